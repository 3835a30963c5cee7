// Life of the job: MFU and effective time, with every start, restart and eviction and its evidence.

import { Lines } from "./lines.js";
import { css, h, table } from "./dom.js";
import { digits, moment, seconds, share } from "./format.js";
import { isStatic, json, token } from "./data.js";
import * as state from "./state.js";

const TELLING = { failure: "vermillion", eviction: "purple", restart: "blue", nan: "vermillion" };
const COLOURS = { vermillion: "#d55e00", purple: "#cc79a7", blue: "#0072b2" };

export const help = "Tab: through the evidence; Enter on a row: the rank that it names. Down, up: next, previous row.";

class Life {
  constructor(run) {
    this.run = run;
    this.summary = h("p", { class: "readout" });
    this.lines = new Lines("MFU and effective time over the life of the job", { height: 300 });
    this.legend = h("div", { class: "legend" });
    this.starts = h("div");
    this.marks = h("div");
    this.nodes = h("div");
    this.body = h("div", { tabIndex: 0, class: "frame" }, this.lines.element);
    this.element = h("div", {}, this.summary, this.legend, this.body, this.nodes, this.marks, this.starts);
    this.element.addEventListener("keydown", (event) => this.press(event));
  }

  async show(run) {
    this.run = run;
    const { facts } = run;
    const verdict = facts.verdicts.find((each) => each.subject === "effective time");
    this.summary.textContent = verdict ? `Effective training time: ${verdict.line}` : "";
    this.draw();
    this.listMarks();
    this.listStarts();
    await this.listNodes();
  }

  draw() {
    const { run } = this;
    const { facts } = run;
    const order = [...run.steps.keys()].filter((at) => run.step_end_s[at] > 0).sort((one, other) => run.step_end_s[one] - run.step_end_s[other]);
    this.body.hidden = order.length < 2;
    if (this.body.hidden) return this.lines.clear();
    const hasMfu = run.mfu.some(Number.isFinite);
    let trained = 0;
    const first = facts.spans.length ? facts.spans[0].from_s : 0;
    // Nothing was trained between two starts: a place without a value breaks the lines there.
    const places = order.flatMap((at, number) => (number && run.attempt[at] !== run.attempt[order[number - 1]] ? [null, at] : [at]));
    const x = Float64Array.from(places, (at, number) => (at === null ? (run.step_end_s[places[number - 1]] + run.step_end_s[places[number + 1]]) / 2 : run.step_end_s[at]));
    const effective = places.map((at) => {
      if (at === null) return NaN;
      trained += Number.isFinite(run.step_median_s[at]) ? run.step_median_s[at] : 0;
      return trained / Math.max(1e-9, run.step_end_s[at] - first);
    });
    // A run that stands still goes on to cost time.
    const recorded = Math.max(...facts.spans.map((span) => span.to_s), x[x.length - 1]);
    const end = Math.max(recorded, facts.stop.until_s ?? recorded);
    const at = Float64Array.from(end > recorded ? [...x, end] : x);
    if (end > recorded) effective.push(trained / Math.max(1e-9, end - first));
    const source = hasMfu ? run.mfu : run.step_median_s;
    const values = Float64Array.from(at, (_, number) => source[places[number]] ?? NaN);
    const series = [{ label: hasMfu ? "MFU of the step" : "step, median rank", values, colour: "blue" }];
    const isKnown = facts.verdicts.some((each) => each.subject === "effective time" && each.state !== "cannot tell");
    if (isKnown) series.push({ label: "effective time so far", values: effective, colour: "orange", dash: [6, 3], scale: hasMfu ? "y" : "second" });
    const shades = facts.spans.map((span, number) => ({ from: number ? facts.spans[number - 1].to_s : span.from_s, to: span.first_step_s ?? span.to_s, colour: css("--band") }));
    // Steps that a later start took again are not in the line.
    facts.spans.forEach((span, number) => {
      const own = x.findLast((_, number) => places[number] !== null && run.attempt[places[number]] === span.attempt) ?? span.first_step_s ?? span.to_s;
      if (number < facts.spans.length - 1) shades.push({ from: own, to: span.to_s, colour: css("--band") });
    });
    if (end > recorded) shades.push({ from: x[x.length - 1], to: end, colour: css("--band") });
    const telling = facts.marks.filter((mark) => mark.name in TELLING);
    this.lines.show(at, series, {
      x: "time since the run began", y: hasMfu ? share : seconds, y2: hasMfu || !isKnown ? undefined : share, shades, asTime: moment, range: [first, end],
      marks: telling.map((mark) => ({ at: mark.at_s, colour: COLOURS[TELLING[mark.name]] })),
    });
    const key = (colour, text) => {
      const swatch = h("span", { class: "swatch" });
      swatch.style.background = colour;
      return h("span", { class: "key" }, swatch, text);
    };
    this.legend.replaceChildren(...[...new Set(telling.map((mark) => mark.name))].map((name) => key(COLOURS[TELLING[name]], name)), shades.length ? key(css("--band"), "no step that counts: start, restart or hang") : "");
    if (!hasMfu) this.legend.append(h("span", { class: "key" }, "The peak FLOPs of this device are not known: step times instead of MFU."));
  }

