// Draws rows of cells over steps or time: which rank is slow, which GPU idles. Text stands on both sides of the canvas.
'use strict';

const SLOWEST = 0.4; // of a rank against the median of all, at which the colour is full
const SHADES = 32;
const REDRAW_MS = 5000; // between two redraws for new points, which mostly move a map by less than a cell

class Heat {
  constructor() {
    this.canvas = el('canvas', { role: 'img' });
    [this.names, this.values] = ['heat-names', 'heat-values'].map((name) => el(`div.${name}`));
    this.axis = el('div.heat-axis');
    this.node = el('div.heat', this.names, this.canvas, this.values, this.axis);
    Object.assign(this, { rows: [], width: 0, drawnAt: 0 });
    watchWidth(this.canvas, (width) => {
      this.width = width;
      this.draw();
    });
    this.canvas.addEventListener('pointermove', (event) => this.hover(event));
    this.canvas.addEventListener('pointerleave', () => tip.hide());
  }

  // rows: [{label, sub, value, mark, x, y}]. palette: colours from y = low to y = high. lines: (row, value, x) -> tip.
  // relative: y is compared with the median of all rows. look: what else the picture depends on, as text
  set(rows, { range, low, high, palette, lines, about, ticks, relative = false, look = '' }) {
    Object.assign(this, { rows, range, low, high, palette, lines, relative });
    const height = rows.length > 32 ? 10 : rows.length > 12 ? 18 : 26;
    const isShown = (index) => height > 10 || index % 4 === 0;
    const cell = (...content) => el('div', { style: { height: `${height}px` } }, content);
    const name = ({ label, sub }, index) => (isShown(index) ? cell(label, span('faint', sub)) : cell());
    const value = ({ value: text, mark }, index) => (isShown(index) || mark ? cell(text, slowMark(mark)) : cell());
    const place = (at) => `${(100 * (at - range[0])) / (range[1] - range[0])}%`;
    const tick = ({ at, text }) => el('span', { style: { left: place(at) } }, text);
    fill(this.names, rows.map(name));
    fill(this.values, rows.map(value));
    fill(this.axis, ticks.map(tick));
    this.height = height * rows.length;
    this.canvas.style.height = `${this.height}px`;
    if (this.canvas.getAttribute('aria-label') !== about) this.canvas.setAttribute('aria-label', about);
    const now = JSON.stringify([look, rows.map(({ label }) => label), palette[0], palette.at(-1)]);
    clearTimeout(this.timer);
    if (now !== this.look) this.draw();
    else this.timer = setTimeout(() => this.draw(), Math.max(0, this.drawnAt + REDRAW_MS - Date.now()));
    this.look = now;
  }

  draw() {
    if (!this.width || !this.rows.length) return;
    this.drawnAt = Date.now();
    const scale = devicePixelRatio || 1;
    this.canvas.width = Math.round(this.width * scale);
    this.canvas.height = Math.round(this.height * scale);
    this.count = Math.max(1, Math.min(this.mostPoints(), Math.floor(this.width / 3)));
    this.cells = this.rows.map(({ x, y }) => binned(x, y, this.range, this.count));
    if (this.relative) this.cells = againstMedian(this.cells);
    const context = this.canvas.getContext('2d');
    const [wide, high] = [this.canvas.width / this.count, this.canvas.height / this.rows.length];
    const line = high > 8 * scale ? scale : 0;
    this.cells.forEach((row, index) =>
      row.forEach((value, bin) => {
        if (value === null) return;
        const share = Math.max(0, Math.min(1, (value - this.low) / (this.high - this.low)));
        context.fillStyle = this.palette[Math.round(share * (this.palette.length - 1))];
        const left = Math.floor(bin * wide);
        context.fillRect(left, Math.round(index * high), Math.ceil((bin + 1) * wide) - left, Math.round(high) - line);
      }),
    );
  }

  // Returns how many cells a row has at most: one for each point of the fullest row within the range.
  mostPoints() {
    const [from, to] = this.range;
    return Math.max(...this.rows.map(({ x }) => indexAt(x, to) - Math.max(0, indexAt(x, from)) + 1), 1);
  }

  hover(event) {
    const bin = Math.floor((event.offsetX / this.width) * this.count);
    const index = Math.floor((event.offsetY / this.height) * this.rows.length);
    const value = this.cells?.[index]?.[bin];
    if (value === undefined || value === null) return tip.hide();
    const x = this.range[0] + ((bin + 0.5) / this.count) * (this.range[1] - this.range[0]);
    return tip.show(event, ...this.lines(this.rows[index], value, x));
  }
}

// Returns each cell as a share above the median of all rows at that time: 0.1 is a tenth slower than the others.
function againstMedian(cells) {
  const middles = cells[0].map((_, bin) => median(cells.map((row) => row[bin])));
  const compared = (value, bin) => (value === null || !middles[bin] ? null : value / middles[bin] - 1);
  return cells.map((row) => row.map(compared));
}

// Returns shades from one colour of the theme to another.
function shades(from, to) {
  const parts = (name) => ink(name).match(/[0-9a-f]{2}/gi);
  const [a, b] = [from, to].map((name) => parts(name).map((part) => parseInt(part, 16)));
  const mix = (share) => `rgb(${a.map((part, i) => Math.round(part + (b[i] - part) * share)).join()})`;
  return Array.from({ length: SHADES }, (_, i) => mix(i / (SHADES - 1)));
}

// Neutral at the median, orange where slower, blue where faster: they differ for every kind of colour vision.
const slowShades = () => [...shades('heat-none', 'heat-fast').reverse(), ...shades('heat-none', 'heat-slow')];

// Makes a colour scale with text at its ends.
const legend = (palette, first, last) =>
  el('span.legend', first, el('i', { style: { background: `linear-gradient(90deg, ${palette.join()})` } }), last);
