// Compares two to five runs: their curves in the same charts, their last figures, and the settings in which they differ.
'use strict';

const MOST_COMPARED = 5;
const DASHES = [null, [8, 4], [2, 3], [12, 4, 2, 4], [5, 3]]; // lines also differ without their colours

class ComparePage {
  constructor(names) {
    const line = (index) => ({ colour: `line-${index + 1}`, dash: DASHES[index] });
    this.runs = names.map((name, index) => ({ run: new Run(name), label: name, about: null, ...line(index) }));
    this.names = el('ul.compared');
    this.board = new Board(this.runs);
    this.key = (key) => this.board.key(key);
    this.redraw = () => this.board.redraw();
    this.figures = el('div.scroll');
    this.differences = el('div.scroll');
    this.missing = el('p.faint');
    const panel = (id, title, body) => el('section', { id, class: 'panel' }, el('h2', title), body);
    this.node = el(
      'div.page',
      el('section.head', el('h1', `${names.length} runs compared`), this.names),
      panel('curves', 'Curves', el('div', this.missing, this.board.node)),
      panel('figures', 'Last figures', this.figures),
      panel('differences', 'Settings that differ', this.differences),
    );
    for (const compared of this.runs)
      request(`api/runs/${encodeURIComponent(compared.label)}/about`).then((answer) => {
        compared.about = answer || {};
        if (this.runs.every(({ about }) => about)) this.drawDifferences();
      });
  }

  shownSections() {
    const sections = { curves: 'Curves', figures: 'Figures', differences: 'Settings' };
    return Object.entries(sections).map(([id, title]) => ({ id, title }));
  }

  take(message) {
    const compared = this.runs.find(({ run }) => run.name === message.run);
    if (!compared) return;
    compared.isGone = message.gone;
    const changed = message.gone ? new Set(['head']) : compared.run.take(message);
    if (changed.has('series') || changed.has('fields')) this.board.update();
    if (changed.has('head') || changed.has('figures')) this.drawFigures();
    const isMissing = ({ run }) => run.head.name && this.board.view.axis === 'tokens' && !run.head.tokens_per_step;
    const missing = this.runs.filter(isMissing).map(({ label }) => label);
    this.missing.textContent = missing.length ? `The tokens of a step are not known for ${missing.join(', ')}.` : '';
  }

  drawFigures() {
    fill(this.names, this.runs.map(this.nameOf));
    const known = this.runs.filter(({ run }) => run.panels.figures);
    const figures = known.map(({ run }) => new Map(run.panels.figures.map((figure) => [figure.name, figure])));
    const names = [...new Set(figures.flatMap((byName) => [...byName.keys()]))];
    const row = (name) => {
      const best = bestIndex(figures.map((byName) => byName.get(name)));
      const mark = (index) => (index === best ? { class: 'best', title: 'the best of them' } : {});
      return [name, ...figures.map((byName, index) => el('td', mark(index), byName.get(name)?.text ?? NA))];
    };
    fill(this.figures, table('figures', this.heads(known), names.map(row)));
  }

  heads(runs) {
    return ['', ...runs.map(({ label, colour, dash }) => [swatch(colour, dash), label])];
  }

  nameOf({ run, label, colour, dash, isGone }) {
    const badge = run.panels.head ? stateBadge(run.panels.head.badge) : null;
    const link = el('a', { href: `#/run/${encodeURIComponent(label)}` }, label);
    return el('li', swatch(colour, dash), link, isGone ? span('faint', 'not there') : badge);
  }

  drawDifferences() {
    const configs = this.runs.map(({ about }) => ({ ...about.config, ...about.setup }));
    const keys = [...new Set(configs.flatMap(Object.keys))].filter(
      (key) => key !== 'name' && new Set(configs.map((config) => written(config[key]))).size > 1,
    );
    const rows = keys.map((key) => [key, ...configs.map((config) => written(config[key]))]);
    const none = p('faint', 'None: only the names of the runs differ.');
    this.differences.replaceChildren(rows.length ? table('figures', this.heads(this.runs), rows) : none);
  }
}

// figures: {value, better, step} of the runs; step: of a value that compares only with those of the same step. Returns the index
// of the best; -1 if one is unknown or all are the same.
function bestIndex(figures) {
  const values = figures.map((figure) => figure?.value);
  const better = figures[0]?.better;
  if (!better || values.length < 2 || !values.every(isNumber) || new Set(values).size < 2) return -1;
  if (new Set(figures.map(({ step }) => step)).size > 1) return -1;
  return values.indexOf(better === 'less' ? Math.min(...values) : Math.max(...values));
}

const swatch = (colour, dash) =>
  svg(
    'svg.line-swatch',
    { width: 26, height: 10, 'aria-hidden': 'true' },
    svg('path', { d: 'M1,5H25', stroke: `var(--${colour})`, 'stroke-width': 2.5, 'stroke-dasharray': dash?.join(' ') }),
  );