  listMarks() {
    const { marks } = this.run.facts;
    if (!marks.length) return this.marks.replaceChildren(h("h3", {}, "Evidence"), h("p", {}, "No failure, restart or eviction is recorded."));
    const rows = marks.map((mark) => [
      moment(mark.at_s), h("b", {}, mark.name), mark.step ?? "",
      mark.rank === null ? mark.host : h("button", { class: "link", onclick: () => state.set({ rank: mark.rank, view: "parallel" }, { replace: false }) }, mark.ranks),
      mark.text, mark.facts,
    ]);
    this.marks.replaceChildren(h("h3", {}, "Restarts, evictions, failures, and their evidence"), table(["When", "What", "Step", "Who", "Text", "Evidence"], rows, "Evidence"));
  }

  listStarts() {
    const { starts } = this.run.facts;
    if (!starts.length) return this.starts.replaceChildren();
    const rows = starts.map((start) => [
      String(start.start), start.first_step === null ? "none" : `${start.first_step}–${start.last_step}`, seconds(start.seconds), seconds(start.down_before_s),
      start.until_first_step_s === null ? "-" : seconds(start.until_first_step_s), `${digits(start.steps_lost)} (${seconds(start.lost_s)})`, seconds(start.trained_s), start.ended ? "as intended" : "not as intended",
    ]);
    this.starts.replaceChildren(h("h3", {}, "Starts of the run"), table(["Start", "Steps", "Lasted", "Down before", "Until its first step", "Steps repeated later", "Steps that count", "Ended"], rows, "Starts"));
  }

  // Nodes of a run that `netlayer run` keeps, with a button that evicts one.
  async listNodes() {
    if (isStatic()) return;
    const tree = await json("api/run").catch(() => ({}));
    if (!tree.nodes) return this.nodes.replaceChildren();
    const rows = tree.nodes.map((node) => [
      node.node, node.role, (node.ranks ?? []).map((rank) => `${rank.rank} (${rank.state})`).join(", "), node.reason || node.hardware || "",
      node.role === "evicted" ? "" : h("button", { onclick: () => this.confirm(node), disabled: !token() || !tree.has_driver }, "Evict…"),
    ]);
    const hint = !tree.has_driver ? "No driver keeps this run now: nothing can be evicted." : !token() ? "Open the address that the command printed to evict a node: its token is missing here." : "";
    this.nodes.replaceChildren(h("h3", {}, `Nodes (run: ${tree.state})`), table(["Node", "Role", "Ranks", "Why", "Action"], rows, "Nodes"), h("p", { class: "hint" }, hint));
  }

  confirm(node) {
    const answer = h("p", { role: "status" });
    const send = h("button", { class: "danger", onclick: async () => {
      send.disabled = true;
      try {
        await json("api/evict", { node: node.node });
        answer.textContent = `The driver was asked to evict ${node.node}.`;
      } catch (error) {
        answer.textContent = error.message;
      }
    } }, `Evict ${node.node}`);
    const dialog = h("dialog", { onclose: () => { dialog.remove(); this.listNodes(); } },
      h("h3", {}, `Evict ${node.node}?`),
      h("p", {}, "The training stops on all nodes, a standby takes its place, and the run resumes from the newest whole checkpoint. Without a standby the run waits for one."),
      answer, h("p", { class: "pair" }, send, h("button", { autofocus: true, onclick: () => dialog.close() }, "Close")));
    document.body.append(dialog);
    dialog.showModal();
  }

  press(event) {
    if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
    const buttons = [...this.marks.querySelectorAll("button")];
    if (!buttons.length) return;
    const at = buttons.indexOf(document.activeElement) + (event.key === "ArrowDown" ? 1 : -1);
    buttons[Math.max(0, Math.min(buttons.length - 1, at))].focus();
    event.preventDefault();
  }

  focus() {
    this.body.focus();
  }
}

export const view = { id: "life", title: "Life", help, create: (run) => new Life(run) };
