"""The `headrace` command: one file a verb. A verb parses, calls the library, prints, and decides nothing.

app       the verbs, and what an error looks like
run       headrace run CONFIG, headrace run --resume RUNDIR
check     what a config would do, without doing it
inspect   what a file or a folder of ours holds
facts     headrace metrics, headrace env
terminal  what a person sees while a run goes on
"""

from headrace.cli.app import app, main
from headrace.cli.check import check
from headrace.cli.facts import env, metrics
from headrace.cli.inspect import inspect
from headrace.cli.run import run

# Verbs import what is heavy when they are called, so that `headrace --help` is quick and imports no torch.
for verb in (run, check, inspect, metrics, env):
    app.command(verb)

__all__ = ["main"]
