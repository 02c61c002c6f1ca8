// Two to five runs over each other: the same curves, the last figures side by side, and the settings in which they differ.
'use strict';

const MOST_COMPARED = 5;
// a dash for each beside its colour: told apart in print, and by every eye
const LINES = [
  ['line-1', undefined],
  ['line-2', [8, 4]],
  ['line-3', [2, 3]],
  ['line-4', [12, 4, 2, 4]],
  ['line-5', [5, 3]],
];

class ComparePage {
  constructor(names) {
    this.runs = names.map((name, index) => ({
      run: new Run(name),
      label: name,
      colour: LINES[index][0],
      dash: LINES[index][1],
    }));
    this.abouts = new Map();
    this.keys = el('ul', { class: 'compared' });
    this.board = new Board(this.runs);
    this.figures = el('div', { class: 'scroll' });
    this.differences = el('div', { class: 'scroll' });
    this.none = el('p', { class: 'faint' });
    const panel = (id, title, body) => el('section', { id, class: 'panel' }, el('h2', {}, title), body);
    this.node = el(
      'div',
      { class: 'page' },
      el('section', { class: 'head' }, el('h1', {}, `${names.length} runs compared`), this.keys),
      panel('curves', 'Curves', el('div', {}, this.none, this.board.node)),
      panel('figures', 'Last figures', this.figures),
      panel('differences', 'Settings that differ', this.differences),
    );
    for (const name of names) {
      ask(`api/runs/${encodeURIComponent(name)}/about`).then((answer) => {
        this.abouts.set(name, answer || {});
        this.drawDifferences();
      });
    }
  }

  shownSections() {
    return [
      { id: 'curves', title: 'Curves' },
      { id: 'figures', title: 'Figures' },
      { id: 'differences', title: 'Settings' },
    ];
  }

  take(message) {
    const found = this.runs.find(({ run }) => run.name === message.run);
    if (!found) return;
    found.gone = message.gone;
    const changed = message.gone ? new Set(['head']) : found.run.take(message);
    if (changed.has('series') || !this.board.charts.size) this.board.update();
    if (changed.has('head') || changed.has('series') || changed.has('goodput')) this.drawFigures();
    const lost = this.runs.filter(
      ({ run }) => run.head.name && this.board.together.axis === 'tokens' && !run.head.tokens_per_step,
    );
    this.none.textContent = lost.length
      ? `Tokens of a step are not known of ${lost.map(({ label }) => label).join(', ')}.`
      : '';
  }

  drawFigures() {
    this.keys.replaceChildren(...this.runs.map((each) => this.keyOf(each)));
    const known = this.runs.filter(({ run }) => run.head.name);
    const field = (name) => [name, (run) => formatField(name, run.head[name]), (run) => run.head[name]];
    const rows = [
      ['step', (run) => formatCount(run.head.step), () => null],
      ...['loss', 'val_bpb', 'tok_per_sec', 'step_ms', 'mfu', 'peak_bytes'].map(field),
      ['time', (run) => formatDuration(run.head.elapsed_s), () => null],
      ['goodput', (run) => formatShare(run.parts.goodput?.share), (run) => run.parts.goodput?.share],
    ].filter(([, format]) => known.some(({ run }) => format(run) !== NA));
    const cells = ([name, format, value]) => {
      const best = bestIndex(
        name,
        known.map(({ run }) => value(run)),
      );
      const mark = (index) => (index === best ? { class: 'best', title: 'the best of them' } : {});
      return [name, ...known.map(({ run }, index) => el('td', mark(index), format(run)))];
    };
    fill(this.figures, table('figures', this.heads(known), rows.map(cells)));
  }

  heads(runs) {
    return ['', ...runs.map(({ label, colour, dash }) => [swatch(colour, dash), label])];
  }

  keyOf({ run, label, colour, dash, gone }) {
    const state = run.head.state ? stateBadge(run.head.state) : null;
    const link = el('a', { href: `#/run/${encodeURIComponent(label)}` }, label);
    return el('li', {}, swatch(colour, dash), link, gone ? el('span', { class: 'faint' }, 'not there') : state);
  }

  drawDifferences() {
    const names = this.runs.map(({ label }) => label);
    if (this.abouts.size < names.length) return;
    const configs = names.map((name) => this.abouts.get(name).config || {});
    const write = (value) =>
      value === undefined ? '' : typeof value === 'object' ? JSON.stringify(value) : String(value);
    const keys = [...new Set(configs.flatMap(Object.keys))].filter(
      (key) => key !== 'name' && new Set(configs.map((config) => write(config[key]))).size > 1,
    );
    const rows = keys.map((key) => [key, ...configs.map((config) => write(config[key]) || NA)]);
    const none = el('p', { class: 'faint' }, 'None: the runs differ in name alone.');
    this.differences.replaceChildren(rows.length ? table('figures', this.heads(this.runs), rows) : none);
  }

  key(key) {
    return this.board.key(key);
  }
  themed() {
    this.board.redraw();
  }
  remove() {
    this.board.remove();
  }
}

// Which is best, where all are known and not all the same; -1 else
function bestIndex(name, values) {
  if (values.length < 2 || !values.every(isNumber) || new Set(values).size < 2 || name === 'peak_bytes') return -1;
  const less = FIELDS[name]?.less;
  return values.indexOf(less ? Math.min(...values) : Math.max(...values));
}

function swatch(colour, dash) {
  return svg(
    'svg',
    { class: 'line-swatch', width: 26, height: 10, 'aria-hidden': 'true' },
    svg('line', {
      x1: 1,
      y1: 5,
      x2: 25,
      y2: 5,
      stroke: `var(--${colour})`,
      'stroke-width': 2.5,
      ...(dash ? { 'stroke-dasharray': dash.join(' ') } : {}),
    }),
  );
}
