// Counters over time: the range over all ranks, and the series of one rank or its host.

import { Lines } from "./lines.js";
import { h, labelled, options } from "./dom.js";
import { count, inUnit, moment, scaled, seconds } from "./format.js";
import { isStatic, load } from "./data.js";
import * as state from "./state.js";

const COLOURS = ["vermillion", "green", "purple", "sky", "orange", "blue"];

export const help = "C: next counter. + and -: zoom, arrow keys: pan, 0: all. Drag over a stretch: zoom there.";

class Counters {
  constructor(run) {
    this.run = run;
    this.name = h("select", { onchange: () => state.set({ counter: this.name.value }) });
    this.readout = h("p", { class: "readout", role: "status" });
    this.problem = h("p", { class: "problem" });
    this.lines = new Lines("Readings of a counter", { height: 360, onZoom: (from, to) => state.set({ from, to }) });
    this.frame = h("div", { tabIndex: 0, class: "plot frame" }, this.lines.element);
    this.frame.addEventListener("keydown", (event) => this.press(event));
    this.element = h("div", {}, h("div", { class: "toolbar" }, labelled("Counter", this.name),
      h("button", { onclick: () => state.set({ from: null, to: null }) }, "Whole run")), this.problem, this.frame, this.readout);
  }

  async show(run) {
    this.run = run;
    const { counters } = run.facts;
    if (!counters.length) {
      this.problem.textContent = "Nobody read a counter of a GPU or a NIC in this run (job.observe.counters_every_s).";
      this.frame.hidden = true;
      return;
    }
    this.frame.hidden = false;
    const items = counters.map((counter) => [counter.name, `${counter.name} (${count(counter.series)} series)`]);
    const wanted = state.get("counter", counters[0].name);
    options(this.name, items, counters.some((counter) => counter.name === wanted) ? wanted : counters[0].name);
    const rank = state.number("rank", run.named[0]);
    const query = { name: this.name.value, rank: run.at.has(rank) ? rank : undefined, from: state.get("from"), to: state.get("to") };
    const token = (this.token = {});
    try {
      let problem = "";
      const data = await load("counters", query).catch(async (error) => {
        if (!isStatic() || (query.rank === undefined && query.from === undefined)) throw error;
        // Of the readings over all ranks the range alone: their first series are those of other ranks.
        const all = await load("counters", { name: query.name });
        const what = query.from === undefined ? `The readings of rank ${query.rank} are` : "A finer view of these readings is";
        problem = `${what} not in the exported page; \`netlayer observe serve\` has them. Shown: the range and the median over all ranks.`;
        return query.rank === undefined ? all : { ...all, facts: { ...all.facts, series: [] } };
      });
      if (token !== this.token) return;
      this.problem.textContent = problem;
      this.draw(data);
    } catch (error) {
      this.problem.textContent = error.message;
      this.lines.clear();
    }
  }

  draw(data) {
    const { facts } = data;
    const series = [];
    const bands = [];
    if (data.middle) {
      series.push({ label: "largest of all", values: data.high, colour: "#8a94a0", width: 1 }, { label: "least of all", values: data.low, colour: "#8a94a0", width: 1 }, { label: "median of all", values: data.middle, colour: "blue" });
      bands.push([1, 2]);
    }
    facts.series.forEach((each, number) => series.push({ label: each.label, values: data[`series${number}`], colour: COLOURS[number % COLOURS.length], dash: number ? [6, 3] : undefined, spans: true }));
    this.span = [data.at_s[0], data.at_s[data.at_s.length - 1]];
    const every = (this.span[1] - this.span[0]) / Math.max(1, data.at_s.length - 1);
    this.lines.show(data.at_s, series, { x: "time since the run began", y: scaled, label: `${facts.name}${facts.unit ? ` (${facts.unit})` : ""}`, bands, asTime: moment });
    const last = (values) => values.findLast((value) => Number.isFinite(value));
    const shown = facts.series.map((each, number) => `${each.label}: last ${inUnit(last(data[`series${number}`]), facts.unit)}`);
    this.readout.textContent = [`${facts.name} in ${facts.unit || "no unit"}, a point every ${seconds(every)}`, ...shown.slice(0, 4)].join(" · ");
    this.frame.setAttribute("aria-label", this.readout.textContent);
  }

  press(event) {
    if (!this.span) return;
    const [from, to] = this.span;
    const length = to - from;
    const window = (low, high) => state.set({ from: low.toFixed(4), to: high.toFixed(4) });
    if (event.key === "c") {
      this.name.selectedIndex = (this.name.selectedIndex + 1) % this.name.options.length;
      this.name.dispatchEvent(new Event("change"));
    } else if (event.key === "+" || event.key === "=") window(from + length / 4, to - length / 4);
    else if (event.key === "-") window(from - length / 2, to + length / 2);
    else if (event.key === "ArrowLeft") window(from - length / 4, to - length / 4);
    else if (event.key === "ArrowRight") window(from + length / 4, to + length / 4);
    else if (event.key === "0") state.set({ from: null, to: null });
    else return;
    event.preventDefault();
  }

  focus() {
    this.frame.focus();
  }
}

export const view = { id: "counters", title: "Counters", help, create: (run) => new Counters(run) };
