"""Mechanisms that several rooms use, each exactly once.

background.py   a thread that runs what a trainer must not wait for
prefetch.py     the items of a sequence, made ahead by such a thread
"""
