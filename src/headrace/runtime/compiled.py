"""Compiled loops: the only module that knows numba.

    @kernel("int64(int64[::1], int64)")
    def count_above(values, limit): ...

    count_above(values, 3)             plain Python at first, compiled code as soon as it is ready
    warm_kernels(count_above)          compile in the background, before the first call
    count_above.python(values, 3)      the function itself

A kernel is a function in numba's subset of Python: arrays and numbers in, numbers out. Importing its module imports no numba. The first call
asks a background thread to compile it and runs the function as it stands, so a fresh machine has its first batch before anything is
compiled; the answers are the same. A kernel whose plain form is too slow to be of use is marked `interpretable=False`, and its
caller waits for the compiler (`Wait("kernels.compile")`).

Compiled code is cached on disk by numba. The cache name of a kernel has a digest of its code, of the kernels it calls and of the constants
it uses, because numba itself looks at the kernel's own file only. With HEADRACE_BOUNDS_CHECKS=1 every index is checked, and such code
has a cache name of its own.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any, Protocol

import numpy as np

from headrace.metrics import Wait

BOUNDS_CHECKS = os.environ.get("HEADRACE_BOUNDS_CHECKS", "") not in ("", "0")
"""Whether compiled code checks every index. Read once, when headrace is imported."""

_compiler = threading.RLock()
"""Held by the thread that imports numba or compiles. A process that forks holds it too: a child must not inherit a half-done import."""


class Compilable(Protocol):
    """A kernel, or a module of kernels."""

    def compile(self) -> object:
        """Compile now, in this thread, or load the code from the cache."""


# ------------------------------------------------------------------------------------------------ compile


class Kernel:
    """A function that is compiled in the background and runs as plain Python until then. Any thread may call it."""

    def __init__(
        self,
        function: Callable[..., Any],
        signatures: Sequence[str],
        *,
        nogil: bool,
        python: Callable[..., Any] | None,
        interpretable: bool,
    ) -> None:
        assert isinstance(function, FunctionType)
        self.name = f"{function.__module__}.{function.__qualname__}"
        self.__doc__ = function.__doc__
        self.python: Callable[..., Any] = python if python is not None else function
        self._function = function
        self._signatures = list(signatures)
        self._nogil = nogil
        self._interpretable = interpretable
        self._compiled: Any = None
        self._error: Exception | None = None
        self._requested = False
        self._replaced: dict[str, Any] = {}

    @property
    def is_compiled(self) -> bool:
        return self._compiled is not None

    def __call__(self, *arguments: Any) -> Any:
        if self._compiled is None:
            if not self._interpretable:
                with Wait("kernels.compile"):
                    self.compile()
            else:
                return self._interpret(arguments)
        return self._compiled(*arguments)

    def _interpret(self, arguments: tuple[Any, ...]) -> Any:
        if self._error is not None:
            raise self._error
        if not self._requested:
            warm_kernels(self)
        # Sums and products of unsigned numbers wrap around in compiled code without a warning.
        with np.errstate(over="ignore"):
            return self.python(*arguments)

    def compile(self) -> Any:
        """Compile now, in this thread, or load the code from the cache. Returns numba's dispatcher."""
        with _compiler:
            self._requested = True
            if self._compiled is None:
                try:
                    called = {
                        name: value.compile()
                        for name, value in self._globals().items()
                        if isinstance(value, Kernel | Intrinsic)
                    }
                    clone = FunctionType(
                        self._function.__code__, self._function.__globals__ | called, self._function.__name__
                    )
                    checked = ".checked" if BOUNDS_CHECKS else ""
                    clone.__qualname__ = f"{self._function.__qualname__}.{self.digest()}{checked}"
                    clone.__module__ = self._function.__module__
                    njit: Any = importlib.import_module("numba").njit
                    self._compiled = njit(
                        self._signatures, nogil=self._nogil, cache=True, error_model="numpy", boundscheck=BOUNDS_CHECKS
                    )(clone)
                except Exception as error:
                    self._error = error
                    raise
            return self._compiled

    def variant(self, signature: str, **replaced: Kernel) -> Kernel:
        """The same function for other types. `replaced`: kernels to call in place of those that the function calls by these names."""
        python = self.python
        if python is self._function:
            # The plain form must call the replaced kernels too: the original ones may be compiled already.
            python = FunctionType(
                self._function.__code__, self._function.__globals__ | replaced, self._function.__name__
            )
        other = Kernel(self._function, [signature], nogil=self._nogil, python=python, interpretable=self._interpretable)
        other._replaced = replaced
        return other

    def digest(self) -> str:
        """Eight letters that change with the code, the kernels it calls and the constants it uses."""
        parts = [repr((_code_text(self._function.__code__), self._signatures, self._nogil))]
        for name, value in sorted(self._globals().items()):
            if isinstance(value, Kernel | Intrinsic):
                parts.append(value.digest())
            elif not isinstance(value, ModuleType):
                parts.append(f"{name}={value.tobytes().hex() if isinstance(value, np.ndarray) else value!r}")
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]

    def _globals(self) -> dict[str, Any]:
        """The names of its module that the function uses, with their values."""
        names, known = self._function.__code__.co_names, self._function.__globals__
        return {name: known[name] for name in names if name in known} | self._replaced


