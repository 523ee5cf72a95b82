// The pages. Data comes from /api, or from the HTML file itself in a static report; both have the same shape.
'use strict';
const EMBEDDED = document.getElementById('data') ? JSON.parse(document.getElementById('data').textContent) : null;
const main = document.getElementById('main'), head = document.getElementById('top');
const TITLES = {overview: 'Overview', step: 'Step', find: 'Find', streams: 'Streams', spool: 'Spool', rl: 'Rollouts', metrics: 'Metrics', config: 'Config'};
let leave = [];
let visit = 0;

const query = params => Object.entries(params).flatMap(([k, v]) => (Array.isArray(v) ? v : [v]).filter(x => x !== null && x !== undefined && x !== '').map(x => `${encodeURIComponent(k)}=${encodeURIComponent(x)}`)).join('&');
async function api(name, params = {}) {
  const address = `/api/${name}${Object.keys(params).length ? '?' + query(params) : ''}`;
  if (EMBEDDED) {
    if (name === 'curves' && EMBEDDED.curves) return {curves: Object.fromEntries((params.key || []).filter(k => EMBEDDED.curves[k]).map(k => [k, EMBEDDED.curves[k]]))};
    if (EMBEDDED.pages[name]) return EMBEDDED.pages[name];
    throw new Error('This is a saved report. The live page answers this: headrace ui ' + (EMBEDDED.path || 'RUN'));
  }
  const response = await fetch(address);
  const value = await response.json().catch(() => ({error: `the server answered ${response.status}`}));
  if (!response.ok) throw new Error(value.error || `the server answered ${response.status}`);
  return value;
}
// The answer for a part of the page; null if it was refused there, or if another page was opened meanwhile.
async function answerFor(part, name, params) {
  const here = visit;
  try { const answer = await api(name, params); return here === visit ? answer : null; } catch (error) { if (here === visit) put(part, refused(error)); return null; }
}
const link = (run, ...rest) => '#/' + ['run', run, ...rest].map(encodeURIComponent).join('/');
const go = address => { location.hash = address; };

function duration(seconds) {
  if (seconds === null || seconds === undefined) return '';
  if (seconds < 90) return `${Math.max(Math.round(seconds), 0)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} days`;
}
function bytes(n) { for (const [size, unit] of [[2 ** 30, 'GiB'], [2 ** 20, 'MiB'], [2 ** 10, 'KiB']]) if (n >= size) return `${(n / size).toFixed(1)} ${unit}`; return `${n} B`; }

// ------------------------------------------------------------------------------------------------ frame

function bar(run, tabs, page) {
  const input = h('input', {type: 'number', min: 1, placeholder: 'number', 'aria-label': 'open a step'});
  put(head, h('nav', {class: 'bar'},
    h('a', {class: 'brand', href: '#/'}, 'headrace'),
    h('div', {class: 'tabs'}, (tabs || []).map(t => h('a', {href: link(run, t), 'aria-current': t === page ? 'page' : null}, TITLES[t] || t))),
    tabs && tabs.includes('step') && !EMBEDDED && h('form', {class: 'go', onsubmit: e => { e.preventDefault(); if (input.value) go(link(run, 'step', input.value)); }}, h('label', {}, 'Step'), input)));
}

function titled(status) {
  document.title = `${status.name} – headrace`;
  const left = status.seconds_left ? ` · ${duration(status.seconds_left)} left` : '';
  const silent = status.state === 'running' && status.changed ? ` · last line ${duration(status.now - status.changed)} ago` : '';
  const ranks = status.ranks > 1 ? ` · ${status.ranks} ranks` : '';
  const steps = status.steps ? ` of ${whole(status.steps)}` : '';
  const reading = status.progress < 1 ? ` · reading the metrics: ${(100 * status.progress).toFixed(0)} %` : '';
  return [h('div', {class: 'head'}, h('h1', {}, status.name), h('span', {class: 'state ' + status.state}, status.state),
    h('span', {class: 'dim num', id: 'progress-text'}, `step ${whole(status.step)}${steps}${left}${ranks}${silent}${reading}`)),
    status.steps ? h('div', {class: 'progress'}, h('i', {style: {width: Math.min(100 * status.step / status.steps, 100) + '%'}})) : ''];
}

const capital = text => text.slice(0, 1).toUpperCase() + text.slice(1);
const coded = text => text.split('`').map((part, i) => i % 2 ? h('code', {}, part) : part);
function verdictText(verdict, count) {
  if (verdict.level === 'good' || verdict.level === 'quiet') return verdict.text;
  return (verdict.level === 'bad' ? 'In trouble: ' : '') + (count === 1 ? 'one thing to look at' : `${count} things to look at`);
}
function figure(f) {
  const text = f.unit === '%' ? (f.value >= 10 ? f.value.toFixed(0) : f.value >= 0.1 ? f.value.toFixed(1) : f.value > 0 ? '< 0.1' : '0') : short(f.value);
  return h('div', {class: 'figure'}, h('div', {class: 'label'}, f.label), h('b', {}, text), h('span', {class: 'unit'}, f.unit), h('div', {class: 'note', title: f.note}, f.note));
}
function findingCard(f, run, tabs) {
  const where = f.key && (f.key.startsWith('stream_mixing/') || f.key.startsWith('ledger')) ? 'streams' : 'metrics';
  return h('article', {class: 'finding ' + f.severity, 'data-rule': f.rule}, h('h3', {}, f.title), h('p', {}, coded(f.sentence)), f.remedy && h('p', {class: 'remedy'}, coded(f.remedy)),
    h('div', {class: 'links'}, f.key && h('a', {href: link(run, tabs.includes(where) ? where : 'metrics', f.key)}, 'Show the curve'), f.step !== null && tabs.includes('step') && !EMBEDDED && h('a', {href: link(run, 'step', f.step)}, `Open step ${whole(f.step)}`)));
}
function findingsList(list, run, tabs, open) {
  const shown = open || list.length === 2 ? list.length : 1, rest = list.slice(shown);
  return h('div', {class: 'findings'}, list.slice(0, shown).map(f => findingCard(f, run, tabs)),
    rest.length ? h('details', {}, h('summary', {class: 'dim'}, `${rest.length} more to look at`), h('div', {class: 'findings'}, rest.map(f => findingCard(f, run, tabs)))) : '');
}

