"""Finds device classes that fall silent on nearly all nodes together while the nodes report: their reader is gone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.state import State, notes
from detectors.base.topology_index import TopologyIndex
from detectors.telemetry.silence import GIVEN_UP, MISSED, NEARLY_ALL, SITE, TOGETHER, Bools, LastSamples
from pipeline.model.records import SECOND

FEW = 4
"""Nodes below which it may be chance, and each device is reported by itself; chosen: a chassis often holds 2 or 3."""
LEFT = 0.1
"""Share of the nodes still silent below which each is judged by itself; chosen: exporters that are restarted return one
after the other, and one that does not return has its own fault."""
_RHYTHMS = 1.5  # readings within which the last samples of a slow class lie: one of them may come late; chosen


@dataclass(frozen=True, slots=True)
class LostReader:
    """The reader of a class is gone.

    silent: (N,) devices that it explains.   nodes: positions of their nodes.   of: nodes that were counted.
    """

    entity: str
    since: int
    seconds: float
    silent: Bools
    nodes: NDArray[np.intp]
    of: int


@dataclass
class Readers(State):
    """For each class whose reader is gone: since when, and the entity that is blamed."""

    _gone: dict[str, dict[str, Any]] = notes()

    def find_lost(
        self,
        device_class: str,
        silent: Bools,
        counted: Bools,
        owner: NDArray[np.intp],
        index: TopologyIndex,
        last: LastSamples,
    ) -> LostReader | None:
        """Returns the lost reader of a class with the silent devices that it explains; None if it is not lost.

        silent: (N,) devices to explain.  counted: (N,) devices whose node reports, without maintenance.  owner: (N,)
        position of the node of each.
        """
        size = len(silent)
        devices = last.of_class(device_class)
        seen = devices.seen[:size]
        known = last.known(device_class)[:size]
        quiet = counted & known & (devices.missed[:size] >= MISSED) & (last.time - seen < GIVEN_UP)
        if device_class not in self._gone and not self._begins(
            device_class, silent, counted & known, quiet, owner, index, last
        ):
            return None
        gone = self._gone[device_class]
        for end in ("since", "till"):
            gone[end] = min(gone[end], last.time)  # the clock may have been set back
        mine = quiet & (seen >= gone["since"]) & (seen <= gone["till"])
        nodes = np.unique(owner[mine])
        if len(nodes) < max(FEW, LEFT * gone["affected"]):
            del self._gone[device_class]
            return None
        return LostReader(gone["entity"], gone["since"], gone["seconds"], mine, nodes, gone["of"])

    def _begins(
        self,
        device_class: str,
        silent: Bools,
        counted: Bools,
        quiet: Bools,
        owner: NDArray[np.intp],
        index: TopologyIndex,
        last: LastSamples,
    ) -> bool:
        """Returns whether the newest silent devices fell silent together with nearly all that are counted."""
        if not silent.any():
            return False
        seen = last.of_class(device_class).seen[: len(silent)]
        rhythm = float(np.median(last.of_class(device_class).rhythm[: len(silent)][counted]))
        window = max(TOGETHER, round(_RHYTHMS * rhythm))
        together = quiet & (np.abs(seen - seen[silent].max()) <= window)
        affected = np.count_nonzero(np.bincount(owner[together]))
        of = np.count_nonzero(np.bincount(owner[counted & (together | ~silent)]))
        if affected < FEW or affected < NEARLY_ALL * of:
            return False
        times = {"since": int(seen[together].min()), "till": int(seen[together].max()), "seconds": window / SECOND}
        entity = _nearest_around(together, index)
        self._gone[device_class] = {**times, "entity": entity, "affected": int(affected), "of": int(of)}
        return True

    def clear(self, device_class: str) -> None:
        """Call it when no device of a class is silent."""
        self._gone.pop(device_class, None)


def _nearest_around(together: Bools, index: TopologyIndex) -> str:
    """Returns the nearest entity above all of them."""
    inside = np.zeros(len(together), bool)
    for entity in index.ancestors(int(together.argmax())):
        inside[:] = False
        inside[index.positions_below(entity)] = True
        if inside[together].all():
            return entity
    return SITE
