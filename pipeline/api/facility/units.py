"""Units of cooling and power with their newest values, from memory, and the racks, nodes and jobs that hang on each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.api.fleet import SILENT, STATE_OF, STATES
from pipeline.model.records import SECOND, iso
from pipeline.model.signals import CATALOGUE, Signal, signals_of_class
from pipeline.model.topology import Topology, kind_of
from pipeline.store.devices import Devices
from pipeline.store.latest import CurrentValues

ReadAll = Callable[[str], CurrentValues]
COOLING = ("cdu", "loop", "connector", "pump", "reservoir", "filter")
POWER = ("pdu", "shelf", "chassis", "circuit", "outlet", "output")
LEAKS = ("leak_detector",)
KINDS = (*COOLING, *POWER, *LEAKS)
LISTED = (*COOLING, "pdu", "shelf", *LEAKS)
"""Kinds in the list of all units; the others are parts of a PDU or shelf, of which a site has ten thousand."""
MAX_NAMED = 24
"""Racks, nodes and jobs named for a unit. Chosen: what a person reads; the rest is counted."""
INTERVALS = 3
_CLASSES = ("coolant", "power", "leak")


@dataclass
class Below:
    """What depends on a unit."""

    racks: set[str] = field(default_factory=set)
    nodes: set[str] = field(default_factory=set)
    jobs: set[str] = field(default_factory=set)

    def as_json(self) -> dict[str, Any]:
        """Returns numbers and the first names."""
        return {
            name: {"count": len(found), "first": sorted(found)[:MAX_NAMED]}
            for name, found in (("racks", self.racks), ("nodes", self.nodes), ("jobs", self.jobs))
        }


def find_below(topology: Topology) -> dict[str, Below]:
    """Returns unit -> what it supplies, for all units that the topology names."""
    jobs = _jobs_of_nodes(topology)
    found: dict[str, Below] = defaultdict(Below)
    for entity in list(topology.parents):
        kind = kind_of(entity)
        if kind in KINDS:
            for unit in (entity, *topology.ancestors(entity)):
                if kind_of(unit) in KINDS:
                    found[unit]
        if kind not in ("rack", "node", "psu"):
            continue
        node = topology.ancestor_of_kind(entity, "node")
        rack = topology.ancestor_of_kind(entity, "rack")
        for unit in topology.ancestors(entity):
            if kind_of(unit) in KINDS:
                if rack is not None:
                    found[unit].racks.add(rack)
                if node is not None:
                    found[unit].nodes.add(node)
                    found[unit].jobs.update(jobs.get(node, ()))
    return dict(found)


def _jobs_of_nodes(topology: Topology) -> dict[str, set[str]]:
    """Returns node -> jobs with a rank on it."""
    found: dict[str, set[str]] = defaultdict(set)
    for entity in list(topology.parents):
        if entity.startswith("rank:"):
            job, node = topology.ancestor_of_kind(entity, "job"), topology.ancestor_of_kind(entity, "node")
            if job is not None and node is not None:
                found[node].add(job)
    return found


def list_units(
    read: ReadAll,
    devices: Devices,
    topology: Topology,
    below: Mapping[str, Below],
    incidents: Iterable[tuple[str, str, Collection[str]]],
    now: int,
) -> list[dict[str, Any]]:
    """Returns all units by name. incidents: (id, severity, entities) of those that are unresolved."""
    of_unit: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for identity, severity, about in incidents:
        for entity in about:
            if kind_of(entity) in KINDS:
                of_unit[entity].append((identity, severity))
    measured = {row["entity"]: row for c in _CLASSES for row in _read_class(read, devices, c, now)}
    names = {*measured, *below}
    return [_unit(name, measured.get(name), topology, below, of_unit.get(name, ())) for name in sorted(names)]


def _unit(
    name: str,
    row: Mapping[str, Any] | None,
    topology: Topology,
    below: Mapping[str, Below],
    incidents: Sequence[tuple[str, str]],
) -> dict[str, Any]:
    measured = row or {"values": {}, "last_seen": None, "fresh": False, "simulated": False, "abnormal": []}
    worst = max((STATES.index(STATE_OF[severity]) for _, severity in incidents), default=0)
    state = STATES[worst]
    if state != "critical" and not measured["fresh"]:
        state = "no_data"
    return {
        "entity": name,
        "kind": kind_of(name),
        "parents": list(topology.parents.get(name, ())),
        "state": state,
        "simulated": measured["simulated"],
        "last_seen": measured["last_seen"],
        "values": measured["values"],
        "abnormal": measured["abnormal"],
        "incidents": [identity for identity, _ in incidents],
        "below": below.get(name, Below()).as_json(),
    }


def _read_class(read: ReadAll, devices: Devices, device_class: str, now: int) -> Iterator[dict[str, Any]]:
    """Yields the devices of a class with their newest values; states in words. Old values are left out."""
    found = read(device_class)
    names, origins = devices.names(device_class), devices.origins(device_class)
    at = np.flatnonzero(found.slot >= 0)
    values: list[dict[str, Any]] = [{} for _ in at]
    abnormal: list[list[str]] = [[] for _ in at]
    fresh = now - found.time[at] <= SILENT
    for signal in signals_of_class(device_class, CATALOGUE):
        if signal.column in found.values and signal.kind != "counter" and not signal.name.endswith(".generation"):
            _add_values(found, signal, at, now, values, abnormal)
    for i, slot in enumerate(found.slot[at].tolist()):
        yield {
            "entity": names[slot],
            "simulated": origins[slot][2],
            "last_seen": iso(int(found.time[at[i]])),
            "fresh": bool(fresh[i]) or bool(values[i]),
            "values": values[i],
            "abnormal": abnormal[i],
        }


def _add_values(
    found: CurrentValues,
    signal: Signal,
    at: np.ndarray[Any, Any],
    now: int,
    values: list[dict[str, Any]],
    abnormal: list[list[str]],
) -> None:
    """Adds the current values of one signal, and the signal where a state is not normal."""
    raw, times = found.values[signal.column][at], found.times[signal.column][at]
    known = raw != np.iinfo(raw.dtype).max if raw.dtype.kind == "u" else np.isfinite(raw)
    known &= now - times <= max(SILENT, int(INTERVALS * (signal.interval or 0) * SECOND))
    for i in np.flatnonzero(known).tolist():
        value = raw[i].item()
        if signal.states:
            value = signal.states[int(value)] if int(value) < len(signal.states) else str(int(value))
            if signal.normal and value not in signal.normal:
                abnormal[i].append(signal.name)
        values[i][signal.name] = value
