// The parts of a run's page that are only text and bars, each made anew from what the run holds now.
'use strict';

// steps in colour, what was lost in the colours of warnings, the rest in greys
const GOODPUT_COLOURS = {
  steps: 'line-1',
  lost: 'error',
  recovery: 'line-2',
  evaluation: 'grey-1',
  checkpoint: 'grey-2',
  compile: 'grey-3',
  start_up: 'grey-4',
  checks: 'grey-5',
  idle: 'grid',
};

function drawHead(run) {
  const { head, parts } = run;
  const share = head.num_steps ? head.step / head.num_steps : null;
  const silent = head.updated ? nowS() - head.updated : null;
  const command = head.command ? head.command.join(' ') : head.framework ? `a log of ${head.framework}` : null;
  const words = parts.summary;
  return el(
    'section',
    { class: 'head' },
    el('h1', {}, head.name, stateBadge(head.state)),
    command ? el('p', { class: 'command' }, command) : null,
    words?.text && !parts.explanation ? el('p', { class: `summary ${words.level}` }, words.text) : null,
    (parts.notes || []).map((note) => el('p', { class: 'note faint' }, note)),
    share === null ? null : progress(head, share),
    el('p', { class: 'times' }, timesOf(run, share, silent)),
  );
}

function progress(head, share) {
  return el(
    'div',
    { class: 'progress', role: 'progressbar', 'aria-valuenow': Math.round(100 * share), 'aria-label': 'steps' },
    el('div', {
      class: `done ${STATES[head.state]?.[1] || 'calm'}`,
      style: { width: `${Math.min(100, 100 * share)}%` },
    }),
  );
}

function timesOf(run, share, silent) {
  const { head } = run;
  const words = [];
  if (head.step || head.num_steps) {
    words.push([
      el('b', {}, `step ${formatCount(head.step)}`),
      head.num_steps ? ` of ${formatCount(head.num_steps)}, ${formatShare(share, share && share < 0.1 ? 1 : 0)}` : '',
    ]);
  }
  if (head.tokens_per_step && head.step) words.push(`${formatShort(head.step * head.tokens_per_step)} tokens`);
  if (isNumber(head.elapsed_s)) words.push(`${formatDuration(head.elapsed_s)} ${run.isLive ? 'so far' : 'in all'}`);
  if (run.isLive && isNumber(head.eta_s))
    words.push([
      el('b', {}, `${formatDuration(head.eta_s)} to go`),
      `, until ${formatTime(nowS() + head.eta_s, { seconds: false })}`,
    ]);
  if (silent !== null && !(run.isLive && silent < 20))
    words.push(run.isLive ? `silent for ${formatDuration(silent)}` : `last sign of life ${formatTime(head.updated)}`);
  return words.map((each) => el('span', {}, each));
}

function drawTiles(run) {
  const { head, parts } = run;
  const plan = parts.plan || {};
  const best = bestOf(run.curves.series.val_bpb);
  const tiles = ['loss', 'val_bpb', 'tok_per_sec', 'step_ms', 'mfu', 'peak_bytes']
    .filter((name) => isNumber(head[name]))
    .map((name) =>
      tile(name, formatField(name, head[name]), name === 'val_bpb' ? best : againstPlan(name, head[name], plan[name])),
    );
  if (isNumber(parts.goodput?.share))
    tiles.push(tile('goodput', formatShare(parts.goodput.share), [el('span', {}, 'of the time in steps')]));
  return tiles.length ? [el('section', { class: 'tiles', 'aria-label': 'now' }, tiles)] : [];
}

function tile(name, value, more) {
  return el(
    'div',
    { class: 'tile' },
    el('span', { class: 'muted' }, name),
    el('b', {}, value),
    el('span', { class: 'faint' }, more || '\u00a0'),
  );
}

