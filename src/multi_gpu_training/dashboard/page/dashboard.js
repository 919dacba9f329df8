// The dashboard. Whatever comes from a run goes in through textContent: names and errors are text.
'use strict';

const SVG = 'http://www.w3.org/2000/svg';
const PHASES = ['input', 'forward', 'backward', 'comm', 'optimizer', 'checkpoint', 'other', 'queued'];
const PHASE_WORDS = { comm: 'communication', queued: 'ready, but without a core' };
const DASHES = ['', '6 3', '2 3', '8 3 2 3', '1 4', '10 4', '4 2', '3 6'];
const MARKS = { running: '\u25b6', finished: '\u2713', failed: '\u2715', killed: '\u2715', stopped: '\u25a0',
  quiet: '?', unreadable: '!' };
const TITLES = { samples_per_s: 'samples/s', lr: 'learning rate', grad_norm: 'gradient norm',
  input_wait: 'share of time waiting for data' };
const FROM_ZERO = ['samples_per_s', 'input_wait', 'lr'];
const X_WORDS = { step: 'step', time: 'time', samples: 'samples' };
const SILENT_S = 30;      // of a running run, from which on the page says so
const WATCHDOG_MS = 25000; // the server says something every 10 s

const state = { runs: new Map(), ids: [], details: new Map(), selected: [], x: 'step', filter: '', roots: [],
  problems: [], readOnly: false, compared: null, reading: null, chosen: false, asked: new Map() };
const rows = new Map();
let token = '', stream = null, wait = 1000, lastHeard = 0, drawn = [];

const $ = (id) => document.getElementById(id);

function el(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined && text !== null) made.textContent = text;
  return made;
}

function svg(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  return made;
}

// Numbers as people read them

function num(value) {
  if (value === null || value === undefined) return '\u2013';
  const size = Math.abs(value);
  if (value === 0) return '0';
  if (size >= 1e6 || size < 1e-4) return value.toExponential(3).replace(/\.?0+e/, 'e');
  if (size >= 100) return Math.round(value).toLocaleString('en-US');
  return String(Number(value.toPrecision(4)));
}

function span(seconds) {
  if (seconds === null || seconds === undefined) return '';
  const s = Math.max(0, seconds), two = (n) => String(n).padStart(2, '0');
  if (s < 20) return Number(s.toFixed(1)) + ' s';
  if (s < 120) return Math.round(s) + ' s';
  const whole = Math.round(s), minutes = Math.floor(whole / 60);
  if (minutes < 60) return minutes + ' min ' + two(whole % 60) + ' s';
  return Math.floor(minutes / 60) + ' h ' + two(minutes % 60) + ' min';
}

function bytes(value) {
  if (value === null || value === undefined) return '\u2013';
  return value >= 2 ** 30 ? (value / 2 ** 30).toFixed(1) + ' GB' : (value / 2 ** 20).toFixed(1) + ' MB';
}

function percent(value) {
  return value === null || value === undefined ? '\u2013' : Math.round(value * 100) + '%';
}

// Address: #token=...&runs=a,b&x=time

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  token = given.get('token') || sessionStorage.getItem('token') || '';
  state.selected = (given.get('runs') || '').split(',').filter(Boolean).slice(0, 8);
  state.x = given.get('x') in X_WORDS ? given.get('x') : 'step';
}

function writeAddress() {
  sessionStorage.setItem('token', token);
  const parts = new URLSearchParams();
  parts.set('token', token);
  if (state.selected.length) parts.set('runs', state.selected.join(','));
  if (state.x !== 'step') parts.set('x', state.x);
  history.replaceState(null, '', '#' + parts.toString().replaceAll('%2C', ','));
}

async function call(path, options) {
  const answer = await fetch(path, { ...options, headers: { authorization: 'Bearer ' + token }, cache: 'no-store' });
  if (answer.status === 401) { unlock(); throw new Error('the token is missing or wrong'); }
  if (!answer.ok) {
    const told = await answer.json().catch(() => ({}));
    throw new Error(told.error || 'the server answered ' + answer.status);
  }
  return answer;
}

function unlock() {
  if (!$('locked').open) $('locked').showModal();
}

// The stream of changes

