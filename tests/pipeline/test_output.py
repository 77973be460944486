"""The four output formats of a command."""

from __future__ import annotations

import csv
import io
import json
import unicodedata

import pytest

from pipeline.commands.output import cut_cells, render_rows, wrap_cells
from pipeline.model.text_width import wrap_text

ROWS = [{"name": "a", "value": 1.5, "more": None}, {"name": "with, comma", "value": float("nan"), "more": ["x", "y"]}]
COLUMNS = ("name", "value", "more")


def test_json_is_one_list_with_null_for_missing_values() -> None:
    assert json.loads(render_rows(ROWS, COLUMNS, "json")) == [
        {"name": "a", "value": 1.5, "more": None},
        {"name": "with, comma", "value": None, "more": ["x", "y"]},
    ]


def test_json_lines_have_one_object_per_line() -> None:
    assert [json.loads(line)["name"] for line in render_rows(ROWS, COLUMNS, "jsonl").splitlines()] == [
        "a",
        "with, comma",
    ]


def test_csv_quotes_and_leaves_missing_values_empty() -> None:
    assert list(csv.reader(io.StringIO(render_rows(ROWS, COLUMNS, "csv")))) == [
        ["name", "value", "more"],
        ["a", "1.5", ""],
        ["with, comma", "", "x y"],
    ]


def test_a_table_aligns_names_left_and_numbers_right() -> None:
    text = render_rows([{"n": "a", "v": 1}, {"n": "bcd", "v": 100}], ("n", "v"), "table")
    assert text == "n      v\na      1\nbcd  100\n"


def test_a_table_has_one_line_per_row_and_no_codes_for_terminals() -> None:
    assert render_rows([{"n": "a\nb\x1b[31m\u202ec"}], ("n",), "table") == "n\na b [31m c\n"


def test_no_rows_give_a_header_or_an_empty_list() -> None:
    assert render_rows([], ("n",), "table") == "n\n"
    assert render_rows([], ("n",), "csv") == "n\n"
    assert json.loads(render_rows([], ("n",), "json")) == []
    assert render_rows([], ("n",), "jsonl") == ""


def test_one_long_name_leaves_room_for_the_columns_after_it() -> None:
    rows = [{"who": "alexandra.konstantinopoulou@infra.example.com", "n": 7}, {"who": "ann\x1b[1m", "n": 8}, {"n": 9}]
    assert render_rows(cut_cells(rows, ("who",), 16), ("who", "n"), "table") == (
        "who               n\nalexandra.konst…  7\nann [1m           8\n                  9\n"
    )


WIDE = "\u4ea4\u63db\u673a\u98ce\u6247\u6545\u969c"  # seven characters of two columns each


def columns_of(line: str) -> int:
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else not unicodedata.combining(c) for c in line)


@pytest.mark.parametrize("text", [WIDE, "e\u0301" * 9, "\U0001f525 " * 5, f"fan of {WIDE}"])
def test_a_table_counts_the_columns_of_wide_characters(text: str) -> None:
    lines = render_rows([{"a": text, "b": "end"}, {"a": "short", "b": "end"}], ("a", "b"), "table").splitlines()
    assert len({columns_of(line[: line.index("end")]) for line in lines[1:]}) == 1


@pytest.mark.parametrize("width", [20, 37, 40, 119])
def test_lines_of_wide_characters_are_within_the_width(width: int) -> None:
    row = {"id": "inc-1", "who": WIDE * 3, "summary": f"{WIDE * 9} of node n1 {WIDE}", "n": 5}
    names = ("id", "who", "summary", "n")
    wrapped = wrap_cells([row], names, max(width, 40))
    assert max(map(columns_of, render_rows(wrapped, names, "table").splitlines())) <= max(width, 40)
    assert "".join(str(one["summary"] or "") for one in wrapped).replace(" ", "") == row["summary"].replace(" ", "")
    assert max(map(columns_of, render_rows([row], names, "table", width).splitlines())) <= width
    assert columns_of(str(cut_cells([row], ("who",), width)[0]["who"])) <= width


@pytest.mark.parametrize("columns", range(12, 60))
def test_wide_text_is_wrapped_without_loss(columns: int) -> None:
    text = f"    2026-11-29  {WIDE} of n1  {WIDE * 4} and more, {'x' * 20} \u00e9nd"
    lines = wrap_text(text, columns, "      ")
    assert max(map(columns_of, lines)) <= columns
    assert all(line.startswith("      ") for line in lines[1:])
    assert "".join("".join(lines).split()) == "".join(text.split())
    assert lines[0].startswith("    2026")
    plain = "plain text of words and of more words"
    assert wrap_text(plain, columns) == [line.replace("\u0301", "") for line in wrap_text(f"{plain}\u0301", columns)]
