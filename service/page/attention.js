// Attention weights as heat maps: all heads small, one of them large with both token axes.

import { bytes } from "./api.js";
import { element, svg } from "./dom.js";
import { label } from "./tokens.js";
import { readSafetensors } from "./safetensors.js";

const KINDS = {
  cross: { title: "Cross", rows: "target", columns: "source",
    help: "What each target token looks at in the source." },
  encoder: { title: "Encoder", rows: "source", columns: "source",
    help: "What each source token looks at in the source." },
  decoder: { title: "Decoder (masked)", rows: "target", columns: "target",
    help: "What each target token looks at among those before it. Later ones are masked." },
};
const HEAT = [236, 92, 38]; // over light and dark alike: the weight is its opacity
const CELL = { least: 12, most: 40 };
const LETTER = 7.6; // width of a character of the axes, about
const LONGEST = 12; // characters of a token on an axis
const UPRIGHT = 4; // characters of the longest where the axis is not turned

/** The maps of the answer at hand. */
export class AttentionView {
  constructor(container) {
    this.kind = "cross";
    this.layer = 0;
    this.head = 0;
    this.status = element("p", { class: "hint", role: "status" },
      "Run a source to see where the model looks.");
    this.kinds = element("div", { class: "segments", role: "group", "aria-label": "Which attention" });
    this.help = element("p", { class: "hint" });
    this.grid = element("div", { class: "heads", role: "group", "aria-label": "Layers and heads" });
    this.large = element("div", { class: "large" });
    this.readout = element("output", { class: "readout" });
    this.table = element("details", { class: "numbers" });
    this.body = element("div", { hidden: true }, this.kinds, this.help,
      element("div", { class: "maps" }, this.grid,
        element("div", { class: "map" }, this.readout, this.large, scale(), this.table)));
    container.append(this.status, this.body);
  }

  /** Ask for an answer's maps with a body of /attention; what was asked for before is dropped. */
  async show(answer, body) {
    this.clear("Reading the attention weights …");
    this.answer = answer;
    try {
      const binary = { ...body, format: "safetensors" };
      const file = readSafetensors(await bytes("attention", binary, this.asking.signal));
      this.tensors = file.tensors;
      this.labels = { source: axis(file, "source"), target: axis(file, "target") };
    } catch (error) {
      if (error.name === "AbortError") return;
      this.clear("");
      throw error;
    }
    this.status.textContent = "";
    this.body.hidden = false;
    this.draw();
  }

  clear(message) {
    this.asking?.abort();
    this.asking = new AbortController();
    this.answer = null;
    this.status.textContent = message;
    this.body.hidden = true;
  }

  /** The weights of one head: `[rows][columns]` in a row. */
  weights(layer, head) {
    const { shape: [, , heads, rows, columns], data } = this.tensors[this.kind];
    const start = (layer * heads + head) * rows * columns;
    return { rows, columns, data: data.subarray(start, start + rows * columns) };
  }

  draw() {
    const [, layers, heads] = this.tensors[this.kind].shape;
    this.layer = Math.min(this.layer, layers - 1);
    this.head = Math.min(this.head, heads - 1);
    this.kinds.replaceChildren(...Object.entries(KINDS).map(([kind, { title }]) => element("button", {
      type: "button", "aria-pressed": String(kind === this.kind), "data-kind": kind,
      click: () => { this.kind = kind; this.draw(); this.kinds.querySelector("[aria-pressed=true]").focus(); },
    }, title)));
    this.help.textContent = KINDS[this.kind].help;
    this.drawGrid(layers, heads);
    this.drawLarge();
  }

  drawGrid(layers, heads) {
    this.grid.style.setProperty("--heads", heads);
    const names = Array.from({ length: heads }, (_, head) =>
      element("span", { class: "name", "aria-hidden": "true" }, `H${head + 1}`));
    const cells = [element("span"), ...names];
    for (let layer = 0; layer < layers; layer += 1) {
      cells.push(element("span", { class: "name", "aria-hidden": "true" }, `L${layer + 1}`));
      for (let head = 0; head < heads; head += 1) cells.push(this.thumbnail(layer, head));
    }
    this.grid.replaceChildren(...cells);
  }

  thumbnail(layer, head) {
    return element("button", {
      type: "button", class: "thumbnail", "aria-label": `Layer ${layer + 1}, head ${head + 1}`,
      "aria-pressed": String(layer === this.layer && head === this.head),
      click: (event) => {
        this.layer = layer;
        this.head = head;
        this.grid.querySelector("[aria-pressed=true]")?.setAttribute("aria-pressed", "false");
        event.currentTarget.setAttribute("aria-pressed", "true");
        this.drawLarge();
      },
    }, painted(this.weights(layer, head)));
  }

