"""Adapters for training loops that have their own DataLoader.

    data = hr.TextDataset(["jsonl:web/*.jsonl"], tokenizer="tokenizer.json", seq_len=2048)

    ds = hr.TorchDataset(data, global_batch_size=32)                       a torch IterableDataset
    DataLoader(ds, batch_size=None)                                        the batches of hr.Loader
    StatefulDataLoader(ds, batch_size=None)                                the same, with torchdata's state_dict()
    DataLoader(hr.TorchDataset(data, global_batch_size=32, batched=False), batch_size=32)      rows, collated by torch

    trainer = Trainer(..., train_dataset=hr.TorchDataset(data, global_batch_size=32, labels="hf"))
    hr.attach_to_trainer(trainer)                                          exact resume from the Trainer's checkpoints

With num_workers=0 all of them deliver what `hr.Loader` delivers, element by element, and resume exactly. `hr.Loader` remains
the one with all guarantees: it prefetches and tokenises in threads, and its batches depend on no number of workers.

With num_workers=N > 0 worker w of rank r (of W) takes the lanes of rank r + W·w of W·N. So workers share nothing and leave
nothing out, the samples of a rank stay its own, and N steps together hold the samples that N steps of `hr.Loader` would; but
which of them share a batch depends on N. A warning says so.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import traceback
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from headrace.errors import ConfigError, CursorMismatch, HeadraceError
from headrace.loader.batch_fill import FILL_KERNELS
from headrace.loader.dataset import TextDataset
from headrace.loader.loader import Loader
from headrace.loader.text_plan import TextPlan
from headrace.order import Cursor
from headrace.runtime.compiled import wait_for_kernels
from headrace.text import PACK_KERNELS

ROWS_KIND, ROWS_VERSION = "text-rows", 1
"""A state in the middle of a batch. Between batches the state is the loader's own, so that each can load the other's."""

_BATCH_ONLY = ("cu_seqlens", "max_seqlen")
"""Fields over the flattened batch, which a single row does not have."""


class TorchDataset(IterableDataset[dict[str, Any]]):
    """A torch `IterableDataset` over this rank's share of each global batch of `data`, a `TextDataset`.

    `batched=True` yields whole batches, for `DataLoader(..., batch_size=None)`. `batched=False` yields their rows one by one,
    dicts of 1-D tensors, for a DataLoader that collates them itself; with its `batch_size` at global_batch_size / dp_world_size
    it puts together the batches of `hr.Loader` again. Rows have no cu_seqlens and max_seqlen: document borders are then where
    position_ids is 0 (or ask for segment_ids=True).

    Rank and world size (`dp_rank`, `dp_world_size`) come from torch.distributed when it is initialised before the first batch, or are given. All other
    options are those of `hr.Loader`. Iterating again goes on where delivery stopped; after the end it starts the next pass.

    Workers (num_workers > 0) are started anew for every iteration, and then begin the same pass again, also after an early
    break. `set_epoch(n)` before epoch n gives them the next pass, and so does persistent_workers=True. Persistent workers go on
    after an early break, behind the batches that they had made ahead: those are lost.
    """

    def __init__(
        self,
        data: TextDataset,
        *,
        global_batch_size: int,
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
        batched: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        refused = sorted({"pin_memory", "device"} & options.keys())
        if refused:
            raise ConfigError(
                f"TorchDataset takes no {' or '.join(refused)}: moving batches is the DataLoader's part (its pin_memory=True), or "
                "that of hr.Loader"
            )
        self.batched = batched
        self._recipe: Mapping[str, Any] = data.recipe
        self._size = global_batch_size
        self._ranks = (dp_rank, dp_world_size)
        self._options = options
        self._state: dict[str, Any] | None = None
        """Of a dataset that came from another process and has not been used here."""
        self._loader: Loader | None = self._new_loader(data)
        self._is_worker = False
        """Whether the loader is that of one worker of a DataLoader: a rank of a larger world, in a process that no process group connects."""
        self._forget()
        # The dataset has them compiled by a thread. A worker that is forked meanwhile would compile them again for itself: so wait.
        wait_for_kernels(*PACK_KERNELS, *FILL_KERNELS)

    # -------------------------------------------------------------------------------------- iteration

    def __iter__(self) -> Iterator[dict[str, Any]]:
        _refuse_a_second_split(self.loader.world_size)
        return self._batches() if self.batched else self._rows()

    def __len__(self) -> int:
        return len(self.loader)

    def _batches(self) -> Iterator[dict[str, Any]]:
        # A generator, so that nothing happens before the first batch is asked for: a StatefulDataLoader calls iter() only to
        # look at the state, and a loader that has ended starts its next pass when it is iterated.
        loader = self.loader
        self._touched = True
        for batch in loader:  # noqa: UP028 (`yield from` would close the loader when the caller's loop ends early)
            yield batch

    def _rows(self) -> Iterator[dict[str, Any]]:
        # The open batch lives in the dataset, not here: the next iteration gets the rest of its rows.
        loader = self.loader
        self._touched = True
        iter(loader)  # the next pass, if this one has ended
        while True:
            if self._batch is None:
                self._before = loader.state_dict()
                try:
                    self._batch = next(loader)
                except StopIteration:
                    return
            batch, index = self._batch, self._row
            count = len(batch["sample_index"])
            if index >= count:
                raise CursorMismatch(
                    f"state was saved after row {index} of a batch, and batches have {count} rows now: resume with the "
                    "global_batch_size and dp_world_size it was saved with, or save between batches"
                )
            self._batch, self._row = (batch, index + 1) if index + 1 < count else (None, 0)
            yield {name: value[index] for name, value in batch.items() if name not in _BATCH_ONLY}

    @property
    def loader(self) -> Loader:
        """The `hr.Loader` underneath, of this process: digest, report(), gather_state(), pieces() are its own."""
        worker, loader = get_worker_info(), self._loader
        if worker is not None and not self._is_worker:
            return self._enter(worker.id, worker.num_workers)
        if loader is None:
            return self._settle(self._new_loader(TextDataset(**self._recipe)), self._state)
        if not self._touched and self._ranks == (None, None) and _joined(loader.world_size):
            # Ranks were joined after this dataset was made, as TrainingArguments does it.
            return self._settle(self._new_loader(loader.data), None)
        return loader

    def set_epoch(self, epoch: int) -> None:
        """Start pass `epoch` over finite sources, if none is under way and it was not had yet; otherwise change nothing.

        Passes follow each other by themselves. Only workers that are started anew for each epoch need this call.
        """
        loader = self.loader
        if not self._row:
            loader.set_epoch(epoch)
            self._touched = True

    # ------------------------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """What this rank has delivered, as a plain JSON-able dict; between batches it is that of `hr.Loader`."""
        return self._saved(self.loader)

    def load_state_dict(
        self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, accept: Collection[str] = ()
    ) -> None:
        """Go on where a state was saved, here or by `hr.Loader`: one state, or the list of all ranks' states."""
        states: list[Any] = list(state) if isinstance(state, Sequence) else [state]
        found = [_inside(s) for s in states]
        rows = sorted({row for _, row in found})
        if len(rows) > 1:
            raise CursorMismatch(
                f"the states of the ranks do not belong together: they were saved after rows {', '.join(map(str, rows))} of a "
                "batch. Save all ranks at the same row."
            )
        row = rows[0] if rows else 0
        if row and self.batched:
            raise CursorMismatch(
                f"state was saved in the middle of a batch, after row {row}: load it into a dataset with batched=False, or "
                "save between batches"
            )
        self.loader.load_state_dict([inner for inner, _ in found], accept=accept)
        self._forget()
        self._row, self._touched = row, True

    def close(self) -> None:
        """Stop the threads. Iterating again goes on where delivery stopped."""
        if self._loader is not None:
            self._loader.close()

    # -------------------------------------------------------------------------------- other processes

    def __getstate__(self) -> dict[str, Any]:
        """What it takes to make this dataset anew: no open file, lock or thread goes along."""
        ranks, state = self._ranks, self._state
        loader = self._loader if get_worker_info() is not None else self.loader
        if loader is not None:
            ranks, state = (loader.rank, loader.world_size), self._saved(loader) if self._touched else None
        return {
            "batched": self.batched, "recipe": self._recipe, "size": self._size, "options": self._options,
            "ranks": ranks, "state": state,
        }  # fmt: skip

    def __setstate__(self, made: Mapping[str, Any]) -> None:
        self.batched = made["batched"]
        self._recipe, self._size, self._options = made["recipe"], made["size"], made["options"]
        self._ranks, self._state = made["ranks"], made["state"]
        self._loader, self._is_worker = None, False
        self._forget()

    def _enter(self, worker: int, workers: int) -> Loader:
        """Become the dataset of one worker of a DataLoader.

        A forked worker inherits locks that threads of its parent may have held at that moment, so it makes everything anew,
        as a spawned one has to.
        """
        made = self.__getstate__()
        rank, world = made["ranks"]
        data = TextDataset(**self._recipe)
        _check_workers(data, world, workers, self._options, made["state"])
        if worker == 0:
            warnings.warn(
                f"a TorchDataset in a DataLoader with num_workers={workers}: every worker delivers batches of its own lanes, so "
                "which samples share a batch depends on the number of workers, and so does a saved state. hr.Loader delivers "
                "the same batches whatever the number of its threads; or use num_workers=0. Workers that are started anew for an "
                "epoch begin the same pass again: call set_epoch(n) before epoch n, or set persistent_workers=True.",
                UserWarning,
                stacklevel=2,
            )
        options: dict[str, Any] = {"prefetch_batches": 0} | self._options | {"tokenizer_workers": 0}
        loader = Loader(
            data, global_batch_size=self._size * workers, dp_rank=rank + world * worker, dp_world_size=world * workers, **options
        )  # fmt: skip
        plan = loader.plan
        assert isinstance(plan, TextPlan)
        # A forked worker sees its parent's process group, and must not speak through its parent's sockets.
        plan.rank = replace(plan.rank, connected=False)
        # Workers of a single rank may end one after the other: the DataLoader goes on with the rest. Those of several ranks
        # must not, and work out by themselves when the other lanes end.
        plan.ends_alone = world == 1
        self._is_worker = True
        return self._settle(loader, made["state"])

    def _settle(self, loader: Loader, state: Mapping[str, Any] | None) -> Loader:
        self._loader, self._state = loader, None
        self._forget()
        if state is not None:
            self.load_state_dict(state)
        return loader

    def _new_loader(self, data: TextDataset) -> Loader:
        rank, world = self._ranks
        return Loader(data, global_batch_size=self._size, dp_rank=rank, dp_world_size=world, **self._options)

    def _saved(self, loader: Loader) -> dict[str, Any]:
        if not self._row:
            return loader.state_dict()
        before = self._before if self._batch is not None else loader.state_dict()
        body = {"batch": before, "rows": self._row}
        return Cursor(kind=ROWS_KIND, version=ROWS_VERSION, fingerprint=before["fingerprint"], body=body).to_dict()

    def _forget(self) -> None:
        self._touched = False
        """Something was delivered or loaded: from then on the ranks are settled."""
        self._batch: dict[str, Any] | None = None
        self._before: dict[str, Any] = {}
        """The loader's state before `_batch` was taken."""
        self._row = 0
        """How many rows of the open batch were delivered. After loading: how many of the next one have been."""


