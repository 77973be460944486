"""Problems of one port, and of leaf switches or the whole fabric of which many ports fail together.

One port: flaps, link down, lost speed and errors, each with its level, title and suspected side. Corruption and
congestion are distinguished as in CorrOpt (Zhuo et al., SIGCOMM 2017): damaged packets do not depend on the load,
packets dropped for lack of a buffer do.

Many ports: one page for the switch, none for its ports. A cable or a module fails alone. If more than a share of the
ports of a switch go down within seconds, or begin to have errors within minutes, the cause is the switch, its cooling
or its supply; where several switches are affected, it is what they share, or the agent that reads the counters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.findings import Comparison
from detectors.base.gates import Gates
from detectors.base.state import State, notes
from detectors.base.streams import LEARN
from detectors.link.best_values import PortSpeeds
from detectors.link.cable_ends import (
    UNKNOWN_END,
    CableEnds,
    OpticalModules,
    blame_for_errors,
    blame_for_flaps,
    blame_for_link_down,
)
from detectors.link.counters import Floats
from detectors.link.error_counts import PACKETS, PHYSICAL, SLOW_LIMIT, PortErrors
from detectors.link.port_states import PortStates, burst_onset
from pipeline.model.entity_names import short_duration, short_number
from pipeline.model.links import PEER
from pipeline.model.records import SECOND, Frame, Level
from pipeline.model.topology import kind_of

PACKET_COUNTERS = frozenset({"nic.crc_errors", "nic.phy_crc_errors", "nic.port_rx_errors"})
"""Error counters of whole packets: more traffic causes more of them whatever the reason."""
CORRUPTION, CONGESTION = 0.2, 0.5
"""Rank correlation of losses with load below which it is corruption, and above which congestion; chosen."""
_MINUTE = 60 * SECOND  # of one point of errors and load; chosen
_POINTS = 60  # kept: an hour
_NUMBERS = 5  # of a point, all points of a port in one list: rates of both kinds of errors, load, errors of both kinds
_MIN_POINTS = 20  # with fewer a correlation of 0.5 comes by chance more than once in 50; chosen
_MIN_ERRORS = 5.0  # per minute on average: with fewer, minutes without errors correlate with the load. Chosen
_STEADY_LOAD = 0.05  # standard deviation, as a share of the mean, below which load shows nothing; chosen
_FEW_ERRORS = 100  # below it a title has the number of errors, from it on the rate; chosen
_ERROR_NAMES = {
    "nic.symbol_errors": "symbol errors",
    "nic.phy_symbol_errors": "symbol errors",
    "nic.crc_errors": "CRC errors",
    "nic.phy_crc_errors": "CRC errors",
    "nic.integrity_errors": "integrity errors",
    "nic.link_recoveries": "link recoveries",
    "nic.port_rx_errors": "receive errors",
}


@dataclass
class PacketLosses(State):
    """Errors and traffic per minute of the ports that have errors."""

    followed: dict[str, dict[str, Any]] = notes()
    closed: int = notes(
        int
    )  # when minutes were closed last: one minute for all ports, as healthy fabrics have errors on many

    def add_errors(self, port: str, packets: bool, count: float, time: int) -> None:
        """Adds errors of a port and follows it from now on. packets: whether they are of whole packets."""
        fresh = {"since": time, "newest": time, "now": [0.0, 0.0], "read": None, "points": []}
        known = self.followed.setdefault(port, fresh)
        known["now"][packets] += count
        known["newest"] = time

    def close_minutes(self, index: Mapping[str, int], traffic: Floats, time: int) -> None:
        """Adds a point for each minute that is over, and drops ports without errors for an hour. traffic: bytes."""
        if 0 <= time - self.closed < _MINUTE:
            return
        self.closed, read = time, traffic.tolist()
        for port in list(self.followed):
            known, i = self.followed[port], index.get(port, -1)
            if time - known["newest"] > _POINTS * _MINUTE or time < known["since"]:
                del self.followed[port]
            elif time > known["since"] and i >= 0 and math.isfinite(read[i]):
                bytes_read, before = read[i], known["read"]
                seconds = (time - known["since"]) / SECOND
                if before is not None and bytes_read > before:
                    below, packets = known["now"]
                    load = (bytes_read - before) / seconds
                    # of packets the share that is lost: with more packets more are lost, whatever the reason
                    known["points"] += (below / seconds, packets / (bytes_read - before), load, below, packets)
                    del known["points"][: -_POINTS * _NUMBERS]
                known["since"], known["now"], known["read"] = time, [0.0, 0.0], bytes_read

    def load_correlation(self, port: str, packets: bool) -> float | None:
        """Returns the rank correlation of error rate and traffic over the last hour; None: not known yet."""
        points = np.array(self.followed.get(port, {}).get("points", [])).reshape(-1, _NUMBERS)
        if len(points) < _MIN_POINTS or points[:, 3 + int(packets)].mean() < _MIN_ERRORS:
            return None
        errors, load = points[:, int(packets)], points[:, 2]
        if errors.min() == errors.max() or load.std() < _STEADY_LOAD * load.mean():
            return None
        return float(np.corrcoef(_ranks(errors), _ranks(load))[0, 1])


def _ranks(values: Floats) -> Floats:
    """Returns ranks from 0; equal values share their mean rank (Spearman)."""
    _, position, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return np.asarray((last - (count + 1) / 2)[position])


@dataclass(frozen=True, slots=True)
class PortLimits:
    """Limits from the configuration of the detector."""

    flaps: int
    flap_window: float
    flap_quiet: float
    drop: float
    busy_drop: float
    healthy_ber: float
    errors: float


@dataclass(frozen=True, slots=True)
class PortRecords:
    """The state of all ports at one instant.

    far:    (N,) index of each port's far end (-1: not monitored).   leaps: port -> transitions that no link can make.
    shared: ports whose errors are those of a leaf or of the fabric.  slow: ports below the speed that they held.
    work:   port that is down -> what it did before: one of BUSY, IDLE and UNKNOWN_WORK.
    """

    frame: Frame
    states: PortStates
    speeds: PortSpeeds
    errors: PortErrors
    modules: OpticalModules
    losses: PacketLosses
    gates: Gates
    leaps: Mapping[str, list[float]]
    far: NDArray[np.int64]
    shared: frozenset[int]
    slow: frozenset[int]
    work: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PortTrouble:
    """One problem of a port. title: in few words.   side: which end of the link to blame."""

    level: Level
    since: int
    score: float
    title: str
    side: str
    clears: str
    signal: str
    evidence: Mapping[str, Any]
    compared: Comparison | None = None


def find_troubles(records: PortRecords, limits: PortLimits, i: int) -> list[PortTrouble]:
    """Returns the problems of a port, worst first."""
    cable = _cable_of(records, i)
    kinds = (_flap_trouble, _down_trouble, _speed_trouble, _error_trouble)
    found = [trouble for kind in kinds for trouble in kind(records, limits, cable)]
    return sorted(found, key=lambda t: (t.level != "page", t.level != "ticket", -t.score))


def _cable_of(records: PortRecords, i: int) -> CableEnds:
    frame, far = records.frame, int(records.far[i])
    name = frame.topology.attributes.get(frame.entities[i], {}).get(PEER)
    return CableEnds(i, far, frame.entities[i], name if isinstance(name, str) else "the far end")


def _flap_trouble(records: PortRecords, limits: PortLimits, cable: CableEnds) -> Iterator[PortTrouble]:
    time = records.frame.time
    times = records.states.recent_flaps(cable.near_name, time, limits.flap_window, limits.flap_quiet)
    if times:
        level: Level = "page" if len(times) >= limits.flaps else "suspect"
        if level == "page" and records.states.idle_flaps.get(cable.near_name) == times[-1]:
            level = "ticket"  # no job has lost work, though one may have begun since
        over = max((times[-1] - times[0]) / SECOND, 1.0)
        leap = records.leaps.get(cable.near_name)
        title = "1 flap" if len(times) == 1 else f"{len(times)} flaps in {short_duration(over)}"
        title += " or more" if leap else ""
        side = blame_for_flaps(cable, records.modules)
        evidence = {"flaps": len(times), "side": side, **records.modules.as_evidence(cable.near)}
        evidence |= {"leapt_by": leap[0]} if leap else {}
        clears = f"no flap for {limits.flap_quiet / 60:.0f} min"
        since, signal = burst_onset(times, limits.flap_quiet), "nic.carrier_changes"
        yield PortTrouble(level, since, float(len(times)), title, side, clears, signal, evidence)


def _down_trouble(records: PortRecords, limits: PortLimits, cable: CableEnds) -> Iterator[PortTrouble]:
    """Yields a port that is down; the sooner a page, the surer it is that a job waits for it.

    While the node at the far end is silent, that node may be off or booting; before a port pages early, its far end
    must have been read since. A switch's port is read by another agent, whose silence shows nothing about the switch.
    """
    states, time = records.states, records.frame.time
    if not (since := int(states.down[cable.near])) or not states.was_up[cable.near]:
        return
    seconds, work = (time - since) / SECOND, records.work.get(cable.near_name, UNKNOWN_WORK)
    hosted = cable.far >= 0 and records.frame.topology.ancestor_of_kind(cable.far_name, "node") is not None
    silent = hosted and states.is_long_silent(cable.far, time)
    early = work == BUSY and (not hosted or states.heard_since(cable.far, since))
    level: Level = "suspect"
    if seconds >= (limits.busy_drop if early else limits.drop) and not silent:
        level = "ticket" if work == IDLE else "page"
    side = blame_for_link_down(cable, records.modules)
    if silent:
        side = f"{cable.far_name} is silent, so its node may be off or booting"
    evidence = {"down_s": round(seconds, 1), "before": work, "side": side, **records.modules.as_evidence(cable.near)}
    title = f"down for {short_duration(seconds)}" if seconds >= 1 else "down"
    title += " under load" if work == BUSY else ""
    yield PortTrouble(level, since, seconds / limits.drop, title, side, "the port is up again", "nic.state", evidence)


BUSY, IDLE, UNKNOWN_WORK = "carried traffic", "carried no traffic", "traffic not known"


def _speed_trouble(records: PortRecords, limits: PortLimits, cable: CableEnds) -> Iterator[PortTrouble]:
    """Yields a port below the speed that it held; a ticket where software changed within a day, which may cause it."""
    speeds, i = records.speeds, cable.near
    if i not in records.slow:
        return
    now, before = float(speeds.newest[i]), float(speeds.best[i])
    changed = records.gates.last_change(cable.near_name, records.frame.topology)
    level: Level = "ticket" if changed is not None and changed >= speeds.last_at_best(i) else "page"
    title = f"runs at {now / 1000:g} Gb/s, was {before / 1000:g}"
    compared = Comparison(now, before, None, "own past", 0, 1 - now / before, "share")
    side, clears = f"{UNKNOWN_END}: module, cable or port", "the port is back at its speed"
    evidence = {"side": side, **records.modules.as_evidence(i)}
    yield PortTrouble(level, speeds.fell_at(i), before / now, title, side, clears, "nic.speed", evidence, compared)


def _error_trouble(records: PortRecords, limits: PortLimits, cable: CableEnds) -> Iterator[PortTrouble]:
    """Yields the errors of the counter with the highest sum, those of the physical layer first."""
    errors, port = records.errors, cable.near
    if port in records.shared:
        return
    sums = errors.sums_by_counter(port)
    suspect = limits.errors / 2
    if not sums or max(sums.values()) <= suspect:
        yield from _decay_trouble(records, limits, cable)
        return
    signal = max(sums, key=lambda s: (s in PHYSICAL, sums[s]) if sums[s] > suspect else (False, 0))
    counter = errors.counters[signal]
    since, count = int(counter.since[port]), int(counter.total[port])
    correlation = records.losses.load_correlation(cable.near_name, signal in PACKET_COUNTERS)
    level, side = _level_and_side(records, limits, cable, signal, sums[signal], correlation)
    seconds = max((records.frame.time - since) / SECOND, 1.0)
    rate, bits = count / seconds * 3600, float(errors.bits_per_second(np.array([port]))[0])
    usual = bits * limits.healthy_ber * 3600
    cohort = f"healthy links: BER below {limits.healthy_ber:g}"
    compared = Comparison(rate, usual, None, cohort, 0, rate - usual, "errors/h")
    evidence: dict[str, Any] = {s: int(errors.counters[s].total[port]) for s in sums}
    bunched = round(counter.moments.overdispersion(usual / 360), 3)
    evidence |= {"side": side, "bunched": bunched, "tied_to_load": correlation}
    evidence |= records.modules.as_evidence(port)
    amount = f"{count} {_ERROR_NAMES[signal]} in {short_duration(seconds)}"
    title = amount if count < _FEW_ERRORS else f"{short_number(rate)} {_ERROR_NAMES[signal]}/h"
    title += " from congestion" if side.startswith("congestion") else ""
    clears = "no more errors than a healthy link has, for about 10 min"
    score = sums[signal] / limits.errors
    yield PortTrouble(level, since, score, title, side, clears, signal, evidence, compared)


def _decay_trouble(records: PortRecords, limits: PortLimits, cable: CableEnds) -> Iterator[PortTrouble]:
    """Yields a port with few errors, but in more minutes than chance explains: it slows no job yet."""
    errors, port = records.errors, cable.near
    for signal in (s for s, c in errors.counters.items() if s in PHYSICAL and port < len(c.slow)):
        counter = errors.counters[signal]
        if counter.slow[port] > SLOW_LIMIT:
            since, count = int(counter.slow_since[port]), int(counter.slow_total[port])
            seconds = max((records.frame.time - since) / SECOND, 1.0)
            side = blame_for_errors(cable, records.modules, _far_end_has_errors(records, limits, cable))
            bits = float(errors.bits_per_second(np.array([port]))[0])
            rate, usual = count / seconds / bits, limits.healthy_ber
            compared = Comparison(rate, usual, None, f"healthy links: BER below {usual:g}", 0, rate - usual, "BER")
            title = f"{count:,} {_ERROR_NAMES[signal]} in {short_duration(seconds)}, BER {rate:.0e}"
            evidence = {"side": side, signal: count, **records.modules.as_evidence(port)}
            clears = "a few minutes with errors in an hour at most"
            score = float(counter.slow[port]) / SLOW_LIMIT
            yield PortTrouble("ticket", since, score, title, side, clears, signal, evidence, compared)
            return


def _level_and_side(
    records: PortRecords, limits: PortLimits, cable: CableEnds, signal: str, total: float, correlation: float | None
) -> tuple[Level, str]:
    """Returns the level of errors and the side to blame. total: of the CUSUM."""
    if signal in PACKETS and correlation is not None and correlation > CONGESTION:
        return "ticket", f"congestion: errors follow the load (rank correlation {correlation:.2f})"
    far_has_errors = _far_end_has_errors(records, limits, cable)
    backed = bool(far_has_errors) or records.modules.is_hot(cable.near)
    level: Level = "page" if total > limits.errors or backed else "suspect"
    if signal in PHYSICAL or (correlation is not None and correlation < CORRUPTION):
        return level, blame_for_errors(cable, records.modules, far_has_errors)
    return "suspect", "unknown whether packets were damaged or dropped for lack of buffers"


def _far_end_has_errors(records: PortRecords, limits: PortLimits, cable: CableEnds) -> bool | None:
    """Returns whether the receiver at the far end has errors too; None: it is not monitored."""
    if cable.far < 0:
        return None
    found = [v for s, v in records.errors.sums_by_counter(cable.far).items() if s in PHYSICAL]
    return max(found, default=0.0) > limits.errors / 2


FABRIC = "fabric:all"
RETURN_TIME = 120 * SECOND
"""us after a leaf is back in which its last ports train their links, which is the leaf's trouble. Chosen."""
STORM_SHARE = 0.3  # of the monitored ports; chosen: ten of a leaf's 32 ports never fail within minutes
STORM_PORTS = 8  # fewest ports of which a share counts; chosen
STORM_WITHIN = 300 * SECOND  # from the first onset to the last; chosen: a BER of 1e-13 is suspected within it
_SHARED_FOR = 600 * SECOND  # us in which errors still count against a port that has none any more; chosen: as the Desk
Indices = NDArray[np.int64]
Bools = NDArray[np.bool_]
Groups = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LeafLimits:
    """When a leaf is down: more than `share` of at least `ports` ports went down within `within` s."""

    ports: int
    share: float
    within: float


