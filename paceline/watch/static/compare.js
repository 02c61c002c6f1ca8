// Compares runs: their curves in the same charts, their figures at a common step, and the settings in which they differ.
'use strict';

const MOST_COMPARED = 16;
const LINE_COLOURS = 6;
const LONG_TEXT = 24; // characters of a cell, as in style.css
const UNEQUAL = {
  eval_tokens: 'val_bpb is measured on different numbers of held-out tokens; paceline eval measures on all of them',
  eval_text: 'val_bpb is measured on different texts; paceline eval --data measures on one',
};
const NEAR_SHARE = 0.02; // of a step: how far apart the points around it may be
const DASHES = [null, [8, 4], [2, 3], [12, 4, 2, 4], [5, 3]]; // lines also differ without their colours

// Returns the colour and the dashes of the line at an index: thirty differ.
const lineStyle = (index) => ({
  colour: `line-${(index % LINE_COLOURS) + 1}`,
  dash: DASHES[index % DASHES.length],
});

class ComparePage {
  constructor(names, link) {
    this.runs = names.map((name, index) => ({ run: new Run(name), label: name, about: null, ...lineStyle(index) }));
    this.names = el('ul.compared');
    this.board = new Board(this.runs, { link });
    highlightFrom(this.names, this.board.view);
    this.key = (key) => this.board.key(key);
    this.redraw = () => this.board.redraw();
    this.figures = el('div.scroll.snaps');
    this.differences = el('div.scroll.snaps');
    const panel = (id, title, body) => el('section', { id, class: 'panel' }, el('h2', title), body);
    this.node = el(
      'div.page',
      el('section.head', el('h1', `${names.length} runs compared`), this.names),
      panel('curves', 'Curves', this.board.node),
      panel('figures', 'Last figures', this.figures),
      panel('differences', 'Settings that differ', this.differences),
    );
    for (const compared of this.runs)
      request(`api/runs/${encodeURIComponent(compared.label)}/about`).then((answer) => {
        compared.about = answer || {};
        compared.group = compared.about.group;
        if (!this.runs.every(({ about }) => about)) return;
        this.drawDifferences();
        this.board.update();
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
  }

  // Draws the last figures. The best one is marked; of a figure that depends on the step only among values at one step.
  drawFigures() {
    fill(
      this.names,
      this.runs.map((compared) => this.nameOf(compared)),
    );
    const known = this.runs.filter(({ run }) => run.panels.figures);
    const figures = known.map(({ run }) => new Map(run.panels.figures.map((figure) => [figure.name, figure])));
    const textsOf = (name) => new Set(figures.map((byName) => byName.get(name)?.text).filter(Boolean));
    const unequal = Object.keys(UNEQUAL).filter((name) => textsOf(name).size > 1);
    const names = [...new Set(figures.flatMap((byName) => [...byName.keys()]))];
    const row = (name, cells, better) => {
      const best = bestText(cells, better);
      const mark = (figure) => (figure && figure.text === best ? { class: 'best', title: 'the best of them' } : {});
      return [wrapped(name), ...cells.map((figure) => el('td', mark(figure), figure?.text ?? NA))];
    };
    const rowsOf = (name) => {
      const cells = figures.map((byName) => byName.get(name));
      const places = new Set(cells.filter(Boolean).map(({ at }) => at));
      if (!places.has(undefined)) {
        const textOf = ({ at, text }) => (places.size > 1 ? `${text} at step ${at}` : text);
        const results = cells.map((figure) => figure && { ...figure, text: textOf(figure) });
        return [row(places.size > 1 ? name : `${name} at step ${[...places]}`, results, 'less')];
      }
      if (name in UNEQUAL) return unequal.includes(name) ? [row([name, span('mark', ' ▲')], cells)] : [];
      const better = name === 'val_bpb' && unequal.length ? null : cells.find(Boolean).better;
      const curves = known.map(({ run }) => run.curves.series[name]);
      const ends = new Set(curves.map((series) => series?.steps.at(-1)));
      if (!cells.some((figure) => isNumber(figure?.step)) || ends.size < 2) return [row(name, cells, better)];
      const step = commonStep(curves);
      if (step === null) return [row(name, cells)];
      const unit = this.board.fields()[name]?.unit;
      const cellOf = (value) => ({ value, text: formatUnit(value, unit) });
      const common = curves.map((series) => cellOf(valueAtStep(series, step)));
      return [row(name, cells), row(`${name} at step ${formatCount(step)}`, common, better)];
    };
    const shown = table('figures', this.heads(known), names.flatMap(rowsOf));
    fill(this.figures, shown, ...unequal.map((name) => p('faint', span('mark', '▲ '), `${UNEQUAL[name]}.`)));
  }

  heads(runs) {
    return ['', ...runs.map(({ label, colour, dash }) => [swatch(colour, dash), wrapped(label)])];
  }

  nameOf({ run, label, colour, dash, isGone }) {
    const badge = run.panels.head ? stateBadge(run.panels.head.badge) : null;
    const link = el('a', { href: `#/run/${encodeURIComponent(label)}` }, label);
    return el('li', { 'data-line': label }, swatch(colour, dash), link, isGone ? span('faint', 'not there') : badge);
  }

  drawDifferences() {
    // what the plan chose stands in place of what the config left open
    const settings = this.runs.map(({ about }) => ({ ...about.config, ...about.setup }));
    const valueOf = (values, key) => written(values[key]).replace(/ \(auto\)$/, ''); // the same value, set or chosen
    const keys = [...new Set(settings.flatMap(Object.keys))].filter(
      (key) => key !== 'name' && new Set(settings.map((values) => valueOf(values, key))).size > 1,
    );
    const breakable = (key) => key.split(/(?=_)/).flatMap((word) => [word, el('wbr')]);
    const rows = keys.map((key) => [el('span', breakable(key)), ...settings.map((values) => wrapped(written(values[key])))]);
    const none = p('faint', 'None: only the names of the runs differ.');
    this.differences.replaceChildren(rows.length ? table('figures', this.heads(this.runs), rows) : none);
  }
}

// better: 'less' or 'more'. Returns the best value of the runs as it is shown; null where one is unknown or all look the same.
function bestText(figures, better) {
  const values = figures.map((figure) => figure?.value);
  if (!better || !values.every(isNumber) || new Set(figures.map(({ text }) => text)).size < 2) return null;
  return figures[values.indexOf(better === 'less' ? Math.min(...values) : Math.max(...values))].text;
}

// Returns the last step at which all these curves have a value; null without one.
function commonStep(curves) {
  if (!curves.every((series) => series?.steps.length)) return null;
  const shortest = curves.reduce((a, b) => (b.steps.at(-1) < a.steps.at(-1) ? b : a));
  return shortest.steps.findLast((step) => step > 0 && curves.every(({ steps }) => isKnownAt(steps, step))) ?? null;
}

// Returns whether a curve has a point at a step, or points around it so near that the line between them tells the value.
function isKnownAt(steps, step) {
  const index = indexAt(steps, step);
  return steps[index] === step || (index >= 0 && steps[index + 1] - steps[index] <= NEAR_SHARE * step);
}

// Returns the value at a step, between two logged steps on the line between them.
const valueAtStep = ({ steps, values }, step) => valueOn(...inOrder(steps, values), step);

// Breaks a long name or value into lines, so that the other columns stay in sight.
const wrapped = (text) => (text.length > LONG_TEXT ? el('span.long', { title: text }, text) : text);

const swatch = (colour, dash) =>
  svg(
    'svg.line-swatch',
    { width: 26, height: 10, 'aria-hidden': 'true' },
    svg('path', { d: 'M1,5H25', stroke: `var(--${colour})`, 'stroke-width': 2.5, 'stroke-dasharray': dash?.join(' ') }),
  );
