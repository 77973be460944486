"""The time of the last sample of each device, and what devices that fell silent together have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.state import State, memory, notes, parts, piece_of
from detectors.base.topology_index import TopologyIndex
from pipeline.model.compiling import compiled
from pipeline.model.records import SECOND, Frame
from pipeline.model.signals import CATALOGUE

Bools = NDArray[np.bool_]
Times = NDArray[np.int64]
Counts = NDArray[np.int32]

MISSED = 3
"""Instants in a row without a sample before a device is silent: a pause of the pipeline is not silence; chosen."""
KNOWN = 20
"""Samples after which a device of a node is known to exist: some respond once and never again. A device that never had
a sample is not silent."""
KNOWN_OF: Mapping[str, int] = {"node": 1, "coolant": 2, "power": 2}
"""The same for classes with their own agent or BMC, which was installed on purpose: their first samples prove that they
exist. Chosen: one for an agent; two for a unit, as a BMC that starts may list it before it can read it."""
READINGS = 3
"""Readings that must fail at least before a device is silent; chosen: one may fail, one be late."""
RARE = 1e-9
"""Chance of a row of missing readings that makes a silence, where single ones are lost as often as they were of late:
1,000 nodes of 8 GPUs have 7e7 readings a day at 10 s. Chosen."""
_LOST, _GIVEN, _FORGETS_S = 0.5, 100.0, 3600.0
"""Readings that are lost, and given, before any was seen; s in which a class forgets its own. Chosen."""
BMC_RESTARTS = 1800.0
"""s for which the BMC of a node may not respond: a restart takes 1 to 3 min, an upgrade of firmware 10 to 20, and the
node works in that time. Longer is a ticket, by whatever reads it. Chosen."""
FOLLOWS, LONGEST_GAP = 0.2, 3.0
"""Gain of the usual time between two samples, and how many times the usual one gap counts at most: a silence does not
become usual. Chosen."""
UNKNOWN = 60.0
"""s between samples where neither two of them nor the catalogue show it; chosen: agents send each minute at least."""
LATE = 1.5  # usual times between two samples after which the next one is late; chosen: half of one is jitter
_BY_BMC = frozenset({"psu"})  # classes that only a BMC reads
GIVEN_UP = 72 * 3600 * SECOND
"""A device that is silent for longer was removed; chosen: a long weekend."""
TOGETHER = 20 * SECOND
"""Last samples at most so far apart are of one moment: a frame of 10 s, 5 s of jitter, a lost sample; chosen."""
NEARLY_ALL = 0.9
"""Share of the devices below a shared entity that must be silent with it; chosen: one node may have been out."""
SITE = "site:all"
"""Cause where all fall silent and no entity in the topology holds them all."""
_NO_VALUES = np.empty(0)


@dataclass
class SeenDevices(State):
    """The devices of one class: (N,) each, times in us.

    seen:   last sample.              since: reporting without a silence since.
    missed: instants since then.      count: samples so far.
    mean:   usual time between two samples, 0 if not known.
    rhythm: the same; of nodes at least between the last two.   usual: before this instant.
    gaps, holes: for devices with a sample at this instant: time since the one before, and instants missed in between.
    names:  entities; after a restart only if none of them reported, else they come with the next frame.
    twins:  (2, pairs) positions of devices with one name, both ways: with a new [site] name an agent sends as others.
    """

    seen: Times = memory(0, np.int64)
    since: Times = memory(0, np.int64)
    missed: Counts = memory(0, np.int32)
    count: Counts = memory(0, np.int32)
    mean: Times = memory(0, np.int64)
    rhythm: Times = memory(0, np.int64)
    _lost_names: list[str] = notes(list)
    names: Sequence[str] = field(default=(), init=False)
    twins: NDArray[np.int64] = field(default_factory=lambda: np.zeros((2, 0), np.int64), init=False)
    _compared: int = field(default=0, init=False)  # names that twins are found among
    usual: Times = field(default_factory=lambda: np.zeros(0, np.int64), init=False)
    gaps: Times = field(default_factory=lambda: np.zeros(0, np.int64), init=False)
    holes: Counts = field(default_factory=lambda: np.zeros(0, np.int32), init=False)

    def add_devices(self, names: Sequence[str], time: int) -> None:
        """Adds the devices of a frame; new ones report since `time`."""
        known = len(self.seen)
        self.grow(len(names))
        self.since[known:] = time
        self.names = names
        if len(names) != self._compared:
            self._compared, self.twins = len(names), find_twins(names)

    def update(self, values: NDArray[np.float64], time: int, back: bool) -> None:
        """Adds the samples of an instant. back: time was set back, so no device had a sample later than now."""
        if back:
            for times in (self.seen, self.since):
                np.minimum(times, time, out=times)
        self.holes, self.gaps = np.zeros(len(self.seen), np.int32), np.zeros(len(self.seen), np.int64)
        lives = self.seen, self.since, self.missed, self.count
        _count_missed(values, time, MISSED, *lives, self.holes, self.gaps)

    def follow_rhythm(self, last: bool) -> tuple[float, float]:
        """Updates how far apart the samples of each device are; returns how many readings were lost before those of
        this instant, and how many those are. last: a longer time between the last two counts at once."""
        self.usual, self.rhythm = self.rhythm, np.empty(len(self.seen), np.int64)
        lost, there = _follow_gaps(self.gaps, self.usual, self.count, last, self.mean, self.rhythm)
        return float(lost), float(there)

    @property
    def reporting(self) -> Bools:
        """(N,) devices with a sample within the last MISSED instants."""
        return self.missed < MISSED

    def known(self, least: int) -> Bools:
        """(N,) devices with at least so many samples, without those that have sent as another device since."""
        out: Bools = self.count >= least
        one, other = self.twins
        out[one[self.seen[one] < self.seen[other]]] = False
        return out

    def snapshot(self, copied: bool = True) -> dict[str, Any]:
        """See `State.snapshot`; with names if no device reports."""
        self._lost_names = list(self.names) if len(self.names) and not self.reporting.any() else []
        return super().snapshot(copied)

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `State.restore`."""
        super().restore(state)
        self.names = self._lost_names


