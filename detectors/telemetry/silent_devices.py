"""Silent devices of nodes that speak, and silent plant: one GPU whose firmware hangs, a supply that is not read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from detectors.base.topology_index import TopologyIndex
from detectors.telemetry.silence import Bools, shared
from detectors.telemetry.silent_nodes import Known, Silence, clock
from detectors.telemetry.silent_readers import Gone, Readers
from pipeline.model.records import SECOND, Level

IN_NODES = ("gpu", "nic", "psu")
PLANT = ("coolant", "power")
SETTLES = 120 * SECOND
"""A node that speaks again has its devices back so much later at most: drivers load last; chosen."""
_MEANING = {
    "gpu": "GPU",
    "nic": "port",
    "psu": "power supply",
    "coolant": "coolant unit",
    "power": "power unit",
}


class SilentDevices:
    """Keeps what it derived from the topology, and whose readers are gone."""

    def __init__(self) -> None:
        self._homes: dict[str, TopologyIndex] = {}
        self._readers = Readers()

    def look(self, known: Known) -> Iterator[Silence]:
        """Who is silent now, and why."""
        for device_class in (*IN_NODES, *PLANT):
            silent = known.last.silent(device_class, known.seconds)
            if not silent.any():
                self._readers.over(device_class)
                continue
            names = known.last.names[device_class]
            homes = self._homes.setdefault(device_class, TopologyIndex())
            homes.update(names, known.topology)
            if device_class in PLANT:
                mine = {i: names[i] for i in np.flatnonzero(silent).tolist() if not known.in_work(names[i])}
                yield from self._plant(device_class, mine, homes, known)
            elif len(known.last.names.get("node", ())):
                yield from self._in_nodes(device_class, silent[: len(names)], homes, known)

    def _in_nodes(self, device_class: str, silent: Bools, homes: TopologyIndex, known: Known) -> Iterator[Silence]:
        """Those of a node that speaks: nearly all at once are their reader's silence, told once."""
        nodes = known.last.names["node"]
        owner = homes.node_positions(nodes)
        counted = np.append(self._spoke(device_class, known)[: len(nodes)], False)[owner]
        if counted.any():
            counted &= ~known.working(device_class)
        silent = silent & counted
        gone = self._readers.look(device_class, silent, counted, owner, homes, known.last)
        if gone is not None:
            yield self._unread(device_class, gone, known)
            silent &= ~gone.silent
        by_node: dict[str, list[int]] = {}
        for i in np.flatnonzero(silent).tolist():
            by_node.setdefault(nodes[owner[i]], []).append(i)
        names, since = known.last.names[device_class], known.last.seen[device_class]
        for node, found in sorted(by_node.items()):
            if len(found) > 1 and len(found) == len(homes.devices_below(node)):
                yield self._all(node, device_class, len(found), int(since[found].min()), known)
                continue
            for i in found:
                yield self._one(names[i], node, device_class, int(since[i]), known)

    def _unread(self, device_class: str, gone: Gone, known: Known) -> Silence:
        """A ticket, unless the jobs of most of the nodes ended with it: then the devices are gone themselves."""
        names = known.last.names["node"]
        nodes = [names[i] for i in gone.nodes]
        count, what = len(nodes), _many(device_class)
        when = f"within {gone.seconds:.0f} s at {clock(gone.since)}"
        said = f"{what[0].upper()}{what[1:]} of {count} of {gone.of} nodes fell silent {when}"
        ended = device_class == "gpu" and _jobs_ended(nodes, gone.since, known)
        why = "and their jobs ended with it" if ended else "what reads them is gone (exporter, collector)"
        summary = f"{said} while the nodes speak: {why}"
        clears, more = "over with the next samples of nearly all", {"nodes": nodes[:64]}
        key = f"{device_class}|unread"
        level: Level = "page" if ended else "ticket"
        signal = (known.last.signals[device_class],)
        return Silence(key, gone.entity, gone.since, level, float(count), summary, "reader", clears, signal, more)

    def _spoke(self, device_class: str, known: Known) -> Bools:
        """(N,) whether a node speaks, and has done so for long enough that its devices should, too."""
        patience = known.last.patience(device_class, known.seconds) + SETTLES
        return known.last.speaks("node") & (known.time - known.last.since["node"] > patience)

    def _all(self, node: str, device_class: str, count: int, since: int, known: Known) -> Silence:
        level, why = self._why(node, node, since, known) if device_class == "gpu" else ("ticket", "")
        what = {"gpu": "driver or NVML hangs", "nic": "the driver is gone", "psu": "its BMC is not read"}[device_class]
        said = f"All {count} {_many(device_class)} of {node} are silent for {(known.time - since) / SECOND:.0f} s"
        summary = f"{said} while the node speaks: {why or what}"
        signal = (known.last.signals[device_class],)
        clears = "over when the first of them speaks"
        more = {"devices": count}
        return Silence(f"{node}|{device_class}", node, since, level, 1.0, summary, "devices", clears, signal, more)

    def _one(self, entity: str, node: str, device_class: str, since: int, known: Known) -> Silence:
        level, why = self._why(entity, node, since, known) if device_class == "gpu" else ("ticket", "")
        others = f"while {node} and its other {_many(device_class)} speak"
        summary = (
            f"{entity} has been silent for {(known.time - since) / SECOND:.0f} s {others}{': ' if why else ''}{why}"
        )
        signal = (known.last.signals[device_class],)
        clears = f"over with the next sample of the {_MEANING[device_class]}"
        score = 2.0 if level == "page" else 1.0
        return Silence(f"{entity}|device", entity, since, level, score, summary, "device", clears, signal)

    def _why(self, entity: str, node: str, since: int, known: Known) -> tuple[Level, str]:
        """Of a GPU, or all of a node."""
        fact = known.facts.of(entity, known.time)
        if fact is not None:
            return "page", fact[1]
        jobs = known.jobs.of(node, since, known.time, known.topology)
        if jobs.state in ("ended", "hangs"):
            return "page", f"{jobs.job} {'ended with it' if jobs.state == 'ended' else 'has made no step since'}"
        return "ticket", "off the bus, a hang of its firmware or a reset; no XID was told"

    def _plant(
        self, device_class: str, mine: Mapping[int, str], homes: TopologyIndex, known: Known
    ) -> Iterator[Silence]:
        """Units that no node holds: all of them silent is their reader's silence, told once."""
        seen, names = known.last.seen[device_class], known.last.names[device_class]
        left = dict(mine)
        spoke = known.last.count[device_class] > 0
        if len(mine) > 1 and len(mine) == np.count_nonzero(spoke):
            flags = np.zeros(len(names), bool)
            flags[list(mine)] = True
            around = shared(flags, flags, spoke, homes)
            entity = next((e for e, m in around.items() if len(m) == len(mine)), names[min(mine)])
            since = int(seen[list(mine)].min())
            said = f"All {len(mine)} {_many(device_class)} are silent for {(known.time - since) / SECOND:.0f} s"
            yield self._blind(f"{device_class}|all", entity, device_class, since, said, known)
            left = {}
        for i, entity in left.items():
            since = int(seen[i])
            said = f"{entity} has been silent for {(known.time - since) / SECOND:.0f} s while its like speak"
            yield self._blind(f"{entity}|device", entity, device_class, since, said, known)

    def _blind(self, key: str, entity: str, device_class: str, since: int, said: str, known: Known) -> Silence:
        summary = f"{said}: its BMC or its reader is gone, and nobody watches what it feeds or cools"
        signal = (known.last.signals[device_class],)
        return Silence(key, entity, since, "ticket", 1.0, summary, "reader", "over with its next sample", signal)

    def snapshot(self) -> dict[str, Any]:
        return {"readers": self._readers.snapshot()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._homes = {}
        self._readers.restore(state.get("readers", {}))


def _many(device_class: str) -> str:
    return _MEANING[device_class].removesuffix("y") + ("ies" if device_class == "psu" else "s")


def _jobs_ended(nodes: Sequence[str], since: int, known: Known) -> bool:
    """Whether most of the nodes had jobs, and none of them lives on: an end or two within minutes are usual."""
    ended = 0
    for node in nodes:
        state = known.jobs.of(node, since, known.time, known.topology).state
        if state not in ("ended", "none"):
            return False
        ended += state == "ended"
    return ended > len(nodes) / 2
