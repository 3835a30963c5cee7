// 3D-parallel view: all ranks by stage and data-parallel place, the groups of one of them, and what is known of it.

import { VERMILLION, colourBar, pixels, scaleOf } from "./colours.js";
import { CellImage, css, fit, h, labelled, onFrame, outline, table } from "./dom.js";
import { count, describeRanks, formatRanks, inUnit, milliseconds, moment, parseRanks, size } from "./format.js";
import { load } from "./data.js";
import { DIMENSIONS } from "./run.js";
import * as state from "./state.js";

const LEFT = 74;
const TOP = 20;
const OUTLINES = { dp: [2, 2], dp_replicate: [1, 3], pp: [], tp: [], cp: [] };

export const help = "Left, right: context- or data-parallel neighbour, then the next replica. Up, down: tensor-parallel neighbour, then the next stage. T: its timeline. W: the rank that it waits for.";

class Parallel {
  constructor(run) {
    this.run = run;
    this.canvas = h("canvas", { tabIndex: 0, role: "img", class: "plot" });
    this.rank = h("input", { type: "number", min: 0, class: "short", onchange: () => state.set({ rank: this.rank.value }) });
    this.legend = h("div", { class: "legend" });
    this.note = h("p", { class: "hint" });
    this.detail = h("div", { class: "detail" });
    this.element = h("div", {}, h("div", { class: "toolbar" }, labelled("Rank", this.rank), this.legend), this.note, this.canvas, this.detail);
    this.redraw = onFrame(() => this.draw());
    this.image = new CellImage();
    this.canvas.addEventListener("keydown", (event) => this.press(event));
    this.canvas.addEventListener("click", (event) => this.pick(event));
  }

  get chosen() {
    const { run } = this;
    const rank = state.number("rank", run.named[0]);
    return run.at.has(rank) ? rank : run.ranks[0];
  }

  async show(run) {
    this.run = run;
    if (!run.ranks.length) {
      this.note.textContent = "This evidence names no rank.";
      return;
    }
    this.prepare();
    this.rank.value = this.chosen;
    this.redraw();
    await this.inspect(this.chosen);
  }

  // Place of each rank in the drawing: line by stage and tensor-parallel place, column by data-parallel place.
  prepare() {
    const { run } = this;
    const number = run.ranks.length;
    this.line = new Int32Array(number);
    this.column = new Int32Array(number);
    if (run.hasLayout) {
      const { degrees } = run;
      this.tp = degrees.tp;
      this.stages = degrees.pp;
      [this.cp, this.dp, this.replicas] = [degrees.cp, degrees.dp, degrees.dp_replicate];
      this.columns = this.replicas * this.dp * this.cp;
      for (let index = 0; index < number; index += 1) {
        this.line[index] = run.pp[index] * this.tp + Math.max(0, run.tp[index]);
        this.column[index] = (Math.max(0, run.dp_replicate[index]) * this.dp + run.dp[index]) * this.cp + Math.max(0, run.cp[index]);
      }
      const lines = this.tp > 1 ? `, each of ${this.tp} tensor-parallel lines` : "";
      const across = [this.replicas > 1 ? `${this.replicas} replicas, each of ` : "", `${count(this.dp)} data-parallel places`, this.cp > 1 ? `, each of ${this.cp} context-parallel ranks` : ""];
      this.note.textContent = `From top to bottom ${this.stages} pipeline stages${lines}; from left to right ${across.join("")}. Outlined: the groups of the chosen rank.`;
    } else {
      [this.tp, this.cp, this.dp, this.replicas] = [1, 1, 1, 1];
      this.columns = Math.min(number, 32);
      this.stages = Math.ceil(number / this.columns);
      for (let index = 0; index < number; index += 1) [this.line[index], this.column[index]] = [Math.floor(index / this.columns), index % this.columns];
      this.note.textContent = "This evidence does not say which rank is which stage: ranks in order. The groups below are those of its collectives.";
    }
    this.lines = this.stages * this.tp;
    this.index = new Map();
    for (let index = 0; index < number; index += 1) this.index.set(this.line[index] * this.columns + this.column[index], index);
  }

