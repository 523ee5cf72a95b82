"""Character diffusion over a spool: one process corrupts text, another learns to restore it.

    python examples/char_diffusion.py prepare --data_dir data/chars          in one terminal (stays until Ctrl-C)
    python examples/char_diffusion.py train --data_dir data/chars            in another
    python examples/char_diffusion.py both --data_dir data/chars             or both at once

A sample is a stretch of text with some characters masked; how many depends on the stage of corruption that was drawn for
it. x is the corrupted stretch, y has the characters to restore and -100 elsewhere.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

import headrace as hr
from headrace.spool.providers.sampling import mask_tokens, next_span

STAGES = (0.15, 0.35, 0.6, 0.85)
"""Shares of characters that are corrupted, from nearly whole to nearly noise."""


def read_text() -> str:
    """Text that every machine with Python has."""
    return Path(os.__file__).read_text(encoding="utf-8")


class CharDiffusion(hr.DataProviderBase):
    """Stretches of characters, corrupted to a random stage."""

    def on_start(self) -> None:
        self._load()

    def _load(self) -> None:
        text = read_text()
        self.characters = sorted(set(text))
        self.mask_id = len(self.characters)
        ids = np.array([self.characters.index(c) for c in text], np.uint16)
        cut = int(0.9 * len(ids))
        self.tokens = {"train": ids[:cut], "val": ids[cut:]}

    def build_meta(self) -> dict:
        self._load()
        shape = [self.block_size]
        return {
            "dataset_name": "char_diffusion",
            "training_type": "MLM",
            "vocab_size": self.mask_id + 1,
            "mask_token_id": self.mask_id,
            "itos": dict(enumerate(self.characters)),
            "stages": list(STAGES),
            "batch_schema": [
                {"name": "x", "dtype": "int64", "shape": shape, "role": "input"},
                {"name": "y", "dtype": "int64", "shape": shape, "role": "target"},
            ],
            "split_info": {split: {"characters": len(ids)} for split, ids in self.tokens.items()},
        }

    def sample_batch(self, split: str, rng: torch.Generator) -> dict[str, torch.Tensor]:
        ids, _ = next_span(self.tokens[split], self.batch_size, self.block_size or 0, rng)
        stage = STAGES[int(torch.randint(len(STAGES), (), generator=rng))]
        x, y = mask_tokens(ids, rng, mask_id=self.mask_id, vocab_size=self.mask_id, probability=stage)
        return {"x": x, "y": y}


def prepare(options: argparse.Namespace) -> None:
    made = CharDiffusion(
        options.data_dir, options.batch_size, options.block_size, batches_per_file=options.batches_per_file,
        max_backlog_files=options.max_backlog_files, sleep_seconds=options.sleep_seconds, force_regenerate=options.force_regenerate, report=print,
    )  # fmt: skip
    try:
        made.run()
    except KeyboardInterrupt:
        print("stopped; the next start goes on where this one ended")


def train(options: argparse.Namespace) -> None:
    deadline = time.monotonic() + 60
    while not (Path(options.data_dir) / "meta.json").exists():
        if time.monotonic() > deadline:
            sys.exit(f"no provider has started in {options.data_dir}")
        time.sleep(0.05)
    torch.manual_seed(0)
    consumer = hr.DatasetConsumer(options.data_dir, device_type="cpu")
    size = consumer.meta["vocab_size"]
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = torch.nn.ModuleDict({
        "embed": torch.nn.Embedding(size, 64), "place": torch.nn.Embedding(options.block_size, 64),
        "mix": torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), "head": torch.nn.Linear(64, size),
    })  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = model["mix"](model["embed"](x) + model["place"](torch.arange(x.shape[1])))
        return torch.nn.functional.cross_entropy(
            model["head"](hidden).reshape(-1, size), y.reshape(-1), ignore_index=-100
        )

    for step in range(1, options.steps + 1):
        x, y = consumer.get_batch("train", "cpu")
        loss = loss_of(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 1 or step % 20 == 0:
            with torch.no_grad():
                held_out = sum(loss_of(*consumer.get_batch("val", "cpu")).item() for _ in range(4)) / 4
            print(f"step {step}  loss {loss.item():.3f}  val {held_out:.3f}", flush=True)
    consumer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("prepare", "train", "both"))
    parser.add_argument("--data_dir", default="data/char_diffusion")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--block_size", type=int, default=64)
    parser.add_argument("--batches_per_file", type=int, default=20)
    parser.add_argument("--max_backlog_files", type=int, default=2)
    parser.add_argument("--sleep_seconds", type=float, default=0.2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--force_regenerate", action="store_true", help="empty the spool first")
    options = parser.parse_args()
    if options.part == "prepare":
        prepare(options)
    elif options.part == "train":
        train(options)
    else:
        words = [sys.executable, __file__, "prepare", *sys.argv[2:]]
        provider = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        try:
            train(options)
        finally:
            provider.terminate()
            provider.wait()


if __name__ == "__main__":
    main()
