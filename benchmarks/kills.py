"""kill -9 of the pipeline while it commits, over a real broker: nothing lost, nothing twice.

    python -m benchmarks.kills [--rounds 1000] [--broker-every 25] [--seed 1]

Starts a real broker and `fleetpulse pipeline`, and sends messages of 8 nodes at 50 a second each, through spools and
the agent's sender, for as long as it takes. A round: wait until new rows are stored, wait up to 2.5 s more, kill. Every
`broker-every` rounds the broker is killed too, and started again. So rounds do not depend on the speed of the machine.
At the end every message must be one row. SIGTERM then ends the pipeline; its wall and CPU time are printed. Exit code 1
if a message is missing or stored twice, or a pipeline stores nothing for 180 s. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from agents.node.spool.spool import Spool
from agents.node.uplink.sender import SpoolSender
from benchmarks.outage import CONFIG, LENIENT, command, free_port
from benchmarks.watched import Api
from pipeline.config.sections import Kafka
from pipeline.model.records import SECOND, TELEMETRY
from pipeline.transport import wire
from tests.kafka_broker import Broker, BrokerError, missing
from tests.pipeline.kafka_pipeline import INTERVAL_S, body

NODES = tuple(f"n{number}" for number in range(8))
START_S = 180.0  # chosen: a start takes 4 s on two idle cores
MORE_S = 2.5  # chosen: longer than a commit waits for more rows
DRAIN_S = 300.0
END_S = 60.0
STORED = "SELECT count(*) FROM gpu"
DISTINCT = "SELECT count(DISTINCT (entity, temperature)) FROM gpu"
HIGHEST = "SELECT sum(highest) FROM (SELECT max(temperature)::BIGINT + 1 AS highest FROM gpu GROUP BY entity)"
GAPS = "SELECT coalesce(sum(next_sequence - first_sequence), 0) FROM gaps"


class Senders:
    """Writes messages of all nodes until it is stopped; each has the sequence of the message as its temperature."""

    def __init__(self, folder: Path, kafka: Kafka) -> None:
        self.spools = {node: Spool(folder, node, TELEMETRY, free_bytes=0) for node in NODES}
        self._sender = SpoolSender(folder, NODES, kafka, lambda text: print(f"agent: {text}", flush=True))
        self._start = time.time_ns() // 1000 - 60 * SECOND
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write, name="writer")

    def start(self) -> None:
        self._sender.start()
        self._thread.start()

    def _write(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            for node, spool in self.spools.items():
                spool.append(body(node, self._start, spool.next), wire.TELEMETRY_KIND, time.time_ns() // 1000)
                spool.sync()
            self._sender.wake()

    def finish(self) -> int:
        """Stops writing; returns the messages once the brokers have all. Raises SystemExit if they do not."""
        self._stop.set()
        self._thread.join()
        ticket, until = self._sender.request_flush(), time.monotonic() + DRAIN_S
        while not self._sender.is_flushed(ticket):
            if time.monotonic() > until:
                sys.exit(f"benchmarks.kills: not sent within {DRAIN_S:g} s: {self._sender.problem()}")
            time.sleep(0.1)
        return sum(spool.next for spool in self.spools.values())

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._sender.close()
        for spool in self.spools.values():
            spool.close()


@dataclass
class Pipeline:
    """One `fleetpulse pipeline` at a time."""

    folder: Path
    api: Api
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environ = os.environ | {"FLEETPULSE_PARENT": str(os.getpid())}
        with open(self.folder / "pipeline.log", "ab") as log:
            self.process = subprocess.Popen(command(self.folder, "pipeline"), stdout=log, stderr=log, env=environ)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def count(self, query: str) -> int:
        """Returns the number of a query; -1 while nothing answers."""
        try:
            return self.api.number(query)
        except (OSError, KeyError, IndexError):
            return -1

    def wait_for(self, query: str, least: int, seconds: float) -> int:
        """Returns the number of a query once it is at least `least`, or after `seconds`."""
        until, found = time.monotonic() + seconds, -1
        while found < least and time.monotonic() < until:
            found = self.count(query)
            time.sleep(0.1)
        return found

    def end(self) -> tuple[float, float]:
        """Sends SIGTERM; returns wall and CPU seconds until the process is gone."""
        assert self.process is not None
        begun, before = time.monotonic(), self._cpu()
        used = before
        self.process.send_signal(signal.SIGTERM)
        while self.process.poll() is None and time.monotonic() < begun + END_S:
            with contextlib.suppress(OSError):
                used = self._cpu()
            time.sleep(0.02)
        self.kill()
        return time.monotonic() - begun, used - before

    def _cpu(self) -> float:
        assert self.process is not None
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_rounds(pipeline: Pipeline, broker: Broker, rounds: int, broker_every: int, rng: random.Random) -> None:
    """Kills the pipeline `rounds` times, each time after new rows. Raises SystemExit if it stores nothing."""
    stored, begun = 0, time.monotonic()
    pipeline.start()
    for number in range(1, rounds + 1):
        found = pipeline.wait_for(STORED, stored + 1, START_S)
        if found <= stored:
            sys.exit(f"benchmarks.kills: round {number}: no new row within {START_S:g} s\n{tail(pipeline.folder)}")
        stored = found
        time.sleep(rng.uniform(0, MORE_S))
        pipeline.kill()
        if broker_every and number % broker_every == 0:
            broker.kill()
            broker.start()
        pipeline.start()
        if number % 10 == 0 or number == rounds:
            print(f"{number} rounds, {stored} rows stored, {time.monotonic() - begun:.0f} s", flush=True)


def tail(folder: Path) -> str:
    """Returns the end of the pipeline's log."""
    return (folder / "pipeline.log").read_text(errors="replace")[-2000:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--broker-every", type=int, default=25, help="rounds between two kills of the broker; 0: none")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if lacking := missing():
        sys.exit(f"benchmarks.kills: {lacking}: run 'make parts'")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fleetpulse-kills-")))
        broker = stack.enter_context(Broker(folder / "broker", properties=LENIENT))
        port = free_port()
        (folder / "fleetpulse.toml").write_text(CONFIG.format(folder=folder, bootstrap=broker.bootstrap, port=port))
        subprocess.run(command(folder, "init"), check=True, capture_output=True)
        senders = Senders(folder / "spool", Kafka(bootstrap_servers=broker.bootstrap))
        stack.callback(senders.close)
        pipeline = Pipeline(folder, Api(port))
        stack.callback(pipeline.kill)
        senders.start()
        run_rounds(pipeline, broker, given.rounds, given.broker_every, random.Random(given.seed))
        sent = senders.finish()
        stored = pipeline.wait_for(STORED, sent, DRAIN_S)
        distinct, highest, gaps = (pipeline.count(query) for query in (DISTINCT, HIGHEST, GAPS))
        wall, used = pipeline.end()
        found = f"{sent} sent, {stored} stored, {distinct} distinct, {highest} by sequence, {gaps} in gaps"
        print(f"{given.rounds} kills: {found}")
        print(f"SIGTERM: {wall:.2f} s, {used:.2f} CPU s")
        if not sent == stored == distinct == highest or gaps:
            sys.exit("benchmarks.kills: a message is missing or stored twice")


if __name__ == "__main__":
    try:
        main()
    except BrokerError as error:
        sys.exit(f"benchmarks.kills: {error}")
