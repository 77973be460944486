"""A cable whose ends are read by two agents, in a live engine: from the wire through the store to a finding."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from detectors.link.link import Link
from detectors.link.link_stall import LinkStall
from detectors.runner import Runner
from pipeline.commands.service import load_topology
from pipeline.engine.engine import Engine
from pipeline.ingest.entities import load_entities
from pipeline.model.records import SECOND, Batch, Block, Event, Origin
from pipeline.transport import wire
from tests.pipeline.conftest import Site

START, STEP, SIZE = 1_790_000_000 * SECOND, 10 * SECOND, 6
HOSTS = tuple(f"port:n{i}.mlx5_0" for i in range(SIZE))
SWITCH = tuple(f"port:leaf1.{i}" for i in range(SIZE))
BAD = 2
Change = Callable[[int, dict[str, np.ndarray], dict[str, np.ndarray]], None]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.shut()
    for spool in made.spools.values():
        spool.close()


def inventory(node: str, entities: Mapping[str, object]) -> Event:
    return Event(START, f"node:{node}", "inventory", {"entities": entities})


def cable(site: Site) -> None:
    """Sends the inventory of each node's port, and of the switch's ports by the agent of the fabric."""
    for i, host in enumerate(HOSTS):
        own = {"parents": [f"node:n{i}"], "attributes": {"port_guid": f"g{i}"}}
        site.send_events(f"n{i}", inventory(f"n{i}", {host: own}))
    far = {
        name: {"parents": ["leaf:leaf1"], "attributes": {"guid": "L", "port": i, "peer_guid": f"g{i}", "peer_port": 1}}
        for i, name in enumerate(SWITCH)
    }
    site.send_events("sm1", inventory("sm1", far))


def columns() -> dict[str, np.ndarray]:
    known = {"nic.state": np.ones((1, SIZE), "u1"), "nic.speed": np.full((1, SIZE), 400_000, "f4")}
    names = ("nic.symbol_errors", "nic.rx_bytes", "nic.tx_bytes", "nic.port_tx_wait")
    return known | {name: np.zeros((1, SIZE), "u8") for name in names}


def ship(site: Site, ticks: int, change: Change) -> None:
    """Sends samples of all agents; counters of the switch every 30 s, its states every 10 s."""
    samples = [(columns(), columns()) for _ in range(ticks)]
    for tick, (near, far) in enumerate(samples):
        change(tick, near, far)
    for i, host in enumerate(HOSTS):
        send(
            site,
            f"n{i}",
            (host,),
            {tick: {s: v[:, i : i + 1] for s, v in near.items()} for tick, (near, _) in enumerate(samples)},
        )
    send(site, "sm1", SWITCH, {tick: {"nic.state": far["nic.state"]} for tick, (_, far) in enumerate(samples)})
    counters = [{name: v for name, v in far.items() if name != "nic.state"} for _, far in samples]
    send(site, "sm1", SWITCH, {tick: counters[tick] for tick in range(0, ticks, 3)})


def send(site: Site, node: str, entities: tuple[str, ...], samples: dict[int, dict[str, np.ndarray]]) -> None:
    """Sends one batch of an agent's samples of some ports."""
    first = next(iter(samples.values()))
    block = Block("nic", entities, {name: np.concatenate([samples[tick][name] for tick in samples]) for name in first})
    times = START + np.array(list(samples)) * STEP
    site.send_raw(node, wire.encode(Batch(Origin("local", node, b"b" * 16), times, (block,))))


def run_detector(site: Site, detector: Link | LinkStall, ticks: int, change: Change) -> list[tuple[object, ...]]:
    """Returns (entity, level, evidence) of the findings that an engine stores."""
    cable(site)
    ingest = site.open()
    while ingest.step() is not None:
        pass
    assert site.database is not None
    topology = load_topology(load_entities(site.database.connection, 0))
    engine = Engine(site.database, ingest.devices, topology, Runner([detector]), lambda *_: [], lambda: START * 2, STEP)
    ship(site, ticks, change)
    while (committed := ingest.step()) is not None:
        engine.observe(committed)
    engine.advance(START + ticks * STEP)
    return site.rows("SELECT entity, level, evidence FROM findings ORDER BY time, entity")


def counts(tick: int, per_tick: float) -> int:
    return int(per_tick * max(0, tick - 25))


def test_errors_at_both_ends_blame_the_cable(store: Site) -> None:
    def both(tick: int, near: dict[str, np.ndarray], far: dict[str, np.ndarray]) -> None:
        near["nic.symbol_errors"][0, BAD] = far["nic.symbol_errors"][0, BAD] = counts(tick, 0.5)

    pages = [row for row in run_detector(store, Link(), 60, both) if row[1] == "page"]
    assert {entity for entity, *_ in pages} == {HOSTS[BAD], SWITCH[BAD]}
    assert any("the cable: receivers at both ends report errors" in str(cause) for *_, cause in pages)


@pytest.mark.slow
def test_errors_at_the_node_alone_blame_the_switchs_transmitter_or_the_cable(store: Site) -> None:
    def one(tick: int, near: dict[str, np.ndarray], far: dict[str, np.ndarray]) -> None:
        near["nic.symbol_errors"][0, BAD] = counts(tick, 1.0)

    pages = [row for row in run_detector(store, Link(), 66, one) if row[1] == "page"]
    assert {entity for entity, *_ in pages} == {HOSTS[BAD]}
    assert f"transmitter of {SWITCH[BAD]} or the cable" in str(pages[0][2])


def test_when_a_whole_job_stops_the_port_with_data_waiting_at_the_switch_is_blamed(store: Site) -> None:
    """InfiniBand: no traffic and no driver error; only the switch's end waits for credits."""

    def stall(tick: int, near: dict[str, np.ndarray], far: dict[str, np.ndarray]) -> None:
        for end in (near, far):
            for signal in ("nic.rx_bytes", "nic.tx_bytes"):
                end[signal][:] = 10**12 + 10**9 * min(tick, 40)
        far["nic.port_tx_wait"][0, BAD] = 10**6 * max(0, tick - 40)

    found = run_detector(store, LinkStall(), 70, stall)
    assert {(entity, level) for entity, level, _ in found if level == "page"} == {(HOSTS[BAD], "page")}
    assert json.loads(str(found[-1][2]))["data_waited_readings"] >= 2


def test_a_job_that_hangs_without_waiting_data_blames_no_port(store: Site) -> None:
    def hang(tick: int, near: dict[str, np.ndarray], far: dict[str, np.ndarray]) -> None:
        for end in (near, far):
            for signal in ("nic.rx_bytes", "nic.tx_bytes"):
                end[signal][:] = 10**12 + 10**9 * min(tick, 40)

    assert run_detector(store, LinkStall(), 70, hang) == []
