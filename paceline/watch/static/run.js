// The page of one run. Each section is drawn only when its part of the run changes.
'use strict';

class RunPage {
  // about: config, facts and samples of a report; a live page requests them.
  constructor(run, { about = null, isLive = true, link = null } = {}) {
    Object.assign(this, { run, about: about || {}, sections: new Map(), top: el('div'), tiles: el('div') });
    this.board = new Board([{ run, label: run.name, colour: 'line-1' }], {
      onChange: () => this.drawMaps(),
      marksOf: (axis) => run.panels.marks?.[axis],
      link,
    });
    this.ranks = new Ranks(run, this.board);
    this.devices = new Devices(run, this.board);
    this.events = new Events(run);
    this.logs = isLive ? new Logs(run) : null;
    this.node = el('div.page', this.top);
    for (const section of this.layout().filter(([id]) => this.logs || id !== 'logs')) this.add(section);
    this.sections.get('why').node.after(this.tiles);
    this.sections.get('why').node.addEventListener('click', (event) => {
      const { log, line } = event.target.closest('[data-log]')?.dataset ?? {};
      if (!log) return;
      event.preventDefault();
      this.logs?.openAt(log, Number(line));
    });
    if (isLive) this.readAbout();
  }

  async readAbout() {
    this.about = (await request(`api/runs/${encodeURIComponent(this.run.name)}/about`)) || {};
    this.update(new Set(['about']));
  }

  // id, title, the panels and curves it is drawn from, and what draws it: a function that returns nodes or null, or a
  // part of the page with whether it has anything to show. A section without anything to show is hidden.
  layout() {
    const { panels } = this.run;
    const panel = (name, draw) => () => (panels[name] ? draw(panels[name]) : null);
    const size = (value) => Object.keys(value || {}).length;
    const about = (name, draw) => () => (size(this.about[name]) ? draw(this.about[name]) : null);
    return [
      ['why', 'What happened', ['why'], panel('why', drawWhy)],
      ['curves', 'Curves', ['series', 'fields', 'marks'], () => size(panels.fields), { part: this.board }],
      ['ranks', 'Ranks', ['ranks', 'rank_series'], () => panels.ranks, { part: this.ranks }],
      [
        ...['devices', 'Devices', ['hosts', 'maps', 'gpu_series', 'host_series']],
        ...[() => size(panels.hosts) || size(panels.maps), { part: this.devices }],
      ],
      ['attempts', 'Attempts', ['attempts'], panel('attempts', drawAttempts)],
      ['events', 'Events', ['events', 'spans'], () => size(panels.events), { part: this.events }],
      ['logs', 'Logs', ['logs'], () => size(panels.logs?.rows), { part: this.logs }],
      ['plan', 'Plan against measured', ['plan'], panel('plan', drawPlan), { short: 'Plan', half: true }],
      ['time', 'Where the time went', ['goodput'], panel('goodput', drawGoodput), { short: 'Time', half: true }],
      ['evaluations', 'Results of paceline eval', ['evaluations'], panel('evaluations', drawEvaluations), { short: 'Eval' }],
      ['findings', 'Findings of the checks', ['findings'], panel('findings', drawFindings), { short: 'Findings' }],
      ['samples', 'Samples', ['about'], about('samples', drawSamples)],
      ['config', 'Config', ['about'], about('config', drawConfig)],
      ['machine', 'Machine', ['about'], about('facts', drawFacts)],
    ];
  }

  add([id, title, sources, draw, { part = null, short = title, half = false } = {}]) {
    const body = part ? part.node : el('div');
    const attributes = { id, hidden: true, 'aria-labelledby': `${id}-title` };
    const node = el(
      half ? 'section.panel.half' : 'section.panel',
      attributes,
      el('h2', { id: `${id}-title` }, title),
      body,
    );
    this.sections.set(id, { id, title: short, sources, draw, part, half, node, body });
    this.node.append(node);
  }

  // changed: the names of panels and of groups of curves.
  update(changed) {
    const { head, tiles } = this.run.panels;
    if (this.state === 'preparing' && head.badge.state !== 'preparing') this.readAbout(); // it has a config now
    this.state = head?.badge.state;
    if (changed.has('head')) fill(this.top, drawHead(this.run.name, head));
    if (changed.has('tiles')) fill(this.tiles, drawTiles(tiles));
    let isMoved = false;
    for (const { node, body, sources, part, draw, half } of this.sections.values()) {
      if (!sources.some((name) => changed.has(name))) continue;
      const drawn = draw();
      isMoved ||= node.hidden === Boolean(drawn);
      node.hidden = !drawn;
      if (!drawn) continue;
      if (part) part.update();
      else if (half) fill(body, drawn);
      else body.replaceChildren(drawn);
    }
    if (isMoved) this.onSections?.();
  }

  shownSections() {
    return [...this.sections.values()].filter(({ node }) => !node.hidden);
  }

  drawMaps() {
    if (!this.sections.get('ranks')?.node.hidden) this.ranks.update();
    if (!this.sections.get('devices')?.node.hidden) this.devices.follow();
  }

  key(key) {
    if (key !== '/' || !this.logs) return this.board.key(key);
    this.logs.search.scrollIntoView({ block: 'center' });
    this.logs.search.focus();
    return true;
  }

  redraw() {
    this.board.redraw();
    this.drawMaps();
    if (!this.sections.get('devices').node.hidden) this.devices.redraw();
    this.events.drawLine();
  }
}
