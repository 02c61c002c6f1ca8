// Arithmetic of curves: what stands on the x axis, smoothing, which y are shown. Pure: arrays in, arrays out.
'use strict';

// The curve's x in steps, tokens or hours since it began; null where that is not known of this run
function xOf(series, axis, { tokensPerStep, started }) {
  if (axis === 'steps') return series.steps;
  if (axis === 'tokens') return tokensPerStep ? series.steps.map((step) => step * tokensPerStep) : null;
  const first = isNumber(started) ? started : series.times[0];
  return series.times.map((time) => (time - first) / 3600);
}

// An x that never goes back, as a chart needs it: after a resume the hours grow and the steps may not
function inOrder(x, y) {
  let last = -Infinity;
  const kept = x.map((value) => (isNumber(value) && value > last ? ((last = value), true) : false));
  return kept.every(Boolean) ? [x, y] : [x.filter((_, i) => kept[i]), y.filter((_, i) => kept[i])];
}

// The exponential mean of W&B and TensorBoard, freed of the bias of its start. weight: 0 none, towards 1 more.
function smooth(values, weight) {
  if (!weight) return values;
  let mean = 0;
  let debias = 1;
  return values.map((value) => {
    if (!isNumber(value)) return null;
    mean = mean * weight + value * (1 - weight);
    debias *= weight;
    return mean / (1 - debias);
  });
}

// Of the values at x in [from, to]: where the y axis begins and ends. clipped: the outermost hundredths may be cut off.
// steady: the figure hardly changes in a good run, and its noise is not blown up to fill the chart.
function yRange(lines, [from, to], { clipped, log, steady }) {
  const seen = [];
  for (const [x, y] of lines) {
    for (let i = 0; i < x.length; i += 1) {
      if (x[i] >= from && x[i] <= to && isNumber(y[i]) && (!log || y[i] > 0)) seen.push(y[i]);
    }
  }
  if (!seen.length) return [log ? 0.1 : 0, 1];
  seen.sort((a, b) => a - b);
  const cut = clipped ? Math.floor(seen.length * 0.02) : 0;
  let [low, high] = [seen[cut], seen[seen.length - 1 - cut]];
  if (steady) {
    const least = Math.abs(seen[seen.length >> 1]) * 0.1;
    [low, high] = [
      Math.min(low, Math.max(0, low - (least - (high - low)) / 2)),
      Math.max(high, high + (least - (high - low)) / 2),
    ];
  }
  if (log) return [low / 1.04, high * 1.04];
  const room = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

// The index of the last x that is not after the value; -1 before the first
function indexAt(x, value) {
  let [low, high] = [0, x.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

function nearest(x, value) {
  const index = indexAt(x, value);
  if (index < 0) return x.length ? 0 : -1;
  return index + 1 < x.length && x[index + 1] - value < value - x[index] ? index + 1 : index;
}

// The mean of a curve in each of so many equal parts of [from, to]. A part without a point has that of the part before
// it, unless the points are further apart than they usually are: then nothing was measured there, and it is null.
function binned(x, y, [from, to], count) {
  const sums = new Float64Array(count);
  const sizes = new Uint32Array(count);
  const width = (to - from) / count || 1;
  for (let i = 0; i < x.length; i += 1) {
    const bin = x[i] === to ? count - 1 : Math.floor((x[i] - from) / width);
    if (bin >= 0 && bin < count && isNumber(y[i])) {
      sums[bin] += y[i];
      sizes[bin] += 1;
    }
  }
  const gap = usualGap(x) * 4;
  const found = new Array(count).fill(null);
  let next = indexAt(x, from);
  for (let bin = 0; bin < count; bin += 1) {
    const at = from + (bin + 0.5) * width;
    while (next + 1 < x.length && x[next + 1] <= at) next += 1;
    if (sizes[bin]) found[bin] = sums[bin] / sizes[bin];
    else if (next >= 0 && next + 1 < x.length && x[next + 1] - x[next] <= gap) found[bin] = y[next];
  }
  return found;
}

function usualGap(x) {
  if (x.length < 3) return Infinity;
  const gaps = x
    .slice(1)
    .map((value, i) => value - x[i])
    .sort((a, b) => a - b);
  return gaps[Math.floor(gaps.length / 2)];
}

function median(values) {
  const known = values.filter(isNumber).sort((a, b) => a - b);
  if (!known.length) return null;
  const half = known.length >> 1;
  return known.length % 2 ? known[half] : (known[half - 1] + known[half]) / 2;
}

// A few round values in [from, to]
function niceTicks(from, to, most) {
  const rough = (to - from) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const width = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const ticks = [];
  for (let tick = Math.ceil(from / width) * width; tick <= to + width * 1e-9; tick += width)
    ticks.push(Number(tick.toPrecision(12)));
  return ticks;
}

function binaryTicks(from, to) {
  const unit = 1024 ** Math.max(0, Math.floor(Math.log(Math.max(to, 1)) / Math.log(1024)));
  return niceTicks(from / unit, to / unit, 4).map((tick) => tick * unit);
}
