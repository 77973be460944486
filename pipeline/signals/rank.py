"""Signals of the class rank: one member of a training job. One line per signal."""

from __future__ import annotations

from pipeline.signals.signal import Signal

SIGNALS: tuple[Signal, ...] = (
    Signal("rank.step", "{step}", "counter", "rank", "u8", "Training steps finished", "training job"),
    Signal("rank.step_time", "s", "gauge", "rank", "f4", "Length of the last step for the whole job", "training job", "", (0, 1e6), harm="up"),
    Signal("rank.compute_time", "s", "gauge", "rank", "f4", "Forward and backward computation of the last step, before any collective", "training job", "", (0, 1e6), harm="up"),
    Signal("rank.communication_time", "s", "gauge", "rank", "f4", "Time in collectives of the last step, waiting included", "training job", "", (0, 1e6)),
)  # fmt: skip
