"""What a node costs the pipeline while everything runs live: CPU per node-second, nodes per core, memory, commits.

    python -m benchmarks.live [--nodes 8 64 256 1024] [--interval 1] [--seconds 60] [--linger 5] [--partitions 32]

The stream of a real agent (benchmarks/agent_stream.py: 8 GPUs, 9 NICs, 144 NVLinks, 996 values a reading) is cloned to
N nodes and sent in real time through a real Kafka broker to `fleetpulse pipeline`, with all detectors. One job runs on
each 64 nodes. After a warm-up the CPU of all processes of the pipeline is taken over `seconds`. Messages are encoded
before, and broker and sender are other processes. --interval 10 is a fleet whose agents read everything ten times less
often: as many values a reading, a tenth of the values a second.

"in real time" means that the newest row is at most LATE_S old at the end, and that every row sent has been stored.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agents.node.joining import TickJoiner
from benchmarks.agent_stream import AgentStream
from benchmarks.kafka import BATCH_BYTES, PATIENT, make_topics
from benchmarks.processes import Session, wait_for
from benchmarks.watched import Api
from pipeline.config.sections import Kafka
from pipeline.model.records import EVENTS, SECOND, TELEMETRY, Batch, Event, EventBatch, Origin
from pipeline.transport import kafka_clients, wire
from tests.kafka_broker import Broker, BrokerError, missing

GPUS = 8
NODES_PER_JOB = 64
LATE_S = 20.0
"""s that the newest row may be old: linger, a frame and the wait of a commit, with as much again. Chosen."""
READY_S = 90.0  # for the start of the pipeline, which compiles its loops the first time; chosen
WARM_S = 30  # before the measurement: the first messages make columns, devices and groups; chosen
LEAD_S = 5  # between the end of preparation and the first reading; chosen
PLENTY_S = 120.0  # for a broker to accept all messages; chosen


@dataclass(frozen=True)
class Sent:
    """One message, due at `time` (us)."""

    time: int
    topic: str
    node: str
    value: bytes


@dataclass(frozen=True)
class Cost:
    """What `nodes` nodes cost, per node and second. lag: s since the newest row.   missing: GPU rows not stored."""

    nodes: int
    milliseconds: float
    memory: float
    commits: float
    lag: float
    missing: int

    def line(self) -> str:
        """Returns the figures in words."""
        per_core = 1e3 / self.milliseconds
        kept = "in real time" if self.lag <= LATE_S and not self.missing else f"LATE: {self.missing} rows missing"
        return (
            f"{self.nodes:6d} nodes: {self.milliseconds:7.3f} ms of CPU per node and second, {per_core:6.0f} nodes a "
            f"core, {self.memory:6.0f} MiB, {self.commits:.2f} commits a second, newest row {self.lag:.1f} s old, "
            f"{kept}"
        )


def free_port() -> int:
    """Returns a port that nothing listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def node_name(number: int) -> str:
    """Returns the name of a node."""
    return f"n{number:05d}"


def inventory(number: int, entities: dict[str, tuple[str, ...]], time: int) -> EventBatch:
    """Returns what an agent says of its node, and the start of the job on it with its ranks."""
    name, job = node_name(number), f"bench-{number // NODES_PER_JOB}"
    node = f"node:{name}"
    known: dict[str, dict[str, object]] = {node: {"parents": [f"rack:r{number // 16}"], "attributes": {}}}
    for names in entities.values():
        for entity in (e.replace("NODE", name) for e in names):
            parents = (
                [f"gpu:{'.'.join(entity.partition(':')[2].split('.')[:2])}"] if entity.startswith("nvlink") else []
            )
            known.setdefault(entity, {"parents": [*parents, node], "attributes": {}})
    for gpu in range(GPUS):
        rank = f"rank:{job}.{number % NODES_PER_JOB * GPUS + gpu}"
        known[rank] = {"parents": [f"gpu:{name}.{gpu}", f"job:{job}"], "attributes": {}}
    events = [Event(time, node, "inventory", {"entities": known})]
    if number % NODES_PER_JOB == 0:
        events.append(Event(time, f"job:{job}", "job_start", {}))
    return EventBatch(Origin("bench", name, bytes(16)), tuple(events))


def messages_of(number: int, stream: AgentStream, first: int, interval: int, linger: float) -> Iterator[Sent]:
    """Yields the messages of a node in their order. first: time of its first reading (s)."""
    name, epoch = node_name(number), (number + 1).to_bytes(16, "big")
    start = first * SECOND
    events = wire.encode_events(inventory(number, stream.entities, start))
    yield Sent(start, EVENTS, name, wire.seal(events, wire.EVENTS_KIND, epoch, 0, start))
    encoder, joiner = wire.Encoder(), TickJoiner(round(linger * SECOND), interval * SECOND)
    sequence = 0
    for reading, batch in enumerate(stream.batches(name, first)):
        spread = Batch(batch.origin, np.array([start + reading * interval * SECOND]), batch.blocks)
        for done in joiner.add_tick(spread):
            body, at = encoder.encode(done), int(done.times[-1])
            yield Sent(at, TELEMETRY, name, wire.seal(body, wire.TELEMETRY_KIND, epoch, sequence, at))
            sequence += 1


