// The page of one run: its sections in the order in which one asks, each drawn anew only when its part of the run changes.
'use strict';

// id, title, which changes concern it, whether it is shown at all, how it is drawn
class RunPage {
  constructor(run, { about = null, live = true } = {}) {
    Object.assign(this, { run, about: about || {}, live, sections: new Map(), node: el('div', { class: 'page' }) });
    this.board = new Board([{ run, label: run.name, colour: 'line-1' }], {
      onChange: () => this.zoomed(),
      marks: () => marksOf(run, this.board),
    });
    this.ranks = new Ranks(run, this.board);
    this.devices = new Devices(run, this.board);
    this.events = new Events(run);
    this.logs = live ? new Logs(run) : null;
    this.top = el('div');
    this.tiles = el('div');
    this.node.append(this.top);
    for (const plan of this.plans()) this.add(plan);
    this.sections.get('why').section.after(this.tiles);
    if (live)
      ask(`api/runs/${encodeURIComponent(run.name)}/about`).then((answer) => {
        this.about = answer || {};
        this.update(new Set(['about']));
      });
    this.ticking = live ? setInterval(() => this.tick(), 5000) : null;
  }

  plans() {
    const { run } = this;
    const curves = () => Object.values(run.curves.series).some(({ steps }) => steps.length);
    return [
      { id: 'why', title: 'What happened', of: ['explanation'], draw: () => drawWhy(run) },
      { id: 'curves', title: 'Curves', of: ['series', 'events'], part: this.board, shown: curves },
      { id: 'ranks', title: 'Ranks', of: ['ranks', 'rank_series'], part: this.ranks, shown: () => !this.ranks.isEmpty },
      {
        id: 'devices',
        title: 'Devices',
        of: ['hosts', 'gpu_series', 'host_series'],
        part: this.devices,
        shown: () => !this.devices.isEmpty,
      },
      { id: 'attempts', title: 'Attempts', of: ['attempts', 'state'], draw: () => drawAttempts(run) },
      {
        id: 'events',
        title: 'Events',
        of: ['events', 'attempts', 'state'],
        part: this.events,
        shown: () => run.parts.events?.length,
      },
      ...(this.logs
        ? [
            {
              id: 'logs',
              title: 'Logs',
              of: ['logs', 'explanation'],
              part: this.logs,
              shown: () => run.parts.logs?.length,
            },
          ]
        : []),
      {
        id: 'plan',
        title: 'Plan against measured',
        short: 'Plan',
        of: ['plan', 'series', 'state'],
        half: true,
        draw: () => drawPlan(run),
      },
      {
        id: 'time',
        title: 'Where the time went',
        short: 'Time',
        of: ['goodput'],
        half: true,
        draw: () => drawGoodput(run),
      },
      {
        id: 'findings',
        title: 'Findings of the checks',
        short: 'Findings',
        of: ['findings'],
        draw: () => drawFindings(run),
      },
      { id: 'samples', title: 'Samples', of: ['about'], draw: () => drawSamples(this.about) },
      { id: 'config', title: 'Config', of: ['about'], draw: () => drawConfig(this.about) },
      { id: 'machine', title: 'Machine', of: ['about'], draw: () => drawFacts(this.about) },
    ];
  }

  add(plan) {
    const body = plan.part ? plan.part.node : el('div');
    const section = el(
      'section',
      { id: plan.id, class: `panel${plan.half ? ' half' : ''}`, hidden: true, 'aria-labelledby': `${plan.id}-title` },
      el('h2', { id: `${plan.id}-title` }, plan.title),
      body,
    );
    this.sections.set(plan.id, { ...plan, section, body });
    this.node.append(section);
  }

  // changed: names of parts and groups of curves
  update(changed) {
    if (changed.has('head') || changed.has('summary')) this.drawTop();
    if (['head', 'goodput', 'plan', 'series'].some((name) => changed.has(name)))
      fill(this.tiles, ...drawTiles(this.run));
    let moved = false;
    for (const each of this.sections.values()) {
      if (!each.of.some((name) => changed.has(name))) continue;
      const drawn = each.part ? each.shown() : each.draw();
      moved ||= each.section.hidden === Boolean(drawn);
      each.section.hidden = !drawn;
      if (!drawn) continue;
      if (each.part) each.part.update();
      else if (each.half) fill(each.body, drawn);
      else each.body.replaceChildren(drawn);
    }
    if (changed.has('series') && !this.sections.get('ranks').section.hidden) this.ranks.update();
    if (moved) this.onSections?.(this.shownSections());
  }

  shownSections() {
    return [...this.sections.values()]
      .filter(({ section }) => !section.hidden)
      .map(({ id, title, short }) => ({ id, title: short || title }));
  }

  // What moves on while no file changes
  tick() {
    this.drawTop();
    if (this.run.isLive) this.events.drawLine();
  }

  drawTop() {
    if (this.run.head.name) fill(this.top, drawHead(this.run));
  }

  zoomed() {
    if (!this.sections.get('ranks')?.section.hidden) this.ranks.update();
    if (!this.sections.get('devices')?.section.hidden) this.devices.updateMap();
  }

  key(key) {
    if (key === '/' && this.logs) {
      this.logs.search.scrollIntoView({ block: 'center' });
      this.logs.search.focus();
      return true;
    }
    return this.board.key(key);
  }

  themed() {
    this.board.redraw();
    this.zoomed();
    this.events.drawLine();
  }

  remove() {
    clearInterval(this.ticking);
    [this.board, this.ranks, this.devices, this.events, this.logs].forEach((part) => part?.remove());
  }
}

const MARKED = ['verdict', 'hang', 'trouble', 'rollback', 'resumed'];

// Where something broke or began again, on the axis that the board shows
function marksOf(run, board) {
  const axis = board?.together.axis;
  const guide = run.curves.series.loss;
  if (!guide?.steps.length) return [];
  const facts = factsOf(run);
  return (run.parts.events || [])
    .filter(({ kind, step }) => MARKED.includes(kind) && (step || kind !== 'resumed'))
    .flatMap((event) => {
      if (axis === 'hours')
        return isNumber(event.time) && isNumber(facts.started)
          ? [{ x: (event.time - facts.started) / 3600, kind: event.kind }]
          : [];
      const step = event.step ?? guide.steps[Math.max(0, indexAt(guide.times, event.time))];
      if (!isNumber(step)) return [];
      return [{ x: axis === 'tokens' ? step * (facts.tokensPerStep || NaN) : step, kind: event.kind }];
    });
}
