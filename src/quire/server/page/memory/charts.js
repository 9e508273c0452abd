// Charts of the last five minutes, a point a second, drawn from totals of which differences are taken.

import { make } from "../base/elements.js";
import { count } from "../base/words.js";

const MOST = 300;
const samples = [];
const CHARTS = [
  [
    "tokens/s",
    (now, then) => (now.totals.generation_tokens - then.totals.generation_tokens) / seconds(now, then),
    (value) => count(Math.round(value)),
  ],
  [
    "prefix hits",
    (now, then) => {
      const queried = now.totals.queried_tokens - then.totals.queried_tokens;
      return queried > 0 ? (now.totals.hit_tokens - then.totals.hit_tokens) / queried : null;
    },
    (value) => `${Math.round(100 * value)} %`,
    1,
  ],
  ["queued", (now) => now.queue.waiting + now.queue.swapped, (value) => count(value)],
  [
    "memory used",
    (now) => now.usage.used / now.usage.num_blocks,
    (value) => `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`,
  ],
  // The median, and as a second line the 90th percentile, over the last minute.
  [
    "first token p50, p90",
    (now) => now.first?.p50 ?? null,
    (value) => `${value.toFixed(2)}\u202fs`,
    null,
    (now) => now.first?.p90 ?? null,
  ],
  [
    "preemptions/s",
    (now, then) => (now.totals.preemptions - then.totals.preemptions) / seconds(now, then),
    (value) => value.toFixed(1),
  ],
];

function named(name) {
  const canvas = make("canvas");
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", name);
  return canvas;
}

const seconds = (now, then) => Math.max(0.001, (now.at - then.at) / 1000);

export function addSample({ totals, queue, usage, first_token_s: first }) {
  samples.push({ at: performance.now(), totals, queue, usage, first });
  if (samples.length > MOST + 1) samples.shift();
}

export function drawCharts(place) {
  if (!place.firstChild) {
    place.append(
      ...CHARTS.map(([name]) =>
        make("figure", {}, make("figcaption", {}, make("span", { textContent: name }), make("b")), named(name)),
      ),
    );
  }
  if (samples.length > 1) CHARTS.forEach((chart, idx) => draw(place.children[idx], chart));
}

function draw(figure, [name, valueOf, textOf, top, secondOf]) {
  const canvas = figure.querySelector("canvas"),
    width = canvas.clientWidth,
    height = 44,
    ratio = devicePixelRatio || 1;
  if (!width) return;
  const values = samples.slice(1).map((now, idx) => valueOf(now, samples[idx]));
  const last = values.findLast((value) => value !== null);
  const others = secondOf ? samples.slice(1).map(secondOf) : [],
    second = others.findLast((value) => value !== null);
  const text = last === undefined ? "\u2013" : textOf(last) + (second === undefined ? "" : `, ${textOf(second)}`);
  figure.querySelector("b").textContent = text;
  canvas.setAttribute("aria-label", `${name}: ${text}`);
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d"),
    style = getComputedStyle(canvas),
    most = top ?? Math.max(...values, ...others, 1e-9);
  pen.scale(ratio, ratio);
  pen.strokeStyle = style.getPropertyValue("--line");
  pen.strokeRect(0.5, 0.5, width - 1, height - 1);
  for (const [line, ink] of [
    [others, "--soft"],
    [values, "--used"],
  ]) {
    pen.strokeStyle = style.getPropertyValue(ink);
    pen.lineWidth = 1.5;
    drawLine(pen, line, width, height, most);
  }
}

function drawLine(pen, values, width, height, most) {
  let isOpen = false;
  pen.beginPath();
  values.forEach((value, idx) => {
    if (value === null) {
      isOpen = false;
      return;
    }
    const x = width - 2 - (values.length - 1 - idx) * ((width - 4) / (MOST - 1)),
      y = height - 3 - (height - 8) * Math.min(1, value / most);
    if (isOpen) pen.lineTo(x, y);
    else {
      pen.moveTo(x - 1, y);
      pen.lineTo(x, y);
    }
    isOpen = true;
  });
  pen.stroke();
}
