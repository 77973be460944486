"""GPUs that say themselves that heat slows them down, whatever their resistance looks like.

Loops, racks and fleets that heat slows down as a whole while nobody reads what cools them.

Where a unit is read, the detector `coolant` tells what failed, and GPUs and ranks of it are left to it. Where none is
(no agent asks it, it tells half, it fell silent, or air cools the rack) its GPUs are the only witnesses, so they are
heard together; those of no loop, CDU or rack of three nodes as one unit, the rest of the fleet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.cohorts import Cohorts, SpanningCohorts
from detectors.base.findings import make_evidence
from detectors.base.kernel import compiled
from detectors.base.streams import Bools, Floats
from detectors.heat.thermal_blame import CLOSE_K, Blamed, Heat
from pipeline.model.records import SECOND, Frame, Level
from pipeline.model.topology import kind_of

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
            at = np.flatnonzero(members)
            found[names[node]] = _throttling_blame(frame, at, names[node], since, heat, hold, urgent)
            taken |= members
    for i in np.flatnonzero(mine & ~taken).tolist():
        found[frame.entities[i]] = _throttling_blame(frame, np.array([i]), frame.entities[i], since, heat, hold, urgent)
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
            shown = make_evidence(clears, None, throttled=False, gpus=[entity], resistance_known=True)
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


def _throttling_blame(
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
    return Blamed(level, onset, summary, make_evidence("ends when no heat slows it down", None, **more), float(held))


Times = NDArray[np.int64]
READINGS = ("coolant.flow", "coolant.supply_temperature")
"""By both of which `coolant` judges: of one alone it does not see the other fail; a leak rope tells neither."""
SILENT = 600 * SECOND
"""A unit not heard for so long is not read: its incidents end at the Desk after as much quiet, so that nobody else says
any more what is wrong with it."""
NEVER = np.int64(2**63 - 1)
_KINDS = ("loop", "cdu", "rack")  # what GPUs share, nearest to the coolant first; as Crowds of the stragglers has it
_NODES = 3  # on which they are slowed down: two coincide, or share a fault of their own; chosen, as Crowds has it
_MANY = 0.3  # share from which stragglers leave all of a cohort to others: it has no median any more; as Crowds
_WIDE = 0.5  # share of its nodes from which no GPU is named by itself; as thermal_bits has it
_GAP = 120 * SECOND  # two frames of a minute without it end it: GPUs at their limit blink from frame to frame; chosen
_IDLE = 0.2  # share of the highest power, its own or that of a quarter of its unit: idle parts of 700 W draw 70 to 130


@dataclass(frozen=True, slots=True)
class Shared:
    """found: unit -> what is said of it now.   holding: units whose condition goes on, those that blink too.
    since: (N,) since when each GPU is part of such a unit, and needs no line of its own; else NEVER."""

    found: Mapping[str, Blamed] = field(default_factory=dict)
    holding: frozenset[str] = frozenset()
    since: Times = field(default_factory=lambda: np.full(1, NEVER))

    @property
    def members(self) -> Bools:
        return np.asarray(self.since < NEVER)


@dataclass(frozen=True, slots=True)
class Struck:
    """One unit. mine: (N,) its GPUs at work.   slowed: (N,) those of them that heat slows down.   nodes: on which."""

    unit: str
    mine: Bools
    slowed: Bools
    nodes: int

    @property
    def many(self) -> bool:
        return int(np.count_nonzero(self.slowed)) > _MANY * int(np.count_nonzero(self.mine))


class Unread:
    """Which units are heard, and which of the others heat slows down; a part() of a detector."""

    def __init__(self) -> None:
        self._heard: dict[str, dict[str, int]] = {r: {} for r in READINGS}  # entity of class coolant -> when last
        self._begun = self._last = 0
        self.crowds: dict[str, dict[str, int]] = {}  # unit -> how it fares
        self._cohorts, self._nodes = SpanningCohorts(*_KINDS, least=_NODES), Cohorts("node")
        self._read: tuple[object, Bools] | None = None

    def hear(self, frames: Mapping[str, Frame]) -> None:
        """Takes what is read of coolant at an instant."""
        if not frames:
            return
        time = max(frame.time for frame in frames.values())
        # in a time of which there are no frames at all nobody could be heard; the same where the clock was set
        if not self._begun or abs(time - self._last) >= SILENT:
            self._begun = time
        self._begun, self._last = min(self._begun, time), time  # what was restored may be of a clock that was ahead
        if (coolant := frames.get("coolant")) is not None and len(coolant.entities):
            for reading, heard in self._heard.items():
                told = np.flatnonzero(np.isfinite(coolant[reading])).tolist()
                heard.update(dict.fromkeys((coolant.entities[i] for i in told), time))
        for reading, heard in self._heard.items():
            if any(not 0 <= time - at < SILENT for at in heard.values()):
                self._heard[reading] = {e: min(at, time) for e, at in heard.items() if time - at < SILENT}

    def take(
        self, frame: Frame, slowed: Bools, since: Times, powers: tuple[Floats, Floats], others: Bools, hold: float
    ) -> Shared:
        """What is said of units that nobody reads.

        slowed, since: (N,) whom heat slows down, and since when.   powers: (N,) now, and the highest of late.
        others: (N,) whose heat is somebody else's.   hold: s after which a ticket is a page.
        """
        time = frame.time
        if self.crowds:
            kept = {u: c for u, c in self.crowds.items() if time - c["last"] <= _GAP}
            self.crowds = {u: {name: min(at, time) for name, at in c.items()} for u, c in kept.items()}
        found, (power, peak) = dict[str, Blamed](), powers
        if slowed.any() and time - self._begun >= SILENT:  # else it may only not have been heard yet
            counts = np.isfinite(frame["gpu.throttle_reasons"]) & ~(power < _IDLE * peak) & ~others
            for struck in self._struck(frame, counts, slowed, powers):
                crowd = self._follow(struck, since, time)
                if not crowd["excused"]:
                    found[struck.unit] = _unit_blame(frame, struck, crowd, hold)
        if not self.crowds:
            return Shared()
        groups, onsets = self._cohorts.groups(frame), np.full(len(slowed), NEVER)
        for group, unit in enumerate(self._cohorts.names):
            if unit in self.crowds:
                onsets[groups == group] = self.crowds[unit]["onset"]
        return Shared(found, frozenset(u for u, c in self.crowds.items() if not c["excused"]), onsets)

    def excuse(self, frame: Frame, mask: Bools) -> None:
        """A person said that it is no fault of all in `mask`: of a unit within, nothing is said until it is over."""
        groups = self._cohorts.groups(frame)
        for group, unit in enumerate(self._cohorts.names):
            if unit in self.crowds and mask[groups == group].all():
                self.crowds[unit]["excused"] = 1

    def _struck(self, frame: Frame, counts: Bools, slowed: Bools, powers: tuple[Floats, Floats]) -> Iterator[Struck]:
        """Units that nobody reads and that heat slows down as a whole."""
        groups, nodes = self._cohorts.groups(frame), self._nodes.groups(frame)
        counts = counts & (nodes >= 0) & (groups >= 0) & ~self._below(frame)
        for group in np.unique(groups[counts & slowed]).tolist():
            mine = counts & (groups == group)
            mine &= ~(powers[0] < _IDLE * _usual(powers[1][mine]))  # spare ones were never at work
            on, every = len(np.unique(nodes[mine & slowed])), len(np.unique(nodes[mine]))
            struck = Struck(self._cohorts.names[group], mine, mine & slowed, on)
            if on >= _NODES and (on > _WIDE * every or struck.many):
                yield struck

    def _follow(self, struck: Struck, since: Times, time: int) -> dict[str, int]:
        """How a unit fares. many: since when so many are slowed down that the whole of it is in trouble."""
        onset = int(since[: len(struck.slowed)][struck.slowed].min())
        onset = min(max(onset, time - SILENT), time)  # one may have been close to its limit for days
        new = {"onset": onset, "last": time, "many": time, "many_last": time - _GAP - 1, "excused": 0}
        crowd = self.crowds.setdefault(struck.unit, new)
        crowd["last"] = time
        if struck.many:
            lasts = time - crowd["many_last"] <= _GAP
            crowd["many"], crowd["many_last"] = crowd["many"] if lasts else time, time
        return crowd

    def _below(self, frame: Frame) -> Bools:
        """(N,) whose coolant is read: by what feeds it, or by something within what holds both."""
        read = frozenset.intersection(*map(frozenset, self._heard.values()))
        key = (id(frame.topology), frame.topology.version, len(frame.entities), read)
        if self._read is None or self._read[0] != key:
            above = frame.topology.ancestors
            over = {a for e in frame.entities for a in above(e)}
            feeds = {next((a for a in (e, *above(e)) if a in over), e) for e in read}
            mask = np.fromiter((not feeds.isdisjoint(above(e)) for e in frame.entities), bool, len(frame.entities))
            self._read = key, mask
        return self._read[1]

    def snapshot(self) -> dict[str, Any]:
        crowds = {unit: dict(crowd) for unit, crowd in self.crowds.items()}
        heard = {reading: dict(times) for reading, times in self._heard.items()}
        return {"heard": heard, "begun": self._begun, "last": self._last, "crowds": crowds}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._heard = {reading: dict(state["heard"].get(reading, {})) for reading in READINGS}
        self._begun, self._last = state["begun"], state["last"]
        self.crowds = {unit: dict(crowd) for unit, crowd in state["crowds"].items()}


def _usual(peaks: Floats) -> float:
    """The highest power that a quarter of a unit has shown, so that one glitch is none; NaN where none is known."""
    known = peaks[np.isfinite(peaks)]
    return float(np.quantile(known, 0.75)) if len(known) else np.nan


def _unit_blame(frame: Frame, struck: Struck, crowd: Mapping[str, int], hold: float) -> Blamed:
    """Ticket; page once many of it were slowed down for `hold` s."""
    lasts = struck.many and frame.time - crowd["many"] >= hold * SECOND
    level: Level = "page" if lasts else "ticket"
    gpus, every = np.flatnonzero(struck.slowed), int(np.count_nonzero(struck.mine))
    kind, held = kind_of(struck.unit), (frame.time - crowd["onset"]) / SECOND
    unread = "it is not read itself" if kind == "cdu" else f"no CDU of the {kind} is read"
    unread += " for both flow and supply"
    summary = (
        f"{struck.unit}: {len(gpus)} of its {every} GPUs at work slow down for heat at once ({struck.nodes} nodes), "
        f"for {held:.0f} s; {unread}, so whether flow, supply or load is to blame cannot be told"
    )
    shown = make_evidence(
        f"ends when for {_GAP // SECOND} s heat slows down fewer of them, or once what cools them is read",
        throttled=True,
        gpus=[frame.entities[i] for i in gpus[:16].tolist()],
        slowed=len(gpus),
        at_work=every,
        nodes=struck.nodes,
    )
    return Blamed(level, crowd["onset"], summary, shown, held)
