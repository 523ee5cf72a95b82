"""Typed records of rollouts, whose tokens are columns of numbers and never Python lists.

    Rollout ── trajectory ──► Step ── tokens ──► StepTokens   int32 ids, uint8 masks, float32 logprobs
                                                     └──────► RoutedExperts   uint8 [rows, layers, topk], as it came

    TrainingSample      one token sequence with what to learn from it; experts stay a list of chunks until they are written

A rollout and its parts check themselves when they are made, so code that holds one can rely on its lengths. Advantage, temperature and environment are one value a sample and positions
are implied: a token costs 4 bytes of id, 4 of logprob and 1 of mask. Values by token (`TOKEN_COLUMNS`) are optional. Records that there are many of are hidden from the garbage collector (gc=False; they form no
cycles): it would walk 15,000 of them a step on the event loop's time.
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self

import msgspec
import numpy as np

from headrace.errors import ConfigError, RolloutRefused

ALL_ENVS = "all"
"""Stands for every environment in metric keys, so no environment may be called that."""
Mode = Literal["rl", "sft"]
TOKEN_COLUMNS = ("advantages", "loss_weights", "reference_logprobs")
"""Optional float32 columns with a value for each token. On the wire they are `completion_advantages` and so on."""
Group = tuple[str, int | str, int | str | None]
"""(env_name, example_id, draw)."""

# Characters decoded at a time: a2b_base64 holds the GIL, and 192 KiB take 0.5 ms.
_BASE64_SLICE = 192 << 10


def check_env_name(name: str) -> str:
    """The name, if an environment may have it; ConfigError otherwise."""
    if not isinstance(name, str) or not name or name == ALL_ENVS or "/" in name or len(name) > 200:
        raise ConfigError(
            f"an environment cannot be called {name!r}: expected a name without '/' other than {ALL_ENVS!r}, which stands for "
            "all environments in metric keys. Rename the environment"
        )
    return name


class RoutedExperts(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """Which experts every token was routed to, as the engine sent it: raw bytes, or base64 text from older servers.

    Row r belongs to token `start + r` of the step's prompt and completion.
    """

    data: Any
    """Bytes, a view, an array, or base64 text."""
    shape: tuple[int, int, int]
    start: int = 0
    dtype: Literal["uint8"] = "uint8"

    def __post_init__(self) -> None:
        if len(self.shape) != 3 or min(self.shape) < 0 or self.shape[1] * self.shape[2] < 1 or self.start < 0:
            raise RolloutRefused(
                "routing", f"routed experts have shape {self.shape} from token {self.start} on, expected [rows, layers, topk]"
            )  # fmt: skip
        size, unit = self.shape[0] * self.row_bytes, "bytes"
        if isinstance(self.data, str):
            found, size, unit = len(self.data), -(-size // 3) * 4, "characters of base64"
        elif isinstance(self.data, (bytes, bytearray, memoryview, np.ndarray)):
            found = memoryview(self.data).nbytes
        else:
            raise RolloutRefused(
                "routing", f"the data of routed experts is a {type(self.data).__name__}, expected bytes or base64"
            )
        if found != size:
            raise RolloutRefused(
                "routing",
                f"routed experts of shape {list(self.shape)} need {size:,} {unit}, got {found:,}: the engine and its reply disagree",
            )

    @property
    def row_bytes(self) -> int:
        return self.shape[1] * self.shape[2]

    @property
    def end(self) -> int:
        """The first token that has no row."""
        return self.start + self.shape[0]

    def rows(self, first: int, stop: int) -> np.ndarray:
        """The rows of the tokens [first, stop). A view of raw bytes; of base64 only these rows are decoded."""
        if not self.start <= first <= stop <= self.end:
            raise IndexError(f"tokens {first} to {stop} asked for, rows of {self.start} to {self.end} are there")
        shape = (stop - first, *self.shape[1:])
        begin, end = (first - self.start) * self.row_bytes, (stop - self.start) * self.row_bytes
        if isinstance(self.data, str):
            return _decoded(self.data, begin, end).reshape(shape)
        flat = np.frombuffer(self.data, np.uint8) if not isinstance(self.data, np.ndarray) else self.data.reshape(-1)
        return flat[begin:end].reshape(shape)


def _decoded(text: str, begin: int, end: int) -> np.ndarray:
    """Bytes [begin, end) of decoded base64 text. 4 characters are 3 bytes, so only the characters of these bytes are decoded."""
    first, last = begin // 3, -(-end // 3)
    pieces = [np.empty(0, np.uint8)]
    for at in range(first, last, _BASE64_SLICE // 4):
        stop = min(at + _BASE64_SLICE // 4, last)
        try:
            raw = binascii.a2b_base64(text[at * 4 : stop * 4], strict_mode=True)
        except ValueError as error:
            raise RolloutRefused("routing", f"routed experts are not base64 ({error})") from error
        if len(raw) < min(end, stop * 3) - at * 3:
            raise RolloutRefused("routing", f"routed experts are not base64: it ends at byte {at * 3 + len(raw):,}")
        pieces.append(np.frombuffer(raw, np.uint8))
    return np.concatenate(pieces)[begin - first * 3 : end - first * 3]


class VersionSpan(NamedTuple):
    """Completion tokens [start, end) that one version of the weights sampled, as the engine named it."""

    version: str
    start: int
    end: int


class StepTokens(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """The tokens of one turn: the whole context it was given, and what the model said."""

    prompt_ids: np.ndarray
    prompt_mask: np.ndarray
    completion_ids: np.ndarray
    completion_mask: np.ndarray
    completion_logprobs: np.ndarray
    routed_experts: RoutedExperts | None = None
    multimodal: Mapping[str, Any] | None = None
    """Fields of images and the like for the whole context, carried along untouched."""
    version_spans: tuple[VersionSpan, ...] = ()
    """Which weights sampled which completion tokens, where the engine said so."""
    columns: Mapping[str, np.ndarray] = {}
    """Those of TOKEN_COLUMNS that the rollout has, for the completion tokens."""

    def __post_init__(self) -> None:
        columns = {name: (getattr(self, name), dtype) for name, dtype in STEP_COLUMNS.items()}
        columns |= {f"completion_{name}": (column, _FLOAT) for name, column in self.columns.items()}
        for name, (column, dtype) in columns.items():
            if not isinstance(column, np.ndarray) or column.dtype != dtype or column.ndim != 1:
                raise TypeError(f"{name} must be one row of {dtype}, got {column!r:.80}")
            side = name.partition("_")[0]
            wanted = len(columns[f"{side}_ids"][0])
            if len(column) != wanted:
                raise RolloutRefused(
                    "wrong_length",
                    f"a step has {wanted} {side} tokens and a {name} of {len(column)}: both must be equally long",
                )
            if name.endswith("_mask") and column.max(initial=0) > 1:
                raise RolloutRefused("wrong_type", f"{name} holds numbers other than 0 and 1")
            if dtype == _FLOAT and not np.isfinite(column).all():
                at = int(np.flatnonzero(~np.isfinite(column))[0])
                raise RolloutRefused(
                    "not_finite", f"{name} of {side} token {at} is {column[at]}: nothing can be learnt from it"
                )
        if (routed := self.routed_experts) is not None and routed.end > self.length:
            raise RolloutRefused(
                "routing",
                f"a step has {self.length} tokens and routed experts up to token {routed.end}: they belong to another request",
            )

    @classmethod
    def answered(cls, prompt_ids: np.ndarray, completion_ids: np.ndarray, logprobs: np.ndarray, **more: Any) -> Self:
        """A turn whose completion is learnt, and whose context is not."""
        return cls(
            prompt_ids=prompt_ids, prompt_mask=np.zeros(len(prompt_ids), np.uint8), completion_ids=completion_ids,
            completion_mask=np.ones(len(completion_ids), np.uint8), completion_logprobs=logprobs, **more,
        )  # fmt: skip

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    def slim(self) -> StepTokens:
        """The turn without the contents of its context, its experts and its images. The context keeps its length: zeros with a stride of 0, which take no
        memory."""
        n = len(self.prompt_ids)
        ids, mask = np.ndarray(n, np.int32, bytes(4), strides=(0,)), np.ndarray(n, np.uint8, bytes(1), strides=(0,))
        return msgspec.structs.replace(
            self, prompt_ids=ids, prompt_mask=mask, routed_experts=None, multimodal=None, columns={}
        )


_FLOAT = np.dtype(np.float32)
STEP_COLUMNS = {
    "prompt_ids": np.dtype(np.int32), "prompt_mask": np.dtype(np.uint8), "completion_ids": np.dtype(np.int32),
    "completion_mask": np.dtype(np.uint8), "completion_logprobs": _FLOAT,
}  # fmt: skip
"""The columns that every turn has, and their types."""


class Step(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """One turn: messages as they were sent, and their tokens once there are some."""

    prompt: Any = ()
    """Messages of the whole context (or one string)."""
    completion: Any = ()
    tokens: StepTokens | None = None
    is_truncated: bool = False


class Rollout(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One try at one example."""

    example_id: int | str
    env_name: str
    reward: float
    trajectory: tuple[Step, ...]
    draw: int | str | None = None
    """Which draw of the example: two draws of one example are two groups. A pipeline writes the task's number here, in front of the rollout's own draw."""
    metrics: Mapping[str, float] = {}
    error: tuple[str, ...] | None = None
    """What went wrong, outermost first; None if nothing did."""
    is_truncated: bool = False
    stop_condition: str | None = None
    sampling_args: Mapping[str, Any] = {}
    timing: Mapping[str, float] = {}
    """Seconds by name: total, setup, generation, model, env."""
    state: Mapping[str, Any] = {}
    """All other fields that the environment returned; `state_columns` chooses which of them are saved."""
    policy_version: int = 0
    run: str = ""
    mode: Mode = "rl"
    split_at: tuple[int, ...] = ()
    """For each sample after the first, the token at which its context first differs from the sample before it."""

    def __post_init__(self) -> None:
        try:
            check_env_name(self.env_name)
        except ConfigError as error:
            raise RolloutRefused("env_name", str(error)) from error
        if not np.isfinite(self.reward):
            raise RolloutRefused(
                "not_finite", f"rollout of example {self.example_id!r} in {self.env_name} has reward {self.reward}"
            )

    @property
    def group(self) -> Group:
        """The key of the rollout's group. Rollouts of one group are compared with each other."""
        return self.env_name, self.example_id, self.draw

    @property
    def temperature(self) -> float:
        value = self.sampling_args.get("temperature")
        return 1.0 if value is None else float(value)

    def slim(self) -> Rollout:
        """The rollout without the tokens of its contexts, its experts and its images, which are the bulk of it."""
        return msgspec.structs.replace(
            self,
            trajectory=tuple(
                s if s.tokens is None else msgspec.structs.replace(s, tokens=s.tokens.slim()) for s in self.trajectory
            ),
        )

    @property
    def completion_length(self) -> int:
        """Tokens that the model wrote, over all turns."""
        return sum(len(s.tokens.completion_ids) for s in self.trajectory if s.tokens is not None)


