"""Maps a series of another sender (metric name and labels) to signals of the catalogue, or to a custom signal.

In this order: our own names (`fleetpulse.`), the hardware conventions (`hw.`), the mapping files (dcgm-exporter,
node_exporter, the OpenTelemetry Collector's hostmetrics and others). Everything else is kept as `custom.value` of an
entity `custom:NODE.METRIC{LABELS}`.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pipeline.foreign.mapping import MappedMetric, MetricMapping, fill_template, list_shipped, load_mapping
from pipeline.model.names import MAX_NAME
from pipeline.model.signals import CATALOGUE, CLASS_OF_KIND, CLASSES, otel

SET, ADD, MIN, MAX, COUNT, MATCH = range(6)
"""How a value enters its cell: as it is; summed with those of other series; their minimum, maximum or number; or, if it
equals `scale`, as the state `offset`."""
_MERGES = {"": SET, "sum": ADD, "min": MIN, "max": MAX, "count": COUNT}
_HASHED = 12  # characters of the hash that replaces the end of a long name
CUSTOM = "custom"


@dataclass(frozen=True, slots=True)
class Series:
    """One series. kind: gauge, sum, histogram, ...; delta: its values are increments; counters: cumulative sum.

    resource: attributes of what sent it.  labels: of the series itself.
    """

    name: str
    unit: str
    kind: str
    delta: bool
    labels: Mapping[str, str]
    resource: Mapping[str, str] = field(default_factory=dict)


class Target(NamedTuple):
    """Where a value goes: value * scale + offset, see SET and MATCH. Values from `blank` on are missing."""

    device_class: str
    entity: str
    signal: str
    merge: int = SET
    scale: float = 1.0
    offset: float = 0.0
    blank: float = math.inf


# --- the node -----------------------------------------------------------------------------------------------------

NODE_LABELS = ("Hostname", "kubernetes_node", "nodename", "node")
"""Labels that name the node of a series without attributes of a host: of dcgm-exporter, and of Kubernetes scrapes."""
_NO_NODE = ("node_uname_info", "nodename")
"""A metric and its own label, which is the kernel's host name: the other series of its page do not have it."""
_ADDRESSES = ("server.address", "net.host.name", "service.instance.id", "instance")
"""Attributes and labels with the address of a scraped endpoint, its port perhaps included."""


def find_node(series: Series, attributes: Sequence[str]) -> str:
    """The node of a series: the first of `attributes` of its resource, a label, the address it was scraped from; "" if
    there is none."""
    for key in attributes:
        if found := series.resource.get(key):
            return found
    named = (key.replace(".", "_") for key in attributes)  # as attributes of a resource are labels in Prometheus
    for key in (*attributes, *named, *NODE_LABELS):
        if (found := series.labels.get(key)) and (series.name, key) != _NO_NODE:
            return found
    for key in _ADDRESSES:
        if found := series.resource.get(key) or series.labels.get(key):
            return found.rpartition(":")[0].strip("[]") if found.rpartition(":")[2].isdecimal() else found
    return ""


# --- the signal ---------------------------------------------------------------------------------------------------


def map_series(series: Series, node: str) -> list[Target]:
    """The signals of the catalogue that a series becomes; [] if it stays a custom signal."""
    if series.name.startswith(otel.PREFIX):
        found = _map_own(series)
    elif series.name.startswith("hw."):
        found = _map_hardware(series, node)
    else:
        found = _map_by_file(series, node)
    if series.delta:  # our counters are cumulative
        found = [target for target in found if CATALOGUE[target.signal].kind != "counter"]
    return found


def _map_own(series: Series) -> list[Target]:
    signal = CATALOGUE.get(series.name.removeprefix(otel.PREFIX))
    entity = series.labels.get("fleetpulse.entity") or series.labels.get("hw.id", "")
    if signal is None or CLASS_OF_KIND.get(entity.partition(":")[0]) != signal.device_class:
        return []
    return [Target(signal.device_class, entity, signal.name)]


_CLASS_OF_TYPE = {
    # hw.type -> device class
    "gpu": "gpu",
    "network": "nic",
    "memory": "dimm",
    "physical_disk": "disk",
    "power_supply": "psu",
    "battery": "battery",
    **dict.fromkeys(("temperature", "voltage", "fan", "enclosure"), "sensor"),
}
_CLASS_OF_PREFIX = {
    # of a name without hw.type -> device class
    "hw.gpu.": "gpu",
    "hw.network.": "nic",
    "hw.power_supply.": "psu",
    "hw.battery.": "battery",
    "hw.physical_disk.": "disk",
    "hw.memory.": "dimm",
    "hw.host.": "node",
    **dict.fromkeys(("hw.temperature", "hw.voltage", "hw.fan."), "sensor"),
}
_DEFAULTS = {"hw.gpu.task": "general"}  # attributes that may be left out


@functools.cache
def _conventions() -> Mapping[tuple[str, str], list[otel.Metric]]:
    """(name, device class) -> the catalogue's metrics under that hardware convention."""
    found: dict[tuple[str, str], list[otel.Metric]] = {}
    for signal in CATALOGUE.values():
        for metric in otel.metrics_of_signal(signal):
            if metric.is_hardware:
                found.setdefault((metric.name, signal.device_class), []).append(metric)
    return found


