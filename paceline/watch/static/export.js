// Saves a chart as it is shown: as a picture, or its points as a table.
'use strict';

const PICTURE = { scale: 2, head: 34 }; // the scale of a picture, and room for the chart's name

// Saves the chart as PNG, with its name and the names of its runs, on an opaque background.
async function savePicture(chart) {
  const { width, height, name, lines, view } = chart;
  const canvas = el('canvas', { width: width * PICTURE.scale, height: (height + PICTURE.head) * PICTURE.scale });
  const context = canvas.getContext('2d');
  context.scale(PICTURE.scale, PICTURE.scale);
  context.fillStyle = ink('card');
  context.fillRect(0, 0, width, height + PICTURE.head);
  let left = 12;
  const write = (text, colour, weight) => {
    Object.assign(context, { font: `${weight} 13px system-ui, sans-serif`, fillStyle: ink(colour) });
    context.fillText(text, left, 22);
    left += context.measureText(text).width + 14;
  };
  write(name, 'ink', 600);
  write(`by ${view.axis}`, 'muted', 400);
  for (const { label, colour } of lines) write(label, colour, 400);
  context.translate(0, PICTURE.head);
  chart.paint(context);
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, 'image/png'));
  download(fileName(chart, 'png'), blob);
}

// Saves the points that are shown as CSV: a column for x, and one for each run.
function saveTable(chart) {
  const { name, lines, view } = chart;
  const [from, to] = view.shown;
  const quote = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const rows = new Map();
  lines.forEach(({ x, y }, column) =>
    x.forEach((at, i) => {
      if (at < from || at > to || !isNumber(y[i])) return;
      if (!rows.has(at)) rows.set(at, new Array(lines.length).fill(''));
      rows.get(at)[column] = y[i];
    }),
  );
  const heads = lines.length > 1 ? lines.map(({ label }) => `${name} of ${label}`) : [name];
  const body = [...rows].sort(([a], [b]) => a - b).map(([at, values]) => [at, ...values].join());
  const table = [[view.axis, ...heads].map(quote).join(), ...body];
  download(fileName(chart, 'csv'), `${table.join('\n')}\n`, 'text/csv');
}

function fileName({ lines, name }, ending) {
  const runs = lines.map(({ label }) => label).join('-');
  return `${runs.replace(/[^\w.-]+/g, '_').slice(0, 80)}-${name}.${ending}`;
}
