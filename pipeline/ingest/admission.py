"""Admission: the table of rules for what a transport may bring in. Telemetry is validated, not trusted.

Rejected input is never stored. It becomes a dead letter whose reason begins with the name of the rule, and is counted
by rule. The unit of rejection is a message, or an event, entity or inventory line in it: the rest is stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from weakref import WeakSet

import duckdb

from pipeline.config.sections import Limits
from pipeline.ingest.columns import MAX_NEW, MAX_PER_SENDER
from pipeline.ingest.entities import EXPIRY, EntityCounts, KnownEntity
from pipeline.ingest.ownership import NEVER, Owners, claim_entities, keep_owned, save_claims
from pipeline.ingest.sequences import RecentMessages
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
MAX_DATA = 64 << 10  # characters and values of an event's data, except inventory; chosen: 10 times the largest
MAX_NESTING = 8  # levels of lists and objects in an event's data; chosen: twice that of agents
_NOBODY = frozenset[str]()
_ANY_KIND = frozenset({"canary", "custom"})  # device classes of entities of any kind


@dataclass(frozen=True, slots=True)
class Rule:
    """A reason to reject. `name` is the label of its counter and the first word of its dead letters."""

    name: str
    help: str


RULES: Mapping[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("wire", "Bytes that are not a message of this wire version, or a message that does not fit the store"),
        Rule("newer", "A message of a newer wire version: the agent is newer than the pipeline"),
        Rule("sender", "A message that names another node than its spool folder or record key"),
        Rule("signature", "A message on Kafka without a valid signature of its node, if [kafka] node_keys is set"),
        Rule("sequence", "A different message with a known sequence number; both are stored"),
        Rule("owner", "An entity that belongs to another sender"),
        Rule(
            "kind",
            "An event kind that is unknown or internal to the pipeline, or an event of an entity of a kind that the "
            "catalogue does not allow",
        ),
        Rule("class", "An entity of a kind that does not have the device class of its signals"),
        Rule(
            "name",
            f"A name over {MAX_NAME} characters, a text over {MAX_TEXT}, or one with control, bidirectional, "
            "zero-width, invisible or unassigned characters or line breaks",
        ),
        Rule(
            "data",
            f"Event data over {MAX_DATA} characters and values, nested deeper than {MAX_NESTING}, or with a number "
            "that is not finite; a malformed inventory",
        ),
        Rule(
            "topology",
            f"Inventory with a circle of parents, over {MAX_DEPTH} levels, or over {MAX_PARENTS} parents of one entity",
        ),
        Rule("signals", f"Signals without a column, over {MAX_PER_SENDER} of one sender or {MAX_NEW} of one class"),
        Rule("entities", "More entities than [limits] allows for one sender or one kind"),
        Rule("otlp", "Values of another sender without a node, or with times outside the years 2000 to 9999"),
    )
}


class Admitted(NamedTuple):
    """The admitted part of a message. body: None if nothing.  excluded: entities whose telemetry is not stored."""

    body: wire.Body | EventBatch | None
    rejected: tuple[Rejected, ...] = ()
    excluded: frozenset[str] = frozenset()


@dataclass(slots=True)
class StoredState:
    """Entities and parents in the store at the start of the pipeline."""

    known: Iterable[KnownEntity] = ()
    graph: ParentGraph = field(default_factory=ParentGraph)


class Admission:
    """Applies the rules to messages in the order in which they are stored. For one thread.

    Parents that a message adds take effect with `commit`; `begin` undoes those of a failed transaction.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        stored: StoredState | None = None,
        owners: Owners | None = None,
        sender_check: SenderCheck | None = None,
    ) -> None:
        stored = stored or StoredState()
        self.owners, self.sequences = owners or Owners(), RecentMessages()
        self.sender_check = sender_check or SenderCheck()
        self._population = EntityCounts(limits or Limits(), stored.known)
        self._graph = stored.graph
        self._replaced: dict[str, tuple[str, ...] | None] = {}  # by this transaction; None: new
        self._checked_layouts: WeakSet[wire.Layout] = WeakSet()
        self._settled: dict[wire.Layout, range] = {}  # event times without an effect; until the next admission
        self._expired_at = 0

    def begin(self, now: int) -> None:
        """Starts a transaction; undoes what a failed one left."""
        self.sequences.begin()
        self._settled.clear()
        self._graph.remove(entity for entity, before in self._replaced.items() if before is None)
        self._graph.set_parents({entity: before for entity, before in self._replaced.items() if before is not None})
        self._replaced.clear()
        if now - self._expired_at >= EXPIRY:
            if self._expired_at:
                self._graph.remove(self._population.drop_expired())
                self.owners.drop_expired(now)
                self._checked_layouts.clear()
            self._expired_at = now

    def save_owners(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Writes ownership, in the transaction that stores the messages."""
        save_claims(connection, self.owners)

    def commit(self) -> None:
        """Keeps the changes of the durable transaction."""
        self._replaced.clear()
        self.sequences.commit()
        self.owners.mark_saved()

    def admit(self, message: Message, body: wire.Body | EventBatch, now: int = wire.MAX_TIME) -> Admitted:
        """The admitted part of a valid message. now: arrival time if the transport has none."""
        arrived = message.appended or now
        try:
            if isinstance(body, EventBatch):
                return self._admit_events(body, arrived)
            return self._admit_telemetry(body, min(body.newest_time, arrived))
        except Rejected as error:
            return Admitted(None, (error,))

    # --- telemetry --------------------------------------------------------------------------------------------------

    def _admit_telemetry(self, body: wire.Body, time: int) -> Admitted:
        excluded, rejected = self.admit_layout(body.layout, time)
        if not excluded:
            return Admitted(body)
        left = any(entity not in excluded for block in body.layout.blocks for entity in block.entities)
        return Admitted(body if left or not rejected else None, rejected, excluded)

    def is_settled(self, layout: wire.Layout, time: int) -> bool:
        """Whether telemetry of a layout is admitted whole and concerns no other sender; then `record_settled` does."""
        settled = self._settled.get(layout)
        if settled is None:
            settled = self.owners.find_settled(layout) if layout in self._checked_layouts else NEVER
            self._settled[layout] = settled
        return time in settled

    def record_settled(self, node: str, time: int) -> None:
        """Admits telemetry of `node` with settled layouts up to `time`."""
        self.owners.record_message(node, time)

    def admit_layout(self, layout: wire.Layout, time: int) -> tuple[frozenset[str], tuple[Rejected, ...]]:
        """(entities whose telemetry is not stored, the first rejection of each rule). Raises Rejected for none."""
        self._settled.clear()
        owners = self.owners
        excluded: dict[str, Rejected] = {}
        if layout in self._checked_layouts:
            owners.record_message(layout.node, time)
            if refused := owners.find_refused(layout, time):
                excluded = {entity: Rejected("owner", fault) for entity, fault in refused.items()}
        else:
            excluded = self._find_excluded(layout, time)
            if not excluded:
                self._checked_layouts.add(layout)
        if not excluded:
            return _NOBODY, ()
        return frozenset(excluded), _first_of_each_rule(excluded)

    def _find_excluded(self, layout: wire.Layout, time: int) -> dict[str, Rejected]:
        """Entities of an unchecked layout whose telemetry is not stored; the others are claimed."""
        _reject_if("name", find_name_fault((layout.site, layout.node)))
        self.owners.record_message(layout.node, time)
        excluded = {entity: fault for block in layout.blocks for entity, fault in _find_block_faults(block)}
        entities = {e: None for block in layout.blocks for e in block.entities if e not in excluded}
        others = {e: why for e in entities if (why := self.owners.check_owner(layout.node, e, time))}
        over = self._population.add_entities(layout.site, layout.node, [e for e in entities if e not in others])
        texts = {fault: Rejected("entities", fault) for fault in over.values()}
        excluded |= {entity: texts[fault] for entity, fault in over.items()}
        excluded |= {entity: Rejected("owner", why) for entity, why in others.items()}
        for entity in entities:
            if entity not in excluded:
                self.owners.claim_entity(layout.node, entity, time, measured=True)
        return excluded

    # --- events -----------------------------------------------------------------------------------------------------

    def admit_inventory(self, batch: EventBatch, now: int) -> Admitted:
        """The admitted part of an inventory that the pipeline makes for a sender without an agent."""
        try:
            return self._admit_events(batch, now)
        except Rejected as error:
            return Admitted(None, (error,))

    def _admit_events(self, batch: EventBatch, arrived: int) -> Admitted:
        self._settled.clear()
        _reject_if("name", find_name_fault((batch.origin.site, batch.origin.node)))
        if batch.events:
            self.owners.record_message(batch.origin.node, min(arrived, max(event.time for event in batch.events)))
        kept: list[Event] = []
        rejected: list[Rejected] = []
        for event in batch.events:
            try:
                left, refused = self._check_event(batch, event, min(arrived, event.time))
                kept.append(left)
                rejected += _first_of_each_rule(refused)
            except Rejected as error:
                rejected.append(error)
        if not rejected and all(left is event for left, event in zip(kept, batch.events, strict=True)):
            return Admitted(batch)
        return Admitted(replace(batch, events=tuple(kept)) if kept else None, tuple(rejected))

    def _check_event(self, batch: EventBatch, event: Event, time: int) -> tuple[Event, Mapping[str, Rejected]]:
        """The event without the parts that its sender may not report, and these parts. Raises Rejected if none is left.

        Counts and claims the entities in the event.
        """
        _check_kind(event)
        _reject_if("name", find_entity_fault((event.entity,)))
        lines: Mapping[str, tuple[str, ...]] = {}
        most = self._population.max_entities(batch.origin.node)
        if event.kind == "inventory":
            _parse_inventory(event, most)
            _check_values({key: value for key, value in event.data.items() if key != "entities"}, MAX_DATA)
        else:
            _check_values(event.data, MAX_DATA)
        event, refused = keep_owned(self.owners, batch.origin.node, event, time)
        if event.kind == "inventory":
            lines = _parse_inventory(event, most)
            named = {event.entity: None, **{e: None for child, above in lines.items() for e in (child, *above)}}
            lines = {e: above for e, above in lines.items() if above and above != self._graph.parents.get(e)}
            self._check_topology(lines)
        else:
            named = {event.entity: None, **dict.fromkeys(_job_ranks(event))}
        _reject_if("entities", self._population.add_all(batch.origin.site, batch.origin.node, named))
        claim_entities(self.owners, batch.origin.node, event, time)
        self._set_parents(lines)
        return event, {entity: Rejected("owner", fault) for entity, fault in refused.items()}

    def _check_topology(self, lines: Mapping[str, tuple[str, ...]]) -> None:
        try:
            self._graph.check_parents(lines)
        except UsageError as error:
            raise Rejected("topology", str(error).removeprefix("topology: ")) from error

    def _set_parents(self, lines: Mapping[str, tuple[str, ...]]) -> None:
        for entity in lines:
            self._replaced.setdefault(entity, self._graph.parents.get(entity))
        self._graph.set_parents(lines)


def _reject_if(rule: str, fault: str | None) -> None:
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


def _find_block_faults(block: wire.BlockLayout) -> Iterator[tuple[str, Rejected]]:
    """Entities that may not be in this block, for any sender, with the reason."""
    kinds = kinds_of_class(block.device_class)
    every = block.device_class in _ANY_KIND
    sound = find_entity_fault(block.entities) is None  # usual case: one check for all
    for entity in block.entities:
        if not sound and (fault := find_entity_fault((entity,))):
            yield entity, Rejected("name", fault)
        elif not every and kind_of(entity) not in kinds:
            text = f"{entity}: class {block.device_class} expects entities of kind {' or '.join(kinds)}"
            yield entity, Rejected("class", text)


def _first_of_each_rule(excluded: Mapping[str, Rejected]) -> tuple[Rejected, ...]:
    """The first rejection of each rule, with the number of further ones."""
    found: dict[str, list[Rejected]] = {}
    for rejected in excluded.values():
        found.setdefault(rejected.rule, []).append(rejected)
    return tuple(
        first if not more else Rejected(rule, f"{str(first).removeprefix(f'{rule}: ')}; and {len(more)} more entities")
        for rule, (first, *more) in found.items()
    )


def _job_ranks(event: Event) -> Iterator[str]:
    """The ranks of a job_start, which become entities."""
    ranks = event.data.get("ranks")
    if event.kind == "job_start" and isinstance(ranks, dict):
        yield from (rank for rank in ranks if kind_of(rank) == "rank")


def _parse_inventory(event: Event, most: int) -> dict[str, tuple[str, ...]]:
    """Entity -> its parents, for at most `most` entities. Raises Rejected unless all lines are valid."""
    found = event.data.get("entities")
    if not isinstance(found, dict) or not all(isinstance(line, dict) for line in found.values()):
        raise Rejected("data", "inventory without an object `entities` with one object per entity")
    if len(found) > most:
        raise Rejected("entities", f"inventory of {len(found)} entities, at most {most}: see [limits]")
    lines: dict[str, tuple[str, ...]] = {}
    for entity, line in found.items():
        parents, attributes = line.get("parents", []), line.get("attributes", {})
        if not isinstance(parents, list) or not isinstance(attributes, dict):
            raise Rejected(
                "data", f"inventory of {quote_text(entity)}: expected a list of parents and an object of attributes"
            )
        if not all(isinstance(parent, str) for parent in parents):
            raise Rejected("data", f"inventory of {quote_text(entity)}: parents that are not text")
        if len(parents) > MAX_PARENTS:
            raise Rejected(
                "topology", f"{quote_text(entity)}: {len(parents)} parents, at most {MAX_PARENTS} are accepted"
            )
        if len(attributes) > MAX_ATTRIBUTES:
            raise Rejected(
                "data", f"{quote_text(entity)}: {len(attributes)} attributes, at most {MAX_ATTRIBUTES} are accepted"
            )
        lines[entity] = tuple(parents)
    _reject_if("name", find_entity_fault(dict.fromkeys(e for child, above in lines.items() for e in (child, *above))))
    _check_values(found)
    return lines


def _check_values(data: Mapping[str, object], most: float = math.inf) -> None:
    """Raises Rejected unless keys, texts, numbers, nesting and size of event data are valid."""
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
            raise Rejected("data", f"the number {bad}, which is not valid JSON")
        level = [
            inner
            for value in level
            if isinstance(value, (dict, list))
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
    size += sum(map(len, texts)) + sum(map(len, names))
    if size > most:
        raise Rejected("data", f"{size} characters and values, at most {most} are accepted")
    _reject_if("name", find_text_fault(names, MAX_NAME))
    _reject_if("name", find_text_fault(texts))
