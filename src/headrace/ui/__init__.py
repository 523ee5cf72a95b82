"""The live page of runs, and the static report: the same pages from the same code.

metrics_index  metrics.jsonl by key: bounded memory, spikes kept, follows a growing file
run_view       a run folder as the pages see it: state, config, journal, metrics
findings       the problems of a run, the worst first, each with a remedy
pages/         content of each page as JSON, one module a page
questions      documents of a step, find, diff: answered by headrace.provenance in a worker process
server         the live page (Starlette, uvicorn): routes, access rules, limits
static_page    the report: one HTML file with the data inside
assets/        the page itself: HTML, CSS, JavaScript; no build step, no library
"""

from headrace.ui.findings import Finding, find_problems
from headrace.ui.run_view import RunView, find_runs
from headrace.ui.static_page import page_html, read_run, write_page

__all__ = ["Finding", "RunView", "find_problems", "find_runs", "page_html", "read_run", "write_page"]
