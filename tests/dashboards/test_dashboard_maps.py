"""Data of the scripts in the browser, and what the fleet page says beside them."""

from __future__ import annotations

import re
from datetime import UTC
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from dashboards import freshness, words
from dashboards.answers import Fleet, parse_incident
from dashboards.fleet_map import table
from dashboards.fleet_map.answers import (
    FleetLayout,
    FleetMap,
    parse_layout,
    parse_map,
    parse_share,
    selected_entities,
)
from dashboards.fleet_map.component import MapView, map_data
from dashboards.freshness.component import INTERVALS, stamp_data
from dashboards.incident_list.component import MAX_LISTED, _row, list_rows, sort_incidents
from dashboards.people_answers import parse_incident_page
from dashboards.snapshot import INTERVAL_S, CachedAnswer
from dashboards.views.fleet import headline
from dashboards.views.sharing import chance, share_markup
from pipeline.model.records import SECOND, Incident, iso
from tests.dashboards.conftest import Api, incident_table, map_tables, shared_table

NOW = 1_767_268_800 * SECOND
BUTTONS = (Path(freshness.__file__).parent / "freshness.html").read_text()


def incident(identity: str, severity: str = "page", state: str = "open", opened: int = NOW, **more: object) -> Incident:
    table = {
        "id": identity,
        "cause": "gpu:n1.0",
        "opened": iso(opened),
        "onset": iso(opened),
        "resolved": iso(opened) if state == "resolved" else None,
        "severity": severity,
        "members": [],
        "confidence": None,
        "state": state,
        "summary": "gpu:n1.0 is wrong",
        "simulated": False,
        **more,
    }
    return parse_incident(table)


def fleet_answer(newest: int, unready: tuple[str, ...] = ()) -> CachedAnswer[Fleet]:
    return CachedAnswer(Fleet(NOW, NOW - 60 * SECOND, False, None, (), newest=newest, unready=unready), NOW)


def fleet_tables(*nodes: dict[str, object], by: str = "rack", within: str = "") -> tuple[FleetMap, FleetLayout]:
    table, names = map_tables({**Api().fleet, "nodes": list(nodes)}, by, "state", within)
    return parse_map(table), parse_layout(names)


def node(name: str, rack: str | None, state: str, *incidents: str, affected: bool = False) -> dict[str, object]:
    made = {**Api().node(name, state, list(incidents)), "rack": rack}
    return {**made, "affected": affected}


FEW = (
    node("n1", "rack:r1", "critical", "A1"),
    node("n2", "rack:r1", "degraded", "B2", affected=True),
    node("n3", "rack:r2", "no_data"),
    node("<b>", None, "ok"),
)


def test_tables_have_each_group_and_each_node_of_a_state_with_links() -> None:
    found, layout = fleet_tables(*FEW)
    groups = table.group_table(found, layout)
    lines = re.findall(r'<th scope="row">(.*?)</th>(.*?)</tr>', groups)
    texts = [(re.sub("<[^>]*>", "", name), re.findall("<td>([^<]*)</td>", cells)) for name, cells in lines]
    assert texts == [
        ("rack r1", ["2", "1", "0", "0", "1", "0", "0", "0"]),
        ("rack r2", ["1", "0", "0", "0", "0", "0", "1", "0"]),
        ("no rack", ["1", "0", "0", "0", "0", "0", "0", "1"]),
    ]
    assert 'href="./?within=rack%3Ar1"' in groups
    critical = table.node_table(found, layout, "critical")
    assert ">node n1</a>" in critical
    assert 'href="incident?id=A1"' in critical
    assert "n2" not in critical
    assert "&lt;b&gt;" in table.node_table(found, layout, "ok")


def test_an_empty_fleet_is_a_map_without_cells() -> None:
    found, layout = fleet_tables()
    assert table.group_table(found, layout) == '<p class="fp-empty">No nodes.</p>'
    assert headline(found) == "No node has sent data yet"


def test_the_headline_counts_causes_and_affected_nodes_apart() -> None:
    found, _ = fleet_tables(*FEW)
    assert headline(found) == "1 critical and 1 affected of 4 nodes, 1 without data"
    narrowed, _ = fleet_tables(*FEW, within="rack:r2")
    assert headline(narrowed) == "No data from any node in rack r2"


def test_a_selection_of_whole_groups_is_their_names() -> None:
    _, layout = fleet_tables(*FEW)
    assert selected_entities(layout, [[0, 1]]) == ["rack:r1"]
    assert selected_entities(layout, [[0, 0], [2, 3]]) == ["node:n1", "node:n3", "node:<b>"]
    assert selected_entities(layout, [[-5, 99]]) == ["rack:r1", "node:n3", "node:<b>"]
    assert selected_entities(layout, []) == []


def test_what_separates_a_selection_is_shown_with_numbers_and_method() -> None:
    text = share_markup(parse_share(Api().share))
    assert 'href="./?within=leaf%3Al7"' in text
    assert "2 of 2" in text
    assert "0 of 1" in text
    assert "1 in 2,500" in text
    assert "corrected for 7 compared values; a value separates below 1 %" in text


def test_nothing_separates_them_is_an_answer() -> None:
    shared = [shared_table("<script>", 2, 1, 0.8, "driver")]
    text = share_markup(parse_share({**Api().share, "shared": shared, "unknown": ["rack:none"]}))
    assert "Nothing separates them." in text
    assert "Nearest, but within chance" in text
    assert "&lt;script&gt;" in text
    assert "Not found: rack none." in text
    assert "Select two or more nodes" in share_markup(parse_share({**Api().share, "selected": 1}))


@pytest.mark.parametrize(
    ("p", "text"), [(1e-30, "below 1 in a billion"), (1e-4, "1 in 10,000"), (0.34, "34 %"), (1.0, "100 %")]
)
def test_a_probability_is_said_as_a_person_says_it(p: float, text: str) -> None:
    assert chance(p) == text


