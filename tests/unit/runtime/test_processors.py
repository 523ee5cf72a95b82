"""How many threads are started by default."""

from __future__ import annotations

import pytest

from headrace.runtime import processors


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"),
    [(1, "1", 2), (2, "1", 2), (8, "1", 8), (64, "1", 16), (64, "8", 8), (64, "64", 2), (8, "x", 8), (8, "0", 8)],
)
def test_threads_are_a_ranks_share_of_the_processors(monkeypatch, cores, ranks, threads):
    monkeypatch.setattr(processors, "usable_processors", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert processors.tokenizer_threads() == threads
