// Computes curves: the x axis, smoothing, the range of the y axis. Pure: arrays in, arrays out.
'use strict';

const AXES = ['steps', 'tokens', 'hours', 'clock'];
const GAP = 4; // times the usual distance of two points: further apart, nothing was measured between them

// Returns the curve's x in steps, tokens, hours since the run began or Unix seconds; null where this run does not tell it.
function xOf(series, axis, { tokens_per_step: tokensPerStep, started }) {
  if (axis === 'steps') return series.steps;
  if (axis === 'tokens') return tokensPerStep ? series.steps.map((step) => step * tokensPerStep) : null;
  if (axis === 'clock') return series.times;
  const first = isNumber(started) ? started : series.times[0];
  return series.times.map((time) => (time - first) / 3600);
}

// Removes points whose x goes back, as a chart needs it: after a resume the hours grow, but the steps may not.
function inOrder(x, y) {
  let last = -Infinity;
  const isSound = x.map((value) => isNumber(value) && value > last && ((last = value), true));
  return isSound.every(Boolean) ? [x, y] : [x.filter((_, i) => isSound[i]), y.filter((_, i) => isSound[i])];
}

// Returns the exponential mean of W&B and TensorBoard, without the bias of its start. weight: 0 for none, up to 1.
function smooth(values, weight) {
  let mean = 0;
  let debias = 1;
  return values.map((value) => {
    if (!isNumber(value)) return null;
    mean = mean * weight + value * (1 - weight);
    debias *= weight;
    return mean / (1 - debias);
  });
}

// Returns the ends of the y axis for the values at x in [from, to]. clipped: cuts off the outermost hundredths and what is
// ten times the distance of the quartiles beyond them.
// steady: the figure hardly changes in a good run, and its noise must not fill the chart. span: ends that are always shown.
// most: about how many ticks the axis has room for.
function yRange(curves, [from, to], { clipped, log, steady, span, most }) {
  const values = [];
  for (const { x, y, low: lows, high: highs } of curves) {
    for (let i = Math.max(0, indexAt(x, from)); i < x.length && x[i] <= to; i += 1)
      for (const value of lows ? [lows[i], highs[i]] : [y[i]])
        if (x[i] >= from && isNumber(value) && (!log || value > 0)) values.push(value);
  }
  if (!values.length) return log ? [0.1, 1] : span || [0, 1];
  const sorted = Float64Array.from(values).sort();
  const cut = clipped ? Math.floor(sorted.length * 0.02) : 0;
  let [low, high] = [sorted[cut], sorted[sorted.length - 1 - cut]];
  if (clipped) { // a hundredth of few points is none
    const [lower, upper] = [sorted[sorted.length >> 2], sorted[(3 * sorted.length) >> 2]];
    const distance = 10 * (upper - lower) || Infinity; // 0: constant most of the time, with ends such as a warm-up's
    low = Math.max(low, sorted.find((value) => value >= lower - distance));
    high = Math.min(high, sorted.findLast((value) => value <= upper + distance));
  }
  if (log) return roundLow([low / 1.04, high * 1.04], logTicks, most);
  if (span) return [Math.min(low, span[0]), Math.max(high, span[1])];
  if (steady) {
    const missing = Math.max(0, Math.abs(sorted[sorted.length >> 1]) * 0.1 - (high - low)) / 2;
    [low, high] = [Math.min(low, Math.max(0, low - missing)), high + missing];
  }
  const room = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1;
  return roundLow([low >= 0 && low - room < 0 ? 0 : low - room, high + room], niceTicks, most);
}

// Moves the lower end down to a tick where that costs little room, so that a label stands below the curve.
function roundLow([low, high], ticksOf, most) {
  const scale = ticksOf === logTicks ? Math.log : Number;
  const [from, to] = ticksOf === logTicks ? [low / 10, high] : [low - (high - low) / 2, high];
  const below = ticksOf(from, to, 1.5 * most).findLast((tick) => tick <= low && (tick >= 0 || low < 0));
  const isNear = isNumber(below) && scale(low) - scale(below) < 0.25 * (scale(high) - scale(low));
  return [isNear ? below : low, high];
}

// Returns the index of the last x that is not after the value; -1 before the first.
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

// Returns the value of a curve at x, on the line between its two nearest points; null before its first and after its last.
function valueOn(xs, y, x) {
  const index = indexAt(xs, x);
  if (index < 0 || x > xs.at(-1)) return null;
  if (xs[index] === x || !isNumber(y[index]) || !isNumber(y[index + 1])) return y[index] ?? null;
  return y[index] + ((y[index + 1] - y[index]) * (x - xs[index])) / (xs[index + 1] - xs[index]);
}

// Returns the mean of several curves, and the mean less and plus one standard deviation, where all of them have a value.
function meanOf(curves) {
  const guide = curves.reduce((a, b) => (b.x.length < a.x.length ? b : a));
  const mean = { x: [], y: [], low: [], high: [] };
  for (const x of guide.x) {
    const values = curves.map((curve) => valueOn(curve.x, curve.y, x));
    if (!values.every(isNumber)) continue;
    const middle = values.reduce((sum, value) => sum + value, 0) / values.length;
    const squares = values.reduce((sum, value) => sum + (value - middle) ** 2, 0);
    const spread = Math.sqrt(squares / Math.max(1, values.length - 1));
    mean.x.push(x);
    mean.y.push(middle);
    mean.low.push(middle - spread);
    mean.high.push(middle + spread);
  }
  return mean;
}

// Returns the mean of a curve in each of `count` equal parts of [from, to]. A part without a point repeats the part
// before it, unless the points are further apart than usual: then nothing was measured there, and it is null.
function binned(x, y, [from, to], count) {
  const sums = new Float64Array(count);
  const sizes = new Uint32Array(count);
  const width = (to - from) / count || 1;
  for (let i = Math.max(0, indexAt(x, from)); i < x.length && x[i] <= to; i += 1) {
    const bin = x[i] === to ? count - 1 : Math.floor((x[i] - from) / width);
    if (bin >= 0 && bin < count && isNumber(y[i])) {
      sums[bin] += y[i];
      sizes[bin] += 1;
    }
  }
  const gap = usualGap(x) * GAP;
  const means = new Array(count).fill(null);
  let next = indexAt(x, from);
  for (let bin = 0; bin < count; bin += 1) {
    const at = from + (bin + 0.5) * width;
    while (next + 1 < x.length && x[next + 1] <= at) next += 1;
    if (sizes[bin]) means[bin] = sums[bin] / sizes[bin];
    else if (next >= 0 && next + 1 < x.length && x[next + 1] - x[next] <= gap) means[bin] = y[next];
  }
  return means;
}

// Returns the median distance of two points.
function usualGap(x) {
  if (x.length < 3) return Infinity;
  const gaps = new Float64Array(x.length - 1).map((_, i) => x[i + 1] - x[i]).sort();
  return gaps[gaps.length >> 1];
}

function median(values) {
  const sorted = values.filter(isNumber).sort((a, b) => a - b);
  const half = sorted.length >> 1;
  if (!sorted.length) return null;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}
