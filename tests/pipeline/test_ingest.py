"""Ingest: each accepted message is stored exactly once, or is in a counted gap, or is a dead letter."""

import json
import shutil
import struct

import duckdb
import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pipeline.ingest.ingest
from pipeline.model.errors import Retryable
from pipeline.model.records import SECOND, TELEMETRY, Batch, Block, Event, Origin
from pipeline.transport import Partition, wire
from tests.examples import examples

T0 = 1_780_000_000 * SECOND


def test_every_sample_is_stored_under_its_entity_and_time(site):
    site.send("n1", T0, ticks=3, first=40.0)
    site.drain()
    found = site.rows("SELECT epoch_us(time), entity, temperature, sm_clock FROM gpu ORDER BY ALL")
    assert found == [(T0 + t * SECOND, f"gpu:n1.{g}", 40.0 + t, 1000 + g) for t in range(3) for g in range(2)]


@pytest.mark.slow
def test_a_restart_continues_at_the_stored_offset(site):
    site.send("n1", T0)
    site.drain()
    site.send("n1", T0 + SECOND)
    site.drain()
    assert site.rows("SELECT count(*), count(DISTINCT time) FROM gpu") == [(4, 2)]
    assert site.rows("SELECT count(*) FROM gaps") == [(0,)]


@pytest.mark.slow
def test_a_repeated_message_is_counted_and_not_stored_again(site):
    site.send("n1", T0)
    site.drain()
    for table in ("ingest_commit", "partition_offset"):  # as if the offset had been lost
        site.database.connection.execute(f"DELETE FROM {table}")
    ingest = site.drain()
    assert ingest.counters["duplicates"] == 1
    assert site.rows("SELECT count(*) FROM gpu") == [(2,)]


def test_a_message_that_is_not_a_batch_becomes_a_dead_letter_and_reading_continues(site):
    site.send("n1", T0)
    site.send_raw("n1", b"not a zstd frame")
    site.send("n1", T0 + SECOND)
    site.drain()
    assert site.rows("SELECT count(*) FROM gpu") == [(4,)]
    [(offset, reason, payload)] = site.rows('SELECT "offset", reason, payload FROM dead_letter')
    assert offset == 1
    assert "zstd" in reason
    assert b"not a zstd frame" in payload


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("device_class", "signal", "values", "reason"),
    [
        ("gpu", "gpu.sm_clock", np.ones((1, 1), "f4"), "values of type f4, expected u2"),
        ("gpu", 'gpu."; DROP TABLE hot_gpu; --', np.ones((1, 1), "f4"), "lower-case"),
        ("GPU", "gpu.x", np.ones((1, 1), "f4"), "expected one of gpu"),
        ("entities", "entities.x", np.ones((1, 1), "f4"), "expected one of gpu"),
        *(
            ("gpu", f"gpu.{name}", np.ones((1, 1), "f4"), "reserved by the store")
            for name in ("time", "node", "simulated", "id", "place", "at")
        ),
    ],
)
def test_a_batch_that_does_not_fit_the_store_is_refused_with_its_reason(site, device_class, signal, values, reason):
    site.send_raw("n1", one_signal("n1", signal, values, device_class))
    site.send("n2", T0)
    site.drain()
    assert reason in site.rows("SELECT reason FROM dead_letter")[0][0]
    assert site.rows("SELECT count(*) FROM gpu") == [(2,)]


def test_a_broken_clock_is_a_dead_letter(site):
    site.send("n1", 1_000_000)
    site.drain()
    assert "clock is broken" in site.rows("SELECT reason FROM dead_letter")[0][0]


@pytest.mark.slow
def test_missing_values_are_null(site):
    columns = {
        "gpu.temperature": np.array([[np.nan]], "f4"),
        "gpu.sm_clock": np.array([[0xFFFF]], "u2"),
        "gpu.energy": np.array([[2**64 - 1]], "u8"),
    }
    batch = Batch(Origin("local", "n1", b"b" * 16), np.array([T0]), (Block("gpu", ("gpu:n1.0",), columns),))
    site.send_raw("n1", wire.encode(batch))
    site.drain()
    assert site.rows("SELECT temperature, sm_clock, energy FROM gpu") == [(None, None, None)]


