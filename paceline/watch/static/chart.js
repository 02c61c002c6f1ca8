// Curves drawn by uPlot, several charts that move together: one x axis, one zoom, one cursor.
'use strict';

const AXES = ['steps', 'tokens', 'hours'];
const HEIGHTS = { loss: 240, val_bpb: 240 };
const HEIGHT = 170;
const FEW_POINTS = 40; // so few are shown as points, and not smoothed

function ink(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// What the charts of a page have in common, kept in the browser from one visit to the next
class Together {
  constructor(onChange) {
    const kept = JSON.parse(recall('charts') || '{}');
    Object.assign(this, { axis: 'steps', weight: 0, log: false, clipped: false, ...kept });
    Object.assign(this, { range: null, whole: [0, 1], charts: [], onChange, marks: () => [] });
    this.key = `together-${Math.random()}`;
  }

  set(name, value) {
    this[name] = value;
    if (name === 'axis') this.range = null;
    const { axis, weight, log, clipped } = this;
    remember('charts', JSON.stringify({ axis, weight, log, clipped }));
    this.onChange();
  }

  get shown() {
    return this.range || this.whole;
  }

  zoom(from, to) {
    const [low, high] = this.whole;
    const width = Math.max((high - low) / 5000, to - from);
    const start = Math.max(low, Math.min(from, high - width));
    this.range = width >= (high - low) * 0.999 ? null : [start, Math.min(high, start + width)];
    this.charts.forEach((chart) => chart.rescale());
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
}

// One chart. set() takes lines: {label, colour, dash, x, y}; curves of other runs have other x.
class Chart {
  constructor(name, together, { about, format, bytes, steady } = {}) {
    Object.assign(this, {
      name,
      together,
      lines: [],
      plot: null,
      format: format || ((v) => trim(v, 5)),
      bytes,
      steady,
    });
    this.now = el('output', { class: 'chart-now' });
    this.paper = el('div', { class: 'paper' });
    this.node = el(
      'figure',
      { class: 'chart', 'data-field': name, 'aria-label': name },
      el('figcaption', {}, el('b', {}, name), about ? el('span', { class: 'faint' }, about) : null, this.now),
      this.paper,
    );
    this.watcher = new ResizeObserver(() => this.fit());
    this.watcher.observe(this.paper);
    together.charts.push(this);
  }

  remove() {
    this.watcher.disconnect();
    this.plot?.destroy();
    this.together.charts = this.together.charts.filter((each) => each !== this);
    this.node.remove();
  }

  get height() {
    return HEIGHTS[this.name] || HEIGHT;
  }

  fit() {
    const width = this.paper.clientWidth;
    if (!width) return;
    if (!this.plot) this.draw();
    else if (this.plot.width !== width) this.plot.setSize({ width, height: this.height });
  }

  set(lines) {
    this.lines = lines;
    if (this.plot && this.drawn === this.look()) {
      this.plot.setData(this.columns(), false);
      this.rescale();
    } else if (this.paper.clientWidth) this.draw();
    this.tell();
  }

  // What a drawn plot was made for; another needs another plot
  look() {
    const lines = this.lines.map((line) => [line.label, line.colour, line.dash, this.weightOf(line) > 0]);
    return JSON.stringify([lines, this.together.log, this.together.axis, document.documentElement.dataset.theme]);
  }

  // A line of a few points is not smoothed
  weightOf({ y }) {
    return y.length < FEW_POINTS ? 0 : this.together.weight;
  }

  // [x, y] of a line, and [x, y, smoothed y] of one that is smoothed
  tableOf(line) {
    const y = this.together.log ? line.y.map((value) => (value > 0 ? value : null)) : line.y;
    const weight = this.weightOf(line);
    return weight ? [line.x, y, smooth(y, weight)] : [line.x, y];
  }

  // What uPlot takes: one x for all, then each line, its raw values before the smoothed ones
  columns() {
    this.tables = this.lines.map((line) => this.tableOf(line));
    return this.tables.length < 2 ? this.tables[0] || [[]] : uPlot.join(this.tables);
  }

  draw() {
    this.plot?.destroy();
    this.drawn = this.look();
    const lines = this.lines.flatMap((each) => {
      const { label, colour, dash } = each;
      const line = { label, stroke: colour, width: 1.6, dash, spanGaps: true, points: { show: false } };
      const alone = {
        ...line,
        points: { show: (plot, index) => pointsOf(plot, index) < FEW_POINTS, size: 5, fill: colour },
      };
      return this.weightOf(each) ? [{ ...line, width: 1, alpha: 0.4, dash: undefined }, line] : [alone];
    });
    this.plot = new uPlot({ ...this.options(), series: [{}, ...lines] }, this.columns(), this.paper);
    this.rescale();
    this.tell();
  }

  options() {
    const grid = { stroke: ink('grid'), width: 1 };
    const axis = { stroke: ink('muted'), font: '11px system-ui, sans-serif', ticks: { show: false }, grid };
    const { together } = this;
    const log = together.log;
    return {
      width: this.paper.clientWidth,
      height: this.height,
      padding: [10, 16, 0, 0],
      legend: { show: false },
      scales: {
        x: { time: false, range: () => together.shown },
        y: { distr: log ? 3 : 1, range: () => this.yRange() },
      },
      axes: [
        {
          ...axis,
          space: 70,
          size: 26,
          grid: { show: false },
          values: (_, ticks) => ticks.map((tick) => this.xTick(tick)),
        },
        {
          ...axis,
          size: 52,
          space: 34,
          ...(this.bytes ? { splits: (_, __, low, high) => binaryTicks(low, high) } : {}),
          values: (_, ticks) => ticks.map((tick) => (tick === null ? '' : this.yTick(tick))),
        },
      ],
      cursor: {
        sync: { key: together.key, setSeries: false, scales: ['x', null] },
        y: false,
        points: { size: 7 },
        hover: { prox: 24 },
        drag: { x: true, y: false, setScale: false, dist: 5 },
        bind: {
          dblclick: () => () => {
            together.reset();
          },
        },
      },
      hooks: {
        setCursor: [(plot) => this.tell(plot.cursor.left >= 0 ? plot.posToVal(plot.cursor.left, 'x') : null)],
        setSelect: [(plot) => this.zoomTo(plot)],
        drawAxes: [(plot) => this.drawMarks(plot)],
      },
    };
  }

  yRange() {
    const { clipped, log } = this.together;
    const lines = this.tables.flatMap(([x, ...ys]) => ys.map((y) => [x, y]));
    return yRange(lines, this.together.shown, { clipped, log, steady: this.steady });
  }

  xTick(tick) {
    return this.together.axis === 'hours' ? formatHours(tick, this.together.shown) : formatShort(tick);
  }

  yTick(tick) {
    return this.bytes ? formatBytes(tick) : formatShort(tick);
  }

  zoomTo(plot) {
    const { left, width } = plot.select;
    if (width < 5) return;
    const [from, to] = [plot.posToVal(left, 'x'), plot.posToVal(left + width, 'x')];
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.together.zoom(from, to);
  }

  rescale() {
    if (!this.plot) return;
    const [min, max] = this.together.shown;
    this.plot.setScale('x', { min, max });
  }

  // Lines where something broke or began again
  drawMarks(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    for (const { x, kind } of this.together.marks()) {
      const [from, to] = this.together.shown;
      if (x < from || x > to) continue;
      const left = plot.valToPos(x, 'x', true);
      ctx.strokeStyle = ink(kind === 'resumed' ? 'good' : 'error');
      ctx.lineWidth = devicePixelRatio;
      ctx.setLineDash(kind === 'resumed' ? [4 * devicePixelRatio, 3 * devicePixelRatio] : []);
      ctx.beginPath();
      ctx.moveTo(left, bbox.top);
      ctx.lineTo(left, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  // Whether a curve has ended before x, or begins after it
  isBeyond(xs, x) {
    const [from, to] = this.together.shown;
    const near = (to - from) / 50;
    return x !== null && (x > xs.at(-1) + near || x < xs[0] - near);
  }

  // The values at x, or the last ones, beside the name
  tell(x = null) {
    const words = this.lines.map(({ label, colour, x: xs, y }) => {
      const index = x === null ? y.length - 1 : nearest(xs, x);
      const value = isNumber(y[index]) && !this.isBeyond(xs, x) ? this.format(y[index]) : NA;
      return el(
        'span',
        {
          style: { color: this.lines.length > 1 ? `color-mix(in srgb, ${colour} 75%, ${ink('ink')})` : 'inherit' },
          title: label,
        },
        value,
      );
    });
    this.now.replaceChildren(...words);
    this.now.classList.toggle('at-cursor', x !== null);
    const last = this.lines.map(({ label, y }) => `${label} ${isNumber(y.at(-1)) ? this.format(y.at(-1)) : NA}`);
    this.node.setAttribute('aria-label', `${this.name}: ${last.join(', ')}`);
    if (x !== null) this.together.onCursor?.(x);
  }
}

function pointsOf(plot, index) {
  return plot.data[index].reduce((count, value) => count + (value !== null && value !== undefined), 0);
}

function formatHours(hours, [from, to]) {
  const span = to - from;
  if (span > 96) return `${trim(hours / 24, 3)}d`;
  if (span > 2) return `${trim(hours, 3)}h`;
  return span > 0.05 ? `${trim(hours * 60, 3)}m` : `${trim(hours * 3600, 4)}s`;
}

function formatX(x, axis, range) {
  if (axis === 'hours') return `after ${formatDuration(x * 3600)}`;
  return axis === 'tokens' ? `${formatShort(x)} tokens` : `step ${formatCount(x)}`;
}

// Settings that this browser keeps; a report opened from a file may not
function remember(name, value) {
  try {
    localStorage.setItem(`paceline.${name}`, value);
  } catch {
    /* a private window keeps nothing, and all works */
  }
}

function recall(name) {
  try {
    return localStorage.getItem(`paceline.${name}`);
  } catch {
    return null;
  }
}
