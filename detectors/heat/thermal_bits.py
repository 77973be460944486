"""GPUs that say themselves that heat slows them down, whatever their resistance looks like."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.findings import evidence
from detectors.base.kernel import compiled
from detectors.heat.thermal_patterns import CLOSE_K, Blamed, Heat
from pipeline.records import SECOND, Frame, Level

Bools = NDArray[np.bool_]
HEAT = np.uint64(0x20 | 0x40)  # NVML clock event reasons: software and hardware thermal slowdown
_SLOWDOWN, _BRAKE = np.uint64(0x8), np.uint64(0x80)  # hardware slowdown: heat, unless the power brake is told too
_HELD = 2  # frames; one may be a reading of a moment; chosen
_FEWEST, _MOST = 3, 0.6  # GPUs of a node, and share of them, from which the node is named; as for resistance, chosen
_LOOP_WIDE, _FEWEST_NODES = 0.5, 3  # share of a cohort's nodes, and nodes: then the loop is the event; chosen
CHRONIC = 24 * 3600 * SECOND
"""For so long after it was last slowed down, a GPU that sheds its heat as ever stays one ticket: who runs close to its
limit since it was built is slowed down by each warm hour anew, and nobody wants a ticket for each. Chosen: a day."""


@compiled
def told(reasons: NDArray[np.float64]) -> Bools:
    """(N,) whether heat slows it down."""
    found = np.zeros(len(reasons), np.bool_)
    for i in range(len(reasons)):
        if (reasons[i] >= 0) and (reasons[i] < 2.0**63):  # False for NaN
            bits = np.uint64(reasons[i])
            braked = (bits & _SLOWDOWN) != 0 and (bits & _BRAKE) == 0
            found[i] = (bits & HEAT) != 0 or braked
    return found


def follow(count: NDArray[np.int64], since: NDArray[np.int64], reasons: NDArray[np.float64], time: int) -> Bools:
    """Counts frames in a row with such a bit; who has it for long enough. What is not told changes nothing."""
    slowed = told(reasons)
    _counted(count, since, np.isfinite(reasons), slowed, time)
    return np.asarray(slowed & (count >= _HELD))


@compiled
def _counted(count: NDArray[np.int64], since: NDArray[np.int64], known: Bools, slowed: Bools, time: int) -> None:
    for i in range(len(count)):
        if slowed[i] and ((count[i] == 0) or (since[i] > time)):  # the clock may have gone back
            since[i] = time
        if known[i]:
            count[i] = count[i] + 1 if slowed[i] else 0


def blamed(
    frame: Frame,
    on: Bools,
    since: NDArray[np.int64],
    heat: Heat,
    groups: NDArray[np.int32],
    hold: float,
    urgent: Bools,
    shared: Bools,
) -> dict[str, Blamed]:
    """Entity -> why: a GPU, or the node of which most are slowed down; nobody where a whole loop is.

    shared: (N,) of units that are told as a whole already.

    Who is not `urgent`, since it loses its heat as ever, is a ticket: a job that it slows down is the stragglers' page.
    """
    nodes, names = heat.units["node"]
    mine = on & ~shared & ~_wide(on, groups, nodes)
    found: dict[str, Blamed] = {}
    taken = np.zeros(len(on), bool)
    for node in np.unique(nodes[mine & (nodes >= 0)]).tolist():
        members = mine & (nodes == node)
        if members.sum() >= max(_FEWEST, _MOST * np.count_nonzero(nodes == node)):
            found[names[node]] = _one(frame, np.flatnonzero(members), names[node], since, heat, hold, urgent)
            taken |= members
    for i in np.flatnonzero(mine & ~taken).tolist():
        found[frame.entities[i]] = _one(frame, np.array([i]), frame.entities[i], since, heat, hold, urgent)
    return found


def chronic(frame: Frame, conditions: Iterable[str], last: NDArray[np.int64], well: Bools) -> dict[str, Blamed]:
    """Entity -> why: GPUs told before that are slowed down now and then.

    last: (N,) when each was slowed down while it was as usual; 0 never.   well: not known to lose its heat worse.
    """
    told, found = frozenset(conditions), dict[str, Blamed]()
    for i in np.flatnonzero((last > 0) & well).tolist():
        ago = max(frame.time - int(last[i]), 0)
        if frame.entities[i] in told and ago <= CHRONIC:
            entity = frame.entities[i]
            summary = f"{entity}: slowed down by heat now and then, last {ago / 60 / SECOND:.0f} min ago"
            summary += "; it loses its heat as ever, so it has little room below its limit"
            clears = f"ends {CHRONIC // SECOND // 3600} h after heat slowed it down last"
            shown = evidence(clears, None, throttled=False, gpus=[entity], resistance_known=True)
            found[entity] = Blamed("ticket", int(last[i]), summary, shown, 0.0)
    return found


def _wide(on: Bools, groups: NDArray[np.int32], nodes: NDArray[np.int32]) -> Bools:
    """(N,) members of cohorts, or of the whole site, of which most nodes have such a GPU."""
    found = np.zeros(len(on), bool)
    for group in (None, *np.unique(groups[on & (groups >= 0)]).tolist()):
        members = nodes >= 0 if group is None else groups == group
        struck, every = np.unique(nodes[members & on]), np.unique(nodes[members])
        if len(struck) >= _FEWEST_NODES and len(struck) > _LOOP_WIDE * len(every):
            found |= members
    return found


def _one(
    frame: Frame,
    at: NDArray[np.int64],
    entity: str,
    since: NDArray[np.int64],
    heat: Heat,
    hold: float,
    urgent: Bools,
) -> Blamed:
    """Ticket; page once it is at its limit, and was slowed down for long, and not for how it was built."""
    onset = int(since[at].min())
    left = heat.left[at]
    nearest = float(np.min(left[np.isfinite(left)], initial=np.inf))
    held = (frame.time - onset) / SECOND
    limited = nearest <= CLOSE_K and bool(urgent[at].any())
    level: Level = "page" if held >= hold and limited else "ticket"
    hottest = float(np.max(frame["gpu.temperature"][at][np.isfinite(frame["gpu.temperature"][at])], initial=-np.inf))
    warm = f" at {hottest:.0f} Cel" if np.isfinite(hottest) else ""
    who = entity if len(at) == 1 else f"{len(at)} GPUs of {entity}"
    reasons = int(frame["gpu.throttle_reasons"][at[0]])
    summary = f"{who}: slowed down by heat{warm} for {held:.0f} s, as its clock event reasons {reasons:#x} say"
    more: Mapping[str, Any] = {
        "throttled": True,
        "reasons": reasons,
        "gpus": [frame.entities[i] for i in at[:16].tolist()],
        "kelvin_left": round(nearest, 1) if np.isfinite(nearest) else None,
        "resistance_known": bool(heat.step.judged[at].any()),
    }
    return Blamed(level, onset, summary, evidence("ends when no heat slows it down", None, **more), float(held))