@dataclass
class LastSamples(State):
    """When each device of some classes had its last sample of one signal.

    signals: device class -> a signal that each of its devices always has.   time: of the newest instant (us).
    """

    signals: Mapping[str, str]
    time: int = notes(int)
    classes: dict[str, SeenDevices] = parts(SeenDevices)
    lost: dict[str, list[float]] = notes()  # class -> readings that were lost, and all, of late

    def update(self, frames: Mapping[str, Frame], time: int) -> None:
        """Adds an instant."""
        back, passed = time < self.time, max(time - self.time, 0) / SECOND if self.time else 0.0
        self.time = time
        for device_class, signal in self.signals.items():
            frame = frames.get(device_class)
            values = None if frame is None else frame.values.get(signal)
            if frame is not None and values is not None:
                piece_of(self.classes, device_class, SeenDevices).add_devices(frame.entities, time)
            if device_class in self.classes:
                self.classes[device_class].update(values if values is not None else _NO_VALUES, time, back)
        for device_class, devices in self.classes.items():
            lost, there = devices.follow_rhythm(last=device_class == "node")
            if there:
                known, kept = self.lost.get(device_class, [_LOST, _GIVEN]), np.exp(-passed / _FORGETS_S)
                self.lost[device_class] = [float(kept * known[0] + lost), float(kept * known[1] + lost + there)]

    def readings(self, device_class: str) -> int:
        """Returns how many readings must be missing in a row before a device is silent, as often as single ones are."""
        lost, of = self.lost.get(device_class, [_LOST, _GIVEN])
        share = min(max(lost / max(of, 1.0), 1e-9), 0.5)
        return max(READINGS, int(np.ceil(np.log(RARE) / np.log(share))))

    def interval(self) -> int:
        """Returns the usual time (us) between two samples of a node."""
        rhythm = self.of_class("node").rhythm
        known = rhythm[rhythm > 0]
        return int(np.median(known)) if len(known) else 0

    def of_class(self, device_class: str) -> SeenDevices:
        """Returns the devices of a class; an empty one before its first frame."""
        return self.classes.get(device_class) or _NO_DEVICES

    def names(self, device_class: str) -> Sequence[str]:
        """Returns the entities of a class, none before its first frame."""
        return self.of_class(device_class).names

    def known(self, device_class: str) -> Bools:
        """Returns (N,) devices that had enough samples to be known to exist, and go by no other site's name since."""
        return self.of_class(device_class).known(KNOWN_OF.get(device_class, KNOWN))

    def reporting(self, device_class: str) -> Bools:
        """Returns (N,) devices with a sample within the last MISSED instants, or of which the next is not due."""
        devices = self.of_class(device_class)
        return devices.reporting | (self.time - devices.seen <= LATE * devices.rhythm)

    def patience(self, device_class: str, seconds: float, readings: int = 0) -> NDArray[np.int64]:
        """Returns (N,) the time (us) without a sample after which a device is silent: `seconds`, at least BMC_RESTARTS
        where only a BMC reads it, or so many of its own usual readings; readings: 0 means `readings()`."""
        readings = readings or self.readings(device_class)
        seconds = max(seconds, BMC_RESTARTS) if device_class in _BY_BMC else seconds
        rhythm, given = self.of_class(device_class).rhythm, CATALOGUE[self.signals[device_class]].interval or UNKNOWN
        rhythm = np.where(rhythm > 0, rhythm, given * SECOND)
        return np.asarray(np.maximum(seconds * SECOND, readings * rhythm), np.int64)

    def silent(self, device_class: str, seconds: float, readings: int = 0) -> Bools:
        """Returns (N,) devices that have been silent for longer than their `patience`."""
        devices = self.of_class(device_class)
        if not len(devices.names):
            return np.zeros(0, bool)
        out: Bools = devices.missed >= MISSED
        if not out.any():
            return out
        age = self.time - devices.seen
        return (
            out & self.known(device_class) & (age > self.patience(device_class, seconds, readings)) & (age < GIVEN_UP)
        )


