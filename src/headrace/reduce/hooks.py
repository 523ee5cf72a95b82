"""The activations of a module, reduced while a model runs.

    result = activations(model, loader, module="blocks.2", steps=100)
    result.pca(16).share

The rows are what the module puts out, one a position, in the order of the batches; nothing is stored but the sums and one
chunk of rows. The number of rows is known at the end only. The sum is exact in its
order; the activations have the same bits again only if the model's own kernels give them (same device, same libraries, same
batch shapes). With a headrace loader the batches themselves are the same on every run.

Under torchrun every rank reduces the rows of its own samples and all get the one result. Rows are summed in `streams`: stream s
takes the samples g with g mod streams = s, in order, and the streams are added by number. So the order of the sum depends on
`streams`, not on ranks: with streams=8, one rank, two, four and eight sum the same rows in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.errors import ConfigError, DataError, WorkerDied, did_you_mean
from headrace.metrics import Wait
from headrace.metrics.ranks import Ranks
from headrace.reduce.result import GramResult
from headrace.reduce.stream import GramStream, streams_result

if TYPE_CHECKING:
    from torch import Tensor, nn

_DEADLINE = 1800.0
"""Seconds that ranks wait for each other when the streams are added."""


def activations(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    module: str | nn.Module,
    steps: int | None = None,
    forward: Callable[[nn.Module, Any], object] | None = None,
    keep: Callable[[Any], Tensor] | None = None,
    chunk_size: int | None = None,
    shift: Any = None,
    threads: int = 1,
    streams: int | None = None,
) -> GramResult:
    """Run `model` over `steps` batches (all of them unless given) and reduce what `module` puts out.

    `module`: its name in the model, or itself. `forward(model, batch)` unless it is model(input_ids, position_ids) of a headrace
    batch. `keep(batch)`: a mask of the positions that count, such as `lambda batch: batch["labels"] != -100`; all unless given.
    `streams`: sums that are kept apart and added at the end, a multiple of the ranks and as many as those unless given; each
    holds a chunk of rows. All ranks call this together and return the same result.
    """
    import torch.distributed as dist

    grouped = dist.is_available() and dist.is_initialized()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
    count = ranks if streams is None else streams
    if count < 1 or count % ranks:
        raise ConfigError(
            f"streams must be a multiple of the {ranks} ranks, so that each is summed by one of them; got {streams}"
        )
    if steps is not None and steps < 1:
        raise ConfigError(f"steps must be 1 or more, got {steps}")

    def stream_for(rows: Tensor) -> GramStream:
        return GramStream(width=rows.shape[1], shift=shift, chunk_size=chunk_size, threads=threads)

    sums = _Streams(count, rank, ranks, stream_for)
    problem: Exception | None = None
    packed: dict[int, np.ndarray] = {}
    try:
        _collect(model, loader, module, steps, forward, keep, sums)
        if count == 1:
            return sums.open[0].finish()
        packed = {number: stream.packed() for number, stream in sums.open.items()}
    except Exception as error:
        if ranks == 1:
            raise
        problem = error  # raised after the exchange: without it the other ranks would wait until their deadline
    return sums.result(packed, problem)


class _Streams:
    """The sums of this rank, by number of the stream. Stream s belongs to rank s mod `ranks`."""

    def __init__(self, count: int, rank: int, ranks: int, begin: Callable[[Tensor], GramStream]) -> None:
        self._count, self._rank, self._ranks, self._begin = count, rank, ranks, begin
        self.open: dict[int, GramStream] = {}

    def push(self, batch: Any, output: Tensor, mask: Tensor | None) -> None:
        """Add what the module put out for a batch, to the streams of its samples."""
        rows = output.reshape(-1, output.shape[-1])
        with Wait("reduce.device", deadline=600):
            rows, mask = rows.to("cpu"), None if mask is None else mask.to("cpu")
        if self._count == self._ranks:
            self._add(self._rank, rows if mask is None else rows[mask])
            return
        samples = _samples(batch, output)
        each = len(rows) // max(len(samples), 1)
        for at, sample in enumerate(samples):
            if sample % self._ranks != self._rank:
                raise ConfigError(
                    f"sample {sample} came to rank {self._rank} of {self._ranks}: streams need a loader that gives sample g to rank g mod "
                    "the ranks, as headrace's do. Leave streams out"
                )
            part = slice(at * each, (at + 1) * each)
            self._add(sample % self._count, rows[part] if mask is None else rows[part][mask[part]])

    def _add(self, number: int, rows: Tensor) -> None:
        if number not in self.open:
            self.open[number] = self._begin(rows)
        self.open[number].push(rows)

    def result(self, packed: Mapping[int, np.ndarray], problem: Exception | None) -> GramResult:
        """The result over the streams of all ranks, on every rank.

        `packed`: the sum of each stream of this rank. `problem`: an error of this rank; the other ranks learn of it before it is raised here.
        """
        mine = next(iter(self.open.values()), None)
        n_rows = sum(stream.n_rows for stream in self.open.values())
        exchange = None
        if self._ranks > 1:
            exchange = Ranks(None, doing="sum of activations", asker="the process group")
            about = None if problem or mine is None else [mine.columns.width, mine.chunk_size, mine.about["rows"]]
            with Wait("reduce.streams", deadline=_DEADLINE) as wait:
                exchange.begin()
                all_ranks = exchange.exchange({"about": about, "n_rows": n_rows}, wait)
            if problem is not None:
                raise problem
            for other, found in enumerate(all_ranks):
                if found["about"] is None:
                    raise WorkerDied(f"rank {other} could not collect its activations; its own message says why")
                if found["about"] != about:
                    raise DataError(
                        f"rank {other} has rows of width, chunk size and type {found['about']}, rank {self._rank} of {about}: all must agree"
                    )
            n_rows = sum(found["n_rows"] for found in all_ranks)
        assert mine is not None
        nothing = np.zeros(mine.columns.k * (mine.columns.k + 1) // 2)
        parts: list[np.ndarray] = []
        for first in range(0, self._count, self._ranks):
            part = packed.get(first + self._rank, nothing)
            if exchange is None:
                parts.append(part)
                continue
            with Wait("reduce.streams", deadline=_DEADLINE) as wait:
                exchange.begin()
                parts.extend(exchange.gather(part.view(np.int64), wait).view(np.float64))
        return streams_result(parts, mine.columns, n_rows, mine.about)


def _samples(batch: Any, output: Tensor) -> list[int]:
    try:
        samples = [int(g) for g in batch["sample_index"]]
    except (KeyError, TypeError, IndexError):
        raise ConfigError(
            "streams are divided by batch['sample_index'], which this loader does not give: leave streams out"
        ) from None
    if not samples or len(output) != len(samples):
        raise ConfigError(
            f"the module puts out {len(output)} rows of positions for {len(samples)} samples: leave streams out"
        )
    return samples


def _collect(
    model: nn.Module,
    loader: Iterable[Any],
    module: str | nn.Module,
    steps: int | None,
    forward: Callable[[nn.Module, Any], object] | None,
    keep: Callable[[Any], Tensor] | None,
    sums: _Streams,
) -> None:
    import torch

    place = _found(model, module)
    call = forward if forward is not None else _forward
    seen: list[Tensor] = []
    handle = place.register_forward_hook(lambda _, __, output: seen.append(_tensor(output)))
    modes = [(part, part.training) for part in model.modules()]  # a part may be frozen in a model that trains
    model.eval()
    try:
        with torch.no_grad():
            for taken, batch in enumerate(loader, start=1):
                seen.clear()
                call(model, batch)
                if not seen:
                    raise ConfigError(
                        f"module {module!r} was not called in a forward pass: is it the one that this model uses?"
                    )
                for output in seen:
                    mask = None if keep is None else _mask(keep(batch), output.numel() // output.shape[-1])
                    sums.push(batch, output, mask)
                if steps is not None and taken >= steps:
                    break
    finally:
        handle.remove()
        for part, training in modes:
            part.training = training
    if not sums.open:
        raise ConfigError("the loader gave no batch: there is nothing to reduce")


def _found(model: nn.Module, module: str | nn.Module) -> nn.Module:
    if not isinstance(module, str):
        if not any(part is module for part in model.modules()):
            raise ConfigError("the module that was given is not part of the model")
        return module
    try:
        return model.get_submodule(module)
    except AttributeError:
        names = [name for name, _ in model.named_modules() if name]
        hint = did_you_mean(module, names) or f"; it has {', '.join(names[:8])}"
        raise ConfigError(f"the model has no module {module!r}{hint}") from None


def _forward(model: nn.Module, batch: Any) -> object:
    try:
        return model(batch["input_ids"], batch["position_ids"])
    except (TypeError, KeyError, IndexError) as error:
        raise ConfigError(
            f"the model could not be called as model(input_ids, position_ids) ({error}): say how with forward=lambda model, batch: …"
        ) from error


def _tensor(output: Any) -> Tensor:
    first = output[0] if isinstance(output, tuple) else output
    if not hasattr(first, "reshape") or not first.is_floating_point():
        raise ConfigError(f"the module puts out {type(first).__name__}, not a tensor of floats: choose another")
    if not first.ndim or not first.shape[-1]:
        raise ConfigError(
            f"the module puts out a tensor of shape {tuple(first.shape)}, which holds no rows: choose another"
        )
    return first.detach().clone()  # what follows in the model may write into it


def _mask(mask: Tensor, rows: int) -> Tensor:
    flat = mask.reshape(-1).bool()
    if len(flat) != rows:
        raise ConfigError(f"keep() gave {len(flat):,} positions for {rows:,} rows of activations")
    return flat
