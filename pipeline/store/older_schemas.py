"""SQL that brings the rows of an older schema into today's tables, which exist already; run in one transaction.

And the view that shows today's rows as an older schema did.
"""

from __future__ import annotations

FROM_1 = """
INSERT INTO partition_offset
SELECT topic, partition, incarnation, max(next_offset) FROM ingest_commit GROUP BY ALL
"""
"""Version 1 had no table of offsets."""

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