_NO_DEVICES = SeenDevices()


def find_twins(names: Sequence[str]) -> NDArray[np.int64]:
    """Returns (2, pairs) the positions of equal names, each pair in both orders."""
    if len(set(names)) == len(names):
        return np.zeros((2, 0), np.int64)
    places: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        places.setdefault(name, []).append(i)
    pairs = [pair for same in places.values() if len(same) > 1 for pair in permutations(same, 2)]
    return np.array(pairs, np.int64).T


@compiled
def _count_missed(
    values: NDArray[np.float64],
    time: int,
    long: int,
    seen: Times,
    since: Times,
    missed: Counts,
    count: Counts,
    holes: Counts,
    gaps: Times,
) -> None:
    """Records the devices with a sample at `time`; one that missed more than `long` instants reports since then.

    Out: holes, gaps: of a device with a sample, the instants that it missed and us since the sample before; else 0.
    """
    for i in range(len(missed)):
        missed[i] += 1
        holes[i], gaps[i] = 0, 0
        if i < len(values) and values[i] == values[i]:
            holes[i], gaps[i] = missed[i] - 1, time - seen[i]
            if missed[i] > long:
                since[i] = time
            seen[i], missed[i] = time, 0
            count[i] += 1


@compiled
def _follow_gaps(gaps: Times, usual: Times, count: Counts, last: bool, mean: Times, rhythm: Times) -> tuple[int, int]:
    """Fills in the rhythm after the gaps of an instant; returns readings that were lost before it, and its own.

    A frame has the time of its newest sample, so the gaps of samples 30 s apart can be 21 and 39 s in turn: only their
    mean is the interval.
    """
    lost = there = 0
    for i in range(len(gaps)):
        gap, known = gaps[i], usual[i]
        rhythm[i] = known
        if gap > 0 and known > 0:
            there += 1
            lost += min(max(int(np.rint(gap / known)) - 1, 0), READINGS)
        if gap > 0 and count[i] > 1:
            at = mean[i]
            mean[i] = gap if at <= 0 else int(at + FOLLOWS * (min(float(gap), LONGEST_GAP * at) - at))
            rhythm[i] = max(gap, mean[i]) if last else mean[i]
    return lost, there


def shared_ancestors(
    silent: Bools, together: Bools, counted: Bools, index: TopologyIndex, least: int = 2
) -> dict[str, list[int]]:
    """Returns entity -> positions below it that fell silent together, where nearly all that count did.

    silent: devices to explain.  together: devices that fell silent within the same seconds.  counted: devices that
    count at all.  least: devices below which a shared entity explains nothing.
    """
    found: dict[str, list[int]] = {}
    around = dict.fromkeys(e for i in np.flatnonzero(silent).tolist() for e in index.ancestors(i))
    for entity in around:
        below = index.positions_below(entity)
        below = below[counted[below]]
        mine = below[together[below]]
        if len(mine) >= least and len(mine) >= NEARLY_ALL * len(below):
            found[entity] = mine.tolist()
    return found
