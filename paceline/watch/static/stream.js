// The server's changes put together to snapshots again: the browser's half of feed.py. Knows nothing of the page.
'use strict';

const clock = { ahead: 0 }; // of the server before this browser: a laptop's clock is no part of how long a run is silent
const nowS = () => Date.now() / 1000 + clock.ahead;

const noCurves = () => ({ series: {}, rank_series: {}, gpu_series: {}, host_series: {} });

class Run {
  constructor(name) {
    this.name = name;
    this.head = {};
    this.parts = {};
    this.curves = noCurves();
  }

  // Returns the names of what changed: 'head', a part's, a group of curves'
  take(message) {
    const changed = new Set(Object.keys(message.parts || {}));
    if (message.whole) this.curves = noCurves();
    if (message.head) {
      if (message.head.state !== this.head.state) changed.add('state');
      this.head = message.head;
      changed.add('head');
    }
    Object.assign(this.parts, message.parts);
    if (message.summary !== undefined) {
      this.parts.summary = message.summary;
      changed.add('summary');
    }
    for (const [group, grown] of Object.entries(message.curves || {})) {
      changed.add(group);
      for (const [key, points] of Object.entries(grown)) this.grow(group, key, points);
    }
    return changed;
  }

  grow(group, key, points) {
    if (points === null) {
      delete this.curves[group][key];
      return;
    }
    const old = this.curves[group][key] || { steps: [], values: [], times: [] };
    const kept = (name) => old[name].slice(0, points.from).concat(points[name] || []); // of devices no steps come
    this.curves[group][key] = { steps: kept('steps'), values: kept('values'), times: kept('times') };
  }

  get isLive() {
    return LIVE.includes(this.head.state);
  }
}

// Follows an address of server-sent events while the page is in sight; a hidden tab asks nothing of the server.
class Stream {
  constructor(address, onMessage, onState) {
    Object.assign(this, { address, onMessage, onState, source: null });
    this.onVisible = () => (document.hidden ? this.pause() : this.open());
    document.addEventListener('visibilitychange', this.onVisible);
    this.open();
  }

  open() {
    if (this.source) return;
    this.source = new EventSource(this.address);
    this.source.onopen = () => this.onState('live');
    this.source.onerror = () => {
      this.onState('lost');
      if (this.source?.readyState === EventSource.CLOSED) {
        // refused: another server, another token
        this.source = null;
        clearTimeout(this.retry);
        this.retry = setTimeout(() => {
          if (!document.hidden && !this.closed) this.open();
        }, 5000);
      }
    };
    this.source.onmessage = (event) => {
      const message = JSON.parse(event.data);
      if (isNumber(message.now)) clock.ahead = message.now - Date.now() / 1000;
      this.onMessage(message);
    };
  }

  pause() {
    this.source?.close();
    this.source = null;
  }

  close() {
    this.closed = true;
    clearTimeout(this.retry);
    document.removeEventListener('visibilitychange', this.onVisible);
    this.pause();
  }
}

// An object from the server, or null
async function ask(address) {
  try {
    const answer = await fetch(address);
    return answer.ok ? await answer.json() : null;
  } catch {
    return null;
  }
}
