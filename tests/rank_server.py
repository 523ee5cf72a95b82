"""A fork server for tests over real gloo ranks: it imports torch once and forks the ranks of each scenario, so a scenario costs what it
does, not four imports of torch.

    SCENARIOS["agree"] = agree                  in the test file: a function of (rank, world, **arguments)
    if __name__ == "__main__": serve()          the file run as a script is the server
    with serving(__file__) as process: ...      its fixture `server`
    def test_…(ranks): ranks(4, "agree")        what each rank returned, or the error that it raised
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import HeadraceError

SCENARIOS: dict[str, Callable[..., Any]] = {}
"""What a rank can be asked to do, by name."""
Told = list[dict[str, Any]]


def device_group(world: int) -> Any:
    """A group that reaches one device and no CPU memory, as nccl does. The device is torch's lazy one: its tensors are not in CPU memory, and
    it is in every build of torch."""
    import torch
    import torch._lazy.ts_backend
    import torch.distributed as dist

    torch._lazy.ts_backend.init()

    class DeviceGroup(dist.ProcessGroup):
        group_name = "on_a_device"

        def allgather(self, outputs: Any, inputs: Any, options: Any) -> Any:
            assert {t.device.type for t in (*inputs, *outputs[0])} == {"lazy"}
            here = [torch.empty(t.shape, dtype=t.dtype) for t in outputs[0]]
            work = dist.group.WORLD.allgather([here], [inputs[0].cpu()], options)
            return self._landed(work, outputs[0], here)

        def allreduce(self, tensors: Any, options: Any) -> Any:
            assert tensors[0].device.type == "lazy"
            here = tensors[0].cpu()
            return self._landed(dist.group.WORLD.allreduce([here], options), tensors, [here])

        def _landed(self, work: Any, there: Any, here: Any) -> Any:
            work.wait()
            for to, what in zip(there, here, strict=True):
                to.copy_(what.to("lazy"))
            return work

    dist.Backend.register_backend(
        "on_a_device", lambda store, rank, size, timeout: DeviceGroup(rank, size), devices=["lazy"]
    )
    return dist.new_group(list(range(world)), backend="on_a_device")


def be_rank(rank: int, world: int, folder: Path, scenario: str, arguments: dict[str, Any], tcp: bool) -> None:
    import torch.distributed as dist

    with open(folder / f"rank-{rank}.err", "w") as errors:  # what a rank said that ended in another way than it should
        os.dup2(errors.fileno(), 2)
    faulthandler.enable()
    faulthandler.dump_traceback_later(80, exit=False)
    told: dict[str, Any] = {}
    timeout = timedelta(minutes=30)  # torch's default: what is quicker is ours
    if tcp:
        port_file = folder / "port"
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False, timeout=timeout)
            (folder / "port.tmp").write_text(str(store.port))
            (folder / "port.tmp").rename(port_file)
        else:
            while not port_file.exists():
                os.sched_yield()
            store = dist.TCPStore("127.0.0.1", int(port_file.read_text()), world, is_master=False, timeout=timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    else:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timeout
        )
    began = time.monotonic()
    try:
        told["result"] = SCENARIOS[scenario](rank, world, **arguments)
    except HeadraceError as error:
        told["error"], told["message"] = type(error).__name__, str(error)
    told["seconds"] = time.monotonic() - began
    (folder / f"rank-{rank}.tmp").write_text(json.dumps(told))
    (folder / f"rank-{rank}.tmp").rename(folder / f"rank-{rank}.json")
    if scenario == "lost":
        # A rank that noticed the loss stays connected until all ranks have: its own exit would otherwise be what they notice.
        others = [folder / f"rank-{n}.json" for n in range(world) if n != arguments["victim"]]
        end = time.monotonic() + 60
        while not all(path.exists() for path in others) and time.monotonic() < end:
            time.sleep(0.01)
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
    if "error" not in told:
        os._exit(0)  # taking torch down costs a second; only after an error is it in question whether that ends


def serve() -> None:
    import torch.distributed  # noqa: F401  (imported once, for all ranks to come)

    gc.freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        pids: list[int] = []
        for rank in range(order["world"]):
            pid = os.fork()
            if pid == 0:
                be_rank(
                    rank, order["world"], Path(order["folder"]), order["scenario"], order["arguments"], order["tcp"]
                )
                sys.exit(0)
            pids.append(pid)
        codes: dict[int, int] = {}
        end = time.monotonic() + order["deadline"]
        left = [rank for rank in range(order["world"]) if rank not in order["stopped"]]
        while left and time.monotonic() < end:
            for rank in list(left):
                pid, status = os.waitpid(pids[rank], os.WNOHANG)
                if pid:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                    left.remove(rank)
            time.sleep(0.005)
        for rank in (*left, *order["stopped"]):
            os.kill(pids[rank], signal.SIGKILL)
            os.waitpid(pids[rank], 0)
        print(json.dumps({"codes": codes, "hung": left}), flush=True)


@contextlib.contextmanager
def serving(script: str, cwd: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """A process that runs `script`, which says "ready" and then forks ranks for orders, such as `serve` does."""
    single = os.environ | {
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }  # a process that forks must have no other threads
    process = subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=cwd, env=single
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.stdin.close()
    process.wait(60)
    process.stdout.close()


@pytest.fixture
def ranks(server: subprocess.Popen[str], tmp_path: Path) -> Callable[..., Told]:
    runs = itertools.count()

    def once(
        world: int,
        scenario: str,
        *,
        lost: int | None = None,
        stopped: bool | list[int] = False,
        tcp: bool = False,
        **arguments: Any,
    ) -> Told:
        folder = tmp_path / f"ranks-{next(runs)}"
        folder.mkdir()
        order = {
            "world": world, "folder": str(folder), "scenario": scenario, "arguments": arguments, "tcp": tcp,
            "deadline": 100.0, "stopped": [lost] if stopped is True else stopped or [],
        }  # fmt: skip
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(order) + "\n")
        server.stdin.flush()
        answer = json.loads(server.stdout.readline())
        said = {rank: (folder / f"rank-{rank}.err").read_text()[-6000:] for rank in answer["hung"]}
        assert said == {}, f"ranks {answer['hung']} hung; {said}"
        survivors = [rank for rank in range(world) if rank != lost and rank not in order["stopped"]]
        said = {
            rank: (folder / f"rank-{rank}.err").read_text()[-2000:] for rank in survivors if answer["codes"][str(rank)]
        }
        assert said == {}, f"exit codes {answer['codes']}; {said}"
        return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in survivors]

    def run(world: int, scenario: str, *, within: float | None = None, **how: Any) -> Told:
        """What each rank came to. Every rank but a lost one must also have ended by itself, with exit code 0.

        `within` are the seconds that no rank may need. On a busy machine a rank can be slow for no fault of its own, so
        they must be kept once in four times.
        """
        needed: list[float] = []
        while True:
            told = once(world, scenario, **how)
            needed.append(max(said["seconds"] for said in told))
            if within is None or needed[-1] < within:
                return told
            assert len(needed) < 4, f"{scenario} on {world} ranks took {needed} s, expected less than {within} s"

    return run


def fork_ranks(world: int, work: Callable[[int], object]) -> int:
    """Call `work` with a rank in a process of its own for each; 1 if one of them failed. For files that are run as a script."""
    children = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                work(rank)
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    ends = [os.waitpid(pid, 0)[1] for pid in children]
    return int(any(ends))
