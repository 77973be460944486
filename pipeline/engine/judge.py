"""What the engine needs of the detectors, which the entry point passes in: the pipeline imports no detector."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.model.records import Event, Finding, Frame
from pipeline.model.topology import Topology
from pipeline.store.detector_state import Piece


class Judge(Protocol):
    """The detectors, passed in by the entry point. beat: heartbeat, called with the next step; set by the pipeline."""

    beat: Callable[[str], None]

    @property
    def signals(self) -> Collection[str] | None:
        """The signals that they use; None: all."""
        ...

    @property
    def names(self) -> Collection[str]:
        """The names of the detectors, for modes and mutes."""
        ...

    def listing(self) -> list[dict[str, Any]]:
        """Returns a row per detector, as in GET /api/v1/detectors."""
        ...

    def calibration(self) -> dict[str, Any]:
        """Returns the thresholds in force, and the evidence for them."""
        ...

    def calibration_rows(self, other: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Returns them as rows, compared with an earlier version, as in GET /api/v1/calibration."""
        ...

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Returns the findings of one instant. frames: by device class."""
        ...

    def judge_events(self, events: Sequence[Event], topology: Topology, again: bool = False) -> list[Finding]:
        """Returns the findings of single events, on arrival. again: also for events that were judged before."""
        ...

    def snapshot(self) -> Iterable[Piece]:
        """Yields the state of the detectors in named pieces, to be read before the next instant."""
        ...

    def restore(self, pieces: Mapping[str, bytes]) -> None:
        """Restores the state of a snapshot."""
        ...

    def drop_ranks(self, kept: NDArray[np.bool_]) -> None:
        """Forgets ranks that ended, after `restore`. kept: (N,) whether a column of the frames of ranks stays."""
        ...
