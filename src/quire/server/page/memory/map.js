// The canvas of the blocks: one cell a block, as far as blocks were touched so far, at any zoom.
//
// A frame fills an image with a pixel a cell and scales it up: 65,536 cells cost no more than their pixels. What needs
// shapes (holders, pins, flashes) is drawn over the visible cells, where cells are large enough to have any.

const PINNED = 2,
  MEDIA = 256;
const holdersIn = (state) => (state & 255) >> 2;
const GOLDEN = 0.618034;
const FLASH_MS = 900;
const MAX_HEIGHT = 300,
  MAX_SIDE = 16,
  MAX_ZOOM = 64,
  MAX_DISK = 4096;

// Hues from green over blue to red: none is that of idle blocks.
const hue = (number) => 75 + 290 * ((number * GOLDEN) % 1);
export const colour = (number) => `hsl(${hue(number)} 52% 48%)`;

// A colour as the four bytes of a pixel, of "#rrggbb".
const pixelOf = (text) => {
  const rgb = parseInt(text.trim().slice(1), 16);
  return (0xff000000 | ((rgb & 255) << 16) | (rgb & 0xff00) | (rgb >> 16)) >>> 0;
};

function pixelOfOwner(number) {
  const part = (shift) => {
    const at = (shift + hue(number) / 30) % 12;
    return Math.round(255 * (0.48 - 0.2496 * Math.max(-1, Math.min(at - 3, 9 - at, 1))));
  };
  return (0xff000000 | (part(4) << 16) | (part(8) << 8) | part(0)) >>> 0;
}

function faded(pixel, paper) {
  let mixed = 0xff;
  for (const shift of [16, 8, 0])
    mixed = mixed * 256 + Math.round(0.22 * ((pixel >> shift) & 255) + 0.78 * ((paper >> shift) & 255));
  return mixed >>> 0;
}

export class BlockMap {
  // `onBlock` is called with the pool and the block of a cell that was chosen, `onMove` where the cursor moved,
  // `onPoint` with the cell under the mouse and where that is, null for none.
  constructor(canvas, { onBlock, onMove, onPoint }) {
    Object.assign(this, {
      canvas,
      onBlock,
      onMove,
      onPoint,
      space: canvas.parentElement,
      box: canvas.parentElement.parentElement,
    });
    Object.assign(this, {
      lit: null,
      litCells: new Set(),
      cursor: null,
      isDue: false,
      zoom: 1,
      flashes: new Map(),
      disk: 0,
    });
    this.image = document.createElement("canvas");
    this.owned = new Map();
    this.isCalm = matchMedia("(prefers-reduced-motion: reduce)");
    canvas.addEventListener("click", (event) => this.pick(event.offsetX, event.offsetY));
    canvas.addEventListener("mousemove", (event) => this.point(event));
    canvas.addEventListener("mouseleave", () => this.onPoint(null));
    canvas.addEventListener("keydown", (event) => this.press(event));
    this.box.addEventListener("scroll", () => this.redraw());
    this.box.addEventListener(
      "wheel",
      (event) => {
        if (!event.ctrlKey) return;
        event.preventDefault();
        this.scale(event.deltaY < 0 ? 1.25 : 0.8);
      },
      { passive: false },
    );
    addEventListener("resize", () => this.redraw());
    addEventListener("themechange", () => this.redraw());
  }

  layout(info) {
    this.info = info;
    const total = info.pools.reduce((sum, pool) => sum + pool.cells, 0);
    this.states = new Uint16Array(total);
    this.owners = new Uint32Array(total);
    let first = 0;
    this.pools = info.pools.map((pool, idx) => {
      const start = first;
      first += pool.cells;
      return { ...pool, idx, first: start, touched: 1 };
    });
  }

  // Applies runs of (gap, length, state, owner), each a LEB128 number.
  update(text) {
    const bytes = Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
    let at = 0,
      cell = 0;
    const next = () => {
      let value = 0,
        scale = 1,
        byte;
      do {
        byte = bytes[at];
        at += 1;
        value += (byte & 127) * scale;
        scale *= 128;
      } while (byte > 127);
      return value;
    };
    while (at < bytes.length) {
      cell += next();
      const end = cell + next(),
        state = next(),
        owner = next();
      this.states.fill(state, cell, end);
      this.owners.fill(owner, cell, end);
      for (const pool of this.pools) {
        if (cell < pool.first + pool.cells && end > pool.first) {
          pool.touched = Math.max(pool.touched, Math.min(end, pool.first + pool.cells) - pool.first);
        }
      }
      cell = end;
    }
    this.redraw();
  }

