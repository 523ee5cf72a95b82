"""Content of each page as JSON: one module a page. The server sends it, the static report holds it.

page_parts      what several pages share: header, tabs, findings, verdict, charts, bars
runs_page       every run below a folder
overview_page   status, findings, figures, loss, time budget, mix, throughput, ranks; and what is new since a line
metrics_page    every metric: title, key, unit, meaning, healthy range, last value; points of curves
config_page     config and journal
compare_page    two runs: curves and config differences
streams_page    the pool over time, picks, evictions
spool_page      files, backlog, commit point, lag of ranks, providers, quarantine
rollouts_page   rewards, groups, staleness, event-loop lag; the rollouts of a step
"""

from headrace.ui.pages.compare_page import compare
from headrace.ui.pages.config_page import config
from headrace.ui.pages.metrics_page import curves, metrics
from headrace.ui.pages.overview_page import new_lines, overview
from headrace.ui.pages.page_parts import tabs
from headrace.ui.pages.rollouts_page import rl, rollouts
from headrace.ui.pages.runs_page import runs
from headrace.ui.pages.spool_page import spool
from headrace.ui.pages.streams_page import streams

__all__ = [
    "compare",
    "config",
    "curves",
    "metrics",
    "new_lines",
    "overview",
    "rl",
    "rollouts",
    "runs",
    "spool",
    "streams",
    "tabs",
]
