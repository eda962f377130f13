"""The figures of a report, drawn from its numbers alone; one without anything to show is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from onnxcalib.analysis.layer_rows import ReportData, worst_rows
from onnxcalib.reports.names import label_layers, short, unread
from onnxcalib.reports.plots import LOOKS, pyplot
from onnxcalib.reports.svg import (
    BAND,
    BIT_COLOURS,
    FIRST,
    INK,
    MUTED,
    SECOND,
    STYLE,
    THIRD,
    Drawing,
    Picture,
    drawing,
    finish,
)

SHOWN_WORST = 4
FEW = 60  # layers up to which points are joined and bars have gaps


def draw(report: ReportData) -> dict[str, Picture]:
    """Every figure that the numbers have something for, by name."""
    makers: tuple[Callable[[ReportData], Drawing | None], ...] = (
        bits, sensitivity, curve, noise, hurting, histograms, tuning, size,
    )  # fmt: skip
    with pyplot().rc_context(STYLE):
        return {drawn.name: finish(drawn) for maker in makers if (drawn := maker(report)) is not None}


def runs(names: Sequence[str], reports: Sequence[ReportData]) -> Picture:
    """Several runs: what each costs in bytes, and how far its outputs are from the float model's."""
    with pyplot().rc_context(STYLE):
        drawn, axes = drawing("runs", "Size of the file against the signal to noise of its outputs, a dot a run", 3.8)
        for name, report in zip(names, reports, strict=True):
            before, after = report["outcome"]["float"], report["outcome"]["quantized"]
            if after["sqnr_db"] is not None:
                place = 100 * after["bytes"] / before["bytes"], after["sqnr_db"]
                (dot,) = axes.plot(*([value] for value in place), "o", color=FIRST, ms=7)
                drawn.tip(dot, f"{name}: {report['asked']}")
                axes.annotate(short(name), place, xytext=(6, 4), textcoords="offset points", fontsize=8)
        axes.set_xlabel("size, % of the float file")
        axes.set_ylabel("SQNR of the outputs, dB")
        axes.margins(0.15)
        axes.grid()
        return finish(drawn)


def bits(report: ReportData) -> Drawing | None:
    """Weight and activation bits along the network."""
    rows = report["layers"]
    if not rows:  # only constants are stored
        return None
    drawn, (top, bottom) = drawing("bits", "Bits of every layer, from input to output", 3.9, 2, sharex=True)
    wide = 0.86 if len(rows) <= FEW else 1.0
    for axes, key, what in ((top, "weight_bits", "weights"), (bottom, "activation_bits", "activations")):
        widths = [row[key] for row in rows]
        highest, colours = max(8, *widths), [BIT_COLOURS.get(bit, MUTED) for bit in widths]
        bars = axes.bar(range(len(rows)), widths, width=wide, color=colours, edgecolor=colours, lw=0.3)
        for bar, row in zip(bars, rows, strict=True):
            drawn.tip(bar, f"{row['layer']}: {row['bits']}, {row['bytes']:,} bytes of weights")
        axes.set_ylabel(f"bits of {what}")
        axes.set_ylim(0, highest + 0.4)
        axes.set_yticks([bit for bit in (2, 4, 6, 8, 16, 32) if bit <= highest])
        axes.grid(axis="y")
    label_layers(bottom, [row["layer"] for row in rows])
    return drawn