function againstPlan(name, value, planned) {
  if (!isNumber(planned) || !planned) return null;
  const over = value / planned - 1;
  const worse = FIELDS[name].less || FIELDS[name].bytes ? over > 0.1 : over < -0.1;
  return [
    `plan ${FIELDS[name].bytes ? formatBytes(planned) : name === 'tok_per_sec' ? formatShort(planned) : formatField(name, planned)} `,
    el('span', { class: worse ? 'warning' : null }, `${worse ? '▲ ' : ''}${formatSigned(over)}`),
  ];
}

function formatSigned(share) {
  const percent = Math.round(100 * share);
  return `${percent > 0 ? '+' : percent < 0 ? '−' : '±'}${Math.abs(percent)} %`;
}

function bestOf(series) {
  const known = (series?.values || []).filter(isNumber);
  return known.length ? [`best ${Math.min(...known).toFixed(4)}`] : null;
}

function drawWhy(run) {
  const why = run.parts.explanation;
  if (!why) return null;
  const place = [
    isNumber(why.rank) ? `rank ${why.rank}` : null,
    isNumber(why.step) ? `step ${formatCount(why.step)}` : null,
    why.host ? `host ${why.host}` : null,
  ];
  return el(
    'div',
    { class: 'why' },
    el(
      'p',
      { class: 'cause' },
      el('b', {}, why.cause),
      el('span', { class: 'muted' }, place.filter(Boolean).join(', ')),
    ),
    el('p', { class: 'told' }, why.summary),
    why.fix
      ? el(
          'p',
          { class: 'fix' },
          el('span', { class: 'muted' }, 'fix'),
          el(isCommand(why.fix) ? 'code' : 'span', {}, why.fix),
          copyButton(why.fix),
        )
      : null,
    evidenceOf('Evidence', why.evidence),
    evidenceOf('Only followed', why.consequences),
    el(
      'p',
      { class: 'faint' },
      isNumber(why.confidence)
        ? `${formatShare(why.confidence)} sure${why.also?.length ? `; it could also be ${why.also.join(' or ')}` : ''}`
        : '',
    ),
  );
}

function evidenceOf(title, lines) {
  if (!lines?.length) return null;
  const place = ({ source, line, rank }) =>
    [[source, line].filter((part) => part ?? false).join(':'), isNumber(rank) ? `rank ${rank}` : ''].join('  ');
  const item = (each) => el('li', {}, el('span', { class: 'faint' }, place(each)), el('code', {}, each.text));
  return [el('h3', {}, title), el('ul', { class: 'evidence' }, lines.map(item))];
}

const isCommand = (fix) => /^(?:paceline|--|[A-Z_]+=|pip|sudo|export) ?/.test(fix);

function drawAttempts(run) {
  const { parts } = run;
  const attempts = parts.attempts || [];
  if (attempts.length < 2 && (parts.explanation || !attempts.some(({ cause }) => cause))) return null;
  return el(
    'ol',
    { class: 'attempts' },
    attempts.map((each) => {
      const state = each.state || (run.isLive && each === attempts.at(-1) ? 'running' : 'broken');
      return el(
        'li',
        {},
        el('span', { class: 'number' }, each.attempt),
        el(
          'div',
          {},
          el('p', {}, stateBadge(state), el('span', { class: 'faint' }, formatTime(Date.parse(each.time) / 1000))),
          each.summary ? el('p', {}, el('b', {}, each.cause), `  ${each.summary}`) : null,
          each.action ? el('p', { class: 'muted' }, `then ${each.action.replaceAll('_', ' ')}: ${each.why}`) : null,
        ),
      );
    }),
  );
}

