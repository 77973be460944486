"""What straggler_inferred keeps of GPUs, as those see it that put it into words."""

from __future__ import annotations

from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from detectors.base.gates import Gates
from detectors.base.streams import Bools, Floats, Streams
from detectors.straggler.pressure import Pressure
from detectors.straggler.seats import Seats


class Watched(Protocol):
    """Settings and arrays by GPU; see StragglerInferred."""

    name: ClassVar[str]
    delta: float
    duty_delta: float
    hold: float
    job_hold: float
    clocks: Streams
    duty: Streams
    seats: Seats
    gates: Gates
    pressure: Pressure
    raw: Floats
    power: Floats
    clock: Floats
    active: Floats
    width: Floats
    generation: Floats
    capped: Floats
    bits: NDArray[np.uint64]
    bit_since: NDArray[np.int64]
    stuck_since: NDArray[np.int64]
    low_since: NDArray[np.int64]
    high_since: NDArray[np.int64]
    judged: NDArray[np.int64]
    settled: NDArray[np.int64]
    tensor: Bools
