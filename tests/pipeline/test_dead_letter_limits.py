"""Dead letters are bounded; a pipeline older than its agents loses no message that it can keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.config.sections import Store
from pipeline.ingest.admission import Admission
from pipeline.ingest.ingest import Ingest
from pipeline.ingest.messages import NEWER, DeadLetter
from pipeline.ingest.ownership import load_owners
from pipeline.ingest.rejections import PAYLOAD_BYTES, PER_MINUTE, LetterLimits
from pipeline.model.records import SECOND, TELEMETRY
from pipeline.store.database import Database
from pipeline.store.devices import Devices
from pipeline.store.retention import HOUR, apply_bounds
from pipeline.transport import Message, Partition, wire
from pipeline.transport.signatures import SenderCheck, sign
from tests.pipeline.conftest import NOW
from tests.pipeline.shared_log import ONE, SharedLog, one_row

T0 = NOW - 3600 * SECOND
LOSSES = "SELECT (SELECT count(*) FROM dead_letter), (SELECT count(*) FROM gaps)"
PARTITION = Partition(TELEMETRY, "0", "topic")


def dead_letter(size: int = 100, rule: str = "wire", partition: Partition = PARTITION) -> DeadLetter:
    return DeadLetter(Message(partition, 0, b"x" * size), "not a Fleetpulse message", rule)


def count_kept(limits: LetterLimits, one: DeadLetter, times: int) -> int:
    return sum(limits.payload_to_keep(one) is not None for _ in range(times))


def test_letters_of_one_partition_and_rule_are_limited_per_minute() -> None:
    limits = LetterLimits(1 << 30)
    limits.begin(NOW)
    assert count_kept(limits, dead_letter(), 1000) == PER_MINUTE
    assert count_kept(limits, dead_letter(rule="kind"), 1000) == PER_MINUTE
    assert count_kept(limits, dead_letter(partition=Partition(TELEMETRY, "1", "topic")), 10) == 10
    limits.commit()
    limits.begin(NOW + 1)
    assert count_kept(limits, dead_letter(), 10) == 0
    limits.begin(NOW + 60 * SECOND)
    assert count_kept(limits, dead_letter(), 10) == 10


def test_a_failed_transaction_uses_up_no_limit() -> None:
    limits = LetterLimits(1 << 30)
    for _ in range(100):
        limits.begin(NOW)
        assert count_kept(limits, dead_letter(), PER_MINUTE) == PER_MINUTE
    assert limits.stored == 0


def test_the_bytes_are_bounded_and_half_of_them_are_for_messages_that_an_upgrade_can_read() -> None:
    limits = LetterLimits(10_000)
    for minute in range(200):
        limits.begin(NOW + minute * 60 * SECOND)
        count_kept(limits, dead_letter(900), 10)
        limits.commit()
    assert limits.stored == 4500
    limits.begin(NOW)
    assert count_kept(limits, dead_letter(900, NEWER), 100) == 6


def test_a_payload_is_cut_unless_an_upgrade_can_read_it() -> None:
    limits = LetterLimits(1 << 30)
    limits.begin(NOW)
    assert len(limits.payload_to_keep(dead_letter(1 << 20)) or b"") == PAYLOAD_BYTES
    assert len(limits.payload_to_keep(dead_letter(1 << 20, NEWER)) or b"") == 1 << 20


def test_a_flood_of_unreadable_messages_is_bounded_and_each_message_is_accounted_for(
    site: Any,
) -> None:
    """Of 2,000 messages 60 are kept: the others are gaps with their cause, and the valid ones are stored."""
    site.send("n1", T0)
    for _ in range(1000):
        site.spool("n1").append(b"rubbish" * 100, wire.TELEMETRY_KIND, 0)
    site.send("n1", T0 + SECOND)
    for _ in range(1000):
        site.spool("n1").append(b"rubbish" * 100, wire.TELEMETRY_KIND, 0)
    site.send("n1", T0 + 2 * SECOND)
    ingest = site.drain()
    [(letter_rows, size)] = site.rows("SELECT count(*), sum(octet_length(payload)) FROM dead_letter")
    assert letter_rows == PER_MINUTE
    assert ingest.letter_limits.stored == size
    gaps = site.rows("SELECT cause, count(*), sum(next_sequence - first_sequence) FROM gaps GROUP BY ALL")
    assert gaps == [("dead letter not kept: wire", 2, 2000 - PER_MINUTE)]
    assert site.rows("SELECT count(*) FROM gpu") == [(6,)]
    assert ingest.counters["dead_letters"] == 2000
    assert ingest.counters["dead_letters_not_kept"] == 2000 - PER_MINUTE


def read_next_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipeline after an upgrade: it reads messages of the current version and of the next one."""
    today, checked = wire.VERSION, wire.open_envelope

    def either(message: Any) -> Any:
        try:
            return checked(message)
        except wire.WireError:
            with monkeypatch.context() as older:
                older.setattr(wire, "VERSION", today)
                return checked(message)

    monkeypatch.setattr(wire, "VERSION", today + 1)
    monkeypatch.setattr(wire, "open_envelope", either)


