// Ranks and GPUs: what each does now, and a map of how it went. The maps follow the zoom of the curves.
'use strict';

const DEVICE_FIELDS = {
  use: { about: 'share of time in which a kernel ran', share: (v) => v, format: (v) => formatShare(v) },
  used_bytes: { about: 'memory taken', share: (v, gpu) => v / (gpu?.total_bytes || v || 1), format: formatBytes },
  power_w: { about: 'watts', share: (v, gpu) => v / (gpu?.power_limit_w || 700), format: (v) => `${Math.round(v)} W` },
  temperature_c: {
    about: '30 to 90 °C',
    share: (v) => (v - 30) / 60,
    format: (v) => `${Math.round(v)} °C`,
    full: 'heat-slow',
  },
  cpu: { about: 'share of all cores of the host', share: (v) => v, format: (v) => formatShare(v) },
  ram_used: {
    about: 'memory of the host taken',
    share: (v, host) => v / (host?.ram_total || v || 1),
    format: formatBytes,
  },
};

const AT_ITS_POWER_LIMIT = 'power'; // a reason to clock down that every card has that works

const GRAVE_ERRORS = ['xid', 'ecc_uncorrected'];

class Ranks {
  constructor(run, board) {
    Object.assign(this, { run, board, heat: new Heat() });
    this.now = el('p', { class: 'muted' });
    this.key = el('p', { class: 'tools' });
    this.table = el('div', { class: 'scroll' });
    this.node = el('div', {}, this.now, this.key, this.heat.node, this.table);
  }

  get isEmpty() {
    const ranks = this.run.parts.ranks || [];
    return (
      !(this.run.isLive && ranks.length) &&
      !ranks.some(({ busy_ms: busy }) => isNumber(busy)) &&
      !Object.keys(this.run.curves.rank_series).length
    );
  }

  remove() {
    this.heat.remove();
  }

  update() {
    const { run, board } = this;
    const ranks = run.parts.ranks || [];
    this.now.textContent = phasesOf(ranks, run);
    const { axis, shown } = board.together;
    const rows = Object.entries(run.curves.rank_series).flatMap(([key, series]) => {
      const x = series.steps.length ? xOf(series, axis, factsOf(run)) : null;
      const view = ranks.find(({ rank }) => String(rank) === key) || {};
      const value = isNumber(view.busy_ms) ? `${Math.round(view.busy_ms)} ms` : '';
      return x
        ? [{ label: `rank ${key}`, sub: view.host, value, mark: view.slow ? '▲ slow' : null, x, y: series.values }]
        : [];
    });
    const mapped = rows.length > 1;
    this.heat.node.hidden = !mapped;
    this.key.hidden = !mapped;
    this.table.replaceChildren(mapped ? '' : rankTable(ranks));
    if (!mapped) return;
    const paint = slowPaint();
    this.key.replaceChildren(
      el(
        'span',
        { class: 'faint' },
        'own work of each rank in a step, without waiting for the others, against the median of all',
      ),
      legend(paint, -SLOWEST, SLOWEST, 'faster', 'slower'),
    );
    this.heat.set(rows, {
      range: shown,
      paint,
      relative: true,
      about: `step time of ${rows.length} ranks`,
      told: (row, value, at) => [`${row.label}: ${formatSigned(value)} against the median`, formatX(at, axis)],
      ticks: ([from, to]) =>
        niceTicks(from, to, 6).map((tick) => ({
          at: (tick - from) / (to - from),
          words: axis === 'hours' ? formatHours(tick, [from, to]) : formatShort(tick),
        })),
    });
  }
}

function phasesOf(ranks, run) {
  if (!ranks.length || !run.isLive) return '';
  const phases = [...new Set(ranks.map(({ phase }) => phase).filter(Boolean))];
  const quiet = ranks.filter(({ silent_s: silent }) => silent > 30);
  const words = [
    `${ranks.length} rank${ranks.length > 1 ? 's' : ''}`,
    phases.length ? `in ${phases.join(', ')}` : '',
    quiet.length
      ? `; without a sign: ${quiet
          .map(
            ({ rank, phase, silent_s: silent }) =>
              `rank ${rank} for ${formatDuration(silent)}${phase ? ` in ${phase}` : ''}`,
          )
          .slice(0, 8)
          .join(', ')}`
      : '',
  ];
  return words.filter(Boolean).join(' ').replace(' ;', ';');
}

