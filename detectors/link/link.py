"""Finds network ports that flap, stay down, lose speed or have errors, and leaf switches that fail as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base.cohorts import Cohorts
from detectors.base.detector import Detector, notes, part
from detectors.base.findings import REPEAT, OpenConditions, close_ended, due_report
from detectors.base.gates import Gates
from detectors.base.streams import LEARN, USUAL_STEP
from detectors.base.topology_index import per_device_topology
from detectors.link.alarm_rates import PORTS_PER_NODE, RULE, describe_cusum_rate, describe_window_rate
from detectors.link.best_values import PortSpeeds
from detectors.link.cable_ends import OpticalModules, PortSurroundings
from detectors.link.counters import CounterGenerations, Floats, Indices
from detectors.link.error_counts import PACKETS, PHYSICAL, ErrorLimits, PortErrors
from detectors.link.port_states import UP, PortStates
from detectors.link.port_troubles import (
    BUSY,
    FABRIC,
    IDLE,
    PACKET_COUNTERS,
    UNKNOWN_WORK,
    DownLeaves,
    ErringPorts,
    ErrorStorm,
    ErrorStorms,
    LeafLimits,
    PacketLosses,
    PortLimits,
    PortRecords,
    PortTrouble,
    find_troubles,
)
from pipeline.model.entity_names import pager_title, short_duration
from pipeline.model.records import LEVELS, SECOND, Finding, Frame, Level

_BRING_UP_S = 120.0
"""s in which a port comes up after a boot or a reload of its driver: its transitions and errors then do not count."""
_POLLS, _LEAST_POLLS_S = 2.5, 25.0  # polls, and s, before a port went down in which it carried traffic. Chosen
_IDLE_FOR = 3600 * SECOND  # us without traffic after which a port slows no job. Chosen: longer than any evaluation
_FABRIC_MBITS = 100_000.0  # as slow as ports of training fabrics are (EDR, 100 GbE)
_DISABLED = 3  # nic.phys_state of a port that was disabled on purpose (IBTA PortPhysicalState)
_TRAINING_S = 30.0
"""s after a flap in which errors are those of link training; the flap is reported instead. Chosen: one poll."""


@dataclass
class Link(Detector):
    """Counts flaps, times links that are down, and sums errors left after correction; a failed leaf is one finding.

    Suspect: one flap, a port that is down, or errors at half of `limit`. Page: `flaps` within `flap_window` s; a port
    that carried traffic and has been down for `busy_drop` s, or another one of a running job for `drop` s; trained to
    less than its speed (a ticket after new firmware, the normal speed after a day); errors at `limit`, or more in 300 s
    than chance explains: at 400 Gb/s five in a minute or six in five, four where the whole fabric has very few; a burst
    counts at most `error_cap` in 30 s. Ticket: fewer errors, in more minutes than ten times the healthy rate makes, and
    a port without traffic that is down for `drop` s, flaps, errs or is slow. Errors do not page until their counter has
    been read for ten minutes, which shows whether they come in bursts and how many are usual here; suspected ones page
    sooner if both ends of the cable have them, or the module is hot. More than `leaf_share` of a leaf's ports (at least
    `leaf_ports`) down within `leaf_within` s, or one poll: one page for the leaf, none for its ports. The same if more
    than 30 % of at least eight ports of a leaf begin to have errors within five minutes; if they are on several leaves,
    the entity is the rail that all of them are on, else `fabric:all`.

    Nothing counts during announced maintenance and until links have settled, on a port that is disabled or whose
    counters have just started, on one whose far end's node is silent (it boots), or in a counter that was reset or is
    saturated (evidence: `full`). Received packets with errors that follow the load are congestion, a ticket at most.
    Only a port of a fabric, below a leaf or a rail in the topology, pages; in a topology without both, one of at least
    100 Gb/s on a node with GPUs. Elsewhere cables are unplugged on purpose: a page becomes a ticket there, as with the
    role `management` anywhere, and a suspect with `wireless` or the role `unused`.

    Source: 3 flaps in 12 h, a hold-off of 25 s and down for 4 min as in gpud's rules; bit error rates of 1e-15
    (`healthy_ber`, NVIDIA's factory test of cables; down to a tenth of it where all ports together show less, up to
    that of the median port where that is more) against 1e-13 (`faulty_ber`), at least ten times as many; Poisson CUSUM
    of Lucas (Technometrics 27, 1985) with exp(21) readings between false alarms, and a sliding count (Naus, 1982), both
    negative binomial as far as errors come in bunches on the whole fabric.
    """

    name: ClassVar[str] = "link"
    family: ClassVar[str] = "link degradation"
    device_class: ClassVar[str] = "nic"
    needs: ClassVar[tuple[str, ...]] = ("nic.state",)
    wants: ClassVar[tuple[str, ...]] = (
        *("nic.carrier_changes", "nic.generation", "nic.speed", "nic.rx_bytes", "nic.tx_bytes"),
        "nic.phys_state",
        *(*PHYSICAL, *PACKETS, "nic.rx_power_min", "nic.tx_power_min", "nic.module_temperature"),
        *("event:link_state", "event:maintenance_start", "event:maintenance_end"),
    )
    cannot_see: ClassVar[str] = (
        "Ports that were slow or down when first seen, throughput lost without a lower speed or errors, errors in the "
        "first ten minutes of a counter's readings, and those of saturated counters until a person clears them."
    )

    flaps: int = 3
    flap_window: float = 12 * 3600.0
    flap_quiet: float = 1800.0
    drop: float = 240.0
    busy_drop: float = 28.0
    healthy_ber: float = 1e-15
    faulty_ber: float = 1e-13
    limit: float = 21.0
    error_cap: float = 3.0
    leaf_share: float = 0.5
    leaf_within: float = 5.0
    leaf_ports: int = 4

    gates: Gates = part(Gates)
    generations: CounterGenerations = part(CounterGenerations, kept=True)
    states: PortStates = part(PortStates, kept=True)
    errors: PortErrors = part(PortErrors, kept=True)
    leaves: DownLeaves = part(DownLeaves)
    storms: ErrorStorms = part(ErrorStorms)
    speeds: PortSpeeds = part(PortSpeeds, kept=True)
    modules: OpticalModules = part(OpticalModules, kept=True)
    losses: PacketLosses = part(PacketLosses)
    conditions: OpenConditions = notes()
    _leaf: Cohorts = field(default_factory=lambda: Cohorts("leaf"), init=False, repr=False)
    _fabric: Cohorts = field(default_factory=lambda: Cohorts("leaf", "rail"), init=False, repr=False)
    _around: PortSurroundings = field(default_factory=PortSurroundings, init=False, repr=False)

    def budget(self) -> list[str]:
        """Returns the false alarm rates of its tests."""
        tests = (describe_cusum_rate(self.limit, USUAL_STEP, PORTS_PER_NODE), describe_window_rate(PORTS_PER_NODE))
        return [*(f"errors, {words}" for words in tests), f"flaps, drops, leaves: {RULE}"]

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Returns findings of leaves, of the fabric and of ports."""
        self.gates.update(frames)
        frame = frames.get("nic")
        if frame is None or not len(frame.entities):
            return []
        restarted, started = self.generations.find_restarted(frame["nic.generation"])
        self.modules.update(frame)
        self.speeds.update_ports(frame)
        self.states.loads.update(frame["nic.rx_bytes"], frame["nic.tx_bytes"], frame["nic.speed"], frame.time)
        for i, times in self.states.update(frame["nic.state"], frame["nic.carrier_changes"], frame.time, restarted):
            self._record_flap(frame, i, times, frame.time, started)
        self._apply_events(frame, started)
        self._note_work(frame)
        self._update_errors(frame, restarted, started)
        return self._findings(frame, self._ports_below_down_leaves(frame))

    def _apply_events(self, frame: Frame, started: Floats) -> None:
        """Reads link_state events of ports without a counter of transitions; a counter has counted them already."""
        for event in [e for e in frame.events if e.kind == "link_state" and "state" in e.data]:
            i = self._port_indices(frame).get(event.entity, -1)
            if i >= 0 and self.states.apply_event(i, event):
                self._record_flap(frame, i, 1, event.time, started)

    def _note_work(self, frame: Frame) -> None:
        """Notes what each port that is down did before: later its job has died and shows nothing."""
        down = self.states.down_ports().tolist()
        if not down and not self.states.work:
            return
        known, names = self.states.work, {frame.entities[i]: i for i in down if i < len(frame.entities)}
        self.states.work = {port: known.get(port) or self._work_before(frame, i) for port, i in names.items()}

    def _work_before(self, frame: Frame, i: int) -> str:
        """Returns whether a port carried traffic until it went down; of a pause in a job nothing is known."""
        since, topology = int(self.states.down[i]), frame.topology
        if not self.states.loads.first[i]:
            return UNKNOWN_WORK
        polls = int(max(_POLLS * self.states.step[i], _LEAST_POLLS_S) * SECOND)
        if self.states.loads.carried(i, since, polls):
            return BUSY
        works = self._around.has_job(frame.entities[i], topology)
        return UNKNOWN_WORK if works and not self.states.loads.is_idle(i, since, _IDLE_FOR) else IDLE

    def _record_flap(self, frame: Frame, i: int, times: int, time: int, started: Floats) -> None:
        """Counts returns to up as flaps unless maintenance, a boot or a leaf that was down explains them."""
        port = frame.entities[i]
        self.states.record_return(i, port, time)
        if (
            self.states.has_enough_samples(i)
            and not self._excused(frame, started)[i]
            and not self.leaves.explains_port(self._leaf_of(frame, i), time)
        ):
            self.states.record_flap(port, times, time, self.states.loads.is_idle(i, time, _IDLE_FOR))

    def _excused(self, frame: Frame, started: Floats) -> NDArray[np.bool_]:
        """Returns (N,) ports in maintenance, and those whose counters have just started."""
        age = frame.time - started[: len(frame.entities)] * SECOND
        return np.asarray(((age >= 0) & (age < _BRING_UP_S * SECOND)) | self.gates.maintenance_mask(frame))

    def _update_errors(self, frame: Frame, restarted: Indices, started: Floats) -> None:
        """Adds the growth of the error counters, of ports whose errors count now."""
        self.errors.update_speeds(frame["nic.speed"])
        limits = ErrorLimits(self.healthy_ber, self.faulty_ber, self.limit, self.error_cap)
        n = len(frame.entities)
        up, young = self.states.state[:n] == UP, self.states.count[:n] <= LEARN
        excused = self._excused(frame, started)
        for signal in (*PHYSICAL, *PACKETS):
            if signal in frame.values:
                at, growth = self.errors.measure_growth(signal, frame.values[signal], frame.time, restarted)
                if len(at):
                    kept = np.fromiter((self._errors_count(frame, i) for i in at.tolist()), bool, len(at))
                    kept &= ~excused[at]
                    at, growth = at[kept], growth[kept]
                for i, count in zip(at.tolist(), growth.tolist(), strict=True):
                    self.losses.add_errors(frame.entities[i], signal in PACKET_COUNTERS, count, frame.time)
                self.errors.update_sums(signal, at, growth, up, frame.time, limits, young)
        if self.losses.followed:
            self.losses.close_minutes(self._port_indices(frame), frame["nic.rx_bytes"], frame.time)

    def _errors_count(self, frame: Frame, i: int) -> bool:
        returned = self.states.returned.get(frame.entities[i], 0)
        training = 0 <= frame.time - returned <= _TRAINING_S * SECOND or self.states.down[i] > 0
        return self.states.has_enough_samples(i) and not training

    def _ports_below_down_leaves(self, frame: Frame) -> NDArray[np.bool_]:
        """Returns (N,) ports below a leaf that is down."""
        groups = self._leaf.groups(frame)  # numbered when the fleet changes, not first when a leaf goes down
        if not self.states.down.any():
            self.leaves.replace_fallen({}, frame.time)
            return np.zeros(len(frame.entities), np.bool_)
        limits = LeafLimits(self.leaf_ports, self.leaf_share, self.leaf_within)
        return self.leaves.find_ports_below(self.states, groups, lambda i: self._leaf_of(frame, i), limits, frame.time)

    def _leaf_of(self, frame: Frame, i: int) -> str:
        return frame.topology.ancestor_of_kind(frame.entities[i], "leaf") or ""

    def _rail_of(self, frame: Frame, i: int) -> str:
        return frame.topology.ancestor_of_kind(frame.entities[i], "rail") or FABRIC

    @per_device_topology
    def _port_indices(self, frame: Frame) -> dict[str, int]:
        """Returns the index of each port in the frame."""
        return {port: i for i, port in enumerate(frame.entities)}

    def _findings(self, frame: Frame, below_down_leaf: NDArray[np.bool_]) -> list[Finding]:
        """Returns findings of leaves that are down or have many errors, and of every other port with a problem."""
        slow = frozenset(self.speeds.find_slow(frame, self.gates))
        bad = self._ports_in_trouble(frame, slow)
        found = [*self._leaf_findings(frame), *self._storm_findings(frame, below_down_leaf, bad)]
        holding = {*self.leaves.fallen, *self.storms.standing}
        shared = frozenset(self._port_indices(frame).get(port, -1) for port in self.storms.shared)
        records = self._records(frame, shared, slow) if bad else None
        disabled = frame["nic.phys_state"] == _DISABLED
        for i in bad:
            port = frame.entities[i]
            if below_down_leaf[i] or disabled[i] or not self.states.has_enough_samples(i):
                continue
            if self.gates.in_maintenance(port, frame.topology, frame.time):
                continue
            if self.leaves.back and self.leaves.explains_port(self._leaf_of(frame, i), frame.time):
                continue
            if i not in shared and self._was_just_reported(frame, i):
                holding.add(port)
                continue
            troubles = find_troubles(records, self._port_limits, i) if records else []
            if troubles:
                holding.add(port)
                if not self.states.is_silent(i):
                    found += self._port_finding(frame, i, troubles)
        close_ended(self.conditions, holding)
        return found

    def _records(self, frame: Frame, shared: frozenset[int], slow: frozenset[int]) -> PortRecords:
        pieces = (self.states, self.speeds, self.errors, self.modules, self.losses, self.gates, self.states.leaps)
        return PortRecords(frame, *pieces, self._around.find_far_ends(frame), shared, slow, self.states.work)

    @property
    def _port_limits(self) -> PortLimits:
        waits = self.flap_window, self.flap_quiet, self.drop, self.busy_drop
        return PortLimits(self.flaps, *waits, self.healthy_ber, errors=self.limit)

    def _was_just_reported(self, frame: Frame, i: int) -> bool:
        """Returns whether a port was reported within REPEAT at the highest level that it may have."""
        known = self.conditions.get(frame.entities[i])
        fresh = known is not None and 0 <= frame.time - known["reported"] < REPEAT
        return fresh and known is not None and known["level"] == self._highest_level(frame, i)

    def _ports_in_trouble(self, frame: Frame, slow: frozenset[int]) -> list[int]:
        bad = {*self.states.down_ports().tolist(), *self.errors.ports_above(self.limit / 2).tolist(), *slow}
        bad |= set(self.errors.decaying_ports().tolist())
        if self.states.flapped:
            self.states.drop_old_returns(frame.time, self.flap_window)
            recent, index = self.states.recent_flaps, self._port_indices(frame)
            names = [p for p in list(self.states.flapped) if recent(p, frame.time, self.flap_window, self.flap_quiet)]
            bad |= {index.get(name, -1) for name in names}
        return sorted(i for i in bad if 0 <= i < len(frame.entities))

    def _leaf_findings(self, frame: Frame) -> list[Finding]:
        found = []
        for leaf, since in sorted(self.leaves.fallen.items()):
            if self.gates.in_maintenance(leaf, frame.topology, frame.time):
                continue
            if due := due_report(self.conditions, leaf, frame.time, since, "page"):
                seconds = round((frame.time - since) / SECOND, 1)
                down, below = self.leaves.ports[leaf]
                title = f"{down} of {below} ports down" + (f" for {short_duration(seconds)}" if seconds >= 60 else "")
                found.append(
                    self.finding(
                        *(frame.time, leaf, (min(due[0], frame.time), due[1])),
                        score=1.0,
                        summary=pager_title(leaf, title),
                        signals=("nic.state",),
                        clears="fewer than half of its ports are down",
                        down_s=seconds,
                        down=down,
                        ports=below,
                    )
                )
        return found

    def _storm_findings(self, frame: Frame, below_down_leaf: NDArray[np.bool_], bad: list[int]) -> list[Finding]:
        """Returns findings of leaves, of a rail or of the fabric, on which many ports began to have errors together."""
        if not (bad or self.storms.standing or self.storms.shared):
            return []
        leaf_of, rail_of = (lambda i: self._leaf_of(frame, i)), (lambda i: self._rail_of(frame, i))
        leaves = self._leaf.groups(frame)
        erring = self._erring_ports(frame, below_down_leaf)
        storms = self.storms.find_storms(erring, leaves, (leaf_of, rail_of), frame.entities, frame.time)
        due = ((s, due_report(self.conditions, s.entity, frame.time, s.since, s.level)) for s in storms)
        return [self._storm_finding(frame, storm, report) for storm, report in due if report is not None]

    def _storm_finding(self, frame: Frame, storm: ErrorStorm, due: tuple[int, Level]) -> Finding:
        return self.finding(
            *(frame.time, storm.entity, (min(due[0], frame.time), due[1])),
            score=storm.erring / storm.ports,
            summary=pager_title(storm.entity, f"errors on {storm.erring} of {storm.ports} ports within minutes"),
            signals=tuple(s for s in (*PHYSICAL, *PACKETS) if s in frame.values),
            clears="fewer than 30 % of its ports have errors",
            erring=storm.erring,
            ports=storm.ports,
        )

    def _erring_ports(self, frame: Frame, below_down_leaf: NDArray[np.bool_]) -> ErringPorts:
        n, maintenance = len(frame.entities), self.gates.maintenance_mask(frame)
        at = self.errors.ports_above(self.limit / 2)
        at = at[at < n]
        at = at[~below_down_leaf[at] & ~maintenance[at] & (self.states.count[at] > LEARN)]
        at = at[np.fromiter((self._is_fabric(frame, i) for i in at.tolist()), bool, len(at))]
        watched = self.states.was_up[:n] & (self._fabric.groups(frame) >= 0)
        busy = np.fromiter((self._highest_level(frame, i) == "page" for i in at.tolist()), bool, len(at))
        return ErringPorts(at, self.errors.onsets(at, self.limit / 2), self.errors.confirmed(at) & busy, watched)

    def _port_finding(self, frame: Frame, i: int, troubles: list[PortTrouble]) -> list[Finding]:
        """Returns the finding of a port, if one is due; its worst problem comes first."""
        entity, time, worst = frame.entities[i], frame.time, troubles[0]
        level = min(worst.level, self._highest_level(frame, i), key=LEVELS.index)
        due = due_report(self.conditions, entity, time, min(t.since for t in troubles), level)
        if due is None:
            return []
        evidence = {k: v for t in reversed(troubles) for k, v in t.evidence.items()}
        if full := self.errors.saturated_counters(i, frame.values):
            evidence["full"] = full
        return [
            self.finding(
                *(time, entity, (min(due[0], time), due[1])),
                score=worst.score,
                summary=pager_title(entity, ", ".join(t.title for t in troubles)),
                signals=tuple(dict.fromkeys(t.signal for t in troubles)),
                clears="; ".join(t.clears for t in troubles),
                compared=worst.compared,
                **evidence,
            )
        ]

    def _highest_level(self, frame: Frame, i: int) -> Level:
        """Returns the highest level of a port: a fabric link holds up a job, another one at most its own host, and one
        without traffic for an hour none."""
        facts = frame.topology.attributes.get(frame.entities[i], {})
        if facts.get("wireless") is True or facts.get("role") == "unused":
            return "suspect"
        work = self.states.work.get(frame.entities[i])
        idle = work == IDLE if work else self.states.loads.is_idle(i, frame.time, _IDLE_FOR)
        return "page" if self._is_fabric(frame, i) and not idle else "ticket"

    def _is_fabric(self, frame: Frame, i: int) -> bool:
        """Returns whether a port is in a fabric: below a leaf or a rail; where the topology has neither, of a node with
        GPUs and as fast as no management port is."""
        facts = frame.topology.attributes.get(frame.entities[i], {})
        if facts.get("wireless") is True or facts.get("role") in ("unused", "management"):
            return False
        groups = self._fabric.groups(frame)
        if groups.max(initial=-1) >= 0:
            return bool(groups[i] >= 0)
        fast = i < len(self.errors.mbits) and self.errors.mbits[i] >= _FABRIC_MBITS
        return bool(fast and self._around.gpus_beside(frame.entities[i], frame.topology))