@pytest.mark.slow
def test_a_signal_missing_in_the_catalogue_becomes_a_column(site):
    columns = {"gpu.made_by_others": np.array([[7]], "u4")}
    batch = Batch(Origin("local", "n1", b"b" * 16), np.array([T0]), (Block("gpu", ("gpu:n1.0",), columns),))
    site.send_raw("n1", wire.encode(batch))
    site.drain()
    assert site.rows("SELECT made_by_others FROM gpu") == [(7,)]


@pytest.mark.slow
def test_latest_holds_the_newest_row_of_each_device(site):
    site.send("n1", T0, ticks=3, first=40.0)
    site.send("n2", T0, ticks=1, first=50.0)
    site.drain()
    site.send("n1", T0 - 60 * SECOND, first=1.0)  # late: must not replace a newer row
    site.drain()
    assert site.rows("SELECT device, temperature FROM latest_gpu ORDER BY device") == [
        (0, 42.0), (1, 42.0), (2, 50.0), (3, 50.0)
    ]  # fmt: skip


def test_messages_of_all_nodes_are_committed_in_order_of_event_time(site):
    for second in range(5):
        site.send("n1", T0 + second * SECOND)
    site.send("n2", T0 - 100 * SECOND)
    committed = site.open().step()
    assert committed.messages == 6
    assert committed.rows[0].time[0] == T0 - 100 * SECOND


@pytest.mark.slow
def test_a_dropped_segment_is_a_counted_gap_with_its_cause(site):
    spool = site.spool("n1")
    spool.max_bytes = 3 * (1 << 16)
    rng = np.random.default_rng(1)
    for _ in range(8):
        noise = rng.random((1000, 2), "f4")
        block = Block("gpu", ("gpu:n1.0", "gpu:n1.1"), {"gpu.temperature": noise, "gpu.power": noise[::-1].copy()})
        times = T0 + spool_ticks(spool) + np.arange(1000) * SECOND
        site.send_raw("n1", wire.encode(Batch(Origin("local", "n1", b"b" * 16), times, (block,))))
        for _ in range(4):
            site.send_raw("n1", wire.encode(Batch(Origin("local", "n1", b"b" * 16), times, (block,))))
    assert spool.dropped > 0
    site.drain()
    assert site.rows("SELECT source, sum(next_sequence - first_sequence) FROM gaps GROUP BY 1") == [
        ("n1", spool.dropped)
    ]
    assert site.rows("SELECT count(*) FROM gpu") == [((40 - spool.dropped) * 2000,)]


def spool_ticks(spool) -> int:
    """A later start for every batch, so that times do not repeat."""
    return spool.dropped * SECOND


@pytest.mark.slow
def test_a_new_spool_of_a_node_is_a_counted_gap_and_is_read_from_its_start(site):
    site.send("n1", T0)
    site.drain()
    site.spools.pop(("n1", TELEMETRY)).close()
    site.shut()
    shutil.rmtree(site.folder / "spool")
    site.send("n1", T0 + 60 * SECOND)
    site.drain()
    assert site.rows("SELECT count(*) FROM gpu") == [(4,)]
    assert "new spool" in site.rows("SELECT cause FROM gaps")[0][0]


def test_events_and_inventory_are_stored(site):
    lines = {"gpu:n1.0": {"parents": ["node:n1"], "attributes": {"sku": "H200"}}, "node:n1": {"parents": ["rack:r1"]}}
    site.send_events(
        "n1",
        Event(T0, "node:n1", "inventory", {"entities": lines}),
        Event(T0, "gpu:n1.0", "xid", {"code": 79}),
    )
    site.drain()
    assert site.rows("SELECT entity, kind, parents FROM entities ORDER BY ALL") == [
        ("gpu:n1.0", "gpu", ["node:n1"]), ("node:n1", "node", ["rack:r1"])
    ]  # fmt: skip
    assert json.loads(site.rows("SELECT data FROM events WHERE kind = 'xid'")[0][0]) == {"code": 79}


