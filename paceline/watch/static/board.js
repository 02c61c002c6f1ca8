// Shows one chart for each field of metrics.jsonl, of one run or several, and the tools that move all charts.
'use strict';

// Holds what all charts of a page share. The browser stores the settings.
class SharedView {
  constructor(onChange) {
    const stored = JSON.parse(setting('charts') || '{}');
    Object.assign(this, { axis: 'steps', weight: 0, log: false, clipped: false, ...stored });
    Object.assign(this, { range: null, whole: [0, 1], charts: [], onChange, marks: [], bands: [] });
  }

  set(name, value) {
    this[name] = value;
    if (name === 'axis') this.range = null;
    const { axis, weight, log, clipped } = this;
    setting('charts', JSON.stringify({ axis, weight, log, clipped }));
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
    this.charts.forEach((chart) => chart.draw());
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

// runs: [{run, label, colour, dash}]. marksOf(axis) returns {marks, bands} on that axis.
class Board {
  constructor(runs, { onChange = () => {}, marksOf = () => ({}) } = {}) {
    Object.assign(this, { runs, marksOf, onChange, charts: new Map() });
    this.view = new SharedView((what) => (what === 'zoom' ? this.zoomed() : this.update()));
    this.view.onCursor = (x) => {
      this.where.textContent = x === null ? '' : formatX(x, this.view.axis, this.view.shown);
    };
    this.where = el('output.where.faint');
    this.weight = el('output');
    this.slider = el('input', { type: 'range', min: 0, max: 0.99, step: 0.01, 'aria-label': 'smoothing' });
    this.slider.addEventListener('input', () => this.view.set('weight', Number(this.slider.value)));
    this.tools = el('div.tools');
    this.papers = el('div.charts');
    this.node = el('div', this.tools, this.papers);
    this.drawTools();
  }

  fields() {
    return Object.assign({}, ...this.runs.map(({ run }) => run.panels.fields));
  }

  // Returns the lines of a field, for the runs whose x is known.
  linesOf(name) {
    return this.runs.flatMap(({ run, label, colour, dash }) => {
      const series = run.curves.series[name];
      const x = series?.steps.length ? xOf(series, this.view.axis, run.head) : null;
      if (!x) return [];
      const [xs, y] = inOrder(x, series.values);
      return [{ label, colour, dash, x: xs, y, last: run.panels.fields?.[name]?.last }];
    });
  }

  update() {
    const fields = this.fields();
    const lines = new Map(Object.keys(fields).map((name) => [name, this.linesOf(name)]));
    const xs = [...lines.values()].flat().map(({ x }) => x);
    const [first, last] = [Math.min(...xs.map((x) => x[0])), Math.max(...xs.map((x) => x.at(-1)))];
    this.view.whole = xs.length ? [first, last > first ? last : first + 1] : [0, 1];
    const { marks = [], bands = [] } = this.marksOf(this.view.axis);
    Object.assign(this.view, { marks, bands });
    const chartOf = (name) => this.charts.get(name) || new Chart(name, this.view, fields[name]);
    this.charts = new Map([...lines.keys()].map((name) => [name, chartOf(name)]));
    this.view.charts = [...this.charts.values()];
    const nodes = this.view.charts.map(({ node }) => node);
    const isMoved =
      nodes.length !== this.papers.children.length || nodes.some((node, i) => this.papers.children[i] !== node);
    if (isMoved) this.papers.replaceChildren(...nodes);
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
    const look = JSON.stringify([view.axis, view.log, view.clipped, !!view.range]);
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
      el(
        'span.segments',
        { role: 'group', 'aria-label': 'zoom' },
        tool('+', 'Zoom in (+)', () => view.zoomBy(0.5)),
        tool('−', 'Zoom out (-)', () => view.zoomBy(2)),
      ),
      view.range ? tool('whole run', 'Reset the zoom (r), or double-click', () => view.reset()) : '',
      this.where,
    );
    if (focused) this.tools.querySelector(`[data-tool="${focused}"]`)?.focus();
  }

  // Returns whether the key belongs to one of these tools.
  key(key) {
    const { view } = this;
    const acts = {
      x: () => view.set('axis', AXES[(AXES.indexOf(view.axis) + 1) % AXES.length]),
      s: () => view.set('weight', { 0: 0.6, 0.6: 0.9, 0.9: 0.97 }[view.weight] ?? 0),
      l: () => view.set('log', !view.log),
      o: () => view.set('clipped', !view.clipped),
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
