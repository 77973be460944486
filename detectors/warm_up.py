"""Compiles the loops of the detectors before telemetry is read: else a first start reads nothing for 20 s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.detector import Detector
from detectors.runner import Runner
from pipeline.judging.frames import Framer
from pipeline.model.records import SECOND, Rows
from pipeline.model.signals import CATALOGUE, CLASSES
from pipeline.model.topology import Topology

_DEVICES = 16  # of each class, one on each of 16 nodes; chosen: twice the smallest cohort that is compared
_INSTANTS = 30  # chosen: by then every loop that a learning detector calls has been called
_STEP, _BEGIN = 10 * SECOND, 1_600_000_000 * SECOND
_SHARED = ("rack:warm", "cdu:warm", "pdu:warm", "leaf:warm", "rail:warm", "stage:warm.0", "job:warm")


def warm_up(detectors: Sequence[Detector]) -> None:
    """Runs `detectors` over some artificial frames; do not use them afterwards.

    The frames come from a Framer, since machine code is compiled for the types of its arrays.
    """
    runner = Runner(detectors)
    names = {c: [f"{kind}:warm{i}.0" for i in range(_DEVICES)] for c, kind in CLASSES.items()}
    names["node"] = [f"node:warm{i}" for i in range(_DEVICES)]
    parents = {n: (f"node:warm{i}", *_SHARED) for c in names if c != "node" for i, n in enumerate(names[c])}
    framer = Framer(_STEP, Topology(parents), lambda c: names[c], start=_BEGIN, signals=runner.signals)
    for instant in range(_INSTANTS):
        time = _BEGIN + instant * _STEP
        for rows in _rows(runner.signals, time):
            framer.add_rows(rows)
        for instant_frames in framer.advance(time + _STEP):
            runner.observe(instant_frames.frames)


def _rows(signals: frozenset[str], time: int) -> list[Rows]:
    """Returns a row of each device of each class, with a value near one, or a valid one, of each signal."""
    spread = 1 + np.arange(_DEVICES) % 3 / 100 + (time // _STEP) % 5 / 1000
    of_class: dict[str, dict[str, NDArray[Any]]] = {}
    for name in sorted(signals & CATALOGUE.keys()):
        low, high = CATALOGUE[name].valid
        of_class.setdefault(CATALOGUE[name].device_class, {})[name] = np.clip(spread, low, high)
    times, devices = np.full(_DEVICES, time), np.arange(_DEVICES, dtype=np.int32)
    return [Rows(c, times, devices, columns) for c, columns in of_class.items()]