def _inside(state: Mapping[str, Any]) -> tuple[Mapping[str, Any], int]:
    """The loader's state in a state, and the rows of its next batch that were delivered."""
    if not isinstance(state, Mapping) or state.get("kind") != ROWS_KIND:
        return state, 0
    cursor = Cursor.from_dict(state)
    if cursor.version != ROWS_VERSION:
        raise CursorMismatch(
            f"state was saved as version {cursor.version} of the {ROWS_KIND!r} cursor; this headrace reads version "
            f"{ROWS_VERSION}. Resume with the headrace that saved it."
        )
    batch, rows = cursor.body.get("batch"), cursor.body.get("rows")
    if not isinstance(batch, Mapping) or not isinstance(rows, int) or rows < 1:
        raise CursorMismatch(f"state is damaged: its body needs a batch and a number of rows, got rows={rows!r}")
    return batch, rows


def _joined(world_size: int) -> bool:
    """Whether torch.distributed now connects another number of ranks."""
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() != world_size


def _check_workers(
    data: TextDataset, world: int, workers: int, options: Mapping[str, Any], state: Mapping[str, Any] | None
) -> None:
    lanes, problems = data.lanes, []
    row = _inside(state)[1] if state is not None else 0
    if row and workers > 1:
        problems.append(
            f"the dataset stands in the middle of a batch, after row {row}, and batches of {workers} workers have other rows: "
            "start workers between batches, or use num_workers=1 or 0"
        )
    followed = lanes // math.gcd(lanes, world)
    """Lanes that a rank follows."""
    if followed % workers:
        fitting = ", ".join(str(n) for n in range(1, followed + 1) if followed % n == 0)
        problems.append(
            f"the {followed} lanes of a rank cannot be shared by {workers} workers: use num_workers of {fitting}, or 0"
        )
    inner = [name for name in ("tokenizer_workers", "data_loader_workers") if options.get(name)]
    if inner:
        problems.append(
            f"num_workers={workers} and {inner[0]}={options[inner[0]]} together are refused: threads and processes inside "
            f"processes fight for the same cores and stall. Leave {inner[0]} out, or use num_workers=0."
        )
    by_step = [name for name, given in (("mix_changes", data.mix_changes), ("skip", options.get("skip"))) if given]
    if by_step:
        problems.append(
            f"{' and '.join(by_step)} count steps of the run, which a worker among {workers} does not see: use num_workers=0"
        )
    if problems:
        raise ConfigError(problems)


