"""Signals of the class rank: one member of a training job. One line per signal.

With several steps between two looks the durations are means; with none the last step's values stand.
"""

from __future__ import annotations

from pipeline.model.signals.signal import Signal

RANK_SIGNALS: tuple[Signal, ...] = (
    Signal("rank.step", "{step}", "counter", "rank", "u8", "Training steps finished", "training"),
    Signal("rank.step_time", "s", "gauge", "rank", "f4", "Length of the last step, waiting for other ranks included; the mean where a look saw several", "training", "", (0, 1e6), harm="up"),
    Signal("rank.compute_time", "s", "gauge", "rank", "f4", "Forward and backward computation of the last step, before any collective; the mean where a look saw several", "training", "", (0, 1e6), harm="up"),
    Signal("rank.communication_time", "s", "gauge", "rank", "f4", "Time in collectives of the last step, waiting included; the mean where a look saw several", "training", "", (0, 1e6)),
    Signal("rank.step_time_longest", "s", "gauge", "rank", "f4", "Longest of the steps that the last look saw", "training", "", (0, 1e6)),
    Signal("rank.compute_time_longest", "s", "gauge", "rank", "f4", "Longest computation of the steps that the last look saw", "training", "", (0, 1e6)),
    Signal("rank.tokens", "{token}", "counter", "rank", "u8", "Tokens that this rank worked on since its script began", "training"),
    Signal("rank.loss", "1", "gauge", "rank", "f4", "Loss of the last step that told one; missing where it was NaN or infinite", "training", "", (-3.4e38, 3.4e38)),
    Signal("rank.gradient_norm", "1", "gauge", "rank", "f4", "Greatest norm of the gradient of the steps that the last look saw; missing where it was NaN or infinite", "training", "", (0, 3.4e38)),
    Signal("rank.nonfinite", "{value}", "counter", "rank", "u8", "Losses and gradient norms that were NaN or infinite", "training", harm="up"),
    Signal("rank.drops", "{datagram}", "counter", "rank", "u8", "Reports of the script that the agent could not take at once", "training"),
    Signal("rank.refused", "{value}", "counter", "rank", "u8", "Values of the script that could not be used: of another type, negative durations and the like", "training"),
)  # fmt: skip
