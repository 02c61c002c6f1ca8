// Draws charts on a canvas: lines, axes, marks and bands. Several charts share one x axis, one zoom and one cursor.
//
// A chart has two canvases: the lower one is painted when data, zoom or theme change, the upper one when the pointer
// moves. Drawing never reads a size from the page, which would force a layout; a ResizeObserver delivers the sizes.
'use strict';

const EDGE = { left: 62, right: 16, top: 10, bottom: 26 }; // pixels around the plot, for the axes
const PAIR = ['loss', 'val_bpb']; // taller, where they stand side by side
const [HEIGHT, TALL_HEIGHT, WIDE_HEIGHT] = [170, 240, 420]; // wide: over the whole width
const FEW_LINES = 5; // whose values stand beside the chart's name; those of more lines stand at the pointer alone
const NEAR_LINES = 14; // of more, those nearest to the pointer are listed
const FEW_POINTS = 40; // a line of so few points shows them, and is not smoothed
const LEAST_DRAG = 5; // in pixels; less is a click
const FONT = '11px system-ui, sans-serif';

// set() takes lines {label, colour, dash, x, y, last, low, high, isBroken}: colour is a name of the theme, last is the text of the
// last value, low and high are the ends of a band; a broken line has a gap where nothing was measured.
// field: {label, about, unit, steady, span}; without a label, the chart's heading is its name.
class Chart {
  constructor(name, view, field = {}) {
    Object.assign(this, { name, view, field, lines: [], width: 0, drag: null, near: null });
    this.values = el('output.chart-now');
    this.base = el('canvas', { 'aria-hidden': 'true' });
    this.cover = el('canvas.cover', { 'aria-hidden': 'true' });
    this.paper = el('div.paper', this.base, this.cover);
    const save = (kind, act) => button(kind, () => act(this), { class: 'quiet', title: `Save ${name} as ${kind}` });
    const flip = (list) => () => view.flip(list, name);
    this.logButton = toggle('log', false, flip('flipped'), { title: `Logarithmic y of ${name} alone`, class: 'quiet' });
    this.title = button(field.label || name, flip('wide'), { class: 'name', title: 'Over the whole width, and back' });
    this.node = el(
      'figure.chart',
      { 'data-field': name, 'aria-label': name },
      el(
        'figcaption',
        this.title,
        span('faint', field.about),
        el('span.save', this.logButton, save('png', savePicture), save('csv', saveTable)),
        this.values,
      ),
      this.paper,
    );
    this.setHeight();
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
      if (!this.frame) return;
      if (this.drag) this.drag[1] = at(event);
      this.near = this.lineAt(event);
      this.view.point(this.xAt(at(event)));
      this.showLines(event);
    });
    this.cover.addEventListener('pointerup', () => {
      const [from, to] = (this.drag || [0, 0]).toSorted((a, b) => a - b);
      this.drag = null;
      if (to - from >= LEAST_DRAG) this.view.zoom(this.xAt(from), this.xAt(to));
    });
    for (const name of ['pointerleave', 'pointercancel'])
      this.cover.addEventListener(name, () => {
        this.drag = this.near = null;
        this.view.point(null);
        tip.hide();
      });
    this.cover.addEventListener('dblclick', () => this.view.reset());
  }

  resize(width) {
    if (!width || width === this.width) return;
    this.width = width;
    this.refresh();
    if (this.isStale) whenIdle(() => this.isStale && this.draw()); // those in sight come first
  }

  setHeight() {
    const { wide, charts = [] } = this.view;
    const isWide = wide.has(this.name);
    const arePaired = PAIR.every((name) => !wide.has(name) && charts.some((chart) => chart.name === name));
    this.height = isWide ? WIDE_HEIGHT : arePaired && PAIR.includes(this.name) ? TALL_HEIGHT : HEIGHT;
    this.paper.style.height = `${this.height}px`;
    this.node.classList.toggle('wide', isWide);
    this.title.setAttribute('aria-pressed', String(isWide));
  }

  get isLog() {
    return this.view.log !== this.view.flipped.has(this.name);
  }

  // Returns the curve, smoothed or not, that is the nearest to the pointer; null for a single one.
  lineAt({ offsetX, offsetY }) {
    const x = this.xAt(offsetX);
    const distance = ({ x: xs, y }) => {
      const value = this.isBeyond(xs, x) ? null : y[nearest(xs, x)];
      return isNumber(value) ? Math.abs(this.top(value) - offsetY) : Infinity;
    };
    const curves = this.curves.filter(({ faint }) => !faint);
    const distances = curves.map(distance);
    const least = Math.min(...distances);
    return curves.length > 1 && least < Infinity ? curves[distances.indexOf(least)].label : null;
  }

  // Lists the values at the pointer beside it, where there is no room for them beside the chart's name.
  showLines(event) {
    if (this.lines.length <= FEW_LINES) return;
    const x = this.view.cursor;
    const curves = this.curves.filter(({ faint, x: xs }) => !faint && !this.isBeyond(xs, x));
    const value = ({ x: xs, y }) => y[nearest(xs, x)];
    const shown = curves.toSorted((a, b) => value(b) - value(a));
    const first = Math.max(0, shown.findIndex(({ label }) => label === this.near) - NEAR_LINES / 2);
    const row = (curve) =>
      el(
        curve.label === this.near ? 'b' : 'span',
        el('span', swatch(curve.colour, curve.dash), ' ', formatUnit(value(curve), this.field.unit), ` ${curve.label}`),
      );
    tip.show(event, formatX(x, this.view.axis, this.view.shown), ...shown.slice(first, first + NEAR_LINES).map(row));
  }

  // Takes new data. A chart whose pixels would not move is not painted, and of one out of sight nothing is computed.
  set(lines) {
    const isNew = this.lines.map(({ label }) => label).join() !== lines.map(({ label }) => label).join();
    this.lines = lines;
    this.setHeight();
    if (isNew) this.drawNames();
    this.drawValues(this.view.cursor ?? null);
    if (this.inSight) this.prepare();
    this.isStale ||= !this.inSight || !this.frame || this.moved() > 0.5;
    if (this.isStale && this.inSight) this.draw();
  }

  // Paints the chart again, as soon as it is in sight.
  refresh() {
    this.isStale = true;
    if (this.inSight) this.draw();
  }

  // Prepares the curves: the raw values faintly behind the smoothed ones, or only the values; and the y axis.
  prepare() {
    const { isLog: log } = this;
    const { weight, clipped, shown } = this.view;
    const positive = (values) => (log ? values?.map((value) => (value > 0 ? value : null)) : values);
    this.curves = this.lines.flatMap((line) => {
      const isSmoothed = weight > 0 && line.y.length >= FEW_POINTS;
      const [y, low, high] = [line.y, line.low, line.high].map(positive);
      if (!isSmoothed) return [{ ...line, y, low, high, points: y.length < FEW_POINTS }];
      const raw = { ...line, y, low, high, dash: null, faint: true };
      return [raw, { ...line, y: smooth(y, weight), raw: y, low: null, high: null }];
    });
    const { steady, span: ends } = this.field;
    const range = yRange(this.curves, shown, { clipped, log, steady, span: ends, most: this.mostTicks() });
    this.logButton.setAttribute('aria-pressed', String(log));
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
    const { axis, weight, clipped, marks, alone } = this.view;
    const theme = document.documentElement.dataset.theme;
    const look = [this.isLog, theme, this.curves.length, this.width, this.height];
    return JSON.stringify([axis, weight, clipped, marks, alone, look]);
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
    this.paintAxes(context);
    this.paintInside(context, (box) => {
      this.paintMarks(context, box);
      for (const curve of this.curves) this.paintBand(context, curve);
      for (const curve of this.curves) this.paintCurve(context, curve);
      this.paintGaps(context);
    });
  }

  // Paints what must not leave the axes.
  paintInside(context, act) {
    const box = [EDGE.left, EDGE.top, this.width - EDGE.left - EDGE.right, this.height - EDGE.top - EDGE.bottom];
    context.save();
    context.beginPath();
    context.rect(box[0], box[1] - 2, box[2] + 2, box[3] + 4);
    context.clip();
    act(box);
    context.restore();
  }

  mostTicks() {
    return Math.max(2, Math.floor((this.height - EDGE.top - EDGE.bottom) / 28));
  }

  paintAxes(context) {
    const { view, height, width, field } = this;
    Object.assign(context, { font: FONT, fillStyle: ink('muted'), strokeStyle: ink('grid'), lineWidth: 1 });
    Object.assign(context, { textAlign: 'right', textBaseline: 'middle' });
    const most = this.mostTicks();
    context.beginPath();
    for (const tick of valueTicks(...this.y.range, most, { log: this.isLog, unit: field.unit })) {
      const top = Math.round(this.top(tick)) + 0.5;
      context.moveTo(EDGE.left, top);
      context.lineTo(width - EDGE.right, top);
      context.fillText(formatAxis(tick, field.unit), EDGE.left - 8, top);
    }
    context.stroke();
    context.textBaseline = 'alphabetic';
    if (view.axis === 'steps' || view.axis === 'tokens') context.fillText(view.axis, EDGE.left - 16, height - 8);
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

  paintBand(context, { x, low, high, colour }) {
    const ends = low ? x.flatMap((at, i) => (isNumber(low[i]) ? [[at, low[i], high[i]]] : [])) : [];
    context.beginPath();
    for (const [at, , top] of ends) context.lineTo(this.left(at), this.top(top));
    for (const [at, bottom] of ends.toReversed()) context.lineTo(this.left(at), this.top(bottom));
    Object.assign(context, { fillStyle: ink(colour), globalAlpha: 0.16 });
    context.fill();
    context.globalAlpha = 1;
  }

  // Marks the points that are NaN or infinite, above the x axis.
  paintGaps(context) {
    Object.assign(context, { fillStyle: ink('error'), textAlign: 'center', font: FONT });
    for (const { x, y } of this.lines) {
      let last = -Infinity;
      for (const left of x.filter((_, i) => y[i] === null).map((at) => this.left(at))) {
        if (left - last < 8) continue;
        context.fillText('×', left, this.height - EDGE.bottom - 3);
        last = left;
      }
    }
  }

  // weight: the line's width in pixels, where it is not the usual one.
  paintCurve(context, { x, y, colour, dash, faint, points, isBroken, label }, weight = faint ? 1 : 1.6) {
    const [from, to] = this.view.shown;
    const gap = isBroken ? GAP * Math.max(1, usualGap(x)) : Infinity;
    const isAside = this.view.alone && this.view.alone !== label;
    Object.assign(context, { strokeStyle: ink(colour), fillStyle: ink(colour), lineWidth: weight });
    Object.assign(context, { globalAlpha: isAside ? 0.18 : faint ? 0.4 : 1, lineJoin: 'bevel' });
    context.lineCap = dash ? 'butt' : 'round'; // a point between two gaps is a dot
    context.setLineDash(dash || []);
    context.beginPath();
    let last = -Infinity;
    for (let i = Math.max(0, indexAt(x, from)); i < x.length; i += 1) {
      if (!isNumber(y[i])) {
        last = -Infinity;
        continue;
      }
      if (x[i] - last > gap || last === -Infinity) context.moveTo(this.left(x[i]), this.top(y[i]));
      context.lineTo(this.left(x[i]), this.top(y[i]));
      last = x[i];
      if (last > to) break;
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
    if (!this.frame || (x === null && !this.hasCursor)) return;
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
      const curves = this.curves.filter(({ faint }) => !faint);
      const strong = curves.find(({ label }) => label === this.near);
      if (strong) this.paintInside(context, () => this.paintCurve(context, strong, 3));
      for (const curve of curves) {
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
    this.values.hidden = this.lines.length > FEW_LINES;
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

  // Returns the value at x as text; of the only line also the smoothed value.
  valueAt({ x: xs, y, label }, x) {
    if (this.isBeyond(xs, x)) return NA;
    const value = formatUnit(y[nearest(xs, x)], this.field.unit);
    const curve = this.lines.length === 1 && this.curves.find(({ raw, label: name }) => raw && name === label);
    return curve ? `${value}, smoothed ${formatUnit(curve.y[nearest(xs, x)], this.field.unit)}` : value;
  }
}
