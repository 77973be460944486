"""Classes that fall silent nearly everywhere at once while their nodes live: what reads them is gone, told once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.topology_index import TopologyIndex
from detectors.telemetry.silence import GIVEN_UP, MISSED, NEARLY_ALL, SITE, TOGETHER, Bools, LastSeen
from pipeline.model.records import SECOND
from pipeline.model.signals import CATALOGUE

FEW = 4
"""Nodes below which it may be chance, and each is told for itself; chosen: a chassis often holds two or three."""
LEFT = 0.1
"""Share of the nodes still silent below which the rest are judged each for itself; chosen: exporters that are started
anew come back one after the other, and whom that leaves out for good has a fault of its own."""
_RHYTHMS = 1.5  # of a class read seldom, last samples lie one look apart at most; chosen: and one of them comes late


@dataclass(frozen=True, slots=True)
class Gone:
    """The reader of a class is gone. silent: (N,) devices it explains; nodes: positions of theirs; of: nodes at all."""

    entity: str
    since: int
    seconds: float
    silent: Bools
    nodes: NDArray[np.intp]
    of: int


class Readers:
    """Per class, since when its reader has been gone, and whom that is blamed on."""

    def __init__(self) -> None:
        self._gone: dict[str, dict[str, Any]] = {}

    def look(
        self,
        device_class: str,
        silent: Bools,
        counted: Bools,
        owner: NDArray[np.intp],
        homes: TopologyIndex,
        last: LastSeen,
    ) -> Gone | None:
        """Whom of the silent ones it explains, if it does.

        silent: (N,) whom to explain.  counted: (N,) whose node lives, and who is not worked on.  owner: of each, the
        position of its node.
        """
        size = len(silent)
        seen = last.seen[device_class][:size]
        known = last.known(device_class)[:size]
        quiet = counted & known & (last.missed[device_class][:size] >= MISSED) & (last.time - seen < GIVEN_UP)
        if device_class not in self._gone and not self._begins(
            device_class, silent, counted & known, quiet, owner, homes, last
        ):
            return None
        gone = self._gone[device_class]
        for end in ("since", "till"):
            gone[end] = min(gone[end], last.time)  # a time that stepped back
        mine = quiet & (seen >= gone["since"]) & (seen <= gone["till"])
        nodes = np.unique(owner[mine])
        if len(nodes) < max(FEW, LEFT * gone["struck"]):
            del self._gone[device_class]
            return None
        return Gone(gone["entity"], gone["since"], gone["seconds"], mine, nodes, gone["of"])

    def _begins(
        self,
        device_class: str,
        silent: Bools,
        counted: Bools,
        quiet: Bools,
        owner: NDArray[np.intp],
        homes: TopologyIndex,
        last: LastSeen,
    ) -> bool:
        """Whether those silent last became so with nearly all that are looked at."""
        if not silent.any():
            return False
        seen = last.seen[device_class][: len(silent)]
        rhythm = CATALOGUE[last.signals[device_class]].interval or 1.0
        window = max(TOGETHER, round(_RHYTHMS * rhythm * SECOND))
        together = quiet & (np.abs(seen - seen[silent].max()) <= window)
        struck = np.count_nonzero(np.bincount(owner[together]))
        of = np.count_nonzero(np.bincount(owner[counted & (together | ~silent)]))
        if struck < FEW or struck < NEARLY_ALL * of:
            return False
        times = {"since": int(seen[together].min()), "till": int(seen[together].max()), "seconds": window / SECOND}
        self._gone[device_class] = {**times, "entity": _around(together, homes), "struck": struck, "of": of}
        return True

    def over(self, device_class: str) -> None:
        """Nobody of a class is silent."""
        self._gone.pop(device_class, None)

    def snapshot(self) -> dict[str, Any]:
        return {device_class: dict(gone) for device_class, gone in self._gone.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._gone = {device_class: dict(gone) for device_class, gone in state.items()}


def _around(together: Bools, homes: TopologyIndex) -> str:
    """The nearest that holds them all."""
    inside = np.zeros(len(together), bool)
    for entity in homes.ancestors(int(together.argmax())):
        inside[:] = False
        inside[homes.positions_below(entity)] = True
        if inside[together].all():
            return entity
    return SITE
