"""Ownership of entities: which sender may report which entity. An entity belongs to one sender.

    configured   [[admission.speaks_for]] gives the entity to senders, whatever its name is
    by name      `gpu:n042.3` belongs to the sender n042; for MIXED_KINDS only if there is such a sender
    by claim     everything else belongs to the sender that reported it first: `cdu:`, `rank:`, a switch's `port:`
    shared       `job:` and `stage:` belong to no sender: each node of a job reports its own part of it. Their lines in
                 inventories belong to one sender, by claim

A claim passes to another sender after its owner released it (its inventory no longer lists it, or its job ended) or was
silent. The former owner gets it back when it reports the entity again. Claims are stored in the table `owner`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal
from weakref import WeakKeyDictionary

import duckdb

from pipeline.config.sections import Admission
from pipeline.model.records import SECOND
from pipeline.model.topology import kind_of
from pipeline.store.append import insert, times
from pipeline.store.database import Database
from pipeline.transport import wire

NODE_KINDS = frozenset(
    {
        *("node", "gpu", "nvlink", "neuroncore", "cpu", "dimm", "disk", "filesystem", "service"),
        *("agent", "collector"),
    }
)
"""Kinds whose entities are parts of a host, which its own agent reports."""
MIXED_KINDS = frozenset({"port", "sensor", "psu"})
"""Kinds that hosts have, but also switches and chassis, which another host's agent reports."""
SHARED_KINDS = frozenset({"job", "stage"})
RANK_TAKEOVER = 60 * SECOND
"""Silence after which a rank may have another owner; chosen: ranks move when a job restarts, within minutes."""
KEEP_RANKS, KEEP_CLAIMS = 3600 * SECOND, 7 * 24 * 3600 * SECOND
"""How long claims are kept that nobody renews; chosen: job names are not used again, facilities may rest for a week."""
SENDERS = 200_000
"""Senders that are known by name, those heard last: 40 MB. Chosen: twice those of senders.py, which a start brings."""
Verdict = Literal["own", "claim"]


