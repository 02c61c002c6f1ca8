// Shows the log of any rank: its end as it grows, or the lines that hold a text. Log text is only ever shown as text.
'use strict';

const MOST_LINES = 3000; // drawn; the file has them all

class Logs {
  constructor(run) {
    Object.assign(this, { run, chosen: null, find: '', follow: true, size: null });
    Object.assign(this, { loading: false, isOutdated: false, inSight: false });
    this.select = el('select', { 'aria-label': 'log of' });
    this.select.addEventListener('change', () => {
      this.chosen = this.select.value;
      this.load();
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
    const tools = el('div.tools', this.select, this.search, this.wrap, this.note);
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
    else if (this.shown !== this.chosen || (this.log.bytes !== this.size && this.inSight && !this.find)) this.load();
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
    const { chosen, find, log } = this;
    if (!log) return;
    this.size = log.bytes;
    this.shown = chosen;
    const rank = log.rank === null ? {} : { rank: log.rank };
    const query = new URLSearchParams({ attempt: log.attempt, ...rank, ...(find ? { find } : {}) });
    const answer = await request(`api/runs/${encodeURIComponent(this.run.name)}/log?${query}`);
    if (chosen !== this.chosen || find !== this.find) return; // another request follows
    if (!answer) this.showNote('This log cannot be read now.');
    else if (find) this.showHits(answer);
    else this.showEnd(answer, log);
  }

  showEnd({ text, levels, whole }, log) {
    const lines = text.replace(/\n$/, '').split('\n');
    const start = Math.max(0, lines.length - MOST_LINES);
    const before = this.text.scrollTop;
    this.text.replaceChildren(...lines.slice(start).map((line, i) => logLine(line, levels[start + i])));
    this.note.textContent = `${log.size}${whole && !start ? '' : ', its end'}  ${log.path}`;
    this.text.scrollTop = this.follow ? this.text.scrollHeight : before;
  }

  showHits({ hits, levels, note }) {
    this.text.replaceChildren(...hits.map(([number, line], i) => logLine(line, levels[i], number, this.find)));
    this.note.textContent = note;
    this.text.scrollTop = 0;
  }
}

// number: the line's number in a search; find: the text to mark in the line.
function logLine(line, level, number = null, find = '') {
  const at = find ? line.toLowerCase().indexOf(find.toLowerCase()) : -1;
  const end = at + find.length;
  const parts = at < 0 ? [line] : [line.slice(0, at), el('mark', line.slice(at, end)), line.slice(end)];
  return el(`div.${level ?? ''}`, number === null ? null : span('line-number', String(number)), parts, '\n');
}
