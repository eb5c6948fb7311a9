"""The style sheet and the script of every page."""

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #222; --dim: #555; --line: #ccc;
        --edge: #888; --mark: #2166ac; --note: #b26a00; --sort: #767676;
        --full: #4292c6; --on-cell: #000; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16181c; --ink: #e4e4e4; --dim: #a8adb5; --line: #3a3f47; --edge: #6b727c;
          --mark: #7fb2e5; --note: #e0a040; --sort: #9aa0a8; --full: #2166ac; --on-cell: #fff; }
}
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 78rem; margin: 1.5rem auto 4rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .75rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.25rem 0 .5rem; padding-bottom: .2rem;
     border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
p { margin: .5rem 0; max-width: 60rem; overflow-wrap: anywhere; }
.limits, .note, figcaption small { color: var(--dim); }
.note { border-left: 3px solid var(--note); padding-left: .6rem; }
.text { font-family: ui-monospace, monospace; font-size: .9rem; white-space: pre-wrap; }
figure { margin: 1.25rem 1.5rem 1.25rem 0; display: inline-block; vertical-align: top;
         max-width: 100%; }
figure.whole { display: block; margin-right: 0; }
figcaption { font-weight: 600; overflow-wrap: anywhere; margin-bottom: .35rem; max-width: 60rem; }
figcaption small { display: block; font-weight: 400; font-size: .85rem; }
.scroll, .picture { overflow-x: auto; overflow-y: hidden; }
.scroll:focus-visible, .picture:focus-visible, button:focus-visible, summary:focus-visible,
td:focus-visible { outline: 2px solid var(--mark); outline-offset: 1px; }
[data-wide]::after { content: "scrolls sideways →"; position: sticky; left: 0; display: block;
                     width: max-content; font-size: .75rem; color: var(--dim); }
.long { overflow-y: auto; max-height: 32rem; border-bottom: 1px solid var(--line); }
table { border-collapse: collapse; margin: .25rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .9rem .15rem 0; text-align: right; vertical-align: top; }
thead th { border-bottom: 1px solid var(--edge); background: var(--paper); white-space: nowrap; }
.long thead th { position: sticky; top: 0; z-index: 1; }
th.left, td.left { text-align: left; }
td.left { white-space: nowrap; }
td.words { white-space: normal; overflow-wrap: anywhere; min-width: 7rem; }
td.number { white-space: nowrap; }
.facts th { text-align: left; font-weight: 600; border: 0; white-space: nowrap; }
.facts td { text-align: left; overflow-wrap: anywhere; }
.facts span { white-space: pre-wrap; margin-right: .6rem; display: inline-block; }
th button { all: unset; cursor: pointer; font: inherit; font-weight: 600; }
th button::after { content: "\\2195"; color: var(--sort); margin-left: .25rem; }
th[aria-sort=descending] button::after { content: "\\2193"; color: var(--ink); }
th[aria-sort=ascending] button::after { content: "\\2191"; color: var(--ink); }
details { margin-top: 1.5rem; }
summary { cursor: pointer; }
.grid table { border-collapse: separate; border-spacing: 2px; }
.grid th { font-weight: 400; text-align: left; white-space: pre; padding: .1rem .35rem .1rem 0;
           border: 0; font-size: .8rem; }
.grid tbody th { position: sticky; left: 0; background: var(--paper); z-index: 1; }
.grid td { text-align: left; padding: .1rem .35rem; white-space: pre; font-size: .85rem;
           background: color-mix(in srgb, var(--full) var(--shade, 0%), var(--paper));
           color: var(--on-cell); }
.grid td small { display: block; font-size: .75rem; }
#tip { position: fixed; z-index: 9; display: none; background: #222; color: #fff;
       padding: .4rem .6rem; font-size: .8rem; line-height: 1.4; white-space: pre-wrap;
       overflow-wrap: anywhere; max-width: min(24rem, 92vw); pointer-events: none;
       border-radius: 3px; }
