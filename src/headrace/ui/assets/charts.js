// Charts as SVG: lines, stacked bars, heat map, lanes, sparkline. No library, no network. Names reach the page as text only.
'use strict';
const SVG = 'http://www.w3.org/2000/svg';

function h(tag, attrs, ...children) {
  const e = document.createElement(tag);
  for (const [k, v] of Object.entries(attrs || {})) {
    if (v === undefined || v === null || v === false) continue;
    if (k === 'class') e.className = v;
    else if (k.startsWith('on')) e.addEventListener(k.slice(2), v);
    else if (k === 'style') Object.assign(e.style, v);
    else e.setAttribute(k, v === true ? '' : v);
  }
  for (const c of children.flat(Infinity)) if (c !== undefined && c !== null && c !== false) e.append(c instanceof Node ? c : String(c));
  return e;
}
// Replace the children of an element. As with h, children may be lists, and false ones are left out.
function put(element, ...children) { element.replaceChildren(...h('div', {}, ...children).childNodes); }
function s(tag, attrs, ...children) {
  const e = document.createElementNS(SVG, tag);
  for (const [k, v] of Object.entries(attrs || {})) if (v !== undefined && v !== null) e.setAttribute(k, v);
  for (const c of children) e.append(c instanceof Node ? c : String(c));
  return e;
}
const colour = name => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim();
const SERIES = ['s0', 's1', 's2', 's3', 's4', 's5', 's6', 's7'];

function short(v, digits = 4) {
  if (v === null || v === undefined || !Number.isFinite(v)) return '–';
  const a = Math.abs(v);
  if (a >= 1e15) return v.toExponential(2);
  for (const [size, letter] of [[1e12, 'T'], [1e9, 'G'], [1e6, 'M'], [1e4, 'k']]) if (a >= size) return trim((v / (letter === 'k' ? 1e3 : size)).toPrecision(3)) + letter;
  if (a !== 0 && a < 1e-3) return v.toExponential(1).replace('e-', 'e−');
  return trim(Number(v.toPrecision(digits)).toString());
}
const trim = t => t.includes('.') && !t.includes('e') ? t.replace(/\.?0+$/, '') : t;
const whole = v => v === null || v === undefined ? '–' : Math.round(v).toLocaleString('en-US');

function ticks(low, high, count) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const rough = span / Math.max(count, 1), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map(m => m * power).find(m => m >= rough) || 10 * power;
  const found = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9 && found.length < 50; v += step) found.push(Math.abs(v) < step * 1e-9 ? 0 : v);
  return found;
}

function thin(steps, values, points) {
  // The least and the greatest of each stretch: no spike is lost.
  if (steps.length <= points) return [steps, values];
  const size = Math.ceil(steps.length / (points / 2)), xs = [], ys = [];
  for (let i = 0; i < steps.length; i += size) {
    let low = i, high = i;
    for (let j = i; j < Math.min(i + size, steps.length); j++) {
      if (values[j] === null) continue;
      if (values[low] === null || values[j] < values[low]) low = j;
      if (values[high] === null || values[j] > values[high]) high = j;
    }
    for (const j of low === high ? [low] : low < high ? [low, high] : [high, low]) { xs.push(steps[j]); ys.push(values[j]); }
  }
  return [xs, ys];
}

