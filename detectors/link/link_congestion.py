"""Finds leaf switches that are congested: most ports wait or are told to slow down, and none of them errs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base.cohorts import Cohorts
from detectors.base.detector import Detector, notes, part
from detectors.base.findings import Compared, Open, close, evidence, tell
from detectors.base.gates import Gates
from detectors.link.leaf_traffic import ERRORS, MARKS, WAIT, LeafTraffic
from pipeline.records import SECOND, Finding, Frame, Level

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
    blind: ClassVar[str] = (
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
    conditions: Open = notes()
    _leaf: Cohorts = field(default_factory=lambda: Cohorts("leaf"), init=False, repr=False)
    _node: Cohorts = field(default_factory=lambda: Cohorts("node"), init=False, repr=False)

    def budget(self) -> list[str]:
        many = f"on {self.ports:g} ports of a leaf at once, for {self.hold:g} s"
        return [f"a rule on waits {self.factor:g} times the usual {many}: no statistical alarm rate"]

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        self.gates.hear(frames)
        frame = frames.get("nic")
        if frame is None or not len(frame.entities):
            return []
        if self.traffic.due(frame.time):
            if self.traffic.look(frame, self._node.of(frame), self.least_load, float(np.log(self.factor))):
                self._judge(frame)
            for leaf in [e for e, known in self.crowded.items() if abs(frame.time - known["seen"]) > _FORGOTTEN]:
                del self.crowded[leaf]
        if not self.crowded and not self.conditions:
            return []
        return self._findings(frame)

    def _judge(self, frame: Frame) -> None:
        """Counts the ports of each leaf in excess; a leaf is crowded from the first minute that most are."""
        groups = self._leaf.of(frame) + 1  # 0: on no leaf
        excess, total = self.traffic.excess, int(groups.max(initial=0)) + 1
        judged = np.isfinite(excess).any(axis=0)
        over = excess > np.log(self.factor)  # NaN: no
        if self.conditions or over.sum() >= self.ports:
            judged &= ~self.gates.working(frame)
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
        leaf = frame.topology.above_of_kind(frame.entities[int(ports[0])], "leaf") or ""
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
        known |= {"group": int(self._leaf.of(frame)[int(ports[0])]) + 1}
        known["looks"] += 1
        known["factor"] = float(np.exp(np.median(self.traffic.excess[row, mine]))) if len(mine) else 1.0
        known["load"] = float(np.nanmedian(self.traffic.share[judged])) if len(judged) else 0.0
        known["beside"] = bool(self.traffic.beside[mine].mean() > 0.5) if len(mine) else known.get("beside", False)
        known["errors"] = int(np.nansum(self.traffic.errors[ports]))

    def _findings(self, frame: Frame) -> list[Finding]:
        told = {leaf: known for leaf, known in self.crowded.items() if known["looks"] >= 2}
        close(self.conditions, set(told))
        found = []
        for leaf, known in sorted(told.items()):
            held = (frame.time - known["onset"]) / SECOND
            level: Level = "ticket" if held >= self.hold and known["beside"] else "suspect"
            if due := tell(self.conditions, leaf, frame.time, known["onset"], level):
                what, signals = _KINDS[known["row"]]
                summary = (
                    f"{leaf} is congested: {what} on {known['ports']} of its {known['of']} busy ports, in the median"
                    f" {known['factor']:.1f} times what is normal for them, for {held / 60:.0f} min, with"
                    f" {known['errors']} errors; no port is at fault"
                )
                compared = Compared(known["factor"], 1.0, None, "own past", 0, known["factor"] - 1, "share")
                facts = {name: known[name] for name in ("ports", "of", "errors")}
                facts |= {"load": round(known["load"], 3), "minutes": round(held / 60, 1)}
                clears = f"fewer than a third of the ports are at {self.factor:g} times their normal"
                told_by = evidence(clears, compared, **facts)
                score = known["factor"]
                found.append(Finding(*(frame.time, due[0], leaf, self.name, due[1], score, summary), told_by, signals))
        return found