def test_a_failing_transaction_stores_nothing_and_is_tried_again(site, monkeypatch):
    site.send("n1", T0)
    ingest = site.open()
    broken = iter([duckdb.IOException("disk full")])
    transaction = site.database.transaction

    def once():
        if error := next(broken, None):
            raise error
        return transaction()

    monkeypatch.setattr(site.database, "transaction", once)
    with pytest.raises(Retryable, match="disk full"):
        ingest.step()
    assert ingest.step().messages == 1
    assert site.rows("SELECT count(*) FROM gpu") == [(2,)]


def test_a_second_writer_on_the_same_offsets_is_refused(site):
    site.send("n1", T0)
    ingest = site.open()
    incarnation = site.transport.partitions()[0].incarnation
    site.database.connection.execute(f"INSERT INTO partition_offset VALUES ('{TELEMETRY}', 'n1', '{incarnation}', 1)")
    with pytest.raises(Retryable, match="another pipeline"):
        ingest.step()
    assert site.rows("SELECT count(*) FROM gpu") == [(0,)]


def test_backlog_is_the_oldest_unread_event_time(site):
    ingest = site.open()
    ingest.step()
    assert ingest.backlog() is None
    site.send("n1", T0)
    ingest._fetch()
    assert ingest.backlog() == T0
    ingest.step()
    assert ingest.backlog() is None
    assert ingest.newest() == T0


SCRIPTS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.sampled_from("abc"), st.integers(0, 50), st.integers(1, 3)),
        st.tuples(st.just("poison"), st.sampled_from("abc")),
        st.tuples(st.just("restart")),
    ),
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=examples(8), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=SCRIPTS)
def test_any_script_of_batches_poison_and_restarts_stores_each_batch_once(new_site, script):
    check_script(new_site, script)


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=SCRIPTS)
def test_many_scripts_of_batches_poison_and_restarts_store_each_batch_once(new_site, script):
    check_script(new_site, script)


def check_script(new_site, script):
    """Runs one script against a new store: each sample is stored once, each poisoned message is a dead letter."""
    site = new_site()
    sent = poison = 0
    for kind, *arguments in script:
        if kind == "send":
            node, offset, ticks = arguments
            site.send(node, T0 + offset * SECOND, ticks)
            sent += ticks * 2
        elif kind == "poison":
            site.send_raw(arguments[0], b"\0poison")
            poison += 1
        else:
            site.drain()
    site.drain()
    assert site.rows("SELECT count(*) FROM gpu") == [(sent,)]
    assert site.rows("SELECT count(*) FROM dead_letter") == [(poison,)]
    site.shut()
    for spool in site.spools.values():
        spool.close()


def test_offsets_are_per_incarnation(site):
    site.send("n1", T0)
    ingest = site.drain()
    [partition] = site.transport.partitions()
    assert ingest.offsets.durable == {partition: 1}
    assert partition != Partition(partition.topic, partition.name, "another")


def one_signal(node, name, values, device_class="gpu"):
    block = Block(device_class, (f"gpu:{node}.0",), {name: values})
    return wire.encode(Batch(Origin("local", node, b"b" * 16), np.array([T0]), (block,)))


def test_text_that_no_store_can_write_is_a_dead_letter(site):
    layout = json.dumps({"site": "local", "node": "n1", "blocks": [["gpu", ["gpu:\ud800"], [["gpu.power", "f4"]]]]})
    names = layout.encode()
    raw = b"b" * 16 + struct.pack("<II", len(names), 1) + names + struct.pack("<qf", T0, 1.0)
    site.send_raw("n1", zstandard.ZstdCompressor().compress(raw))
    site.send_raw("n1", one_signal("n1", "gpu.power", np.ones((1, 1), "f4")))
    site.send_events("n2", Event(T0, "gpu:n2.0", "xid", {"text": "\\ud800"}))
    site.drain()
    assert "not valid Unicode" in site.rows("SELECT reason FROM dead_letter")[0][0]
    assert site.rows("SELECT count(*) FROM gpu") == [(1,)]


def test_a_dead_letter_leaves_no_second_record_of_the_same_loss(site):
    site.send("n1", T0)
    site.send_raw("n1", b"not a zstd frame")
    site.send("n1", T0 + SECOND)
    site.drain()
    assert site.rows("SELECT count(*) FROM dead_letter") == [(1,)]
    assert site.rows("SELECT count(*) FROM gaps") == [(0,)]


def test_senders_with_different_types_for_a_new_signal_are_distinguished(site):
    site.send_raw("n1", one_signal("n1", "gpu.brand_new", np.array([[3]], "u1")))
    site.send_raw("n2", one_signal("n2", "gpu.brand_new", np.array([[3.7]], "f4")))
    site.drain()
    assert site.rows("SELECT count(*) FROM gpu") == [(1,)]
    assert "senders disagree" in site.rows("SELECT reason FROM dead_letter")[0][0]


def test_two_signals_that_would_share_a_column_are_refused(site):
    columns = {"gpu.fan.speed": np.ones((1, 1), "f4"), "gpu.fan_speed": np.ones((1, 1), "f4")}
    batch = Batch(Origin("local", "n1", b"b" * 16), np.array([T0]), (Block("gpu", ("gpu:n1.0",), columns),))
    site.send_raw("n1", wire.encode(batch))
    site.drain()
    assert "share one column" in site.rows("SELECT reason FROM dead_letter")[0][0]


def test_a_full_disk_during_the_search_for_a_poison_message_loses_nothing(site, monkeypatch):
    """The first half is durable, the second fails: the next step continues after it, and both reach the framer."""
    for second in range(4):
        site.send("n1", T0 + second * SECOND)
    ingest = site.open()
    transaction = ingest._write_transaction
    failures = [*[duckdb.ConversionException("poison")] * 3, None, duckdb.IOException("disk full")]

    def failing(items, gaps):
        error = failures.pop(0) if failures else None
        if error is not None:
            raise error
        transaction(items, gaps)

    monkeypatch.setattr(ingest, "_write_transaction", failing)
    with pytest.raises(Retryable, match="disk full"):
        ingest.step()
    assert site.rows("SELECT count(*) FROM gpu") == [(4,)]
    done = ingest.step()
    assert site.rows("SELECT count(*), count(DISTINCT (time, entity)) FROM gpu") == [(8, 8)]
    assert sum(len(rows.time) for rows in done.rows) == 8
    assert ingest.step() is None


def test_an_unexpected_error_is_reported_and_the_message_set_aside(site, monkeypatch):
    site.send("n1", T0)
    site.send("n2", T0, first=13.0)
    ingest = site.open()
    rows = pipeline.ingest.ingest.build_rows

    def unlucky(bodies, devices, barred):
        if any(b.layout.node == "n2" for b in bodies):
            raise ZeroDivisionError("a fault in the code")
        return rows(bodies, devices, barred)

    monkeypatch.setattr(pipeline.ingest.ingest, "build_rows", unlucky)
    assert ingest.step().messages == 2
    assert site.rows("SELECT count(*) FROM gpu") == [(2,)]
    assert "a fault in the code" in site.rows("SELECT reason FROM dead_letter")[0][0]


def test_messages_with_a_high_compression_ratio_are_decoded_a_few_at_a_time(site):
    block = Block("gpu", tuple(f"gpu:n1.{i}" for i in range(100)), {"gpu.power": np.zeros((10_000, 100), "f4")})
    body = wire.encode(Batch(Origin("local", "n1", b"b" * 16), T0 + np.arange(10_000), (block,)))
    for _ in range(20):
        site.send_raw("n1", body)
    ingest = site.open()
    ingest._fetch()
    assert sum(len(queue) for queue in ingest._queues.values()) <= 3


def test_other_threads_read_only_data_that_the_last_step_published(site):
    site.send("n1", T0)
    ingest = site.open()
    before = ingest.progress
    ingest.step()
    assert (before.newest, before.nodes) == (None, {})
    assert (ingest.progress.newest, ingest.progress.nodes) == (T0, {"n1": T0})
