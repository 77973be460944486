"""Links of a large fleet: the cost of half a fabric going down, and a switch that slows all its ports."""

from __future__ import annotations

import time

import numpy as np

from detectors.link.link import Link
from detectors.runner import Runner
from pipeline.incidents.desk import Desk
from pipeline.model.records import SECOND, Finding, Frame
from pipeline.model.topology import Topology

START, STEP, AT = 1_790_000_000 * SECOND, 10 * SECOND, 65


def fabric(size: int, leaves: int) -> tuple[tuple[str, ...], Topology]:
    """Returns ports and topology of nodes of eight ports, with one leaf per rail."""
    ports = tuple(f"port:n{i // 8}.p{i % 8}" for i in range(size))
    each = size // leaves * 8
    return ports, Topology({p: (f"node:n{i // 8}", f"leaf:l{i // each * 8 + i % 8}") for i, p in enumerate(ports)})


class Count(Topology):
    """Counts lookups of ancestors."""

    asked = 0

    def ancestor_of_kind(self, entity: str, kind: str) -> str | None:
        self.asked += 1
        return super().ancestor_of_kind(entity, kind)


def instant(tick: int, ports: tuple[str, ...], site: Topology, down: int = 0, slow: slice = slice(0)) -> Frame:
    size = len(ports)
    state, speed, changes = np.ones(size), np.full(size, 400_000.0), np.full(size, 2.0)
    if tick >= AT:
        state[:down], changes[:down], speed[slow] = 0.0, 3.0, 200_000.0
    values = {"nic.state": state, "nic.speed": speed, "nic.carrier_changes": changes}
    return Frame(START + tick * STEP, "nic", ports, values, site)


def test_half_a_fabric_down_costs_one_lookup_per_leaf() -> None:
    ports, plain = fabric(4096, 64)
    link, site, found = Link(), Count(plain.parents), list[Finding]()
    for tick in range(AT + 14):
        before = site.asked
        found += link.observe({"nic": instant(tick, ports, site, down=2048)})
        numbering = 2 * len(ports) if tick in (0, AT) else 0  # numbering of ports by leaf, once
        assert site.asked - before <= numbering + 200
    assert {f.level for f in found} == {"page"}
    assert len({f.entity for f in found}) == 32
    assert all(f.evidence["down"] == f.evidence["ports"] == 64 for f in found)


def test_slow_ports_are_found_once_per_tick() -> None:
    ports, site = fabric(4096, 64)
    link, longest = Link(), 0.0
    for tick in range(AT + 6):
        began = time.process_time()
        link.observe({"nic": instant(tick, ports, site, slow=slice(0, 2048))})
        longest = max(longest, time.process_time() - began if tick > AT else 0.0)
    assert longest < 1.0


def test_a_leaf_that_retrains_all_its_ports_to_half_speed_is_one_incident() -> None:
    ports, site = fabric(512, 8)
    runner, desk = Runner([Link()]), Desk(site)
    for tick in range(AT + 12):
        frame = instant(tick, ports, site, slow=slice(2, None, 8))
        desk.observe(frame.time, runner.observe({"nic": frame}))
    (incident,) = desk.incidents.values()
    assert (incident.cause, incident.severity, len(incident.members)) == ("leaf:l2", "page", 64)


def test_onsets_precede_findings_when_the_clock_steps_back() -> None:
    ports, site = fabric(64, 8)
    link, reported = Link(), 0
    for tick in range(AT + 200):
        frame = instant(tick, ports, site, down=1, slow=slice(9, 10))
        back = Frame(frame.time - (tick > AT + 30) * 900 * SECOND, "nic", ports, frame.values, site)
        for finding in link.observe({"nic": back}):
            reported += 1
            assert finding.onset <= finding.time
    assert reported > 10
