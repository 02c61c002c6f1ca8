// The log of any rank: its end as it grows, or the lines in which a text stands. Log text is only ever shown as text.
'use strict';

const ESCAPES = /\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*(?:\x07|\x1b\\)/g; // colours and titles of terminals
const GRAVE = /\b(?:Traceback|Error|Exception|FAILED|fatal|Killed|out of memory|assert\w* failed)\b/i;
const CAREFUL = /\bwarn(?:ing)?\b/i;
const MOST_LINES = 3000; // drawn; the file has them all

class Logs {
  constructor(run) {
    Object.assign(this, {
      run,
      chosen: null,
      find: '',
      wrap: recall('wrap') !== 'no',
      follow: true,
      size: null,
      loading: false,
      again: false,
      inSight: false,
    });
    this.which = el('select', {
      'aria-label': 'log of',
      onchange: () => {
        this.chosen = this.which.value;
        this.load();
      },
    });
    this.search = el('input', {
      type: 'search',
      placeholder: 'Search this log  /',
      'aria-label': 'Search this log',
      oninput: () => this.typed(),
      onkeydown: (event) => event.key === 'Enter' && this.look(),
    });
    this.wrapped = el(
      'button',
      { type: 'button', class: 'toggle', 'aria-pressed': String(this.wrap), onclick: () => this.setWrap(!this.wrap) },
      'wrap',
    );
    this.note = el('span', { class: 'faint' });
    this.text = el('pre', { class: 'log', tabindex: 0, 'aria-label': 'log text' });
    this.text.addEventListener('scroll', () => {
      this.follow = this.text.scrollTop + this.text.clientHeight > this.text.scrollHeight - 30;
    });
    this.node = el(
      'div',
      {},
      el('div', { class: 'tools' }, this.which, this.search, this.wrapped, this.note),
      this.text,
    );
    this.sight = new IntersectionObserver(([{ isIntersecting }]) => {
      this.inSight = isIntersecting;
      this.update();
    });
    this.sight.observe(this.node);
    this.setWrap(this.wrap);
  }

  remove() {
    clearTimeout(this.typing);
    this.sight.disconnect();
  }

  setWrap(wrap) {
    this.wrap = wrap;
    remember('wrap', wrap ? 'yes' : 'no');
    this.wrapped.setAttribute('aria-pressed', String(wrap));
    this.text.classList.toggle('wrap', wrap);
  }

  typed() {
    clearTimeout(this.typing);
    this.typing = setTimeout(() => this.look(), 250);
  }

  look() {
    clearTimeout(this.typing);
    this.find = this.search.value;
    this.load();
  }

  keyOf({ attempt, rank }) {
    return `${attempt}/${rank ?? ''}`;
  }

  // Called as the snapshot changes: the sizes of the logs stand in it, so only a log that has grown is asked for, and only in
  // sight. What was looked for is not looked for again: the file may be large, Enter does.
  update() {
    const logs = this.run.parts.logs || [];
    const keys = logs.map((log) => this.keyOf(log)).join();
    if (keys !== this.keys) {
      this.keys = keys;
      const last = Math.max(...logs.map(({ attempt }) => attempt), 0);
      const blamed = this.run.parts.explanation?.rank;
      const first =
        logs.find(({ attempt, rank }) => attempt === last && rank === (blamed ?? 0)) ||
        logs.find(({ attempt }) => attempt === last);
      if (!logs.some((log) => this.keyOf(log) === this.chosen)) this.chosen = first ? this.keyOf(first) : null;
      const many = logs.some(({ attempt }) => attempt !== last);
      this.which.replaceChildren(
        ...[...logs]
          .reverse()
          .sort((a, b) => b.attempt - a.attempt || (a.rank ?? -1) - (b.rank ?? -1))
          .map((log) =>
            el(
              'option',
              {
                value: this.keyOf(log),
                selected: this.keyOf(log) === this.chosen,
              },
              `${many ? `attempt ${log.attempt}, ` : ''}${log.rank === null ? (this.run.head.kind === 'log' ? 'the log' : 'launch') : `rank ${log.rank}`}`,
            ),
          ),
      );
    }
    const log = logs.find((each) => this.keyOf(each) === this.chosen);
    if (!log) this.say('No log yet.');
    else if (this.shown !== this.chosen || (log.bytes !== this.size && this.inSight && !this.find)) this.load();
  }

  say(words) {
    this.text.replaceChildren();
    this.note.textContent = words;
  }

  // One request at a time: what is wanted meanwhile is asked for after it
  async load() {
    this.again = this.loading;
    if (this.loading) return;
    this.loading = true;
    do {
      this.again = false;
      await this.loadOnce();
    } while (this.again);
    this.loading = false;
  }

  async loadOnce() {
    const { chosen, find } = this;
    const log = (this.run.parts.logs || []).find((each) => this.keyOf(each) === chosen);
    if (!log) return;
    this.size = log.bytes;
    this.shown = chosen;
    const query = new URLSearchParams({
      attempt: log.attempt,
      ...(log.rank === null ? {} : { rank: log.rank }),
      ...(find ? { find } : {}),
    });
    const answer = await ask(`api/runs/${encodeURIComponent(this.run.name)}/log?${query}`);
    if (chosen !== this.chosen || find !== this.find) return; // another is asked for next
    if (!answer) this.say('This log cannot be read now.');
    else if (find) this.showHits(answer);
    else this.showTail(answer, log);
  }

  showTail({ text, whole }, log) {
    const lines = text
      .replace(ESCAPES, '')
      .split('\n')
      .map((line) => line.slice(line.lastIndexOf('\r', line.length - 2) + 1));
    if (lines.at(-1) === '') lines.pop();
    const shown = lines.slice(-MOST_LINES);
    const kept = this.text.scrollTop;
    this.text.replaceChildren(...shown.map((line) => logLine(line)));
    this.note.textContent = `${formatBytes(log.bytes)}${whole && shown.length === lines.length ? '' : ', its end'}  ${log.path}`;
    this.text.scrollTop = this.follow ? this.text.scrollHeight : kept;
  }

  showHits({ hits, all }) {
    this.text.replaceChildren(...hits.map(([number, line]) => logLine(line.replace(ESCAPES, ''), number, this.find)));
    this.note.textContent = hits.length
      ? `${all ? '' : 'the last '}${hits.length} lines with it`
      : 'No line has this text.';
    this.text.scrollTop = 0;
  }
}

function logLine(line, number = null, find = '') {
  const level = GRAVE.test(line) ? 'error' : CAREFUL.test(line) ? 'warning' : null;
  const at = find ? line.toLowerCase().indexOf(find.toLowerCase()) : -1;
  const parts =
    at < 0
      ? [line]
      : [line.slice(0, at), el('mark', {}, line.slice(at, at + find.length)), line.slice(at + find.length)];
  return el(
    'div',
    { class: level },
    number === null ? null : el('span', { class: 'line-number' }, String(number)),
    ...parts,
    '\n',
  );
}
