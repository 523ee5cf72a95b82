"""Record of a run's samples: which source and window each one came from.

    flight.jsonl, a line an interval:
      {"first": 41, "samples": [984, 1008, 1032], "picks": "AAABAAAA…", "opened": [[1003, 43, 1, 0, 882, 0]]}

      first      the training step that begins at samples[0]; the last entry of `samples` is where the last step ends
      picks      base64 of uint16: the source of every sample of these steps, 65535 for one with nothing to learn
      opened     [sample, lane, source, epoch, position, offset]: the windows whose first block these samples delivered
      skipped    [[from, to], …]: samples that were passed over between steps; `skipped_picks` holds their sources
      sources    the names that the numbers mean, where they are not those of the run's config

Two bytes a sample and a row a window are enough: the source of a sample and the window that was open name its block, because
a lane delivers the blocks of a window in their order. After a kill the steps since the checkpoint are recorded again; a
line that begins at step n replaces everything from n on.

Lines are checked one by one; what is kept of them is two bytes a sample. A line that is torn or invalid is a hole: steps outside it can be
shown, and steps that depend on it are refused by name.
"""

from __future__ import annotations

import base64
import itertools
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from headrace.errors import ConfigError, FileCorrupt
from headrace.files import read_lines
from headrace.loader.windows import WindowStart

FILLER = 0xFFFF
_MAX_LINE = 64 << 20
_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]


class _Line(msgspec.Struct):
    """A line of the file; picks are decoded from base64."""

    first: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
    samples: Annotated[list[_Number], msgspec.Meta(min_length=2)]
    picks: bytes
    opened: list[tuple[_Number, _Number, _Number, _Number, _Number, _Number]] = []
    skipped: list[tuple[_Number, _Number]] | None = None
    skipped_picks: bytes = b""
    sources: Annotated[list[str], msgspec.Meta(max_length=FILLER - 1)] | None = None
    lanes: _Count | None = None
    window_blocks: int | None = None
    shuffle_chunks: int = 1
    """Earlier versions shuffled chunk by chunk, and did not say so."""


class OpenedWindow(NamedTuple):
    """A window, and the sample that was its first block."""

    sample: int
    start: WindowStart


class SamplePlace(NamedTuple):
    """Which block of which window a sample is."""

    sample: int
    lane: int
    source: int
    """-1: a filler."""
    window: OpenedWindow | None
    block: int
    skipped: bool


@dataclass(slots=True)
class _Stretch:
    """Consecutive samples that one line records."""

    begin: int
    picks: np.ndarray
    """The source of every sample, as an index into the record's names."""
    opened: np.ndarray
    """A row of six numbers for each window, as in the file but for the source, which is an index into the record's names."""

    @property
    def end(self) -> int:
        return self.begin + len(self.picks)

    def cut(self, sample: int) -> None:
        """Forget the samples from `sample` on: a later line replaces them."""
        self.picks, self.opened = self.picks[: sample - self.begin], self.opened[self.opened[:, 0] < sample]


class _ParsedLine(NamedTuple):
    first: int
    """Number of the first step."""
    steps: Sequence[tuple[int, int]]
    """Begin and end of every step."""
    stretch: _Stretch