@dataclass(slots=True)
class Claim:
    """An entity's owner by claim. Times in UTC us.

    since: when the owner got it.  seen: when the owner last reported it.  measured: whether telemetry reports it, not
    only inventory.  former: the owner before, which lost it without letting go; "" if there is none.
    """

    owner: str
    since: int
    seen: int
    measured: bool = False
    released: bool = False
    former: str = ""


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of one layout: entities that its sender may never report, with the reason; and those by claim."""

    refused: Mapping[str, str]
    claimed: tuple[str, ...]


class Owners:
    """Who owns what. For one thread. claims: as stored.  senders: name -> newest event time, as stored (UTC us).

    `changed` and `gone` are the entities whose claims the store does not have yet. Memory: one Claim for each entity by
    claim, which admission bounds by sender.
    """

    def __init__(
        self,
        rules: Admission | None = None,
        claims: Mapping[str, Claim] | None = None,
        senders: Mapping[str, int] | None = None,
    ) -> None:
        rules = rules or Admission()
        self._takeover, self._speaks_for = round(rules.takeover * SECOND), rules.speaks_for
        self._heard: dict[str, int] = dict(senders or {})
        self.claims: dict[str, Claim] = dict(claims or {})
        self._by_owner: defaultdict[str, set[str]] = defaultdict(set)
        for entity, claim in self.claims.items():
            self._by_owner[claim.owner].add(entity)
        self._layouts: WeakKeyDictionary[wire.Layout, _Known] = WeakKeyDictionary()
        self.changed: set[str] = set()
        self.gone: set[str] = set()

    def hear(self, sender: str, time: int) -> None:
        """A message of `sender` arrived, made at `time`."""
        before = self._heard.get(sender)
        if before is None:
            self._layouts.clear()  # the name of an entity may begin with that of the new sender
            if len(self._heard) >= SENDERS:  # a tenth at once, as this looks at all of them
                for oldest in sorted(self._heard, key=self._heard.__getitem__)[: SENDERS // 10]:
                    del self._heard[oldest]
        if before is None or time > before:
            self._heard[sender] = time

    def refused(self, layout: wire.Layout, time: int) -> Mapping[str, str]:
        """Entities of a telemetry message that its sender may not report -> why; the others are claimed."""
        known = self._layouts.get(layout)
        if known is None:
            known = self._layouts[layout] = self._look(layout)
        if not known.claimed:
            return known.refused
        found = dict(known.refused)
        for entity in known.claimed:
            if reason := self._claim(layout.node, entity, time, measured=True):
                found[entity] = reason
        return found

    def _look(self, layout: wire.Layout) -> _Known:
        refused: dict[str, str] = {}
        claimed: list[str] = []
        for entity in (entity for block in layout.blocks for entity in block.entities):
            verdict = self._verdict(layout.node, entity)
            if verdict == "claim":
                claimed.append(entity)
            elif verdict != "own":
                refused[entity] = verdict
        return _Known(refused, tuple(claimed))

    def _verdict(self, sender: str, entity: str) -> Verdict | str:
        """Whether `entity` is the sender's own or goes by claim; otherwise why it belongs to another sender."""
        kind, _, name = entity.partition(":")
        if (named := self._configured(entity)) is not None:
            return (
                "own"
                if sender in named
                else f"{entity[:80]!a}: [[admission.speaks_for]] gives it to {', '.join(named)}"
            )
        bearer = self._bearer(name)
        if kind in SHARED_KINDS or (bearer == sender and kind in NODE_KINDS | MIXED_KINDS):
            return "own"
        if kind in NODE_KINDS or (kind in MIXED_KINDS and bearer is not None):
            return f"{entity[:80]!a}: belongs to node {bearer or name.partition('.')[0]} by its name"
        return "claim"

    def _configured(self, entity: str) -> tuple[str, ...] | None:
        """The senders that the configuration gives `entity` to; None if it does not name it."""
        found = (s.node for s in self._speaks_for if any(fnmatchcase(entity, pattern) for pattern in s.entities))
        return tuple(found) or None

    def _bearer(self, name: str) -> str | None:
        """The known sender whose name is `name` or its beginning up to a dot; of several the longest."""
        end = len(name)
        while end > 0:
            if name[:end] in self._heard:
                return name[:end]
            end = name.rfind(".", 0, end)
        return None

    # --- claims -----------------------------------------------------------------------------------------------------

    def check(self, sender: str, entity: str, time: int) -> str | None:
        """Why `sender` may not speak of `entity` at `time`; None if it may. Claims nothing."""
        verdict = self._verdict(sender, entity)
        if verdict != "claim":
            return None if verdict == "own" else verdict
        claim = self.claims.get(entity)
        return None if claim is None or self._may(claim, sender, entity, time) else self._reason(entity, claim)

    def holds(self, sender: str, entity: str) -> bool:
        """Whether `entity` is the sender's by name, claim or configuration, and not only nobody's or everybody's."""
        verdict = self._verdict(sender, entity)
        if verdict == "claim":
            claim = self.claims.get(entity)
            return claim is not None and claim.owner == sender
        return verdict == "own" and (kind_of(entity) not in SHARED_KINDS or self._configured(entity) is not None)

    def claim(self, sender: str, entity: str, time: int, measured: bool = False) -> str | None:
        """As `check`; what goes by claim is the sender's from then on."""
        verdict = self._verdict(sender, entity)
        if verdict != "claim":
            return None if verdict == "own" else verdict
        return self._claim(sender, entity, time, measured)

    def may_describe(self, sender: str, entity: str, time: int) -> bool:
        """Whether what `sender` says of a job or stage holds: no other node of the job describes it."""
        claim = self.claims.get(entity)
        return claim is None or self._may(claim, sender, entity, time)

    def describe(self, sender: str, entity: str, time: int) -> None:
        """What is said of a job or stage is the sender's from then on."""
        self._claim(sender, entity, time, measured=False)

    def _claim(self, sender: str, entity: str, time: int, measured: bool) -> str | None:
        claim = self.claims.get(entity)
        if claim is not None and claim.owner == sender:
            claim.seen = max(claim.seen, time)
            claim.measured |= measured
            if claim.released:
                claim.released = False
                self.changed.add(entity)
            return None
        if claim is not None and not self._may(claim, sender, entity, time):
            return self._reason(entity, claim)
        if claim is None or time >= claim.since:  # what is older than the owner's claim came late from the owner before
            self._hand_over(sender, entity, claim, Claim(sender, time, time, measured))
        return None

    def _may(self, claim: Claim, sender: str, entity: str, time: int) -> bool:
        return sender in (claim.owner, claim.former) or claim.released or self._silent(claim, entity, time)

    def _silent(self, claim: Claim, entity: str, time: int) -> bool:
        """Whether the owner no longer reports the entity; of what only inventory reports, whether it sends nothing."""
        patience = min(self._takeover, RANK_TAKEOVER) if kind_of(entity) == "rank" else self._takeover
        last = claim.seen if claim.measured else max(claim.seen, self._heard.get(claim.owner, claim.seen))
        return time - last > patience

    def _hand_over(self, sender: str, entity: str, before: Claim | None, now: Claim) -> None:
        if before is not None:
            now.former = before.owner if before.former != sender else ""
            self._by_owner[before.owner].discard(entity)
        self.claims[entity] = now
        self._by_owner[sender].add(entity)
        self.changed.add(entity)
        self.gone.discard(entity)

    @staticmethod
    def _reason(entity: str, claim: Claim) -> str:
        return f"{entity[:80]!a}: belongs to {claim.owner}, which reports it; see [admission] takeover and speaks_for"

    def release(self, sender: str, entities: Iterable[str]) -> None:
        """`sender` says that these are no longer there."""
        for entity in entities:
            claim = self.claims.get(entity)
            if claim is not None and claim.owner == sender and not claim.released:
                claim.released = True
                self.changed.add(entity)

    def release_all_but(self, sender: str, entities: Collection[str]) -> None:
        """`sender` says that of what it has only these are there."""
        self.release(sender, [entity for entity in self._by_owner.get(sender, ()) if entity not in entities])

    def saved(self) -> None:
        """The store has all claims."""
        self.changed.clear()
        self.gone.clear()

    def expire(self, now: int) -> None:
        """Drops claims that nobody renewed for long."""
        for entity in [e for e, claim in self.claims.items() if now - self._renewed(claim) > _kept(e)]:
            claim = self.claims.pop(entity)
            self._by_owner[claim.owner].discard(entity)
            self.changed.discard(entity)
            self.gone.add(entity)

    def _renewed(self, claim: Claim) -> int:
        return claim.seen if claim.measured or claim.released else max(claim.seen, self._heard.get(claim.owner, 0))


def _kept(entity: str) -> int:
    return KEEP_RANKS if kind_of(entity) == "rank" else KEEP_CLAIMS


_STORED = """
SELECT o.entity, o.node, o.former, epoch_us(o.since), o.released, epoch_us(e.last_seen)
FROM owner o LEFT JOIN entities e ON e.entity = o.entity
"""
_BEFORE = """
SELECT d.entity, any_value(d.node), '', 0, false, epoch_us(max(e.last_seen))
FROM device d LEFT JOIN entities e ON e.entity = d.entity
WHERE NOT starts_with(split_part(d.entity, ':', 2) || '.', d.node || '.') AND d.entity NOT IN (SELECT entity FROM owner)
GROUP BY d.entity
"""
"""Devices that are not called like their sender, from before there were claims: who reported them first has them."""


def load_owners(database: Database, rules: Admission | None = None) -> Owners:
    """What the store knows of owners. A claim was last seen when its entity's newest row was measured."""
    with database.lock:
        connection = database.connection
        rows = connection.execute(_STORED).fetchall() + connection.execute(_BEFORE).fetchall()
        senders = dict(connection.execute("SELECT DISTINCT node, 0 FROM device").fetchall())
        senders |= dict(connection.execute("SELECT node, epoch_us(least(newest, arrived)) FROM sender").fetchall())
    claims = {
        entity: Claim(node, since, max(since, seen or 0), seen is not None, released, former)
        for entity, node, former, since, released, seen in rows
    }
    return Owners(rules, claims, senders)


def save_claims(connection: duckdb.DuckDBPyConnection, owners: Owners) -> None:
    """Writes what changed since the last save that became durable."""
    if owners.gone:
        connection.execute("DELETE FROM owner WHERE list_contains(?, entity)", [sorted(owners.gone)])
    if not owners.changed:
        return
    entities = sorted(owners.changed)
    claims = [owners.claims[entity] for entity in entities]
    columns = {
        "entity": entities,
        "node": [claim.owner for claim in claims],
        "former": [claim.former for claim in claims],
        "since": times([claim.since for claim in claims]),
        "released": [claim.released for claim in claims],
    }
    renew = "node = excluded.node, former = excluded.former, since = excluded.since, released = excluded.released"
    insert(connection, "owner", columns, f"ON CONFLICT (entity) DO UPDATE SET {renew}")
    connection.execute(
        """UPDATE device SET node = owner.node FROM owner
           WHERE owner.entity = device.entity AND owner.node <> device.node AND list_contains(?, device.entity)""",
        [entities],
    )