async function connect() {
  if (stream) stream.abort();
  const mine = stream = new AbortController();
  try {
    const answer = await call('api/stream?runs=' + state.selected.join(','), { signal: mine.signal });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    say('live', 'live');
    wait = 1000;
    let rest = '';
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      lastHeard = performance.now();
      const parts = (rest + value).split('\n\n');
      rest = parts.pop();
      for (const part of parts) take(part);
    }
  } catch (error) {
    if (mine !== stream) return;  // another selection has its own stream
    if (!$('locked').open) say('lost', 'not connected (' + error.message + '); trying again');
  }
  if (mine !== stream || $('locked').open) return;
  say('lost', 'not connected; trying again');
  setTimeout(() => { if (mine === stream) connect(); }, wait);
  wait = Math.min(wait * 2, 10000);
}

function say(kind, text) {
  $('status').className = kind;
  $('status-text').textContent = text;
}

function take(part) {
  const kind = part.match(/^event: (\w+)/m), data = part.match(/^data: (.*)$/m);
  if (!kind || !data) return;
  const told = JSON.parse(data[1]);
  if (kind[1] === 'runs') {
    state.ids = told.ids;
    for (const run of told.changed) { run.since = performance.now() - (run.silent_s || 0) * 1000; state.runs.set(run.id, run); }
    for (const id of state.runs.keys()) if (!told.ids.includes(id)) state.runs.delete(id);
    state.roots = told.roots; state.problems = told.problems; state.readOnly = told.read_only; state.reading = told.reading;
    const running = told.ids.some((id) => state.runs.get(id).state === 'running');
    if (!state.chosen && !state.selected.length && told.ids.length && (running || !told.reading)) { select([firstOf(told.ids)]); }
    showList();
    const gone = state.selected.filter((id) => !state.runs.has(id));
    if (gone.length || !state.selected.length) showDetail();
    else if (state.selected.length > 1) compareSoon();
  } else if (kind[1] === 'run') {
    told.since = performance.now() - (told.silent_s || 0) * 1000;
    state.details.set(told.id, told);
    noteDone(told);
    showDetail();
  }
}

function firstOf(ids) {
  return ids.find((id) => state.runs.get(id).state === 'running') || ids[0];
}

// The list

function select(ids) {
  state.chosen = true;
  state.selected = ids.slice(0, 8);
  for (const id of state.details.keys()) if (!ids.includes(id)) state.details.delete(id);
  state.compared = null;
  writeAddress();
  showList();
  showDetail();
  connect();
}

function matches(run) {
  const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
  const text = (run.name + ' ' + run.state + ' ' + (run.mode || '')).toLowerCase();
  return words.every((word) => text.includes(word));
}

function ordered() {
  const runs = state.ids.map((id) => state.runs.get(id)).filter((run) => run && matches(run));
  const rank = (run) => (run.state === 'running' ? 0 : 1);
  return runs.sort((a, b) => rank(a) - rank(b) || (b.began || 0) - (a.began || 0) || a.name.localeCompare(b.name));
}

function makeRow(id) {
  const item = el('li', 'row');
  const box = el('input'); box.type = 'checkbox';
  box.addEventListener('change', () => toggle(id));
  const button = el('button');
  button.type = 'button';
  button.addEventListener('click', () => { select([id]); $('detail').focus({ preventScroll: true }); });
  const parts = { item, box, button, name: el('span', 'name'), spark: svg('svg', { viewBox: '0 0 84 22', 'aria-hidden': 'true' }),
    state: el('span', 'state'), bar: el('progress'), facts: el('span', 'facts') };
  parts.bar.max = 1;
  parts.bar.setAttribute('aria-label', 'progress');
  button.append(parts.name, parts.spark, parts.state, parts.bar, parts.facts);
  item.append(box, button);
  return parts;
}

function toggle(id) {
  const now = state.selected.includes(id) ? state.selected.filter((one) => one !== id) : [...state.selected, id];
  select(now);
}