  // Marks cells for a moment, by the names of what happened to them.
  flash(recent) {
    const until = performance.now() + FLASH_MS;
    for (const [name, cells] of Object.entries(recent))
      for (const cell of cells) this.flashes.set(cell, { name, until });
    if (this.flashes.size) this.redraw();
  }

  // Dims all cells but those of a request: those that show its colour, and the cells of its block tables.
  light(number, samples = []) {
    this.lit = number;
    const onDevice = this.pools.filter((pool) => pool.tier === "device").length;
    this.litCells = new Set(
      samples.flatMap(({ status, tables }) =>
        tables.flatMap((table, idx) =>
          table.map((block) => this.pools[idx + (status === "swapped" ? onDevice : 0)].first + block),
        ),
      ),
    );
    this.redraw();
  }

  scale(factor) {
    this.zoom = factor === null ? 1 : Math.min(MAX_ZOOM, Math.max(1, this.zoom * factor));
    this.redraw();
  }

  redraw() {
    if (this.isDue || !this.info) return;
    this.isDue = true;
    requestAnimationFrame(() => {
      this.isDue = false;
      this.draw();
    });
  }

  // ---- a frame; lengths are pixels of the device ----

  // Gives each pool its place for cells of a size; returns the height of all.
  place(width, side, ratio) {
    const columns = Math.max(1, Math.floor(width / side)),
      label = this.strips.length > 1 ? 17 * ratio : 0;
    let top = 0;
    for (const strip of this.strips) {
      strip.top = top + label;
      strip.rows = Math.ceil(strip.shown / columns);
      top = strip.top + strip.rows * side + 4 * ratio;
    }
    Object.assign(this, { side, columns });
    return top;
  }

  measure() {
    const ratio = devicePixelRatio || 1,
      width = Math.floor(this.box.clientWidth * ratio),
      most = MAX_HEIGHT * ratio;
    // A quarter more than was touched, so that the map has something free to show.
    this.strips = this.pools.map((pool) => ({
      pool,
      shown: Math.min(pool.cells - 1, Math.max(64, Math.ceil(pool.touched * 1.25))),
    }));
    if (this.disk)
      this.strips.push({ pool: { tier: "disk", idx: -1, first: -1 }, shown: Math.min(MAX_DISK, this.disk) });
    const total = this.strips.reduce((sum, strip) => sum + strip.shown, 0);
    let side = Math.max(1, Math.min(MAX_SIDE * ratio, Math.floor(Math.sqrt((width * most) / total))));
    while (side > 1 && this.place(width, side, ratio) > most) side -= 1;
    const height = this.place(width, Math.min(40 * ratio, Math.max(1, Math.round(side * this.zoom))), ratio);
    return { ratio, width, height, seen: Math.min(height, most) };
  }

  draw() {
    if (!this.box.clientWidth) return;
    const { canvas, space, box } = this,
      { ratio, width, height, seen } = this.measure();
    space.style.height = `${height / ratio}px`;
    if (canvas.width !== width || canvas.height !== Math.ceil(seen))
      Object.assign(canvas, { width, height: Math.ceil(seen) });
    canvas.style.height = `${seen / ratio}px`;
    const pen = canvas.getContext("2d"),
      style = getComputedStyle(canvas),
      ink = (name) => style.getPropertyValue(`--${name}`);
    const inks = Object.fromEntries(
      ["free", "idle", "others", "pin", "card", "soft", "disk", "copied", "merged", "evicted", "ink"].map((name) => [
        name,
        ink(name).trim(),
      ]),
    );
    const offset = Math.min(box.scrollTop * ratio, height - seen);
    pen.clearRect(0, 0, width, canvas.height);
    pen.imageSmoothingEnabled = false;
    for (const strip of this.strips) this.drawStrip(pen, strip, offset, seen, ratio, inks);
    this.drawFlashes(pen, offset, seen, ratio, inks);
  }

