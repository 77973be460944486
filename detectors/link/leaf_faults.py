"""Leaves and fabrics of which so many ports begin to err within minutes that it is not the ports: one page, not many.

A cable or a module fails alone. What makes a third of the ports of a switch err at once is the switch, its cooling or
supply; where it is several switches, what they share, or whoever reads the counters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detectors.base.streams import LEARN
from detectors.link.port_states import PortStates
from pipeline.model.records import SECOND, Level

FABRIC = "fabric:all"
SHARE = 0.3  # of the ports that are watched; chosen: of a leaf's 32 ports ten never fail within minutes
LEAST = 8  # ports below which a share of them says little; chosen
WITHIN = 300 * SECOND  # between the onsets of the first and the last; chosen: a BER of 1e-13 is suspected within it
RETURNS = 120 * SECOND
"""After a leaf is back its last ports train their links; they are its own trouble until then. Chosen."""
_AFTER = 600 * SECOND  # so long errors speak against a port that errs no more; chosen, the Desk's quiet
Places = NDArray[np.int64]
Bools = NDArray[np.bool_]
Groups = NDArray[np.int32]


class Leaves:
    """Leaves that fell: more than a share of their ports are down, and went down within seconds of each other."""

    def __init__(self) -> None:
        self.fallen: dict[str, int] = {}  # leaf -> since when
        self.ports: dict[str, tuple[int, int]] = {}  # leaf that has fallen -> (ports that are down, all below it)
        self.back: dict[str, int] = {}  # leaf that had fallen -> when it was back, with some ports before others

    def excuses(self, leaf: str, time: int) -> bool:
        """Whether what a port of a leaf does now is the leaf's: it has fallen, or is only just back."""
        return leaf in self.fallen or time - self.back.get(leaf, -RETURNS) <= RETURNS

    def stand(self, time: int) -> None:
        """No port is down."""
        self._renew({}, time)

    def _renew(self, standing: dict[str, int], time: int) -> None:
        if self.fallen or self.back:
            self.back |= {leaf: time for leaf in self.fallen if leaf not in standing}
            self.back = {leaf: at for leaf, at in self.back.items() if 0 <= time - at <= RETURNS}
        self.fallen = standing
        if not standing:
            self.ports = {}

    def judge(
        self,
        states: PortStates,
        groups: NDArray[np.int32],
        leaf_of: Callable[[int], str],
        least: int,
        share: float,
        within: float,
        time: int,
    ) -> NDArray[np.bool_]:
        """(N,) ports below a leaf that fell; `groups` numbers ports by their leaf, -1 without one."""
        n, groups = len(groups), groups + 1
        down = (states.down[:n] > 0) & states.was_up[:n] & (states.count[:n] > LEARN) & (groups > 0)
        total = int(groups.max()) + 1
        size = np.bincount(groups, states.was_up[:n] & (groups > 0), total)
        part = np.bincount(groups, down, total) / np.maximum(size, 1)
        together = np.bincount(groups, _together(down, states.down[:n], groups, total, within), total)
        fell = np.zeros(total, np.bool_)
        standing: dict[str, int] = {}
        self.ports = {}
        first, since = _first(down, states.down[:n], groups, total)
        below, lost = np.bincount(groups, minlength=total), np.bincount(groups, states.down[:n] > 0, total)
        for group in np.flatnonzero((part > share) & (size >= least)).tolist():
            leaf = leaf_of(int(first[group]))
            if leaf in self.fallen or together[group] > share * size[group]:
                standing[leaf] = self.fallen.get(leaf, int(since[group]))
                self.ports[leaf] = int(lost[group]), int(below[group])
                fell[group] = True
        self._renew(standing, time)
        return np.asarray(fell[groups])

    def snapshot(self) -> dict[str, dict[str, int]]:
        return {"fallen": dict(self.fallen), "back": dict(self.back)}

    def restore(self, state: Mapping[str, Mapping[str, int]]) -> None:
        self.fallen, self.back = dict(state["fallen"]), dict(state["back"])


