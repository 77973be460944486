"""The agent with Kafka: the same loop, and a sender."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agents.collectors.host.host import Host
from agents.node.agent import Agent
from agents.node.uplink.sender import SpoolSender
from agents.node.uplink.uplink import open_uplink
from pipeline.config.sections import Agent as AgentSection
from pipeline.config.sections import Config, Kafka, Pipeline, Spool
from pipeline.model.records import EVENTS, TELEMETRY
from pipeline.transport import wire
from tests.kafka_broker import Address, Broker, reserve_port
from tests.kafka_clients import make_topics, read

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.refusals


def config(folder: Path, kafka: Kafka, **spool: int) -> Config:
    section = AgentSection("n1", 0.05, linger=0.0)  # many small messages
    return Config(agent=section, spool=Spool(folder, **spool), kafka=kafka, pipeline=Pipeline(transport="kafka"))


@pytest.fixture
def unreachable_kafka() -> Iterator[Kafka]:
    """Unreachable brokers."""
    with reserve_port() as port:
        yield Kafka(bootstrap_servers=f"127.0.0.1:{port.getsockname()[1]}")


def until(holds: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def running(agent: Agent) -> Iterator[SpoolSender]:
    """The agent's loop in a thread, and its sender."""
    stop = threading.Event()
    loop = threading.Thread(target=agent.run, args=(stop,))
    loop.start()
    try:
        assert agent.uplink is not None
        yield agent.uplink
    finally:
        stop.set()
        loop.join()


@pytest.mark.walk
def test_readings_of_the_collectors_are_in_the_topics(kafka: Address, tmp_path: Path) -> None:
    log = io.StringIO()
    with running(Agent(config(tmp_path, make_topics(kafka)), [Host()], log=log)) as sender:
        until(lambda: sender.dispatcher.sent > 5)
    batches = [wire.decode(record.value) for record in read(kafka, TELEMETRY)]
    assert len(batches) > 3
    assert {batch.origin.node for batch in batches} == {"n1"}
    kinds = {event.kind for record in read(kafka, EVENTS) for event in wire.decode_events(record.value).events}
    assert {"inventory", "collector"} <= kinds
    assert "kafka:" not in log.getvalue()


@pytest.mark.slow
def test_losses_of_the_spool_in_an_outage_are_sent_as_an_event(own_broker: Broker, tmp_path: Path) -> None:
    settings, log = make_topics(own_broker), io.StringIO()
    own_broker.kill()

    def gaps() -> list[dict[str, object]]:
        found = [event for record in read(own_broker, EVENTS) for event in wire.decode_events(record.value).events]
        return [dict(event.data) for event in found if event.kind == "gap" and event.entity == "node:n1"]

    with running(Agent(config(tmp_path, settings, max_bytes=4000), [Host()], log=log)):
        until(lambda: "losing data" in log.getvalue())
        until(lambda: "kafka: topic" in log.getvalue())
        own_broker.start()
        until(gaps, 60)
        until(lambda: "kafka: messages arrive again" in log.getvalue(), 60)
    assert gaps()[0]["cause"] == "spool full"
    assert gaps()[0]["topic"] in (TELEMETRY, EVENTS)
    log_lines = [line for line in log.getvalue().splitlines() if " kafka: " in line]
    assert any("connection refused" in line for line in log_lines), log_lines
    assert len(log_lines) <= 4, log_lines  # a line per change of the cause, not one per try


PROGRAM = """
import sys
from pathlib import Path
from agents.node.agent import run
from pipeline.config.sections import Agent, Config, Kafka, Pipeline, Spool
spool, brokers = Path(sys.argv[1]), Kafka(bootstrap_servers=sys.argv[2])
sys.exit(run(Config(agent=Agent("n1", 0.05), spool=Spool(spool), kafka=brokers, pipeline=Pipeline(transport="kafka"))))
"""


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
def test_sigterm_in_an_outage_ends_the_agent_within_2_s_and_its_log_is_one_line_per_change(
    frozen: bool, own_broker: Broker, tmp_path: Path
) -> None:
    make_topics(own_broker)
    own_broker.freeze() if frozen else own_broker.kill()
    words = [sys.executable, "-c", PROGRAM, str(tmp_path), own_broker.bootstrap]
    with subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "kafka:" in line:
                break
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        lines += process.stderr.readlines()
        assert process.wait() == 0, "".join(lines)
        assert time.monotonic() - began < 6  # two seconds, plus the interpreter's end on a busy machine
    if frozen:
        own_broker.thaw()
    assert sum("kafka:" in line for line in lines) == 1, lines
    # beside other tests: the disk of a busy machine may be slow for a while, also for the last messages, and jobs of a
    # real Slurm start and end; the number of GPUs is given at each start
    slow_disk = (" disk: ", " spool: disk does not respond")
    known = (" collector ", " agent: ", " kafka: ", " gpu_count ", " job_start ", " job_end ", *slow_disk)
    assert all(any(word in line for word in known) for line in lines), "".join(lines)
    assert sum(any(word in line for word in slow_disk) for line in lines) <= 3, "".join(lines)


def test_with_transport_spool_nothing_of_kafka_is_loaded(tmp_path: Path) -> None:
    program = PROGRAM.split("sys.exit")[0] + (
        "from agents.node.agent import Agent as A\n"
        "A(Config(agent=Agent('n1'), spool=Spool(spool)), []).close()\n"
        "print('kafka' in sys.modules)"
    )
    words = [sys.executable, "-c", program, str(tmp_path), "h:1"]
    assert subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout == "False\n"


def test_the_transport_decides_whether_there_is_a_sender(unreachable_kafka: Kafka, tmp_path: Path) -> None:
    settings = config(tmp_path, unreachable_kafka)
    assert open_uplink(settings, "spool", ["n1"], print, "agent") is None
    sender = open_uplink(settings, "kafka", ["n1"], print, "agent")
    assert sender is not None
    sender.close()
