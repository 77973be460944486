"""Finds network ports that flap, stay down or corrupt data, and leaf switches that take their ports with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base.cohorts import Cohorts
from detectors.base.detector import Detector, notes, part
from detectors.base.findings import REPEAT, OpenConditions, close_ended, due_report, make_evidence
from detectors.base.gates import Gates
from detectors.base.streams import LEARN, USUAL_STEP
from detectors.link.alarm_rates import LINKS, RULES, of_sum, of_window
from detectors.link.best_values import Speeds
from detectors.link.counters import Floats, Lives, Places
from detectors.link.cable_ends import Ends
from detectors.link.cable_ends import Modules
from detectors.link.error_counts import PACKETS, PHYSICAL, Errors, Setting
from detectors.link.leaf_faults import Erring, Leaves, Storms
from detectors.link.port_states import UP, PortStates
from detectors.link.port_troubles import PACKET_COUNTERS, Losses, Seen, Trouble, troubles
from pipeline.model.records import LEVELS, SECOND, Finding, Frame, Level

_BRING_UP = 120.0
"""s in which a port that has begun a new life (boot, driver loaded anew) comes up: what it does then is no fault."""
_TRAINING = 30.0
"""s after a flap in which errors are those of the training of the link: the flap tells of them. Chosen: a poll."""


@dataclass
class Link(Detector):
    """Flap machine, drop timer and a CUSUM on errors left after correction; a fallen leaf is blamed whole.

    Suspect: one flap, a port that is down, or errors at half of `limit`. Page: `flaps` within `flap_window` s, down
    for `drop` s, trained to less than its speed (a ticket after new firmware), errors at `limit`, or more in 300 s than
    chance makes: at 400 Gb/s five in a minute or six in five, four where the whole fabric hardly errs; a burst counts
    at most `error_cap` in 30 s. Suspected errors page at once where both ends of the cable have them, or the module is
    hot. Alone they do not before their counter has been read for ten minutes, as it is not known yet how it bunches.
    More than `leaf_share` of a leaf's ports (at least `leaf_ports`) down within `leaf_within` s: one page for the
    leaf, none for its ports. The same where more than 30 % of at least eight ports of a leaf begin to err within five
    minutes; `fabric:all` is blamed where these are of several leaves.

    Nothing counts during announced work and until links have settled, on a port that begins a new life, on one whose
    far end's node is silent (it boots), or in a counter that was reset or stands at its top (evidence: `full`).
    Received packets with errors that rise and fall with the load are congestion, a ticket at most. Only a port of a
    fabric, below a leaf or a rail in the topology, pages. Elsewhere people pull cables: what would page is a ticket
    there, as with the role `management` anywhere; a suspect with `wireless` or the role `unused`.

    Source: 3 flaps in 12 h and down for 4 min as in gpud's rules; bit error rates of 1e-15 (`healthy_ber`, NVIDIA's
    factory test of cables; down to a tenth of it where all ports together show less) against 1e-13 (`faulty_ber`);
    Poisson CUSUM of Lucas (Technometrics 27, 1985) with exp(21) readings between false alarms, and a sliding count
    (Naus, 1982), both negative binomial as far as errors come in bunches on the whole fabric.
    """

    name: ClassVar[str] = "link"
    family: ClassVar[str] = "link degradation"
    device_class: ClassVar[str] = "nic"
    needs: ClassVar[tuple[str, ...]] = ("nic.state",)
    wants: ClassVar[tuple[str, ...]] = (
        *("nic.carrier_changes", "nic.generation", "nic.speed", "nic.rx_bytes"),
        *(*PHYSICAL, *PACKETS, "nic.rx_power_min", "nic.tx_power_min", "nic.module_temperature"),
        *("event:link_state", "event:maintenance_start", "event:maintenance_end"),
    )
    cannot_see: ClassVar[str] = (
        "Ports that were slow or down when first seen, throughput lost without a lower speed or errors, errors in the "
        "first ten minutes of a counter's readings, and those of counters at their top until somebody clears them."
    )

    flaps: int = 3
    flap_window: float = 12 * 3600.0
    flap_quiet: float = 1800.0
    drop: float = 240.0
    healthy_ber: float = 1e-15
    faulty_ber: float = 1e-13
    limit: float = 21.0
    error_cap: float = 3.0
    leaf_share: float = 0.5
    leaf_within: float = 5.0
    leaf_ports: int = 4

    gates: Gates = part(Gates)
    lives: Lives = part(Lives)
    states: PortStates = part(PortStates)
    errors: Errors = part(Errors)
    leaves: Leaves = part(Leaves)
    storms: Storms = part(Storms)
    speeds: Speeds = part(Speeds)
    leaps: dict[str, list[float]] = notes()
    modules: Modules = part(Modules)
    losses: Losses = part(Losses)
    flapped: dict[str, int] = notes()
    conditions: OpenConditions = notes()
    _leaf: Cohorts = field(default_factory=lambda: Cohorts("leaf"), init=False, repr=False)
    _fabric: Cohorts = field(default_factory=lambda: Cohorts("leaf", "rail"), init=False, repr=False)
    _ends: Ends = field(default_factory=Ends, init=False, repr=False)
    _place: dict[str, int] = field(default_factory=dict, init=False, repr=False)

    def budget(self) -> list[str]:
        tests = (of_sum(self.limit, USUAL_STEP, LINKS), of_window(LINKS))
        return [*(f"errors, {words}" for words in tests), f"flaps, drops, leaves: {RULES}"]

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        self.gates.update(frames)
        frame = frames.get("nic")
        if frame is None or not len(frame.entities):
            return []
        anew, lives = self.lives.changed(frame["nic.generation"])
        self.modules.take(frame)
        self.speeds.take(frame)
        self._flaps(frame, anew, lives)
        self._hear(frame, lives)
        self._count(frame, anew, lives)
        return self._findings(frame, self._fallen(frame))

    def _fallen(self, frame: Frame) -> NDArray[np.bool_]:
        """(N,) ports below a leaf that fell."""
        groups = self._leaf.groups(frame)  # numbered when the fleet changes, not first when it falls
        if not self.states.down.any():
            self.leaves.stand(frame.time)
            return np.zeros(len(frame.entities), np.bool_)
        limits = (self.leaf_ports, self.leaf_share, self.leaf_within)
        return self.leaves.judge(self.states, groups, lambda i: self._leaf_of(frame, i), *limits, frame.time)

    def _flaps(self, frame: Frame, anew: Places, lives: Floats) -> None:
        for i, times in self.states.look(frame["nic.state"], frame["nic.carrier_changes"], frame.time, anew):
            self._flap(frame, i, times, frame.time, lives)

    def _hear(self, frame: Frame, lives: Floats) -> None:
        """Takes transitions that events tell of ports without a counter; a counter has them all already."""
        for event in [e for e in frame.events if e.kind == "link_state" and "state" in e.data]:
            i = self._places(frame).get(event.entity, -1)
            if i >= 0 and self.states.hear(i, event):
                self._flap(frame, i, 1, event.time, lives)

    def _flap(self, frame: Frame, i: int, times: int, time: int, lives: Floats) -> None:
        """Notes returns to up that nothing explains: no work, no boot, no fallen leaf."""
        port = frame.entities[i]
        self.flapped[port] = time
        if i in self.states.leaps:
            self.leaps[port] = list(self.states.leaps[i])
        if (
            self.states.known(i)
            and not self._excused(frame, i, lives)
            and not self.leaves.excuses(self._leaf_of(frame, i), time)
        ):
            self.states.flap(port, times, time)

    def _excused(self, frame: Frame, i: int, lives: Floats) -> bool:
        """Whether a port is worked on, or has only just begun to live."""
        young = frame.time - lives[i] * SECOND < _BRING_UP * SECOND
        return bool(young) or self.gates.in_maintenance(frame.entities[i], frame.topology, frame.time)

    def _count(self, frame: Frame, anew: Places, lives: Floats) -> None:
        """Feeds the error counters into their CUSUMs, of ports whose errors mean anything now."""
        self.errors.speeds(frame["nic.speed"])
        setting = Setting(self.healthy_ber, self.faulty_ber, self.limit, self.error_cap)
        up = self.states.state[: len(frame.entities)] == UP
        for signal in (*PHYSICAL, *PACKETS):
            if signal in frame.values:
                at, growth = self.errors.take(signal, frame.values[signal], frame.time, anew)
                if len(at):
                    kept = np.fromiter((self._counts(frame, i, lives) for i in at.tolist()), bool, len(at))
                    at, growth = at[kept], growth[kept]
                for i, count in zip(at.tolist(), growth.tolist(), strict=True):
                    self.losses.err(frame.entities[i], signal in PACKET_COUNTERS, count, frame.time)
                self.errors.judge(signal, at, growth, up, frame.time, setting)
        if self.losses.followed:
            self.losses.take(self._places(frame), frame["nic.rx_bytes"], frame.time)

    def _counts(self, frame: Frame, i: int, lives: Floats) -> bool:
        flapped = self.flapped.get(frame.entities[i], 0)
        training = 0 <= frame.time - flapped <= _TRAINING * SECOND or self.states.down[i] > 0
        return self.states.known(i) and not training and not self._excused(frame, i, lives)

    def _leaf_of(self, frame: Frame, i: int) -> str:
        return frame.topology.ancestor_of_kind(frame.entities[i], "leaf") or ""

    def _findings(self, frame: Frame, fallen: NDArray[np.bool_]) -> list[Finding]:
        """Of leaves that fell, and of every other port with trouble."""
        slow = frozenset(self.speeds.slow(frame, self.gates))
        bad = self._bad(frame, slow)
        found = [*self._of_leaves(frame), *self._of_storms(frame, fallen, bad)]
        holding = {*self.leaves.fallen, *self.storms.standing}
        shared = frozenset(self._places(frame).get(port, -1) for port in self.storms.shared)
        seen = Seen(self, frame, self._ends.of(frame), shared, slow) if bad else None
        for i in bad:
            port = frame.entities[i]
            if fallen[i] or not self.states.known(i) or self.gates.in_maintenance(port, frame.topology, frame.time):
                continue
            if self.leaves.back and self.leaves.excuses(self._leaf_of(frame, i), frame.time):
                continue
            if i not in shared and self._told(frame, i):
                holding.add(port)
                continue
            told = troubles(seen, i) if seen else []
            if told:
                holding.add(port)
                if not self.states.silent(i):
                    found += self._of_port(frame, i, told)
        close_ended(self.conditions, holding)
        return found

    def _told(self, frame: Frame, i: int) -> bool:
        """Whether the trouble of a port has been told just now, as loudly as it can be."""
        known = self.conditions.get(frame.entities[i])
        fresh = known is not None and 0 <= frame.time - known["told"] < REPEAT
        return fresh and known is not None and known["level"] == self._highest(frame, i)

    def _bad(self, frame: Frame, slow: frozenset[int]) -> list[int]:
        """Ports that have any trouble."""
        bad = {*self.states.lost().tolist(), *self.errors.above(self.limit / 2).tolist(), *slow}
        if self.states.flapped:
            for port in [p for p, at in self.flapped.items() if frame.time - at > self.flap_window * SECOND]:
                del self.flapped[port]
                self.leaps.pop(port, None)
            burst, place = self.states.burst, self._places(frame)
            names = [p for p in list(self.states.flapped) if burst(p, frame.time, self.flap_window, self.flap_quiet)]
            bad |= {place.get(name, -1) for name in names}
        return sorted(i for i in bad if 0 <= i < len(frame.entities))

    def _places(self, frame: Frame) -> dict[str, int]:
        """Where each port stands in the frame: names are only ever added at the end."""
        for i in range(len(self._place), len(frame.entities)):
            self._place[frame.entities[i]] = i
        return self._place

    def _of_leaves(self, frame: Frame) -> list[Finding]:
        found = []
        for leaf, since in sorted(self.leaves.fallen.items()):
            work = self.gates.in_maintenance(leaf, frame.topology, frame.time)
            if not work and (due := due_report(self.conditions, leaf, frame.time, since, "page")):
                seconds = round((frame.time - since) / SECOND, 1)
                down, below = self.leaves.ports[leaf]
                summary = f"{leaf}: {down} of its {below} ports went down together: the switch, not its ports"
                if seconds >= 60:
                    summary += f"; it has been gone for {seconds / 60:.0f} min"
                says = make_evidence("fewer than half of its ports are down", down_s=seconds, down=down, ports=below)
                head = (frame.time, min(due[0], frame.time), leaf, self.name, due[1], 1.0)
                found.append(Finding(*head, summary, says, ("nic.state",)))
        return found

    def _of_storms(self, frame: Frame, fallen: NDArray[np.bool_], bad: list[int]) -> list[Finding]:
        """Of leaves, or the fabric, on which many ports began to err together."""
        if not (bad or self.storms.standing or self.storms.shared):
            return []
        n, working = len(frame.entities), self.gates.maintenance_mask(frame)
        at = self.errors.above(self.limit / 2)
        at = at[at < n]
        at = at[~fallen[at] & ~working[at] & (self.states.count[at] > LEARN)]
        at = at[np.fromiter((self._highest(frame, i) == "page" for i in at.tolist()), bool, len(at))]
        sure = self.errors.were_above(at)
        erring = Erring(
            at, self.errors.since(at, self.limit / 2), sure, self.states.was_up[:n] & (self._fabric.groups(frame) >= 0)
        )
        storms = self.storms.judge(
            erring, self._leaf.groups(frame), lambda i: self._leaf_of(frame, i), frame.entities, frame.time
        )
        found = []
        for storm in storms:
            if due := due_report(self.conditions, storm.entity, frame.time, storm.since, storm.level):
                says = make_evidence("fewer than 30 % of its ports err", None, erring=storm.struck, ports=storm.of)
                head = (frame.time, min(due[0], frame.time), storm.entity, self.name, due[1], storm.struck / storm.of)
                signals = tuple(s for s in (*PHYSICAL, *PACKETS) if s in frame.values)
                found.append(Finding(*head, self.storms.words(storm), says, signals))
        return found

    def _of_port(self, frame: Frame, i: int, told: list[Trouble]) -> list[Finding]:
        """One finding per port, of its worst trouble first."""
        entity, time, worst = frame.entities[i], frame.time, told[0]
        level = min(worst.level, self._highest(frame, i), key=LEVELS.index)
        due = due_report(self.conditions, entity, time, min(t.since for t in told), level)
        if due is None:
            return []
        says = {k: v for t in reversed(told) for k, v in t.evidence.items()}
        if full := self.errors.full(i, frame.values):
            says["full"] = full
        clears = "; ".join(t.clears for t in told)
        summary = f"{entity} {' and '.join(t.text for t in told)}: {worst.side}"
        signals = tuple(dict.fromkeys(t.signal for t in told))
        shown = make_evidence(clears, worst.compared, **says)
        return [Finding(time, min(due[0], time), entity, self.name, due[1], worst.score, summary, shown, signals)]

    def _highest(self, frame: Frame, i: int) -> Level:
        """How loud a port may get: a link of the fabric holds up a job, another one at most its own host."""
        facts = frame.topology.attributes.get(frame.entities[i], {})
        if facts.get("wireless") is True or facts.get("role") == "unused":
            return "suspect"
        fabric = self._fabric.groups(frame)[i] >= 0 and facts.get("role") != "management"
        return "page" if fabric else "ticket"
