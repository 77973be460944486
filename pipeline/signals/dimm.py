"""Signals of the class dimm: one memory module. One line per signal."""

from __future__ import annotations

from pipeline.signals.signal import Signal

SIGNALS: tuple[Signal, ...] = (
    Signal("dimm.corrected", "{error}", "counter", "dimm", "u8", "Corrected memory errors since boot", "/sys/devices/system/edac/mc/mcN/dimmN/dimm_ce_count", "hw.errors", harm="up", interval=30),
    Signal("dimm.uncorrected", "{error}", "counter", "dimm", "u8", "Uncorrected memory errors since boot", "/sys/devices/system/edac/mc/mcN/dimmN/dimm_ue_count", "hw.errors", harm="up", interval=30),
)  # fmt: skip
