// Timeline of a group of ranks: what each did in a step, and what a chosen event waits for.

import { isDark, kindColour } from "./colours.js";
import { css, fit, h, labelled, onFrame, options, table } from "./dom.js";
import { count, describeRanks, formatRanks, inUnit, milliseconds, parseRanks, seconds, size } from "./format.js";
import { embedded, load } from "./data.js";
import { DIMENSIONS } from "./run.js";
import * as state from "./state.js";

const MARK = 254;
const ROW = 15;
const RANK_GAP = 5;
const TOP = 20;
const MOST_HEIGHT = 520;
const MOST_RANKS = 64;

export const help = "Left, right: previous, next event. Up, down: another row. D: next dependency. + and -: zoom, shift and arrow keys: pan, 0: all. [ and ]: step before, after.";

class Timeline {
  constructor(run) {
    this.run = run;
    this.canvas = h("canvas", { tabIndex: 0, role: "img", class: "plot" });
    this.group = h("select", { onchange: () => state.set({ group: this.group.value, event: null }) });
    this.step = h("input", { type: "number", class: "short", onchange: () => state.set({ step: this.step.value, event: null }) });
    this.before = h("button", { onclick: () => this.turn(-1), "aria-label": "Step before" }, "◀");
    this.after = h("button", { onclick: () => this.turn(1), "aria-label": "Step after" }, "▶");
    this.steps = h("div", { class: "control" }, h("span", {}, "Step"), h("span", { class: "pair" }, this.before, this.step, this.after));
    this.legend = h("div", { class: "legend kinds" });
    this.problem = h("p", { class: "problem" });
    this.detail = h("div", { class: "detail", role: "status" });
    this.element = h("div", {},
      h("div", { class: "toolbar" }, labelled("Ranks", this.group),
        this.steps, this.legend),
      this.problem, this.canvas, this.detail);
    this.redraw = onFrame(() => this.draw());
    this.canvas.addEventListener("keydown", (event) => this.press(event));
    this.canvas.addEventListener("pointerdown", (event) => this.grab(event));
    this.canvas.addEventListener("pointermove", (event) => this.drag(event));
    this.canvas.addEventListener("pointerup", (event) => this.drop(event));
    this.canvas.addEventListener("wheel", (event) => this.roll(event), { passive: false });
  }

  // Groups of the chosen rank: by its place in the job, and those of its collectives.
  async groups(rank) {
    const items = [];
    for (const [dimension, { name }] of Object.entries(DIMENSIONS)) {
      const ranks = this.run.group(dimension, rank);
      if (ranks.length > 1) items.push([formatRanks(ranks), `${name}: ${describeRanks(ranks)}`]);
    }
    try {
      for (const flow of (await load("rank", { rank })).facts.flows) {
        const ranks = flow.group_ranks ? parseRanks(flow.group_ranks) : flow.peer === null ? [] : [rank, flow.peer].sort((one, other) => one - other);
        const key = formatRanks(ranks);
        if (ranks.length > 1 && !items.some(([value]) => value === key)) items.push([key, `${flow.group || flow.name}: ${describeRanks(ranks)}`]);
      }
    } catch {
      // Not in an exported page.
    }
    if (!items.some(([value]) => value === String(rank))) items.push([String(rank), `rank ${rank} alone`]);
    if (!this.run.hasLayout && this.run.ranks.length <= MOST_RANKS) items.unshift([formatRanks([...this.run.ranks]), `all ${this.run.ranks.length} ranks`]);
    return items.slice(0, 40);
  }

