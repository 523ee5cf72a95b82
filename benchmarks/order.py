"""Permutations and digests, beside what numpy would do."""

from __future__ import annotations

import timeit

import numpy as np

from headrace.order import Permutation, content_hash, sample_term


def us(call, number: int = 2000) -> float:
    return min(timeit.repeat(call, number=number, repeat=5)) / number * 1e6


def main() -> None:
    generator = np.random.default_rng(0)
    small = us(lambda: Permutation(64, 7).slice(0, 64))
    print(
        f"shuffle of 64      keyed {small:6.1f} us   np.random.permutation {us(lambda: generator.permutation(64)):6.1f} us   ratio {small / us(lambda: generator.permutation(64)):.2f}"
    )
    large = Permutation(10**8, 7)
    one = us(lambda: large[12_345_678])
    print(
        f"one of 10^8        keyed {one:6.1f} us   (a table of 10^8 takes {1e-6 * 8 * 10**8:.0f} MB and seconds to make)"
    )
    row = np.arange(2048, dtype=np.int32)
    held = row.copy()
    digest, copy = us(lambda: sample_term(5, content_hash(row))), us(lambda: np.copyto(held, row))
    print(f"digest of 2,048    {digest:6.2f} us   memcpy {copy:6.2f} us   ratio {digest / copy:.1f}")


if __name__ == "__main__":
    main()
