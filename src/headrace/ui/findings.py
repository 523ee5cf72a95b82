"""The problems of a run in sentences: the worst first, each with a remedy and the metric that shows it.

Three kinds are looked for: the state of the run (dead, stalled), the last lines (waits, loss, speed), and metrics outside
the healthy range that their declaration gives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.errors import count_text
from headrace.ui.metrics_index import Line, family, is_number, numbers, steps_of
from headrace.ui.run_view import SPEEDS, RunView

_OUTSIDE = 0.1
"""A metric outside its healthy range for more than this share of the lines is a finding."""
_RECENT_STEPS = 100
_WAIT_SHARE = 0.05
"""Exposed wait above this share of the step time is a finding; above four times as much it is bad."""
_STARTUP = 10
"""Steps at a run's start whose waits are ignored: compiling, first windows."""
_MIX_BAND = 0.02
"""Largest distance between a source's share of the tokens and its target."""
_LOPSIDED = 10.0
"""Ratio of the largest to the smallest number of picks from which a mix is called lopsided."""
_SPREAD = 0.3
"""Largest healthy difference between the remaining fractions of the pool's files."""
_SINCE = "stream_mixing/active/steps_since_pick_max"
_EXHAUSTED = "stream_mixing/refill/exhaust_events"
_MODALITIES = "stream_mixing/active/modalities/"
_PICKS = "stream_mixing/picks/"

_REMEDIES = (
    ("loader.next", "The loader is slower than the trainer. Raise loader.tokenizer_workers and loader.prefetch_batches, or tokenise once with `headrace prepare`."),
    ("source.", "Reading is slow. Put the files on a faster disk, or tokenise once with `headrace prepare`; raise loader.prefetch_batches to ride over short stalls."),
    ("streams.", "Reading cells is slow. Raise streams.num_workers or streams.prefetch_batches."),
    ("spool.empty", "The spool is empty: providers are slower than the trainer. Start another provider with `headrace provide CONFIG`."),
    ("spool.", "The spool's disk or locks hold the trainer up. See the Spool page and `headrace spool stat`."),
    ("kernels.compile", "Compiling happens once per machine. Keep HEADRACE_CACHE on a disk that outlives the job."),
    ("train.reduce", "Ranks wait for each other in the gradient reduction. The heat map of ranks shows which one is late."),
    ("metrics.reduce", "Ranks wait for each other when a line is written. Raise run.log_every, or look at the rank that is late."),
    ("rollouts.", "The trainer waits for rollouts. Raise the number of rollouts at a time, or allow more lag."),
    ("ledger.", "Ranks exchange recurrent state. Fewer groups per batch or a larger ledger.capacity shorten it."),
)  # fmt: skip


_LAG = "Something blocks the event loop of the environments, or the machine is busy with other work. Look for slow code in `play` and in reward functions; give the run more cores."
_RANGE_REMEDIES = {"event_loop_lag/p99": _LAG, "event_loop_lag/median": _LAG}
"""Remedies for metrics outside their range, in place of the metric's meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A problem of a run."""

    key: str
    """The metric that shows it; empty if none does."""
    title: str
    sentence: str
    remedy: str = ""
    severity: str = "warn"
    """bad or warn."""
    step: int | None = None
    """A step to open, if one stands out."""
    weight: float = 0.0
    """Findings of one severity are ordered by this, the largest first."""
    rule: str = ""
    """Name of the check that found it. It does not change between versions."""


def find_problems(view: RunView, status: Mapping[str, Any]) -> list[Finding]:
    """All problems of a run, the worst first. `status`: what `view.status()` returned."""
    found: list[Finding] = []
    counting = () if view.is_outline else (_mix, _left_out, _ledger, _rollouts)  # some lines say nothing about totals
    for check in (_state, _loss, _waits, _speed, *counting, _streams, _ranges):
        found += check(view, status)
    # A check of its own says more about a metric than its healthy range.
    said = {f.key for f in found if f.rule != "range"}
    kept = [f for f in found if f.rule != "range" or f.key not in said]
    return sorted(kept, key=lambda f: (f.severity != "bad", -f.weight))