const table = (titles, rows) => h('div', {class: 'scroll'}, h('table', {}, titles.length ? h('thead', {}, h('tr', {}, titles.map(t => h('th', {}, t)))) : '', h('tbody', {}, rows)));
function refused(error) { return h('p', {class: 'refused', role: 'alert'}, String(error.message || error)); }
function command(text) {
  const button = h('button', {onclick: async () => { try { await navigator.clipboard.writeText(text); button.textContent = 'copied'; } catch { button.textContent = 'select and copy'; } }}, 'copy');
  return h('div', {class: 'command'}, h('code', {}, text), button);
}
const picker = (run, tabs) => tabs.includes('step') && !EMBEDDED ? step => go(link(run, 'step', step)) : tabs.includes('rl') && !EMBEDDED ? step => go(link(run, 'rl', step)) : null;
const zoomer = run => EMBEDDED ? null : async (keys, first, last) => (await api('curves', {run, key: keys, first, last})).curves;

function follow(run, status, keys, onLines) {
  if (EMBEDDED) return;
  const events = new EventSource('/api/events?' + query({run, line: status.lines, generation: status.generation, key: keys}));
  events.addEventListener('lines', e => onLines(JSON.parse(e.data)));
  events.addEventListener('reload', () => { events.close(); route(); });
  leave.push(() => events.close());
}

// ------------------------------------------------------------------------------------------------- runs

async function runsPage() {
  bar(null, null);
  document.title = 'Runs – headrace';
  const data = await api('runs');
  const chosen = [];
  const compare = h('button', {disabled: true, onclick: () => go('#/compare/' + chosen.map(encodeURIComponent).join('/'))}, 'Compare two runs');
  const choose = (run, on) => { if (on) chosen.push(run); else chosen.splice(chosen.indexOf(run), 1); compare.disabled = chosen.length !== 2; };
  const rows = data.runs.map(r => h('tr', {class: 'link', onclick: e => { if (!e.target.closest('input, a')) go(link(r.run, 'overview')); }},
    h('td', {}, h('input', {type: 'checkbox', 'aria-label': `choose ${r.name} for a comparison`, onchange: e => choose(r.run, e.target.checked)})),
    h('td', {}, h('a', {href: link(r.run, 'overview')}, r.name), h('div', {class: 'key'}, r.run), h('span', {class: 'only-small pill ' + r.verdict.level}, r.verdict.text)),
    h('td', {}, h('span', {class: 'state ' + r.state}, r.state), h('div', {class: 'dim small'}, r.kind)),
    h('td', {class: 'right'}, whole(r.step), h('div', {class: 'dim small'}, r.steps ? `of ${whole(r.steps)}` : '')),
    h('td', {class: 'hide-small'}, sparkline(r.curve)),
    h('td', {class: 'right'}, short(r.value), h('div', {class: 'dim small'}, r.key === 'train/loss' ? 'loss' : 'reward')),
    h('td', {class: 'right hide-small'}, r.speed === null ? '–' : short(r.speed, 3), h('div', {class: 'dim small'}, r.speed_unit || '')),
    h('td', {class: 'right hide-small'}, r.wait_share === null ? '–' : h('span', {class: r.wait_share > 0.05 ? 'pill warn' : ''}, (100 * r.wait_share).toFixed(1) + ' %'), h('div', {class: 'dim small'}, 'waiting')),
    h('td', {class: 'hide-small'}, h('span', {class: 'pill ' + r.verdict.level}, r.verdict.text)),
    h('td', {class: 'hide-small dim small'}, r.changed ? new Date(r.changed * 1000).toLocaleString() : '')));
  put(main, h('div', {class: 'head'}, h('h1', {}, 'Runs'), h('span', {class: 'dim'}, data.root)), data.runs.length > 1 ? h('div', {class: 'toolbar'}, compare, h('span', {class: 'dim small'}, 'tick two runs to see where they part')) : '',
    rows.length ? h('div', {class: 'scroll'}, h('table', {}, h('thead', {}, h('tr', {}, ['', 'Run', 'State'].map(t => h('th', {}, t)), h('th', {class: 'right'}, 'Step'), h('th', {class: 'hide-small'}, 'Curve'), h('th', {class: 'right'}, 'Now'), h('th', {class: 'right hide-small'}, 'Speed'), h('th', {class: 'right hide-small'}, 'Exposed wait'), h('th', {class: 'hide-small'}, 'Verdict'), h('th', {class: 'hide-small'}, 'Last line'))), h('tbody', {}, rows))) : h('p', {class: 'empty'}, 'No run below this folder yet. `headrace run CONFIG` starts one.'));
  if (!EMBEDDED && data.runs.some(r => r.state === 'running')) { const timer = setTimeout(() => { if (!chosen.length) route(); }, 5000); leave.push(() => clearTimeout(timer)); }
}

// --------------------------------------------------------------------------------------------- overview

