"""From the service root to every device: pages, loops of links, members that are documents, and limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.collectors.bmc import redfish_tree as walked
from agents.collectors.bmc.redfish_document import PREFIX, EntityRow, ParseFaults
from agents.collectors.bmc.redfish_schedule import PollSchedule
from agents.collectors.bmc.redfish_settings import BmcSettings
from agents.collectors.bmc.redfish_tree import MAX_PAGES, ResourceTree
from tests.agents.redfish_trees import TREES

WORDS = ["@odata.id", "@odata.type", "Members", "Members@odata.nextLink", "CDUs", "Chassis", "Pumps", "Status", "State"]
WORDS += ["LeakDetection", "LeakDetectorGroups", "Detectors", "DataSourceUri", "Health", "SecondaryCoolantConnectors"]
CDUS, CHASSIS = f"{PREFIX}/ThermalEquipment/CDUs", f"{PREFIX}/Chassis"


class Walk:
    """Reads documents from memory as a BMC's thread does, until there are no new requests."""

    def __init__(self, documents: dict[str, Any], **settings: Any) -> None:
        self.documents, self.faults = documents, ParseFaults()
        self.now = 0.0
        self.schedule = PollSchedule(lambda: self.now)
        self.gone: list[str] = []
        self.tree = ResourceTree(
            BmcSettings("b1", "https://h", **settings), self.schedule, self.faults, self.gone.append
        )
        self.rows: dict[str, EntityRow] = {}
        self.asked: list[str] = []

    def run(self, seconds: float = 10.0) -> Walk:
        if not self.tree.targets:
            self.tree.start()
        until = self.now + seconds
        while self.now < until and len(self.asked) < 20_000:
            target = self.schedule.pop_due()
            if target is None:
                self.now += min(0.1, max(0.001, self.schedule.seconds_until_due()))
                continue
            self.asked.append(target.path)
            body = self.documents.get(target.path)
            rows = self.tree.parse(target, body) if body is not None else None
            if rows is None:
                self.schedule.record_failure(target, self.now, bmc_down=False, retry_after=0.0)
                continue
            self.rows |= {row.entity: row for _, row in rows}
            self.schedule.record_success(target, self.now)
        return self


def link(path: str) -> dict[str, str]:
    return {"@odata.id": path}


def root(**more: Any) -> dict[str, Any]:
    return {PREFIX: {"ThermalEquipment": link(f"{PREFIX}/ThermalEquipment"), "Chassis": link(CHASSIS), **more}}


def units(members: list[Any], **more: Any) -> dict[str, Any]:
    return root() | {f"{PREFIX}/ThermalEquipment": {"CDUs": link(CDUS)}, CDUS: {"Members": members, **more}}


UNIT = {"Status": {"State": "Enabled", "Health": "OK"}}


@pytest.mark.parametrize("name", sorted(TREES))
def test_every_resource_of_a_tree_is_read_once_without_faults(name: str) -> None:
    documents = {path.rstrip("/"): body for path, body in TREES[name]().documents.items()}
    walk = Walk(documents, fast=3600.0, leaks=3600.0, sensors=3600.0, slow=3600.0).run()
    assert len(walk.asked) == len(set(walk.asked))
    assert walk.faults.count == 0, walk.faults.last
    assert len(walk.rows) >= 4


def test_pages_of_a_collection_are_followed() -> None:
    pages = [f"{CDUS}?$skip={n}" for n in (1, 2)]
    documents = units([link(f"{CDUS}/0")], **{"Members@odata.nextLink": pages[0]})
    documents |= {pages[0]: {"Members": [link(f"{CDUS}/1")], "Members@odata.nextLink": pages[1]}}
    documents |= {pages[1]: {"Members": [link(f"{CDUS}/2")]}} | {f"{CDUS}/{n}": UNIT for n in range(3)}
    assert sorted(Walk(documents).run().rows) == ["cdu:b1.0", "cdu:b1.1", "cdu:b1.2"]


def test_endless_pages_are_bounded() -> None:
    pages = {f"{CDUS}?p={n}": {"Members": [], "Members@odata.nextLink": f"{CDUS}?p={n + 1}"} for n in range(1, 200)}
    walk = Walk(
        units([link(f"{CDUS}/0")], **{"Members@odata.nextLink": f"{CDUS}?p=1"}) | pages | {f"{CDUS}/0": UNIT}
    ).run()
    assert sum("?p=" in path for path in walk.asked) == MAX_PAGES
    assert (sorted(walk.rows), walk.faults.count) == (["cdu:b1.0"], 1)


def test_a_page_that_leads_back_or_away_is_not_followed() -> None:
    for elsewhere in (CDUS, "http://other/redfish/v1/x", "/etc/passwd", 7, f"{PREFIX}/a b"):
        walk = Walk(units([link(f"{CDUS}/0")], **{"Members@odata.nextLink": elsewhere}) | {f"{CDUS}/0": UNIT}).run()
        assert walk.asked.count(CDUS) == 1
        assert set(walk.asked) <= {PREFIX, f"{PREFIX}/ThermalEquipment", CDUS, f"{CDUS}/0", CHASSIS}


