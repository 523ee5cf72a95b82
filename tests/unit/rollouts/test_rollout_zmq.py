"""Over ZMQ every batch arrives whole, in order and once, and is deleted when all ranks have it; who is gone is named."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import msgspec
import pytest

from headrace.errors import ConfigError, DeadlineExceeded, EndOfData, WorkerDied
from headrace.rollouts import RolloutPipeline
from headrace.rollouts import zmq_transport as wire
from headrace.rollouts.zmq_transport import ZmqReceiver, ZmqSender

zmq = pytest.importorskip("zmq", reason="pyzmq is an extra: headrace[rl]")


def output(step, tokens):
    columns = {
        "prompt_ids": [step], "prompt_mask": [0], "completion_ids": list(range(tokens)), "completion_mask": [1] * tokens,
        "completion_logprobs": [-1.0] * tokens, "routed_experts": {"data": bytes([step]) * (tokens * 6), "shape": [tokens, 2, 3]},
    }  # fmt: skip
    return {"example_id": step, "env_name": "game", "reward": 1.0, "trajectory": [{"tokens": columns}]}


class Orchestrator(threading.Thread):
    """Sends some steps from a loop in a thread of its own."""

    def __init__(self, queue, steps, *, empty=(), tokens=50, **more):
        super().__init__()
        self.sender = ZmqSender("tcp://127.0.0.1:*", queue, **{"deadline": 10.0, **more})
        self.steps, self.empty, self.tokens, self.ranks = steps, empty, tokens, more.get("ranks", 1)
        self.error = None
        self.start()

    def run(self):
        try:
            asyncio.run(self.send())
        except Exception as error:
            self.error = error

    async def send(self):
        async with RolloutPipeline(self.sender.queue, seq_len=4096, ranks=self.ranks) as pipeline:
            try:
                for step in self.steps:
                    if step not in self.empty:
                        pipeline.arrive(output(step, self.tokens), step=step, key=(step, 0))
                    await self.sender.send(await pipeline.finish(step, policy_version=step))
                await self.sender.close()
            finally:
                await self.sender.close(last=False)

    def done(self):
        self.join(20)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error


def test_every_rank_gets_every_step_in_order_and_then_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(wire, "_PART", 1000)  # many parts a file
    sending = Orchestrator(tmp_path / "queue", range(4), empty={2}, ranks=2, max_unread=1, tokens=400)
    ranks = [
        ZmqReceiver(sending.sender.address, tmp_path / f"rank{r}", rank=r, ranks=2, deadline=60.0) for r in range(2)
    ]
    for step in (0, 1, 3):
        for rank in ranks:
            batch = rank.receive()
            assert (batch.step, batch.policy_version) == (step, step)
            experts = next(m["routed_experts"] for m in batch.micro_batches(0))
            assert experts.shape == (401, 2, 3)
            assert set(experts[:-1].reshape(-1).tolist()) == {step}
            rank.ack(step)
    for rank in ranks:
        with pytest.raises(EndOfData, match="ended after step 3"):
            rank.receive()
        assert rank.refused == {"nothing_to_train_on": 1}
        rank.close()
    sending.done()
    assert [list((tmp_path / name).iterdir()) for name in ("queue", "rank0", "rank1")] == [[], [], []]


def test_a_sender_holds_at_most_so_many_batches_and_names_the_wait(tmp_path):
    sending = Orchestrator(tmp_path, range(9), max_unread=3, deadline=0.2)
    with pytest.raises(DeadlineExceeded, match=r"rollouts\.ack"):
        sending.done()
    assert sorted(p.name for p in tmp_path.iterdir() if "experts" not in p.name) == [
        f"step_{s:012d}.safetensors" for s in range(4)
    ]


def test_a_sender_that_does_not_answer_is_named_within_a_heartbeat(tmp_path):
    silent = ZmqReceiver("tcp://127.0.0.1:9", tmp_path, heartbeat=0.1)
    with silent, pytest.raises(WorkerDied, match=r"has not answered for 0\.1 s"):
        silent.receive()
    with pytest.raises(ConfigError, match="no address"):
        ZmqReceiver("nonsense", tmp_path)


def test_foreign_messages_get_no_answer_and_other_ranks_are_refused(tmp_path):
    sending = Orchestrator(tmp_path / "queue", [0])
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(sending.sender.address)
    odd = [("part", 0, 1, 0, 7, 0), ("part", 0, 1, 0, 1, 0), ("part", 0, 1, 0, 0, 2**63), ("what", 0, 1, 0, 0, 0)]
    for raw in (b"", b"\xc1", b"x" * 300, *map(msgspec.msgpack.encode, odd)):
        socket.send(raw)
    other = ZmqReceiver(sending.sender.address, tmp_path / "r", rank=1, ranks=2)
    with other, pytest.raises(ConfigError, match="packed for 1 ranks, not 2"):
        other.receive()
    with ZmqReceiver(sending.sender.address, tmp_path / "r", deadline=60.0) as receiver:
        receiver.ack(receiver.receive().step)
        with pytest.raises(EndOfData):
            receiver.receive()
    sending.done()
    socket.close(linger=0)
    context.term()


def test_a_batch_larger_than_allowed_is_not_fetched(tmp_path):
    sending = Orchestrator(tmp_path / "queue", [0], deadline=0.5)
    with ZmqReceiver(sending.sender.address, tmp_path / "r", max_bytes=100, deadline=60.0) as receiver:
        with pytest.raises(ConfigError, match="at most 100 are taken"):
            receiver.receive()
        assert list((tmp_path / "r").iterdir()) == []
    with pytest.raises(DeadlineExceeded):
        sending.done()


def test_a_killed_sender_process_is_named_within_a_heartbeat_and_what_it_had_sent_stays(tmp_path):
    code = (
        "import asyncio, sys; from pathlib import Path\n"
        "from headrace.rollouts import RolloutPipeline; from headrace.rollouts.zmq_transport import ZmqSender\n"
        "tokens = {'prompt_ids': [1], 'prompt_mask': [0], 'completion_ids': [2], 'completion_mask': [1], 'completion_logprobs': [-1.0]}\n"
        "async def go():\n"
        "    sender = ZmqSender('tcp://127.0.0.1:*', Path(sys.argv[1]), max_unread=9)\n"
        "    async with RolloutPipeline(sender.queue, seq_len=8) as pipeline:\n"
        "        pipeline.arrive({'example_id': 0, 'env_name': 'a', 'reward': 1.0, 'trajectory': [{'tokens': tokens}]}, step=0, key=(0, 0))\n"
        "        await sender.send(await pipeline.finish(0))\n"
        "        print(sender.address, flush=True); await asyncio.sleep(60)\n"
        "asyncio.run(go())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "queue")], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        with ZmqReceiver(
            process.stdout.readline().strip(), tmp_path / "rank", deadline=20.0, heartbeat=0.5
        ) as receiver:
            batch = receiver.receive()
            process.kill()
            process.wait(10)
            assert batch.arrays["ids"].tolist() == [1, 2]
            with pytest.raises(WorkerDied, match=r"has not answered for 0\.5 s \(step 1\)"):
                receiver.receive()
            assert [p.name for p in (tmp_path / "rank").iterdir()] == ["step_000000000000.safetensors"]
    finally:
        process.kill()
        process.communicate()
