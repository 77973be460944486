"""What `fleetpulse signals` shows: one row per signal of the catalogue."""

from __future__ import annotations

from typing import Any

from pipeline.signals import CATALOGUE

_FIELDS = {"name": "signal", "unit": "unit", "kind": "kind", "device_class": "class", "column": "column"}
_FIELDS |= {"type": "type", "otel": "otel", "source": "source", "help": "help"}
COLUMNS = list(_FIELDS.values())


def rows() -> list[dict[str, Any]]:
    """Plain data, in the order of the catalogue."""
    return [{shown: getattr(signal, name) for name, shown in _FIELDS.items()} for signal in CATALOGUE.values()]
