"""Troubles of one port: flaps, link down, lost speed and errors, each with its level, title and suspected side.

Corruption is told from congestion as in CorrOpt (Zhuo et al., SIGCOMM 2017): damaged packets come whatever the load is,
packets without a buffer come with the load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.findings import Comparison
from detectors.base.gates import Gates
from detectors.base.state import State, notes
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
from detectors.link.error_counts import PACKETS, PHYSICAL, PortErrors
from detectors.link.port_states import PortStates, burst_onset
from pipeline.model.entity_names import short_duration, short_number
from pipeline.model.links import PEER
from pipeline.model.records import SECOND, Frame, Level

PACKET_COUNTERS = frozenset({"nic.crc_errors", "nic.phy_crc_errors", "nic.port_rx_errors"})
"""Error counters of whole packets: more traffic causes more of them whatever the reason."""
CORRUPTION, CONGESTION = 0.2, 0.5
"""Rank correlation of losses with load below which it is corruption, and above which congestion; chosen."""
_MINUTE = 60 * SECOND  # of one point of errors and load; chosen
_POINTS = 60  # kept: an hour
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

    def add_errors(self, port: str, packets: bool, count: float, time: int) -> None:
        """Adds errors of a port and follows it from now on. packets: whether they are of whole packets."""
        fresh = {"since": time, "newest": time, "now": [0.0, 0.0], "read": None, "points": []}
        known = self.followed.setdefault(port, fresh)
        known["now"][packets] += count
        known["newest"] = time

    def close_minutes(self, index: Mapping[str, int], traffic: Floats, time: int) -> None:
        """Adds a point for each minute that is over, and drops ports without errors for an hour. traffic: bytes."""
        for port in list(self.followed):
            known, i = self.followed[port], index.get(port, -1)
            if time - known["newest"] > _POINTS * _MINUTE or time < known["since"]:
                del self.followed[port]
            elif time - known["since"] >= _MINUTE and i >= 0 and np.isfinite(traffic[i]):
                bytes_read, before = float(traffic[i]), known["read"]
                seconds = (time - known["since"]) / SECOND
                if before is not None and bytes_read > before:
                    below, packets = known["now"]
                    load = (bytes_read - before) / seconds
                    # of packets the share that is lost: with more packets more are lost, whatever the reason
                    point = [below / seconds, packets / (bytes_read - before), load, below, packets]
                    known["points"] = [*known["points"], point][-_POINTS:]
                known |= {"since": time, "now": [0.0, 0.0], "read": bytes_read}

    def load_correlation(self, port: str, packets: bool) -> float | None:
        """Returns the rank correlation of error rate and traffic over the last hour; None: not known yet."""
        points = np.array(self.followed.get(port, {}).get("points", []))
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
    """When a port is in trouble, from the detector's configuration."""

    flaps: int
    flap_window: float
    flap_quiet: float
    drop: float
    healthy_ber: float
    errors: float


@dataclass(frozen=True, slots=True)
class PortRecords:
    """The state of all ports at one instant.

    far:    (N,) index of each port's far end (-1: not monitored).   leaps: port -> transitions that no link can make.
    shared: ports whose errors are those of a leaf or of the fabric.  slow: ports below the speed that they held.
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


@dataclass(frozen=True, slots=True)
class PortTrouble:
    """One trouble of a port. title: in few words.   side: which end of the link to blame."""

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
    """Returns the troubles of a port, the worst first."""
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
    """Yields a port that is down. While the node at the far end is silent, that node may be off or booting.

    A switch's port is read by another agent, whose silence shows nothing about the switch.
    """
    states, time = records.states, records.frame.time
    if not (since := int(states.down[cable.near])) or not states.was_up[cable.near]:
        return
    seconds = (time - since) / SECOND
    silent = cable.far >= 0 and states.is_long_silent(cable.far, time)
    silent = silent and records.frame.topology.ancestor_of_kind(cable.far_name, "node") is not None
    level: Level = "page" if seconds >= limits.drop and not silent else "suspect"
    side = blame_for_link_down(cable, records.modules)
    if silent:
        side = f"{cable.far_name} is silent, so its node may be off or booting"
    evidence = {"down_s": round(seconds, 1), "side": side, **records.modules.as_evidence(cable.near)}
    title = f"down for {short_duration(seconds)}" if seconds >= 1 else "down"
    yield PortTrouble(level, since, seconds / limits.drop, title, side, "the port is up again", "nic.state", evidence)


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