  async show(run) {
    this.run = run;
    if (!run.ranks.length) {
      this.problem.textContent = "This evidence names no rank.";
      return;
    }
    const rank = state.number("rank", run.named[0] ?? run.ranks[0]);
    const items = await this.groups(rank);
    const wanted = state.get("group");
    if (wanted && !items.some(([value]) => value === wanted)) items.unshift([wanted, describeRanks(parseRanks(wanted))]);
    // A straggler is seen beside ranks with equal work.
    const peers = formatRanks(run.group("dp", rank));
    const first = run.slow.has(rank) && !run.silent.has(rank) && items.some(([value]) => value === peers) ? peers : items[0][0];
    options(this.group, items, wanted ?? first);
    const steps = run.steps;
    const step = state.number("step", run.facts.default_step ?? steps[steps.length - 1]);
    this.step.value = step ?? "";
    this.steps.hidden = !steps.length;
    const query = steps.length ? { ranks: this.group.value, first: step, last: step } : { ranks: this.group.value };
    const key = JSON.stringify([query, run.facts.version]);
    if (key !== this.key) {
      this.key = key;
      try {
        const data = await load("events", query);
        if (key !== this.key) return;
        this.take(data);
        this.problem.textContent = data.facts.omitted ? `${count(data.facts.omitted)} of the shortest events are not drawn.` : "";
        if (!data.code?.length) this.problem.textContent = "Nothing is recorded of these ranks in this step.";
      } catch (error) {
        this.take(null);
        this.offer(error.message);
      }
    }
    this.redraw();
  }

  // In an exported page: what it has.
  offer(message) {
    const links = embedded().filter((key) => key.startsWith("events?")).map((key) => {
      const query = new URLSearchParams(key.slice(7));
      const ranks = query.get("ranks");
      const step = query.get("first");
      const text = `${describeRanks(parseRanks(ranks))}${step ? `, step ${step}` : ""}`;
      return h("li", {}, h("button", { class: "link", onclick: () => state.set({ group: ranks, step, event: null }) }, text));
    });
    this.problem.replaceChildren(message, ...(links.length ? [" It has: ", h("ul", {}, links)] : []));
  }

  // Sort events into rows, a lane of a rank each; steps are no row but the ground of their rank.
  take(data) {
    this.data = data?.code?.length ? withOpen(data) : null;
    this.rows = [];
    this.events = [];
    this.detail.replaceChildren();
    if (!this.data) return;
    data = this.data;
    const { facts } = data;
    this.kinds = facts.classes;
    const step = this.kinds.indexOf("step");
    const lanes = new Map();
    const order = [...parseRanks(this.group.value)];
    for (let at = 0; at < data.code.length; at += 1) {
      if (data.code[at] === step || data.open.has(at)) continue;
      const kind = data.code[at] === MARK ? "mark" : this.kinds[data.code[at]];
      const lane = kind === "mark" ? (this.isLaunch(at) ? "launches" : "marks") : ["data", "checkpoint", "evaluation"].includes(kind) ? "host" : facts.names.lane[data.lane[at]] || (kind === "collective" ? "collectives" : "computation");
      const key = `${data.rank[at]}/${lane}`;
      if (!lanes.has(key)) lanes.set(key, { rank: data.rank[at], lane, events: [] });
      lanes.get(key).events.push(at);
    }
    // An operation that never ended is drawn open, from the last that its rank recorded.
    for (const [at, open] of data.open) {
      const own = [...lanes.values()].filter((lane) => lane.rank === open.rank);
      lanes.set(`${open.rank}/open`, { rank: open.rank, lane: own.length ? "no end" : "", events: [at], open });
    }
    // A rank that recorded nothing has a row too: that it is missing may be what matters.
    const known = new Set([...lanes.values()].map((lane) => lane.rank));
    for (const rank of order.slice(0, MOST_RANKS)) if (!known.has(rank)) lanes.set(`${rank}/nothing`, { rank, lane: "", events: [] });
    const place = new Map(order.map((rank, index) => [rank, index]));
    this.rows = [...lanes.values()].sort((one, other) => (place.get(one.rank) ?? 1e9) - (place.get(other.rank) ?? 1e9) || one.rank - other.rank || one.lane.localeCompare(other.lane));
    let y = 0;
    this.rows.forEach((row, number) => {
      if (number && this.rows[number - 1].rank !== row.rank) y += RANK_GAP;
      row.y = y;
      row.depth = this.nest(row.events);
      y += ROW * (row.depth > 1 ? 1.4 : 1);
    });
    this.total = y;
    const begin = data.start_ms.reduce((least, each) => Math.min(least, each), Infinity);
    const end = data.end_ms.reduce((most, each) => Math.max(most, each), begin);
    this.all = { from: begin, to: Math.max(end, begin + 1e-3) };
    this.recorded = begin;
    data.end_ms.forEach((each, at) => {
      if (!data.open.has(at)) this.recorded = Math.max(this.recorded, each);
    });
    this.span = { ...this.all };
    this.scroll = 0;
    this.byKey = new Map();
    data.key.forEach((key, at) => {
      if (key < 0) return;
      if (!this.byKey.has(key)) this.byKey.set(key, []);
      this.byKey.get(key).push(at);
    });
    const used = new Set();
    data.code.forEach((code, at) => {
      if (code !== step && !data.open.has(at)) used.add(code === MARK ? (this.isLaunch(at) ? "launch" : "mark") : this.kinds[code]);
    });
    this.legend.replaceChildren(...[...used].map((kind) => {
      const swatch = h("span", { class: "swatch" });
      swatch.style.background = kindColour(kind === "launch" ? "collective" : kind, isDark());
      return h("span", { class: "key" }, swatch, kind === "other" ? "other (computation)" : kind === "collective" ? "communication (collective, send, receive)" : kind);
    }), facts.open?.length ? h("span", { class: "key" }, h("span", { class: "swatch open" }), "has no end in the record") : "");
    const wanted = state.number("event");
    this.selected = Number.isInteger(wanted) && wanted < data.code.length && wanted >= 0 ? wanted : this.first();
    this.inspect();
  }

