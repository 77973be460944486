"""Admission by sender: the transport must confirm the node of a message, and a forgery replaces nothing."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.ingest.admission import Admission
from pipeline.ingest.ingest import Ingest
from pipeline.ingest.ownership import load_owners
from pipeline.ingest.sequences import WINDOW, RecentMessages
from pipeline.model.errors import ConfigError, Retryable
from pipeline.model.records import SECOND, Batch, Block, Origin
from pipeline.store.database import Database
from pipeline.store.devices import Devices
from pipeline.transport import wire
from pipeline.transport.signatures import RENEW_S, NodeKeys, SenderCheck, sign
from tests.pipeline.conftest import gpu_body
from tests.pipeline.shared_log import ONE, SharedLog

NOW = 1_790_000_000 * SECOND
EPOCH = b"e" * 16
KEY, OTHER = b"k" * 32, b"o" * 32


def message(node: str, sequence: int, temperature: float, sent: int | None = None) -> bytes:
    """Returns one row of gpu:NODE.0, made in the second of its sequence unless `sent` is given."""
    time = NOW + sequence * SECOND
    block = Block("gpu", (f"gpu:{node}.0",), {"gpu.temperature": np.full((1, 1), temperature, "f4")})
    body = wire.encode(Batch(Origin("local", node, bytes(16)), np.array([time]), (block,)))
    return wire.seal(body, wire.TELEMETRY_KIND, EPOCH, sequence, time if sent is None else sent)


class SenderHarness:
    """An ingest over a shared log that can restart."""

    def __init__(self, folder):
        self.folder, self.log, self.keys, self.database = folder, SharedLog(), None, None

    def drain(self) -> Ingest:
        self.shut()
        self.database = Database(self.folder / "store.duckdb")
        devices = Devices(self.database.connection)
        admission = Admission(owners=load_owners(self.database), sender_check=SenderCheck(self.keys))
        ingest = Ingest(self.database, self.log, devices, lambda: NOW + 3600 * SECOND, admission=admission)
        while ingest.step() is not None:
            pass
        return ingest

    def shut(self):
        if self.database is not None:
            self.database.close()
            self.database = None

    def temperatures(self) -> list[float]:
        rows = self.database.connection.execute("SELECT temperature FROM gpu ORDER BY time, temperature").fetchall()
        return [value for (value,) in rows]

    def read_letters(self) -> list[str]:
        rows = self.database.connection.execute("SELECT reason FROM dead_letter ORDER BY ALL").fetchall()
        return [reason for (reason,) in rows]


@pytest.fixture
def bench(tmp_path):
    made = SenderHarness(tmp_path)
    yield made
    made.shut()


def test_a_message_of_another_node_than_its_spool_folder_is_rejected(site):
    site.send_raw("h1", gpu_body("h2", NOW, first=999.0))
    site.send("h1", NOW, first=40.0)
    site.send("h2", NOW, first=50.0)
    ingest = site.drain()
    assert site.rows("SELECT DISTINCT entity, temperature FROM gpu ORDER BY ALL") == [
        ("gpu:h1.0", 40.0), ("gpu:h1.1", 40.0), ("gpu:h2.0", 50.0), ("gpu:h2.1", 50.0)
    ]  # fmt: skip
    [(reason,)] = site.rows("SELECT reason FROM dead_letter")
    assert reason == "sender: message of node 'h2' in the spool of 'h1'"
    assert ingest.rejected["sender"] == 1
    assert site.rows("SELECT count(*) FROM gaps") == [(0,)]  # the message was passed over, not lost


@pytest.mark.parametrize(("key", "reason"), [(b"h1", "under the key b'h1'"), (None, "without a key"), (b"", "?")])
def test_a_kafka_message_whose_key_is_not_its_node_is_rejected(bench, key, reason):
    bench.log.add(ONE, [message("h2", 0, 40.0)], key=key if key != b"" else b"h2\0")
    bench.drain()
    assert bench.temperatures() == []
    assert bench.read_letters()[0].startswith("sender: message of node 'h2'")
    assert reason.strip("?") in bench.read_letters()[0]


def test_messages_sent_ahead_by_an_impostor_do_not_make_those_of_the_node_duplicates(bench):
    """Without keys Kafka topics cannot confirm the sender; the node's own messages are never lost because of that."""
    bench.log.add(ONE, [message("h2", 0, 40.0)])
    bench.log.add(ONE, [message("h2", n, 999.0) for n in range(1, 4)])
    bench.log.add(ONE, [message("h2", n, 40.0 + n) for n in range(1, 4)])
    ingest = bench.drain()
    assert bench.temperatures() == [40.0, 41.0, 999.0, 42.0, 999.0, 43.0, 999.0]
    assert ingest.counters["duplicates"] == 0
    assert ingest.rejected["sequence"] == 3
    assert [letter.split(";")[0] for letter in bench.read_letters()] == [
        f"sequence: another message of h2 had sequence {n} of telemetry.v1 before" for n in range(1, 4)
    ]


