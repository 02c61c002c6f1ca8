// Draws charts on a canvas: lines, axes, marks and bands. Several charts share one x axis, one zoom and one cursor.
//
// A chart has two canvases: the lower one is painted when data, zoom or theme change, the upper one when the pointer
// moves. Drawing never reads a size from the page, which would force a layout; a ResizeObserver delivers the sizes.
'use strict';

const EDGE = { left: 52, right: 16, top: 10, bottom: 26 }; // pixels around the plot, for the axes
const TALL = { loss: 240, val_bpb: 240 };
const HEIGHT = 170;
const FEW_POINTS = 40; // a line of so few points shows them, and is not smoothed
const LEAST_DRAG = 5; // in pixels; less is a click
const FONT = '11px system-ui, sans-serif';
const PICTURE = { scale: 2, head: 34 }; // of an exported chart: its scale, and room for its name

// set() takes lines {label, colour, dash, x, y, last}: colour is a name of the theme, last is the text of the last
// value. field: {about, unit, steady}.
class Chart {
  constructor(name, view, field = {}) {
    Object.assign(this, { name, view, field, lines: [], width: 0, height: TALL[name] || HEIGHT, drag: null });
    this.values = el('output.chart-now');
    this.base = el('canvas', { 'aria-hidden': 'true' });
    this.cover = el('canvas.cover', { 'aria-hidden': 'true' });
    this.paper = el('div.paper', { style: { height: `${this.height}px` } }, this.base, this.cover);
    const save = (kind, act) => button(kind, () => this[act](), { class: 'quiet', title: `Save ${name} as ${kind}` });
    this.node = el(
      'figure.chart',
      { 'data-field': name, 'aria-label': name },
      el(
        'figcaption',
        el('b', name),
        span('faint', field.about),
        el('span.save', save('png', 'savePicture'), save('csv', 'saveTable')),
        this.values,
      ),
      this.paper,
    );
    watchWidth(this.paper, (width) => this.resize(width));
    watchSight(this.paper, (inSight) => {
      this.inSight = inSight;
      if (inSight && this.isStale) this.draw();
    });
    this.listen();
  }

  listen() {
    const at = ({ offsetX }) => Math.max(EDGE.left, Math.min(this.width - EDGE.right, offsetX));
    this.cover.addEventListener('pointerdown', (event) => {
      if (event.button) return;
      this.cover.setPointerCapture(event.pointerId);
      this.drag = [at(event), at(event)];
    });
    this.cover.addEventListener('pointermove', (event) => {
      if (this.drag) this.drag[1] = at(event);
      this.view.point(this.xAt(at(event)));
    });
    this.cover.addEventListener('pointerup', () => {
      const [from, to] = (this.drag || [0, 0]).toSorted((a, b) => a - b);
      this.drag = null;
      if (to - from >= LEAST_DRAG) this.view.zoom(this.xAt(from), this.xAt(to));
    });
    for (const name of ['pointerleave', 'pointercancel'])
      this.cover.addEventListener(name, () => {
        this.drag = null;
        this.view.point(null);
      });
    this.cover.addEventListener('dblclick', () => this.view.reset());
  }

  resize(width) {
    if (!width || width === this.width) return;
    this.width = width;
    this.draw();
  }

  // Takes new data. A chart whose pixels would not move is not painted, nor is one out of sight.
  set(lines) {
    const isNew = this.lines.map(({ label }) => label).join() !== lines.map(({ label }) => label).join();
    this.lines = lines;
    this.prepare();
    if (isNew) this.drawNames();
    this.drawValues(this.view.cursor ?? null);
    const pixels = this.frame ? this.moved() : Infinity;
    this.isStale ||= pixels > 0.5;
    if (this.isStale && (this.inSight || pixels === Infinity)) this.draw();
  }

  // Prepares the curves: the raw values faintly behind the smoothed ones, or only the values; and the y axis.
  prepare() {
    const { log, weight } = this.view;
    this.curves = this.lines.flatMap(({ colour, dash, x, y }) => {
      const isSmoothed = weight > 0 && y.length >= FEW_POINTS;
      const positive = log ? y.map((value) => (value > 0 ? value : null)) : y;
      const line = { x, y: isSmoothed ? smooth(positive, weight) : positive, colour, dash };
      const raw = { x, y: positive, colour, dash: null, faint: true };
      return isSmoothed ? [raw, line] : [{ ...line, points: y.length < FEW_POINTS }];
    });
    const range = yRange(this.curves, this.view.shown, { ...this.view, steady: this.field.steady });
    const scale = log ? Math.log : Number;
    this.y = { range, from: scale(range[0]), width: scale(range[1]) - scale(range[0]), scale };
  }

  // Returns how many pixels the axes have moved since the chart was painted.
  moved() {
    const { shown, y, settings } = this.frame;
    if (settings !== this.settings()) return Infinity;
    const moves = (old, now, size) =>
      Math.max(...now.map((end, i) => Math.abs(end - old[i]) / (now[1] - now[0]))) * size;
    return Math.max(moves(shown, this.view.shown, this.width), moves(y.range, this.y.range, this.height));
  }

