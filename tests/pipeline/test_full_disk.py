"""A store whose disk is full, shrinks or fails: no message is lost, and all are stored once there is room."""

from __future__ import annotations

import itertools
import random
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import duckdb
import numpy as np
import pytest

from agents.node.spool.spool import Spool
from pipeline.commands.pipeline import PipelineBackend
from pipeline.commands.service import PipelineService
from pipeline.config import sections as configuration
from pipeline.config.settings import build_section
from pipeline.ingest.ingest import Ingest
from pipeline.model.errors import Retryable
from pipeline.model.records import EVENTS, SECOND, TELEMETRY, Batch, Block, Event, EventBatch, Origin
from pipeline.transport import wire
from tests.pipeline.test_service import EmptyJudge

T0 = 1_780_000_000 * SECOND
MESSAGES, TICKS, GPUS = 1_040, 10, 8


def sent_values() -> np.ndarray:
    """Returns (messages, ticks, GPUs) temperatures; random, so that they do not compress on disk."""
    return np.random.default_rng(7).random((MESSAGES, TICKS, GPUS), "f4")


class NodeSenders:
    """Four nodes that send the messages in turn, each into its own spool."""

    def __init__(self, folder: Path, values: np.ndarray) -> None:
        self._spools = [Spool(folder, f"n{i}", TELEMETRY, free_bytes=0) for i in range(4)]
        self._bodies = iter([body_of(number, block) for number, block in enumerate(values)])
        self._number = 0

    def send(self, count: int) -> None:
        for body in itertools.islice(self._bodies, count):
            self._spools[self._number % 4].append(body, wire.TELEMETRY_KIND, T0)
            self._number += 1
        for spool in self._spools:
            spool.sync()

    def close(self) -> None:
        for spool in self._spools:
            spool.close()


def body_of(number: int, block: np.ndarray) -> bytes:
    node = f"n{number % 4}"
    times = T0 + (number * TICKS + np.arange(TICKS)) * SECOND
    columns = {"gpu.temperature": block, "gpu.power": block[::-1].copy()}
    entities = tuple(f"gpu:{node}.{i}" for i in range(GPUS))
    return wire.encode(Batch(Origin("local", node, b"b" * 16), times, (Block("gpu", entities, columns),)))


def service_over(folder: Path, store: Path, free_bytes: int) -> PipelineService:
    table = {"store": {"path": str(store), "free_bytes": free_bytes}, "spool": {"directory": str(folder / "spool")}}
    table["pipeline"] = {"commit_wait": 0.0}  # a step of the script is a look at the spools
    return PipelineService(
        build_section(configuration.Config, table, "test"), EmptyJudge(), clock=lambda: T0 + 20_000 * SECOND
    )


class Script:
    """The `stop` of a service: each wait runs the next step of a script; after the last one it stops."""

    def __init__(self, steps: Iterator[object]) -> None:
        self._steps, self._over = steps, False

    def is_set(self) -> bool:
        return self._over

    def wait(self, seconds: float) -> bool:
        self._over = self._over or next(self._steps, self) is self
        return self._over


def read_stored(service: PipelineService) -> np.ndarray:
    """Returns temperatures in the shape of `sent_values`; fails unless each row is stored exactly once."""
    rows = service.database.connection.execute("SELECT temperature FROM gpu ORDER BY time, entity").fetchnumpy()
    return np.asarray(rows["temperature"], "f4").reshape(MESSAGES, TICKS, GPUS)


def count_losses(service: PipelineService) -> tuple[int, int]:
    query = "SELECT (SELECT count(*) FROM dead_letter), (SELECT count(*) FROM gaps)"
    return service.database.connection.execute(query).fetchall()[0]