function showList() {
  const shown = ordered();
  for (const [id, row] of rows) if (!state.runs.has(id)) { row.item.remove(); rows.delete(id); }
  const items = shown.map((run) => {
    if (!rows.has(run.id)) rows.set(run.id, makeRow(run.id));
    const row = rows.get(run.id);
    const open = state.selected.includes(run.id);
    row.item.classList.toggle('open', open);
    row.button.setAttribute('aria-pressed', String(open));
    row.box.checked = open;
    row.box.setAttribute('aria-label', 'Compare ' + run.name);
    if (row.version !== run.version) {
      row.version = run.version;
      row.name.textContent = run.name;
      row.name.title = run.name;
      row.state.className = 'state ' + run.state;
      row.state.textContent = MARKS[run.state] + ' ' + run.state;
      row.bar.hidden = run.state === 'finished' || run.progress === null || run.progress === undefined;
      row.bar.value = run.progress || 0;
      spark(row.spark, run.spark || []);
    }
    row.facts.textContent = facts(run);
    return row.item;
  });
  const list = $('rows');
  // Moved only where the order differs: what has the focus keeps it.
  if (items.length !== list.children.length || items.some((item, i) => item !== list.children[i])) {
    const focused = document.activeElement;
    list.replaceChildren(...items);
    if (focused && focused !== document.body && list.contains(focused)) focused.focus({ preventScroll: true });
  }
  const all = state.ids.length, running = [...state.runs.values()].filter((run) => run.state === 'running').length;
  $('count').textContent = all ? (shown.length < all ? shown.length + ' of ' : '') + all + (all === 1 ? ' run' : ' runs') + ', ' + running + ' running' + (state.reading ? ', reading ' + state.reading + ' more' : '') : state.reading ? 'reading ' + state.reading + ' runs' : '';
  document.querySelector('.keys').hidden = !all;
  $('roots').textContent = state.roots.join(', ');
  $('problems').replaceChildren(...state.problems.map((text) => el('p', 'notice', text)));
  document.title = running ? '(' + running + ') Runs' : 'Runs';
}

function facts(run) {
  const parts = [];
  if (run.progress !== null && run.progress !== undefined && run.state !== 'finished') parts.push(Math.floor(run.progress * 100) + '%');
  else if (run.step) parts.push(num(run.step) + (run.step === 1 ? ' step' : ' steps'));
  if (run.remaining_s !== null && run.remaining_s !== undefined) parts.push(span(run.remaining_s) + ' left');
  if (run.loss !== null && run.loss !== undefined) parts.push('loss ' + num(run.loss));
  if (run.samples_per_s) parts.push(num(run.samples_per_s) + ' samples/s');
  if (run.state === 'running' && silence(run) > SILENT_S) parts.push('silent for ' + span(silence(run)));
  return parts.map((part) => part.replaceAll(' ', '\u00a0')).join(' \u00b7 ') || run.problem || run.state_text;
}

function silence(run) { return (performance.now() - run.since) / 1000; }

function spark(box, values) {
  box.replaceChildren();
  if (values.length < 2) return;
  const low = Math.min(...values), high = Math.max(...values), width = high - low || 1;
  const points = values.map((v, i) => (1 + i * 82 / (values.length - 1)).toFixed(1) + ' ' + (20 - 18 * (v - low) / width).toFixed(1));
  box.append(svg('path', { d: 'M' + points.join('L'), class: 'line s0' }));
}

// One run, or several

function showDetail() {
  const box = $('detail'), there = state.selected.filter((id) => state.runs.has(id));
  const focus = document.activeElement && box.contains(document.activeElement) ? document.activeElement.id : '';
  const opened = new Set([...box.querySelectorAll('details[open]')].map((one) => one.id));
  const scrolled = new Map([...box.querySelectorAll('.scroll')].map((one) => [one.id, one.scrollLeft]));
  drawn = [];
  const parts = [], loaded = state.reading === 0;
  for (const id of state.selected) {
    if (loaded && !state.runs.has(id)) parts.push(el('p', 'notice', 'A selected run is not there any more: its folder was deleted or moved.'));
  }
  if (!there.length && !loaded) parts.push(el('p', 'empty', 'Reading the runs\u2026'));
  else if (!state.ids.length) parts.push(noRuns());
  else if (!there.length) parts.push(el('p', 'empty', 'Choose a run from the list. Tick several to compare them.'));
  else if (there.length === 1) parts.push(...oneRun(there[0]));
  else parts.push(...severalRuns(there));
  box.replaceChildren(...parts);
  for (const draw of drawn) draw();
  for (const id of opened) if ($(id)) $(id).open = true;
  for (const [id, left] of scrolled) if ($(id)) $(id).scrollLeft = left;
  if (focus && $(focus)) $(focus).focus({ preventScroll: true });
}

function noRuns() {
  const text = el('p', 'empty', 'There are no runs here yet. Start one, and it appears within seconds: ');
  text.append(el('code', '', 'mgt train image'));
  return text;
}

