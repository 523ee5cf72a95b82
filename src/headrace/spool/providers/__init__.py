"""Providers that fill a spool: language model, masked language model, labelled rows, and the usual ways to sample."""