@dataclass
class DownLeaves(State):
    """Leaves of which more than a share of the ports are down and went down within seconds of each other."""

    fallen: dict[str, int] = notes()  # leaf -> since when
    back: dict[str, int] = notes()  # leaf that was down -> when it came back, with some ports before others
    ports: dict[str, tuple[int, int]] = field(default_factory=dict, init=False)  # leaf -> (ports down, all its ports)

    def explains_port(self, leaf: str, time: int) -> bool:
        """Returns whether the state of a leaf's ports is due to the leaf: it is down, or came back just now."""
        return leaf in self.fallen or time - self.back.get(leaf, -RETURN_TIME) <= RETURN_TIME

    def replace_fallen(self, fallen: dict[str, int], time: int) -> None:
        """Sets the leaves that are down now, and notes which of the former ones are back."""
        if self.fallen or self.back:
            self.back |= {leaf: time for leaf in self.fallen if leaf not in fallen}
            self.back = {leaf: at for leaf, at in self.back.items() if 0 <= time - at <= RETURN_TIME}
        self.fallen = fallen
        if not fallen:
            self.ports = {}

    def find_ports_below(
        self, states: PortStates, groups: Groups, leaf_of: Callable[[int], str], limits: LeafLimits, time: int
    ) -> Bools:
        """Returns (N,) ports below a leaf that is down. groups: (N,) number of each port's leaf, -1 without one."""
        n, groups = len(groups), groups + 1
        down = (states.down[:n] > 0) & states.was_up[:n] & (states.count[:n] > LEARN) & (groups > 0)
        total = int(groups.max()) + 1
        size = np.bincount(groups, states.was_up[:n] & (groups > 0), total)
        share = np.bincount(groups, down, total) / np.maximum(size, 1)
        within = max(limits.within, float(np.max(states.step[:n], where=down, initial=0.0)))
        together = np.bincount(groups, _down_together(down, states.down[:n], groups, total, within), total)
        fell = np.zeros(total, np.bool_)
        fallen: dict[str, int] = {}
        self.ports = {}
        first, since = _first_down(down, states.down[:n], groups, total)
        below, lost = np.bincount(groups, minlength=total), np.bincount(groups, states.down[:n] > 0, total)
        for group in np.flatnonzero((share > limits.share) & (size >= limits.ports)).tolist():
            leaf = leaf_of(int(first[group]))
            if leaf in self.fallen or together[group] > limits.share * size[group]:
                fallen[leaf] = self.fallen.get(leaf, int(since[group]))
                self.ports[leaf] = int(lost[group]), int(below[group])
                fell[group] = True
        self.replace_fallen(fallen, time)
        return np.asarray(fell[groups])