def test_the_list_starts_with_open_incidents_of_high_severity() -> None:
    found = [
        incident("resolved", state="resolved"),
        incident("watch", "watch"),
        incident("old", opened=NOW - 60 * SECOND),
        incident("taken", state="acknowledged"),
        incident("new"),
        incident("ticket", "ticket"),
    ]
    assert [i.id for i in sort_incidents(found)] == ["new", "old", "taken", "ticket", "watch", "resolved"]


def test_a_row_shows_simulation_and_duration() -> None:
    made = incident("A", simulated=True, confidence=0.876, members=["gpu:n1.0"])
    (row,) = list_rows([made], NOW + 150 * SECOND)
    assert row["simulated"] == "SIMULATED"
    assert (row["age"], row["members"], row["confidence"]) == ("2 min", "1 member", "88 %")
    assert row["summary"] == "GPU 0 of n1 is wrong"


def test_the_number_of_rows_is_limited() -> None:
    assert len(list_rows([incident(str(i)) for i in range(MAX_LISTED + 1)], NOW)) == MAX_LISTED


def test_the_page_of_incidents_knows_the_jobs_and_nodes_that_each_reaches_if_the_api_does() -> None:
    rows = [incident_table("A1") | {"impact": {"nodes": 2, "jobs": 3}}, incident_table("A2") | {"impact": None}]
    page = parse_incident_page({"incidents": rows})
    assert page.reach == {"A1": (3, 2)}
    rows = [_row(i, NOW, page.reach.get(i.id)) for i in page.incidents]
    assert [(row["jobs"], row["nodes"], row["members"]) for row in rows] == [
        ("3 jobs", "2 nodes", ""),
        ("", "", "2 members"),
    ]


def test_the_list_does_not_say_0_jobs_where_the_jobs_of_the_nodes_are_not_known() -> None:
    impact = {"nodes": 2, "jobs": 0, "nodes_without_job_list": 1}
    rows = [incident_table("A1") | {"impact": impact}, incident_table("A2") | {"impact": {**impact, "jobs": 1}}]
    page = parse_incident_page({"incidents": rows})
    shown = [_row(i, NOW, page.reach.get(i.id))["jobs"] for i in page.incidents]
    assert shown == ["jobs not known", "1 job"]


def test_the_age_uses_the_servers_clock() -> None:
    stamp = stamp_data(CachedAnswer("x", NOW), fleet_answer(NOW - 7 * SECOND), NOW, "")
    assert (stamp["age"], stamp["clock"], stamp["fault"]) == (7.0, "11:59:53Z", "")
    assert stamp_data(CachedAnswer("x", NOW), fleet_answer(NOW + SECOND), NOW, "")["age"] == 0.0


@pytest.mark.parametrize(("live", "interval"), [("", INTERVAL_S), ("30", 30), ("0", INTERVAL_S)])
def test_the_stamp_waits_as_long_as_the_page_refreshes(live: str, interval: int) -> None:
    stamp = stamp_data(CachedAnswer("x", NOW), fleet_answer(NOW), NOW, live)
    assert (stamp["interval"], stamp["live"]) == (interval, live or "usual")
    assert f'data-live="{live or "usual"}"' in BUTTONS
    assert INTERVALS[live] is None or f"Refresh every {interval} s" in BUTTONS


def test_the_stamp_shows_the_time_of_the_newest_data() -> None:
    stamp = stamp_data(CachedAnswer("x", NOW), fleet_answer(NOW - 50 * SECOND, ("no broker answers",)), NOW, "")
    assert (stamp["clock"], stamp["age"], stamp["answered"]) == ("11:59:10Z", 50.0, 0.0)
    assert stamp["unready"]
    assert stamp["behind"] == 10.0


def test_the_stamp_is_in_the_zone_of_the_page_and_has_a_date_unless_it_is_today() -> None:
    words.set_zone(ZoneInfo("Asia/Tokyo"))
    try:
        stamp = stamp_data(CachedAnswer("x", NOW), fleet_answer(NOW - 86_400 * SECOND), NOW, "")
    finally:
        words.set_zone(UTC)
    assert (stamp["clock"], stamp["answered_at"]) == ("2025-12-31 21:00:00 JST", "21:00:00 JST")


def test_the_stamp_shows_an_unreachable_api_and_missing_data() -> None:
    stamp = stamp_data(CachedAnswer(None, NOW, "refused"), CachedAnswer(None, NOW, "refused"), NOW, "")
    assert stamp["fault"] == "API unreachable"
    assert stamp["clock"] == ""


def test_tiles_say_what_changed_in_an_hour_and_nothing_if_it_is_not_known() -> None:
    table_, _ = map_tables(Api().fleet, "rack", "state", "")
    counts = table_["counts"] | {"critical": 3, "degraded": 0, "watch": 1}
    before = {"time": iso(NOW), "counts": {"critical": 1, "degraded": 2, "watch": 1, "affected": 0}}
    found = parse_map({**table_, "counts": counts, "before": before})
    assert map_data(found, MapView(False, "", (), ""))["changes"] == {"critical": "+2 in 1 h", "degraded": "-2 in 1 h"}
    assert parse_map(table_).changes == {}


@pytest.mark.parametrize(
    ("status", "fault"),
    [(401, "API refuses the dashboard"), (403, "API refuses the dashboard"), (503, "API answers HTTP 503")],
)
def test_the_stamp_tells_a_refusal_from_an_unreachable_api(status: int, fault: str) -> None:
    refused = CachedAnswer(None, NOW, "no token", status)
    assert stamp_data(refused, fleet_answer(NOW), NOW, "")["fault"] == fault
