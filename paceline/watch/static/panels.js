// Draws the panels of a run's page that are text and bars. Each function gets what the server wrote, and returns nodes.
'use strict';

// Draws a piece of a sentence: text, {text} in bold, or {time} on the reader's clock.
const drawPiece = (piece) =>
  typeof piece === 'string' ? piece : 'time' in piece ? formatTime(piece.time, piece) : el('b', piece.text);

function drawHead(name, { badge, command, summary, tags, note, notes, progress, facts }) {
  const fact = (parts) => el('span', parts.map(drawPiece));
  return el(
    'section.head',
    el('h1', name, stateBadge(badge)),
    p('command', command),
    (note || tags.length > 0) && el('p.note', note && el('span', note), tags.map((tag) => el('span.tag', tag))),
    summary && p(`summary ${summary.level}`, summary.text),
    notes.map((text) => p('note faint', text)),
    progress &&
      el(
        'div.progress',
        { role: 'progressbar', 'aria-valuenow': progress.percent, 'aria-label': 'steps' },
        el(`div.done.${progress.level}`, { style: { width: `${progress.percent}%` } }),
      ),
    el('p.times', facts.map(fact)),
  );
}

function drawTiles(tiles) {
  const tile = ({ name, value, note, difference, worse }) =>
    el(
      'div.tile',
      el('span.muted', name),
      el('b', value),
      el('span.faint', note || '\u00a0', span(worse ? 'warning' : '', difference)),
    );
  return tiles.length ? el('section.tiles', { 'aria-label': 'now' }, tiles.map(tile)) : null;
}

function drawWhy({ cause, place, summary, fix, is_command: isCommand, blocks, sure }) {
  const open = (source, log, number) =>
    el('a', { href: '#logs', 'data-log': log, 'data-line': number, title: 'Open the log at this line' }, source);
  const line = ({ place: source, text, log, line: number }) =>
    el('li', log ? open(source, log, number) : span('faint', source), el('code', text));
  return el(
    'div.why',
    el('p.cause', el('b', cause), span('muted', place)),
    p('reason', summary),
    fix && p('fix', span('muted', 'fix'), el(isCommand ? 'code' : 'span', {}, fix), copyButton(fix)),
    blocks.map(({ title, lines }) => [el('h3', title), el('ul.evidence', lines.map(line))]),
    p('faint', sure),
  );
}

function drawAttempts(attempts) {
  const item = ({ number, badge, time, changes, cause, summary, action }) =>
    el(
      'li',
      span('number', number),
      el(
        'div',
        el('p', stateBadge(badge), span('faint', formatTime(time))),
        p('muted', changes),
        summary && el('p', el('b', cause), `  ${summary}`),
        p('muted', action),
      ),
    );
  return el('ol.attempts', attempts.map(item));
}

const drawPlan = (rows) => table('plan', ['', 'plan', 'measured', ''], rows);

function drawEvaluations(results) {
  const heads = ['measured on', 'val_bpb', 'step', 'tokens', 'at'];
  const row = ([title, step, bpb, tokens, time]) => [wrapped(title), bpb, step, tokens, formatTime(time)];
  return el('div.scroll', table('figures', heads, results.map(row)));
}

function drawGoodput({ rows, energy }) {
  const bar = ({ kind, name, duration, share }) =>
    share && el(`span.kind-${kind}`, { title: `${name} ${duration}`, style: { 'flex-grow': share } });
  const row = ({ kind, name, duration, percent }) =>
    el(
      'li',
      el(`i.swatch.kind-${kind}`),
      el('span', name),
      el('span.number', duration),
      el('span.number.muted', percent),
    );
  return el(
    'div',
    el('div.stack', { role: 'img', 'aria-label': 'where the time went' }, rows.filter(({ share }) => share).map(bar)),
    el('ul.spent', rows.map(row)),
    p('muted', energy),
  );
}

function drawFindings(findings) {
  const item = ({ level, sign, severity, what, why, fix, about }) =>
    el(
      `li.${level}`,
      el('i', { 'aria-label': severity }, sign),
      el(
        'div',
        el('p', what),
        p('muted', why),
        fix && el('p', span('muted', 'fix '), el('code', fix)),
        p('faint', about),
      ),
    );
  return el('ul.findings', findings.map(item));
}

const written = (value) => (typeof value === 'object' ? JSON.stringify(value) : String(value ?? NA));

function drawConfig(config) {
  const row = ([key, value]) => [key, written(value)];
  return list('config', Object.entries(config).map(row));
}

function drawFacts(facts) {
  const host = ({ host: name, rows }) => el('div', el('h3', name), list('config', rows));
  return el('div.facts', facts.map(host));
}

function drawSamples(samples) {
  const parts = ({ prompt, text }) =>
    prompt && text.startsWith(prompt)
      ? [
          p('faint', 'held-out text'),
          el('pre.muted', prompt),
          p('faint', 'continued by the model'),
          el('pre.written', text.slice(prompt.length)),
        ]
      : el('pre', text);
  const sample = (written, index) =>
    el('details', { open: index === 0 }, el('summary', written.name), parts(written));
  return el('div.samples', samples.map(sample));
}

// Draws a host's gauges and its GPUs.
function drawHost({ name, place, is_lost: isLost, measured, gauges, gpus }) {
  const where = place && (isLost ? el('b.mark.error', `✗ ${place}`) : span('muted', place));
  return el(
    'article.host',
    el('h3', name, where, measured && span('faint', 'measured ', formatTime(measured))),
    el('div.gauges', gauges.map(drawGauge)),
    gpus.length ? el('div.gpus', gpus.map(drawGpu)) : p('faint', 'no GPU'),
  );
}

const drawGauge = ({ name, share, text, level }) =>
  el(
    'div.gauge',
    span('muted', name),
    share === null ? el('span') : meter(share, name, level),
    el('span.number', level ? '▲ ' : '', text),
  );

function drawGpu({ name, model, gauges, more, marks }) {
  const chip = ({ level, text }) => el(`b.mark.${level}`, text);
  return el(
    'div.gpu',
    el('div.gpu-name', el('b', name), span('faint', model)),
    gauges.map(drawGauge),
    el('div.gpu-more.faint', more),
    marks.length ? el('div.gpu-chips', marks.map(chip)) : null,
  );
}

// Draws what each rank does now, for a page without the map. A cell is text, or a bar with its text.
function drawRanks({ heads, rows }) {
  const bar = ({ share, text, slow }) => [meter(share, 'own work', slow ? 'warning' : ''), ` ${text} `, slowMark(slow)];
  const row = (cells) => cells.map((content) => (typeof content === 'string' ? content : bar(content)));
  return table('figures ranks', heads, rows.map(row));
}

const slowMark = (slow) => (slow ? el('b.mark', slow) : null);
