// Lists all runs of the folder, the latest first. Some can be chosen for a comparison.
'use strict';

const HEADS = ['', 'run', 'state', 'step', 'loss', 'val_bpb', 'tok/s', 'last event'];

class RunsPage {
  constructor(onCompare) {
    Object.assign(this, { runs: null, chosen: new Set(), onCompare });
    this.search = el('input', {
      type: 'search',
      placeholder: 'Find a run  /',
      'aria-label': 'Find a run',
      oninput: () => this.draw(),
    });
    this.compare = button('Compare', () => this.go(), { class: 'main', disabled: true });
    this.body = el('div.scroll');
    this.node = el(
      'div.page',
      el('section.head', el('h1', 'Runs')),
      el('section.panel', el('div.tools', this.search, this.compare), this.body),
    );
  }

  take({ runs }) {
    this.runs = runs;
    this.chosen = new Set(runs.map(({ name }) => name).filter((name) => this.chosen.has(name)));
    this.draw();
  }

  draw() {
    const find = this.search.value.toLowerCase();
    const matches = (this.runs || []).filter(({ name, state }) => `${name} ${state}`.toLowerCase().includes(find));
    const focused = document.activeElement;
    const none = this.runs?.length ? 'No run has this in its name or state.' : 'No runs yet: paceline train makes one.';
    const shown = table('runs', HEADS, []);
    shown.tBodies[0].append(...matches.map((run) => this.row(run)));
    this.body.replaceChildren(matches.length ? shown : p('faint', none));
    if (focused?.dataset.run) {
      const place = `${focused.tagName}[data-run="${CSS.escape(focused.dataset.run)}"]`;
      this.body.querySelector(place)?.focus({ preventScroll: true });
    }
    this.count();
  }

  row({ name, texts }) {
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
    const link = el('a', { href: `#/run/${encodeURIComponent(name)}`, 'data-run': name }, name);
    return el(
      'tr',
      el('td', choose),
      el('th', { scope: 'row' }, link, span('faint command', texts.command)),
      el('td', stateBadge(texts.badge)),
      el('td.steps', texts.share === null ? null : meter(texts.share, 'steps'), texts.steps),
      [texts.loss, texts.val_bpb, texts.tok_per_sec].map((text) => el('td', text)),
      el('td.muted', formatTime(texts.time, { seconds: false })),
    );
  }

  count() {
    const size = this.chosen.size;
    this.compare.disabled = size < 2 || size > MOST_COMPARED;
    const some = size > 1 ? `Compare ${size} runs` : 'Compare: choose two to five';
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
