// Formats what depends on the zoom or the pointer: labels of axes, values under the cursor, times. All times are UTC, as
// in the log lines and in the terminal. The server formats every other text.
'use strict';

// Returns so many significant digits, without trailing zeros.
const trim = (value, digits) => String(Number(value.toPrecision(digits)));

const formatCount = (count) => Math.round(count).toLocaleString('en-US');

// 856_679 -> '857K', for axes.
function formatShort(value) {
  const size = Math.abs(value);
  if (size >= 1000) {
    const power = Math.min(4, Math.floor(Math.log10(size) / 3));
    return `${trim(value / 1000 ** power, 3)}${['', 'K', 'M', 'B', 'T'][power]}`;
  }
  return size !== 0 && size < 0.001 ? value.toExponential(1) : trim(value, 4);
}

function formatBytes(bytes) {
  let [size, unit] = [bytes, 'B'];
  for (const next of ['KiB', 'MiB', 'GiB', 'TiB']) if (Math.abs(size) >= 1024) [size, unit] = [size / 1024, next];
  return `${unit === 'B' || size >= 100 ? size.toFixed(0) : size.toFixed(1)} ${unit}`;
}

// By the unit that the server names; the server formats the last value in the same way.
const UNITS = {
  loss: (value) => value.toFixed(4),
  ms: (value) => `${value >= 100 ? formatCount(value) : value.toFixed(value >= 10 ? 1 : 2)} ms`,
  share: (value) => `${(100 * value).toFixed(1)} %`,
  percent: (value) => `${(100 * value).toFixed(0)} %`,
  bytes: formatBytes,
  count: formatCount,
  watts: (value) => `${value.toFixed(0)} W`,
  celsius: (value) => `${value.toFixed(0)} °C`,
  mhz: (value) => `${formatCount(value)} MHz`,
  rate: (value) => `${formatBytes(value)}/s`,
};
const plainNumber = (value) => (Math.abs(value) < 10_000 ? trim(value, 4) : formatCount(value));
const formatUnit = (value, unit) => (isNumber(value) ? (UNITS[unit] || plainNumber)(value) : NA);

const axisPercent = (value) => `${trim(100 * value, 3)} %`;
const axisBytes = (value) => formatBytes(value).replace('.0 ', ' ');
const AXIS_UNITS = { bytes: axisBytes, rate: (value) => `${axisBytes(value)}/s`, share: axisPercent, percent: axisPercent };
const formatAxis = (value, unit) => (AXIS_UNITS[unit] || formatShort)(value);

// Returns the unit of the x axis that fits the range, in hours, and its name.
function hoursUnit([from, to]) {
  const width = to - from;
  return width > 96 ? [24, 'd'] : width > 2 ? [1, 'h'] : width > 0.05 ? [1 / 60, 'm'] : [1 / 3600, 's'];
}

function formatTick(x, axis, range) {
  const width = range[1] - range[0];
  if (axis === 'clock') return formatTime(x, { seconds: width < 300, day: width > 86_400 });
  if (axis !== 'hours') return formatShort(x);
  const [unit, name] = hoursUnit(range);
  return `${trim(x / unit, 4)}${name}`;
}

function formatX(x, axis, range) {
  if (axis === 'steps') return `step ${formatCount(x)}`;
  if (axis === 'clock') return `${formatTime(x)} UTC`;
  return axis === 'hours' ? `after ${formatTick(x, axis, range)}` : `${formatShort(x)} tokens`;
}

// Made once, because making one takes a browser much longer than using it.
const clockFormat = (options) => new Intl.DateTimeFormat('en-GB', { timeZone: 'UTC', ...options });
const CLOCKS = [
  clockFormat({ hour: '2-digit', minute: '2-digit' }),
  clockFormat({ hour: '2-digit', minute: '2-digit', second: '2-digit' }),
];
const DAY = clockFormat({ day: 'numeric', month: 'short' });

// Returns Unix seconds as a time in UTC. day: whether with the day; null: where it is not today.
function formatTime(time, { seconds = true, day = null } = {}) {
  if (!isNumber(time)) return NA;
  const date = new Date(time * 1000);
  const clock = CLOCKS[Number(seconds)].format(date);
  return !(day ?? Math.floor(time / 86_400) !== Math.floor(Date.now() / 86_400_000))
    ? clock
    : `${DAY.format(date)} ${clock}`;
}

// Returns round values in [from, to], about `most` of them.
function niceTicks(from, to, most) {
  const rough = (to - from) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const width = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const ticks = [];
  for (let tick = Math.ceil(from / width) * width; tick <= to + width * 1e-9; tick += width)
    ticks.push(Number(tick.toPrecision(12)));
  return ticks;
}

function axisTicks(axis, range, most) {
  if (axis === 'clock') return timeTicks(...range, most);
  const unit = axis === 'hours' ? hoursUnit(range)[0] : 1;
  return niceTicks(range[0] / unit, range[1] / unit, most).map((tick) => tick * unit);
}

const LOG_STEPS = [[1], [1, 2, 5], [1, 2, 3, 5, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9]]; // of a power of ten, the coarsest first

// Returns the coarsest round values of a logarithmic axis that are at least three; between them linear ones.
function logTicks(from, to, most) {
  const powers = Array.from({ length: 40 }, (_, i) => 10 ** (i - 20));
  const ticksOf = (steps) => powers.flatMap((power) => steps.map((step) => Number((step * power).toPrecision(1))));
  const choices = LOG_STEPS.map((steps) => ticksOf(steps).filter((tick) => tick >= from && tick <= to));
  return choices.find((ticks) => ticks.length > 2) || niceTicks(from, to, most);
}

function valueTicks(from, to, most, { log, unit }) {
  if (log) return logTicks(from, to, most);
  const isBinary = unit === 'bytes' || unit === 'rate';
  const scale = isBinary ? 1024 ** Math.max(0, Math.floor(Math.log(Math.max(to, 1)) / Math.log(1024))) : 1;
  return niceTicks(from / scale, to / scale, most).map((tick) => tick * scale);
}

// Returns a few round times.
function timeTicks(from, to, most) {
  const widths = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];
  const width = widths.find((size) => (to - from) / size <= Math.max(2, most)) ?? 2592000;
  const ticks = [];
  for (let time = Math.ceil(from / width) * width; time <= to; time += width) ticks.push(time);
  return ticks;
}
