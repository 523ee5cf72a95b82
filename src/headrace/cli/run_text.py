"""What `headrace run` prints before the first step and after the last, for every kind of run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from headrace.cli.terminal import Line, facts, marked
from headrace.errors import short_number

if TYPE_CHECKING:
    from headrace.runs.config.base import JobConfig
    from headrace.runs.config.rl import RLConfig
    from headrace.runs.config.schema import RunConfig
    from headrace.runs.config.streams import LedgerSection, StreamsConfig
    from headrace.runs.lm import Summary
    from headrace.runs.rl import RLSummary
    from headrace.runs.run_loop import RunSummary
    from headrace.runs.streams import StreamSummary

Rows = Sequence[tuple[str, str]]


def opening(config: JobConfig, *, folder: str, ranks: int, resumed: bool) -> tuple[str, Rows]:
    """A headline and the run's config in a few rows."""
    rows, _ = _ROWS[config.kind]
    headline = f"[bold]headrace[/] {'resumes' if resumed else 'runs'} [bold]{config.run.name}[/]  in {folder}"
    return headline, [*rows(config), ("seed", f"{config.run.seed}   ranks {ranks}   config {config.hash}")]


def conclude(kind: str, summary: RunSummary, folder: str) -> Iterator[Line]:
    """The results, and the command that continues the run."""
    _, rows = _ROWS[kind]
    done = {"completed": "completed", "stopped": "stopped", "data_ended": "ran out of data"}[summary.state]
    yield marked(f"\n[bold]{done}[/] at step {summary.step} of {summary.steps}")
    go_on = ("resume", summary.resume)
    if summary.step >= summary.steps:
        accept = " --accept config" if getattr(summary, "decays", False) else ""
        go_on = ("extend", f"{summary.resume} --run.steps {summary.steps * 2}{accept}")
    look = f"headrace report {folder}" + (
        "" if kind == "streams" else f"   headrace step {folder} {max(summary.step, 1)}"
    )
    model = ("model", f"sha256 {summary.model_sha256[:16]}…")
    yield from facts([*rows(summary), model, ("folder", folder), ("look", look), go_on])


def _text_config(config: RunConfig) -> Rows:
    total = sum(s.weight for s in config.source) or 1.0
    text, loader = config.text, config.loader
    return [
        ("sources", "  ".join(f"{s.name} {s.weight / total:.3g} ({s.spec})" for s in config.source)),
        ("text", f"{text.tokenizer or 'bytes'} tokenizer, seq_len {text.seq_len}, pack {text.pack}"),
        ("batches", f"{loader.global_batch_size} x {text.seq_len} tokens, {config.run.steps} steps"),
        ("model", f"{config.train.model}, lr {config.train.lr:g}"),
    ]  # fmt: skip


def _stream_config(config: StreamsConfig) -> Rows:
    streams, train, ledger = config.streams, config.train, config.ledger
    sizes = ", ".join([f"{streams.batch_size} rows", *(f"{m} {n}" for m, n in streams.batch_sizes.items())])
    per_lane = streams.batching_mode == "device_per_stream"
    shape = f"{streams.lane_count} lanes" if per_lane else f"x {streams.global_ranks}"
    what = "recurrent, the next cell of a group guessed" if ledger else f"{train.mask:.0%} of the features hidden"
    return [
        ("streams", f"{'  '.join(streams.roots)} ({streams.layout})"),
        ("mixing", f"{streams.num_streams_mixed} at a time, {streams.pick_mode}, {streams.queue}"),
        ("batches", f"{sizes}; {streams.batching_mode} {shape}, {config.run.steps} steps"),
        ("model", f"{train.depth} blocks of {train.dim}, {what}, lr {train.lr:g}"),
        *([("ledger", _ledger_text(ledger))] if ledger is not None else []),
    ]


