"""Fixtures of the pipeline's tests: small batches in real spools, and an ingest over them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from agents.node.spool.spool import Spool
from pipeline.config import sections
from pipeline.config.receivers import InhibitRule, Route
from pipeline.config.sections import Limits
from pipeline.ingest.admission import Admission, StoredState
from pipeline.ingest.entities import load_entities
from pipeline.ingest.ingest import Ingest
from pipeline.ingest.ownership import load_owners
from pipeline.model.records import EVENTS, SECOND, TELEMETRY, Batch, Block, Event, EventBatch, Origin
from pipeline.model.topology import ParentGraph
from pipeline.store.database import Database
from pipeline.store.devices import Devices
from pipeline.transport import wire
from pipeline.transport.spool import SpoolTransport
from tests.pipeline.lossy_site import Hooked, Make
from tests.pipeline.notifier_harness import NotifierHarness, Receiver

if TYPE_CHECKING:
    from pipeline.config.sections import Kafka
    from tests.pipeline.kafka_pipeline import KafkaPipeline

NOW = 1_900_000_000 * SECOND  # later than the times of all cases
GPUS = 2


def gpu_body(node: str, start: int, ticks: int = 1, first: float = 0.0) -> bytes:
    """Returns the body of a batch: 2 GPUs, temperatures that rise by 1 per tick from `first`; clocks 1000 + GPU."""
    times = start + np.arange(ticks) * SECOND
    temperature = (first + np.arange(ticks, dtype="f4"))[:, None] + np.zeros(GPUS, "f4")
    clock = np.full((ticks, GPUS), [1000, 1001], "u2")
    columns = {"gpu.temperature": temperature, "gpu.sm_clock": clock}
    block = Block("gpu", tuple(f"gpu:{node}.{i}" for i in range(GPUS)), columns)
    return wire.encode(Batch(Origin("local", node, b"b" * 16), times, (block,)))


class Site:
    """A spool directory with writers and a store that reads it; all parts are real and can be restarted."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.spools = folder, {}
        self.rules = sections.Admission()
        self.database: Database | None = None
        self.limits = Limits()

    def allow_all_entities(self, node: str) -> None:
        """Lets `node` report every entity from the next `open`; for tests with one sender for a whole fleet."""
        self.rules = sections.Admission(speaks_for=(sections.SpeaksFor(node, ("*:*",)),))

    def spool(self, node: str, topic: str = TELEMETRY) -> Spool:
        if (node, topic) not in self.spools:
            self.spools[node, topic] = Spool(self.folder / "spool", node, topic, segment_bytes=1 << 16, free_bytes=0)
        return self.spools[node, topic]

    def send(self, node: str, start: int, ticks: int = 1, first: float = 0.0) -> None:
        spool = self.spool(node)
        spool.append(gpu_body(node, start, ticks, first), wire.TELEMETRY_KIND, start)
        spool.sync()

    def send_raw(self, node: str, body: bytes) -> None:
        self.spool(node).append(body, wire.TELEMETRY_KIND, 0)
        self.spool(node).sync()

    def send_events(self, node: str, *events: Event) -> None:
        spool = self.spool(node, EVENTS)
        spool.append(wire.encode_events(EventBatch(Origin("local", node, b"b" * 16), events)), wire.EVENTS_KIND, 0)
        spool.sync()

    def open(self) -> Ingest:
        self.shut()
        self.database = Database(self.folder / "store.duckdb")
        self.transport = SpoolTransport(self.folder / "spool")
        stored = load_entities(self.database.connection, NOW)
        known, owners = StoredState(stored.known, ParentGraph(stored.parents)), load_owners(self.database, self.rules)
        admission = Admission(self.limits, known, owners)
        devices = Devices(self.database.connection)
        return Ingest(self.database, self.transport, devices, lambda: NOW, admission=admission)

    def drain(self) -> Ingest:
        """Restarts ingest, and runs it until nothing is left to read."""
        ingest = self.open()
        while ingest.step() is not None:
            pass
        return ingest

    def rows(self, query: str) -> list[tuple[object, ...]]:
        assert self.database is not None
        return self.database.connection.execute(query).fetchall()

    def shut(self) -> None:
        if self.database is not None:
            self.transport.close()
            self.database.close()
            self.database = None


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """A store that the tests of one file share."""
    with closing(Database(tmp_path_factory.mktemp("store") / "store.duckdb")) as made:
        yield made


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.shut()
    for spool in made.spools.values():
        spool.close()


@pytest.fixture
def new_site(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Site]:
    """Makes several sites in one test; the test closes them."""
    return lambda: Site(tmp_path_factory.mktemp("site"))


@pytest.fixture
def fast_broker_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipeline checks its brokers ten times as often as by default, so tests wait less."""
    from pipeline.transport import broker_watch

    monkeypatch.setattr(broker_watch, "CHECK_EVERY_S", 0.5)
    monkeypatch.setattr(broker_watch, "RESPONSE_S", 1.0)


@pytest.fixture
def new_pipeline(tmp_path: Path) -> Iterator[Callable[..., KafkaPipeline]]:
    """Makes a whole pipeline, from spools to a store, over the brokers of a [kafka]; it is closed after the test."""
    from tests.pipeline.kafka_pipeline import KafkaPipeline  # here: most tests need no Kafka client

    made: list[KafkaPipeline] = []

    def make(kafka: Kafka, **more: Any) -> KafkaPipeline:
        made.append(KafkaPipeline(tmp_path / "pipeline", kafka, **more))
        return made[-1]

    yield make
    for pipeline in made:
        pipeline.close()


@pytest.fixture
def receivers() -> Iterator[Callable[..., Receiver]]:
    made: list[tuple[Receiver, threading.Thread]] = []

    def make(kind: type[Receiver] = Receiver) -> Receiver:
        receiver = kind()
        made.append((receiver, threading.Thread(target=receiver.serve_forever, args=(0.01,))))
        made[-1][1].start()
        return receiver

    yield make
    for receiver, thread in made:
        receiver.shutdown()
        receiver.server_close()
        thread.join()


@pytest.fixture
def receiver(receivers: Callable[[], Receiver]) -> Receiver:
    return receivers()


@pytest.fixture
def harness(tmp_path: Path, receiver: Receiver) -> Iterator[NotifierHarness]:
    made = NotifierHarness(tmp_path, [f"http://127.0.0.1:{receiver.server_port}/"])
    yield made
    made.close()


@pytest.fixture
def hooked(tmp_path: Path, receiver: Receiver) -> Iterator[Make]:
    """Makes notifiers whose webhook loses what it is sent."""
    made: list[Hooked] = []

    def make(route: Route | None = None, rules: Sequence[InhibitRule] = ()) -> Hooked:
        made.append(Hooked(tmp_path, receiver, route, rules))
        return made[-1]

    yield make
    for one in made:
        one.close()
