"""Data of the scripts in the browser."""

from __future__ import annotations

import base64

import numpy as np

from dashboards.answers import Fleet, Node, parse_incident
from dashboards.fleet_map.component import NEVER, map_data, natural_key
from dashboards.freshness.component import stamp_data
from dashboards.incident_list.component import MAX_LISTED, list_rows, sort_incidents
from dashboards.snapshot import CachedAnswer
from pipeline.model.records import SECOND, Incident, iso

NOW = 1_767_268_800 * SECOND


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


def numbers(text: object, kind: str) -> list[int]:
    return [int(v) for v in np.frombuffer(base64.b64decode(str(text)), kind)]


def test_racks_are_in_natural_order_and_nodes_without_rack_are_last() -> None:
    nodes = [
        Node("node:n10", "rack:r10", "ok", NOW, True),
        Node("node:n2", "rack:r2", "critical", NOW - 90 * SECOND, True, ("A", "B")),
        Node("node:host", "", "no_data", None, False),
        Node("node:n1", "rack:r2", "ok", NOW + 5 * SECOND, True),
    ]
    data = map_data(nodes, NOW, stale=False)
    assert data["racks"] == [["r2", 2], ["r10", 1], ["", 1]]
    assert data["names"] == ["node:n1", "node:n2", "node:n10", "node:host"]
    assert numbers(data["states"], "u1") == [0, 3, 0, 4]
    assert numbers(data["simulated"], "u1") == [1, 1, 1, 0]
    assert numbers(data["ages"], "<u2") == [0, 90, 0, NEVER]
    assert data["incidents"] == {"1": 2}


def test_an_empty_fleet_is_a_map_without_racks() -> None:
    data = map_data([], NOW, stale=True)
    assert data["racks"] == []
    assert data["names"] == []
    assert data["stale"]


def test_digits_are_compared_as_numbers() -> None:
    assert sorted(["n10", "n9", "n", "9"], key=natural_key) == ["9", "n", "n9", "n10"]


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
    assert (row["age"], row["members"], row["confidence"]) == ("2 min", "1 member", "88%")
    assert row["summary"] == "GPU 0 of n1 is wrong"


def test_the_number_of_rows_is_limited() -> None:
    assert len(list_rows([incident(str(i)) for i in range(MAX_LISTED + 1)], NOW)) == MAX_LISTED


def test_the_age_uses_the_servers_clock() -> None:
    stamp = stamp_data(CachedAnswer("x", NOW), fleet_answer(NOW - 7 * SECOND), NOW, True)
    assert (stamp["age"], stamp["clock"], stamp["unreachable"]) == (7.0, "11:59:53Z", False)
    assert stamp_data(CachedAnswer("x", NOW), fleet_answer(NOW + SECOND), NOW, True)["age"] == 0.0


def test_the_stamp_shows_the_time_of_the_newest_data() -> None:
    stamp = stamp_data(CachedAnswer("x", NOW), fleet_answer(NOW - 50 * SECOND, ("no broker answers",)), NOW, True)
    assert (stamp["clock"], stamp["age"], stamp["answered"]) == ("11:59:10Z", 50.0, 0.0)
    assert stamp["unready"]
    assert stamp["behind"] == 10.0


def test_the_stamp_shows_an_unreachable_api_and_missing_data() -> None:
    stamp = stamp_data(CachedAnswer(None, NOW, "refused"), CachedAnswer(None, NOW, "refused"), NOW, True)
    assert stamp["unreachable"]
    assert stamp["clock"] == ""
