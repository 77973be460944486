"""The rate at which a backlog is sent to a real broker."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from agents.node.spool.spool import Spool
from agents.node.uplink.sender import SpoolSender
from agents.node.uplink.streams import BURST_S, CatchUpLimiter
from pipeline.model.records import TELEMETRY
from pipeline.transport import wire
from tests.kafka_broker import Address
from tests.kafka_clients import make_topics, read

pytestmark = pytest.mark.refusals
SECONDS, MULTIPLE = 300, 50.0
LIMIT_S = 30.0  # chosen: three times what sending takes, for a busy machine


def test_a_backlog_is_sent_completely_and_at_the_configured_multiple_of_its_time(
    kafka: Address, tmp_path: Path
) -> None:
    with Spool(tmp_path, "n0", TELEMETRY) as spool:
        for second in range(SECONDS):
            spool.append(bytes(2000), wire.TELEMETRY_KIND, 1_800_000_000_000_000 + second * 1_000_000)
    sender = SpoolSender(tmp_path, ["n0"], make_topics(kafka), lambda _: None, limiter=CatchUpLimiter(MULTIPLE))
    began = time.monotonic()
    sender.start()
    try:
        ticket = sender.request_flush()
        while not sender.is_flushed(ticket):
            assert time.monotonic() - began < LIMIT_S
            time.sleep(0.01)  # lets the broker run
        took = time.monotonic() - began
    finally:
        sender.close()
    assert took > SECONDS / MULTIPLE - BURST_S - 0.5
    assert [wire.open_envelope(record.value).sequence for record in read(kafka, TELEMETRY)] == list(range(SECONDS))
