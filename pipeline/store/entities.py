"""What the store knows of entities when a pipeline starts: sound rows alone, so that no row can prevent the start."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import duckdb

from pipeline.model.names import entity_fault, quoted
from pipeline.model.signals import CLASSES
from pipeline.model.topology import Lineage, Topology
from pipeline.population import FORGET, Known
from pipeline.store.retention import newest_row

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
        return Topology.of_sound(self.parents, self.attributes)


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
        shown = "; ".join(f"{quoted(entity)}: {why}" for entity, why in list(found.skipped.items())[:_SHOWN])
        log.warning("store: %d rows of entity skipped, as if they were not there: %s", len(found.skipped), shown)
    return found


def _fault(entity: str, parents: list[str], facts: object) -> str | None:
    if not isinstance(facts, dict):
        return "attributes that are not a JSON object"
    return entity_fault((entity, *parents))


def _skip_circles(found: Entities) -> None:
    """Takes out lines of parents that make a circle with those before them, or that lie too deep."""
    bad = Lineage().put_sound(found.parents)
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
