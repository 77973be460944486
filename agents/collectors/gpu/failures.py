"""Failed GPUs in the readings of one read, for `fleetpulse doctor`, which evaluates a node without history."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.collector import Reading
from pipeline.model.records import Event
from pipeline.model.signals import CATALOGUE

_COLLECTOR_SIGNALS = ("gpu.present", "gpu.call_latency_max", "gpu.field_latency")
"""Signals of the collector itself, present even if the GPU reports nothing."""
_RECOVERY_ACTIONS = CATALOGUE["gpu.recovery_action"].states


def gpu_failures(readings: Sequence[Reading]) -> list[str]:
    """Returns one text per GPU that is lost, silent or needs a recovery action, and one per wrong number of GPUs."""
    found: dict[str, str] = {}
    for reading in readings:
        if reading.device_class == "gpu":
            found |= dict(_failures_in_columns(reading))
        for event in reading.events:
            found |= dict(_failures_in_events(event))
    return [f"{entity}: {what}" for entity, what in found.items()]


def _failures_in_columns(reading: Reading) -> Iterator[tuple[str, str]]:
    """Yields the failures in the columns of a reading. A missing column proves nothing."""
    reported = [
        _present_values(values) for signal, values in reading.columns.items() if signal not in _COLLECTOR_SIGNALS
    ]
    present, action = (reading.columns.get(signal) for signal in ("gpu.present", "gpu.recovery_action"))
    for i, entity in enumerate(reading.entities):
        if present is not None and present[i] == 0:
            yield entity, "lost: no response to its driver"
        elif reported and not any(known[i] for known in reported):
            yield entity, "silent: all its signals are missing"
        elif action is not None and _present_values(action)[i] and action[i] != 0:
            yield entity, _recovery_text(action[i])


def _failures_in_events(event: Event) -> Iterator[tuple[str, str]]:
    """Yields the failures in an event, with what a technician needs to find the GPU."""
    if event.kind == "gpu_lost":
        known = ", ".join(f"{key} {event.data[key]}" for key in ("pci", "serial") if event.data.get(key))
        yield event.entity, f"lost: no response to its driver{f' ({known})' if known else ''}"
    elif event.kind == "gpu_count" and event.data.get("present") != event.data.get("expected"):
        missing = ", ".join(map(str, event.data.get("missing") or ()))
        counted = f"{event.data.get('present')} of {event.data.get('expected')} GPUs by {event.data.get('source')}"
        yield event.entity, f"{counted}{f', missing: {missing}' if missing else ''}"
    elif event.kind == "recovery_action" and event.data.get("to"):
        yield event.entity, _recovery_text(event.data["to"])


def _recovery_text(action: float) -> str:
    number = int(action)
    known = 0 <= number < len(_RECOVERY_ACTIONS)
    return f"recovery action required by its driver: {_RECOVERY_ACTIONS[number] if known else number}"


def _present_values(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Returns which values are present. NaN, and the largest number of an unsigned type, mean missing."""
    if values.dtype.kind == "u":
        return np.asarray(values != np.iinfo(values.dtype).max)
    return np.asarray(~np.isnan(values))
