// Puts the server's changes together to snapshots: the browser's half of `changes` in snapshot.py. Depends on nothing of the page.
'use strict';

const noCurves = () => ({ series: {}, rank_series: {}, gpu_series: {}, host_series: {} });

// head and parts are the snapshot's numbers, curves its series, panels the texts and shares that the page shows.
class Run {
  constructor(name) {
    Object.assign(this, { name, head: {}, parts: {}, panels: {}, curves: noCurves() });
  }

  // Returns the names of the panels, parts and groups of curves that changed.
  take(message) {
    if (message.whole) this.curves = noCurves();
    if (message.head) this.head = message.head;
    Object.assign(this.parts, message.parts);
    Object.assign(this.panels, message.panels);
    for (const [group, changes] of Object.entries(message.curves || {}))
      for (const [key, points] of Object.entries(changes)) this.grow(group, key, points);
    return new Set([message.panels, message.parts, message.curves].flatMap((changes) => Object.keys(changes || {})));
  }

  // Replaces all points from index `from` on; null: the curve is gone.
  grow(group, key, points) {
    if (points === null) {
      delete this.curves[group][key];
      return;
    }
    const curve = (this.curves[group][key] ??= { steps: [], values: [], times: [] });
    for (const name of ['steps', 'values', 'times']) {
      curve[name].length = Math.min(curve[name].length, points.from);
      for (const value of points[name] || []) curve[name].push(value); // curves of devices come without steps
    }
  }
}

// Follows an address of server-sent events while the page is in sight; a hidden tab sends no requests.
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
    this.source.onmessage = (event) => this.onMessage(JSON.parse(event.data));
    this.source.onerror = () => {
      const isRefused = this.source?.readyState === EventSource.CLOSED; // by another server, with another token
      this.onState(isRefused ? 'refused' : 'lost');
      if (!isRefused) return;
      this.source = null;
      clearTimeout(this.retry);
      this.retry = setTimeout(() => {
        if (!document.hidden && !this.isClosed) this.open();
      }, 5000);
    };
  }

  pause() {
    this.source?.close();
    this.source = null;
  }

  close() {
    this.isClosed = true;
    clearTimeout(this.retry);
    document.removeEventListener('visibilitychange', this.onVisible);
    this.pause();
  }
}

// Returns an object from the server, or null.
async function request(address) {
  try {
    const answer = await fetch(address);
    return answer.ok ? await answer.json() : null;
  } catch {
    return null;
  }
}