async function overviewPage(run) {
  const data = await api('overview', {run});
  const {status, tabs} = data;
  bar(run, tabs, 'overview');
  const pick = picker(run, tabs), zoom = zoomer(run), marks = data.marks;
  const top = h('div'), verdict = h('div'), figures = h('div', {class: 'figures'});
  let shown = '';
  const showTop = d => {
    put(top, ...titled(d.status).filter(x => x));
    put(figures, ...d.figures.map(figure));
    const now = JSON.stringify([d.verdict, d.findings]);
    if (now === shown) return;  // what a reader has opened stays open
    shown = now;
    const mark = {good: '✓', warn: '!', bad: '!', quiet: '…'}[d.verdict.level], open = verdict.querySelector('details[open]');
    put(verdict, h('div', {class: 'verdict ' + d.verdict.level, role: 'status'}, h('span', {class: 'mark', 'aria-hidden': 'true'}, mark), h('span', {}, capital(verdictText(d.verdict, d.findings.length)))), d.findings.length ? findingsList(d.findings, run, tabs) : '');
    if (open && verdict.querySelector('details')) verdict.querySelector('details').open = true;
  };
  showTop(data);
  const text = tabs.includes('rl') ? 'click: its rollouts' : undefined;
  const charts = data.charts.map((p, i) => new LineChart(p, {size: i === 0 ? 'wide' : '', height: i === 0 ? 230 : 180, onPick: pick, onZoom: zoom, marks, pickText: text, hint: i === 0 && pick ? `click a point to read ${tabs.includes('rl') ? 'its rollouts' : 'its documents'}, drag to zoom` : ''}));
  const budget = new StackChart('Where the time goes', 'step/phase/*, step/wait/*', 'ms per step', data.lines, {height: 206, onPick: pick});
  const parts = [budget];
  const grid = h('div', {class: 'grid'});
  if (charts.length) grid.append(charts[0].root);
  if (data.lines.some(l => Object.keys(l.parts).length)) grid.append(budget.root);
  const mix = mixCard(data, pick);
  if (mix) { grid.append(mix.root); parts.push(mix); }
  for (const c of charts.slice(1)) grid.append(c.root);
  if (status.ranks > 1 && data.lines.some(l => l.ranks || l.worst)) { const map = new HeatMap('Exposed wait by rank', 'waits/exposed/seconds', data.lines.filter(l => l.ranks || l.worst), status.ranks, {size: 'half'}); grid.append(map.root); parts.push(map); }
  put(main, top, verdict, figures, grid, h('footer', {}, data.facts.map(([k, v]) => `${k} ${v}`).join(' · ')));
  leave.push(() => { for (const c of [...charts, ...parts]) c.remove(); });
  follow(run, status, charts.flatMap(c => c.curves.map(x => x.key)), news => {
    if (!charts.length && news.status.lines > status.lines) { route(); return; }  // the page was open before the first line
    showTop(news);
    for (const c of charts) c.append(news.points);
    for (const c of parts) c.append(news.lines);
  });
}

function mixCard(data, pick) {
  const names = [...new Set(data.lines.flatMap(l => Object.keys(l.tokens)))].sort();
  if (names.length < 2) return null;
  const sums = Object.fromEntries(names.map(n => [n, 0]));
  const curves = names.map(n => ({key: n, name: n, steps: [], values: []}));
  const targets = Object.fromEntries(Object.entries(data.targets).map(([n, t]) => [n, 100 * t]));
  const take = lines => {
    for (const line of lines) {
      for (const n of names) sums[n] += line.tokens[n] || 0;
      const all = Object.values(sums).reduce((a, b) => a + b, 0);
      if (all) for (const c of curves) { c.steps.push(line.step); c.values.push(100 * sums[c.key] / all); }
    }
  };
  take(data.lines);
  const chart = new LineChart({title: 'Share of tokens by source', key: 'data/source_tokens/<source>', unit: '%', curves}, {height: 130, onPick: pick, targets});
  const rows = () => { const all = Object.values(sums).reduce((a, b) => a + b, 0) || 1; put(chart.body, h('div', {class: 'mix'}, names.slice(0, 8).map((n, i) => {
    const share = 100 * sums[n] / all, target = targets[n];
    return h('div', {class: 'row'}, h('span', {class: 'name', title: n}, n), share_bar(share, target, SERIES[i % 8]), h('span', {class: 'num small'}, `${share.toFixed(1)} %`, target !== undefined ? h('span', {class: 'dim'}, ` of ${target.toFixed(1)} %`) : ''));
  }))); };
  rows();
  chart.append = lines => { take(lines); chart.curves = curves.map(c => ({...c})); rows(); if (chart.width) chart.draw(); };
  const draw = chart.draw.bind(chart);
  chart.draw = () => { draw(); put(chart.legend); };
  return chart;
}
function share_bar(share, target, tint) {
  const svg = s('svg', {viewBox: '0 0 100 10', height: 10, width: '100%', preserveAspectRatio: 'none'});
  svg.append(s('rect', {x: 0, y: 2, width: 100, height: 6, fill: colour('line')}), s('rect', {x: 0, y: 2, width: Math.min(share, 100), height: 6, fill: colour(tint)}));
  if (target !== undefined) svg.append(s('rect', {x: Math.max(target - 2, 0), y: 0, width: 4, height: 10, fill: colour('dim'), opacity: .18}), s('rect', {x: target - .3, y: 0, width: .6, height: 10, fill: colour('ink')}));
  return svg;
}

// ------------------------------------------------------------------------------------------------- step

async function stepPage(run, number) {
  const {status, tabs} = await api('config', {run});
  bar(run, tabs, 'step');
  const step = Number(number) || status.step;
  if (!number) { location.replace(link(run, 'step', step)); return; }
  const body = h('div', {}, h('p', {class: 'loading'}, 'Making the documents of this step again…'));
  const input = h('input', {type: 'number', value: step, min: 1, 'aria-label': 'step'});
  put(main, h('div', {class: 'head'}, h('h1', {}, `Step ${whole(step)}`), h('span', {class: 'dim'}, `of ${status.name}`)),
    h('form', {class: 'toolbar', onsubmit: e => { e.preventDefault(); go(link(run, 'step', input.value)); }},
      h('button', {type: 'button', disabled: step <= 1, onclick: () => go(link(run, 'step', step - 1))}, '← earlier'), input, h('button', {type: 'button', onclick: () => go(link(run, 'step', step + 1))}, 'later →'),
      h('a', {href: link(run, 'overview')}, 'back to the curves')), body);
  const keyed = e => { if (e.target.closest('input, svg')) return; if (e.key === 'ArrowLeft' && step > 1) go(link(run, 'step', step - 1)); if (e.key === 'ArrowRight') go(link(run, 'step', step + 1)); };
  addEventListener('keydown', keyed);
  leave.push(() => removeEventListener('keydown', keyed));
  const answer = await answerFor(body, 'step', {run, step});
  if (!answer) return;
  const total = Object.values(answer.totals).reduce((a, t) => a + t.tokens, 0) || 1;
  const proof = answer.proven ? h('span', {class: 'pill good', title: answer.digest}, 'proven by the digest the run recorded') : h('span', {class: 'pill warn'}, 'not proven: the run has not recorded this step’s digest');
  const sources = Object.keys(answer.totals);
  const filter = h('select', {'aria-label': 'source', onchange: () => show()}, h('option', {value: ''}, 'all sources'), sources.map(n => h('option', {value: n}, n)));
  const words = h('input', {type: 'search', placeholder: 'text in these documents', 'aria-label': 'text', size: 26, oninput: () => show()});
  const list = h('div');
  const show = () => {
    const wanted = answer.documents.filter(d => (!filter.value || d.source === filter.value) && (!words.value || (d.text || '').toLowerCase().includes(words.value.toLowerCase())));
    put(list, ...wanted.slice(0, 400).map(d => documentCard(run, d)), wanted.length > 400 ? h('p', {class: 'dim'}, `and ${wanted.length - 400} more: headrace step ${status.path} ${step}`) : '');
  };
  put(body, h('p', {}, proof, h('span', {class: 'dim'}, ` ${whole(answer.documents.length)} pieces of documents, samples ${whole(answer.first_sample)} to ${whole(answer.first_sample + answer.samples - 1)}, ${answer.world_size} rank${answer.world_size > 1 ? 's' : ''}`)),
    h('div', {class: 'legend'}, Object.entries(answer.totals).sort(([a], [b]) => a < b ? -1 : 1).map(([n, t], i) => t.tokens && h('span', {}, h('i', {class: 'swatch', style: {background: colour(SERIES[i % 8])}}), `${n}: ${whole(t.documents)} documents, ${whole(t.tokens)} tokens (${(100 * t.tokens / total).toFixed(1)} %)`)), answer.padding ? h('span', {}, `padding ${whole(answer.padding)} tokens`) : ''),
    h('details', {}, h('summary', {class: 'dim'}, 'Skip this step in a later run'), command(`headrace run --resume ${status.path} --run.skip ${step}:${step + 1}`), command(`headrace step ${status.path} ${step} --format json`)),
    h('div', {class: 'toolbar'}, filter, words), list);
  show();
}

