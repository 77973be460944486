"""Rows of a command as a table for people, or as JSON, JSON lines or CSV for programs."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pipeline.model.plain_text import make_printable, strip_codes
from pipeline.model.records import to_json
from pipeline.model.text_width import cut_text, measure_text, pad_text, wrap_text

Form = Literal["table", "json", "jsonl", "csv"]
LEAST_WRAPPED = 8
"""Width to which a column shrinks at most. Chosen: a word."""
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
    return "".join(f"{cut_text(line, width)}\n" for line in table.splitlines())


def cut_cells(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], most: int) -> list[dict[str, Any]]:
    """Returns rows with cells of at most `most` columns, so that one long name leaves room for the other columns."""
    texts = [{name: make_printable(_text(row.get(name))) for name in columns} for row in rows]
    cut = [{n: cut_text(text, most) for n, text in line.items() if measure_text(text) > most} for line in texts]
    return [{**row, **short} for row, short in zip(rows, cut, strict=True)]


def wrap_cells(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], width: int) -> list[dict[str, Any]]:
    """Returns rows with the widest cells on several lines, so that a table of `width` cuts none."""
    cells = [{name: make_printable(_text(row.get(name))) for name in columns} for row in rows]
    natural = {name: max([len(name), *(measure_text(row[name]) for row in cells)]) for name in columns}
    most = _find_widest(natural, width - 2 * (len(columns) - 1))
    found: list[dict[str, Any]] = []
    for row, line in zip(rows, cells, strict=True):
        parts = {name: _wrap(line[name], max(most, len(name))) for name in columns}
        whole = {name: row.get(name) if len(part) < 2 else part[0] for name, part in parts.items()}
        found.append({**row, **whole})
        rest = range(1, max(map(len, parts.values()), default=1))
        found += [{name: part[i] if i < len(part) else None for name, part in parts.items()} for i in rest]
    return found


def _find_widest(columns: Mapping[str, int], room: int) -> int:
    """Returns the width to which wide columns shrink so that all fit into `room` characters; names are not shortened.

    columns: name -> width of the longest value.
    """

    def fits(most: int) -> bool:
        return sum(min(width, max(most, len(name))) for name, width in columns.items()) <= room

    return next(filter(fits, range(max(room, LEAST_WRAPPED), LEAST_WRAPPED, -1)), LEAST_WRAPPED)


def _wrap(text: str, width: int) -> list[str]:
    return wrap_text(text, width) or [text]


def _csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([strip_codes(_text(row[name])) for name in columns] for row in rows)
    return out.getvalue()


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Returns a table with columns as wide as their longest value; numbers are right-aligned."""
    cells = [[make_printable(_text(row[name])) for name in columns] for row in rows]
    widths = [max(measure_text(line[i]) for line in [list(columns), *cells]) for i in range(len(columns))]
    right = [bool(rows) and all(isinstance(row[name], (int, float, type(None))) for row in rows) for name in columns]
    lines = [
        "  ".join(pad_text(text, w, is_right=r) for text, w, r in zip(line, widths, right, strict=True)).rstrip()
        for line in [list(columns), *cells]
    ]
    return "\n".join(lines) + "\n"


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
