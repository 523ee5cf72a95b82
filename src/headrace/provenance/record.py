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

Lines are checked one by one and kept without their picks, which are decoded for the few lines that a question needs: a
million steps in 100,000 lines are read in about 3 s and 100 MB. A line that is torn or invalid is a hole: steps outside it can be
shown, and steps that depend on it are refused by name.
"""

from __future__ import annotations

import base64
import binascii
import itertools
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from headrace.errors import ConfigError, FileCorrupt
from headrace.files import Line, open_regular, read_lines, unreadable
from headrace.loader.windows import WindowStart

FILLER = 0xFFFF
_MAX_LINE = 64 << 20
_MAX_SAMPLE = 1 << 62
_LINES_DECODED = 256
"""Lines whose decoded picks are kept."""


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


class _Segment(NamedTuple):
    """Consecutive samples of one line, and where their picks begin among the line's."""

    begin: int
    end: int
    skipped: bool
    at: int


@dataclass(slots=True, eq=False)
class _RecordLine:
    """One line, without its picks. `cut` when a later line begins before its end."""

    line: int
    offset: int
    length: int
    first: int
    starts: Sequence[int]
    """A range, where all steps are of one size."""
    stops: Sequence[int]
    segments: list[_Segment]
    opened: array[int]
    """Six numbers a window, as in the file but for the source, which is an index into the record's names."""
    sources: Sequence[int]
    """The line's numbers of sources as indices into the record's names."""

    @property
    def begin(self) -> int:
        return self.segments[0].begin

    @property
    def end(self) -> int:
        return self.segments[-1].end

    def cut(self, step: int, sample: int) -> None:
        """Forget the steps from `step` on, and the samples from `sample` on."""
        kept = max(step - self.first, 0)
        self.starts, self.stops = self.starts[:kept], self.stops[:kept]
        self.segments = [s._replace(end=min(s.end, sample)) for s in self.segments if s.begin < sample]
        kept_windows = [i for i in range(0, len(self.opened), 6) if self.opened[i] < sample]
        self.opened = array("q", [v for i in kept_windows for v in self.opened[i : i + 6]])


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
        self._picks_of = lru_cache(_LINES_DECODED)(self._decode_picks)
        lines: list[_RecordLine] = []
        for recorded in self._recorded_lines():
            while lines and (lines[-1].first >= recorded.first or lines[-1].begin >= recorded.begin):
                lines.pop()
            if lines and (lines[-1].end > recorded.begin or lines[-1].first + len(lines[-1].starts) > recorded.first):
                lines[-1].cut(recorded.first, recorded.begin)
            lines.append(recorded)
        self._segments = [(s, recorded) for recorded in lines for s in recorded.segments]
        self._segment_begins = [s.begin for s, _ in self._segments]
        self._step_lines = [recorded for recorded in lines if len(recorded.starts)]
        self._firsts = [recorded.first for recorded in self._step_lines]
        self._begins = [recorded.starts[0] for recorded in self._step_lines]
        opened = np.frombuffer(b"".join(recorded.opened for recorded in lines), np.int64).reshape(-1, 6)
        self._opened = opened[np.lexsort((opened[:, 0], opened[:, 2], opened[:, 1]))]
        self._opened_keys = self._opened[:, 1] * (1 << 17) + self._opened[:, 2]

    # ------------------------------------------------------------------------------------------- steps

    @property
    def last_step(self) -> int:
        """The last step that is recorded; 0 if none is."""
        return self._step_lines[-1].first + len(self._step_lines[-1].starts) - 1 if self._step_lines else 0

    def steps(self) -> Iterator[tuple[int, int, int]]:
        """(step, first sample, sample after the last) of every recorded step, in order."""
        for recorded in self._step_lines:
            for i, (start, stop) in enumerate(zip(recorded.starts, recorded.stops, strict=True)):
                yield recorded.first + i, start, stop

    def span(self, step: int) -> range:
        """The samples of a step."""
        if step < 1:
            raise ConfigError(f"step {step} does not exist: steps count from 1")
        i = bisect_right(self._firsts, step) - 1
        if i >= 0 and step - self._firsts[i] < len(self._step_lines[i].starts):
            recorded, at = self._step_lines[i], step - self._firsts[i]
            return range(recorded.starts[at], recorded.stops[at])
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
        if i < 0:
            return None
        recorded = self._step_lines[i]
        at = bisect_right(recorded.starts, sample) - 1
        return recorded.first + at if sample < recorded.stops[at] else None

    # ----------------------------------------------------------------------------------------- samples

    def place(self, sample: int) -> SamplePlace:
        """Which block of which window a recorded sample is."""
        lane = sample % self.lanes
        segment, recorded = self._segment(sample)
        source = int(self._picks_of(recorded, segment.skipped)[segment.at + sample - segment.begin])
        if source == FILLER:
            return SamplePlace(sample, lane, -1, None, 0, segment.skipped)
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
        return SamplePlace(sample, lane, source, window, block, segment.skipped)

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
        last = self._segments[-1][0].end if self._segments else 0
        until = last if end is None else end
        while at < min(until, last):
            segment, recorded = self._segment(at)
            low, high = segment.at + at - segment.begin, segment.at + min(until, segment.end) - segment.begin
            picks = self._picks_of(recorded, segment.skipped)[low : high : self.lanes]
            yield at, picks
            at += len(picks) * self.lanes

    def _segment(self, sample: int) -> tuple[_Segment, _RecordLine]:
        i = bisect_right(self._segment_begins, sample) - 1
        if i >= 0 and sample < self._segments[i][0].end:
            return self._segments[i]
        raise FileCorrupt(
            f"{self._hole()} Sample {sample} is not recorded, and block numbers cannot be counted across it; {self._recorded_steps()} "
            "can be shown as far as their windows were opened outside the hole."
        )

    def _decode_picks(self, recorded: _RecordLine, skipped: bool) -> np.ndarray:
        """The source of every delivered, or every skipped, sample of a line. Called through the cache `_picks_of`."""
        try:
            with open(open_regular(self.path, follow=True), "rb") as handle:
                handle.seek(recorded.offset)
                value = orjson.loads(handle.read(recorded.length))
            picks = _decoded(value.get("skipped_picks" if skipped else "picks", ""))
            meant = np.array([*recorded.sources, FILLER], np.uint16)
            found = meant[np.where(picks == FILLER, len(recorded.sources), picks)]
            if len(found) < max(s.at + s.end - s.begin for s in recorded.segments if s.skipped is skipped):
                raise ValueError("there are fewer than there were")
            return found
        except (OSError, ValueError, AttributeError, IndexError) as error:
            sentence = (
                f"the picks in line {recorded.line} of {self.path} are damaged ({error}): the steps from {recorded.first} to "
                f"{recorded.first + len(recorded.starts) - 1}, and blocks of windows that were open then, cannot be shown"
            )
            if isinstance(error, OSError):
                raise unreadable(self.path, error, sentence) from error
            raise FileCorrupt(sentence) from error

    def _hole(self) -> str:
        if not self.damaged:
            return f"{self.path} has a gap."
        line, why = self.damaged[0]
        more = f" (and {len(self.damaged) - 1} more)" if len(self.damaged) > 1 else ""
        return f"Line {line} of {self.path} is damaged: {why}{more}."

    def _recorded_steps(self) -> str:
        """The steps that are recorded, as words."""
        runs: list[list[int]] = []
        for recorded in self._step_lines:
            last = recorded.first + len(recorded.starts) - 1
            if runs and runs[-1][1] + 1 == recorded.first:
                runs[-1][1] = last
            else:
                runs.append([recorded.first, last])
        shown = ", ".join(f"{a}–{b}" for a, b in runs[:8]) + (", …" if len(runs) > 8 else "")
        return f"steps {shown}" if runs else "no step"

    # ----------------------------------------------------------------------------------------- parsing

    def _recorded_lines(self) -> Iterator[_RecordLine]:
        """The valid lines, in the order of the file."""
        try:
            for line in read_lines(self.path, _MAX_LINE, follow=True):
                try:
                    recorded = self._parse(line)
                except (ValueError, TypeError, KeyError, OverflowError) as error:
                    self.damaged.append((line.number, str(error) or type(error).__name__))
                    continue
                yield recorded
        except FileNotFoundError:
            raise FileCorrupt(f"{self.path} is missing: the run did not record it") from None

    def _parse(self, line: Line) -> _RecordLine:
        """A checked line; ValueError names the problem."""
        if line.text is None:
            raise ValueError(f"it is longer than {_MAX_LINE:,} bytes")
        value = orjson.loads(line.text)
        if not isinstance(value, dict):
            raise ValueError(f"expected an object, found {type(value).__name__}")
        first, samples = value.get("first"), _ascending(value.get("samples"))
        if type(first) is not int or not 1 <= first < _MAX_SAMPLE:
            raise ValueError("`first` is not a step")
        passed, skipped = _coded_count(value.get("skipped_picks", "")), value.get("skipped")
        if skipped is None and passed:  # an older line that holds only their picks: they come right before its steps
            skipped = [[samples[0] - passed, samples[0]]]
        stops, segments = _segments(samples, _joined(skipped or []))
        counts = [sum(s.end - s.begin for s in segments if s.skipped is kind) for kind in (False, True)]
        coded = [_coded_count(value.get("picks", "")), passed]
        if counts != coded:
            raise ValueError(f"{counts[0]} samples with {coded[0]} picks, {counts[1]} skipped with {coded[1]}")
        self._take_sizes(value)
        sources = self._meaning(value.get("sources"))
        opened = self._windows_of(value.get("opened", []), segments[0].begin, segments[-1].end, sources)
        return _RecordLine(
            line.number, line.offset, len(line.text), first, samples[:-1], stops, segments, opened, sources
        )

    def _take_sizes(self, value: dict[str, Any]) -> None:
        lanes = value.get("lanes", self.lanes)
        if type(lanes) is not int or not 1 <= lanes <= 1 << 16:
            raise ValueError("`lanes` is not a number of lanes")
        self.lanes = lanes
        # Earlier versions shuffled chunk by chunk, and did not say so.
        self.sizes = {"shuffle_chunks": 1} | {
            n: value[n] for n in ("lanes", "window_blocks", "shuffle_chunks") if n in value
        }

    def _windows_of(self, opened: list[list[int]], begin: int, end: int, sources: Sequence[int]) -> array[int]:
        found = array("q")
        for sample, lane, source, *start in opened:
            if not (begin <= sample < end and lane == sample % self.lanes and 0 <= source < len(sources)):
                raise ValueError("a window was opened outside the line's samples, lanes or sources")
            if len(start) != 3 or min(start) < 0 or max(start) >= _MAX_SAMPLE:
                raise ValueError("a window starts nowhere")
            found.extend((sample, lane, sources[source], *start))
        return found

    def _meaning(self, given: object) -> Sequence[int]:
        """The line's numbers of sources as indices into `names`; names that are new here are appended."""
        if given is None:
            return range(self._configured)
        if not isinstance(given, list) or not all(isinstance(n, str) for n in given) or len(given) >= FILLER:
            raise ValueError("`sources` is not a list of names")
        for name in given:
            if name not in self.names:
                if len(self.names) >= FILLER - 1:
                    raise ValueError("too many names of sources")
                self.names.append(name)
        return [self.names.index(n) for n in given]