def _refuse_a_second_split(world_size: int) -> None:
    """Accelerate splits an iterable dataset over the ranks; this one is already split, and the rest would be lost unseen."""
    if world_size == 1 or "accelerate" not in sys.modules:
        return
    for frame, _ in itertools.islice(traceback.walk_stack(sys._getframe(2)), 12):  # up to Accelerate's loader
        owner = type(frame.f_locals.get("self"))
        name = owner.__name__
        if owner.__module__ == "accelerate.data_loader" and name in ("IterableDatasetShard", "DataLoaderDispatcher"):
            raise ConfigError(
                f"this TorchDataset delivers one rank's share of {world_size}, and Accelerate's {name} would "
                "split it a second time: most samples would never be seen. In a Trainer call hr.attach_to_trainer(trainer); "
                "elsewhere do not pass its DataLoader to accelerator.prepare()."
            )


# --------------------------------------------------------------------------------- the Hugging Face Trainer


def attach_to_trainer(trainer: Any, *, columns: Sequence[str] = ("input_ids", "labels", "position_ids")) -> None:
    """Let `trainer`, a `transformers.Trainer`, train on its TorchDataset and resume exactly.

    The Trainer gets this rank's batches as they are: Accelerate neither splits them again nor reads one ahead. The data's
    position, of all ranks, is written into the trainer_state.json of every checkpoint and loaded by
    `train(resume_from_checkpoint=...)`, at any number of ranks; batches are not replayed (ignore_data_skip is set). A fresh
    `train()` goes on where the dataset stands. `columns` are the fields that the model's forward() takes: its models see
    where documents begin from position_ids.
    """
    dataset = trainer.train_dataset
    _check_trainer(trainer, dataset)
    trainer.args.ignore_data_skip = True
    pin = bool(trainer.args.dataloader_pin_memory) and torch.cuda.is_available()

    def pick(batch: Any) -> dict[str, Any]:
        return {name: batch[name] for name in columns}

    # A generator of its own: iter() draws a seed, and from the global one it would do so after a resume has restored that,
    # which would change dropout for the rest of the run.
    loader = DataLoader(dataset, batch_size=None, collate_fn=pick, pin_memory=pin, generator=torch.Generator())
    trainer.get_train_dataloader = lambda: loader
    trainer.add_callback(_position_callback(dataset))


