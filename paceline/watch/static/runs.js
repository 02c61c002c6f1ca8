// Lists the runs of the folder: sorted by a column, those that a filter finds, in groups. Some can be chosen for a comparison.
'use strict';

const COLUMNS = {
  name: 'run',
  state: 'state',
  step: 'step',
  loss: 'loss',
  val_bpb: 'val_bpb',
  eval_tokens: 'eval_tokens', // these two are shown where the runs differ in them
  eval_text: 'eval_text',
  eval: 'eval', // the newest result of paceline eval, where a run has one
  eval_of: 'eval of',
  tok_per_sec: 'tok/s',
  time: 'last activity',
};
const RISING = ['name', 'state', 'loss', 'val_bpb', 'eval']; // the columns whose first click puts the smallest value on top

class RunsPage {
  constructor(onCompare) {
    Object.assign(this, { runs: null, chosen: new Set(), settings: null, onCompare });
    this.sort = { name: 'time', isRising: false };
    this.search = el('input', {
      type: 'search',
      placeholder: 'Find a text or depth=12 (key /)',
      'aria-label': 'Find a run by its name, state, tag or note, or by a setting as depth=12',
      oninput: () => this.find(),
    });
    this.compare = button('Compare', () => this.go(), { class: 'main', disabled: true });
    this.groups = toggle('group seeds', setting('groups') === 'yes', () => this.setGroups());
    this.body = el('div.scroll');
    this.node = el(
      'div.page',
      el('section.head', el('h1', 'Runs')),
      el('section.panel', el('div.tools', this.search, this.groups, this.compare), this.body),
    );
  }

  take({ runs }) {
    this.runs = runs;
    this.chosen = new Set(runs.map(({ name }) => name).filter((name) => this.chosen.has(name)));
    const names = JSON.stringify(runs.map(({ name }) => name).sort());
    if (names !== this.names) this.settings = null; // of other runs
    this.names = names;
    this.groups.hidden = !runs.some(({ group }) => group);
    const textsOf = (name) => new Set(runs.map(({ texts }) => texts[name]).filter((text) => text !== NA));
    const least = { eval: 0, eval_of: 1, eval_tokens: 1, eval_text: 1 }; // texts that a column is left out for
    this.columns = Object.keys(COLUMNS).filter((name) => !(name in least) || textsOf(name).size > least[name]);
    this.find();
  }

  // Draws the list; for a filter by a setting it requests the settings of all runs first.
  async find() {
    if (!this.settings && this.search.value.includes('=')) this.settings = await request('api/settings');
    this.draw();
  }

  // Returns whether a run has every word of the filter: a setting as depth=12, or a text.
  isMatch({ name, state, tags, note, texts }, words) {
    const text = [name, state, note, texts.command, ...tags].join(' ').toLowerCase();
    const config = this.settings?.[name] || {};
    return words.every((word) => {
      const [key, value] = word.split('=');
      const isSetting = value && Object.hasOwn(config, key) && written(config[key]).toLowerCase() === value;
      return isSetting || text.includes(word);
    });
  }

  // Returns the runs in the order of the chosen column; what is not known comes last.
  sorted(runs) {
    const { name, isRising } = this.sort;
    const valueOf = {
      time: ({ texts }) => texts.time,
      eval: (run) => run.eval?.val_bpb,
      eval_of: ({ texts }) => (texts.eval_of === NA ? null : texts.eval_of),
    }[name] ?? ((run) => run[name]);
    const values = new Map(runs.map((run) => [run, valueOf(run)]));
    const isKnown = (value) => value !== null && value !== undefined;
    const order = (a, b) => (typeof a === 'string' ? a.localeCompare(b, 'en', { numeric: true }) : a - b);
    return runs.toSorted((one, other) => {
      const [a, b] = [values.get(one), values.get(other)];
      if (!isKnown(a) || !isKnown(b)) return isKnown(b) - isKnown(a);
      const isScript = [one, other].map(({ texts }) => Boolean(texts.command));
      if (name === 'loss' && isScript[0] !== isScript[1]) return isScript[0] - isScript[1]; // a loss of another kind
      return isRising ? order(a, b) : order(b, a);
    });
  }

  draw() {
    const words = this.search.value.toLowerCase().split(' ').filter(Boolean);
    const matches = this.sorted((this.runs || []).filter((run) => this.isMatch(run, words)));
    const focused = document.activeElement;
    const none = this.runs?.length
      ? 'No run has this: not in its name, state, tags, note or settings.'
      : 'No runs yet: paceline train makes one.';
    const shown = table('runs', [], []);
    shown.tHead.rows[0].append(el('th'), ...this.columns.map((name) => this.head(name)));
    shown.tBodies[0].append(...this.rows(matches));
    this.body.replaceChildren(matches.length ? shown : p('faint', none));
    const { run, column } = focused?.dataset ?? {};
    const place = run ? `${focused.tagName}[data-run="${CSS.escape(run)}"]` : column && `[data-column="${column}"]`;
    const nodes = place ? [...this.body.querySelectorAll(place)] : [];
    nodes.find((node) => node.checkVisibility())?.focus({ preventScroll: true });
    this.count();
  }