  draw() {
    const { run } = this;
    if (!run.ranks.length || !this.element.isConnected) return;
    const width = Math.max(280, this.element.clientWidth || 1000);
    // Context-parallel ranks of a data-parallel place stand together, and so do the places of a replica.
    this.between = this.cp > 1 && this.columns < 256 ? 3 : 0;
    this.apart = this.replicas > 1 ? 8 : 0;
    const gaps = (this.columns / this.cp - 1) * this.between + (this.replicas - 1) * this.apart;
    this.w = Math.max(1.2, Math.min(72, (width - LEFT - gaps) / this.columns));
    this.wide = this.left(this.columns - 1) + this.w;
    this.hgt = Math.max(4, Math.min(22, 420 / this.lines));
    this.gap = this.tp > 1 ? 4 : 1;
    const height = TOP + this.lines * this.hgt + this.stages * this.gap + 4;
    const context = fit(this.canvas, width, height);
    context.clearRect(0, 0, width, height);
    const chosen = this.chosen;
    const own = run.at.get(chosen);
    const { measure, statistic } = run.opening;
    const values = measure >= 0 ? run.values(measure, statistic) : null;
    this.unit = run.facts.measures[measure]?.unit;
    const palette = state.get("palette", "viridis");
    const waits = run.between.some((between) => between >= 0);
    const ground = css("--cell");
    // Nothing of it changes while a rank is chosen.
    this.image.draw(context, [run.facts.version, palette, ground, width].join(), width, height, (fill) => {
      this.scale = values ? scaleOf(values, this.unit) : null;
      const colours = pixels(palette, ground);
      const deepest = run.between.reduce((most, each) => Math.max(most, each), 1);
      for (let index = 0; index < run.ranks.length; index += 1) {
        let level = 255;
        if (waits && run.between[index] >= 0) level = 60 + Math.round((180 * (deepest - run.between[index])) / deepest);
        else if (!waits && values && Number.isFinite(values[index])) level = this.scale.level(values[index]);
        fill(...this.corner(index), Math.max(1, this.w - (this.w > 5 ? 1 : 0)), this.hgt - 1, colours[level]);
      }
    });
    this.groups(context, own);
    for (const [rank, row] of run.slow) this.mark(context, rank, row.confirmed ? css("--ink") : css("--muted"), false);
    for (const rank of [...run.silent, ...run.culprits]) this.mark(context, rank, VERMILLION, true);
    this.label(context);
    this.describe(waits);
  }

  corner(index) {
    const line = this.line[index];
    return [this.left(this.column[index]), TOP + line * this.hgt + Math.floor(line / this.tp) * this.gap];
  }

  left(column) {
    const place = Math.floor(column / this.cp);
    return LEFT + column * this.w + place * this.between + Math.floor(place / this.dp) * this.apart;
  }

  // Outlines of the groups of the chosen rank.
  groups(context, own) {
    const { run } = this;
    const around = (indices, colour, dash) => {
      context.setLineDash(dash);
      for (const index of indices) {
        const [x, y] = this.corner(index);
        for (const [thick, stroke] of [[3, css("--card")], [1.5, colour]]) {
          context.lineWidth = thick;
          context.strokeStyle = stroke;
          context.strokeRect(x - 0.5, y - 0.5, Math.max(3, this.w), this.hgt);
        }
      }
      context.setLineDash([]);
    };
    if (run.hasLayout) {
      for (const [dimension, dash] of Object.entries(OUTLINES)) around(run.group(dimension, run.ranks[own]).map((rank) => run.at.get(rank)), css("--ink"), dash);
    }
    const [x, y] = this.corner(own);
    const [w, hgt] = [Math.max(9, this.w + 3), Math.max(9, this.hgt + 2)];
    for (const [thick, stroke] of [[5, css("--card")], [3, css("--link")]]) {
      context.lineWidth = thick;
      context.strokeStyle = stroke;
      context.strokeRect(x + (this.w - w) / 2, y + (this.hgt - 1 - hgt) / 2, w, hgt);
    }
  }

  mark(context, rank, colour, crossed) {
    const index = this.run.at.get(rank);
    if (index === undefined) return;
    const [x, y] = this.corner(index);
    outline(context, x + this.w / 2, y + (this.hgt - 1) / 2, Math.max(7, Math.min(12, this.hgt / 2 + 1)), colour, crossed);
  }