@pytest.mark.slow
def test_the_spool_of_a_newer_agent_waits_for_the_upgrade_and_loses_nothing(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spool keeps it within its bounds; no dead letter, no gap, and no other node waits."""
    site.send("n1", T0)
    with monkeypatch.context() as upgraded_agent:
        upgraded_agent.setattr(wire, "VERSION", wire.VERSION + 1)
        for second in range(1, 50):
            site.send("n1", T0 + second * SECOND)
    site.send("n2", T0 + 100 * SECOND)
    ingest = site.drain()
    assert ingest.progress.newer == ("n1",)
    assert ingest.progress.backlog is None
    assert site.rows("SELECT count(*) FROM gpu") == [(4,)]
    site.send("n2", T0 + 101 * SECOND)
    assert ingest.step() is not None
    assert site.rows(LOSSES) == [(0, 0)]
    read_next_version(monkeypatch)
    ingest = site.drain()
    assert ingest.progress.newer == ()
    assert site.rows("SELECT count(*), count(DISTINCT (time, entity)) FROM gpu") == [(104, 104)]
    assert site.rows(LOSSES) == [(0, 0)]


@pytest.mark.slow
def test_on_shared_partitions_messages_of_a_newer_agent_are_kept_whole_and_stored_after_the_upgrade(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many more than the limit per minute for other letters; each message is stored once, across two restarts."""
    log, epoch = SharedLog(), bytes(range(16))
    log.add(ONE, [one_row("n1", epoch, 0, T0)])
    with monkeypatch.context() as upgraded_agent:
        upgraded_agent.setattr(wire, "VERSION", wire.VERSION + 1)
        log.add(ONE, [one_row("n1", epoch, i, T0 + i * SECOND) for i in range(1, 301)])
    log.add(ONE, [one_row("n2", epoch, i, T0 + i * SECOND) for i in range(10)])

    def restart() -> tuple[Database, Ingest]:
        database = Database(tmp_path / "store.duckdb")
        ingest = Ingest(database, log, Devices(database.connection), lambda: NOW)
        while ingest.step() is not None:
            pass
        return database, ingest

    database, ingest = restart()
    assert database.connection.execute(LOSSES).fetchall() == [(300, 0)]
    assert ingest.rejected == {"newer": 300}
    database.close()
    read_next_version(monkeypatch)
    for _ in range(2):
        database, ingest = restart()
        rows = "SELECT count(*), count(DISTINCT (time, entity)), sum(temperature) FROM gpu"
        assert database.connection.execute(rows).fetchall() == [(311, 311, sum(range(301)) + 45)]
        assert database.connection.execute(LOSSES).fetchall() == [(0, 0)]
        assert ingest.progress.backlog is None
        database.close()


def test_signed_messages_of_a_newer_agent_are_stored_after_the_upgrade_and_unsigned_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, epoch, key, folder = SharedLog(), bytes(range(16)), b"k" * 32, tmp_path / "keys"
    folder.mkdir()
    (folder / "n1.key").write_bytes(key)
    (folder / "n1.key").chmod(0o600)
    with monkeypatch.context() as upgraded_agent:
        upgraded_agent.setattr(wire, "VERSION", wire.VERSION + 1)
        values = [one_row("n1", epoch, i, T0 + i * SECOND) for i in range(3)]
        forged = [one_row("n1", epoch, i, T0 + i * SECOND) for i in range(3, 6)]
    log.add(ONE, values, key=b"n1", signatures=[sign(key, TELEMETRY, value) for value in values])
    log.add(ONE, forged, key=b"n1")

    def restart() -> Database:
        database = Database(tmp_path / "store.duckdb")
        admission = Admission(owners=load_owners(database), sender_check=SenderCheck(folder))
        ingest = Ingest(database, log, Devices(database.connection), lambda: NOW, admission=admission)
        while ingest.step() is not None:
            pass
        return database

    database = restart()
    rules = "SELECT rule, count(*) FROM dead_letter GROUP BY ALL ORDER BY ALL"
    assert database.connection.execute(rules).fetchall() == [("newer", 3), ("signature", 3)]
    database.close()
    read_next_version(monkeypatch)
    database = restart()
    assert database.connection.execute("SELECT count(*) FROM gpu").fetchall() == [(3,)]
    assert database.connection.execute(rules).fetchall() == [("signature", 3)]
    database.close()


def test_letters_deleted_from_the_table_make_room_for_new_ones(site: Any) -> None:
    site.send_raw("n1", b"rubbish")
    ingest = site.drain()
    assert ingest.letter_limits.stored > 0
    apply_bounds(site.database, Store(), NOW + 200 * HOUR)
    ingest.apply_retention(0)
    assert ingest.letter_limits.stored == 0