function rankTable(ranks) {
  const longest = Math.max(...ranks.map(({ busy_ms: busy }) => busy || 0), 1);
  const work = ({ busy_ms: busy, slow }) => [
    meter(busy / longest, { label: 'own work', level: slow ? 'warning' : '' }),
    ` ${Math.round(busy)} ms `,
    slow ? el('b', { class: 'mark' }, '▲ slow') : null,
  ];
  const columns = [
    ['host', ({ host }) => host],
    ['step', ({ step }) => (isNumber(step) ? formatCount(step) : null)],
    ['phase', ({ phase }) => phase],
    ['own work in a step', (each) => (isNumber(each.busy_ms) ? work(each) : null)],
  ].filter(([, of]) => ranks.some((each) => of(each)));
  const row = (each) => [each.rank, ...columns.map(([, of]) => of(each) || NA)];
  return table('figures ranks', ['rank', ...columns.map(([name]) => name)], ranks.map(row));
}

class Devices {
  constructor(run, board) {
    Object.assign(this, { run, board, field: 'use', heat: new Heat() });
    this.hosts = el('div', { class: 'hosts' });
    this.tools = el('div', { class: 'tools' });
    this.node = el('div', {}, this.hosts, this.tools, this.heat.node);
  }

  get isEmpty() {
    return !this.run.parts.hosts?.length && !this.mapped().length;
  }

  remove() {
    this.heat.remove();
  }

  update() {
    this.hosts.replaceChildren(...(this.run.parts.hosts || []).map((host) => hostCard(host, this.run)));
    this.updateMap();
  }

  updateMap() {
    const found = this.mapped();
    const fields = Object.keys(DEVICE_FIELDS).filter((name) => found.some(({ field }) => field === name));
    this.heat.node.hidden = this.tools.hidden = !fields.length;
    if (!fields.length) return;
    const field = fields.includes(this.field) ? this.field : fields[0];
    const { share, format, about, full } = DEVICE_FIELDS[field];
    const rows = found
      .filter((each) => each.field === field)
      .map(({ series, device, ...words }) => {
        const y = series.values.map((value) => (isNumber(value) ? share(value, device) : null));
        return {
          ...words,
          value: formatLast(series, format),
          mark: heldBack(device).length ? '▲ held back' : null,
          x: series.times,
          y,
          values: series.values,
        };
      });
    const paint = sharePaint(full);
    this.drawTools(fields, field, about, paint);
    this.heat.set(rows, {
      range: this.range(rows),
      paint,
      about: `${field} of ${rows.length} devices`,
      told: (row, value, at) => [`${row.label}: ${format(row.values[nearest(row.x, at)])}`, formatTime(at)],
      ticks: ([from, to]) =>
        ticksOfTime(from, to, 5).map((time) => ({
          at: (time - from) / (to - from),
          words: formatTime(time, { seconds: to - from < 600 }),
        })),
    });
  }

  // Every curve of a GPU or a host: {field, label, sub, device, series}
  mapped() {
    const { curves, parts } = this.run;
    const hosts = parts.hosts || [];
    const several = hosts.length > 1;
    const named = (name) => hosts.find((host) => host.name === name);
    const gpus = Object.entries(curves.gpu_series).flatMap(([key, series]) => {
      const [, host, index, field] = key.match(/^(.*)\/(\d+) (\w+)$/) || [];
      const device = named(host)?.gpus.find((gpu) => String(gpu.index) === index);
      return field && series.times.length
        ? [{ field, label: `GPU ${index}`, sub: several ? host : null, device, series }]
        : [];
    });
    const whole = Object.entries(curves.host_series).flatMap(([key, series]) => {
      const [, host, field] = key.match(/^(.*) (\w+)$/) || [];
      return field && series.times.length ? [{ field, label: host, sub: null, device: named(host), series }] : [];
    });
    return [...gpus, ...whole];
  }

  drawTools(fields, shown, about, paint) {
    const choose = (name) => () => {
      this.field = name;
      this.updateMap();
      this.tools.querySelector('[aria-pressed=true]')?.focus();
    };
    this.tools.replaceChildren(
      el(
        'span',
        { class: 'segments', role: 'group', 'aria-label': 'map of' },
        fields.map((name) =>
          el('button', { type: 'button', 'aria-pressed': String(name === shown), onclick: choose(name) }, name),
        ),
      ),
      el('span', { class: 'faint' }, about),
      legend(paint, 0, 1, 'less', 'more'),
    );
  }

  // The board's zoom in Unix seconds; all samples where it shows the whole run
  range(rows) {
    const whole = [Math.min(...rows.map(({ x }) => x[0])), Math.max(...rows.map(({ x }) => x.at(-1)))];
    const { range, axis } = this.board.together;
    const guide = Object.values(this.run.curves.series)[0];
    if (!range || !guide?.times.length) return whole[1] > whole[0] ? whole : [whole[0], whole[0] + 1];
    const x = xOf(guide, axis, factsOf(this.run));
    return range.map((at) => guide.times[Math.max(0, nearest(x, at))]);
  }
}

function formatLast(series, format) {
  const last = series.values.at(-1);
  return isNumber(last) ? format(last) : NA;
}

