"""Mechanisms that several rooms use, each exactly once.

background.py   a thread that runs what a trainer must not wait for
buffers.py      memory for batches that is used again once nothing refers to it
compiled.py     compiled loops: the only module that knows numba
prefetch.py     the items of a sequence, made ahead by a background thread
"""
