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
PATIENCE = 60 * SECOND
"""Where agents were heard before, nothing must be admitted for so long, or for LOOKS of their intervals, up to SLOWEST:
one sender that is rejected among slow ones is not the fleet. Chosen: the time in which an operator must be told."""
LOOKS, SLOWEST = 3, 600 * SECOND
NEW = 10 * SECOND
"""The same where no agent was ever heard; chosen: two messages of an agent."""
FRESH = 120 * SECOND  # without a rejected message for so long, nothing arrives any more; chosen: two of slow agents
SENDER = 15 * SECOND
"""So long of a known sender before it is an event: before its silence is told (35 s). Chosen: three messages."""
MOST = 256  # senders with such an event at once; chosen, as that of wrong clocks
_RULES = 3  # rules that a text names


@dataclass(slots=True)
class Streak:
    """Messages that were rejected one after another: when the first and the last came (us), and how many by rule."""

    first: int
    last: int
    rules: Counter[str] = field(default_factory=Counter)

    def add(self, rule: str, now: int) -> None:
        self.first, self.last = min(self.first, now), now  # our clock may be set back
        self.rules[rule] += 1

    def words(self) -> str:
        """Which rules rejected how many."""
        named = [f"{rule} ({count:,})" for rule, count in self.rules.most_common(_RULES)]
        more = len(self.rules) - len(named)
        return f"rule {', '.join(named)}{f' and {more} more' if more else ''}"


class Rejections:
    """Streaks of rejected telemetry. One thread writes; any may ask `reason`. All times are ours (UTC us)."""

    def __init__(self) -> None:
        self._fleet: Streak | None = None
        self._shown: Streak | None = None  # a copy for other threads
        self._senders: dict[str, Streak] = {}  # of known senders alone: others could be made up without end
        self._told: set[str] = set()

    def take(
        self, rejected: Iterable[tuple[Message, str]], admitted: Collection[str], known: Collection[str], now: int
    ) -> None:
        """A commit is durable. admitted: nodes of which telemetry was admitted in it.  known: nodes heard before."""
        for message, rule in rejected:
            if message.partition.topic != TELEMETRY:
                continue
            self._fleet = self._fleet or Streak(now, now)
            self._fleet.add(rule, now)
            if (node := (message.sender or b"").decode("utf-8", "replace")) in known:
                self._senders.setdefault(node, Streak(now, now)).add(rule, now)
        if admitted:
            self._fleet = None
            for node in self._senders.keys() & set(admitted):
                del self._senders[node]
                self._told.discard(node)
        self._shown = None if self._fleet is None else replace(self._fleet, rules=Counter(self._fleet.rules))

    def reason(self, now: int, heard: bool, apart: Callable[[], int]) -> str | None:
        """Why nothing comes in although messages arrive; None if some is admitted, or if nothing arrives.

        heard: whether any agent was heard before.  apart: the shortest interval of those (us), 0: not known.
        """
        streak = self._shown
        if streak is None or now - streak.last > FRESH:
            return None
        patience = max(PATIENCE, min(LOOKS * apart(), SLOWEST)) if heard else NEW
        if streak.last - streak.first < patience:
            return None
        count = sum(streak.rules.values())
        since = iso(streak.first)[:19]
        return f"all of {count:,} messages since {since}Z were rejected: {streak.words()}; see dead letters"

    def of(self, nodes: Iterable[str]) -> Mapping[str, int]:
        """Rejected messages by rule of those nodes; empty unless of each of them all are rejected."""
        streaks = [self._senders.get(node) for node in nodes]
        found: Counter[str] = Counter()
        for streak in streaks:
            if streak is None:
                return {}
            found.update(streak.rules)
        return found

    def events(self, now: int) -> list[EventBatch]:
        """An event of each known sender of which all was rejected for SENDER; `told` follows once they are stored."""
        due = [n for n, s in self._senders.items() if n not in self._told and s.last - s.first >= SENDER]
        return [
            EventBatch(Origin("", node, b""), (Event(now, f"node:{node}", KIND, self._data(node)),))
            for node in sorted(due)[: max(0, MOST - len(self._told))]
        ]

    def told(self, batches: Iterable[EventBatch]) -> None:
        """Events of `events` are stored."""
        self._told.update(batch.origin.node for batch in batches)

    def _data(self, node: str) -> dict[str, object]:
        streak = self._senders[node]
        return {"count": sum(streak.rules.values()), "rules": dict(streak.rules), "since": iso(streak.first)}


