"""The highest value that each device's link has held, such as its speed or lanes, and whether it is below that now."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detectors.base.gates import Gates
from detectors.base.state import N, State, memory
from detectors.base.streams import LEARN, LIFT
from pipeline.model.compiling import compiled
from pipeline.model.records import SECOND, Frame

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

CONFIRM_SAMPLES = 3
"""Equal samples in a row that confirm a value; chosen: one misread sample does not count."""
SILENT_AFTER = 600 * SECOND
"""us without a sample after which a device is not judged; chosen: as long as the Desk waits for the end."""
_MAX_COUNT = 30_000
_MAX_MBITS = 10_000_000.0  # no port is as fast; a driver that does not know the speed returns all bits set
RUN, LOW, COUNT, JUDGED = range(4)
"""Rows of `counts`."""
FELL, SEEN, WHOLE = range(3)
"""Rows of `times`."""


@dataclass
class BestValues(State):
    """The highest value that each device has held, and whether it is below that now.

    counts: (4, N) samples in a row at the newest value, in a row below the best, all samples, and judged ones.
    times:  (3, N) when the value fell below the best, of the newest sample, and when it was last at its best.
    """

    best: Floats = memory(0.0)
    newest: Floats = memory(0.0)
    counts: NDArray[np.int32] = memory(0, np.int32, shape=(4, N))
    times: NDArray[np.int64] = memory(0, np.int64, shape=(3, N))

    def update(self, values: Floats, judged: Bools, time: int) -> None:
        """Adds one sample per device. judged: False where a value below the best is normal (idle links save power)."""
        n = len(values)
        self.grow(n)
        limits = (CONFIRM_SAMPLES, _MAX_COUNT)
        update_best_values(
            values, judged, (self.best, self.newest), self.counts[:, :n], self.times[:, :n], time, limits
        )

    def below_best(self, time: int) -> Bools:
        """Returns (N,) devices that have been below their best for CONFIRM_SAMPLES samples in a row, and not for LIFT:
        what a site leaves for a day, with an incident open, is intended."""
        low = self.counts[LOW] >= CONFIRM_SAMPLES
        if not low.any():
            return np.asarray(low)
        for i in np.flatnonzero(low & (time - self.times[FELL] >= LIFT * SECOND)).tolist():
            self.accept_newest(i)
            low[i] = False
        return np.asarray(low & self.reported_recently(time))

    def reported_recently(self, time: int) -> Bools:
        """Returns (N,) devices with a sample within SILENT_AFTER."""
        return np.asarray(time - self.times[SEEN] <= SILENT_AFTER)

    def has_enough_samples(self, n: int) -> Bools:
        """Returns (N,) devices with more samples than the first ones, on which nothing is reported."""
        self.grow(n)
        return np.asarray(self.counts[COUNT, :n] > LEARN)

    def has_enough_judged(self, n: int) -> Bools:
        """Returns (N,) devices with as many judged samples."""
        self.grow(n)
        return np.asarray(self.counts[JUDGED, :n] > LEARN)

    def fell_at(self, i: int) -> int:
        """Returns when the value of a device fell below its best."""
        return int(self.times[FELL, i])

    def last_at_best(self, i: int) -> int:
        """Returns when a device was last at its best."""
        return int(self.times[WHOLE, i])

    def accept_newest(self, i: int) -> None:
        """Makes the newest value of a device its best."""
        self.best[i] = self.newest[i]
        self.counts[LOW, i] = 0


@dataclass
class PortSpeeds(BestValues):
    """The speed of each port while it is up, and the highest that it has held."""

    def update_ports(self, frame: Frame) -> None:
        """Adds the speeds of one instant; the speed of a port that is down is ignored: it belongs to link training."""
        speed = frame["nic.speed"]
        known = (speed > 0) & (speed < _MAX_MBITS) & (frame["nic.state"] >= 1)
        self.update(np.where(known, speed, np.nan), known, frame.time)

    def find_slow(self, frame: Frame, gates: Gates) -> list[int]:
        """Returns the ports that are slower than they were; a speed set during maintenance becomes the new best."""
        low = self.below_best(frame.time)
        if not low.any():
            return []
        found = np.flatnonzero(low & self.has_enough_samples(len(low))).tolist()
        for i in [i for i in found if gates.in_maintenance(frame.entities[i], frame.topology, frame.time)]:
            self.accept_newest(i)
            found.remove(i)
        return found


@compiled
def update_best_values(
    values: Floats,
    judged: Bools,
    levels: tuple[Floats, Floats],
    counts: NDArray[np.int32],
    times: NDArray[np.int64],
    time: int,
    limits: tuple[int, int],
) -> None:
    """Adds one sample of each device. levels: best, newest. limits: samples that confirm, and the top of counts."""
    (best, newest), (confirm, top) = levels, limits
    for i in range(len(values)):
        value = values[i]
        if not np.isfinite(value):
            continue
        times[SEEN, i] = time
        if not (judged[i] or value >= best[i]):
            continue
        counts[RUN, i] = min(counts[RUN, i] + 1, top) if value == newest[i] else 1
        newest[i] = value
        if value > best[i] and counts[RUN, i] >= confirm:
            best[i] = value
        if value < best[i]:
            if counts[LOW, i] == 0:
                times[FELL, i] = time
            counts[LOW, i] = min(counts[LOW, i] + 1, top)
        else:
            counts[LOW, i] = 0
            times[WHOLE, i] = time
        counts[COUNT, i] = min(counts[COUNT, i] + 1, top)
        if judged[i]:
            counts[JUDGED, i] = min(counts[JUDGED, i] + 1, top)
