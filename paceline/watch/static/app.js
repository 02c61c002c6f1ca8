// Holds the page, the stream that feeds it, keys, and the light and dark theme. A report has one page and no stream.
'use strict';

const THEMES = ['auto', 'light', 'dark'];

class App {
  constructor(report) {
    Object.assign(this, { report, page: null, stream: null, state: report ? 'report' : 'wait' });
    this.main = document.getElementById('main');
    this.keys = document.getElementById('keys');
    this.sections = el('nav.sections', { 'aria-label': 'sections' });
    this.path = el('nav.path', { 'aria-label': 'where' });
    this.live = el('span.live', { role: 'status' });
    this.theme = button('', () => this.nextTheme(), { class: 'quiet', title: 't' });
    const keys = button('?', () => this.keys.showModal(), { class: 'quiet', title: 'Keys (?)', 'aria-label': 'keys' });
    const right = el('span.right', this.live, this.theme, keys);
    document.getElementById('top').append(this.path, this.sections, right);
    this.setTheme(setting('theme') || 'auto');
    this.listen();
    if (report) this.openReport();
    else this.open();
    this.showState(this.state);
  }

  listen() {
    this.keys.querySelector('button').addEventListener('click', () => this.keys.close());
    document.addEventListener('keydown', (event) => this.keyDown(event));
    addEventListener('beforeprint', () => this.page?.redraw?.());
    addEventListener('scroll', () => this.markSection(), { passive: true });
    document.querySelector('.skip').addEventListener('click', (event) => {
      event.preventDefault();
      this.main.focus();
    });
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => this.setTheme(this.chosen));
    if (!this.report) addEventListener('hashchange', () => this.open());
  }

  open() {
    this.stream?.close();
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
    this.path.replaceChildren(el('a', { href: '#/', class: 'home' }, 'paceline'), run ? el('span', run) : '');
    document.title = run ? `${run} · paceline` : 'paceline';
    this.main.replaceChildren(this.page.node);
    this.main.classList.add('waiting');
    this.listSections();
    scrollTo(0, 0);
    this.showState('wait');
    const address = `api/stream${query}`;
    this.stream = new Stream(address, this.take.bind(this), this.showState.bind(this));
  }

  openReport() {
    const run = new Run(this.report.run);
    this.showRun(new RunPage(run, { about: this.report.about, isLive: false }));
    this.path.replaceChildren(el('span.home', 'paceline'), el('span', run.name));
    this.main.replaceChildren(this.page.node);
    this.page.update(new Set([...run.take(this.report), 'about']));
  }

  showRun(page) {
    this.page = page;
    page.onSections = () => this.listSections();
  }

  take(message) {
    this.main.classList.remove('waiting');
    if (!(this.page instanceof RunPage)) this.page.take(message);
    else if (message.gone) {
      this.page.top.replaceChildren(el('section.head', el('h1', message.run), p('summary error', 'There is no such run.')));
    } else {
      this.page.update(this.page.run.take(message));
      const { title } = this.page.run.panels.head;
      if (document.title !== title) document.title = title;
    }
  }

  listSections() {
    const link = ({ id, title }) => {
      const onclick = (event) => {
        event.preventDefault();
        this.goTo(id);
      };
      return el('a', { href: `#${id}`, onclick }, title);
    };
    this.sections.replaceChildren(...(this.page.shownSections?.() || []).map(link));
  }

  // Marks the section that is being read: the last one that has scrolled up to the frame.
  markSection() {
    const sections = this.page?.shownSections?.() || [];
    const isPassed = ({ id }) => document.getElementById(id)?.getBoundingClientRect().top < 140;
    const isEnd = scrollY + innerHeight > document.body.scrollHeight - 4;
    const now = isEnd ? sections.at(-1) : sections.findLast(isPassed);
    for (const link of this.sections.children) {
      if (link.hash === `#${now?.id}`) link.setAttribute('aria-current', 'true');
      else link.removeAttribute('aria-current');
    }
  }

  goTo(id) {
    const isCalm = matchMedia('(prefers-reduced-motion: reduce)').matches;
    const section = document.getElementById(id);
    section?.scrollIntoView({ behavior: isCalm ? 'auto' : 'smooth', block: 'start' });
    section?.querySelector('h2')?.setAttribute('tabindex', '-1');
    section?.querySelector('h2')?.focus({ preventScroll: true });
  }

  showState(state) {
    this.state = this.live.dataset.state = state;
    const texts = { wait: 'reading', live: 'live', lost: 'connection lost' };
    this.live.textContent = texts[state] ?? `report of ${formatTime(this.report.now, { seconds: false, day: true })}`;
  }

  setTheme(chosen) {
    this.chosen = chosen;
    setting('theme', chosen);
    document.documentElement.dataset.theme =
      chosen === 'auto' ? (matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light') : chosen;
    colours.clear();
    this.theme.textContent = { auto: '◐', light: '○', dark: '●' }[chosen];
    this.theme.setAttribute('aria-label', `colours: ${chosen}`);
    this.page?.redraw?.();
  }

  nextTheme() {
    this.setTheme(THEMES[(THEMES.indexOf(this.chosen) + 1) % THEMES.length]);
  }

  keyDown(event) {
    const typing = event.target.matches?.('input[type=search], select, textarea');
    if (event.key === 'Escape' && typing) event.target.blur();
    if (typing || event.ctrlKey || event.metaKey || event.altKey || this.keys.open) return;
    if (event.target.matches?.('input[type=range], .log') && event.key.startsWith('Arrow')) return;
    const links = [...this.sections.children];
    if (event.key === 'g' && !this.report) location.hash = '#/';
    else if (event.key === 't') this.nextTheme();
    else if (event.key === '?') this.keys.showModal();
    else if (/^[1-9]$/.test(event.key) && links[event.key - 1]) links[event.key - 1].click();
    else if (!this.page?.key(event.key)) return;
    event.preventDefault();
  }
}

// The token is in a cookie now, so it leaves the address, where a screenshot would show it.
if (location.search) history.replaceState(null, '', location.pathname + location.hash);
const REPORT = document.getElementById('report');
const app = new App(REPORT ? JSON.parse(REPORT.textContent) : null);
