"""Finds leaf switches that are congested: most of their ports wait or get congestion marks, and none has errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base.cohorts import Cohorts
from detectors.base.detector import Detector, notes, part
from detectors.base.findings import Comparison, OpenConditions, close_ended, due_report
from detectors.base.gates import Gates
from detectors.base.state import N, State, memory
from detectors.base.statistics import grouped_median
from pipeline.model.entity_names import pager_title
from pipeline.model.records import SECOND, Finding, Frame, Level

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

WAIT = ("nic.port_tx_wait",)
MARKS = ("nic.cnp_sent", "nic.cnp_handled", "nic.ecn_marked")
ERRORS = ("nic.symbol_errors", "nic.crc_errors")
_READ = (*WAIT, *MARKS, *ERRORS, "nic.tx_bytes")
_NORMAL = ("wait", "marks", "count", "generation")
_KINDS = (("waits for credits", WAIT), ("congestion marks", MARKS))
MINUTE_S = 60.0  # s between two readings
_MAX_GAP_S = 300.0  # s between two readings above which growth is an average over too much; chosen
_FLOORS = (1e4, 1.0)
"""Ticks of waiting, and marks, per second of a port at _USUAL_BYTES, below which nothing waits: 1e4 ticks are below a
percent of a second at every known length of tick; a mark a second is a packet in a million. Both chosen."""
_USUAL_BYTES = 5e9  # By/s: a tenth of a port of 400 Gb/s, to which the floors are scaled
_MIN_SIBLINGS = 4  # ports of a node, itself among them, from which their median is that of the job; chosen
LEARN = 20  # minutes before a port is judged: the replay contract
_GAIN = 1 / 240  # least learning rate: a memory of four hours; chosen
_STALE_AFTER = 120 * SECOND  # us without a reading of a leaf after which its condition is over; two readings


@dataclass
class PortTraffic(State):
    """Waits and congestion marks of each port per minute and per byte sent, against its node and its own past.

    Ports of one node serve the same ranks: their median is what the job does (its phase, its share of the line, its
    pauses), and what differs from it belongs to the path of each port's traffic.

    last:   (K, N) last readings.      normal: (4, N) usual waits and marks, minutes learnt from, generation.
    excess: (2, N) of waits and marks, logarithm above its own normal in this minute; NaN: not judged.
    share:  (N,) of the line rate that it sends.  errors: (N,) errors in this minute.
    beside: (N,) whether enough other ports of its node were there to remove what the job does.
    """

    last: Floats = memory(np.nan, shape=(len(_READ), N))
    normal: Floats = memory(0.0, shape=(len(_NORMAL), N))
    excess: Floats = memory(np.nan, shape=(2, N))
    share: Floats = memory(np.nan)
    errors: Floats = memory(0.0)
    beside: Bools = memory(False, np.bool_)
    time: int = notes(int)

    def is_due(self, time: int) -> bool:
        """Returns whether a minute has passed since the last reading."""
        seconds = (time - self.time) / SECOND
        return not 0 <= seconds < MINUTE_S - 0.5

    def add_minute(self, frame: Frame, nodes: NDArray[np.int32], least: float, doubled: float) -> bool:
        """Reads all counters; returns False where nothing is known yet.

        nodes: (N,) number of each port's node. least: share of the line that a busy port sends.
        doubled: excess above which nothing is learnt.
        """
        n, seconds = len(frame.entities), (frame.time - self.time) / SECOND
        self.grow(n)
        now = np.stack([frame[name] for name in _READ])
        growth = self._measure_growth(frame, now, n)
        first, self.time = not self.time, frame.time
        if first or not 0 < seconds <= _MAX_GAP_S:
            return False
        rate = growth / seconds
        speed = frame["nic.speed"] * 1e6 / 8
        self.share[:n] = rate[-1] / np.where(speed > 0, speed, np.nan)
        self.errors[:n] = np.nansum(growth[1 + len(MARKS) : 1 + len(MARKS) + len(ERRORS)], axis=0)
        carries = self.share[:n] >= least
        per = np.where(carries, rate[-1], np.nan) / _USUAL_BYTES
        marked = _sum_known(rate[1 : 1 + len(MARKS)])
        for row, (amount, floor) in enumerate(zip((rate[0], marked), _FLOORS, strict=True)):
            self._update_excess(row, np.log(np.maximum(amount, 0) / per + floor), nodes, doubled)
        self.normal[2, :n] += carries
        return True

    def _update_excess(self, row: int, levels: Floats, nodes: NDArray[np.int32], doubled: float) -> None:
        """Removes what all ports of the node do, then the port's own normal; learns unless it is in excess."""
        n = len(levels)
        common, size = grouped_median(levels, nodes)
        self.beside[:n] = size >= _MIN_SIBLINGS
        own = levels - np.where(self.beside[:n], common, 0.0)
        count, normal = self.normal[2, :n], self.normal[row, :n]
        departure = own - normal
        known = np.isfinite(own)
        self.excess[row, :n] = np.where(known & (count >= LEARN), departure, np.nan)
        young = count < LEARN
        gain = np.where(known & (young | (departure < doubled / 2)), np.maximum(1 / (count + 1), _GAIN), 0.0)
        normal += np.where(gain > 0, gain * np.where(known, departure, 0.0), 0.0)

    def _measure_growth(self, frame: Frame, now: Floats, n: int) -> Floats:
        """Returns (K, N) growth since the last reading; NaN where a counter is missing, fell or started again."""
        last, generations = self.last[:, :n], frame["nic.generation"]
        growth = np.where(np.isfinite(now) & (now >= last), now - last, np.nan)
        known = self.normal[3, :n]
        growth[:, np.isfinite(generations) & (known > 0) & (generations != known)] = np.nan
        self.normal[3, :n] = np.where(np.isfinite(generations), generations, known)
        self.last[:, :n] = np.where(np.isfinite(now), now, np.nan)
        return growth