@pytest.mark.slow
def test_many_such_messages_with_future_times_and_a_restart_do_not_either(bench):
    ahead = 3 * WINDOW
    bench.log.add(ONE, [message("h2", 0, 40.0)], appended=NOW)
    forged = [message("h2", n, 999.0, sent=NOW + 25 * SECOND) for n in range(1, ahead)]
    bench.log.add(ONE, forged, appended=NOW + SECOND)
    bench.drain()
    for n in (40, 41, ahead - 1):
        bench.log.add(ONE, [message("h2", n, 40.0)], appended=NOW + n * SECOND)
    ingest = bench.drain()
    assert bench.temperatures().count(40.0) == 4
    assert ingest.counters["duplicates"] == 0
    assert ingest.rejected["sequence"] == 3


def test_a_repeated_message_is_a_duplicate_also_after_a_second_one_of_its_sequence(bench):
    first, second = message("h2", 1, 999.0), message("h2", 1, 41.0)
    bench.log.add(ONE, [message("h2", 0, 40.0), first, second, second, first])
    ingest = bench.drain()
    assert bench.temperatures() == [40.0, 41.0, 999.0]
    assert ingest.counters["duplicates"] == 2
    assert ingest.rejected["sequence"] == 1


@pytest.mark.slow
def test_a_log_read_again_from_its_start_gives_only_duplicates(bench):
    bench.log.add(ONE, [message("h2", n, 40.0) for n in range(2 * WINDOW)])
    bench.drain()
    bench.database.connection.execute("DELETE FROM ingest_commit")
    bench.database.connection.execute("DELETE FROM partition_offset")
    ingest = bench.drain()
    assert ingest.counters["duplicates"] == 2 * WINDOW
    assert bench.read_letters() == []
    assert len(bench.temperatures()) == 2 * WINDOW


def test_a_second_message_counts_only_once_its_transaction_is_durable():
    sequences, sender = RecentMessages(), ("telemetry.v1", "h2", "e")
    sequences.add_messages(sender, [1], [message("h2", 1, 999.0)])
    sequences.begin()
    assert not sequences.is_repeat(sender, 1, message("h2", 1, 41.0), None, None)
    sequences.begin()  # that transaction failed
    assert not sequences.is_repeat(sender, 1, message("h2", 1, 41.0), None, None)
    sequences.commit()
    sequences.begin()
    assert sequences.is_repeat(sender, 1, message("h2", 1, 41.0), None, None)


# --- signatures ------------------------------------------------------------------------------------------------------


def write_key(folder, node: str, *keys: bytes) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / f"{node}.key"
    path.touch(mode=0o600)
    path.write_bytes(b"\n".join(keys))


def test_with_keys_configured_only_messages_signed_with_the_nodes_key_are_accepted(bench, tmp_path):
    bench.keys = tmp_path / "keys"
    write_key(bench.keys, "h2", KEY)
    write_key(bench.keys, "h1", OTHER)
    sent = [message("h2", n, 40.0 + n) for n in range(4)]
    signed = [sign(KEY, "telemetry.v1", sent[0]), None, sign(OTHER, "telemetry.v1", sent[2]), b"short"]
    bench.log.add(ONE, sent, signatures=signed)
    bench.log.add(ONE, [message("h3", 0, 999.0)], signatures=[sign(KEY, "telemetry.v1", message("h3", 0, 999.0))])
    ingest = bench.drain()
    assert bench.temperatures() == [40.0]
    assert ingest.rejected["signature"] == 4
    assert [letter.split(":")[0] for letter in bench.read_letters()] == ["signature"] * 4


