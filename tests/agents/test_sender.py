"""From the spool to a real broker: once and in order without failures, completely after any failure."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from agents.node.spool.spool import Spool
from agents.node.uplink import sender as sender_module
from agents.node.uplink.client import ClientTimeouts, KafkaSendClient
from agents.node.uplink.sender import SpoolSender
from pipeline.config.sections import Kafka
from pipeline.model.errors import ConfigError
from pipeline.model.records import EVENTS, TELEMETRY
from pipeline.transport import wire
from tests.kafka_broker import Address, Broker
from tests.kafka_clients import delete_topics, kafka_of, make_topic, make_topics, read
from tests.until import until

SHORT = ClientTimeouts(delivery=2.0, request=1.0, block=0.3, blocked=2.0)
"""Short timeouts, so that a long outage takes seconds; the product's are ClientTimeouts()."""
I_O = "-network-thread"
pytestmark = pytest.mark.refusals


class Site:
    """Spools of some nodes, and their senders, which are closed at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log_lines = folder, list[str]()
        self.spools: dict[tuple[str, str], Spool] = {}
        self.senders: list[SpoolSender] = []

    def add(self, count: int, node: str = "n0", topic: str = TELEMETRY, size: int = 2000, **more: Any) -> None:
        """Writes messages made at 0, 1, 2, ... us to the spool."""
        spool = self.spools.get((node, topic)) or Spool(self.folder, node, topic, **more)
        self.spools[node, topic] = spool
        for _ in range(count):
            spool.append(bytes([spool.next % 251]) * size, wire.TELEMETRY_KIND, spool.next)
        spool.sync()

    def send(self, kafka: Kafka, times: ClientTimeouts = SHORT) -> SpoolSender:
        nodes = sorted({node for node, _ in self.spools})
        self.senders.append(SpoolSender(self.folder, nodes, kafka, self.log_lines.append, timeouts=times))
        self.senders[-1].start()
        return self.senders[-1]

    def close(self) -> None:
        for sender in self.senders:
            sender.close()
        for spool in self.spools.values():
            spool.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path / "spool")
    yield made
    made.close()


def all_arrive(sender: SpoolSender, seconds: float = 30.0) -> None:
    ticket = sender.request_flush()
    until(lambda: sender.is_flushed(ticket), seconds)


def sequences(address: Address, topic: str = TELEMETRY, node: str = "n0") -> list[int]:
    return [
        wire.unpack_envelope(record.value).sequence for record in read(address, topic) if record.key == node.encode()
    ]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.endswith(I_O)]


def test_acknowledged_messages_are_in_the_topic_once_and_in_order_under_their_node(kafka: Address, site: Site) -> None:
    settings = make_topics(kafka)
    site.add(3000)
    sender = site.send(settings)
    all_arrive(sender)
    site.add(200)
    all_arrive(sender)
    assert sequences(kafka) == list(range(3200))
    assert sender.dispatcher.sent == 3200
    assert site.log_lines == []
    assert sender.problem() is None


def test_a_restart_continues_at_the_cursor(kafka: Address, site: Site) -> None:
    settings = make_topics(kafka)
    site.add(50)
    first = site.send(settings)
    all_arrive(first)
    first.close()
    site.add(50)
    second = site.send(settings)
    all_arrive(second)
    assert second.dispatcher.sent == 50
    assert sequences(kafka) == list(range(100))


def test_nodes_are_merged_by_the_time_at_which_messages_were_made(kafka: Address, site: Site) -> None:
    settings = kafka_of(kafka)
    make_topic(kafka, TELEMETRY)
    for node in ("n0", "n1", "n2"):
        site.add(100, node, size=500)
    all_arrive(site.send(settings))
    made = [wire.unpack_envelope(record.value).sent for record in read(kafka, TELEMETRY)]
    assert len(made) == 300
    assert made == sorted(made)


def test_bytes_in_flight_stay_below_the_bound_with_any_backlog(kafka: Address, site: Site) -> None:
    settings = make_topics(kafka)
    for node in range(8):
        site.add(4, f"n{node}", size=700_000)
        site.add(200, f"n{node}", EVENTS, size=3000)
    site.add(1, "n0", size=wire.MAX_MESSAGE - wire.ENVELOPE_BYTES)
    sender = site.send(settings, ClientTimeouts())
    all_arrive(sender, 60)
    assert 0 < sender.dispatcher.peak_in_flight <= sender_module.IN_FLIGHT
    assert sender.dispatcher.sent == 8 * 204 + 1
    assert sender.dispatcher.refused == 0


@pytest.mark.slow
def test_without_a_broker_the_sender_starts_states_why_and_sends_all_once_one_is_reachable(
    own_broker: Broker, site: Site
) -> None:
    settings = make_topics(own_broker)
    own_broker.kill()
    site.add(100)
    sender = site.send(settings)
    until(sender.problem)
    assert "connection refused" in site.log_lines[0]
    own_broker.start()
    all_arrive(sender)
    assert sorted(set(sequences(own_broker))) == list(range(100))
    until(lambda: sender.problem() is None)
    assert len(site.log_lines) == 2


@pytest.mark.slow
def test_a_killed_broker_gets_everything_after_its_return(own_broker: Broker, site: Site) -> None:
    settings = make_topics(own_broker)
    site.add(100)
    sender = site.send(settings)
    all_arrive(sender)
    site.add(3000)
    sender.wake()
    own_broker.kill()
    site.add(500)
    until(sender.problem)
    own_broker.start()
    all_arrive(sender)
    assert sorted(set(sequences(own_broker))) == list(range(3600))


@pytest.mark.slow
def test_a_client_without_response_of_a_frozen_broker_is_replaced_and_everything_arrives(
    own_broker: Broker, site: Site
) -> None:
    settings = make_topics(own_broker)
    site.add(10)
    sender = site.send(settings)
    all_arrive(sender)
    own_broker.freeze()
    site.add(2000)
    sender.wake()
    until(lambda: sender.clients >= 2 and sender.problem())
    assert len(threads()) == 1
    assert "does not respond" in site.log_lines[0]
    own_broker.thaw()
    all_arrive(sender)
    assert sorted(set(sequences(own_broker))) == list(range(2010))
    until(lambda: len(site.log_lines) == 2)


@pytest.mark.slow
def test_messages_dropped_by_the_size_limit_in_an_outage_are_an_event_with_its_cause(
    own_broker: Broker, site: Site
) -> None:
    settings = make_topics(own_broker)
    site.add(10, max_bytes=200_000)
    sender = site.send(settings)
    all_arrive(sender)
    own_broker.kill()
    site.add(200)
    own_broker.start()
    all_arrive(sender)
    events = sender.take_events()
    assert {(event.entity, event.kind) for event in events} == {("node:n0", "gap")}
    reported = {(event.data["topic"], event.data["epoch"], event.data["cause"]) for event in events}
    assert reported == {(TELEMETRY, site.spools["n0", TELEMETRY].epoch.hex(), "spool full")}
    lost = {number for event in events for number in range(event.data["first"], event.data["next"])}
    assert len(lost) == sender.lost > 0
    assert set(sequences(own_broker)) >= set(range(210)) - lost
    assert sender.take_events() == []


def test_a_message_too_large_for_the_topic_is_dropped_and_reported_and_its_neighbours_arrive(
    kafka: Address, site: Site
) -> None:
    make_topic(kafka, TELEMETRY, max_message_bytes="20000")
    for size in (1000, 30_000, 1000, 1000, 40_000, 1000):
        site.add(1, size=size)
    sender = site.send(kafka_of(kafka))
    all_arrive(sender)
    assert sorted(set(sequences(kafka))) == [0, 2, 3, 5]
    assert sender.dispatcher.refused == 2
    (line,) = site.log_lines
    assert "max.message.bytes" in line
    first, second = sender.take_events()
    assert (first.entity, first.kind) == ("node:n0", "gap")
    assert first.data == {
        "topic": TELEMETRY,
        "epoch": site.spools["n0", TELEMETRY].epoch.hex(),
        "first": 1,
        "next": 2,
        "cause": "refused by the brokers: MessageSizeTooLargeError",
    }
    assert (second.data["first"], second.data["next"]) == (4, 5)


def test_a_missing_topic_is_named_does_not_block_the_other_and_gets_everything_once_created(
    kafka: Address, site: Site
) -> None:
    settings = make_topics(kafka)
    delete_topics(kafka, [TELEMETRY])
    site.add(20)
    site.add(20, topic=EVENTS)
    sender = site.send(settings)
    until(lambda: len(sequences(kafka, EVENTS)) == 20)
    until(sender.problem)
    assert TELEMETRY in site.log_lines[0]
    assert "fleetpulse init" in site.log_lines[0]
    make_topic(kafka, TELEMETRY, 2)
    all_arrive(sender)
    assert sorted(set(sequences(kafka))) == list(range(20))


def test_ending_in_an_outage_takes_less_than_3_s_leaves_no_thread_and_the_spool_as_it_was(
    own_broker: Broker, site: Site
) -> None:
    settings = make_topics(own_broker)
    site.add(10)
    sender = site.send(settings, ClientTimeouts())
    all_arrive(sender)
    own_broker.freeze()
    site.add(1000)
    sender.wake()
    until(lambda: sender.dispatcher.in_flight > 0)
    began = time.monotonic()
    sender.close()
    assert time.monotonic() - began < 3
    assert threads() == []
    own_broker.thaw()
    again = site.send(settings)
    all_arrive(again)
    assert again.dispatcher.sent == 1000
    assert sorted(set(sequences(own_broker))) == list(range(1010))


@pytest.mark.slow
def test_a_wrong_password_is_reported_as_such_and_works_once_its_file_is_fixed(
    secure_kafka: Broker, site: Site, tmp_path: Path
) -> None:
    right = make_topics(secure_kafka)
    assert right.password_file is not None
    password = tmp_path / "password"
    password.write_text("wrong")
    site.add(10)
    sender = site.send(kafka_of(secure_kafka, password_file=password))
    until(sender.problem)
    assert "is refused" in site.log_lines[0]
    password.write_text(right.password_file.read_text())
    all_arrive(sender)
    assert set(sequences(secure_kafka)) == set(range(10))


def test_a_fixed_password_file_works_immediately_despite_the_retry_interval_of_the_client(
    secure_kafka: Broker, site: Site, tmp_path: Path
) -> None:
    right = make_topics(secure_kafka)
    assert right.password_file is not None
    password = tmp_path / "password"
    password.write_text("wrong")
    site.add(10)
    sender = site.send(kafka_of(secure_kafka, password_file=password), ClientTimeouts(blocked=600.0))
    until(sender.problem)
    password.write_text(right.password_file.read_text())
    all_arrive(sender, 10.0)
    until(lambda: sender.problem() is None)
    assert [("is refused" in line, "again" in line) for line in site.log_lines] == [(True, False), (False, True)]
    assert sender.clients == 2


def test_credentials_that_cannot_be_read_are_an_error_before_anything_starts(site: Site, tmp_path: Path) -> None:
    wanting = Kafka(security_protocol="SASL_SSL", username="u", password_file=tmp_path / "absent")
    with pytest.raises(ConfigError, match="password_file"):
        SpoolSender(site.folder, ["n0"], wanting, site.log_lines.append)
    assert threads() == []


def test_a_sender_that_was_never_started_can_be_closed(site: Site) -> None:
    sender = SpoolSender(site.folder, ["n0"], Kafka(), site.log_lines.append)
    sender.close()
    assert threads() == []


def test_the_private_attributes_for_ending_the_client_exist(kafka: Address) -> None:
    """kafka-python is pinned; another version must pass this, or stalled clients could not be ended."""
    client = KafkaSendClient(kafka_of(kafka), "test", SHORT, SimpleQueue())
    assert client.is_alive
    assert client._producer._sender.is_alive()
    assert callable(client._producer._sender.force_close)
    assert client._producer._metadata.brokers() is not None
    client.close(force=True)
    assert not client._producer._sender.is_alive()
    assert not client.is_alive


def test_unreadable_messages_do_not_count_as_sent(kafka: Address, site: Site) -> None:
    site.add(3)
    (segment,) = site.folder.rglob("*.seg")
    away = segment.with_suffix(".away")
    segment.rename(away)
    segment.symlink_to(segment)  # a symlink loop: it cannot be opened
    sender = site.send(make_topics(kafka))
    ticket = sender.request_flush()
    until(sender.problem)
    assert not sender.is_flushed(ticket)
    away.replace(segment)  # atomically: a segment that is absent for a moment is a gap, and counts as flushed
    until(lambda: sender.is_flushed(ticket))
    assert sender.dispatcher.sent == 3