class SampleRecord:
    """A run's flight.jsonl as it was when it was opened; lines that are appended later are not seen."""

    def __init__(self, path: Path, *, lanes: int, names: Sequence[str]) -> None:
        """Read the lines of a file.

        Args:
            path: The file.
            lanes: Lanes of the run, for lines of version 0.1, which do not name them.
            names: The sources of the run's config.
        """
        self.path = path
        self.lanes = lanes
        self.sizes: dict[str, Any] = {}
        """`TextDataset.sizes` of the run, as far as the lines name them."""
        self.names = list(names)
        self._configured = len(self.names)
        """The sources of the config, then any that only older lines know."""
        self.damaged: list[tuple[int, str]] = []
        """(line, why) of the lines that cannot be used."""
        self._numbers, self._begins, self._ends = array("q"), array("q"), array("q")
        """Of every recorded step: its number, its first sample, and the sample after its last."""
        self._stretches: list[_Stretch] = []
        for line in self._parsed_lines():
            self._append(line)
        self._stretch_begins = [stretch.begin for stretch in self._stretches]
        opened = np.concatenate([np.empty((0, 6), np.int64), *(stretch.opened for stretch in self._stretches)])
        self._opened = opened[np.lexsort((opened[:, 0], opened[:, 2], opened[:, 1]))]
        self._opened_keys = self._opened[:, 1] * (1 << 17) + self._opened[:, 2]

    def _append(self, line: _ParsedLine) -> None:
        """Add a line in place of everything from its first step and sample on."""
        begin, stretches = line.stretch.begin, self._stretches
        kept = min(bisect_left(self._numbers, line.first), bisect_left(self._begins, begin))
        begins, ends = zip(*line.steps, strict=True)
        numbers = range(line.first, line.first + len(line.steps))
        for column, new in ((self._numbers, numbers), (self._begins, begins), (self._ends, ends)):
            del column[kept:]
            column.extend(new)
        while stretches and stretches[-1].begin >= begin:
            stretches.pop()
        if stretches and stretches[-1].end > begin:
            stretches[-1].cut(begin)
        stretches.append(line.stretch)

    # ------------------------------------------------------------------------------------------- steps

    @property
    def last_step(self) -> int:
        """The last step that is recorded; 0 if none is."""
        return self._numbers[-1] if self._numbers else 0

    def steps(self) -> Iterator[tuple[int, int, int]]:
        """(step, first sample, sample after the last) of every recorded step, in order."""
        return zip(self._numbers, self._begins, self._ends, strict=True)

    def span(self, step: int) -> range:
        """The samples of a step."""
        if step < 1:
            raise ConfigError(f"step {step} does not exist: steps count from 1")
        i = bisect_left(self._numbers, step)
        if i < len(self._numbers) and self._numbers[i] == step:
            return range(self._begins[i], self._ends[i])
        if step > self.last_step:
            torn = f" (line {self.damaged[-1][0]} of {self.path} is damaged)" if self.damaged else ""
            raise ConfigError(
                f"step {step} is not recorded yet: the last step in {self.path} is {self.last_step}{torn}. Steps are written "
                "down every run.log_every steps; ask for an earlier one, or wait"
            )
        raise FileCorrupt(f"{self._hole()} Step {step} cannot be shown; {self._recorded_steps()} can.")

    def step_of(self, sample: int) -> int | None:
        """The step that delivered a sample; None if none did."""
        i = bisect_right(self._begins, sample) - 1
        return self._numbers[i] if i >= 0 and sample < self._ends[i] else None

    # ----------------------------------------------------------------------------------------- samples

    def place(self, sample: int) -> SamplePlace:
        """Which block of which window a recorded sample is."""
        lane = sample % self.lanes
        stretch, skipped = self._stretch(sample), self.step_of(sample) is None
        source = int(stretch.picks[sample - stretch.begin])
        if source == FILLER:
            return SamplePlace(sample, lane, -1, None, 0, skipped)
        windows = self._rows(lane, source)
        at = int(np.searchsorted(windows[:, 0], sample, side="right")) - 1
        if at < 0:
            raise FileCorrupt(
                f"{self.path} records sample {sample} of source {self.names[source]} in lane {lane}, but no window it could "
                f"come from. {self._hole()} {self._recorded_steps()} can be shown where their windows are recorded."
            )
        window = _window(windows[at].tolist())
        picks = self._lane_picks(lane, window.sample, sample)
        block = sum(int(np.count_nonzero(p == source)) for _, p in picks)
        return SamplePlace(sample, lane, source, window, block, skipped)

    def windows(self, lane: int, source: int) -> list[OpenedWindow]:
        """The windows that a lane opened of a source, in the order in which it did."""
        return [_window(row) for row in self._rows(lane, source).tolist()]

    def sample_of(self, lane: int, source: int, window: OpenedWindow, block: int) -> int | None:
        """The sample that is block number `block` of a window; None if the record ends before."""
        for first, picks in self._lane_picks(lane, window.sample, None):
            found = np.flatnonzero(picks == source)
            if block < len(found):
                return first + int(found[block]) * self.lanes
            block -= len(found)
        return None

    # ----------------------------------------------------------------------------------- picks and windows

    def _rows(self, lane: int, source: int) -> np.ndarray:
        key = lane * (1 << 17) + source
        low, high = np.searchsorted(self._opened_keys, [key, key + 1])
        return self._opened[low:high]

    def _lane_picks(self, lane: int, begin: int, end: int | None) -> Iterator[tuple[int, np.ndarray]]:
        """(sample, the picks of this sample and of the lane's next ones), from `begin` to `end` or to the record's end."""
        at = begin + (lane - begin) % self.lanes
        last = self._stretches[-1].end
        until = last if end is None else min(end, last)
        while at < until:
            stretch = self._stretch(at)
            picks = stretch.picks[at - stretch.begin : until - stretch.begin : self.lanes]
            yield at, picks
            at += len(picks) * self.lanes

    def _stretch(self, sample: int) -> _Stretch:
        i = bisect_right(self._stretch_begins, sample) - 1
        if i >= 0 and sample < self._stretches[i].end:
            return self._stretches[i]
        raise FileCorrupt(
            f"{self._hole()} Sample {sample} is not recorded, and block numbers cannot be counted across it; {self._recorded_steps()} "
            "can be shown as far as their windows were opened outside the hole."
        )

    def _hole(self) -> str:
        if not self.damaged:
            return f"{self.path} has a gap."
        line, why = self.damaged[0]
        more = f" (and {len(self.damaged) - 1} more)" if len(self.damaged) > 1 else ""
        return f"Line {line} of {self.path} is damaged: {why}{more}."

    def _recorded_steps(self) -> str:
        """The steps that are recorded, as words."""
        runs: list[list[int]] = []
        for number in self._numbers:
            if runs and runs[-1][1] + 1 == number:
                runs[-1][1] = number
            else:
                runs.append([number, number])
        shown = ", ".join(f"{a}–{b}" for a, b in runs[:8]) + (", …" if len(runs) > 8 else "")
        return f"steps {shown}" if runs else "no step"

    # ----------------------------------------------------------------------------------------- parsing

    def _parsed_lines(self) -> Iterator[_ParsedLine]:
        """The valid lines, in the order of the file."""
        try:
            for line in read_lines(self.path, _MAX_LINE, follow=True):
                try:
                    parsed = self._parse(line.text)
                except (ValueError, OverflowError, RecursionError) as error:
                    self.damaged.append((line.number, str(error)))
                    continue
                yield parsed
        except FileNotFoundError:
            raise FileCorrupt(f"{self.path} is missing: the run did not record it") from None

    def _parse(self, text: bytes | None) -> _ParsedLine:
        """A checked line; an error names the problem."""
        if text is None:
            raise ValueError(f"it is longer than {_MAX_LINE:,} bytes")
        line = msgspec.json.decode(text, type=_Line)
        delivered, passed = np.frombuffer(line.picks, "<u2"), np.frombuffer(line.skipped_picks, "<u2")
        skipped = line.skipped
        if skipped is None and len(passed):  # an older line holds only their picks: they come right before its steps
            skipped = [(line.samples[0] - len(passed), line.samples[0])]
        steps, skips = _steps(line.samples, skipped or [])
        begin, end = _bounds([*steps, *skips])
        if end - begin != len(delivered) + len(passed):
            raise ValueError(f"{end - begin} samples with {len(delivered)} picks, and {len(passed)} of skipped ones")
        self.lanes = line.lanes or self.lanes
        sizes = {"lanes": line.lanes, "window_blocks": line.window_blocks, "shuffle_chunks": line.shuffle_chunks}
        self.sizes = {name: size for name, size in sizes.items() if size is not None}
        sources = self._meaning(line.sources)
        is_skipped = np.zeros(end - begin, bool)
        for low, high in skips:
            is_skipped[low - begin : high - begin] = True
        picks = np.empty(end - begin, np.uint16)
        picks[~is_skipped], picks[is_skipped] = delivered, passed
        opened = np.array(line.opened, np.int64).reshape(-1, 6)
        samples, lanes, numbers = opened[:, 0], opened[:, 1], opened[:, 2]
        if ((picks >= len(sources)) & (picks != FILLER)).any() or (numbers >= len(sources)).any():
            raise ValueError("a pick or a window names no source")
        if ((samples < begin) | (samples >= end) | (lanes != samples % self.lanes)).any():
            raise ValueError("a window was opened outside the line's samples or lanes")
        opened[:, 2] = sources[numbers]
        picks = np.where(picks == FILLER, picks, sources[np.minimum(picks, len(sources) - 1)])
        return _ParsedLine(line.first, steps, _Stretch(begin, picks, opened))

    def _meaning(self, given: Sequence[str] | None) -> np.ndarray:
        """The line's numbers of sources as indices into `names`; names that are new here are appended."""
        given = self.names[: self._configured] if given is None else given
        self.names += [name for name in dict.fromkeys(given) if name not in self.names]
        if len(self.names) >= FILLER:
            raise ValueError("too many names of sources")
        return np.array([self.names.index(name) for name in given], np.uint16)


