// Map rank x step of one measure, to zoom and pan, and the times of steps below it.

import { colourBar, pixels, scaleOf, VERMILLION } from "./colours.js";
import { Lines } from "./lines.js";
import { css, fit, h, labelled, onFrame, options } from "./dom.js";
import { inUnit, seconds } from "./format.js";
import { load } from "./data.js";
import * as state from "./state.js";

const HEIGHT = 420;
const LEFT = 64;
const BOTTOM = 22;

export const help = "Arrow keys: another cell. + and -: zoom. Shift and arrow keys, or drag: pan. 0: all. Enter: timeline of that step.";

class Steps {
  constructor(run) {
    this.run = run;
    this.canvas = h("canvas", { tabIndex: 0, role: "img", class: "plot" });
    this.measure = h("select", { onchange: () => state.set({ measure: this.measure.value }) });
    this.legend = h("div", { class: "legend" });
    this.readout = h("p", { class: "readout", role: "status" });
    this.problem = h("p", { class: "problem" });
    this.times = new Lines("Times of the steps");
    this.element = h("div", {}, h("div", { class: "toolbar" }, labelled("Measure", this.measure), this.legend),
      this.problem, this.canvas, this.readout, h("h3", {}, "Step times"), this.times.element);
    this.redraw = onFrame(() => this.draw());
    this.canvas.addEventListener("keydown", (event) => this.press(event));
    this.canvas.addEventListener("pointerdown", (event) => this.grab(event));
    this.canvas.addEventListener("pointermove", (event) => this.drag(event));
    this.canvas.addEventListener("pointerup", (event) => this.drop(event));
    this.canvas.addEventListener("wheel", (event) => this.roll(event), { passive: false });
    this.window = null;
  }

  async show(run) {
    if (this.run !== run) this.data = null;
    this.run = run;
    const items = run.facts.measures.map((measure, number) => [number, measure.name]);
    if (!items.length) {
      this.problem.textContent = "No step is recorded in this evidence.";
      this.canvas.hidden = true;
      return;
    }
    this.canvas.hidden = false;
    const first = Math.max(0, run.opening.measure);
    const wanted = state.number("measure", first);
    options(this.measure, items, wanted < items.length ? wanted : first);
    const number = Number(this.measure.value);
    if (!this.data || this.number !== number) {
      try {
        this.data = await load("map", { of: number });
        this.number = number;
        this.problem.textContent = "";
      } catch (error) {
        this.problem.textContent = error.message;
        return;
      }
      const [ranks, steps] = this.data.levels.shape;
      this.window ??= { left: 0, right: steps, top: 0, bottom: ranks };
      this.window.right = Math.min(this.window.right, steps);
      if (this.steps !== steps) this.window = { left: 0, right: steps, top: 0, bottom: ranks };
      this.steps = steps;
      this.row = new Map([...this.data.ranks].map((rank, row) => [rank, row]));
    }
    this.redraw();
    this.showTimes();
  }

  async showTimes() {
    const { run } = this;
    const steps = Float64Array.from(run.steps);
    const series = [
      { label: "step, median rank", values: run.step_median_s, colour: "blue" },
      { label: "busy time (without waits), median rank", values: run.own_median_s, colour: "green", dash: [6, 3] },
      { label: "busy time (without waits), slowest rank", values: run.own_largest_s, colour: "orange", dash: [2, 3] },
    ];
    const rank = state.number("rank");
    const { busy } = run.facts;
    if (run.at.has(rank) && busy !== null) {
      try {
        const detail = await load("rank", { rank });
        if (detail[`series${busy}`]) series.push({ label: `busy time, rank ${rank}`, values: detail[`series${busy}`], colour: "vermillion" });
      } catch {
        // An exported page has some ranks alone; their lines are missing.
      }
    }
    this.times.show(steps, series, { x: "step", y: (value) => seconds(value), cursor: state.number("step") });
  }

