"""Ownership of entities: which sender may report which entity, also in events. An entity belongs to one sender.

    configured   [[admission.speaks_for]] gives the entity to senders, whatever its name is
    by name      `gpu:n042.3` belongs to the sender n042; for MIXED_KINDS only if there is such a sender
    by claim     everything else belongs to the sender that reported it first: `cdu:`, `rank:`, a switch's `port:`
    shared       `job:` and `stage:` belong to no sender: each node of a job reports its own part of it. Their lines in
                 inventories belong to one sender, by claim

A claim passes to another sender after its owner released it (its inventory no longer lists it, or its job ended) or was
silent. The former owner gets it back when it reports the entity again. Claims are stored in the table `owner`.

Of events only the entities that the sender may report are kept; the rest is removed:

`inventory`   only the node's own; its lines for entities that the node may report, which it claims. Attributes of jobs
              and stages only with ranks of the job, and from one sender at a time: equal lines of others are dropped
`job_start`   `ranks` that the node may report, in stages of the job; claims them
`job_end`     `ranks` of the node; required, because without them it would end the job everywhere
`checkpoint`  of a rank that the node may report

`maintenance_start`, `maintenance_end` and `version` suppress detectors for all descendants of their entity. It must
belong to the sender: not an entity without an owner, such as a rack, or a shared one, such as a job.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from types import UnionType
from typing import Any, Literal
from weakref import WeakKeyDictionary

import duckdb

from pipeline.config.sections import Admission
from pipeline.model.errors import Rejected
from pipeline.model.records import SECOND, Event
from pipeline.model.topology import kind_of
from pipeline.store.append import insert_columns, to_timestamps
from pipeline.store.database import Database
from pipeline.transport import wire

NODE_KINDS = frozenset(
    {
        *("node", "gpu", "nvlink", "neuroncore", "cpu", "dimm", "disk", "filesystem", "service"),
        *("agent", "collector"),
    }
)
"""Kinds of parts of a host, reported by its own agent."""
MIXED_KINDS = frozenset({"port", "sensor", "psu"})
"""Kinds of parts of hosts, but also of switches and chassis, which another host's agent reports."""
SHARED_KINDS = frozenset({"job", "stage"})
"""Kinds that several nodes report."""
RANK_TAKEOVER = 60 * SECOND
"""Silence after which a rank may have another owner; chosen: ranks move when a job restarts, within minutes."""
KEEP_RANKS, KEEP_CLAIMS = 3600 * SECOND, 7 * 24 * 3600 * SECOND
"""How long unrenewed claims are kept; chosen: job ids are not reused, facilities may be off for a week."""
MAX_SENDERS = 200_000
"""Most recent senders known by name: 40 MB. Chosen: twice those of senders.py, which a start loads."""
RENEW_CLAIMS = 5 * SECOND
"""How often the claims of a layout are renewed (us) while no claim of any sender changes. Chosen: a twelfth of the
least silence after which an entity may have another owner."""
NEVER, ALWAYS = range(0), range(-wire.MAX_TIME, wire.MAX_TIME)
"""Event times (us)."""
Verdict = Literal["own", "claim"]


@dataclass(slots=True)
class Claim:
    """The owner of an entity by claim. Times in UTC us.

    since: start of the claim.  seen: last report by the owner.  measured: reported by telemetry, not only inventory.
    former: the previous owner, which lost it without a release; "" if none.
    """

    owner: str
    since: int
    seen: int
    measured: bool = False
    released: bool = False
    former: str = ""


@dataclass(frozen=True, slots=True)
class _LayoutOwners:
    """Classified entities of one layout: those that its sender may never report, with the reason; those by claim."""

    refused: Mapping[str, str]
    claimed: tuple[str, ...]