def recent_lines(view: RunView, steps: int = _RECENT_STEPS) -> list[Line]:
    """The lines of the last `steps` steps, without the run's start."""
    lines = list(view.index.recent)
    if not lines:
        return []
    after = max(lines[-1]["step"] - steps, min(_STARTUP, lines[-1]["step"] // 4))
    return [line for line in lines if line["step"] > after]


def recent_waits(view: RunView) -> tuple[dict[str, float], float, int]:
    """Seconds by wait over the recent lines, the step time that they are part of, and the number of steps."""
    lines = recent_lines(view)
    waits: Counter[str] = Counter()
    for line in lines:
        waits.update(family(line, "step/wait/", "/seconds"))
    return dict(waits.most_common()), sum(numbers(lines, "step/seconds")), int(sum(map(steps_of, lines)))


def healthy_range(view: RunView, key: str) -> tuple[float, float] | None:
    """The healthy range of a metric: as declared, or as it follows from the config; None if it has none."""
    if key == _SINCE:
        size = view.section("streams").get("num_streams_mixed")
        return (0.0, 5.0 * size) if isinstance(size, int) else None
    spec = view.spec(key)
    return spec.healthy if spec is not None else None


# ------------------------------------------------------------------------------------------ state of the run


def _state(view: RunView, status: Mapping[str, Any]) -> Iterator[Finding]:
    if status["state"] == "dead":
        yield Finding(
            rule="dead", key="", severity="bad", weight=1e9, title="The run died",
            sentence=f"No process holds the run's lock, and the run wrote no summary of its end. Its last line is of step {status['step']:,}.",
            remedy=f"Continue it: headrace run --resume {view.path}",
        )  # fmt: skip
    times = numbers(list(view.index.recent)[-50:], "time")
    if status["state"] == "running" and len(times) > 3:
        usual, silent = float(np.median(np.diff(times))), status["now"] - times[-1]
        if silent > max(20 * usual, 60):
            yield Finding(
                rule="stalled", key="seconds", severity="bad", weight=1e8, title="The run has stalled",
                sentence=f"No line for {_duration(silent)}; lines usually come every {_duration(usual)}.",
                remedy="Look at the run's terminal. A wait that passes its deadline (run.deadline) ends the run with an error that names it.",
            )  # fmt: skip
    if status["damaged"]:
        yield Finding(
            rule="damaged", key="", weight=0.5, title="Damaged lines",
            sentence=f"{status['damaged']:,} lines of metrics.jsonl are torn or foreign and are not shown.",
            remedy="One torn line after a kill is normal. More of them point at the disk, or at a second writer.",
        )  # fmt: skip
    if status["keys_left_out"]:
        yield Finding(
            rule="keys", key="", weight=0.5, title="Too many metrics",
            sentence="The file has more keys than a page can hold, and some are not shown.",
            remedy="A name that varies without end (a path, an index) should not be part of a metric's key.",
        )  # fmt: skip


def _loss(view: RunView, status: Mapping[str, Any]) -> Iterator[Finding]:
    lines = list(view.index.recent)
    missing = [line for line in lines if "train/loss" in line and not is_number(line["train/loss"])]
    finite = [line for line in lines if is_number(line.get("train/loss"))]
    if missing:
        first = missing[0]["step"]
        ended = bool(finite) and finite[-1]["step"] > missing[-1]["step"]
        yield Finding(
            rule="nan", key="train/loss", severity="warn" if ended else "bad", weight=1e7, step=first, title="The loss is not a number",
            sentence=f"The loss is NaN or infinite in {count_text(len(missing), 'line')}, first at step {first:,}.",
            remedy=f"Read the documents of step {first:,}; lower train.lr, or skip the steps: headrace run --resume {view.path} --run.skip {first}:{first + 1}",
        )  # fmt: skip
    norms = view.index.means("train/grad_norm")
    extremes = view.index.extremes("train/grad_norm")
    if (
        extremes is not None
        and len(norms) > 10
        and extremes[2] > 20 * float(np.median(norms))
        and extremes[3] > _STARTUP
    ):
        yield Finding(
            rule="grad_norm", key="train/grad_norm", weight=900, step=extremes[3], title="The gradient norm has a spike",
            sentence=f"At step {extremes[3]:,} the gradient norm is {extremes[2]:.3g}; its median is {float(np.median(norms)):.3g}.",
            remedy=f"Read the documents of step {extremes[3]:,}. train.grad_clip keeps such a step from moving the weights far.",
        )  # fmt: skip
    if view.kind == "streams":  # a step has the loss of one modality, so the loss jumps from step to step
        return
    worst: tuple[float, Line, float] | None = None
    values = np.array([line["train/loss"] for line in finite])
    for i in range(10, len(values)):
        before = values[max(i - 30, 0) : i]
        middle = float(np.median(before))
        spread = max(1.4826 * float(np.median(np.abs(before - middle))), 0.02 * abs(middle), 1e-6)
        far = (values[i] - middle) / spread
        if far > 8 and (worst is None or far > worst[0]):
            worst = float(far), finite[i], middle
    if worst is not None and worst[1]["train/loss"] > 1.3 * worst[2]:
        step = worst[1]["step"]
        yield Finding(
            rule="spike", key="train/loss", weight=1e3 + worst[0], step=step, title="The loss has a spike",
            sentence=f"At step {step:,} the loss is {worst[1]['train/loss']:.4g}; over the lines before its median is {worst[2]:.4g}.",
            remedy=f"Read the documents of step {step:,}. If they are bad, skip them at the next resume with --run.skip.",
        )  # fmt: skip


def _waits(view: RunView, status: Mapping[str, Any]) -> Iterator[Finding]:
    waits, total, steps = recent_waits(view)
    if total <= 0 or steps < 2:
        return
    lines = recent_lines(view)
    for name, seconds in list(waits.items())[:3]:
        share = seconds / total
        # An RL step always waits for its rollouts: only more than half of its time is a finding.
        limit = 0.5 if name.startswith("rollouts.") else _WAIT_SHARE
        if share <= limit:
            continue
        worst = Counter(numbers(lines, f"wait/{name}/seconds/worst_rank")).most_common(1)
        where = f", most often on rank {worst[0][0]:.0f}" if worst and view.world_size > 1 else ""
        yield Finding(
            rule="wait", key=key if (key := f"wait/{name}/seconds") in view.index else "waits/exposed/seconds", severity="bad" if share > 4 * limit else "warn", weight=1e5 * share,
            title=f"{share:.0%} of the time is waiting for {name}",
            sentence=f"Wait `{name}` took {share:.1%} of the last {steps:,} steps{where}.", remedy=_remedy(name),
        )  # fmt: skip


def _remedy(wait: str) -> str:
    return next(
        (text for head, text in _REMEDIES if wait.startswith(head)), "See what the wait is for on the Metrics page."
    )


def _speed(view: RunView, status: Mapping[str, Any]) -> Iterator[Finding]:
    for key, unit in SPEEDS:
        all_lines = view.index.means(key)
        recent = numbers(recent_lines(view), key)
        if len(all_lines) < 20 or len(recent) < 3:
            continue
        usual, now = float(np.median(all_lines)), float(np.median(recent))
        if usual > 0 and now < 0.7 * usual:
            yield Finding(
                rule="slower", key=key, weight=1e3 * (1 - now / usual), title="The run has become slower",
                sentence=f"{now:,.0f} {unit} over the last lines; the median of the run is {usual:,.0f}.",
                remedy="The time budget shows which part of a step has grown.",
            )  # fmt: skip


def _mix(view: RunView, status: Mapping[str, Any]) -> Iterator[Finding]:
    targets = view.targets()
    members = view.members("data/source_tokens/<source>")
    totals = {name: view.index.total(key) for name, key in members.items()}
    everything = sum(totals.values())
    if (
        everything <= 0
        or len(totals) < 2
        or status["step"] < 20
        or any(e.get("event") == "weights" for e in view.events)
    ):
        return
    for name, total in totals.items():
        if name in targets and abs(total / everything - targets[name]) > _MIX_BAND:
            yield Finding(
                rule="mix", key=members[name], weight=10, title=f"{name} is off its share",
                sentence=f"{name} has {total / everything:.1%} of the tokens, its weight promises {targets[name]:.1%}.",
                remedy="A source that has ended under loader.exhausted = \"drop\" leaves its share to the others; see `headrace plan`.",
            )  # fmt: skip


def _left_out(view: RunView, status: Mapping[str, Any]) -> Iterator[Finding]:
    for key, what in (("text/bad_rows", "row"), ("text/bad_shards", "file")):
        count = int(view.index.total(key))
        if count:
            yield Finding(
                rule="left_out", key=key, weight=100 + min(count, 100), title=f"{count_text(count, what)} could not be read",
                sentence=f"{count_text(count, what)} of the sources could not be read and {'was' if count == 1 else 'were'} left out by policy (on_bad).",
                remedy="The journal names each: headrace inspect RUN. Mend the files before the next run.",
            )  # fmt: skip
    padding, tokens = view.index.total("data/padding"), view.index.total("data/tokens")
    if tokens and padding / (padding + tokens) > 0.15:
        yield Finding(
            rule="padding", key="data/padding", weight=50, title=f"{padding / (padding + tokens):.0%} of the batch is padding",
            sentence=f"{padding / (padding + tokens):.1%} of all positions are padding, which costs compute and teaches nothing.",
            remedy='Use pack = "best_fit" or "concat", or a seq_len closer to the length of the documents.',
        )  # fmt: skip


def _ledger(view: RunView, status: Mapping[str, Any]) -> Iterator[Finding]:
    for mode, setting in (("stale", "ledger.stale_threshold"), ("lru", "ledger.capacity")):
        key = f"ledger/false_evictions/{mode}"
        total = int(view.index.total(key))
        if not total:
            continue
        away = view.index.extremes("ledger/refault_distance_max")
        late = "" if away is None else f", up to {int(away[2]):,} steps after they were forgotten"
        now = view.section("ledger").get("stale_threshold")
        enough = ""
        if mode == "stale" and away is not None and isinstance(now, int):
            enough = f" {now + int(away[2]):,} would have been enough (it is {now:,})."
        yield Finding(
            rule="false_evictions", key=key, severity="bad", weight=1e4, title="Recurrent state was forgotten too early",
            sentence=f"{total:,} groups were evicted while their files were still read, and came back without their state{late}.",
            remedy=f"Raise {setting}.{enough} Or set ledger.protect_active = true.",
        )  # fmt: skip


def _streams(view: RunView, status: Mapping[str, Any]) -> Iterator[Finding]:
    dry = view.index.means(_EXHAUSTED)
    if len(dry) and float(np.mean(dry > 0)) > 0.5 and float(dry.mean()) > 0.5:
        yield Finding(
            rule="exhausts", key=_EXHAUSTED, severity="bad", weight=500, title="Files run dry at almost every step",
            sentence=f"Slices run dry in {float(np.mean(dry > 0)):.0%} of the lines, {float(dry.mean()):.2f} of them a step: the run opens files instead of reading them.",
            remedy="Use longer files, smaller batches, or fewer streams at a time (streams.num_streams_mixed).",
        )  # fmt: skip
    low = view.index.means("stream_mixing/active/remaining_fraction_min")
    high = view.index.means("stream_mixing/active/remaining_fraction_max")
    if len(low) and len(low) == len(high):
        uneven = float(np.mean(high - low > _SPREAD))
        if uneven > _OUTSIDE:
            yield Finding(
                rule="uneven", key="stream_mixing/active/remaining_fraction_max", weight=100 * uneven, title="The pool drains unevenly",
                sentence=f"The fullest and the emptiest open file are more than {_SPREAD:.0%} apart in {uneven:.0%} of the lines.",
                remedy='pick_mode = "proportional" drains files evenly.',
            )  # fmt: skip
    picks = {name: view.index.total(key) for name, key in view.members(f"{_PICKS}<modality>").items()}
    total = sum(picks.values())
    if total and len(picks) > 1:
        for name, count in picks.items():
            if count / total < 0.1 / len(picks):
                yield Finding(
                    rule="starved", key=f"{_PICKS}{name}", weight=400, title=f"{name} is hardly ever picked",
                    sentence=f"{name} gets {count / total:.1%} of the batches, {count:,.0f} of {total:,.0f}.",
                    remedy="Batch sizes decide how often a file is picked: even them out (streams.batch_sizes), or set streams.targets.",
                )  # fmt: skip
        most, least = max(picks.values()), min(picks.values())
        flat = [view.index.extremes(f"{_MODALITIES}{name}") for name in picks]
        if most >= _LOPSIDED * max(least, 1) and all(e is not None and e[0] == e[2] for e in flat):
            leader = max(picks, key=lambda name: picks[name])
            yield Finding(
                rule="lopsided", key=f"{_PICKS}{leader}", weight=350, title=f"{leader} takes {picks[leader] / total:.0%} of the batches",
                sentence=f"{leader} gets {picks[leader] / total:.0%} of the batches while the counts of open files stay flat: those count open files, not picks.",
                remedy="stream_mixing/picks/* shows the mix. Even out streams.batch_sizes.",
            )  # fmt: skip
    for name, key in view.members(f"{_MODALITIES}<modality>").items():
        open_files = view.index.means(key)
        absent = float(np.mean(open_files == 0)) if len(open_files) else 0.0
        if absent > 0.25:
            yield Finding(
                rule="absent", key=key, weight=300, title=f"{name} starves",
                sentence=f"No file of {name} is in the pool in {absent:.0%} of the lines.",
                remedy='Use queue = "stratified", or a larger pool (streams.num_streams_mixed).',
            )  # fmt: skip


def _rollouts(view: RunView, status: Mapping[str, Any]) -> Iterator[Finding]:
    lines = recent_lines(view)
    for name, key in view.members("solve_none/<env>").items():
        values = numbers(lines, key)
        if name != "all" and len(values) > 5 and min(values[-5:]) >= 0.95:
            yield Finding(
                rule="unsolved", key=key, weight=200, title=f"{name} is never solved",
                sentence=f"In the last steps no rollout of {values[-1]:.0%} of the groups of {name} has full reward, so there is little to learn from.",
                remedy="Make the tasks easier, or look at the rollouts: a reward function that is always 0 looks like this.",
            )  # fmt: skip
    for cause, key in view.members("rollouts/refused/<cause>").items():
        count = int(view.index.total(key))
        if count:
            yield Finding(
                rule="refused", key=key, weight=150, title=f"Rollouts are refused: {cause}",
                sentence=f"{count_text(count, 'rollout')} could not become samples ({cause}).",
                remedy="The rollout viewer shows their errors.",
            )  # fmt: skip


# ---------------------------------------------------------------------------------------------- healthy ranges


def _ranges(view: RunView, status: Mapping[str, Any]) -> Iterator[Finding]:
    for key in view.index.known_keys():
        healthy = healthy_range(view, key)
        if healthy is None or key.startswith("ledger/false_evictions/") or key == "event_loop_lag/max":
            continue
        low, high = healthy
        means = view.index.means(key)
        if not len(means):
            continue
        outside = float(np.mean((means < low) | (means > high)))
        extremes = view.index.extremes(key)
        if outside > _OUTSIDE and extremes is not None:
            value, step = (extremes[2], extremes[3]) if extremes[2] > high else (extremes[0], extremes[1])
            yield Finding(
                rule="range", key=key, weight=outside, step=step, title=f"{title_of(view, key)} is outside its healthy range",
                sentence=f"{key} is outside {low:g} to {high:g} in {outside:.0%} of the lines, furthest at step {step:,} with {value:g}.",
                remedy=_RANGE_REMEDIES.get(key) or ((spec.help[:1].upper() + spec.help[1:] + ".") if (spec := view.spec(key)) is not None and spec.help else ""),
            )  # fmt: skip


def title_of(view: RunView, key: str) -> str:
    """A key in words: `train/grad_norm` is "Grad norm", `data/source_tokens/web` is "Source tokens: web"."""
    known = _TITLES.get(key)
    if known is not None:
        return known
    spec = view.spec(key)
    pattern = spec.key if spec is not None else key
    varying = [p for p, s in zip(key.split("/"), pattern.split("/"), strict=False) if s.startswith("<")]
    return key_words(pattern) + (f": {', '.join(varying)}" if varying else "")


def key_words(pattern: str) -> str:
    """The last part of a key in words, with the part before it where it is only a statistic."""
    fixed = [part for part in pattern.split("/") if not part.startswith("<")] or [pattern]
    words = fixed[-2:] if fixed[-1] in _STATISTICS else fixed[-1:]
    text = " ".join(words).replace("_", " ").replace(".", " ")
    return text[:1].upper() + text[1:]


_STATISTICS = ("seconds", "count", "mean", "std", "max", "min", "p50", "p99", "stale", "lru")
_TITLES = {
    "train/loss": "Loss",
    "reward/all/mean": "Reward",
    "train/grad_norm": "Gradient norm",
    "train/lr": "Learning rate",
    "tokens_per_second": "Throughput",
    "cells_per_second": "Throughput",
    "seconds": "Wall time of a line",
    "step/seconds": "Step time",
    "waits/exposed/seconds": "Exposed wait",
    "waits/hidden/seconds": "Hidden wait (background threads)",
    "loader/next/p99": "next(), slowest of a hundred",
    "loader/next/p50": "next(), median",
    "loader/next/max": "next(), slowest",
}


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
