"""The `headrace` command: one file a verb. A verb parses, calls the library, prints, and decides nothing.

app       the verbs, and what an error looks like
init      write a first config for your files
run       headrace run CONFIG, headrace run --resume RUNDIR
check     what a config would do, without doing it
plan      how its mix, epochs and repeats would go
prepare   tokenise once, into shards that are mapped
provide   make a run's batches in a process of their own
spool     headrace spool ls, stat, verify, quarantine, purge
inspect   what a file or a folder written by headrace holds
ui        the live page of runs
report    the page of a run, saved as one file
replay    what a captured step of rollouts costs the event loop
step      the documents of one step of a run
find      the steps that delivered a document
diff      the first step at which two runs saw different data
gram      headrace gram: the Gram matrix of rows in shards
metrics   every declared metric
env       what headrace sees of this machine
terminal  printing, shared by all verbs
run_text  what `run` prints before the first step and after the last
"""

from headrace.cli.app import app, main
from headrace.cli.check import check
from headrace.cli.diff import diff
from headrace.cli.env import env
from headrace.cli.find import find
from headrace.cli.gram import gram
from headrace.cli.init import init
from headrace.cli.inspect import inspect
from headrace.cli.metrics import metrics
from headrace.cli.plan import plan
from headrace.cli.prepare import prepare
from headrace.cli.provide import provide
from headrace.cli.replay import replay
from headrace.cli.report import report
from headrace.cli.run import run
from headrace.cli.spool import spool
from headrace.cli.step import step
from headrace.cli.ui import ui

# Verbs import what is heavy when they are called, so that `headrace --help` is quick and imports no torch.
for verb in (
    init, run, check, plan, prepare, provide, inspect, ui, report, step, find, diff, spool, gram, replay, metrics, env,
):  # fmt: skip
    app.command(verb)

__all__ = ["main"]
