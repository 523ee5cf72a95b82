"""Draw the pictures of the concepts page: docs/img/law-<name>.svg. `python docs/drawings.py` writes them; a test compares them with the files."""

from __future__ import annotations

from html import escape
from pathlib import Path

IMAGES = Path(__file__).resolve().parent / "img"
STYLE = """text { font: 14px system-ui, sans-serif; fill: #18212b; } .dim { fill: #5d6975; font-size: 12px; } .line { stroke: #8a95a1; fill: none; stroke-width: 1.5; }
.a { fill: #1f66b0; } .b { fill: #d9730d; } .c { fill: #138a72; } .soft { fill: #dbe8f5; } .in { fill: #fff; }
@media (prefers-color-scheme: dark) { text { fill: #e3e9ef; } .dim { fill: #9aa6b2; } .soft { fill: #1d3550; } }"""


class Drawing:
    """An SVG picture, piece by piece."""

    def __init__(self, name: str, title: str, width: int, height: int) -> None:
        self.name, self.title, self.width, self.height = name, title, width, height
        self.parts: list[str] = []

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, kind: str, words: str = "") -> None:
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" class="{kind}"/>')
        if words:
            self.text(x + width / 2, y + height / 2 + 5, words, "" if kind == "soft" else "in", "middle")

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self.parts.append(f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" class="line" marker-end="url(#tip)"/>')

    def svg(self) -> str:
        tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="#8a95a1"/></marker>'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img"><title>{escape(self.title)}</title>'
        return "\n".join([head, f"<style>{STYLE}</style><defs>{tip}</defs>", *self.parts, "</svg>", ""])


def order() -> Drawing:
    """One sequence, shared out to 1, 2 or 3 ranks."""
    d = Drawing("order", "One sequence of samples, shared out to one, two or three ranks", 760, 210)
    d.text(10, 34, "files, seed")
    d.arrow(90, 29, 122, 29)
    for g in range(8):
        d.box(130 + 76 * g, 12, 68, 34, "soft", f"sample {g}")
    for row, ranks in enumerate((1, 2, 3)):
        y = 70 + 46 * row
        d.text(10, y + 22, f"{ranks} rank" + ("s" if ranks > 1 else ""))
        for g in range(8):
            d.box(130 + 76 * g, y, 68, 32, "abc"[g % ranks], f"rank {g % ranks}")
    return d


def state() -> Drawing:
    """What was delivered is the state; what was made ahead is not."""
    d = Drawing("state", "The state is the position of what was delivered", 760, 130)
    d.box(10, 40, 420, 36, "a", "delivered to the trainer")
    d.box(434, 40, 190, 36, "soft", "prefetched")
    d.arrow(432, 112, 432, 80)
    d.text(424, 122, "the state: this position, a few KiB", "dim", "end")
    d.text(10, 26, "samples in order", "dim")
    d.text(634, 63, "not made yet", "dim")
    d.text(444, 96, "lost in a crash, and made again", "dim")
    return d


def waits() -> Drawing:
    """A step as a stack of named parts."""
    d = Drawing("waits", "One training step, divided into named waits and phases", 760, 110)
    x = 10.0
    for width, kind, name in (
        (120, "b", "loader.next"),
        (210, "a", "forward"),
        (290, "a", "backward"),
        (110, "a", "optimizer"),
    ):
        d.box(x, 30, width - 4, 36, kind, name)
        x += width
    d.text(10, 20, "one step", "dim")
    d.text(10, 88, "wait: the trainer was blocked, and this is what for", "dim")
    d.text(340, 88, "phases: the trainer worked", "dim")
    return d


def files() -> Drawing:
    """How a file comes to exist."""
    d = Drawing("files", "A file is written under a temporary name, synced, and linked to its name", 760, 100)
    for i, words in enumerate(("write a temporary file", "fsync the file", "link it to its name", "fsync the folder")):
        d.box(10 + 188 * i, 16, 160, 40, "a" if i == 2 else "soft", words)
        if i:
            d.arrow(172 + 188 * (i - 1), 36, 194 + 188 * (i - 1), 36)
    d.text(10, 80, "no reader sees it", "dim")
    d.text(386, 80, "from here on it is there, whole", "dim")
    return d


def batch() -> Drawing:
    """From a document to a batch."""
    d = Drawing("batch", "From the files of a source to the batch of a rank", 760, 120)
    steps = (
        ("source", "files, a weight"),
        ("chunks", "read at once"),
        ("lanes", "48 consumers"),
        ("windows", "tokenised together"),
        ("blocks", "rows of seq_len"),
        ("batch", "the rank's rows"),
    )
    for i, (name, note) in enumerate(steps):
        d.box(10 + 126 * i, 20, 98, 40, "a" if i == 5 else "soft", name)
        d.text(59 + 126 * i, 82, note, "dim", "middle")
        if i:
            d.arrow(110 + 126 * (i - 1), 40, 133 + 126 * (i - 1), 40)
    return d


def drawings() -> dict[str, str]:
    """File name and text of every picture."""
    return {f"law-{d.name}.svg": d.svg() for d in (order(), state(), waits(), files(), batch())}


if __name__ == "__main__":
    for name, text in drawings().items():
        (IMAGES / name).write_text(text)
