"""What missing telemetry blinds: the detectors whose required signals have no current value, and on which devices."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.api.heatmap import FleetNames
from pipeline.api.quality.sources import Read
from pipeline.model.records import SECOND
from pipeline.model.signals import CATALOGUE, CLASSES, Signal
from pipeline.store.devices import Devices

MAX_AGE = 60 * SECOND
"""Age from which a value is missing (us), or three intervals of its signal. As in GET /api/v1/heatmap."""
MOSTLY = 0.5
"""Share of the devices of a group that must lack a signal that as many of the others have. Chosen: the majority."""
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ClassValues:
    """Which devices of a class lack which signal now, by slot.

    node: number of the node of each device.  nodes: their names.  missing: signal -> no current value.
    stopped: signal -> it had a value, which is too old now.
    """

    number: int
    node: NDArray[np.intp]
    nodes: Sequence[str]
    missing: Mapping[str, Bools]
    stopped: Mapping[str, Bools]


@dataclass(frozen=True, slots=True)
class Blinded:
    """What a group of problems blinds: detectors and signals by name, and devices by kind."""

    detectors: tuple[str, ...]
    signals: tuple[str, ...]
    devices: Mapping[str, int]


@dataclass
class BlindSpots:
    """The signals that detectors use, with the devices that lack them now."""

    detectors: Sequence[Mapping[str, Any]]
    classes: dict[str, ClassValues] = field(default_factory=dict)

    @classmethod
    def read(
        cls, read: Read, devices: Devices, names: FleetNames, detectors: Sequence[Mapping[str, Any]], now: int
    ) -> BlindSpots:
        """Reads the newest values of all signals that a detector needs or uses, from memory."""
        found = cls(detectors)
        wanted: dict[str, dict[str, Signal]] = {}
        for row in detectors:
            for name in (*_required(row), *map(str, row["wants"])):
                if (signal := CATALOGUE.get(name)) is not None:
                    wanted.setdefault(signal.device_class, {})[name] = signal
        for device_class, signals in wanted.items():
            if devices.names(device_class):
                found.classes[device_class] = _read_class(read, devices, names, device_class, signals, now)
        return found

    def find_blinded(self, nodes: Collection[str]) -> Blinded:
        """Returns the signals that are not evaluated on these nodes: most of their devices lack them, others do not."""
        blind: dict[str, None] = {}
        counts: dict[str, int] = {}
        for device_class, known in self.classes.items():
            mine = np.isin(known.node, [i for i, name in enumerate(known.nodes) if name[5:] in nodes])
            own = int(mine.sum())
            if not own:
                continue
            lost = np.zeros(known.number, bool)
            for name, missing in known.missing.items():
                gone = missing & mine
                elsewhere = known.number == own or bool((~missing & ~mine).sum() >= MOSTLY * (known.number - own))
                if known.stopped[name][mine].any() or (elsewhere and gone.sum() >= MOSTLY * own):
                    blind[name] = None
                    lost |= gone
            if lost.any():
                counts[CLASSES[device_class]] = int(lost.sum())
        judges = tuple(str(row["name"]) for row in self.detectors if _is_blinded(row, blind))
        return Blinded(judges, tuple(blind), counts)

    def list_detectors(self) -> Iterator[dict[str, Any]]:
        """Yields each detector with the number of its devices, and of those that it cannot judge now."""
        for row in self.detectors:
            known = self.classes.get(str(row["class"]))
            number = 0 if known is None else known.number
            blind = np.zeros(number, bool)
            worst, most = "", 0
            for choice in _choices(row):
                names = [n for n in choice if known is not None and n in known.missing]
                if known is None or not names or len(names) < len(choice):
                    continue  # an event, or a signal of another class
                lacking = np.logical_and.reduce([known.missing[n] for n in names])
                blind |= lacking
                if lacking.sum() > most:
                    worst, most = names[0], int(lacking.sum())
            yield {
                "detector": row["name"],
                "kind": CLASSES.get(str(row["class"]), str(row["class"])),
                "devices": number,
                "blind": int(blind.sum()),
                "missing": worst,
                "off": list(row["off"]),
                "errors": int(row["errors"]),
            }


def _choices(row: Mapping[str, Any]) -> list[list[str]]:
    """Returns the required inputs of a detector: of each inner list, one suffices."""
    return [str(need).split(" or ") for need in row["needs"]]


def _required(row: Mapping[str, Any]) -> list[str]:
    return [name for choice in _choices(row) for name in choice]


def _is_blinded(row: Mapping[str, Any], blind: Mapping[str, None]) -> bool:
    return not row["off"] and any(all(name in blind for name in choice) for choice in _choices(row))


def _read_class(
    read: Read, devices: Devices, names: FleetNames, device_class: str, signals: Mapping[str, Signal], now: int
) -> ClassValues:
    found = read(device_class, [signal.column for signal in signals.values()])
    node, nodes = names.nodes(devices, device_class)
    number = len(node)
    missing, stopped = {}, {}
    at = np.flatnonzero((found.slot >= 0) & (found.slot < number))
    slot = found.slot[at]
    for name, signal in signals.items():
        lacks, ended = np.ones(number, bool), np.zeros(number, bool)
        if signal.column in found.values:
            raw, time = found.values[signal.column][at], found.times[signal.column][at]
            known = raw != np.iinfo(raw.dtype).max if raw.dtype.kind == "u" else np.isfinite(raw)
            old = now - time > max(MAX_AGE, int(3 * (signal.interval or 0) * SECOND))
            lacks[slot], ended[slot] = ~known | old, known & old
        missing[name], stopped[name] = lacks, ended
    return ClassValues(number, node, nodes, missing, stopped)