function documentCard(run, d) {
  const text = h('div', {class: 'text'}, d.start ? '…' : '', d.text === null ? '' : d.text, d.shortened ? '…' : '');
  const button = h('button', {class: 'plain', onclick: async () => {
    button.textContent = 'reading…';
    try {
      const answer = await api('tokens', {run, sample: d.sample});
      const piece = answer.pieces.find(p => p.column === d.column) || answer.pieces[0];
      put(text, ...piece.texts.map((t, i) => h('span', {class: 'tok', title: `token ${piece.start + i} of the document, id ${piece.ids[i]}`}, t === '' ? '·' : t)));
      button.remove();
    } catch (error) { button.textContent = String(error.message); }
  }}, 'all of it, token by token');
  return h('article', {class: 'doc'}, h('div', {class: 'where'}, h('b', {}, d.source), h('span', {class: 'key'}, `${d.file} row ${d.row}`), h('span', {class: 'dim small num'}, `tokens ${whole(d.start)}–${whole(d.start + d.length)} · rank ${d.rank} · row ${d.position} · column ${d.column}`),
    d.step !== undefined ? h('a', {href: link(run, 'step', d.step)}, `step ${whole(d.step)}`) : '', button, h('a', {href: link(run, 'find', d.source, d.row, d.file)}, 'other steps that saw it')), text);
}

// ------------------------------------------------------------------------------------------------- find

async function findPage(run, source, row, file) {
  const {status, tabs, config} = await api('config', {run});
  bar(run, tabs, 'find');
  const sources = config.filter(([k]) => /^source\.\d+\.name$/.test(k)).map(([, v]) => v);
  const which = h('select', {'aria-label': 'source'}, sources.map(n => h('option', {value: n, selected: n === source}, n)));
  const at = h('input', {type: 'number', min: 0, value: row || '', placeholder: 'row', 'aria-label': 'row'});
  const inFile = h('input', {value: file || '', placeholder: 'file (optional)', 'aria-label': 'file', size: 34});
  const words = h('input', {type: 'search', placeholder: 'a text fragment', 'aria-label': 'text', size: 30});
  const near = h('input', {type: 'number', min: 1, value: status.step, 'aria-label': 'around step'});
  const body = h('div');
  put(main, h('div', {class: 'head'}, h('h1', {}, 'Find'), h('span', {class: 'dim'}, 'which steps saw a document')),
    h('form', {class: 'toolbar', onsubmit: e => { e.preventDefault(); go(link(run, 'find', which.value, at.value || '0', inFile.value)); }}, h('span', {class: 'dim'}, 'Document'), which, at, inFile, h('button', {}, 'Find')),
    h('form', {class: 'toolbar', onsubmit: e => { e.preventDefault(); search(); }}, h('span', {class: 'dim'}, 'Text'), words, h('span', {class: 'dim'}, 'around step'), near, h('button', {}, 'Search')), body);
  async function search() {
    put(body, h('p', {class: 'loading'}, 'Making the documents around that step again…'));
    const answer = await answerFor(body, 'search', {run, text: words.value, step: near.value});
    if (answer) put(body, h('p', {class: 'dim'}, `${answer.documents.length} pieces in steps ${answer.steps[0]} to ${answer.steps[answer.steps.length - 1]}`), ...answer.documents.map(d => documentCard(run, d)));
  }
  if (source === undefined || row === undefined) return;
  put(body, h('p', {class: 'loading'}, 'Looking for its windows…'));
  const answer = await answerFor(body, 'find', {run, source, row, file});
  if (!answer) return;
  put(body, h('h2', {}, `${answer.source} row ${whole(answer.source_row)}`), h('div', {class: 'key'}, `${answer.file} row ${answer.row}`),
    answer.seen.length ? table(['Step', 'Epoch', 'Sample', 'Rank', 'Row', 'Tokens'], answer.seen.map(x => h('tr', {}, h('td', {}, x.step === null ? 'skipped' : h('a', {href: link(run, 'step', x.step)}, whole(x.step))), [x.epoch, x.sample, x.rank, x.position].map(v => h('td', {}, whole(v))), h('td', {}, `${whole(x.start)}–${whole(x.start + x.length)}`)))) : h('p', {class: 'empty'}, `Not seen up to step ${whole(answer.last_step)}.`),
    answer.never ? h('p', {class: 'dim'}, `It does not come${answer.seen.length ? ' again' : ''}: ${answer.never}`) : '',
    answer.upcoming ? h('p', {class: 'dim'}, `It comes next in epoch ${answer.upcoming.epoch}, lane ${answer.upcoming.lane}, at position ${whole(answer.upcoming.position)}.`) : '');
}

