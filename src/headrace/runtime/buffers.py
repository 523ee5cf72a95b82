"""Memory for batches that is used again once nothing refers to it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.errors import ConfigError


class BufferPool:
    """Arrays that are handed out again once only the pool refers to them.

    A new 4 MiB array costs 1,024 page faults, which take longer than the copy into it. Everything that shares an array's memory holds a
    reference to it: numpy views, a tensor's storage (`torch.from_numpy`) and so all views of the tensor, its `.numpy()` and its DLPack exports.
    So an array with no reference but the pool's is free. One thread at a time may call `array`.
    """

    def __init__(self, depth: int = 8, new: Callable[[tuple[int, ...], np.dtype], np.ndarray] = np.empty) -> None:
        """Make an empty pool.

        Args:
            depth: How many arrays of one shape and type the pool keeps. Further ones are handed out and freed like any array.
            new: Allocates an array of a shape and type.
        """
        self._depth = depth
        self._new = new
        self._arrays: dict[tuple[tuple[int, ...], np.dtype], list[np.ndarray]] = {}

    def array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An array that nothing else refers to. Its content is undefined."""
        arrays = self._arrays.setdefault((shape, dtype), [])
        for i in range(len(arrays)):
            if sys.getrefcount(arrays[i]) == 2:
                return arrays[i]
        array = self._new(shape, dtype)
        if len(arrays) < self._depth:
            if len(self._arrays) > 64:  # batch sizes that come and go must not pile up
                self._arrays = {(shape, dtype): arrays}
            arrays.append(array)
        return array


class TensorMemory:
    """Tensors for batches. A tensor's memory is used again only when nothing refers to it.

    Pinned memory comes from torch, whose allocator does the same, and also waits for copies to the device that are under way.
    """

    def __init__(self, depth: int, *, pin: bool = False) -> None:
        """Make an empty pool; ConfigError if `pin` is asked for without a CUDA device.

        Args:
            depth: How many tensors of one shape and type are kept.
            pin: Whether tensors lie in pinned memory.
        """
        import torch

        if pin and not torch.cuda.is_available():
            raise ConfigError("pin_memory=True needs a CUDA device, and torch sees none here: leave it off")
        self._torch, self._pin = torch, pin
        # Memory of torch's own: it begins at a multiple of 64 bytes, and numpy's does not, which costs a compiled loop a quarter of its speed.
        self._pool = BufferPool(
            depth, lambda shape, dtype: torch.empty(shape, dtype=getattr(torch, dtype.name)).numpy()
        )

    def tensor_and_array(self, shape: tuple[int, ...], dtype: np.dtype) -> tuple[Any, np.ndarray]:
        """A tensor of undefined content, and the array over the same memory."""
        if self._pin:
            tensor = self._torch.empty(shape, dtype=getattr(self._torch, dtype.name), pin_memory=True)
            return tensor, tensor.numpy()
        array = self._pool.array(shape, dtype)
        return self._torch.from_numpy(array), array

    def adopt(self, array: np.ndarray) -> Any:
        """A small array as a tensor. Nothing else may refer to the array."""
        tensor = self._torch.from_numpy(array)
        return tensor.pin_memory() if self._pin else tensor
