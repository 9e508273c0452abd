// The timeline of running and recent requests, gathered from the events of the map: nothing is asked of the server.

import { count } from "../base/words.js";
import { colour } from "./map.js";

const EVENT_MS = 100,
  WINDOW_MS = 60000,
  LEAST_MS = 10000,
  ROW = 14,
  GUTTER = 52,
  MAX_ROWS = 28,
  MAX_ENDED = 16;

const PHASES = {
  waiting: (row) => (row.num_preemptions ? "preempted" : "queued"),
  swapped: () => "swapped",
  running: (row) => (row.num_computed < row.num_prompt ? "prefill" : "decode"),
};

export class Timeline {
  constructor(canvas, note, onRequest) {
    Object.assign(this, { canvas, note, onRequest, entries: new Map(), rows: [], cursor: null, before: -Infinity });
    canvas.addEventListener("click", (event) => {
      const entry = this.rows[Math.floor(event.offsetY / ROW)];
      if (entry) onRequest(entry.number);
    });
    canvas.addEventListener("keydown", (event) => {
      const move = { ArrowUp: -1, ArrowDown: 1 }[event.key];
      if (event.key === "Enter" && this.rows[this.cursor]) onRequest(this.rows[this.cursor].number);
      if (!move || !this.rows.length) return;
      event.preventDefault();
      this.cursor = Math.min(this.rows.length - 1, Math.max(0, (this.cursor ?? -move) + move));
      this.draw();
    });
  }

  record(requests) {
    const now = performance.now(),
      seen = new Set();
    for (const row of requests) {
      seen.add(row.number);
      const kind = (PHASES[row.status] ?? PHASES.running)(row);
      let entry = this.entries.get(row.number);
      if (!entry)
        this.entries.set(
          row.number,
          (entry = { number: row.number, phases: [], chunks: [], computed: 0, ended: null }),
        );
      const last = entry.phases.at(-1);
      if (last) last.to = now;
      // A prompt that was computed since the event before was never seen in part.
      if (!last && kind === "decode" && now - this.before < 2 * EVENT_MS)
        entry.phases.push({ kind: "prefill", from: now - EVENT_MS, to: now });
      if (last?.kind !== kind) entry.phases.push({ kind, from: now, to: now });
      if (kind === "prefill" && row.num_computed > entry.computed) entry.chunks.push(now);
      entry.computed = row.num_computed;
    }
    this.before = now;
    for (const entry of this.entries.values()) if (!seen.has(entry.number)) entry.ended ??= now;
    const ended = [...this.entries.values()]
      .filter((entry) => entry.ended !== null)
      .sort((one, other) => one.ended - other.ended);
    for (const entry of ended.slice(0, -MAX_ENDED)) this.entries.delete(entry.number);
  }

  // The phases of a request in words, null where it was not seen.
  describe(number) {
    const entry = this.entries.get(number);
    if (!entry) return null;
    const totals = new Map();
    for (const { kind, from, to } of entry.phases) totals.set(kind, (totals.get(kind) ?? 0) + to - from);
    const chunks = entry.chunks.length > 1 ? ` in ${count(entry.chunks.length)} chunks or more` : "";
    return [...totals]
      .map(([kind, ms]) => `${kind} ${(ms / 1000).toFixed(1)} s${kind === "prefill" ? chunks : ""}`)
      .join(", ");
  }

  draw() {
    const { canvas } = this,
      width = canvas.parentElement.clientWidth,
      ratio = devicePixelRatio || 1,
      now = performance.now();
    if (!width) return;
    this.rows = [...this.entries.values()]
      .filter((entry) => !entry.ended || now - entry.ended < WINDOW_MS)
      .slice(-MAX_ROWS);
    const height = Math.max(1, this.rows.length) * ROW;
    const oldest = Math.min(now, ...this.rows.map((entry) => entry.phases[0].from));
    const span = Math.min(WINDOW_MS, Math.max(LEAST_MS, 1.1 * (now - oldest)));
    this.note.textContent = `the last ${Math.round(span / 1000)} s`;
    canvas.hidden = !this.rows.length;
    Object.assign(canvas, { width: width * ratio, height: height * ratio });
    canvas.style.height = `${height}px`;
    canvas.setAttribute("aria-label", `Timeline of ${count(this.rows.length)} requests over the last minute`);
    const pen = canvas.getContext("2d"),
      style = getComputedStyle(canvas),
      ink = (name) => style.getPropertyValue(`--${name}`);
    const at = (time) => GUTTER + (width - GUTTER) * Math.max(0, 1 - (now - time) / span);
    pen.scale(ratio, ratio);
    pen.font = "11px system-ui, sans-serif";
    this.rows.forEach((entry, idx) => {
      const y = idx * ROW;
      pen.fillStyle = colour(entry.number);
      pen.fillRect(0, y + 3, 8, 8);
      pen.fillStyle = ink("soft");
      pen.fillText(`#${entry.number}`, 12, y + 11);
      for (const { kind, from, to } of entry.phases) {
        pen.fillStyle = ink(kind);
        pen.fillRect(at(from), y + 2, Math.max(1.5, at(to) - at(from)), ROW - 4);
      }
      pen.fillStyle = ink("card");
      for (const time of entry.chunks) if (at(time) > GUTTER) pen.fillRect(at(time), y + 2, 1, ROW - 4);
      if (idx === this.cursor && document.activeElement === canvas) {
        pen.strokeStyle = ink("ink");
        pen.strokeRect(0.5, y + 0.5, width - 1, ROW - 1);
      }
    });
  }
}
