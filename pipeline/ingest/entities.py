"""Known entities: those in the store at the start, and how many each sender may add.

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
from pipeline.model.errors import UsageError
from pipeline.model.names import find_entity_fault, quote_text
from pipeline.model.records import SECOND
from pipeline.model.signals import CLASS_OF_KIND, CLASSES
from pipeline.model.topology import ParentGraph, Topology, kind_of
from pipeline.store.retention import find_newest_row
from pipeline.topology.merge import MergedTopology, overlay_lines

EXPIRY = 24 * 3600 * SECOND
"""An entity that no message named for one to two of these no longer counts (chosen; inventory is sent hourly)."""
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
"""Kind -> maximum entities per GPU of a site, unless configured. Eighteen NVLinks as in NVIDIA's H100; others
chosen: at least twice those of a node of 8 GPUs with 64 sensors and 60 services. All other kinds share OTHER."""
OTHER = "other"  # kinds that are not in PER_GPU, counted together: one per GPU
KnownEntity = tuple[str, str, str]
"""(site, entity, sender that named it)."""


class EntityCounts:
    """Counts entities per sender and kind. For one thread. Memory: one entry per entity."""

    def __init__(self, limits: Limits, known: Iterable[KnownEntity] = ()) -> None:
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

    def add_entities(self, site: str, sender: str, entities: Collection[str]) -> dict[str, str]:
        """Counts `entities` named by `sender`; returns entity -> reason for those over a limit."""
        new = [entity for entity in entities if not self._is_known(site, entity)]
        refused: dict[str, str] = {}
        full: dict[str, str] = {}  # pool -> reason, shared by its entities
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

    def add_all(self, site: str, sender: str, entities: Collection[str]) -> str | None:
        """Counts all of `entities` or none; returns the reason for none."""
        new = dict.fromkeys(entity for entity in entities if not self._is_known(site, entity))
        kinds = Counter(map(_pool, new))
        fault = self._sender_fault(sender, len(new)) if new else None
        for kind, number in kinds.items():
            fault = fault or self._kind_fault(kind, number)
        if fault is None:
            for entity in new:
                self._add(site, entity, sender)
        return fault

    def max_entities(self, sender: str) -> int:
        """Maximum entities of a sender."""
        return self._limits.senders.get(sender, self._limits.entities_per_sender)

    def drop_expired(self) -> Iterator[str]:
        """Drops entities that were not named for EXPIRY, and returns them. Called every EXPIRY."""
        gone, self._older, self._recent = self._older, self._recent, {}
        for named in gone.values():
            for entity, sender in named.items():
                self._of_sender[sender] -= 1
                self._of_kind[_pool(entity)] -= 1
                yield entity
        self._of_sender, self._of_kind = +self._of_sender, +self._of_kind

    def _is_known(self, site: str, entity: str) -> bool:
        """Whether an entity counts already; renews it."""
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
        most = self.max_entities(sender)
        if self._of_sender[sender] + more <= most:
            return None
        return (
            f"{more} new entities in addition to {self._of_sender[sender]} of sender {sender}, at most {most}: "
            f"see [limits] entities_per_sender and senders"
        )

    def _kind_fault(self, kind: str, more: int) -> str | None:
        most = self._limits.kinds.get(kind, PER_GPU.get(kind, 1) * self._limits.gpus)
        if self._of_kind[kind] + more <= most:
            return None
        known = self._of_kind[kind]
        return f"{more} new entities in addition to {known} of kind {kind}, at most {most}: see [limits] gpus"


def _pool(entity: str) -> str:
    kind = kind_of(entity)
    return kind if kind in PER_GPU else OTHER


log = logging.getLogger("fleetpulse.store")

_SHOWN = 3  # skipped rows shown in the log


@dataclass(slots=True)
class StoredEntities:
    """Entities in the store. parents, attributes: valid ones.  known: with senders.  skipped: entity -> reason."""

    parents: dict[str, tuple[str, ...]] = field(default_factory=dict)
    attributes: dict[str, Mapping[str, object]] = field(default_factory=dict)
    known: list[KnownEntity] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def build_topology(self) -> Topology:
        """A new topology from the rows."""
        return Topology.from_checked(self.parents, self.attributes)


def load_entities(connection: duckdb.DuckDBPyConnection, now: int) -> StoredEntities:
    """Loads the tables `entity` and `device`. An invalid row is skipped and logged, never fatal."""
    found = StoredEntities()
    rows = connection.execute("SELECT entity, parents, attributes, site, node FROM entity ORDER BY entity").fetchall()
    for entity, parents, attributes, site, node in rows:
        try:
            facts = json.loads(attributes)
        except (ValueError, RecursionError) as error:
            found.skipped[entity] = f"attributes that are not JSON: {error}"
            continue
        if fault := _find_fault(entity, parents, facts):
            found.skipped[entity] = fault
            continue
        found.known += ((site, name, node or "") for name in (entity, *parents))
        if parents:
            found.parents[entity] = tuple(parents)
        if facts:
            found.attributes[entity] = facts
    _skip_circles(found)
    found.known += _load_devices(connection, now)
    if found.skipped:
        shown = "; ".join(f"{quote_text(entity)}: {why}" for entity, why in list(found.skipped.items())[:_SHOWN])
        log.warning("store: %d invalid rows of table entity skipped: %s", len(found.skipped), shown)
    return found


def _find_fault(entity: str, parents: list[str], facts: object) -> str | None:
    if not isinstance(facts, dict):
        return "attributes that are not a JSON object"
    return find_entity_fault((entity, *parents))


def _skip_circles(found: StoredEntities) -> None:
    """Removes parents that form a circle with earlier rows or exceed MAX_DEPTH."""
    bad = ParentGraph().set_valid(found.parents)
    found.skipped |= bad
    for entity in bad:
        del found.parents[entity]


def _load_devices(connection: duckdb.DuckDBPyConnection, now: int) -> list[KnownEntity]:
    """Devices with telemetry within EXPIRY of the newest row."""
    since = find_newest_row(connection, now) - EXPIRY
    each = " UNION ".join(
        f"SELECT d.site, d.entity, d.node FROM latest_{c} l JOIN device d ON d.id = l.device AND d.class = '{c}' "
        f"WHERE l.time >= make_timestamptz({since})"
        for c in CLASSES
    )
    return connection.execute(each).fetchall()


def load_topology(entities: StoredEntities, site: MergedTopology | None = None) -> Topology:
    """Returns the topology of the stored inventory below what the files of the site say.

    Stored lines that form a circle with the files are skipped.
    """
    topology = entities.build_topology()
    if site is None or not (site.parents or site.attributes):
        return topology
    lines = overlay_lines(site.parents, entities.parents)
    facts = {e: {**entities.attributes.get(e, {}), **more} for e, more in site.attributes.items()}
    try:
        topology.merge(lines, facts)
    except UsageError:
        left = ParentGraph(site.parents)
        rest = {**entities.parents, **{e: above for e, above in lines.items() if above != site.parents[e]}}
        entities.skipped |= left.set_valid(rest)
        topology = Topology(left.parents, {**entities.attributes, **facts})
    topology.site = site.parents, site.attributes
    return topology
