"""Simulated fleets with shared faults of six kinds, one after the other, and independent faults beside them.

Coolant, leaf and PDU are kinds of the simulator. The others are made of its kinds: a rail whose optics degrade, a job
that makes itself slow or hang, GPUs whose firmware hangs on the nodes with one driver version. 64 nodes with jobs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from agents.sim.faults.cluster import DataStall, JobHang, SlowCollectives
from agents.sim.faults.facility import CoolantLoss, PduTrip
from agents.sim.faults.gpu import GspTimeout
from agents.sim.faults.leaf import LeafCrash
from agents.sim.faults.link import LinkDegradation
from agents.sim.layout import Layout
from agents.sim.scenario import Fleet, Line, Rates, Scenario
from benchmarks.detection.judge import STEP, Trial
from benchmarks.rootcause.fleet import NEW, OLD
from detectors.replay import ReplayedIncidents
from pipeline.incidents.desk import Desk
from pipeline.judging.frames import Framer
from pipeline.model.membership import Membership
from pipeline.model.topology import Topology, kind_of

GPUS, DURATION = 8, 12_600.0
SLOTS = ((3600.0, 5400.0), (7200.0, 8400.0), (10_200.0, 11_400.0))
"""Begin and end (s) of the three faults of a run; the first hour is for baselines. A rail is the last: its incident
stays open for half an hour after it, and takes in jobs that are slow."""
GROUPS = {"plant": ("cdu", "leaf", "pdu"), "work": ("job", "version", "rail")}
RANDOM_FAULTS = 5.0
"""Factor on the published rates of independent faults. Chosen: a few in each run, and room for the shared ones."""
_INSIDE = frozenset({"node", "gpu"})
"""Kinds of parents that agents know without any file of the site."""


@dataclass(frozen=True)
class Shared:
    """A shared fault of a run: its kind, the cause that should be blamed ("": drawn by the simulator), begin and end
    (s). lines: what the simulator does."""

    kind: str
    root: str
    begin: float
    end: float
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class World:
    """One run: its shared faults, and the nodes with the new driver version."""

    scenario: Scenario
    shared: tuple[Shared, ...]
    upgraded: frozenset[str]


def make_world(group: str, seed: int, nodes: int) -> World:
    """Returns the world of a group of kinds (GROUPS) and a seed."""
    dice, layout = random.Random(f"{group} {seed}"), Layout(nodes, GPUS)
    racks = sorted(dice.sample(range(layout.racks), max(2, round(0.35 * layout.racks))))
    upgraded = frozenset(f"node:{layout.node_names[n]}" for n in range(nodes) if layout.rack_of_node[n] in racks)
    made = [
        _make(kind, begin, end, layout, sorted(upgraded), dice)
        for kind, (begin, end) in zip(GROUPS[group], SLOTS, strict=True)
    ]
    lines = tuple(line for shared in made for line in shared.lines)
    rates = Rates(faults=RANDOM_FAULTS, confounders=1.0)
    scenario = Scenario(DURATION, 10.0, None, Fleet(nodes, GPUS), lines, source=f"root cause {seed}", rates=rates)
    return World(scenario, tuple(made), upgraded)


def _make(kind: str, begin: float, end: float, layout: Layout, upgraded: list[str], dice: random.Random) -> Shared:
    if kind == "cdu":
        return Shared(kind, "", begin, end, (Line(CoolantLoss(), begin, end),))
    if kind == "leaf":
        return Shared(kind, "", begin, end, (Line(LeafCrash(), begin, end),))
    if kind == "pdu":
        return Shared(kind, "", begin, end, (Line(PduTrip(), begin, end),))
    if kind == "rail":
        return _make_rail(begin, end, layout, dice)
    if kind == "job":
        own = dice.choice((DataStall(), JobHang(), SlowCollectives(slowdown=dice.uniform(0.3, 1.5))))
        return Shared(kind, "", begin, end, (Line(own, begin, end),))
    return _make_version(begin, end, upgraded, dice)


def _make_rail(begin: float, end: float, layout: Layout, dice: random.Random) -> Shared:
    """Optics of one batch, all on one rail: 60 to 100 % of its ports have errors and flap, from within 2 min on."""
    rail, share = dice.randrange(GPUS), dice.uniform(0.6, 1.0)
    ports = [f"port:{node}.mlx5_{rail}" for node in layout.node_names if dice.random() < share]
    lines = tuple(Line(LinkDegradation(), begin + dice.uniform(0, 120), end, port) for port in ports)
    return Shared("rail", f"rail:sim-{rail}", begin, end, lines)


def _make_version(begin: float, end: float, upgraded: list[str], dice: random.Random) -> Shared:
    """One GPU of 40 to 80 % of the upgraded nodes: its firmware hangs, within a quarter of an hour."""
    share = dice.uniform(0.4, 0.8)
    lines = []
    for node in upgraded:
        if dice.random() < share:
            at = begin + dice.uniform(0, 900)
            gpu = f"gpu:{node.partition(':')[2]}.{dice.randrange(GPUS)}"
            lines.append(Line(GspTimeout(code="119"), at, at + dice.uniform(30, 300), gpu))
    return Shared("version", f"version:nvidia_driver={NEW}", begin, end, tuple(lines))


class SharedTrial(Trial):
    """A trial in which nodes have driver versions. bare: no source has the groups above a node, as at a site without
    files of its topology."""

    def __init__(self, world: World, seed: int, bare: bool) -> None:
        super().__init__(world.scenario, seed)
        for known in self.simulator._calendar._hardware:  # what inventories say, here and in what agents send
            for entity, line in known.items():
                line.update(_rewritten(entity, line, world, bare))
        lines = {e: line for known in self.simulator._calendar._hardware for e, line in known.items()}
        parents: Any = {e: tuple(line["parents"]) for e, line in lines.items()}  # type: ignore[arg-type]
        attributes: Any = {e: line["attributes"] for e, line in lines.items() if line["attributes"]}
        self.topology = Topology(parents, attributes)
        self.membership = Membership(self.topology)
        self.framer = Framer(STEP, self.topology, self.numbers.names, signals=self.runner.signals)
        self.cases = ReplayedIncidents(Desk(self.topology, lambda _: True))


def _rewritten(entity: str, line: dict[str, Any], world: World, bare: bool) -> dict[str, Any]:
    parents, facts = list(line["parents"]), dict(line["attributes"])
    if kind_of(entity) == "node":
        facts["nvidia_driver"] = NEW if entity in world.upgraded else OLD
    return {"parents": [p for p in parents if kind_of(p) in _INSIDE] if bare else parents, "attributes": facts}


def with_root(shared: Shared, truth: list[dict[str, Any]], begin: str) -> Shared:
    """Returns the fault with the cause that the simulator drew. begin: its onset as the truth has it."""
    if shared.root:
        return shared
    name = shared.lines[0].kind.name
    return replace(shared, root=next(t["entity"] for t in truth if t["kind"] == name and t["onset"] == begin))
