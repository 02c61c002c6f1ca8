// Shows what each rank and device does now, and maps of how that went. The maps follow the zoom of the curves.
'use strict';

class Ranks {
  constructor(run, board) {
    Object.assign(this, { run, board, heat: new Heat() });
    this.now = el('p.muted');
    this.key = el('p.tools');
    this.table = el('div.scroll');
    this.node = el('div', this.now, this.key, this.heat.node, this.table);
  }

  update() {
    const { text, labels, table: drawn } = this.run.panels.ranks;
    const { axis, shown, range } = this.board.view;
    this.now.textContent = text;
    const rows = Object.entries(this.run.curves.rank_series).flatMap(([rank, series]) => {
      const x = series.steps.length ? xOf(series, axis, this.run.head) : null;
      return x ? [{ label: `rank ${rank}`, ...labels[rank], x, y: series.values }] : [];
    });
    const isMapped = rows.length > 1;
    this.heat.node.hidden = this.key.hidden = !isMapped;
    fill(this.table, isMapped ? null : drawRanks(drawn));
    if (!isMapped) return;
    const palette = slowShades();
    const about = 'own work of each rank in a step, without waiting for the others, against the median of all';
    fill(this.key, span('faint', about), legend(palette, 'faster', 'slower'));
    this.heat.set(rows, {
      ...{ range: shown, low: -SLOWEST, high: SLOWEST, palette, relative: true, look: JSON.stringify([axis, range]) },
      about: `step time of ${rows.length} ranks`,
      lines: (row, value, at) => [
        `${row.label}: ${formatDifference(value)} against the median`,
        formatX(at, axis, shown),
      ],
      ticks: axisTicks(axis, shown, 6).map((at) => ({ at, text: formatTick(at, axis, shown) })),
    });
  }
}

const formatDifference = (share) => `${share < 0 ? '−' : '+'}${Math.abs(Math.round(100 * share))} %`;

class Devices {
  constructor(run, board) {
    Object.assign(this, { run, board, field: null, heat: new Heat() });
    this.hosts = el('div.hosts');
    this.tools = el('div.tools');
    this.node = el('div', this.hosts, this.tools, this.heat.node);
  }

  update() {
    fill(this.hosts, this.run.panels.hosts.map(drawHost));
    this.updateMap();
  }

  updateMap() {
    const { maps } = this.run.panels;
    const fields = Object.keys(maps);
    this.heat.node.hidden = this.tools.hidden = !fields.length;
    if (!fields.length) return;
    const field = fields.includes(this.field) ? this.field : fields[0];
    const { about, unit, colour, rows: devices } = maps[field];
    const rows = devices.flatMap(({ group, key, low, high, ...texts }) => {
      const series = this.run.curves[group][key];
      const y = series?.values.map((value) => (isNumber(value) ? (value - low) / (high - low) : null));
      return series?.times.length ? [{ ...texts, x: series.times, y, values: series.values }] : [];
    });
    if (!rows.length) return;
    const palette = shades('heat-none', colour);
    this.drawTools(fields, field, about, palette);
    const range = this.range(rows);
    const seconds = range[1] - range[0] < 600;
    this.heat.set(rows, {
      ...{ range, low: 0, high: 1, palette, look: JSON.stringify([field, this.board.view.range]) },
      about: `${field} of ${rows.length} devices`,
      lines: (row, _, at) => [`${row.label}: ${formatUnit(row.values[nearest(row.x, at)], unit)}`, formatTime(at)],
      ticks: timeTicks(...range, 5).map((at) => ({ at, text: formatTime(at, { seconds }) })),
    });
  }

  drawTools(fields, field, about, palette) {
    const look = JSON.stringify([fields, field, palette[0]]);
    if (look === this.look) return;
    this.look = look;
    const choose = (name) => {
      this.field = name;
      this.updateMap();
      this.tools.querySelector('[aria-pressed=true]')?.focus();
    };
    this.tools.replaceChildren(
      segments('map of', fields, field, choose),
      span('faint', about),
      legend(palette, 'less', 'more'),
    );
  }

  // Returns the board's zoom in Unix seconds; the range of all samples where the board shows the whole run.
  range(rows) {
    const whole = [Math.min(...rows.map(({ x }) => x[0])), Math.max(...rows.map(({ x }) => x.at(-1)))];
    const { range, axis } = this.board.view;
    const guide = Object.values(this.run.curves.series)[0];
    if (!range || !guide?.times.length) return whole[1] > whole[0] ? whole : [whole[0], whole[0] + 1];
    const x = xOf(guide, axis, this.run.head);
    return range.map((at) => guide.times[Math.max(0, nearest(x, at))]);
  }
}
