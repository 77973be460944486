"""Telemetry as OTLP in Kafka's topic `otlp_metrics`, keyed by node, and unreachable brokers."""

from __future__ import annotations

import subprocess
import sys
import time as clock_time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from agents.node.agent import open_telemetry
from agents.otlp.delivery import KafkaDelivery
from pipeline.config.sections import Config, Opentelemetry, Pipeline
from pipeline.model.errors import Retryable
from pipeline.model.records import OTLP, SECOND, Batch, Block, Origin
from tests.kafka_broker import Address, reserve_port
from tests.kafka_clients import delete_topics, make_topics, read

ROOT = Path(__file__).parents[2]
T0 = 1_767_225_600 * SECOND


def until(holds: Callable[[], object], seconds: float = 30.0) -> None:
    end = clock_time.monotonic() + seconds
    while not holds():
        assert clock_time.monotonic() < end, "it did not come to pass"
        clock_time.sleep(0.01)


def test_telemetry_is_in_the_topic_keyed_by_its_node(kafka: Address) -> None:
    settings = Opentelemetry(kafka=True, interval=1.0)
    config = Config(opentelemetry=settings, pipeline=Pipeline(transport="kafka"), kafka=make_topics(kafka))
    telemetry = open_telemetry(config, Origin("dc1", "n7", bytes(16)), lambda *_: None)
    assert telemetry is not None
    for i in range(3):
        block = Block("gpu", ("gpu:n7.0",), {"gpu.power": np.array([[100 + i]], np.float32)})
        telemetry.add_batch(Batch(Origin("dc1", "n7", bytes(16)), np.array([T0 + i * SECOND]), (block,)))
    until(lambda: len(read(kafka, OTLP)) == 3)
    telemetry.close(5.0)
    records = read(kafka, OTLP)
    requests = [ExportMetricsServiceRequest.FromString(record.value) for record in records]
    metrics = [request.resource_metrics[0].scope_metrics[0].metrics[0] for request in requests]
    assert {record.key for record in records} == {b"n7"}
    assert [(m.name, m.gauge.data_points[0].as_double) for m in metrics] == [("hw.power", 100 + i) for i in range(3)]


def test_a_missing_topic_is_named_in_the_error(kafka: Address) -> None:
    configuration = make_topics(kafka)
    delete_topics(kafka, [OTLP])
    broker = KafkaDelivery(configuration, "n1")
    with pytest.raises(Retryable, match=f"topic {OTLP}: UnknownTopic"):
        broker(b"x")
    broker.close()


@pytest.mark.slow
def test_unreachable_brokers_are_retried_later() -> None:
    program = (
        "import sys; from agents.otlp.delivery import KafkaDelivery; from pipeline.config.sections import Kafka\n"
        "from pipeline.model.errors import Retryable\n"
        "broker = KafkaDelivery(Kafka(bootstrap_servers=sys.argv[1]), 'n1')\n"
        "try: broker(b'x')\n"
        "except Retryable as error: print(error)\n"
        "broker.close(); broker.close()"
    )  # in a separate process: kafka-python leaves sockets of refused connections to the garbage collector
    with reserve_port() as port:
        words = [sys.executable, "-c", program, f"127.0.0.1:{port.getsockname()[1]}"]
        ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.startswith(f"topic {OTLP}: ")
