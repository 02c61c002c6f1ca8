// The frame: which page stands in it, the stream that feeds it, keys, light and dark. In a report there is one page and no stream.
'use strict';

const KEYS = [
  ['1 to 9', 'go to a section'],
  ['x', 'steps, tokens or hours'],
  ['s', 'smoothing'],
  ['l', 'logarithmic y'],
  ['o', 'clip outliers'],
  ['+ −', 'zoom; drag does too'],
  ['← →', 'move along the zoom'],
  ['r', 'the whole run; double-click does too'],
  ['/', 'search the log, or the runs'],
  ['j k', 'next and last run of the list'],
  ['space, c', 'choose a run, compare those chosen'],
  ['g', 'all runs'],
  ['t', 'light or dark'],
  ['?', 'these keys'],
];
const THEMES = ['auto', 'light', 'dark'];

class App {
  constructor(report) {
    Object.assign(this, { report, page: null, stream: null, state: report ? 'report' : 'wait' });
    this.top = document.getElementById('top');
    this.main = document.getElementById('main');
    this.sections = el('nav', { class: 'sections', 'aria-label': 'sections' });
    this.path = el('nav', { class: 'path', 'aria-label': 'where' });
    this.live = el('span', { class: 'live', role: 'status' });
    this.theme = el('button', { type: 'button', class: 'quiet', title: 't', onclick: () => this.nextTheme() });
    this.top.append(
      this.path,
      this.sections,
      el(
        'span',
        { class: 'right' },
        this.live,
        this.theme,
        el(
          'button',
          { type: 'button', class: 'quiet', title: 'Keys (?)', 'aria-label': 'keys', onclick: () => this.showKeys() },
          '?',
        ),
      ),
    );
    this.setTheme(recall('theme') || 'auto');
    document.addEventListener('keydown', (event) => this.keyDown(event));
    addEventListener('scroll', () => this.markSection(), { passive: true });
    document.querySelector('.skip').addEventListener('click', (event) => {
      event.preventDefault();
      this.main.focus();
    });
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => this.setTheme(this.chosen));
    if (report) this.openReport();
    else {
      addEventListener('hashchange', () => this.open());
      this.open();
    }
    setInterval(() => this.tellState(), 1000);
  }

  open() {
    this.stream?.close();
    this.page?.remove();
    tip.hide();
    const [kind, ...names] = location.hash.slice(2).split('/').filter(Boolean).map(decodeURIComponent);
    let query = '';
    if (kind === 'run' && names.length) {
      this.showRun(new RunPage(new Run(names[0])));
      query = `?${new URLSearchParams({ run: names[0] })}`;
    } else if (kind === 'compare' && names.length > 1) {
      this.page = new ComparePage(names.slice(0, MOST_COMPARED));
      query = `?${new URLSearchParams(names.slice(0, MOST_COMPARED).map((name) => ['run', name]))}`;
    } else
      this.page = new RunsPage((chosen) => {
        location.hash = `#/compare/${chosen.map(encodeURIComponent).join('/')}`;
      });
    const run = kind === 'run' ? names[0] : kind === 'compare' ? 'compare' : null;
    this.path.replaceChildren(el('a', { href: '#/', class: 'home' }, 'paceline'), run ? el('span', {}, run) : '');
    document.title = run ? `${run} · paceline` : 'paceline';
    this.main.replaceChildren(this.page.node);
    this.main.classList.add('waiting');
    this.listSections();
    scrollTo(0, 0);
    this.state = 'wait';
    this.stream = new Stream(
      `api/stream${query}`,
      (message) => this.take(message),
      (state) => {
        this.state = state;
        this.tellState();
      },
    );
  }

  openReport() {
    const run = new Run(this.report.run);
    this.showRun(new RunPage(run, { about: this.report.about, live: false }));
    this.path.replaceChildren(el('span', { class: 'home' }, 'paceline'), el('span', {}, run.name));
    this.main.replaceChildren(this.page.node);
    clock.ahead = this.report.now - Date.now() / 1000;
    this.page.update(new Set([...run.take(this.report), 'about', ...Object.keys(this.report.parts)]));
    this.tellState();
  }

  showRun(page) {
    this.page = page;
    page.onSections = () => this.listSections();
  }

  take(message) {
    this.main.classList.remove('waiting');
    this.heard = nowS();
    if (!(this.page instanceof RunPage)) {
      this.page.take(message);
      return;
    }
    if (message.gone) {
      this.page.top.replaceChildren(
        el(
          'section',
          { class: 'head' },
          el('h1', {}, message.run),
          el('p', { class: 'summary warning' }, 'There is no such run, or not any more.'),
        ),
      );
      return;
    }
    const changed = this.page.run.take(message);
    this.page.update(changed);
    const { head } = this.page.run;
    const share = this.page.run.isLive && head.num_steps ? `${Math.floor((100 * head.step) / head.num_steps)} % ` : '';
    document.title = `${(STATES[head.state] || STATES.unknown)[0]} ${share}${head.name} · paceline`;
  }

  listSections() {
    this.sections.replaceChildren(
      ...this.page.shownSections().map(({ id, title }) =>
        el(
          'a',
          {
            href: `#${id}`,
            onclick: (event) => {
              event.preventDefault();
              this.goTo(id);
            },
          },
          title,
        ),
      ),
    );
  }

  // Which section is read now: the last one that has come up to the frame
  markSection() {
    const seen = this.page
      ?.shownSections()
      .filter(({ id }) => document.getElementById(id)?.getBoundingClientRect().top < 140);
    const now =
      scrollY + innerHeight > document.body.scrollHeight - 4 ? this.page?.shownSections().at(-1) : seen?.at(-1);
    for (const link of this.sections.children) {
      if (link.hash === `#${now?.id}`) link.setAttribute('aria-current', 'true');
      else link.removeAttribute('aria-current');
    }
  }

  goTo(id) {
    const section = document.getElementById(id);
    section?.scrollIntoView({
      behavior: matchMedia('(prefers-reduced-motion: reduce)').matches ? 'auto' : 'smooth',
      block: 'start',
    });
    section?.querySelector('h2')?.setAttribute('tabindex', '-1');
    section?.querySelector('h2')?.focus({ preventScroll: true });
  }

  tellState() {
    const words = {
      wait: 'reading',
      live: 'live',
      lost: 'connection lost',
      report: this.report ? `report of ${formatTime(this.report.now, { seconds: false, day: true })}` : '',
    };
    if (this.live.textContent !== words[this.state]) this.live.replaceChildren(words[this.state]);
    this.live.dataset.state = this.state;
  }

  setTheme(chosen) {
    this.chosen = chosen;
    remember('theme', chosen);
    document.documentElement.dataset.theme =
      chosen === 'auto' ? (matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light') : chosen;
    this.theme.textContent = { auto: '◐', light: '○', dark: '●' }[chosen];
    this.theme.setAttribute('aria-label', `colours: ${chosen}`);
    this.page?.themed();
  }

  nextTheme() {
    this.setTheme(THEMES[(THEMES.indexOf(this.chosen) + 1) % THEMES.length]);
  }

  showKeys() {
    const dialog = document.getElementById('keys');
    dialog.replaceChildren(
      el('h2', {}, 'Keys'),
      el(
        'dl',
        {},
        KEYS.map(([key, words]) => el('div', {}, el('dt', {}, el('kbd', {}, key)), el('dd', {}, words))),
      ),
      el('button', { type: 'button', autofocus: true, onclick: () => dialog.close() }, 'close'),
    );
    dialog.showModal();
  }

  keyDown(event) {
    const typing = event.target.matches?.('input[type=search], select, textarea');
    if (event.key === 'Escape' && typing) event.target.blur();
    if (typing || event.ctrlKey || event.metaKey || event.altKey || document.getElementById('keys').open) return;
    if (event.target.matches?.('input[type=range], .log') && event.key.startsWith('Arrow')) return;
    const links = [...this.sections.children];
    const acts = {
      g: () => {
        if (!this.report) location.hash = '#/';
      },
      t: () => this.nextTheme(),
      '?': () => this.showKeys(),
    };
    if (event.key in acts) acts[event.key]();
    else if (/^[1-9]$/.test(event.key) && links[event.key - 1]) links[event.key - 1].click();
    else if (!this.page?.key(event.key)) return;
    event.preventDefault();
  }
}

// The token has become a cookie: it need not stand in the address, where a screen shot shows it
if (location.search) history.replaceState(null, '', location.pathname + location.hash);
const REPORT = document.getElementById('report');
const app = new App(REPORT ? JSON.parse(REPORT.textContent) : null);
