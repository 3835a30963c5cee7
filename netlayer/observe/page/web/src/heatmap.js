// Heat map host x rank: one cell a rank, one row of cells a host.

import { colourBar, pixels, scaleOf, VERMILLION } from "./colours.js";
import { CellImage, css, fit, h, labelled, onFrame, options, outline, table } from "./dom.js";
import { count, inUnit } from "./format.js";
import * as state from "./state.js";

const STATISTICS = [["mean", "mean"], ["median", "median"], ["p99", "99th percentile"], ["trend", "change from first to last step (fitted line)"]];
const WAITS = "waits";
const GAP = 8;
const MOST_HEIGHT = 560;

export const title = "Heat map";
export const help = "Arrow keys: another rank. Home, End: first, last. Enter: its place in the job. M, S: next measure, statistic.";

export class HeatMap {
  constructor(run) {
    this.run = run;
    this.canvas = h("canvas", { tabIndex: 0, role: "img", class: "plot" });
    this.measure = h("select", { onchange: () => state.set({ measure: this.measure.value }) });
    this.statistic = h("select", { onchange: () => state.set({ stat: this.statistic.value }) });
    this.palette = h("select", { onchange: () => state.set({ palette: this.palette.value }) });
    this.legend = h("div", { class: "legend" });
    this.hint = h("p", { class: "hint" });
    this.readout = h("p", { class: "readout", role: "status" });
    this.slowest = h("div");
    this.overSteps = labelled("Over the steps", this.statistic);
    this.element = h("div", {},
      h("div", { class: "toolbar" }, labelled("Measure", this.measure), this.overSteps, labelled("Colours", this.palette), this.legend),
      this.hint,
      this.canvas, this.readout, this.slowest);
    this.redraw = onFrame(() => this.draw());
    this.image = new CellImage();
    this.drawn = 0;
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.say());
    this.canvas.addEventListener("click", (event) => this.choose(this.under(event)));
    this.canvas.addEventListener("keydown", (event) => this.press(event));
  }

  show(run) {
    this.run = run;
    const items = run.facts.measures.map((measure, number) => [number, measure.name]);
    if (run.facts.stop.silent.length || run.culprits.size) items.push([WAITS, "who waits for whom"]);
    // Of a run that stands still all steps are alike: what tells is who waits for whom.
    const first = items.some(([value]) => value === WAITS) || !items.length ? WAITS : run.opening.measure;
    const wanted = state.get("measure", first);
    this.chosen = items.some(([value]) => String(value) === String(wanted)) ? wanted : first;
    options(this.measure, items, this.chosen);
    options(this.statistic, STATISTICS, this.stat);
    options(this.palette, [["viridis", "viridis"], ["cividis", "cividis"]], state.get("palette", "viridis"));
    const why = String(this.chosen) === String(run.opening.measure) ? run.opening.why : "";
    const stages = why && run.degrees.pp > 1 ? "Stages of a pipeline may do unequal work. " : "";
    this.hint.replaceChildren(why ? h("span", { class: "why" }, why) : "", why ? " " : "", stages, run.facts.hosts.some(Boolean) ? "A row of cells is a host, a cell is a rank." : "A cell is a rank; which hosts they are on is not known.");
    this.overSteps.hidden = this.chosen === WAITS;
    this.prepare();
    this.redraw();
  }

  get stat() {
    return state.get("stat", this.run.opening.statistic);
  }

  // Level of each rank, 0 to 254, or 255, and the ends of the scale.
  prepare() {
    const { run } = this;
    const key = [run.facts.version, this.chosen, this.stat].join();
    if (key === this.key) return;
    this.key = key;
    this.drawn += 1;
    this.levels = new Uint8Array(run.ranks.length).fill(255);
    if (this.chosen === WAITS) {
      const deepest = Math.max(1, ...run.between);
      run.between.forEach((between, index) => {
        if (between >= 0) this.levels[index] = 60 + Math.round((180 * (deepest - between)) / deepest);
      });
      this.scale = null;
      return;
    }
    const values = run.values(this.chosen, this.stat);
    if (!values) return;
    const { unit } = run.facts.measures[this.chosen];
    const scale = scaleOf(values, unit);
    values.forEach((value, index) => {
      if (Number.isFinite(value)) this.levels[index] = scale.level(value);
    });
    this.scale = { ...scale, unit, values };
  }

  layout() {
    const { rows } = this.run;
    const width = Math.max(280, this.element.clientWidth || 1000);
    const most = Math.max(1, ...rows.map((row) => row.indices.length));
    const across = Math.min(most, 16);
    const labels = rows.length <= 160 && rows.length * 18 < 3000;
    let best = null;
    for (let cell = 24; cell >= 4; cell -= 1) {
      const label = labels && cell >= 9 ? 96 : 0;
      const lines = rows.map((row) => Math.ceil(row.indices.length / across));
      const block = across * cell + GAP + label;
      const columns = Math.max(1, Math.floor((width + GAP) / block));
      if (columns === 1 && block - GAP > width && cell > 4) continue;
      const perColumn = Math.ceil(rows.length / columns);
      const height = perColumn * Math.max(...lines) * cell + perColumn * (cell > 8 ? 3 : 1);
      best = { cell, columns, perColumn, block, label, across, lines: Math.max(...lines), height, width, step: cell > 8 ? 3 : 1 };
      if (height <= MOST_HEIGHT) break;
    }
    this.grid = best;
    this.boxes = new Float32Array(this.run.ranks.length * 2);
    rows.forEach((row, number) => {
      const [x, y] = this.corner(number);
      row.indices.forEach((index, place) => {
        this.boxes[2 * index] = x + best.label + (place % across) * best.cell;
        this.boxes[2 * index + 1] = y + Math.floor(place / across) * best.cell;
      });
    });
  }

  corner(number) {
    const { perColumn, block, lines, cell, step } = this.grid;
    return [Math.floor(number / perColumn) * block, (number % perColumn) * (lines * cell + step)];
  }

  draw() {
    const { run } = this;
    if (!run.ranks.length || !this.element.isConnected) return;
    this.layout();
    const { cell, label } = this.grid;
    const context = fit(this.canvas, this.grid.width, this.grid.height + 12);
    context.clearRect(0, 0, this.grid.width, this.grid.height + 12);
    context.translate(0, 6);
    const name = state.get("palette", "viridis");
    const inner = cell > 6 ? cell - 1 : cell;
    const ground = css("--cell");
    // Nothing of it changes while a rank is chosen.
    const key = [this.drawn, name, ground, this.grid.width].join();
    this.image.draw(context, key, this.grid.width, this.grid.height + 6, (fill) => {
      const colours = pixels(name, ground);
      this.levels.forEach((level, index) => fill(this.boxes[2 * index], this.boxes[2 * index + 1], inner, inner, colours[level]));
    });
    if (label) {
      context.fillStyle = css("--muted");
      context.font = `${Math.min(12, cell)}px ${css("--sans")}`;
      context.textBaseline = "middle";
      run.rows.forEach((row, number) => {
        const [x, y] = this.corner(number);
        const text = row.name.length > 15 ? `${row.name.slice(0, 6)}…${row.name.slice(-8)}` : row.name;
        context.fillText(text, x, y + cell / 2, label - 6);
      });
    }
    for (const [rank, row] of run.slow) this.ring(context, rank, row.confirmed ? css("--ink") : css("--muted"), false);
    for (const rank of [...run.silent, ...run.culprits]) this.ring(context, rank, VERMILLION, true);
    const selected = state.number("rank");
    if (run.at.has(selected)) this.select(context, run.at.get(selected));
    context.setTransform(1, 0, 0, 1, 0, 0);
    this.describe();
    this.say();
  }

  // Outline of a rank that a verdict names; a cross too where it is silent, for colour alone says nothing.
  ring(context, rank, colour, crossed) {
    const index = this.run.at.get(rank);
    if (index === undefined) return;
    const { cell } = this.grid;
    const [x, y] = [this.boxes[2 * index] + (cell - 1) / 2, this.boxes[2 * index + 1] + (cell - 1) / 2];
    outline(context, x, y, Math.max(7, cell / 2 + 2), colour, crossed);
  }

  select(context, index) {
    const { cell } = this.grid;
    const [x, y] = [this.boxes[2 * index] - 2, this.boxes[2 * index + 1] - 2];
    const sizes = Math.max(10, cell + 3);
    for (const [width, stroke] of [[4, css("--card")], [2, css("--link")]]) {
      context.lineWidth = width;
      context.strokeStyle = stroke;
      context.strokeRect(x, y, sizes, sizes);
    }
  }

  describe() {
    const { run, scale } = this;
    const name = state.get("palette", "viridis");
    const bar = colourBar(name);
    const marks = [];
    if (run.silent.size || run.culprits.size) marks.push(h("span", { class: "key cross" }, "✕ silent, or holds others up"));
    if (run.slow.size) marks.push(h("span", { class: "key" }, "○ straggler"));
    if (!scale) {
      const swatch = h("span", { class: "swatch" });
      swatch.style.background = css("--cell");
      marks.push(h("span", { class: "key" }, swatch, run.alike.size ? "in the same operation, readings go on" : "waits for none of them"));
    }
    const ends = scale ? [inUnit(scale.low, scale.unit), inUnit(scale.high, scale.unit)] : ["others between", "waits for it directly"];
    this.legend.replaceChildren(h("span", { class: "ends" }, h("span", {}, ends[0]), bar, h("span", {}, ends[1])), ...marks);
    this.list();
  }

  // Ranks of a run that stands still: those that are waited for, those in the same operation, the nearest that wait.
  standing() {
    const { run } = this;
    const first = [...new Set([...run.silent, ...run.culprits, ...run.alike])].map((rank) => run.at.get(rank)).filter((index) => index !== undefined);
    const waiting = [...run.between.keys()].filter((index) => run.between[index] >= 0).sort((one, other) => run.between[one] - run.between[other]);
    return [...new Set([...first, ...waiting])].slice(0, Math.max(8, first.length + 4));
  }

  // The same in words: the ranks with the largest values.
  list() {
    const { run, scale } = this;
    const order = scale
      ? [...scale.values.keys()].filter((index) => Number.isFinite(scale.values[index])).sort((one, other) => scale.values[other] - scale.values[one]).slice(0, 8)
      : this.standing();
    if (!order.length) return this.slowest.replaceChildren(h("p", {}, "No rank has a value of this."));
    const rows = order.map((index) => [
      h("button", { class: "link", onclick: () => state.set({ rank: run.ranks[index], view: "parallel" }, { replace: false }) }, `rank ${run.ranks[index]}`),
      scale ? inUnit(scale.values[index], scale.unit) : "", run.flags(run.ranks[index]).join("; "), run.hostOf(index), run.place(index),
    ]);
    const name = scale ? run.facts.measures[this.chosen].name : "who waits for whom";
    const [, statistic] = STATISTICS.find(([value]) => value === this.stat) ?? STATISTICS[0];
    this.slowest.replaceChildren(h("h3", {}, scale ? `${name}, ${statistic}: largest first` : "Silent, and nearest to it"), table(["Rank", name, "State", "Host", "Place"], rows, "Largest values"));
  }

  say(index = this.run.at.get(state.number("rank"))) {
    if (index === undefined) {
      this.readout.textContent = `${count(this.run.ranks.length)} ranks. Point at a cell, or use the arrow keys.`;
      return;
    }
    const value = this.scale ? `${this.run.facts.measures[this.chosen].name}: ${inUnit(this.scale.values[index], this.scale.unit)}` : "";
    this.readout.textContent = [this.run.title(index), value, ...this.run.flags(this.run.ranks[index])].filter(Boolean).join(" · ");
    this.canvas.setAttribute("aria-label", `Heat map. ${this.readout.textContent}`);
  }

  under(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top - 6];
    const { cell } = this.grid ?? { cell: 0 };
    let nearest;
    let least = Math.max(cell, 8) ** 2;
    for (let index = 0; index < this.run.ranks.length; index += 1) {
      const distance = (this.boxes[2 * index] + cell / 2 - x) ** 2 + (this.boxes[2 * index + 1] + cell / 2 - y) ** 2;
      if (distance < least) [nearest, least] = [index, distance];
    }
    return nearest;
  }

  point(event) {
    this.say(this.under(event) ?? this.run.at.get(state.number("rank")));
  }

  choose(index) {
    if (index !== undefined) state.set({ rank: this.run.ranks[index] });
  }

  press(event) {
    const { run } = this;
    const at = run.at.get(state.number("rank")) ?? -1;
    const moves = { ArrowLeft: -1, ArrowRight: 1 };
    if (event.key in moves) this.choose(Math.max(0, Math.min(run.ranks.length - 1, at + moves[event.key])));
    else if (event.key === "ArrowUp" || event.key === "ArrowDown") this.choose(this.across(at, event.key === "ArrowUp" ? -1 : 1));
    else if (event.key === "Home") this.choose(0);
    else if (event.key === "End") this.choose(run.ranks.length - 1);
    else if (event.key === "Enter") state.set({ view: "parallel" }, { replace: false });
    else if (event.key === "m") this.next(this.measure);
    else if (event.key === "s") this.next(this.statistic);
    else return;
    event.preventDefault();
  }

  // The rank at the same place of the host above or below.
  across(at, step) {
    if (at < 0) return 0;
    const { rows } = this.run;
    const row = rows.findIndex((each) => each.indices.includes(at));
    const place = rows[row].indices.indexOf(at);
    const target = rows[Math.max(0, Math.min(rows.length - 1, row + step))];
    return target.indices[Math.min(place, target.indices.length - 1)];
  }

  next(select) {
    if (select.closest("[hidden]") || !select.options.length) return;
    select.selectedIndex = (select.selectedIndex + 1) % select.options.length;
    select.dispatchEvent(new Event("change"));
  }

  focus() {
    this.canvas.focus();
  }
}

export const view = { id: "map", title, help, create: (run) => new HeatMap(run) };