def _check_trainer(trainer: Any, dataset: Any) -> None:
    args = trainer.args
    if not isinstance(dataset, TorchDataset) or not dataset.batched:
        raise ConfigError(
            "attach_to_trainer needs a Trainer whose train_dataset is an hr.TorchDataset with batched=True, got "
            f"{type(dataset).__name__}"
        )
    loader, problems = dataset.loader, []
    if any(type(c).__name__ == "HeadracePosition" for c in trainer.callback_handler.callbacks):
        problems.append("this Trainer was attached already: call attach_to_trainer once")
    if dataset._ranks == (None, None) and loader.world_size != args.world_size:
        problems.append(f"the dataset is for {loader.world_size} ranks, and the Trainer has {args.world_size}")
    rows = loader.global_batch_size // loader.world_size
    if rows != args.train_batch_size:
        problems.append(
            f"global_batch_size {loader.global_batch_size} gives each of {loader.world_size} ranks {rows} rows, and the Trainer "
            f"expects {args.train_batch_size}: set per_device_train_batch_size={rows}"
        )
    if dataset._options.get("labels", "shifted") == "shifted" and getattr(trainer, "compute_loss_func", None) is None:
        problems.append('transformers\' models shift labels themselves: make the dataset with labels="hf"')
    if args.dataloader_num_workers:
        problems.append(
            f"dataloader_num_workers={args.dataloader_num_workers} would make batches depend on it: leave it at 0, the dataset "
            "tokenises in threads (tokenizer_workers)"
        )
    if args.auto_find_batch_size:
        problems.append("auto_find_batch_size would change the batch size under the dataset: switch it off")
    if problems:
        raise ConfigError(problems)