// ---------------------------------------------------------------------------------------------- compare

async function comparePage(a, b) {
  bar(null, null);
  const data = await api('compare', {a, b});
  document.title = `${data.a.name} and ${data.b.name} – headrace`;
  const parts = h('div', {}, h('p', {class: 'loading'}, 'Comparing what the two runs saw…'));
  const charts = data.charts.map((p, i) => new LineChart(p, {size: i === 0 ? 'wide' : '', height: i === 0 ? 230 : 180, onPick: data.provenance ? step => go(link(a, 'step', step)) : null}));
  const side = (letter, status, run) => h('span', {}, h('b', {}, letter + ' '), h('a', {href: link(run, 'overview')}, status.name), h('span', {class: 'key'}, ' ' + run), h('span', {class: 'dim'}, ` ${status.state}, step ${whole(status.step)}`));
  put(main, h('div', {class: 'head'}, h('h1', {}, 'Compare'), side('A', data.a, a), side('B', data.b, b)), parts, h('div', {class: 'grid'}, charts.map(c => c.root)),
    h('h2', {}, 'Config'), data.config.length ? table(['Key', 'A', 'B'], data.config.map(([k, x, y]) => h('tr', {}, h('td', {class: 'key'}, k), h('td', {}, x === null ? '–' : x), h('td', {}, y === null ? '–' : y)))) : h('p', {class: 'dim'}, 'The configs are the same.'));
  leave.push(() => charts.forEach(c => c.remove()));
  if (!data.provenance) { put(parts, h('p', {class: 'dim'}, 'Only text runs record which documents they saw.')); return; }
  const answer = await answerFor(parts, 'diff', {a, b});
  if (!answer) return;
  const seen = (letter, x, run) => x && h('article', {class: 'doc'}, h('div', {class: 'where'}, h('b', {}, letter), x.source === null ? 'nothing to learn' : [h('b', {}, x.source), h('span', {class: 'key'}, `${x.file} row ${x.row}`)], x.step !== null ? h('a', {href: link(run, 'step', x.step)}, `step ${whole(x.step)}`) : 'skipped'), x.text ? h('div', {class: 'text'}, x.text) : '');
  put(parts, h('div', {class: 'verdict ' + (answer.same ? 'good' : 'warn')}, h('span', {class: 'mark', 'aria-hidden': 'true'}, answer.same ? '✓' : '!'),
    answer.same ? `The same data for all ${whole(Math.min(answer.steps_a, answer.steps_b))} steps that both have` : `The data parts at step ${whole(answer.step_a)}${answer.step_a !== answer.step_b ? ` of A, step ${whole(answer.step_b)} of B` : ''}`),
    h('p', {class: 'dim'}, answer.samples_compared ? `${whole(answer.samples_compared)} samples before it are equal. ` : '', Object.keys(answer.order).length ? ['Different: ', Object.entries(answer.order).map(([k, [x, y]]) => h('span', {class: 'pill'}, `${k.replace('config:', '')}: A ${x}, B ${y}`))] : ''),
    h('div', {class: 'pair'}, seen('A', answer.seen_a, a), seen('B', answer.seen_b, b)), ...answer.notes.map(n => h('p', {class: 'dim'}, n)));
}

// ---------------------------------------------------------------------------------------------- metrics

async function metricsPage(run, wanted) {
  const data = await api('metrics', {run});
  bar(run, data.tabs, 'metrics');
  const pick = picker(run, data.tabs), zoom = zoomer(run), flagged = new Set(data.findings.map(f => f.key));
  const words = h('input', {type: 'search', placeholder: 'search metrics', 'aria-label': 'search metrics', size: 32, value: ''});
  const groups = new Map(), cards = [];
  const holder = h('div');
  for (const p of data.panels) {
    if (!groups.has(p.group)) { const title = h('h2', {}, p.group), grid = h('div', {class: 'grid'}); holder.append(title, grid); groups.set(p.group, {title, grid, cards: []}); }
    const chart = new LineChart(p, {onPick: pick, onZoom: zoom, marks: data.marks, help: true, lazy: true, height: 160});
    if (p.curves.some(c => flagged.has(c.key))) chart.root.classList.add('flag');
    if (p.healthy) chart.root.querySelector('.help').append(` Healthy: ${short(p.healthy[0])} to ${p.healthy[1] === null ? '∞' : short(p.healthy[1])}.`);
    groups.get(p.group).grid.append(chart.root);
    const entry = {chart, panel: p, text: (p.title + ' ' + p.key + ' ' + p.curves.map(c => c.key).join(' ') + ' ' + p.help).toLowerCase()};
    cards.push(entry); groups.get(p.group).cards.push(entry);
  }
  let queue = [], timer = null;
  const fetchQueued = async () => {
    timer = null;
    while (queue.length) {
      const batch = queue.splice(0, 6);
      const keys = batch.flatMap(e => e.panel.curves.map(c => c.key));
      try { const {curves} = await api('curves', {run, key: keys, points: 300}); for (const e of batch) { for (const c of e.chart.curves) Object.assign(c, curves[c.key] || {}); e.chart.draw(); } } catch { /* the run went away; the next visit says so */ }
    }
  };
  const seen = new IntersectionObserver(entries => { for (const x of entries) if (x.isIntersecting) { seen.unobserve(x.target); queue.push(cards.find(e => e.chart.root === x.target)); } if (queue.length && !timer) timer = setTimeout(fetchQueued, 20); }, {rootMargin: '300px'});
  cards.forEach(e => seen.observe(e.chart.root));
  words.addEventListener('input', () => { const w = words.value.toLowerCase(); for (const e of cards) e.chart.root.hidden = !e.text.includes(w); for (const g of groups.values()) { const none = g.cards.every(e => e.chart.root.hidden); g.title.hidden = none; g.grid.hidden = none; } });
  put(main, ...titled(data.status).filter(x => x), h('div', {class: 'toolbar'}, words, h('span', {class: 'dim'}, `${data.panels.length} metrics`)), holder, data.zero.length ? h('p', {class: 'zero'}, 'Always zero, not drawn: ' + data.zero.join(', ')) : '');
  leave.push(() => { seen.disconnect(); clearTimeout(timer); cards.forEach(e => e.chart.remove()); });
  if (wanted) { const entry = cards.find(e => e.panel.curves.some(c => c.key === wanted)); if (entry) { entry.chart.root.classList.add('marked'); entry.chart.root.scrollIntoView({block: 'center'}); } }
  follow(run, data.status, [], () => 0);
}

