"""A run described as data: config, rooms wired together, run folder, summary.

config/                   tables, defaults, where each value came from, messages with file and line
job.py                    `headrace.load`: from a config to dataset, loader and trainer settings
run_loop.py               the loop that all kinds of runs share
lm.py, streams.py, rl.py  the three kinds of runs
"""
