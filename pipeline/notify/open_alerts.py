"""The alerts of all incidents that are not resolved, and what holds them back: read again when one of them changed,
once for all receivers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import duckdb

from pipeline.notify.routes import Labels

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


@dataclass(frozen=True, slots=True)
class OpenAlerts:
    """By incident: the labels of each alert, which may inhibit others, and what holds it back, if anything does."""

    firing: Mapping[str, Labels]
    held_back: Mapping[str, HeldBack]


class OpenAlertReader:
    """Reads them for the threads of all receivers: the same object while nothing changed.

    load_firing: returns the labels of all alerts that fire, by incident.
    """

    def __init__(self, load_firing: Callable[[duckdb.DuckDBPyConnection], Mapping[str, Labels]]) -> None:
        self._load_firing = load_firing
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
                    self._read = OpenAlerts(self._load_firing(cursor), back)
                    self._state = state
            finally:
                cursor.rollback()
            return self._read
