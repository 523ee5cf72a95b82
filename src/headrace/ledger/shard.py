"""Ledger of one rank: the states of its groups, their eviction, and ghosts that find false evictions.

    shard = LedgerShard(LedgerSettings(width=256, mode="lru", capacity=100_000))
    states, found = shard.lookup(gids)                        zeros where there is none
    shard.store(gids, states, step=7, streams=..., epochs=...)
    shard.end_step(7)                                         sweeps and wipes; every step, also one without a store

States are rows of one tensor, and the oldest groups stand at the head of a line (slots.py), so that no step scans all groups. A step runs

    store ─► LRU overflow, never a group of this step ─► stale sweep ─► full wipe, which clears the ghosts too

A ghost is what is left of an evicted group: (mode, step, stream, epoch of that stream). A group that is written anew and has a ghost of
the same stream and epoch was evicted falsely: its stream had not ended. In another epoch it comes back by right. Ghosts are
bounded in number and in age, so the count is a lower bound once `ledger/ghosts_dropped` is above 0.

Ties are broken by gid, time is steps and never a clock, and nothing depends on slots: equal calls give equal ledgers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.errors import ConfigError, CursorMismatch, DataError, HeadraceError
from headrace.ledger.gauges import (
    CONFLICTS,
    DISTANCE,
    DROPPED,
    EVICTED,
    FALSE,
    LEDGER_SPECS,
    OCCUPANCY,
    PROTECTED,
    WIPES,
)
from headrace.ledger.owners import BUCKETS, owner_of
from headrace.ledger.settings import MAX_STEP, NO_LIMIT, EvictionMode, LedgerSettings
from headrace.ledger.slots import Slots
from headrace.metrics import MetricSpec

_KIND, _VERSION = "headrace.ledger", 1
_LRU, _STALE = 1, 2
_NAMES = {_LRU: "lru", _STALE: "stale"}
_GROUP_COLUMNS = {"last": np.int32, "stream": np.int32, "epoch": np.int32}
_GHOST_COLUMNS = {"when": np.int32, "stream": np.int32, "epoch": np.int32, "mode": np.uint8}
_SAVED = {
    "ledger/gid": np.int64, "ledger/last": np.int32, "ledger/stream": np.int32, "ledger/epoch": np.int32,
    "ghosts/gid": np.int64, **{f"ghosts/{name}": dtype for name, dtype in _GHOST_COLUMNS.items()},
}  # fmt: skip
_STORED_AS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_NONE = np.zeros(0, np.int64)


class LedgerShard:
    """The part of a ledger that one rank owns. Nothing here talks to another rank."""

    def __init__(self, settings: LedgerSettings, *, rank: int = 0, world_size: int = 1) -> None:
        if not 0 <= rank < world_size <= BUCKETS:
            raise ConfigError(f"a ledger needs 0 <= rank < world size <= {BUCKETS:,}, got rank {rank} of {world_size}")
        self.settings = settings
        self.rank, self.world_size = rank, world_size
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        self.device = _device(settings.device)
        self.step = -1
        """The last step that was stored or ended; none goes back behind it."""
        self._groups = Slots(_GROUP_COLUMNS, limit=settings.capacity or NO_LIMIT)
        """Those of closed steps are in line, by (step of the last store, gid)."""
        self._pending: list[np.ndarray] = []
        """Slots stored in the step under way, each once: they are in no line."""
        self._ghosts = Slots(_GHOST_COLUMNS, limit=settings.ghost_capacity)
        self._arena = torch.zeros((0, settings.width), dtype=self.dtype, device=self.device)
        self._active = _NONE
        self._counts: dict[str, int] = dict.fromkeys((spec.key for spec in LEDGER_SPECS), 0)
        self._happened = False

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def index_nbytes(self) -> int:
        """Bytes of everything but the states."""
        return self._groups.nbytes + self._ghosts.nbytes

    @property
    def ghosts(self) -> int:
        """Evicted groups that are remembered."""
        return len(self._ghosts)

    # -------------------------------------------------------------------------------------------- find, store

    def lookup(self, gids: Tensor | np.ndarray) -> tuple[Tensor, Tensor]:
        """(states [n, width], found bool [n]); zeros where there is none. Does not make a group younger."""
        wanted = as_gids(gids)
        self._require_owned(wanted, "looked up")
        slots, found = self._groups.find(wanted)
        at = torch.from_numpy(slots).to(self.device)
        here = at >= 0
        if found == 0:
            return torch.zeros((len(wanted), self.settings.width), dtype=self.dtype, device=self.device), here
        states = self._arena.index_select(0, at.clamp(min=0))
        if found < len(wanted):
            states.mul_(here[:, None])
        return states, here

    def store(
        self,
        gids: Tensor | np.ndarray,
        states: Tensor,
        *,
        step: int,
        streams: Tensor | np.ndarray | int = -1,
        epochs: Tensor | np.ndarray | int = 0,
    ) -> None:
        """Keep these states, detached. Of two states of a group in one step the later row stays, and the conflict is counted.

        `streams` and `epochs` say which stream each row came from, and which pass over it this is. Nothing is changed if it is refused.
        """
        wanted = as_gids(gids)
        states = states.detach()
        stream, epoch = as_tags(streams, len(wanted), "streams"), as_tags(epochs, len(wanted), "epochs")
        self._require_owned(wanted, "stored")
        self._require_step(step, "store")
        if states.shape != (len(wanted), self.settings.width):
            raise ConfigError(
                f"store at step {step} needs states of shape [{len(wanted)}, {self.settings.width}], one for each gid; got {list(states.shape)}"
            )
        if not len(wanted):
            self._open(step)
            return
        self._require_finite(wanted, states, step)
        self._require_room(wanted, step)
        self._open(step)
        groups = self._groups
        slots, found = groups.find(wanted)
        conflicts = self._refresh(slots if found == len(wanted) else slots[slots >= 0], step)
        if found < len(wanted):
            fresh = np.flatnonzero(slots < 0)
            # By gid, each with its last row: that is the one that stays.
            gid, back = np.unique(wanted[fresh][::-1], return_index=True)
            rows = fresh[::-1][back]
            conflicts += len(fresh) - len(rows)
            self._admit(gid, stream[rows], epoch[rows], step)
            slots, _ = groups.find(wanted)
        self._counts[CONFLICTS] += conflicts
        if conflicts:  # writing a slot twice in one call would leave either of the rows
            slots, last = np.unique(slots[::-1], return_index=True)
            last = len(wanted) - 1 - last
            states, stream, epoch = states[torch.from_numpy(last).to(states.device)], stream[last], epoch[last]
        groups.columns["stream"][slots] = stream
        groups.columns["epoch"][slots] = epoch
        self._arena.index_copy_(0, torch.from_numpy(slots).to(self.device), states.to(self.device, self.dtype))
        self._happened = True

    def _refresh(self, slots: np.ndarray, step: int) -> int:
        """Slots that are stored again leave the line until the step is over; how many of these rows replace one of the same step."""
        last = self._groups.columns["last"]
        older = np.sort(slots[last[slots] != step])
        older = older[np.diff(older, prepend=-1) > 0]  # each once; np.unique takes five times as long
        last[older] = step
        self._groups.leave_line(older)
        self._pending.append(older)
        return len(slots) - len(older)

    def _admit(self, gid: np.ndarray, stream: np.ndarray, epoch: np.ndarray, step: int) -> None:
        """Slots for new groups."""
        groups = self._groups
        self._recall(gid, stream, epoch, step)
        if groups.make_room(len(gid)):
            arena = torch.zeros((groups.size, self.settings.width), dtype=self.dtype, device=self.device)
            arena[: len(self._arena)] = self._arena
            self._arena = arena
        overflow = len(groups) + len(gid) - groups.limit
        if overflow > 0:
            self._evict_lru_overflow(overflow, step)
        slots = groups.take(gid)
        groups.columns["last"][slots] = step
        self._pending.append(slots)

    def _recall(self, gid: np.ndarray, stream: np.ndarray, epoch: np.ndarray, step: int) -> None:
        """Remove the ghosts of groups that are written anew, and count the false evictions among them."""
        ghosts = self._ghosts
        if not len(ghosts):
            return
        slots, found = ghosts.find(gid)
        if not found:
            return
        known = np.flatnonzero(slots >= 0)
        slots = slots[known]
        distance = step - ghosts.columns["when"][slots]
        false = (ghosts.columns["stream"][slots] == stream[known]) & (ghosts.columns["epoch"][slots] == epoch[known])
        false &= distance <= self.settings.ghost_horizon
        for mode, name in _NAMES.items():
            self._counts[FALSE[name]] += int(np.count_nonzero(false & (ghosts.columns["mode"][slots] == mode)))
        self._counts[DISTANCE] = max(self._counts[DISTANCE], int(distance[false].max(initial=0)))
        ghosts.remove(slots)

    def set_active(self, streams: Collection[int] | np.ndarray) -> None:
        """Which streams are still read, from here on. With `protect_active` their groups are left alone."""
        listed = streams if isinstance(streams, np.ndarray) else np.fromiter(streams, np.int64, len(streams))
        self._active = np.unique(listed.astype(np.int64, copy=False))

    def end_step(self, step: int) -> None:
        """Sweep and wipe, if it is their time, and let ghosts go that are too old."""
        self._require_step(step, "end_step")
        self._open(step)
        settings = self.settings
        if settings.stale_threshold is not None and step and step % settings.sweep_every == 0:
            self._sweep_stale_entries(step)
        if settings.wipe_every is not None and step and step % settings.wipe_every == 0:
            self.wipe()
        too_old = [*self._ghosts.oldest_before("when", step - settings.ghost_horizon)]
        if too_old and len(too_old[0]):
            self._ghosts.remove(np.concatenate(too_old))
        self._happened = True

    # -------------------------------------------------------------------------------------------------- forget

    def _evict_lru_overflow(self, count: int, step: int) -> None:
        gone = self._evict(step, count, _LRU, self._active if self.settings.protect_active else _NONE)
        if gone < count:  # everything left is protected: the oldest goes anyway
            self._counts[PROTECTED] += self._evict(step, count - gone, _LRU, _NONE)

    def _sweep_stale_entries(self, step: int) -> None:
        assert self.settings.stale_threshold is not None
        cutoff = step - self.settings.stale_threshold
        self._evict(cutoff, len(self._groups), _STALE, self._active if self.settings.protect_active else _NONE)

    def _evict(self, cutoff: int, limit: int, mode: int, active: np.ndarray) -> int:
        """Evict the oldest groups of steps before `cutoff` and make ghosts of them, for which the oldest ghosts make room; how many."""
        groups, found, missing = self._groups, [], limit
        for victims in groups.oldest_before("last", cutoff):
            if len(active):
                victims = victims[~np.isin(groups.columns["stream"][victims], active)]
            found.append(victims[:missing])
            missing -= len(found[-1])
            if not missing:
                break
        gone = limit - missing
        if gone:
            victims = np.concatenate(found)
            self._add_ghosts(victims, mode)
            groups.remove(victims)
            self._counts[EVICTED[_NAMES[mode]]] += gone
        return gone

    def _add_ghosts(self, victims: np.ndarray, mode: int) -> None:
        """Make ghosts of groups that are evicted; the oldest ghosts make room, and are counted."""
        groups, ghosts = self._groups, self._ghosts
        if not ghosts.limit:
            return
        over = max(len(ghosts) + len(victims) - ghosts.limit, 0)
        self._counts[DROPPED] += over
        if over:
            ghosts.remove(ghosts.first(over))
            victims = victims[-ghosts.limit :]
        ghosts.make_room(len(victims))
        slots = ghosts.take(groups.keys[victims])
        for name in ("stream", "epoch"):
            ghosts.columns[name][slots] = groups.columns[name][victims]
        ghosts.columns["when"][slots] = self.step
        ghosts.columns["mode"][slots] = mode
        ghosts.append(slots)

    def wipe(self) -> None:
        """Forget all groups, and all ghosts: what is wiped on purpose is not missed."""
        self._groups.clear()
        self._pending = []
        self._ghosts.clear()
        self._arena = self._arena[:0].clone()
        self._counts[WIPES] += 1
        self._happened = True

    # -------------------------------------------------------------------------------------------------- refuse

    def _open(self, step: int) -> None:
        """Begin `step`: what was stored in the step before takes its place in the line."""
        if step > self.step:
            if self._pending:
                self._groups.append(self._touched())
                self._pending = []
            self.step = step

    def _touched(self) -> np.ndarray:
        """The slots of the step under way, by gid."""
        slots = np.concatenate([*self._pending, _NONE])
        return slots[np.argsort(self._groups.keys[slots])]

    def _require_owned(self, gids: np.ndarray, what: str) -> None:
        if self.world_size == 1:
            return
        owners = owner_of(gids, self.world_size)
        wrong = np.flatnonzero(owners != self.rank)
        if len(wrong):
            raise HeadraceError(
                f"group {gids[wrong[0]]} belongs to rank {owners[wrong[0]]} of {self.world_size} and was {what} on rank {self.rank}"
                + (f", as were {len(wrong) - 1:,} others" if len(wrong) > 1 else "")
                + ": two ranks would keep different states of one group. Send it to its owner, as Ledger does."
            )

    def _require_step(self, step: int, what: str) -> None:
        if type(step) is not int or not 0 <= step <= MAX_STEP:
            raise ConfigError(f"{what} needs a step between 0 and {MAX_STEP:,}, got {step!r}")
        if step < self.step:
            raise HeadraceError(
                f"{what} at step {step} after step {self.step}: steps of a ledger do not go back, or it would forget by a wrong age. Load the "
                "ledger's state together with the model's."
            )

    def _require_finite(self, gids: np.ndarray, states: Tensor, step: int) -> None:
        # One sum is a tenth of the cost of looking at every number; it can overflow, so only a bad one is looked into.
        if bool(torch.isfinite(states.sum(dtype=torch.float32))):
            return
        bad = torch.nonzero(~torch.isfinite(states).all(dim=1)).flatten().cpu().numpy()
        if len(bad):
            raise DataError(
                f"the state of group {gids[bad[0]]} at step {step} is not finite"
                + (f" ({len(bad):,} groups are not)" if len(bad) > 1 else "")
                + ": kept, it would spoil every later step of the group. Lower the learning rate, or clip, and resume from the last checkpoint."
            )

    def _require_room(self, gids: np.ndarray, step: int) -> None:
        capacity = self.settings.capacity
        if capacity is None:
            return
        groups = self._groups
        if self.settings.mode is EvictionMode.LRU:
            before = sum(map(len, self._pending)) if step == self.step else 0
            if before + len(gids) > capacity:
                held = groups.keys[self._touched()] if before else gids[:0]
                needed = len(np.union1d(gids, held))
                if needed > capacity:
                    raise ConfigError(
                        f"step {step} stores {needed:,} groups on rank {self.rank} and the ledger's capacity is {capacity:,}: a group of the step under "
                        f"way is never evicted. Raise the capacity to {needed:,} or more."
                    )
        elif len(groups) + len(gids) > capacity:
            slots, _ = groups.find(gids)
            needed = len(groups) + len(np.unique(gids[slots < 0]))
            if needed > capacity:
                raise ConfigError(
                    f"step {step} brings the ledger of rank {self.rank} to {needed:,} groups and its capacity is {capacity:,}; mode "
                    f"{EvictionMode(self.settings.mode).value} evicts nothing for want of room. Raise the capacity, or use mode lru."
                )

    # -------------------------------------------------------------------------------------------------- metrics

    def metric_specs(self) -> tuple[MetricSpec, ...]:
        """Every key of `drain_metrics`."""
        return LEDGER_SPECS

    def drain_metrics(self) -> dict[str, int]:
        """What happened since the last drain, and how many groups there are; {} if nothing did."""
        if not self._happened:
            return {}
        values = {**self._counts, OCCUPANCY: len(self._groups)}
        self._counts = dict.fromkeys(self._counts, 0)
        self._happened = False
        return values

    # ---------------------------------------------------------------------------------------------------- state

    def order(self) -> np.ndarray:
        """The gids in the order in which they would be evicted: by (step of the last store, gid)."""
        return self._groups.keys[np.concatenate([self._groups.line(), self._touched()])]

    def state_arrays(self) -> tuple[dict[str, np.ndarray], dict[str, str], dict[str, Any]]:
        """Copies of everything the ledger depends on: (arrays, stored dtypes, meta), as CheckpointStore takes them."""
        groups, ghosts = self._groups, self._ghosts
        slots, gone = np.concatenate([groups.line(), self._touched()]), ghosts.line()
        states = self._arena[torch.from_numpy(slots).to(self.device)].cpu()
        arrays = {
            "ledger/gid": groups.keys[slots], **{f"ledger/{n}": groups.columns[n][slots] for n in _GROUP_COLUMNS},
            "ghosts/gid": ghosts.keys[gone], **{f"ghosts/{n}": c[gone] for n, c in ghosts.columns.items()},
            "ledger/state": (states.view(torch.uint16) if self.dtype is torch.bfloat16 else states).numpy(),
        }  # fmt: skip
        meta = {"kind": _KIND, "version": _VERSION, "step": self.step} | self._identity()
        return arrays, {"ledger/state": _STORED_AS[self.settings.dtype]}, meta

    def _identity(self) -> dict[str, Any]:
        """What a saved ledger must share with this one."""
        return {"kind": _KIND, "version": _VERSION, "width": self.settings.width, "dtype": self.settings.dtype}

    def load_state_arrays(self, parts: Sequence[tuple[Mapping[str, np.ndarray], Mapping[str, Any]]]) -> None:
        """Become the shard of the ledger whose ranks gave these (arrays, meta), one or all, on whatever number of ranks.

        Takes what this rank owns and leaves the rest. Nothing is changed if the parts do not fit.
        """
        steps = {meta.get("step") for _, meta in parts}
        differing: dict[str, tuple[Any, Any]] = {
            name: (meta.get(name, "absent"), now)
            for _, meta in parts
            for name, now in self._identity().items()
            if meta.get(name) != now
        }
        if len(steps) != 1:
            differing["step"] = (sorted(map(str, steps)), "one step")
        for arrays, meta in parts:
            differing |= _misfits(arrays, meta.get("step"), self.settings)
        if differing:
            differences = "; ".join(f"{n}: saved {a}, now {b}" for n, (a, b) in list(differing.items())[:3])
            raise CursorMismatch(
                f"the saved ledger does not fit this one ({differences}). Restore the ledger's settings, or start a new run.",
                differing,
            )
        together = {n: np.concatenate([np.asarray(a[n]) for a, _ in parts]) for n in (*_SAVED, "ledger/state")}
        step = int(parts[0][1]["step"])
        mine = self._kept(together, "ledger/gid", by=("ledger/gid", "ledger/last"))
        if len(np.unique(together["ledger/gid"][mine])) < len(mine) or len(mine) > self._groups.limit:
            raise CursorMismatch(
                f"the saved ledger has {len(mine):,} groups for rank {self.rank} of {self.world_size}, where there is room for "
                f"{self._groups.limit:,}, or the same group twice; give each rank's part once, and a capacity for all of them"
            )
        if len(np.unique(together["ghosts/gid"])) < len(together["ghosts/gid"]):
            raise CursorMismatch("the saved ledger remembers an evicted group twice; give each rank's part once")
        groups = self._groups = Slots(_GROUP_COLUMNS, limit=self._groups.limit)
        slots = _take_saved(groups, together, "ledger", mine)
        # Those of the step under way stay pending; the rest are in line, oldest first.
        open_now = together["ledger/last"][mine] == step
        groups.append(slots[~open_now])
        self._pending = [slots[open_now]]
        rows = together["ledger/state"][mine]
        self._arena = torch.zeros((groups.size, self.settings.width), dtype=self.dtype, device=self.device)
        loaded = torch.from_numpy(np.ascontiguousarray(rows))
        if self.dtype is torch.bfloat16:
            loaded = loaded.view(torch.bfloat16)
        self._arena[torch.from_numpy(slots).to(self.device)] = loaded.to(self.device)
        ghosts = self._ghosts
        ghosts.clear()
        mine = self._kept(together, "ghosts/gid", by=("ghosts/when",))[-ghosts.limit :] if ghosts.limit else _NONE
        ghosts.append(_take_saved(ghosts, together, "ghosts", mine))
        self.step = step
        self._counts = dict.fromkeys(self._counts, 0)
        self._happened = False

    def _kept(self, arrays: Mapping[str, np.ndarray], gid: str, by: Sequence[str]) -> np.ndarray:
        """Which rows this rank owns, sorted; those that compare equal stay in the order of the parts."""
        mine = np.flatnonzero(owner_of(arrays[gid], self.world_size) == self.rank)
        return mine[np.lexsort([arrays[name][mine] for name in by])]


def _take_saved(slots: Slots, arrays: Mapping[str, np.ndarray], kind: str, rows: np.ndarray) -> np.ndarray:
    """Slots for these rows of the saved arrays of a kind, with their columns."""
    slots.make_room(len(rows))
    taken = slots.take(arrays[f"{kind}/gid"][rows])
    for name, column in slots.columns.items():
        column[taken] = arrays[f"{kind}/{name}"][rows]
    return taken


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"ledger device must be one of torch's, such as cpu or cuda:0, got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"a ledger was asked to keep its states on {name}, and torch finds no CUDA device here; use cpu"
        )
    return device


def _misfits(arrays: Mapping[str, np.ndarray], step: Any, settings: LedgerSettings) -> dict[str, tuple[Any, Any]]:
    """What of saved arrays cannot be, with what it should be. A file that someone made must not reach a loop unchecked."""
    found: dict[str, tuple[Any, Any]] = {}
    if type(step) is not int or not -1 <= step <= MAX_STEP:
        return {"step": (step, "a step")}
    stored_as = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[settings.dtype]
    for name, dtype in {**_SAVED, "ledger/state": stored_as}.items():
        array = arrays.get(name)
        shape = [len(arrays.get(f"{name.partition('/')[0]}/gid", ()))]
        shape += [settings.width] if name == "ledger/state" else []
        if array is None or array.dtype != dtype or list(array.shape) != shape:
            described = "absent" if array is None else f"{array.dtype} {list(array.shape)}"
            found[name] = (described, f"{np.dtype(dtype)} {shape}")
    for name, low, high in (("ledger/last", 0, step), ("ghosts/when", 0, step), ("ghosts/mode", _LRU, _STALE)):
        if name not in found and len(arrays[name]) and not (low <= arrays[name].min() and arrays[name].max() <= high):
            found[name] = (f"{arrays[name].min()} to {arrays[name].max()}", f"{low} to {high}")
    return found


def as_gids(gids: Tensor | np.ndarray) -> np.ndarray:
    """Group ids as int64 [n] in CPU memory."""
    array = gids.detach().cpu().numpy() if isinstance(gids, Tensor) else np.asarray(gids)
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.dtype == np.uint64:
        raise ConfigError(f"group ids must be one row of signed whole numbers, got {array.dtype} {list(array.shape)}")
    return np.ascontiguousarray(array, dtype=np.int64)


def as_tags(values: Tensor | np.ndarray | int, length: int, name: str) -> np.ndarray:
    """Streams or epochs as int32 [n]; one number stands for all rows."""
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.ndim == 0:
        array = np.full(length, array)
    if array.shape != (length,) or array.dtype.kind not in "iu":
        raise ConfigError(
            f"{name} must be one whole number, or one for each of {length} gids; got {array.dtype} {list(array.shape)}"
        )
    if length and not (int(array.min()) >= -1 and int(array.max()) <= NO_LIMIT):
        raise ConfigError(f"{name} must lie between -1 and {NO_LIMIT:,}, got {int(array.min())} to {int(array.max())}")
    return array.astype(np.int32)
