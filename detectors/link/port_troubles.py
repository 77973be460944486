"""What is wrong with one port, in the words of a finding, and how much that matters.

Corruption told from congestion: damaged packets come whatever the load is, packets without room with the load.

The idea is CorrOpt's (Zhuo et al., SIGCOMM 2017): corruption is stable and not tied to utilisation. The cut-offs are
chosen. Only ports whose packets are lost are followed, and for as long as that matters.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from detectors.base.findings import Comparison
from detectors.base.gates import Gates
from detectors.link import cable_ends as link_ends
from detectors.link.best_values import Speeds
from detectors.link.counters import Floats
from detectors.link.cable_ends import Link
from detectors.link.cable_ends import Modules
from detectors.link.error_counts import PACKETS, PHYSICAL, Errors
from detectors.link.port_states import PortStates, began
from pipeline.model.links import PEER
from pipeline.model.records import SECOND, Frame, Level

CORRUPTION, CONGESTION = 0.2, 0.5
"""Rank correlation of losses with utilisation below which it is corruption, and above which congestion; chosen."""
_WINDOW = 60 * SECOND  # of one point; chosen
_WINDOWS = 60  # points: an hour
_LEAST = 20  # points below which a correlation of 0.5 comes by chance more than once in 50; their number is chosen
_ENOUGH = 5.0  # errors a minute on the mean: with fewer, minutes with none tie the rate to the load. Chosen
_STEADY = 0.05  # load that varies by less than this share of its mean tells nothing; chosen


class Losses:
    """Errors and traffic per minute of the ports that have errors."""

    def __init__(self) -> None:
        self.followed: dict[str, dict[str, Any]] = {}

    def err(self, port: str, packets: bool, count: float, time: int) -> None:
        """Takes errors of a port, of whole packets or of what is below them, and follows it from now on."""
        fresh = {"since": time, "newest": time, "now": [0.0, 0.0], "read": None, "points": []}
        known = self.followed.setdefault(port, fresh)
        known["now"][packets] += count
        known["newest"] = time

    def take(self, places: Mapping[str, int], traffic: Floats, time: int) -> None:
        """Closes the minutes that are over; `traffic` counts bytes. Who has been quiet for an hour is forgotten."""
        for port in list(self.followed):
            known, i = self.followed[port], places.get(port, -1)
            if time - known["newest"] > _WINDOWS * _WINDOW or time < known["since"]:
                del self.followed[port]
            elif time - known["since"] >= _WINDOW and i >= 0 and np.isfinite(traffic[i]):
                bytes_read, before = float(traffic[i]), known["read"]
                seconds = (time - known["since"]) / SECOND
                if before is not None and bytes_read > before:
                    below, packets = known["now"]
                    load = (bytes_read - before) / seconds
                    # of packets the share that is lost: with more of them more are, whatever the reason
                    point = [below / seconds, packets / (bytes_read - before), load, below, packets]
                    known["points"] = [*known["points"], point][-_WINDOWS:]
                known |= {"since": time, "now": [0.0, 0.0], "read": bytes_read}

    def tied(self, port: str, packets: bool) -> float | None:
        """Rank correlation of the error rate of a port with its traffic over the last hour; None: not told yet."""
        points = np.array(self.followed.get(port, {}).get("points", []))
        if len(points) < _LEAST or points[:, 3 + int(packets)].mean() < _ENOUGH:
            return None
        errors, load = points[:, int(packets)], points[:, 2]
        if errors.min() == errors.max() or load.std() < _STEADY * load.mean():
            return None
        return float(np.corrcoef(_ranks(errors), _ranks(load))[0, 1])

    def snapshot(self) -> dict[str, Any]:
        return copy.deepcopy(self.followed)

    def restore(self, state: Mapping[str, Any]) -> None:
        self.followed = copy.deepcopy(dict(state))


def _ranks(values: Floats) -> Floats:
    """Ranks from 0, ties share their mean (Spearman)."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return np.asarray((last - (count + 1) / 2)[place])


