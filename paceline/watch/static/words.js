// Numbers as people read them, and elements made in one call. Text goes in as text: nothing here parses markup.
'use strict';

const NA = 'n/a';

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (name === 'style') Object.entries(value).forEach(([key, said]) => node.style.setProperty(key, said));
    else node.setAttribute(name, value === true ? '' : value);
  }
  node.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

// heads: the first row, text or nodes; rows: the name of each, then its cells, or its cells ready made
function table(name, heads, rows) {
  const cell = (words) => (words instanceof HTMLTableCellElement ? words : el('td', {}, words));
  const row = ([first, ...cells]) => el('tr', {}, el('th', { scope: 'row' }, first), cells.map(cell));
  const head = heads.map((words) => el('th', {}, words));
  return el('table', { class: name }, el('thead', {}, el('tr', {}, head)), el('tbody', {}, rows.map(row)));
}

// What is shown becomes what is drawn now, only where it differs: text that somebody marks stays marked, bars glide.
// For parts without listeners.
function settle(shown, drawn) {
  if (shown.isEqualNode(drawn)) return;
  const alike = shown.nodeName === drawn.nodeName && shown.childNodes.length === drawn.childNodes.length;
  if (!alike || shown.nodeType !== Node.ELEMENT_NODE) {
    shown.replaceWith(drawn);
    return;
  }
  for (const { name } of [...shown.attributes]) if (!drawn.hasAttribute(name)) shown.removeAttribute(name);
  for (const { name, value } of drawn.attributes) {
    if (name === 'style') shown.style.cssText = drawn.style.cssText;
    else if (shown.getAttribute(name) !== value) shown.setAttribute(name, value);
  }
  const [old, now] = [[...shown.childNodes], [...drawn.childNodes]];
  old.forEach((child, index) => settle(child, now[index]));
}

// The only children of a place become these
function fill(place, ...children) {
  const drawn = children.filter(Boolean);
  if (place.childNodes.length !== drawn.length) place.replaceChildren(...drawn);
  else [...place.childNodes].forEach((child, index) => settle(child, drawn[index]));
}

const isNumber = (value) => typeof value === 'number' && Number.isFinite(value);

function formatCount(count) {
  return isNumber(count) ? Math.round(count).toLocaleString('en-US') : NA;
}

// 856_679 -> 857K; for axes and narrow places
function formatShort(value) {
  if (!isNumber(value)) return NA;
  const size = Math.abs(value);
  if (size >= 1000) {
    const power = Math.min(4, Math.floor(Math.log10(size) / 3));
    return `${trim(value / 1000 ** power, 3)}${['', 'K', 'M', 'B', 'T'][power]}`;
  }
  return size !== 0 && size < 0.001 ? value.toExponential(1) : trim(value, 4);
}

// digits: significant ones, without trailing zeros
function trim(value, digits) {
  return String(Number(value.toPrecision(digits)));
}

function formatBytes(bytes) {
  if (!isNumber(bytes)) return NA;
  let size = bytes;
  for (const unit of ['B', 'KiB', 'MiB', 'GiB', 'TiB']) {
    if (Math.abs(size) < 1024 || unit === 'TiB')
      return `${unit === 'B' || size >= 100 ? size.toFixed(0) : size.toFixed(1)} ${unit}`;
    size /= 1024;
  }
  return NA;
}

function formatDuration(seconds) {
  if (!isNumber(seconds)) return NA;
  const whole = Math.round(Math.max(0, seconds));
  const two = (value) => String(value).padStart(2, '0');
  if (whole < 60) return `${whole}s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}m${two(whole % 60)}s`;
  const hours = Math.floor(whole / 3600);
  return hours < 48
    ? `${hours}h${two(Math.floor((whole % 3600) / 60))}m`
    : `${Math.floor(hours / 24)}d${two(hours % 24)}h`;
}

function formatAgo(seconds) {
  return seconds < 2 ? 'now' : `${formatDuration(seconds)} ago`;
}

const formatShare = (share, digits = 0) => (isNumber(share) ? `${(100 * share).toFixed(digits)} %` : NA);

