"""Both ends of one cable in a simulated fabric: counters, state and events in the store, side by side.

Real: the fabric's management datagrams, the subnet manager, the tools, both collectors, the wire, the store.
Simulated: switches and hosts (ibsim). A host of ibsim has no kernel, so the node's sysfs is written by the test, from
the output of `ibstat` and `perfquery` for that host's port.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agents.collector import Collector, NoData
from agents.collectors.fabric.fabric import Fabric
from agents.collectors.nic.infiniband import Infiniband
from agents.node.batches import build_batch, build_inventory_event
from pipeline.engine.engine import Engine
from pipeline.ingest.entities import load_entities, load_topology
from pipeline.model.records import SECOND, Origin
from pipeline.model.topology import Topology
from pipeline.transport import wire
from tests.agents.rdma_node import RdmaNode, write
from tests.fabric import SimulatedFabric, fabric
from tests.pipeline.conftest import Site
from tests.pipeline.test_engine import HotForThree

pytestmark = pytest.mark.infiniband
LEAF, HOST = 1, 2
NEAR, FAR = "port:n102.mlx5_0", "port:leaf1.2"
START = 1_789_999_000 * SECOND
SIDE_BY_SIDE = """
SELECT l.entity, l.peer,
       (SELECT arg_max(symbol_errors, time) FROM nic WHERE entity = l.entity) AS errors,
       (SELECT arg_max(symbol_errors, time) FROM nic WHERE entity = l.peer) AS errors_of_peer,
       (SELECT arg_max(state, time) FROM nic WHERE entity = l.entity) AS state,
       (SELECT arg_max(state, time) FROM nic WHERE entity = l.peer) AS state_of_peer
FROM links l WHERE l.entity LIKE 'port:n%'"""
"""The query of docs/fabric.md."""
_STATES = {"Down": "1: DOWN", "Initializing": "2: INIT", "Armed": "3: ARMED", "Active": "4: ACTIVE"}


@pytest.fixture
def simulated(tmp_path: Path) -> Iterator[SimulatedFabric]:
    """A new fabric for each test: ibsim ends if a collector that is closed kills a tool while it connects."""
    with fabric(tmp_path / "fabric") as running:
        yield running


class HostSysfs:
    """The sysfs of one host, updated from the simulated port."""

    def __init__(self, root: Path, simulated: SimulatedFabric) -> None:
        self.node, self._fabric = RdmaNode(root), simulated
        self.folder = self.node.device("mlx5_0") / "ports" / "1"
        guid = simulated.plan.host_port_guid(LEAF, HOST)
        write(self.folder / "gids" / "0", f"fe80:0000:0000:0000:{guid}")

    def update(self) -> None:
        said = self._fabric.ask_at("n102 mlx5_0", "ibstat")
        logical, physical = (re.search(rf"{word}: (\w+)", said) for word in ("State", "Physical state"))
        assert logical is not None
        assert physical is not None
        assert said.replace("0x", "").find(self._fabric.plan.host_port_guid(LEAF, HOST).replace(":", "")) > 0
        write(self.folder / "state", _STATES[logical[1]])
        write(self.folder / "phys_state", {"LinkUp": "5: LinkUp", "Polling": "2: Polling"}[physical[1]])
        counted = dict(re.findall(r"^(\w+):\.*(\d+)$", self._fabric.ask_at("n102 mlx5_0", "perfquery"), re.MULTILINE))
        write(self.folder / "counters" / "symbol_error", counted["SymbolErrorCounter"])
        write(self.folder / "counters" / "link_downed", counted["LinkDownedCounter"])


class CollectorAgent:
    """Reads one collector as an agent does, and sends its readings."""

    def __init__(self, collector: Collector, node: str, site: Site) -> None:
        self.collector, self.site, self.origin = collector, site, Origin("local", node, b"b" * 16)
        collector.open(node)

    def send_readings(self, now: int) -> None:
        readings = self.collector.read()
        if found := build_batch(self.origin, now, readings):
            self.site.send_raw(self.origin.node, wire.encode(found))
        events = [event for reading in readings for event in reading.events]
        if readings:
            events.append(build_inventory_event(now, self.origin.node, self.collector.inventory()))
        self.site.send_events(self.origin.node, *events)


class LinkAgents:
    """The agents of the node and of the fabric, and a store with their data."""

    def __init__(self, folder: Path, simulated: SimulatedFabric, site: Site) -> None:
        self.sysfs, self.site, self.now = HostSysfs(folder, simulated), site, START
        pace = {"links_every": 0.1, "counters_every": 0.1, "topology_every": 0.5}
        self.far = Fabric(enabled=True, tools=simulated.tools, **pace)
        self.near = Infiniband(root=self.sysfs.node.rdma, proc=self.sysfs.node.proc)
        self.far._now = self.near._now = lambda: self.now
        self.ingest = site.open()
        self.agents = [CollectorAgent(self.far, "sm1", site), CollectorAgent(self.near, "n102", site)]

    def await_rows(self, query: str, wanted: Callable[[list[tuple[object, ...]]], bool]) -> list[tuple[object, ...]]:
        """Runs both agents until the store returns the wanted rows."""
        until, found = time.monotonic() + 15, []
        while time.monotonic() < until:
            self.now += SECOND
            self.sysfs.update()
            for agent in self.agents:
                agent.send_readings(self.now)
            while self.ingest.step() is not None:
                pass
            found = self.site.rows(query)
            if wanted(found):
                return found
        raise TimeoutError(f"waited 15 s; last found {found}")


@pytest.fixture
def agents(tmp_path: Path, simulated: SimulatedFabric, site: Site) -> Iterator[LinkAgents]:
    made = LinkAgents(tmp_path / "node", simulated, site)
    yield made
    made.far.close()
    made.near.close()


def test_symbol_errors_and_a_pulled_cable_arrive_joined_from_both_ends(
    agents: LinkAgents, simulated: SimulatedFabric
) -> None:
    healthy = [(NEAR, FAR, 0, 0, 1, 1)]
    agents.await_rows(SIDE_BY_SIDE, lambda rows: rows == healthy)

    simulated.count(f"S-{simulated.plan.leaf(LEAF):016x}", HOST, "SymbolErrorCounter", 77)
    simulated.count(f"H-{simulated.plan.host(LEAF, HOST):016x}", 1, "SymbolErrorCounter", 9)
    agents.await_rows(SIDE_BY_SIDE, lambda rows: rows == [(NEAR, FAR, 9, 77, 1, 1)])

    simulated.unlink(LEAF, HOST)
    agents.await_rows(SIDE_BY_SIDE, lambda rows: rows == [(NEAR, FAR, 9, 77, 0, 0)])
    query = "SELECT entity, data ->> '$.state' FROM events WHERE kind = 'link_state' ORDER BY entity, time"
    assert agents.site.rows(query) == [(FAR, "down"), (NEAR, "down")]

    simulated.relink(LEAF, HOST)
    agents.await_rows(SIDE_BY_SIDE, lambda rows: rows == [(NEAR, FAR, 9, 77, 1, 1)])
    for end in (FAR, NEAR):
        states = [state for entity, state in agents.site.rows(query) if entity == end]
        assert (states[0], states[-1]) == ("down", "up")


def test_the_engine_has_both_ends_and_the_leaf_that_the_node_cannot_report(agents: LinkAgents) -> None:
    agents.await_rows(SIDE_BY_SIDE, lambda rows: len(rows) == 1)
    assert agents.site.database is not None
    known = load_topology(load_entities(agents.site.database.connection, 0))
    engine = Engine(
        agents.site.database, agents.ingest.devices, known, HotForThree(), lambda *_: [], lambda: START, SECOND
    )
    topology: Topology = engine.topology
    assert topology.attributes[NEAR]["peer"] == FAR
    assert topology.attributes[FAR]["peer"] == NEAR
    assert topology.parents[NEAR] == ("node:n102", "leaf:leaf1")
    assert topology.attributes["port:leaf1.9"]["peer"] == "port:spine1.1"


def test_without_its_own_cable_the_agent_has_no_data_from_the_start_and_repeats_its_error(
    simulated: SimulatedFabric,
) -> None:
    """The agent queries from the first host of the first leaf."""
    ask = ("iblinkinfo", ("--line", "--switches-only"))
    collector = Fabric(enabled=True, tools=simulated.tools)
    reasons = []
    simulated.unlink(1, 1)
    try:
        simulated.await_tool(*ask, lambda text: "Active/" not in text)
        for _ in range(2):
            with pytest.raises(NoData, match="listed no switch port") as refused:
                collector.open("n101")
            collector.close()
            reasons.append(str(refused.value))
    finally:
        simulated.relink(1, 1)
    assert reasons[0] == reasons[1]
    simulated.await_tool(*ask, lambda text: "Active/" in text)
    collector.open("n101")
    collector.close()
