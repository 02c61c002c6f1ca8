// All runs of the folder, the latest first; some of them chosen for a comparison.
'use strict';

class RunsPage {
  constructor(onCompare) {
    Object.assign(this, { runs: null, chosen: new Set(), find: '', onCompare });
    this.search = el('input', {
      type: 'search',
      placeholder: 'Find a run  /',
      'aria-label': 'Find a run',
      oninput: () => {
        this.find = this.search.value;
        this.draw();
      },
    });
    this.compare = el('button', { type: 'button', class: 'main', disabled: true, onclick: () => this.go() }, 'Compare');
    this.body = el('div', { class: 'scroll' });
    this.node = el(
      'div',
      { class: 'page' },
      el('section', { class: 'head' }, el('h1', {}, 'Runs')),
      el('section', { class: 'panel' }, el('div', { class: 'tools' }, this.search, this.compare), this.body),
    );
  }

  shownSections() {
    return [];
  }
  themed() {}
  remove() {}

  take({ runs }) {
    this.runs = runs;
    this.chosen.forEach((name) => {
      if (!runs.some((run) => run.name === name)) this.chosen.delete(name);
    });
    this.draw();
  }

  draw() {
    const wanted = (this.runs || []).filter(({ name, state }) =>
      `${name} ${state}`.toLowerCase().includes(this.find.toLowerCase()),
    );
    const had = document.activeElement;
    if (!wanted.length) {
      this.body.replaceChildren(
        el(
          'p',
          { class: 'faint' },
          this.runs?.length ? 'No run has this in its name or state.' : 'No runs yet: paceline train makes one.',
        ),
      );
    } else {
      this.body.replaceChildren(
        el(
          'table',
          { class: 'runs' },
          el(
            'thead',
            {},
            el(
              'tr',
              {},
              ['', 'run', 'state', 'step', 'loss', 'val_bpb', 'tok/s', 'last event'].map((words) =>
                el('th', {}, words),
              ),
            ),
          ),
          el(
            'tbody',
            {},
            wanted.map((run) => this.row(run)),
          ),
        ),
      );
    }
    if (had?.dataset.run)
      this.body.querySelector(`${had.tagName}[data-run="${CSS.escape(had.dataset.run)}"]`)?.focus({ preventScroll: true });
    this.count();
  }

  row(run) {
    const choose = el('input', {
      type: 'checkbox',
      'data-run': run.name,
      checked: this.chosen.has(run.name),
      'aria-label': `compare ${run.name}`,
      onchange: () => {
        this.chosen[choose.checked ? 'add' : 'delete'](run.name);
        this.count();
      },
    });
    const at = run.time ? Date.parse(run.time) / 1000 : null;
    const share = run.num_steps ? run.step / run.num_steps : null;
    const steps = run.command
      ? NA
      : `${formatCount(run.step)}${run.num_steps ? ` of ${formatCount(run.num_steps)}` : ''}`;
    return el(
      'tr',
      {},
      el('td', {}, choose),
      el(
        'th',
        { scope: 'row' },
        el('a', { href: `#/run/${encodeURIComponent(run.name)}`, 'data-run': run.name }, run.name),
        run.command ? el('span', { class: 'faint command' }, run.command.join(' ')) : null,
      ),
      el('td', {}, stateBadge(run.state)),
      el('td', { class: 'steps' }, share === null ? null : meter(share, { label: 'steps' }), steps),
      el('td', {}, formatField('loss', run.loss)),
      el('td', {}, formatField('val_bpb', run.val_bpb)),
      el('td', {}, formatShort(run.tok_per_sec)),
      el('td', { class: 'muted', title: at ? formatTime(at) : null }, at ? formatAgo(Math.max(0, nowS() - at)) : NA),
    );
  }

  count() {
    const size = this.chosen.size;
    this.compare.disabled = size < 2 || size > MOST_COMPARED;
    this.compare.textContent =
      size > MOST_COMPARED
        ? `Compare: ${MOST_COMPARED} at most`
        : size > 1
          ? `Compare ${size} runs`
          : 'Compare: choose two to five';
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
