"""What is wrong with one port, in the words of a finding, and how much that matters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from detectors.base.findings import Compared
from detectors.base.gates import Gates
from detectors.link import ends as link_ends
from detectors.link.cause import CONGESTION, CORRUPTION, Losses
from detectors.link.ends import Link, Modules
from detectors.link.errors import PACKETS, PHYSICAL, Errors
from detectors.link.speeds import Speeds
from detectors.link.state import PortStates, began
from pipeline.links import PEER
from pipeline.records import SECOND, Frame, Level

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
    compared: Compared | None = None


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
    silent = silent and seen.frame.topology.above_of_kind(link.far_name, "node") is not None
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
    changed = judge.gates.changed(link.near_name, seen.frame.topology)
    level: Level = "ticket" if changed is not None and changed >= judge.speeds.whole(i) else "page"
    text = f"runs at {now / 1000:g} Gb/s, was at {before / 1000:g}"
    compared = Compared(now, before, None, "own past", 0, 1 - now / before, "share")
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
    compared = Compared(
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