  settings() {
    const { axis, weight, log, clipped, marks } = this.view;
    const theme = document.documentElement.dataset.theme;
    return JSON.stringify([axis, weight, log, clipped, marks, theme, this.curves.length, this.width]);
  }

  left(x, width = this.width) {
    const [from, to] = this.view.shown;
    return EDGE.left + ((x - from) / (to - from)) * (width - EDGE.left - EDGE.right);
  }

  xAt(left) {
    const [from, to] = this.view.shown;
    return from + ((left - EDGE.left) / (this.width - EDGE.left - EDGE.right)) * (to - from);
  }

  top(y) {
    const room = this.height - EDGE.top - EDGE.bottom;
    return EDGE.top + room * (1 - (this.y.scale(y) - this.y.from) / this.y.width);
  }

  draw() {
    if (!this.width) return;
    this.prepare();
    this.isStale = false;
    this.frame = { shown: [...this.view.shown], y: this.y, settings: this.settings() };
    this.paint(this.sized(this.base));
    this.drawCursor();
  }

  // Returns the cleared context of a canvas, in pixels of the page.
  sized(canvas) {
    const scale = devicePixelRatio || 1;
    const size = [Math.round(this.width * scale), Math.round(this.height * scale)];
    if (canvas.width !== size[0] || canvas.height !== size[1]) [canvas.width, canvas.height] = size;
    const context = canvas.getContext('2d');
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    return context;
  }

  paint(context) {
    const box = [EDGE.left, EDGE.top, this.width - EDGE.left - EDGE.right, this.height - EDGE.top - EDGE.bottom];
    this.paintAxes(context);
    context.save();
    context.beginPath();
    context.rect(box[0], box[1] - 2, box[2] + 2, box[3] + 4);
    context.clip();
    this.paintMarks(context, box);
    for (const curve of this.curves) this.paintCurve(context, curve);
    context.restore();
  }

  paintAxes(context) {
    const { view, height, width, field } = this;
    Object.assign(context, { font: FONT, fillStyle: ink('muted'), strokeStyle: ink('grid'), lineWidth: 1 });
    Object.assign(context, { textAlign: 'right', textBaseline: 'middle' });
    const most = Math.max(2, Math.floor((height - EDGE.top - EDGE.bottom) / 28));
    context.beginPath();
    for (const tick of valueTicks(...this.y.range, most, { log: view.log, unit: field.unit })) {
      const top = Math.round(this.top(tick)) + 0.5;
      context.moveTo(EDGE.left, top);
      context.lineTo(width - EDGE.right, top);
      context.fillText(formatAxis(tick, field.unit), EDGE.left - 8, top);
    }
    context.stroke();
    context.textBaseline = 'alphabetic';
    for (const tick of axisTicks(view.axis, view.shown, Math.floor((width - EDGE.left) / 70))) {
      const left = this.left(tick);
      context.textAlign = left > width - 30 ? 'right' : 'center';
      context.fillText(formatTick(tick, view.axis, view.shown), Math.min(left, width - 4), height - 8);
    }
  }

  // Paints bands of lost steps or hours, and lines where something failed or resumed.
  paintMarks(context, [, top, , high]) {
    context.globalAlpha = 0.09;
    context.fillStyle = ink('error');
    for (const [from, to] of this.view.bands)
      context.fillRect(this.left(from), top, Math.max(1, this.left(to) - this.left(from)), high);
    context.globalAlpha = 1;
    context.lineWidth = 1;
    for (const { x, kind } of this.view.marks) {
      context.strokeStyle = ink(kind === 'resumed' ? 'good' : 'error');
      context.setLineDash(kind === 'resumed' ? [4, 3] : []);
      context.beginPath();
      context.moveTo(this.left(x), top);
      context.lineTo(this.left(x), top + high);
      context.stroke();
    }
  }

  paintCurve(context, { x, y, colour, dash, faint, points }) {
    const [from, to] = this.view.shown;
    Object.assign(context, { strokeStyle: ink(colour), fillStyle: ink(colour), lineWidth: faint ? 1 : 1.6 });
    Object.assign(context, { globalAlpha: faint ? 0.4 : 1, lineJoin: 'bevel' });
    context.setLineDash(dash || []);
    context.beginPath();
    let isFirst = true;
    for (let i = Math.max(0, indexAt(x, from)); i < x.length; i += 1) {
      if (!isNumber(y[i])) continue;
      if (isFirst) context.moveTo(this.left(x[i]), this.top(y[i]));
      else context.lineTo(this.left(x[i]), this.top(y[i]));
      isFirst = false;
      if (x[i] > to) break;
    }
    context.stroke();
    context.globalAlpha = 1;
    if (points) x.forEach((at, i) => isNumber(y[i]) && this.paintPoint(context, this.left(at), this.top(y[i]), 2.5));
  }

  paintPoint(context, left, top, radius) {
    context.beginPath();
    context.arc(left, top, radius, 0, 2 * Math.PI);
    context.fill();
  }

