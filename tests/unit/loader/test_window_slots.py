"""What a worker leaves in a slot is what its trainer finds, for as long as anybody looks at it."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest

from headrace.loader.window_slots import WindowSlots, shared_memory_works

pytestmark = pytest.mark.skipif(not shared_memory_works(), reason="this system has no memory without a name")
ARRAYS = (np.arange(700, dtype=np.int32).reshape(7, 100), np.arange(3, dtype=np.int64), np.empty(0, np.uint64))
SHAPES = [(array.dtype, array.size) for array in ARRAYS]


@pytest.fixture
def both_ends():
    trainer, descriptor = WindowSlots.create(3, 5000)
    worker = WindowSlots(descriptor, 3, 5000)
    os.close(descriptor)
    return trainer, worker


def test_what_was_put_is_found_at_the_other_end(both_ends):
    trainer, worker = both_ends
    for times in range(5):
        slot = worker.put([array + array.dtype.type(times) for array in ARRAYS])
        found = trainer.get(slot, SHAPES)
        for array, view in zip(ARRAYS, found, strict=True):
            assert np.array_equal(view, array.reshape(-1) + array.dtype.type(times))


def test_a_slot_is_free_once_the_last_view_is_gone(both_ends):
    trainer, worker = both_ends
    found = trainer.get(worker.put(ARRAYS), SHAPES)
    table = found[0].reshape(7, 100)[2:]
    del found
    gc.collect()
    assert (worker.free, trainer.free) == (2, 2)
    assert table[0, 0] == 200
    del table
    assert (worker.free, trainer.free) == (3, 3)


def test_what_does_not_fit_is_left_to_the_caller(both_ends):
    trainer, worker = both_ends
    held = [trainer.get(worker.put(ARRAYS), SHAPES) for _ in range(3)]
    assert worker.put(ARRAYS) is None
    del held
    assert worker.put([np.zeros(9000, np.uint8)]) is None
    assert worker.free == 3
    assert worker.put(ARRAYS) == 0


def test_views_that_a_fork_lets_go_are_still_the_trainers(both_ends):
    trainer, worker = both_ends
    found = trainer.get(worker.put(ARRAYS), SHAPES)
    pid = os.fork()
    if not pid:
        del found
        gc.collect()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert worker.free == 2
    assert np.array_equal(found[1], ARRAYS[1])