// ---------------------------------------------------------------------------------------------- streams

async function streamsPage(run, wanted) {
  const data = await api('streams', {run});
  bar(run, data.tabs, 'streams');
  const charts = data.charts.map(p => new LineChart(p, {marks: data.marks, onZoom: zoomer(run), height: 170}));
  const grid = h('div', {class: 'grid'});
  const total = Object.values(data.picks).reduce((a, b) => a + b, 0) || 1;
  if (data.pool.slices && data.pool.slices.length) { const lanes = new LaneChart('Open files over time', data.pool, {size: 'full'}); grid.append(lanes.root); leave.push(() => lanes.remove()); }
  else if (data.pool.refused) grid.append(h('p', {class: 'refused card full'}, data.pool.refused));
  if (Object.keys(data.picks).length) grid.append(h('section', {class: 'card'}, h('h3', {}, 'Picks so far'), h('div', {class: 'key'}, 'stream_mixing/picks/<modality>'), h('div', {class: 'mix'}, Object.entries(data.picks).map(([n, c], i) => h('div', {class: 'row'}, h('span', {class: 'name'}, n), share_bar(100 * c / total, undefined, SERIES[i % 8]), h('span', {class: 'num small'}, `${(100 * c / total).toFixed(1)} %`))))));
  charts.forEach(c => { if (wanted && c.curves.some(x => x.key === wanted)) c.root.classList.add('marked'); grid.append(c.root); });
  put(main, ...titled(data.status).filter(x => x), data.findings.length ? findingsList(data.findings, run, data.tabs) : '', grid);
  const marked = main.querySelector('.card.marked');
  if (marked) marked.scrollIntoView({block: 'center'});
  leave.push(() => charts.forEach(c => c.remove()));
  follow(run, data.status, charts.flatMap(c => c.curves.map(x => x.key)).slice(0, 40), news => charts.forEach(c => c.append(news.points)));
}

// ------------------------------------------------------------------------------------------------ spool

async function spoolPage(run) {
  const data = await api('spool', {run});
  bar(run, data.tabs, 'spool');
  const parts = [];
  if (data.refused) parts.push(h('p', {class: 'refused'}, data.refused));
  else {
    const sp = data.spool, channels = Object.values(sp.splits).flat();
    const missing = channels.reduce((n, c) => n + c.gaps.length, 0), aside = channels.reduce((n, c) => n + c.quarantined, 0), ahead = Math.min(...channels.map(c => c.backlog));
    const level = missing || aside ? 'bad' : data.status.state === 'running' && ahead === 0 ? 'warn' : 'good';
    const ready = ahead === 0 ? 'No file is ready: the trainer waits for a provider' : `${whole(ahead)} file${ahead === 1 ? ' is' : 's are'} ready for the slowest rank`;
    if (channels.length) parts.push(h('div', {class: 'verdict ' + level}, h('span', {class: 'mark', 'aria-hidden': 'true'}, level === 'good' ? '✓' : '!'), h('span', {}, `${ready}, ${whole(missing)} missing, ${whole(aside)} in quarantine`)));
    for (const [split, channels] of Object.entries(sp.splits)) parts.push(h('h2', {}, `Split ${split}`), table(['Part', 'Files', 'Size', 'First', 'Last', 'Read up to', 'Committed up to', 'Backlog', 'Missing', 'Quarantine'],
      channels.map(c => h('tr', {}, [c.part, c.files, bytes(c.bytes), c.first, c.last, c.read, c.commit, c.backlog].map(v => h('td', {}, v === null ? '–' : v)), h('td', {}, c.gaps.length ? h('span', {class: 'pill bad'}, `${c.gaps.length}: ${c.gaps.slice(0, 5).join(', ')}`) : '0'), h('td', {}, c.quarantined ? h('span', {class: 'pill bad'}, c.quarantined) : '0')))));
    if (data.ranks.length) parts.push(h('h2', {}, 'Ranks'), table(['Rank', 'Read up to', 'Behind the newest file'], data.ranks.flatMap(r => Object.entries(r.done).map(([split, done]) => {
      const behind = (sp.splits[split] || []).map((c, part) => c.last === null ? 0 : Math.max(c.last + 1 - (done[part] ?? 0), 0));
      return h('tr', {}, h('td', {}, `${r.rank} of ${r.world_size}`), h('td', {}, `${split} ${done.join(', ')}`), h('td', {}, behind.join(', ')));
    }))));
    const work = Object.entries(sp.at_work);
    parts.push(h('h2', {}, 'At work'), work.length ? table(['Role', 'Process'], work.map(([k, v]) => h('tr', {}, h('td', {}, k), h('td', {}, v)))) : h('p', {class: 'dim'}, 'No process holds a lock of this spool.'));
    if (data.quarantine.length) parts.push(h('h2', {}, 'Quarantine'), table(['File', 'Reason'], data.quarantine.map(q => h('tr', {}, h('td', {}, q.file || ''), h('td', {}, q.reason || JSON.stringify(q))))));
    parts.push(h('h2', {}, 'Files'), table(['File', 'Rows', 'Size', 'Verdict', 'Made'], data.files.slice().reverse().map(f => h('tr', {}, h('td', {class: 'key'}, `${f.split} ${f.name}`), h('td', {}, f.rows === null ? h('span', {class: 'pill bad'}, 'unreadable') : whole(f.rows)), h('td', {}, bytes(f.bytes)), h('td', {}, h('span', {class: 'pill ' + (f.verdict === 'bad' ? 'bad' : f.verdict === 'good' ? 'good' : '')}, f.verdict)), h('td', {class: 'dim'}, new Date(f.produced_at * 1000).toLocaleTimeString())))));
    for (const w of sp.disk.warnings || []) parts.unshift(h('article', {class: 'finding'}, h('h3', {}, 'The disk of the spool'), h('p', {}, w)));
  }
  const charts = data.charts.map(p => new LineChart(p, {marks: data.marks, onZoom: zoomer(run), height: 160}));
  put(main, ...titled(data.status).filter(x => x), ...parts, charts.length ? h('h2', {}, 'Over time') : '', h('div', {class: 'grid'}, charts.map(c => c.root)));
  leave.push(() => charts.forEach(c => c.remove()));
  if (!EMBEDDED && data.status.state === 'running') { const timer = setTimeout(route, 5000); leave.push(() => clearTimeout(timer)); }
}