function drawPlan(run) {
  const { head, parts } = run;
  const plan = parts.plan;
  if (!plan) return null;
  const measured = { ...head, total_s: run.isLive ? (head.elapsed_s ?? 0) + (head.eta_s ?? NaN) : head.elapsed_s };
  const names = ['step_ms', 'tok_per_sec', 'mfu', 'peak_bytes', 'total_s'].filter((name) => isNumber(plan[name]));
  if (!names.length) return null;
  const format = (name, value) => (name === 'total_s' ? formatDuration(value) : formatField(name, value));
  const row = (name) => {
    const over = isNumber(measured[name]) ? formatSigned(measured[name] / plan[name] - 1) : '';
    return [name, format(name, plan[name]), format(name, measured[name]), el('td', { class: 'muted' }, over)];
  };
  return table('plan', ['', 'plan', 'measured', ''], names.map(row));
}

function drawGoodput(run) {
  const found = run.parts.goodput;
  if (!found) return null;
  const spent = Object.entries(found.seconds)
    .filter(([kind, seconds]) => seconds > 0 && kind !== 'idle')
    .sort((a, b) => b[1] - a[1]);
  const whole = spent.reduce((sum, [, seconds]) => sum + seconds, 0);
  if (!whole) return null;
  const swatch = (kind) =>
    el('i', { class: 'swatch', style: { background: `var(--${GOODPUT_COLOURS[kind] || 'muted'})` } });
  const row = ([kind, seconds]) =>
    el(
      'li',
      {},
      swatch(kind),
      el('span', {}, found.words[kind]),
      el('span', { class: 'number' }, formatDuration(seconds)),
      el('span', { class: 'number muted' }, kind === 'idle' ? '' : formatShare(seconds / whole, 1)),
    );
  return el(
    'div',
    {},
    el(
      'div',
      { class: 'stack', role: 'img', 'aria-label': 'where the time went' },
      spent.map(([kind, seconds]) =>
        el('span', {
          title: `${found.words[kind]} ${formatDuration(seconds)}`,
          style: { 'flex-grow': seconds / whole, background: `var(--${GOODPUT_COLOURS[kind] || 'muted'})` },
        }),
      ),
    ),
    el('ul', { class: 'spent' }, spent.map(row), found.seconds.idle ? row(['idle', found.seconds.idle]) : null),
    found.energy ? el('p', { class: 'muted' }, `${found.energy}, the GPUs`) : null,
  );
}

function drawFindings(run) {
  const findings = run.parts.findings || [];
  if (!findings.length) return null;
  const level = { stop: 'error', warn: 'warning', note: 'info' };
  return el(
    'ul',
    { class: 'findings' },
    findings.map((each) =>
      el(
        'li',
        { class: level[each.severity] || 'info' },
        el('i', { 'aria-label': each.severity }, LEVELS[level[each.severity]] || LEVELS.info),
        el(
          'div',
          {},
          el('p', {}, each.what),
          el('p', { class: 'muted' }, each.why),
          each.fix ? el('p', {}, el('span', { class: 'muted' }, 'fix '), el('code', {}, each.fix)) : null,
          el('p', { class: 'faint' }, [each.id, each.host].filter(Boolean).join(', ')),
        ),
      ),
    ),
  );
}

function drawConfig(about) {
  const config = Object.entries(about.config || {});
  if (!config.length) return null;
  return el(
    'dl',
    { class: 'config' },
    config.map(([key, value]) =>
      el('div', {}, el('dt', {}, key), el('dd', {}, typeof value === 'object' ? JSON.stringify(value) : String(value))),
    ),
  );
}

function drawFacts(about) {
  if (!about.facts?.length) return null;
  return el(
    'div',
    { class: 'facts' },
    about.facts.map(({ host, rows }) =>
      el(
        'div',
        {},
        el('h3', {}, host),
        el(
          'dl',
          { class: 'config' },
          rows.map(([name, value]) => el('div', {}, el('dt', {}, name), el('dd', {}, value))),
        ),
      ),
    ),
  );
}

function drawSamples(about) {
  if (!about.samples?.length) return null;
  return el(
    'div',
    { class: 'samples' },
    about.samples.map(({ name, text }, index) =>
      el('details', { open: index === 0 }, el('summary', {}, name), el('pre', {}, text)),
    ),
  );
}