  drawLarge() {
    const map = this.weights(this.layer, this.head);
    const { rows, columns } = KINDS[this.kind];
    const names = { rows: this.labels[rows], columns: this.labels[columns] };
    this.cell = { row: map.rows - 1, column: 0 };
    this.upright = names.columns.every((name) => cut(name).length <= UPRIGHT);
    this.margin = { left: room(names.rows), top: this.upright ? 24 : room(names.columns) };
    const { left, top } = this.margin;
    const fitting = (this.large.clientWidth - left - 2) / map.columns;
    this.size = Math.max(CELL.least, Math.min(CELL.most, fitting));
    const [width, height] = [map.columns * this.size, map.rows * this.size];
    const title = `${KINDS[this.kind].title} attention, layer ${this.layer + 1}, head ${this.head + 1}`;
    this.cursor = svg("rect", { class: "cursor", width: this.size, height: this.size });
    const image = svg("image", {
      href: painted(map).toDataURL(), x: left, y: top, width, height,
      preserveAspectRatio: "none", class: "pixels",
    });
    const frame = svg("rect", { x: left, y: top, width, height, class: "frame" });
    const drawing = svg("svg", {
      class: "heat", width: left + width + 2, height: top + height + 2, tabindex: "0", role: "img",
      "aria-label": `${title}. ${map.rows} ${rows} tokens by ${map.columns} ${columns} tokens. `
        + "Arrow keys read the weights.",
      pointermove: (event) => this.point(event, map),
      pointerdown: (event) => this.point(event, map),
      keydown: (event) => this.step(event, map),
    }, image, frame, ...this.axes(names), this.cursor);
    this.names = names;
    this.large.replaceChildren(drawing);
    this.table.replaceChildren(element("summary", {}, "The numbers"));
    this.table.ontoggle = () => this.table.open && this.fillTable(map, title);
    if (this.table.open) this.fillTable(map, title);
    this.read(map, strongest(map));
  }

  axes({ rows, columns }) {
    const { left, top } = this.margin;
    const middle = (i) => (i + 0.5) * this.size;
    return [
      ...rows.map((name, i) => svg("text", {
        x: left - 6, y: top + middle(i), class: "row", "data-row": i,
      }, cut(name))),
      ...columns.map((name, i) => svg("text", {
        transform: `translate(${left + middle(i)} ${top - (this.upright ? 12 : 6)})${this.upright ? "" : " rotate(-90)"}`,
        class: this.upright ? "upright" : "column", "data-column": i,
      }, cut(name))),
    ];
  }

  point(event, map) {
    const drawn = event.currentTarget.getBoundingClientRect();
    const column = Math.floor((event.clientX - drawn.left - this.margin.left) / this.size);
    const row = Math.floor((event.clientY - drawn.top - this.margin.top) / this.size);
    if (row >= 0 && column >= 0 && row < map.rows && column < map.columns) {
      this.read(map, { row, column });
    }
  }

  step(event, map) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    const within = (value, count) => Math.min(Math.max(value, 0), count - 1);
    this.read(map, {
      row: within(this.cell.row + move[0], map.rows),
      column: within(this.cell.column + move[1], map.columns),
    });
  }

  /** Say the weight of a cell, and mark it. */
  read(map, cell) {
    this.cell = cell;
    const weight = map.data[cell.row * map.columns + cell.column];
    this.cursor.setAttribute("x", this.margin.left + cell.column * this.size);
    this.cursor.setAttribute("y", this.margin.top + cell.row * this.size);
    for (const name of this.large.querySelectorAll("text")) {
      const { row, column } = name.dataset;
      const here = row === String(cell.row) || column === String(cell.column);
      name.classList.toggle("here", here);
    }
    this.readout.replaceChildren(
      element("bdi", {}, this.names.rows[cell.row]), " looks at ",
      element("bdi", {}, this.names.columns[cell.column]), " with weight ",
      element("b", {}, weight.toFixed(3)),
    );
  }

  fillTable(map, title) {
    const header = this.names.columns.map((name) => element("th", { scope: "col" }, name));
    const rows = this.names.rows.map((name, row) => {
      const weights = map.data.subarray(row * map.columns, (row + 1) * map.columns);
      return element("tr", {}, element("th", { scope: "row" }, name),
        ...Array.from(weights, (weight) => element("td", {}, weight.toFixed(3))));
    });
    this.table.querySelector("div")?.remove();
    this.table.append(element("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": title },
      element("table", {}, element("caption", {}, title),
        element("thead", {}, element("tr", {}, element("td"), ...header)),
        element("tbody", {}, ...rows))));
  }
}

/** The names of an axis' tokens; ids where the model has no tokenizer. */
function axis({ tensors, metadata }, side) {
  const [names] = JSON.parse(metadata[`${side}_tokens`]);
  const ids = [...tensors[`${side}_ids`].data];
  return ids.map((id, i) => label({ id, text: names?.[i] ?? null }));
}

/** A canvas with a pixel for each weight. */
function painted({ rows, columns, data }) {
  const canvas = element("canvas", { width: columns, height: rows });
  const pixels = new ImageData(columns, rows);
  data.forEach((weight, i) => pixels.data.set([...HEAT, 255 * weight], 4 * i));
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  return canvas;
}

/** The cell of the last row that weighs most. */
function strongest({ rows, columns, data }) {
  const last = data.subarray((rows - 1) * columns);
  return { row: rows - 1, column: last.indexOf(Math.max(...last)) };
}

const cut = (name) => (name.length > LONGEST ? `${name.slice(0, LONGEST - 1)}…` : name);

const room = (names) => 14 + LETTER * Math.max(...names.map((name) => cut(name).length));

/** What the colours mean. */
function scale() {
  const stops = painted({ rows: 1, columns: 64, data: Float32Array.from({ length: 64 }, (_, i) => i / 63) });
  stops.setAttribute("aria-hidden", "true");
  return element("p", { class: "scale" }, "0", stops, "1");
}