  // Whether events of a row lie in one another: then inner ones are drawn lower.
  nest(events) {
    let end = -Infinity;
    let depth = 1;
    this.level ??= new Map();
    for (const at of events) {
      const inside = this.data.start_ms[at] < end - 1e-6;
      this.level.set(at, inside ? 1 : 0);
      if (inside) depth = 2;
      end = Math.max(end, this.data.end_ms[at]);
    }
    return depth;
  }

  // What matters most: the operation of a silent rank that never ended, the longest pass of a straggler, the last
  // event of another rank that a verdict names; else the first of all.
  first() {
    const { data } = this;
    for (const rank of this.run.named) {
      for (const [at, open] of data.open) if (open.rank === rank) return at;
      const passes = [...data.code.keys()].filter((at) => data.rank[at] === rank && this.isPass(at));
      if (this.run.slow.has(rank) && passes.length) return passes.reduce((longest, at) => (this.length(at) > this.length(longest) ? at : longest));
      const rows = this.rows.filter((row) => row.rank === rank && row.lane !== "marks" && row.events.length);
      if (rows.length) {
        const events = rows.flatMap((row) => row.events);
        return events.reduce((last, at) => (this.data.end_ms[at] > this.data.end_ms[last] ? at : last), events[0]);
      }
    }
    return this.rows.find((row) => row.events.length)?.events[0];
  }

  isPass(at) {
    return ["forward", "backward"].includes(this.kinds[this.data.code[at]]) && !this.data.open.has(at);
  }

  length(at) {
    return this.data.end_ms[at] - this.data.start_ms[at];
  }

  // How long the same pass takes on the other ranks of its stage that are shown.
  usual(at) {
    const { data, run } = this;
    if (!this.isPass(at) || !run.hasLayout) return "";
    const stage = (rank) => run.pp[run.at.get(rank)];
    const alike = [...data.code.keys()].filter((other) => data.rank[other] !== data.rank[at] && data.code[other] === data.code[at] && data.step[other] === data.step[at]
      && data.chunk[other] === data.chunk[at] && !data.open.has(other) && stage(data.rank[other]) === stage(data.rank[at]));
    if (!alike.length) {
      const peers = run.group("dp", data.rank[at]);
      return peers.length < 2 ? "" : h("button", { class: "link", onclick: () => state.set({ group: formatRanks(peers), rank: data.rank[at], event: null }) }, "show its data-parallel group, whose ranks do equal work");
    }
    const lengths = alike.map((other) => this.length(other)).sort((one, other) => one - other);
    const middle = lengths[Math.floor(lengths.length / 2)];
    const ranks = new Set(alike.map((other) => data.rank[other])).size;
    return `${milliseconds(middle)} (median of ${count(ranks)} other ${ranks === 1 ? "rank" : "ranks"} of its stage; this one: ${inUnit(this.length(at) / middle - 1, "share")})`;
  }