def test_a_signature_for_one_topic_is_invalid_for_another():
    assert sign(KEY, "telemetry.v1", b"x") != sign(KEY, "events.v1", b"x")
    assert sign(KEY, "t", b"x") != sign(OTHER, "t", b"x")


def test_a_key_is_replaced_without_a_gap_and_a_removed_one_ends_within_a_minute(tmp_path):
    clock = [0.0]
    keys = NodeKeys(tmp_path, lambda: clock[0])
    write_key(tmp_path, "h2", KEY, OTHER)
    assert keys.signing_key("h2") == KEY
    assert keys.find_fault("h2", "t", b"x", sign(OTHER, "t", b"x")) is None
    write_key(tmp_path, "h2", KEY)
    clock[0] += RENEW_S
    assert "wrong signature" in keys.find_fault("h2", "t", b"x", sign(OTHER, "t", b"x"))


@pytest.mark.parametrize(("text", "mode", "reason"), [(b"short", 0o600, "at least 32"), (KEY, 0o644, "chmod 600")])
def test_a_key_without_protection_is_refused(tmp_path, text, mode, reason):
    write_key(tmp_path, "h2", text)
    (tmp_path / "h2.key").chmod(mode)
    with pytest.raises(ConfigError, match=reason):
        NodeKeys(tmp_path).signing_key("h2")
    assert reason in NodeKeys(tmp_path).find_fault("h2", "t", b"x", b"")


def test_nothing_is_stored_for_a_node_with_a_misleading_name_not_even_its_clock(bench):
    node = "n1\u202e\ncritical"
    bench.log.add(ONE, [message(node, 0, 40.0, sent=NOW + 7200 * SECOND)], key=node.encode(), appended=NOW)
    ingest = bench.drain()
    assert dict(ingest.rejected) == {"name": 1}
    assert ingest.senders.clock_errors == {}
    assert bench.database.connection.execute("SELECT * FROM events").fetchall() == []


def test_a_missing_key_folder_loses_no_message(bench, tmp_path):
    bench.keys = tmp_path / "keys"
    value = message("h1", 0, 40.0)
    bench.log.add(ONE, [value], signatures=[sign(KEY, ONE.topic, value)])
    with pytest.raises(Retryable, match="node_keys"):
        bench.drain()
    write_key(bench.keys, "h1", KEY)
    ingest = bench.drain()
    assert bench.temperatures() == [40.0]
    assert dict(ingest.rejected) == {}


@pytest.mark.parametrize(("sequence", "sent"), [(0, -(1 << 63)), (0, (1 << 63) - 1), (1 << 63, NOW)])
def test_values_from_a_sender_never_exceed_the_range_of_the_store(bench, sequence, sent):
    """A clock error beyond 64 bits would fail every commit, with the messages of all senders."""
    for i in range(30):
        arrived = NOW + i * 5 * SECOND
        moving = sent + i * 5 * SECOND if sent < NOW else sent
        bad = wire.seal(gpu_body("evil", arrived), wire.TELEMETRY_KIND, EPOCH, sequence + i, moving)
        bench.log.add(ONE, [bad], arrived, key=b"evil")
        bench.log.add(ONE, [message("h1", i, 2.0, arrived)], arrived)
    ingest = bench.drain()
    assert bench.temperatures() == [2.0] * 30
    assert dict(ingest.rejected) == {"wire": 30}


@pytest.mark.parametrize("node", ["a/b", "..", "\u8282" * 70, "\u8282" * 22 + "xx"])
def test_a_node_that_can_have_no_key_file_is_refused_and_the_others_are_stored(bench, tmp_path, node):
    bench.keys = tmp_path / "keys"
    write_key(bench.keys, "h2", KEY)
    value = message("h2", 0, 40.0)
    bench.log.add(ONE, [message(node, 0, 999.0)])
    bench.log.add(ONE, [value], signatures=[sign(KEY, ONE.topic, value)])
    ingest = bench.drain()
    assert bench.temperatures() == [40.0]
    assert dict(ingest.rejected) == {"signature": 1}
    assert "key" in bench.read_letters()[0]
