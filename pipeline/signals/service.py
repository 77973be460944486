"""Signals of the class service: one service that must run. One line per signal."""

from __future__ import annotations

from pipeline.signals.signal import Signal

SIGNALS: tuple[Signal, ...] = (
    Signal("service.state", "1", "state", "service", "u1", "Whether it runs, as systemd has it; absent: configuration requires it and it is not installed", "systemd over D-Bus, ActiveState", "hw.status", (0, 7), states=("inactive", "active", "reloading", "failed", "activating", "deactivating", "maintenance", "absent"), normal=("active", "reloading"), interval=15),
    Signal("service.restarts", "1", "counter", "service", "u4", "Times that systemd started it anew by itself", "systemd over D-Bus, NRestarts", "", harm="up", interval=15),
)  # fmt: skip
