"""Batches reach the trainer in order and once; what is stale, gone or somebody else's is named."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading

import pytest

from headrace.errors import ConfigError, DeadlineExceeded, EndOfData, FileCorrupt, WorkerDied
from headrace.rollouts import RolloutPipeline, SpoolReceiver, SpoolSender
from headrace.rollouts.transport import _step_of


def output(task):
    tokens = {
        "prompt_ids": [task, 1], "prompt_mask": [0, 0], "completion_ids": [2, 3], "completion_mask": [1, 1],
        "completion_logprobs": [-1.0, -2.0], "routed_experts": {"data": bytes([task, 1, 2]), "shape": [3, 1, 1]},
    }  # fmt: skip
    return {"example_id": task, "env_name": "game", "reward": 1.0, "trajectory": [{"tokens": tokens}]}


async def send_steps(folder, steps, *, versions=None, empty=(), last=True, **more):
    """An orchestrator of some steps, each of one rollout."""
    sender = SpoolSender(folder, **{"max_unread": 100, "deadline": 5.0, **more})
    try:
        async with RolloutPipeline(
            sender.queue, seq_len=16, ranks=more.get("ranks", 1), first_step=sender.next_step
        ) as pipeline:
            for step in steps:
                if step not in empty:
                    pipeline.arrive(output(step % 256), step=step, key=(step, 0))
                version = step if versions is None else versions[step]
                await sender.send(await pipeline.finish(step, policy_version=version))
    finally:
        await sender.close(last=last)


def first_ids(batch):
    return batch.arrays["ids"].tolist()[:1]


def test_steps_arrive_in_order_each_once_and_then_the_data_ends(tmp_path):
    asyncio.run(send_steps(tmp_path, range(4), empty={1}))
    with SpoolReceiver(tmp_path, deadline=60.0) as receiver:
        seen = []
        for _ in range(3):
            batch = receiver.receive()
            seen.append(
                (batch.step, first_ids(batch), next(batch.micro_batches(0))["routed_experts"].reshape(-1).tolist())
            )
            receiver.ack(batch.step)
        assert seen == [(s, [s], [s, 1, 2, 0]) for s in (0, 2, 3)]
        assert receiver.refused == {"nothing_to_train_on": 1}
        with pytest.raises(EndOfData, match="ended after step 3"):
            receiver.receive()


def test_a_restarted_pair_goes_on_after_what_was_acknowledged(tmp_path):
    asyncio.run(send_steps(tmp_path, range(3), last=False))
    with SpoolReceiver(tmp_path, deadline=60.0) as receiver:
        receiver.ack(receiver.receive().step)
        assert receiver.receive().step == 1
    asyncio.run(send_steps(tmp_path, [3]))
    assert sorted(p.name for p in (tmp_path / "queue" / "rollouts").iterdir() if "experts" not in p.name) == [
        f"step_{s:012d}.safetensors" for s in (1, 2, 3)
    ]
    with SpoolReceiver(tmp_path, deadline=60.0) as receiver:
        assert [receiver.receive().step for _ in range(3)] == [1, 2, 3]


def test_stale_batches_are_refused_and_counted(tmp_path):
    asyncio.run(send_steps(tmp_path, range(4), versions=[0, 7, 2, 9]))
    with SpoolReceiver(tmp_path, deadline=60.0, max_lag=2) as receiver:
        assert [receiver.receive(policy_version=9).step for _ in range(2)] == [1, 3]
        assert receiver.refused == {"stale": 2}


def test_a_sender_waits_for_the_slowest_rank_by_name_and_deletes_what_all_have(tmp_path):
    async def go():
        with pytest.raises(DeadlineExceeded, match=r"rollouts\.trainer"):
            await send_steps(tmp_path, range(3), ranks=2, max_unread=2, deadline=0.2, last=False)

    asyncio.run(go())
    readers = [SpoolReceiver(tmp_path, rank=r, ranks=2, deadline=60.0) for r in range(2)]
    sending = threading.Thread(target=lambda: asyncio.run(send_steps(tmp_path, [3, 4], ranks=2, max_unread=2)))
    sending.start()
    for _ in range(5):
        for reader in readers:
            reader.ack(reader.receive().step)
    sending.join(10)
    assert not sending.is_alive()
    # What all ranks have is deleted when the next batch is sent: the last two may be left.
    assert {_step_of(p.name) for p in (tmp_path / "queue" / "rollouts").iterdir()} - {-1} <= {3, 4}
    for reader in readers:
        with pytest.raises(EndOfData):
            reader.receive()
        reader.close()


def test_a_second_sender_or_receiver_is_refused_naming_the_first(tmp_path):
    sender = SpoolSender(tmp_path)
    with pytest.raises(ConfigError, match="in use by an orchestrator"):
        SpoolSender(tmp_path)
    asyncio.run(sender.close())
    first, second = (SpoolReceiver(tmp_path, rank=r, ranks=2) for r in range(2))
    with pytest.raises(ConfigError, match="in use by rank 1 of a trainer"):
        SpoolReceiver(tmp_path, rank=1, ranks=2)
    first.close()
    second.close()


def test_steps_out_of_order_another_folder_or_another_number_of_ranks_are_refused(tmp_path):
    async def other_folder():
        sender = SpoolSender(tmp_path / "spool")
        async with RolloutPipeline(tmp_path / "elsewhere", seq_len=16) as pipeline:
            pipeline.arrive(output(0), step=0, key=(0, 0))
            report = await pipeline.finish(0)
            with pytest.raises(ConfigError, match="sender's queue"):
                await sender.send(report)
        await sender.close()

    asyncio.run(other_folder())
    with pytest.raises(ConfigError, match=r"step 1 was sent after step -1"):
        asyncio.run(send_steps(tmp_path / "order", [1]))
    asyncio.run(send_steps(tmp_path / "ranks", [0]))
    with SpoolReceiver(tmp_path / "ranks", ranks=2, deadline=60.0) as receiver:
        with pytest.raises(ConfigError, match="packed for 1 ranks, this trainer has 2"):
            receiver.receive()
        with pytest.raises(ConfigError, match="cannot be acknowledged"):
            receiver.ack(5)


def test_a_renamed_batch_is_refused(tmp_path):
    asyncio.run(send_steps(tmp_path, [0]))
    queue = tmp_path / "queue" / "rollouts"
    with SpoolReceiver(tmp_path, deadline=60.0) as receiver:
        receiver.ack(receiver.receive().step)
        for kind in ("", ".experts"):
            (queue / f"step_{0:012d}{kind}.safetensors").rename(queue / f"step_{1:012d}{kind}.safetensors")
        with pytest.raises(FileCorrupt, match=r"holds step 0"):
            receiver.receive()


def test_a_killed_orchestrator_is_named_within_its_heartbeat(tmp_path):
    code = (
        "import sys, asyncio; from headrace.rollouts import SpoolSender\n"
        "sender = SpoolSender(sys.argv[1]); print('ready', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with SpoolReceiver(tmp_path, deadline=30.0, heartbeat=0.1) as receiver:
            threading.Timer(0.1, lambda: process.send_signal(signal.SIGKILL)).start()
            with pytest.raises(WorkerDied, match="is gone and step 0 was not sent"):
                receiver.receive()
    finally:
        process.kill()
        process.communicate()


def test_a_receiver_does_not_wait_for_ever(tmp_path):
    with SpoolReceiver(tmp_path, deadline=0.05) as receiver, pytest.raises(DeadlineExceeded, match=r"rollouts\.batch"):
        receiver.receive()