def sensitivity(report: ReportData) -> Drawing | None:
    """The increase of the loss by layer and precision."""
    table = report["sensitivity"]
    if table is None:
        return None
    choices = sorted({choice for row in table["layers"] for choice in row["losses"]} - {table["base"]})
    values = [max(loss, 0.0) for row in table["layers"] for choice, loss in row["losses"].items() if choice in choices]
    if not choices or not any(values):
        return None
    floor = max(min(value for value in values if value) / 2, max(values) / 1e4)
    caption = f"Increase of the {table['loss']} loss when one layer alone leaves {table['base']}"
    drawn, axes = drawing("sensitivity", caption, 3.6)
    wide = 5 if len(table["layers"]) <= FEW else 3
    for choice, colour, marker in zip(choices, (FIRST, SECOND, THIRD, MUTED, INK), "osD^v", strict=False):
        known = [(place, row["layer"], row["losses"].get(choice)) for place, row in enumerate(table["layers"])]
        known = [each for each in known if each[2] is not None]
        places, losses = [place for place, _, _ in known], [max(loss, floor) for _, _, loss in known]
        (dots,) = axes.plot(places, losses, marker, color=colour, ms=wide)
        drawn.tip_dots(dots, [f"{name} at {choice}: {loss:.3g}" for _, name, loss in known])
        axes.plot([], [], marker, color=colour, label=unread(choice))
    axes.set_yscale("log")
    axes.set_ylim(bottom=floor / 1.6)
    axes.set_ylabel("loss increase")
    axes.grid(axis="y")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=5)
    label_layers(axes, [row["layer"] for row in table["layers"]])
    return drawn


def curve(report: ReportData) -> Drawing | None:
    """Loss against size by the integer program and both greedy rules, and what was chosen."""
    points, chosen = report["curve"], report["chosen"]
    if not points:
        return None
    drawn, axes = drawing("curve", "Estimated loss against the size of all constants, relative to float", 3.8)
    colours = dict(zip(LOOKS, (FIRST, SECOND, MUTED), strict=True))
    for method, (_, marker, line) in LOOKS.items():
        mine = [point for point in points if point["method"] == method]
        sizes, lost = [point["size"] for point in mine], [max(point["loss"], 1e-12) for point in mine]
        axes.plot(sizes, lost, line, color=colours[method], marker=marker, label=method, ms=4, lw=1.4)
    place = [chosen["size"]], [max(chosen["estimated_loss"], 1e-12)]
    (star,) = axes.plot(*place, "*", color=THIRD, ms=15, label="chosen", zorder=5)
    losses = f"loss {chosen['estimated_loss']:.4g} estimated, {chosen['measured_loss']:.4g} measured"
    drawn.tip(star, f"size {chosen['size']:.4f}, {losses}")
    axes.set_yscale("log")
    axes.set_xlabel("size relative to float")
    axes.set_ylabel("estimated loss")
    axes.grid(which="major")
    axes.legend()
    return drawn


def noise(report: ReportData) -> Drawing | None:
    """Signal to noise of every layer, alone and with all that comes before it."""
    rows = [row for row in report["layers"] if row["sqnr_db"] is not None]
    if not rows:
        return None
    drawn, axes = drawing("sqnr", "SQNR of every layer's output against the float model's", 3.8)
    many = len(rows) > FEW
    series = (
        ("alone_db", "the layer alone, on float inputs", SECOND, "o"),
        ("sqnr_db", "in the quantized model", FIRST, "s"),
    )
    for key, label, colour, marker in series:
        known = [(place, row) for place, row in enumerate(rows) if row[key] is not None]
        places, values = [place for place, _ in known], [row[key] for _, row in known]
        if key == "sqnr_db" or not many:  # many layers' own noise, joined, would hide the other
            axes.plot(places, values, "-", color=colour, lw=1.1, alpha=0.6)
        (dots,) = axes.plot(places, values, marker, color=colour, ms=2.5 if many else 4.5)
        drawn.tip_dots(dots, [f"{row['layer']} ({row['bits']}): {row[key]:.1f} dB, {label}" for _, row in known])
        axes.plot([], [], marker, color=colour, label=label)
    axes.set_ylabel("SQNR, dB")
    axes.grid(axis="y")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    label_layers(axes, [row["layer"] for row in rows])
    return drawn