  drawStrip(pen, strip, offset, seen, ratio, inks) {
    const { side, columns } = this,
      { pool, shown, top } = strip;
    if (this.strips.length > 1 && top - offset > 0 && top - offset < seen + 17 * ratio) {
      pen.fillStyle = inks.soft;
      pen.font = `${12 * ratio}px system-ui, sans-serif`;
      const group =
        this.info.pools.some((each) => each.group) && pool.tier !== "disk" ? `, cache group ${pool.group}` : "";
      pen.fillText(pool.tier + group, 0, top - offset - 5 * ratio);
    }
    const first = Math.max(0, Math.floor((offset - top) / side));
    const last = Math.min(strip.rows, Math.ceil((offset + seen - top) / side));
    if (last <= first) return;
    const rows = last - first,
      start = first * columns,
      count = Math.min(shown - start, rows * columns);
    const cells = new ImageData(columns, rows);
    this.paint(new Uint32Array(cells.data.buffer), pool.first + 1 + start, count, inks);
    Object.assign(this.image, { width: columns, height: rows });
    this.image.getContext("2d").putImageData(cells, 0, 0);
    const y = top - offset + first * side;
    pen.drawImage(this.image, 0, 0, columns, rows, 0, y, columns * side, rows * side);
    if (side >= 4 * ratio) {
      pen.fillStyle = inks.card;
      for (let column = 1; column <= columns; column += 1) pen.fillRect(column * side - ratio, y, ratio, rows * side);
      for (let row = 1; row <= rows; row += 1) pen.fillRect(0, y + row * side - ratio, columns * side, ratio);
      if (pool.first >= 0) this.drawShapes(pen, pool, start, count, y, ratio, inks);
    }
  }

  // The pixels of consecutive cells.
  paint(pixels, start, count, inks) {
    const [free, idle, others, paper, disk] = ["free", "idle", "others", "card", "disk"].map((name) =>
      pixelOf(inks[name]),
    );
    if (start <= 0) {
      pixels.fill(disk, 0, count);
      return;
    }
    const { states, owners, owned, lit, litCells } = this;
    for (let at = 0; at < count; at += 1) {
      const cell = start + at,
        state = states[cell],
        owner = owners[cell];
      let pixel = free;
      if (holdersIn(state)) {
        if (!owner) pixel = state & PINNED ? idle : others;
        else if ((pixel = owned.get(owner)) === undefined) owned.set(owner, (pixel = pixelOfOwner(owner)));
      } else if (state) pixel = idle;
      if (lit !== null && owner !== lit && !litCells.has(cell)) pixel = faded(pixel, paper);
      pixels[at] = pixel;
    }
    if (owned.size > 4096) owned.clear();
  }

  // The hatches of blocks with rows of images, the cores of shared blocks and the outlines of pinned ones.
  drawShapes(pen, pool, start, count, top, ratio, inks) {
    const inner = this.side - ratio;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    for (let at = 0; at < count; at += 1) {
      const cell = pool.first + 1 + start + at,
        state = this.states[cell],
        holders = holdersIn(state);
      const x = (at % this.columns) * this.side,
        y = top + Math.floor(at / this.columns) * this.side;
      if (state & MEDIA) {
        pen.strokeStyle = inks.card;
        pen.lineWidth = Math.max(ratio, inner / 8);
        pen.beginPath();
        for (const [from, to] of [
          [0, 0.5],
          [0, 1],
          [0.5, 1],
        ]) {
          pen.moveTo(x + from * inner, y + to * inner);
          pen.lineTo(x + to * inner, y + from * inner);
        }
        pen.stroke();
      }
      if (holders > 1) {
        // The core grows with the number of holders, which is written where it has room.
        const core = inner * Math.min(0.7, 0.25 + 0.07 * holders),
          edge = (inner - core) / 2;
        pen.fillStyle = inks.card;
        pen.fillRect(x + edge, y + edge, core, core);
        if (inner > 18 * ratio) {
          pen.fillStyle = inks.ink;
          pen.font = `${core * 0.62}px system-ui, sans-serif`;
          pen.fillText(holders, x + inner / 2, y + inner / 2 + ratio);
        }
      }
      if (state & PINNED) {
        pen.strokeStyle = inks.pin;
        pen.lineWidth = 1.5 * ratio;
        pen.strokeRect(x + 0.75 * ratio, y + 0.75 * ratio, inner - 1.5 * ratio, inner - 1.5 * ratio);
      }
    }
    pen.textAlign = "start";
    pen.textBaseline = "alphabetic";
  }

