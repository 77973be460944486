"""Telemetry that arrives and is rejected whole since the last that was admitted: of the fleet, and of known senders.

A sender whose telemetry is rejected looks silent, and a fleet of such senders looks like a new site without agents. The
first is an event that the silence of its node names, the second a reason of /readyz.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from pipeline.model.records import SECOND, TELEMETRY, Event, EventBatch, Origin, iso
from pipeline.transport import Message

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