@media (max-width: 30rem) {
  body { margin-top: 1rem; padding: 0 .75rem; }
  .facts tr, .facts th, .facts td { display: block; }
  .facts th { white-space: normal; }
  .facts td { padding-bottom: .4rem; }
  figure { margin-right: 0; }
}
"""

# Sorts tables, shows what a cell holds, and draws the pictures; the page needs nothing else.
SCRIPT = """
(() => {
  "use strict";
  const value = (row, column) => {
    const cell = row.cells[column], given = cell.dataset.value;
    if (given === undefined) return cell.textContent;
    return given === "" ? null : Number(given);
  };
  const compare = (a, b) => typeof a === "number" && typeof b === "number"
    ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  const sort = (table, heading, column) => {
    const rows = [...table.tBodies[0].rows];
    const numeric = rows.some((row) => typeof value(row, column) === "number");
    const before = heading.getAttribute("aria-sort");
    const down = before === null ? numeric : before === "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    rows.sort((one, other) => {
      const a = value(one, column), b = value(other, column);
      if (a === null || b === null) return (a === null) - (b === null);
      return down ? compare(b, a) : compare(a, b);
    });
    table.tBodies[0].append(...rows);
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((heading, column) => {
      const button = heading.querySelector("button");
      if (button) button.addEventListener("click", () => sort(table, heading, column));
    });
  }

  const tip = document.createElement("div");
  tip.id = "tip";
  tip.setAttribute("role", "tooltip");
  document.body.append(tip);
  const hide = () => { tip.style.display = "none"; };
  const show = (cell) => {
    tip.textContent = cell.dataset.tip;
    tip.style.display = "block";
    const at = cell.getBoundingClientRect(), own = tip.getBoundingClientRect();
    const left = Math.min(at.left, innerWidth - own.width - 8);
    const below = at.bottom + own.height + 8 < innerHeight;
    tip.style.left = Math.max(8, left) + "px";
    tip.style.top = Math.max(8, below ? at.bottom + 4 : at.top - own.height - 4) + "px";
  };
  for (const cell of document.querySelectorAll("[title]")) {
    cell.dataset.tip = cell.title;
    cell.removeAttribute("title");
    cell.tabIndex = 0;
    cell.addEventListener("pointerenter", () => show(cell));
    cell.addEventListener("focus", () => show(cell));
    cell.addEventListener("pointerleave", hide);
    cell.addEventListener("blur", hide);
  }
  addEventListener("scroll", hide, true);

  const BAR = 32; // pixels for the buttons above a picture
  const BUTTONS = [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]];

  // A picture is as dark as the page. It is as wide as it was made, or as the page is, or as its
  // labels need at least.
  const night = matchMedia("(prefers-color-scheme: dark)");
  const templates = JSON.parse(document.getElementById("templates")?.textContent ?? "{}");
  const draw = (box) => {
    const figure = JSON.parse(box.querySelector("script").textContent);
    const { least, title_height: lost } = figure.layout.meta, full = figure.layout.width;
    const width = Math.round(Math.max(Math.min(least, full), Math.min(full, box.clientWidth)));
    const theme = night.matches ? "dark" : "light";
    if (box.drawn === theme + width) return;
    box.drawn = theme + width;
    figure.layout.template = templates[theme];
    figure.layout.width = width;
    figure.layout.height += BAR - lost;
    figure.layout.margin.t += BAR - lost;
    delete figure.layout.title;
    if (width < 0.9 * full)
      for (const trace of figure.data)
        if (trace.type === "heatmap" && !trace.text) delete trace.texttemplate;
    const config = { displaylogo: false, displayModeBar: true, modeBarButtons: BUTTONS };
    Plotly.react(box.querySelector("div"), figure.data, figure.layout, config);
  };
  const boxes = [...document.querySelectorAll(".picture")];
  const fit = () => {
    if (typeof Plotly !== "undefined") boxes.forEach(draw);
    for (const box of document.querySelectorAll(".scroll, .picture"))
      box.toggleAttribute("data-wide", box.scrollWidth > box.clientWidth + 1);
  };
  fit();
  night.addEventListener("change", fit);
  let waiting = 0;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(fit, 150);
  });
})();
"""
