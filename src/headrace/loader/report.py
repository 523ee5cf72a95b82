"""What did the loader do? Speed, waits by name, realised mix, padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


def left_out_text(counts: Mapping[str, int]) -> str:
    """`3 empty documents, 1 bad shard`; nothing if nothing was left out."""
    counted = ((count, name.replace("_", " ")) for name, count in counts.items() if count)
    return ", ".join(f"{count:,} {name if count > 1 else name.removesuffix('s')}" for count, name in counted)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderReport:
    """A summary that prints itself. Shares are of tokens delivered, over the whole run."""

    steps: int
    tokens: int
    seconds: float
    tokens_per_second: float
    padding: float
    """Share of all positions."""
    documents: int
    mix: dict[str, tuple[float, float]]
    """Per source: realised share, target."""
    exposed: dict[str, float]
    """Seconds the trainer stood still, by the name of the wait."""
    digest: str
    left_out: dict[str, int]
    """Empty documents, bad rows and bad shards, as `Loader.left_out` counts them."""
    unit: str
    """What `tokens` counts: cells of streams."""

    def __str__(self) -> str:
        waited = sum(self.exposed.values())
        share = waited / self.seconds if self.seconds else 0.0
        documents = f"{self.documents:,} documents, " if self.unit == "tokens" else ""
        lines = [
            f"{self.steps:,} steps, {self.tokens:,} {self.unit}, {documents}{self.tokens_per_second:,.0f} {self.unit}/s",
            f"exposed wait {waited:.2f} s ({share:.1%}): "
            + (", ".join(f"{n} {s:.2f} s" for n, s in self.exposed.items()) or "none"),
            *([f"padding {self.padding:.2%}"] if self.unit == "tokens" else []),
            "mix " + ", ".join(f"{n} {r:.3f} (target {t:.3f})" for n, (r, t) in self.mix.items()),
            *([f"left out {said}"] if (said := left_out_text(self.left_out)) else []),
            *([f"digest {self.digest}"] if self.digest else []),
        ]
        return "\n".join(lines)
