"""Settings of a ledger: width, eviction mode, limits.

LedgerSettings(width=256, mode="periodic_stale", stale_threshold=64, protect_active=True)
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

from headrace.errors import ConfigError

NO_LIMIT = 2**31 - 1
"""Groups are numbered in 32 bits."""
DTYPES = ("float32", "bfloat16", "float16")
MAX_STEP = 2**31 - 2
"""Steps are kept in 32 bits: at a millisecond each, 24 days; at a second, 68 years."""


class EvictionMode(enum.Enum):
    """When a state is forgotten."""

    NONE = "none"
    FULL_WIPE = "full_wipe"
    """All of them, every `wipe_every` steps."""
    LRU = "lru"
    """Those stored longest ago, as soon as there are more than `capacity`."""
    PERIODIC_STALE = "periodic_stale"
    """Every `sweep_every` steps, those not stored for more than `stale_threshold` steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSettings:
    """How states are kept, and when they are forgotten. All numbers are steps or groups, never seconds."""

    width: int
    """Numbers in a state."""
    mode: EvictionMode | str = EvictionMode.NONE
    capacity: int | None = None
    """Groups a rank may hold. LRU needs a capacity; in other modes, exceeding it is an error. What LRU evicts therefore depends on
    the number of ranks; what goes stale does not."""
    stale_threshold: int | None = None
    sweep_every: int = 1
    wipe_every: int | None = None
    protect_active: bool = False
    """Leave alone the groups of streams that are still read (`set_active`)."""
    ghost_capacity: int = 65_536
    """Evicted groups to remember, in order to know them again: 49 bytes each. 0: false evictions are not looked for."""
    ghost_horizon: int = 10_000
    """Steps for which they are remembered."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        try:
            mode = EvictionMode(self.mode)
        except ValueError:
            raise ConfigError(
                f"ledger mode must be one of {', '.join(m.value for m in EvictionMode)}, got {self.mode!r}"
            ) from None
        object.__setattr__(self, "mode", mode)
        stale, wipes = mode is EvictionMode.PERIODIC_STALE, mode is EvictionMode.FULL_WIPE
        problems = [
            f"ledger {name} must be {wanted}, got {getattr(self, name)!r}"
            for name, wanted, holds in (
                ("width", "1 to 1,048,576 numbers", _whole(self.width, 1, 1 << 20)),
                ("capacity", f"1 to {NO_LIMIT:,} groups", self.capacity is None or _whole(self.capacity, 1, NO_LIMIT)),
                ("stale_threshold", "0 or more steps", self.stale_threshold is None or _whole(self.stale_threshold, 0, MAX_STEP)),
                ("sweep_every", "1 or more steps", _whole(self.sweep_every, 1, MAX_STEP)),
                ("wipe_every", "1 or more steps", self.wipe_every is None or _whole(self.wipe_every, 1, MAX_STEP)),
                ("ghost_capacity", f"0 to {NO_LIMIT // 2:,} groups", _whole(self.ghost_capacity, 0, NO_LIMIT // 2)),
                ("ghost_horizon", "1 or more steps", _whole(self.ghost_horizon, 1, MAX_STEP)),
                ("dtype", f"one of {', '.join(DTYPES)}", self.dtype in DTYPES),
            )
            if not holds
        ]  # fmt: skip
        if mode is EvictionMode.LRU and self.capacity is None:
            problems.append("ledger mode lru needs a capacity: how many groups a rank may hold")
        if stale != (self.stale_threshold is not None):
            problems.append(
                "ledger mode periodic_stale needs a stale_threshold: after how many steps a group is forgotten"
                if stale
                else f"ledger stale_threshold belongs to mode periodic_stale, not to {mode.value}"
            )
        if wipes != (self.wipe_every is not None):
            problems.append(
                "ledger mode full_wipe needs wipe_every: how many steps lie between two wipes"
                if wipes
                else f"ledger wipe_every belongs to mode full_wipe, not to {mode.value}"
            )
        if problems:
            raise ConfigError(problems)


def _whole(value: object, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high
