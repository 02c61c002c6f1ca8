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

// The hosts now, and how it went: lines with axes for each figure, or a map of one of them. Both follow the zoom of the curves;
// a drag in one of these charts zooms them alone.
class Devices {
  constructor(run, board) {
    Object.assign(this, { run, board, field: null, heat: new Heat(), charts: new Map() });
    this.mode = setting('devices') === 'map' ? 'map' : 'lines';
    this.hosts = el('div.hosts');
    this.tools = el('div.tools');
    this.names = el('ul.compared');
    this.papers = el('div.charts.dense');
    this.view = new SharedView(() => this.drawHistory(), { axis: 'clock' });
    highlightFrom(this.names, this.view);
    this.node = el('div', this.hosts, this.tools, this.names, this.papers, this.heat.node);
  }

  update() {
    fill(this.hosts, this.run.panels.hosts.map(drawHost));
    this.drawHistory();
  }

  // Called when the curves change, and zooms as they do.
  follow() {
    const { range, axis } = this.board.view;
    const zoom = JSON.stringify([range, axis]);
    if (zoom === this.zoom) return;
    this.zoom = zoom;
    const guide = Object.values(this.run.curves.series)[0];
    const x = guide?.times.length && range ? xOf(guide, axis, this.run.head) : null;
    this.view.range = x ? range.map((at) => guide.times[Math.max(0, nearest(x, at))]) : null;
    if (this.view.range?.[0] === this.view.range?.[1]) this.view.range = null;
    this.drawHistory();
  }

  redraw() {
    this.charts.forEach((chart) => chart.draw());
    this.drawHistory();
  }

  drawHistory() {
    const fields = Object.keys(this.run.panels.maps);
    const isMap = this.mode === 'map';
    this.tools.hidden = !fields.length;
    this.heat.node.hidden = !isMap || !fields.length;
    this.papers.hidden = this.names.hidden = isMap;
    if (!fields.length) return;
    const field = fields.includes(this.field) ? this.field : fields[0];
    const palette = shades('heat-none', this.run.panels.maps[field].colour);
    this.drawTools(fields, field, palette);
    const rows = new Map(fields.map((name) => [name, this.rowsOf(name)]));
    const xs = [...rows.values()].flat().map(({ x }) => x);
    if (!xs.length) return;
    const [first, last] = [Math.min(...xs.map((x) => x[0])), Math.max(...xs.map((x) => x.at(-1)))];
    this.view.whole = [first, last > first ? last : first + 1];
    if (isMap) this.drawMap(field, rows.get(field), palette);
    else this.drawLines(rows);
  }

  // Returns the devices that report a field, each with its curve and how its line looks in every chart.
  rowsOf(name) {
    const { rows } = this.run.panels.maps[name];
    return rows.flatMap(({ group, key, ...row }) => {
      const series = this.run.curves[group][key];
      return series?.times.length ? [{ ...row, x: series.times, values: series.values }] : [];
    });
  }

  drawLines(rows) {
    const names = [...new Set([...rows.values()].flat().map(({ device }) => device))];
    const style = new Map(names.map((name, index) => [name, lineStyle(index)]));
    const { maps } = this.run.panels;
    const fields = Object.fromEntries(
      Object.entries(maps).map(([name, { label, about, unit, span: ends }]) => [name, { label, about, unit, span: ends }]),
    );
    this.charts = placeCharts(this.papers, this.charts, [...rows.keys()], this.view, fields);
    for (const [name, devices] of rows)
      this.charts
        .get(name)
        .set(
          devices.map(({ device: label, value: last, x, values: y }) => ({
            label,
            last,
            x,
            y,
            isBroken: true,
            ...style.get(label),
          })),
        );
    const name = (device) =>
      el('li', { 'data-line': device }, swatch(style.get(device).colour, style.get(device).dash), device);
    fill(this.names, names.length > 1 ? names.map(name) : null);
  }

  drawMap(field, devices, palette) {
    const { label, unit } = this.run.panels.maps[field];
    const rows = devices.map((row) => {
      const y = row.values.map((value) => (isNumber(value) ? (value - row.low) / (row.high - row.low) : null));
      return { ...row, y };
    });
    const { shown: range } = this.view;
    const seconds = range[1] - range[0] < 600;
    this.heat.set(rows, {
      ...{ range, low: 0, high: 1, palette, look: JSON.stringify([field, this.view.range]) },
      about: `${label} of ${rows.length} devices`,
      lines: (row, _, at) => [`${row.label}: ${formatUnit(row.values[nearest(row.x, at)], unit)}`, formatTime(at)],
      ticks: timeTicks(...range, 5).map((at) => ({ at, text: formatTime(at, { seconds }) })),
    });
  }

  drawTools(fields, field, palette) {
    const look = JSON.stringify([fields, field, palette[0], this.mode, !!this.view.range]);
    if (look === this.look) return;
    this.look = look;
    const focused = this.tools.contains(document.activeElement) ? document.activeElement.dataset.tool : null;
    const choose = (name, value) => {
      this[name] = value;
      setting('devices', this.mode);
      this.drawHistory();
    };
    const { maps } = this.run.panels;
    const { about } = maps[field];
    const map = [
      segments('map of', fields, field, (name) => choose('field', name), (name) => maps[name].label),
      span('faint', about),
      legend(palette, 'less', 'more'),
    ];
    this.tools.replaceChildren(
      segments('history as', ['lines', 'map'], this.mode, (name) => choose('mode', name)),
      ...(this.mode === 'map' ? map : []),
      this.view.range ? button('whole run', () => this.view.reset(), { 'data-tool': 'whole run' }) : '',
    );
    if (focused) this.tools.querySelector(`[data-tool="${focused}"]`)?.focus();
  }
}
