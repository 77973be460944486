"""Signals of the class canary: one processor core on which known problems are computed. One line per signal."""

from __future__ import annotations

from pipeline.signals.signal import Signal

SIGNALS: tuple[Signal, ...] = (
    Signal("canary.runs", "{run}", "counter", "canary", "u8", "Problems with known answers that this core has computed", "own count", interval=3600),
    Signal("canary.mismatches", "{run}", "counter", "canary", "u8", "Rounds of them of which an answer was wrong", "own count", harm="up", interval=3600),
    Signal("canary.yields", "{run}", "counter", "canary", "u8", "Rounds given up because others needed the core", "own count", interval=3600),
    Signal("canary.busy_time", "ms", "counter", "canary", "u8", "Processor time that the problems took", "getrusage(2)", interval=3600),
)  # fmt: skip
