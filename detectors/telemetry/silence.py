"""When every device last spoke: silence is a state of its own, never taken for quiet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.topology_index import TopologyIndex
from detectors.telemetry import instrument_kernel
from pipeline.model.records import SECOND, Frame
from pipeline.model.signals import CATALOGUE

MISSED = 3
"""Instants in a row without a sample before anybody is silent, so that a pause of the pipeline is nobody's; chosen."""
KNOWN = 20
"""Samples after which a device of a node is known to exist: some answer once and never again. What never spoke is not
silent."""
KNOWN_OF: Mapping[str, int] = {"node": 1, "coolant": 2, "power": 2}
"""The same of what has an agent or BMC of its own: it was installed by somebody, so that its first samples prove that
it exists. Chosen: one for an agent; two for a unit, as a BMC that starts may list it before it can read it."""
LOOKS = 3
"""Where agents look more seldom, as at power supplies, so many looks must fail; chosen: one may fail, one be late."""
GIVEN_UP = 72 * 3600 * SECOND
"""Who is silent for longer was taken away; chosen: a long weekend."""
TOGETHER = 20 * SECOND
"""Last samples so far apart at most are of one moment: a frame of 10 s, 5 s of jitter, a lost sample; chosen."""
SITE = "site:all"
"""What is blamed where all fall silent and nothing that the topology knows holds them all."""
Bools = NDArray[np.bool_]
_NOBODY = np.empty(0)


