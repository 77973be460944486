"""Admission: the one table of rules for what a transport may bring in. Telemetry is validated, not trusted.

What a rule rejects is never stored. It becomes a dead letter whose reason begins with the rule's name, and is counted
by rule. The unit of rejection is one message, or one event, entity or line of an inventory in it: the rest is stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from weakref import WeakSet

import duckdb

from pipeline.config.sections import Limits
from pipeline.ingest.columns import MOST_NEW, MOST_OF_SENDER
from pipeline.ingest.entities import FORGET, Known, Population
from pipeline.ingest.event_admission import claim_named, owned_part
from pipeline.ingest.ownership import Owners, save_claims
from pipeline.ingest.sequences import Sequences
from pipeline.model.errors import Rejected, UsageError
from pipeline.model.event_kinds import EVENT_KINDS
from pipeline.model.names import MAX_NAME, MAX_TEXT, find_entity_fault, find_name_fault, find_text_fault, quote_text
from pipeline.model.records import Event, EventBatch
from pipeline.model.signals import kinds_of_class
from pipeline.model.topology import MAX_DEPTH, ParentGraph, kind_of
from pipeline.transport import Message, wire
from pipeline.transport.signatures import SenderCheck

MAX_PARENTS = 16  # of one entity; chosen: a node has a rack, a PDU or two, a loop, its leaves and rails
MAX_ATTRIBUTES = 64  # of one entity; chosen: four times what agents send of a GPU
MAX_DATA = (
    64 << 10
)  # characters and values of one event's data, inventory aside; chosen: ten times the largest of agents
MAX_NESTING = 8  # of lists and objects in one event's data; chosen: twice that of agents
_ANY_KIND = frozenset({"canary", "custom"})  # device classes that entities of every kind bear


@dataclass(frozen=True, slots=True)
class Rule:
    """One reason to reject. `name` is the label of its counter and the first word of its dead letters."""

    name: str
    help: str


RULES: Mapping[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("wire", "Bytes that are not a message of this wire version, or a message that does not fit the store"),
        Rule("newer", "A message of a later wire version: its agent is newer than the pipeline"),
        Rule("sender", "A message of another node than the folder of its spool or the key of its record says"),
        Rule("signature", "A message on Kafka without the signature of its node, where [kafka] node_keys is set"),
        Rule("sequence", "A second message of other content under a known sequence; both are stored"),
        Rule("owner", "An entity that belongs to another sender"),
        Rule(
            "kind",
            "An event of a kind that is not in the catalogue, that only the pipeline writes, or of an entity of "
            "another kind than the catalogue has",
        ),
        Rule("class", "An entity of a kind that does not bear the device class whose signals are sent of it"),
        Rule(
            "name",
            f"A name over {MAX_NAME} characters, a text over {MAX_TEXT}, or one with control, bidirectional, "
            "zero-width, invisible or unassigned characters or line breaks",
        ),
        Rule(
            "data",
            f"Event data of over {MAX_DATA} characters and values, nested deeper than {MAX_NESTING}, or with a number "
            "that is not finite; inventory of another form",
        ),
        Rule(
            "topology",
            f"Inventory whose parents form a circle with what is known, are over {MAX_DEPTH} levels deep, or over "
            f"{MAX_PARENTS} of one entity",
        ),
        Rule("signals", f"Signals without a column, over {MOST_OF_SENDER} of one sender or {MOST_NEW} of one class"),
        Rule("entities", "More entities than [limits] accepts of one sender, or of one kind in all"),
    )
}


@dataclass(frozen=True, slots=True)
class Admitted:
    """What the rules leave of one message. body: None if nothing.  barred: entities whose telemetry is not stored."""

    body: wire.Body | EventBatch | None
    rejected: tuple[Rejected, ...] = ()
    barred: frozenset[str] = frozenset()


@dataclass(slots=True)
class Stored:
    """What the store knows of entities when a pipeline starts."""

    known: Iterable[Known] = ()
    lineage: ParentGraph = field(default_factory=ParentGraph)


class Admission:
    """Applies the rules to messages in the order in which they are stored. One thread only.

    Parents that a message adds count once `commit` says that its transaction is durable; `begin` takes back what the
    last transaction left.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        stored: Stored | None = None,
        owners: Owners | None = None,
        sender_check: SenderCheck | None = None,
    ) -> None:
        stored = stored or Stored()
        self.owners, self.sequences = owners or Owners(), Sequences()
        self.sender_check = sender_check or SenderCheck()
        self._population = Population(limits or Limits(), stored.known)
        self._lineage = stored.lineage
        self._replaced: dict[str, tuple[str, ...] | None] = {}  # by this transaction; None: no line before
        self._sound: WeakSet[wire.Layout] = WeakSet()
        self._turned = 0

    def begin(self, now: int) -> None:
        """A transaction begins: nothing of an earlier one that failed counts."""
        self.sequences.begin()
        self._lineage.remove(entity for entity, before in self._replaced.items() if before is None)
        self._lineage.set_parents({entity: before for entity, before in self._replaced.items() if before is not None})
        self._replaced.clear()
        if now - self._turned >= FORGET:
            if self._turned:
                self._lineage.remove(self._population.turn())
                self.owners.expire(now)
                self._sound.clear()
            self._turned = now

    def save(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Writes who owns what, in the transaction that stores the messages."""
        save_claims(connection, self.owners)

    def commit(self) -> None:
        """The transaction is durable."""
        self._replaced.clear()
        self.sequences.commit()
        self.owners.saved()

    def admit(self, message: Message, body: wire.Body | EventBatch, now: int = wire.MAX_TIME) -> Admitted:
        """What is left of a sound message after the rules. now: when it arrived, where its transport does not say."""
        arrived = message.appended or now
        try:
            if isinstance(body, EventBatch):
                return self._admit_events(body, arrived)
            return self._admit_telemetry(body, min(body.newest_time, arrived))
        except Rejected as error:
            return Admitted(None, (error,))

    # --- telemetry --------------------------------------------------------------------------------------------------

    def _admit_telemetry(self, body: wire.Body, time: int) -> Admitted:
        layout, owners = body.layout, self.owners
        barred: dict[str, Rejected] = {}
        if layout in self._sound:
            owners.hear(layout.node, time)
            barred = {entity: Rejected("owner", fault) for entity, fault in owners.refused(layout, time).items()}
        else:
            barred = self._barred(layout, time)
        if not barred:
            self._sound.add(layout)
            return Admitted(body)
        left = any(entity not in barred for block in layout.blocks for entity in block.entities)
        return Admitted(body if left else None, _one_of_each_rule(barred), frozenset(barred))

    def _barred(self, layout: wire.Layout, time: int) -> dict[str, Rejected]:
        """Entities of a layout that is not known to be sound whose telemetry is not stored; the others are claimed."""
        _check("name", find_name_fault((layout.site, layout.node)))
        self.owners.hear(layout.node, time)
        barred = {entity: fault for block in layout.blocks for entity, fault in _block_faults(block)}
        entities = {e: None for block in layout.blocks for e in block.entities if e not in barred}
        others = {e: why for e in entities if (why := self.owners.check(layout.node, e, time))}
        over = self._population.name(layout.site, layout.node, [e for e in entities if e not in others])
        texts = {fault: Rejected("entities", fault) for fault in over.values()}
        barred |= {entity: texts[fault] for entity, fault in over.items()}
        barred |= {entity: Rejected("owner", why) for entity, why in others.items()}
        for entity in entities:
            if entity not in barred:
                self.owners.claim(layout.node, entity, time, measured=True)
        return barred

    # --- events -----------------------------------------------------------------------------------------------------

    def _admit_events(self, batch: EventBatch, arrived: int) -> Admitted:
        _check("name", find_name_fault((batch.origin.site, batch.origin.node)))
        if batch.events:
            self.owners.hear(batch.origin.node, min(arrived, max(event.time for event in batch.events)))
        kept: list[Event] = []
        rejected: list[Rejected] = []
        for event in batch.events:
            try:
                left, refused = self._checked(batch, event, min(arrived, event.time))
                kept.append(left)
                rejected += _one_of_each_rule(refused)
            except Rejected as error:
                rejected.append(error)
        if not rejected and all(left is event for left, event in zip(kept, batch.events, strict=True)):
            return Admitted(batch)
        return Admitted(replace(batch, events=tuple(kept)) if kept else None, tuple(rejected))

    def _checked(self, batch: EventBatch, event: Event, time: int) -> tuple[Event, Mapping[str, Rejected]]:
        """The event without what its sender may not report, and that. Raises Rejected if nothing is left.

        What the event names counts from now on.
        """
        _check_kind(event)
        _check("name", find_entity_fault((event.entity,)))
        lines: Mapping[str, tuple[str, ...]] = {}
        most = self._population.most(batch.origin.node)
        if event.kind == "inventory":
            _inventory_lines(event, most)
        else:
            _check_values(event.data, MAX_DATA)
        event, refused = owned_part(self.owners, batch.origin.node, event, time)
        if event.kind == "inventory":
            lines = _inventory_lines(event, most)
            named = {event.entity: None, **{e: None for child, above in lines.items() for e in (child, *above)}}
            lines = {e: above for e, above in lines.items() if above and above != self._lineage.parents.get(e)}
            self._check_topology(lines)
        else:
            named = {event.entity: None, **dict.fromkeys(_ranks(event))}
        _check("entities", self._population.name_all(batch.origin.site, batch.origin.node, named))
        claim_named(self.owners, batch.origin.node, event, time)
        self._put(lines)
        return event, {entity: Rejected("owner", fault) for entity, fault in refused.items()}

    def _check_topology(self, lines: Mapping[str, tuple[str, ...]]) -> None:
        try:
            self._lineage.check_parents(lines)
        except UsageError as error:
            raise Rejected("topology", str(error).removeprefix("topology: ")) from error

    def _put(self, lines: Mapping[str, tuple[str, ...]]) -> None:
        for entity in lines:
            self._replaced.setdefault(entity, self._lineage.parents.get(entity))
        self._lineage.set_parents(lines)


def _check(rule: str, fault: str | None) -> None:
    if fault is not None:
        raise Rejected(rule, fault)


def _check_kind(event: Event) -> None:
    kind = EVENT_KINDS.get(event.kind)
    if kind is None:
        raise Rejected("kind", f"event kind {quote_text(event.kind)}: not in the catalogue: upgrade the pipeline")
    if kind.internal:
        raise Rejected("kind", f"event kind {event.kind!r}: only the pipeline writes it; agents may not send it")
    if not kind.applies_to(kind_of(event.entity)):
        raise Rejected(
            "kind", f"event {event.kind} of {quote_text(event.entity)}: expected an entity of kind {kind.entity}"
        )


def _block_faults(block: wire.BlockLayout) -> Iterator[tuple[str, Rejected]]:
    """Entities of which telemetry may not be sent in this block, whoever sends it, with the reason."""
    kinds = kinds_of_class(block.device_class)
    every = block.device_class in _ANY_KIND
    sound = find_entity_fault(block.entities) is None  # the usual case costs one look at all of them
    for entity in block.entities:
        if not sound and (fault := find_entity_fault((entity,))):
            yield entity, Rejected("name", fault)
        elif not every and kind_of(entity) not in kinds:
            text = f"{entity}: class {block.device_class} wants entities of kind {' or '.join(kinds)}"
            yield entity, Rejected("class", text)


def _one_of_each_rule(barred: Mapping[str, Rejected]) -> tuple[Rejected, ...]:
    """The first rejection by each rule, with how many more there are."""
    found: dict[str, list[Rejected]] = {}
    for rejected in barred.values():
        found.setdefault(rejected.rule, []).append(rejected)
    return tuple(
        first if not more else Rejected(rule, f"{str(first).removeprefix(f'{rule}: ')}; and {len(more)} more entities")
        for rule, (first, *more) in found.items()
    )


def _ranks(event: Event) -> Iterator[str]:
    """The ranks that a job_start places, which become entities."""
    ranks = event.data.get("ranks")
    if event.kind == "job_start" and isinstance(ranks, dict):
        yield from (rank for rank in ranks if kind_of(rank) == "rank")


def _inventory_lines(event: Event, most: int) -> dict[str, tuple[str, ...]]:
    """Entity -> its parents, of at most `most` entities. Raises Rejected unless all lines are sound."""
    found = event.data.get("entities")
    if not isinstance(found, dict) or not all(isinstance(line, dict) for line in found.values()):
        raise Rejected("data", "inventory without an object `entities` that holds one object per entity")
    if len(found) > most:
        raise Rejected("entities", f"inventory of {len(found)} entities, at most {most}: see [limits]")
    lines: dict[str, tuple[str, ...]] = {}
    for entity, line in found.items():
        parents, attributes = line.get("parents", []), line.get("attributes", {})
        if not isinstance(parents, list) or not isinstance(attributes, dict):
            raise Rejected(
                "data", f"inventory of {quote_text(entity)}: wanted a list of parents and an object of attributes"
            )
        if not all(isinstance(parent, str) for parent in parents):
            raise Rejected("data", f"inventory of {quote_text(entity)}: parents that are no text")
        if len(parents) > MAX_PARENTS:
            raise Rejected(
                "topology", f"{quote_text(entity)}: {len(parents)} parents, at most {MAX_PARENTS} are accepted"
            )
        if len(attributes) > MAX_ATTRIBUTES:
            raise Rejected(
                "data", f"{quote_text(entity)}: {len(attributes)} attributes, at most {MAX_ATTRIBUTES} are accepted"
            )
        lines[entity] = tuple(parents)
    _check("name", find_entity_fault(dict.fromkeys(e for child, above in lines.items() for e in (child, *above))))
    _check_values(found)
    return lines


def _check_values(data: Mapping[str, object], most: float = math.inf) -> None:
    """Raises Rejected unless keys, texts, numbers, nesting and size of event data are sound."""
    names: list[str] = []
    texts: list[str] = []
    size = depth = 0
    level: list[object] = [data]
    while level:
        if (depth := depth + 1) > MAX_NESTING:
            raise Rejected("data", f"lists and objects nested deeper than {MAX_NESTING}")
        size += len(level)
        names += (key for value in level if isinstance(value, dict) for key in value)
        texts += (value for value in level if isinstance(value, str))
        if bad := next((v for v in level if isinstance(v, float) and not math.isfinite(v)), None):
            raise Rejected("data", f"the number {bad}, which JSON does not have")
        level = [
            inner
            for value in level
            if isinstance(value, (dict, list))
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
    size += sum(map(len, texts)) + sum(map(len, names))
    if size > most:
        raise Rejected("data", f"{size} characters and values, at most {most} are accepted")
    _check("name", find_text_fault(names, MAX_NAME))
    _check("name", find_text_fault(texts))
