// What is selected, in the address behind #, so that a link leads to the same selection.

const listeners = new Set();
let values = read();

function read() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

export const get = (name, otherwise) => values[name] ?? otherwise;

export function number(name, otherwise) {
  const value = Number(values[name]);
  return values[name] !== undefined && Number.isFinite(value) ? value : otherwise;
}

export function set(changes, { replace = true } = {}) {
  const next = { ...values };
  for (const [name, value] of Object.entries(changes)) {
    if (value === undefined || value === null || value === "") delete next[name];
    else next[name] = String(value);
  }
  if (new URLSearchParams(next).toString() === new URLSearchParams(values).toString()) return;
  const before = values;
  values = next;
  history[replace ? "replaceState" : "pushState"](null, "", `#${new URLSearchParams(values)}`);
  announce(before);
}

// A token in the address is taken out of it, so that links that are passed on have none.
export function takeToken() {
  const { token, ...rest } = values;
  if (token === undefined) return undefined;
  values = rest;
  history.replaceState(null, "", `#${new URLSearchParams(values)}`);
  return token;
}

export function onChange(listener) {
  listeners.add(listener);
}

function announce(before) {
  const changed = new Set([...Object.keys(before), ...Object.keys(values)].filter((name) => before[name] !== values[name]));
  for (const listener of listeners) listener(changed);
}

addEventListener("hashchange", () => {
  const before = values;
  values = read();
  announce(before);
});
