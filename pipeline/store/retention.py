"""Retention: the bound of every table of the store, and how rows over it are removed.

Rows removed from `gaps` and `dead_letter` are added to `losses`, one row per topic and cause, so that no loss is lost
from the counts. Also removes rows with times in the future, which older versions stored because they trusted every
clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import duckdb

from pipeline.config.sections import Store
from pipeline.model.records import SECOND
from pipeline.model.signals import CLASSES
from pipeline.store import schema
from pipeline.store.database import Database
from pipeline.store.job_membership import end_unnamed_ranks
from pipeline.store.topology_lines import keep_unnamed

HOUR = 3600 * SECOND
DAY = 24 * HOUR
SENT_KEPT = 7 * DAY
"""Time for which messages to receivers are kept at least (us). Chosen."""
GAP_ROWS = 100_000  # as many as can heal (MAX_GAPS of gaps.py)
LETTER_ROWS = 100_000  # chosen: far more than a person reads; bytes are bounded too
EVENT_ROWS = 2_000_000  # chosen: one per minute and node of 1,000 nodes for a day, or a quarter of a calmer fleet
FINDING_ROWS = 1_000_000  # chosen: a finding a minute for two years
INCIDENT_ROWS = 100_000  # chosen: a thousand a day for a quarter
MUTE_ROWS = 10_000  # chosen: a hundred a day for a quarter
RANK_ROWS = 5_000_000  # chosen: 50 starts of a job on all of 100,000 GPUs
LINE_ROWS = 2_000_000  # chosen: every line of 12,500 nodes with 8 GPUs changes ten times
AUDIT_ROWS = 1_000_000  # chosen: two thousand writes a day for a year
JOB_ROWS = 200_000  # chosen: two thousand jobs a day for a quarter
PACE_ROWS = 5_000_000  # chosen: a hundred jobs for a month, 200 MB
LOSS_CAUSES = 1_000  # causes come from senders; more are counted as one; chosen


@dataclass(frozen=True, slots=True)
class Bound:
    """The bound of a table, as in docs/store.md.  sql: statements that remove rows over it, in order.

    {now}, {commits}, {routine}, {sent}, {gaps}, {letters}, {history}, {audit} are the times (us) before which rows are
    too old; {bytes} is the limit of the payloads of dead letters.
    """

    text: str
    sql: tuple[str, ...] = ()


def _older_than(table: str, time: str, name: str, rows: int) -> str:
    """SQL condition: older than {name}, or than the newest `rows` rows."""
    newest = f'SELECT max({time}) FROM (SELECT {time} FROM "{table}" ORDER BY {time} DESC NULLS LAST OFFSET {rows})'
    return f"({time} < make_timestamptz({{{name}}}) OR {time} <= ({newest}))"


_OLD_GAP = _older_than("gaps", "time", "gaps", GAP_ROWS)
_OLD_INCIDENT = _older_than("incidents", "resolved", "history", INCIDENT_ROWS)
_OLD_LETTER = (
    _older_than("dead_letter", "time", "letters", LETTER_ROWS)[:-1]
    + """ OR time <= (SELECT max(time) FROM (
        SELECT time, sum(octet_length(payload)) OVER (ORDER BY time DESC) AS held FROM dead_letter)
        WHERE held > {bytes}))"""
)


def _add_losses(kind: str, cause: str, messages: str, table: str, condition: str) -> str:
    """SQL that adds the rows that match the condition to their totals in `losses`."""
    known = f"(SELECT count(*) FROM losses) < {LOSS_CAUSES} OR cause IN (SELECT cause FROM losses)"
    return f"""
        INSERT INTO losses
        SELECT '{kind}', topic, CASE WHEN {known} THEN cause ELSE 'other causes' END AS said, count(*),
               sum(messages), min(time), max(time)
        FROM (SELECT topic, left({cause}, 200) AS cause, {messages} AS messages, time FROM {table} WHERE {condition})
        GROUP BY ALL
        ON CONFLICT (kind, topic, cause) DO UPDATE SET number = losses.number + excluded.number,
            messages = losses.messages + excluded.messages, first = least(losses.first, excluded.first),
            last = greatest(losses.last, excluded.last)"""


def bound_events(most: int) -> Bound:
    """Returns the bound of `events` with at most so many rows."""
    return Bound(
        f"[store] history_days, and the newest {most:,} rows; inventories and digests for a day",
        (
            f"DELETE FROM events WHERE {_ROUTINE} AND time < make_timestamptz({{routine}})",
            f"DELETE FROM events WHERE {_older_than('events', 'time', 'history', most)}",
        ),
    )


FIRES = """id IN (SELECT id FROM (
    SELECT id, number >= max(number) FILTER (kind <> 'update') OVER same AS is_newest,
           arg_max(kind, number) FILTER (kind <> 'update') OVER same AS newest
    FROM outbox WINDOW same AS (PARTITION BY receiver, incident)) WHERE is_newest AND newest = 'firing')"""
"""Condition on rows of `outbox`: the newest of an alert that fires, which numbers the next one and lets it end."""
_ROUTINE = "kind IN ('inventory', 'digest')"
"""Events that are sent all the time; their newest content is in `entity` and in findings."""
_SEALED = "full hours older than [store] hot_hours move to sealed files; rows older than [store] telemetry_days"
BOUNDS: Mapping[str, Bound] = {
    "meta": Bound("a fixed set of keys"),
    "snapshot": Bound("a fixed set of keys; the newest state of each"),
    "device": Bound("devices in telemetry, limited by admission"),
    "entity": Bound("entities in inventories, limited by admission"),
    "sender": Bound("100,000 senders; those with the oldest message are removed"),
    "owner": Bound(
        "entities claimed by senders, limited by admission; removed after a week without a claim, ranks after an hour"
    ),
    "events": bound_events(EVENT_ROWS),
    "sealed": Bound(
        "files of [store] telemetry_days, rollups of [store] rollup_days, and the newest [store] telemetry_bytes of "
        "both, at most half of the disk; rows go before rollups"
    ),
    **{f"hot_{c}": Bound(_SEALED) for c in CLASSES},  # and its narrow tables hot_CLASS_N, MAX_TABLES of a class
    **{f"latest_{c}": Bound("one row per row of device") for c in CLASSES},
    "ingest_commit": Bound(
        "commits of the last hour, and the newest of each partition; partitions that were replaced or silent for "
        "[store] history_days are removed",
        (
            """DELETE FROM ingest_commit WHERE committed < make_timestamptz({commits}) AND NOT EXISTS (
                FROM partition_offset o WHERE o.topic = ingest_commit.topic AND o.partition = ingest_commit.partition
                AND o.incarnation = ingest_commit.incarnation AND o.next_offset = ingest_commit.next_offset)""",
            """DELETE FROM ingest_commit WHERE (topic, partition, incarnation) IN (
                SELECT (topic, partition, incarnation) FROM ingest_commit GROUP BY topic, partition, incarnation
                HAVING max(committed) < make_timestamptz({history}))""",
        ),
    ),
    "partition_offset": Bound(
        "one row per partition, as long as it has a commit",
        (
            """DELETE FROM partition_offset WHERE (topic, partition, incarnation) NOT IN (
                SELECT (topic, partition, incarnation) FROM ingest_commit)""",
        ),
    ),
    "producer_mark": Bound(
        "the 16 newest spools per sender and topic, 400,000 senders and topics; spools without a message for "
        "[store] history_days are removed",
        (
            "UPDATE producer_mark SET updated = make_timestamptz({now}) WHERE updated IS NULL",
            "DELETE FROM producer_mark WHERE updated < make_timestamptz({history})",
        ),
    ),
    "gaps": Bound(
        f"[store] gap_days, and the newest {GAP_ROWS:,} rows; totals are kept in losses",
        (
            _add_losses("gap", "cause", "next_sequence - first_sequence", "gaps", _OLD_GAP),
            f"DELETE FROM gaps WHERE {_OLD_GAP}",
        ),
    ),
    "dead_letter": Bound(
        f"[store] dead_letter_hours, [store] dead_letter_bytes of payload, and the newest {LETTER_ROWS:,} rows; "
        "totals are kept in losses",
        (
            _add_losses("dead_letter", "rule", "1", "dead_letter", _OLD_LETTER),
            f"DELETE FROM dead_letter WHERE {_OLD_LETTER}",
        ),
    ),
    "losses": Bound(f"{LOSS_CAUSES:,} causes; further ones are counted as 'other causes'"),
    "incidents": Bound(
        f"[store] history_days after resolution, and the {INCIDENT_ROWS:,} resolved last; unresolved ones are kept",
        (f"DELETE FROM incidents WHERE resolved IS NOT NULL AND {_OLD_INCIDENT}",),
    ),
    "findings": Bound(
        f"[store] history_days, and the newest {FINDING_ROWS:,} rows; those of stored incidents are kept",
        (
            f"""DELETE FROM findings WHERE {_older_than("findings", "time", "history", FINDING_ROWS)}
                AND (incident IS NULL OR incident NOT IN (SELECT id FROM incidents))""",
        ),
    ),
    "history": Bound(
        "removed with their incident",
        ("DELETE FROM history WHERE incident NOT IN (SELECT id FROM incidents)",),
    ),
    "impact": Bound(
        "removed with their incident",
        ("DELETE FROM impact WHERE incident NOT IN (SELECT id FROM incidents)",),
    ),
    "impact_jobs": Bound(
        "removed with their incident",
        ("DELETE FROM impact_jobs WHERE incident NOT IN (SELECT id FROM incidents)",),
    ),
    "jobs": Bound(
        f"[store] history_days after their end, and the newest {JOB_ROWS:,} runs",
        (f"DELETE FROM jobs WHERE ended IS NOT NULL AND {_older_than('jobs', 'ended', 'history', JOB_ROWS)}",),
    ),
    "job_pace": Bound(
        f"[store] gap_days, and the newest {PACE_ROWS:,} rows",
        (f"DELETE FROM job_pace WHERE {_older_than('job_pace', 'time', 'gaps', PACE_ROWS)}",),
    ),
    "job_loss": Bound(
        f"[store] history_days, and the newest {PACE_ROWS:,} rows",
        (f"DELETE FROM job_loss WHERE {_older_than('job_loss', 'time', 'history', PACE_ROWS)}",),
    ),
    "job_energy": Bound(
        f"[store] history_days, and the newest {PACE_ROWS:,} rows",
        (f"DELETE FROM job_energy WHERE {_older_than('job_energy', 'hour', 'history', PACE_ROWS)}",),
    ),
    "outbox": Bound(
        "a week after their incident was resolved; of groups of alerts and failing receivers a week after their "
        "message, the newest after [store] history_days as long as it fires",
        (
            f"""DELETE FROM outbox WHERE state <> 'pending' AND created < make_timestamptz({{sent}})
                AND incident NOT IN (SELECT id FROM incidents)
                AND (created < make_timestamptz({{history}}) OR NOT {FIRES})""",
        ),
    ),
    "notify_groups": Bound(
        "groups of alerts that fire; removed when all ended; of a removed receiver a week after their incidents"
    ),
    "notify_threads": Bound(
        "a week after their incident was resolved, with its messages",
        ("DELETE FROM notify_threads WHERE thread NOT IN (SELECT incident FROM outbox)",),
    ),
    "notify_silences": Bound("alerts that fire; replaced at each reading of the receiver"),
    "wrong_pages": Bound(
        f"[store] history_days, and the newest {MUTE_ROWS:,} rows",
        (f"DELETE FROM wrong_pages WHERE {_older_than('wrong_pages', 'time', 'history', MUTE_ROWS)}",),
    ),
    "decommissioned": Bound(
        "one row per node that is out of service, at most 100,000; [store] history_days after its return",
        ("DELETE FROM decommissioned WHERE returned < make_timestamptz({history})",),
    ),
    "calibrations": Bound("the newest 100 versions, and those that a person pinned or returned to"),
    "silences": Bound(
        f"[store] history_days after their end, and the newest {MUTE_ROWS:,} ended ones",
        (
            f"""DELETE FROM silences WHERE {_older_than("silences", "starts", "history", MUTE_ROWS)}
                AND least(ends, coalesce(expired, ends)) < make_timestamptz({{history}})""",
        ),
    ),
    "job_rank": Bound(
        f"[store] history_days after the rank ended, and the newest {RANK_ROWS:,} ended ones",
        (
            f"""DELETE FROM job_rank WHERE "until" IS NOT NULL
             AND {_older_than("job_rank", '"until"', "history", RANK_ROWS)}""",
        ),
    ),
    **{
        table: Bound(
            f"[store] history_days after the line ended, and the newest {LINE_ROWS:,} ended ones",
            (f"DELETE FROM {table} WHERE {_older_than(table, chr(34) + 'until' + chr(34), 'history', LINE_ROWS)}",),
        )
        for table in ("inventory_past", "site_line", "site_link")
    },
    "acts": Bound(
        "[store] audit_days after its last change; those in force stay",
        ("DELETE FROM acts WHERE NOT active AND updated < make_timestamptz({audit})",),
    ),
    "act_history": Bound("as long as its act", ("DELETE FROM act_history WHERE act NOT IN (SELECT id FROM acts)",)),
    "act_breaker": Bound(
        "[store] audit_days after it was closed", ("DELETE FROM act_breaker WHERE closed < make_timestamptz({audit})",)
    ),
    "audit": Bound(
        f"[store] audit_days, and the newest {AUDIT_ROWS:,} rows",
        (f"DELETE FROM audit WHERE {_older_than('audit', 'time', 'audit', AUDIT_ROWS)}",),
    ),
}


def apply_bounds(database: Database, store: Store, now: int) -> None:
    """Removes rows over the bounds, in one transaction; telemetry: see `delete_old_rows`."""
    values = {
        "now": now,
        "commits": now - HOUR,
        "sent": now - SENT_KEPT,
        "routine": now - DAY,
        "gaps": now - int(store.gap_days * DAY),
        "letters": now - int(store.dead_letter_hours * HOUR),
        "history": now - int(store.history_days * DAY),
        "audit": now - int(store.audit_days * DAY),
        "bytes": store.dead_letter_bytes,
    }
    with database.transaction() as connection:
        for bound in BOUNDS.values():
            for statement in bound.sql:
                connection.execute(statement.format(**values))


def count_losses(connection: duckdb.DuckDBPyConnection) -> tuple[int, int]:
    """(gaps, dead letters) ever counted, including removed ones."""
    found = connection.execute("""
        SELECT (SELECT count(*) FROM gaps) + coalesce(sum(number) FILTER (kind = 'gap'), 0),
               (SELECT count(*) FROM dead_letter) + coalesce(sum(number) FILTER (kind = 'dead_letter'), 0)
        FROM losses""").fetchall()
    gaps, letters = found[0]
    return int(gaps), int(letters)


MIN_SILENT_DEVICES = 4096
"""Silent devices of a class that are not worth renumbering (chosen: they cost the detectors about 20 MB)."""


def delete_old_rows(database: Database, before: int) -> int:
    """Removes telemetry older than `before` (us) that was not sealed; returns the number of rows."""
    removed = 0
    with database.transaction() as connection:
        for table in schema.list_hot_tables(connection):
            old = f'DELETE FROM "{table}" WHERE time < make_timestamptz({before})'
            removed += connection.execute(old).fetchall()[0][0]
        schema.drop_hot_tables(connection, _find_empty_tables(connection))
    return removed


def _find_empty_tables(connection: duckdb.DuckDBPyConnection) -> list[str]:
    """Hot tables of sets of signals that none reports any more."""
    narrow = (t for t in schema.list_hot_tables(connection) if t != f"hot_{schema.class_of_table(t)}")
    return [t for t in narrow if not connection.execute(f'SELECT 1 FROM "{t}" LIMIT 1').fetchall()]


def clamp_latest(database: Database, now: int, latest: int) -> int:
    """Sets the time of the newest row of a device to `now` if it is after `latest`; returns how many there were.

    Otherwise a wrong clock would keep its devices "just seen" until that time.
    """
    with database.transaction() as connection:
        return sum(
            connection.execute(
                f'UPDATE "latest_{c}" SET time = make_timestamptz({now}) WHERE time > make_timestamptz({latest})'
            ).fetchall()[0][0]
            for c in CLASSES
        )


def find_newest_row(connection: duckdb.DuckDBPyConnection, now: int) -> int:
    """Time of the newest telemetry, at most `now`; `now` if there is none. UTC us."""
    each = " UNION ALL ".join(f"SELECT max(time) AS time FROM latest_{c}" for c in CLASSES)
    [(newest,)] = connection.execute(f"SELECT epoch_us(max(time)) FROM ({each})").fetchall()
    return now if newest is None else min(now, newest)


def drop_silent_devices(database: Database, keep: int, share: float, now: int) -> int:
    """Drops devices without a row in the last `keep` us of telemetry, if there are many; returns how many.

    Many: in some class MIN_SILENT_DEVICES plus `share` of the others. Devices in frames are renumbered then, so the
    detectors learn again; their snapshot is cleared. Rows of dropped devices are deleted too, since ids are reused.
    """
    with database.lock:
        before = find_newest_row(database.connection, now) - keep
        counts = list(_count_silent(database.connection, before))
    if not any(silent > MIN_SILENT_DEVICES + share * (known - silent) for _, silent, known in counts):
        return 0
    with database.transaction() as connection:
        for device_class, silent, _ in counts:
            if silent:
                old = f"FROM latest_{device_class} WHERE time < make_timestamptz({before})"
                connection.execute(f"DELETE FROM device WHERE class = '{device_class}' AND id IN (SELECT device {old})")
                connection.execute(f"DELETE {old}")
                for table in schema.list_hot_tables(connection):
                    if schema.class_of_table(table) == device_class:
                        connection.execute(f'DELETE FROM "{table}" WHERE time < make_timestamptz({before})')
        connection.execute("UPDATE snapshot SET state = '' WHERE key = 'judge'")
    return sum(silent for _, silent, _ in counts)


def _count_silent(connection: duckdb.DuckDBPyConnection, before: int) -> Iterator[tuple[str, int, int]]:
    """(class, devices without a row since `before`, all devices)."""
    for device_class in CLASSES:
        [(silent, known)] = connection.execute(
            f"SELECT count(*) FILTER (time < make_timestamptz({before})), count(*) FROM latest_{device_class}"
        ).fetchall()
        yield device_class, silent, known


def drop_unnamed_entities(database: Database, keep: int, now: int) -> int:
    """Drops entities that no inventory named in the last `keep` us of telemetry; returns how many.

    Rows of an older version, without that time, count as named now.
    """
    with database.transaction() as connection:
        before = find_newest_row(connection, now) - keep
        connection.execute(f"UPDATE entity SET named = make_timestamptz({now}) WHERE named IS NULL")
        end_unnamed_ranks(connection, before)
        keep_unnamed(connection, before)
        found = connection.execute(f"DELETE FROM entity WHERE named < make_timestamptz({before})").fetchall()
    return int(found[0][0])