// A panel: title in words, key in small type, a plot that follows the width of its card.
class Card {
  constructor(title, key, unit, options = {}) {
    this.tools = h('span', {class: 'tools'});
    this.plot = s('svg', {class: 'plot', tabindex: 0, role: 'img', 'aria-label': title});
    this.legend = h('div', {class: 'legend'});
    this.body = h('div');
    this.root = h('section', {class: 'card ' + (options.size || ''), 'data-key': key || title},
      h('h3', {}, h('span', {}, title), unit && h('span', {class: 'unit'}, unit), this.tools),
      key && h('div', {class: 'key'}, key), options.help && h('p', {class: 'help'}, options.help), this.legend, this.body, this.plot);
    this.height = options.height || 190;
    this.width = 0;
    this.watch = new ResizeObserver(() => { const w = this.plot.clientWidth; if (w && Math.abs(w - this.width) > 1) { this.width = w; this.draw(); } });
    this.watch.observe(this.plot);
    this.plot.setAttribute('height', this.height);
  }
  frame(left, bottom) {
    this.plot.replaceChildren();
    this.plot.setAttribute('viewBox', `0 0 ${this.width} ${this.height}`);
    this.box = {left, top: 10, right: this.width - 10, bottom: this.height - bottom};
  }
  axisX(first, last, label = 'step') {
    const {left, right, bottom} = this.box;
    const x = v => last > first ? left + (v - first) / (last - first) * (right - left) : (left + right) / 2;
    const found = ticks(first, last, Math.max(Math.floor((right - left) / 90), 2)).filter(Number.isInteger);
    for (const t of found) this.plot.append(s('text', {x: x(t), y: bottom + 15, 'text-anchor': x(t) > right - 24 ? 'end' : x(t) < left + 10 ? 'start' : 'middle'}, t >= 1e5 ? short(t) : whole(t)));
    this.plot.append(s('text', {x: right, y: bottom + 28, 'text-anchor': 'end'}, label));
    return x;
  }
  axisY(low, high, unit) {
    const {left, right, top, bottom} = this.box;
    const y = v => high > low ? bottom - (v - low) / (high - low) * (bottom - top) : (top + bottom) / 2;
    for (const t of ticks(low, high, 4)) {
      this.plot.append(s('line', {x1: left, x2: right, y1: y(t), y2: y(t), class: 'gridline'}), s('text', {x: left - 6, y: y(t) + 4, 'text-anchor': 'end'}, short(t, 3) + (unit === '%' ? ' %' : '')));
    }
    return y;
  }
  showTip(x, y, ...content) {
    if (!this.tip) { this.tip = h('div', {class: 'tip'}); this.root.append(this.tip); }
    this.tip.replaceChildren(...content.flat(Infinity).filter(c => c));
    this.tip.hidden = false;
    const offset = this.plot.offsetLeft, wide = this.tip.offsetWidth;
    this.tip.style.left = Math.max(4, Math.min(offset + x + 14, this.root.clientWidth - wide - 6)) + 'px';
    this.tip.style.top = (this.plot.offsetTop + y) + 'px';
  }
  hideTip() { if (this.tip) this.tip.hidden = true; if (this.cross) { this.cross.remove(); this.cross = null; } }
  draw() {}
  remove() { this.watch.disconnect(); this.root.remove(); }
}