def prepare(nodes: int, readings: int, interval: int, linger: float) -> tuple[int, list[Sent]]:
    """Returns the time of the first reading (s), and all messages in the order of their times.

    They are encoded for a moment in the future, whose distance the first nodes give.
    """
    stream = AgentStream(readings)
    began = time.monotonic()
    list(messages_of(0, stream, 0, interval, linger))
    each = time.monotonic() - began
    first = int(time.time() + 1.5 * each * nodes + LEAD_S)
    first += -first % 10
    sent = [message for n in range(nodes) for message in messages_of(n, stream, first, interval, linger)]
    return first, sorted(sent, key=lambda message: message.time)


def send(kafka: Kafka, messages: Sequence[Sent]) -> None:
    """Sends each message at its time."""
    producer = kafka_clients.create_producer(kafka, "benchmark", batch_size=BATCH_BYTES, linger_ms=20)
    for message in messages:
        if (ahead := message.time / SECOND - time.time()) > 0:
            time.sleep(ahead)
        producer.send(message.topic, key=message.node.encode(), value=message.value)
    producer.flush(PLENTY_S)
    producer.shut_down(5.0)


def configure(folder: Path, kafka: Kafka, port: int) -> Path:
    """Writes the configuration of the pipeline."""
    path = folder / "fleetpulse.toml"
    path.write_text(
        f"[site]\nname = 'bench'\n[pipeline]\ntransport = 'kafka'\n"
        f"[kafka]\nbootstrap_servers = '{kafka.bootstrap_servers}'\n"
        f"partitions = {kafka.partitions}\n[api]\nport = {port}\n[store]\npath = '{folder / 'store.duckdb'}'\n"
    )
    return path


def usage(session: Session) -> tuple[float, float]:
    """Returns CPU seconds and MiB of the processes of the pipeline."""
    costs = session.costs().values()
    return sum(cost.cpu for cost in costs), sum(cost.memory for cost in costs)


def measure(nodes: int, options: argparse.Namespace, folder: Path) -> Cost:
    """Runs one fleet live and returns its cost."""
    readings = (WARM_S + options.seconds) // options.interval + 1
    with Broker(folder / "broker", heap="512m", properties=PATIENT) as broker:
        kafka, port = Kafka(bootstrap_servers=broker.bootstrap, partitions=options.partitions), free_port()
        make_topics(kafka)
        config, api = configure(folder, kafka, port), Api(port)
        words = [sys.executable, "-m", "fleetpulse", "pipeline", "--config", str(config)]
        session = Session(words, dict(os.environ), Path.cwd(), folder / "pipeline.log")
        try:
            wait_for(lambda: api.ready()[0], READY_S, "the API of the pipeline")
            first, messages = prepare(nodes, readings, options.interval, options.linger)
            sender = os.fork()
            if not sender:
                send(kafka, messages)
                os._exit(0)
            time.sleep(max(0.0, first + WARM_S - time.time()))
            (before, _), start, commits = (
                usage(session),
                time.monotonic(),
                api.metric("fleetpulse_ingest_commits_total"),
            )
            time.sleep(options.seconds)
            (after, memory), span = usage(session), time.monotonic() - start
            rate = (api.metric("fleetpulse_ingest_commits_total") - commits) / span
            newest = api.number("SELECT epoch_us(max(time)) FROM gpu")
            lag = time.time() - newest / SECOND
            os.waitpid(sender, 0)
            rows = nodes * GPUS * readings
            stored = lambda: api.number("SELECT count(*) FROM gpu")  # noqa: E731 - read twice
            wait_for(lambda: stored() >= rows or time.time() > first + WARM_S + options.seconds + LATE_S, 300, "rows")
            return Cost(nodes, 1e3 * (after - before) / span / nodes, memory, rate, lag, rows - stored())
        finally:
            session.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--interval", type=int, default=1, help="s between two readings")
    parser.add_argument("--seconds", type=int, default=60, help="of the measurement")
    parser.add_argument("--linger", type=float, default=5.0, help="s of ticks in a message")
    parser.add_argument("--partitions", type=int, default=32)
    options = parser.parse_args()
    logging.getLogger("kafka").setLevel(logging.ERROR)
    if lacking := missing():
        sys.exit(f"benchmarks.live: {lacking}: run 'make parts'")
    for nodes in options.nodes:
        with tempfile.TemporaryDirectory() as name:
            print(measure(nodes, options, Path(name)).line(), flush=True)


if __name__ == "__main__":
    try:
        main()
    except BrokerError as error:
        sys.exit(f"benchmarks.live: {error}")
