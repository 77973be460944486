"""The transport that the configuration names."""

from __future__ import annotations

from pipeline.config.sections import Config
from pipeline.ingest.offsets import load_offsets
from pipeline.runtime.memory import reduce_gc, tune_allocator
from pipeline.store.database import Database
from pipeline.transport import Transport
from pipeline.transport.spool import SpoolTransport
from pipeline.transport.unpacking import compile_loops


def open_transport(config: Config, database: Database) -> Transport:
    """Returns the configured transport. Raises ConfigError if credentials cannot be read."""
    reduce_gc()
    if config.pipeline.transport == "spool":
        return SpoolTransport(config.spool.directory)
    from pipeline.transport.kafka import KafkaTransport  # imported here: the spool needs no Kafka client

    tune_allocator()
    cursor = database.cursor()
    try:
        return KafkaTransport(config.kafka, load_offsets(cursor))
    finally:
        cursor.close()


def compile_reading(config: Config) -> None:
    """Compiles the loops that read messages of the configured transport, or reads what an earlier start compiled."""
    compile_loops()
    if config.pipeline.transport == "kafka":
        from pipeline.transport import record_batches  # here, as above

        record_batches.compile_loops()
