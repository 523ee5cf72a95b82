"""A run described as data: config, rooms wired together, run folder, summary.

config/          schema, defaults, where each value came from, messages with file and line
job.py           `headrace.load`: checked values to dataset, loader and trainer settings
lm.py, streams.py  the tasks
"""
