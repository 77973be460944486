"""Finds leaf switches that are congested: most ports wait or are told to slow down, and none of them errs.

Waits and congestion marks of each port by the minute and for the bytes it carried, against its node and its past.

Ports of one node serve the same ranks: their median takes out what the job does (its phase, its share of the line, its
pauses), and what is left belongs to the way that each port's traffic takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base.cohorts import Cohorts
from detectors.base.detector import Detector, notes, part
from detectors.base.findings import Comparison, OpenConditions, close_ended, due_report, make_evidence
from detectors.base.gates import Gates
from detectors.base.statistics import grouped_median
from pipeline.model.records import SECOND, Finding, Frame, Level

Floats = NDArray[np.float64]

WAIT = ("nic.port_tx_wait",)
MARKS = ("nic.cnp_sent", "nic.cnp_handled", "nic.ecn_marked")
ERRORS = ("nic.symbol_errors", "nic.crc_errors")
_READ = (*WAIT, *MARKS, *ERRORS, "nic.tx_bytes")
MINUTE = 60.0  # s of one look
_LONGEST = 300.0  # s between two looks beyond which growth is an average of too much; chosen
_FLOORS = (1e4, 1.0)  # of a port that carries a tenth of 400 Gb/s: ticks a second, marks a second
"""Below these nothing waits: 1e4 ticks are below a percent of a second at every length of tick that is known; a mark a
second is a packet in a million. Both chosen."""
_USUAL_BYTES = 5e9  # a second: a tenth of a port of 400 Gb/s, to which the floors are scaled
_SIBLINGS = 4  # ports of a node, itself among them, from which their median takes out the job; chosen
LEARN = 20  # looks before a port is judged: the replay contract
_GAIN = 1 / 240  # least learning rate: a memory of four hours; chosen
_ARRAYS = ("last", "normal", "excess", "share", "errors", "beside")
_CELLS = ("wait", "marks", "count", "generation")


@dataclass
class LeafTraffic:
    """State of all ports: last readings and what is normal. A part() of a detector.

    excess: (2, N) of waits and marks, logarithm above the own normal, in this minute; NaN = not judged.
    share:  (N,) of the line that it sends.  errors: (N,) errors in this minute.
    beside: (N,) whether other ports of its node were there to take out what the job does.
    """

    last: Floats = field(default_factory=lambda: np.empty((len(_READ), 0)))
    normal: Floats = field(default_factory=lambda: np.empty((len(_CELLS), 0)))
    excess: Floats = field(default_factory=lambda: np.empty((2, 0)))
    share: Floats = field(default_factory=lambda: np.empty(0))
    errors: Floats = field(default_factory=lambda: np.empty(0))
    beside: Bools = field(default_factory=lambda: np.empty(0, np.bool_))
    time: int = 0

    def due(self, time: int) -> bool:
        seconds = (time - self.time) / SECOND
        return not 0 <= seconds < MINUTE - 0.5

    def look(self, frame: Frame, nodes: NDArray[np.int32], least: float, doubled: float) -> bool:
        """Takes all counters; False where nothing can be said yet. doubled: excess above which nothing is learnt."""
        n, seconds = len(frame.entities), (frame.time - self.time) / SECOND
        self._grow(n)
        now = np.stack([frame[name] for name in _READ])
        growth = self._growth(frame, now, n)
        first, self.time = not self.time, frame.time
        if first or not 0 < seconds <= _LONGEST:
            return False
        rate = growth / seconds
        speed = frame["nic.speed"] * 1e6 / 8
        self.share = rate[-1] / np.where(speed > 0, speed, np.nan)
        self.errors = np.nansum(growth[1 + len(MARKS) : 1 + len(MARKS) + len(ERRORS)], axis=0)
        carries = self.share >= least
        per = np.where(carries, rate[-1], np.nan) / _USUAL_BYTES
        marked = _row_sum(rate[1 : 1 + len(MARKS)])
        self.excess = np.full((2, n), np.nan)
        for row, (amount, floor) in enumerate(zip((rate[0], marked), _FLOORS, strict=True)):
            self._judge(row, np.log(np.maximum(amount, 0) / per + floor), nodes, doubled)
        self.normal[2, :n] += carries
        return True

    def _judge(self, row: int, levels: Floats, nodes: NDArray[np.int32], doubled: float) -> None:
        """Takes out what all ports of the node do, then the port's own normal; learns unless it is in excess."""
        n = len(levels)
        common, size = grouped_median(levels, nodes)
        self.beside = np.asarray(size >= _SIBLINGS)
        own = levels - np.where(self.beside, common, 0.0)
        count, normal = self.normal[2, :n], self.normal[row, :n]
        departure = own - normal
        known = np.isfinite(own)
        self.excess[row] = np.where(known & (count >= LEARN), departure, np.nan)
        young = count < LEARN
        gain = np.where(known & (young | (departure < doubled / 2)), np.maximum(1 / (count + 1), _GAIN), 0.0)
        normal += np.where(gain > 0, gain * np.where(known, departure, 0.0), 0.0)

    def _growth(self, frame: Frame, now: Floats, n: int) -> Floats:
        """(K, N) since the last look; NaN where a counter is missing, fell or began anew."""
        last, lives = self.last[:, :n], frame["nic.generation"]
        growth = np.where(np.isfinite(now) & (now >= last), now - last, np.nan)
        known = self.normal[3, :n]
        growth[:, np.isfinite(lives) & (known > 0) & (lives != known)] = np.nan
        self.normal[3, :n] = np.where(np.isfinite(lives), lives, known)
        self.last[:, :n] = np.where(np.isfinite(now), now, np.nan)
        return growth

    def _grow(self, size: int) -> None:
        more = size - self.last.shape[1]
        if more > 0:
            self.last = np.concatenate([self.last, np.full((len(_READ), more), np.nan)], axis=1)
            self.normal = np.concatenate([self.normal, np.zeros((len(_CELLS), more))], axis=1)

    def snapshot(self) -> dict[str, Any]:
        arrays = {name: getattr(self, name).copy() for name in _ARRAYS}
        return {**arrays, "time": self.time}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name in _ARRAYS:
            setattr(self, name, np.array(state[name]))
        self.time = int(state["time"])