PACKET_COUNTERS = frozenset({"nic.crc_errors", "nic.phy_crc_errors", "nic.port_rx_errors"})
"""Error counters that count whole packets, so that more traffic makes more of them whatever the reason."""


class Judge(Protocol):
    """What is asked of the detector: its configuration and its state."""

    flaps: int
    flap_window: float
    flap_quiet: float
    drop: float
    healthy_ber: float
    limit: float
    states: PortStates
    speeds: Speeds
    gates: Gates
    leaps: dict[str, list[float]]
    errors: Errors
    modules: Modules
    losses: Losses


@dataclass(frozen=True, slots=True)
class Seen:
    """One instant: who judges, its frame, and the places of the far ends (-1: not watched).

    shared: ports whose errors are those of a leaf or of the fabric.  slow: ports below the speed that they held.
    """

    judge: Judge
    frame: Frame
    far: NDArray[np.int64]
    shared: frozenset[int] = frozenset()
    slow: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Trouble:
    """One trouble of a port. side: which end of the link is to blame, in words."""

    level: Level
    since: int
    score: float
    text: str
    side: str
    clears: str
    signal: str
    evidence: Mapping[str, Any]
    compared: Comparison | None = None


def troubles(seen: Seen, i: int) -> list[Trouble]:
    """What is wrong with the port at place `i`, the worst first; errors of several counters are each told."""
    link = _link(seen, i)
    found = [*_flapping(seen, link), *_down(seen, link), *_slow(seen, link), *_erring(seen, link)]
    return sorted(found, key=lambda t: (t.level != "page", t.level != "ticket", -t.score))


def _link(seen: Seen, i: int) -> Link:
    frame, far = seen.frame, int(seen.far[i])
    name = frame.topology.attributes.get(frame.entities[i], {}).get(PEER)
    return Link(i, far, frame.entities[i], name if isinstance(name, str) else "the far end")


def _flapping(seen: Seen, link: Link) -> Iterator[Trouble]:
    judge, time = seen.judge, seen.frame.time
    times = judge.states.burst(link.near_name, time, judge.flap_window, judge.flap_quiet)
    if times:
        level: Level = "page" if len(times) >= judge.flaps else "suspect"
        over = f"within {_long(max((times[-1] - times[0]) / SECOND, 1.0))}"
        text = "went down and up again " + ("once" if len(times) == 1 else f"{len(times)} times {over}")
        leap = judge.leaps.get(link.near_name)
        text += f" at least: its counter leapt by {leap[0]:g} in {_long(leap[1])}, more than it can" if leap else ""
        side = link_ends.of_flaps(link, judge.modules)
        more = {"flaps": len(times), "side": side, **judge.modules.told(link.near)}
        more |= {"leapt_by": leap[0]} if leap else {}
        clears = f"no flap for {judge.flap_quiet / 60:.0f} min"
        since, signal = began(times, judge.flap_quiet), "nic.carrier_changes"
        yield Trouble(level, since, float(len(times)), text, side, clears, signal, more)


def _down(seen: Seen, link: Link) -> Iterator[Trouble]:
    """Down for long; but while the node at the far end is silent, it may be that which is off or boots.

    A switch's port is read by another agent, whose silence says nothing of the switch.
    """
    judge, time = seen.judge, seen.frame.time
    if not (since := int(judge.states.down[link.near])) or not judge.states.was_up[link.near]:
        return
    seconds = (time - since) / SECOND
    silent = link.far >= 0 and judge.states.away(link.far, time)
    silent = silent and seen.frame.topology.ancestor_of_kind(link.far_name, "node") is not None
    level: Level = "page" if seconds >= judge.drop and not silent else "suspect"
    side = link_ends.of_loss(link, judge.modules)
    if silent:
        side = f"{link.far_name} is silent, so its node may be off or booting"
    more = {"down_s": round(seconds, 1), "side": side, **judge.modules.told(link.near)}
    text = f"has been down for {_long(seconds)}" if seconds >= 1 else "went down"
    yield Trouble(level, since, seconds / judge.drop, text, side, "the port is up again", "nic.state", more)


