"""Which switch port an interface is on: every shape that lldpd writes, changes, and two real lldpd on one cable."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.collector import NoData
from agents.collectors.nic.lldp import MAX_NEIGHBORS, Lldp, LldpNeighbor, parse_neighbors
from pipeline.model.records import Event
from tests.agents.rdma_node import RdmaNode, h100
from tests.lldp_cable import cable

SW = {
    "id": {"type": "mac", "value": "0c:42:a1:00:00:07"},
    "descr": "SONiC Software Version",
    "mgmt-ip": ["192.0.2.7", "2001:db8::7"],
}
PORT = {"id": {"type": "local", "value": "Ethernet48"}, "descr": "to n042 ens8", "ttl": "120"}
ENTRY = {"via": "LLDP", "rid": "1", "age": "0 day, 00:01:07", "chassis": {"leaf-7": SW}, "port": PORT}
WANTED = LldpNeighbor("leaf-7", "0c:42:a1:00:00:07", "Ethernet48", "to n042 ens8", "192.0.2.7")
JSON0 = {
    "name": "ens8",
    "via": "LLDP",
    "chassis": [
        {
            "id": [{"type": "mac", "value": "0c:42:a1:00:00:07"}],
            "name": [{"value": "leaf-7"}],
            "mgmt-ip": [{"value": "192.0.2.7"}],
        }
    ],
    "port": [{"id": [{"type": "local", "value": "Ethernet48"}], "descr": [{"value": "to n042 ens8"}]}],
}


def text(interface: Any) -> str:
    return json.dumps({"lldp": {"interface": interface}})


@pytest.mark.parametrize(
    "message",
    [
        text({"ens8": ENTRY}),
        text([{"ens8": ENTRY}]),
        text([{"ens8": ENTRY}, {"ens9": ENTRY}]),
        text({"ens8": ENTRY, "ens9": ENTRY}),
        json.dumps({"lldp": [{"interface": [JSON0]}]}),
        text([{"ens8": {**ENTRY, "via": "CDPv2", "chassis": {"other": SW}}}, {"ens8": ENTRY}]),
    ],
)
def test_every_shape_has_the_same_result(message: str) -> None:
    assert parse_neighbors(message)["ens8"] == WANTED


def test_a_neighbor_without_name_has_its_id_and_a_port_with_an_address_its_description() -> None:
    by_mac = {"id": {"type": "mac", "value": "02:00:00:00:00:01"}, "descr": "swp3"}
    found = parse_neighbors(text({"ens8": {"chassis": SW, "port": by_mac}}))["ens8"]
    assert (found.switch, found.chassis, found.port) == ("", "0c:42:a1:00:00:07", "swp3")


@pytest.mark.parametrize(
    "message", ["", "{}", '{"lldp": {}}', '{"lldp": {"interface": null}}', "[]", "7", '{"lldp": []}']
)
def test_an_empty_far_end_is_not_a_neighbor(message: str) -> None:
    assert parse_neighbors(message) == {}


@pytest.mark.parametrize("message", ["{", "no json", "[" * 100_000])
def test_invalid_json_is_a_value_error(message: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_neighbors(message)


KEYS = st.sampled_from(["lldp", "interface", "chassis", "port", "id", "value", "descr", "mgmt-ip", "name", "via", "e0"])
TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)


@given(TREES | TREES.map(lambda tree: {"lldp": {"interface": {"e0": tree}}}))
def test_any_json_is_accepted(tree: Any) -> None:
    for name, neighbour in parse_neighbors(json.dumps(tree)).items():
        assert isinstance(name, str)
        assert all(isinstance(getattr(neighbour, f), str) for f in LldpNeighbor.__slots__)


def test_neighbors_and_texts_are_bounded() -> None:
    many = {f"e{n}": {**ENTRY, "chassis": {"x" * 5000: SW}} for n in range(1000)}
    found = parse_neighbors(text(many))
    assert len(found) == MAX_NEIGHBORS
    assert len(found["e0"].switch) <= 128


# --- the collector ---------------------------------------------------------------------------------------------------


class Lldpcli:
    """A command with the output of the test."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lldpcli"

    def prints(self, message: str) -> None:
        self.does(f"cat <<'END'\n{message}\nEND")

    def does(self, body: str) -> None:
        fresh = self.path.with_suffix(".new")
        fresh.write_text(f"#!/bin/sh\n{body}\n")
        fresh.chmod(0o755)
        fresh.replace(self.path)


@pytest.fixture
def node(tmp_path: Path) -> RdmaNode:
    return h100(tmp_path / "node", ports=1)


@pytest.fixture
def lldpcli(tmp_path: Path) -> Lldpcli:
    made = Lldpcli(tmp_path)
    made.prints(text({"ens8": ENTRY, "eno1": ENTRY, "gone0": ENTRY}))
    return made


@pytest.fixture
def collector(node: RdmaNode, lldpcli: Lldpcli) -> Iterator[Lldp]:
    made = Lldp(command=lldpcli.path, root=node.net, every=0.05)
    made.open("n1")
    yield made
    made.close()