def test_links_that_lead_back_are_followed_once() -> None:
    documents = units([link(f"{CDUS}/0"), link(CDUS), link(PREFIX)])
    documents |= {f"{CDUS}/0": {**UNIT, "Pumps": link(CDUS), "Filters": link(f"{CDUS}/0")}}
    walk = Walk(documents).run(5)
    assert sorted(walk.rows) == ["cdu:b1.0"]
    assert len(walk.asked) < 20


def test_members_named_twice_without_a_path_or_of_a_wrong_type_cost_no_other() -> None:
    members = [
        link(f"{CDUS}/0"),
        link(f"{CDUS}/0"),
        {},
        7,
        None,
        {"@odata.id": 5},
        link("http://x/y"),
        link(f"{CDUS}/1"),
    ]
    walk = Walk(units(members) | {f"{CDUS}/0": UNIT, f"{CDUS}/1": UNIT}).run()
    assert sorted(walk.rows) == ["cdu:b1.0", "cdu:b1.1"]
    assert walk.faults.count >= 5


def test_two_devices_with_the_same_name_are_reported_once_and_counted() -> None:
    walk = Walk(units([link(f"{CDUS}/A:1"), link(f"{CDUS}/A_1"), link(f"{CDUS}/A@1")]) | {
        f"{CDUS}/A:1": UNIT, f"{CDUS}/A_1": UNIT, f"{CDUS}/A@1": UNIT
    }).run()  # fmt: skip
    assert sorted(walk.rows) == ["cdu:b1.A-1", "cdu:b1.A_1"]
    assert walk.faults.count >= 1


def test_expanded_members_are_read_with_their_collection() -> None:
    whole = [{**link(f"{CDUS}/{n}"), **UNIT, "Id": str(n)} for n in range(3)]
    walk = Walk(units(whole), sensors=1.0).run(4)
    assert sorted(walk.rows) == ["cdu:b1.0", "cdu:b1.1", "cdu:b1.2"]
    assert walk.asked.count(CDUS) >= 3
    assert f"{CDUS}/0" not in walk.asked


def test_removed_resources_are_reported_with_everything_below_them() -> None:
    documents = units([link(f"{CDUS}/0")])
    documents |= {f"{CDUS}/0": {**UNIT, "Pumps": link(f"{CDUS}/0/Pumps")}}
    documents |= {f"{CDUS}/0/Pumps": {"Members": [link(f"{CDUS}/0/Pumps/1")]}, f"{CDUS}/0/Pumps/1": UNIT}
    walk = Walk(documents, inventory=5.0).run(2)
    assert sorted(walk.rows) == ["cdu:b1.0", "pump:b1.0.1"]
    documents[CDUS] = {"Members": []}
    walk.run(10)
    assert sorted(walk.gone) == ["cdu:b1.0", "pump:b1.0.1"]
    assert f"{CDUS}/0/Pumps/1" not in walk.tree.targets


def test_the_number_of_resources_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walked, "MAX_TARGETS", 20)
    members = [link(f"{CDUS}/{n}") for n in range(50)]
    walk = Walk(units(members) | {f"{CDUS}/{n}": UNIT for n in range(50)}).run()
    assert len(walk.tree.targets) == 20
    assert walk.faults.count == 50 - len(walk.rows)


def test_a_chassis_and_a_unit_with_the_same_id_keep_separate_parts() -> None:
    pumps, thermal = f"{CHASSIS}/1/ThermalSubsystem/Pumps", f"{CHASSIS}/1/ThermalSubsystem"
    documents = units([link(f"{CDUS}/1")])
    documents |= {f"{CDUS}/1": {**UNIT, "Pumps": link(f"{CDUS}/1/Pumps")}, f"{CDUS}/1/Pumps/1": UNIT}
    documents |= {
        f"{CDUS}/1/Pumps": {"Members": [link(f"{CDUS}/1/Pumps/1")]},
        CHASSIS: {"Members": [link(f"{CHASSIS}/1")]},
    }
    documents |= {f"{CHASSIS}/1": {**UNIT, "ThermalSubsystem": link(thermal)}, thermal: {"Pumps": link(pumps)}}
    documents |= {pumps: {"Members": [link(f"{pumps}/1")]}, f"{pumps}/1": UNIT}
    walk = Walk(documents).run()
    assert {"pump:b1.1.1", "pump:b1.chassis.1.1"} <= set(walk.rows)
    assert walk.faults.count == 0


def test_a_recorded_service_can_be_walked_without_a_network(tmp_path: Path) -> None:
    """The way in which samples of vendors are looked at by hand."""
    path = tmp_path / "capture.json"
    path.write_text(json.dumps(TREES["shelf"]().documents))
    walk = Walk(json.loads(path.read_text()), read=("power", "sensors")).run()
    assert any(entity.startswith("sensor:b1.") for entity in walk.rows)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.just(link(f"{CDUS}/1")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=5),
    max_leaves=15,
)


@given(st.dictionaries(st.sampled_from([PREFIX, f"{PREFIX}/ThermalEquipment", CDUS, f"{CDUS}/1", CHASSIS]), JSON))
def test_no_tree_of_documents_breaks_a_walk(documents: dict[str, Any]) -> None:
    walk = Walk(root() | {path: body for path, body in documents.items() if isinstance(body, dict)}).run(1)
    assert len(walk.asked) < 1000
    assert len(set(walk.rows)) == len(walk.rows)
