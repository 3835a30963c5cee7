// The page: what stands out, six views, and the address that says what is selected.

import { Missing, forget, isStatic, json, keepToken, load } from "./data.js";
import { h } from "./dom.js";
import { count, moment } from "./format.js";
import { Run } from "./run.js";
import * as state from "./state.js";
import { view as counters } from "./counters.js";
import { view as life } from "./life.js";
import { view as map } from "./heatmap.js";
import { view as parallel } from "./parallel.js";
import { view as steps } from "./steps.js";
import { view as timeline } from "./timeline.js";

const VIEWS = [map, steps, timeline, parallel, counters, life];
const STATES = { found: "Found", suspected: "Suspected", "cannot tell": "Cannot tell", none: "None", measured: "Measured", restarts: "Restarts" };
const PLACE = { straggler: "steps", "slow link": "parallel", drift: "steps", traffic: "counters" };
const LABELS = { hang: "holds others up", drift: "steps become longer", behind: "launched less" };

// The first rank that a line names, where there is such a one.
function firstRank(line, run) {
  const rank = Number(/\brank (\d+)/.exec(line)?.[1]);
  return run.at.has(rank) ? rank : undefined;
}

const clipped = (text) => (text.length > 160 ? `${text.slice(0, 159)}…` : text);

class Page {
  constructor() {
    this.heading = h("h1");
    this.subtitle = h("p", { class: "subtitle" });
    this.live = h("span", { class: "live", role: "status" });
    this.findings = h("section", { class: "findings", "aria-label": "Findings" });
    this.tabs = h("div", { role: "tablist", "aria-label": "Views" });
    this.panel = h("main", { role: "tabpanel", id: "panel" });
    this.help = h("p", { class: "keys" });
    this.instances = new Map();
    document.body.append(h("div", { class: "shell" },
      h("header", {}, h("div", { class: "row" }, this.heading, this.live), this.subtitle), this.findings, this.tabs, this.panel, h("footer", {}, this.help)));
  }

