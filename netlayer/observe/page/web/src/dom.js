// Elements from text: nothing from a run is ever parsed as HTML.

export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "class") element.className = value;
    else if (key in element && !key.startsWith("aria") && key !== "list") element[key] = value;
    else element.setAttribute(key, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// Columns that have nothing in any row are omitted.
export function table(headings, rows, caption) {
  const kept = [...headings.keys()].filter((at) => rows.some((cells) => cells[at] !== "" && cells[at] !== null && cells[at] !== undefined));
  const chosen = (cells) => kept.map((at) => cells[at]);
  return h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": caption },
    h("table", {},
      h("thead", {}, h("tr", {}, chosen(headings).map((heading) => h("th", { scope: "col" }, heading)))),
      h("tbody", {}, rows.map((cells) => h("tr", {}, chosen(cells).map((cell) => h("td", {}, cell ?? "")))))));
}

export function options(select, items, chosen) {
  select.replaceChildren(...items.map(([value, text]) => h("option", { value, selected: String(value) === String(chosen) }, text)));
}

export function labelled(text, control) {
  return h("label", { class: "control" }, h("span", {}, text), control);
}

// A canvas whose bitmap has the screen's own pixels; `draw` gets a context in CSS pixels.
export function fit(canvas, width, height) {
  const ratio = Math.min(window.devicePixelRatio || 1, 2);
  const [w, hgt] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== hgt) {
    canvas.width = w;
    canvas.height = hgt;
  }
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

// Calls of `draw` between two frames are one.
export function onFrame(draw) {
  let due = false;
  return () => {
    if (due) return;
    due = true;
    requestAnimationFrame(() => {
      due = false;
      draw();
    });
  };
}

export function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// A ring, or a cross, on whatever colour is below.
export function outline(context, x, y, half, colour, crossed) {
  for (const [width, stroke] of [[5, css("--card")], [2.5, colour]]) {
    context.lineWidth = width;
    context.strokeStyle = stroke;
    context.beginPath();
    if (crossed) {
      context.moveTo(x - half, y - half);
      context.lineTo(x + half, y + half);
      context.moveTo(x + half, y - half);
      context.lineTo(x - half, y + half);
    } else {
      context.arc(x, y, half, 0, 2 * Math.PI);
    }
    context.stroke();
  }
}

// Cells drawn by pixels into an image of their own, which stays until `key` changes: thousands of rectangles a move are
// slow where a browser draws by software. `cells` yields x, y, width, height, and the colour as red, green and blue.
export class CellImage {
  draw(context, key, width, height, cells) {
    const ratio = context.getTransform().a;
    if (this.key !== key || this.ratio !== ratio) {
      const [w, hgt] = [Math.max(1, Math.ceil(width * ratio)), Math.max(1, Math.ceil(height * ratio))];
      const image = new ImageData(w, hgt);
      const pixels = new Uint32Array(image.data.buffer);
      cells((x, y, wide, high, colour) => {
        const [left, right] = [Math.round(x * ratio), Math.min(w, Math.round((x + wide) * ratio))];
        const bottom = Math.min(hgt, Math.round((y + high) * ratio));
        for (let line = Math.round(y * ratio); line < bottom; line += 1) pixels.fill(colour, line * w + left, line * w + Math.max(left + 1, right));
      });
      this.canvas ??= document.createElement("canvas");
      [this.canvas.width, this.canvas.height] = [w, hgt];
      this.canvas.getContext("2d").putImageData(image, 0, 0);
      [this.key, this.ratio] = [key, ratio];
    }
    context.drawImage(this.canvas, 0, 0, this.canvas.width / ratio, this.canvas.height / ratio);
  }
}