def _first_down(down: Bools, since: Indices, groups: Groups, total: int) -> tuple[Indices, Indices]:
    """Returns by group its first port that is down, and when the first of them went down."""
    at = np.flatnonzero(down)
    first, oldest = np.full(total, len(down)), np.full(total, np.iinfo(np.int64).max)
    np.minimum.at(first, groups[at], at)
    np.minimum.at(oldest, groups[at], since[at])
    return first, oldest


def _down_together(down: Bools, since: Indices, groups: Groups, total: int, within: float) -> Bools:
    """Returns (N,) ports that went down within seconds of the newest of their leaf, or within a poll of the slowest."""
    newest = np.zeros(total, np.int64)
    np.maximum.at(newest, groups, np.where(down, since, 0))
    return np.asarray(down & (since >= newest[groups] - within * SECOND))


@dataclass(frozen=True, slots=True)
class ErringPorts:
    """Ports with errors now: indices, onsets, and whether the errors are confirmed.

    watched: (N,) ports of a fabric that were ever up.
    """

    at: Indices
    since: Indices
    confirmed: Bools
    watched: Bools


@dataclass(frozen=True, slots=True)
class ErrorStorm:
    """Many ports of a leaf, a rail or the fabric with errors together: `erring` of `ports`."""

    entity: str
    level: Level
    since: int
    erring: int
    ports: int