def hurting(report: ReportData) -> Drawing | None:
    """The layers that alone cost the float model the most."""
    rows = worst_rows(report["layers"])
    if not rows:
        return None
    caption = "The layers that hurt the most: their share of what all layers cost one by one"
    drawn, axes = drawing("hurting", caption, 0.9 + 0.27 * len(rows))
    for place, row in enumerate(rows):
        share = 100 * row["loss_share"]
        (bar,) = axes.barh([place], [share], color=BIT_COLOURS.get(row["weight_bits"], MUTED), height=0.72)
        drawn.tip(bar, f"{row['layer']} ({row['bits']}): {share:.1f} % of the loss of all layers one by one")
        _beside(axes, unread(row["bits"]), share, place)
    _downwards(axes, [short(row["layer"]) for row in rows], "% of the loss of all layers one by one", 0.08)
    return drawn


def histograms(report: ReportData) -> Drawing | None:
    """Weights and inputs of the worst layers, with the ranges of their grids."""
    rows = report["histograms"][:SHOWN_WORST]
    if not rows:
        return None
    caption = "The layers that hurt the most: values (bars) and the range of the grid (band)"
    drawn, grid = drawing("histograms", caption, 1.75 * len(rows), len(rows), 2, squeeze=False)
    for axes, row in zip(grid, rows, strict=True):
        _histogram(axes[0], row["weight"], f"{short(row['layer'])}: weights, in steps of the grid")
        if row["input"] is None:
            axes[1].set_axis_off()
        else:
            _histogram(axes[1], row["input"], f"{short(row['layer'])}: what it reads")
    return drawn


def _histogram(axes: Any, histogram: ReportData, title: str) -> None:
    step = (histogram["high"] - histogram["low"]) / len(histogram["counts"])
    edges = [histogram["low"] + step * place for place in range(len(histogram["counts"]) + 1)]
    axes.axvspan(histogram["range_low"], histogram["range_high"], color=BAND, lw=0)
    axes.stairs(histogram["counts"], edges, color=FIRST, fill=True, baseline=0.7)
    for bound in (histogram["range_low"], histogram["range_high"]):
        axes.axvline(bound, color=SECOND, lw=1.2, ls="--")
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.set_title(title, fontsize=8)
    axes.tick_params(labelsize=7)


def tuning(report: ReportData) -> Drawing | None:
    """Held-out losses before and after each step."""
    rows = report["stages"]
    if not rows:
        return None
    drawn, axes = drawing("tuning", "Held-out loss before and after each step", 0.9 + 0.5 * len(rows))
    for key, shift, colour in (("before", -0.2, MUTED), ("after", 0.2, FIRST)):
        places = [place + shift for place in range(len(rows))]
        axes.barh(places, [row[key] for row in rows], height=0.36, color=colour, label=key)
        for place, row in zip(places, rows, strict=True):
            _beside(axes, f"{row[key]:.3g}", row[key], place)
    _downwards(axes, [row["stage"] for row in rows], "loss")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    return drawn


def size(report: ReportData) -> Drawing | None:
    """Where the bytes of the file are."""
    parts = {name: count for name, count in report["bytes"].items() if count}
    if not parts:
        return None
    drawn, axes = drawing("size", "Bytes of the quantized file", 0.8 + 0.27 * len(parts))
    for place, (name, count) in enumerate(parts.items()):
        (bar,) = axes.barh([place], [count], color=FIRST, height=0.72)
        drawn.tip(bar, f"{name}: {count:,} bytes")
        _beside(axes, f"{count:,}", count, place)
    _downwards(axes, list(parts), "bytes")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    return drawn


def _downwards(axes: Any, names: Sequence[str], unit: str, margin: float = 0.12) -> None:
    """Names the bars, first on top, and the axis below them."""
    axes.set_yticks(range(len(names)), names)  # which are short or ours
    axes.invert_yaxis()
    axes.margins(x=margin)
    axes.set_xlabel(unit)
    axes.grid(axis="x")


def _beside(axes: Any, text: str, value: float, place: float) -> None:
    """Writes a number at the end of its bar."""
    axes.annotate(text, (value, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=7.5)
