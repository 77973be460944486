"""Leaves and fabrics of which so many ports begin to err within minutes that it is not the ports: one page, not many.

A cable or a module fails alone. What makes a third of the ports of a switch err at once is the switch, its cooling or
supply; where it is several switches, what they share, or whoever reads the counters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.records import SECOND, Level

FABRIC = "fabric:all"
SHARE = 0.3  # of the ports that are watched; chosen: of a leaf's 32 ports ten never fail within minutes
LEAST = 8  # ports below which a share of them says little; chosen
WITHIN = 300 * SECOND  # between the onsets of the first and the last; chosen: a BER of 1e-13 is suspected within it
_AFTER = 600 * SECOND  # so long errors speak against a port that errs no more; chosen, the Desk's quiet
Places = NDArray[np.int64]
Bools = NDArray[np.bool_]
Groups = NDArray[np.int32]


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
