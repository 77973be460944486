"""Charts from series."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC
from zoneinfo import ZoneInfo

import pytest

from dashboards import words
from dashboards.answers import Point, Series
from dashboards.evidence import chart_rows, legend_names, peers_chart
from dashboards.rates import convert_series
from dashboards.theme import PALETTES
from pipeline.model.records import SECOND


def series(values: list[float | None], peers: int = 7, peer_kind: str = "rack", step: int = 10) -> Series:
    points = tuple(
        Point(i * step * SECOND, v, *((1.0, 0.9, 1.1) if peers else (None,) * 3)) for i, v in enumerate(values)
    )
    return Series("gpu:n1.0", "gpu.temperature", "Cel", "Temperature", peer_kind, peers, points)


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_a_chart_is_valid_vega_lite_with_a_utc_axis_and_the_onset(mode: str) -> None:
    chart = peers_chart(series([1.0, 2.0, 3.0]), 10 * SECOND, PALETTES[mode]).to_dict()  # type: ignore[index]
    assert {layer["encoding"]["x"]["scale"]["type"] for layer in chart["layer"]} == {"utc"}
    assert [layer["mark"]["type"] for layer in chart["layer"]] == ["area", "line", "line", "rule", "text"]
    onset = chart["datasets"][chart["layer"][-1]["data"]["name"]]
    assert onset == [{"time": 10_000, "label": "onset 1970-01-01 00:00:10Z"}]


@pytest.mark.parametrize(
    ("signal", "unit", "drawn"),
    [
        ("nic.symbol_errors", "{error}/s", "error/h"),
        ("nic.carrier_changes", "{change}/s", "change/h"),
        ("nvlink.crc_errors", "{error}/s", "error/h"),
        ("gpu.dram_corrected", "{error}/s", "error/h"),  # usual rates of memory errors are per hour in titles
        ("nvlink.recoveries", "{event}/s", "event/h"),
        ("nic.rx_packets", "{packet}/s", "packet/s"),
        ("nic.phy_bits", "{bit}/s", "bit/s"),
        ("nic.port_tx_wait", "{tick}/s", "tick/s"),
        ("nic.tx_pause", "{packet}/s", "packet/s"),
        ("nvlink.fec_0", "{block}/s", "block/s"),
        ("node.context_switches", "{switch}/s", "switch/s"),
        ("nic.rx_bytes", "By/s", "B/s"),
    ],
)
def test_error_rates_are_drawn_per_hour_as_titles_name_them(signal: str, unit: str, drawn: str) -> None:
    given = replace(series([0.5, None, 1.0]), signal=signal, unit=unit)
    shown = convert_series(given)
    factor = 3600 if drawn.endswith("/h") else 1
    assert [p.value for p in shown.points] == [0.5 * factor, None, factor]
    assert (shown.points[0].median, shown.points[0].high) == (factor, 1.1 * factor)
    chart = peers_chart(shown, 0, PALETTES["light"]).to_dict()
    assert chart["layer"][2]["encoding"]["y"]["title"] == drawn
    assert given.points[0].value == 0.5


def test_without_peers_the_device_is_drawn_alone() -> None:
    chart = peers_chart(series([1.0, 2.0], peers=0), 0, PALETTES["light"]).to_dict()
    assert [layer["mark"]["type"] for layer in chart["layer"]] == ["line", "rule", "text"]


def test_few_peers_are_shown_as_a_line_without_a_band() -> None:
    chart = peers_chart(series([1.0, 2.0], peers=1, peer_kind="class"), 0, PALETTES["light"]).to_dict()
    assert [layer["mark"]["type"] for layer in chart["layer"]] == ["line", "line", "rule", "text"]
    assert chart["layer"][0]["encoding"]["color"]["scale"]["domain"] == ["GPU 0 of n1", "its one peer of its kind"]


def test_an_empty_series_gives_a_chart() -> None:
    assert peers_chart(series([]), 0, PALETTES["light"]).to_dict()["layer"]


def test_a_short_gap_is_bridged_and_a_long_gap_breaks_the_line() -> None:
    short = chart_rows(series([1.0, None, 1.0, 1.0]), "value")
    assert [row["value"] for row in short] == [1.0, 1.0, 1.0]
    long = chart_rows(series([1.0, 1.0, None, None, None, None, 1.0]), "value")
    assert [row["value"] for row in long] == [1.0, 1.0, None, 1.0]
    assert [row["time"] for row in long] == [0, 10_000, 20_000, 60_000]


def test_a_signal_with_a_long_interval_is_one_line() -> None:
    values: list[float | None] = [1.0 if i % 6 == 0 else None for i in range(60)]
    assert None not in [row["value"] for row in chart_rows(series(values), "value")]


def test_the_legend_names_the_peers() -> None:
    assert legend_names(series([1.0]))[1] == "median of 7 peers in the same rack"
    assert legend_names(series([1.0], peer_kind="class"))[1] == "median of 7 peers of its kind"


def test_a_name_with_quotes_does_not_break_the_chart() -> None:
    odd = Series('gpu:n"1.0', "s", "", "h", "rack", 1, series([1.0]).points)
    assert peers_chart(odd, 0, PALETTES["light"]).to_dict()


def test_axis_onset_and_tooltip_of_a_chart_are_in_one_zone() -> None:
    def parts() -> tuple[int, int, str, set[str], set[str]]:
        chart = peers_chart(series([1.0, 2.0, 3.0]), 10 * SECOND, PALETTES["light"]).to_dict()
        text = json.dumps(chart)
        labels = set(re.findall(r'"labelExpr": "([^"]+)"', text))
        titles = set(re.findall(r'"title": "(UTC|JST)"', text))
        rows = [row for values in chart["datasets"].values() for row in values]
        onset = next(row for row in rows if "label" in row)
        first = min(row["time"] for row in rows if "label" not in row)
        return first, onset["time"], onset["label"], labels, titles

    first, onset, label, labels, titles = parts()
    assert (onset, label, labels, titles) == (10_000, "onset 1970-01-01 00:00:10Z", {"datum.label + 'Z'"}, {"UTC"})
    words.set_zone(ZoneInfo("Asia/Tokyo"))
    try:
        local = parts()
    finally:
        words.set_zone(UTC)
    ahead = 9 * 3_600_000
    assert local == (first + ahead, onset + ahead, "onset 1970-01-01 09:00:10 JST", {"datum.label"}, {"JST"})
