"""What our own scripts in the browser get."""

from __future__ import annotations

import base64

import numpy as np

from dashboards.answers import Fleet, Node, incident_of
from dashboards.fleet_map.component import NEVER, map_data, natural
from dashboards.freshness.component import stamp_data
from dashboards.incident_list.component import MOST, in_order, rows
from dashboards.snapshot import Answer
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
    return incident_of(table)


def standing(newest: int, unready: tuple[str, ...] = ()) -> Answer[Fleet]:
    return Answer(Fleet(NOW, NOW - 60 * SECOND, False, None, (), newest=newest, unready=unready), NOW)


def numbers(text: object, kind: str) -> list[int]:
    return [int(v) for v in np.frombuffer(base64.b64decode(str(text)), kind)]


def test_the_map_gets_racks_in_natural_order_and_the_rackless_last() -> None:
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


def test_a_fleet_without_nodes_is_a_map_without_racks() -> None:
    data = map_data([], NOW, stale=True)
    assert data["racks"] == []
    assert data["names"] == []
    assert data["stale"]


def test_digits_are_compared_as_numbers() -> None:
    assert sorted(["n10", "n9", "n", "9"], key=natural) == ["9", "n", "n9", "n10"]


def test_the_list_begins_with_what_needs_somebody() -> None:
    found = [
        incident("resolved", state="resolved"),
        incident("watch", "watch"),
        incident("old", opened=NOW - 60 * SECOND),
        incident("taken", state="acknowledged"),
        incident("new"),
        incident("ticket", "ticket"),
    ]
    assert [i.id for i in in_order(found)] == ["new", "old", "taken", "ticket", "watch", "resolved"]


def test_a_row_says_what_is_simulated_and_how_long_it_lasts() -> None:
    made = incident("A", simulated=True, confidence=0.876, members=["gpu:n1.0"])
    (row,) = rows([made], NOW + 150 * SECOND)
    assert row["simulated"] == "SIMULATED"
    assert (row["age"], row["members"], row["confidence"]) == ("2 min", "1 member", "88%")
    assert row["summary"] == "GPU 0 of n1 is wrong"


def test_no_more_rows_are_sent_than_are_shown() -> None:
    assert len(rows([incident(str(i)) for i in range(MOST + 1)], NOW)) == MOST


def test_the_stamp_counts_the_age_by_the_servers_clock() -> None:
    stamp = stamp_data(Answer("x", NOW), standing(NOW - 7 * SECOND), NOW, True)
    assert (stamp["age"], stamp["clock"], stamp["unreachable"]) == (7.0, "11:59:53Z", False)
    assert stamp_data(Answer("x", NOW), standing(NOW + SECOND), NOW, True)["age"] == 0.0


def test_the_stamp_tells_when_the_newest_data_came_not_when_the_api_answered() -> None:
    stamp = stamp_data(Answer("x", NOW), standing(NOW - 50 * SECOND, ("no broker answers",)), NOW, True)
    assert (stamp["clock"], stamp["age"], stamp["answered"]) == ("11:59:10Z", 50.0, 0.0)
    assert stamp["unready"]
    assert stamp["behind"] == 10.0


def test_the_stamp_tells_an_unreachable_api_and_that_there_is_nothing_yet() -> None:
    stamp = stamp_data(Answer(None, NOW, "refused"), Answer(None, NOW, "refused"), NOW, True)
    assert stamp["unreachable"]
    assert stamp["clock"] == ""
