// Makes elements in one call, and the small parts that every panel uses. Text stays text: nothing parses markup.
'use strict';

const NA = 'n/a';
const isNumber = (value) => typeof value === 'number' && Number.isFinite(value);

// Makes an element from its tag and classes: 'div.head'. A plain object as the next argument holds attributes: listeners
// are called on...; null, undefined and false are left out. All other arguments are children.
function dress(node, name, [first, ...others]) {
  const isPlain = first && Object.getPrototypeOf(first) === Object.prototype;
  const [attributes, children] = isPlain ? [first, others] : [{}, [first, ...others]];
  if (name.includes('.')) node.setAttribute('class', name.split('.').slice(1).join(' ').trim());
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith('on')) node.addEventListener(key.slice(2), value);
    else if (key === 'style') Object.entries(value).forEach((rule) => node.style.setProperty(...rule));
    else node.setAttribute(key, value === true ? '' : value);
  }
  node.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const SVG = 'http://www.w3.org/2000/svg';
const el = (name, ...parts) => dress(document.createElement(name.split('.')[0]), name, parts);
const svg = (name, ...parts) => dress(document.createElementNS(SVG, name.split('.')[0]), name, parts);

// A paragraph or a span with a class; null without text.
const p = (name, ...text) => (text.flat().some(Boolean) ? el(`p.${name}`, text) : null);
const span = (name, ...text) => (text.flat().some(Boolean) ? el(`span.${name}`, text) : null);

const button = (text, onclick, attributes = {}) => el('button', { type: 'button', onclick, ...attributes }, text);

const toggle = (text, pressed, onclick, attributes = {}) =>
  button(text, onclick, { class: 'toggle', 'aria-pressed': String(pressed), ...attributes });

// Makes a group of buttons, of which one is pressed.
function segments(label, names, pressed, choose, textOf = (name) => name) {
  const segment = (name) => toggle(textOf(name), name === pressed, () => choose(name), { class: null, 'data-tool': name });
  return el('span.segments', { role: 'group', 'aria-label': label }, names.map(segment));
}

// heads: the first row; rows: the name of a row, then its cells. A cell is text, nodes, or a finished <td>.
function table(name, heads, rows) {
  const cell = (content) => (content instanceof HTMLTableCellElement ? content : el('td', content));
  const row = ([first, ...cells]) => el('tr', el('th', { scope: 'row' }, first), cells.map(cell));
  const head = heads.map((text) => el('th', text));
  return el(`table.${name}`, el('thead', el('tr', head)), el('tbody', rows.map(row)));
}

function list(name, pairs) {
  const row = ([term, text]) => el('div', el('dt', term), el('dd', text));
  return el(`dl.${name}`, pairs.map(row));
}

// Changes the shown node only where the drawn one differs, so that selected text stays selected.
// It suits parts without listeners.
function settle(shown, drawn) {
  if (shown.isEqualNode(drawn)) return;
  const alike = shown.nodeName === drawn.nodeName && shown.childNodes.length === drawn.childNodes.length;
  if (!alike || shown.nodeType !== Node.ELEMENT_NODE) {
    shown.replaceWith(drawn);
    return;
  }
  for (const { name } of [...shown.attributes]) if (!drawn.hasAttribute(name)) shown.removeAttribute(name);
  for (const { name, value } of drawn.attributes) {
    if (name === 'style') shown.style.cssText = drawn.style.cssText;
    else if (shown.getAttribute(name) !== value) shown.setAttribute(name, value);
  }
  const [old, now] = [[...shown.childNodes], [...drawn.childNodes]];
  old.forEach((child, index) => settle(child, now[index]));
}

// Makes these nodes the only children of a place.
function fill(place, ...children) {
  const drawn = children.flat().filter(Boolean);
  if (place.childNodes.length !== drawn.length) place.replaceChildren(...drawn);
  else [...place.childNodes].forEach((child, index) => settle(child, drawn[index]));
}

// badge: {state, sign, level}.
const stateBadge = ({ state, sign, level }) =>
  el(`span.badge.${level}`, { 'data-state': state }, el('i', { 'aria-hidden': 'true' }, sign), state);

// Makes a bar. share: from 0 to 1, or null.
function meter(share, label, level = '') {
  const percent = isNumber(share) ? Math.round(100 * Math.max(0, Math.min(1, share))) : null;
  const range = { 'aria-valuemin': 0, 'aria-valuemax': 100, 'aria-valuenow': percent };
  const bar = el('span', { style: { width: `${percent ?? 0}%` } });
  return el(`span.meter.${level}`, { role: 'meter', 'aria-label': label, ...range }, bar);
}

function copyButton(text) {
  const act = async ({ target }) => {
    await navigator.clipboard?.writeText(text);
    target.textContent = 'copied';
    setTimeout(() => target.replaceChildren('copy'), 1500);
  };
  return button('copy', act, { class: 'quiet copy' });
}

// The box beside the pointer. Its first line is strong.
const tip = {
  show(event, ...lines) {
    const box = document.getElementById('tip');
    box.replaceChildren(...lines.filter(Boolean).map((line, index) => el(index ? 'div' : 'strong', {}, line)));
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    const { clientX: x, clientY: y } = event;
    box.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 8))}px`;
    box.style.top = `${y + 18 + height > innerHeight ? y - height - 10 : y + 18}px`;
  },
  hide() {
    document.getElementById('tip').hidden = true;
  },
};

// Returns a colour of the theme by its name. Each is read once, because a computed style forces the browser to restyle.
const colours = new Map();
function ink(name) {
  const style = colours.has(name) ? null : getComputedStyle(document.documentElement);
  if (style) colours.set(name, style.getPropertyValue(`--${name}`).trim());
  return colours.get(name);
}

// Reads a setting that this browser keeps from one visit to the next, or writes it where a value is given.
function setting(name, ...value) {
  try {
    return value.length ? localStorage.setItem(`paceline.${name}`, value[0]) : localStorage.getItem(`paceline.${name}`);
  } catch {
    return null; // a private window and a file store nothing; the page works without settings
  }
}

// Calls back with the width of a node when it changes, so that drawing never forces a layout to read it.
const watchWidth = (node, act) => new ResizeObserver(([{ contentRect }]) => act(contentRect.width)).observe(node);

// Calls back when a node comes into sight or leaves it.
const watchSight = (node, act) => new IntersectionObserver(([{ isIntersecting }]) => act(isIntersecting)).observe(node);

// Calls back once nothing more urgent is to be done.
const whenIdle = globalThis.requestIdleCallback ?? ((act) => setTimeout(act, 200)); // Safari has none

// Saves a text or a Blob as a file, as the browser saves any download.
function download(name, content, type) {
  const address = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  el('a', { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
