"""The newest values of an entity and its parts, from memory, each beside those of its peers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.api.compare import natural_key
from pipeline.api.heatmap import DeviceValues, FleetNames, select_current
from pipeline.api.history import find_signal, signal_brief
from pipeline.model.errors import UsageError
from pipeline.model.records import SECOND, iso
from pipeline.model.signals import CLASS_OF_KIND, Signal
from pipeline.model.topology import Topology, kind_of
from pipeline.store.devices import Devices
from pipeline.store.latest import CurrentValues

MAX_SIGNALS = 64
"""Signals of one request (chosen: all that a page about a node shows)."""
MAX_DEVICES = 512
"""Devices of one class in an answer (chosen: a node of 8 GPUs has up to 144 NVLinks)."""
_LEAST_PEERS = 4
"""Peers that a group must have; with fewer, the whole class is compared. Chosen: a quartile each."""


def read_values(
    read: Callable[[str, Sequence[str]], CurrentValues],
    devices: Devices,
    names: FleetNames,
    topology: Topology,
    entity: str,
    wanted: Iterable[str],
    now: int,
    max_age: float,
) -> dict[str, Any]:
    """Returns the answer of GET /api/v1/values. A counter is a total since its last reset, and has no peers.

    read: newest values of a class. max_age: s, as in `heatmap`. Raises UsageError.
    """
    signals = [find_signal(name) for name in dict.fromkeys(wanted)]
    if not 0 < len(signals) <= MAX_SIGNALS:
        raise UsageError(f"signal: found {len(signals)}; expected 1 to {MAX_SIGNALS}")
    by_class: dict[str, list[Signal]] = defaultdict(list)
    for signal in signals:
        by_class[signal.device_class].append(signal)
    parts = {entity, *topology.descendants(entity)}
    found = []
    for device_class, own in by_class.items():
        slots = _find_slots(devices, device_class, parts, entity)
        current = read(device_class, [signal.column for signal in own])
        groups = names.groups(devices, topology, device_class, "auto")
        mine, left_out = slots[:MAX_DEVICES], max(0, len(slots) - MAX_DEVICES)
        values = [select_current(current, devices, signal, now, int(max_age * SECOND)) for signal in own]
        listed = devices.names(device_class)
        found.append(
            {
                "device_class": device_class,
                "entities": [listed[slot] for slot in mine],
                "last_seen": [_last_seen(current, slot) for slot in mine],
                "left_out": left_out,
                "signals": [_one_signal(v, mine, groups) for v in values] if mine else [],
            }
        )
    return {"classes": found}


def _last_seen(current: CurrentValues, slot: int) -> str | None:
    at = np.flatnonzero(current.slot == slot)
    return iso(int(current.time[at[0]])) if len(at) else None


def _find_slots(devices: Devices, device_class: str, parts: set[str], entity: str) -> list[int]:
    """Returns the slots of the parts of this class, also of those that the node sends but no inventory lists."""
    sender = entity.partition(":")[2] if kind_of(entity) == "node" else None
    origins = list(devices.origins(device_class))
    listed = list(devices.names(device_class))[: len(origins)]
    kinds = {kind for kind, own in CLASS_OF_KIND.items() if own == device_class}
    inside = parts if any(kind_of(e) in kinds for e in parts) else set()
    if not inside and sender is None:
        return []
    on_node = device_class not in ("power", "coolant", "rank")
    found = [
        i for i, e in enumerate(listed) if e in inside or (on_node and sender is not None and origins[i][1] == sender)
    ]
    return sorted(found, key=lambda i: natural_key(listed[i]))


def _one_signal(found: DeviceValues, mine: Sequence[int], groups: NDArray[np.intp]) -> dict[str, Any]:
    """Returns the values of some devices, and median, 10th and 90th percentile of their peers on other nodes."""
    signal, place = found.signal, np.array(mine, np.intp)
    number = min(len(found.known), len(groups))
    values = [found.values[i].item() if i < len(found.known) and found.known[i] else None for i in mine]
    others = found.known[:number].copy()
    others[place[place < number]] = False
    group = groups[place[0]] if place[0] < number else -1
    peers = others & (groups[:number] == group)
    kind = "group"
    if np.count_nonzero(peers) < _LEAST_PEERS:
        peers, kind = others, "class"
    numbers = found.values[:number][peers].astype(np.float64)
    numbers = numbers[np.isfinite(numbers)]
    compared = signal.kind == "gauge" and len(numbers) >= 1
    low, median, high = np.quantile(numbers, [0.1, 0.5, 0.9]).tolist() if compared else (None, None, None)
    brief = {**signal_brief(signal), "unit": signal.unit}
    return {
        "signal": {**brief, "states": list(signal.states), "normal": list(signal.normal)},
        "values": [None if v is None or (isinstance(v, float) and not np.isfinite(v)) else v for v in values],
        "median": median,
        "low": low,
        "high": high,
        "peers": len(numbers) if compared else 0,
        "peer_kind": kind if compared else "none",
    }
