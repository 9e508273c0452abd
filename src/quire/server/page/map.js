// The canvas of the blocks: one cell a block, as far as blocks were touched so far.

const PINNED = 2, HOLDER = 4;
const GOLDEN = 0.618034;

// Hues from green over blue to red: none is that of idle blocks.
export const colour = (number) => `hsl(${75 + 290 * ((number * GOLDEN) % 1)} 52% 48%)`;

export class BlockMap {
  constructor(canvas, onBlock) {
    this.canvas = canvas;
    this.lit = null;
    this.litCells = new Set();
    this.cursor = null;
    this.isDue = false;
    canvas.addEventListener("click", (event) => this.pick(event.offsetX, event.offsetY, onBlock));
    canvas.addEventListener("keydown", (event) => this.step(event, onBlock));
    addEventListener("resize", () => this.redraw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
  }

  layout(info) {
    this.info = info;
    const total = info.pools.reduce((sum, pool) => sum + pool.cells, 0);
    this.states = new Uint8Array(total);
    this.owners = new Uint32Array(total);
    let first = 0;
    this.pools = info.pools.map((pool) => { const start = first; first += pool.cells; return { ...pool, first: start, touched: 1 }; });
  }

  // Applies runs of (gap, length, state, owner), each a LEB128 number.
  update(text) {
    const bytes = Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
    let at = 0, cell = 0;
    const next = () => {
      let value = 0, scale = 1, byte;
      do { byte = bytes[at]; at += 1; value += (byte & 127) * scale; scale *= 128; } while (byte > 127);
      return value;
    };
    while (at < bytes.length) {
      cell += next();
      const end = cell + next(), state = next(), owner = next();
      this.states.fill(state, cell, end);
      this.owners.fill(owner, cell, end);
      for (const pool of this.pools) if (cell >= pool.first && cell < pool.first + pool.cells) pool.touched = Math.max(pool.touched, end - pool.first);
      cell = end;
    }
    this.redraw();
  }

  // Dims all cells but those of a request: those that show its colour, and the cells of its block tables.
  light(number, samples = []) {
    this.lit = number;
    const onDevice = this.pools.filter((pool) => pool.tier === "device").length;
    this.litCells = new Set(samples.flatMap(({ status, tables }) =>
      tables.flatMap((table, idx) => table.map((block) => this.pools[idx + (status === "swapped" ? onDevice : 0)].first + block))));
    this.redraw();
  }

  redraw() {
    if (this.isDue || !this.info) return;
    this.isDue = true;
    requestAnimationFrame(() => { this.isDue = false; this.draw(); });
  }

  draw() {
    const { canvas } = this, width = canvas.clientWidth, ratio = devicePixelRatio || 1;
    if (!width) return;
    const style = getComputedStyle(canvas), ink = (name) => style.getPropertyValue(`--${name}`);
    // A quarter more than was touched, so that the map has something free to show.
    const shown = this.pools.map((pool) => Math.min(pool.cells - 1, Math.max(64, Math.ceil(pool.touched * 1.25))));
    const total = shown.reduce((sum, each) => sum + each, 0);
    const side = Math.max(3, Math.min(16, Math.floor(Math.sqrt((width * 260) / total))));
    const columns = Math.floor(width / side), gap = side > 5 ? 1 : 0;
    this.places = [];
    let top = 0;
    this.pools.forEach((pool, idx) => {
      const label = this.pools.length > 1 ? 16 : 0;
      this.places.push({ pool, idx, top: top + label, label: top + 12, shown: shown[idx] });
      top += label + Math.ceil(shown[idx] / columns) * side + 6;
    });
    Object.assign(this, { side, columns });
    canvas.width = width * ratio;
    canvas.height = top * ratio;
    canvas.style.height = `${top}px`;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const inks = { free: ink("free"), idle: ink("idle"), others: ink("others"), pin: ink("pin"), card: ink("card"), soft: ink("soft") };
    for (const place of this.places) {
      if (this.pools.length > 1) {
        pen.fillStyle = inks.soft;
        pen.font = "12px system-ui, sans-serif";
        pen.fillText(`${place.pool.tier}, cache group ${place.pool.group}`, 0, place.label);
      }
      for (let block = 1; block <= place.shown; block += 1) this.cell(pen, place, block, side - gap, inks);
    }
  }

  cell(pen, { pool, idx, top }, block, side, inks) {
    const state = this.states[pool.first + block], owner = this.owners[pool.first + block];
    const x = ((block - 1) % this.columns) * this.side, y = top + Math.floor((block - 1) / this.columns) * this.side;
    const holders = Math.floor(state / HOLDER);
    const isDim = this.lit !== null && owner !== this.lit && !this.litCells.has(pool.first + block);
    pen.globalAlpha = isDim ? 0.22 : 1;
    if (!state) pen.fillStyle = inks.free;
    else if (!holders) pen.fillStyle = inks.idle;
    else pen.fillStyle = owner ? colour(owner) : state & PINNED ? inks.idle : inks.others;
    pen.fillRect(x, y, side, side);
    if (holders > 1 && side > 4) {
      // The core grows with the number of holders.
      const core = side * Math.min(0.7, 0.25 + 0.07 * holders), edge = (side - core) / 2;
      pen.fillStyle = inks.card;
      pen.fillRect(x + edge, y + edge, core, core);
    }
    if (state & PINNED) { pen.strokeStyle = inks.pin; pen.lineWidth = 1.5; pen.strokeRect(x + 0.75, y + 0.75, side - 1.5, side - 1.5); }
    if (this.cursor && this.cursor.idx === idx && this.cursor.block === block) {
      pen.globalAlpha = 1;
      pen.strokeStyle = inks.pin;
      pen.lineWidth = 2;
      pen.strokeRect(x, y, side, side);
    }
  }

  pick(x, y, onBlock) {
    const place = this.places?.findLast((each) => y >= each.top), column = Math.floor(x / this.side);
    if (!place || column >= this.columns) return;
    const block = Math.floor((y - place.top) / this.side) * this.columns + column + 1;
    if (block > place.shown) return;
    this.cursor = { idx: place.idx, block };
    this.redraw();
    onBlock(place.idx, block);
  }

  // Arrows move over the cells, Enter opens one.
  step(event, onBlock) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns };
    if (event.key === "Enter" && this.cursor) onBlock(this.cursor.idx, this.cursor.block);
    if (!(event.key in moves) || !this.places) return;
    event.preventDefault();
    this.cursor ??= { idx: 0, block: 1 - moves[event.key] };
    const place = this.places[this.cursor.idx];
    this.cursor.block = Math.min(place.shown, Math.max(1, this.cursor.block + moves[event.key]));
    this.redraw();
  }
}
