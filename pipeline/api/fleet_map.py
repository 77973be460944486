"""The fleet map as bytes: per cell its look (state, cause or affected, simulated), age of its data and one value.

Everything comes from memory except the rates of link errors, which are read over 5 minutes and kept for 30 s.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.api.fleet import SILENT, STATE_OF, STATES, Row, find_affected_nodes
from pipeline.api.fleet_groups import FleetIndex, Layout
from pipeline.api.heatmap import DeviceValues, FleetNames
from pipeline.model.records import SECOND
from pipeline.model.signals import CLASSES
from pipeline.model.topology import Topology
from pipeline.store.devices import Devices
from pipeline.store.latest import CurrentValues

Colour = Literal["state", "temperature", "power", "ber", "step"]
AFFECTED, SIMULATED, DRAINED = 8, 16, 32
"""Bits of a look, above the state: only affected by a fault elsewhere; simulated; held by an act."""
UNKNOWN = 255
"""Level of a cell without a value; the others are 0 to TOP."""
TOP = 250
"""Level of the high end of a scale (chosen: one byte, with room for marks)."""
NEVER = 255
"""Age of a cell that never had data."""
MAX_SETS = 254
"""Most different sets of incidents that cells refer to (one byte; 255: other sets). Chosen."""


@dataclass(frozen=True, slots=True)
class ColourScale:
    """How values become levels. low, high: values of level 0 and TOP.  logarithmic: equal ratios are equal steps.

    diverging: the middle is normal.  label, unit: of the values, for people.
    """

    label: str
    unit: str
    low: float
    high: float
    diverging: bool = False
    logarithmic: bool = False


SCALES: Mapping[Colour, ColourScale] = {
    "temperature": ColourScale("hottest GPU against the median of its peers", "K", -15.0, 15.0, diverging=True),
    "power": ColourScale("mean power of the GPUs", "W", 0.0, 1000.0),
    "ber": ColourScale("bit error rate of the worst link", "1", 1e-15, 1e-6, logarithmic=True),
    "step": ColourScale("slowest rank against the median of its stage", "%", -30.0, 30.0, diverging=True),
}
"""Fixed ends, so that a colour means the same on every day. Chosen: 15 K is a failed cold plate, 30 % a bad straggler;
InfiniBand requires 1e-12. `power` ends at the next 100 W above the greatest value."""


@dataclass(frozen=True, slots=True)
class NodeRoles:
    """own: node -> incidents whose cause is the node or on it.  affected: node -> incidents that only reach it."""

    own: Mapping[str, Sequence[str]]
    affected: Mapping[str, Sequence[str]]
    severity: Mapping[str, str]


def find_roles(incidents: Sequence[Row], topology: Topology, senders: Mapping[str, str]) -> NodeRoles:
    """Returns which nodes hold the cause of an unresolved incident, and which are only affected by one."""
    own, affected = find_affected_nodes(incidents, topology, senders)
    return NodeRoles(own, affected, {incident: severity for incident, severity, _, _ in incidents})


def find_looks(
    index: FleetIndex, roles: NodeRoles, seen: NDArray[np.int64], drained: Iterable[str], now: int
) -> NDArray[np.uint8]:
    """Returns (nodes,) looks. seen: time of the newest row of each node, -1 without one.  drained: entities of nodes.

    No data comes before everything but a critical cause on the node itself; a cause comes before an affected node.
    """
    looks = np.zeros(len(index.nodes), np.uint8)
    silent = (seen < 0) | (now - seen > SILENT)
    for ids_of, bit in ((roles.affected, AFFECTED), (roles.own, 0)):
        for node, ids in ids_of.items():
            if (i := index.number.get(node)) is not None:
                looks[i] = max(STATES.index(STATE_OF[roles.severity[incident]]) for incident in ids) | bit
    looks[silent & (looks != STATES.index("critical"))] = STATES.index("no_data")
    looks |= np.where(index.simulated, SIMULATED, 0).astype(np.uint8)
    looks[[index.number[node] for node in drained if node in index.number]] |= DRAINED
    return looks


def count_states(looks: NDArray[np.uint8]) -> dict[str, int]:
    """Returns the number of nodes per state, only affected ones as `affected`; and how many of all are drained."""
    only = (looks & AFFECTED) > 0
    counts = np.bincount((looks & 7)[~only], minlength=len(STATES)).tolist()
    drained = int(np.count_nonzero(looks & DRAINED))
    return {**dict(zip(STATES, counts, strict=False)), "affected": int(np.count_nonzero(only)), "drained": drained}


class NodePlaces:
    """The number of the node that sends each device, kept until devices or nodes change."""

    def __init__(self, names: FleetNames) -> None:
        self._names = names
        self._kept: dict[str, tuple[object, object, NDArray[np.intp]]] = {}

    def find(self, devices: Devices, device_class: str, index: FleetIndex) -> NDArray[np.intp]:
        """Returns the node number of each device of a class by slot, -1 for nodes that are not in service."""
        place, nodes = self._names.nodes(devices, device_class)
        kept = self._kept.get(device_class)
        if kept is None or kept[0] is not place or kept[1] is not index:
            numbers = np.fromiter((index.number.get(node, -1) for node in nodes), np.intp, len(nodes))
            kept = self._kept[device_class] = place, index, numbers[place] if len(place) else np.zeros(0, np.intp)
        return kept[2]


def find_newest(
    devices: Devices, places: NodePlaces, index: FleetIndex, read: Callable[[str, Sequence[str]], CurrentValues]
) -> NDArray[np.int64]:
    """Returns (nodes,) time of the newest row of any device of a node, -1 without one."""
    newest = np.full(len(index.nodes), -1, np.int64)
    for device_class in CLASSES:
        found = read(device_class, ())
        place = places.find(devices, device_class, index)
        at = np.flatnonzero((found.slot >= 0) & (found.slot < len(place)))
        node = place[found.slot[at]]
        np.maximum.at(newest, node[node >= 0], found.time[at][node >= 0])
    return newest


def ages_of(seen: NDArray[np.int64], now: int) -> NDArray[np.uint8]:
    """Returns ages in one byte: 0 below 30 s, then 1 to 59 s, 60 and more minutes, 120 and more hours, NEVER."""
    seconds = np.maximum(0, now - seen) // SECOND
    coarse = np.where(seconds < 3600, 60 + seconds // 60 - 1, np.minimum(119 + seconds // 3600, NEVER - 1))
    ages = np.where(seconds < 30, 0, np.where(seconds < 60, seconds, coarse))
    return np.where(seen < 0, NEVER, ages).astype(np.uint8)


# --- values -----------------------------------------------------------------------------------------------------------


def reduce_by_node(
    values: NDArray[np.float64], known: NDArray[np.bool_], place: NDArray[np.intp], number: int, how: str
) -> NDArray[np.float64]:
    """Returns (nodes,) the highest (`max`) or mean value of the devices of each node; NaN without one."""
    size = min(len(values), len(place))
    use = known[:size] & np.isfinite(values[:size]) & (place[:size] >= 0)
    at, found = place[:size][use], values[:size][use]
    if how == "mean":
        count = np.bincount(at, minlength=number)
        with np.errstate(invalid="ignore"):
            return np.asarray(np.bincount(at, found, minlength=number) / np.where(count, count, np.nan))
    highest = np.full(number, -np.inf)
    np.maximum.at(highest, at, found)
    return np.where(np.isfinite(highest), highest, np.nan)


def deviations(found: DeviceValues, groups: NDArray[np.intp], relative: bool) -> NDArray[np.float64]:
    """Returns (devices,) distance from the median of the group, in per cent of it if `relative`; NaN without peers."""
    size = min(len(found.values), len(groups))
    values = found.values[:size].astype(np.float64)
    use = np.flatnonzero(found.known[:size] & (groups[:size] >= 0) & np.isfinite(values))
    out = np.full(size, np.nan)
    if not len(use):
        return out
    order = use[np.lexsort((values[use], groups[use]))]
    group = groups[order]
    starts = np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]]))
    number = np.diff(np.append(starts, len(order)))
    low, high = starts + (number - 1) // 2, starts + number // 2
    median = np.repeat((values[order[low]] + values[order[high]]) / 2, number)
    with np.errstate(divide="ignore", invalid="ignore"):
        distance = (values[order] - median) * (100 / median if relative else 1.0)
    out[order] = np.where(np.repeat(number, number) > 1, distance, np.nan)
    return out


def quantize(values: NDArray[np.float64], scale: ColourScale) -> NDArray[np.uint8]:
    """Returns levels 0 to TOP, values beyond the ends at the ends, UNKNOWN for NaN."""
    low, high, shown = scale.low, scale.high, values
    if scale.logarithmic:
        low, high = np.log10(low), np.log10(high)
        shown = np.log10(np.maximum(values, scale.low))
    part = np.clip((shown - low) / (high - low), 0.0, 1.0)
    return np.where(np.isnan(part), UNKNOWN, np.rint(np.nan_to_num(part) * TOP)).astype(np.uint8)


def fit_power(values: NDArray[np.float64]) -> ColourScale:
    """Returns the scale of power up to the next 100 W above the greatest value."""
    known = values[np.isfinite(values)]
    scale = SCALES["power"]
    high = max(100.0, float(np.ceil(known.max() / 100) * 100)) if len(known) else scale.high
    return ColourScale(scale.label, scale.unit, scale.low, high)


# --- the answer -------------------------------------------------------------------------------------------------------


def encode_bytes(values: NDArray[np.uint8]) -> str:
    """Returns base64 of one byte per value."""
    return base64.b64encode(np.ascontiguousarray(values, np.uint8).tobytes()).decode()


def encode_incidents(index: FleetIndex, layout: Layout, roles: NodeRoles) -> dict[str, Any]:
    """Returns `incident_sets`, and per cell the number of its set from 1; 0: none, 255: a set that is left out."""
    sets: dict[tuple[str, ...], int] = {}
    of_node = np.zeros(len(index.nodes), np.uint8)
    for node in sorted({*roles.own, *roles.affected}, key=lambda n: index.number.get(n, -1)):
        if (i := index.number.get(node)) is not None and layout.own[i]:
            ids = (*roles.own.get(node, ()), *roles.affected.get(node, ()))
            if ids not in sets and len(sets) < MAX_SETS:
                sets[ids] = len(sets) + 1
            of_node[i] = sets.get(ids, 255)
    return {"incident_sets": [list(ids) for ids in sets], "incident_of": encode_bytes(of_node[layout.nodes])}


def list_causes(incidents: Iterable[Row]) -> list[str]:
    """Returns the causes of unresolved incidents, each once: groups among them are marked on the map."""
    return list(dict.fromkeys(cause for _, _, cause, _ in incidents))
