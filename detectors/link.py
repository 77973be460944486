"""Finds network ports that flap, stay down or corrupt data, and leaf switches that take their ports with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.baseline import COUNTER, LEARN, Cells, counter_delta, poisson_cusum
from detectors.cohorts import Cohorts
from detectors.conditions import Open, close, tell
from detectors.detector import Detector, memory, notes
from pipeline.records import LEVELS, SECOND, Finding, Frame, Level

PORT = np.dtype(
    [
        ("count", "<i8"),  # samples seen
        ("state", "<i1"),  # 0 unknown, 1 down, 2 up
        ("was_up", "?"),
        ("down", "<i8"),  # since when it is down; 0 = it is not
    ]
)
_DOWN, _UP = 1, 2
_UP_WORDS = {"up", "active", "1", "true"}
_WINDOW = 30.0  # s over which errors are capped; the interval at which fabrics are polled
_MOST_FLAPS = 64  # kept per port; chosen


@dataclass
class Link(Detector):
    """Flap machine, drop timer and a Poisson CUSUM on errors left after correction; a fallen leaf is blamed whole.

    Suspect: one flap, a port that is down, or errors at half of `limit`. Page: `flaps` within `flap_window` s, down
    for `drop` s, or errors at `limit`; a burst counts at most `error_cap` errors per 30 s. More than `leaf_share` of
    a leaf's ports (at least `leaf_ports`) down within `leaf_within` s: one page for the leaf, none for its ports.

    Only a port of a fabric, below a leaf or a rail in the topology, pages. Elsewhere people pull cables and laptops
    move: what would page is a ticket there, as with the role `management` anywhere. It stays a suspect on a port with
    the attribute `wireless` or the role `unused` (the agent tells a port's role from where it sits).

    Source: 3 flaps in 12 h as in gpud's rule; error rates of BER 1e-15 (healthy, InfiniBand cable test) against 1e-13
    (faulty) at 400 Gb/s; Poisson CUSUM of Lucas (Technometrics 27, 1985) with exp(23) windows between false alarms.
    """

    name: ClassVar[str] = "link"
    family: ClassVar[str] = "link degradation"
    device_class: ClassVar[str] = "nic"
    needs: ClassVar[tuple[str, ...]] = ("nic.state",)
    wants: ClassVar[tuple[str, ...]] = (
        "nic.carrier_changes",
        "nic.symbol_errors",
        "nic.crc_errors",
        "nic.generation",
        "event:link_state",
    )
    blind: ClassVar[str] = (
        "Links that lose speed without errors or state changes, and ports that were down when first seen."
    )

    flaps: int = 3
    flap_window: float = 12 * 3600.0
    flap_quiet: float = 1800.0
    drop: float = 240.0
    healthy_errors: float = 1.44
    faulty_errors: float = 144.0
    limit: float = 23.0
    error_cap: float = 3.0
    leaf_share: float = 0.5
    leaf_within: float = 5.0
    leaf_ports: int = 4

    ports: Cells = memory(0, PORT)
    changes: Cells = memory(0, COUNTER)
    symbol: Cells = memory(0, COUNTER)
    crc: Cells = memory(0, COUNTER)
    flapped: dict[str, list[int]] = notes()
    leaves: dict[str, int] = notes()
    conditions: Open = notes()
    _leaf: Cohorts = field(default_factory=lambda: Cohorts("leaf"), init=False, repr=False)
    _fabric: Cohorts = field(default_factory=lambda: Cohorts("leaf", "rail"), init=False, repr=False)

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        frame = frames.get("nic")
        if frame is None or not len(frame.entities):
            return []
        self.grow(len(frame.entities))
        self._look(frame)
        self._hear(frame)
        self._count(frame, "nic.symbol_errors", self.symbol)
        self._count(frame, "nic.crc_errors", self.crc)
        fallen = self._judge_leaves(frame)
        return [*self._of_leaves(frame), *self._of_ports(frame, fallen)]

    def _hear(self, frame: Frame) -> None:
        """Takes transitions that events tell of ports without a counter; a counter has them all already."""
        heard = [e for e in frame.events if e.kind == "link_state" and "state" in e.data]
        place = {e: i for i, e in enumerate(frame.entities)} if heard else {}
        for event in heard:
            i = place.get(event.entity, -1)
            new = _UP if str(event.data["state"]).lower() in _UP_WORDS else _DOWN
            if i < 0 or self.changes["time"][i] > 0 or self.ports["state"][i] == new:
                continue
            port = self.ports[i]
            if new == _UP and port["state"] == _DOWN:
                self._flap(frame, i, 1, event.time)
            port["down"] = event.time if new == _DOWN else 0
            port["state"], port["was_up"] = new, port["was_up"] or new == _UP

    def _look(self, frame: Frame) -> None:
        """Takes state and transition counter of all ports; between two readings a port may have come and gone."""
        ports = self.ports[: len(frame.entities)]
        reading = frame["nic.state"]
        known = np.isfinite(reading)
        old = ports["state"].copy()
        new = np.where(known, np.where(reading >= 1, _UP, _DOWN), old)
        changes, lives = frame["nic.carrier_changes"], frame["nic.generation"]
        delta, _ = counter_delta(self.changes[: len(new)], changes, frame.time, lives)
        moved = (old > 0) & (new != old)
        moves = np.maximum(np.nan_to_num(delta).astype(np.int64), moved)
        # of n alternating moves, the number that went up follows from where they began and ended
        ups = np.where(old == new, moves // 2, np.where(new == _UP, (moves + 1) // 2, moves // 2))
        for i in np.flatnonzero((ups > 0) & (old > 0)).tolist():
            self._flap(frame, i, int(ups[i]), frame.time)
        ports["down"] = np.where(
            new == _UP, 0, np.where(moved | ((ups > 0) & (new == _DOWN)), frame.time, ports["down"])
        )
        ports["state"], ports["was_up"], ports["count"] = new, ports["was_up"] | (new == _UP), ports["count"] + known

    def _flap(self, frame: Frame, i: int, times: int, time: int) -> None:
        """Notes returns to up of a port that had been up before; the first samples of a port may be its bring-up."""
        port, name = self.ports[i], frame.entities[i]
        if port["was_up"] and port["count"] >= LEARN and self._leaf_of(frame, i) not in self.leaves:
            self.flapped[name] = [*self.flapped.get(name, []), *[time] * min(times, _MOST_FLAPS)][-_MOST_FLAPS:]

    def _count(self, frame: Frame, signal: str, cells: Cells) -> None:
        """Feeds an error counter into its CUSUM; one burst counts at most as the cap, so that it cannot page alone."""
        mine = cells[: len(frame.entities)]
        errors, seconds = counter_delta(mine, frame[signal], frame.time, frame["nic.generation"])
        errors = np.minimum(errors, self.error_cap * np.maximum(seconds / _WINDOW, 1 / 3))
        errors[self.ports["count"][: len(errors)] <= LEARN] = np.nan
        hour = 3600.0
        poisson_cusum(
            mine, errors, seconds, self.healthy_errors / hour, self.faulty_errors / hour, self.limit, frame.time
        )

    def _leaf_of(self, frame: Frame, i: int) -> str:
        return frame.topology.above_of_kind(frame.entities[i], "leaf") or ""

    def _judge_leaves(self, frame: Frame) -> NDArray[np.bool_]:
        """(N,) ports below a leaf that fell: more than half of its ports down, and so within seconds."""
        ports, groups = self.ports[: len(frame.entities)], self._leaf.of(frame) + 1
        down = (ports["down"] > 0) & ports["was_up"] & (ports["count"] > LEARN)
        if not down.any() and not self.leaves:
            return np.asarray(down)
        bearing = ports["was_up"] & (groups > 0)
        size = np.bincount(groups, bearing, int(groups.max()) + 1)
        share = np.bincount(groups, down & bearing, len(size)) / np.maximum(size, 1)
        together = self._together(down & bearing, groups, len(size))
        fresh = np.bincount(groups, together, len(size)) / np.maximum(size, 1)
        fallen = np.zeros(len(size), bool)
        for group in np.flatnonzero((share > self.leaf_share) & (size >= self.leaf_ports)).tolist():
            members = np.flatnonzero((groups == group) & down)
            leaf = self._leaf_of(frame, int(members[0]))
            if leaf in self.leaves or fresh[group] > self.leaf_share:
                self.leaves.setdefault(leaf, int(ports["down"][members].min()))
                fallen[group] = True
        standing = {self._leaf_of(frame, int(np.flatnonzero(groups == g)[0])) for g in np.flatnonzero(fallen)}
        for leaf in [leaf for leaf in self.leaves if leaf not in standing]:
            del self.leaves[leaf]
        return np.asarray(fallen[groups])

    def _together(self, down: NDArray[np.bool_], groups: NDArray[Any], total: int) -> NDArray[np.bool_]:
        """Ports that went down within seconds of their leaf's newest; the grid is as fine as that can be told."""
        since = np.where(down, self.ports["down"][: len(down)], 0)
        newest = np.zeros(total, np.int64)
        np.maximum.at(newest, groups, since)
        return np.asarray(down & (since >= newest[groups] - self.leaf_within * SECOND))

    def _of_leaves(self, frame: Frame) -> list[Finding]:
        found = []
        for leaf, since in sorted(self.leaves.items()):
            if due := tell(self.conditions, leaf, frame.time, since, "page"):
                summary = f"{leaf}: more than {self.leaf_share:.0%} of its ports went down together"
                evidence = {"down_s": round((frame.time - since) / SECOND, 1)}
                found.append(
                    Finding(frame.time, due[0], leaf, self.name, due[1], 1.0, summary, evidence, ("nic.state",))
                )
        return found

    def _of_ports(self, frame: Frame, fallen: NDArray[np.bool_]) -> list[Finding]:
        flapping = [name for name in list(self.flapped) if self._burst(name, frame.time)]
        n = len(frame.entities)
        ports = self.ports[:n]
        errors = np.maximum(self.symbol["sum"][:n], self.crc["sum"][:n]) > self.limit / 2
        down = (ports["down"] > 0) & ports["was_up"]
        flapped = np.isin(frame.entities, flapping) if flapping else np.zeros(n, bool)
        bad = (errors | down | flapped) & ~fallen & (ports["count"] > LEARN)
        close(self.conditions, {*self.leaves, *(frame.entities[i] for i in np.flatnonzero(bad).tolist())})
        measured = np.isfinite(frame["nic.state"])
        found = [self._of_port(frame, i) for i in np.flatnonzero(bad & measured).tolist()]
        return [finding for finding in found if finding is not None]

    def _burst(self, name: str, time: int) -> list[int]:
        """Flaps of the window, if the port still flaps; empty once it has been quiet."""
        window, quiet = int(self.flap_window * SECOND), int(self.flap_quiet * SECOND)
        kept = self.flapped[name] = [t for t in self.flapped.get(name, []) if time - t <= window]
        if not kept:
            del self.flapped[name]
        return kept if kept and time - kept[-1] <= quiet else []

    def _began(self, times: list[int]) -> int:
        """First flap after the last quiet spell."""
        quiet = int(self.flap_quiet * SECOND)
        return next((b for a, b in zip(times[-2::-1], times[:0:-1], strict=True) if b - a > quiet), times[0])

    def _highest(self, frame: Frame, i: int) -> Level:
        """How loud a port may get: a link of the fabric holds up a job, another one at most its own host."""
        facts = frame.topology.attributes.get(frame.entities[i], {})
        if facts.get("wireless") is True or facts.get("role") == "unused":
            return "suspect"
        fabric = self._fabric.of(frame)[i] >= 0 and facts.get("role") != "management"
        return "page" if fabric else "ticket"

    def _of_port(self, frame: Frame, i: int) -> Finding | None:
        """One finding per port, of its worst trouble first."""
        entity, time = frame.entities[i], frame.time
        troubles: list[tuple[Level, int, float, str, dict[str, Any], str]] = []
        if times := self._burst(entity, time):
            level: Level = "page" if len(times) >= self.flaps else "suspect"
            often = "once" if len(times) == 1 else f"{len(times)} times"
            text = f"went down and up again {often} in {self.flap_window / 3600:.0f} h"
            troubles.append(
                (level, self._began(times), float(len(times)), text, {"flaps": len(times)}, "nic.carrier_changes")
            )
        if since := int(self.ports["down"][i]):
            seconds = (time - since) / SECOND
            level = "page" if seconds >= self.drop else "suspect"
            troubles.append(
                (level, since, seconds / self.drop, f"is down for {seconds:.0f} s", {"down_s": seconds}, "nic.state")
            )
        for signal, cells in (("nic.symbol_errors", self.symbol[i]), ("nic.crc_errors", self.crc[i])):
            if (total := float(cells["sum"])) > self.limit / 2:
                count = int(cells["total"])
                level = "page" if total > self.limit else "suspect"
                text = f"has {count} {signal.removeprefix('nic.').replace('_', ' ')}"
                troubles.append((level, int(cells["since"]), total / self.limit, text, {signal: count}, signal))
        troubles.sort(key=lambda t: (t[0] != "page", -t[2]))
        level = min(troubles[0][0], self._highest(frame, i), key=LEVELS.index)
        due = tell(self.conditions, entity, time, min(t[1] for t in troubles), level)
        if due is None:
            return None
        evidence = {k: v for t in troubles for k, v in t[4].items()}
        summary = f"{entity} " + " and ".join(t[3] for t in troubles)
        return Finding(
            time, due[0], entity, self.name, due[1], troubles[0][2], summary, evidence, tuple(t[5] for t in troubles)
        )