  size() {
    const width = Math.max(280, this.element.clientWidth || 1000);
    return { width, plotWidth: width - LEFT, plotHeight: HEIGHT - BOTTOM };
  }

  draw() {
    if (!this.data || !this.element.isConnected) return;
    const { levels } = this.data;
    const [ranks, steps] = levels.shape;
    const { width, plotWidth, plotHeight } = this.size();
    const context = fit(this.canvas, width, HEIGHT);
    const { left, right, top, bottom } = this.window;
    const [columns, rows] = [Math.max(1, Math.round(plotWidth)), Math.max(1, Math.round(plotHeight))];
    // One pixel a step, or a column of the screen where there are more steps: the browser stretches it.
    const [begin, end] = [Math.floor(left), Math.ceil(right)];
    const across = Math.min(columns, Math.max(1, end - begin));
    const image = new ImageData(across, rows);
    const target = new Uint32Array(image.data.buffer);
    const colours = this.colours();
    const firstStep = new Int32Array(across + 1).map((_, x) => Math.min(steps - 1, Math.floor(begin + ((end - begin) * x) / across)));
    const line = new Uint8Array(steps);
    for (let y = 0; y < rows; y += 1) {
      const from = Math.min(ranks - 1, Math.floor(top + ((bottom - top) * y) / rows));
      const to = Math.max(from + 1, Math.min(ranks, Math.floor(top + ((bottom - top) * (y + 1)) / rows)));
      // Of several ranks in a line of pixels the largest value is seen: a straggler never gets lost.
      for (let step = firstStep[0]; step <= firstStep[across]; step += 1) {
        let most = -1;
        for (let row = from; row < to; row += 1) {
          const level = levels[row * steps + step];
          if (level !== 255 && level > most) most = level;
        }
        line[step] = most < 0 ? 255 : most;
      }
      for (let x = 0; x < across; x += 1) target[y * across + x] = colours[line[firstStep[x]]];
    }
    context.clearRect(0, 0, width, HEIGHT);
    this.buffer ??= document.createElement("canvas");
    this.buffer.width = across;
    this.buffer.height = rows;
    this.buffer.getContext("2d").putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    const scale = across / (end - begin);
    context.drawImage(this.buffer, (left - begin) * scale, 0, (right - left) * scale, rows, LEFT, 0, plotWidth, plotHeight);
    this.axes(context, plotWidth, plotHeight);
    this.marks(context, plotWidth, plotHeight);
    this.describe();
  }

  // Colours of the payload's levels on the scale that the other views have for this measure.
  colours() {
    const { low, high, unit } = this.data.facts;
    const means = this.run.values(this.number, "mean");
    // Times of single steps go far beyond the means of ranks, and then they stretch the scale.
    this.scale = scaleOf(unit === "share" ? means : [...means, low, high], unit);
    const all = pixels(state.get("palette", "viridis"), css("--cell"));
    return all.map((colour, level) => (level === 255 ? colour : all[this.scale.level(low + (level / 254) * (high - low))]));
  }

  axes(context, plotWidth, plotHeight) {
    const { left, right, top, bottom } = this.window;
    context.fillStyle = css("--muted");
    context.font = `12px ${css("--sans")}`;
    context.textBaseline = "middle";
    context.textAlign = "right";
    const lines = Math.max(2, Math.min(9, Math.floor(bottom - top)));
    for (let tick = 0; tick < lines; tick += 1) {
      const row = Math.min(this.data.ranks.length - 1, Math.floor(top + ((bottom - top) * (tick + 0.5)) / lines));
      context.fillText(String(this.data.ranks[row]), LEFT - 8, (plotHeight * (tick + 0.5)) / lines);
    }
    context.textAlign = "center";
    context.textBaseline = "bottom";
    const columns = Math.max(2, Math.min(10, Math.floor(right - left), Math.floor(plotWidth / 60)));
    for (let tick = 0; tick < columns; tick += 1) {
      const step = Math.min(this.run.steps.length - 1, Math.floor(left + ((right - left) * (tick + 0.5)) / columns));
      context.fillText(String(this.run.steps[step]), LEFT + (plotWidth * (tick + 0.5)) / columns, HEIGHT - 2);
    }
    context.textAlign = "left";
    context.fillText("step", 0, HEIGHT - 2);
    context.textBaseline = "top";
    context.fillText("rank", 0, 0);
  }

