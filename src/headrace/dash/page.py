"""One self-contained HTML file: the run's facts, what stands out, and its curves to zoom into.

Nothing is loaded from anywhere: plotly's JavaScript is copied in from its wheel (4.8 MB), and a content security policy
forbids the rest. Names and numbers come from files, so they reach the page as JSON in which no tag can end, and are put
there as text. A curve has at most 2,000 points, extremes kept: a page of a million steps is as large as one of a thousand.
"""

from __future__ import annotations

import html
import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from headrace.dash.panels import Report
from headrace.errors import ConfigError
from headrace.files import publish

__all__ = ["page_html", "write_page"]

_POINTS = 2000
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def write_page(report: Report, path: Path) -> int:
    """Publish the page; its size in bytes."""
    data = page_html(report).encode("utf-8", "replace")
    publish(path, data, replace=True, durable=False)
    return len(data)


def page_html(report: Report) -> str:
    """The page as text."""
    data = json.dumps(_data(report), allow_nan=False, ensure_ascii=True)
    # Inside a script element only "</" and "<!--" mean anything to a parser, and JSON needs neither.
    safe = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return _PAGE.format(
        policy=_POLICY, title=html.escape(f"{report.name} – headrace"), style=_STYLE, plotly=_plotly(), data=safe, script=_SCRIPT
    )  # fmt: skip


def _plotly() -> str:
    found = importlib.util.find_spec("plotly")
    folder = Path(found.submodule_search_locations[0]) if found and found.submodule_search_locations else None
    script = folder / "package_data" / "plotly.min.js" if folder is not None else None
    if script is None or not script.is_file():
        raise ConfigError("a report needs the package plotly, which is not installed. Run: pip install 'headrace[ui]'")
    return script.read_text(encoding="utf-8").replace("</script", "<\\/script")


def _data(report: Report) -> dict[str, Any]:
    series = report.series
    panels = []
    for panel in report.panels:
        curves = []
        for curve in panel.curves:
            steps, values = series.thinned(curve.key, _POINTS)
            entry: dict[str, Any] = {"name": curve.name, "key": curve.key, "x": steps.tolist(), "y": _finite(values)}
            if curve.worst_rank is not None:
                at = np.searchsorted(series.steps, steps)
                entry["worst"] = _finite(series[curve.worst_rank][at])
            curves.append(entry)
        healthy = None
        if panel.healthy is not None:
            healthy = [v if math.isfinite(v) else None for v in panel.healthy]
        panels.append(
            {
                "title": panel.title, "group": panel.group, "unit": panel.unit, "help": panel.help, "healthy": healthy,
                "ranks": panel.over_ranks, "curves": curves,
            }
        )  # fmt: skip
    return {
        "name": report.name,
        "kind": report.kind,
        "path": report.path,
        "facts": [list(fact) for fact in report.facts],
        "findings": [{"key": f.key, "sentence": f.sentence} for f in report.findings],
        "marks": [list(mark) for mark in report.marks[-200:]],
        "panels": panels,
    }


