// A board of charts, one for each field of metrics.jsonl, and the tools that move them all. One run or several.
'use strict';

const FIRST_FIELDS = ['loss', 'val_bpb', 'tok_per_sec', 'step_ms', 'mfu', 'grad_norm', 'lr_mult', 'peak_bytes'];

// runs: [{run, label, colour, dash}], as the page has them now
class Board {
  constructor(runs, { onChange = () => {}, marks = () => [] } = {}) {
    this.runs = runs;
    this.charts = new Map();
    this.onChange = onChange;
    this.together = new Together((what) => (what === 'zoom' ? this.zoomed() : this.update()));
    this.together.marks = marks;
    this.together.onCursor = (x) => {
      this.where.textContent = formatX(x, this.together.axis);
    };
    this.where = el('output', { class: 'where faint' });
    this.tools = el('div', { class: 'tools' });
    this.papers = el('div', { class: 'charts' });
    this.papers.addEventListener('mouseleave', () => {
      this.where.textContent = '';
    });
    this.node = el('div', {}, this.tools, this.papers);
    this.drawTools();
  }

  fields() {
    const drawn = ([, { values }]) => values.some(isNumber);
    const known = new Set(
      this.runs.flatMap(({ run }) =>
        Object.entries(run.curves.series)
          .filter(drawn)
          .map(([name]) => name),
      ),
    );
    const others = [...known].filter((name) => !FIRST_FIELDS.includes(name)).sort();
    return [...FIRST_FIELDS.filter((name) => known.has(name)), ...others];
  }

  // The lines of a field, of those runs whose x is known
  linesOf(name) {
    return this.runs.flatMap(({ run, label, colour, dash }) => {
      const series = run.curves.series[name];
      const x = series?.steps.length ? xOf(series, this.together.axis, factsOf(run)) : null;
      if (!x) return [];
      const [xs, y] = inOrder(x, series.values);
      return [{ label, colour: ink(colour), dash, x: xs, y }];
    });
  }

  update() {
    const lines = new Map(this.fields().map((name) => [name, this.linesOf(name)]));
    const ends = [...lines.values()].flat().map(({ x }) => x.at(-1));
    const starts = [...lines.values()].flat().map(({ x }) => x[0]);
    const last = Math.max(...ends, 0);
    this.together.whole = ends.length
      ? [Math.min(...starts, last), last > Math.min(...starts) ? last : last + 1]
      : [0, 1];
    for (const [name, chart] of this.charts) {
      if (lines.has(name)) continue;
      chart.remove();
      this.charts.delete(name);
    }
    for (const [name, those] of lines) {
      if (!this.charts.has(name)) {
        this.charts.set(name, new Chart(name, this.together, FIELDS[name]));
        const before = [...lines.keys()]
          .slice(0, [...lines.keys()].indexOf(name))
          .reverse()
          .find((each) => this.charts.has(each));
        if (before) this.charts.get(before).node.after(this.charts.get(name).node);
        else this.papers.prepend(this.charts.get(name).node);
      }
      this.charts.get(name).set(those);
    }
    this.zoomed();
  }

  redraw() {
    this.charts.forEach((chart) => {
      chart.drawn = null;
    });
    this.update();
  }

  zoomed() {
    this.drawTools();
    this.onChange();
  }

  drawTools() {
    const { together } = this;
    const look = JSON.stringify([together.axis, together.weight, together.log, together.clipped, !!together.range]);
    if (look === this.look) return;
    this.look = look;
    const had = this.tools.contains(document.activeElement) ? document.activeElement.dataset.tool : null;
    const axis = el(
      'span',
      { class: 'segments', role: 'group', 'aria-label': 'x axis' },
      AXES.map((name) =>
        el(
          'button',
          {
            type: 'button',
            'data-tool': `x ${name}`,
            'aria-pressed': String(together.axis === name),
            title: 'key x',
            onclick: () => together.set('axis', name),
          },
          name,
        ),
      ),
    );
    this.tools.replaceChildren(
      axis,
      this.slider(),
      this.toggle('log', 'log y', 'l'),
      this.toggle('clipped', 'clip outliers', 'o'),
      el(
        'span',
        { class: 'segments', role: 'group', 'aria-label': 'zoom' },
        this.button('+', 'Zoom in (+)', () => together.zoomBy(0.5)),
        this.button('−', 'Zoom out (-)', () => together.zoomBy(2)),
      ),
      together.range ? this.button('whole run', 'Reset the zoom (r), or double-click', () => together.reset()) : '',
      this.where,
    );
    if (had) this.tools.querySelector(`[data-tool="${had}"]`)?.focus();
  }

  slider() {
    const { together } = this;
    const shown = el('output', {}, together.weight ? together.weight.toFixed(2) : 'off');
    const input = el('input', {
      type: 'range',
      min: 0,
      max: 0.99,
      step: 0.01,
      value: together.weight,
      'data-tool': 'smooth',
      'aria-label': 'smoothing',
      oninput: () => {
        shown.textContent = Number(input.value) ? Number(input.value).toFixed(2) : 'off';
        this.look = JSON.stringify([
          together.axis,
          Number(input.value),
          together.log,
          together.clipped,
          !!together.range,
        ]);
        together.set('weight', Number(input.value));
      },
    });
    return el('label', { class: 'slider', title: 'key s' }, 'smoothing', input, shown);
  }

  toggle(name, words, key) {
    return el(
      'button',
      {
        type: 'button',
        class: 'toggle',
        title: `key ${key}`,
        'data-tool': name,
        'aria-pressed': String(this.together[name]),
        onclick: () => this.together.set(name, !this.together[name]),
      },
      words,
    );
  }

  button(words, title, onclick) {
    return el('button', { type: 'button', title, 'data-tool': words, 'aria-label': title, onclick }, words);
  }

  // Returns whether the key was one of these tools'
  key(key) {
    const { together } = this;
    const acts = {
      x: () => together.set('axis', AXES[(AXES.indexOf(together.axis) + 1) % AXES.length]),
      s: () => together.set('weight', { 0: 0.6, 0.6: 0.9, 0.9: 0.97 }[together.weight] ?? 0),
      l: () => together.set('log', !together.log),
      o: () => together.set('clipped', !together.clipped),
      r: () => together.reset(),
      '+': () => together.zoomBy(0.5),
      '=': () => together.zoomBy(0.5),
      '-': () => together.zoomBy(2),
      ArrowLeft: () => together.pan(-0.2),
      ArrowRight: () => together.pan(0.2),
    };
    acts[key]?.();
    return key in acts;
  }

  remove() {
    this.charts.forEach((chart) => chart.remove());
  }
}

function factsOf(run) {
  return { tokensPerStep: run.head.tokens_per_step, started: run.head.started };
}
