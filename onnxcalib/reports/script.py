"""What a report does in a browser: tables that sort and search, and a walk along the curve."""

from __future__ import annotations

import json
from typing import Any

from onnxcalib.analysis.layer_rows import finite

STYLE = """
th.sorts { cursor: pointer; user-select: none; } th.sorts:focus-visible { outline: 2px solid var(--first); }
th[aria-sort=ascending]::after { content: " \\2191"; } th[aria-sort=descending]::after { content: " \\2193"; }
input[type=search] { font: inherit; width: 100%; box-sizing: border-box; padding: .35rem .6rem; margin: .4rem 0;
 background: var(--card); color: var(--ink); border: 1px solid var(--rule); border-radius: .35rem; }
input[type=range] { width: 100%; accent-color: var(--first); }
.strip { display: flex; height: 1.6rem; gap: 1px; margin: .4rem 0; } .strip i { flex: 1 1 0; min-width: 0; }
.legend span { display: inline-block; margin-right: 1rem; } .legend { font-size: .875rem; color: var(--muted); }
.legend i { display: inline-block; width: .8rem; height: .8rem; margin-right: .3rem; vertical-align: -.05rem; }
svg.network path { fill: none; stroke: var(--muted); stroke-width: 1; }
svg.network circle { fill: var(--muted); } svg.network .noise { fill: var(--ink); opacity: .75; }
svg.network .float { fill: none; stroke: var(--muted); stroke-dasharray: 2 2; }
.only-script { display: none; } .scripted .only-script { display: block; }
"""

SCRIPT = """
"use strict";
document.documentElement.classList.add("scripted");

function value(row, column) {
  const text = row.cells[column].textContent.trim();
  const number = Number(text.replaceAll(",", ""));
  return text === "-" ? -Infinity : Number.isNaN(number) || text === "" ? text.toLowerCase() : number;
}

function sort(table, column, head) {
  const rising = head.getAttribute("aria-sort") !== "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", rising ? "ascending" : "descending");
  const rows = Array.from(table.tBodies[0].rows);
  rows.sort((a, b) => {
    const x = value(a, column), y = value(b, column);
    const order = typeof x === typeof y ? (x < y ? -1 : x > y ? 1 : 0) : typeof x === "number" ? -1 : 1;
    return rising ? order : -order;
  });
  table.tBodies[0].append(...rows);
}

for (const table of document.querySelectorAll("table.sortable")) {
  Array.from(table.tHead.rows[0].cells).forEach((head, column) => {
    head.classList.add("sorts");
    head.tabIndex = 0;
    head.addEventListener("click", () => sort(table, column, head));
    head.addEventListener("keydown", event => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(table, column, head); }
    });
  });
}

for (const box of document.querySelectorAll("input[type=search]")) {
  const table = document.getElementById(box.dataset.table);
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\\s+/).filter(word => word);
    for (const row of table.tBodies[0].rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every(word => text.includes(word));
    }
  });
}

const held = document.getElementById("chooser-data");
if (held) {
  const data = JSON.parse(held.textContent);
  const slider = document.getElementById("chooser"), told = document.getElementById("chooser-told");
  const strip = document.getElementById("chooser-strip"), typed = document.getElementById("chooser-typed");
  for (const layer of data.layers) strip.append(document.createElement("i"));
  if (data.layers.length > 100) strip.style.gap = "0";  // gaps alone would be wider than a telephone
  const show = () => {
    const point = data.points[slider.value];
    const counts = {};
    point.bits.forEach((place, layer) => {
      const name = data.precisions[place];
      counts[name] = (counts[name] || 0) + 1;
      const cell = strip.children[layer];
      cell.style.background = data.colours[place];
      cell.title = data.layers[layer] + ": " + name;
    });
    const mix = Object.keys(counts).sort().map(name => counts[name] + " at " + name).join(", ");
    const near = point.chosen ? ", nearest to what was chosen" : "";
    told.textContent = point.size.toFixed(4) + " of float (" + point.bytes.toLocaleString("en") + " bytes), "
      + "estimated loss " + point.loss.toPrecision(4) + near + "; " + mix;
    typed.textContent = "--compression " + (Math.ceil(point.size * 10000) / 10000);
  };
  slider.addEventListener("input", show);
  show();
}
"""


def embedded(data: Any) -> str:
    """Data for the script, in a form that ends no element whatever names it holds."""
    text = (
        json.dumps(finite(data), allow_nan=False)
        .replace("&", "\\u0026")
        .replace("<", "\\u003c")
        .replace(">", "\\u003e")
    )
    return f'<script type="application/json" id="chooser-data">{text}</script>'