  head(name) {
    const { name: chosen, isRising } = this.sort;
    const order = name !== chosen ? null : isRising ? 'ascending' : 'descending';
    const sign = { ascending: ' ↑', descending: ' ↓' }[order] ?? '';
    const sort = () => {
      this.sort = { name, isRising: name === chosen ? !isRising : RISING.includes(name) };
      this.draw();
    };
    const title = UNEQUAL[name];
    const narrow = name === 'state' ? [...this.head('time').children] : [];
    narrow.forEach((node) => node.classList.add('narrow'));
    const sorter = button(COLUMNS[name] + sign, sort, { class: 'sort', 'data-column': name });
    return el('th', { 'aria-sort': order, title }, sorter, narrow);
  }

  // Returns a row for each run; with groups, those of one group below each other, at the place of the first of them.
  rows(runs) {
    if (setting('groups') !== 'yes') return runs.map((run) => this.row(run));
    const keyOf = ({ name, group }) => (group ? `group ${group.key}` : `run ${name}`);
    return Object.values(Object.groupBy(runs, keyOf)).flatMap((members) => {
      const rows = members.map((run) => this.row(run));
      const { group } = members[0];
      rows.forEach((row) => group && row.classList.add('member'));
      return group ? [this.groupRow(group, members), ...rows] : rows;
    });
  }

  groupRow(group, members) {
    const all = members.every(({ name }) => this.chosen.has(name));
    const choose = el('input', {
      type: 'checkbox',
      checked: all,
      'aria-label': 'compare the group',
      onchange: () => {
        for (const { name } of members) this.chosen[all ? 'delete' : 'add'](name);
        this.draw();
      },
    });
    const about = 'Runs that differ only in their seed: mean ± standard deviation of their last figures';
    const settings = Object.entries(group.settings).map(([key, value]) => `${key} ${written(value)}`);
    const size = [`${group.size} seeds`, span('faint', ', mean ± deviation')];
    const name = el('th', { scope: 'row', title: about }, size, span('muted note', settings.join(', ')));
    return el('tr.group', el('td', choose), name, el('td'), el('td', group.step), this.cells(group), el('td'));
  }

  row({ name, tags, note, notes = [], texts }) {
    const choose = el('input', {
      type: 'checkbox',
      'data-run': name,
      checked: this.chosen.has(name),
      'aria-label': `compare ${name}`,
      onchange: () => {
        this.chosen[choose.checked ? 'add' : 'delete'](name);
        this.count();
      },
    });
    const filter = (tag) => () => {
      this.search.value = tag;
      this.find();
    };
    const link = el('a', { href: `#/run/${encodeURIComponent(name)}`, 'data-run': name, title: name }, name);
    const chips = tags.map((tag) => button(tag, filter(tag), { class: 'tag', title: `Runs with ${tag}` }));
    return el(
      'tr',
      el('td', choose),
      el('th', { scope: 'row' }, link, chips, span('faint command', texts.command), span('muted note', note),
        notes.map((text) => span('warning note', text))),
      el('td', stateBadge(texts.badge), el('span.muted.narrow', formatTime(texts.time, { seconds: false }))),
      el('td.steps', texts.share === null ? null : meter(texts.share, 'steps'), texts.steps),
      this.cells(texts),
      el('td.muted', formatTime(texts.time, { seconds: false })),
    );
  }

  // Returns the cells between the steps and the time. The one of the figure, with its name, is what a phone shows of them.
  cells(texts) {
    const isKnown = (name) => ![undefined, NA].includes(texts[name]);
    const names = this.sort.name === 'eval' ? ['eval', 'val_bpb'] : ['val_bpb'];
    const figure = names.find(isKnown) ?? 'loss';
    const kind = (column) => (column === figure ? 'td.figure' : 'td');
    return this.columns.slice(3, -1).map((column) => el(kind(column), { 'data-name': column }, texts[column]));
  }

  setGroups() {
    const isOn = setting('groups') !== 'yes';
    setting('groups', isOn ? 'yes' : 'no');
    this.groups.setAttribute('aria-pressed', String(isOn));
    this.draw();
  }

  count() {
    const size = this.chosen.size;
    this.compare.disabled = size < 2 || size > MOST_COMPARED;
    const some = size > 1 ? `Compare ${size} runs` : `Compare: choose 2 to ${MOST_COMPARED}`;
    this.compare.textContent = size > MOST_COMPARED ? `Compare: ${MOST_COMPARED} at most` : some;
  }

  go() {
    if (!this.compare.disabled) this.onCompare([...this.chosen]);
  }

  key(key) {
    const links = [...this.body.querySelectorAll('th a')];
    const at = links.indexOf(document.activeElement);
    if (key === '/') this.search.focus();
    else if (key === 'j' || key === 'ArrowDown') links[Math.min(links.length - 1, at + 1)]?.focus();
    else if (key === 'k' || key === 'ArrowUp') links[Math.max(0, at - 1)]?.focus();
    else if (key === ' ' && at >= 0) links[at].closest('tr').querySelector('input').click();
    else if (key === 'c') this.go();
    else return false;
    return true;
  }
}
