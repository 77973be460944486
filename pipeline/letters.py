"""How much of what cannot be stored is kept: so many dead letters a minute of one sender, so many bytes in all.

What is kept is a row of `dead_letter`; what is not is a row of `gaps` with its cause. All of it is counted by rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import duckdb

from pipeline.intake import NEWER, DeadLetter
from pipeline.model.records import SECOND
from pipeline.transport import Message, Partition

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
