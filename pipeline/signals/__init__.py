"""The signal catalogue as data: a file per device class, a line per signal, and what every part may ask about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from pipeline.signals import (
    agent,
    battery,
    bmc,
    canary,
    collector,
    coolant,
    custom,
    dimm,
    disk,
    exporter,
    filesystem,
    gpu,
    leak,
    neuroncore,
    nic,
    node,
    nvlink,
    power,
    psu,
    rank,
    sensor,
    service,
)
from pipeline.signals.signal import TYPES, Kind, Signal, column_of

__all__ = [
    "CATALOGUE",
    "CLASSES",
    "CLASS_OF_KIND",
    "TYPES",
    "Kind",
    "Signal",
    "column_of",
    "kinds_of",
    "of_class",
    "with_declared",
]

CLASSES: Mapping[str, str] = {
    # device class -> kind of the entities that bear it, the main one where there are several
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
    # device class -> further kinds of entity that bear it
    "power": ("shelf", "chassis", "circuit", "outlet", "output"),
    "coolant": ("connector", "pump", "reservoir", "filter", "loop"),
}

CLASS_OF_KIND: Mapping[str, str] = {kind: c for c, main in CLASSES.items() for kind in (main, *_FURTHER.get(c, ()))}
"""Kind of entity -> the device class that it bears."""

_FILES = (
    *(gpu, nvlink, neuroncore, nic, node, sensor, dimm, disk, filesystem, service),
    *(power, psu, battery, coolant, leak, bmc, rank, canary, agent, collector, exporter, custom),
)


def _with_generations(signals: Iterable[Signal]) -> Iterator[Signal]:
    """All signals, and for each class that counts the start of its counters' present life (agents/node/counter_generations.py)."""
    counting: dict[str, None] = {}
    for signal in signals:
        yield signal
        if signal.kind == "counter":
            counting[signal.device_class] = None
    for c in counting:
        text = f"UTC second in which the counters of this {CLASSES[c]} began their present life, as the agent saw it"
        yield Signal(f"{c}.generation", "s", "state", c, "u4", text, "agent")


CATALOGUE: Mapping[str, Signal] = {
    signal.name: signal for signal in _with_generations(signal for file in _FILES for signal in file.SIGNALS)
}


def kinds_of(device_class: str) -> tuple[str, ...]:
    """All kinds of entity that bear a device class, the main one first."""
    return (CLASSES[device_class], *_FURTHER.get(device_class, ()))


def of_class(device_class: str, catalogue: Mapping[str, Signal] = CATALOGUE) -> tuple[Signal, ...]:
    """All signals of a device class in catalogue order."""
    return tuple(s for s in catalogue.values() if s.device_class == device_class)


def with_declared(declared: Iterable[Signal]) -> dict[str, Signal]:
    """The catalogue with `declared` signals added; a declaration wins over a line of the same name."""
    return {**CATALOGUE, **{signal.name: signal for signal in declared}}
