"""What brings the rows of an older schema into today's tables, which exist already; run in one transaction.

And the view that shows today's rows as an older schema did.
"""

from __future__ import annotations

import duckdb

from pipeline.model.errors import WireError
from pipeline.transport import wire

_FROM_1 = """
INSERT INTO partition_offset
SELECT topic, partition, incarnation, max(next_offset) FROM ingest_commit GROUP BY ALL;
UPDATE dead_letter SET rule = 'newer'
WHERE starts_with(reason, 'wire version ') AND contains(reason, ', wanted 1: ') AND octet_length(payload) < 65536;
INSERT INTO gaps
SELECT DISTINCT l.time, l.topic, m.node, m.epoch, l."offset", l."offset" + 1, 'from an agent newer than the pipeline'
FROM dead_letter l JOIN producer_mark m
    ON m.topic = l.topic AND m.node = l.partition AND m.epoch = lower(hex(l.payload[9:24])) AND m.sequence >= l."offset"
WHERE l.rule = 'newer'
"""
"""Version 1 had no table of offsets. It refused messages of newer agents, but kept them whole up to 64 KiB: ingest
reads them again. Of a spool it counted them as read: a gap for each, which ends when the message is read, opens them.
The sender's epoch is at bytes 8 to 23 of a message (transport/wire.py)."""

FROM_3 = """
ALTER TABLE mutes ADD COLUMN IF NOT EXISTS ended_by VARCHAR;
INSERT OR IGNORE INTO silences
SELECT id, 'mute', to_json(list_filter([
           {name: 'detector', value: detector, isRegex: false, isEqual: true},
           {name: 'scope', value: scope, isRegex: false, isEqual: true}], lambda m: m.value <> '*')),
       since, "until", "user", reason, since, coalesce(ended, since), coalesce(ended_by, "user"), 1, ended, ended_by,
       'mutes'
FROM mutes;
DROP TABLE mutes"""
"""Mutes became silences."""

MUTES = """
CREATE OR REPLACE VIEW mutes AS
SELECT id, coalesce(list_filter(m, lambda x: x.name = 'detector')[1].value, '*') AS detector,
       coalesce(list_filter(m, lambda x: x.name = 'scope')[1].value, '*') AS scope, starts AS since, ends AS "until",
       reason, author AS "user", expired AS ended, expired_by AS ended_by
FROM (SELECT *, from_json(matchers, '[{"name": "VARCHAR", "value": "VARCHAR"}]') AS m FROM silences
      WHERE kind = 'mute')"""
"""The mutes as the table of version 3 had them."""


def migrate_from_1(connection: duckdb.DuckDBPyConnection) -> None:
    """Brings the rows of version 1 into today's tables. It kept no record keys: the node in the message is the key."""
    connection.execute(_FROM_1)
    letters = connection.execute("SELECT rowid FROM dead_letter WHERE rule = 'newer'").fetchall()
    for letter in letters:
        ((payload,),) = connection.execute("SELECT payload FROM dead_letter WHERE rowid = ?", letter).fetchall()
        try:
            node = wire.open_telemetry(bytes(payload)).layout.node
        except WireError:  # damaged, or newer than today: it stays a letter
            continue
        connection.execute('UPDATE dead_letter SET "key" = ? WHERE rowid = ?', [node.encode(), *letter])
