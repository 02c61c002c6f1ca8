// What happened, over the run's own time: a bar for each attempt, a mark for each event, and the list of them.
'use strict';

const FEW_EVENTS = 12;
const MARK_SHAPES = { error: 'M-5,-5L5,5M-5,5L5,-5', warning: 'M0,-6L6,5L-6,5Z', good: 'M0,-5L0,5', info: 'M0,-3L0,3' };

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

// [{attempt, state, from, to}] in Unix seconds; an attempt that has no end goes on to the last sign of life
function spansOf(run) {
  const events = run.parts.events || [];
  const attempts = run.parts.attempts || [];
  return attempts.map((each, index) => {
    const from = Date.parse(each.time) / 1000;
    const next = index + 1 < attempts.length ? Date.parse(attempts[index + 1].time) / 1000 : Infinity;
    const ended = events.find(({ kind, time }) => kind === 'attempt_ended' && time >= from && time < next);
    return { ...each, from, to: ended?.time ?? Math.min(next, run.head.updated ?? from) };
  });
}

function drawTimeline(run, width) {
  const events = (run.parts.events || []).filter(({ time }) => isNumber(time));
  const spans = spansOf(run);
  const times = [...events.map(({ time }) => time), ...spans.flatMap(({ from, to }) => [from, to])];
  if (run.isLive) times.push(run.head.updated);
  const [first, last] = [Math.min(...times), Math.max(...times)];
  if (!Number.isFinite(first) || last <= first) return el('div');
  const at = (time) => 8 + ((time - first) / (last - first)) * (width - 16);
  const picture = svg('svg', {
    class: 'timeline',
    viewBox: `0 0 ${width} 74`,
    width,
    height: 74,
    role: 'img',
    'aria-label': `${spans.length} attempts and ${events.length} events between ${formatTime(first)} and ${formatTime(last)}`,
  });
  for (const span of spans) picture.append(...drawSpan(span, at));
  const rank = ({ level }) => ['info', 'good', 'warning', 'error'].indexOf(level);
  for (const event of [...events].sort((a, b) => rank(a) - rank(b))) picture.append(drawEvent(event, at(event.time)));
  for (const time of ticksOfTime(first, last, Math.floor(width / 110))) {
    picture.append(
      svg(
        'text',
        { x: Math.max(44, Math.min(at(time), width - 44)), y: 70, class: 'tick' },
        formatTime(time, { seconds: last - first < 600 }),
      ),
    );
  }
  return picture;
}

function drawSpan({ attempt, state, from, to, summary }, at) {
  const wide = Math.max(3, at(to) - at(from));
  const level = state === 'finished' ? 'good' : state === 'failed' ? 'error' : state ? 'calm' : 'busy';
  const words = [
    `attempt ${attempt}: ${state || 'going on'}`,
    `${formatTime(from)}, ${formatDuration(to - from)}`,
    summary,
  ];
  const bar = svg('rect', {
    x: at(from),
    y: 8,
    width: wide,
    height: 16,
    rx: 3,
    class: `span ${level}`,
    onmousemove: (event) => tip.show(event.clientX, event.clientY, ...words),
    onmouseleave: () => tip.hide(),
  });
  const sign = { good: '✓', error: '✕', busy: '▶', calm: '■' }[level];
  const name = wide > 90 ? `${sign} attempt ${attempt}` : wide > 26 ? `${sign} ${attempt}` : '';
  return [bar, svg('text', { x: at(from) + 6, y: 20, class: 'span-name' }, name)];
}

function drawEvent(event, x) {
  const group = svg('g', {
    transform: `translate(${x},42)`,
    class: `event-mark ${event.level}`,
    onmousemove: (moved) =>
      tip.show(
        moved.clientX,
        moved.clientY,
        event.text,
        `${formatTime(event.time)}${event.step ? `, step ${formatCount(event.step)}` : ''}`,
      ),
    onmouseleave: () => tip.hide(),
  });
  group.append(
    svg('rect', { x: -6, y: -10, width: 12, height: 20, fill: 'transparent' }),
    svg('path', { d: MARK_SHAPES[event.level] || MARK_SHAPES.info }),
  );
  return group;
}

// Round times of the reader's clock, a few of them
function ticksOfTime(first, last, most) {
  const widths = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];
  const width = widths.find((each) => (last - first) / each <= Math.max(2, most)) ?? 2592000;
  const shift = new Date(first * 1000).getTimezoneOffset() * 60;
  const ticks = [];
  for (let time = Math.ceil((first - shift) / width) * width + shift; time <= last; time += width) ticks.push(time);
  return ticks;
}

// The panel: the line of time, a filter, the latest events first
class Events {
  constructor(run) {
    Object.assign(this, { run, all: false, grave: false });
    this.line = el('div', { class: 'line' });
    this.tools = el('div', { class: 'tools' });
    this.list = el('ol', { class: 'events' });
    this.node = el('div', {}, this.line, this.tools, this.list);
    this.watcher = new ResizeObserver(() => this.drawLine());
    this.watcher.observe(this.line);
  }

  remove() {
    this.watcher.disconnect();
  }

  drawLine() {
    if (this.line.clientWidth) this.line.replaceChildren(drawTimeline(this.run, this.line.clientWidth));
  }

  update() {
    this.drawLine();
    const events = [...(this.run.parts.events || [])].reverse();
    const grave = events.filter(({ level }) => level === 'error' || level === 'warning');
    const shown = this.grave ? grave : events;
    const toggle = (words, pressed, act) =>
      el(
        'button',
        {
          type: 'button',
          class: 'toggle',
          'aria-pressed': String(pressed),
          onclick: () => {
            act();
            this.update();
          },
        },
        words,
      );
    const more =
      shown.length > FEW_EVENTS
        ? toggle(this.all ? 'the latest only' : `all ${shown.length}`, this.all, () => {
            this.all = !this.all;
          })
        : null;
    this.tools.replaceChildren(
      toggle(`warnings and errors (${grave.length})`, this.grave, () => {
        this.grave = !this.grave;
      }),
      more || '',
    );
    this.list.replaceChildren(...(this.all ? shown : shown.slice(0, FEW_EVENTS)).map(eventLine));
    if (!shown.length) this.list.replaceChildren(el('li', { class: 'faint' }, 'Nothing yet.'));
  }
}

function eventLine({ time, text, level, step }) {
  return el(
    'li',
    { class: level },
    el('time', {}, formatTime(time)),
    el('i', { 'aria-label': level }, LEVELS[level] || LEVELS.info),
    el('span', { title: text.length > 160 ? text : null }, text),
    el('span', { class: 'faint number' }, isNumber(step) ? `step ${formatCount(step)}` : ''),
  );
}
