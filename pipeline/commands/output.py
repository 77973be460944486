"""Rows of a command as a table for people, or as JSON, JSON lines or CSV for programs."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pipeline.model.records import to_json

Form = Literal["table", "json", "jsonl", "csv"]
FORMS: tuple[Form, ...] = ("table", "json", "jsonl", "csv")


def render_rows(rows: Iterable[Mapping[str, Any]], columns: Sequence[str], form: Form, width: int | None = None) -> str:
    """Returns the rows as text with a final newline. Missing and non-finite values are empty, null in JSON.

    width: lines of a table that are longer are cut, with `…` at their end.
    """
    plain = [{name: to_json(row.get(name)) for name in columns} for row in rows]
    if form == "json":
        return json.dumps(plain, indent=1, default=str) + "\n"
    if form == "jsonl":
        return "".join(json.dumps(row, default=str) + "\n" for row in plain)
    if form == "csv":
        return _csv(plain, columns)
    table = _table(plain, columns)
    if width is None:
        return table
    return "".join(f"{line if len(line) <= width else line[: width - 1] + '…'}\n" for line in table.splitlines())


def _csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_text(row[name]) for name in columns] for row in rows)
    return out.getvalue()


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Returns a table with columns as wide as their longest value; numbers are right-aligned."""
    cells = [[make_printable(_text(row[name])) for name in columns] for row in rows]
    widths = [max(len(line[i]) for line in [list(columns), *cells]) for i in range(len(columns))]
    right = [bool(rows) and all(isinstance(row[name], (int, float, type(None))) for row in rows) for name in columns]
    lines = [
        "  ".join(
            text.rjust(w) if r else text.ljust(w) for text, w, r in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in [list(columns), *cells]
    ]
    return "\n".join(lines) + "\n"


def make_printable(text: str) -> str:
    """Returns text without line ends and codes that a terminal would obey: comments and names come from others."""
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}" if abs(value) < 1e15 else f"{value:.0f}"
    if isinstance(value, list):
        return " ".join(map(_text, value))
    return json.dumps(value) if isinstance(value, dict) else str(value)


def print_message(line: str) -> None:
    """Prints a line for people on stderr."""
    sys.stderr.write(f"{line}\n")
