"""Explore: the address holds the view; charts, exports and SQL."""

from __future__ import annotations

import io
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from dashboards import routes
from dashboards.devices.answers import parse_comparison
from dashboards.devices.html import explore_href
from dashboards.explore import choose, export, sql_view
from dashboards.explore.columns import plain_table, shown_table, unique_names
from dashboards.theme import LIGHT, SERIES
from dashboards.time_chart.component import Look, chart_data
from pipeline.model.records import SECOND, iso
from pipeline.model.signals import CATALOGUE
from tests.dashboards.conftest import NOW
from tests.dashboards.device_tables import compare_table, empty_caches, serve_node
from tests.dashboards.test_dashboard_pages import page, shown


def explore_script() -> None:
    from dashboards.explore import page

    page.page()


@pytest.fixture(autouse=True)
def _empty_caches() -> None:
    empty_caches()
    sql_view.run.clear()


def test_no_two_lines_of_one_chart_look_the_same() -> None:
    end = NOW // SECOND * SECOND
    asked = {"from": [iso(end - 3600 * SECOND)], "to": [iso(end)], "signal": ["gpu.temperature", "nic.state"]}
    names = [f"gpu:n1.{i}" for i in range(16)] + [f"port:n1.mlx5_{i}" for i in range(16)]
    found = parse_comparison(compare_table({**asked, "entity": names}, "n1", 16))
    for own in (frozenset[str](), frozenset(names[:1]), frozenset(names[5:6]), frozenset((names[0], names[16]))):
        for panel in chart_data(found, (), Look(own=own))["panels"]:
            looks = {drawn_look(line) for line in panel["lines"]}
            assert len(looks) == len(panel["lines"]) == 16, own


def drawn_look(line: dict[str, Any]) -> tuple[str, int]:
    """Returns colour and dash as the script draws a line: an own one has the colour of the device."""
    return (LIGHT.device, 0) if line["own"] else (SERIES[line["colour"]][0], line["dash"])


def test_a_page_without_a_band_names_no_peers(api: Any) -> None:
    serve_node(api, gpus=8)
    asked = {"entity": "node:n003", "signal": "gpu.temperature"}
    assert (
        "Peers: usual peers, those of the first device of a chart; over a long range an even sample of them."
        in shown(page(explore_script, **asked))
    )
    empty_caches()
    full = api.tables["compare"]
    api.tables["compare"] = lambda query: without_band(full(query))
    assert "Peers: none" in shown(page(explore_script, **asked))


def without_band(table: dict[str, Any]) -> dict[str, Any]:
    """Returns the comparison of devices that have no peers."""
    return {**table, "signals": [{**signal, "peers": 0, "band": None} for signal in table["signals"]]}


def test_presets_and_examples_use_what_exists() -> None:
    assert {name for names in choose.PRESETS.values() for name in names} <= CATALOGUE.keys()
    assert all(len(names) <= choose.MAX_SIGNALS for names in choose.PRESETS.values())


def test_enter_chooses_the_first_match_not_all(api: Any) -> None:
    serve_node(api)
    fields = page(explore_script, live="0").multiselect
    assert [field.label for field in fields] == ["Devices", "Signals"]
    assert [field.proto.select_all for field in fields] == [0, 0]  # else it is the first line of the list


@pytest.mark.slow
@pytest.mark.parametrize("text", ["GPU 3 of n003", " gpu 3 OF N003", "gpu:n003.3", "N003.3"])
def test_a_device_is_chosen_by_the_name_that_the_page_shows(api: Any, text: str) -> None:
    names = ("gpu:n003.30", "gpu:n003.3", "gpu:n0033.3")
    api.hits = [{"kind": "gpu", "id": e, "match": e, "text": "", "state": None} for e in names]
    assert choose.find_entities(text) == ("gpu:n003.3",)


def test_the_address_has_the_view(api: Any) -> None:
    serve_node(api)
    test = page(
        explore_script, entity=["node:n003", "gpu:n004.0"], signal=["gpu.temperature", "gpu.nonsense"], peers="class",
        range="24h", live="0",
    )  # fmt: skip
    text = shown(test)
    assert "Node n003, GPU 0 of n004: 1 signal" in text
    assert "gpu.nonsense: not in the catalogue" in text
    assert [m.value for m in test.multiselect] == [["node:n003", "gpu:n004.0"], ["gpu.temperature"]]
    asked = next(query for path, query in api.asked if path == "compare")
    assert asked["entity"] == ["node:n003", "gpu:n004.0"]
    assert asked["peers"] == ["class"]
    assert "Values in the time range" in text
    assert len(test.get("download_button")) == 2


