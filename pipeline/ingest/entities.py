"""Entities that the pipeline knows: those that the store holds at a start, and how many each sender may add.

Only valid rows are loaded, so that no row can prevent a start. The numbers of entities per sender and per kind are
bounded before an entity gets an id. An entity counts for the sender that named it first, until it was not named for
FORGET.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import duckdb

from pipeline.config.sections import Limits
from pipeline.model.names import find_entity_fault, quote_text
from pipeline.model.records import SECOND
from pipeline.model.signals import CLASS_OF_KIND, CLASSES
from pipeline.model.topology import ParentGraph, Topology, kind_of
from pipeline.store.retention import newest_row

FORGET = 24 * 3600 * SECOND
"""An entity that nobody named for one to two of these counts no more (chosen: inventory comes every hour)."""
PER_GPU: Mapping[str, int] = {
    **dict.fromkeys(CLASS_OF_KIND, 1),
    **dict.fromkeys(("job", "stage", "rack", "leaf"), 1),
    "nvlink": 18,
    "sensor": 16,
    "service": 16,
    "rank": 8,
    "neuroncore": 8,
    "port": 8,
    "dimm": 4,
    "disk": 4,
    "filesystem": 4,
    "collector": 4,
}
"""Kind -> entities of it per GPU that a site may have, unless configured. Eighteen NVLinks as in NVIDIA's H100; the
others chosen: at least twice what a node of 8 GPUs with 64 sensors and 60 services has. Other kinds share OTHER."""
OTHER = "other"  # kinds that are not in PER_GPU count together, one per GPU
Known = tuple[str, str, str]
"""Site, entity, and the sender that named it."""


class Population:
    """Counts entities. For one thread. Memory: one entry for each entity that counts."""

    def __init__(self, limits: Limits, known: Iterable[Known] = ()) -> None:
        self._limits = limits
        self._recent: dict[str, dict[str, str]] = {}  # site -> entity -> sender
        self._older: dict[str, dict[str, str]] = {}
        self._of_sender: Counter[str] = Counter()
        self._of_kind: Counter[str] = Counter()
        for site, entity, sender in known:
            if not self._is_known(site, entity):
                self._add(site, entity, sender)

    def __len__(self) -> int:
        return sum(self._of_kind.values())

    def name(self, site: str, sender: str, entities: Collection[str]) -> dict[str, str]:
        """Counts `entities`, which `sender` names; entity -> why for those that it may not add."""
        new = [entity for entity in entities if not self._is_known(site, entity)]
        refused: dict[str, str] = {}
        full: dict[str, str] = {}  # pool -> why: one text for all that it holds for
        for entity in new:
            fault = full.get("") or full.get(pool := _pool(entity))
            if fault is None and (fault := self._sender_fault(sender, 1)):
                full[""] = fault
            elif fault is None and (fault := self._kind_fault(pool, 1)):
                full[pool] = fault
            if fault is None:
                self._add(site, entity, sender)
            else:
                refused[entity] = fault
        return refused

    def name_all(self, site: str, sender: str, entities: Collection[str]) -> str | None:
        """As `name`, but counts all or nothing; why nothing."""
        new = dict.fromkeys(entity for entity in entities if not self._is_known(site, entity))
        kinds = Counter(map(_pool, new))
        fault = self._sender_fault(sender, len(new)) if new else None
        for kind, number in kinds.items():
            fault = fault or self._kind_fault(kind, number)
        if fault is None:
            for entity in new:
                self._add(site, entity, sender)
        return fault

    def most(self, sender: str) -> int:
        """How many entities a sender may name."""
        return self._limits.senders.get(sender, self._limits.entities_per_sender)

    def turn(self) -> Iterator[str]:
        """Another FORGET has passed: the entities that count no more."""
        gone, self._older, self._recent = self._older, self._recent, {}
        for named in gone.values():
            for entity, sender in named.items():
                self._of_sender[sender] -= 1
                self._of_kind[_pool(entity)] -= 1
                yield entity
        self._of_sender, self._of_kind = +self._of_sender, +self._of_kind

    def _is_known(self, site: str, entity: str) -> bool:
        """Whether it counts already; it goes on to."""
        if entity in self._recent.get(site, ()):
            return True
        older = self._older.get(site, {})
        if entity not in older:
            return False
        self._recent.setdefault(site, {})[entity] = older.pop(entity)
        return True

    def _add(self, site: str, entity: str, sender: str) -> None:
        self._recent.setdefault(site, {})[entity] = sender
        self._of_sender[sender] += 1
        self._of_kind[_pool(entity)] += 1

    def _sender_fault(self, sender: str, more: int) -> str | None:
        most = self.most(sender)
        if self._of_sender[sender] + more <= most:
            return None
        return (
            f"{more} new entities beside the {self._of_sender[sender]} of sender {sender}, at most {most}: "
            f"see [limits] entities_per_sender and senders"
        )

    def _kind_fault(self, kind: str, more: int) -> str | None:
        most = self._limits.kinds.get(kind, PER_GPU.get(kind, 1) * self._limits.gpus)
        if self._of_kind[kind] + more <= most:
            return None
        return f"{more} new entities beside the {self._of_kind[kind]} of kind {kind}, at most {most}: see [limits] gpus"


def _pool(entity: str) -> str:
    kind = kind_of(entity)
    return kind if kind in PER_GPU else OTHER


log = logging.getLogger("fleetpulse.store")

_SHOWN = 3  # skipped rows that the log shows


@dataclass(slots=True)
class Entities:
    """parents, attributes: by entity, sound and without a circle.  known: who named what.  skipped: entity -> why."""

    parents: dict[str, tuple[str, ...]] = field(default_factory=dict)
    attributes: dict[str, Mapping[str, object]] = field(default_factory=dict)
    known: list[Known] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def topology(self) -> Topology:
        """A new topology of the rows."""
        return Topology.from_checked(self.parents, self.attributes)


def load_entities(connection: duckdb.DuckDBPyConnection, now: int) -> Entities:
    """The rows of `entity` and `device`. A row that could not be admitted today is skipped and logged, never fatal."""
    found = Entities()
    rows = connection.execute("SELECT entity, parents, attributes, site, node FROM entity ORDER BY entity").fetchall()
    for entity, parents, attributes, site, node in rows:
        try:
            facts = json.loads(attributes)
        except (ValueError, RecursionError) as error:
            found.skipped[entity] = f"attributes that are not JSON: {error}"
            continue
        if fault := _fault(entity, parents, facts):
            found.skipped[entity] = fault
            continue
        found.known += ((site, name, node or "") for name in (entity, *parents))
        if parents:
            found.parents[entity] = tuple(parents)
        if facts:
            found.attributes[entity] = facts
    _skip_circles(found)
    found.known += _devices(connection, now)
    if found.skipped:
        shown = "; ".join(f"{quote_text(entity)}: {why}" for entity, why in list(found.skipped.items())[:_SHOWN])
        log.warning("store: %d rows of entity skipped, as if they were not there: %s", len(found.skipped), shown)
    return found


def _fault(entity: str, parents: list[str], facts: object) -> str | None:
    if not isinstance(facts, dict):
        return "attributes that are not a JSON object"
    return find_entity_fault((entity, *parents))


def _skip_circles(found: Entities) -> None:
    """Takes out lines of parents that make a circle with those before them, or that lie too deep."""
    bad = ParentGraph().set_valid(found.parents)
    found.skipped |= bad
    for entity in bad:
        del found.parents[entity]


def _devices(connection: duckdb.DuckDBPyConnection, now: int) -> list[Known]:
    """Devices with telemetry in the last FORGET of it."""
    since = newest_row(connection, now) - FORGET
    each = " UNION ".join(
        f"SELECT d.site, d.entity, d.node FROM latest_{c} l JOIN device d ON d.id = l.device AND d.class = '{c}' "
        f"WHERE l.time >= make_timestamptz({since})"
        for c in CLASSES
    )
    return connection.execute(each).fetchall()
