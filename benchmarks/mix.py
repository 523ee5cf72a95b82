"""Choosing the next source and dealing rows, beside random choice and a shuffled index of everything."""

from __future__ import annotations

import random
import time
import timeit

import numpy as np

from headrace.mix import Deal, LaneMix, fixed_point, starting_credits


def us(call, number: int = 20_000) -> float:
    return min(timeit.repeat(call, number=number, repeat=5)) / number * 1e6


def main() -> None:
    for count in (2, 8, 50):
        weights = [1.0 / (i + 1) for i in range(count)]
        fixed = fixed_point(weights)
        mix = LaneMix(fixed, starting_credits(fixed, block=2048, lane=0, lanes=48, seed=1), block=2048)
        ours = us(lambda mix=mix: mix.deliver(mix.next_source(), 2000))
        names = list(range(count))
        other = us(lambda names=names, weights=weights: random.choices(names, weights))
        print(
            f"next of {count:>2} sources   ours {ours:5.2f} us   random.choices {other:5.2f} us   ratio {ours / other:.2f}"
        )
    rows = np.full(100_000, 1000)
    began = time.perf_counter()
    deal = Deal(rows, rows, key=1, lanes=48)
    deal.spans(7, 3, 123_456, 500)
    first = time.perf_counter() - began
    later = us(lambda: deal.spans(7, 3, 900_000, 500), 200)
    began = time.perf_counter()
    np.random.default_rng(0).permutation(10**8)
    table = time.perf_counter() - began
    print(
        f"seek in 10^8 rows    first {first * 1e3:.1f} ms, then {later:.0f} us for 500 rows   shuffling an index of all {table * 1e3:.0f} ms   ratio {first / table:.3f}"
    )


if __name__ == "__main__":
    main()