def check_all_stored(steps: Iterator[object], service: PipelineService) -> None:
    """Runs the service through the steps; each message must be stored once, without losses."""
    service.run(Script(steps))  # type: ignore[arg-type] # it needs no more of its `stop`
    assert count_losses(service) == (0, 0)
    np.testing.assert_array_equal(read_stored(service), sent_values())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system of 24 MiB."""
    place = tmp_path / "disk"
    place.mkdir(mode=0o700)
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(place)], capture_output=True)
    if made.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {made.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def senders(tmp_path: Path) -> Iterator[NodeSenders]:
    made = NodeSenders(tmp_path / "spool", sent_values())
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("free_bytes", [0, 256 << 20], ids=["no reserve", "reserve"])
def test_a_disk_that_is_repeatedly_full_and_freed_loses_nothing(
    small_disk: Path, tmp_path: Path, senders: NodeSenders, seed: int, free_bytes: int
) -> None:
    """Without a reserve DuckDB itself meets the full disk, in large and in small commits."""
    chance = random.Random(seed)
    service = service_over(tmp_path, small_disk / "store.duckdb", free_bytes)
    ball, reasons = small_disk / "ball", []

    def steps() -> Iterator[object]:
        for _ in range(25):
            ball.unlink(missing_ok=True)
            left = chance.choice([0, 4096, 60_000, 300_000, 1 << 20, 4 << 20])
            ball.write_bytes(b"x" * max(0, shutil.disk_usage(small_disk).free - left))
            senders.send(chance.choice([1, 10, 60, 300]))
            yield
            reasons.append(service.list_unready_reasons())
            if chance.random() < 0.4:
                ball.unlink(missing_ok=True)
                yield
        ball.unlink(missing_ok=True)
        senders.send(MESSAGES)
        yield from range(20)

    try:
        step = steps()
        next(step)
        check_all_stored(step, service)
        assert any("its disk" in text for texts in reasons for text in texts)
        assert service.list_unready_reasons() == []
    finally:
        service.close()


@pytest.mark.slow
def test_a_failed_checkpoint_does_not_require_a_new_process(
    small_disk: Path, tmp_path: Path, senders: NodeSenders
) -> None:
    """DuckDB then refuses everything until its file is opened again; committed data is durable."""
    service = service_over(tmp_path, small_disk / "store.duckdb", 0)
    ball, reasons = small_disk / "ball", []

    def steps() -> Iterator[object]:
        senders.send(MESSAGES // 2)
        yield
        ball.write_bytes(b"x" * (shutil.disk_usage(small_disk).free - 4096))
        with pytest.raises(duckdb.FatalException):
            service.database.connection.execute("CHECKPOINT")
        senders.send(MESSAGES)
        for _ in range(5):
            yield
            reasons.append(service.list_unready_reasons())
        ball.unlink()
        yield from range(10)

    try:
        check_all_stored(steps(), service)
        assert all(reasons)
        assert service.list_unready_reasons() == []
    finally:
        service.close()


@pytest.mark.slow
def test_a_limit_on_the_size_of_files_loses_nothing(tmp_path: Path, senders: NodeSenders) -> None:
    """EFBIG, as with a quota; it needs no separate file system."""
    service = service_over(tmp_path, tmp_path / "state" / "store.duckdb", 0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def steps() -> Iterator[object]:
        senders.send(MESSAGES)
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, before[1]))
        for _ in range(5):
            yield
            assert service.list_unready_reasons()
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        yield from range(10)

    try:
        step = steps()
        next(step)
        check_all_stored(step, service)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        service.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [
        duckdb.TransactionException("TransactionContext Error: Failed to commit: No space left on device"),
        duckdb.FatalException("FATAL Error: database has been invalidated"),
        duckdb.InternalException("INTERNAL Error: an assertion"),
        duckdb.OutOfMemoryException("Out of Memory Error: could not allocate"),
        duckdb.InterruptException("INTERRUPT Error"),
        duckdb.Error("Corrupt database file: computed checksum 1 does not match stored checksum 2"),
        MemoryError(),
        OSError(5, "Input/output error"),
        RuntimeError("unexpected error"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_no_error_of_the_disk_or_of_memory_loses_a_message(
    tmp_path: Path, senders: NodeSenders, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Errors that no message causes leave all messages in place: in order, none a dead letter."""
    service = service_over(tmp_path, tmp_path / "store.duckdb", 0)
    ingest: Ingest = service.ingest
    transaction = ingest._write_transaction
    try:
        service.start_engine()
        senders.send(40)

        def failing(*_: object) -> None:
            raise error

        monkeypatch.setattr(ingest, "_write_transaction", failing)
        for _ in range(3):
            with pytest.raises((Retryable, OSError, RuntimeError)):
                service.run_step()
        monkeypatch.setattr(ingest, "_write_transaction", transaction)
        while service.run_step():
            pass
        assert count_losses(service) == (0, 0)
        assert service.ingest.counters["messages"] == 40
    finally:
        service.close()