class LineChart extends Card {
  // panel: {title, key, unit, help, healthy, curves: [{key, name, steps, values}], band}; options: {onPick(step), onZoom(first, last) -> Promise(curves), marks, targets, hint}
  constructor(panel, options = {}) {
    super(panel.title, panel.key, panel.unit, {size: options.size, height: options.height, help: options.help ? panel.help : ''});
    if (panel.help) this.root.querySelector('h3').title = panel.help;
    this.panel = panel;
    this.options = options;
    this.curves = panel.curves.map(c => ({...c, steps: c.steps || [], values: c.values || []}));
    this.zoomed = null;
    if (options.onPick) this.plot.classList.add('picks');
    this.at = null;
    this.plot.addEventListener('pointermove', e => this.move(e));
    this.plot.addEventListener('pointerleave', () => { if (!this.from) this.hideTip(); });
    this.plot.addEventListener('pointerdown', e => { if (e.button === 0 && e.pointerType === 'mouse') { this.from = e.offsetX; this.plot.setPointerCapture(e.pointerId); } });
    this.plot.addEventListener('pointerup', e => this.up(e));
    this.plot.addEventListener('dblclick', () => this.reset());
    this.plot.addEventListener('keydown', e => this.keyed(e));
  }
  data() { return this.zoomed ? this.zoomed.curves : this.curves; }
  append(points) {
    let changed = false;
    for (const c of this.curves) for (const [step, value] of points[c.key] || []) {
      if (c.steps.length && step <= c.steps[c.steps.length - 1]) continue;
      c.steps.push(step); c.values.push(value); changed = true;
    }
    for (const c of this.curves) if (c.steps.length > 1600) [c.steps, c.values] = thin(c.steps, c.values, 800);
    if (changed && !this.zoomed && this.width) this.draw();
  }
  draw() {
    if (!this.width) return;
    const curves = this.data(), {healthy, band} = this.panel, targets = this.options.targets || {};
    let first = Infinity, last = -Infinity, low = Infinity, high = -Infinity;
    for (const c of curves) for (let i = 0; i < c.steps.length; i++) {
      first = Math.min(first, c.steps[i]); last = Math.max(last, c.steps[i]);
      const v = c.values[i];
      if (v !== null) { low = Math.min(low, v); high = Math.max(high, v); }
    }
    if (this.zoomed) { first = this.zoomed.first; last = this.zoomed.last; }
    else for (const [, a, b] of band || []) { low = Math.min(low, a); high = Math.max(high, b); }
    for (const v of Object.values(targets)) { low = Math.min(low, v); high = Math.max(high, v); }
    this.frame(52, 32);
    if (!(last >= first)) { if (this.options.lazy) return; this.plot.append(s('text', {x: this.width / 2, y: this.height / 2, 'text-anchor': 'middle'}, 'no values yet')); return; }
    if (!Number.isFinite(low)) { low = 0; high = 1; }
    if (low > 0 && low < 0.45 * high) low = 0;
    if (low === high) { const pad = Math.abs(low) * 0.1 || 1; if (low > 0) low = 0; else low -= pad; high += pad; }
    const pad = (high - low) * 0.06;
    high += pad; if (low !== 0) low -= pad;
    const y = this.axisY(low, high, this.panel.unit), x = this.axisX(first, last), {left, right, top, bottom} = this.box;
    this.scale = {x, y, first, last};
    const clamp = v => Math.max(top, Math.min(bottom, v));
    if (healthy) {
      const a = clamp(y(healthy[1] === null ? high : healthy[1])), b = clamp(y(healthy[0] === null ? low : healthy[0]));
      if (b > a) this.plot.append(s('rect', {x: left, width: right - left, y: a, height: b - a, class: 'healthy'}, s('title', {}, `healthy: ${short(healthy[0])} to ${short(healthy[1])}`)));
    }
    for (const [step, what] of this.options.marks || []) if (step >= first && step <= last) this.plot.append(s('line', {x1: x(step), x2: x(step), y1: top, y2: bottom, class: 'mark'}, s('title', {}, `${what}, step ${step}`)));
    if (band && !this.zoomed && band.length > 1) {
      const up = band.map(([t, , b]) => `${x(t).toFixed(1)},${clamp(y(b)).toFixed(1)}`), down = band.map(([t, a]) => `${x(t).toFixed(1)},${clamp(y(a)).toFixed(1)}`).reverse();
      this.plot.append(s('polygon', {points: [...up, ...down].join(' '), fill: colour('accent-soft'), opacity: .7}));
    }
    this.legend.replaceChildren();
    curves.forEach((c, i) => {
      const tint = colour(SERIES[i % SERIES.length]);
      let path = '', open = false, dots = 0;
      for (let j = 0; j < c.steps.length; j++) {
        if (c.values[j] === null) { open = false; continue; }
        path += `${open ? 'L' : 'M'}${x(c.steps[j]).toFixed(1)} ${clamp(y(c.values[j])).toFixed(1)}`;
        open = true; dots++;
      }
      this.plot.append(s('path', {d: path, class: 'curve', stroke: tint, 'stroke-dasharray': i >= SERIES.length ? '5 3' : null}));
      if (dots < 40) for (let j = 0; j < c.steps.length; j++) if (c.values[j] !== null) this.plot.append(s('circle', {cx: x(c.steps[j]), cy: clamp(y(c.values[j])), r: 2, fill: tint}));
      if (c.name in targets) this.plot.append(s('line', {x1: left, x2: right, y1: y(targets[c.name]), y2: y(targets[c.name]), class: 'target', stroke: tint}));
      if (curves.length > 1) this.legend.append(h('span', {}, h('i', {class: 'swatch', style: {background: tint}}), c.name));
    });
    this.tools.replaceChildren();
    if (this.zoomed) this.tools.append(h('button', {class: 'plain', onclick: () => this.reset()}, 'whole run'));
    else if (this.options.hint) this.tools.append(h('span', {class: 'dim hide-small'}, this.options.hint));
  }
  near(px) {
    const want = this.scale.first + (px - this.box.left) / (this.box.right - this.box.left) * (this.scale.last - this.scale.first);
    let best = null;
    for (const c of this.data()) {
      let lo = 0, hi = c.steps.length - 1;
      if (hi < 0) continue;
      while (lo < hi) { const mid = (lo + hi) >> 1; if (c.steps[mid] < want) lo = mid + 1; else hi = mid; }
      for (const j of [lo - 1, lo]) if (j >= 0 && (best === null || Math.abs(c.steps[j] - want) < Math.abs(best - want))) best = c.steps[j];
    }
    return best;
  }
  point(step, py) {
    this.at = step;
    const {x} = this.scale, {top, bottom} = this.box;
    if (this.cross) this.cross.remove();
    this.cross = s('line', {x1: x(step), x2: x(step), y1: top, y2: bottom, class: 'cross'});
    this.plot.append(this.cross);
    const rows = this.data().map((c, i) => { const j = c.steps.indexOf(step); return j < 0 || c.values[j] === null ? null : h('div', {}, h('i', {class: 'swatch', style: {background: colour(SERIES[i % SERIES.length]), display: 'inline-block', marginRight: '6px'}}), this.data().length > 1 ? c.name + ' ' : '', h('b', {}, short(c.values[j], 5)), this.panel.unit ? ' ' + this.panel.unit : ''); });
    this.showTip(x(step), Math.min(py, this.height - 60), h('div', {class: 'dim'}, 'step ' + whole(step)), rows, this.options.onPick && h('div', {class: 'dim'}, this.options.pickText || 'click: its documents'));
  }
  move(e) {
    if (!this.scale) return;
    if (this.from && Math.abs(e.offsetX - this.from) > 6) {
      if (this.brush) this.brush.remove();
      const a = Math.max(Math.min(this.from, e.offsetX), this.box.left), b = Math.min(Math.max(this.from, e.offsetX), this.box.right);
      this.brush = s('rect', {x: a, width: Math.max(b - a, 0), y: this.box.top, height: this.box.bottom - this.box.top, class: 'brush'});
      this.plot.append(this.brush);
      return;
    }
    const step = this.near(e.offsetX);
    if (step !== null) this.point(step, e.offsetY);
  }
  async up(e) {
    const from = this.from;
    this.from = null;
    if (this.brush) { this.brush.remove(); this.brush = null; }
    if (!this.scale) return;
    if (from && Math.abs(e.offsetX - from) > 6) {
      const {first, last} = this.scale, {left, right} = this.box;
      const step = px => Math.round(first + (Math.max(left, Math.min(right, px)) - left) / (right - left) * (last - first));
      const a = step(Math.min(from, e.offsetX)), b = step(Math.max(from, e.offsetX));
      if (b > a) await this.zoom(a, b);
      return;
    }
    const step = this.near(e.offsetX);
    if (step !== null && this.options.onPick && e.button === 0) this.options.onPick(step);
  }
  async zoom(first, last) {
    const keys = this.curves.map(c => c.key);
    const found = this.options.onZoom ? await this.options.onZoom(keys, first, last) : null;
    this.zoomed = {first, last, curves: this.curves.map(c => {
      const got = found && found[c.key];
      if (got) return {...c, ...got};
      const keep = c.steps.map((t, i) => i).filter(i => c.steps[i] >= first && c.steps[i] <= last);
      return {...c, steps: keep.map(i => c.steps[i]), values: keep.map(i => c.values[i])};
    })};
    this.draw();
  }
  reset() { this.zoomed = null; this.hideTip(); this.draw(); }
  keyed(e) {
    if (!this.scale) return;
    const steps = [...new Set(this.data().flatMap(c => c.steps))].sort((a, b) => a - b);
    if (!steps.length) return;
    const here = this.at === null ? steps.length : steps.indexOf(this.at);
    if (e.key === 'ArrowLeft') this.point(steps[Math.max(here - 1, 0)], 20);
    else if (e.key === 'ArrowRight') this.point(steps[Math.min(here + 1, steps.length - 1)], 20);
    else if (e.key === 'Enter' && this.at !== null && this.options.onPick) this.options.onPick(this.at);
    else if (e.key === 'Escape') this.reset();
    else return;
    e.preventDefault();
  }
}