class LastSeen:
    """Per device class when each device had its last sample of one signal, and how often it was missed since.

    seen: us of the last sample.  since: us since when it has spoken without a silence.  missed: instants since the last
    sample.  count: samples so far.  names: entities, empty until a class has a frame.
    rhythm: of nodes, us between their last two samples, 0: not known.  usual: the same before this instant.
    holes, gaps: of who speaks at this instant, how many instants he missed before, and us since the sample before.
    """

    def __init__(self, signals: Mapping[str, str]) -> None:
        """signals: device class -> a signal that each of its devices always has."""
        self.signals = signals
        self.time = 0
        self.seen: dict[str, NDArray[np.int64]] = {}
        self.missed: dict[str, NDArray[np.int32]] = {}
        self.count: dict[str, NDArray[np.int32]] = {}
        self.since: dict[str, NDArray[np.int64]] = {}
        self.names: dict[str, Sequence[str]] = {}
        self.holes: dict[str, NDArray[np.int32]] = {}
        self.gaps: dict[str, NDArray[np.int64]] = {}
        self.rhythm = self.usual = np.zeros(0, np.int64)

    def look(self, frames: Mapping[str, Frame], time: int) -> None:
        """Takes an instant. Where time steps back, nobody was seen later than now."""
        back = time < self.time
        self.time = time
        for device_class, signal in self.signals.items():
            frame = frames.get(device_class)
            values = None if frame is None else frame.values.get(signal)
            if frame is not None and values is not None:
                self._grow(device_class, len(values))
                self.names[device_class] = frame.entities
            if device_class not in self.seen:
                continue
            seen = self.seen[device_class]
            if back:
                for times in (seen, self.since[device_class]):
                    np.minimum(times, time, out=times)
            told = values if values is not None else _NOBODY
            lives = self.since[device_class], self.missed[device_class], self.count[device_class]
            holes = np.zeros(len(seen), np.int32), np.zeros(len(seen), np.int64)
            self.holes[device_class], self.gaps[device_class] = holes
            instrument_kernel.heard(told, time, MISSED, seen, *lives, *holes)
        self._follow()

    def _follow(self) -> None:
        """Takes how far apart the samples of nodes lie."""
        if "node" not in self.gaps:
            return
        gaps = self.gaps["node"]
        self.usual = np.append(self.rhythm, np.zeros(len(gaps) - len(self.rhythm), np.int64))
        spoke = gaps > 0
        spoke[spoke] = self.count["node"][spoke] > 1
        self.rhythm = np.where(spoke, gaps, self.usual)

    def known(self, device_class: str) -> Bools:
        """(N,) what had enough samples to be known to exist."""
        return self.count[device_class] >= KNOWN_OF.get(device_class, KNOWN)

    def patience(self, device_class: str, seconds: float) -> int:
        """Silence (us) that is one, for a class."""
        rhythm = CATALOGUE[self.signals[device_class]].interval or 1.0
        return round(max(seconds, LOOKS * rhythm) * SECOND)

    def silent(self, device_class: str, seconds: float) -> Bools:
        """(N,) who has been silent for at least `seconds`, or LOOKS of its looks where these are rarer."""
        if device_class not in self.seen or not len(self.names.get(device_class, ())):
            return np.zeros(0, bool)
        missed = self.missed[device_class]
        out: Bools = missed >= MISSED
        if not out.any():
            return out
        age = self.time - self.seen[device_class]
        return out & self.known(device_class) & (age > self.patience(device_class, seconds)) & (age < GIVEN_UP)

    def silent_nodes(self, seconds: float, slow_seconds: float) -> Bools:
        """(N,) which nodes have been silent for at least `seconds`, or `slow_seconds` where they speak so seldom that
        LOOKS of their looks take longer, and while nobody knows how often they speak."""
        out = self.silent("node", seconds)
        rhythm = self.rhythm[: len(out)]
        slow = (rhythm == 0) | (rhythm * LOOKS > seconds * SECOND)
        return out & (~slow | self.silent("node", slow_seconds)) if out.any() else out

    def speaks(self, device_class: str) -> Bools:
        """(N,) who had a sample within the last MISSED instants."""
        return self.missed.get(device_class, np.zeros(0, np.int32)) < MISSED

    def _grow(self, device_class: str, size: int) -> None:
        known = len(self.seen.get(device_class, ()))
        if size > known:
            more = size - known
            for times in (self.seen, self.since):
                times[device_class] = _longer(times.get(device_class, np.zeros(0, np.int64)), more)
            for counts in (self.missed, self.count):
                counts[device_class] = _longer(counts.get(device_class, np.zeros(0, np.int32)), more)
            self.since[device_class][known:] = self.time

    def snapshot(self) -> dict[str, Any]:
        """Arrays; names only of classes of which nobody speaks: those of the others come with their next frame."""
        lost = {c: list(n) for c, n in self.names.items() if len(n) and not self.speaks(c).any()}
        cells: dict[str, Mapping[str, NDArray[Any]]]
        cells = {"seen": self.seen, "since": self.since, "missed": self.missed, "count": self.count}
        copied = {name: {c: a.copy() for c, a in by_class.items()} for name, by_class in cells.items()}
        return {**copied, "names": lost, "rhythm": self.rhythm.copy(), "time": self.time}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.seen, self.since = dict(state["seen"]), dict(state["since"])
        self.missed, self.count = dict(state["missed"]), dict(state["count"])
        self.names, self.time = dict(state["names"]), state["time"]
        self.rhythm = state.get("rhythm", np.zeros(0, np.int64))[: len(self.seen.get("node", ()))]


def _longer(cells: NDArray[Any], more: int) -> NDArray[Any]:
    return np.append(cells, np.zeros(more, cells.dtype))


def shared(
    silent: Bools, together: Bools, counted: Bools, homes: TopologyIndex, least: int = 2
) -> dict[str, list[int]]:
    """Entity above -> those below it that fell silent together, where nearly all that count did.

    silent: whom to explain.  together: who fell silent within the same seconds.  counted: who is looked at at all.
    """
    found: dict[str, list[int]] = {}
    around = dict.fromkeys(e for i in np.flatnonzero(silent).tolist() for e in homes.ancestors(i))
    for entity in around:
        below = homes.positions_below(entity)
        below = below[counted[below]]
        mine = below[together[below]]
        if len(mine) >= least and len(mine) >= NEARLY_ALL * len(below):
            found[entity] = mine.tolist()
    return found


NEARLY_ALL = 0.9
"""Share of what hangs on a shared factor that must have fallen silent with it; chosen: one node may have been out."""
