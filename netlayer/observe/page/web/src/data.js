// Payloads by name: from the server, or from blocks of base64 in a page that is one file.

const kept = new Map();
const MOST_KEPT = 40;

export class Missing extends Error {}

export const isStatic = () => document.getElementById("netlayer-data") !== null;

// Token of the address, kept for this tab; it never stands in a URL that a browser sends.
let own = "";

export function token() {
  try {
    return own || (sessionStorage.getItem("netlayer-token") ?? "");
  } catch {
    return own;
  }
}

export function keepToken(value) {
  own = value;
  try {
    sessionStorage.setItem("netlayer-token", value);
  } catch {
    // A browser without storage needs the printed address again at the next load.
  }
}

export function key(name, query = {}) {
  const pairs = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return pairs.length ? `${name}?${new URLSearchParams(pairs)}` : name;
}

// Names of all payloads in a page that is one file.
export function embedded() {
  return [...document.querySelectorAll("script[data-key]")].map((block) => block.dataset.key);
}

export async function load(name, query = {}) {
  const wanted = key(name, query);
  if (kept.has(wanted)) return kept.get(wanted);
  const promise = (isStatic() ? fromBlock(wanted) : fromServer(wanted)).then(decode);
  kept.set(wanted, promise);
  promise.catch(() => kept.delete(wanted));
  if (kept.size > MOST_KEPT) kept.delete(kept.keys().next().value);
  return promise;
}

export function forget() {
  kept.clear();
}

async function fromServer(wanted) {
  const answer = await fetch(`api/${wanted}`, { headers: { "X-Netlayer-Token": token() } });
  if (!answer.ok) throw new Missing((await answer.json().catch(() => ({}))).error ?? `the server answers ${answer.status}`);
  return answer.arrayBuffer();
}

async function fromBlock(wanted) {
  const block = [...document.querySelectorAll("script[data-key]")].find((each) => each.dataset.key === wanted);
  if (!block) throw new Missing("This is not in the exported page; `netlayer observe serve` has all of it.");
  const text = atob(block.textContent);
  const packed = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at += 1) packed[at] = text.charCodeAt(at);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

// See netlayer/observe/page/payload.py.
export function decode(buffer) {
  const view = new DataView(buffer);
  if (view.getUint32(0) !== 0x4e4c5031) throw new Error("no payload of the page");
  const begin = 8 + view.getUint32(4, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, begin - 8)));
  const types = { uint8: Uint8Array, int32: Int32Array, float32: Float32Array, float64: Float64Array };
  const arrays = {};
  for (const [name, [type, shape, offset]] of Object.entries(header.arrays)) {
    arrays[name] = new types[type](buffer, begin + offset, shape.reduce((product, each) => product * each, 1));
    arrays[name].shape = shape;
  }
  return { facts: header.facts, ...arrays };
}

export async function json(path, body) {
  const headers = { "X-Netlayer-Token": token() };
  if (body) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body) });
  const tree = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Missing(tree.error ?? `the server answers ${answer.status}`);
  return tree;
}