class Intrinsic:
    """A function that generates the LLVM code of its calls (`numba.extending.intrinsic`), for use in kernels."""

    def __init__(self, function: Callable[..., Any], *constants: object) -> None:
        """`constants`: what the code depends on besides the function's text. They are part of the cache name of kernels that use it."""
        assert isinstance(function, FunctionType)
        self._function, self._constants = function, constants
        self._compiled: Any = None

    def __call__(self, *arguments: Any) -> Any:
        raise TypeError(f"{self._function.__qualname__} exists in compiled code only")

    def compile(self) -> Any:
        if self._compiled is None:
            extending: Any = importlib.import_module("numba.extending")
            self._compiled = extending.intrinsic(self._function)
        return self._compiled

    def digest(self) -> str:
        return repr((_code_text(self._function.__code__), self._constants))


def _code_text(code: CodeType) -> str:
    """The same text for the same code in every process; the `repr` of a nested function's code holds an address."""
    constants = [_code_text(value) if isinstance(value, CodeType) else value for value in code.co_consts]
    return repr((code.co_code, constants, code.co_names))


def kernel(
    *signatures: str,
    nogil: bool = True,
    python: Callable[..., Any] | None = None,
    interpretable: bool = True,
) -> Callable[[Callable[..., Any]], Kernel]:
    """Decorator that makes a kernel of a function.

    Args:
        signatures: In numba's notation, such as "int64(int64[::1], Array(int64, 1, 'C', readonly=True))".
        nogil: Whether the compiled code releases the GIL.
        python: Runs until the function is compiled, where plain Python has a faster way to the same answer.
        interpretable: Whether the kernel may run as plain Python at all. Otherwise callers wait for the compiler.
    """
    return lambda function: Kernel(function, signatures, nogil=nogil, python=python, interpretable=interpretable)


class KernelModule:
    """A module whose import needs numba, because it uses numba's own types and intrinsics. Calling the object returns the module."""

    def __init__(self, module: str) -> None:
        self.name = module
        self._module: ModuleType | None = None

    def __call__(self) -> ModuleType:
        if self._module is None:
            with Wait("kernels.compile"):
                self.compile()
        assert self._module is not None
        return self._module

    def compile(self) -> ModuleType:
        """Import it now, in this thread."""
        with _compiler:
            if self._module is None:
                self._module = importlib.import_module(self.name)
            return self._module


# --------------------------------------------------------------------------------------------- background

_queue: deque[Compilable] = deque()
_queue_lock = threading.Lock()
_thread: threading.Thread | None = None


def warm_kernels(*kernels: Compilable) -> None:
    """Have these compiled by the background thread, in this order."""
    global _thread
    with _queue_lock:
        for one in kernels:
            if isinstance(one, Kernel):
                one._requested = True
            _queue.append(one)
        if _thread is None:
            # Not a daemon: a process must not end inside LLVM. `_exiting` ends it between two passes of the compiler.
            _thread = threading.Thread(target=_compile_queue, name="headrace-kernels")
            _thread.start()


def _compile_queue() -> None:
    global _thread
    with contextlib.suppress(_Abandoned):
        _stop_between_passes()
        while True:
            with _queue_lock:
                if not _queue or _exiting.is_set():
                    _thread = None
                    return
                following = _queue[0]
            with contextlib.suppress(Exception):  # the next call of the kernel raises it
                following.compile()
            with _queue_lock:
                _queue.popleft()


class _Abandoned(BaseException):
    """Ends the background thread. Not an `Exception`: numba must not take it for a mistake in a kernel."""


_exiting = threading.Event()


@functools.cache
def _stop_between_passes() -> None:
    """Have numba look at `_exiting` before each of its passes: a process that exits, or was interrupted, needs no more kernels.

    A pass takes a fraction of a second. An exception raised inside one, by `PyThreadState_SetAsyncExc`, left LLVM's objects freed twice.
    """
    with _compiler:
        event: Any = importlib.import_module("numba.core.event")

    class Stop(event.Listener):
        def on_start(self, event: object) -> None:
            if _exiting.is_set() and threading.current_thread() is _thread:
                raise _Abandoned

        def on_end(self, event: object) -> None:
            pass

    event.register("numba:run_pass", Stop())


# Runs before the interpreter joins its threads; `atexit` would run after that.
threading._register_atexit(_exiting.set)  # ty: ignore[missing-attribute]


def wait_for_kernels(*kernels: Compilable) -> None:
    """Compile these now. Called before work so large that its plain form would take longer than the compiler."""
    with Wait("kernels.compile"):
        for one in kernels:
            one.compile()


def _after_fork_in_child() -> None:
    global _compiler, _queue_lock, _thread
    _compiler, _queue_lock, _thread = threading.RLock(), threading.Lock(), None
    # The background thread stayed in the parent. What it had not compiled yet is asked for again by the next call.
    for one in _queue:
        if isinstance(one, Kernel):
            one._requested = False
    _queue.clear()


def _before_fork() -> None:
    _compiler.acquire()


def _after_fork_in_parent() -> None:
    _compiler.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