function hostCard(host, run) {
  const age = host.time ? nowS() - host.time : null;
  const cgroup = host.cgroup_limit && host.cgroup_used !== null;
  const [used, whole] = cgroup ? [host.cgroup_used, host.cgroup_limit] : [host.ram_used, host.ram_total];
  const gauges = [
    isNumber(host.cpu)
      ? gauge('CPU', host.cpu, `${formatShare(host.cpu)}${host.cores ? ` of ${host.cores} cores` : ''}`)
      : null,
    isNumber(used)
      ? gauge(
          cgroup ? 'RAM (cgroup)' : 'RAM',
          whole ? used / whole : null,
          `${formatBytes(used)}${whole ? ` of ${formatBytes(whole)}` : ''}`,
          0.95,
        )
      : null,
    isNumber(host.disk_free)
      ? gauge(
          'disk',
          host.disk_total ? 1 - host.disk_free / host.disk_total : null,
          `${formatBytes(host.disk_free)} free`,
          0.97,
        )
      : null,
    isNumber(host.net_in_bps)
      ? gauge('network', null, `${formatBytes(host.net_in_bps)}/s in, ${formatBytes(host.net_out_bps)}/s out`)
      : null,
  ];
  return el(
    'article',
    { class: 'host' },
    el(
      'h3',
      {},
      host.name,
      el('span', { class: 'faint' }, age === null ? '' : run.isLive && age < 10 ? '' : `measured ${formatAgo(age)}`),
    ),
    el('div', { class: 'gauges' }, gauges),
    host.gpus.length ? el('div', { class: 'gpus' }, host.gpus.map(gpuRow)) : el('p', { class: 'faint' }, 'no GPU'),
  );
}

// share null: a number that is a part of nothing known. full: from where it is marked.
function gauge(name, share, words, full = 2) {
  const grave = isNumber(share) && share > full;
  return el(
    'div',
    { class: 'gauge' },
    el('span', { class: 'muted' }, name),
    !isNumber(share) ? el('span') : meter(share, { label: name, level: grave ? 'warning' : '' }),
    el('span', { class: 'number' }, grave ? '▲ ' : '', words),
  );
}

// Without the reasons for which cards clock down every day
function heldBack(gpu) {
  return (gpu?.throttle || []).filter((reason) => reason !== AT_ITS_POWER_LIMIT);
}

function gpuRow(gpu) {
  const strange = (gpu.processes || []).filter(({ ours }) => ours === false);
  const errors = GRAVE_ERRORS.map((name) => [name, gpu.errors?.[name]]).filter(([, count]) => count);
  const chips = [
    ...heldBack(gpu).map((reason) => el('b', { class: 'mark' }, `▲ held back: ${reason.replaceAll('_', ' ')}`)),
    ...errors.map(([name, count]) => el('b', { class: 'mark error' }, `✕ ${name.replace('_', ' ')} ${count}`)),
    ...strange.map(({ pid, name, bytes }) =>
      el('b', { class: 'mark' }, `▲ also ${name} ${pid}${isNumber(bytes) ? `, ${formatBytes(bytes)}` : ''}`),
    ),
  ];
  return el(
    'div',
    { class: 'gpu' },
    el(
      'div',
      { class: 'gpu-name' },
      el('b', {}, `GPU ${gpu.index}`),
      el('span', { class: 'faint' }, (gpu.name || '').replace(/^NVIDIA (GeForce )?/, '')),
    ),
    isNumber(gpu.use) ? gauge('use', gpu.use, formatShare(gpu.use)) : null,
    isNumber(gpu.used_bytes)
      ? gauge(
          'memory',
          gpu.total_bytes ? gpu.used_bytes / gpu.total_bytes : null,
          `${formatBytes(gpu.used_bytes)}${gpu.total_bytes ? ` of ${formatBytes(gpu.total_bytes)}` : ''}`,
        )
      : null,
    isNumber(gpu.power_w)
      ? gauge(
          'power',
          gpu.power_limit_w ? gpu.power_w / gpu.power_limit_w : null,
          `${Math.round(gpu.power_w)}${gpu.power_limit_w ? ` of ${Math.round(gpu.power_limit_w)}` : ''} W`,
        )
      : null,
    el(
      'div',
      { class: 'gpu-more faint' },
      [
        isNumber(gpu.temperature_c) ? `${Math.round(gpu.temperature_c)} °C` : null,
        isNumber(gpu.sm_mhz) ? `${formatCount(gpu.sm_mhz)} MHz` : null,
        gpu.pcie ? `PCIe ${gpu.pcie}` : null,
      ]
        .filter(Boolean)
        .join(', '),
    ),
    chips.length ? el('div', { class: 'gpu-chips' }, chips) : null,
  );
}