  x(ms) {
    return this.left + ((ms - this.span.from) / (this.span.to - this.span.from)) * this.plotWidth;
  }

  draw() {
    if (!this.element.isConnected) return;
    this.canvas.hidden = !this.data;
    if (!this.data) return;
    const width = Math.max(280, this.element.clientWidth || 1000);
    this.left = width > 640 ? 146 : 76;
    this.plotWidth = width - this.left - 8;
    this.visible = Math.min(MOST_HEIGHT, this.total + 4);
    const height = TOP + this.visible;
    const context = fit(this.canvas, width, height);
    context.clearRect(0, 0, width, height);
    context.save();
    context.beginPath();
    context.rect(0, TOP, width, this.visible);
    context.clip();
    context.translate(0, TOP - this.scroll);
    const dark = isDark();
    context.font = `12px ${css("--sans")}`;
    context.textBaseline = "middle";
    let before = null;
    const [ink, muted, line, sans] = [css("--ink"), css("--muted"), css("--line"), css("--sans")];
    for (const row of this.rows) {
      if (row.rank !== before) {
        context.fillStyle = line;
        context.fillRect(0, row.y - 3, width, 1);
      }
      if (row.y + 2 * ROW >= this.scroll && row.y <= this.scroll + this.visible) {
        const faulty = this.run.isFaulty(row.rank) || this.run.slow.has(row.rank);
        if (row.rank !== before) {
          context.fillStyle = ink;
          context.font = `${faulty ? "bold " : ""}12px ${sans}`;
          context.fillText(`${this.run.isFaulty(row.rank) ? "✕ " : ""}rank ${row.rank}`, 0, row.y + ROW / 2, this.left - (this.left > 100 ? 62 : 6));
        }
        context.fillStyle = muted;
        context.font = `11px ${sans}`;
        if (this.left > 100) {
          context.textAlign = "right";
          context.fillText(row.lane, this.left - 8, row.y + ROW / 2, 56);
          context.textAlign = "left";
        }
        if (!row.events.length) context.fillText(this.run.steps.length ? "nothing recorded in this step" : "nothing recorded", this.left, row.y + ROW / 2);
        else if (row.open) this.open(context, row);
        else this.bars(context, row, dark);
      }
      before = row.rank;
    }
    this.arrows(context);
    context.restore();
    this.ticks(context, width);
  }