  // Arrows beside the rows of ranks that verdicts name, and the selected cell.
  marks(context, plotWidth, plotHeight) {
    const { left, right, top, bottom } = this.window;
    const named = [...this.run.silent, ...this.run.culprits].map((rank) => [rank, VERMILLION]);
    for (const rank of this.run.slow.keys()) named.push([rank, css("--ink")]);
    for (const [rank, colour] of named) {
      const row = this.row.get(rank);
      if (row === undefined || row < top || row >= bottom) continue;
      const y = (plotHeight * (row + 0.5 - top)) / (bottom - top);
      context.fillStyle = colour;
      context.beginPath();
      context.moveTo(LEFT, y);
      context.lineTo(LEFT - 7, y - 5);
      context.lineTo(LEFT - 7, y + 5);
      context.fill();
    }
    const cell = this.cell();
    if (!cell) return;
    const [w, hgt] = [plotWidth / (right - left), plotHeight / (bottom - top)];
    const [x, y] = [LEFT + (cell.column - left) * w, (cell.row - top) * hgt];
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, plotWidth, plotHeight);
    context.clip();
    for (const [thick, stroke] of [[4, css("--card")], [2, css("--link")]]) {
      context.lineWidth = thick;
      context.strokeStyle = stroke;
      context.strokeRect(x + Math.min(0, (w - 8) / 2), y + Math.min(0, (hgt - 8) / 2), Math.max(8, w), Math.max(8, hgt));
    }
    context.restore();
  }

  cell() {
    const row = this.row?.get(state.number("rank"));
    if (row === undefined) return null;
    const column = Math.max(0, this.run.steps.indexOf(state.number("step", this.run.steps[this.run.steps.length - 1])));
    return { row, column };
  }

  describe() {
    const { facts } = this.data;
    const bar = colourBar(state.get("palette", "viridis"));
    const swatch = h("span", { class: "swatch" });
    swatch.style.background = css("--cell");
    const marks = [h("span", { class: "key" }, swatch, "step without an end in the record")];
    if (this.run.silent.size || this.run.culprits.size) marks.push(h("span", { class: "key cross" }, "▸ silent, or holds others up"));
    if (this.run.slow.size) marks.push(h("span", { class: "key ink" }, "▸ straggler"));
    this.legend.replaceChildren(h("span", { class: "ends" }, h("span", {}, inUnit(this.scale.low, facts.unit)), bar, h("span", {}, inUnit(this.scale.high, facts.unit))), ...marks);
    const cell = this.cell();
    if (!cell) {
      this.readout.textContent = "Bright rows are slow ranks, bright columns slow steps. Choose a cell.";
      return;
    }
    const level = this.data.levels[cell.row * this.run.steps.length + cell.column];
    const value = level === 255 ? "no value" : `about ${inUnit(facts.low + (level / 254) * (facts.high - facts.low), facts.unit)}`;
    const rank = this.data.ranks[cell.row];
    this.readout.textContent = [this.run.title(this.run.at.get(rank)), `step ${this.run.steps[cell.column]}`, `${facts.name}: ${value}`, ...this.run.flags(rank)].join(" · ");
    this.canvas.setAttribute("aria-label", `Map of ranks and steps. ${this.readout.textContent}`);
  }

  choose(row, column) {
    const [ranks, steps] = this.data.levels.shape;
    const [r, c] = [Math.max(0, Math.min(ranks - 1, row)), Math.max(0, Math.min(steps - 1, column))];
    this.reveal(r, c);
    state.set({ rank: this.data.ranks[r], step: this.run.steps[c] });
  }

  reveal(row, column) {
    const { left, right, top, bottom } = this.window;
    if (row < top) this.pan(0, row - top);
    else if (row >= bottom) this.pan(0, row + 1 - bottom);
    if (column < left) this.pan(column - left, 0);
    else if (column >= right) this.pan(column + 1 - right, 0);
  }

  pan(columns, rows) {
    const [ranks, steps] = this.data.levels.shape;
    const { left, right, top, bottom } = this.window;
    const dx = Math.max(-left, Math.min(steps - right, columns));
    const dy = Math.max(-top, Math.min(ranks - bottom, rows));
    this.window = { left: left + dx, right: right + dx, top: top + dy, bottom: bottom + dy };
    this.redraw();
  }

  zoom(factor, atColumn, atRow) {
    const [ranks, steps] = this.data.levels.shape;
    const { left, right, top, bottom } = this.window;
    const around = (low, high, at, most) => {
      const length = Math.max(Math.min(4, most), Math.min(most, (high - low) * factor));
      const share = (at - low) / (high - low);
      const begin = Math.max(0, Math.min(most - length, at - share * length));
      return [begin, begin + length];
    };
    const cell = this.cell();
    const [l, r] = around(left, right, atColumn ?? cell?.column ?? (left + right) / 2, steps);
    const [t, b] = around(top, bottom, atRow ?? cell?.row ?? (top + bottom) / 2, ranks);
    this.window = { left: l, right: r, top: t, bottom: b };
    this.redraw();
  }

  press(event) {
    if (!this.data) return;
    const { left, right, top, bottom } = this.window;
    const cell = this.cell() ?? { row: -1, column: this.run.steps.length - 1 };
    const arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.key in arrows) {
      const [dx, dy] = arrows[event.key];
      if (event.shiftKey) this.pan((dx * (right - left)) / 8, (dy * (bottom - top)) / 8);
      else this.choose(cell.row + dy, cell.column + dx);
    } else if (event.key === "+" || event.key === "=") this.zoom(0.5);
    else if (event.key === "-") this.zoom(2);
    else if (event.key === "0") this.zoom(Infinity);
    else if (event.key === "Enter") state.set({ view: "timeline" }, { replace: false });
    else return;
    event.preventDefault();
  }

  where(event) {
    const box = this.canvas.getBoundingClientRect();
    const { plotWidth, plotHeight } = this.size();
    const { left, right, top, bottom } = this.window;
    return [left + ((event.clientX - box.left - LEFT) / plotWidth) * (right - left), top + ((event.clientY - box.top) / plotHeight) * (bottom - top)];
  }

  grab(event) {
    if (!this.data) return;
    this.held = { x: event.clientX, y: event.clientY, moved: false };
    this.canvas.setPointerCapture(event.pointerId);
  }

  drag(event) {
    if (!this.held) return;
    const { plotWidth, plotHeight } = this.size();
    const { left, right, top, bottom } = this.window;
    const [dx, dy] = [event.clientX - this.held.x, event.clientY - this.held.y];
    if (Math.abs(dx) + Math.abs(dy) < 3 && !this.held.moved) return;
    this.held = { x: event.clientX, y: event.clientY, moved: true };
    this.pan((-dx / plotWidth) * (right - left), (-dy / plotHeight) * (bottom - top));
  }

  drop(event) {
    if (this.held && !this.held.moved) {
      const [column, row] = this.where(event);
      this.choose(Math.floor(row), Math.floor(column));
    }
    this.held = null;
  }

  roll(event) {
    if (!this.data || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    const [column, row] = this.where(event);
    this.zoom(event.deltaY > 0 ? 1.25 : 0.8, column, row);
  }

  focus() {
    this.canvas.focus();
  }
}

export const view = { id: "steps", title: "Steps", help, create: (run) => new Steps(run) };
