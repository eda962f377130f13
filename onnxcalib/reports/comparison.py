"""One page about several runs: what each asked for, what came out, and what every layer got."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from onnxcalib.analysis.layer_rows import ReportData
from onnxcalib.errors import DataError
from onnxcalib.files import check_outputs, replacing
from onnxcalib.reports.figures import runs as runs_figure
from onnxcalib.reports.find import read_numbers
from onnxcalib.reports.network import colour_of
from onnxcalib.reports.page import Html, document, figure, searchable, text

COLUMNS = ("run", "asked", "top-1, %", "agreement, %", "SQNR, dB", "loss", "bytes", "of float, %", "latency, ms")


def write_comparison(reports: Sequence[str | Path], path: str | Path) -> None:
    """Writes a page that compares runs by the numbers of their reports, the .html or the .json of each."""
    path = Path(path)
    files = [Path(each).with_suffix(suffix) for each in reports for suffix in (".html", ".json")]
    check_outputs({"output": path}, [("a report to compare", lambda: files)])
    found = {str(each): read_numbers(Path(each)) for each in reports}
    _about_one_model(found)
    with replacing(path) as temporary:
        temporary.write_bytes(comparison(found).encode())


def comparison(found: dict[str, ReportData]) -> str:
    """The page."""
    names = _short(list(found))
    numbers = list(found.values())
    rows = [_row(name, each) for name, each in zip(names, numbers, strict=True)]
    measured = {each["outcome"]["data"] for each in numbers}
    apart = "" if len(measured) == 1 else "<p><b>The runs were measured on different data: compare with care.</b></p>"
    return document(
        f"{len(rows)} runs of {text(numbers[0]['repeat']['model'])}",
        f"<p>Measured on {text(', '.join(sorted(measured)))}.</p>{apart}"
        + searchable("runs", "find runs", COLUMNS, rows, set(range(2, len(COLUMNS))))
        + figure(runs_figure(names, numbers))
        + "<h2>Bits of every layer</h2>"
        + searchable("layers", "find layers", ("layer", *names), _layers(numbers)),
    )


def _about_one_model(found: dict[str, ReportData]) -> None:
    by_hash: dict[str, str] = {}
    for path, report in found.items():
        by_hash.setdefault(report["repeat"]["sha256"]["model"], path)
    if len(by_hash) > 1:
        first, second = list(by_hash.values())[:2]
        raise DataError(f"{first} and {second} tell of different float models.", "Compare runs of one model.")


def _short(paths: Sequence[str]) -> list[str]:
    """Names of the runs: those of the files, or their paths where two are called the same."""
    stems = [Path(path).stem for path in paths]
    return stems if len(set(stems)) == len(stems) else list(paths)


def _row(name: str, report: ReportData) -> list[str]:
    before, after = report["outcome"]["float"], report["outcome"]["quantized"]
    digits = (("top1", 2), ("agreement", 2), ("sqnr_db", 1), ("distillation_loss", 5))
    quality = ["-" if after[key] is None else f"{after[key]:.{places}f}" for key, places in digits]
    share = f"{100 * after['bytes'] / before['bytes']:.1f}"
    return [name, report["asked"], *quality, f"{after['bytes']:,}", share, f"{after['latency_ms']:.2f}"]


def _layers(numbers: Sequence[ReportData]) -> list[list[str]]:
    by_run = [{row["layer"]: row for row in report["layers"]} for report in numbers]
    names = dict.fromkeys(name for rows in by_run for name in rows)
    return [[Html(f"<code>{text(name)}</code>"), *(_bits(rows.get(name)) for rows in by_run)] for name in names]


def _bits(row: ReportData | None) -> str:
    if row is None:
        return "float"
    noise = "" if row["sqnr_db"] is None else f" <span class=muted>{row['sqnr_db']:.1f} dB</span>"
    colour = colour_of(row["weight_bits"])
    return Html(f'<span class=legend><i style="background:{colour}"></i></span>{text(row["bits"])}{noise}')
