// Shows one chart for each field of metrics.jsonl, of one run or several, and the tools that move all charts.
'use strict';

// Holds what the charts of a group share: axis, zoom, cursor, smoothing. flipped: the charts whose y axis is logarithmic
// where that of the others is not; wide: those over the whole width.
class SharedView {
  constructor(onChange, settings = {}) {
    Object.assign(this, { axis: 'steps', weight: 0, log: false, clipped: false, seeds: false, ...settings });
    Object.assign(this, { range: null, whole: [0, 1], charts: [], onChange, marks: [], bands: [], alone: null });
    [this.flipped, this.wide] = [new Set(), new Set()];
  }

  set(name, value) {
    this[name] = value;
    if (name === 'axis') this.range = null;
    if (name === 'log') this.flipped.clear();
    this.onChange('settings', name);
  }

  // Puts a chart into a set, or takes it out.
  flip(list, name) {
    if (!this[list].delete(name)) this[list].add(name);
    this.onChange('settings');
  }

  get shown() {
    return this.range || this.whole;
  }

  zoom(from, to) {
    const [low, high] = this.whole;
    const width = Math.max((high - low) / 5000, to - from);
    const start = Math.max(low, Math.min(from, high - width));
    this.range = width >= (high - low) * 0.999 ? null : [start, Math.min(high, start + width)];
    this.charts.forEach((chart) => chart.refresh());
    this.onChange('zoom');
  }

  zoomBy(factor) {
    const [from, to] = this.shown;
    const half = ((to - from) / 2) * factor;
    this.zoom((from + to) / 2 - half, (from + to) / 2 + half);
  }

  pan(share) {
    const [from, to] = this.shown;
    this.zoom(from + (to - from) * share, to + (to - from) * share);
  }

  reset() {
    this.zoom(...this.whole);
  }

  // Moves the cursor of all charts to x; null removes it.
  point(x) {
    this.cursor = x;
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.charts.forEach((chart) => chart.drawCursor());
      this.onCursor?.(this.cursor);
    });
  }
}

const STORED = ['axis', 'weight', 'log', 'clipped']; // settings that the browser keeps from one run to the next

// A link keeps what a reader sees: the view's settings as parameters of the address.
function viewOf(parameters) {
  const stored = JSON.parse(setting('charts') || '{}');
  if (!parameters.size) return stored;
  const isOn = (name) => parameters.get(name) === '1';
  const axis = AXES.find((name) => name === parameters.get('x')) ?? 'steps';
  const weight = Math.max(0, Math.min(0.99, Number(parameters.get('smooth')) || 0));
  return { axis, weight, log: isOn('log'), clipped: isOn('clip'), seeds: isOn('seeds') };
}

function parametersOf({ wish, weight, log, clipped, seeds, range, flipped, wide }) {
  const entries = { x: wish, smooth: weight, log: Number(log), clip: Number(clipped), seeds: Number(seeds) };
  const kept = Object.entries(entries).filter(([, value]) => value && value !== 'steps');
  if (range) kept.push(['zoom', range.map((at) => trim(at, 10)).join('~')]);
  for (const [name, charts] of Object.entries({ flip: flipped, wide }))
    if (charts.size) kept.push([name, [...charts].join()]);
  return new URLSearchParams(kept.length ? kept : [['x', 'steps']]);
}