  drawFlashes(pen, offset, seen, ratio, inks) {
    const now = performance.now(),
      size = Math.max(this.side, 5 * ratio),
      pad = (size - this.side) / 2;
    const mark = (strip, idx, draw) => {
      const x = (idx % this.columns) * this.side,
        y = strip.top - offset + Math.floor(idx / this.columns) * this.side;
      if (idx < strip.shown && y > -size && y < seen) draw(x - pad, y - pad);
    };
    for (const [cell, { name, until }] of this.flashes) {
      if (until <= now) {
        this.flashes.delete(cell);
        continue;
      }
      const strip = this.strips.find(({ pool }) => cell >= pool.first && cell < pool.first + pool.cells);
      pen.globalAlpha = this.isCalm.matches ? 1 : (until - now) / FLASH_MS;
      pen.strokeStyle = pen.fillStyle = inks[name];
      pen.lineWidth = 2 * ratio;
      const draw =
        this.side < 6 * ratio
          ? (x, y) => pen.fillRect(x, y, size, size)
          : (x, y) => pen.strokeRect(x, y, size - ratio, size - ratio);
      if (strip) mark(strip, cell - strip.pool.first - 1, draw);
    }
    pen.globalAlpha = 1;
    if (this.cursor && this.strips[this.cursor.idx]) {
      pen.strokeStyle = inks.pin;
      pen.lineWidth = 2 * ratio;
      mark(this.strips[this.cursor.idx], this.cursor.block - 1, (x, y) => pen.strokeRect(x, y, size, size));
    }
    // The page has ten frames of the map in a second, and flashes fade as smoothly.
    if (this.flashes.size) setTimeout(() => this.redraw(), this.isCalm.matches ? FLASH_MS : 100);
  }

  // ---- choosing a cell ----

  // The strip and the block at a place on the canvas, null where there is none.
  at(x, y) {
    if (!this.strips) return null;
    const ratio = devicePixelRatio || 1,
      down = (y + this.box.scrollTop) * ratio,
      column = Math.floor((x * ratio) / this.side);
    const strip = this.strips.findLast((each) => down >= each.top);
    if (!strip || column >= this.columns) return null;
    const block = Math.floor((down - strip.top) / this.side) * this.columns + column + 1;
    return block > strip.shown || strip.pool.first < 0 ? null : { strip, block };
  }

  pick(x, y) {
    const found = this.at(x, y);
    if (!found) return;
    this.cursor = { idx: found.strip.pool.idx, block: found.block };
    this.redraw();
    this.onBlock(this.cursor.idx, this.cursor.block);
  }

  point({ offsetX, offsetY, clientX, clientY }) {
    const found = this.at(offsetX, offsetY);
    this.onPoint(found && this.cellOf(found.strip.pool, found.block), clientX, clientY);
  }

  // Arrows move over the cells, Enter opens one; plus, minus and 0 zoom.
  press(event) {
    if (!this.strips || event.ctrlKey || event.metaKey || event.altKey) return;
    const factor = { "+": 1.5, "=": 1.5, "-": 1 / 1.5, 0: null }[event.key];
    if (factor !== undefined) {
      event.preventDefault();
      this.scale(factor);
      return;
    }
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns };
    if (event.key === "Enter" && this.cursor) this.onBlock(this.cursor.idx, this.cursor.block);
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.cursor ??= { idx: 0, block: 1 - moves[event.key] };
    const strip = this.strips[this.cursor.idx],
      ratio = devicePixelRatio || 1;
    this.cursor.block = Math.min(strip.shown, Math.max(1, this.cursor.block + moves[event.key]));
    const y = (strip.top + Math.floor((this.cursor.block - 1) / this.columns) * this.side) / ratio;
    if (y < this.box.scrollTop || y > this.box.scrollTop + this.box.clientHeight - 24)
      this.box.scrollTop = y - this.box.clientHeight / 2;
    this.redraw();
    this.onMove(this.cellOf(strip.pool, this.cursor.block));
  }

  cellOf(pool, block) {
    const cell = pool.first + block,
      state = this.states[cell],
      owner = this.owners[cell];
    const [isPublished, isPinned, isMedia] = [1, PINNED, MEDIA].map((bit) => Boolean(state & bit));
    return { pool, block, holders: holdersIn(state), isPublished, isPinned, isMedia, owner };
  }
}