def _slow(seen: Seen, link: Link) -> Iterator[Trouble]:
    """Trained to less than it held; a ticket where new software or firmware of the last day may want it so."""
    judge, i = seen.judge, link.near
    if i not in seen.slow:
        return
    now, before = float(judge.speeds.newest[i]), float(judge.speeds.best[i])
    changed = judge.gates.last_change(link.near_name, seen.frame.topology)
    level: Level = "ticket" if changed is not None and changed >= judge.speeds.whole(i) else "page"
    text = f"runs at {now / 1000:g} Gb/s, was at {before / 1000:g}"
    compared = Comparison(now, before, None, "own past", 0, 1 - now / before, "share")
    side, clears = "cannot tell which end: module, cable or port", "the port is back at its speed"
    more = {"side": side, **judge.modules.told(i)}
    yield Trouble(level, judge.speeds.since(i), before / now, text, side, clears, "nic.speed", more, compared)


def _erring(seen: Seen, link: Link) -> Iterator[Trouble]:
    """Errors of the counter that tells most."""
    judge = seen.judge
    if link.near in seen.shared:
        return
    strength = judge.errors.strength(link.near)
    if not strength or max(strength.values()) <= judge.limit / 2:
        return
    signal = max(strength, key=lambda s: (s in PHYSICAL, strength[s]) if strength[s] > judge.limit / 2 else (False, 0))
    counted = judge.errors.counted[signal]
    since, count = int(counted.since[link.near]), int(counted.total[link.near])
    far_errs = _far_errs(judge, link)
    tied = judge.losses.tied(link.near_name, signal in PACKET_COUNTERS)
    level, side = _verdict(judge, link, signal, strength[signal], far_errs, tied)
    seconds = max((seen.frame.time - since) / SECOND, 1.0)
    rate, bits = count / seconds, float(judge.errors.bits(np.array([link.near]))[0])
    text = f"has {count} {signal.removeprefix('nic.').replace('_', ' ')} in {_long(seconds)}, {rate * 3600:.0f} an hour"
    usual = bits * judge.healthy_ber * 3600
    compared = Comparison(
        rate * 3600, usual, None, f"sound links: BER below {judge.healthy_ber:g}", 0, rate * 3600 - usual, "errors/h"
    )
    more: dict[str, Any] = {s: int(judge.errors.counted[s].total[link.near]) for s in strength}
    more = {
        **more,
        "side": side,
        "bunched": round(counted.cohort.bunched(usual / 360), 3),
        "tied_to_load": tied,
    }
    more |= judge.modules.told(link.near)
    clears = "so few errors that a sound link would have them, for about 10 min"
    yield Trouble(level, since, strength[signal] / judge.limit, text, side, clears, signal, more, compared)


def _verdict(
    judge: Judge, link: Link, signal: str, strength: float, far_errs: bool | None, tied: float | None
) -> tuple[Level, str]:
    """How loud, and who is to blame."""
    if signal in PACKETS and tied is not None and tied > CONGESTION:
        return "ticket", f"congestion: errors rise and fall with the load (rank correlation {tied:.2f})"
    backed = bool(far_errs) or judge.modules.hot(link.near)
    level: Level = "page" if strength > judge.limit or backed else "suspect"
    if signal in PHYSICAL:
        return level, link_ends.of_errors(link, judge.modules, far_errs)
    if tied is not None and tied < CORRUPTION:
        return level, link_ends.of_errors(link, judge.modules, far_errs)
    return "suspect", "cannot tell yet whether they are damaged or found no room"


def _far_errs(judge: Judge, link: Link) -> bool | None:
    """Whether the receiver at the far end sees errors, too; None: it is not watched."""
    if link.far < 0:
        return None
    said = [v for s, v in judge.errors.strength(link.far).items() if s in PHYSICAL]
    return max(said, default=0.0) > judge.limit / 2


def _long(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )
