"""The parts of the sender that need no broker: acknowledgements of a stream, reading, and log lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agents.node.spool.spool import Spool
from agents.node.uplink.link_state import NO_ACK_S, LinkState
from agents.node.uplink.streams import WINDOW_BYTES, SendStream, SendStreams
from agents.node.uplink.uplink import remove_stale_cursors
from pipeline.config.sections import Kafka
from pipeline.model.records import EVENTS, TELEMETRY
from pipeline.transport import Message, Partition, wire
from pipeline.transport.spool import SpoolTransport
from tests.kafka_broker import reserve_port

PARTITION = Partition(TELEMETRY, "n0", "0" * 32, True)


def stream(count: int, size: int = 100) -> SendStream:
    found = SendStream(PARTITION, 0)
    found.ahead.extend(Message(PARTITION, offset, bytes(size)) for offset in range(count))
    return found


def test_only_messages_acknowledged_without_a_gap_count() -> None:
    one = stream(4)
    for _ in range(4):
        one.mark_sent(0.0)
    one.mark_returned(2)
    assert (one.acknowledged, one.in_flight_bytes) == (0, 300)
    one.mark_returned(0)
    assert one.acknowledged == 1
    one.mark_returned(1)
    one.mark_returned(3)
    assert (one.acknowledged, one.in_flight_bytes) == (4, 0)


def test_a_failure_returns_a_stream_to_the_first_unacknowledged_message() -> None:
    one = stream(5)
    for _ in range(5):
        one.mark_sent(0.0)
    one.mark_returned(0)
    for offset in (3, 1):
        one.mark_returned(offset)
        one.request_retry(offset)
    assert one.acknowledged == 1
    one.mark_returned(2)
    one.mark_returned(4)
    one.rewind()
    assert (one.position, one.acknowledged, one.in_flight, one.at_end) == (1, 1, {}, False)


def test_a_known_gap_is_not_reported_again_after_a_rewind() -> None:
    one = stream(40)
    for _ in range(10):
        one.mark_sent(0.0)
    assert one.add_gap(10, 30) == [(10, 30)]
    assert one.add_gap(5, 35) == [(5, 10), (30, 35)]
    assert one.add_gap(5, 35) == []
    assert one.add_gap(35, 36) == [(35, 36)]


def test_a_window_allows_one_message_of_any_size_and_otherwise_its_limit() -> None:
    one = stream(2, WINDOW_BYTES)
    assert one.fits_window(WINDOW_BYTES * 2)
    one.mark_sent(0.0)
    assert not one.fits_window(1)


@pytest.fixture
def spools(tmp_path: Path) -> Iterator[Callable[..., Spool]]:
    opened: list[Spool] = []

    def open_spool(node: str, topic: str = TELEMETRY, **more: Any) -> Spool:
        opened.append(Spool(tmp_path, node, topic, **more))
        return opened[-1]

    yield open_spool
    for spool in opened:
        spool.close()


def filled(spool: Spool, sizes: list[int]) -> Spool:
    for number, size in enumerate(sizes):
        spool.append(bytes(size), wire.TELEMETRY_KIND, number)
    spool.sync()
    return spool


def test_a_transport_for_some_nodes_sees_only_theirs(spools: Callable[..., Spool], tmp_path: Path) -> None:
    filled(spools("n0"), [10])
    filled(spools("n1"), [10])
    transport = SpoolTransport(tmp_path, "kafka", nodes=["n1"])
    assert [partition.name for partition in transport.partitions()] == ["n1"]
    transport.close()


def test_a_transport_has_its_own_cursor_and_none_before_it_stored_anything(
    spools: Callable[..., Spool], tmp_path: Path
) -> None:
    filled(spools("n0"), [10, 10, 10])
    transport = SpoolTransport(tmp_path, "kafka")
    (partition,) = transport.partitions()
    assert transport.stored_offset(partition) is None
    transport.commit_offset(partition, 2)
    transport.close()
    again = SpoolTransport(tmp_path, "kafka")
    assert again.stored_offset(again.partitions()[0]) == 2
    assert SpoolTransport(tmp_path, "pipeline").stored_offset(partition) is None


def test_cursors_can_be_written_immediately(spools: Callable[..., Spool], tmp_path: Path) -> None:
    filled(spools("n0"), [10, 10, 10])
    transport = SpoolTransport(tmp_path, "kafka", lambda: 0.0)
    (partition,) = transport.partitions()
    transport.commit_offset(partition, 1)
    transport.commit_offset(partition, 2)
    assert transport.stored_offset(partition) == 1
    transport.write_cursors()
    assert transport.stored_offset(partition) == 2
    transport.close()


def test_messages_dropped_unsent_are_reported_with_their_cause_and_reading_continues_after_them(
    spools: Callable[..., Spool], tmp_path: Path
) -> None:
    filled(spools("n0", max_bytes=40_000), [3000] * 30)
    lost: list[tuple[int, int, str]] = []
    transport = SpoolTransport(tmp_path, "kafka")
    streams = SendStreams(transport, lambda _, *gap: lost.append(gap))
    streams.refresh()
    (one,) = streams
    assert streams.read_ahead(one)
    assert lost == [(0, one.next_offset, "spool full")]
    transport.close()


def test_messages_read_by_another_reader_before_are_not_a_gap(spools: Callable[..., Spool], tmp_path: Path) -> None:
    spool = filled(spools("n0", segment_bytes=6000), [3000] * 9)
    reader = SpoolTransport(tmp_path, "pipeline")
    reader.commit_offset(reader.partitions()[0], 6)
    reader.close()
    filled(spool, [3000] * 3)
    remove_stale_cursors(tmp_path, ["n0"], "kafka")
    lost: list[tuple[int, int, str]] = []
    transport = SpoolTransport(tmp_path, "kafka")
    streams = SendStreams(transport, lambda _, *gap: lost.append(gap))
    streams.refresh()
    (one,) = streams
    assert streams.read_ahead(one)
    assert one.next_offset > 0
    assert lost == []
    transport.close()


def test_only_the_other_transports_cursors_of_the_named_nodes_are_removed(
    spools: Callable[..., Spool], tmp_path: Path
) -> None:
    for node in ("n0", "n1"):
        for topic in (TELEMETRY, EVENTS):
            filled(spools(node, topic), [10])
    for reader in ("pipeline", "kafka"):
        transport = SpoolTransport(tmp_path, reader)
        for partition in transport.partitions():
            transport.commit_offset(partition, 1)
        transport.close()

    def cursors() -> list[str]:
        return sorted(f"{p.parts[-4]} {p.stem}" for p in tmp_path.glob("*/*/*/*.cursor"))

    remove_stale_cursors(tmp_path, ["n0", "absent"], "kafka")
    assert cursors() == ["n0 kafka"] * 2 + ["n1 kafka"] * 2 + ["n1 pipeline"] * 2
    remove_stale_cursors(tmp_path, ["n1"], "spool")
    assert cursors() == ["n0 kafka"] * 2 + ["n1 pipeline"] * 2


@pytest.fixture
def link() -> Iterator[SimpleNamespace]:
    lines: list[str] = []
    with reserve_port() as port:  # the port is reserved, and no process listens on it
        made = LinkState(Kafka(bootstrap_servers=f"127.0.0.1:{port.getsockname()[1]}"), lines.append)
        yield SimpleNamespace(it=made, lines=lines)
        made.close()


def update_link(link: LinkState, streams: list[SendStream], now: float) -> None:
    """Updates the state as the sender does once a second; the cause is looked up in another thread."""
    link.update(streams, now, None)
    if link._lookup is not None:
        link._lookup.join(10)
        link.update(streams, now, None)


@pytest.mark.slow
@pytest.mark.refusals
def test_silence_of_the_brokers_is_logged_once_with_its_cause_and_once_when_it_ends(link: SimpleNamespace) -> None:
    one = stream(1)
    one.mark_sent(100.0)
    update_link(link.it, [one], 100.0 + NO_ACK_S)
    assert link.lines == []
    for second in range(1, 60):
        update_link(link.it, [one], 100.0 + NO_ACK_S + second)
    one.mark_returned(0)
    update_link(link.it, [one], 200.0)
    assert len(link.lines) == 2
    assert "connection refused" in link.lines[0]
    assert "stay in the spool" in link.lines[0]
    assert link.lines[1] == "messages arrive again"
    assert link.it.problem is None


def test_a_refused_message_is_logged_once_per_topic_and_reason_with_the_fix(link: SimpleNamespace) -> None:
    for _ in range(3):
        link.it.log_refused(stream(1), 5000, ValueError())
    (line,) = link.lines
    assert "5000 bytes" in line
    assert "max.message.bytes of at least 9096" in line
