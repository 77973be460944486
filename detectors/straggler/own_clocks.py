"""SM clocks against their own past, of GPUs whose node is most of what they could be compared with.

NVML reports why a clock is lower: heat, power, a setting, an idle GPU. So a clock that falls without any of its reasons
is a fault of the device, also where no peer shows it. Unless those of several nodes fall together: people set them, and
not all that they do has a reason (locked clocks).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detectors.base.calibration import Kinds
from detectors.base.state import State, part
from detectors.base.statistics import count_near
from detectors.base.streams import Bools, Channel, Floats, Streams
from detectors.straggler.blame import HARM
from detectors.straggler.gpu_readings import AGO, NODES
from pipeline.model.records import SECOND


@dataclass
class OwnClocks(State):
    """(N,) by GPU. streams: -ln of the SM clock, of moments for whose clock NVML gives no reason."""

    streams: Streams = part(lambda: Streams(Channel(0.01, HARM)))

    def step(
        self, clock: Floats, gate: Bools, nodes: NDArray[np.int32], time: int, kinds: Kinds
    ) -> tuple[Floats, NDArray[np.int64]]:
        """Adds a sample of each; returns (N,) ln by which the clock is below its past, 0 where it is not, and the s for
        which it is.

        clock: MHz, NaN without one.   gate: works, has no reason for a lower clock, and may be judged. Under a reason
        that comes later a fall lasts for as long as the clock is low.
        nodes: number of the node, -1 unknown.   kinds: products (Detector.kinds).
        """
        value = -np.log(np.where(clock > 0, clock, np.nan))
        step = self.streams.step(value, np.full(len(clock), -1, np.int32), time, gate, kinds)
        at = np.flatnonzero(step.on & ~step.below & (gate | (value - step.median >= HARM)))
        at = at[count_near(time - SECOND * step.held[at], nodes[at], AGO) < NODES]
        fallen = np.zeros(len(clock))
        fallen[at] = step.effect[at]
        return fallen, step.held
