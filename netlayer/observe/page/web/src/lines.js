// Lines over a common axis, by uPlot, in the page's colours.

import uPlot from "uplot";
import { isDark } from "./colours.js";
import { css, h } from "./dom.js";

const COLOURS = {
  blue: "#0072b2", green: "#009e73", orange: "#e69f00", vermillion: "#d55e00", purple: "#cc79a7", sky: "#56b4e9",
};
const LIGHT_BLUE = "#58a9f0"; // on a dark ground
const HEIGHT = 240;

export class Lines {
  constructor(label, { height = HEIGHT, onZoom } = {}) {
    this.height = height;
    this.onZoom = onZoom;
    this.element = h("div", { class: "lines", role: "img", "aria-label": label });
    this.observer = new ResizeObserver(() => {
      const width = this.element.clientWidth;
      if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: this.height });
    });
    this.observer.observe(this.element);
  }

  // series: {label, values, colour, dash, scale, band}; bands: [[index, index]]; marks: [{at, colour}].
  show(x, series, { x: name, y, y2, label, bands = [], marks = [], shades = [], cursor, asTime = false, range } = {}) {
    this.plot?.destroy();
    const [ink, grid] = [css("--muted"), css("--line")];
    const font = `12px ${css("--sans")}`;
    const axis = { stroke: ink, font, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 } };
    const axes = [
      { ...axis, values: (_, values, at, space, every) => values.map((value) => (asTime ? asTime(value, every) : String(value))), space: 70, size: 34, label: name, labelSize: 22, labelFont: font },
      { ...axis, values: (_, values) => values.map(y), size: 74, label, labelSize: 22, labelFont: font },
    ];
    if (y2) axes.push({ ...axis, scale: "second", side: 1, values: (_, values) => values.map(y2), size: 56, grid: { show: false } });
    const shown = (format) => (_, value) => (value === null || value === undefined ? "" : format(value));
    const hooks = {
      drawClear: [(plot) => this.shade(plot, shades)],
      draw: [(plot) => this.rule(plot, marks, cursor)],
    };
    if (this.onZoom) hooks.setSelect = [(plot) => this.select(plot)];
    this.plot = new uPlot({
      width: Math.max(280, this.element.clientWidth || 900),
      height: this.height,
      hooks,
      axes,
      bands: bands.map(([one, other]) => ({ series: [one, other], fill: css("--band") })),
      cursor: { drag: { x: Boolean(this.onZoom), y: false, setScale: false }, points: { size: 6 } },
      scales: { x: { time: false, range: range && (() => range) } },
      series: [
        { label: "at", value: shown((value) => (asTime ? asTime(value) : String(value))) },
        ...series.map((each) => ({
          label: each.label, stroke: (isDark() && each.colour === "blue" ? LIGHT_BLUE : COLOURS[each.colour]) ?? each.colour ?? ink, width: each.width ?? 1.75, dash: each.dash, points: { show: x.length < 3 ? true : undefined, size: 4 },
          scale: each.scale ?? "y", value: shown(each.scale === "second" ? y2 : y), spanGaps: false,
        })),
      ],
    }, [x, ...series.map((each) => gaps(each.values, each.spans))], this.element);
  }

  shade(plot, shades) {
    const { ctx, bbox } = plot;
    for (const { from, to, colour } of shades) {
      const [left, right] = [plot.valToPos(from, "x", true), plot.valToPos(to, "x", true)];
      ctx.fillStyle = colour;
      ctx.fillRect(left, bbox.top, Math.max(1, right - left), bbox.height);
    }
  }

  rule(plot, marks, cursor) {
    const { ctx, bbox } = plot;
    const lines = [...marks, ...(cursor === undefined ? [] : [{ at: cursor, colour: css("--link"), dash: [4, 4] }])];
    for (const { at, colour, dash } of lines) {
      const x = plot.valToPos(at, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.save();
      ctx.strokeStyle = colour;
      ctx.lineWidth = 2;
      ctx.setLineDash(dash ?? []);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.restore();
    }
  }

  select(plot) {
    if (plot.select.width < 4) return;
    const [from, to] = [plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")];
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.onZoom(from, to);
  }

  clear() {
    this.plot?.destroy();
    this.plot = null;
  }
}

// uPlot takes null for a gap, and draws on over undefined: of readings that are rarer than points, where they go on.
function gaps(values, spans) {
  const result = Array.from(values, (value) => (Number.isFinite(value) ? value : null));
  if (!spans) return result;
  const known = [...result.keys()].filter((at) => result[at] !== null);
  const apart = known.slice(1).map((at, number) => at - known[number]);
  const usual = apart.toSorted((one, other) => one - other)[Math.floor(apart.length / 2)];
  known.slice(1).forEach((at, number) => {
    if (apart[number] <= 4 * usual) result.fill(undefined, known[number] + 1, at);
  });
  return result;
}
