"""Texts of alerts that are sent again, as their incidents are now: the title of an incident changes while it is open.

They are read from the store, as the threads of receivers may not read the engine's books.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import duckdb

from pipeline.incidents import ledger
from pipeline.model.records import Incident
from pipeline.notify.alertmanager import make_alert

Annotate = Callable[[Incident, tuple[str, str] | None], Mapping[str, str]]
"""Incident, and its impact in one line and for a title (None: as it is known now) -> further annotations."""
Renew = Callable[[duckdb.DuckDBPyConnection, Sequence[Mapping[str, Any]]], list[Mapping[str, Any]]]
"""Returns alerts with the texts of now."""
_NEWEST_ALERTS = """
SELECT incident, payload FROM outbox WHERE incident IN (SELECT unnest($1::VARCHAR[])) AND kind = 'firing'
QUALIFY row_number() OVER (PARTITION BY incident ORDER BY created DESC, number DESC) = 1
"""
_IMPACTS = """
SELECT incident, detail ->> '$.text', detail ->> '$.title' FROM impact WHERE incident IN (SELECT unnest($1::VARCHAR[]))
"""


def renew_texts(
    cursor: duckdb.DuckDBPyConnection, alerts: Sequence[Mapping[str, Any]], external_url: str, annotate: Annotate
) -> list[Mapping[str, Any]]:
    """Returns the alerts, those that fire with the annotations of their incidents as stored. Labels, which are the
    identity of an alert, stay as sent, and so does an alert whose incident has ended."""
    ids = sorted({str(one["labels"].get("incident", "")) for one in alerts if one["status"] == "firing"})
    known = {one.id: one for one in ledger.load_incidents(cursor, ids) if one.resolved is None}
    rows = cursor.execute(_IMPACTS, [list(known)]).fetchall() if known else []
    impacts = {incident: (text or "", title or "") for incident, text, title in rows}
    found = list[Mapping[str, Any]]()
    for one in alerts:
        incident = known.get(str(one["labels"].get("incident", ""))) if one["status"] == "firing" else None
        if incident is None:
            found.append(one)
            continue
        more = annotate(incident, impacts.get(incident.id, ("", "")))
        made = make_alert(incident, one["labels"], external_url, None, more)
        found.append({**one, "annotations": made["annotations"]})
    return found


def read_sent_labels(
    open_cursor: Callable[[], duckdb.DuckDBPyConnection], incidents: Sequence[str]
) -> dict[str, Mapping[str, str]]:
    """Returns the labels of the newest stored alert of each incident that has one."""
    with contextlib.closing(open_cursor()) as cursor:
        rows = cursor.execute(_NEWEST_ALERTS, [list(incidents)]).fetchall()
    return {incident: json.loads(payload)["alerts"][-1]["labels"] for incident, payload in rows}
