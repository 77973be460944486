"""Signals of the class rank: one member of a training job. One line per signal.

Durations are means if there were several steps between two readings; without a step the last values are repeated.
"""

from __future__ import annotations

from pipeline.model.signals.signal import Signal

RANK_SIGNALS: tuple[Signal, ...] = (
    Signal("rank.step", "{step}", "counter", "rank", "u8", "Training steps finished", "training"),
    Signal("rank.step_time", "s", "gauge", "rank", "f4", "Duration of the last step, including waiting for other ranks; the mean if there were several since the previous reading", "training", "", (0, 1e6), harm="up"),
    Signal("rank.compute_time", "s", "gauge", "rank", "f4", "Forward and backward computation of the last step, before any collective; the mean if there were several since the previous reading", "training", "", (0, 1e6), harm="up"),
    Signal("rank.communication_time", "s", "gauge", "rank", "f4", "Time in collectives of the last step, including waiting; the mean if there were several since the previous reading", "training", "", (0, 1e6)),
    Signal("rank.step_time_longest", "s", "gauge", "rank", "f4", "Longest step since the previous reading", "training", "", (0, 1e6)),
    Signal("rank.compute_time_longest", "s", "gauge", "rank", "f4", "Longest computation of a step since the previous reading", "training", "", (0, 1e6)),
    Signal("rank.tokens", "{token}", "counter", "rank", "u8", "Tokens that this rank processed since its script started", "training"),
    Signal("rank.loss", "1", "gauge", "rank", "f4", "Loss of the last step that reported one; missing if it was NaN or infinite", "training", "", (-3.4e38, 3.4e38)),
    Signal("rank.gradient_norm", "1", "gauge", "rank", "f4", "Largest gradient norm since the previous reading; missing if it was NaN or infinite", "training", "", (0, 3.4e38)),
    Signal("rank.nonfinite", "{value}", "counter", "rank", "u8", "Losses and gradient norms that were NaN or infinite", "training", harm="up"),
    Signal("rank.drops", "{datagram}", "counter", "rank", "u8", "Reports of the script that the agent could not accept immediately", "training"),
    Signal("rank.refused", "{value}", "counter", "rank", "u8", "Invalid values from the script, such as wrong types and negative durations", "training"),
)  # fmt: skip