// --------------------------------------------------------------------------------------------------- RL

async function rlPage(run, step, chosen) {
  if (chosen === undefined) shownRollouts = null;
  if (step !== undefined) return rolloutPage(run, Number(step), Number(chosen || 0));
  const data = await api('rl', {run});
  bar(run, data.tabs, 'rl');
  const pick = data.steps.length && !EMBEDDED ? at => { const near = data.steps.reduce((a, b) => Math.abs(b - at) < Math.abs(a - at) ? b : a); go(link(run, 'rl', near)); } : null;
  const options = {marks: data.marks, onZoom: zoomer(run), onPick: pick, pickText: 'click: its rollouts', height: 170};
  const hint = pick ? 'click a point to read its rollouts, drag to zoom' : '';
  const charts = [...data.rewards, ...data.charts].map((p, i) => new LineChart(p, {...options, size: i === 0 ? 'wide' : '', height: i === 0 ? 230 : 170, hint: i === 0 ? hint : ''}));
  const budget = new StackChart('Where the time goes', 'step/phase/*, step/wait/*', 'ms per step', data.lines, {height: 206});
  const grid = h('div', {class: 'grid'}, charts.length ? charts[0].root : '', data.lines.some(l => Object.keys(l.parts).length) ? budget.root : '', charts.slice(1).map(c => c.root));
  const newest = data.steps[data.steps.length - 1];
  put(main, ...titled(data.status).filter(x => x), data.findings.length ? findingsList(data.findings, run, data.tabs) : '', newest !== undefined && !EMBEDDED ? h('p', {}, h('a', {href: link(run, 'rl', newest)}, `Read the rollouts of step ${whole(newest)}`)) : '', grid, groupsTable(run, data.groups || []),
    data.answers.length ? h('h2', {}, 'Held-out answers, first and last evaluation') : '', data.answers.map(a => h('article', {class: 'doc'}, h('div', {class: 'where'}, h('b', {}, `step ${whole(a.step)}`), h('span', {class: 'dim small'}, `${a.env} task ${a.task} · reward ${short(a.reward)}`)), h('div', {class: 'text'}, `${a.prompt} → ${a.answer}`))));
  leave.push(() => [...charts, budget].forEach(c => c.remove()));
  follow(run, data.status, charts.flatMap(c => c.curves.map(x => x.key)).slice(0, 40), news => { charts.forEach(c => c.append(news.points)); budget.append(news.lines); });
}

function groupsTable(run, groups) {
  if (!groups.length) return '';
  const row = g => h('tr', {}, h('td', {}, EMBEDDED ? whole(g.step) : h('a', {href: link(run, 'rl', g.step)}, whole(g.step))), h('td', {}, h('span', {class: 'pill ' + (g.trained ? 'good' : '')}, g.trained ? 'trained' : 'collecting')),
    [g.rollouts, g.complete, g.open].map(v => h('td', {class: 'right'}, whole(v))), h('td', {}, Object.keys(g.failed).length ? Object.entries(g.failed).map(([cause, n]) => h('span', {class: 'pill bad'}, `${cause}: ${whole(n)}`)) : '–', g.damaged ? h('span', {class: 'pill bad'}, 'damaged log') : ''));
  return h('div', {}, h('h2', {}, 'Groups of the newest steps'), h('div', {class: 'scroll'}, h('table', {id: 'groups'}, h('thead', {}, h('tr', {}, h('th', {}, 'Step'), h('th', {}, 'State'), ['Rollouts', 'Groups complete', 'Groups open'].map(t => h('th', {class: 'right'}, t)), h('th', {}, 'Failed requests by cause'))), h('tbody', {}, groups.map(row)))));
}

