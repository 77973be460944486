"""Both ends of a cable are joined in any order of reports, and are folded into one incident."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.incidents.causes import CauseRules
from pipeline.incidents.desk import Desk
from pipeline.ingest.entities import load_entities, load_topology
from pipeline.model.links import Links
from pipeline.model.records import SECOND, Event, Finding, Level
from pipeline.model.topology import Topology
from tests.pipeline.conftest import NOW, Site

HOST, FAR = "port:n1.mlx5_0", "port:leaf1.2"
Line = tuple[str, tuple[str, ...], dict[str, object]]
NODE: Line = (HOST, ("node:n1",), {"port_guid": "a088:c203:0010:0021", "fw_ver": "28.41"})
SWITCH: Line = (
    FAR,
    ("leaf:leaf1",),
    {"guid": "a088:c203:0002:0100", "port": 2, "peer_guid": "a088:c203:0010:0021", "peer_port": 1},
)
UP: Line = ("port:leaf1.9", ("leaf:leaf1",), {"guid": "L", "port": 9, "peer_guid": "S", "peer_port": 1})
DOWN: Line = ("port:spine1.1", ("spine:spine1",), {"guid": "S", "port": 1, "peer_guid": "L", "peer_port": 9})


def learn_lines(links: Links, *lines: Line) -> None:
    links.topology.merge(*links.join_inventory({e: p for e, p, _ in lines}, {e: f for e, _, f in lines}))


def read_ends(topology: Topology) -> tuple[object, object, tuple[str, ...]]:
    return (
        topology.attributes[HOST].get("peer"),
        topology.attributes[FAR].get("peer"),
        topology.parents[HOST],
    )


JOINED = (FAR, HOST, ("node:n1", "leaf:leaf1"))


@pytest.mark.parametrize("order", [(NODE, SWITCH), (SWITCH, NODE), (NODE, SWITCH, NODE, SWITCH), (SWITCH, NODE, NODE)])
def test_both_ends_are_joined_in_any_order_and_however_often_they_are_reported(order: Sequence[Line]) -> None:
    links = Links(Topology())
    for line in order:
        learn_lines(links, line)
    assert read_ends(links.topology) == JOINED
    assert links.topology.attributes[HOST]["fw_ver"] == "28.41"


def test_both_ends_in_one_inventory_are_joined() -> None:
    links = Links(Topology())
    learn_lines(links, NODE, SWITCH)
    assert read_ends(links.topology) == JOINED


def test_ends_known_at_the_start_are_joined_too() -> None:
    known = Topology({e: p for e, p, _ in (NODE, SWITCH)}, {e: f for e, _, f in (NODE, SWITCH)})
    Links(known)
    assert read_ends(known) == JOINED


def test_an_unchanged_line_does_not_change_the_topology() -> None:
    links = Links(Topology())
    learn_lines(links, NODE, SWITCH)
    version = links.topology.version
    learn_lines(links, NODE)
    learn_lines(links, SWITCH)
    assert links.topology.version == version


def test_a_moved_cable_leaves_nothing_of_its_old_join() -> None:
    links = Links(Topology())
    learn_lines(links, NODE, SWITCH)
    other: Line = ("port:leaf2.5", ("leaf:leaf2",), {**SWITCH[2], "guid": "other", "port": 5})
    emptied: Line = (FAR, SWITCH[1], {"guid": "a088:c203:0002:0100", "port": 2})
    learn_lines(links, other, emptied)
    assert links.topology.attributes[HOST]["peer"] == "port:leaf2.5"
    assert links.topology.parents[HOST] == ("node:n1", "leaf:leaf2")
    assert "peer" not in links.topology.attributes[FAR]


def test_a_replaced_nic_removes_its_join() -> None:
    links = Links(Topology())
    learn_lines(links, NODE, SWITCH)
    learn_lines(links, (HOST, ("node:n1",), {"port_guid": "a088:c203:0099:0001"}))
    assert "peer" not in links.topology.attributes[HOST]
    assert "peer" not in links.topology.attributes[FAR]
    assert links.topology.parents[HOST] == ("node:n1",)


def test_a_configured_leaf_is_kept() -> None:
    links = Links(Topology())
    learn_lines(links, (HOST, ("node:n1", "leaf:by-hand"), NODE[2]), SWITCH)
    assert links.topology.parents[HOST] == ("node:n1", "leaf:by-hand")
    assert links.topology.attributes[HOST]["peer"] == FAR


def test_cables_between_switches_are_joined_by_switch_and_port_number() -> None:
    links = Links(Topology())
    learn_lines(links, UP, DOWN)
    assert links.topology.attributes["port:leaf1.9"]["peer"] == "port:spine1.1"
    assert links.topology.attributes["port:spine1.1"]["peer"] == "port:leaf1.9"
    assert links.topology.parents["port:spine1.1"] == ("spine:spine1",)


JUNK = st.one_of(st.none(), st.integers(0, 2), st.sampled_from(["a", "b"]), st.lists(st.integers(), max_size=2))
FACTS = st.dictionaries(st.sampled_from(["port_guid", "peer_guid", "peer_port", "guid", "port", "peer"]), JUNK)


@given(st.lists(st.tuples(st.sampled_from([HOST, FAR, "port:x", "gpu:n1.0"]), FACTS), max_size=12))
def test_any_attributes_are_accepted_and_no_port_is_its_own_peer(lines: list[tuple[str, dict[str, object]]]) -> None:
    links = Links(Topology())
    for entity, facts in lines:
        learn_lines(links, (entity, ("node:n1",), facts))
    for entity, found in links.topology.attributes.items():
        assert entity.startswith("gpu:") or found.get("peer") != entity


# --- in the store ----------------------------------------------------------------------------------------------------


def inventory(node: str, *lines: Line) -> Event:
    entities: Mapping[str, object] = {e: {"parents": list(p), "attributes": f} for e, p, f in lines}
    return Event(NOW, f"node:{node}", "inventory", {"entities": entities})


def test_sql_shows_both_ends_and_a_restart_joins_them_again(site: Site) -> None:
    second: Line = ("port:leaf1.8", ("leaf:leaf1",), {**UP[2], "port": 8, "peer_port": 2})
    its_end: Line = ("port:spine1.2", ("spine:spine1",), {**DOWN[2], "port": 2, "peer_port": 8})
    site.send_events("fabric", inventory("fabric", SWITCH, UP, DOWN, second, its_end))
    site.send_events("n1", inventory("n1", NODE))
    site.drain()
    assert site.rows("SELECT entity, peer FROM links ORDER BY 1, 2") == [
        ("port:leaf1.2", HOST),
        ("port:leaf1.8", "port:spine1.2"),
        ("port:leaf1.9", "port:spine1.1"),
        (HOST, FAR),
        ("port:spine1.1", "port:leaf1.9"),
        ("port:spine1.2", "port:leaf1.8"),
    ]
    assert site.database is not None
    topology = load_topology(load_entities(site.database.connection, 0))
    Links(topology)
    assert read_ends(topology) == JOINED


# --- one link, one suspect -------------------------------------------------------------------------------------------


def finding(time: int, entity: str, level: Level, signal: str) -> Finding:
    return Finding(time, NOW, entity, "link", level, 1.0, f"{entity} is bad", {}, (signal,))


def desk() -> Desk:
    links = Links(Topology())
    learn_lines(links, NODE, SWITCH, UP, DOWN)
    return Desk(links.topology)


def test_both_ends_of_a_link_are_one_incident_named_after_the_nodes_port() -> None:
    found = desk()
    found.observe(NOW, [finding(NOW, FAR, "suspect", "nic.state")])
    found.observe(NOW + SECOND, [finding(NOW + SECOND, HOST, "suspect", "nic.state")])
    (incident,) = found.incidents.values()
    assert (incident.cause, incident.severity) == (HOST, "watch")  # that the link is down is one fact, reported twice
    assert set(incident.members) == {FAR, HOST}


def test_errors_reported_by_both_ends_make_two_suspicions_a_ticket() -> None:
    found = desk()
    found.observe(NOW, [finding(NOW, FAR, "suspect", "nic.symbol_errors")])
    found.observe(NOW + SECOND, [finding(NOW + SECOND, HOST, "suspect", "nic.state")])
    (incident,) = found.incidents.values()
    assert incident.severity == "ticket"


def test_a_link_between_switches_belongs_to_the_leaf() -> None:
    links = Links(Topology())
    learn_lines(links, UP, DOWN)
    folding = CauseRules(links.topology)
    assert folding.find_suspect("port:spine1.1") == folding.find_suspect("port:leaf1.9") == "port:leaf1.9"


def test_two_ends_count_as_one_child_of_their_leaf() -> None:
    """Three links in trouble make the leaf a suspect; two links, one of them reported by both ends, do not."""
    lines: list[Line] = []
    for i in range(1, 9):
        lines.append((f"port:n{i}.mlx5_0", (f"node:n{i}",), {"port_guid": f"g{i}"}))
        lines.append((f"port:leaf1.{i}", ("leaf:leaf1",), {"guid": "L", "port": i, "peer_guid": f"g{i}"}))
    links = Links(Topology())
    learn_lines(links, *lines)
    found = Desk(links.topology)
    two = [f"port:{name}" for i in (1, 2) for name in (f"n{i}.mlx5_0", f"leaf1.{i}")]
    found.observe(NOW, [finding(NOW, e, "suspect", "nic.state") for e in two])
    assert {i.cause for i in found.incidents.values()} == {"port:n1.mlx5_0", "port:n2.mlx5_0"}
    found.observe(NOW + SECOND, [finding(NOW + SECOND, "port:leaf1.3", "suspect", "nic.state")])
    assert {i.cause for i in found.incidents.values() if i.resolved is None} == {"leaf:leaf1"}