def _finite(values: np.ndarray) -> list[float | None]:
    return [v if math.isfinite(v) else None for v in values.tolist()]


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body><header><h1></h1><p id="path"></p></header>
<section id="facts"></section><section id="findings"></section>
<nav><input id="search" type="search" placeholder="show only metrics that contain ..." aria-label="filter metrics">
<label><input id="log" type="checkbox"> log axis</label></nav>
<main></main>
<footer>grey band: the healthy range; hover names the worst rank; drag to zoom all panels, double click to reset</footer>
<script>{plotly}</script>
<script type="application/json" id="data">{data}</script>
<script>{script}</script></body></html>
"""

_STYLE = """
:root{color-scheme:light dark;--ink:#1d2733;--dim:#66727f;--line:#dde3ea;--back:#fff;--card:#f7f9fb;--warn:#b3541e}
@media(prefers-color-scheme:dark){:root{--ink:#e4e9ef;--dim:#93a0ad;--line:#2b3440;--back:#12171d;--card:#1a212a;--warn:#f0a070}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--back);margin:0 auto;max-width:1500px;padding:1.2rem 1.6rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1rem;margin:1.6rem 0 .4rem;color:var(--dim);text-transform:uppercase;letter-spacing:.06em}
#path,footer{color:var(--dim);margin:.1rem 0 1rem}#facts{display:flex;flex-wrap:wrap;gap:.3rem 1.6rem}
#facts b{color:var(--dim);font-weight:500;margin-right:.5rem}#findings ul{margin:.2rem 0;padding-left:1.2rem}#findings li{color:var(--warn)}
nav{display:flex;gap:1rem;align-items:center;margin:1rem 0 0}nav input[type=search]{flex:0 1 26rem;padding:.35rem .6rem;border:1px solid var(--line);border-radius:6px;background:var(--card);color:inherit}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(430px,1fr));gap:12px}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:.5rem .6rem .2rem;min-width:0}
.card.flag{border-color:var(--warn)}.card h3{font-size:.9rem;margin:0;overflow-wrap:anywhere}.card p{font-size:.78rem;color:var(--dim);margin:0;min-height:1.1em}
.plot{height:210px}
"""

_SCRIPT = """
'use strict';
const data = JSON.parse(document.getElementById('data').textContent);
const make = (tag, text, name) => { const e = document.createElement(tag); if (text !== undefined) e.textContent = text; if (name) e.className = name; return e; };
document.querySelector('h1').textContent = data.name + '  (' + data.kind + ')';
document.getElementById('path').textContent = data.path;
for (const [name, text] of data.facts) { const s = make('span'); s.append(make('b', name), text); document.getElementById('facts').append(s); }
const found = document.getElementById('findings');
if (data.findings.length) { found.append(make('h2', 'stands out')); const ul = make('ul'); for (const f of data.findings) ul.append(make('li', f.sentence)); found.append(ul); }
else { found.append(make('h2', 'nothing stands out')); }
const flagged = new Set(data.findings.map(f => f.key));
const main = document.querySelector('main');
const groups = new Map();
const dark = matchMedia('(prefers-color-scheme: dark)').matches;
const ink = dark ? '#e4e9ef' : '#1d2733', line = dark ? '#2b3440' : '#dde3ea';
const colours = ['#2f6fb3', '#d9822b', '#3a9d6e', '#b34a6b', '#7a62b8', '#8a7a2f', '#4aa5b8', '#a0522d'];
const plots = [];
let syncing = false;
for (const panel of data.panels) {
  if (!groups.has(panel.group)) { const h = make('h2', panel.group), g = make('div', undefined, 'grid'); main.append(h, g); groups.set(panel.group, {h, g}); }
  const card = make('div', undefined, 'card' + (panel.curves.some(c => flagged.has(c.key)) ? ' flag' : ''));
  card.append(make('h3', panel.title + (panel.unit ? '  [' + panel.unit + ']' : '')));
  card.append(make('p', panel.help + (panel.ranks ? '  (over ranks: ' + panel.ranks + ')' : '')));
  const plot = make('div', undefined, 'plot');
  card.append(plot);
  groups.get(panel.group).g.append(card);
  const escape = text => String(text).replace(/&/g, '&amp;').replace(/</g, '&lt;').replace(/>/g, '&gt;');
  const traces = panel.curves.map((c, i) => ({
    type: 'scattergl', mode: c.x.length < 60 ? 'lines+markers' : 'lines', x: c.x, y: c.y, name: escape(c.name),
    line: {width: 1.4, color: colours[i % colours.length]}, marker: {size: 3},
    customdata: c.worst, hovertemplate: '%{y:.5~g}' + (c.worst ? '  worst rank %{customdata}' : '') + '<extra>' + escape(c.name) + '</extra>',
  }));
  for (const t of traces) t.type = 'scatter';
  const shapes = [];
  if (panel.healthy) {
    const values = panel.curves.flatMap(c => c.y).filter(v => v !== null);
    const low = panel.healthy[0] === null ? Math.min(...values) : panel.healthy[0];
    const high = panel.healthy[1] === null ? Math.max(...values) : panel.healthy[1];
    shapes.push({type: 'rect', xref: 'paper', x0: 0, x1: 1, y0: low, y1: high, line: {width: 0}, fillcolor: dark ? 'rgba(120,160,140,.20)' : 'rgba(110,150,130,.16)', layer: 'below'});
  }
  for (const [step, what] of data.marks) shapes.push({type: 'line', x0: step, x1: step, yref: 'paper', y0: 0, y1: 1, line: {width: 1, dash: 'dot', color: '#999'}});
  const layout = {
    margin: {l: 52, r: 8, t: 6, b: 28}, shapes, hovermode: 'x unified', showlegend: panel.curves.length > 1, legend: {orientation: 'h', y: 1.14, font: {size: 10}},
    paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)', font: {color: ink, size: 11}, xaxis: {gridcolor: line, zeroline: false}, yaxis: {gridcolor: line, zeroline: false, rangemode: 'tozero'},
  };
  plots.push({panel, card, plot, traces, layout, drawn: false});
}
const draw = p => { if (p.drawn) return; p.drawn = true;
  Plotly.newPlot(p.plot, p.traces, p.layout, {displayModeBar: false, responsive: true});
  p.plot.on('plotly_relayout', e => { if (syncing) return;
    const range = e['xaxis.autorange'] ? {'xaxis.autorange': true} : e['xaxis.range[0]'] !== undefined ? {'xaxis.range': [e['xaxis.range[0]'], e['xaxis.range[1]']]} : null;
    if (!range) return; syncing = true;
    Promise.all(plots.filter(o => o !== p).map(o => { if (o.drawn) return Plotly.relayout(o.plot, range); if (range['xaxis.range']) o.layout.xaxis.range = range['xaxis.range']; else delete o.layout.xaxis.range; return null; })).then(() => { syncing = false; }); });
};
if (typeof IntersectionObserver === 'undefined') { plots.forEach(draw); }
else { const seen = new IntersectionObserver(list => { for (const e of list) if (e.isIntersecting) draw(plots.find(p => p.card === e.target)); }, {rootMargin: '400px'}); plots.forEach(p => seen.observe(p.card)); }
document.getElementById('search').addEventListener('input', e => { const word = e.target.value.toLowerCase();
  for (const p of plots) p.card.style.display = (p.panel.title + ' ' + p.panel.curves.map(c => c.key).join(' ')).toLowerCase().includes(word) ? '' : 'none';
  for (const {h, g} of groups.values()) h.style.display = [...g.children].some(c => c.style.display !== 'none') ? '' : 'none'; });
document.getElementById('log').addEventListener('change', e => { for (const p of plots) { p.layout.yaxis.type = e.target.checked ? 'log' : 'linear'; if (p.drawn) Plotly.relayout(p.plot, {'yaxis.type': p.layout.yaxis.type}); } });
"""