  // Paints the upper canvas: a line at the cursor, a point on each curve, the part that a drag selects.
  drawCursor() {
    const x = this.view.cursor ?? null;
    if (x === null && !this.hasCursor) return;
    const context = this.sized(this.cover);
    this.hasCursor = x !== null;
    if (x !== null) {
      const [top, bottom] = [EDGE.top, this.height - EDGE.bottom];
      Object.assign(context, { strokeStyle: ink('faint'), fillStyle: ink('accent'), lineWidth: 1, globalAlpha: 0.14 });
      if (this.drag) context.fillRect(this.drag[0], top, this.drag[1] - this.drag[0], bottom - top);
      context.globalAlpha = 1;
      context.beginPath();
      context.moveTo(Math.round(this.left(x)) + 0.5, top);
      context.lineTo(Math.round(this.left(x)) + 0.5, bottom);
      context.stroke();
      for (const curve of this.curves.filter(({ faint }) => !faint)) {
        const index = nearest(curve.x, x);
        if (!isNumber(curve.y[index]) || this.isBeyond(curve.x, x)) continue;
        context.fillStyle = ink(curve.colour);
        this.paintPoint(context, this.left(curve.x[index]), this.top(curve.y[index]), 3.5);
      }
    }
    this.drawValues(x);
  }

  // Returns whether a curve ends before x or begins after it.
  isBeyond(xs, x) {
    const near = (this.view.shown[1] - this.view.shown[0]) / 50;
    return x > xs.at(-1) + near || x < xs[0] - near;
  }

  // Makes a place for the value of each line beside the chart's name.
  drawNames() {
    const tint = (colour) => `color-mix(in srgb, var(--${colour}) 75%, var(--ink))`;
    const style = ({ colour }) => (this.lines.length > 1 ? { color: tint(colour) } : {});
    const place = (line) => el('span', { style: style(line), title: line.label });
    this.values.replaceChildren(...this.lines.map(place));
  }

  // Writes the values at x; null: the last ones.
  drawValues(x) {
    const texts = this.lines.map((line) => (x === null ? (line.last ?? NA) : this.valueAt(line, x)));
    texts.forEach((text, index) => {
      const place = this.values.children[index];
      if (place.textContent !== text) place.textContent = text;
    });
    this.values.classList.toggle('at-cursor', x !== null);
    if (x !== null) return;
    const label = `${this.name}: ${this.lines.map((line, index) => `${line.label} ${texts[index]}`).join(', ')}`;
    if (this.node.getAttribute('aria-label') !== label) this.node.setAttribute('aria-label', label);
  }

  valueAt({ x: xs, y }, x) {
    return this.isBeyond(xs, x) ? NA : formatUnit(y[nearest(xs, x)], this.field.unit);
  }

  // Saves the chart as it is shown as PNG, with its name and the names of its runs, on an opaque background.
  async savePicture() {
    const canvas = el('canvas', {
      width: this.width * PICTURE.scale,
      height: (this.height + PICTURE.head) * PICTURE.scale,
    });
    const context = canvas.getContext('2d');
    context.scale(PICTURE.scale, PICTURE.scale);
    context.fillStyle = ink('card');
    context.fillRect(0, 0, this.width, this.height + PICTURE.head);
    let left = 12;
    const write = (text, colour, weight) => {
      Object.assign(context, { font: `${weight} 13px system-ui, sans-serif`, fillStyle: ink(colour) });
      context.fillText(text, left, 22);
      left += context.measureText(text).width + 14;
    };
    write(this.name, 'ink', 600);
    write(`by ${this.view.axis}`, 'muted', 400);
    for (const { label, colour } of this.lines) write(label, colour, 400);
    context.translate(0, PICTURE.head);
    this.paint(context);
    const blob = await new Promise((resolve) => canvas.toBlob(resolve, 'image/png'));
    download(this.fileName('png'), blob);
  }

  // Saves the points that are shown as CSV: a column for x, and one for each run.
  saveTable() {
    const [from, to] = this.view.shown;
    const quote = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
    const rows = new Map();
    this.lines.forEach(({ x, y }, column) =>
      x.forEach((at, i) => {
        if (at < from || at > to || !isNumber(y[i])) return;
        if (!rows.has(at)) rows.set(at, new Array(this.lines.length).fill(''));
        rows.get(at)[column] = y[i];
      }),
    );
    const heads = this.lines.length > 1 ? this.lines.map(({ label }) => `${this.name} of ${label}`) : [this.name];
    const body = [...rows].sort(([a], [b]) => a - b).map(([at, values]) => [at, ...values].join());
    const table = [[this.view.axis, ...heads].map(quote).join(), ...body];
    download(this.fileName('csv'), `${table.join('\n')}\n`, 'text/csv');
  }

  fileName(ending) {
    const runs = this.lines.map(({ label }) => label).join('-');
    return `${runs.replace(/[^\w.-]+/g, '_').slice(0, 80)}-${this.name}.${ending}`;
  }
}
