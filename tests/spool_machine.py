"""A model of a whole life: providers and ranks that come, go, crash and change in number, checkpoints, damage.

The model is one list: the samples the trained model has seen. Whatever happens, it is 0, 1, 2, … without a gap. Played
shortly in tests/property, and for long in tests/faults.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.spool import DatasetConsumer, SequentialProvider, open_batch_file

BATCH = 6


class Counted(SequentialProvider):
    def build_meta(self) -> dict[str, Any]:
        return {
            "dataset_name": "counted",
            "training_type": "SEQUENCE_SCORING",
            "batch_schema": [{"name": "g", "dtype": "int64", "shape": []}],
        }

    def start_from(self, split, part, cursor) -> None:
        self.at = {**getattr(self, "at", {}), part: cursor["rows"] if cursor else 0}

    def next_batch(self, split, part):
        own = self.at[part]
        self.at[part] += self.batch_size
        return {"g": np.arange(own, own + self.batch_size) * self.parts + part}

    def cursor(self, split, part):
        return {"rows": self.at[part]}


class Spool(RuleBasedStateMachine):
    steps = 0
    """Of all machines of this process."""

    @initialize(parts=st.integers(1, 2), per_file=st.integers(1, 3))
    def begin(self, parts, per_file):
        self.folder = Path(tempfile.mkdtemp())
        self.parts, self.per_file = parts, per_file
        self.providers: list[tuple[Counted, threading.Thread]] = []
        self.errors: list[BaseException] = []
        self.ranks: list[DatasetConsumer] = []
        self.trained: list[int] = []
        self.saved: list[tuple[dict, list[int]]] = []
        self.start_provider()

    # ------------------------------------------------------------------------------------------ provider

    def start_provider(self):
        provider = Counted(
            self.folder,
            BATCH,
            batches_per_file=self.per_file,
            max_backlog_files=2,
            parts=self.parts,
            sleep_seconds=0.002,
            durable=False,
            deadline=60,
        )
        provider.open(("train",))

        def work():
            try:
                provider.run()
            except BaseException as error:
                self.errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        self.providers.append((provider, thread))

    def stop_provider(self):
        provider, thread = self.providers.pop()
        provider.stop()
        thread.join(10)

    @precondition(lambda self: self.providers)
    @rule(torn=st.booleans())
    def provider_dies_and_comes_back(self, torn):
        self.stop_provider()
        if torn:  # what a kill in the middle of a file leaves
            (self.folder / "queue" / "train" / ".tmp-999999999-abc").write_bytes(b"half")
            part = self.folder / "claims" / "train" / ("" if self.parts == 1 else "part-000")
            (part / f"{len(self.trained) // BATCH + 1:012d}").write_bytes(b"nobody")
        self.start_provider()

    # --------------------------------------------------------------------------------------------- ranks

    @precondition(lambda self: not self.ranks)
    @rule(world=st.sampled_from([1, 2, 3]), copy=st.booleans())
    def ranks_start(self, world, copy):
        self.ranks = [
            DatasetConsumer(
                self.folder,
                "cpu",
                ack="commit",
                dp_rank=r,
                dp_world_size=world,
                deadline=20,
                verdict_patience=60,
                copy=copy,
            )
            for r in range(world)
        ]
        if self.saved:
            state, trained = self.saved[-1]
            self.trained = list(trained)
            for rank in self.ranks:
                rank.load_state_dict(state)
        else:
            self.trained = []

    @precondition(lambda self: self.ranks)
    @rule(steps=st.integers(1, 4))
    def train(self, steps):
        with ThreadPoolExecutor(len(self.ranks)) as threads:
            for _ in range(steps):
                shares = list(threads.map(lambda rank: rank.get_batch("train")["g"], self.ranks))
                self.trained += sorted(g for share in shares for g in share.tolist())
                for share in shares:  # a trainer may do with a batch as it likes
                    share.fill_(-1)

    @precondition(lambda self: self.ranks)
    @rule(commit=st.booleans())
    def checkpoint(self, commit):
        self.saved = [*self.saved[-1:], (self.ranks[0].state_dict(), list(self.trained))]
        if commit:
            for rank in self.ranks:
                rank.commit(self.saved[0][0])

    @precondition(lambda self: len(self.saved) == 2 and not self.ranks)
    @rule()
    def newest_checkpoint_is_lost(self):
        self.saved.pop()

    @precondition(lambda self: self.ranks)
    @rule(kill=st.booleans())
    def ranks_die(self, kill):
        for rank in self.ranks:
            if kill:
                rank._queue.background.close()
                rank._queue.lock.release()
            else:
                rank.close()
        self.ranks = []

    # -------------------------------------------------------------------------------------------- damage

    @precondition(lambda self: not self.ranks)
    @rule(which=st.integers(0, 5), bit=st.integers(0, 1 << 20))
    def a_bit_flips_in_a_file_that_will_be_read(self, which, bit):
        self.stop_provider()
        splits = self.saved[-1][0]["body"]["splits"] if self.saved and self.trained else {}
        at = (
            splits["train"]["at"] if "train" in splits else [[0, 0]] * self.parts
        )  # one saved before the first batch has no place yet
        files = [
            path
            for path in sorted((self.folder / "queue" / "train").rglob("*.safetensors"))
            if int(path.stem) >= at[int(path.parent.name[-3:]) if self.parts > 1 else 0][0]
        ]
        if files:
            path = files[which % len(files)]
            raw = bytearray(path.read_bytes())
            raw[bit // 8 % len(raw)] ^= 1 << (bit % 8)
            # Not in place: to shorten a file that somebody has mapped ends that process.
            path.with_name("changed").write_bytes(raw)
            path.with_name("changed").replace(path)
        self.start_provider()

    # ---------------------------------------------------------------------------------------------- laws

    @invariant()
    def the_model_has_seen_every_sample_once_in_order(self):
        assert getattr(self, "trained", []) == list(range(len(getattr(self, "trained", []))))

    @invariant()
    def no_provider_failed(self):
        Spool.steps += 1
        assert not getattr(self, "errors", [])

    def teardown(self):
        if not hasattr(self, "folder"):
            return
        for rank in self.ranks:
            rank.close()
        for provider, thread in self.providers:
            provider.stop()
            thread.join(10)
        for path in (self.folder / "queue").rglob("*.safetensors"):
            try:
                file = open_batch_file(path)
                file.check()
            except Exception:
                continue  # damaged by the machine and not met by a rank since
            g = (np.arange(file.header.rows) + file.header.first) * self.parts + file.header.part
            assert np.array_equal(file.arrays["g"], g)
        shutil.rmtree(self.folder)