// runs: [{run, label, colour, dash}]. marksOf(axis) returns {marks, bands} on that axis. link: the parameters of the address,
// and a function that replaces them.
class Board {
  constructor(runs, { onChange = () => {}, marksOf = () => ({}), link = null } = {}) {
    Object.assign(this, { runs, marksOf, onChange, link, charts: new Map() });
    const parameters = link?.parameters ?? new URLSearchParams();
    this.view = new SharedView((what, name) => this.changed(what, name), viewOf(parameters));
    this.wish = this.view.axis;
    const zoom = (parameters.get('zoom') ?? '').split('~').map(Number);
    if (zoom.length === 2 && zoom[0] < zoom[1]) this.view.range = zoom;
    for (const [list, name] of [
      ['flipped', 'flip'],
      ['wide', 'wide'],
    ])
      this.view[list] = new Set((parameters.get(name) ?? '').split(',').filter(Boolean));
    this.view.onCursor = (x) => {
      this.where.textContent = x === null ? '' : formatX(x, this.view.axis, this.view.shown);
    };
    this.where = el('output.where.faint');
    this.weight = el('output');
    this.slider = el('input', { type: 'range', min: 0, max: 0.99, step: 0.01, 'aria-label': 'smoothing' });
    this.slider.addEventListener('input', () => this.view.set('weight', Number(this.slider.value)));
    this.tools = el('div.tools');
    this.note = el('p.faint');
    this.papers = el('div.charts');
    this.node = el('div', this.tools, this.note, this.papers);
    this.drawTools();
  }

  fields() {
    return Object.assign({}, ...this.runs.map(({ run }) => run.panels.fields));
  }

  // Keeps the settings in the browser and in the address.
  changed(what, name) {
    const { view } = this;
    if (name === 'axis') this.wish = view.axis;
    if (what === 'zoom') this.zoomed();
    else this.update();
    const stored = { ...view, axis: this.wish };
    setting('charts', JSON.stringify(Object.fromEntries(STORED.map((name) => [name, stored[name]]))));
    this.link?.replace(parametersOf({ ...view, wish: this.wish }));
  }

  // Sets the axis: the chosen one, or steps where no run has it.
  chooseAxis() {
    const drawn = this.runs.filter(({ run }) => Object.keys(run.curves.series).length);
    const missing = drawn.filter(({ run }) => this.wish === 'tokens' && !run.head.tokens_per_step);
    const isLost = missing.length > 0 && missing.length === drawn.length;
    this.view.axis = isLost ? 'steps' : this.wish;
    const names = this.runs.length > 1 ? missing.map(({ label }) => label).join(', ') : 'this run';
    const result = isLost ? 'the curves are drawn over steps' : 'their curves are left out';
    const text = missing.length ? `The tokens of a step are not known for ${names}: ${result}.` : '';
    if (this.note.textContent !== text) this.note.textContent = text;
  }

  // Returns the lines of a field: of each run whose x is known, or the means of runs that differ only in their seed.
  linesOf(name) {
    const lines = this.runLines(name);
    const groups = this.view.seeds ? Object.values(Object.groupBy(lines, ({ group }) => group)) : [];
    if (!groups.some((members) => members.length > 1)) return lines;
    const unit = this.fields()[name]?.unit;
    return groups.map((members) => {
      if (members.length < 2) return members[0];
      const [{ label, colour, dash }] = members;
      const mean = meanOf(members);
      return {
        label: `mean of ${members.length} like ${label}`,
        colour,
        dash,
        ...mean,
        last: formatUnit(mean.y.at(-1), unit),
      };
    });
  }

  runLines(name) {
    return this.runs.flatMap(({ run, label, colour, dash, group = label }) => {
      const series = run.curves.series[name];
      const x = series?.steps.length ? xOf(series, this.view.axis, run.head) : null;
      if (!x) return [];
      const [xs, y] = inOrder(x, series.values);
      return [{ label, colour, dash, group, x: xs, y, last: run.panels.fields?.[name]?.last }];
    });
  }

  update() {
    this.chooseAxis();
    const fields = this.fields();
    const lines = new Map(Object.keys(fields).map((name) => [name, this.linesOf(name)]));
    const xs = [...lines.values()].flat().map(({ x }) => x);
    const [first, last] = [Math.min(...xs.map((x) => x[0])), Math.max(...xs.map((x) => x.at(-1)))];
    this.view.whole = xs.length ? [first, last > first ? last : first + 1] : [0, 1];
    const { marks = [], bands = [] } = this.marksOf(this.view.axis);
    Object.assign(this.view, { marks, bands });
    this.charts = placeCharts(this.papers, this.charts, [...lines.keys()], this.view, fields);
    for (const [name, drawn] of lines) this.charts.get(name).set(drawn);
    this.zoomed();
  }

