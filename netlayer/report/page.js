"use strict";
const page = JSON.parse(document.getElementById("plots").textContent);

// ast: expressions are interpreted, not compiled, so the page's policy can forbid eval.
const options = {
  mode: "vega-lite",
  renderer: "svg",
  actions: false,
  ast: true,
  defaultStyle: false,
  tooltip: { disableDefaultStyle: true },
};

for (const box of document.querySelectorAll("[data-plot]")) {
  // A legend does not wrap by itself: on a narrow screen it gets fewer columns.
  const columns = Math.max(1, Math.min(page.config.legend.columns, Math.floor(box.clientWidth / 150)));
  const config = { ...page.config, legend: { ...page.config.legend, columns } };
  vegaEmbed(box, page.specs[box.dataset.plot], { ...options, config }).then(
    () => { box.dataset.state = "drawn"; },
    (error) => {
      console.error(`chart ${box.dataset.plot}:`, error);
      const picture = new Image();
      picture.src = `plots/${box.dataset.plot}.png`;
      picture.alt = box.getAttribute("aria-label");
      box.replaceChildren(picture);
      box.dataset.state = "failed";
    },
  );
}

// The contents show which section is being read.
const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
const reading = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) links.get(target.id)?.setAttribute("aria-current", "true");
      else links.get(target.id)?.removeAttribute("aria-current");
    }
  },
  { rootMargin: "-20% 0px -70% 0px" },
);
document.querySelectorAll("main section").forEach((section) => reading.observe(section));
