// Colours that the colour-blind tell apart: viridis and cividis for quantities, Okabe and Ito's for kinds.

const STOPS = {
  viridis: ["440154", "482475", "414487", "355f8d", "2a788e", "21918c", "22a884", "44bf70", "7ad151", "bddf26", "fde725"],
  cividis: ["00224e", "123570", "3b496c", "575d6d", "707173", "8a8678", "a59c74", "c3b369", "e1cc55", "f4df4b", "fee838"],
};

const OKABE_ITO = {
  black: "#000000", orange: "#e69f00", sky: "#56b4e9", green: "#009e73",
  yellow: "#f0e442", blue: "#0072b2", vermillion: "#d55e00", purple: "#cc79a7",
};

const KINDS = {
  forward: "blue", backward: "sky", weights: "green", optimizer: "green", collective: "orange", wait: "vermillion",
  data: "purple", checkpoint: "yellow", evaluation: "yellow", gc: "black", other: "grey", step: "grey", mark: "vermillion",
};

export const VERMILLION = OKABE_ITO.vermillion;

export function kindColour(kind, dark) {
  const name = KINDS[kind] ?? "grey";
  if (name === "grey") return dark ? "#77828e" : "#9aa4ae";
  if (name === "black") return dark ? "#e8e8e8" : "#000000";
  return OKABE_ITO[name];
}

const tables = {};

// 256 colours of a palette as red, green, blue; number 255 is the ground colour of what has no value.
export function palette(name) {
  if (!tables[name]) {
    const stops = (STOPS[name] ?? STOPS.viridis).map((hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)));
    const table = new Uint8Array(256 * 3);
    for (let level = 0; level < 256; level += 1) {
      const place = (Math.min(level, 254) / 254) * (stops.length - 1);
      const low = Math.min(stops.length - 2, Math.floor(place));
      for (let part = 0; part < 3; part += 1) {
        table[level * 3 + part] = Math.round(stops[low][part] + (place - low) * (stops[low + 1][part] - stops[low][part]));
      }
    }
    tables[name] = table;
  }
  return tables[name];
}

// The same as 32-bit pixels for an ImageData, with the ground for level 255.
export function pixels(name, ground) {
  const table = palette(name);
  const result = new Uint32Array(256);
  for (let level = 0; level < 256; level += 1) {
    result[level] = (255 << 24) | (table[level * 3 + 2] << 16) | (table[level * 3 + 1] << 8) | table[level * 3];
  }
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(ground.slice(at, at + 2), 16));
  result[255] = (255 << 24) | (blue << 16) | (green << 8) | red;
  return result;
}

export function cssColour(name, level) {
  const table = palette(name);
  return `rgb(${table[level * 3]} ${table[level * 3 + 1]} ${table[level * 3 + 2]})`;
}

export const isDark = () => matchMedia("(prefers-color-scheme: dark)").matches;

// Scale of a measure's values, the same in all views. Noise alone fills none: a tenth is the least that it spans.
export function scaleOf(values, unit) {
  const sorted = Float64Array.from(values).filter(Number.isFinite).sort();
  const quantile = (share) => sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
  const middle = quantile(0.5);
  const least = unit === "share" ? 0.05 : Math.abs(middle) * 0.05;
  const low = Math.min(quantile(0.005), middle - least);
  const high = Math.max(quantile(0.998), middle + least);
  const level = (value) => Math.max(0, Math.min(254, Math.round((254 * (value - low)) / (high - low))));
  return { low, high, level };
}

export function colourBar(name) {
  const bar = document.createElement("canvas");
  [bar.className, bar.width, bar.height] = ["bar", 128, 1];
  const context = bar.getContext("2d");
  for (let at = 0; at < 128; at += 1) {
    context.fillStyle = cssColour(name, 2 * at);
    context.fillRect(at, 0, 1, 1);
  }
  return bar;
}