def _first(
    down: NDArray[np.bool_], since: NDArray[np.int64], groups: NDArray[np.int32], total: int
) -> tuple[Places, NDArray[np.int64]]:
    """By group: its first port that is down, and when the first of them went down."""
    places = np.flatnonzero(down)
    first, oldest = np.full(total, len(down)), np.full(total, np.iinfo(np.int64).max)
    np.minimum.at(first, groups[places], places)
    np.minimum.at(oldest, groups[places], since[places])
    return first, oldest


def _together(
    down: NDArray[np.bool_], since: NDArray[np.int64], groups: NDArray[np.int32], total: int, within: float
) -> NDArray[np.bool_]:
    """Ports that went down within seconds of their leaf's newest; the grid is as fine as that can be told."""
    newest = np.zeros(total, np.int64)
    np.maximum.at(newest, groups, np.where(down, since, 0))
    return np.asarray(down & (since >= newest[groups] - within * SECOND))


@dataclass(frozen=True, slots=True)
class Erring:
    """Which ports err now: their places, since when, and whether it is sure.

    watched: (N,) ports of a fabric that were ever up.
    """

    at: Places
    since: Places
    sure: Bools
    watched: Bools


@dataclass(frozen=True, slots=True)
class Storm:
    """Many ports that err together: how many `of` so many, on how many leaves."""

    entity: str
    level: Level
    since: int
    struck: int
    of: int
    leaves: int


class Storms:
    """What stands, and the ports whose errors are shared by others."""

    def __init__(self) -> None:
        self.standing: dict[str, int] = {}  # leaf or fabric -> since when
        self.shared: dict[str, int] = {}  # port -> when it was last part of one

    def judge(
        self, erring: Erring, leaves: Groups, leaf_of: Callable[[int], str], names: Sequence[str], time: int
    ) -> list[Storm]:
        """Storms of this instant: of the fabric, where several leaves are struck, else of one leaf."""
        self.shared = {port: at for port, at in self.shared.items() if 0 <= time - at <= _AFTER}
        if len(erring.at) <= SHARE * LEAST:
            self.standing = {}
            return []
        of_leaves = self._struck(erring, leaves, leaf_of)
        everywhere = self._struck(erring, np.zeros(len(leaves), np.int32), lambda i: FABRIC)
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
            level: Level = "page" if erring.sure[members].any() else "suspect"
            on = len(np.unique(leaves[at]))
            found.append(Storm(entity, level, self.standing[entity], len(at), size, on))
        return found

    def _struck(self, erring: Erring, groups: Groups, name: Callable[[int], str]) -> list[tuple[str, Places, int]]:
        """(who, places in `erring`, watched ports) where more than a share began within minutes, or still err."""
        mine, groups = groups[erring.at] + 1, groups + 1
        size = np.bincount(groups[erring.watched], minlength=int(groups.max()) + 1)
        many = np.bincount(mine, minlength=len(size)) > SHARE * size
        found = []
        for group in np.flatnonzero(many & (size >= LEAST) & (np.arange(len(size)) > 0)).tolist():
            members = np.flatnonzero(mine == group)
            who, since = name(int(erring.at[members[0]])), erring.since[members]
            together = np.count_nonzero(since >= since.max() - WITHIN)
            if who in self.standing or together > SHARE * size[group]:
                found.append((who, members, int(size[group])))
        return found

    def words(self, storm: Storm) -> str:
        """What is told of one."""
        begins = f"{storm.entity}: {storm.struck} of {storm.of} ports began to err within minutes of each other"
        if storm.entity == FABRIC:
            on = f"on {storm.leaves} leaves" if storm.leaves > 1 else "in the whole fabric"
            return f"{begins}, {on}: what they share, or how they are read; not the ports"
        return f"{begins}: the switch, its cooling or supply, not its ports"

    def snapshot(self) -> dict[str, dict[str, int]]:
        return {"standing": dict(self.standing), "shared": dict(self.shared)}

    def restore(self, state: Mapping[str, Mapping[str, int]]) -> None:
        self.standing, self.shared = dict(state["standing"]), dict(state["shared"])