def merge_rank_records(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One line of flight.jsonl from what every rank recorded of the same steps (`Loader.drain_flight`), in rank order."""
    world, merged = len(lines), dict(lines[0])
    for line in lines[1:]:
        for name in ("first", "samples", "skipped"):
            if line.get(name) != merged.get(name):
                raise ValueError(f"ranks recorded other steps: {name} is {line.get(name)} and {merged.get(name)}")
    stops, _ = _segments(merged["samples"], _joined(merged.get("skipped", [])))
    delivered = list(zip(merged["samples"], stops, strict=False))
    for name, ranges in (("picks", delivered), ("skipped_picks", merged.get("skipped", []))):
        samples = np.concatenate([np.empty(0, np.int64), *(np.arange(a, b) for a, b in ranges)])
        picks = np.empty(len(samples), "<u2")
        for rank, line in enumerate(lines):
            picks[samples % world == rank] = _decoded(line.get(name, ""))
        if name in merged:
            merged[name] = base64.b64encode(picks.tobytes()).decode()
    merged["opened"] = sorted(window for line in lines for window in line["opened"])
    return merged


def _window(row: Sequence[int]) -> OpenedWindow:
    sample, _, _, *start = row
    return OpenedWindow(sample, WindowStart(*start))


def _ascending(value: object) -> Sequence[int]:
    """Ascending integers; as a range if they are evenly spaced, which is the rule."""
    if not isinstance(value, list) or not value or type(value[0]) is not int or type(value[-1]) is not int:
        raise ValueError("`samples` is not a list of integers")
    if value[0] < 0 or value[-1] >= _MAX_SAMPLE:
        raise ValueError("`samples` is out of bounds")
    if len(value) > 1 and type(value[1]) is int and value[1] > value[0]:
        even = range(value[0], value[-1] + 1, value[1] - value[0])
        if len(even) == len(value) and list(even) == value:
            return even
    if not all(type(n) is int for n in value) or any(a >= b for a, b in itertools.pairwise(value)):
        raise ValueError("`samples` does not ascend")
    return value


def _coded_count(value: object) -> int:
    """How many numbers a text of base64 holds, without decoding it."""
    if not isinstance(value, str) or len(value) % 4:
        raise ValueError("picks are not base64")
    size = len(value) // 4 * 3 - value[-2:].count("=")
    if size % 2:
        raise ValueError("picks end in the middle of a number")
    return size // 2


def _decoded(value: Any) -> np.ndarray:
    try:
        raw = base64.b64decode(value, validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise ValueError("picks are not base64") from None
    if len(raw) % 2:
        raise ValueError("picks end in the middle of a number")
    return np.frombuffer(raw, "<u2")


def _joined(ranges: list[list[int]]) -> list[tuple[int, int]]:
    """Ranges in order, those that touch as one."""
    joined: list[tuple[int, int]] = []
    for begin, end in ranges:
        if type(begin) is not int or type(end) is not int or not 0 <= begin < end < _MAX_SAMPLE:
            raise ValueError("`skipped` holds something else than ranges")
        if joined and begin < joined[-1][1]:
            raise ValueError("`skipped` does not ascend")
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined


def _segments(samples: Sequence[int], skipped: Sequence[tuple[int, int]]) -> tuple[Sequence[int], list[_Segment]]:
    """The end of each step, and the segments of a line in order. A skip comes before, after or between whole steps."""
    begin, last = samples[0], samples[-1]
    stops: Sequence[int] = samples[1:]
    segments: list[_Segment] = []
    delivered = passed = 0
    for low, high in skipped:
        if begin < high and low < last:
            step = bisect_left(samples, low) - 1
            if step < 0 or high != samples[step + 1]:
                raise ValueError("`skipped` begins or ends inside a step")
            stops = [*stops[:step], low, *stops[step + 1 :]]
        if begin < min(low, last):
            segments.append(_Segment(begin, min(low, last), False, delivered))
            delivered += min(low, last) - begin
            begin = min(high, last)
        segments.append(_Segment(low, high, True, passed))
        passed += high - low
    if begin < last:
        segments.append(_Segment(begin, last, False, delivered))
    if not segments:
        raise ValueError("it holds no sample")
    return stops, segments