function oneRun(id) {
  const run = state.runs.get(id), more = state.details.get(id);
  const head = el('div', 'head');
  head.append(el('h2', '', run.name), el('span', 'state ' + run.state, MARKS[run.state] + ' ' + run.state_text));
  const parts = [head, el('p', 'soft path', run.path)];
  if (run.problem) parts.push(el('p', 'notice failed', run.problem));
  if (run.error) parts.push(el('p', 'notice failed', run.error));
  if (!more) return [...parts, el('p', 'empty', run.problem ? '' : 'Reading its events\u2026')];
  parts.push(actions(more), advance(run, more), tiles(more));
  if (more.verdict) parts.push(el('p', 'verdict ' + more.verdict_kind, capital(more.verdict) + '.'));
  if (more.forecast) parts.push(el('p', 'verdict forecast', capital(more.forecast.text) + '.'));
  parts.push(...curves([more]), ...ranks(more));
  parts.push(...table('checkpoints', 'Checkpoints', ['step', 'size', 'training paused', 'after'],
    more.checkpoints.map((c) => [num(c.step), c.size || '', c.stall, c.after]), 'None written yet.'));
  parts.push(...table('faults', 'Faults and restarts', ['after', 'what', 'ranks', 'step', 'action', 'message'],
    more.faults.map((f) => [f.after, f.kind, f.ranks, f.step ?? '', f.action, f.text]), 'None.'));
  parts.push(...table('events', 'Events', ['after', 'what', 'details'], more.events, 'None yet.'));
  for (const problem of more.problems) parts.push(el('p', 'soft footnote', problem));
  parts.push(settings(more));
  return parts;
}

function capital(text) { return text.charAt(0).toUpperCase() + text.slice(1); }

function advance(run, more) {
  const box = el('div', 'advance');
  if (run.progress !== null && run.progress !== undefined) {
    const bar = el('progress', 'large');
    bar.max = 1; bar.value = run.progress;
    bar.setAttribute('aria-label', 'progress of the run');
    box.append(bar);
  }
  const words = ['step ' + num(run.step) + (run.total ? ' of ' + num(run.total) : '')];
  if (run.progress !== null && run.progress !== undefined) words.push(Math.floor(run.progress * 100) + '%');
  if (run.elapsed_s) words.push(span(run.elapsed_s) + ' trained');
  if (run.remaining_s !== null && run.remaining_s !== undefined) words.push('about ' + span(run.remaining_s) + ' left');
  const line = el('p', '', words.join(' \u00b7 '));
  line.id = 'advance';
  box.append(line);
  if (run.state === 'running' && silence(run) > SILENT_S) {
    box.append(el('p', 'notice', 'It has written nothing for ' + span(silence(run)) + ': it may compile, validate, or hang.'));
  }
  return box;
}

function tiles(more) {
  const box = el('dl', 'tiles');
  for (const [name, value] of more.tiles) {
    if (name === 'state' || name === 'steps') continue;
    const tile = el('div', 'tile');
    tile.append(el('dt', '', name), el('dd', '', value));
    box.append(tile);
  }
  return box;
}

function table(id, title, heads, lines, nothing) {
  const heading = el('h3', '', title);
  if (!lines.length) return [heading, el('p', 'soft', nothing)];
  const box = el('div', 'scroll'), made = el('table'), head = el('tr'), body = el('tbody');
  box.id = id; box.tabIndex = 0; box.setAttribute('role', 'region'); box.setAttribute('aria-label', title);
  for (const name of heads) { const cell = el('th', '', name); cell.scope = 'col'; head.append(cell); }
  for (const line of lines) {
    const row = el('tr');
    for (const cell of line) row.append(cell instanceof Node ? cell : el('td', '', cell));
    body.append(row);
  }
  const top = el('thead');
  top.append(head);
  made.append(top, body);
  box.append(made);
  return [heading, box];
}

function settings(more) {
  const box = el('details');
  box.id = 'settings';
  box.append(el('summary', '', 'Settings (' + more.config.length + ')'), ...table('config', '', ['setting', 'value'], more.config, 'None recorded.').slice(1));
  return box;
}