@dataclass
class ErrorStorms(State):
    """Storms that hold, and the ports whose errors are part of one."""

    standing: dict[str, int] = notes()  # leaf, rail or fabric -> since when
    shared: dict[str, int] = notes()  # port -> when it was last part of a storm

    def find_storms(
        self,
        erring: ErringPorts,
        leaves: Groups,
        above: tuple[Callable[[int], str], Callable[[int], str]],
        names: Sequence[str],
        time: int,
    ) -> list[ErrorStorm]:
        """Returns the storms of this instant: of one leaf or, where several are affected, of their rail or the fabric.

        above: give the leaf of a port, and its rail, FABRIC where none is known.
        """
        leaf_of, rail_of = above
        self.shared = {port: at for port, at in self.shared.items() if 0 <= time - at <= _SHARED_FOR}
        if len(erring.at) <= STORM_SHARE * STORM_PORTS:
            self.standing = {}
            return []
        of_leaves = self._find_groups(erring, leaves, leaf_of)
        wide = next((e for e in self.standing if kind_of(e) != "leaf"), FABRIC)
        everywhere = self._find_groups(erring, np.zeros(len(leaves), np.int32), lambda i: wide)
        if len(of_leaves) > 1 and not everywhere:
            everywhere = [(FABRIC, np.concatenate([at for _, at, _ in of_leaves]), sum(n for _, _, n in of_leaves))]
        if everywhere and len(np.unique(leaves[erring.at[everywhere[0][1]]])) == 1 and of_leaves:
            everywhere = []
        for _, members, size in everywhere:
            rails = {rail_of(i) for i in erring.at[members].tolist()}
            everywhere = [(rails.pop() if len(rails) == 1 else FABRIC, members, size)]
        found, before = [], self.standing
        self.standing = {}
        for entity, members, size in everywhere or of_leaves:
            at = erring.at[members]
            self.standing[entity] = before.get(entity, int(erring.since[members].min()))
            self.shared |= {names[i]: time for i in at.tolist()}
            level: Level = "page" if erring.confirmed[members].any() else "suspect"
            found.append(ErrorStorm(entity, level, self.standing[entity], len(at), size))
        return found

    def _find_groups(
        self, erring: ErringPorts, groups: Groups, name: Callable[[int], str]
    ) -> list[tuple[str, Indices, int]]:
        """Returns (entity, positions in `erring`, watched ports) where more than a share began within minutes."""
        mine, groups = groups[erring.at] + 1, groups + 1
        size = np.bincount(groups[erring.watched], minlength=int(groups.max()) + 1)
        many = np.bincount(mine, minlength=len(size)) > STORM_SHARE * size
        found = []
        for group in np.flatnonzero(many & (size >= STORM_PORTS) & (np.arange(len(size)) > 0)).tolist():
            members = np.flatnonzero(mine == group)
            entity, since = name(int(erring.at[members[0]])), erring.since[members]
            together = np.count_nonzero(since >= since.max() - STORM_WITHIN)
            if entity in self.standing or together > STORM_SHARE * size[group]:
                found.append((entity, members, int(size[group])))
        return found