  redraw() {
    this.charts.forEach((chart) => chart.draw());
  }

  zoomed() {
    this.drawTools();
    this.onChange();
  }

  drawTools() {
    const { view } = this;
    this.slider.value = view.weight;
    this.weight.textContent = view.weight ? view.weight.toFixed(2) : 'off';
    const look = JSON.stringify([view.axis, view.log, view.clipped, view.seeds, this.hasGroups(), !!view.range]);
    if (look === this.look) return;
    this.look = look;
    const focused = this.tools.contains(document.activeElement) ? document.activeElement.dataset.tool : null;
    const tool = (name, title, act) => button(name, act, { title, 'data-tool': name, 'aria-label': title });
    const flip = (name, text, key) =>
      toggle(text, view[name], () => view.set(name, !view[name]), { title: `key ${key}`, 'data-tool': name });
    this.tools.replaceChildren(
      segments('x axis', AXES, view.axis, (name) => view.set('axis', name)),
      el('label.slider', { title: 'key s' }, 'smoothing', this.slider, this.weight),
      flip('log', 'log y', 'l'),
      flip('clipped', 'clip outliers', 'o'),
      this.hasGroups() ? flip('seeds', 'mean of seeds', 'm') : '',
      el(
        'span.segments',
        { role: 'group', 'aria-label': 'zoom' },
        tool('+', 'Zoom in (+)', () => view.zoomBy(0.5)),
        tool('−', 'Zoom out (-)', () => view.zoomBy(2)),
      ),
      view.range ? tool('whole run', 'Reset the zoom (r), or double-click', () => view.reset()) : '',
      this.runs.length === 1 && this.link ? this.tableLink() : '',
      this.where,
    );
    if (focused) this.tools.querySelector(`[data-tool="${focused}"]`)?.focus();
  }

  tableLink() {
    const [{ run }] = this.runs;
    const href = `api/runs/${encodeURIComponent(run.name)}/metrics.csv`;
    return el('a', { href, download: '', title: 'Every line of metrics.jsonl' }, 'all as csv');
  }

  // Returns whether some of the runs differ only in their seed.
  hasGroups() {
    const groups = this.runs.map(({ group }) => group).filter(Boolean);
    return new Set(groups).size < groups.length;
  }

  // Returns whether the key belongs to one of these tools.
  key(key) {
    const { view } = this;
    const acts = {
      x: () => view.set('axis', AXES[(AXES.indexOf(this.wish) + 1) % AXES.length]),
      s: () => view.set('weight', { 0: 0.6, 0.6: 0.9, 0.9: 0.97 }[view.weight] ?? 0),
      l: () => view.set('log', !view.log),
      o: () => view.set('clipped', !view.clipped),
      m: () => view.set('seeds', !view.seeds),
      r: () => view.reset(),
      '+': () => view.zoomBy(0.5),
      '=': () => view.zoomBy(0.5),
      '-': () => view.zoomBy(2),
      ArrowLeft: () => view.pan(-0.2),
      ArrowRight: () => view.pan(0.2),
    };
    acts[key]?.();
    return key in acts;
  }
}

// Makes the charts of these names the only children of a place, and returns them; those that are there already stay.
function placeCharts(place, charts, names, view, fields) {
  const placed = new Map(names.map((name) => [name, charts.get(name) || new Chart(name, view, fields[name])]));
  view.charts = [...placed.values()];
  const nodes = view.charts.map(({ node }) => node);
  const isMoved = nodes.length !== place.children.length || nodes.some((node, i) => place.children[i] !== node);
  if (isMoved) place.replaceChildren(...nodes);
  return placed;
}

// Lets the line of the name under the pointer stand out among those of all charts.
function highlightFrom(names, view) {
  const choose = (line) => {
    if (line === view.alone) return;
    view.alone = line;
    view.charts.forEach((chart) => chart.refresh());
  };
  names.addEventListener('pointerover', ({ target }) => choose(target.closest('[data-line]')?.dataset.line ?? null));
  names.addEventListener('pointerleave', () => choose(null));
}