class ExpertRows(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """The routed experts of a sample, one row a token, as the chunks they came in: nothing is joined before it is written."""

    chunks: tuple[np.ndarray, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        layers, topk = self.chunks[0].shape[1:]
        return sum(len(c) for c in self.chunks), layers, topk

    def joined(self) -> np.ndarray:
        """All rows in one array: a copy."""
        return np.concatenate(self.chunks)

    def first(self, rows: int) -> ExpertRows:
        """The chunks of the first `rows` rows; views."""
        kept: list[np.ndarray] = []
        for chunk in self.chunks:
            if rows <= 0:
                break
            kept.append(chunk[:rows])
            rows -= len(chunk)
        return ExpertRows(chunks=tuple(kept))


class TrainingSample(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """One sequence to learn from, made by `interleave_rollout`."""

    env_name: str
    example_id: int | str
    ids: np.ndarray
    mask: np.ndarray
    """1 where a token is learnt."""
    logprobs: np.ndarray
    """Log-prob of each token under the policy that sampled it; 0 for tokens that no policy sampled."""
    prompt_length: int
    """Tokens before the first completion."""
    draw: int | str | None = None
    reward: float = 0.0
    advantage: float = 0.0
    temperature: float = 1.0
    policy_version: int = 0
    run: str = ""
    mode: Mode = "rl"
    experts: ExpertRows | None = None
    multimodal: Mapping[str, Any] | None = None
    columns: Mapping[str, np.ndarray] = {}
    """Those of TOKEN_COLUMNS that the rollout has, one value a token. NaN among the advantages stands for the sample's advantage."""
    split_at: int | None = None
    """The token at which its first context differs from the rollout's sample before it; None for the first sample of a rollout."""

    def __len__(self) -> int:
        return len(self.ids)

    def truncated(self, length: int) -> TrainingSample:
        """The sample's first `length` tokens; views."""
        if len(self) <= length:
            return self
        return msgspec.structs.replace(
            self, ids=self.ids[:length], mask=self.mask[:length], logprobs=self.logprobs[:length],
            prompt_length=min(self.prompt_length, length), experts=None if self.experts is None else self.experts.first(length),
            columns={name: column[:length] for name, column in self.columns.items()},
        )  # fmt: skip


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two sequences begin with alike."""
    shared = min(len(a), len(b))
    differs = np.flatnonzero(a[:shared] != b[:shared])
    return int(differs[0]) if len(differs) else shared


def rollouts_by_group(rollouts: Sequence[Rollout]) -> dict[Group, list[int]]:
    """Indices of the members of each group. Groups are in the order of their first member."""
    groups: dict[Group, list[int]] = {}
    for at, rollout in enumerate(rollouts):
        groups.setdefault(rollout.group, []).append(at)
    return groups
