"""The four output formats of a command."""

from __future__ import annotations

import csv
import io
import json

from pipeline.commands.output import cut_cells, render_rows

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
