"""A whole pipeline over real brokers, with counts of the messages that were sent, stored and lost in gaps.

Every message is one row of one GPU, whose temperature is the sequence of the message: rows show sequences.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from kafka import TopicPartition

from agents.node.spool.spool import Spool
from agents.node.uplink.client import ClientTimeouts
from agents.node.uplink.sender import SpoolSender
from pipeline.commands.service import PipelineService
from pipeline.config import sections
from pipeline.model.records import SECOND, TELEMETRY, Batch, Block, Origin
from pipeline.store.database import Database
from pipeline.transport import kafka_clients, wire

NODES = ("n0", "n1", "n2", "n3")
"""Chosen: over 4 partitions their keys use three of them."""
INTERVAL_S = 0.02
"""Between two messages of a node. Chosen: 200 messages a second in all leave both cores idle."""
SHORT_TIMEOUTS = ClientTimeouts(delivery=2.0, request=1.0, block=0.5)
"""Timeouts of the agent's client: a fifteenth of the defaults, so that a test can wait for longer than them."""
VISIBLE_S = 30.0
"""Every fault must be visible within this time."""
log = logging.getLogger("tests.failures")


class EmptyJudge:
    """A judge without detectors."""

    signals = frozenset[str]()
    names: tuple[str, ...] = ()

    def listing(self) -> list[dict[str, Any]]:
        return []

    def calibration(self) -> dict[str, Any]:
        return {}

    def calibration_rows(self, other: Any = None) -> list[dict[str, Any]]:
        return []

    def beat(self, doing: str) -> None:
        """Does nothing: no heartbeat is checked."""

    def judge_events(self, events: object, topology: object, again: bool = False) -> list[object]:
        return []

    def observe(self, frames: object) -> list[object]:
        return []

    def snapshot(self) -> tuple[()]:
        return ()

    def restore(self, pieces: object) -> None: ...


def wait_until(holds: Callable[[], object], seconds: float, what: str) -> float:
    """Returns the seconds until `holds` was true. Fails after `seconds`."""
    begin = time.monotonic()
    while not holds():
        assert time.monotonic() < begin + seconds, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - begin


@dataclass
class MessageCounts:
    """Messages by (node, sequence). `stored` counts rows."""

    sent: set[tuple[str, int]]
    stored: Counter[tuple[str, int]]
    gaps: Counter[tuple[str, int]]
    causes: set[str] = field(default_factory=set)

    @property
    def lost(self) -> set[tuple[str, int]]:
        return self.sent - set(self.stored) - set(self.gaps)

    @property
    def duplicates(self) -> set[tuple[str, int]]:
        return {key for key, count in (self.stored + self.gaps).items() if count > 1}