@pytest.mark.slow
def test_a_fixed_range_is_asked_for_as_it_is(api: Any) -> None:
    serve_node(api)
    start, end = iso(NOW - 7200 * SECOND), iso(NOW - 3600 * SECOND)
    page(explore_script, entity="node:n003", signal="gpu.power", **{"from": start, "to": end}, live="0")
    asked = next(query for path, query in api.asked if path == "compare")
    assert (asked["from"], asked["to"]) == ([start], [end])


def test_without_a_choice_the_page_says_what_to_do(api: Any) -> None:
    text = shown(page(explore_script, live="0"))
    assert "Choose a device and a signal above." in text
    assert "GPU heat of node n003" in text  # the critical node of the fleet


def test_addresses_repeat_names() -> None:
    entities = ["node:a,b", "gpu:\N{SNOWMAN}.1"]
    assert explore_href(entities, ["gpu.power"]).startswith(
        "explore?entity=node%3Aa%2Cb&entity=gpu%3A%E2%98%83.1&signal="
    )
    assert routes.entity_href("gpu:a.1").startswith("node?entity=")


# --- export ---------------------------------------------------------------------------------------------------------


def _table() -> pa.Table:
    query = {"from": [iso(NOW - 3600 * SECOND)], "to": [iso(NOW)], "entity": ["node:n1"], "signal": ["gpu.power"]}
    return export.chart_table(parse_comparison(compare_table(query, "node:n1", 2)))


def test_a_chart_is_exported_without_its_gaps() -> None:
    table = _table()
    assert table.num_rows == 2 * (60 - 7)  # points 21 to 27 have no value
    parquet = pyarrow.parquet.read_table(io.BytesIO(export.write_parquet(table)))
    assert parquet.equals(table)
    csv = pyarrow.csv.read_csv(io.BytesIO(export.write_csv(table)))
    assert csv.num_rows == table.num_rows
    assert csv.column_names == table.column_names
    assert b"2026-01-01T11:00:00.000000Z" in export.write_csv(table)
    assert set(table["entity"].to_pylist()) == {"gpu:n1.0", "gpu:n1.1"}


def test_a_text_is_no_formula_in_a_spreadsheet() -> None:
    table = pa.table({"job": ["=cmd|' /C calc'!A0", "plain"], "tags": [["a"], []], "x": [1, 2]})
    text = export.write_csv(table).decode()
    assert "'=cmd" in text
    assert "plain" in text


def _csv(query: str) -> list[str]:
    """Returns the lines of the CSV of a query's result, which Parquet can hold too."""
    table = plain_table(duckdb.sql(query).to_arrow_table())
    assert pyarrow.parquet.read_table(io.BytesIO(export.write_parquet(table))).num_rows == table.num_rows
    return export.write_csv(table).decode().splitlines()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("INTERVAL '1 month 5 days 90 seconds'", '"1 month 5 days 00:01:30"'),
        ("INTERVAL '-14 months'", '"\'-1 year -2 months"'),
        ("INTERVAL '-1500 milliseconds'", '"\'-00:00:01.5"'),
        ("INTERVAL '0 seconds'", '"00:00:00"'),
        ("NULL::INTERVAL", ""),
        ("TIMESTAMP_NS '2026-01-01 00:00:00.123456789'", '"2026-01-01T00:00:00.123456789Z"'),
        ("TIMESTAMP_S '2026-01-01 00:00:01'", '"2026-01-01T00:00:01.000000Z"'),
        ("TIMESTAMP_MS '2026-01-01 00:00:01.25'", '"2026-01-01T00:00:01.250000Z"'),
        ("TIMESTAMPTZ '2026-01-01 01:00:00+01'", '"2026-01-01T00:00:00.000000Z"'),
        ("'infinity'::TIMESTAMP", ""),
        ("'-infinity'::TIMESTAMPTZ", ""),
        ("TIMESTAMP '290000-01-01'", '"+290000-01-01T00:00:00.000000Z"'),
        ("DATE '2026-01-31'", '"2026-01-31"'),
        ("DATE '20000-01-31'", '"+20000-01-31"'),
        ("'infinity'::DATE", ""),
        ("'=1+1'::ENUM('=1+1')", '"\'=1+1"'),
        ("['infinity'::TIMESTAMP]", None),
        ("[INTERVAL '1 day']", None),
        ("union_value(a := 1)", '"1"'),
        ("TIME '10:00:00'", "10:00:00.000000"),
    ],
)
def test_a_value_of_any_type_has_a_text_in_the_files_of_a_query(value: str, text: str | None) -> None:
    lines = _csv(f"SELECT {value} AS x")
    assert lines[0] == '"x"'
    assert text is None or lines[1:] == [text]


# --- SQL ------------------------------------------------------------------------------------------------------------


