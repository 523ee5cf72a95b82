"""A signal that comes while a line is being printed stops the run and breaks neither."""

from __future__ import annotations

import io
import os
import signal
from typing import Any

from headrace.runs.run_loop import Run, stop_on_signal


class Interrupted(io.RawIOBase):
    """A terminal: SIGTERM arrives while something is being written to it."""

    def __init__(self) -> None:
        self.seen = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if not self.seen:
            os.kill(os.getpid(), signal.SIGTERM)
        self.seen += bytes(data)
        return len(data)


class Printing:
    def __init__(self, terminal: Interrupted) -> None:
        self.out = io.TextIOWrapper(io.BufferedWriter(terminal), write_through=True)

    def notice(self, sentence: str) -> None:
        print(sentence, file=self.out, flush=True)


def test_a_signal_in_the_middle_of_a_line_asks_for_a_stop_and_both_sentences_are_whole():
    terminal = Interrupted()
    run = Run(folder=None, watcher=Printing(terminal))
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signal(run):
        run.watcher.notice("step 1")
        assert run.stop_signal == signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) == before, "a second one is as rude as ever"
    assert terminal.seen == b"step 1\nSIGTERM: stopping after this step (again: at once, without saving)\n"