def _map_hardware(series: Series, node: str) -> list[Target]:
    """By the attributes of its convention; the one with the most of them, if several fit."""
    device_class, entity = _find_hardware(series, node)
    labels = {**_DEFAULTS, **series.labels}
    fitting = [m for m in _conventions().get((series.name, device_class), ()) if _fits(m, labels)]
    if not fitting:
        return []
    metric = max(fitting, key=lambda m: len(m.attributes))
    if metric.states is None:
        scale, offset = 1 / metric.factor, -metric.offset / metric.factor
        return [Target(device_class, entity, metric.signal, SET, scale, offset)]
    found = [Target(device_class, entity, metric.signal, MATCH, 1.0, metric.states[0])]
    if metric.name == "hw.network.up":
        down = next((n for n in range(len(CATALOGUE[metric.signal].states)) if n not in metric.states), None)
        found += [] if down is None else [Target(device_class, entity, metric.signal, MATCH, 0.0, down)]
    return found


def _fits(metric: otel.Metric, labels: Mapping[str, str]) -> bool:
    """Whether a point has the attributes of a metric; hw.type may be left out where the name has it."""
    return all(labels.get(key, value if key == "hw.type" else None) == value for key, value in metric.attributes)


def _find_hardware(series: Series, node: str) -> tuple[str, str]:
    """(device class, entity) of a point of a hardware convention; ("", "") if they are unknown.

    hw.id may be one of our entities (`gpu:n042.3`), as our own agents send it, or any other identifier.
    """
    part, kind = series.labels.get("hw.id", ""), series.labels.get("hw.type", "")
    if (own := CLASS_OF_KIND.get(part.partition(":")[0])) is not None and ":" in part:
        return own, part
    device_class = _CLASS_OF_TYPE.get(kind)
    if device_class is None:
        device_class = next((c for prefix, c in _CLASS_OF_PREFIX.items() if series.name.startswith(prefix)), "")
    if device_class == "node":
        return device_class, f"node:{node}"
    return (device_class, f"{CLASSES[device_class]}:{node}.{part}") if device_class and part else ("", "")


@functools.cache
def _mappings() -> tuple[MetricMapping, ...]:
    return tuple(load_mapping(name) for name in list_shipped())


@functools.cache
def _entries_of(name: str) -> tuple[tuple[MetricMapping, MappedMetric], ...]:
    return tuple((names, metric) for names in _mappings() for metric in names.find_metrics(name))


@functools.lru_cache(65_536)
def _has_entries(name: str) -> bool:
    return any(names.find_metrics(name) for names in _mappings())


def _map_by_file(series: Series, node: str) -> list[Target]:
    """By the shipped mapping files. Their `{node}`, and dcgm-exporter's `{Hostname}`, are the node of the series."""
    if not _has_entries(series.name):
        return []
    labels = {**series.labels, "node": node, "Hostname": node, "target": node}
    found = []
    for names, metric in _entries_of(series.name):
        if metric.merge == "mean" or not metric.matches(series.labels):
            continue
        entity = fill_template(names.entity_template(metric), labels)
        if entity is None:
            continue
        signal = CATALOGUE[metric.signal]
        target = Target(signal.device_class, entity, signal.name, blank=names.blank)
        if metric.states:
            found += [
                target._replace(merge=MATCH, scale=float(value), offset=signal.states.index(state))
                for value, state in metric.states.items()
            ]
        else:
            found.append(target._replace(merge=_MERGES[metric.merge], scale=metric.scale, offset=metric.offset))
    return found


# --- custom signals -----------------------------------------------------------------------------------------------

_INSTANCE = ("service.namespace", "service.name", "service.instance.id", "k8s.pod.name", "k8s.container.name")
"""Attributes of a resource that distinguish two senders on one node."""


def map_custom(series: Series, node: str, scope: str = "") -> Target:
    """The custom signal of a series. scope: distinguishes series that are equal otherwise.

    A name above MAX_NAME characters ends with a hash of the whole.
    """
    labels = {**{key: series.resource[key] for key in _INSTANCE if key in series.resource}, **series.labels}
    if scope:
        labels["otel.scope.name"] = scope
    inside = ",".join(f"{label}={value}" for label, value in sorted(labels.items()))
    entity = f"{CUSTOM}:{node}.{series.name}" + (f"{{{inside}}}" if inside else "")
    if len(entity) > MAX_NAME:
        digest = hashlib.sha256(entity.encode("utf-8", "replace")).hexdigest()[:_HASHED]
        entity = f"{entity[: MAX_NAME - _HASHED - 3].rstrip()}...{digest}"
    return Target(CUSTOM, entity, f"{CUSTOM}.value")


def describe_series(series: Series) -> dict[str, object]:
    """What the inventory reports about a custom signal."""
    facts: dict[str, object] = {"metric": series.name, "labels": dict(series.labels), "type": series.kind}
    if series.unit:
        facts["unit"] = series.unit
    if series.delta:
        facts["temporality"] = "delta"
    return facts
