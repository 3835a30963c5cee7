// Numbers as a person writes them.

export function seconds(value) {
  if (!Number.isFinite(value)) return "-";
  const size = Math.abs(value);
  // A space that does not break: number and unit stay on one line.
  if (size >= 86400) return `${(value / 86400).toFixed(1)}\u00a0d`;
  if (size >= 3600) return `${(value / 3600).toFixed(1)}\u00a0h`;
  if (size >= 120) return `${(value / 60).toFixed(1)}\u00a0min`;
  if (size >= 1 || size < 1e-9) return `${size < 1e-9 ? 0 : digits(value)}\u00a0s`;
  if (size >= 1e-3) return `${digits(value * 1e3)}\u00a0ms`;
  if (size >= 1e-6) return `${digits(value * 1e6)}\u00a0µs`;
  return `${digits(value * 1e9)}\u00a0ns`;
}

export const milliseconds = (value) => seconds(value / 1e3);

export function digits(value) {
  if (!Number.isFinite(value)) return "-";
  if (value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-3)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

export const share = (value) => (Number.isFinite(value) ? `${(100 * value).toFixed(1)}%` : "-");

export function inUnit(value, unit) {
  if (!Number.isFinite(value)) return "no value";
  if (unit === "share") return `${value >= 0 ? "+" : ""}${share(value)}`;
  if (unit === "s") return seconds(value);
  return `${scaled(value)}${unit ? ` ${unit}` : ""}`;
}

export function scaled(value) {
  if (!Number.isFinite(value)) return "-";
  for (const [scale, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    const by = letter === "k" ? 1e3 : scale;
    if (Math.abs(value) >= scale) return `${digits(value / by)}${letter}`;
  }
  return digits(value);
}

export function size(bytes) {
  if (!Number.isFinite(bytes) || bytes <= 0) return "";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(units.length - 1, Math.floor(Math.log2(bytes) / 10));
  return `${digits(bytes / 2 ** (10 * power))}\u00a0${units[power]}`;
}

// A moment of the run as `1:58`, with as many digits as ticks `every` seconds apart need.
export function moment(value, every = 0.001) {
  if (!Number.isFinite(value)) return "-";
  const places = every >= 1 ? 0 : Math.min(6, Math.ceil(-Math.log10(every) - 1e-9));
  const scale = 10 ** places;
  const whole = Math.round(Math.abs(value) * scale) / scale;
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  const rest = (whole % 60).toFixed(places).padStart(places ? places + 3 : 2, "0");
  const text = hours ? `${hours}:${String(minutes).padStart(2, "0")}:${rest}` : `${minutes}:${rest}`;
  return value < 0 ? `-${text}` : text;
}

export const count = (number) => number.toLocaleString("en-US");

// As `netlayer.observe.events.format_ranks`: `first:stop:stride`, else a list.
export function formatRanks(ranks) {
  if (!ranks.length) return "";
  const stride = ranks.length > 1 ? ranks[1] - ranks[0] : 1;
  const even = stride > 0 && ranks.every((rank, index) => rank === ranks[0] + index * stride);
  return even ? `${ranks[0]}:${ranks[ranks.length - 1] + 1}:${stride}` : ranks.join(",");
}

export function parseRanks(text) {
  const match = /^(\d{1,9}):(\d{1,9}):(\d{1,9})$/.exec(text);
  if (!match) return text.split(",").map(Number).filter(Number.isInteger);
  const [first, stop, stride] = match.slice(1).map(Number);
  const ranks = [];
  for (let rank = first; stride > 0 && rank < stop && ranks.length < 1 << 20; rank += stride) ranks.push(rank);
  return ranks;
}

export function describeRanks(ranks) {
  if (ranks.length === 1) return `rank ${ranks[0]}`;
  const whole = ranks.length > 2 && ranks[ranks.length - 1] - ranks[0] === ranks.length - 1;
  if (whole) return `ranks ${ranks[0]}–${ranks[ranks.length - 1]}`;
  if (ranks.length <= 8) return `ranks ${ranks.join(", ")}`;
  return `ranks ${ranks.slice(0, 3).join(", ")}, … ${ranks[ranks.length - 1]} (${count(ranks.length)})`;
}
