"""Signals of the class agent: the agent itself. One line per signal."""

from __future__ import annotations

from pipeline.signals.signal import Signal

SIGNALS: tuple[Signal, ...] = (
    Signal("agent.cpu_time", "ms", "counter", "agent", "u8", "Processor time of all its processes", "/proc/PID/stat", "process.cpu.time", interval=10),
    Signal("agent.memory", "By", "gauge", "agent", "f8", "Proportional set size of all its processes", "/proc/PID/smaps_rollup", "process.memory.usage", (0, 1e12), harm="up", interval=60),
    Signal("agent.spool_bytes", "By", "gauge", "agent", "f8", "Bytes of the spools on disk", "agent", "", (0, 1e15), interval=10),
    Signal("agent.spool_wait", "s", "gauge", "agent", "f4", "Longest time that a message waited for the disk of the spool, in the last 10 s", "agent", "", (0, 1e6), harm="up", interval=10),
    Signal("agent.dropped", "{message}", "counter", "agent", "u8", "Messages that the spools gave up or could not take", "agent", "", harm="up", interval=10),
    Signal("agent.unsent", "{message}", "gauge", "agent", "f8", "Messages spooled and not yet acknowledged by Kafka", "agent", "", (0, 1e15), harm="up", interval=10),
)  # fmt: skip
