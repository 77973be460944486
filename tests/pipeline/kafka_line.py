"""The whole line over real brokers, and its books: what was sent, what is stored, what lies in gaps, how long it took.

Every message is one row of one GPU, whose temperature is the message's sequence: rows can be held against sequences.
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
"""Chosen: over 4 partitions their keys fall on three."""
PACE_S = 0.02
"""Between two messages of a node; chosen: 200 messages a second in all leave both cores idle."""
BRISK = ClientTimeouts(delivery=2.0, request=1.0, block=0.5)
"""Of the agent's client: a fifteenth of what agents have, so that a test can outlast them."""
SEEN_S = 30.0
"""Within which every trouble must be visible."""
log = logging.getLogger("tests.failures")


class Quiet:
    """A judge that finds nothing."""

    signals = frozenset[str]()
    names: tuple[str, ...] = ()

    def listing(self) -> list[dict[str, Any]]:
        return []

    def beat(self, doing: str) -> None:
        """Nobody waits for it."""

    def judge_events(self, events: object, topology: object, anew: bool = False) -> list[object]:
        return []

    def observe(self, frames: object) -> list[object]:
        return []

    def snapshot(self) -> str:
        return "{}"

    def restore(self, state: str) -> None: ...


def until(holds: Callable[[], object], seconds: float, what: str) -> float:
    """Seconds until `holds` was true. Fails after `seconds`."""
    begin = time.monotonic()
    while not holds():
        assert time.monotonic() < begin + seconds, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - begin


@dataclass
class Books:
    """Sequences by (node, sequence). `stored` counts rows."""

    sent: set[tuple[str, int]]
    stored: Counter[tuple[str, int]]
    gaps: Counter[tuple[str, int]]
    causes: set[str] = field(default_factory=set)

    @property
    def lost(self) -> set[tuple[str, int]]:
        return self.sent - set(self.stored) - set(self.gaps)

    @property
    def twice(self) -> set[tuple[str, int]]:
        return {key for key, count in (self.stored + self.gaps).items() if count > 1}