  label(context) {
    if (!this.run.hasLayout) return;
    context.fillStyle = css("--muted");
    context.font = `12px ${css("--sans")}`;
    context.textBaseline = "middle";
    for (let stage = 0; stage < this.stages; stage += 1) {
      context.fillText(`stage ${stage}`, 0, TOP + stage * (this.tp * this.hgt + this.gap) + (this.tp * this.hgt) / 2, LEFT - 8);
    }
    context.textBaseline = "top";
    if (this.replicas > 1) {
      for (let replica = 0; replica < this.replicas; replica += 1) {
        const x = this.left(replica * this.dp * this.cp);
        context.fillText(this.replicas > 8 ? String(replica) : `replica ${replica}`, x, 2, Math.max(8, this.dp * this.cp * this.w));
      }
      return;
    }
    context.fillText("dp 0", LEFT, 2);
    if (this.dp < 2 || this.wide < LEFT + 90) return;
    context.textAlign = "right";
    context.fillText(`dp ${this.dp - 1}`, Math.min(this.canvas.clientWidth, this.wide), 2);
    context.textAlign = "left";
  }

  describe(waits) {
    const { run } = this;
    const marks = [];
    if (run.silent.size || run.culprits.size) marks.push(h("span", { class: "key cross" }, "✕ silent, or holds others up"));
    if (run.slow.size) marks.push(h("span", { class: "key" }, "○ straggler"));
    const ends = waits ? ["through others", "waits for it directly"] : this.scale ? [inUnit(this.scale.low, this.unit), `${inUnit(this.scale.high, this.unit)} (${run.facts.measures[run.opening.measure].name}, ${run.opening.statistic})`] : null;
    const bar = ends ? h("span", { class: "ends" }, h("span", {}, ends[0]), colourBar(state.get("palette", "viridis")), h("span", {}, ends[1])) : "";
    this.legend.replaceChildren(bar, ...marks);
  }

  async inspect(rank) {
    const { run } = this;
    const index = run.at.get(rank);
    const waiting = this.waiting(rank);
    const flags = run.flags(rank);
    const head = [
      h("h3", {}, run.title(index)),
      flags.length ? h("ul", { class: "flags" }, flags.map((flag) => h("li", {}, flag))) : h("p", {}, "No verdict names it."),
    ];
    if (waiting.length) head.push(h("p", {}, `${count(waiting.length)} ranks wait for it: `, this.links(waiting.slice(0, 12)), waiting.length > 12 ? " " : "", waiting.length > 12 ? this.link(`and ${count(waiting.length - 12)} more`, () => state.set({ view: "map", measure: "waits" }, { replace: false })) : ""));
    if (run.waits_for[index] >= 0) head.push(h("p", {}, "It waits for ", this.links([run.waits_for[index]]), run.between[index] > 0 ? ` through ${run.between[index]} ${run.between[index] > 1 ? "others" : "other"}.` : " directly."));
    if (run.hasLayout) {
      head.push(h("dl", {}, Object.entries(DIMENSIONS).flatMap(([dimension, { name }]) => {
        const ranks = run.group(dimension, rank);
        return ranks.length < 2 ? [] : [h("dt", {}, name), h("dd", {}, this.link(describeRanks(ranks), () => state.set({ view: "timeline", group: formatRanks(ranks), rank, event: null }, { replace: false })))];
      })));
    }
    const token = (this.token = {});
    this.detail.replaceChildren(...head, h("p", { class: "hint" }, "…"));
    let more;
    try {
      more = this.facts(await load("rank", { rank }));
    } catch (error) {
      more = [h("p", { class: "problem" }, error.message)];
    }
    if (token === this.token) this.detail.replaceChildren(...head, ...more);
  }

