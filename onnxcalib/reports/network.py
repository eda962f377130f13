"""The network as a picture of blocks, coloured by bits, with a bar for the noise."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from onnxcalib.analysis.layer_rows import ReportData
from onnxcalib.names import printable
from onnxcalib.reports.svg import BIT_COLOURS

CELL, BLOCK, LEAD = 30, 18, 14  # pixels: from block to block, of a block, of the space above a line for skips
COLUMNS = 30  # blocks side by side
LOUDEST_DB, QUIETEST_DB = 5.0, 45.0  # the bar is full at the one and gone at the other


def network(report: ReportData) -> str:
    """The picture, as SVG; nothing where the report has no graph."""
    nodes: Sequence[ReportData] = report.get("network") or []
    if not nodes:
        return ""
    rows = {row["layer"]: row for row in report["layers"]}
    places, height = _places(nodes)
    arrows = "".join(_arrow(places[source], places[at]) for at, node in enumerate(nodes) for source in node["reads"])
    drawn = "".join(_block(node, places[at], rows) for at, node in enumerate(nodes))
    width = COLUMNS * CELL
    return (
        f'<svg class=network viewBox="0 0 {width} {height}" role="img" aria-label="The network as blocks">'
        f"{arrows}{drawn}</svg>{_legend(report['layers'])}"
    )


def _places(nodes: Sequence[ReportData]) -> tuple[list[tuple[int, int]], int]:
    """Where each block stands: as far right as its longest way from the input, in lines like text."""
    ranks: list[int] = []
    for node in nodes:
        ranks.append(1 + max((ranks[source] for source in node["reads"]), default=-1))
    depth: dict[int, int] = {}
    stacked = []
    for rank in ranks:
        stacked.append(depth.get(rank, 0))
        depth[rank] = stacked[-1] + 1
    lines = max(ranks) // COLUMNS + 1
    heights = [max(depth[rank] for rank in depth if rank // COLUMNS == line) * CELL + LEAD for line in range(lines)]
    tops = [sum(heights[:line]) for line in range(lines)]
    places = [
        (rank % COLUMNS * CELL + CELL // 2, tops[rank // COLUMNS] + LEAD + level * CELL + CELL // 2)
        for rank, level in zip(ranks, stacked, strict=True)
    ]
    return places, sum(heights)


def _arrow(start: tuple[int, int], end: tuple[int, int]) -> str:
    """A line to the next block, an arc over those between; from one line of blocks to the next only its ends."""
    (x, y), (u, v), half = start, end, BLOCK // 2
    if u <= x or abs(v - y) > CELL * 8:
        path = f"M{x + half} {y}h{CELL // 4}M{u - half - CELL // 4} {v}h{CELL // 4}"
    elif u - x <= CELL:
        path = f"M{x + half} {y}L{u - half} {v}"
    else:
        top = min(y, v) - half - min(LEAD - 3, 3 + (u - x) // CELL)
        path = f"M{x} {y - half}C{x} {top} {x} {top} {x + half} {top}H{u - half}C{u} {top} {u} {top} {u} {v - half}"
    return f'<path d="{path}"/>'


def _block(node: ReportData, place: tuple[int, int], rows: Mapping[str, ReportData]) -> str:
    (x, y), half = place, BLOCK // 2
    square = f'x="{x - half}" y="{y - half}" width="{BLOCK}" height="{BLOCK}"'
    row = rows.get(node["name"])
    if not node["layer"]:
        return _titled(f"{node['op']} {node['name']}", f'<circle cx="{x}" cy="{y}" r="4"/>')
    if row is None:
        return _titled(f"{node['name']}: {node['op']}, float", f"<rect {square} class=float />")
    noise = row["sqnr_db"]
    told = "" if noise is None else f", {noise:.1f} dB"
    full = 0.0 if noise is None else min(max((QUIETEST_DB - noise) / (QUIETEST_DB - LOUDEST_DB), 0.0), 1.0)
    bar = round(full * BLOCK, 1)
    return _titled(
        f"{row['layer']}: {row['op']}, {row['bits']}{told}",
        f'<rect {square} fill="{colour_of(row["weight_bits"])}"/>'
        f'<rect x="{x - half}" y="{y + half - bar}" width="5" height="{bar}" class=noise />',
    )


def _titled(title: str, shapes: str) -> str:
    return f"<g><title>{html.escape(printable(title))}</title>{shapes}</g>"


def colour_of(bits: int) -> str:
    """The colour of a width."""
    return BIT_COLOURS.get(bits, "var(--muted)")


def _legend(rows: Sequence[ReportData]) -> str:
    widths = sorted({row["weight_bits"] for row in rows})
    keys = "".join(f'<span><i style="background:{colour_of(bits)}"></i>{bits} bits</span>' for bits in widths)
    return (
        f"<p class=legend>{keys}<span>a square is a layer, a dot where results meet</span>"
        f"<span>the bar is noise: none from {QUIETEST_DB:.0f} dB on, full at {LOUDEST_DB:.0f} dB</span></p>"
    )