class Owners:
    """Owners of entities. For one thread. claims: as stored.  senders: name -> newest event time, as stored (UTC us).

    `changed` and `dropped` are entities whose claims are not saved yet. Memory: one Claim per entity by claim, bounded
    by admission per sender.
    """

    def __init__(
        self,
        rules: Admission | None = None,
        claims: Mapping[str, Claim] | None = None,
        senders: Mapping[str, int] | None = None,
    ) -> None:
        rules = rules or Admission()
        self._takeover, self._speaks_for = round(rules.takeover * SECOND), rules.speaks_for
        self._newest_of: dict[str, int] = dict(senders or {})
        self.claims: dict[str, Claim] = dict(claims or {})
        self._by_owner: defaultdict[str, set[str]] = defaultdict(set)
        for entity, claim in self.claims.items():
            self._by_owner[claim.owner].add(entity)
        self._layouts: WeakKeyDictionary[wire.Layout, _LayoutOwners] = WeakKeyDictionary()
        # layouts of which all claims were renewed: event time, and number of changes of claims then
        self._renewed: WeakKeyDictionary[wire.Layout, tuple[int, int]] = WeakKeyDictionary()
        self._changes = 0
        self.changed: set[str] = set()
        self.dropped: set[str] = set()

    def record_message(self, sender: str, time: int) -> None:
        """Records a message of `sender` with time `time`."""
        before = self._newest_of.get(sender)
        if before is None:
            self._layouts.clear()  # entity names may begin with the name of the new sender
            if len(self._newest_of) >= MAX_SENDERS:  # drops a tenth, because this sorts all of them
                for oldest in sorted(self._newest_of, key=self._newest_of.__getitem__)[: MAX_SENDERS // 10]:
                    del self._newest_of[oldest]
        if before is None or time > before:
            self._newest_of[sender] = time

    def find_refused(self, layout: wire.Layout, time: int) -> Mapping[str, str]:
        """Entity -> reason for those that the sender of a telemetry message may not report; claims the others."""
        known = self._layouts.get(layout)
        if known is None:
            known = self._layouts[layout] = self._classify_layout(layout)
        if not known.claimed:
            return known.refused
        renewed, changes = self._renewed.get(layout, (0, -1))
        if changes == self._changes and 0 <= time - renewed < RENEW_CLAIMS:
            return known.refused
        found = dict(known.refused)
        for entity in known.claimed:
            if reason := self._claim(layout.node, entity, time, measured=True):
                found[entity] = reason
        if len(found) == len(known.refused):
            self._renewed[layout] = time, self._changes
        return found

    def find_settled(self, layout: wire.Layout) -> range:
        """Event times of messages of a layout that change nothing here but the time of their sender.

        Valid until another layout, event or time limit changes something.
        """
        known = self._layouts.get(layout)
        if known is None or known.refused or layout.node not in self._newest_of:
            return NEVER
        if not known.claimed:
            return ALWAYS
        renewed, changes = self._renewed.get(layout, (0, -1))
        return range(renewed, renewed + RENEW_CLAIMS) if changes == self._changes else NEVER

    def _classify_layout(self, layout: wire.Layout) -> _LayoutOwners:
        refused: dict[str, str] = {}
        claimed: list[str] = []
        for entity in (entity for block in layout.blocks for entity in block.entities):
            verdict = self._classify_entity(layout.node, entity)
            if verdict == "claim":
                claimed.append(entity)
            elif verdict != "own":
                refused[entity] = verdict
        return _LayoutOwners(refused, tuple(claimed))

    def _classify_entity(self, sender: str, entity: str) -> Verdict | str:
        """ "own", "claim", or the reason why `entity` belongs to another sender."""
        kind, _, name = entity.partition(":")
        if (named := self._configured(entity)) is not None:
            return (
                "own"
                if sender in named
                else f"{entity[:80]!a}: [[admission.speaks_for]] gives it to {', '.join(named)}"
            )
        bearer = self._sender_in_name(name)
        if kind in SHARED_KINDS or (bearer == sender and kind in NODE_KINDS | MIXED_KINDS):
            return "own"
        if kind in NODE_KINDS or (kind in MIXED_KINDS and bearer is not None):
            return f"{entity[:80]!a}: belongs to node {bearer or name.partition('.')[0]} by its name"
        return "claim"

    def _configured(self, entity: str) -> tuple[str, ...] | None:
        """The senders that own `entity` by configuration; None if it is not configured."""
        found = (s.node for s in self._speaks_for if any(fnmatchcase(entity, pattern) for pattern in s.entities))
        return tuple(found) or None

    def _sender_in_name(self, name: str) -> str | None:
        """The known sender with the longest name that is `name` or a prefix of it up to a dot."""
        end = len(name)
        while end > 0:
            if name[:end] in self._newest_of:
                return name[:end]
            end = name.rfind(".", 0, end)
        return None

    # --- claims -----------------------------------------------------------------------------------------------------

    def check_owner(self, sender: str, entity: str, time: int) -> str | None:
        """Describes why `sender` may not report `entity` at `time`; None if it may. Claims nothing."""
        verdict = self._classify_entity(sender, entity)
        if verdict != "claim":
            return None if verdict == "own" else verdict
        claim = self.claims.get(entity)
        return (
            None
            if claim is None or self._may_claim(claim, sender, entity, time)
            else self._describe_owner(entity, claim)
        )

    def is_owner(self, sender: str, entity: str) -> bool:
        """Whether `sender` owns `entity` by name, claim or configuration; False for shared and unclaimed entities."""
        verdict = self._classify_entity(sender, entity)
        if verdict == "claim":
            claim = self.claims.get(entity)
            return claim is not None and claim.owner == sender
        return verdict == "own" and (kind_of(entity) not in SHARED_KINDS or self._configured(entity) is not None)

    def claim_entity(self, sender: str, entity: str, time: int, measured: bool = False) -> str | None:
        """Like `check_owner`, and claims the entity if it goes by claim."""
        verdict = self._classify_entity(sender, entity)
        if verdict != "claim":
            return None if verdict == "own" else verdict
        return self._claim(sender, entity, time, measured)

    def may_describe(self, sender: str, entity: str, time: int) -> bool:
        """Whether `sender` may set attributes of a job or stage: no other node of the job does."""
        claim = self.claims.get(entity)
        return claim is None or self._may_claim(claim, sender, entity, time)

    def claim_description(self, sender: str, entity: str, time: int) -> None:
        """Claims the attributes of a job or stage for `sender`."""
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
        if claim is not None and not self._may_claim(claim, sender, entity, time):
            return self._describe_owner(entity, claim)
        if claim is None or time >= claim.since:  # an older report came late from the previous owner
            self._hand_over(sender, entity, claim, Claim(sender, time, time, measured))
        return None

    def _may_claim(self, claim: Claim, sender: str, entity: str, time: int) -> bool:
        return sender in (claim.owner, claim.former) or claim.released or self._is_silent(claim, entity, time)

    def _is_silent(self, claim: Claim, entity: str, time: int) -> bool:
        """Whether the owner stopped reporting the entity; for entities only in inventories: stopped sending at all."""
        patience = min(self._takeover, RANK_TAKEOVER) if kind_of(entity) == "rank" else self._takeover
        last = claim.seen if claim.measured else max(claim.seen, self._newest_of.get(claim.owner, claim.seen))
        return time - last > patience

    def _hand_over(self, sender: str, entity: str, before: Claim | None, now: Claim) -> None:
        self._changes += before is not None
        if before is not None:
            now.former = before.owner if before.former != sender else ""
            self._by_owner[before.owner].discard(entity)
        self.claims[entity] = now
        self._by_owner[sender].add(entity)
        self.changed.add(entity)
        self.dropped.discard(entity)

    @staticmethod
    def _describe_owner(entity: str, claim: Claim) -> str:
        return f"{entity[:80]!a}: belongs to {claim.owner}, which reports it; see [admission] takeover and speaks_for"

    def release_entities(self, sender: str, entities: Iterable[str]) -> None:
        """Releases claims of `sender`: the entities no longer exist."""
        for entity in entities:
            claim = self.claims.get(entity)
            if claim is not None and claim.owner == sender and not claim.released:
                self._changes += 1
                claim.released = True
                self.changed.add(entity)

    def release_unlisted(self, sender: str, entities: Collection[str]) -> None:
        """Releases all claims of `sender` except `entities`."""
        self.release_entities(sender, [entity for entity in self._by_owner.get(sender, ()) if entity not in entities])

    def mark_saved(self) -> None:
        """Records that all claims are stored."""
        self.changed.clear()
        self.dropped.clear()

    def drop_expired(self, now: int) -> None:
        """Drops claims that were not renewed for KEEP_RANKS or KEEP_CLAIMS."""
        for entity in [e for e, claim in self.claims.items() if now - self._renewed_at(claim) > _keep_time(e)]:
            claim = self.claims.pop(entity)
            self._changes += 1
            self._by_owner[claim.owner].discard(entity)
            self.changed.discard(entity)
            self.dropped.add(entity)

    def _renewed_at(self, claim: Claim) -> int:
        return claim.seen if claim.measured or claim.released else max(claim.seen, self._newest_of.get(claim.owner, 0))


def _keep_time(entity: str) -> int:
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
"""Devices without the name of their sender, from versions without claims: they belong to their first sender."""


def load_owners(database: Database, rules: Admission | None = None) -> Owners:
    """Loads owners from the store. `seen` of a claim is the time of its entity's newest row."""
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
    """Writes the claims that changed since the last durable save."""
    if owners.dropped:
        connection.execute("DELETE FROM owner WHERE list_contains(?, entity)", [sorted(owners.dropped)])
    if not owners.changed:
        return
    entities = sorted(owners.changed)
    claims = [owners.claims[entity] for entity in entities]
    columns = {
        "entity": entities,
        "node": [claim.owner for claim in claims],
        "former": [claim.former for claim in claims],
        "since": to_timestamps([claim.since for claim in claims]),
        "released": [claim.released for claim in claims],
    }
    renew = "node = excluded.node, former = excluded.former, since = excluded.since, released = excluded.released"
    insert_columns(connection, "owner", columns, f"ON CONFLICT (entity) DO UPDATE SET {renew}")
    connection.execute(
        """UPDATE device SET node = owner.node FROM owner
           WHERE owner.entity = device.entity AND owner.node <> device.node AND list_contains(?, device.entity)""",
        [entities],
    )


Refused = dict[str, str]
QUIETING_KINDS = frozenset({"maintenance_start", "maintenance_end", "version"})
"""Kinds of event after which detectors expect unusual values of an entity and its descendants for a while."""


def keep_owned(owners: Owners, node: str, event: Event, time: int) -> tuple[Event, Refused]:
    """The event with what `node` may report, and removed entity -> reason. Raises Rejected if nothing is left."""
    if reason := owners.check_owner(node, event.entity, time):
        raise Rejected("owner", f"event {event.kind}: {reason}")
    if event.kind in QUIETING_KINDS and not owners.is_owner(node, event.entity):
        raise Rejected(
            "owner", f"event {event.kind}: {event.entity[:80]!a} does not belong to {node}: see [admission] speaks_for"
        )
    part = _FILTERS.get(event.kind)
    key, refused = part(owners, node, event, time) if part is not None else ("", {})
    if not refused:
        return event, {}
    named: Any = event.data[key]  # those refused without a reason are dropped silently
    kept = [entity for entity in named if isinstance(entity, str) and entity not in refused]
    left = {entity: named[entity] for entity in kept} if isinstance(named, dict) else kept
    return replace(event, data={**event.data, key: left}), {entity: why for entity, why in refused.items() if why}


def claim_entities(owners: Owners, node: str, event: Event, time: int) -> None:
    """Claims the entities in an admitted event for its sender, or releases them."""
    if event.kind == "inventory":
        lines: Any = event.data.get("entities") or ()
        for entity in lines:
            if kind_of(entity) not in SHARED_KINDS:
                owners.claim_entity(node, entity, time)
            elif lines[entity].get("attributes"):
                owners.claim_description(node, entity, time)
        owners.release_unlisted(node, lines)
    elif event.kind == "job_start":
        for rank in _named_ranks(event, dict):
            owners.claim_entity(node, rank, time)
    elif event.kind == "job_end":
        owners.release_entities(node, _named_ranks(event, list | dict))


def _named_ranks(event: Event, kind: type | UnionType) -> list[str]:
    """The ranks in an event."""
    ranks = event.data.get("ranks")
    named: Any = ranks if isinstance(ranks, kind) else ()
    return [rank for rank in named if isinstance(rank, str)]


def _filter_inventory(owners: Owners, node: str, event: Event, time: int) -> tuple[str, Refused]:
    if event.entity != f"node:{node}":
        raise Rejected("owner", f"event inventory: of {event.entity[:80]!a}; expected that of its sender, node:{node}")
    lines = event.data.get("entities")
    found = lines if isinstance(lines, dict) else {}
    refused = {e: why for e, line in found.items() if (why := _check_line(owners, node, e, line, time))}
    jobs = {_job_of(e) for e in found if kind_of(e) == "rank" and e not in refused}
    for entity, line in found.items():
        if kind_of(entity) in SHARED_KINDS and entity not in refused:
            if not owners.may_describe(node, entity, time):
                refused[entity] = ""
            if isinstance(line, dict) and line.get("attributes") and _job_of(entity) not in jobs:
                refused[entity] = f"{entity[:80]!a}: {node} describes it and runs no rank of {_job_of(entity)[:80]}"
    return "entities", refused


def _job_of(entity: str) -> str:
    """The job of a job, stage or rank."""
    kind, _, name = entity.partition(":")
    return f"job:{name if kind == 'job' else name.rpartition('.')[0]}"


def _check_line(owners: Owners, node: str, entity: str, line: object, time: int) -> str | None:
    """Describes why an inventory line is removed. A shared entity has no parents except its job."""
    parents = line.get("parents") if isinstance(line, dict) else None
    kind, _, name = entity.partition(":")
    if kind in SHARED_KINDS and parents:
        job = f"job:{name.rpartition('.')[0]}"
        if kind == "job" or parents != [job]:
            return f"{entity[:80]!a}: parents {str(parents)[:80]!a}; expected {'none' if kind == 'job' else job}"
    return owners.check_owner(node, entity, time)


def _filter_job_start(owners: Owners, node: str, event: Event, time: int) -> tuple[str, Refused]:
    ranks: Any = event.data.get("ranks")
    stages = f"stage:{event.entity.partition(':')[2]}."
    return "ranks", {
        r: why for r in _named_ranks(event, dict) if (why := _check_rank(owners, node, r, ranks[r], stages, time))
    }


def _check_rank(owners: Owners, node: str, rank: str, place: object, stages: str, time: int) -> str | None:
    """Describes why a rank is removed: its sender may not report it, or its stage is of another job."""
    stage = place.get("stage") if isinstance(place, dict) else None
    if isinstance(stage, str) and stage.startswith("stage:") and not stage.startswith(stages):
        return f"{rank[:80]!a}: in {stage[:80]!a}; expected a stage of its job, {stages[:80]}*"
    return owners.check_owner(node, rank, time)


def _filter_job_end(owners: Owners, node: str, event: Event, time: int) -> tuple[str, Refused]:
    if not isinstance(event.data.get("ranks"), list | dict):
        raise Rejected("owner", f"event job_end: {event.entity[:80]!a} without `ranks`; expected those of its sender")
    if not _named_ranks(event, list | dict):
        raise Rejected(
            "owner", f"event job_end: {event.entity[:80]!a} with empty `ranks`; expected those of its sender"
        )
    return "ranks", {
        rank: why for rank in _named_ranks(event, list | dict) if (why := owners.check_owner(node, rank, time))
    }


def _check_checkpoint(owners: Owners, node: str, event: Event, time: int) -> tuple[str, Refused]:
    rank = f"rank:{event.entity.partition(':')[2]}.{event.data.get('rank')}"
    if kind_of(event.entity) == "job" and (why := owners.check_owner(node, rank, time)):
        raise Rejected("owner", f"event checkpoint: {why}")
    return "", {}


_FILTERS: Mapping[str, Callable[[Owners, str, Event, int], tuple[str, Refused]]] = {
    "inventory": _filter_inventory,
    "job_start": _filter_job_start,
    "job_end": _filter_job_end,
    "checkpoint": _check_checkpoint,
}