function ranks(more) {
  if (!more.rank_rows.length) return [];
  const longest = Math.max(...more.rank_rows.map((r) => whole(r.phases)));
  const gpus = more.rank_rows.some((r) => r.gpu_use !== null);
  const lines = more.rank_rows.map((r) => {
    const name = el('td', r.slowest ? 'slowest' : '', 'rank ' + r.rank + (r.slowest ? ' (slowest)' : ''));
    const use = gpus ? r.gpu_use : r.cpu_use;
    return [name, phases(r, longest), meter(use, percent(use), 'use of rank ' + r.rank),
      meter(r.memory_total ? r.memory / r.memory_total : null, bytes(r.memory), 'memory of rank ' + r.rank), bytes(r.peak), r.device, r.host];
  });
  const parts = table('ranks', 'Ranks', ['rank', 'a step, by phase', gpus ? 'GPU use' : 'CPU use', 'memory', 'peak', 'device', 'machine'], lines, '');
  if (!longest) return parts;
  const legend = el('ul', 'legend');
  PHASES.forEach((phase, i) => {
    if (!more.rank_rows.some((r) => r.phases && r.phases[phase])) return;
    const item = el('li'), key = svg('svg', { width: 12, height: 12, 'aria-hidden': 'true' });
    key.append(svg('rect', { width: 12, height: 12, class: 'p' + i }));
    item.append(key, document.createTextNode(PHASE_WORDS[phase] || phase));
    legend.append(item);
  });
  parts.splice(1, 0, legend);
  return parts;
}

function meter(value, text, label) {
  const cell = el('td'), box = el('div', 'meter');
  if (value !== null && value !== undefined) {
    const bar = el('progress');
    bar.max = 1; bar.value = Math.min(1, value);
    bar.setAttribute('aria-label', label);
    box.append(bar);
  }
  box.append(el('span', '', text));
  cell.append(box);
  return cell;
}

function whole(phases) { return phases ? Object.values(phases).reduce((sum, ms) => sum + ms, 0) : 0; }

function phases(rank, longest) {
  const cell = el('td');
  if (!rank.phases) { cell.textContent = 'not timed'; return cell; }
  const words = PHASES.filter((p) => rank.phases[p] > 0).map((p) => (PHASE_WORDS[p] || p) + ' ' + num(rank.phases[p]) + ' ms').join(', ');
  const drawing = svg('svg', { width: 260, height: 16, role: 'img', 'aria-label': words });
  const title = svg('title');
  title.textContent = words;
  drawing.append(title);
  let x = 0;
  PHASES.forEach((phase, i) => {
    const width = 200 * (rank.phases[phase] || 0) / (longest || 1);
    if (!width) return;
    drawing.append(svg('rect', { x: x.toFixed(1), y: 2, width: width.toFixed(1), height: 12, class: 'p' + i }));
    x += width;
  });
  const text = svg('text', { x: (x + 6).toFixed(1), y: 12 });
  text.textContent = num(whole(rank.phases)) + ' ms';
  drawing.append(text);
  cell.append(drawing);
  return cell;
}

// Several runs

let comparing = 0;

function compareSoon() {
  clearTimeout(comparing);
  comparing = setTimeout(compare, 300);
}

async function compare() {
  const ids = state.selected.filter((id) => state.runs.has(id));
  if (ids.length < 2) return;
  try {
    const answer = await call('api/compare?runs=' + ids.join(','));
    const told = await answer.json();
    if (ids.join() !== state.selected.filter((id) => state.runs.has(id)).join()) return;
    state.compared = told;
    showDetail();
  } catch (error) { /* the stream says that the server is gone */ }
}

function severalRuns(ids) {
  const head = el('div', 'head');
  head.append(el('h2', '', ids.length + ' runs side by side'));
  const parts = [head], more = ids.map((id) => state.details.get(id)).filter(Boolean);
  const told = state.compared;
  if (!told) compareSoon();
  else parts.push(...table('compared', 'Results', told.title, told.rows, 'Nothing to compare yet.'));
  parts.push(...curves(more));
  if (told) parts.push(...table('differences', 'Settings that differ', ['setting', ...told.names], told.settings, 'None: the settings are the same.'));
  return parts;
}

// Curves

