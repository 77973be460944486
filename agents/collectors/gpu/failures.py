"""Which GPUs one look shows as failed: for `fleetpulse doctor`, which judges a node without its history."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.collector import Reading
from pipeline.model.records import Event
from pipeline.model.signals import CATALOGUE

_OWN = ("gpu.present", "gpu.call_latency_max", "gpu.field_latency")
"""What the collector says of a GPU itself, whether or not the GPU tells anything."""
_ACTIONS = CATALOGUE["gpu.recovery_action"].states


def failures(readings: Sequence[Reading]) -> list[str]:
    """One text per GPU that is lost, silent or wants a recovery action, and one per count of GPUs that is wrong."""
    found: dict[str, str] = {}
    for reading in readings:
        if reading.device_class == "gpu":
            found |= dict(_seen(reading))
        for event in reading.events:
            found |= dict(_told(event))
    return [f"{entity}: {what}" for entity, what in found.items()]


def _seen(reading: Reading) -> Iterator[tuple[str, str]]:
    """What the columns show; a column that was not looked at says nothing."""
    told = [_known(values) for signal, values in reading.columns.items() if signal not in _OWN]
    present, action = (reading.columns.get(signal) for signal in ("gpu.present", "gpu.recovery_action"))
    for i, entity in enumerate(reading.entities):
        if present is not None and present[i] == 0:
            yield entity, "lost: it does not answer its driver"
        elif told and not any(known[i] for known in told):
            yield entity, "it tells nothing: all its signals are missing"
        elif action is not None and _known(action)[i] and action[i] != 0:
            yield entity, _wanted(action[i])


def _told(event: Event) -> Iterator[tuple[str, str]]:
    """What the events say, with what a technician looks for."""
    if event.kind == "gpu_lost":
        known = ", ".join(f"{key} {event.data[key]}" for key in ("pci", "serial") if event.data.get(key))
        yield event.entity, f"lost: it does not answer its driver{f' ({known})' if known else ''}"
    elif event.kind == "gpu_count" and event.data.get("present") != event.data.get("expected"):
        missing = ", ".join(map(str, event.data.get("missing") or ()))
        counted = f"{event.data.get('present')} of {event.data.get('expected')} GPUs by {event.data.get('source')}"
        yield event.entity, f"{counted}{f', missing: {missing}' if missing else ''}"
    elif event.kind == "recovery_action" and event.data.get("to"):
        yield event.entity, _wanted(event.data["to"])


def _wanted(action: float) -> str:
    number = int(action)
    return f"its driver wants: {_ACTIONS[number] if 0 <= number < len(_ACTIONS) else f'recovery action {number}'}"


def _known(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Which values are there: NaN, and the largest of an unsigned type, mean missing."""
    if values.dtype.kind == "u":
        return np.asarray(values != np.iinfo(values.dtype).max)
    return np.asarray(~np.isnan(values))
