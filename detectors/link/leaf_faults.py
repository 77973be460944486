"""Leaf switches, or the whole fabric, of which many ports fail together: one page for the switch, none for its ports.

A cable or a module fails alone. If more than a share of the ports of a switch go down within seconds, or begin to have
errors within minutes, the cause is the switch, its cooling or its supply; where several switches are affected, it is
what they share, or the agent that reads the counters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from detectors.base.state import State, notes
from detectors.base.streams import LEARN
from detectors.link.port_states import PortStates
from pipeline.model.records import SECOND, Level

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
        """Returns whether the state of a leaf's ports is due to the leaf: it is down, or came back a moment ago."""
        return leaf in self.fallen or time - self.back.get(leaf, -RETURN_TIME) <= RETURN_TIME

    def mark_all_up(self, time: int) -> None:
        """Ends all of them, as no port is down."""
        self._replace({}, time)

    def _replace(self, fallen: dict[str, int], time: int) -> None:
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
        together = np.bincount(groups, _down_together(down, states.down[:n], groups, total, limits.within), total)
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
        self._replace(fallen, time)
        return np.asarray(fell[groups])


def _first_down(down: Bools, since: Indices, groups: Groups, total: int) -> tuple[Indices, Indices]:
    """Returns by group its first port that is down, and when the first of them went down."""
    at = np.flatnonzero(down)
    first, oldest = np.full(total, len(down)), np.full(total, np.iinfo(np.int64).max)
    np.minimum.at(first, groups[at], at)
    np.minimum.at(oldest, groups[at], since[at])
    return first, oldest


def _down_together(down: Bools, since: Indices, groups: Groups, total: int, within: float) -> Bools:
    """Returns (N,) ports that went down within seconds of the newest of their leaf; the grid is as fine as that."""
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
    """Many ports of a leaf or of the fabric with errors together: `erring` of `ports`."""

    entity: str
    level: Level
    since: int
    erring: int
    ports: int


@dataclass
class ErrorStorms(State):
    """Storms that hold, and the ports whose errors are part of one."""

    standing: dict[str, int] = notes()  # leaf or fabric -> since when
    shared: dict[str, int] = notes()  # port -> when it was last part of a storm

    def find_storms(
        self, erring: ErringPorts, leaves: Groups, leaf_of: Callable[[int], str], names: Sequence[str], time: int
    ) -> list[ErrorStorm]:
        """Returns the storms of this instant: one of the fabric where several leaves are affected, else of one leaf."""
        self.shared = {port: at for port, at in self.shared.items() if 0 <= time - at <= _SHARED_FOR}
        if len(erring.at) <= STORM_SHARE * STORM_PORTS:
            self.standing = {}
            return []
        of_leaves = self._find_groups(erring, leaves, leaf_of)
        everywhere = self._find_groups(erring, np.zeros(len(leaves), np.int32), lambda i: FABRIC)
        if len(of_leaves) > 1 and not everywhere:
            everywhere = [(FABRIC, np.concatenate([at for _, at, _ in of_leaves]), sum(n for _, _, n in of_leaves))]
        if everywhere and len(np.unique(leaves[erring.at[everywhere[0][1]]])) == 1 and of_leaves:
            everywhere = []
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
