"""Python processes that begin where the imports are done.

    with warm_python() as python:
        done = python.run([sys.executable, "-m", "headrace", "run", "a.toml"], cwd=folder)       like subprocess.run
        process = python.Popen([sys.executable, "-m", "headrace", "provide", "a.toml"])          like subprocess.Popen
        done = python.ranks(2, [sys.executable, "-m", "headrace", "run", "a.toml"])              as under torchrun

A server imports torch, numba, pyarrow and all of headrace once; a command is a fork of it. Such a process is a real one:
it has its own pid and, if asked, its own session, gets signals, can be killed, starts processes of its own and leaves
through its exit functions. It differs from a fresh interpreter in what happens before the first line of the command
(imports, PYTHON* variables, limits of the interpreter) and in its memory, which it shares with the server: tests about
those use subprocess.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import wait as wait_for  # poll(), where select() ends at descriptor 1,023
from pathlib import Path
from typing import IO, Any

LARGEST = 1 << 17
"""Bytes of a request: argv and the environment, which is some 5 KB."""
HEAVY = (
    "torch", "torch._dynamo", "torch.distributed", "torch.nn.parallel", "torch.utils.data", "numba", "pyarrow.parquet", "tokenizers",
    "safetensors.numpy", "headrace.cli",
)  # fmt: skip


# ------------------------------------------------------------------------------------------- the tests' end


class WarmProcess:
    """One command that runs; what subprocess.Popen is to its caller."""

    def __init__(
        self,
        server: socket.socket,
        command: Sequence[str | os.PathLike[str]],
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        stdin: int | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        text: bool = False,
        start_new_session: bool = False,
    ) -> None:
        self.args = [os.fspath(word) for word in command]
        self.returncode: int | None = None
        self.stdin: IO[Any] | None = None
        self.stdout: IO[Any] | None = None
        self.stderr: IO[Any] | None = None
        order = {
            "argv": self.args,
            "cwd": os.fspath(cwd or os.getcwd()),
            "env": dict(os.environ if env is None else env),
            "session": start_new_session,
        }
        with contextlib.ExitStack() as given:
            if stdin == subprocess.PIPE:
                read, write = os.pipe()
                given.callback(os.close, read)
                self.stdin = os.fdopen(write, "w" if text else "wb")
            else:
                read = given.enter_context(open(os.devnull, "rb")).fileno()
            out, self.stdout = self._end(stdout, 1, text, given)
            err, self.stderr = (out, None) if stderr == subprocess.STDOUT else self._end(stderr, 2, text, given)
            self._told, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            given.callback(theirs.close)
            socket.send_fds(server, [json.dumps(order).encode()], [read, out, err, theirs.fileno()])
        self.pid = int(self._hear(60))

    @staticmethod
    def _end(
        given: int | IO[Any] | None, own: int, text: bool, closing: contextlib.ExitStack
    ) -> tuple[int, IO[Any] | None]:
        if given is None:
            return own, None
        if given == subprocess.PIPE:
            ours, theirs = os.pipe()
            closing.callback(os.close, theirs)
            return theirs, open(ours, "r" if text else "rb")
        if given == subprocess.DEVNULL:
            return closing.enter_context(open(os.devnull, "wb")).fileno(), None
        return (given if isinstance(given, int) else given.fileno()), None

    def _hear(self, timeout: float | None) -> str:
        self._told.settimeout(timeout)
        said = self._told.recv(64).decode()
        if not said:
            raise RuntimeError(f"the server of warm processes ended before {self.args}")
        return said

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            with contextlib.suppress(BlockingIOError):
                self._ended(self._hear(0))
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            try:
                self._ended(self._hear(timeout))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0) from None
        assert self.returncode is not None
        return self.returncode

    def _ended(self, code: str) -> None:
        self.returncode = int(code)
        self._told.close()

    def communicate(self, timeout: float | None = None) -> tuple[Any, Any]:
        """Read its pipes to their ends, then wait for it."""
        end = None if timeout is None else time.monotonic() + timeout
        said: dict[IO[Any], Any] = {}

        def read(pipe: IO[Any]) -> None:
            said[pipe] = pipe.read()

        pipes = [pipe for pipe in (self.stdout, self.stderr) if pipe and not pipe.closed]
        readers = [threading.Thread(target=read, args=(pipe,), daemon=True) for pipe in pipes]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(None if end is None else max(0.0, end - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        for pipe in pipes:
            pipe.close()
        self.wait(None if end is None else max(0.001, end - time.monotonic()))
        return (said.get(self.stdout) if self.stdout else None), (said.get(self.stderr) if self.stderr else None)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> WarmProcess:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe:
                pipe.close()
        self.wait()


class WarmPython:
    """Starts commands as forks of a server."""

    STDOUT, PIPE, DEVNULL, TimeoutExpired = (
        subprocess.STDOUT, subprocess.PIPE, subprocess.DEVNULL, subprocess.TimeoutExpired,
    )  # fmt: skip

    def __init__(self, server: socket.socket) -> None:
        self._server = server

    def Popen(self, command: Sequence[str | os.PathLike[str]], **how: Any) -> WarmProcess:  # noqa: N802
        return WarmProcess(self._server, command, **how)

    def run(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        timeout: float = 110,
        capture_output: bool = True,
        text: bool = True,
        check: bool = False,
        **how: Any,
    ) -> subprocess.CompletedProcess[Any]:
        """Run to its end: what it printed and its exit code."""
        assert capture_output
        return self._together([how.pop("env", None) or dict(os.environ)], command, timeout, text, check, how)

    def ranks(
        self,
        world: int,
        command: Sequence[str | os.PathLike[str]],
        *,
        timeout: float = 110,
        env: Mapping[str, str] | None = None,
        text: bool = True,
        check: bool = False,
        **how: Any,
    ) -> subprocess.CompletedProcess[Any]:
        """Run it on `world` ranks as torchrun would: one that fails takes the others along, and its code is the answer."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = dict(os.environ if env is None else env) | {
            "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        envs = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
        return self._together(envs, command, timeout, text, check, how)

    def _together(
        self, envs: list[Any], command: Sequence[Any], timeout: float, text: bool, check: bool, how: dict[str, Any]
    ) -> subprocess.CompletedProcess[Any]:
        with tempfile.TemporaryFile("w+b") as out, tempfile.TemporaryFile("w+b") as err:
            processes = [self.Popen(command, env=env, stdout=out, stderr=err, **how) for env in envs]
            running, end, code = list(processes), time.monotonic() + timeout, 0
            try:
                while running:
                    left = end - time.monotonic()
                    if left <= 0:
                        raise subprocess.TimeoutExpired(processes[0].args, timeout, _read(out, text), _read(err, text))
                    wait_for([p._told for p in running], left)
                    for process in [p for p in running if p.poll() is not None]:
                        running.remove(process)
                        if process.returncode and not code:
                            code = process.returncode
                            for other in running:
                                other.kill()
            finally:
                for process in running:
                    process.kill()
                    process.wait(60)
            done = subprocess.CompletedProcess(processes[0].args, code, _read(out, text), _read(err, text))
        if check:
            done.check_returncode()
        return done