def _row_sum(values: Floats) -> Floats:
    """(N,) sum over what is known; NaN where nothing is."""
    return np.where(np.isfinite(values).any(axis=0), np.nansum(values, axis=0), np.nan)


Bools = NDArray[np.bool_]
_KINDS = (("data waits for credits", WAIT), ("congestion marks", MARKS))
_FORGOTTEN = 120 * SECOND  # without a look at a leaf its condition is over; two looks


@dataclass
class LinkCongestion(Detector):
    """Waits and congestion marks of each port for the bytes it sends, each minute; a leaf is judged as a whole.

    Ticket: on more than `share` of the ports of a leaf that carry traffic, and on `ports` of them at least, waits or
    marks are `factor` times what is normal for each, for `hold` s; a suspect after two minutes of it. Normal is the
    port's own past, after the median of the other ports of its node has taken out what the job does; where nodes have
    fewer than four busy ports another job would look the same, and it stays a suspect. No port is ever blamed: a
    leaf on which a tenth of those ports err is left to the detector `link`.
    Ends when a third of the ports are left. Two to four ports whose flows were hashed onto one uplink blame nobody.

    Source: corruption is told from congestion by errors and by utilisation as in CorrOpt (SIGCOMM 2017); half of a
    leaf's ports as for a leaf that fell; six ports, since flows that collide on an uplink are two to four; the hold is
    twice the longest burst that training makes of itself (a checkpoint). `factor` chosen: waits swing by a third.
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
        "Congestion that is as strong on all rails of a node at once, leaves with fewer than six busy ports, which flow"
        " or job makes it, and congestion of spines that no port is told of."
    )

    factor: float = 2.0
    share: float = 0.5
    ports: int = 6
    hold: float = 600.0
    least_load: float = 0.005

    traffic: LeafTraffic = part(LeafTraffic)
    gates: Gates = part(Gates)
    crowded: dict[str, dict[str, Any]] = notes()
    conditions: OpenConditions = notes()
    _leaf: Cohorts = field(default_factory=lambda: Cohorts("leaf"), init=False, repr=False)
    _node: Cohorts = field(default_factory=lambda: Cohorts("node"), init=False, repr=False)

    def budget(self) -> list[str]:
        many = f"on {self.ports:g} ports of a leaf at once, for {self.hold:g} s"
        return [f"a rule on waits {self.factor:g} times the usual {many}: no statistical alarm rate"]

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        self.gates.update(frames)
        frame = frames.get("nic")
        if frame is None or not len(frame.entities):
            return []
        if self.traffic.due(frame.time):
            if self.traffic.look(frame, self._node.groups(frame), self.least_load, float(np.log(self.factor))):
                self._judge(frame)
            for leaf in [e for e, known in self.crowded.items() if abs(frame.time - known["seen"]) > _FORGOTTEN]:
                del self.crowded[leaf]
        if not self.crowded and not self.conditions:
            return []
        return self._findings(frame)

    def _judge(self, frame: Frame) -> None:
        """Counts the ports of each leaf in excess; a leaf is crowded from the first minute that most are."""
        groups = self._leaf.groups(frame) + 1  # 0: on no leaf
        excess, total = self.traffic.excess, int(groups.max(initial=0)) + 1
        judged = np.isfinite(excess).any(axis=0)
        over = excess > np.log(self.factor)  # NaN: no
        if self.conditions or over.sum() >= self.ports:
            judged &= ~self.gates.maintenance_mask(frame)
            over &= judged
        size = np.bincount(groups, judged, total)
        errs = np.bincount(groups, judged & (self.traffic.errors > 0), total)
        counts = np.stack([np.bincount(groups, kind, total) for kind in over])
        most = counts.max(axis=0)
        begins = (most > self.share * size) & (most >= self.ports) & (errs <= 0.1 * size)
        stays = (most > self.share / 1.5 * size) & (most >= self.ports / 1.5)
        for group in np.flatnonzero(begins | stays).tolist():
            if group:
                self._crowd(frame, np.flatnonzero(groups == group), over, bool(begins[group]))
        quiet = set(np.flatnonzero((size >= self.ports) & ~stays).tolist())
        for leaf in [e for e, known in self.crowded.items() if known["group"] in quiet]:
            del self.crowded[leaf]

    def _crowd(self, frame: Frame, ports: NDArray[np.intp], over: Bools, begins: bool) -> None:
        """Notes how crowded a leaf is in this minute."""
        leaf = frame.topology.ancestor_of_kind(frame.entities[int(ports[0])], "leaf") or ""
        known = self.crowded.get(leaf)
        if known is None:
            if not begins:
                return
            began = frame.time - int(60 * SECOND)  # in the minute that was looked at
            known = self.crowded[leaf] = {"onset": began, "looks": 0}
        row = int(np.argmax(over[:, ports].sum(axis=1)))
        mine = ports[over[row, ports]]
        judged = ports[np.isfinite(self.traffic.excess[row, ports])]
        known |= {"seen": frame.time, "row": row, "ports": len(mine), "of": len(judged)}
        known |= {"group": int(self._leaf.groups(frame)[int(ports[0])]) + 1}
        known["looks"] += 1
        known["factor"] = float(np.exp(np.median(self.traffic.excess[row, mine]))) if len(mine) else 1.0
        known["load"] = float(np.nanmedian(self.traffic.share[judged])) if len(judged) else 0.0
        known["beside"] = bool(self.traffic.beside[mine].mean() > 0.5) if len(mine) else known.get("beside", False)
        known["errors"] = int(np.nansum(self.traffic.errors[ports]))

    def _findings(self, frame: Frame) -> list[Finding]:
        told = {leaf: known for leaf, known in self.crowded.items() if known["looks"] >= 2}
        close_ended(self.conditions, set(told))
        found = []
        for leaf, known in sorted(told.items()):
            held = (frame.time - known["onset"]) / SECOND
            level: Level = "ticket" if held >= self.hold and known["beside"] else "suspect"
            if due := due_report(self.conditions, leaf, frame.time, known["onset"], level):
                what, signals = _KINDS[known["row"]]
                summary = (
                    f"{leaf} is congested: {what} on {known['ports']} of its {known['of']} busy ports, in the median"
                    f" {known['factor']:.1f} times what is normal for them, for {held / 60:.0f} min, with"
                    f" {known['errors']} errors; no port is at fault"
                )
                compared = Comparison(known["factor"], 1.0, None, "own past", 0, known["factor"] - 1, "share")
                facts = {name: known[name] for name in ("ports", "of", "errors")}
                facts |= {"load": round(known["load"], 3), "minutes": round(held / 60, 1)}
                clears = f"fewer than a third of the ports are at {self.factor:g} times their normal"
                told_by = make_evidence(clears, compared, **facts)
                score = known["factor"]
                found.append(Finding(*(frame.time, due[0], leaf, self.name, due[1], score, summary), told_by, signals))
        return found