def _stream(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def test_a_query_in_the_address_shows_its_result(api: Any) -> None:
    api.sql = (200, _stream(pa.table({"entity": ["gpu:n1.0", "<b>x</b>"], "hottest": [91.5, 60.0]})))
    test = page(explore_script, view="sql", sql="SELECT 1", live="0")
    text = shown(test)
    assert "2 rows in" in text
    assert test.text_area[0].value == "SELECT 1"
    assert [len(frame.value) for frame in test.dataframe] == [2]
    assert len(test.get("download_button")) == 2
    assert "At most 10 s, 100,000 rows" in text


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        ("urn:fleetpulse:wrong-query", "The query has a mistake."),
        ("urn:fleetpulse:refused", "Only SELECT over the listed tables is allowed"),
        ("urn:fleetpulse:over-limit", "or use a rollup table"),
    ],
)
def test_an_error_says_what_to_do(api: Any, kind: str, advice: str) -> None:
    problem = f'{{"type": "{kind}", "title": "Bad Request", "status": 400, "detail": "the query: no"}}'
    api.sql = (400, problem.encode())
    text = shown(page(explore_script, view="sql", sql="SELECT nonsense", live="0"))
    assert "The query: no (HTTP 400)" in text
    assert advice in text


def test_an_example_is_written_into_the_address(api: Any) -> None:
    api.sql = (200, _stream(pa.table({"n": pa.array([], pa.int64())})))
    test = page(explore_script, view="sql", live="0")
    next(box for box in test.selectbox if box.key == "sql-example").select("XIDs of the last day").run()
    assert sql_view.EXAMPLES["XIDs of the last day"] in test.query_params["sql"]
    assert "The query returned no rows." in shown(test)


def test_columns_of_classes_and_rollups_come_from_the_catalogue() -> None:
    columns = {name: unit for name, unit, _ in sql_view.columns_of("gpu")}
    assert columns["temperature"] == "°C"
    assert "temperature_mean" in {name for name, _, _ in sql_view.columns_of("rollup_600_gpu")}
    assert sql_view.columns_of("incidents") == []


def test_times_become_lines_and_texts_bars() -> None:
    times = pa.array([0, 1], pa.timestamp("us", "UTC"))
    over_time = pa.table({"name": ["a", "b"], "time": times, "x": [1, 2], "y": [0.5, np.nan]})
    assert sql_view.chart_columns(over_time) == ("time", ["x", "y"])
    assert sql_view.chart_columns(pa.table({"name": ["a"], "x": [1]})) == ("name", ["x"])
    assert sql_view.chart_columns(pa.table({"x": [1], "y": [2]})) == ("", [])


def test_columns_of_one_name_have_names_of_their_own(api: Any) -> None:
    times = pa.array([NOW, NOW + SECOND], pa.timestamp("us", "UTC"))
    values = [times, pa.array([61.5, 62.0]), pa.array([71.5, 72.0]), pa.array([1, 2])]
    joined = pa.Table.from_arrays(values, names=["time", "temperature", "temperature", "temperature_2"])
    api.sql = (200, _stream(joined))
    test = page(explore_script, view="sql", sql="SELECT 1", live="0")
    assert not test.exception
    assert list(test.dataframe[0].value.columns) == ["time", "temperature", "temperature_3", "temperature_2"]
    assert unique_names(["a", "a", "b", "a"]) == ["a", "a_2", "b", "a_3"]


def test_an_interval_is_shown_as_text(api: Any) -> None:
    api.sql = (200, _stream(duckdb.sql("SELECT 'A1' AS id, INTERVAL '26 hours' AS age").to_arrow_table()))
    test = page(explore_script, view="sql", sql="SELECT 1", live="0")
    assert list(test.dataframe[0].value["age"]) == ["26:00:00"]


def test_a_time_that_no_browser_has_is_text_in_the_table() -> None:
    far = "TIMESTAMP '290000-01-01' AS far, 'infinity'::TIMESTAMPTZ AS never, '-infinity'::DATE AS before"
    near = "TIMESTAMP '9999-12-31' AS near, DATE '2026-01-31' AS day, NULL::TIMESTAMP AS none"
    table = duckdb.sql(f"SELECT {far}, {near}").to_arrow_table()
    shown_columns = shown_table(table)
    assert shown_columns.column("far").to_pylist() == ["+290000-01-01T00:00:00.000000Z"]
    assert shown_columns.column("never").to_pylist() == shown_columns.column("before").to_pylist() == [None]
    assert shown_columns.select(["near", "day", "none"]).equals(table.select(["near", "day", "none"]))


def test_sets_of_signals_look_like_buttons(api: Any) -> None:
    serve_node(api)
    buttons = {button.label: button.proto.type for button in page(explore_script, live="0").button}
    assert {buttons[name] for name in choose.PRESETS} == {"secondary"}
