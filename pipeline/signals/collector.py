"""Signals of the class collector: one collector of the agent. One line per signal."""

from __future__ import annotations

from pipeline.signals.signal import Signal

SIGNALS: tuple[Signal, ...] = (
    Signal("collector.state", "1", "state", "collector", "u1", "What became of its last look", "agent", "hw.status", (0, 4), states=("starting", "ok", "no data", "fault", "hung"), normal=("starting", "ok", "no data"), interval=10),
    Signal("collector.latency", "s", "gauge", "collector", "f4", "How long its last look took", "agent", "", (0, 1e6), harm="up", interval=10),
    Signal("collector.silence", "s", "gauge", "collector", "f4", "Time since its last look that brought a reading", "agent", "", (0, 1e9), harm="up", interval=10),
    Signal("collector.restarts", "1", "counter", "collector", "u4", "Times it was given up and started anew since the agent started", "agent", "", harm="up", interval=10),
)  # fmt: skip
