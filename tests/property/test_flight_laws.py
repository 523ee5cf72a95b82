"""Every sample of a run is told back from its records alone, and every document is found exactly where it was."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headrace.loader import merge_states
from headrace.mix import Deal
from headrace.order import Digest
from headrace.provenance.record import SampleRecord, merge_rank_records
from headrace.provenance.steps import RunProvenance
from headrace.runs.config.loading import load_config
from headrace.runs.folder import RunFolder
from headrace.runs.job import Job
from headrace.runs.recorded import recorded_run

BATCH = 4


@given(
    chunk_rows=st.lists(st.integers(0, 9), min_size=1, max_size=60), lanes=st.sampled_from([1, 2, 3, 12]),
    epoch=st.integers(0, 5), key=st.integers(0, 2**64 - 1), shuffle=st.booleans(), together=st.integers(1, 9),
)  # fmt: skip
def test_finding_a_row_in_the_deal_is_the_inverse_of_reading_it(chunk_rows, lanes, epoch, key, shuffle, together):
    deal = Deal(np.array(chunk_rows, np.int64), key=key, lanes=lanes, shuffle=shuffle, shuffle_chunks=together)
    for lane in range(lanes):
        position = 0
        for span in deal.spans(lane, epoch, 0, deal.rows):
            for chunk, row in zip(span.chunks.tolist(), span.rows.tolist(), strict=True):
                assert deal.find(epoch, chunk, row) == (lane, position)
                position += 1


odd_numbers = st.one_of(st.integers(-2, 9), st.integers(), st.floats(), st.booleans(), st.none(), st.text(max_size=3))
odd_lists = st.one_of(
    odd_numbers, st.lists(odd_numbers, max_size=4), st.lists(st.lists(odd_numbers, max_size=7), max_size=3)
)


@given(
    change=st.dictionaries(
        st.sampled_from(["first", "samples", "picks", "opened", "skipped", "skipped_picks", "sources"]),
        odd_lists,
        max_size=3,
    ),
    cut=st.integers(0, 200),
)
def test_a_line_with_anything_in_it_is_used_or_is_a_hole(tmp_path_factory, change, cut):
    path = tmp_path_factory.getbasetemp() / "odd.jsonl"
    sound = {"first": 1, "samples": [0, 2], "picks": "AAAAAA==", "opened": [[0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]]}
    odd = json.dumps(sound | change).encode()
    path.write_bytes((odd[:-cut] if cut < 20 and cut else odd) + b"\n" + json.dumps(sound).encode() + b"\n")
    record = SampleRecord(path, lanes=2, names=["a"])
    assert record.last_step >= 1
    for sample in range(2):
        assert record.place(sample).source == 0, "the sound line after it still counts"


corpora = st.lists(
    st.lists(st.one_of(st.just(0), st.integers(1, 20), st.integers(60, 150)), min_size=1, max_size=14).filter(any),
    min_size=1,
    max_size=3,
)
"""Lengths of documents, source by source; some are empty, and some longer than a window."""
legs = st.lists(
    st.fixed_dictionaries(
        {
            "world": st.sampled_from([1, 2, 4]), "steps": st.integers(1, 5), "interval": st.integers(1, 3),
            "lost": st.integers(0, 4), "skip": st.sampled_from([0, 0, 1, 2]),
        }
    ),
    min_size=1,
    max_size=3,
)  # fmt: skip


class RecordedRun:
    """A run driven by hand: loaders of any shape, killed at will, with the files that `headrace run` leaves."""

    def __init__(self, folder: Path, corpus, exhausted: str, **text) -> None:
        self.run, sources = folder / "run", []
        for i, lengths in enumerate(corpus):
            rows = [{"text": f"{i}.{n} " + "x" * length if length else ""} for n, length in enumerate(lengths)]
            (folder / f"s{i}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
            sources.append(f'[[source]]\nspec = "jsonl:{folder}/s{i}.jsonl"\nname = "s{i}"\nweight = {i + 1}\n')
        values = "\n".join(f"{k} = {json.dumps(v)}" for k, v in text.items())
        (folder / "c.toml").write_text(
            f'[run]\ndir = "{self.run}"\nseed = 3\n{"".join(sources)}[text]\nseq_len = 24\n{values}\n'
            f'[loader]\nexhausted = "{exhausted}"\n'
            f"global_batch_size = {BATCH}\nlanes = 4\ntokenizer_workers = 0\nprefetch_batches = 0\n[train]\n"
        )
        config = load_config(folder / "c.toml", env={})
        made = RunFolder.create(config, version="test")
        made.release()
        self.job = Job(config)
        self.data = self.job.dataset(records=made.records, cache=folder / "cache")
        self.saved: dict[int, dict] = {0: {}}
        self.truth: dict[int, dict[int, tuple[np.ndarray, list]]] = {}

    def fly(self, at: int, world: int, steps: int, interval: int, skip: int) -> int:
        """Take steps from the state saved after step `at`; returns the last step taken."""
        saved = self.saved[at]
        begun = saved["body"]["step"] if saved else 0
        before = [(a + 1, b + 1) for a, b in saved["body"]["skipped"]] if saved else []
        options = {
            "dp_world_size": world,
            "skip": [*before, *([(begun + 1, begun + 1 + skip)] if skip else [])],
            "record": True,
        }
        ranks = [self.job.loader(self.data, dp_rank=r, **options) for r in range(world)]
        for rank in ranks:
            if saved:
                rank.load_state_dict(saved)
        earlier, self.truth = self.truth, {n: samples for n, samples in self.truth.items() if n <= at}
        step, digests = at, []
        for n in range(steps):
            samples = {}
            for rank in ranks:
                batch = next(rank, None)
                if batch is not None:
                    pieces = rank.pieces(batch)
                    for i, g in enumerate(batch["sample_index"].tolist()):
                        own = [p for p in pieces if p.sample_index == g]
                        samples[g] = (batch["input_ids"][i].numpy().copy(), own)
            if not samples:
                break
            step += 1
            self.truth[step] = samples
            digests.append(str(Digest(sum(int(r.step_digest, 16) for r in ranks))))
            self.saved[step] = merge_states([r.state_dict() for r in ranks])
            if (n + 1) % interval == 0 or n + 1 == steps:
                self._write(ranks, step, digests)
                digests = []
        self._write(ranks, step, digests)
        for rank in ranks:
            rank.close()
        if step == at:  # all that was left was skipped: no line replaces the steps after `at`
            self.truth = earlier
        return step

    def _write(self, ranks, step: int, digests: list[str]) -> None:
        lines = [line for rank in ranks if (line := rank.drain_flight()) is not None]
        if lines:
            with open(self.run / "flight.jsonl", "a") as handle:
                handle.write(json.dumps(merge_rank_records(lines)) + "\n")
            with open(self.run / "digests.jsonl", "a") as handle:
                handle.write(json.dumps({"first": step - len(digests) + 1, "digests": digests}) + "\n")

    def skipped(self) -> dict[int, list]:
        """The pieces of the samples that the run passed over: those of a loader that does not."""
        state = self.saved[max(self.truth)]["body"]
        wanted = {g for a, b in state["skipped"] for g in range(a * BATCH, b * BATCH)}
        found = {g: [] for g in wanted}
        loader = self.job.loader(self.data)
        while wanted and (batch := next(loader, None)) is not None:
            for piece in loader.pieces(batch):
                if piece.sample_index in wanted:
                    found[piece.sample_index].append(piece)
            wanted -= set(batch["sample_index"].tolist())
        loader.close()
        return found


def flown_run(folder: str, corpus, flown, **options) -> RecordedRun:
    run = RecordedRun(Path(folder), corpus, **options)
    at = 0
    for leg in flown:
        at = run.fly(max(at - leg["lost"], 0), leg["world"], leg["steps"], leg["interval"], leg["skip"])
    assume(run.truth)  # everything may have been skipped
    return run


options = {
    "corpus": corpora, "flown": legs, "pack": st.sampled_from(["best_fit", "concat"]), "window_blocks": st.integers(1, 4),
    "shuffle": st.booleans(), "exhausted": st.sampled_from(["repeat", "drop"]),
}  # fmt: skip


@settings(max_examples=20)
@given(**options)
def test_samples_are_rebuilt_and_documents_found_after_any_kills_on_any_ranks(**asked):
    with tempfile.TemporaryDirectory() as folder:
        run = flown_run(folder, **asked)
        with RunProvenance(recorded_run(run.run)) as provenance:
            check_samples(run, provenance)
            check_documents(run, provenance, asked["corpus"], asked["exhausted"])


def check_samples(run, provenance):
    """Every sample of every step is rebuilt as it was delivered, and every step is proven by its digest."""
    assert provenance.record.last_step == max(run.truth)
    for step, samples in run.truth.items():
        span = provenance.record.span(step)
        assert list(span) == sorted(samples)
        for rebuilt in provenance.rebuild(span):
            ids, pieces = samples[rebuilt.place.sample]
            assert [p for p, _ in provenance.pieces(rebuilt, None)] == pieces
            if rebuilt.window is not None:
                assert np.array_equal(rebuilt.window.blocks.tokens[rebuilt.place.block], ids)
            else:
                assert (ids == run.data.packing.pad_id).all()
        documents = provenance.step(step)
        assert documents.digest == documents.recorded


def check_documents(run, provenance, corpus, exhausted):
    """A document is found in exactly the samples that held it."""
    held = defaultdict(set)
    seen = [(step, pieces) for step, samples in run.truth.items() for _, pieces in samples.values()]
    for step, pieces in [*seen, *((None, pieces) for pieces in run.skipped().values())]:
        for p in pieces:
            held[p.source, p.row].add((step, p.sample_index, p.column, p.start, p.length))
    for source, lengths in enumerate(corpus):
        for row, length in enumerate(lengths):
            found = provenance.find(f"s{source}", row)
            got = [(s.step, s.sample, s.column, s.start, s.length) for s in found.seen]
            assert len(got) == len(set(got))
            assert set(got) == held[f"s{source}", row]
            if not length:
                assert found.never is not None
            elif found.upcoming is None:  # read as often as it may be
                assert exhausted == "drop"
                assert sum(s.length for s in found.seen) == len(f"{source}.{row} ") + length + 1