// Unix seconds -> the reader's own clock; the day too where it is not today
function formatTime(time, { seconds = true, day = false } = {}) {
  if (!isNumber(time)) return NA;
  const date = new Date(time * 1000);
  const clock = date.toLocaleTimeString('en-GB', {
    hour: '2-digit',
    minute: '2-digit',
    ...(seconds ? { second: '2-digit' } : {}),
  });
  if (!day && date.toDateString() === new Date(nowS() * 1000).toDateString()) return clock;
  return `${date.toLocaleDateString('en-GB', { day: 'numeric', month: 'short' })} ${clock}`;
}

// How each field of metrics.jsonl is called, told and written. Those that are not here are shown by their own name.
const FIELDS = {
  loss: { about: 'nats per token', format: (v) => v.toFixed(4), less: true },
  val_bpb: { about: 'bits per byte, held-out text', format: (v) => v.toFixed(4), less: true },
  tok_per_sec: { steady: true, about: 'tokens per second', format: (v) => formatCount(v) },
  step_ms: {
    steady: true,
    about: 'milliseconds a step',
    format: (v) => `${v >= 100 ? formatCount(v) : trim(v, 3)} ms`,
    less: true,
  },
  mfu: { steady: true, about: 'share of the peak FLOPs', format: (v) => formatShare(v, 1) },
  grad_norm: { about: 'before clipping', format: (v) => trim(v, 4) },
  lr_mult: { about: 'of the full learning rate', format: (v) => trim(v, 4) },
  peak_bytes: { steady: true, about: 'most memory taken on a device', format: formatBytes, bytes: true },
};

function formatField(name, value) {
  if (!isNumber(value)) return NA;
  return FIELDS[name] ? FIELDS[name].format(value) : trim(value, 5);
}

// Each with a sign beside its colour, for who does not see colours
const STATES = {
  starting: ['◌', 'calm'],
  training: ['▶', 'busy'],
  evaluating: ['▶', 'busy'],
  saving: ['▶', 'busy'],
  running: ['▶', 'busy'],
  recovering: ['↻', 'warning'],
  finished: ['✓', 'good'],
  stopped: ['■', 'calm'],
  failed: ['✕', 'error'],
  broken: ['✕', 'error'],
  unknown: ['?', 'calm'],
};
const LEVELS = { info: '·', good: '✓', warning: '▲', error: '✕' };
const LIVE = ['starting', 'training', 'evaluating', 'saving', 'recovering', 'running'];

function stateBadge(state) {
  const [sign, level] = STATES[state] || STATES.unknown;
  return el('span', { class: `badge ${level}`, 'data-state': state }, el('i', { 'aria-hidden': 'true' }, sign), state);
}

// A bar with a number: share 0 to 1, or null
function meter(share, { label, level = '' } = {}) {
  const width = isNumber(share) ? Math.max(0, Math.min(1, share)) : 0;
  return el(
    'span',
    {
      class: `meter ${level}`,
      role: 'meter',
      'aria-valuemin': 0,
      'aria-valuemax': 100,
      'aria-valuenow': isNumber(share) ? Math.round(100 * share) : null,
      'aria-label': label,
    },
    el('span', { style: { width: `${100 * width}%` } }),
  );
}

function copyButton(text) {
  const button = el(
    'button',
    {
      class: 'quiet copy',
      type: 'button',
      title: 'Copy',
      onclick: () => {
        navigator.clipboard?.writeText(text).then(() => {
          button.textContent = 'copied';
          setTimeout(() => {
            button.textContent = 'copy';
          }, 1500);
        });
      },
    },
    'copy',
  );
  return button;
}

const tip = {
  show(x, y, ...lines) {
    const box = document.getElementById('tip');
    box.replaceChildren(...lines.filter(Boolean).map((line, index) => el(index ? 'div' : 'strong', {}, line)));
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    box.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 8))}px`;
    box.style.top = `${y + 18 + height > innerHeight ? y - height - 10 : y + 18}px`;
  },
  hide() {
    document.getElementById('tip').hidden = true;
  },
};
