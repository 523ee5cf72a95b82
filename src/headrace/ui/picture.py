"""Some panels of a run as one PNG, for documents and pull requests."""

from __future__ import annotations

import importlib.util
import io
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.files import publish
from headrace.ui import pages
from headrace.ui.run_view import RunView

_POINTS = 2000
_COLOURS = ("#1f66b0", "#d9730d", "#138a72", "#a3437f", "#6a5fb5", "#8a7410", "#3fa0c4", "#7a4a2b")
_GROUPS = ("Streams", "Training", "Ledger", "Rollouts")


def write_picture(view: RunView, path: Path, *, keys: Sequence[str] = (), columns: int = 3) -> int:
    """Publish a PNG of some panels, with the findings about them below; returns how many panels.

    Args:
        view: The run.
        path: Where the PNG goes.
        keys: Panels whose key contains one of these; the groups of mixing, training, ledger and rollouts unless given.
        columns: Panels side by side.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "a picture needs the package matplotlib, which is not installed. Run: pip install 'headrace[ui]'"
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown_page = pages.metrics(view)
    chosen = [p for p in shown_page["panels"] if (any(k in p["key"] for k in keys) if keys else p["group"] in _GROUPS)]
    if not chosen:
        raise ConfigError(
            f"no panel of {view.path} contains {' or '.join(map(repr, keys or _GROUPS))}; the first are "
            + ", ".join(p["key"] for p in shown_page["panels"][:5])
        )
    rows = -(-len(chosen) // columns)
    shown = {curve["key"] for panel in chosen for curve in panel["curves"]}
    sentences = [f"• {f['sentence']}" for f in shown_page["findings"] if f["key"] in shown]
    words = [line for sentence in sentences for line in textwrap.wrap(sentence, 62 * columns, subsequent_indent="   ")]
    figure = Figure(figsize=(4.3 * columns, 2.5 * rows + 0.17 * len(words)), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    for i, panel in enumerate(chosen):
        _draw(figure.add_subplot(rows, columns, i + 1), view, panel)
    figure.suptitle(f"{view.name}: {view.index.lines:,} lines", fontsize=11)
    if words:
        figure.supxlabel("\n".join(words).replace("$", r"\$"), x=0.01, ha="left", fontsize=8, linespacing=1.35)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    publish(path, buffer.getvalue(), replace=True, durable=False)
    return len(chosen)


def _draw(axes: Any, view: RunView, panel: Mapping[str, Any]) -> None:
    for i, curve in enumerate(panel["curves"]):
        drawn = view.index.curve(curve["key"], points=_POINTS)
        values = [float("nan") if v is None else v for v in drawn["values"]]
        axes.plot(drawn["steps"], values, linewidth=0.9, color=_COLOURS[i % len(_COLOURS)], label=curve["name"])
    low, high = axes.get_ylim()  # from zero on: a flat curve then looks flat
    axes.set_ylim(
        min(low, 0.0) if axes.dataLim.y0 < 0 else 0.0, high if axes.dataLim.y1 > 0 or axes.dataLim.y0 < 0 else 1.0
    )
    if panel["healthy"] is not None and any(v is not None for v in panel["healthy"]):
        low, high = panel["healthy"]
        bottom, top = axes.get_ylim()
        axes.axhspan(
            bottom if low is None else low, top if high is None else high, color="#6e9682", alpha=0.16, linewidth=0
        )
    axes.set_title(panel["key"].replace("$", r"\$") + (f" [{panel['unit']}]" if panel["unit"] else ""), fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.25)
    if len(panel["curves"]) > 1:
        axes.legend(fontsize=6, ncols=2, frameon=False)