function curves(runs) {
  const bar = el('div', 'bar'), label = el('label', 'soft', 'over '), choice = el('select');
  choice.id = 'x-axis';
  label.htmlFor = 'x-axis';
  for (const [value, text] of Object.entries(X_WORDS)) { const option = el('option', '', text); option.value = value; choice.append(option); }
  choice.value = state.x;
  choice.addEventListener('change', () => { state.x = choice.value; writeAddress(); showDetail(); });
  const span = el('span');
  span.append(label, choice);
  bar.append(el('h3', '', 'Curves'), span);
  const names = [];
  for (const run of runs) if (run.curves) for (const part of ['train', 'val']) for (const name of Object.keys(run.curves[part].values)) if (!names.includes(name)) names.push(name);
  if (!names.length) return [bar, el('p', 'soft', 'Nothing is logged yet: the first values come after a few steps.')];
  const box = el('div', 'charts'), parts = [bar];
  if (runs.length > 1) parts.push(legend(runs.map((run) => run.name)));
  for (const name of names) {
    const series = [];
    runs.forEach((run, i) => {
      if (!run.curves) return;
      for (const part of ['train', 'val']) {
        const values = run.curves[part].values[name], xs = run.curves[part][state.x];
        if (!values) continue;
        const points = values.map((y, at) => [xs[at], y]).filter(([x, y]) => x !== null && y !== null);
        const word = part === 'val' ? 'validation' : runs.length > 1 ? '' : 'training';
        if (points.length) series.push({ points, colour: part === 'val' && runs.length === 1 ? 1 : i % 8, dash: runs.length > 1 ? DASHES[i % 8] : '',
          dots: part === 'val', name: [runs.length > 1 ? run.name : '', word].filter(Boolean).join(' ') });
      }
    });
    if (series.length) box.append(chart(TITLES[name] || name, series, FROM_ZERO.includes(name)));
  }
  if (!box.children.length) parts.push(el('p', 'soft', 'These runs do not say how many samples a step has: choose another axis.'));
  parts.push(box);
  return parts;
}

function legend(names) {
  const list = el('ul', 'legend');
  names.forEach((name, i) => {
    const item = el('li'), key = svg('svg', { width: 28, height: 10, 'aria-hidden': 'true' });
    key.append(svg('path', { d: 'M1 5L27 5', class: 'line s' + i % 8, 'stroke-dasharray': DASHES[i % 8] }));
    item.append(key, el('span', '', name));
    list.append(item);
  });
  return list;
}

const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 604800];

function ticks(low, high, count, time) {
  const step = 10 ** Math.floor(Math.log10((high - low) / count || 1));
  const widths = time && high - low > 5 ? SECONDS : [1, 2, 5, 10].map((m) => m * step);
  const width = widths.find((w) => (high - low) / w <= count) || step * 10;
  const found = [];
  for (let at = Math.ceil(low / width) * width; at <= high + width * 1e-9; at += width) found.push(Math.abs(at) < width * 1e-9 ? 0 : at);
  return { found, width };
}

// As many digits as tell a tick from the next one.
function tickText(value, width) {
  if (value === 0) return '0';
  const size = Math.abs(value), digits = Math.min(12, Math.max(1, Math.round(Math.log10(size / width) + 1.5)));
  const text = Number(value.toPrecision(digits)).toLocaleString('en-US', { maximumFractionDigits: 10 });
  return text.length <= 7 ? text : value.toExponential(Math.min(digits - 1, 3));
}

function xText(x) {
  if (state.x === 'time') return x >= 3600 && x % 3600 === 0 ? x / 3600 + ' h' : x >= 60 && x % 60 === 0 ? x / 60 + ' min' : span(x);
  return x >= 1e6 ? Number((x / 1e6).toPrecision(3)) + ' M' : x >= 1e4 ? Number((x / 1e3).toPrecision(3)) + ' k' : num(x);
}

function chart(title, series, fromZero) {
  const box = el('figure'), read = el('p', 'read');
  box.tabIndex = 0;
  const caption = el('figcaption', '', title);
  caption.title = title;
  box.append(caption, read);
  const last = series.map((s) => (s.name ? s.name + ' ' : '') + num(s.points[s.points.length - 1][1])).join(', ');
  read.textContent = last;
  const drawing = svg('svg', { role: 'img', 'aria-label': title + ' over ' + X_WORDS[state.x] + '; newest: ' + last });
  box.append(drawing);
  drawn.push(() => draw(box, drawing, read, series, last, fromZero));
  return box;
}