  async start() {
    const token = state.takeToken();
    if (token) keepToken(token);
    addEventListener("hashchange", () => this.renew()); // an address with a token, put into a tab that is open
    try {
      this.take(await load("overview"));
    } catch (error) {
      this.panel.replaceChildren(h("p", { class: "problem", role: "alert" }, error.message));
      return;
    }
    state.onChange((changed) => this.follow(changed));
    document.addEventListener("keydown", (event) => this.press(event));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.refresh());
    new ResizeObserver(() => this.resize()).observe(this.panel);
    performance.mark("netlayer-ready");
    if (!isStatic()) this.watch();
  }

  renew() {
    const token = state.takeToken();
    if (!token) return;
    keepToken(token);
    location.reload();
  }

  take(overview) {
    this.run = new Run(overview);
    const { facts } = overview;
    document.title = `${facts.title} - netlayer`;
    this.heading.textContent = facts.title;
    const kinds = Object.entries(facts.kinds).map(([kind, number]) => `${kind} (${count(number)} ${number === 1 ? "file" : "files"})`);
    this.subtitle.textContent = [`${count(this.run.ranks.length)} ranks`, facts.hosts.some(Boolean) ? `${count(facts.hosts.length)} ${facts.hosts.length === 1 ? "host" : "hosts"}` : "", this.progress(), this.checkpoint(), this.layout(), ...kinds].filter(Boolean).join(" · ");
    this.live.textContent = isStatic() ? "exported page" : facts.live ? "live" : "";
    this.live.classList.toggle("now", !isStatic() && facts.live);
    this.showFindings();
    this.showTabs();
    this.refresh();
  }

  progress() {
    const [all, whole] = [this.run.steps.length, this.run.facts.num_whole_steps];
    if (!all) return "";
    return whole < all ? `${count(whole)} steps completed` : `${count(all)} steps`;
  }

  checkpoint() {
    const { checkpoint_step: step } = this.run.facts;
    return step === null ? "" : `newest checkpoint: step ${count(step)}`;
  }

  layout() {
    const { layout } = this.run.facts;
    if (!layout) return "";
    const shown = ["tp", "pp", "dp", "cp", "dp_replicate"].filter((name) => layout[name] > 1 || ["tp", "pp", "dp"].includes(name));
    return shown.map((name) => `${name} ${layout[name]}`).join(" ");
  }

  // Two questions are always answered: does a rank hold the run up, is one slow. Then what else stands out; the rest on demand.
  showFindings() {
    const { facts } = this.run;
    const { stop, hang } = facts;
    const cards = [];
    const calm = [];
    for (const finding of hang?.findings ?? []) {
      const state = finding.kind === "behind" ? "cannot tell" : finding.certain ? "found" : "suspected";
      cards.push(this.card(state, LABELS[finding.kind] ?? finding.kind, finding.line, finding.ranks.length ? { view: "parallel", rank: finding.ranks[0] } : { view: "map" }));
    }
    for (const note of hang?.notes ?? []) cards.push(this.card("suspected", "look at this too", note, { view: "parallel", rank: firstRank(note, this.run) }));
    if (hang && !hang.findings.length) cards.push(this.card("cannot tell", "hang", hang.lines.join("; ") || "the dumps name nobody", { view: "map" }));
    if (this.run.steps.length) {
      const states = { silent: "found", suspected: "suspected", "cannot tell": "cannot tell" };
      const card = this.card(states[stop.state] ?? "none", "silent rank", stop.line, { view: "parallel", rank: stop.silent[0] });
      (stop.state === "running" && hang ? calm : cards).push(card, ...this.next("silent rank", stop.silent[0]));
    }
    for (const verdict of facts.verdicts) {
      const asked = verdict.subject === "straggler" && this.run.steps.length;
      const alarming = verdict.subject in PLACE && (verdict.state === "found" || verdict.state === "suspected");
      const rank = verdict.subject === "straggler" ? facts.stragglers[0]?.rank ?? firstRank(verdict.line, this.run) : undefined;
      // A share of time is no fault that was found.
      const answer = verdict.subject === "effective time" && verdict.state === "found" ? "measured" : verdict.state;
      const card = this.card(answer, verdict.subject, verdict.line, { view: PLACE[verdict.subject] ?? "life", rank });
      const restarted = verdict.subject === "effective time" && facts.starts.length > 1;
      (alarming || asked || restarted ? cards : calm).push(restarted ? this.card("restarts", verdict.subject, verdict.line, { view: "life" }) : card, ...this.next(verdict.subject, rank));
    }
    const past = this.past();
    if (past.length) cards.push(this.card("restarts", "earlier failure", past.join("; "), { view: "life" }));
    if (!cards.length) cards.push(h("p", { class: "card calm" }, "This evidence has neither steps nor what a hang leaves: nobody can be judged. See the timeline."));
    if (facts.notes.length) calm.push(h("div", { class: "card calm" }, h("b", {}, "Notes"), h("ul", {}, facts.notes.map((note) => h("li", {}, note)))));
    const unknown = facts.verdicts.filter((verdict) => verdict.state === "cannot tell" && verdict.subject !== "straggler").length;
    const hint = unknown ? ` (${unknown} of them: cannot tell)` : "";
    this.findings.replaceChildren(...cards, h("details", {}, h("summary", {}, `${calm.length} other answers${hint}`), ...calm));
  }

  // The next step stands under the verdict that it is for, as text to copy.
  next(subject, rank) {
    const { next } = this.run.facts;
    if (!next || next.subject !== subject || next.rank !== rank) return [];
    const lines = next.lines.map((line) => h("li", {}, line.split("`").map((part, number) => (number % 2 ? h("code", {}, part) : part))));
    return [h("div", { class: "card calm next" }, h("b", {}, "Next step"), h("ul", {}, lines))];
  }

  // What made earlier starts end, as a person or the driver wrote it down: the newest failures and evictions.
  past() {
    const { marks } = this.run.facts;
    const telling = marks.filter((mark) => mark.name === "failure" || mark.name === "eviction");
    const lines = telling.slice(-3).map((mark) => `${moment(mark.at_s)} ${mark.name}${mark.step === null ? "" : ` at step ${mark.step}`}${mark.ranks ? ` (${mark.ranks})` : ""}: ${clipped(mark.text)}`);
    return telling.length > 3 ? [`${telling.length - 3} more in Life`, ...lines] : lines;
  }

  card(kind, subject, line, target) {
    const changes = { event: null, group: null, ...target };
    return h("button", { class: `card ${kind.replace(" ", "-")}`, onclick: () => state.set(changes, { replace: false }) },
      h("span", { class: "badge" }, STATES[kind] ?? kind), h("b", {}, LABELS[subject] ?? subject), h("span", { class: "line" }, this.lead(kind, line)), h("span", { class: "go", "aria-hidden": "true" }, `${VIEWS.find((view) => view.id === target.view)?.title ?? "Show"} ›`));
  }

  // What was found stands out from what it rests on.
  lead(kind, line) {
    const end = /[;:] /.exec(line)?.index ?? line.length;
    return kind === "found" || kind === "suspected" ? [h("strong", {}, line.slice(0, end)), line.slice(end)] : line;
  }

  showTabs() {
    this.tabs.replaceChildren(...VIEWS.map((view, number) => h("button", {
      role: "tab", id: `tab-${view.id}`, "aria-controls": "panel", "aria-selected": String(view === this.current), tabIndex: view === this.current ? 0 : -1,
      onclick: () => state.set({ view: view.id }, { replace: false }), onkeydown: (event) => this.turn(event, number),
    }, h("kbd", {}, String(number + 1)), view.title)));
  }

  turn(event, number) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    const next = (number + by + VIEWS.length) % VIEWS.length;
    state.set({ view: VIEWS[next].id }, { replace: false });
    this.tabs.children[next].focus();
    event.preventDefault();
  }

  get current() {
    return VIEWS.find((view) => view.id === state.get("view", "map")) ?? map;
  }

  follow(changed) {
    if (changed.has("view")) this.showTabs();
    this.refresh(changed.has("view"));
  }

  async refresh(isNew = false) {
    const { current } = this;
    if (!this.instances.has(current.id)) this.instances.set(current.id, current.create(this.run));
    const instance = this.instances.get(current.id);
    if (this.panel.firstChild !== instance.element) this.panel.replaceChildren(instance.element);
    this.panel.setAttribute("aria-labelledby", `tab-${current.id}`);
    this.help.textContent = `${current.help} 1–6: views. /: rank by number.`;
    this.panel.dataset.state = "loading";
    await instance.show(this.run);
    if (this.current === current) this.panel.dataset.state = "shown";
    // A canvas that was hidden while its data came takes the focus when it is drawn.
    if (isNew) await new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));
    if (isNew && this.current === current && (document.activeElement === document.body || document.activeElement === null)) instance.focus();
  }

  resize() {
    const width = this.panel.clientWidth;
    if (width === this.width) return;
    this.width = width;
    this.instances.get(this.current.id)?.redraw?.();
  }

  press(event) {
    const typing = ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName) || document.querySelector("dialog");
    if (event.ctrlKey || event.metaKey || event.altKey || typing) return;
    const number = Number(event.key);
    if (number >= 1 && number <= VIEWS.length) {
      state.set({ view: VIEWS[number - 1].id }, { replace: false });
      this.instances.get(this.current.id)?.focus();
    } else if (event.key === "/") this.ask();
    else return;
    event.preventDefault();
  }

  // A rank by its number.
  ask() {
    const input = h("input", { type: "number", min: 0, "aria-label": "Rank", value: state.get("rank", "") });
    const dialog = h("dialog", { onclose: () => dialog.remove() }, h("form", { method: "dialog", onsubmit: () => this.go(input.value) }, h("label", {}, "Rank ", input), " ", h("button", {}, "Go")));
    document.body.append(dialog);
    dialog.showModal();
    input.select();
  }

  go(text) {
    if (this.run.at.has(Number(text))) state.set({ rank: Number(text) });
    queueMicrotask(() => this.instances.get(this.current.id)?.focus());
  }

  // New states of a run that is under way, as the server says that there are any.
  async watch() {
    for (;;) {
      try {
        const { version } = await json(`api/changes?version=${this.run.facts.version}`);
        if (version !== this.run.facts.version) {
          forget();
          this.take(await load("overview"));
        }
        this.panel.classList.remove("lost");
      } catch (error) {
        this.live.textContent = error instanceof Missing ? error.message : "the server is away"; // one that was started again has another token
        await new Promise((resolve) => setTimeout(resolve, 5000));
      }
    }
  }
}

new Page().start();
