"""Data that was lost, late or rejected, and the versions of software of the nodes: from the store, in bounded time."""

from __future__ import annotations

from typing import Any

import duckdb

from pipeline.model.records import SECOND, iso

DAY, HOUR = 86_400 * SECOND, 3600 * SECOND
MAX_ROWS = 50
"""Rows of each list. Chosen: what a person reads."""
MAX_SENDERS = 5
"""Senders named in a row. Chosen."""
VERSIONS = ("agent", "nvidia_driver", "mlx5_core_driver", "kernel", "operating_system", "bios_version")
"""Attributes of nodes that are compared over the fleet, from the collector `versions`."""

_GAPS = """
SELECT cause, topic, count(DISTINCT source) AS senders, sum(next_sequence - first_sequence)::BIGINT AS messages,
       coalesce(sum(next_sequence - first_sequence) FILTER (time >= make_timestamptz($day)), 0)::BIGINT AS last_day,
       epoch_us(min(time)), epoch_us(max(time)), list_slice(list_distinct(list(source ORDER BY time DESC)), 1, $most)
FROM gaps WHERE next_sequence > first_sequence GROUP BY cause, topic ORDER BY max(time) DESC LIMIT $rows"""
_GAP_HOURS = """
SELECT (epoch_us(time) - $day) // 3600000000 AS hour, sum(next_sequence - first_sequence)::BIGINT
FROM gaps WHERE time >= make_timestamptz($day) AND next_sequence > first_sequence GROUP BY hour"""
_REJECTED = """
SELECT rule, topic, "key", count(*) AS letters, epoch_us(min(time)), epoch_us(max(time)), arg_max(reason, time)
FROM dead_letter GROUP BY rule, topic, "key" ORDER BY max(time) DESC LIMIT $rows"""
_EARLIER = "SELECT kind, cause, topic, number, messages, epoch_us(first), epoch_us(last) FROM losses ORDER BY last DESC"
_VERSIONS = """
SELECT name, version, count(*) AS nodes, list_slice(list(entity ORDER BY entity), 1, $most)
FROM (SELECT entity, unnest($names) AS name, attributes ->> ('$.' || unnest($names)) AS version
      FROM entity WHERE kind = 'node')
WHERE version IS NOT NULL GROUP BY name, version ORDER BY name, nodes DESC, version"""


def read_losses(cursor: duckdb.DuckDBPyConnection, now: int) -> dict[str, Any]:
    """Returns gaps by cause, the messages lost per hour of the last day, dead letters by rule and sender, and totals
    of rows that retention removed."""
    given = {"day": now - DAY, "most": MAX_SENDERS, "rows": MAX_ROWS}
    gaps = cursor.execute(_GAPS, given).fetchall()
    hours = dict(cursor.execute(_GAP_HOURS, {"day": now - DAY}).fetchall())
    letters = cursor.execute(_REJECTED, {"rows": MAX_ROWS}).fetchall()
    return {
        "gaps": [
            {
                "cause": cause,
                "topic": topic,
                "senders": senders,
                "messages": messages,
                "last_day": last_day,
                "first": iso(first),
                "last": iso(last),
                "examples": list(examples),
            }
            for cause, topic, senders, messages, last_day, first, last, examples in gaps
        ],
        "gap_hours": [int(hours.get(hour, 0)) for hour in range(24)],
        "rejected": [
            {
                "rule": rule,
                "topic": topic,
                "sender": _sender(key),
                "messages": number,
                "first": iso(first),
                "last": iso(last),
                "reason": reason,
            }
            for rule, topic, key, number, first, last, reason in letters
        ],
        "earlier": [
            dict(zip(("kind", "cause", "topic", "number", "messages", "first", "last"), _with_times(row), strict=True))
            for row in cursor.execute(_EARLIER).fetchall()[:MAX_ROWS]
        ],
    }


def _with_times(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*row[:-2], *map(iso, row[-2:]))


def _sender(key: bytes | None) -> str:
    """Returns the key of a message, which is the name of its sender; "" without one."""
    return "" if key is None else bytes(key).decode("utf-8", "replace")


def read_versions(cursor: duckdb.DuckDBPyConnection) -> list[dict[str, Any]]:
    """Returns the versions of agents, drivers and systems with the number of nodes that run each."""
    rows = cursor.execute(_VERSIONS, {"names": list(VERSIONS), "most": MAX_SENDERS}).fetchall()
    kept: dict[str, int] = {}
    found = []
    for name, version, nodes, examples in rows:
        kept[name] = kept.get(name, 0) + 1
        if kept[name] <= MAX_ROWS:
            found.append({"name": name, "version": version, "nodes": nodes, "examples": list(examples)})
    return found