function draw(box, drawing, read, series, last, fromZero) {
  const width = Math.max(240, box.clientWidth), height = 190, left = 64, right = 12, top = 8, bottom = 24;
  let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
  for (const s of series) for (const [x, y] of s.points) { x0 = Math.min(x0, x); x1 = Math.max(x1, x); y0 = Math.min(y0, y); y1 = Math.max(y1, y); }
  if (x0 > 0 && x0 < 0.1 * x1) x0 = 0;
  if (fromZero) { y0 = Math.min(0, y0); y1 += 0.04 * (y1 - y0); }
  if (x0 === x1) { x0 -= 1; x1 += 1; }
  if (y0 === y1) { const pad = Math.abs(y0) * 0.1 || 1; y0 -= pad; y1 += pad; }
  const X = (x) => left + (x - x0) / (x1 - x0) * (width - left - right);
  const Y = (y) => height - bottom - (y - y0) / (y1 - y0) * (height - top - bottom);
  drawing.setAttribute('width', width); drawing.setAttribute('height', height);
  const across = ticks(y0, y1, 4), along = ticks(x0, x1, Math.max(2, Math.floor(width / 110)), state.x === 'time');
  for (const y of across.found) {
    drawing.append(svg('path', { class: 'grid', d: 'M' + left + ' ' + Y(y).toFixed(1) + 'H' + (width - right) }));
    const text = svg('text', { x: left - 6, y: Y(y) + 4, 'text-anchor': 'end' });
    text.textContent = tickText(y, across.width);
    drawing.append(text);
  }
  for (const x of along.found) {
    const words = xText(x), half = words.length * 3.6;  // of its width: it must not leave the picture
    const text = svg('text', { x: Math.min(X(x), width - half), y: height - 6, 'text-anchor': 'middle' });
    text.textContent = words;
    drawing.append(text);
  }
  for (const s of series) {
    const d = 'M' + s.points.map(([x, y]) => X(x).toFixed(1) + ' ' + Y(y).toFixed(1)).join('L');
    drawing.append(svg('path', { d, class: 'line s' + s.colour, 'stroke-dasharray': s.dash }));
    if (s.dots || s.points.length === 1) for (const [x, y] of s.points.slice(-60)) drawing.append(svg('circle', { cx: X(x).toFixed(1), cy: Y(y).toFixed(1), r: 3, class: 'f' + s.colour }));
  }
  const cursor = svg('path', { class: 'cursor', d: '' });
  drawing.append(cursor);
  const longest = series.reduce((a, b) => (b.points.length > a.points.length ? b : a));
  let at = longest.points.length - 1;
  const point = (x) => {
    const near = (points) => points.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a));
    const here = near(longest.points);
    at = longest.points.indexOf(here);
    cursor.setAttribute('d', 'M' + X(here[0]).toFixed(1) + ' ' + top + 'V' + (height - bottom));
    read.textContent = X_WORDS[state.x] + ' ' + xText(here[0]) + ': ' + series.map((s) => (s.name ? s.name + ' ' : '') + num(near(s.points)[1])).join(', ');
  };
  const leave = () => { cursor.setAttribute('d', ''); read.textContent = last; };
  drawing.addEventListener('pointermove', (event) => point(x0 + (event.offsetX - left) / (width - left - right) * (x1 - x0)));
  drawing.addEventListener('pointerleave', leave);
  box.addEventListener('blur', leave);
  box.addEventListener('keydown', (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
    if (!by) return;
    event.preventDefault();
    point(longest.points[Math.max(0, Math.min(longest.points.length - 1, at + by))][0]);
  });
}

// Asking something of a run

const ASKS = {
  save: { label: 'Save now', title: 'Save a checkpoint now?', confirm: 'Save', text: 'All ranks save the same step, and training goes on.' },
  set_lr: { label: 'Learning rate\u2026', title: 'Change the learning rate', confirm: 'Change', field: 'New rate of the next step',
    text: 'From one step on, on all ranks. The schedule goes on from the new rate. The change is saved: a resumed run keeps it.' },
  set_log_every: { label: 'Log interval\u2026', title: 'Change the log interval', confirm: 'Change', field: 'Log every so many steps', text: 'The change is saved: a resumed run keeps it.' },
  memory_snapshot: { label: 'Memory snapshot', title: 'Take a memory snapshot?', confirm: 'Take it', text: 'Records where the memory of the next steps is allocated. The report then shows which lines hold most of it at the peak.' },
  stop_after_epoch: { label: 'Stop after epoch', title: 'Stop after this epoch?', confirm: 'Stop after epoch', text: 'The epoch is trained, validated and saved; then the run ends. --resume auto continues it.', danger: true },
  stop: { label: 'Stop', title: 'Stop the run now?', confirm: 'Stop', text: 'All ranks save the step that they stand at, and the run ends. --resume auto continues it.', danger: true },
};

