"""Mechanisms that several rooms use, each exactly once.

background.py   a thread that runs what a trainer must not wait for
buffers.py      memory for batches that is used again once nothing refers to it
compiled.py     compiled loops: the only module that knows numba
generations.py  numbered generations of a saved state: the newest that verifies is used
locks.py        exclusive locks between processes, whose refusal names the holder
prefetch.py     the items of a sequence, made ahead by a background thread
processors.py   how many processors this process may use
retry.py        calls that are tried again while their error is one that passes
signals.py      SIGINT and SIGTERM for work without steps
wire_errors.py  errors between processes, by class name and sentence
workers.py      worker processes: start, pipe, and how one ended
"""
