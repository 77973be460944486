"""A password changed on the brokers: reported as such, and resolved as soon as the file has the new one."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kafka.admin import ScramMechanism, UserScramCredentialUpsertion

from agents.node.spool.spool import Spool
from agents.node.uplink.client import ClientTimeouts
from agents.node.uplink.sender import SpoolSender
from pipeline.model.records import TELEMETRY
from pipeline.transport import wire
from tests.kafka_broker import Broker
from tests.kafka_clients import SECONDS, admin_of, make_topics, read
from tests.kafka_security import ITERATIONS, Security

TIMES = ClientTimeouts(delivery=2.0, request=1.0, block=0.3, blocked=600.0)
"""Deliveries fail within seconds; unless the file is fixed, no client is replaced because it cannot send."""


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end, f"not within {SECONDS} s"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.refusals
def test_a_password_changed_on_the_brokers_is_reported_as_refused_and_a_fixed_file_works_immediately(
    new_broker: Callable[..., Broker], tmp_path: Path
) -> None:
    security, log_lines = Security(tmp_path / "security"), list[str]()
    broker = new_broker("changing", security=security)
    kafka = make_topics(broker)
    change = UserScramCredentialUpsertion(security.username, ScramMechanism.SCRAM_SHA_512, "another", ITERATIONS)
    spool = Spool(tmp_path / "spool", "n0", TELEMETRY)
    sender = SpoolSender(tmp_path / "spool", ["n0"], kafka, log_lines.append, timeouts=TIMES)

    def add() -> None:
        for _ in range(20):
            spool.append(b"x" * 1000, wire.TELEMETRY_KIND, spool.next)
        spool.sync()
        sender.wake()

    sender.start()
    try:
        add()
        until(lambda: sender.dispatcher.sent == 20)
        with admin_of(broker) as admin:
            assert admin.alter_user_scram_credentials([change]) == {security.username: None}
        broker.kill()
        add()
        broker.start()
        until(lambda: "is refused" in (sender.problem() or ""))
        time.sleep(2 * TIMES.delivery)  # deliveries fail, which must not be reported as another cause
        assert "is refused" in (sender.problem() or "")
        security.password_file.write_text("another")
        fixed = time.monotonic()
        until(lambda: sender.dispatcher.sent >= 40)
        assert time.monotonic() - fixed < 5.0
        until(lambda: sender.problem() is None)
        assert not [line for line in log_lines if "Expiring" in line or "Timeout" in line]
        assert len({wire.unpack_envelope(record.value).sequence for record in read(broker, TELEMETRY)}) == 40
    finally:
        sender.close()
        spool.close()
