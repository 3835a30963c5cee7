// The run as the overview has it, with what several views ask of it.

// Groups of ranks by what they share, and the coordinates that vary inside one; as DIMENSIONS in view.py.
export const DIMENSIONS = {
  pp: { name: "Pipeline", inside: ["pp"] },
  dp: { name: "Data-parallel group", inside: ["dp", "cp"] },
  tp: { name: "Tensor-parallel group", inside: ["tp"] },
  cp: { name: "Context-parallel group", inside: ["cp"] },
  dp_replicate: { name: "Replicas", inside: ["dp_replicate"] },
};
const PLACES = ["tp", "pp", "dp", "cp", "dp_replicate"];
const SELDOM = { cp: "cp", dp_replicate: "replica" }; // named where there is more than one

import { inUnit } from "./format.js";

export class Run {
  constructor(overview) {
    Object.assign(this, overview);
    this.at = new Map();
    this.ranks.forEach((rank, index) => this.at.set(rank, index));
    this.silent = new Set(this.facts.stop.silent);
    this.alike = new Set(this.facts.stop.alike); // in the same operation as the silent one, but with readings that go on
    this.culprits = new Set((this.facts.hang?.findings ?? []).filter((finding) => finding.certain).flatMap((finding) => finding.ranks));
    this.slow = new Map(this.facts.stragglers.map((row) => [row.rank, row]));
    this.hasLayout = this.ranks.length > 0 && this.pp.every((stage) => stage >= 0) && this.dp.every((place) => place >= 0);
    // Number of places along each dimension.
    this.degrees = Object.fromEntries(PLACES.map((name) => [name, this[name].reduce((most, each) => Math.max(most, each), 0) + 1]));
    // Measure and statistic that maps open with: the comparison with peers only where somebody stands out by it.
    this.opening = this.facts.opening ?? { measure: -1, statistic: "mean", why: "" };
    this.rows = this.hostRows();
  }

  // Ranks by host, in order; where no host is known, eight a row.
  hostRows() {
    const rows = new Map();
    this.ranks.forEach((rank, index) => {
      const host = this.facts.hosts[this.host[index]];
      const name = host || `ranks ${rank - (rank % 8)}–${rank - (rank % 8) + 7}`;
      if (!rows.has(name)) rows.set(name, []);
      rows.get(name).push(index);
    });
    return [...rows].map(([name, indices]) => ({ name, indices }));
  }

  hostOf(index) {
    return this.facts.hosts[this.host[index]] ?? "";
  }

  // Ranks of one dimension's group that a rank is in, in their order; none where no layout is known.
  group(dimension, rank) {
    const own = this.at.get(rank);
    if (own === undefined || !this.hasLayout) return [];
    const { inside } = DIMENSIONS[dimension];
    const others = PLACES.filter((name) => !inside.includes(name));
    const ranks = [];
    for (let index = 0; index < this.ranks.length; index += 1) {
      if (others.every((name) => this[name][index] === this[name][own])) ranks.push(this.ranks[index]);
    }
    const place = (rank) => inside.reduce((sum, name) => sum * this.degrees[name] + this[name][this.at.get(rank)], 0);
    return ranks.sort((one, other) => place(one) - place(other));
  }

  // `tp 1, pp 0, dp 2`, as far as it is known.
  place(index) {
    const shown = PLACES.filter((name) => this[name][index] >= 0 && (!(name in SELDOM) || this.degrees[name] > 1));
    const parts = shown.map((name) => `${SELDOM[name] ?? name} ${this[name][index]}`);
    return parts.join(", ");
  }

  // What a person should know of a rank at once, in words.
  flags(rank) {
    const flags = [];
    if (this.silent.has(rank)) flags.push(this.facts.stop.state === "silent" ? "silent" : "may be silent");
    if (this.alike.has(rank)) flags.push(`in the same operation as rank ${this.facts.stop.silent[0]}, but its readings go on`);
    if (this.culprits.has(rank)) flags.push("holds the job up");
    const slow = this.slow.get(rank);
    if (slow) flags.push(`${slow.confirmed ? "straggler" : "suspected straggler"}: ${inUnit(slow.slowdown, "share")}`);
    const index = this.at.get(rank);
    if (index !== undefined && this.waits_for[index] >= 0) flags.push(`waits for rank ${this.waits_for[index]}`);
    return flags;
  }

  // Ranks that verdicts name, worst first.
  get named() {
    return [...this.silent, ...this.culprits, ...this.slow.keys()].filter((rank) => this.at.has(rank));
  }

  isFaulty(rank) {
    return this.silent.has(rank) || this.culprits.has(rank);
  }

  values(measure, statistic) {
    return this[`${statistic}${measure}`];
  }

  title(index) {
    return [`rank ${this.ranks[index]}`, this.hostOf(index), this.place(index)].filter(Boolean).join(" · ");
  }
}
