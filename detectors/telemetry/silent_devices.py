"""Silent devices of nodes that report, and silent plant: one GPU whose firmware hangs, a supply that is not read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from detectors.base.state import State, part
from detectors.base.topology_index import TopologyIndex
from detectors.telemetry.silence import Bools, shared_ancestors
from detectors.telemetry.silent_nodes import Context, Silence
from detectors.telemetry.silent_readers import LostReader, Readers
from pipeline.model.entity_names import entity_name, pager_title
from pipeline.model.records import SECOND, Level

IN_NODES = ("gpu", "nic", "psu")
PLANT = ("coolant", "power")
SETTLES = 120 * SECOND
"""us after which a node that reports again has its devices back: drivers load last; chosen."""
_MEANING = {
    "gpu": "GPU",
    "nic": "port",
    "psu": "power supply",
    "coolant": "coolant unit",
    "power": "power unit",
}
_ALL_SILENT = {"gpu": "driver or NVML hangs", "nic": "driver gone", "psu": "BMC not read"}
_LISTED = 64  # nodes in the evidence


@dataclass
class SilentDevices(State):
    """Devices that are silent while their node reports, units of the plant, and classes whose reader is gone."""

    _readers: Readers = part(Readers)
    _indexes: dict[str, TopologyIndex] = field(default_factory=dict, init=False, repr=False)

    def find_silences(self, context: Context) -> Iterator[Silence]:
        """Yields the silences of this instant, each with its cause."""
        for device_class in (*IN_NODES, *PLANT):
            silent = context.last.silent(device_class, context.seconds)
            if not silent.any():
                self._readers.clear(device_class)
                continue
            names = context.last.names(device_class)
            index = self._indexes.setdefault(device_class, TopologyIndex())
            index.update(names, context.topology)
            if device_class in PLANT:
                mine = {i: names[i] for i in np.flatnonzero(silent).tolist() if not context.in_maintenance(names[i])}
                yield from self._plant_silences(device_class, mine, index, context)
            elif len(context.last.names("node")):
                yield from self._silences_in_nodes(device_class, silent[: len(names)], index, context)

    def _silences_in_nodes(
        self, device_class: str, silent: Bools, index: TopologyIndex, context: Context
    ) -> Iterator[Silence]:
        """Devices of nodes that report; nearly all together are the silence of their reader, reported once."""
        nodes = context.last.names("node")
        owner = index.node_positions(nodes)
        counted = np.append(self._settled_nodes(device_class, context)[: len(nodes)], False)[owner]
        if counted.any():
            counted &= ~context.maintenance_mask(device_class)
        silent = silent & counted
        gone = self._readers.find_lost(device_class, silent, counted, owner, index, context.last)
        if gone is not None:
            yield self._unread_silence(device_class, gone, context)
            silent &= ~gone.silent
        by_node: dict[str, list[int]] = {}
        for i in np.flatnonzero(silent).tolist():
            by_node.setdefault(nodes[owner[i]], []).append(i)
        devices = context.last.of_class(device_class)
        for node, found in sorted(by_node.items()):
            if len(found) > 1 and len(found) == len(index.devices_below(node)):
                yield self._node_silence(node, device_class, len(found), int(devices.seen[found].min()), context)
                continue
            for i in found:
                yield self._single_silence(devices.names[i], node, device_class, int(devices.seen[i]), context)

    def _unread_silence(self, device_class: str, gone: LostReader, context: Context) -> Silence:
        """A ticket, unless the jobs of most of the nodes ended with it: then the devices are gone themselves."""
        names = context.last.names("node")
        nodes = [names[i] for i in gone.nodes]
        count = len(nodes)
        ended = device_class == "gpu" and _jobs_ended(nodes, gone.since, context)
        why = "their jobs ended" if ended else "reader gone"
        summary = pager_title(gone.entity, f"{_plural(device_class)} of {count} of {gone.of} nodes silent: {why}")
        clears, evidence = "over with the next samples of nearly all", {"nodes": nodes[:_LISTED]}
        key = f"{device_class}|unread"
        level: Level = "page" if ended else "ticket"
        signal = (context.last.signals[device_class],)
        return Silence(key, gone.entity, gone.since, level, float(count), summary, "reader", clears, signal, evidence)

    def _settled_nodes(self, device_class: str, context: Context) -> Bools:
        """Returns (N,) nodes that report, and have for so long that their devices should, too."""
        patience = context.last.patience(device_class, context.seconds) + SETTLES
        nodes = context.last.of_class("node")
        return nodes.reporting & (context.time - nodes.since > patience)

    def _node_silence(self, node: str, device_class: str, count: int, since: int, context: Context) -> Silence:
        level, why = self._gpu_cause(node, node, since, context) if device_class == "gpu" else ("ticket", "")
        silent = f"all {count} {_plural(device_class)} silent for {context.silent_for(since)}"
        summary = pager_title(node, f"{silent}: {why or _ALL_SILENT[device_class]}")
        signal = (context.last.signals[device_class],)
        clears = "over when the first of them reports"
        evidence = {"devices": count}
        return Silence(f"{node}|{device_class}", node, since, level, 1.0, summary, "devices", clears, signal, evidence)

    def _single_silence(self, entity: str, node: str, device_class: str, since: int, context: Context) -> Silence:
        level, why = self._gpu_cause(entity, node, since, context) if device_class == "gpu" else ("ticket", "")
        text = f"silent for {context.silent_for(since)} while its node reports"
        summary = pager_title(entity, f"{text}: {why}" if why else text)
        signal = (context.last.signals[device_class],)
        clears = f"over with the next sample of the {_MEANING[device_class]}"
        score = 2.0 if level == "page" else 1.0
        return Silence(f"{entity}|device", entity, since, level, score, summary, "device", clears, signal)

    def _gpu_cause(self, entity: str, node: str, since: int, context: Context) -> tuple[Level, str]:
        """Returns level and cause in words, for a GPU or all of a node."""
        fact = context.facts.last_fatal(entity, context.time)
        if fact is not None:
            return "page", fact[1]
        jobs = context.jobs.verdict(node, since, context.time, context.topology)
        if jobs.state in ("ended", "hangs"):
            return "page", f"{entity_name(jobs.job)} {'ended' if jobs.state == 'ended' else 'hangs'}"
        return "ticket", "no XID reported"

    def _plant_silences(
        self, device_class: str, mine: Mapping[int, str], index: TopologyIndex, context: Context
    ) -> Iterator[Silence]:
        """Units that no node holds: all of them silent is the silence of their reader, reported once."""
        devices = context.last.of_class(device_class)
        left = dict(mine)
        sampled = devices.count > 0
        if len(mine) > 1 and len(mine) == np.count_nonzero(sampled):
            flags = np.zeros(len(devices.names), bool)
            flags[list(mine)] = True
            around = shared_ancestors(flags, flags, sampled, index)
            entity = next((e for e, m in around.items() if len(m) == len(mine)), devices.names[min(mine)])
            since = int(devices.seen[list(mine)].min())
            text = f"all {len(mine)} {_plural(device_class)} silent for {context.silent_for(since)}"
            yield self._unread_plant(f"{device_class}|all", entity, device_class, since, text, context)
            left = {}
        for i, entity in left.items():
            since = int(devices.seen[i])
            text = f"silent for {context.silent_for(since)}"
            yield self._unread_plant(f"{entity}|device", entity, device_class, since, text, context)

    def _unread_plant(
        self, key: str, entity: str, device_class: str, since: int, text: str, context: Context
    ) -> Silence:
        summary = pager_title(entity, f"{text}: its BMC or reader is gone")
        signal = (context.last.signals[device_class],)
        return Silence(key, entity, since, "ticket", 1.0, summary, "reader", "over with its next sample", signal)


def _plural(device_class: str) -> str:
    return _MEANING[device_class].removesuffix("y") + ("ies" if device_class == "psu" else "s")


def _jobs_ended(nodes: Sequence[str], since: int, context: Context) -> bool:
    """Returns whether most of the nodes had jobs, and all of these ended: an end or two within minutes are usual."""
    ended = 0
    for node in nodes:
        state = context.jobs.verdict(node, since, context.time, context.topology).state
        if state not in ("ended", "none"):
            return False
        ended += state == "ended"
    return ended > len(nodes) / 2