  // An operation without an end, up to the edge.
  open(context, row) {
    const left = Math.max(this.left, this.x(row.open.from_ms));
    const width = this.left + this.plotWidth - left;
    if (width < 4) return;
    const colour = css(this.run.isFaulty(row.rank) ? "--found" : "--muted");
    context.strokeStyle = colour;
    context.lineWidth = row.events[0] === this.selected ? 3 : 1.5;
    context.setLineDash([5, 3]);
    context.strokeRect(left, row.y + 0.5, width + 4, ROW - 2);
    context.setLineDash([]);
    context.save();
    context.beginPath();
    context.rect(left, row.y, width, ROW);
    context.clip();
    context.fillStyle = colour;
    context.font = `11px ${css("--sans")}`;
    const { what } = row.open;
    const texts = [what, what.replace(/ of micro-batch.*/, ""), what.replace(/ (\(|of micro-batch).*/, "")];
    context.fillText(texts.find((text) => context.measureText(text).width <= width - 8) ?? texts[2], left + 5, row.y + ROW / 2 - 0.5);
    context.restore();
  }

  bars(context, row, dark) {
    const { data } = this;
    let covered = -1;
    let code = -1;
    for (const at of row.events) {
      if (data.end_ms[at] < this.span.from || data.start_ms[at] > this.span.to) continue;
      const left = Math.max(this.left, this.x(data.start_ms[at]));
      const right = Math.min(this.left + this.plotWidth, this.x(data.end_ms[at]));
      // What lies within one pixel of the bar before, and is of its kind, is not drawn again.
      if (right <= covered && data.code[at] === code) continue;
      const kind = data.code[at] === MARK ? "mark" : this.kinds[data.code[at]];
      // A launch in a dump is a moment too, but no failure.
      context.fillStyle = kindColour(kind === "mark" && this.isLaunch(at) ? "collective" : kind, dark);
      const low = this.level.get(at) ? ROW * 0.4 : 0;
      const width = Math.max(kind === "mark" ? 2 : 1, right - left - (right - left > 4 ? 1 : 0));
      context.fillRect(left, row.y + 1 + low, width, ROW - 4);
      if (kind === "wait" && width > 5) this.hatch(context, left, row.y + 1 + low, width, ROW - 4);
      [covered, code] = [left + width, data.code[at]];
    }
    if (row.events.includes(this.selected)) {
      const [left, right] = [this.x(data.start_ms[this.selected]), this.x(data.end_ms[this.selected])];
      const low = this.level.get(this.selected) ? ROW * 0.4 : 0;
      for (const [width, stroke] of [[4, css("--card")], [2, css("--ink")]]) {
        context.lineWidth = width;
        context.strokeStyle = stroke;
        context.strokeRect(left - 1, row.y + low, Math.max(4, right - left + 1), ROW - 2);
      }
    }
  }

  hatch(context, x, y, width, height) {
    context.save();
    context.beginPath();
    context.rect(x, y, width, height);
    context.clip();
    context.strokeStyle = css("--card");
    context.lineWidth = 1.5;
    context.beginPath();
    for (let at = x - height; at < x + Math.min(width, 3000); at += 6) {
      context.moveTo(at, y + height);
      context.lineTo(at + height, y);
    }
    context.stroke();
    context.restore();
  }

  ticks(context, width) {
    const length = this.span.to - this.span.from;
    const raw = length / Math.max(2, this.plotWidth / 110);
    const power = 10 ** Math.floor(Math.log10(raw));
    const every = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= raw);
    context.fillStyle = css("--muted");
    context.font = `12px ${css("--sans")}`;
    context.textAlign = "center";
    context.textBaseline = "top";
    // Where the record ends the axis does: an open bar is no measure of time.
    const open = this.data.open.size > 0 && this.recorded < this.span.to;
    const right = open ? this.x(this.recorded) : width - 24;
    for (let at = Math.ceil(this.span.from / every) * every; at <= this.span.to; at += every) {
      const x = this.x(at);
      if (x > right - (open ? 24 : 0)) break;
      context.fillText(at === 0 ? "0" : milliseconds(at), x, 2);
      context.fillRect(x, 16, 1, 3);
    }
    context.textAlign = "left";
    if (this.left > 100) context.fillText(this.run.steps.length ? "time in the step" : "time", 0, 2, this.left - 8);
    if (!open) return;
    context.fillRect(right, 2, 1, 16);
    const { silence_s: silence } = this.run.facts.stop;
    const room = width - right - 8;
    const text = silence > 0 ? [`then ${seconds(silence)} without a record`, `+ ${seconds(silence)}`] : ["no record"];
    context.fillText(text.find((each) => context.measureText(each).width <= room) ?? "", right + 5, 2);
  }

  // What an event waits for and what waits for it: collectives of all ranks, messages, passes of micro-batches.
  dependencies(at) {
    const { data } = this;
    const result = [];
    const same = data.key[at] >= 0 ? this.byKey.get(data.key[at]).filter((other) => other !== at) : [];
    if (same.length) {
      const all = [...same, at];
      const last = all.reduce((late, each) => (data.start_ms[each] > data.start_ms[late] ? each : late), at);
      const isMessage = this.name(at) === "send" || this.name(at) === "recv";
      for (const other of same.slice(0, 40)) {
        const note = isMessage ? (this.name(other) === "send" ? "sent by" : "received by") : other === last ? "began last: the others wait for it" : "same collective";
        result.push({ at: other, note, strong: isMessage || other === last });
      }
      result.sort((one, other) => other.strong - one.strong);
    }
    const kind = this.kinds[data.code[at]];
    if (kind === "forward" || kind === "backward") result.push(...this.passes(at, kind));
    const row = this.rows.find((each) => each.events.includes(at));
    const place = row.events.indexOf(at);
    if (place > 0) result.push({ at: row.events[place - 1], note: "before it on this lane", strong: false });
    return result;
  }