// Lines as bars: one stack per line, parts in the order given. lines: [{step, parts: {name: value}}]
class StackChart extends Card {
  constructor(title, key, unit, lines, options = {}) {
    super(title, key, unit, options);
    this.lines = lines;
    this.options = options;
    this.plot.addEventListener('pointermove', e => this.move(e));
    this.plot.addEventListener('pointerleave', () => this.hideTip());
    this.plot.addEventListener('click', e => { const line = this.near(e.offsetX); if (line && options.onPick) options.onPick(line.step); });
    if (options.onPick) this.plot.classList.add('picks');
  }
  append(lines) {
    for (const line of lines) if (!this.lines.length || line.step > this.lines[this.lines.length - 1].step) this.lines.push(line);
    while (this.lines.length > 160) this.lines = this.lines.filter((_, i) => i % 2 === 0 || i > this.lines.length - 20);
    if (this.width) this.draw();
  }
  names() {
    const totals = new Map();
    // The first line holds start-up: it would drown the rest.
    for (const line of this.lines.length > 3 ? this.lines.slice(1) : this.lines) for (const [n, v] of Object.entries(line.parts)) totals.set(n, (totals.get(n) || 0) + v);
    const rank = n => n.startsWith('phase/') ? 0 : n.startsWith('wait/') ? 1 : 2;
    return {totals, names: [...totals.keys()].sort((a, b) => rank(a) - rank(b) || totals.get(b) - totals.get(a))};
  }
  tint(name, order) {
    if (name.startsWith('wait/')) return colour('w' + Math.min(order, 2));
    if (name.startsWith('phase/')) return colour('p' + Math.min(order, 3));
    return colour('other');
  }
  draw() {
    if (!this.width) return;
    this.frame(52, 32);
    const {totals, names} = this.names(), all = [...totals.values()].reduce((a, b) => a + b, 0);
    if (!all) { this.plot.append(s('text', {x: this.width / 2, y: this.height / 2, 'text-anchor': 'middle'}, 'no values yet')); return; }
    const counts = {phase: 0, wait: 0};
    this.tints = new Map(names.map(n => { const kind = n.split('/')[0]; return [n, this.tint(n, counts[kind] !== undefined ? counts[kind]++ : 0)]; }));
    const sums = this.lines.map(l => Object.values(l.parts).reduce((a, b) => a + b, 0));
    const sorted = [...sums].sort((a, b) => a - b), high = Math.min(sorted[sorted.length - 1], 1.6 * sorted[Math.floor(sorted.length * 0.8)] || 1) * 1.05 || 1;
    const y = this.axisY(0, high, 'ms'), {left, right, top, bottom} = this.box;
    const first = this.lines[0].step, last = this.lines[this.lines.length - 1].step;
    this.axisX(first, last);
    const wide = (right - left) / this.lines.length;
    this.lines.forEach((line, i) => {
      let base = 0;
      for (const n of names) {
        const v = line.parts[n] || 0;
        if (!v) continue;
        const a = Math.max(y(base + v), top), b = Math.max(y(base), top);
        if (b - a > 0.2) this.plot.append(s('rect', {x: (left + i * wide).toFixed(2), width: Math.max(wide - (wide > 4 ? 1 : 0), 0.5).toFixed(2), y: a.toFixed(2), height: (b - a).toFixed(2), fill: this.tints.get(n)}));
        base += v;
      }
    });
    this.legend.replaceChildren(...names.filter(n => totals.get(n) / all > 0.002).slice(0, 9).map(n => h('span', {}, h('i', {class: 'swatch', style: {background: this.tints.get(n)}}), n.replace(/^wait\//, 'wait ').replace(/^phase\/(train\.)?/, ''), h('b', {class: 'num'}, (100 * totals.get(n) / all).toFixed(totals.get(n) / all < 0.1 ? 1 : 0) + ' %'))));
  }
  near(px) { const {left, right} = this.box; return this.lines[Math.max(0, Math.min(this.lines.length - 1, Math.floor((px - left) / (right - left) * this.lines.length)))]; }
  move(e) {
    const line = this.box && this.near(e.offsetX);
    if (!line || !this.tints) return;
    const rows = Object.entries(line.parts).sort((a, b) => b[1] - a[1]).slice(0, 8).map(([n, v]) => h('div', {}, h('i', {class: 'swatch', style: {background: this.tints.get(n) || colour('other'), display: 'inline-block', marginRight: '6px'}}), n.replace('phase/', ''), ' ', h('b', {}, short(v, 3)), ' ms'));
    this.showTip(e.offsetX, 20, h('div', {class: 'dim'}, 'step ' + whole(line.step)), rows);
  }
}

// Ranks by lines: the share of exposed wait, darker is worse. lines: [{step, ranks: [share, …]} or {step, worst: [rank, share]}]
class HeatMap extends Card {
  constructor(title, key, lines, ranks, options = {}) {
    super(title, key, '% of the step', options);
    this.lines = lines; this.ranks = ranks;
    this.height = Math.max(90, Math.min(24 * Math.min(ranks, 64), 420) + 44);
    this.plot.setAttribute('height', this.height);
    this.plot.addEventListener('pointermove', e => this.move(e));
    this.plot.addEventListener('pointerleave', () => this.hideTip());
  }
  append(lines) { this.lines = [...this.lines, ...lines].slice(-160); if (this.width) this.draw(); }
  value(line, rank) { if (line.ranks) return line.ranks[rank]; return line.worst && line.worst[0] === rank ? line.worst[1] : undefined; }
  draw() {
    if (!this.width || !this.lines.length) return;
    this.frame(58, 32);
    const {left, right, top, bottom} = this.box, tall = (bottom - top) / this.ranks, wide = (right - left) / this.lines.length;
    this.axisX(this.lines[0].step, this.lines[this.lines.length - 1].step);
    const shares = this.lines.slice(1).flatMap(l => l.ranks || (l.worst ? [l.worst[1]] : []));
    const most = Math.max(0.1, Math.min(1, Math.max(...shares, 0)));
    const tint = colour('w0');
    const every = Math.ceil(this.ranks / 16);
    for (let r = 0; r < this.ranks; r++) {
      if (r % every === 0) this.plot.append(s('text', {x: left - 6, y: top + tall * (r + .5) + 4, 'text-anchor': 'end'}, 'rank ' + r));
      this.plot.append(s('line', {x1: left, x2: right, y1: top + tall * (r + 1), y2: top + tall * (r + 1), class: 'gridline'}));
      this.lines.forEach((line, i) => {
        const v = this.value(line, r);
        if (v !== undefined && v > 0) this.plot.append(s('rect', {x: (left + i * wide).toFixed(2), y: (top + tall * r + .5).toFixed(2), width: Math.max(wide, .6).toFixed(2), height: Math.max(tall - 1, .8).toFixed(2), fill: tint, opacity: Math.min(v / most, 1).toFixed(3)}));
      });
    }
    const known = this.lines.some(l => l.ranks);
    this.legend.replaceChildren(h('span', {}, h('i', {class: 'swatch', style: {background: tint, opacity: '.15'}}), '0 %'), h('span', {}, h('i', {class: 'swatch', style: {background: tint}}), (100 * most).toFixed(0) + ' %'), !known ? h('span', {}, 'the worst rank of each line') : '');
  }
  move(e) {
    if (!this.box) return;
    const {left, right, top, bottom} = this.box;
    const line = this.lines[Math.floor((e.offsetX - left) / (right - left) * this.lines.length)], r = Math.floor((e.offsetY - top) / (bottom - top) * this.ranks);
    if (!line || r < 0 || r >= this.ranks) return this.hideTip();
    const v = this.value(line, r);
    this.showTip(e.offsetX, Math.min(e.offsetY, this.height - 50), h('div', {class: 'dim'}, `step ${whole(line.step)}, rank ${r}`), h('b', {}, v === undefined ? 'not the worst' : (100 * v).toFixed(1) + ' % waiting'));
  }
}

// Open files over time: slices: [{file, modality, from, to, rows, read, picks, dry, lane}]
class LaneChart extends Card {
  constructor(title, pool, options = {}) {
    super(title, '', '', options);
    this.pool = pool;
    this.rows = [];
    const busy = [];
    for (const one of pool.slices) {
      let row = busy.findIndex(b => b.lane === one.lane && b.to < one.from);
      if (row < 0) { row = busy.length; busy.push({}); }
      busy[row] = {lane: one.lane, to: one.to};
      this.rows.push(row);
    }
    this.count = busy.length;
    this.height = Math.min(22 * this.count, 520) + 44;
    this.plot.setAttribute('height', this.height);
    this.plot.addEventListener('pointermove', e => { const one = this.hit(e); if (one) this.showTip(e.offsetX, Math.min(e.offsetY, this.height - 90), h('b', {}, one.file), h('div', {class: 'dim'}, `steps ${whole(one.from)} to ${whole(one.to)}, ${whole(one.picks)} picks`), h('div', {class: 'dim'}, `${whole(one.read)} of ${whole(one.rows)} rows read${one.dry ? ', ran dry' : ''}`)); else this.hideTip(); });
    this.plot.addEventListener('pointerleave', () => this.hideTip());
  }
  draw() {
    if (!this.width) return;
    this.frame(12, 32);
    const {first, last} = this.pool, {top, bottom} = this.box, tall = (bottom - top) / Math.max(this.count, 1), x = this.axisX(first, last);
    const kinds = [...new Set(this.pool.slices.map(o => o.modality))].sort();
    this.boxes = this.pool.slices.map((one, i) => {
      const a = x(one.from), b = Math.max(x(one.to + 1), a + 2), y = top + this.rows[i] * tall, tint = colour(SERIES[kinds.indexOf(one.modality) % SERIES.length]);
      this.plot.append(s('rect', {x: a, y: y + 1, width: b - a - 1, height: Math.max(tall - 3, 1), rx: 2, fill: tint, opacity: .22}), s('rect', {x: a, y: y + 1, width: Math.max((b - a - 1) * Math.min(one.read / Math.max(one.rows, 1), 1), 1), height: Math.max(tall - 3, 1), rx: 2, fill: tint, opacity: .5}));
      if (b - a > 90 && tall > 12) this.plot.append(s('text', {x: a + 5, y: y + tall / 2 + 3.5, class: 'onbar'}, one.file.slice(-Math.floor((b - a) / 7))));
      return {one, a, b, y, tall};
    });
    this.legend.replaceChildren(...kinds.map((k, i) => h('span', {}, h('i', {class: 'swatch', style: {background: colour(SERIES[i % SERIES.length])}}), k)), h('span', {}, 'filled: read so far'));
  }
  hit(e) { const found = (this.boxes || []).find(b => e.offsetX >= b.a && e.offsetX <= b.b && e.offsetY >= b.y && e.offsetY <= b.y + b.tall); return found && found.one; }
}

function sparkline(values) {
  const there = values.filter(v => v !== null);
  const svg = s('svg', {class: 'spark', viewBox: '0 0 120 26', 'aria-hidden': 'true'});
  if (there.length < 2) return svg;
  const low = Math.min(...there), high = Math.max(...there), y = v => high > low ? 23 - (v - low) / (high - low) * 20 : 13;
  let path = '', open = false;
  values.forEach((v, i) => { if (v === null) { open = false; return; } path += `${open ? 'L' : 'M'}${(1 + i / (values.length - 1) * 118).toFixed(1)} ${y(v).toFixed(1)}`; open = true; });
  svg.append(s('path', {d: path, fill: 'none', stroke: colour('accent'), 'stroke-width': 1.4}));
  return svg;
}
