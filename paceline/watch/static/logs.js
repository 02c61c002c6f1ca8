// Shows the log of any rank: its end as it grows, any other part of it, or the lines that hold a text. Log text is only ever
// shown as text.
'use strict';

class Logs {
  constructor(run) {
    Object.assign(this, { run, chosen: null, find: '', follow: true, size: null, place: null });
    Object.assign(this, { loading: false, isOutdated: false, inSight: false });
    this.select = el('select', { 'aria-label': 'log of' });
    this.select.addEventListener('change', () => {
      this.chosen = this.select.value;
      this.turn(null);
    });
    this.search = el('input', {
      type: 'search',
      placeholder: 'Search this log  /',
      'aria-label': 'Search this log',
      oninput: () => {
        clearTimeout(this.typing);
        this.typing = setTimeout(() => this.searchNow(), 250);
      },
      onkeydown: (event) => event.key === 'Enter' && this.searchNow(),
    });
    this.wrap = toggle('wrap', true, () => this.setWrap(!this.text.classList.contains('wrap')));
    this.note = el('span.faint');
    this.text = el('pre.log', { tabindex: 0, 'aria-label': 'log text' });
    this.text.addEventListener('scroll', () => {
      this.follow = this.text.scrollTop + this.text.clientHeight > this.text.scrollHeight - 30;
    });
    const page = (text, title, placeOf) =>
      button(text, () => this.turn(placeOf(this.part)), { title, 'aria-label': title });
    this.pages = [
      page('⇤', 'The beginning of the log', () => ({ from: 0 })),
      page('←', 'The part before this one', (part) => ({ to: part.from })),
      page('→', 'The part after this one', (part) => ({ from: part.to })),
      page('⇥', 'The end of the log', () => null),
    ];
    const turns = el('span.segments', { role: 'group', 'aria-label': 'part of the log' }, this.pages);
    const tools = el('div.tools', this.select, this.search, turns, this.wrap, this.note);
    this.node = el('div', tools, this.text);
    watchSight(this.node, (inSight) => {
      this.inSight = inSight;
      this.update();
    });
    this.setWrap(setting('wrap') !== 'no');
  }

  setWrap(wrap) {
    setting('wrap', wrap ? 'yes' : 'no');
    this.wrap.setAttribute('aria-pressed', String(wrap));
    this.text.classList.toggle('wrap', wrap);
  }

  searchNow() {
    clearTimeout(this.typing);
    this.find = this.search.value;
    this.load();
  }

  // Shows another part of the log: from a byte on, up to a byte, or around a line; null: its end, as it grows.
  turn(place) {
    clearTimeout(this.typing);
    Object.assign(this, { place, find: '', follow: !place });
    this.search.value = '';
    this.load();
  }

  // Opens a log at a line, from a search or from the evidence of an explanation.
  openAt(key, line) {
    if (key !== null) this.select.value = this.chosen = key;
    this.node.scrollIntoView({ block: 'center' });
    this.turn({ line });
  }

  get log() {
    return (this.run.panels.logs?.rows || []).find(({ key }) => key === this.chosen);
  }

  // Called when the panel changes. It holds the sizes of the logs, so only a log that has grown is requested, and only in
  // sight. A search is not repeated, because the file may be large; Enter repeats it.
  update() {
    const { rows = [], first = null } = this.run.panels.logs || {};
    const keys = rows.map(({ key }) => key).join();
    if (keys !== this.keys) {
      this.keys = keys;
      if (!this.log) this.chosen = first;
      this.select.replaceChildren(
        ...rows.map(({ key, label }) => el('option', { value: key, selected: key === this.chosen }, label)),
      );
    }
    if (!this.log) this.showNote('No log yet.');
    else if (this.shown !== this.chosen || (this.log.bytes !== this.size && this.inSight && !this.find && !this.place))
      this.load();
  }

  showNote(text) {
    this.text.replaceChildren();
    this.note.textContent = text;
  }

  // One request at a time: what changes meanwhile is requested after it.
  async load() {
    this.isOutdated = this.loading;
    if (this.loading) return;
    this.loading = true;
    do {
      this.isOutdated = false;
      await this.loadOnce();
    } while (this.isOutdated);
    this.loading = false;
  }

  async loadOnce() {
    const { chosen, find, log, place } = this;
    if (!log) return;
    this.size = log.bytes;
    this.shown = chosen;
    const rank = log.name ? { name: log.name } : log.rank === null ? {} : { rank: log.rank };
    const query = new URLSearchParams({ attempt: log.attempt, ...rank, ...(find ? { find } : place) });
    const answer = await request(`api/runs/${encodeURIComponent(this.run.name)}/log?${query}`);
    if (chosen !== this.chosen || find !== this.find || place !== this.place) return; // another request follows
    if (!answer) this.showNote('This log cannot be read now.');
    else if (find) this.showHits(answer);
    else this.showPart(answer, log);
  }

  // line: the number of the line to show; index: which of the lines it is.
  showPart({ text, levels, from, to, whole, line: number, index }, log) {
    this.part = { from, to };
    const lines = text.replace(/\n$/, '').split('\n');
    const before = this.text.scrollTop;
    const numberOf = (i) => (isNumber(number) ? number - index + i : null);
    const nodes = lines.map((line, i) => logLine(line, levels[i], { number: numberOf(i) }));
    this.text.replaceChildren(...nodes);
    this.pages.forEach((page, i) => {
      page.disabled = i < 2 ? from === 0 : i === 2 && (!this.place || to >= log.bytes);
    });
    const end = this.place ? `, bytes ${formatCount(from)} to ${formatCount(to)}` : ', its end';
    this.note.textContent = `${log.size}${whole ? '' : end}  ${log.path}`;
    nodes[index]?.classList.add('at');
    if (isNumber(index)) this.text.scrollTop = nodes[index].offsetTop - this.text.clientHeight / 2;
    else this.text.scrollTop = this.follow ? this.text.scrollHeight : this.place ? 0 : before;
  }

  showHits({ hits, levels, note }) {
    const open = (number) => button(String(number), () => this.openAt(null, number), { class: 'line-number' });
    const hit = ([number, line], i) => logLine(line, levels[i], { number: open(number), find: this.find });
    this.text.replaceChildren(...hits.map(hit));
    this.note.textContent = note;
    this.text.scrollTop = 0;
  }
}

// number: the line's number, or a button with it; find: the text to mark in the line.
function logLine(line, level, { number = null, find = '' }) {
  const at = find ? line.toLowerCase().indexOf(find.toLowerCase()) : -1;
  const end = at + find.length;
  const parts = at < 0 ? [line] : [line.slice(0, at), el('mark', line.slice(at, end)), line.slice(end)];
  const place = isNumber(number) ? span('line-number', String(number)) : number;
  return el(`div.${level ?? ''}`, place, parts, '\n');
}
