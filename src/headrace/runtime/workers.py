"""Worker processes: start, pipe, and how one ended.

    worker = WorkerProcess("headrace-cells-0", serve, recipe)        calls serve(pipe, recipe) in a new process
    worker.pipe.send_bytes(question)
    try: answer = worker.pipe.recv_bytes()
    except (EOFError, OSError): raise WorkerDied(f"{worker.describe_end()} while it read {path}")     "… was killed by SIGKILL"
    worker.end()

A worker that dies closes its pipe, so the parent learns of it at the next message. A worker whose parent dies reads the end of its pipe and
ends. Errors travel by name (`wire_errors`). The owner decides which worker gets which question.

The pools of `concurrent.futures`, loky and pebble do not fit: they choose the worker themselves and, when one process dies, cannot say
over which question. Every room here sends a question to one chosen worker.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Generator
from multiprocessing.connection import Connection
from types import FunctionType
from typing import Any

from headrace.errors import ConfigError

_NATIVE_THREADS = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
)
"""Environment of a worker: workers are the parallelism, so a native library starts one thread in each."""
_environment_lock = threading.Lock()
_MAIN_GUARD = (
    'a script that uses worker processes must do its work under `if __name__ == "__main__":`, because every worker process '
    "imports the script."
)


class WorkerProcess:
    """One worker process, and this end of the pipe to it. The process ends with its pipe."""

    def __init__(
        self,
        name: str,
        function: FunctionType,
        *args: Any,
        imports_main: bool = True,
        mid_message: float | None = None,
    ) -> None:
        """Start a process that calls `function(pipe, *args)` and ignores Ctrl-C, which is the parent's to handle.

        Args:
            name: Name of the process, for sentences about it.
            function: A function of a module. The end of the pipe may end it: EOFError and a broken pipe are no errors there.
            args: What the function gets. They are pickled, or JSON values with `imports_main=False`.
            imports_main: Whether the worker imports the main script, which it has to where `args` refer to functions of it. Without,
                scripts need no main guard.
            mid_message: Seconds without a byte in the middle of a message after which `pipe` raises OSError. Only for a parent that calls
                `recv_bytes` once a message has begun to arrive.
        """
        self.name = name
        self.has_answered = False
        """Set by the owner at the first answer. A worker that ended before it may have failed over the main script."""
        if imports_main:
            self._start_with_main(function, args)
        else:
            self._start_alone(function, args)
        if mid_message is not None:
            with socket.socket(fileno=os.dup(self.pipe.fileno())) as end:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(mid_message), 0))

    def _start_with_main(self, function: FunctionType, args: tuple[Any, ...]) -> None:
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise ConfigError(
                f"a worker process imported this script and it started worker processes of its own: {_MAIN_GUARD}"
            )
        # spawn: the parent has threads, and a fork would copy their locks in whatever state they are.
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        # daemon: the parent does not wait at exit for a process that is ending by itself.
        process = context.Process(target=_serve, args=(function, theirs, args), name=self.name, daemon=True)
        try:
            with _one_native_thread():
                process.start()
        except BaseException:
            self.pipe.close()
            raise
        finally:
            theirs.close()
        self._process: subprocess.Popen[bytes] | Any = process
        self.pid: int = process.pid or 0

    def _start_alone(self, function: FunctionType, args: tuple[Any, ...]) -> None:
        ours, theirs = socket.socketpair()
        self.pipe = Connection(ours.detach())
        target = f"{function.__module__}:{function.__name__}"
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "headrace.runtime.workers", str(theirs.fileno()), target],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=os.environ | _NATIVE_THREADS,
                )
        except BaseException:
            self.pipe.close()
            raise
        self.pid = self._process.pid
        with contextlib.suppress(OSError):  # the process is gone: reading its first answer says so
            self.pipe.send_bytes(json.dumps(args).encode())

    def exit_code(self, timeout: float = 0.0) -> int | None:
        """Its exit code, minus the signal's number if it was killed; None if it is alive after `timeout` seconds."""
        if isinstance(self._process, subprocess.Popen):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(timeout)
            return None
        self._process.join(timeout)
        return self._process.exitcode

    def is_alive(self) -> bool:
        return self.exit_code() is None

    def kill(self) -> None:
        self._process.kill()

    def how_it_ended(self, timeout: float = 1.0) -> str:
        """`was killed by SIGKILL` or `ended with code 3`. Waits `timeout` seconds for a process that has just closed its pipe."""
        code = self.exit_code(timeout)
        if code is None:
            return "closed its pipe"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def describe_end(self) -> str:
        """Which process it is, how it ended, and what the likely cause is."""
        how, code = self.how_it_ended(), self.exit_code()
        if code == -signal.SIGKILL:
            how += " (out of memory?)"
        elif code == 1 and not self.has_answered:
            how += f" before it began to work ({_MAIN_GUARD.rstrip('.')})"
        return f"worker process {self.name} (pid {self.pid}) {how}"

    def end(self, patience: float = 1.0) -> None:
        """Close the pipe, and kill the process if it has not ended after `patience` seconds."""
        self.pipe.close()
        if self.exit_code(patience) is None:
            self.kill()
            self.exit_code(60.0)


@contextlib.contextmanager
def _one_native_thread() -> Generator[None]:
    """Processes started inside have one native thread each. The environment is the process's own, so one thread at a time may be in here."""
    with _environment_lock:
        before = {name: os.environ.get(name) for name in _NATIVE_THREADS}
        os.environ.update(_NATIVE_THREADS)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


# ------------------------------------------------------------------------------------------- in the worker


def _serve(function: FunctionType, pipe: Connection, args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        function(pipe, *args)


def _main(descriptor: str, target: str) -> None:
    """Entry point of a process that was started with `imports_main=False`."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # meant for the parent, whose end ends this process too
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = Connection(int(descriptor))
    try:
        args = json.loads(pipe.recv_bytes())
    except EOFError:
        return
    module, name = target.split(":")
    _serve(getattr(importlib.import_module(module), name), pipe, tuple(args))


if __name__ == "__main__":
    _main(*sys.argv[1:])
