"""A coolant unit's own row: flow, temperatures and pressures of its secondary side, made of its connectors'.

Flow and heat are the sum over the secondary connectors, the rest is their mean. A value is given only where every
connector that ever gave it gives it now: a sum with a connector missing would look like a loss of flow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from agents.sources.redfish.rows import Row

_SUMS = ("coolant.flow", "coolant.heat_removed")
_MEANS = (
    *("coolant.supply_temperature", "coolant.return_temperature", "coolant.delta_temperature"),
    *("coolant.pressure", "coolant.supply_pressure", "coolant.return_pressure"),
)
STALE_S = 15.0
"""Age from which on a connector's values are no longer counted in; chosen: three times the slowest poll that still
tells of a lost pump before the GPUs grow hot."""


@dataclass
class Units:
    """The newest rows of secondary connectors by unit. Times are monotonic seconds."""

    _rows: dict[str, dict[str, tuple[float, Row]]] = field(default_factory=dict)
    _gave: dict[str, set[str]] = field(default_factory=dict)

    def row(self, unit: str, connector: Row, now: float, members: Iterable[str]) -> Row | None:
        """The unit's row after one of its connectors was read; None until all `members` were read once."""
        known = self._rows.setdefault(unit, {})
        known[connector.entity] = now, connector
        wanted = set(members)
        for gone in known.keys() - wanted:
            del known[gone]
        self._gave.setdefault(connector.entity, set()).update(
            signal for signal in (*_SUMS, *_MEANS) if connector.values.get(signal) is not None
        )
        if known.keys() != wanted:
            return None
        values = {signal: self._of(known, signal, now) for signal in (*_SUMS, *_MEANS)}
        return Row(unit, "coolant", values)

    def _of(self, known: dict[str, tuple[float, Row]], signal: str, now: float) -> float | None:
        found = []
        for entity, (time, row) in known.items():
            if signal in self._gave.get(entity, ()):
                value = row.values.get(signal)
                if value is None or now - time > STALE_S:
                    return None
                found.append(value)
        if not found:
            return None
        return sum(found) if signal in _SUMS else sum(found) / len(found)

    def drop(self, entity: str) -> None:
        """A connector or unit that is gone."""
        self._rows.pop(entity, None)
        self._gave.pop(entity, None)