def await_renewed(collector: Lldp, events: list[Event] | None = None) -> None:
    until = time.monotonic() + 15
    while time.monotonic() < until:
        found = [event for reading in collector.read() for event in reading.events]
        if events is not None:
            events += found
        if collector.inventory_changed():
            return
        time.sleep(0.02)
    raise TimeoutError("waited 15 s for another inventory")


def test_an_interface_has_the_entity_of_its_own_collector(collector: Lldp) -> None:
    await_renewed(collector)
    found = collector.inventory()
    assert set(found) == {"port:n1.mlx5_8", "port:n1.eno1"}  # ens8 is an RDMA port's; gone0 is not there
    assert found["port:n1.mlx5_8"].parents == ("node:n1",)
    assert found["port:n1.mlx5_8"].attributes == {
        "peer_switch": "leaf-7",
        "peer_chassis": "0c:42:a1:00:00:07",
        "peer_port": "Ethernet48",
        "peer_description": "to n042 ens8",
        "peer_mgmt": "192.0.2.7",
    }


def test_a_moved_cable_is_an_event_and_silence_or_other_text_is_not(collector: Lldp, lldpcli: Lldpcli) -> None:
    await_renewed(collector)
    events: list[Event] = []
    reworded = {**PORT, "descr": "spare"}
    lldpcli.prints(text({"eno1": {**ENTRY, "port": reworded}}))
    await_renewed(collector, events)
    assert events == []
    moved = {**PORT, "id": {"type": "local", "value": "Ethernet52"}}
    lldpcli.prints(text({"eno1": {**ENTRY, "port": moved}}))
    await_renewed(collector, events)
    (event,) = events
    assert (event.kind, event.entity) == ("link_peer", "port:n1.eno1")
    assert (event.data["from_port"], event.data["port"], event.data["peer"]) == ("Ethernet48", "Ethernet52", "leaf-7")
    assert collector.inventory()["port:n1.mlx5_8"].attributes["peer_port"] == "Ethernet48"


def read_for(collector: Lldp, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        collector.read()
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo 'unable to connect to socket' >&2; exit 1", "unable to connect to socket; expected a running lldpd"),
        ("echo '<xml/>'", "cannot parse its output: JSONDecodeError"),
    ],
)
def test_a_daemon_without_response_is_no_data(collector: Lldp, lldpcli: Lldpcli, body: str, message: str) -> None:
    await_renewed(collector)
    lldpcli.does(body)
    with pytest.raises(NoData, match=message):
        read_for(collector, 10)


def test_a_missing_daemon_is_no_data_from_the_start_with_a_stable_reason(node: RdmaNode, lldpcli: Lldpcli) -> None:
    lldpcli.does('echo "$(date +%Y-%m-%dT%H:%M:%S.%N) [WARN/control] unable to connect to socket" >&2; exit 1')
    collector = Lldp(command=lldpcli.path, root=node.net, every=0.05)
    reasons = []
    for _ in range(2):
        with pytest.raises(NoData) as refused:
            collector.open("n1")
        reasons.append(str(refused.value))
    lldpcli.prints(text({"eno1": ENTRY}))
    collector.open("n1")
    lldpcli.does('echo "$(date +%Y-%m-%dT%H:%M:%S.%N) [WARN/control] unable to connect to socket" >&2; exit 1')
    with pytest.raises(NoData) as refused:
        read_for(collector, 10)
    collector.close()
    assert reasons == [str(refused.value)] * 2
    assert reasons[0].startswith(
        f"{lldpcli.path}: [WARN/control] unable to connect to socket; expected a running lldpd"
    )


def test_a_hung_daemon_is_no_data_within_a_read(node: RdmaNode, lldpcli: Lldpcli) -> None:
    lldpcli.does("exec sleep 30")
    began = time.monotonic()
    with pytest.raises(NoData, match=r"did not finish within 0\.3 s"):
        Lldp(command=lldpcli.path, root=node.net, deadline=0.6).open("n1")
    assert time.monotonic() - began < 3.0


def test_without_lldpd_the_message_names_the_package_to_install(tmp_path: Path) -> None:
    with pytest.raises(NoData, match="not found; install lldpd"):
        Lldp(command=tmp_path / "lldpcli").open("n1")


# --- two real lldpd --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.lldp
def test_a_real_lldpd_reports_switch_and_port_and_their_change(tmp_path: Path) -> None:
    (tmp_path / "net" / "host0").mkdir(parents=True)
    with cable() as (socket, _, configure):
        collector = Lldp(socket=socket, root=tmp_path / "net", every=0.2)
        collector.open("n1")
        events: list[Event] = []
        try:
            until = time.monotonic() + 60
            while (
                not (found := dict(collector.inventory()))
                or found["port:n1.host0"].attributes.get("peer_switch") != "leaf-real"
            ):
                assert time.monotonic() < until
                collector.read()
                time.sleep(0.05)
            facts = found["port:n1.host0"].attributes
            assert facts["peer_port"] == facts["peer_description"] == "swp3"
            configure(1, "lldp", "portidsubtype", "local", "Ethernet9")
            while not events:
                assert time.monotonic() < until
                events += [event for reading in collector.read() for event in reading.events]
                time.sleep(0.05)
        finally:
            collector.close()
    assert [(e.data["from_port"], e.data["port"], e.data["peer"]) for e in events] == [
        ("swp3", "Ethernet9", "leaf-real")
    ]