  // The same micro-batch on the stage that gives to this one, and on the one that takes from it.
  passes(at, kind) {
    const { data, run } = this;
    const own = run.at.get(data.rank[at]);
    if (!run.hasLayout || data.micro_batch[at] < 0) return [];
    const stages = Math.max(...run.pp) + 1;
    const step = kind === "forward" ? 1 : -1;
    const result = [];
    for (let other = 0; other < data.code.length; other += 1) {
      if (data.code[other] !== data.code[at] || data.micro_batch[other] !== data.micro_batch[at] || data.step[other] !== data.step[at]) continue;
      const index = run.at.get(data.rank[other]);
      if (index === undefined || ["tp", "cp", "dp", "dp_replicate"].some((name) => run[name][index] !== run[name][own])) continue;
      const here = Math.max(0, data.chunk[at]) * stages + run.pp[own];
      const there = Math.max(0, data.chunk[other]) * stages + run.pp[index];
      if (there === here - step) result.push({ at: other, note: "gives its input", strong: true });
      if (there === here + step) result.push({ at: other, note: "takes its output", strong: true });
    }
    return result;
  }

  arrows(context) {
    if (this.selected === undefined) return;
    context.strokeStyle = css("--ink");
    context.lineWidth = 1.5;
    for (const { at, strong } of this.links ?? []) {
      const [from, to] = this.data.start_ms[at] <= this.data.start_ms[this.selected] ? [at, this.selected] : [this.selected, at];
      const [one, other] = [this.rows.find((row) => row.events.includes(from)), this.rows.find((row) => row.events.includes(to))];
      if (one === other) continue;
      const [x1, x2] = [this.x(this.data.start_ms[from]), this.x(this.data.start_ms[to])];
      const [y1, y2] = [one.y + ROW / 2, other.y + ROW / 2];
      context.setLineDash(strong ? [] : [2, 4]);
      context.globalAlpha = strong ? 0.9 : 0.4;
      context.beginPath();
      context.moveTo(x1, y1);
      context.bezierCurveTo(x1 + 18, y1, x2 - 18, y2, x2, y2);
      context.stroke();
    }
    context.globalAlpha = 1;
    context.setLineDash([]);
  }

  isLaunch(at) {
    return this.name(at).startsWith("launch ");
  }

  name(at) {
    const { data } = this;
    return data.facts.names.name[data.name[at]];
  }

  title(at) {
    const { data } = this;
    if (data.open.has(at)) return `${data.open.get(at).what}, without an end in the record`;
    const kind = data.code[at] === MARK ? "mark" : this.kinds[data.code[at]];
    const group = data.facts.names.group[data.group[at]];
    const name = this.name(at);
    let text = kind === "collective" || kind === "other" || kind === "mark" ? name : kind === "wait" ? `wait in ${name}` : kind === name ? name : `${kind} (${name})`;
    if (group) text += ` (${group})`;
    if (data.micro_batch[at] >= 0) text += `, micro-batch ${data.micro_batch[at]}`;
    return text;
  }

