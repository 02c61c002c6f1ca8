// Rows of cells over steps or time: which rank is slow, which GPU idles. A canvas in the middle, words at both sides.
'use strict';

const SLOWEST = 0.4; // of a rank against the median of all, at which the colour is full

// rows: [{label, sub, value, mark, x, y}]. paint(value) -> colour; told(row, value, x) -> the lines of the tip
class Heat {
  constructor() {
    this.canvas = el('canvas', { role: 'img' });
    this.node = el('div', { class: 'heat' });
    this.rows = [];
    this.watcher = new ResizeObserver(() => this.draw());
    this.watcher.observe(this.canvas);
    this.canvas.addEventListener('mousemove', (event) => this.hover(event));
    this.canvas.addEventListener('mouseleave', () => tip.hide());
  }

  remove() {
    this.watcher.disconnect();
    tip.hide();
  }

  set(rows, { range, paint, told, about, relative = false, ticks = () => [] }) {
    Object.assign(this, { rows, range, paint, told, relative });
    const height = rows.length > 32 ? 10 : rows.length > 12 ? 18 : 26;
    const side = (name, make) =>
      el(
        'div',
        { class: name },
        rows.map((row) => el('div', { style: { height: `${height}px` } }, make(row))),
      );
    const sparse = (row) => height > 10 || rows.indexOf(row) % 4 === 0;
    this.canvas.style.height = `${height * rows.length}px`;
    this.canvas.setAttribute('aria-label', about);
    const axis = ticks(range).map(({ at, words }) => el('span', { style: { left: `${100 * at}%` } }, words));
    this.node.replaceChildren(
      side('heat-names', (row) =>
        sparse(row) ? [row.label, row.sub ? el('span', { class: 'faint' }, row.sub) : null] : null,
      ),
      this.canvas,
      side('heat-values', (row) =>
        sparse(row) || row.mark ? [row.value, row.mark ? el('b', { class: 'mark' }, row.mark) : null] : null,
      ),
      el('div', { class: 'heat-axis' }, axis),
    );
    this.draw();
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (!width || !this.rows.length) return;
    const scale = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    this.count = Math.max(1, Math.min(this.mostPoints(), Math.floor(width / 3)));
    this.cells = this.rows.map(({ x, y }) => binned(x, y, this.range, this.count));
    if (this.relative) this.cells = againstMedian(this.cells);
    const context = this.canvas.getContext('2d');
    const [wide, high] = [this.canvas.width / this.count, this.canvas.height / this.rows.length];
    const line = high > 8 * scale ? scale : 0;
    this.cells.forEach((row, index) =>
      row.forEach((value, bin) => {
        if (value === null) return;
        context.fillStyle = this.paint(value);
        const left = Math.floor(bin * wide);
        context.fillRect(left, Math.round(index * high), Math.ceil((bin + 1) * wide) - left, Math.round(high) - line);
      }),
    );
  }

  // A cell for each point of the fullest row within the range, at most
  mostPoints() {
    const [from, to] = this.range;
    return Math.max(...this.rows.map(({ x }) => indexAt(x, to) - Math.max(0, indexAt(x, from)) + 1), 1);
  }

  hover(event) {
    const box = this.canvas.getBoundingClientRect();
    const bin = Math.floor(((event.clientX - box.left) / box.width) * this.count);
    const index = Math.floor(((event.clientY - box.top) / box.height) * this.rows.length);
    const value = this.cells?.[index]?.[bin];
    if (value === undefined || value === null) return tip.hide();
    const x = this.range[0] + ((bin + 0.5) / this.count) * (this.range[1] - this.range[0]);
    return tip.show(event.clientX, event.clientY, ...this.told(this.rows[index], value, x));
  }
}

// Each cell as its share over the median of all rows then: 0.1 is a tenth slower than the others
function againstMedian(cells) {
  const middles = cells[0].map((_, bin) => median(cells.map((row) => row[bin])));
  return cells.map((row) =>
    row.map((value, bin) => (value === null || !middles[bin] ? null : value / middles[bin] - 1)),
  );
}

function mix(from, to, share) {
  const [a, b] = [from, to].map((colour) => colour.match(/[0-9a-f]{2}/gi).map((part) => parseInt(part, 16)));
  return `rgb(${a.map((part, i) => Math.round(part + (b[i] - part) * Math.max(0, Math.min(1, share)))).join(',')})`;
}

// Neutral at the median, towards orange where slower, towards blue where faster: both are told apart by every eye
function slowPaint() {
  const [none, slow, fast] = ['heat-none', 'heat-slow', 'heat-fast'].map(ink);
  return (over) => mix(none, over > 0 ? slow : fast, Math.max(0, Math.abs(over) - 0.02) / SLOWEST);
}

function sharePaint(full = 'heat-full') {
  const [none, most] = [ink('heat-none'), ink(full)];
  return (share) => mix(none, most, share);
}

// A scale with words at its ends
function legend(paint, from, to, ...words) {
  const stops = Array.from({ length: 12 }, (_, i) => paint(from + ((to - from) * i) / 11));
  return el(
    'span',
    { class: 'legend' },
    words[0],
    el('i', { style: { background: `linear-gradient(90deg, ${stops.join(',')})` } }),
    words.at(-1),
  );
}