class KafkaPipeline:
    """Spools with a writer, a SpoolSender, and a PipelineService in its thread. Parts start and stop separately."""

    def __init__(
        self, folder: Path, kafka: sections.Kafka, nodes: Iterable[str] = NODES, times: ClientTimeouts = SHORT_TIMEOUTS
    ) -> None:
        self.config = sections.Config(
            spool=sections.Spool(folder / "spool", free_bytes=0),
            kafka=kafka,
            store=sections.Store(folder / "store.duckdb"),
            pipeline=sections.Pipeline(transport="kafka"),
        )
        self.nodes, self.messages = tuple(nodes), list[str]()
        self.spools = {node: Spool(folder / "spool", node, TELEMETRY, free_bytes=0) for node in self.nodes}
        self.sender = SpoolSender(folder / "spool", self.nodes, kafka, self.messages.append, timeouts=times)
        self.service: PipelineService | None = None
        self.database: Database | None = None
        self._start = time.time_ns() // 1000 - 60 * SECOND
        self._idle = threading.Event()
        self._writer = threading.Thread(target=self._write_on, name="writer")
        self._stop, self._thread = threading.Event(), threading.Thread()
        self._lock = threading.Lock()
        self.observations: list[str] = []
        self._asked = 0.0

    # --- the writer --------------------------------------------------------------------------------------------------

    def write(self, count: int = 1, payload: int = 0, nodes: Iterable[str] = ()) -> None:
        """Spools `count` messages of each node, each with `payload` extra bytes that do not compress."""
        with self._lock:
            for _ in range(count):
                for node in nodes or self.nodes:
                    spool = self.spools[node]
                    spool.append(body(node, self._start, spool.next, payload), wire.TELEMETRY_KIND, _now())
            for node in nodes or self.nodes:
                self.spools[node].sync()
        self.sender.wake()

    def _write_on(self) -> None:
        while not self._idle.wait(INTERVAL_S):
            self.write()

    def stop_writer(self) -> None:
        """Stops the writer; the messages it wrote stay in the spool."""
        self._idle.set()
        if self._writer.is_alive():
            self._writer.join()

    # --- agent and pipeline ------------------------------------------------------------------------------------------

    def start(self) -> KafkaPipeline:
        """Starts the sender, the service and the writer."""
        self.sender.start()
        self.start_service()
        self._writer.start()
        return self

    def start_service(self) -> None:
        """Starts a pipeline on the store, as after a restart of its process."""
        self.load_service()
        assert self.service is not None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.service.run, args=(self._stop,), name="pipeline")
        self._thread.start()

    def load_service(self) -> PipelineService:
        """Returns a pipeline without a thread: the test runs its steps."""
        self.service = PipelineService(self.config, EmptyJudge())  # type: ignore[arg-type] # it finds nothing, of whatever type
        self.database = self.service.database
        return self.service

    def stop_service(self) -> None:
        """Stops the pipeline."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if self.service is not None:
            self.service.close()
            self.service = self.database = None

    def close(self) -> None:
        self.stop_writer()
        self.stop_service()
        self.sender.close()
        for spool in self.spools.values():
            spool.close()

    # --- what operators see -------------------------------------------------------------------------------------------

    @property
    def reasons(self) -> list[str]:
        """Reasons that /readyz gives."""
        assert self.service is not None
        return self.service.list_unready_reasons()

    @property
    def outage_s(self) -> float:
        """Seconds since `wait_for_trouble` was last called."""
        return time.monotonic() - self._asked

    def wait_for_trouble(self, pipeline: str = "", agent: str = "", seconds: float = VISIBLE_S) -> float:
        """Returns the seconds until the pipeline, the agent or both report trouble with these words; "" skips one."""
        self._asked = begin = time.monotonic()
        wanted = [(pipeline, lambda: "; ".join(self.reasons)), (agent, lambda: self.sender.problem() or "")]
        for word, report in wanted:
            if word:
                wait_until(lambda report=report, word=word: word in report(), seconds, f"{word!r} in {report()!r}")
                self.observations.append(report())
        return time.monotonic() - begin

    def wait_until_healthy(self, seconds: float = VISIBLE_S) -> float:
        """Returns the seconds until messages written from now on are stored and no trouble is reported."""
        begin, marks = time.monotonic(), {node: self.spools[node].next for node in self.nodes}
        self.write()
        stored = lambda: all(newest >= marks[n] for n, newest in self._newest().items())  # noqa: E731
        wait_until(lambda: len(self._newest()) == len(self.nodes) and stored(), seconds, f"rows again; {self.reasons}")
        wait_until(lambda: not self.reasons and not self.sender.problem(), seconds, "no trouble is reported")
        return time.monotonic() - begin

    def _newest(self) -> dict[str, int]:
        return {str(node): int(mark) for node, mark in self.rows("SELECT entity, max(temperature) FROM gpu GROUP BY 1")}

    def rows(self, query: str) -> list[Any]:
        assert self.database is not None
        cursor = self.database.cursor()
        try:
            return cursor.execute(query.replace(" entity", " split_part(entity[5:], '.', 1)")).fetchall()
        finally:
            cursor.close()

    # --- counts ------------------------------------------------------------------------------------------------------

    def count_messages(self) -> MessageCounts:
        sent = {(node, sequence) for node, spool in self.spools.items() for sequence in range(spool.next)}
        rows: list[Any] = self.rows("SELECT entity, temperature, count(*) FROM gpu GROUP BY ALL")
        stored = Counter({(node, int(sequence)): count for node, sequence, count in rows})
        gaps: Counter[tuple[str, int]] = Counter()
        causes = set()
        query = "SELECT source, first_sequence, next_sequence, cause FROM gaps WHERE len(epoch) = 32"
        for node, first, after, cause in self.rows(query):
            gaps.update((node, sequence) for sequence in range(first, after))
            causes.add(cause)
        return MessageCounts(sent, stored, gaps, causes)

    def finish(self, seconds: float = VISIBLE_S) -> MessageCounts:
        """Stops the writer, waits until all is sent and read, and returns the counts. Fails if a message is missing."""
        self.stop_writer()
        self.write()  # a gap at the end is found only when a later message arrives
        self.wait_until_sent(seconds)
        return self.wait_until_accounted(seconds)

    def wait_until_accounted(
        self, seconds: float = VISIBLE_S, turn: Callable[[], object] = lambda: None
    ) -> MessageCounts:
        """Returns the counts once all messages of the brokers are read; `turn` runs a pipeline that has no thread."""
        wait_until(
            lambda: (turn(), not self.count_messages().lost)[1], seconds, "every sequence is stored or is in a gap"
        )
        ends = self.end_offsets()
        wait_until(
            lambda: (turn(), self._stored_offsets().items() >= ends.items())[1], seconds, f"all is read, up to {ends}"
        )
        counts = self.count_messages()
        assert not counts.duplicates, f"stored twice, or stored and in a gap: {sorted(counts.duplicates)[:10]}"
        return counts

    def wait_until_sent(self, seconds: float = VISIBLE_S) -> None:
        """Waits until the brokers have all messages that were written."""
        ticket = self.sender.request_flush()
        wait_until(lambda: self.sender.is_flushed(ticket), seconds, f"all is sent; {self.sender.problem()}")

    def _stored_offsets(self) -> dict[TopicPartition, int]:
        """Returns the stored offset of each partition."""
        newest = "SELECT partition, arg_max(next_offset, committed) FROM ingest_commit"
        query = f"{newest} WHERE topic = '{TELEMETRY}' GROUP BY 1"
        return {TopicPartition(TELEMETRY, int(name)): offset for name, offset in self.rows(query)}

    def end_offsets(self) -> dict[TopicPartition, int]:
        """Returns the end offset of each partition that is not empty."""
        with closing(kafka_clients.create_consumer(self.config.kafka, "tests", VISIBLE_S)) as consumer:
            places = [TopicPartition(TELEMETRY, number) for number in consumer.partitions_for_topic(TELEMETRY)]
            return {place: end for place, end in consumer.end_offsets(places).items() if end}

    def log_result(self, failure: str, visible: float | None, recovered: float | None, counts: MessageCounts) -> None:
        """Logs one row of the table of failures; `pytest -o log_cli=true -o log_cli_level=INFO` shows them."""
        figures = (f"{s:.1f}" if s is not None else "-" for s in (visible, recovered))
        log.info(
            "| %s | %s | %s | %s | %d sent, %d stored, %d in gaps, 0 lost, 0 duplicates |",
            failure,
            "; ".join(self.observations),
            *figures,
            len(counts.sent),
            len(counts.stored),
            len(counts.gaps),
        )


def body(node: str, start: int, sequence: int, payload: int = 0) -> bytes:
    """Returns a message with one row of one GPU; `payload` bytes of noise are added as signals of class nic."""
    blocks = [Block("gpu", (f"gpu:{node}.0",), {"gpu.temperature": np.full((1, 1), sequence, "f4")})]
    if payload:
        noise = np.random.default_rng(sequence).random((1, payload // 8))
        names = tuple(f"nic:{node}.x{i}" for i in range(payload // 8))
        blocks.append(Block("nic", names, {"noise": noise}))
    time_of = np.array([start + sequence * round(INTERVAL_S * SECOND)])
    return wire.encode(Batch(Origin("local", node, bytes(16)), time_of, tuple(blocks)))


def _now() -> int:
    return time.time_ns() // 1000
