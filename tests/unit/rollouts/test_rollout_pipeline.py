"""Rollouts that arrive in any order become one batch; what is late, malformed or damaged is counted and enters nothing."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import sys
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headrace.errors import ConfigError, FileCorrupt
from headrace.files import open_container, write_container
from headrace.metrics import EventLoopLagMonitor
from headrace.rollouts import (
    AdvantageConfig,
    RolloutPipeline,
    ZeroAdvantageFilter,
    batch_files,
    binary_rollout,
    encode_rollout,
    interleave_rollout,
    open_training_batch,
    rollout_from_verifiers,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from rollout_outputs import LAYERS, TOPK, output, told


def run(folder, arrivals, *, step=0, **more):
    async def go():
        options = {"seq_len": 64, "ranks": 2, "advantage": AdvantageConfig(), **more}
        async with RolloutPipeline(folder, **options) as pipeline:
            for key, raw in arrivals:
                assert pipeline.arrive(raw, step=step, key=key, policy_version=4)
            return await pipeline.finish(step, policy_version=5)

    return asyncio.run(go())


KEYS = [(task, member) for task in range(3) for member in range(4)]


def test_the_batch_is_the_same_for_every_order_of_arrival(tmp_path):
    arrivals = [(key, output(*key)) for key in KEYS]
    first = run(tmp_path / "a", arrivals)
    seen = told(open_training_batch(first.path))
    for name, order in (("b", arrivals[::-1]), ("c", arrivals[5:] + arrivals[:5])):
        report = run(tmp_path / name, order)
        assert told(open_training_batch(report.path)) == seen
        assert (report.samples, report.tokens, report.truncated) == (first.samples, first.tokens, first.truncated)
    assert not [p for name in "abc" for p in (tmp_path / name).iterdir() if p.name.startswith(".tmp-")]


@pytest.mark.parametrize("routed", [True, False])
def test_the_trainer_reads_what_interleave_made(tmp_path, routed):
    report = run(tmp_path, [(key, output(*key, routed=routed)) for key in KEYS])
    batch = open_training_batch(report.path)
    assert (batch.step, batch.policy_version, batch.envs) == (0, 5, ("game",))
    expected = {}
    for key in KEYS:
        for sample in interleave_rollout(rollout_from_verifiers(output(*key, routed=routed))):
            expected[sample.ids[:64].tobytes()] = (sample.truncated(64), key)
    found = 0
    for rank in range(2):
        for micro in batch.micro_batches(rank):
            borders = micro["cu_seqlens"]
            assert ("routed_experts" in micro) == routed
            for start, end in itertools.pairwise(borders):
                if not micro["samples"]:
                    assert not micro["mask"].any()
                    continue
                sample, key = expected[micro["ids"][start:end].tobytes()]
                assert micro["mask"][start:end].tobytes() == sample.mask.tobytes()
                assert micro["logprobs"][start:end].tobytes() == sample.logprobs.tobytes()
                assert micro["positions"][start:end].tolist() == list(range(end - start))
                assert set(micro["advantages"][start:end].tolist()) == {0.5 if key[1] % 2 else -0.5}
                if routed:
                    assert micro["routed_experts"][start:end].tobytes() == sample.experts.joined().tobytes()
                found += 1
    assert found == len(expected) == report.samples


@pytest.mark.parametrize("form", [binary_rollout, encode_rollout, lambda raw: raw])
def test_values_by_token_reach_the_trainer_and_others_get_what_they_would_have_had(tmp_path, form):
    rich, plain = output(0, 0, routed=False), output(0, 1, routed=False)
    said = []
    for at, turn in enumerate(rich["trajectory"][:2]):  # the last turn has none
        n = len(turn["tokens"]["completion_ids"])
        for place, name in enumerate(("advantages", "loss_weights", "reference_logprobs")):
            turn["tokens"][f"completion_{name}"] = [10.0 * place + at + 0.5] * n
        said.append(n)
    report = run(tmp_path, [((0, 0), form(rich)), ((0, 1), form(plain))], ranks=1)
    assert report.refused == {}
    (micro,) = open_training_batch(report.path).micro_batches(0)
    assert {len(micro[k]) for k in ("ids", "advantages", "loss_weights", "reference_logprobs")} == {report.tokens}
    borders = micro["cu_seqlens"]
    for at, sample in enumerate(micro["samples"]):
        span = slice(borders[at], borders[at + 1])
        advantages, weights, reference, own = (micro[k][span] for k in ("advantages", "loss_weights", "reference_logprobs", "logprobs"))  # fmt: skip
        if sample == 1:
            assert (set(advantages), set(weights), reference.tolist()) == ({0.5}, {1.0}, own.tolist())
            continue
        first, second = slice(5, 5 + said[0]), slice(10 + said[0], 10 + said[0] + said[1])
        for place, column in enumerate((advantages, weights, reference)):
            assert set(column[first]) == {10.0 * place + 0.5}
            assert set(column[second]) == {10.0 * place + 1.5}
        assert set(advantages[second.stop :]) == {-0.5}
        assert set(weights[second.stop :]) == {1.0}
        assert reference[second.stop :].tolist() == own[second.stop :].tolist()


def test_a_column_by_token_that_does_not_fit_is_refused(tmp_path):
    bad = [output(0, m, routed=False) for m in range(2)]
    bad[0]["trajectory"][0]["tokens"]["completion_loss_weights"] = [1.0] * 99
    bad[1]["trajectory"][0]["tokens"]["completion_advantages"] = [float("nan")] * len(bad[1]["trajectory"][0]["tokens"]["completion_ids"])  # fmt: skip
    report = run(tmp_path, [((0, m), raw) for m, raw in enumerate(bad)])
    assert report.refused == {"wrong_length": 1, "not_finite": 1}


def test_a_token_without_experts_takes_less_than_9_bytes(tmp_path):
    report = run(tmp_path, [(key, output(*key, turns=100, routed=False)) for key in KEYS], seq_len=4096)
    assert report.tokens > 8000
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) < 9 * report.tokens


def test_malformed_rollouts_are_counted_by_cause_and_the_others_train(tmp_path):
    nan = output(0, 1)
    nan["trajectory"][0]["tokens"]["completion_logprobs"][0] = float("nan")
    short = output(0, 2)
    short["trajectory"][1]["tokens"]["completion_mask"].pop()
    bare = output(0, 3)
    del bare["trajectory"][0]["tokens"]
    arrivals = [
        ((0, 0), output(0, 0)),
        ((0, 1), nan),
        ((0, 2), short),
        ((0, 3), bare),
        ((0, 4), output(0, 5)),
        ((0, 5), {}),
    ]
    report = run(tmp_path, arrivals)
    assert report.refused == {"not_finite": 1, "wrong_length": 1, "no_tokens": 1, "missing_field": 1}
    assert report.rollouts + sum(report.refused.values()) == len(arrivals)
    assert report.metrics["rollouts/refused/not_finite"] == 1.0
    assert open_training_batch(report.path).samples == 2


def test_what_is_late_enters_no_step_and_is_counted(tmp_path):
    async def go():
        async with RolloutPipeline(tmp_path, seq_len=64) as pipeline:
            pipeline.arrive(output(0, 0), step=0, key=(0, 0))
            pipeline.arrive(output(1, 0), step=1, key=(1, 0))
            one = await pipeline.finish(1)
            assert not pipeline.arrive(output(1, 1), step=1, key=(1, 1))
            zero = await pipeline.finish(0)
            assert not pipeline.arrive(output(0, 1), step=0, key=(0, 1))
            with pytest.raises(ConfigError, match="finished already"):
                await pipeline.finish(0)
            pipeline.arrive(output(2, 0), step=2, key=(2, 0))
            with pytest.raises(ConfigError, match="arrived twice"):
                pipeline.arrive(output(2, 0), step=2, key=(2, 0))
            return zero, one, pipeline.late

    zero, one, late = asyncio.run(go())
    assert late == 2
    assert [open_training_batch(r.path).arrays["ids"].tolist() for r in (zero, one)] == [
        interleave_rollout(rollout_from_verifiers(output(task, 0)))[0].ids.tolist() for task in (0, 1)
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        f"step_{step:012d}{kind}.safetensors" for step in (0, 1) for kind in ("", ".experts")
    )


def test_a_step_tells_how_many_came_too_late_how_late_the_loop_was_and_what_was_split(tmp_path):
    async def go():
        async with RolloutPipeline(str(tmp_path), seq_len=64, save_to=tmp_path / "saved") as pipeline:
            retokenised = output(0, 0)
            retokenised["trajectory"][1]["tokens"]["prompt_ids"][3] += 1
            pipeline.arrive(retokenised, step=0, key=(0, 0))
            pipeline.arrive(output(0, 1), step=0, key=(0, 1))
            zero = await pipeline.finish(0)
            for member in range(2, 5):
                pipeline.arrive(output(0, member), step=0, key=(0, member))
            pipeline.arrive(output(1, 0), step=1, key=(1, 0))
            await asyncio.sleep(0.25)  # the loop's lag is looked at ten times a second
            one = await pipeline.finish(1)
            return zero.metrics, one.metrics

    zero, one = asyncio.run(go())
    assert (zero["rollouts/late"], one["rollouts/late"]) == (0.0, 3.0)
    assert (zero["rollouts/split_samples"], one["rollouts/split_samples"]) == (1.0, 0.0)
    saved = [json.loads(line) for line in (tmp_path / "saved" / "step_0.jsonl").read_text().splitlines()]
    assert [line.get("split_at") for line in saved] == [[3], None]
    assert {f"event_loop_lag/{n}" for n in ("min", "mean", "median", "p90", "p99", "max")} <= set(one)


@pytest.mark.parametrize("freeze", [True, False])
def test_what_was_alive_when_a_pipeline_opened_is_frozen_until_it_closes(tmp_path, freeze):
    import gc

    async def go():
        before = gc.get_freeze_count()
        async with RolloutPipeline(tmp_path, seq_len=64, freeze_garbage=freeze):
            during = gc.get_freeze_count()
        return before, during, gc.get_freeze_count()

    gc.unfreeze()
    before, during, after = asyncio.run(go())
    assert (before, after) == (0, 0)
    assert (during > 10_000) == freeze


def test_what_a_user_froze_stays_frozen(tmp_path):
    import gc

    async def go():
        async with RolloutPipeline(tmp_path, seq_len=64):
            pass

    gc.freeze()
    try:
        asyncio.run(go())
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_a_step_whose_rollouts_are_all_filtered_publishes_nothing_and_says_so(tmp_path):
    arrivals = [((0, m), output(0, 2 * m)) for m in range(4)]
    report = run(tmp_path, arrivals, filters=[ZeroAdvantageFilter()], save_to=str(tmp_path / "saved"), state_columns={})
    assert report.all_filtered
    assert report.filtered.counts == {"zero_advantage": 4}
    assert report.metrics["reward/all/mean"] == 0.0
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]
    lines = [json.loads(line) for line in (tmp_path / "saved" / "step_0.jsonl").read_text().splitlines()]
    assert [line["trajectory"][1]["prompt_tokens"] > 5 for line in lines] == [True] * 4


def test_metrics_are_over_all_environments_and_for_each(tmp_path):
    arrivals = [((0, m), output(0, m, env="a")) for m in range(2)] + [
        ((1, m), output(1, 1, env="b", seed=m)) for m in range(2)
    ]
    metrics = run(tmp_path, arrivals).metrics
    assert (metrics["reward/all/mean"], metrics["reward/a/mean"], metrics["reward/b/mean"]) == (0.75, 0.5, 1.0)
    assert (metrics["solve_all/all"], metrics["solve_all/a"], metrics["solve_all/b"]) == (0.5, 0.0, 1.0)
    assert metrics["turns/a/max"] == 3.0


@pytest.mark.parametrize("processes", [0, 1])
def test_every_form_of_a_rollout_makes_the_batch_that_its_lists_make(tmp_path, processes):
    arrivals = [(key, output(*key, turns=8)) for key in KEYS]
    expected = told(open_training_batch(run(tmp_path / "lists", arrivals).path))
    forms = [
        binary_rollout, encode_rollout, lambda raw: bytearray(msgspec.msgpack.encode(raw)), lambda raw: msgspec.json.encode(raw).decode(), with_arrays,
    ]  # fmt: skip
    mixed = [(key, forms[at % len(forms)](raw)) for at, (key, raw) in enumerate(arrivals)]
    made = run(tmp_path / "mixed", mixed, use_process_pool=processes)
    assert (made.refused, told(open_training_batch(made.path))) == ({}, expected)


def with_arrays(raw):
    turns = [{**turn, "tokens": {k: v if isinstance(v, dict) else np.array(v) for k, v in turn["tokens"].items()}} for turn in raw["trajectory"]]  # fmt: skip
    return {**raw, "trajectory": turns}


def test_sinks_are_given_the_metrics_of_a_step(tmp_path):
    records = []

    class Sink:
        def write(self, record):
            records.append(dict(record))

        def close(self):
            raise AssertionError("the caller closes its sinks")

    report = run(tmp_path, [((0, 0), output(0, 0))], step=3, sinks=[Sink()])
    assert records == [{"step": 3, "policy_version": 5, **report.metrics}]


def test_phases_are_on_one_line_the_costliest_first(tmp_path):
    report = run(tmp_path, [((0, 0), output(0, 0))])
    line = report.phases.line(7)
    assert line.startswith("Step 7 phase breakdown: ")
    seconds = [float(part.split("=")[1]) for part in line.removeprefix("Step 7 phase breakdown: ").split(", ")]
    assert seconds == sorted(seconds, reverse=True)
    assert set(report.phases.seconds) == {
        "process_rollout", "write_experts", "compute_advantages", "apply_filters", "result_collection_loop", "pack", "training_batch_send",
        "metrics_aggregation", "sinks",
    }  # fmt: skip


def test_rollouts_with_and_without_experts_in_one_step_are_refused_by_name(tmp_path):
    arrivals = [((0, 0), output(0, 0)), ((0, 1), output(0, 1, routed=False, env="plain"))]
    with pytest.raises(ConfigError, match=r"rollouts of plain came without routed experts"):
        run(tmp_path, arrivals)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("processes", [0, 1])
def test_an_images_fields_reach_the_trainer_with_their_sample_and_what_is_no_value_is_refused(tmp_path, processes):
    pixels = np.arange(12, dtype=np.float32).reshape(3, 4)
    with_image, other, foreign, second = (output(0, m) for m in range(4))
    with_image["trajectory"][-1]["tokens"] |= {"pixel_values": pixels, "image_grid_thw": [[1, 2, 6]]}
    second["trajectory"][-1]["tokens"]["pixel_values"] = [4, 5]
    foreign["trajectory"][0]["tokens"]["mm_kwargs"] = {"handle": object()}
    arrivals = [((0, 0), with_image), ((0, 1), other), ((0, 2), foreign), ((0, 3), second)]
    report = run(tmp_path, arrivals, use_process_pool=processes)
    assert report.refused == {"wrong_type": 1}
    micro = [m for rank in range(2) for m in open_training_batch(report.path).micro_batches(rank)]
    image, small = sorted(
        (m for m in micro if m["multimodal"] not in ([], [None])), key=lambda m: len(m["multimodal"][0]), reverse=True
    )
    assert small["multimodal"] == [{"pixel_values": [4, 5]}]
    (found,) = image["multimodal"]
    assert found["pixel_values"].dtype == np.float32
    assert found["pixel_values"].tolist() == pixels.tolist()
    assert found["image_grid_thw"] == [[1, 2, 6]]
    (expected,) = interleave_rollout(rollout_from_verifiers(output(0, 0)))
    assert image["ids"].tolist() == expected.ids.tolist()


@pytest.mark.parametrize("options", [{}, {"use_process_pool": 1}])
def test_samples_that_lose_their_end_are_counted_and_keep_their_experts(tmp_path, options):
    report = run(tmp_path, [((0, m), output(0, m, turns=1 + 8 * (m % 2))) for m in range(4)], seq_len=20, **options)
    assert (report.truncated, report.samples) == (2, 4)
    for rank in range(2):
        for micro in open_training_batch(report.path).micro_batches(rank):
            assert len(micro["ids"]) == len(micro["routed_experts"]) <= 20


def test_a_step_is_published_once(tmp_path):
    run(tmp_path, [((0, 0), output(0, 0))])
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match="is there already"):
        run(tmp_path, [((0, 0), output(0, 1))])
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_closed_pipeline_leaves_no_thread_no_file_and_the_interpreter_as_it_was(tmp_path):
    before = (sys.getswitchinterval(), threading.active_count())

    async def go():
        async with RolloutPipeline(tmp_path, seq_len=64) as pipeline:
            for key in KEYS:
                pipeline.arrive(output(*key), step=3, key=key)

    asyncio.run(go())
    assert (sys.getswitchinterval(), threading.active_count()) == before
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------------------------- damage


def published(tmp_path):
    path = run(tmp_path, [(key, output(*key)) for key in KEYS[:3]]).path
    return path, path.with_name("step_000000000000.experts.safetensors")


def test_a_batch_without_its_sidecar_or_with_anothers_is_refused(tmp_path):
    path, sidecar = published(tmp_path / "a")
    other = published(tmp_path / "b")[1]
    assert open_training_batch(path).experts is not None
    run(tmp_path / "c", [(key, output(*key, seed=1)) for key in KEYS[:3]])
    kept = sidecar.read_bytes()
    sidecar.unlink()
    with pytest.raises(FileCorrupt, match="cannot be opened"):
        open_training_batch(path)
    sidecar.write_bytes(other.read_bytes())
    open_training_batch(path)  # the same rollouts: the same experts
    foreign = (tmp_path / "c" / sidecar.name).read_bytes()
    sidecar.write_bytes(foreign)
    with pytest.raises(FileCorrupt, match=r"belongs to another batch|bytes, its batch says"):
        open_training_batch(path)
    sidecar.write_bytes(kept[:-1])
    with pytest.raises(FileCorrupt, match="bytes, its batch says"):
        open_training_batch(path)


def test_a_sidecar_without_its_batch_is_replaced(tmp_path):
    path, sidecar = published(tmp_path)
    path.unlink()
    before = sidecar.read_bytes()
    again, _ = published(tmp_path)
    assert again == path
    assert sidecar.read_bytes() == before


def test_the_sidecar_is_in_place_and_whole_before_its_batch_is(tmp_path, monkeypatch):
    seen = []

    def look(path, arrays, meta, **more):
        sidecar = path.with_name("step_000000000000.experts.safetensors")
        seen.append((sidecar.stat().st_size, 4096 + meta["experts"]["rows"] * LAYERS * TOPK, path.exists()))
        write_container(path, arrays, meta, **more)

    write_container = batch_files.write_container
    monkeypatch.setattr(batch_files, "write_container", look)
    published(tmp_path)
    ((size, expected, there),) = seen
    assert (size, there) == (expected, False)


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    return run(tmp_path_factory.mktemp("batch"), [(key, output(*key)) for key in KEYS]).path


def changed(name, change):
    return lambda arrays, meta: arrays.__setitem__(name, change(arrays[name]))


@pytest.mark.parametrize(
    "damage",
    [
        changed("logprobs", lambda a: a[:-1]),
        changed("mask_bits", lambda a: a[:-1]),
        changed("ids", lambda a: a.reshape(-1, 1)),
        changed("ids", lambda a: a.astype(np.float32)),
        changed("ids", lambda a: -1 - a),
        changed("advantage", lambda a: a.astype(np.float64)),
        changed("temperature", lambda a: a[:-1]),
        changed("expert_row", lambda a: a[:-1]),
        changed("expert_row", lambda a: np.full_like(a, (1 << 63) - 1)),
        changed("expert_row", lambda a: a - 1),
        changed("prompt_length", lambda a: a + 1000),
        changed("micro_samples", lambda a: a + 1),
        changed("micro_samples", lambda a: a - 1),
        changed("micro_start", lambda a: a[::-1].copy()),
        changed("micro_class", lambda a: a + 1),
        changed("env", lambda a: a - 1),
        changed("sample_start", lambda a: np.append(a[:-1], a[-1] + 1)),
        lambda arrays, meta: arrays.pop("reward"),
        lambda arrays, meta: meta.update(ranks=3),
    ],
)
def test_a_batch_with_right_sums_and_wrong_shapes_is_refused(batch, tmp_path, damage):
    shutil.copytree(batch.parent, tmp_path, dirs_exist_ok=True)
    container = open_container(batch)
    arrays, meta = {k: np.array(v) for k, v in container.arrays.items()}, dict(container.meta)
    damage(arrays, meta)
    write_container(tmp_path / batch.name, arrays, meta, replace=True, durable=False)  # with sums that are right
    with pytest.raises(FileCorrupt, match=rf"{batch.name} (is not a training batch, or )?is damaged"):
        open_training_batch(tmp_path / batch.name)


def test_every_flipped_bit_of_either_file_is_found_before_use(tmp_path):
    path, sidecar = published(tmp_path)
    expected = told(open_training_batch(path))
    rng = np.random.default_rng(1)
    for file, tries in ((path, 60), (sidecar, 60)):
        whole = file.read_bytes()
        for at in rng.integers(0, len(whole), tries).tolist():
            damaged = bytearray(whole)
            damaged[at] ^= 1 << int(rng.integers(8))
            file.write_bytes(damaged)
            try:
                # A bit of the sidecar's padding, or of what other tools read there, changes nothing here.
                assert told(open_training_batch(path)) == expected
                assert file == sidecar
                assert at < 4096
            except FileCorrupt:
                pass
        file.write_bytes(whole)


# ------------------------------------------------------------------------------------------------------ lag


def test_a_stalled_loop_is_seen_and_warned_of(caplog):
    import time

    async def go():
        async with EventLoopLagMonitor(interval=0.005, warn_above={"max": 0.05}) as monitor:
            await asyncio.sleep(0.03)
            quiet = monitor.drain()
            time.sleep(0.12)  # the stall itself: a task that does not yield
            await asyncio.sleep(0.01)
            return quiet, monitor.drain(), list(caplog.records), monitor.drain()

    quiet, stalled, warnings, nothing = asyncio.run(go())
    assert list(quiet) == [f"event_loop_lag/{n}" for n in ("min", "mean", "median", "p90", "p99", "max")]
    assert stalled["event_loop_lag/max"] > 0.1
    assert len(warnings) == 1
    assert "max 0.1" in caplog.text
    assert nothing == {}


def test_a_lag_monitor_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="every so many seconds"):
        EventLoopLagMonitor(interval=0)
    with pytest.raises(ValueError, match="p95"):
        EventLoopLagMonitor(warn_above={"p95": 1.0})
