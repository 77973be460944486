"""The page Facility with a real API, without a browser."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from dashboards import snapshot
from dashboards.answers import parse_series
from dashboards.facility.charts import trend
from dashboards.facility.markup import NO_VALVE
from dashboards.theme import PALETTES
from pipeline.model.records import SECOND, iso
from tests.dashboards.conftest import NOW, series_table
from tests.dashboards.facility_tables import answers, cooling_values, facility_table, prediction, unit
from tests.dashboards.test_dashboard_pages import page, shown


def script() -> None:
    from dashboards.facility.page import page

    page()


@pytest.fixture
def site(api: Any) -> Any:
    api.answers = answers()
    return api


def test_the_worst_unit_and_the_time_to_throttling_are_the_headline(site: Any) -> None:
    text = shown(page(script))
    assert "1 critical and 2 degraded of 13 units, 1 without data; GPUs behind CDU c2 throttle in about 9 min" in text
    assert text.index(">CDU c2<") < text.index(">CDU c1<")


def test_a_prediction_before_any_incident_is_not_headed_by_no_problem(site: Any) -> None:
    site.answers["facility"]["counts"] = {kind: {"ok": 2} for kind in site.answers["facility"]["counts"]}
    text = shown(page(script))
    assert "GPUs behind CDU c2 throttle in about 9 min; no incident on " in text
    assert "No problem" not in text


def test_cooling_shows_flow_temperatures_pressure_pump_and_what_hangs_on_it(site: Any) -> None:
    text = shown(page(script))
    for part in ("193 L/min", "32.4 °C", "50.3 °C", "17.9 K", "1.98 bar", "1,063 rpm", "32 nodes", "Median of all"):
        assert part in text
    assert 'href="facility?entity=cdu%3Ac2"' in text
    assert 'href="incident?id=A1"' in text
    assert "not predictable: its GPUs do not warm" in text


def test_power_is_shown_against_its_limit_or_says_that_there_is_none(site: Any) -> None:
    text = shown(page(script))
    assert '<b class="fp-share">96 %</b>' in text
    assert "no limit reported" in text
    assert "BREAKER: TRIPPED" in text


def test_leaks_are_listed_and_dry_detectors_counted(site: Any) -> None:
    text = shown(page(script))
    assert "WARNING" in text
    assert "1 detector is dry." in text


@pytest.mark.slow
def test_names_are_never_markup(site: Any) -> None:
    text = shown(page(script))
    assert "<b>c3</b>" not in text
    assert "&lt;b&gt;c3&lt;/b&gt;" in text


def test_seconds_to_throttling_are_not_zero_minutes(site: Any) -> None:
    for one in site.answers["facility"]["units"]:
        if one["entity"] == "cdu:c2":
            one["throttle"] |= {"minutes": 0.27}
    text = shown(page(script, entity="cdu:c2"))
    assert "CDU c2: GPUs throttle in about 16 s" in text
    assert "in about 0 min" not in text


@pytest.mark.slow
def test_one_unit_shows_how_its_prediction_is_computed(site: Any) -> None:
    test = page(script, entity="cdu:c2")
    text = shown(test)
    assert "CDU c2: GPUs throttle in about 9 min" in text
    assert "6 K below the limit that it reports. The 12 GPUs with the least margin warm by 0.65 ± 0.02 K/min" in text
    assert "(line through the last 10 min). 6 K ÷ 0.65 K/min = 9 min." in text
    assert "6 K ÷ 0.65 K/min = 9 min" in text
    assert "rack%3Ar000" in text
    asked = [query for path, query in site.asked if path == "series"]
    assert {query["signal"][0] for query in asked} >= {"coolant.flow", "pump.speed"}


@pytest.mark.slow
def test_the_range_of_the_trends_is_in_the_address(site: Any) -> None:
    page(script, entity="cdu:c2", range="24h")
    query = next(query for path, query in site.asked if path == "series")
    assert query["from"][0][:10] != query["to"][0][:10]
    assert page(script, entity="cdu:c2", range="<b>").segmented_control[0].value == "1h"


@pytest.mark.slow
def test_a_unit_that_is_not_known_and_other_entities_are_answered(site: Any) -> None:
    site.answers["facility"] = None
    site.broken["facility"] = (404, b'{"detail": "unit is not known"}')
    assert "CDU c9 is not known" in shown(page(script, entity="cdu:c9"))
    assert "Expected a unit of cooling or power" in shown(page(script, entity="gpu:n1.0"))


def test_no_units_says_what_to_configure(api: Any) -> None:
    api.answers = {"facility": facility_table([])}
    text = shown(page(script))
    assert "No unit of cooling or power is known" in text
    assert "[collector.redfish]" in text


def test_without_the_api_nothing_is_called_healthy(site: Any) -> None:
    site.answers["facility"] = facility_table([unit("cdu:c1")])
    assert "No problem on 1 unit" in shown(page(script))
    site.broken["facility"] = (503, b"{}")
    snapshot._fetch_cached.clear()
    assert "Last known: no problem on 1 unit" in shown(page(script))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"minutes": 0.0, "rate": None}, "is at the limit that it reports."),
        ({"minutes": None, "reason": "its GPUs do not warm"}, "Not predictable: its GPUs do not warm."),
    ],
)
def test_other_predictions(site: Any, changes: dict[str, Any], expected: str) -> None:
    site.answers["facility"] = facility_table([unit("cdu:c2", throttle=prediction(**changes))])
    assert expected in shown(page(script, entity="cdu:c2"))


def test_a_site_of_500_units_lists_the_worst_and_counts_the_rest(site: Any) -> None:
    site.answers["facility"] = facility_table([unit(f"pdu:p{i}") for i in range(500)])
    text = shown(page(script))
    assert "300 more are not listed" in text
    assert text.count("fp-badge") < 900


def facility_of(site: Any, *units: dict[str, Any]) -> str:
    """Returns the page about some units."""
    site.answers["facility"] = {**facility_table(), "units": list(units)}
    return shown(page(script))


def test_throttling_is_unknown_not_absent_while_no_gpu_reports_its_limit(site: Any) -> None:
    why = "the GPUs behind it report no limit (gpu.thermal_margin)"
    blind = prediction(minutes=None, gpu=None, left=None, rate=None, error=None, gpus=0, reason=why)
    calm = prediction(minutes=None, rate=None, error=None, reason="its GPUs do not warm")
    text = facility_of(site, unit("cdu:c1", throttle=blind), unit("cdu:c2", throttle=blind))
    assert "no GPU reports its limit" in text
    assert "throttling predicted" not in text
    snapshot._fetch_cached.clear()
    text = facility_of(site, unit("cdu:c1", throttle=blind), unit("cdu:c2", throttle=calm))
    assert '<b>none</b><span class="fp-word">throttling predicted</span><span class="fp-sub">unknown for 1 unit' in text


def test_the_power_of_all_pdus_names_those_that_it_lacks(site: Any) -> None:
    known = unit("pdu:p1", values={"power.draw": 105_000.0})
    text = facility_of(site, known, unit("pdu:p2", "no_data", last_seen=None))
    assert "<b>105 kW</b>" in text
    assert "drawn by 1 of 2 PDUs" in text
    assert "1 without data" in text


def test_a_unit_shows_the_least_open_valve_of_its_connectors(site: Any) -> None:
    site.answers["series"] = series_table("connector:c1.1", "coolant.valve_position")
    assert NO_VALVE in shown(page(script))
    snapshot._fetch_cached.clear()
    valves = [("c1.1", 0.42), ("c1.2", 0.9)]
    parts = [unit(f"connector:{n}", parents=["cdu:c1"], values={"coolant.valve_position": v}) for n, v in valves]
    text = facility_of(site, unit("cdu:c1", values=cooling_values(328.5, 39.7, 3205.3)), *parts)
    row = text[text.index(">CDU c1<") :].partition("</tr>")[0]
    assert "42 % open, <a" in row
    assert "90 % open" in text
    assert NO_VALVE not in text
    snapshot._fetch_cached.clear()
    assert "Valve position" in shown(page(script, entity="connector:c1.1"))


@pytest.mark.parametrize(
    ("changes", "age_s", "below", "cell"),
    [
        ({"values": {"coolant.flow": 328.5}}, 3, "Last data 11:59:57Z (3 s ago)", ""),
        ({"values": {}}, 3, "Last data 11:59:57Z (3 s ago)", ""),
        (
            {"values": {}},
            720,
            "No data for 12 min: last data 11:48:00Z. Its state now is unknown.",
            "no data for 12 min",
        ),
        ({"values": {}}, 86_400, "No data for 1 d 0 h: last data 2025-12-31 12:00:00Z.", "no data for 1 d 0 h"),
        ({"values": {}, "last_seen": None}, 0, "No data of this unit has arrived yet.", "no data yet"),
    ],
)
def test_a_unit_says_below_its_headline_when_it_last_sent_data(
    site: Any, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], age_s: int, below: str, cell: str
) -> None:
    monkeypatch.setattr(snapshot, "now", lambda: NOW)
    for name in ("cdu:c1", "pdu:p1"):
        snapshot._fetch_cached.clear()
        found = unit(name, "critical", **{"last_seen": iso(NOW - age_s * SECOND), **changes})
        site.answers["facility"] = facility_table([found])
        assert f'<p class="fp-below">{below}' in shown(page(script, entity=name))
        assert (f'<span class="fp-silent">{cell}</span>' in shown(page(script))) == bool(cell)


def test_a_healthy_unit_is_not_called_silent_while_the_api_is_away(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = unit("cdu:c1", values={}, last_seen=iso(NOW - 3 * SECOND))
    site.answers["facility"] = facility_table([found])
    monkeypatch.setattr(snapshot, "now", lambda: NOW)
    page(script, entity="cdu:c1")
    page(script)
    site.broken["facility"] = (503, b'{"detail": "away"}')
    snapshot._fetch_cached.clear()
    monkeypatch.setattr(snapshot, "now", lambda: NOW + 1920 * SECOND)
    one, every = shown(page(script, entity="cdu:c1")), shown(page(script))
    assert '<p class="fp-below">Last data 11:59:57Z</p>' in one
    for text in (one, every):
        assert "Showing the last known state." in text
        assert "o data for 3" not in text


def test_a_silent_unit_keeps_its_trends(site: Any) -> None:
    site.answers["facility"] = facility_table([unit("cdu:c2", "critical", values={})])
    page(script, entity="cdu:c2")
    asked = {query["signal"][0] for path, query in site.asked if path == "series"}
    assert {"coolant.flow", "coolant.supply_temperature"} <= asked
    assert "power.draw" not in asked


def test_a_leak_detector_that_is_silent_since_yesterday_says_so(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "now", lambda: NOW)
    old = unit("leak_detector:r12", "no_data", last_seen=iso(NOW - 86_400 * SECOND))
    assert "2025-12-31 12:00:00Z (1 d 0 h ago)" in facility_of(site, old)


def test_pdus_show_the_balance_of_their_phases_and_feeds(site: Any) -> None:
    assert "their balance is not known" in shown(page(script))
    snapshot._fetch_cached.clear()
    balances = [
        {"phases": 0.04, "circuit": "circuit:p1.m1", "share": 0.51, "feeds": 2},
        {"phases": 0.31, "circuit": "circuit:p2.m1", "share": 0.8, "feeds": 2},
    ]
    text = facility_of(site, *(unit(f"pdu:p{i}", balance=b) for i, b in enumerate(balances, 1)), unit("pdu:p3"))
    assert "phases 4 % off (<a" in text
    assert "51 % of 2 feeds" in text
    assert "PHASES 31 % OFF" in text
    assert "80 % OF 2 FEEDS" in text
    assert "their balance is not known" not in text


def test_nodes_with_uneven_supplies_are_listed_and_the_others_counted(site: Any) -> None:
    text = shown(page(script))
    assert "63 of 64 nodes share the load evenly: no supply is more than 20 % above the mean" in text
    table = text[text.index("<caption>Nodes with uneven") :].partition("</table>")[0]
    assert re.findall(r">([^<>]+)</(?:a|span)></?", table)[-2:] == ["33 %", "1,600 W, 1,600 W, 0 W, 1,600 W"]
    assert 'href="node?entity=node%3An042"' in table


@pytest.mark.parametrize(
    ("supplies", "said"),
    [
        (None, "does not compare the supplies"),
        ({"nodes": 0, "uneven": 0, "limit": 0.2, "worst": []}, "No node reports the load of two power supplies"),
    ],
)
def test_supplies_that_are_not_read_are_not_called_even(site: Any, supplies: Any, said: str) -> None:
    site.answers["facility"] = facility_table(supplies=supplies)
    text = shown(page(script))
    assert said in text
    assert "evenly" not in text


@pytest.mark.parametrize(
    ("signal", "unit", "title"), [("reservoir.level", "1", "%"), ("coolant.flow", "L/min", "L/min")]
)
def test_every_trend_has_a_unit(signal: str, unit: str, title: str) -> None:
    series = replace(parse_series(series_table("reservoir:r1", signal)), signal=signal, unit=unit)
    drawn = trend(series, PALETTES["light"]).to_dict()["layer"][-1]["encoding"]["y"]
    assert (drawn["title"], drawn["axis"].get("format", "")) == (title, ".3~%" if title == "%" else ",~f")
