"""Finds the report that tells how a file came to be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onnxcalib.analysis.layer_rows import ReportData
from onnxcalib.errors import DataError
from onnxcalib.files import read_text
from onnxcalib.reports.data import FORMAT, sha256


def find_report(output: Path, report: Path | None) -> ReportData | None:
    """The numbers of the report that is named, or of one beside the file that tells of just these bytes."""
    if report is None:
        beside = (_read(path) for path in sorted(output.parent.glob("*.json")))
        return next((found for found in beside if found is not None and _is_about(found, output)), None)
    found = read_numbers(report)
    if not _is_about(found, output):
        path = report.with_suffix(".json")
        raise DataError(f"{path} tells of another file than {output}.", "Name the report of the run that wrote it.")
    return found


def read_numbers(report: Path) -> ReportData:
    """The numbers of a report, by its .html or its .json."""
    path = report.with_suffix(".json")
    if not path.exists():
        raise DataError(f"report {path} does not exist.", "Quantize with `report`, or name the .json beside the .html.")
    found = _read(path)
    if found is None:
        raise DataError(f"{path} is not a report's numbers.", "Name the .json that `report` wrote.")
    return found


def _read(path: Path) -> ReportData | None:
    try:
        found: Any = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.get("format") == FORMAT else None


def _is_about(found: ReportData, output: Path) -> bool:
    try:
        return bool(found["repeat"]["sha256"]["output"] == sha256(output))
    except (LookupError, TypeError):
        return False
