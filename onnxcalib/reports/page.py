"""The report as one HTML page: nothing from the network, light and dark; without its script all figures still stand."""

from __future__ import annotations

import html
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from onnxcalib.analysis.layer_rows import ReportData, worst_rows
from onnxcalib.names import printable
from onnxcalib.reports import script
from onnxcalib.reports.network import colour_of, network
from onnxcalib.reports.svg import Picture

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2328; --muted: #656d77; --rule: #d1d5da;
 --band: #dbe9f4; --first: #0b6e99; --second: #c4622d; --third: #7a5ea8; --card: #f5f7f9; }
@media (prefers-color-scheme: dark) { :root { --paper: #15181c; --ink: #e6e8eb; --muted: #9aa4ae; --rule: #3a4149;
 --band: #23384a; --first: #4fb3dd; --second: #ec935f; --third: #b79bea; --card: #1f242a; } }
body { margin: 0 auto; max-width: 60rem; padding: 2rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
 font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; } h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; }
p { margin: .4rem 0; } .muted, figcaption { color: var(--muted); } figcaption { font-size: .875rem; }
code, pre { font: .85em/1.5 ui-monospace, monospace; }
pre { background: var(--card); padding: .75rem 1rem; white-space: pre-wrap; overflow-wrap: anywhere; }
td code { overflow-wrap: anywhere; }
figure { margin: 1rem 0; overflow-x: auto; } svg { width: 100%; height: auto; display: block; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; }
@media (max-width: 40rem) { figure svg { min-width: 40rem; } table { display: block; overflow-x: auto; }
 td code { display: inline-block; min-width: 12rem; } }
th, td { text-align: left; padding: .3rem .6rem .3rem 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { color: var(--muted); font-weight: 600; } .number { text-align: right; font-variant-numeric: tabular-nums; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .75rem; margin: 1rem 0; }
.card { background: var(--card); border-radius: .5rem; padding: .75rem 1rem; }
.card b { font-size: 1.5rem; display: block; }
.scroll { max-height: 26rem; overflow: auto; } summary { cursor: pointer; margin: .5rem 0; }
"""


ALLOWED = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(report: ReportData, pictures: Mapping[str, Picture]) -> str:
    """The whole page."""
    repeat = report["repeat"]
    sections = (
        ("outcome", "What was asked, and what came out", _outcome(report)),
        ("bits", "Bits along the network", _bits(report, pictures)),
        ("network", "The network", network(report) or "<p>There is no graph to draw.</p>"),
        ("sensitivity", "Sensitivity of each layer", _sensitivity(report, pictures)),
        ("curve", "Size against loss", _curve(report, pictures)),
        ("layers", "Noise of each layer, and which hurt the most", _layers(report, pictures)),
        ("histograms", "What the worst layers hold and read", _histograms(report, pictures)),
        ("tuning", "Before and after tuning", _tuning(report, pictures)),
        ("size", "Where the bytes are", _figure(pictures, "size")),
        ("constants", "Stored as integers, computed with in float", _constants(report)),
        ("float", "What stays float, and why", _float(report)),
        ("repeat", "How to repeat this run", _repeat(repeat)),
    )
    body = "\n".join(f'<section id="{key}"><h2>{title}</h2>\n{shown}</section>' for key, title, shown in sections)
    title = f"{text(repeat['output'])}, quantized from {text(repeat['model'])}"
    return document(title, f"<p class=muted>onnxcalib {text(repeat['versions']['onnxcalib'])}</p>\n{body}\n")


def document(title: str, body: str) -> str:
    """A page that may load nothing from anywhere; the title is HTML already."""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{ALLOWED}">'
        f"<style>{STYLE}{script.STYLE}</style></head>\n"
        f"<body><h1>{title}</h1>\n{body}<script>{script.SCRIPT}</script></body></html>\n"
    )


def _outcome(report: ReportData) -> str:
    asked, out = report["asked"], report["outcome"]
    before, after = out["float"], out["quantized"]
    share = 100 * after["bytes"] / before["bytes"]
    cards = [("size", f"{share:.1f} %", f"{after['bytes']:,} of {before['bytes']:,} bytes")]
    if after["latency_ratio"] is not None:
        times = f"{after['latency_ms']:.2f} of {before['latency_ms']:.2f} ms, one sample"
        cards.append(("latency", f"{after['latency_ratio']:.2f}x", times))
    if after["agreement"] is not None:
        cards.insert(0, ("agreement with float", f"{after['agreement']:.2f} %", f"{after['samples']:,} samples"))
    if after["top1"] is not None:
        cards.insert(0, ("top-1", f"{after['top1']:.2f} %", f"float {before['top1']:.2f} %"))
    if after["sqnr_db"] is not None:
        cards.append(("SQNR of the outputs", f"{after['sqnr_db']:.1f} dB", f"loss {after['distillation_loss']:.3g}"))
    shown = "".join(
        f"<div class=card><span class=muted>{name}</span><b>{value}</b><span class=muted>{note}</span></div>"
        for name, value, note in cards
    )
    equal = f" Equalized: {text(', '.join(report['equalized']))}." if report["equalized"] else ""
    own = " These samples calibrated the model: expect a little less on others." if out["calibrated_on_it"] else ""
    return (
        f"<p>Asked: {text(asked)}. Judged by: {text(report['judged_by'])}.{equal}</p><div class=cards>{shown}</div>"
        f"<p class=muted>Measured on {text(out['data'])}, {after['samples']:,} samples.{own}</p>"
        + _budget(out.get("budget"))  # older reports have none
    )


def _budget(proven: ReportData | None) -> str:
    if proven is None:
        return ""
    return (
        f"<p>Accuracy budget: {text(proven['metric'])} fell from {proven['before']:.4g} to {proven['after']:.4g} on "
        f"{proven['samples']:,} samples held out, a drop of {proven['drop']:.4g} for the {proven['most']:g} allowed; "
        f"other samples lose more than that with a chance of {100 * proven['chance']:.0f} %.</p>"
    )


def _bits(report: ReportData, pictures: Mapping[str, Picture]) -> str:
    counts: dict[str, int] = {}
    for row in report["layers"]:
        counts[row["bits"]] = counts.get(row["bits"], 0) + 1
    mix = ", ".join(f"{count} at {name}" for name, count in sorted(counts.items()))
    return f"<p>{len(report['layers'])} layers: {text(mix)}.</p>" + _figure(pictures, "bits")


def _sensitivity(report: ReportData, pictures: Mapping[str, Picture]) -> str:
    if report["sensitivity"] is None:
        return (
            "<p>One precision was asked for, so nothing was measured to choose from. Which layers cost the most at it "
            "is below. For a table, type <code>onnxcalib sensitivity</code>, or give <code>--bits</code> a list.</p>"
        )
    if "sensitivity" not in pictures:
        return "<p>No layer loses anything that could be measured at any precision on offer.</p>"
    samples = report["sensitivity"]["samples"]
    return (
        f"<p>Measured on {samples} samples. Dots on the foot of the axis lose nothing that could be measured.</p>"
        + _figure(pictures, "sensitivity")
    )


def _curve(report: ReportData, pictures: Mapping[str, Picture]) -> str:
    chosen = report["chosen"]
    if chosen is None:
        return "<p>There is a curve where bits are mixed: <code>--bits w4a4,w8a8 --compression 0.18</code>.</p>"
    found = f"best by estimate ({chosen['proof']})"
    if chosen["method"] != "integer program":
        found = f"better when measured than the best by estimate ({chosen['proof']})"
    return (
        f"<p>Chosen, as {found} of all assignments of that size: {chosen['size']:.4f} of float, loss "
        f"{chosen['estimated_loss']:.4g} estimated, {chosen['measured_loss']:.4g} measured before tuning.</p>"
        + _figure(pictures, "curve")
        + _chooser(report)
    )


def _chooser(report: ReportData) -> str:
    """A walk along the integer program's curve: bits of each layer, size and loss of every size."""
    points = [point for point in report["curve"] if point["method"] == "integer program" and "bits" in point]
    if not points:
        return ""
    layers = [row["layer"] for row in report["sensitivity"]["layers"]]
    precisions = sorted({bits for point in points for bits in point["bits"].values()})
    whole = report["sensitivity"]["float_costs"]["size"]
    near = min(range(len(points)), key=lambda place: abs(points[place]["size"] - report["chosen"]["size"]))
    data = {
        "layers": layers,
        "precisions": precisions,
        "colours": [colour_of(int(name[1:].split("a")[0])) for name in precisions],
        "points": [
            {
                "size": point["size"], "bytes": round(point["size"] * whole), "loss": point["loss"],
                "bits": [precisions.index(point["bits"][name]) for name in layers], "chosen": place == near,
            }
            for place, point in enumerate(points)
        ],
    }  # fmt: skip
    keys = "".join(
        f'<span><i style="background:{colour}"></i>{text(name)}</span>'
        for name, colour in zip(precisions, data["colours"], strict=True)
    )
    return (
        "<div class=only-script><label for=chooser>Walk along the integer program's curve, from the smallest file to "
        f"the largest:</label><input type=range id=chooser min=0 max={len(points) - 1} value={near}>"
        "<p id=chooser-told aria-live=polite></p><div class=strip id=chooser-strip></div>"
        f"<p class=legend>{keys}</p><p>For this size, type <code id=chooser-typed></code>.</p></div>"
        + script.embedded(data)
    )


def _layers(report: ReportData, pictures: Mapping[str, Picture]) -> str:
    worst = worst_rows(report["layers"])
    if worst:
        names = ("layer", "bits", "share, %", "SQNR, dB", "alone, dB", "to help it, type")
        rows = [
            (
                _code(row["layer"]), row["bits"], f"{100 * row['loss_share']:.1f}", _number(row["sqnr_db"]),
                _number(row["alone_db"]), _code(row["advice"]),
            )
            for row in worst
        ]  # fmt: skip
        hurt = _table(names, rows, {2, 3, 4})
    else:
        hurt = "<p>No layer alone costs anything that could be measured.</p>"
    columns = ("layer", "op", "bits", "weights", "bytes", "SQNR, dB", "alone, dB", "share, %")
    rows_all = [
        (
            _code(row["layer"]), row["op"], row["bits"], f"{row['parameters']:,}", f"{row['bytes']:,}",
            _number(row["sqnr_db"]), _number(row["alone_db"]),
            "-" if row["loss_share"] is None else f"{100 * row['loss_share']:.1f}",
        )
        for row in report["layers"]
    ]  # fmt: skip
    on, alone = report["loss"]["samples"], report["loss"].get("alone", report["loss"]["samples"])
    fewer = f", on {alone} of the samples" if alone < on else ""
    return (
        f"<p>On {on} calibration samples, after the bias and before the activation. A layer's "
        "share: the float model's softened loss with this layer alone as it is in the file, of the sum of these over "
        f"all layers{fewer}.</p>"
        + _figure(pictures, "sqnr")
        + _figure(pictures, "hurting")
        + hurt
        + f"<details><summary>All {len(rows_all)} layers</summary>"
        + searchable("all-layers", "find layers, by name, op or bits", columns, rows_all, {3, 4, 5, 6, 7})
        + "</details>"
    )


def _histograms(report: ReportData, pictures: Mapping[str, Picture]) -> str:
    if not report["histograms"]:
        return "<p>No layer hurts enough to be looked at.</p>"
    rows = []
    for row in report["histograms"]:
        for what in ("weight", "input"):
            if row[what] is not None:
                clipped = f"{100 * row[what]['clipped']:.2f}"
                span = f"{row[what]['low']:.4g} to {row[what]['high']:.4g}"
                qparams = f"{row[what]['range_low']:.4g} to {row[what]['range_high']:.4g}"
                rows.append((_code(row["layer"]), what, span, qparams, clipped))
    note = (
        "<p>Counts are logarithmic. Weights are in steps of each channel's grid; zeros among inputs are left out.</p>"
    )
    return note + _figure(pictures, "histograms") + _table(("layer", "of", "values", "grid", "clipped, %"), rows, {4})


def _tuning(report: ReportData, pictures: Mapping[str, Picture]) -> str:
    if not report["stages"]:
        return "<p>The plain pipeline tunes nothing: add <code>--pipeline light</code> or <code>advanced</code>.</p>"
    rows = [
        (row["stage"], f"{row['before']:.4g}", f"{row['after']:.4g}", "yes" if row["kept"] else "no: it did not help")
        for row in report["stages"]
    ]
    return _figure(pictures, "tuning") + _table(("step", "before", "after", "kept"), rows, {1, 2})


def _constants(report: ReportData) -> str:
    found = report.get("constants", [])  # older reports have none
    if not found:
        return "<p>Nothing beside the layers' weights.</p>"
    rows = [
        (
            _code(row["constant"]), row["op"], "x".join(map(str, row["shape"])), str(row["bits"]),
            f"{row['float_bytes']:,}", f"{row['bytes']:,}",
        )
        for row in found
    ]  # fmt: skip
    return _table(("constant", "read by", "shape", "bits", "float bytes", "bytes"), rows, {3, 4, 5})


def _float(report: ReportData) -> str:
    if not report["float"]:
        return "<p>Every Conv, Gemm and MatMul is quantized.</p>"
    rows = [(_code(row["node"]), row["op"], row["reason"]) for row in report["float"]]
    return searchable("float-nodes", "find nodes, by name, op or reason", ("node", "op", "why"), rows)


def _repeat(repeat: ReportData) -> str:
    hashes = [(name, _code(value)) for name, value in repeat["sha256"].items()]
    versions = list(repeat["versions"].items())
    return (
        f"<p>Save this recipe as <code>recipe.toml</code>, then type:</p><pre>{text(repeat['recipe'])}</pre>"
        f"<pre>{text(repeat['command'])}</pre>"
        f"<p>{repeat['samples']:,} calibration samples from {_code(repeat['calibration'])}.</p>"
        + _table(("sha-256 of", ""), hashes)
        + "<p></p>"
        + _table(("version of", ""), versions)
    )


def _figure(pictures: Mapping[str, Picture], name: str) -> str:
    if name not in pictures:
        return ""
    return figure(pictures[name])


def figure(picture: Picture) -> str:
    """A picture with its caption."""
    return f"<figure>{picture.inline}<figcaption>{text(picture.caption)}.</figcaption></figure>"


def searchable(
    key: str, hint: str, names: Sequence[str], rows: Sequence[Sequence[str]], numeric: Collection[int] = ()
) -> str:
    """A long table that sorts by a click on a head, with a box that leaves only the rows that hold some words."""
    box = f'<input type=search class=only-script data-table="{key}" placeholder="{hint}" aria-label="{hint}">'
    return f"{box}<div class=scroll>{_table(names, rows, numeric, f' id={key} class=sortable')}</div>"


def _table(
    names: Sequence[str], rows: Sequence[Sequence[str]], numeric: Collection[int] = (), attributes: str = ""
) -> str:
    """Names are data: a cell is escaped unless it is markup."""

    def cells(tag: str, row: Sequence[str]) -> str:
        shown = [cell if isinstance(cell, Html) else text(cell) for cell in row]
        kinds = [f"{tag}{' class=number' if place in numeric else ''}" for place in range(len(row))]
        return "".join(f"<{kind}>{cell}</{tag}>" for kind, cell in zip(kinds, shown, strict=True))

    head, body = cells("th", names), "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table{attributes}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


class Html(str):
    """What is markup already; any other text is escaped."""

    __slots__ = ()


def _code(value: Any) -> Html:
    return Html(f"<code>{text(value)}</code>")


def text(value: Any) -> str:
    """A text as it is, whatever it holds; lines stay lines."""
    return "\n".join(html.escape(printable(line)) for line in str(value).split("\n"))
