"""The signal catalogue: every signal that Fleetpulse measures, by device class.

One file per family of device classes; a new signal is one line in its class:

    gpu       gpu, nvlink, neuroncore
    nic       nic
    node      node and its parts, canary; agent, collector, exporter, custom; rank
    facility  coolant, leak; power, psu, battery
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pipeline.model.signals.facility import BATTERY_SIGNALS, COOLANT_SIGNALS, LEAK_SIGNALS, POWER_SIGNALS, PSU_SIGNALS
from pipeline.model.signals.gpu import GPU_SIGNALS, NEURONCORE_SIGNALS, NVLINK_SIGNALS
from pipeline.model.signals.nic import NIC_SIGNALS
from pipeline.model.signals.node import (
    AGENT_SIGNALS,
    BMC_SIGNALS,
    CANARY_SIGNALS,
    COLLECTOR_SIGNALS,
    CUSTOM_SIGNALS,
    DIMM_SIGNALS,
    DISK_SIGNALS,
    EXPORTER_SIGNALS,
    FILESYSTEM_SIGNALS,
    NODE_SIGNALS,
    RANK_SIGNALS,
    SENSOR_SIGNALS,
    SERVICE_SIGNALS,
)
from pipeline.model.signals.signal import TYPES, Kind, Signal, column_of

__all__ = [
    "CATALOGUE",
    "CLASSES",
    "CLASS_OF_KIND",
    "TYPES",
    "Kind",
    "Signal",
    "class_of_entity",
    "column_of",
    "extend_catalogue",
    "kinds_of_class",
    "signals_of_class",
]

CLASSES: Mapping[str, str] = {
    # device class -> kind of its entities; the main one if there are several
    "gpu": "gpu",
    "nvlink": "nvlink",
    "neuroncore": "neuroncore",
    "nic": "port",
    "node": "node",
    "sensor": "sensor",
    "dimm": "dimm",
    "disk": "disk",
    "filesystem": "filesystem",
    "service": "service",
    "power": "pdu",
    "psu": "psu",
    "battery": "battery",
    "coolant": "cdu",
    "leak": "leak_detector",
    "bmc": "bmc",
    "rank": "rank",
    "canary": "cpu",
    "agent": "agent",
    "collector": "collector",
    "exporter": "exporter",
    "custom": "custom",
}

_FURTHER: Mapping[str, tuple[str, ...]] = {
    # device class -> further kinds of its entities
    "power": ("shelf", "chassis", "circuit", "outlet", "output"),
    "coolant": ("connector", "pump", "reservoir", "filter", "loop"),
}

CLASS_OF_KIND: Mapping[str, str] = {kind: c for c, main in CLASSES.items() for kind in (main, *_FURTHER.get(c, ()))}
"""Kind of entity -> its device class."""

_DECLARED: tuple[Signal, ...] = (
    *GPU_SIGNALS,
    *NVLINK_SIGNALS,
    *NEURONCORE_SIGNALS,
    *NIC_SIGNALS,
    *NODE_SIGNALS,
    *SENSOR_SIGNALS,
    *DIMM_SIGNALS,
    *DISK_SIGNALS,
    *FILESYSTEM_SIGNALS,
    *SERVICE_SIGNALS,
    *POWER_SIGNALS,
    *PSU_SIGNALS,
    *BATTERY_SIGNALS,
    *COOLANT_SIGNALS,
    *LEAK_SIGNALS,
    *BMC_SIGNALS,
    *RANK_SIGNALS,
    *CANARY_SIGNALS,
    *AGENT_SIGNALS,
    *COLLECTOR_SIGNALS,
    *EXPORTER_SIGNALS,
    *CUSTOM_SIGNALS,
)


def _with_generations(signals: Iterable[Signal]) -> Iterator[Signal]:
    """All signals, plus one per class with counters: when its counters were last reset."""
    counting: dict[str, None] = {}
    for signal in signals:
        yield signal
        if signal.kind == "counter":
            counting[signal.device_class] = None
    for c in counting:
        text = f"UTC second of the last counter reset of this {CLASSES[c]}, as the agent detected it"
        yield Signal(f"{c}.generation", "s", "state", c, "u4", text, "agent")


CATALOGUE: Mapping[str, Signal] = {signal.name: signal for signal in _with_generations(_DECLARED)}


def kinds_of_class(device_class: str) -> tuple[str, ...]:
    """All kinds of entity of a device class, the main one first."""
    return (CLASSES[device_class], *_FURTHER.get(device_class, ()))


def class_of_entity(entity: str) -> str:
    """The device class of an entity, whose frames contain its events: that of its kind, else the kind itself."""
    kind = entity.split(":", 1)[0]
    return CLASS_OF_KIND.get(kind, kind)


def signals_of_class(device_class: str, catalogue: Mapping[str, Signal] = CATALOGUE) -> tuple[Signal, ...]:
    """All signals of a device class in catalogue order."""
    return tuple(s for s in catalogue.values() if s.device_class == device_class)


def extend_catalogue(declared: Iterable[Signal]) -> dict[str, Signal]:
    """The catalogue with `declared` signals added; a declaration replaces a signal of the same name."""
    return {**CATALOGUE, **{signal.name: signal for signal in declared}}


_LISTED = {"name": "signal", "unit": "unit", "kind": "kind", "device_class": "class", "column": "column"}
_LISTED |= {"type": "type", "otel": "otel", "source": "source", "help": "help"}
LISTING_COLUMNS = list(_LISTED.values())


def listing_rows() -> list[dict[str, Any]]:
    """The rows of `fleetpulse signals`, in catalogue order."""
    return [{shown: getattr(signal, name) for name, shown in _LISTED.items()} for signal in CATALOGUE.values()]