let tokenColour = 'logprob';
let shownRollouts = null;  // the step whose rollouts were read last: another rollout of it needs no request
function sign(v) { return v === null || v === undefined ? '–' : (v > 0 ? '+' : '') + short(v, 3); }
async function rolloutPage(run, step, chosen) {
  const data = shownRollouts && shownRollouts.key === `${run}/${step}` ? shownRollouts.data : await api('rollouts', {run, step});
  shownRollouts = {key: `${run}/${step}`, data};
  bar(run, data.tabs, 'rl');
  const {rollouts, steps} = data, at = steps.indexOf(step), one = rollouts[Math.min(chosen, rollouts.length - 1)];
  const groups = [...new Set(rollouts.map(r => r.example_id))];
  const detail = h('div');
  const mixed = (name, share) => `color-mix(in srgb, ${colour(name)} ${Math.round(70 * Math.min(1, Math.max(0, share)))}%, transparent)`;
  const most = Math.max(...rollouts.map(r => Math.abs(r.advantage || 0)), 1e-9);
  const tint = p => tokenColour === 'advantage' ? (one.advantage ? mixed(one.advantage > 0 ? 's0' : 'w0', Math.abs(one.advantage) / most) : 'transparent') : p === null ? 'transparent' : mixed('w0', -p / 6);
  const version = (t, i) => { const span = (t.spans || []).find(([, a, b]) => i >= a && i < b); return span ? `, sampled by policy ${span[0]}` : ''; };
  const legend = {logprob: 'darker: less likely under the policy', advantage: 'blue: above its group, orange: below; darker: further'};
  const turn = t => (t.tokens.length ? t.messages.slice(0, 1) : t.messages).map(m => h('div', {class: 'turn ' + m.role}, h('div', {class: 'role'}, m.role), h('div', {class: 'text'}, m.text))).concat(t.logprobs.length ? h('div', {class: 'turn answer'}, h('div', {class: 'role'}, `${t.tokens.length ? 'completion' : 'token ids of the completion'}, ${t.logprobs.length} tokens; ${legend[tokenColour]}`), h('div', {class: 'text'}, t.logprobs.map((p, i) => h('span', {class: 'tok', title: `id ${t.ids[i]}, log-prob ${short(p, 3)}, advantage ${sign(one.advantage)}${version(t, i)}`, style: {background: tint(p)}}, t.tokens[i] !== undefined ? t.tokens[i] : ` ${t.ids[i]}`)))) : []);
  const chooser = h('select', {'aria-label': 'colour tokens by', onchange: () => { tokenColour = chooser.value; route(); }}, [['logprob', 'log-prob'], ['advantage', 'advantage']].map(([v, text]) => h('option', {value: v, selected: v === tokenColour}, text)));
  if (one) put(detail, h('div', {class: 'legend'}, [['task', one.example_id], ['environment', one.env_name], ['reward', short(one.reward)], ['against its group', sign(one.advantage)], ['policy version', one.policy_version], ['trained in step', one.error || (one.filters || []).length ? null : step], ['attempt', one.attempt || null]].filter(([, v]) => v !== undefined && v !== null && v !== '').map(([k, v]) => h('span', {}, k, h('b', {}, String(v)))), Object.entries(one.metrics || {}).map(([k, v]) => h('span', {}, k, h('b', {}, short(v))))), ...(one.filters || []).map(f => h('article', {class: 'finding', 'data-filter': f}, h('h3', {}, `Filter ${f} fired`), h('p', {}, 'Every rollout of the group has the same reward, so the group is left out of the training step (rollouts.drop_equal).'))), one.error ? h('article', {class: 'finding bad'}, h('h3', {}, 'Error'), h('p', {}, one.error)) : '', h('div', {class: 'chat'}, one.turns.map(turn)));
  if (data.damaged) detail.prepend(h('article', {class: 'finding bad'}, h('h3', {}, 'Not all rollouts are shown'), h('p', {}, data.damaged)));
  put(main, h('div', {class: 'head'}, h('h1', {}, `Rollouts of step ${whole(step)}`), h('span', {class: 'dim'}, `${rollouts.length} rollouts, ${groups.length} groups, of ${data.status.name}`)),
    h('div', {class: 'toolbar'}, h('button', {disabled: at <= 0, onclick: () => go(link(run, 'rl', steps[at - 1]))}, '← earlier'), h('button', {disabled: at < 0 || at >= steps.length - 1, onclick: () => go(link(run, 'rl', steps[at + 1]))}, 'later →'), h('label', {class: 'dim'}, 'Colour tokens by ', chooser), h('a', {href: link(run, 'rl')}, 'back to the curves')),
    h('div', {class: 'split'}, h('div', {class: 'list'}, h('table', {}, h('thead', {}, h('tr', {}, ['Task', 'Env', 'Reward', 'Against group'].map(t => h('th', {}, t)))), h('tbody', {}, rollouts.map((r, i) => h('tr', {class: 'link' + (r === one ? ' chosen' : ''), onclick: () => go(link(run, 'rl', step, i))}, h('td', {}, h('a', {href: link(run, 'rl', step, i)}, r.example_id ?? '–')), h('td', {}, r.env_name ?? ''), h('td', {}, r.error ? h('span', {class: 'pill bad'}, 'failed') : short(r.reward, 3)), h('td', {}, sign(r.advantage))))))), detail));
  const row = main.querySelector('tr.chosen');
  if (row) row.scrollIntoView({block: 'nearest'});
  scrollTo(0, 0);
}

// ----------------------------------------------------------------------------------------------- config

async function configPage(run) {
  const data = await api('config', {run});
  bar(run, data.tabs, 'config');
  put(main, ...titled(data.status).filter(x => x), data.status.resume ? command(data.status.resume) : '', h('h2', {}, 'Config'), table([], data.config.map(([k, v]) => h('tr', {}, h('td', {class: 'key'}, k), h('td', {}, v)))),
    h('h2', {}, 'Journal'), table([], data.events.slice().reverse().map(e => h('tr', {}, h('td', {class: 'dim small'}, Number.isFinite(Number(e.time)) ? new Date(Number(e.time) * 1000).toLocaleString() : ''), h('td', {}, e.event), h('td', {class: 'dim'}, Object.entries(e).filter(([k]) => k !== 'time' && k !== 'event').map(([k, v]) => `${k} ${v}`).join(', '))))));
}

// ------------------------------------------------------------------------------------------------ route

const PAGES = {overview: overviewPage, step: stepPage, find: findPage, metrics: metricsPage, streams: streamsPage, spool: spoolPage, rl: rlPage, config: configPage};
async function route() {
  leave.forEach(f => f());
  leave = [];
  const here = ++visit;
  const parts = location.hash.replace(/^#\/?/, '').split('/').filter(x => x !== '').map(x => { try { return decodeURIComponent(x); } catch { return x; } });
  main.dataset.ready = '';
  try {
    if (parts[0] === 'run' && parts[1] !== undefined) await (PAGES[parts[2]] || overviewPage)(parts[1], ...parts.slice(3));
    else if (parts[0] === 'compare' && parts.length === 3) await comparePage(parts[1], parts[2]);
    else if (EMBEDDED) { location.replace(link(EMBEDDED.run, 'overview')); return; }
    else {
      const {runs} = await api('runs');
      if (runs.length === 1 && !location.hash) { location.replace(link(runs[0].run, 'overview')); return; }
      await runsPage();
    }
  } catch (error) { if (here === visit) { if (!head.children.length) bar(null, null); put(main, refused(error)); } }
  if (here === visit) main.dataset.ready = location.hash || '#/';
}
addEventListener('hashchange', () => { scrollTo(0, 0); route(); });
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', route);
addEventListener('keydown', e => { if (e.key === '/' && !e.target.closest('input, textarea')) { const field = main.querySelector('input[type=search]') || head.querySelector('input'); if (field) { e.preventDefault(); field.focus(); } } });
route();