  facts(data) {
    const { facts } = data;
    const result = [];
    if (facts.place) result.push(h("p", {}, `Where its record ends, it is in: ${facts.place}.`));
    for (const finding of facts.findings) result.push(h("p", { class: "finding" }, finding));
    if (data.facts.marks.length) {
      result.push(h("h4", {}, "Errors and other marks"), table(["When", "Mark", "Step", "Text"], facts.marks.map((mark) => [moment(mark.at_s), mark.name, mark.step ?? "", mark.text]), "Marks"));
    }
    const measures = this.run.facts.measures.map((measure, number) => {
      const index = this.run.at.get(facts.rank);
      const values = ["mean", "median", "p99", "trend"].map((key) => this.run.values(number, key)[index]);
      return [measure.name, ...values.map((value) => inUnit(value, measure.unit))];
    }).filter((cells) => cells[1] !== "no value");
    if (measures.length) result.push(h("h4", {}, "Times by step"), table(["Measure", "Mean", "Median", "99th percentile", "Change from first to last step"], measures, "Times by step"));
    if (facts.flows.length) {
      result.push(h("h4", {}, "Flows"), facts.flows[0].launched === undefined
        ? table(["Operation", "Group", "With", "A step", "Size", "Waiting for peers", "Transfer"], facts.flows.map((flow) => [
          flow.name, flow.group, this.peers(flow, facts.rank), String(Number(flow.a_step.toPrecision(3))), size(flow.bytes), milliseconds(flow.wait_ms), milliseconds(flow.transfer_ms)]), "Flows")
        : table(["Operation", "Group", "With", "Launched", "Complete"], facts.flows.map((flow) => [flow.name, flow.group, this.peers(flow, facts.rank), count(flow.launched), count(flow.complete)]), "Flows"));
    }
    if (facts.operations.length) {
      result.push(h("h4", {}, "Last operations, newest first"), table(["When", "Operation", "Step", "Duration"], facts.operations.map((row) => [
        moment(row.at_s), row.what, row.step === undefined ? row.state : row.step, row.ms === undefined ? row.size : milliseconds(row.ms)]), "Last operations"));
    }
    return result;
  }

  peers(flow, rank) {
    const ranks = flow.group_ranks ? parseRanks(flow.group_ranks) : flow.peer === null ? [] : [flow.peer];
    if (!ranks.length) return "";
    const group = flow.group_ranks ? ranks : [rank, flow.peer].sort((one, other) => one - other);
    return this.link(describeRanks(ranks), () => state.set({ view: "timeline", group: formatRanks(group), rank, event: null }, { replace: false }));
  }

  link(text, onclick) {
    return h("button", { class: "link", onclick }, text);
  }

  links(ranks) {
    return ranks.flatMap((rank, number) => [number ? ", " : "", this.link(`rank ${rank}`, () => state.set({ rank }))]);
  }

  waiting(rank) {
    const { run } = this;
    const ranks = [];
    run.waits_for.forEach((other, index) => {
      if (other === rank) ranks.push(index);
    });
    return ranks.sort((one, other) => run.between[one] - run.between[other]).map((index) => run.ranks[index]);
  }

  pick(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left;
    let column = this.columns - 1;
    while (column >= 0 && this.left(column) > x) column -= 1;
    const block = this.tp * this.hgt + this.gap;
    const y = event.clientY - box.top - TOP;
    const line = Math.floor(y / block) * this.tp + Math.min(this.tp - 1, Math.floor((y % block) / this.hgt));
    const index = this.index.get(line * this.columns + column);
    if (index !== undefined && column >= 0 && column < this.columns) state.set({ rank: this.run.ranks[index] });
  }

  press(event) {
    const { run } = this;
    const own = run.at.get(this.chosen);
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (event.key in moves) {
      const [down, right] = moves[event.key];
      const [line, column] = [this.line[own] + down, this.column[own] + right];
      const index = this.index.get(line * this.columns + column);
      if (index !== undefined && column >= 0 && column < this.columns) state.set({ rank: run.ranks[index] });
    } else if (event.key === "t") state.set({ view: "timeline", rank: run.ranks[own], group: null, event: null }, { replace: false });
    else if (event.key === "w" && run.waits_for[own] >= 0) state.set({ rank: run.waits_for[own] });
    else return;
    event.preventDefault();
  }

  focus() {
    this.canvas.focus();
  }
}

export const view = { id: "parallel", title: "Parallelism", help, create: (run) => new Parallel(run) };
