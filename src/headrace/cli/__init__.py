"""The `headrace` command: one file a verb. A verb parses, calls the library, prints, and decides nothing.

app       the verbs, and what an error looks like
run       headrace run CONFIG, headrace run --resume RUNDIR
check     what a config would do, without doing it
plan      how its mix, epochs and repeats would go
prepare   tokenise once, into shards that are mapped
provide   make a run's batches in a process of their own
spool     headrace spool ls, stat, verify, quarantine, purge
inspect   what a file or a folder of ours holds
report    what a run looked like, as one page
replay    what a captured step of rollouts costs the event loop
flight    headrace step, find, diff: what a run saw, and when
gram      headrace gram: the Gram matrix of rows in shards
facts     headrace metrics, headrace env
terminal  what a person sees while a run goes on
"""

from headrace.cli.app import app, main
from headrace.cli.check import check
from headrace.cli.facts import env, metrics
from headrace.cli.flight import diff, find, step
from headrace.cli.gram import gram
from headrace.cli.inspect import inspect
from headrace.cli.plan import plan
from headrace.cli.prepare import prepare
from headrace.cli.provide import provide
from headrace.cli.replay import replay
from headrace.cli.report import report
from headrace.cli.run import run
from headrace.cli.spool import spool

# Verbs import what is heavy when they are called, so that `headrace --help` is quick and imports no torch.
for verb in (run, check, plan, prepare, provide, inspect, report, step, find, diff, spool, gram, replay, metrics, env):
    app.command(verb)

__all__ = ["main"]
