"""Signals of the class bmc: one board management controller that is asked over the network. One line per signal."""

from __future__ import annotations

from pipeline.signals.signal import Signal

SIGNALS: tuple[Signal, ...] = (
    Signal("bmc.reachable", "", "state", "bmc", "u1", "Whether the BMC answered when it was asked last", "any Redfish request", "", (0, 1), ("no", "yes"), ("yes",), "down", interval=10),
    Signal("bmc.latency", "s", "gauge", "bmc", "f4", "Time of the newest answer", "any Redfish request, own timer", "", (0, 1e4), harm="up", interval=10),
    Signal("bmc.pending", "s", "gauge", "bmc", "f4", "How long the request under way has been waiting for its answer; 0 where there is none", "any Redfish request, own timer", "", (0, 1e4), harm="up", interval=10),
    Signal("bmc.requests", "{request}", "counter", "bmc", "u8", "Requests made since the collector started", "own count", interval=10),
    Signal("bmc.failures", "{failure}", "counter", "bmc", "u8", "Requests without a useful answer, and parts of answers that could not be read, since the collector started", "own count", interval=10),
)  # fmt: skip