PER_MINUTE = 60
"""Dead letters kept of one partition and rule per minute; chosen: enough to see what is wrong, and 4 MB at most."""
PAYLOAD_BYTES = 64 << 10
"""Kept of one payload. Messages of a newer version are kept whole: an upgrade can read them."""
REREAD = 100
"""Letters that are read again at once: at most 400 MB, as a rule 2 MB. Chosen."""
_MINUTE = 60 * SECOND
_Key = tuple[Partition, str]


@dataclass(slots=True)
class LetterLimits:
    """Decides what is kept of dead letters. For one thread.

    most: bytes of payload in the table; letters that no upgrade can read get half of it.
    What a transaction uses counts once `commit` says that it is durable; `begin` forgets what a failed one used.
    """

    most: int
    size: int = 0
    _minute: int = 0
    _kept: Counter[_Key] = field(default_factory=Counter)
    _new: Counter[_Key] = field(default_factory=Counter)
    _new_size: int = 0

    @classmethod
    def of_store(cls, connection: duckdb.DuckDBPyConnection, most: int) -> LetterLimits:
        """Begins with what the table holds."""
        return cls(most, stored_bytes(connection))

    def begin(self, now: int) -> None:
        """A transaction begins at `now` (UTC us)."""
        self._new, self._new_size = Counter(), 0
        if now // _MINUTE != self._minute:
            self._minute, self._kept = now // _MINUTE, Counter()

    def commit(self) -> None:
        """The transaction is durable."""
        self._kept.update(self._new)
        self.size += self._new_size

    def payload(self, letter: DeadLetter) -> bytes | None:
        """What is kept of a letter; None if it is only counted."""
        newer = letter.rule == NEWER
        value = bytes(letter.message.value if newer else letter.message.value[:PAYLOAD_BYTES])
        key = (letter.message.partition, letter.rule)
        if self.size + self._new_size + len(value) > (self.most if newer else self.most // 2):
            return None
        if not newer and self._kept[key] + self._new[key] >= PER_MINUTE:
            return None
        self._new[key] += 1
        self._new_size += len(value)
        return value


def newer_letters(connection: duckdb.DuckDBPyConnection, after: int) -> tuple[list[Message], int]:
    """The next REREAD letters of a newer version behind row `after`, as messages, and the row of the last one.

    Their partition has no incarnation: they lie in the store, and no offset moves with them.
    """
    rows = connection.execute(
        """SELECT rowid, topic, partition, "offset", payload, "key", signature
           FROM dead_letter WHERE rule = ? AND rowid > ? ORDER BY rowid LIMIT ?""",
        [NEWER, after, REREAD],
    ).fetchall()
    found = [
        Message(Partition(topic, name, ""), offset, bytes(value), key=key, signature=signature)
        for _, topic, name, offset, value, key, signature in rows
    ]
    return found, rows[-1][0] if rows else after


def remove_letters(connection: duckdb.DuckDBPyConnection, messages: Sequence[Message]) -> None:
    """Letters of `newer_letters` that were stored as telemetry or events."""
    for message in messages:
        where = [NEWER, message.partition.topic, message.partition.name, message.offset]
        connection.execute(
            'DELETE FROM dead_letter WHERE rule = ? AND topic = ? AND partition = ? AND "offset" = ?', where
        )


def stored_bytes(connection: duckdb.DuckDBPyConnection) -> int:
    """Bytes of payload in the table of dead letters."""
    return int(connection.execute("SELECT coalesce(sum(octet_length(payload)), 0) FROM dead_letter").fetchall()[0][0])