  inspect() {
    const { data } = this;
    const at = this.selected;
    if (at === undefined) return;
    this.links = this.dependencies(at);
    const facts = [
      ["Begin", `${milliseconds(data.start_ms[at])} after the first shown (${seconds((data.facts.since_begin_ms + data.start_ms[at]) / 1e3)} into the run)`],
      ["Duration", data.open.has(at) ? "it has no end in the record; the bar ends where the drawing does" : data.code[at] === MARK ? "" : milliseconds(this.length(at))],
      ["Normal", this.usual(at)],
      ["Step", data.step[at] >= 0 ? String(data.step[at]) : ""],
      ["Size", size(data.bytes[at])],
      ["Sequence number in its group", data.seq[at] >= 0 ? String(data.seq[at]) : ""],
      ["Timed by", data.facts.names.timing[data.timing[at]]],
      ["Says", data.facts.texts[at] ?? ""],
    ].filter(([, value]) => value);
    const waiting = this.waiting(at);
    const rows = this.links.slice(0, 24).map((link) => [
      h("button", { class: "link", onclick: () => this.select(link.at) }, `rank ${data.rank[link.at]}: ${this.title(link.at)}`),
      link.note, this.offset(at, link.at),
    ]);
    this.detail.replaceChildren(
      h("h3", {}, `rank ${data.rank[at]}: ${this.title(at)}`),
      h("dl", {}, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
      waiting ? h("p", {}, waiting) : "",
      rows.length ? h("h4", {}, "Depends on, and is needed by") : "",
      rows.length ? table(["Event", "Relation", "Begins"], rows, "Dependencies") : "");
    this.canvas.setAttribute("aria-label", `Timeline. Rank ${data.rank[at]}: ${this.title(at)}, ${milliseconds(data.end_ms[at] - data.start_ms[at])}`);
  }

  offset(at, other) {
    const difference = this.data.start_ms[other] - this.data.start_ms[at];
    return `${milliseconds(Math.abs(difference))} ${difference < 0 ? "earlier" : "later"}`;
  }

  waiting(at) {
    const { data } = this;
    const all = data.key[at] >= 0 ? this.byKey.get(data.key[at]) : [];
    if (all.length < 2) return "";
    const last = all.reduce((late, each) => (data.start_ms[each] > data.start_ms[late] ? each : late), all[0]);
    const waited = Math.max(0, Math.min(data.start_ms[last], data.end_ms[at]) - data.start_ms[at]);
    const length = data.end_ms[at] - data.start_ms[at];
    if (last === at) return `It began last of the ${all.length} that are shown: the others waited for it.`;
    return `For ${milliseconds(waited)} of ${milliseconds(length)} it waited for rank ${data.rank[last]}, which began last of the ${all.length} that are shown.`;
  }

  select(at) {
    this.selected = at;
    state.set({ event: at });
    this.inspect();
    const row = this.rows.find((each) => each.events.includes(at));
    if (row.y < this.scroll || row.y + ROW > this.scroll + this.visible) this.scroll = Math.max(0, Math.min(this.total - this.visible, row.y - this.visible / 2));
    const length = this.span.to - this.span.from;
    if (this.data.end_ms[at] < this.span.from || this.data.start_ms[at] > this.span.to) this.pan((this.data.start_ms[at] - this.span.from - length / 2) / length);
    this.redraw();
  }

  pan(part) {
    const length = this.span.to - this.span.from;
    const from = Math.max(this.all.from - length / 2, Math.min(this.all.to - length / 2, this.span.from + part * length));
    this.span = { from, to: from + length };
    this.redraw();
  }

  zoom(factor, at) {
    const middle = at ?? Math.max(this.span.from, Math.min(this.span.to, (this.data.start_ms[this.selected] + this.data.end_ms[this.selected]) / 2));
    const most = this.all.to - this.all.from;
    const length = Math.max(most / 1e6, Math.min(most * 1.02, (this.span.to - this.span.from) * factor));
    const part = (middle - this.span.from) / (this.span.to - this.span.from);
    this.span = length >= most ? { ...this.all } : { from: middle - part * length, to: middle + (1 - part) * length };
    this.redraw();
  }

  turn(by) {
    const { steps } = this.run;
    const at = Math.max(0, steps.indexOf(Number(this.step.value)));
    const next = steps[Math.max(0, Math.min(steps.length - 1, at + by))];
    if (next !== undefined) state.set({ step: next, event: null });
  }

  press(event) {
    if (event.key === "[" || event.key === "]") this.turn(event.key === "[" ? -1 : 1);
    else if (!this.data || this.selected === undefined) return;
    else if (event.shiftKey && event.key.startsWith("Arrow")) this.slide(event.key);
    else if (event.key === "ArrowLeft" || event.key === "ArrowRight") this.along(event.key === "ArrowLeft" ? -1 : 1);
    else if (event.key === "ArrowUp" || event.key === "ArrowDown") this.across(event.key === "ArrowUp" ? -1 : 1);
    else if (event.key === "d" && this.links?.length) this.select(this.links[0].at);
    else if (event.key === "+" || event.key === "=") this.zoom(0.5);
    else if (event.key === "-") this.zoom(2);
    else if (event.key === "0") this.zoom(Infinity);
    else return;
    event.preventDefault();
  }

  slide(key) {
    if (key === "ArrowLeft" || key === "ArrowRight") this.pan(key === "ArrowLeft" ? -0.2 : 0.2);
    else this.climb(key === "ArrowUp" ? -80 : 80);
  }

  climb(by) {
    this.scroll = Math.max(0, Math.min(Math.max(0, this.total - this.visible), this.scroll + by));
    this.redraw();
  }

  along(by) {
    const row = this.rows.find((each) => each.events.includes(this.selected));
    const at = row.events.indexOf(this.selected) + by;
    if (at >= 0 && at < row.events.length) this.select(row.events[at]);
  }

  // The event of the next row that is nearest in time.
  across(by) {
    const number = this.rows.findIndex((each) => each.events.includes(this.selected)) + by;
    let next = number;
    while (this.rows[next] && !this.rows[next].events.length) next += by;
    const row = this.rows[next];
    if (!row) return;
    const middle = this.data.start_ms[this.selected];
    this.select(row.events.reduce((near, at) => (Math.abs(this.data.start_ms[at] - middle) < Math.abs(this.data.start_ms[near] - middle) ? at : near), row.events[0]));
  }

  grab(event) {
    if (!this.data) return;
    this.held = { x: event.clientX, y: event.clientY, moved: false };
    this.canvas.setPointerCapture(event.pointerId);
  }

  drag(event) {
    if (!this.held) return;
    const [dx, dy] = [event.clientX - this.held.x, event.clientY - this.held.y];
    if (Math.abs(dx) + Math.abs(dy) < 3 && !this.held.moved) return;
    this.held = { x: event.clientX, y: event.clientY, moved: true };
    this.pan(-dx / this.plotWidth);
    this.climb(-dy);
  }

  drop(event) {
    if (this.held && !this.held.moved) this.pick(event);
    this.held = null;
  }

  pick(event) {
    const box = this.canvas.getBoundingClientRect();
    const y = event.clientY - box.top - TOP + this.scroll;
    const row = this.rows.find((each) => y >= each.y && y < each.y + ROW * 1.4);
    if (!row) return;
    const ms = this.span.from + ((event.clientX - box.left - this.left) / this.plotWidth) * (this.span.to - this.span.from);
    const slack = (3 / this.plotWidth) * (this.span.to - this.span.from);
    const hits = row.events.filter((at) => this.data.start_ms[at] - slack <= ms && this.data.end_ms[at] + slack >= ms);
    if (hits.length) this.select(hits[hits.length - 1]);
  }

  roll(event) {
    if (!this.data) return;
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      const box = this.canvas.getBoundingClientRect();
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.span.from + ((event.clientX - box.left - this.left) / this.plotWidth) * (this.span.to - this.span.from));
    } else if (this.total > this.visible && event.shiftKey) {
      event.preventDefault();
      this.climb(event.deltaY);
    }
  }

  focus() {
    this.canvas.focus();
  }
}

// Events with one more for each operation that never ended: up to 30% beyond the last end. `open`: those by place.
function withOpen(data) {
  const open = new Map();
  const added = data.facts.open ?? [];
  if (!added.length) return { ...data, open };
  const number = data.code.length;
  const begin = data.start_ms.reduce((least, each) => Math.min(least, each), Infinity);
  const end = data.end_ms.reduce((most, each) => Math.max(most, each), begin);
  const result = { facts: data.facts, open };
  for (const [name, values] of Object.entries(data)) {
    if (name === "facts") continue;
    result[name] = new values.constructor(number + added.length);
    result[name].set(values);
    result[name].fill(name === "bytes" ? NaN : ["name", "group", "lane", "timing"].includes(name) ? 0 : -1, number);
  }
  added.forEach((each, place) => {
    const at = number + place;
    open.set(at, each);
    [result.rank[at], result.start_ms[at], result.end_ms[at]] = [each.rank, each.from_ms, Math.max(each.from_ms, end) + 0.3 * (end - begin)];
    [result.code[at], result.step[at]] = [data.facts.classes.indexOf("other"), each.step ?? -1];
  });
  return result;
}

export const view = { id: "timeline", title: "Timeline", help, create: (run) => new Timeline(run) };
