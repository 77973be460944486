"""How evenly power is drawn: over the phases of a PDU, PDUs that supply the same racks, and the supplies of a node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.model.records import SECOND
from pipeline.model.signals.signal import HEALTH
from pipeline.model.topology import Topology, kind_of
from pipeline.store.devices import Devices
from pipeline.store.latest import CurrentValues

UNEVEN = 0.2
"""Load of a supply above the mean of its node from which they share unevenly. Chosen: load sharing keeps within 5 to
10 % at usual load, and of six supplies each carries 20 % more if one is lost."""
MAX_WORST = 10
"""Nodes named. Chosen: what a person reads; the rest is counted."""
MAX_AGE = 120 * SECOND
"""Oldest value that counts (us). Chosen: BMCs report supplies every 30 s; four readings."""
LINES = tuple(f"power.current_line{n}" for n in (1, 2, 3))
SUPPLY_COLUMNS = ("output_power", "input_power", "status")
_RESTING = tuple(HEALTH.index(state) for state in ("absent", "standby", "disabled"))


def add_balance(units: Sequence[dict[str, Any]], topology: Topology) -> None:
    """Sets `balance` of each unit: of PDUs the phases of their worst circuit and their share of the feeds of the same
    racks; None without either."""
    phases, shares = _find_phases(units, topology), _find_shares(units)
    for unit in units:
        unbalance, circuit = phases.get(unit["entity"], (None, None))
        share, number = shares.get(unit["entity"], (None, 1))
        known = unbalance is not None or share is not None
        balance = {"phases": unbalance, "circuit": circuit, "share": share, "feeds": number}
        unit["balance"] = balance if known else None


def _find_shares(units: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, int]]:
    """Returns PDU -> its share of the power of all that supply the same racks, and their number; of two or more that
    all report it."""
    feeds: dict[tuple[int, tuple[str, ...]], list[Mapping[str, Any]]] = defaultdict(list)
    for unit in units:
        racks = unit["below"]["racks"]
        if unit["kind"] == "pdu" and racks["count"]:
            feeds[racks["count"], tuple(racks["first"])].append(unit)
    shares: dict[str, tuple[float, int]] = {}
    for alike in feeds.values():
        draws = [unit["values"].get("power.draw") for unit in alike]
        if len(alike) > 1 and None not in draws and sum(draws) > 0:
            shares |= {u["entity"]: (d / sum(draws), len(alike)) for u, d in zip(alike, draws, strict=True)}
    return shares


def _find_phases(units: Sequence[Mapping[str, Any]], topology: Topology) -> dict[str, tuple[float, str]]:
    """Returns PDU -> unbalance of its worst circuit, or of itself, and the name of that."""
    found: dict[str, tuple[float, str]] = {}
    for unit in units:
        unbalance = _unbalance(unit["values"])
        if unbalance is None:
            continue
        for name in (unit["entity"], *topology.ancestors(unit["entity"])):
            if kind_of(name) == "pdu" and (name not in found or unbalance > found[name][0]):
                found[name] = unbalance, unit["entity"]
    return found


def _unbalance(values: Mapping[str, Any]) -> float | None:
    """Returns the reported unbalance of the currents, else the largest deviation of a line from the mean of all three
    over that mean (NEMA MG 1); None if it is not measured, or nothing flows."""
    reported = values.get("power.current_unbalance")
    if reported is not None:
        return float(reported)
    lines = [values[name] for name in LINES if values.get(name) is not None]
    mean = sum(lines) / len(LINES)
    return max(abs(line - mean) for line in lines) / mean if len(lines) == len(LINES) and mean > 0 else None


def find_uneven_supplies(current: CurrentValues, devices: Devices, topology: Topology, now: int) -> dict[str, Any]:
    """Returns on how many nodes the load of the supplies is known, on how many it is uneven, and the worst of these.

    Supplies on standby do not count; one that is lost counts as 0 W. A node needs two.
    """
    loads = _read_loads(current, devices, topology, now)
    rows: list[dict[str, Any]] = []
    for node, supplies in loads.items():
        mean = sum(supplies.values()) / len(supplies)
        if len(supplies) < 2 or mean <= 0:
            continue
        most = max(supplies, key=lambda name: supplies[name])
        rows.append({"node": node, "supply": most, "excess": supplies[most] / mean - 1, "loads": supplies})
    uneven = sorted((r for r in rows if r["excess"] > UNEVEN), key=lambda r: (-r["excess"], r["node"]))
    return {"nodes": len(rows), "uneven": len(uneven), "limit": UNEVEN, "worst": uneven[:MAX_WORST]}


def _read_loads(current: CurrentValues, devices: Devices, topology: Topology, now: int) -> dict[str, dict[str, float]]:
    """Returns node -> supply -> power (W): delivered, else drawn."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    power = _fresh(current, "output_power", now)
    power = np.where(np.isfinite(power), power, _fresh(current, "input_power", now))
    status = current.values.get("status")
    at = np.flatnonzero((current.slot >= 0) & np.isfinite(power))
    names = devices.names("psu")
    for i in at.tolist():
        supply = names[current.slot[i]]
        node = topology.ancestor_of_kind(supply, "node")
        if node is not None and (status is None or int(status[i]) not in _RESTING):
            found[node][supply] = float(power[i])
    return dict(found)


def _fresh(current: CurrentValues, column: str, now: int) -> np.ndarray[Any, Any]:
    """Returns a column without values older than MAX_AGE, which are NaN."""
    if column not in current.values:
        return np.full(len(current.slot), np.nan)
    values = current.values[column].astype(np.float64)
    return np.where(now - current.times[column] <= MAX_AGE, values, np.nan)