function actions(run) {
  const box = el('div', 'actions');
  const asked = state.asked.get(run.id);
  if (asked) { const note = el('p', 'notice', asked.text); note.setAttribute('role', 'status'); box.append(note); }
  if (state.readOnly || !run.can_act) return box;
  for (const [action, ask] of Object.entries(ASKS)) {
    const button = el('button', ask.danger ? 'danger' : '', ask.label);
    button.type = 'button';
    button.id = 'do-' + action;
    button.addEventListener('click', () => open(run, action));
    box.append(button);
  }
  return box;
}

let pending = null;

function open(run, action) {
  const ask = ASKS[action];
  pending = { run: run.id, action, seen: done(run) };
  $('ask-title').textContent = ask.title;
  $('ask-text').textContent = run.name + ': ' + ask.text;
  $('ask-label').textContent = ask.field || '';
  $('ask-field').hidden = !ask.field;
  $('ask-value').value = action === 'set_lr' && run.lr ? run.lr : action === 'set_log_every' ? run.log_every || '' : '';
  $('ask-confirm').textContent = ask.confirm;
  $('ask-problem').textContent = '';
  $('ask').showModal();
  (ask.field ? $('ask-value') : $('ask-cancel')).focus();
}

async function confirmAsk(event) {
  event.preventDefault();
  const { run, action } = pending, field = ASKS[action].field;
  const value = field ? Number($('ask-value').value.trim().replace(',', '.')) : null;
  if (field && !(value > 0)) { $('ask-problem').textContent = 'Give a number above 0.'; return; }
  try {
    await call('api/runs/' + run + '/ask', { method: 'POST', body: JSON.stringify({ action, value }) });
    state.asked.set(run, { action, seen: pending.seen, text: 'Asked: ' + ASKS[action].confirm.toLowerCase() + '. The ranks agree on a step; Events shows when it is done.' });
    $('ask').close();
    showDetail();
  } catch (error) {
    $('ask-problem').textContent = capital(error.message) + '.';
  }
}

function done(run) {
  return (run.events || []).filter(([, kind]) => kind === 'request').map(([, , text]) => text);
}

function noteDone(run) {
  const asked = state.asked.get(run.id);
  if (!asked || asked.answer) return;
  asked.answer = done(run).find((text) => !asked.seen.includes(text));
  if (asked.answer) asked.text = capital(asked.answer) + '.';
  else if (run.state !== 'running') state.asked.delete(run.id);
}

// Keys, and what happens without the server

document.addEventListener('keydown', (event) => {
  const typing = event.target.matches('input[type="search"], input[type="text"], input[type="password"], select, textarea');
  if (event.key === '/' && !typing && !document.querySelector('dialog[open]')) { event.preventDefault(); $('filter').focus(); return; }
  if (event.key === 'Escape' && event.target === $('filter')) { $('filter').value = state.filter = ''; showList(); return; }
  const row = event.target.closest && event.target.closest('.row');
  if (!row && event.target !== $('filter')) return;
  if (event.key === 'ArrowDown' || event.key === 'ArrowUp') {
    const all = [...$('rows').children], at = all.indexOf(row) + (event.key === 'ArrowDown' ? 1 : -1);
    event.preventDefault();
    if (at < 0) $('filter').focus();
    else if (all[at]) all[at].querySelector('button').focus();
  } else if (row && event.key === 'c' && !typing) {
    row.querySelector('input').click();
  }
});

$('filter').addEventListener('input', () => { state.filter = $('filter').value; showList(); });
$('ask').querySelector('form').addEventListener('submit', confirmAsk);
$('ask-value').addEventListener('input', () => { $('ask-problem').textContent = ''; });
$('ask-cancel').addEventListener('click', () => $('ask').close());
$('locked').querySelector('form').addEventListener('submit', () => { token = $('token').value.trim(); writeAddress(); connect(); });
window.addEventListener('hashchange', () => { readAddress(); showList(); showDetail(); connect(); });
let width = 0;
new ResizeObserver(() => {
  if (Math.abs($('detail').clientWidth - width) > 20) { width = $('detail').clientWidth; showDetail(); }
}).observe($('detail'));
setInterval(() => {
  for (const run of state.runs.values()) if (run.state === 'running' && rows.has(run.id)) rows.get(run.id).facts.textContent = facts(run);
  if (stream && lastHeard && performance.now() - lastHeard > WATCHDOG_MS) { lastHeard = performance.now(); say('lost', 'the server is silent; trying again'); connect(); }
}, 1000);

readAddress();
showList();
if (token) { writeAddress(); connect(); } else unlock();
