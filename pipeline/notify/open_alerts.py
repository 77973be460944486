"""What holds back the alerts of incidents that are not resolved: read again when one of them changed, once for all
receivers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import duckdb

_HELD_BACK = """
SELECT id, coalesce(json_extract_string(life, '$.inhibited_by[0]'), ''),
    coalesce(json_extract_string(life, '$.inhibitor'), ''),
    CASE WHEN state = 'acknowledged' AND json_extract_string(life, '$.page_waits') = 'true'
         THEN coalesce(json_extract_string(life, '$.acknowledged_by'), '') ELSE '' END
FROM incidents WHERE resolved IS NULL AND life IS NOT NULL
"""
_STATE = """
SELECT count(*), bit_xor(hash(id, state, severity, cause, entity, detector, simulated, life)) FROM incidents
WHERE resolved IS NULL
"""
"""All that labels and `_HELD_BACK` are made of."""


class HeldBack(NamedTuple):
    """What holds an incident back as its newest change says; empty: nothing.

    storm:     the incident that represents it.   inhibitor: what inhibits it: also if its rule is no longer configured,
               until the end of that inhibition is a change, in which pages count for a storm.
    owner:     who acknowledged it while it was inhibited.
    """

    storm: str = ""
    inhibitor: str = ""
    owner: str = ""


NOTHING = HeldBack()


@dataclass(frozen=True, slots=True)
class OpenAlerts:
    """By incident: what holds it back as its newest change says, and which other incident inhibits it by a rule now."""

    held_back: Mapping[str, HeldBack]
    inhibited: Mapping[str, str]

    def find(self, incident: str) -> HeldBack:
        """Returns what holds an incident back."""
        back = self.held_back.get(incident, NOTHING)
        return back._replace(inhibitor=back.storm or back.inhibitor or self.inhibited.get(incident, ""))


class OpenAlertReader:
    """Reads them for the threads of all receivers: the same object while nothing changed.

    find_inhibited: incident -> the incident that inhibits it by a rule.
    """

    def __init__(self, find_inhibited: Callable[[duckdb.DuckDBPyConnection], Mapping[str, str]]) -> None:
        self._find_inhibited = find_inhibited
        self._lock = threading.Lock()
        self._state: object = None
        self._read = OpenAlerts({}, {})

    def read(self, cursor: duckdb.DuckDBPyConnection) -> OpenAlerts:
        """Returns them as they are now."""
        with self._lock:
            cursor.begin()  # else a page may be in one of the three and the storm that represents it not in another
            try:
                state = cursor.execute(_STATE).fetchone()
                if state != self._state:
                    back = {id_: HeldBack(*by) for id_, *by in cursor.execute(_HELD_BACK).fetchall() if any(by)}
                    self._read = OpenAlerts(back, self._find_inhibited(cursor))
                    self._state = state
            finally:
                cursor.rollback()
            return self._read
