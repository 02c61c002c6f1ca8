// Shows what happened over the run's own time: a bar for each attempt, a mark for each event, and the list of events.
'use strict';

const FEW_EVENTS = 12;
const LEVELS = ['info', 'good', 'warning', 'error']; // the gravest is drawn last, on top
const MARK_SHAPES = { error: 'M-5,-5L5,5M-5,5L5,-5', warning: 'M0,-6L6,5L-6,5Z', good: 'M0,-5L0,5', info: 'M0,-3L0,3' };

// spans: [{label, number, sign, level, from, to, duration}] in Unix seconds; events: [{time, level, text, step}].
function drawTimeline(spans, events, width) {
  const marks = events.filter(({ time }) => isNumber(time));
  const times = [...marks.map(({ time }) => time), ...spans.flatMap(({ from, to }) => [from, to])];
  const [first, last] = [Math.min(...times), Math.max(...times)];
  if (!Number.isFinite(first) || last <= first) return null;
  const at = (time) => 8 + ((time - first) / (last - first)) * (width - 16);
  const about = `${spans.length} attempts and ${marks.length} events between ${formatTime(first)} and ${formatTime(last)}`;
  const seconds = last - first < 600;
  const tick = (time) =>
    svg('text.tick', { x: Math.max(52, Math.min(at(time), width - 52)), y: 70 }, formatTime(time, { seconds }));
  return svg(
    'svg.timeline',
    { viewBox: `0 0 ${width} 74`, width, height: 74, role: 'img', 'aria-label': about },
    spans.map((attempt) => drawSpan(attempt, at)),
    LEVELS.flatMap((level) => marks.filter((event) => event.level === level)).map((event) =>
      drawEvent(event, at(event.time)),
    ),
    timeTicks(first, last, Math.floor(width / 150)).map(tick),
  );
}

function drawSpan({ label, number, sign, level, from, to, duration, summary }, at) {
  const wide = Math.max(3, at(to) - at(from));
  const lines = [label, `${formatTime(from)}, ${duration}`, summary];
  const name = wide > 90 ? `${sign} attempt ${number}` : wide > 26 ? `${sign} ${number}` : '';
  return [
    svg(`rect.span.${level}`, { x: at(from), y: 8, width: wide, height: 16, rx: 3, ...showing(lines) }),
    svg('text.span-name', { x: at(from) + 6, y: 20 }, name),
  ];
}

const drawEvent = ({ time, level, text, step }, x) =>
  svg(
    `g.event-mark.${level}`,
    { transform: `translate(${x},42)`, ...showing([text, formatTime(time) + (step && `, ${step}`)]) },
    svg('rect', { x: -6, y: -10, width: 12, height: 20, fill: 'transparent' }),
    svg('path', { d: MARK_SHAPES[level] || MARK_SHAPES.info }),
  );

// Makes listeners that show these lines beside the pointer.
const showing = (lines) => ({
  onmousemove: (event) => tip.show(event, ...lines),
  onmouseleave: () => tip.hide(),
});

// The panel: the timeline, a filter, and the events, the latest first.
class Events {
  constructor(run) {
    Object.assign(this, { run, isLong: false, isGrave: false, width: 0 });
    this.line = el('div.line');
    this.tools = el('div.tools');
    this.list = el('ol.events');
    this.node = el('div', this.line, this.tools, this.list);
    watchWidth(this.line, (width) => {
      this.width = width;
      this.drawLine();
    });
  }

  // Returns the events with their text.
  get events() {
    return (this.run.parts.events || []).map((event, i) => ({ ...event, ...this.run.panels.events?.[i] }));
  }

  drawLine() {
    if (this.width && this.run.panels.spans)
      this.line.replaceChildren(drawTimeline(this.run.panels.spans, this.events, this.width) || '');
  }

  update() {
    this.drawLine();
    const events = this.events.reverse();
    const look = JSON.stringify([events, this.isGrave, this.isLong]);
    if (look === this.look) return;
    this.look = look;
    const grave = events.filter(({ level }) => level === 'error' || level === 'warning');
    const shown = this.isGrave ? grave : events;
    const flip = (name, text) =>
      toggle(text, this[name], () => {
        this[name] = !this[name];
        this.update();
      });
    this.tools.replaceChildren(
      flip('isGrave', `warnings and errors (${grave.length})`),
      shown.length > FEW_EVENTS ? flip('isLong', this.isLong ? 'the latest only' : `all ${shown.length}`) : '',
    );
    this.list.replaceChildren(...(this.isLong ? shown : shown.slice(0, FEW_EVENTS)).map(eventLine));
    if (!shown.length) this.list.replaceChildren(el('li.faint', 'Nothing yet.'));
  }
}

const eventLine = ({ time, text, level, sign, step }) =>
  el(
    `li.${level}`,
    el('time', formatTime(time)),
    el('i', { 'aria-label': level }, sign),
    el('span', { title: text.length > 160 ? text : null }, text),
    el('span.faint.number', step),
  );