def _sum_known(values: Floats) -> Floats:
    """Returns (N,) sums over the known values; NaN where there are none."""
    return np.where(np.isfinite(values).any(axis=0), np.nansum(values, axis=0), np.nan)


@dataclass
class LinkCongestion(Detector):
    """Waits and congestion marks of each port for the bytes it sends, each minute; a leaf is judged as a whole.

    Ticket: on more than `share` of the ports of a leaf that carry traffic, and on `ports` of them at least, waits or
    marks are `factor` times the normal of each, for `hold` s; a suspect after two minutes of it. Normal is the port's
    own past, after the median of the other ports of its node has removed what the job does; where nodes have fewer than
    four busy ports another job would look the same, and it stays a suspect. A port is never the cause. A leaf on which
    a tenth of those ports have errors is left to the detector `link`. Ends when a third of the ports are left. Two to
    four ports whose flows were hashed onto one uplink are not a finding.

    Source: errors and load distinguish corruption from congestion, as in CorrOpt (SIGCOMM 2017); half of a leaf's
    ports as for a leaf that is down; six ports, since flows that collide on an uplink are two to four; the hold is
    twice the longest burst that training causes itself (a checkpoint). `factor` chosen: waits vary by a third.
    """

    name: ClassVar[str] = "link_congestion"
    family: ClassVar[str] = "link degradation"
    device_class: ClassVar[str] = "nic"
    needs: ClassVar[tuple[str, ...]] = ("nic.tx_bytes", "nic.speed")
    wants: ClassVar[tuple[str, ...]] = (
        *(*WAIT, *MARKS, *ERRORS, "nic.generation"),
        *("event:maintenance_start", "event:maintenance_end"),
    )
    cannot_see: ClassVar[str] = (
        "Congestion that is as strong on all rails of a node, leaves with fewer than six busy ports, which flow"
        " or job causes it, and congestion of spines that no port reports."
    )

    factor: float = 2.0
    share: float = 0.5
    ports: int = 6
    hold: float = 600.0
    least_load: float = 0.005

    traffic: PortTraffic = part(PortTraffic, kept=True)
    gates: Gates = part(Gates)
    crowded: dict[str, dict[str, Any]] = notes()
    conditions: OpenConditions = notes()
    _leaf: Cohorts = field(default_factory=lambda: Cohorts("leaf"), init=False, repr=False)
    _node: Cohorts = field(default_factory=lambda: Cohorts("node"), init=False, repr=False)

    def budget(self) -> list[str]:
        """Returns that it has no statistical test."""
        many = f"on {self.ports:g} ports of a leaf together, for {self.hold:g} s"
        return [f"a rule on waits {self.factor:g} times the usual {many}: no statistical alarm rate"]

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Returns findings of congested leaves."""
        self.gates.update(frames)
        frame = frames.get("nic")
        if frame is None or not len(frame.entities):
            return []
        if self.traffic.is_due(frame.time):
            nodes, doubled = self._node.groups(frame), float(np.log(self.factor))
            if self.traffic.add_minute(frame, nodes, self.least_load, doubled):
                self._update_leaves(frame)
            for leaf in [e for e, known in self.crowded.items() if abs(frame.time - known["seen"]) > _STALE_AFTER]:
                del self.crowded[leaf]
        if not self.crowded and not self.conditions:
            return []
        return self._findings(frame)

    def _update_leaves(self, frame: Frame) -> None:
        """Counts the ports of each leaf in excess; a leaf is crowded from the first minute in which most are."""
        n, groups = len(frame.entities), self._leaf.groups(frame) + 1  # 0: on no leaf
        excess, total = self.traffic.excess[:, :n], int(groups.max(initial=0)) + 1
        judged = np.isfinite(excess).any(axis=0)
        over = excess > np.log(self.factor)  # false for NaN
        if self.conditions or over.sum() >= self.ports:
            judged &= ~self.gates.maintenance_mask(frame)
            over &= judged
        size = np.bincount(groups, judged, total)
        errs = np.bincount(groups, judged & (self.traffic.errors[:n] > 0), total)
        counts = np.stack([np.bincount(groups, kind, total) for kind in over])
        most = counts.max(axis=0)
        begins = (most > self.share * size) & (most >= self.ports) & (errs <= 0.1 * size)
        stays = (most > self.share / 1.5 * size) & (most >= self.ports / 1.5)
        for group in np.flatnonzero(begins | stays).tolist():
            if group:
                self._update_leaf(frame, np.flatnonzero(groups == group), over, bool(begins[group]))
        quiet = set(np.flatnonzero((size >= self.ports) & ~stays).tolist())
        for leaf in [e for e, known in self.crowded.items() if known["group"] in quiet]:
            del self.crowded[leaf]

    def _update_leaf(self, frame: Frame, ports: NDArray[np.intp], over: Bools, begins: bool) -> None:
        """Notes how crowded a leaf is in this minute."""
        leaf = frame.topology.ancestor_of_kind(frame.entities[int(ports[0])], "leaf") or ""
        known = self.crowded.get(leaf)
        if known is None:
            if not begins:
                return
            began = frame.time - int(MINUTE_S * SECOND)  # within the minute that was read
            known = self.crowded[leaf] = {"onset": began, "looks": 0}
        traffic, row = self.traffic, int(np.argmax(over[:, ports].sum(axis=1)))
        mine = ports[over[row, ports]]
        judged = ports[np.isfinite(traffic.excess[row, ports])]
        known |= {"seen": frame.time, "row": row, "ports": len(mine), "of": len(judged)}
        known |= {"group": int(self._leaf.groups(frame)[int(ports[0])]) + 1}
        known["looks"] += 1
        known["factor"] = float(np.exp(np.median(traffic.excess[row, mine]))) if len(mine) else 1.0
        known["load"] = float(np.nanmedian(traffic.share[judged])) if len(judged) else 0.0
        known["beside"] = bool(traffic.beside[mine].mean() > 0.5) if len(mine) else known.get("beside", False)
        known["errors"] = int(np.nansum(traffic.errors[ports]))

    def _findings(self, frame: Frame) -> list[Finding]:
        crowded = {leaf: known for leaf, known in self.crowded.items() if known["looks"] >= 2}
        close_ended(self.conditions, set(crowded))
        found = []
        for leaf, known in sorted(crowded.items()):
            held = (frame.time - known["onset"]) / SECOND
            level: Level = "ticket" if held >= self.hold and known["beside"] else "suspect"
            if due := due_report(self.conditions, leaf, frame.time, known["onset"], level):
                what, signals = _KINDS[known["row"]]
                title = f"congested, {known['factor']:.1f} x {what} on {known['ports']} of {known['of']} busy ports"
                found.append(
                    self.finding(
                        *(frame.time, leaf, due),
                        score=known["factor"],
                        summary=pager_title(leaf, title),
                        signals=signals,
                        clears=f"fewer than a third of the ports are at {self.factor:g} times their normal",
                        compared=Comparison(known["factor"], 1.0, None, "own past", 0, known["factor"] - 1, "share"),
                        **{name: known[name] for name in ("ports", "of", "errors")},
                        load=round(known["load"], 3),
                        minutes=round(held / 60, 1),
                    )
                )
        return found
