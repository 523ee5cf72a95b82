"""What durability and checksums cost, beside a plain write and beside torch.save."""

from __future__ import annotations

import io
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import xxhash

from headrace.files import open_container, write_container


def median(call, rounds: int = 9) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    arrays = {f"w{i}": np.random.default_rng(i).random((1024, 1024), np.float32) for i in range(12)}
    raw = b"".join(a.tobytes() for a in arrays.values())
    megabytes = len(raw) / 1e6
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        plain = median(lambda: (folder / "plain").write_bytes(raw))
        container = median(lambda: write_container(folder / "c", arrays, {}, replace=True, durable=False))
        durable = median(lambda: write_container(folder / "d", arrays, {}, replace=True))
        summed = median(lambda: [xxhash.xxh3_128_hexdigest(a.data) for a in arrays.values()])
        tensors = {k: torch.from_numpy(v) for k, v in arrays.items()}
        saved = median(lambda: torch.save(tensors, folder / "t"))
        print(
            f"write {megabytes:.0f} MB   container {container * 1e3:6.1f} ms   plain write {plain * 1e3:6.1f} ms   ratio {container / plain:.2f}   torch.save {saved * 1e3:6.1f} ms   ratio {container / saved:.2f}"
        )
        print(
            f"                checksums {summed * 1e3:6.1f} ms = {summed / container:.1%} of the write; durable (two fsyncs) {durable * 1e3:.1f} ms"
        )
        opened = median(lambda: open_container(folder / "c"))
        loaded = median(lambda: torch.load(io.BytesIO((folder / "t").read_bytes()), weights_only=True))
        print(
            f"open            verified {opened * 1e3:6.1f} ms   torch.load (unverified) {loaded * 1e3:6.1f} ms   ratio {opened / loaded:.2f}"
        )


if __name__ == "__main__":
    main()
