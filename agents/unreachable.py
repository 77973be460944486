"""Which BMCs and exporters do not answer, and why, as the readings of their collector tell it."""

from __future__ import annotations

from collections.abc import Sequence

from agents.collector import Reading

_SIGNALS = {"bmc": "bmc.reachable", "exporter": "exporter.up"}
_EVENTS = frozenset({"bmc_lost", "exporter"})
UNHEARD = "no answer yet"


def unreachable(readings: Sequence[Reading]) -> dict[str, str]:
    """Entity -> why it is not read; `UNHEARD` where it was asked and has neither answered nor failed."""
    up: dict[str, float | None] = {}
    reasons: dict[str, str] = {}
    for reading in readings:
        for event in reading.events:
            if event.kind in _EVENTS:
                reasons[event.entity] = str(event.data.get("reason") or "")
        signal = _SIGNALS.get(reading.device_class)
        column = reading.columns.get(signal) if signal is not None else None
        for i, entity in enumerate(reading.entities if signal is not None else ()):
            value = float(column[i]) if column is not None else float("nan")
            up[entity] = value if value == value else up.get(entity)
    return {
        entity: UNHEARD if value is None else reasons.get(entity) or "no reason was told"
        for entity, value in up.items()
        if not value
    }
