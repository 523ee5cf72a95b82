"""The activations of a module, reduced while a model runs.

    result = activations(model, loader, module="blocks.2", steps=100)
    result.pca(16).share

The rows are what the module puts out, one a position, in the order of the batches; nothing is stored but the sums and one
chunk of rows. How many rows there will be is known at the end only: the partition is sealed then. The sum is exact in its
order, and the activations are what they are: they have the same bits again only if the model's own kernels give them (same
device, same libraries, same batch shapes). With a headrace loader the batches themselves are the same on every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError
from headrace.metrics import Wait
from headrace.reduce.result import GramResult
from headrace.reduce.stream import GramStream

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["activations"]


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
) -> GramResult:
    """Run `model` over `steps` batches (all of them unless given) and reduce what `module` puts out.

    `module`: its name in the model, or itself. `forward(model, batch)` unless it is model(input_ids, position_ids) of a headrace
    batch. `keep(batch)`: a mask of the positions that count, such as `lambda batch: batch["labels"] != -100`; all unless given.
    """
    import torch
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            f"activations() reduces the rows of one process, and this one is of {dist.get_world_size()} ranks: each would have sums of its own "
            "rows. Run it in one process, or write each rank's activations as shards and reduce those with `headrace gram`"
        )
    if steps is not None and steps < 1:
        raise ConfigError(f"steps must be 1 or more, got {steps}")
    place = _found(model, module)
    call = forward if forward is not None else _forward
    seen: list[Tensor] = []
    stream: GramStream | None = None
    handle = place.register_forward_hook(lambda _, __, output: seen.append(_tensor(output)))
    training = model.training
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
                    rows = output.reshape(-1, output.shape[-1])
                    if keep is not None:
                        rows = rows[_mask(keep(batch), len(rows))]
                    if stream is None:
                        stream = GramStream(width=rows.shape[1], shift=shift, chunk_size=chunk_size, threads=threads)
                    with Wait("reduce.device", deadline=600):
                        held = rows.to("cpu")
                    stream.push(held)
                if steps is not None and taken >= steps:
                    break
    finally:
        handle.remove()
        model.train(training)
    if stream is None:
        raise ConfigError("the loader gave no batch: there is nothing to reduce")
    return stream.finish()


def _found(model: nn.Module, module: str | nn.Module) -> nn.Module:
    if not isinstance(module, str):
        if not any(part is module for part in model.modules()):
            raise ConfigError("the module that was given is not part of the model")
        return module
    try:
        return model.get_submodule(module)
    except AttributeError:
        import difflib

        names = [name for name, _ in model.named_modules() if name]
        near = difflib.get_close_matches(module, names, n=1)
        hint = f", did you mean {near[0]!r}?" if near else f"; it has {', '.join(names[:8])}"
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
    return first.detach().clone()  # what follows in the model may write into it


def _mask(mask: Tensor, rows: int) -> Tensor:
    flat = mask.reshape(-1).bool()
    if len(flat) != rows:
        raise ConfigError(f"keep() gave {len(flat):,} positions for {rows:,} rows of activations")
    return flat
