"""What a pipeline process is made of, from its configuration and its store: transport, topology, links in alerts."""

from __future__ import annotations

import dataclasses

from pipeline.config.sections import Config, Notify
from pipeline.ingest.entities import StoredEntities
from pipeline.ingest.offsets import load_offsets
from pipeline.model.errors import UsageError
from pipeline.model.topology import ParentGraph, Topology
from pipeline.recording.reader import read_topology
from pipeline.store.database import Database
from pipeline.transport import Transport
from pipeline.transport.spool import SpoolTransport


def linked(config: Config) -> Notify:
    """[notify] with the dashboard's address as the links in alerts, unless another one is configured."""
    own = f"http://{config.dashboard.host}:{config.dashboard.port}"
    return dataclasses.replace(config.notify, external_url=config.notify.external_url or own)


def open_transport(config: Config, database: Database) -> Transport:
    """The transport that the configuration names. Raises ConfigError on credentials that cannot be read."""
    if config.pipeline.transport == "spool":
        return SpoolTransport(config.spool.directory)
    from pipeline.transport.kafka import (
        KafkaTransport,  # only here: one host needs no Kafka client
        reduce_gc,
        tune_allocator,
    )

    tune_allocator()
    reduce_gc()
    cursor = database.cursor()
    try:
        return KafkaTransport(config.kafka, load_offsets(cursor))
    finally:
        cursor.close()


def known_topology(entities: StoredEntities, config: Config) -> Topology:
    """What inventory said before, and on top of it the file of [topology], which knows what agents cannot: no inventory
    replaces its lines later.

    Lines of the store that make a circle with the file's are left out; the file itself must be sound.
    """
    topology = entities.build_topology()
    if config.topology.path is None:
        return topology
    extra = read_topology(config.topology.path)
    try:
        topology.merge(extra.parents, extra.attributes)
    except UsageError:
        left = ParentGraph(extra.parents)
        entities.skipped |= left.set_valid({e: p for e, p in entities.parents.items() if e not in extra.parents})
        topology = Topology(left.parents, entities.attributes)
        topology.merge({}, extra.attributes)
    topology.pinned = frozenset(extra.parents), frozenset(e for e, facts in extra.attributes.items() if facts)
    return topology
