"""The objectives of a running pipeline: what each minute adds, and alerts while a budget burns too fast.

An alert is a finding that is repeated while its rule holds, so that its incident resolves by itself like every other.
"""

from __future__ import annotations

import contextlib
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.commands.service import PipelineService
from pipeline.config.objectives import Objective
from pipeline.engine.engine import Engine
from pipeline.model.entity_names import TITLE_LENGTH
from pipeline.model.records import Finding
from pipeline.model.topology import Topology
from pipeline.objectives.budget import RULES, Standing
from pipeline.objectives.recorder import (
    EVERY,
    EnergyMeter,
    GpuReadings,
    read_jobs_of_gpus,
    record_energy,
    record_losses,
)
from pipeline.objectives.summary import Fleet, judge_objectives
from pipeline.store.devices import Devices
from pipeline.store.latest import CurrentValues

J_PER_MJ = 1e-3
"""The signal `gpu.energy` is in mJ, as NVML's counter."""
DETECTOR = "objective"
"""The detector of alerts about objectives, in incidents."""


class ObjectivesKeeper:
    """Called by the loop of the pipeline; does something once a minute."""

    def __init__(self, service: PipelineService) -> None:
        self._service = service
        self._meter = EnergyMeter()
        self._last = 0
        self._since: dict[str, int] = {}

    def run(self) -> bool:
        """Records losses and energy, and alerts. Returns whether it was due."""
        service, now = self._service, self._service.clock()
        if service.engine is None or 0 <= now - self._last < EVERY:
            return False
        self._last = now
        readings = read_gpus(service.ingest.read_current("gpu", ["power", "energy"]), service.devices)
        with contextlib.closing(service.database.cursor()) as cursor:
            jobs = read_jobs_of_gpus(cursor)
        energy = self._meter.measure(readings, jobs, now)
        with service.database.transaction() as connection:
            record_losses(connection, now)
            record_energy(connection, energy, now)
        if service.config.impact.objectives:
            self._alert(service.engine, now)
        return True

    def _alert(self, engine: Engine, now: int) -> None:
        topology = Topology.from_checked(engine.topology.parents)  # lookups in the engine's own need its lock
        fleet = make_fleet(engine.devices, topology)
        with contextlib.closing(self._service.database.cursor()) as cursor:
            standings = judge_objectives(cursor, self._service.config, fleet, now)
        burning = {name_objective(o, scope): (o, standing) for o, scope, standing in standings if standing.alert}
        self._since = {name: self._since.get(name, now) for name in burning}
        found = [make_finding(o, name, standing, self._since[name], now) for name, (o, standing) in burning.items()]
        if found:
            engine.apply(lambda desk: desk.observe_own(now, found), [], found)


def name_objective(objective: Objective, scope: str) -> str:
    """Returns the name of one objective of a scope: with the scope if it is one of many."""
    return f"{objective.name} {scope.partition(':')[2]}" if objective.scope.endswith(":*") else objective.name


def make_finding(objective: Objective, name: str, standing: Standing, onset: int, now: int) -> Finding:
    """Returns the alert of an objective; a fast or medium burn pages if the objective may."""
    rule = next(rule for rule in RULES if rule.name == standing.alert)
    long, short = standing.burns[rule.name]
    level: Literal["page", "ticket"] = "page" if objective.page and rule.name != "slow" else "ticket"
    left = f"{standing.left / standing.budget:.0%}" if standing.budget > 0 else "0 %"
    text = f"Objective {name}: error budget burns {long or 0:.1f}x, {left.replace('%', ' %')} left"
    evidence = {**standing.as_json(), "rule": rule.name, "long_burn": long, "short_burn": short}
    return Finding(now, onset, f"objective:{name}", DETECTOR, level, 1.0, text[:TITLE_LENGTH], evidence)


def make_fleet(devices: Devices, topology: Topology) -> Fleet:
    """Returns the nodes of the fleet, and how to find the node of an entity."""
    nodes = [entity.partition(":")[2] for entity in devices.names("node")]
    return Fleet(nodes, lambda entity: topology.ancestor_of_kind(entity, "node"))


def read_gpus(found: CurrentValues, devices: Devices) -> GpuReadings:
    """Returns the newest power (W) and energy (J) of all GPUs, in the order of their names."""
    names = devices.names("gpu")
    size = len(names)
    power, energy = np.full(size, np.nan), np.full(size, np.nan)
    times = np.zeros(size, np.int64)
    known = np.flatnonzero((found.slot >= 0) & (found.slot < size)) if len(found.time) else np.zeros(0, np.int64)
    slots = found.slot[known]
    times[slots] = found.time[known]
    for column, out, factor in (("power", power, 1.0), ("energy", energy, J_PER_MJ)):
        if column in found.values:
            out[slots] = _to_float(found.values[column][known]) * factor
    return GpuReadings(names, power, energy, times)


def _to_float(raw: NDArray[Any]) -> NDArray[np.float64]:
    """Returns values as floats; the largest unsigned number means missing."""
    out: NDArray[np.float64] = raw.astype(np.float64)
    if raw.dtype.kind == "u":
        out[raw == np.iinfo(raw.dtype).max] = np.nan
    return out
