"""The panels that matter as one PNG, for documents and pull requests."""

from __future__ import annotations

import importlib.util
import io
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from headrace.dash.panels import Panel, Report
from headrace.errors import ConfigError
from headrace.files import publish

__all__ = ["write_picture"]

_POINTS = 2000
_COLOURS = ("#2f6fb3", "#d9822b", "#3a9d6e", "#b34a6b", "#7a62b8", "#8a7a2f", "#4aa5b8", "#a0522d")
_GROUPS = ("stream_mixing", "train", "ledger", "rollouts")


def write_picture(report: Report, path: Path, *, keys: Sequence[str] = (), columns: int = 3) -> int:
    """Publish a PNG of the panels whose titles contain one of `keys` (default: those of mixing and training), with what stands out
    in them below; how many."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "a picture needs the package matplotlib, which is not installed. Run: pip install 'headrace[ui]'"
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    chosen = [p for p in report.panels if (any(k in p.title for k in keys) if keys else p.group in _GROUPS)]
    if not chosen:
        raise ConfigError(
            f"no panel of {report.path} contains {' or '.join(map(repr, keys or _GROUPS))}; the first are "
            + ", ".join(p.title for p in report.panels[:5])
        )
    rows = -(-len(chosen) // columns)
    shown = {curve.key for panel in chosen for curve in panel.curves}
    told = [f"• {f.sentence}" for f in report.findings if f.key in shown]
    words = [line for sentence in told for line in textwrap.wrap(sentence, 62 * columns, subsequent_indent="   ")]
    figure = Figure(figsize=(4.3 * columns, 2.5 * rows + 0.17 * len(words)), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    for i, panel in enumerate(chosen):
        _draw(figure.add_subplot(rows, columns, i + 1), report, panel)
    figure.suptitle(f"{report.name}: {len(report.series.steps):,} lines", fontsize=11)
    if words:
        figure.supxlabel("\n".join(words).replace("$", r"\$"), x=0.01, ha="left", fontsize=8, linespacing=1.35)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    publish(path, buffer.getvalue(), replace=True, durable=False)
    return len(chosen)


def _draw(axes, report: Report, panel: Panel) -> None:
    for i, curve in enumerate(panel.curves[:12]):
        steps, values = report.series.thinned(curve.key, _POINTS)
        axes.plot(steps, values, linewidth=0.9, color=_COLOURS[i % len(_COLOURS)], label=curve.name)
    low, high = axes.get_ylim()  # from zero on, as on the page: a flat curve then looks flat
    axes.set_ylim(
        min(low, 0.0) if axes.dataLim.y0 < 0 else 0.0, high if axes.dataLim.y1 > 0 or axes.dataLim.y0 < 0 else 1.0
    )
    if panel.healthy is not None and np.isfinite(panel.healthy).any():
        low, high = panel.healthy
        bottom, top = axes.get_ylim()
        axes.axhspan(
            low if np.isfinite(low) else bottom,
            high if np.isfinite(high) else top,
            color="#6e9682",
            alpha=0.16,
            linewidth=0,
        )
    axes.set_title(panel.title.replace("$", r"\$") + (f" [{panel.unit}]" if panel.unit else ""), fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.25)
    if len(panel.curves) > 1:
        axes.legend(fontsize=6, ncols=2, frameon=False)
