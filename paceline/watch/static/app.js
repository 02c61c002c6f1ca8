// Holds the page, the stream that feeds it, keys, and the light and dark theme. A report has one page and no stream.
'use strict';

// What the page reports when the server is gone; the argument is the time of the last message.
const LOSSES = {
  lost: (time) =>
    `No answer from the server since ${time} UTC: paceline watch was stopped, or the connection to its host is closed.` +
    ' The page shows the last state, and goes on by itself when the same server answers. One that is started again has another' +
    ' address: open the one that it prints.',
  refused: (time) =>
    `The server that was open here is gone since ${time} UTC. Another one answers at this port, and its address is another:` +
    ' open the one that paceline watch --web printed last.',
};

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
    this.banner = el('p.banner', { role: 'alert', hidden: true });
    const right = el('span.right', this.live, el('span.zone', span('', 'times are '), 'UTC'), this.theme, keys);
    document.getElementById('top').append(this.path, this.sections, right);
    document.getElementById('top').after(this.banner);
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

  // Opens what the address names: #/run/NAME, #/compare/NAME/NAME or the list; after a ?, how the charts are drawn.
  open() {
    this.stream?.close();
    this.banner.hidden = true;
    tip.hide();
    const [place, settings] = location.hash.slice(1).split('?');
    const words = place.split('/').filter(Boolean).map(decoded);
    const [kind, ...names] = words.includes(null) ? [] : words;
    const link = {
      parameters: new URLSearchParams(settings),
      replace: (parameters) => history.replaceState(null, '', `#${place}?${parameters}`),
    };
    let query = '';
    if (kind === 'run' && names.length) {
      this.showRun(new RunPage(new Run(names[0]), { link }));
      query = `?${new URLSearchParams({ run: names[0] })}`;
    } else if (kind === 'compare' && names.length > 1) {
      this.page = new ComparePage(names.slice(0, MOST_COMPARED), link);
      query = `?${new URLSearchParams(names.slice(0, MOST_COMPARED).map((name) => ['run', name]))}`;
    } else if (words.length) return this.showNothing(place);
    else
      this.page = new RunsPage((chosen) => {
        location.hash = `#/compare/${chosen.map(encodeURIComponent).join('/')}`;
      });
    this.show(kind === 'run' ? names[0] : kind === 'compare' ? 'compare' : null);
    this.main.classList.add('waiting');
    this.showState('wait');
    const address = `api/stream${query}`;
    this.stream = new Stream(address, this.take.bind(this), this.showState.bind(this));
    return null;
  }

  show(name) {
    this.path.replaceChildren(el('a', { href: '#/', class: 'home' }, 'paceline'), name ? el('span', name) : '');
    document.title = name ? `${name} · paceline` : 'paceline';
    this.main.replaceChildren(this.page.node);
    this.listSections();
    scrollTo(0, 0);
  }

  showNothing(place) {
    const list = el('a', { href: '#/' }, 'all runs');
    const text = el('p.summary.warning', `This page has nothing at #${place}. See `, list, '.');
    this.page = { node: el('div.page', el('section.head', el('h1', 'No such page'), text)) };
    this.show(null);
    this.main.classList.remove('waiting');
    this.showState('live');
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
    this.heard = message.now ?? Date.now() / 1000;
    this.main.classList.remove('waiting');
    if (!(this.page instanceof RunPage)) this.page.take(message);
    else if (message.gone) {
      this.page.top.replaceChildren(el('section.head', el('h1', message.run), p('summary error', message.why || 'There is no such run.')));
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
    const texts = { wait: 'reading', live: 'live', lost: 'connection lost', refused: 'refused' };
    const ofReport = () => `report of ${formatTime(this.report.now, { seconds: false, day: true })}`;
    this.live.textContent = texts[state] ?? ofReport();
    this.banner.hidden = !(state in LOSSES);
    if (!this.banner.hidden) this.banner.textContent = LOSSES[state](formatTime(this.heard ?? Date.now() / 1000));
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
    else if (!this.page?.key?.(event.key)) return;
    event.preventDefault();
  }
}

// Returns a word of the address; null where it is not properly encoded.
function decoded(word) {
  try {
    return decodeURIComponent(word);
  } catch {
    return null;
  }
}

// The token is in a cookie now, so it leaves the address, where a screenshot would show it.
if (location.search) history.replaceState(null, '', location.pathname + location.hash);
const REPORT = document.getElementById('report');
const app = new App(REPORT ? JSON.parse(REPORT.textContent) : null);