def merge_rank_records(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One line of flight.jsonl from what every rank recorded of the same steps (`Loader.drain_flight`), in rank order."""
    world, merged = len(lines), dict(lines[0])
    for line in lines[1:]:
        for name in ("first", "samples", "skipped"):
            if line.get(name) != merged.get(name):
                raise ValueError(f"ranks recorded other steps: {name} is {line.get(name)} and {merged.get(name)}")
    for name, ranges in zip(
        ("picks", "skipped_picks"), _steps(merged["samples"], merged.get("skipped", [])), strict=True
    ):
        samples = np.concatenate([np.empty(0, np.int64), *(np.arange(a, b) for a, b in ranges)])
        picks = np.empty(len(samples), "<u2")
        for rank, line in enumerate(lines):
            picks[samples % world == rank] = np.frombuffer(base64.b64decode(line.get(name, "")), "<u2")
        if name in merged:
            merged[name] = base64.b64encode(picks.tobytes()).decode()
    merged["opened"] = sorted(window for line in lines for window in line["opened"])
    return merged


def _window(row: Sequence[int]) -> OpenedWindow:
    sample, _, _, *start = row
    return OpenedWindow(sample, WindowStart(*start))


def _steps(
    samples: Sequence[int], skipped: Sequence[tuple[int, int]]
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Begin and end of every step of a line, and of every skipped range, ranges that touch as one."""
    skips: list[tuple[int, int]] = []
    for low, high in skipped:
        if skips and skips[-1][1] == low:
            skips[-1] = (skips[-1][0], high)
        else:
            skips.append((low, high))
    stops = {high: low for low, high in skips}
    return [(begin, stops.get(end, end)) for begin, end in itertools.pairwise(samples)], skips


def _bounds(ranges: list[tuple[int, int]]) -> tuple[int, int]:
    """Begin and end of ranges that follow each other without a gap; ValueError if they do not."""
    ranges = sorted(ranges)
    if any(not 0 <= begin < end for begin, end in ranges):
        raise ValueError("`samples` or `skipped` holds numbers that do not ascend")
    if any(a[1] != b[0] for a, b in itertools.pairwise(ranges)):
        raise ValueError("`skipped` begins or ends inside a step")
    return ranges[0][0], ranges[-1][1]
