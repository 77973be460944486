"""Rejected messages: dead letters within limits, and senders or fleets whose telemetry is all rejected.

A dead letter is stored in `dead_letter`, within a rate per sender and a total size; beyond that it becomes a row of
`gaps` with its cause. Everything is counted by rule.

A sender whose telemetry is all rejected looks silent, and a fleet of such senders looks like a new site without agents.
The first becomes an event that the node's silence refers to, the second a reason of /readyz.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import duckdb

from pipeline.ingest.messages import NEWER, DeadLetter
from pipeline.model.records import SECOND, TELEMETRY, Event, EventBatch, Origin, iso
from pipeline.transport import Message, Partition

KIND = "messages_rejected"
FLEET_STREAK = 60 * SECOND
"""If agents sent before: how long all telemetry must be rejected (us), or INTERVALS of theirs, up to MAX_FLEET_STREAK:
one rejected sender among slow ones is not the fleet. Chosen: time within which an operator must be alerted."""
INTERVALS, MAX_FLEET_STREAK = 3, 600 * SECOND
NEW_FLEET_STREAK = 10 * SECOND
"""The same if no agent ever sent; chosen: two messages of an agent."""
STALE = 120 * SECOND  # without a rejected message for so long nothing arrives; chosen: two of slow agents
SENDER_STREAK = 15 * SECOND
"""Streak of a known sender before an event: before its silence is reported (35 s). Chosen: three messages."""
MAX_REPORTED = 256  # senders with an open event; chosen, as for wrong clocks
_RULES_SHOWN = 3  # rules named in a text


@dataclass(slots=True)
class Streak:
    """Consecutive rejected messages: times of the first and the last (us), and their number by rule."""

    first: int
    last: int
    rules: Counter[str] = field(default_factory=Counter)

    def add_message(self, rule: str, now: int) -> None:
        """Adds one rejected message."""
        self.first, self.last = min(self.first, now), now  # our clock may be set back
        self.rules[rule] += 1

    def describe(self) -> str:
        """The rules, with their numbers of messages."""
        named = [f"{rule} ({count:,})" for rule, count in self.rules.most_common(_RULES_SHOWN)]
        more = len(self.rules) - len(named)
        return f"rule {', '.join(named)}{f' and {more} more' if more else ''}"


class Rejections:
    """Streaks of rejected telemetry. One thread writes; any may call `find_reason`. Times by our clock (UTC us)."""

    def __init__(self) -> None:
        self._fleet: Streak | None = None
        self._fleet_copy: Streak | None = None  # for other threads
        self._senders: dict[str, Streak] = {}  # only known senders: made-up names are unlimited
        self._reported: set[str] = set()

    def record_commit(
        self, rejected: Iterable[tuple[Message, str]], admitted: Collection[str], known: Collection[str], now: int
    ) -> None:
        """Records a durable commit. admitted: nodes with admitted telemetry.  known: nodes that sent before."""
        for message, rule in rejected:
            if message.partition.topic != TELEMETRY:
                continue
            self._fleet = self._fleet or Streak(now, now)
            self._fleet.add_message(rule, now)
            if (node := (message.sender or b"").decode("utf-8", "replace")) in known:
                self._senders.setdefault(node, Streak(now, now)).add_message(rule, now)
        if admitted:
            self._fleet = None
            for node in self._senders.keys() & set(admitted):
                del self._senders[node]
                self._reported.discard(node)
        self._fleet_copy = None if self._fleet is None else replace(self._fleet, rules=Counter(self._fleet.rules))

    def find_reason(self, now: int, known: bool, interval: Callable[[], int]) -> str | None:
        """Describes that all arriving messages are rejected; None if some are admitted or none arrive.

        known: whether any agent sent before.  interval: returns the shortest interval of those (us), 0: unknown.
        """
        streak = self._fleet_copy
        if streak is None or now - streak.last > STALE:
            return None
        patience = max(FLEET_STREAK, min(INTERVALS * interval(), MAX_FLEET_STREAK)) if known else NEW_FLEET_STREAK
        if streak.last - streak.first < patience:
            return None
        count = sum(streak.rules.values())
        since = iso(streak.first)[:19]
        return f"all of {count:,} messages since {since}Z were rejected: {streak.describe()}; see dead letters"

    def count_by_rule(self, nodes: Iterable[str]) -> Mapping[str, int]:
        """Rejected messages of `nodes` by rule; empty unless all messages of each are rejected."""
        streaks = [self._senders.get(node) for node in nodes]
        found: Counter[str] = Counter()
        for streak in streaks:
            if streak is None:
                return {}
            found.update(streak.rules)
        return found

    def due_events(self, now: int) -> list[EventBatch]:
        """Events of known senders with a streak over SENDER_STREAK; call `mark_reported` when they are stored."""
        due = [n for n, s in self._senders.items() if n not in self._reported and s.last - s.first >= SENDER_STREAK]
        return [
            EventBatch(Origin("", node, b""), (Event(now, f"node:{node}", KIND, self._event_data(node)),))
            for node in sorted(due)[: max(0, MAX_REPORTED - len(self._reported))]
        ]

    def mark_reported(self, batches: Iterable[EventBatch]) -> None:
        """Records that events of `due_events` are stored."""
        self._reported.update(batch.origin.node for batch in batches)

    def _event_data(self, node: str) -> dict[str, object]:
        streak = self._senders[node]
        return {"count": sum(streak.rules.values()), "rules": dict(streak.rules), "since": iso(streak.first)}


PER_MINUTE = 60
"""Dead letters kept per partition, rule and minute; chosen: enough to see the problem, at most 4 MB."""
PAYLOAD_BYTES = 64 << 10
"""Maximum bytes kept of a payload. Messages of a newer version are kept whole, for an upgrade."""
REREAD_BATCH = 100
"""Letters read again per batch: at most 400 MB, usually 2 MB. Chosen."""
_MINUTE = 60 * SECOND
_Key = tuple[Partition, str]


@dataclass(slots=True)
class LetterLimits:
    """Limits the dead letters that are kept. For one thread.

    max_bytes: maximum payload bytes in the table; letters that no upgrade can read get half of it.
    What a transaction uses counts after `commit`; `begin` drops what a failed one used.
    """

    max_bytes: int
    stored: int = 0
    _minute: int = 0
    _kept: Counter[_Key] = field(default_factory=Counter)
    _new: Counter[_Key] = field(default_factory=Counter)
    _new_size: int = 0

    @classmethod
    def from_store(cls, connection: duckdb.DuckDBPyConnection, most: int) -> LetterLimits:
        """Limits that start with the bytes in the table."""
        return cls(most, count_letter_bytes(connection))

    def begin(self, now: int) -> None:
        """Starts a transaction at `now` (UTC us)."""
        self._new, self._new_size = Counter(), 0
        if now // _MINUTE != self._minute:
            self._minute, self._kept = now // _MINUTE, Counter()

    def commit(self) -> None:
        """Counts what the durable transaction used."""
        self._kept.update(self._new)
        self.stored += self._new_size

    def payload_to_keep(self, letter: DeadLetter) -> bytes | None:
        """The payload of a letter to keep; None if it is only counted."""
        newer = letter.rule == NEWER
        value = bytes(letter.message.value if newer else letter.message.value[:PAYLOAD_BYTES])
        key = (letter.message.partition, letter.rule)
        if self.stored + self._new_size + len(value) > (self.max_bytes if newer else self.max_bytes // 2):
            return None
        if not newer and self._kept[key] + self._new[key] >= PER_MINUTE:
            return None
        self._new[key] += 1
        self._new_size += len(value)
        return value


def load_newer_letters(connection: duckdb.DuckDBPyConnection, after: int) -> tuple[list[Message], int]:
    """The next REREAD_BATCH letters of a newer version after row `after`, as messages, and the last row.

    Their partition has no incarnation: they come from the store, and no offset advances.
    """
    rows = connection.execute(
        """SELECT rowid, topic, partition, "offset", payload, "key", signature
           FROM dead_letter WHERE rule = ? AND rowid > ? ORDER BY rowid LIMIT ?""",
        [NEWER, after, REREAD_BATCH],
    ).fetchall()
    found = [
        Message(Partition(topic, name, ""), offset, bytes(value), key=key, signature=signature)
        for _, topic, name, offset, value, key, signature in rows
    ]
    return found, rows[-1][0] if rows else after


def remove_letters(connection: duckdb.DuckDBPyConnection, messages: Sequence[Message]) -> None:
    """Deletes letters of `load_newer_letters` that are stored as telemetry or events now."""
    for message in messages:
        where = [NEWER, message.partition.topic, message.partition.name, message.offset]
        connection.execute(
            'DELETE FROM dead_letter WHERE rule = ? AND topic = ? AND partition = ? AND "offset" = ?', where
        )


def count_letter_bytes(connection: duckdb.DuckDBPyConnection) -> int:
    """Payload bytes in the table of dead letters."""
    return int(connection.execute("SELECT coalesce(sum(octet_length(payload)), 0) FROM dead_letter").fetchall()[0][0])