def _read(file: IO[bytes], text: bool) -> Any:
    file.seek(0)
    return file.read().decode() if text else file.read()


@contextlib.contextmanager
def warm_python() -> Iterator[WarmPython]:
    """A server for as long as the block lasts; processes that are left at its end are killed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Threads do not outlive a fork, so none may be started before one: not by BLAS, nor by Arrow's allocator.
    alone = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
    env = os.environ | alone
    words = [sys.executable, __file__, str(theirs.fileno())]
    # In a session of its own: Ctrl-C is for pytest, which then ends the server.
    server = subprocess.Popen(words, env=env, pass_fds=[theirs.fileno()], start_new_session=True)
    theirs.close()
    try:
        ours.settimeout(110)
        if ours.recv(64) != b"ready":
            raise RuntimeError(f"the server of warm processes ended with {server.wait(10)}")
        ours.settimeout(60)
        yield WarmPython(ours)
    finally:
        ours.close()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


# ------------------------------------------------------------------------------------------- the server's end


def serve(orders: socket.socket) -> dict[str, Any]:
    """Fork for each order. Returns only in a child, with its order; the server itself exits when the tests are done."""
    children: dict[int, tuple[int, socket.socket]] = {}
    orders.send(b"ready")
    while True:
        ready = wait_for([orders, *children])
        for pidfd in [fd for fd in ready if fd is not orders]:
            pid, caller = children.pop(pidfd)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.close(pidfd)
            with contextlib.suppress(OSError), caller:  # one that nobody waits for
                caller.send(str(code).encode())
        if orders not in ready:
            continue
        said, fds, _, _ = socket.recv_fds(orders, LARGEST, 4)
        if not said:
            for pidfd, (pid, _) in children.items():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                os.close(pidfd)
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            orders.close()
            for pidfd, (_, caller) in children.items():
                os.close(pidfd)
                caller.close()
            for end, fd in enumerate(fds[:3]):
                os.dup2(fd, end)
            for fd in fds:
                os.close(fd)
            return json.loads(said)
        caller = socket.socket(fileno=fds[3])
        for fd in fds[:3]:
            os.close(fd)
        children[os.pidfd_open(pid)] = (pid, caller)
        with contextlib.suppress(OSError):
            caller.send(str(pid).encode())


def become(order: dict[str, Any], usual: Sequence[Any]) -> None:
    """Run the order's command as a fresh interpreter would, to the end of this process. `usual` are its warning filters."""
    import atexit
    import runpy
    import traceback
    import types
    import warnings

    if order["session"]:
        os.setsid()
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for name, fd, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        errors = "backslashreplace" if name == "stderr" else "strict"
        buffering = 1 if name == "stderr" else -1
        stream = os.fdopen(fd, mode, buffering, encoding="utf-8", errors=errors, closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    words = order["argv"]
    if words[0] != sys.executable:
        raise SystemExit(f"a warm process is a Python process: expected {sys.executable}, got {words[0]}")
    words = words[1:]
    if words[0] == "-W":  # in place of what an interpreter ignores by itself; what libraries ignore comes before it
        sys.warnoptions[:] = [words[1]]
        warnings.filters[:] = [known for known in warnings.filters if known not in usual]
        warnings.simplefilter(words[1], append=True)
        words = words[2:]
    sys.path[0] = order["cwd"] if words[0] in ("-m", "-c") else str(Path(words[0]).resolve().parent)
    code: Any = 0
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(words[1], "<string>", "exec"), main.__dict__)
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as left:
        code = left.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        code = -signal.SIGINT
    except BaseException:
        traceback.print_exc()
        code = 1
    # What an interpreter does at its end, except to take itself apart.
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except BaseException:
        traceback.print_exc()
        code = code or 120
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(0 if code is None else code & 0xFF if isinstance(code, int) else 1)


if __name__ == "__main__":
    import gc
    import importlib
    import pkgutil
    import warnings

    usual = list(warnings.filters)
    for module in HEAVY:
        importlib.import_module(module)
    import headrace

    for found in pkgutil.walk_packages(headrace.__path__, "headrace."):
        if not found.name.endswith("__main__"):
            with contextlib.suppress(ImportError):  # a room that needs an extra that is not here
                importlib.import_module(found.name)
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        sys.exit(f"importing headrace started {len(threads) - 1} threads, and a process with threads cannot be forked")
    gc.collect()
    gc.freeze()
    become(serve(socket.socket(fileno=int(sys.argv[1]))), usual)