@pytest.mark.slow
def test_a_fatal_error_that_sealing_meets_first_reopens_the_store(
    tmp_path: Path, senders: NodeSenders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without new telemetry no commit would meet it."""
    service = service_over(tmp_path, tmp_path / "store.duckdb", 0)

    def failing(*_: object) -> bool:
        raise duckdb.FatalException("FATAL Error: database has been invalidated")

    def steps() -> Iterator[object]:
        senders.send(MESSAGES)
        yield from range(20)
        with monkeypatch.context() as patch:
            patch.setattr(service.sealer, "advance", failing)
            yield
            assert service.database.broken is not None
            assert service.list_unready_reasons()
        yield from range(3)
        assert service.database.broken is None

    try:
        check_all_stored(steps(), service)
        assert service.list_unready_reasons() == []
    finally:
        service.close()


class NearlyFullDisk:
    """A service over one spool folder, whose disk has as much free space as the test says."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = 1 << 40
        monkeypatch.setattr(
            "pipeline.store.database.shutil.disk_usage",
            lambda path: SimpleNamespace(total=1 << 40, used=0, free=self.free),
        )
        self.spools = {topic: Spool(tmp_path / "spool", "n0", topic, free_bytes=0) for topic in (TELEMETRY, EVENTS)}
        self.service = service_over(tmp_path, tmp_path / "store.duckdb", 1 << 30)
        self.service.start_engine()
        self.sent = 0

    def send(self) -> None:
        """Sends a message of each topic."""
        block = np.full((TICKS, GPUS), self.sent, "f4")
        self.spools[TELEMETRY].append(body_of(4 * self.sent, block), wire.TELEMETRY_KIND, T0)
        event = Event(T0 + self.sent * SECOND, "node:n0", "collector", {"collector": "x", "state": "ok", "reason": ""})
        batch = EventBatch(Origin("local", "n0", b"b" * 16), (event,))
        self.spools[EVENTS].append(wire.encode_events(batch), wire.EVENTS_KIND, T0)
        for spool in self.spools.values():
            spool.sync()
        self.sent += 1

    def run(self) -> None:
        for _ in range(4):
            self.service.run_step()

    def stored(self) -> tuple[int, int]:
        """Returns the messages of telemetry and events that are stored."""
        query = f"SELECT (SELECT count(*) FROM gpu) // {TICKS * GPUS}, (SELECT count(*) FROM events)"
        [(rows, events)] = self.service.database.connection.execute(query).fetchall()
        return int(rows), int(events)


@pytest.fixture
def nearly_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NearlyFullDisk]:
    made = NearlyFullDisk(tmp_path, monkeypatch)
    yield made
    made.service.close()
    for spool in made.spools.values():
        spool.close()


def test_a_nearly_full_disk_stores_events_and_leaves_telemetry_in_the_transport(nearly_full: NearlyFullDisk) -> None:
    nearly_full.send()
    nearly_full.run()
    assert nearly_full.stored() == (1, 1)
    nearly_full.free = 900 << 20
    for _ in range(3):
        nearly_full.send()
        nearly_full.run()
    assert nearly_full.stored() == (1, 4)
    counters = PipelineBackend(nearly_full.service).read_counters()
    assert counters["fleetpulse_store_shedding"] == 1
    assert counters["fleetpulse_ingest_shed_seconds_total"] > 0
    assert "no telemetry is stored until there is space" in "".join(nearly_full.service.list_unready_reasons())
    nearly_full.free = 1 << 40
    nearly_full.run()
    assert nearly_full.stored() == (4, 4)
    assert nearly_full.service.database.connection.execute("SELECT * FROM gaps").fetchall() == []


def test_below_a_quarter_of_the_reserve_nothing_is_stored_and_nothing_is_lost(nearly_full: NearlyFullDisk) -> None:
    nearly_full.free = 200 << 20
    nearly_full.send()
    with pytest.raises(Retryable, match="no events either"):
        nearly_full.run()
    assert nearly_full.stored() == (0, 0)
    assert PipelineBackend(nearly_full.service).read_counters()["fleetpulse_store_shedding"] == 2
    nearly_full.free = 900 << 20
    nearly_full.run()
    assert nearly_full.stored() == (0, 1)
    nearly_full.free = 1 << 40
    nearly_full.run()
    assert nearly_full.stored() == (1, 1)