def _position_callback(dataset: TorchDataset) -> Any:
    """A TrainerCallback that carries the data's position through trainer_state.json."""
    from transformers.trainer_callback import ExportableState, TrainerCallback

    class HeadracePosition(TrainerCallback, ExportableState):
        # The Trainer may make callbacks anew from a checkpoint, without arguments: hence the dataset in the closure.

        def __init__(self) -> None:
            self.data: str | None = None
            self.step = -1

        def state(self) -> dict[str, Any]:
            """Asked on the saving rank only, when the others can no longer be asked: so it was gathered before."""
            return {"args": {}, "attributes": {"data": self.data, "step": self.step}}

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            name = type(self).__name__
            saved = state.stateful_callbacks.setdefault(name, self.state())
            if state.global_step == 0:
                return
            found = saved["attributes"]["data"]
            if found is None:
                raise CursorMismatch(
                    f"the checkpoint of step {state.global_step} holds no position of the data: it was saved by a Trainer "
                    "without hr.attach_to_trainer. Resuming would train on the first batches again; resume without it, or load "
                    "a position into the dataset and start a new run from the model's weights."
                )
            dataset.load_state_dict(Cursor.from_json(found).to_dict())

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            # save_strategy="best" decides after the evaluation, which no callback sees in time.
            if control.should_save or control.should_evaluate:
                self._gather()

        on_epoch_end = on_step_end

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.step != dataset.loader.step:
                raise HeadraceError(
                    f"checkpoint-{state.global_step} was saved without the data's position: another callback asked for it after "
                    "this one was called. Add that callback to the Trainer before hr.attach_to_trainer(trainer)."
                )

        def _gather(self) -> None:
            # As text: the Trainer's indented JSON would give every number of it a line.
            self.data, self.step = json.dumps(dataset.loader.gather_state()), dataset.loader.step

    return HeadracePosition()