def _ledger_text(ledger: LedgerSection) -> str:
    words: list[str] = [ledger.mode]
    if ledger.capacity is not None:
        words.append(f"{ledger.capacity:,} groups a rank")
    if ledger.stale_threshold is not None:
        words.append(f"after {ledger.stale_threshold:,} steps")
    if ledger.wipe_every is not None:
        words.append(f"every {ledger.wipe_every:,} steps")
    return ", ".join(words) + ("; groups of open files are protected" if ledger.protect_active else "")


def _rl_config(config: RLConfig) -> Rows:
    policy, rollouts, engine = config.policy, config.rollouts, config.engine
    total = sum(env.weight for env in config.env)
    sizes = " / ".join(str(e.group_size) for e in config.env)
    return [
        ("envs", "  ".join(f"{e.name} {e.weight / total:.3g} ({e.spec})" for e in config.env)),
        ("rollouts", f"{rollouts.groups_per_step} groups of {sizes} a step, lag {rollouts.lag}, {config.run.steps} steps"),
        ("policy", f"{policy.model}, lr {policy.lr:g}, advantage {policy.advantage}"),
        ("engine", f"{engine.kind}, {'in this process' if engine.kind == 'embedded' else ', '.join(engine.url)}"),
        ("eval", f"{config.eval.tasks} held-out tasks every {config.eval.every} steps"),
    ]  # fmt: skip


def _loss_and_wait(summary: RunSummary, speed: str) -> Rows:
    return [
        ("loss", f"{summary.loss_first:.3f} -> {summary.loss_last:.3f}  (first step, mean of the last 10)"),
        ("speed", f"{speed} over {summary.seconds:.1f} s"),
        ("wait", f"{summary.exposed_wait_seconds:.2f} s exposed ({summary.exposed_wait_share:.1%})"),
    ]


def _text_results(summary: Summary) -> Rows:
    from headrace.loader.report import left_out_text

    left_out = left_out_text(summary.left_out)
    return [
        *_loss_and_wait(summary, f"{short_number(summary.tokens_per_second)} tokens/s"),
        ("padding", f"{summary.padding:.2%}   documents {summary.documents:,}   tokens {summary.tokens:,}"),
        ("mix", "  ".join(f"{n} {m['realised']:.3f} (target {m['target']:.3f})" for n, m in summary.mix.items())),
        *([("left out", f"{left_out} (since this process took the run up)")] if left_out else []),
        ("digest", summary.digest),
    ]


def _stream_results(summary: StreamSummary) -> Rows:
    rows = [
        *_loss_and_wait(summary, f"{short_number(summary.cells_per_second)} cells/s"),
        ("mix", "  ".join(f"{m} {share:.3f}" for m, share in summary.mix.items()) + f"   epoch {summary.epoch}"),
    ]
    if summary.false_evictions is not None:
        lost = f"[bold]{summary.false_evictions:,} times a group was evicted while its file was still read[/]: its state was lost"
        rows.append(
            ("ledger", lost if summary.false_evictions else "no group was evicted while its file was still read")
        )
    return [*rows, ("order", summary.order_digest)]


def _rl_results(summary: RLSummary) -> Rows:
    failed = ", ".join(f"{n:,} {reason}" for reason, n in summary.failed.items()) or "none"
    recorded = f"   from the arrival log {summary.recorded:,}" if summary.recorded else ""
    return [
        ("held out", f"{summary.accuracy_first:.1%} -> [bold]{summary.accuracy:.1%}[/] of the tasks solved"),
        ("reward", f"{summary.reward_first:.3f} -> {summary.reward_last:.3f}  (first step, mean of the last 10)"),
        ("speed", f"{summary.rollouts:,} rollouts, {summary.tokens:,} tokens; {summary.seconds:.1f} s"),
        ("wait", f"{summary.exposed_wait_seconds:.2f} s for rollouts ({summary.exposed_wait_share:.1%})"),
        ("failed", failed + recorded),
    ]


_ROWS: dict[str, tuple[Callable[[Any], Rows], Callable[[Any], Rows]]] = {
    "lm": (_text_config, _text_results),
    "streams": (_stream_config, _stream_results),
    "rl": (_rl_config, _rl_results),
}
"""The lines about the config and about the summary of each kind of run."""
