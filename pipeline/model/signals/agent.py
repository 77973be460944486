"""Signals of monitoring itself: agent, collector, exporter (a scraped endpoint), custom (a series without a mapping)."""

from __future__ import annotations

from pipeline.model.signals.signal import Signal

AGENT_SIGNALS: tuple[Signal, ...] = (
    Signal("agent.cpu_time", "ms", "counter", "agent", "u8", "Processor time of all its processes", "/proc/PID/stat", "process.cpu.time", interval=10),
    Signal("agent.memory", "By", "gauge", "agent", "f8", "Proportional set size of all its processes", "/proc/PID/smaps_rollup", "process.memory.usage", (0, 1e12), harm="up", interval=60),
    Signal("agent.spool_bytes", "By", "gauge", "agent", "f8", "Bytes of the spools on disk", "agent", "", (0, 1e15), interval=10),
    Signal("agent.spool_wait", "s", "gauge", "agent", "f4", "Longest time that a message waited for the disk of the spool, in the last 10 s", "agent", "", (0, 1e6), harm="up", interval=10),
    Signal("agent.dropped", "{message}", "counter", "agent", "u8", "Messages that the spools dropped or refused", "agent", "", harm="up", interval=10),
    Signal("agent.unsent", "{message}", "gauge", "agent", "f8", "Messages spooled and not yet acknowledged by Kafka", "agent", "", (0, 1e15), harm="up", interval=10),
)  # fmt: skip


COLLECTOR_SIGNALS: tuple[Signal, ...] = (
    Signal("collector.state", "1", "state", "collector", "u1", "Result of its last reading", "agent", "hw.status", (0, 4), states=("starting", "ok", "no data", "fault", "hung"), normal=("starting", "ok", "no data"), interval=10),
    Signal("collector.latency", "s", "gauge", "collector", "f4", "Duration of its last reading", "agent", "", (0, 1e6), harm="up", interval=10),
    Signal("collector.silence", "s", "gauge", "collector", "f4", "Time since its last successful reading", "agent", "", (0, 1e9), harm="up", interval=10),
    Signal("collector.restarts", "1", "counter", "collector", "u4", "Restarts after a timeout since the agent started", "agent", "", harm="up", interval=10),
)  # fmt: skip


EXPORTER_SIGNALS: tuple[Signal, ...] = (
    Signal("exporter.up", "1", "state", "exporter", "u1", "Whether the endpoint returned a page", "own scrape", "", (0, 1), states=("down", "up"), normal=("up",), harm="down", interval=15.0),
    Signal("exporter.scrape_time", "s", "gauge", "exporter", "f4", "Duration of the scrape, including mapping", "own timer", "", (0, 1e4), harm="up", interval=15.0),
    Signal("exporter.series", "{series}", "gauge", "exporter", "u4", "Series on the page", "own count", "", interval=15.0),
    Signal("exporter.mapped", "{series}", "gauge", "exporter", "u4", "Series mapped to signals of the catalogue", "own count", "", harm="down", interval=15.0),
    Signal("exporter.unmapped", "{series}", "gauge", "exporter", "u4", "Series without a mapping", "own count", "", interval=15.0),
    Signal("exporter.dropped", "{series}", "gauge", "exporter", "u4", "Unmapped series that were not kept: above the limit, or histogram buckets", "own count", "", harm="up", interval=15.0),
    Signal("exporter.bad_lines", "{line}", "gauge", "exporter", "u4", "Lines of the page that are not valid samples", "own count", "", harm="up", interval=15.0),
)  # fmt: skip


CUSTOM_SIGNALS: tuple[Signal, ...] = (
    Signal("custom.value", "", "gauge", "custom", "f8", "Value of the series as exported; its name, labels and type are attributes", "OpenMetrics", "", interval=15.0),
)  # fmt: skip