class Line:
    """Spools with a writer, a SpoolSender, and a Service in its thread. Everything can be ended and begun by itself."""

    def __init__(
        self, folder: Path, kafka: sections.Kafka, nodes: Iterable[str] = NODES, times: ClientTimeouts = BRISK
    ) -> None:
        self.config = sections.Config(
            spool=sections.Spool(folder / "spool", free_bytes=0),
            kafka=kafka,
            store=sections.Store(folder / "store.duckdb"),
            pipeline=sections.Pipeline(transport="kafka"),
        )
        self.nodes, self.said = tuple(nodes), list[str]()
        self.spools = {node: Spool(folder / "spool", node, TELEMETRY, free_bytes=0) for node in self.nodes}
        self.sender = SpoolSender(folder / "spool", self.nodes, kafka, self.said.append, timeouts=times)
        self.service: PipelineService | None = None
        self.database: Database | None = None
        self._start = time.time_ns() // 1000 - 60 * SECOND
        self._idle = threading.Event()
        self._writer = threading.Thread(target=self._write_on, name="writer")
        self._stop, self._thread = threading.Event(), threading.Thread()
        self._lock = threading.Lock()
        self.notes: list[str] = []
        self._asked = 0.0

    # --- the writer --------------------------------------------------------------------------------------------------

    def write(self, count: int = 1, payload: int = 0, nodes: Iterable[str] = ()) -> None:
        """Spools `count` messages of each node; `payload` bytes more each, which do not compress."""
        with self._lock:
            for _ in range(count):
                for node in nodes or self.nodes:
                    spool = self.spools[node]
                    spool.append(body(node, self._start, spool.next, payload), wire.TELEMETRY_KIND, _now())
            for node in nodes or self.nodes:
                self.spools[node].sync()
        self.sender.wake()

    def _write_on(self) -> None:
        while not self._idle.wait(PACE_S):
            self.write()

    def rest(self) -> None:
        """The writer ends; what it wrote stays."""
        self._idle.set()
        if self._writer.is_alive():
            self._writer.join()

    # --- agent and pipeline ------------------------------------------------------------------------------------------

    def begin(self) -> Line:
        """Everything runs, and the writer writes."""
        self.sender.start()
        self.open()
        self._writer.start()
        return self

    def open(self) -> None:
        """Starts a pipeline on the store, as after a restart of its process."""
        self.load()
        assert self.service is not None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.service.run, args=(self._stop,), name="pipeline")
        self._thread.start()

    def load(self) -> PipelineService:
        """A pipeline that the test turns itself."""
        self.service = PipelineService(self.config, Quiet())  # type: ignore[arg-type] # it finds nothing, of whatever type
        self.database = self.service.database
        return self.service

    def shut(self) -> None:
        """Ends the pipeline."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if self.service is not None:
            self.service.close()
            self.service = self.database = None

    def close(self) -> None:
        self.rest()
        self.shut()
        self.sender.close()
        for spool in self.spools.values():
            spool.close()

    # --- what is seen ------------------------------------------------------------------------------------------------

    @property
    def reasons(self) -> list[str]:
        """What /readyz says."""
        assert self.service is not None
        return self.service.list_unready_reasons()

    @property
    def waited(self) -> float:
        """Seconds since the last call of `seen`."""
        return time.monotonic() - self._asked

    def seen(self, pipeline: str = "", agent: str = "", seconds: float = SEEN_S) -> float:
        """Seconds until the pipeline, the agent or both tell trouble with these words; "" asks for none."""
        self._asked = begin = time.monotonic()
        wanted = [(pipeline, lambda: "; ".join(self.reasons)), (agent, lambda: self.sender.problem() or "")]
        for word, told in wanted:
            if word:
                until(lambda told=told, word=word: word in told(), seconds, f"{word!r} in {told()!r}")
                self.notes.append(told())
        return time.monotonic() - begin

    def well(self, seconds: float = SEEN_S) -> float:
        """Seconds until what is written from now on is stored, and nobody tells trouble."""
        begin, marks = time.monotonic(), {node: self.spools[node].next for node in self.nodes}
        self.write()
        stored = lambda: all(newest >= marks[n] for n, newest in self._newest().items())  # noqa: E731
        until(lambda: len(self._newest()) == len(self.nodes) and stored(), seconds, f"rows again; {self.reasons}")
        until(lambda: not self.reasons and not self.sender.problem(), seconds, "nobody tells trouble any more")
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

    # --- the books ---------------------------------------------------------------------------------------------------

    def books(self) -> Books:
        sent = {(node, sequence) for node, spool in self.spools.items() for sequence in range(spool.next)}
        rows: list[Any] = self.rows("SELECT entity, temperature, count(*) FROM gpu GROUP BY ALL")
        stored = Counter({(node, int(sequence)): count for node, sequence, count in rows})
        gaps: Counter[tuple[str, int]] = Counter()
        causes = set()
        query = "SELECT source, first_sequence, next_sequence, cause FROM gaps WHERE len(epoch) = 32"
        for node, first, after, cause in self.rows(query):
            gaps.update((node, sequence) for sequence in range(first, after))
            causes.add(cause)
        return Books(sent, stored, gaps, causes)

    def settle(self, seconds: float = SEEN_S) -> Books:
        """Ends the writer, waits until all is sent and read, and returns the books. Fails if they are not in order."""
        self.rest()
        self.write()  # what is lost before the last message of a node is told by the last one
        self.sent(seconds)
        return self.balanced(seconds)

    def balanced(self, seconds: float = SEEN_S, turn: Callable[[], object] = lambda: None) -> Books:
        """The books once all that the brokers have is read; `turn` keeps a pipeline going that has no thread."""
        until(lambda: (turn(), not self.books().lost)[1], seconds, "every sequence is stored or lies in a gap")
        ends = self.ends()
        until(lambda: (turn(), self._read().items() >= ends.items())[1], seconds, f"all is read, up to {ends}")
        books = self.books()
        assert not books.twice, f"stored twice, or stored and in a gap: {sorted(books.twice)[:10]}"
        return books

    def sent(self, seconds: float = SEEN_S) -> None:
        """Waits until the brokers have all that was written."""
        ticket = self.sender.request_flush()
        until(lambda: self.sender.is_flushed(ticket), seconds, f"all is sent; {self.sender.problem()}")

    def _read(self) -> dict[TopicPartition, int]:
        """Where the store stands in each partition."""
        newest = "SELECT partition, arg_max(next_offset, committed) FROM ingest_commit"
        query = f"{newest} WHERE topic = '{TELEMETRY}' GROUP BY 1"
        return {TopicPartition(TELEMETRY, int(name)): offset for name, offset in self.rows(query)}

    def ends(self) -> dict[TopicPartition, int]:
        """Where the brokers' logs end, of partitions that hold something."""
        with closing(kafka_clients.create_consumer(self.config.kafka, "tests", SEEN_S)) as consumer:
            places = [TopicPartition(TELEMETRY, number) for number in consumer.partitions_for_topic(TELEMETRY)]
            return {place: end for place, end in consumer.end_offsets(places).items() if end}

    def tell(self, failure: str, visible: float | None, recovered: float | None, books: Books) -> None:
        """One row of the table of failures; `pytest -o log_cli=true -o log_cli_level=INFO` shows them."""
        figures = (f"{s:.1f}" if s is not None else "-" for s in (visible, recovered))
        log.info(
            "| %s | %s | %s | %s | %d sent, %d stored, %d in gaps, 0 lost, 0 twice |",
            failure,
            "; ".join(self.notes),
            *figures,
            len(books.sent),
            len(books.stored),
            len(books.gaps),
        )


def body(node: str, start: int, sequence: int, payload: int = 0) -> bytes:
    """One row of one GPU; `payload` bytes of noise ride along as signals of the class node."""
    blocks = [Block("gpu", (f"gpu:{node}.0",), {"gpu.temperature": np.full((1, 1), sequence, "f4")})]
    if payload:
        noise = np.random.default_rng(sequence).random((1, payload // 8))
        names = tuple(f"nic:{node}.x{i}" for i in range(payload // 8))
        blocks.append(Block("nic", names, {"noise": noise}))
    time_of = np.array([start + sequence * round(PACE_S * SECOND)])
    return wire.encode(Batch(Origin("local", node, bytes(16)), time_of, tuple(blocks)))


def _now() -> int:
    return time.time_ns() // 1000
