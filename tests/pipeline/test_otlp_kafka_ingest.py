"""Other senders' telemetry through a real Kafka: written by any client, or by the gateway; stored once."""

from __future__ import annotations

import http.client
import time
from pathlib import Path

import pytest

from agents.gateway.gateway import RunningGateway
from pipeline.config import sections
from pipeline.config.sections import Config, Kafka
from pipeline.ingest.ingest import Ingest
from pipeline.ingest.offsets import load_offsets
from pipeline.model.records import OTLP, TELEMETRY
from pipeline.store.database import Database
from pipeline.store.devices import Devices
from pipeline.transport.kafka import KafkaTransport
from tests.kafka_broker import Address
from tests.kafka_clients import delete_topics, make_topics, write
from tests.pipeline.otlp_requests import T0_NS, gpu_request
from tests.until import until

TIMES = "SELECT DISTINCT (epoch_us(time) - 1780000000000000) // 1000000, count(*) FROM gpu GROUP BY 1 ORDER BY 1"


def request(second: int) -> bytes:
    return gpu_request(time=T0_NS + second * 10**9)


class Reader:
    """A store that reads the brokers; closed at the end of the block."""

    def __init__(self, folder: Path, kafka: Kafka) -> None:
        self.database = Database(folder / "store.duckdb")
        self.transport = KafkaTransport(kafka, load_offsets(self.database.connection))
        devices = Devices(self.database.connection)
        self.ingest = Ingest(self.database, self.transport, devices, lambda: time.time_ns() // 1000)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.transport.close()
        self.database.close()

    def wait_for(self, wanted: list[tuple[int, int]]) -> None:
        """Reads until the store has these (second, rows)."""

        def holds() -> bool:
            self.ingest.step()
            return bool(self.database.connection.execute(TIMES).fetchall() == wanted)

        until(holds, 60.0)


@pytest.mark.parametrize("codec", [None, "gzip"])
def test_records_of_any_client_are_stored_once_across_a_restart(
    kafka: Address, tmp_path: Path, codec: str | None
) -> None:
    settings = make_topics(kafka)
    write(kafka, OTLP, [request(0), b"\xff\xff", request(1)], compression_type=codec)
    with Reader(tmp_path, settings) as reader:
        reader.wait_for([(0, 2), (1, 2)])
        letters = reader.database.connection.execute("SELECT topic, rule FROM dead_letter").fetchall()
        assert letters == [(OTLP, "wire")]
    write(kafka, OTLP, [request(2)], compression_type=codec)
    with Reader(tmp_path, settings) as reader:
        reader.wait_for([(0, 2), (1, 2), (2, 2)])


def test_without_the_topic_the_others_are_read_and_the_brokers_are_no_problem(kafka: Address, tmp_path: Path) -> None:
    settings = make_topics(kafka)
    delete_topics(kafka, [OTLP])
    with Reader(tmp_path, settings) as reader:
        until(
            lambda: reader.ingest.step() is None and TELEMETRY in {p.topic for p in reader.transport.partitions()}, 60.0
        )
        assert reader.transport.find_problem() is None


def test_what_the_gateway_acknowledged_arrives_through_kafka_once(kafka: Address, tmp_path: Path) -> None:
    settings = make_topics(kafka)
    config = Config(
        spool=sections.Spool(tmp_path / "spool", free_bytes=0),
        gateway=sections.Gateway(port=0, node="gw"),
        pipeline=sections.Pipeline(transport="kafka"),
        kafka=settings,
    )
    gateway = RunningGateway(config, lambda text: None)
    try:
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=20)
        for second in range(3):
            connection.request("POST", "/v1/metrics", request(second), {"Content-Type": "application/x-protobuf"})
            answer = connection.getresponse()
            assert (answer.status, answer.read()) == (200, b"")
        connection.close()
        with Reader(tmp_path, settings) as reader:
            reader.wait_for([(0, 2), (1, 2), (2, 2)])
            assert reader.database.connection.execute("SELECT count(*) FROM gaps").fetchall() == [(0,)]
    finally:
        gateway.close()
