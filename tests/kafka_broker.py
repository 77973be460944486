"""A real Apache Kafka 4.3.1 on loopback: one JVM that is broker and KRaft controller, for tests and benchmarks.

    python3 tests/kafka_broker.py fetch    downloads the jars (Maven, once) and tests them
    python3 tests/kafka_broker.py run      starts a broker, prints its address, stops it on Ctrl-C

Needs Java 17 or newer and Maven: `make parts` installs both. Only the standard library is imported.
"""

from __future__ import annotations

import argparse
import base64
import fcntl
import functools
import hashlib
import os
import re
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tests.kafka_security import Security

HOST = "127.0.0.1"
POM = Path(__file__).with_name("kafka_broker_pom.xml")
OLDEST_JAVA = 17
"""Kafka 4's brokers are compiled for it."""
READY_S, STOP_S, FETCH_S = 60, 15, 900
"""Chosen: a start takes 1-4 s, a stop 0.5 s (3 s when the archive is written), the download 10-60 s."""
JVM = ("-Xms64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData", "-Djava.awt.headless=true")
"""Serial collector and first compiler only: the start-up time matters, not long-term throughput."""
STOPPED = (0, 128 + signal.SIGTERM)
"""Exit statuses of a JVM after a normal stop."""
LOGGING = """\
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = %d{HH:mm:ss.SSS} %p %c{1} %m%n
rootLogger.level = info
rootLogger.appenderRef.out.ref = out
"""
PROPERTIES: Mapping[str, str] = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    # one node: with more replicas, groups and transactions would never become ready
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "1",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    "auto.create.topics.enable": "false",
    "message.max.bytes": "8388608",
    "log.cleaner.dedupe.buffer.size": "2097152",  # 128 MB of heap by default
    "num.network.threads": "1",
    "num.io.threads": "2",
    "num.recovery.threads.per.data.dir": "1",
    # retention is checked each second, so that a test need not wait five minutes
    "log.retention.check.interval.ms": "1000",
    "log.initial.task.delay.ms": "1000",
    # a restarted broker is accepted when its former session ends: 12 s with the default of 9 s, 2 s with this
    "broker.session.timeout.ms": "1000",
    "broker.heartbeat.interval.ms": "100",
    "controller.quorum.election.timeout.ms": "100",
    "controller.quorum.election.backoff.max.ms": "100",
}


class BrokerError(Exception):
    """The broker is not available, or did not start; the text gives the reason."""


@functools.cache
def java_version() -> str:
    """Returns the output of `java -version`; empty without a recent enough Java."""
    if shutil.which("java") is None:
        return ""
    said = subprocess.run(["java", "-version"], capture_output=True, text=True).stderr
    found = re.search(r'version "(\d+)', said)
    return said if found and int(found[1]) >= OLDEST_JAVA else ""


def missing() -> str:
    """Returns the missing part without which no broker can start; empty if nothing is missing."""
    if not java_version():
        return f"no Java {OLDEST_JAVA} or newer"
    return "no Maven, and the jars were not fetched" if not _known_jars() and shutil.which("mvn") is None else ""


def _cache() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fleetpulse" / "kafka"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _jars_file() -> Path:
    return _cache() / f"{hashlib.sha256(POM.read_bytes()).hexdigest()[:12]}.classpath"


def _known_jars() -> str:
    with suppress(FileNotFoundError):
        found = _jars_file().read_text()
        if all(map(os.path.exists, found.split(os.pathsep))):
            return found
    return ""


def class_path() -> str:
    """Class path of the broker. The first caller downloads the jars; others wait for it. Raises BrokerError."""
    if not _known_jars():
        with open(_cache() / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _known_jars():
                _download(_jars_file())
    return _known_jars()


def _download(file: Path) -> None:
    part = file.with_suffix(f".{os.getpid()}")
    words = ["mvn", "-B", "-ntp", "-q", "-f", str(POM), "dependency:build-classpath", "-DincludeScope=runtime"]
    try:
        done = subprocess.run([*words, f"-Dmdep.outputFile={part}"], capture_output=True, text=True, timeout=FETCH_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BrokerError(f"the broker's jars cannot be fetched: {error}") from error
    if done.returncode:
        raise BrokerError(f"the broker's jars cannot be fetched; Maven's output: {(done.stdout + done.stderr)[-2000:]}")
    part.replace(file)


def reserve_port(port: int = 0) -> socket.socket:
    """Reserves a loopback port while the socket is open: bound, never listening.

    A JVM sets SO_REUSEADDR too and may therefore listen on it, before and after any restart.
    """
    out = socket.socket()
    out.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    out.bind((HOST, port))
    return out


class Address(Protocol):
    """Address of brokers: a Broker of ours, or external ones."""

    bootstrap: str
    security: Security | None


@dataclass
class External:
    """External brokers."""

    bootstrap: str
    security: Security | None = None


class Broker:
    """One broker with its folder and ports, which remain after its process ends: it can be killed and started again.

    `prefix` precedes `java` (e.g. `taskset -c 1`), `properties` override PROPERTIES, `log_dirs` may be elsewhere.
    """

    def __init__(
        self,
        folder: Path,
        *,
        heap: str = "256m",
        port: int = 0,
        properties: Mapping[str, str] | None = None,
        security: Security | None = None,
        log_dirs: Path | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.folder, self.security, self.prefix = folder.resolve(), security, tuple(prefix)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log_dirs = (log_dirs or self.folder / "data").resolve()
        self.process: subprocess.Popen[bytes] | None = None
        self._heap, self._jars = heap, class_path()
        self._ports = [reserve_port(port), reserve_port(), reserve_port()]
        self.port = self._ports[0].getsockname()[1]
        self.bootstrap = f"{HOST}:{self.port}"
        key = hashlib.sha256((java_version() + self._jars).encode()).hexdigest()[:12]
        self._archive = _cache() / f"{key}.jsa"
        self._next_archive = _cache() / f"{key}.{os.getpid()}.{secrets.token_hex(4)}.part"
        # one that starts with "-" would be read as an option
        self.cluster = "F" + base64.urlsafe_b64encode(os.urandom(16)).decode().rstrip("=")[1:]
        self.configure(properties or {})

    @property
    def controller(self) -> str:
        """Address of the broker's controller."""
        return f"{HOST}:{self._ports[2].getsockname()[1]}"

    def configure(self, more: Mapping[str, str]) -> None:
        """Writes server.properties; `more` overrides."""
        inside, controller = f"{HOST}:{self._ports[1].getsockname()[1]}", self.controller
        kind = "SASL_SSL" if self.security else "PLAINTEXT"
        lines = {
            **PROPERTIES,
            "controller.quorum.voters": f"1@{controller}",
            "listeners": f"CLIENTS://{self.bootstrap},INSIDE://{inside},CONTROLLER://{controller}",
            "advertised.listeners": f"CLIENTS://{self.bootstrap},INSIDE://{inside}",
            "listener.security.protocol.map": f"CLIENTS:{kind},INSIDE:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name": "INSIDE",
            "log.dirs": str(self.log_dirs),
            **(self.security.properties("clients") if self.security else {}),
            **more,
        }
        self._properties = self.folder / "server.properties"
        self._properties.write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
        (self.folder / "log4j2.properties").write_text(LOGGING)

    def __enter__(self) -> Broker:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def log(self) -> str:
        """The broker's log over all its starts."""
        with suppress(FileNotFoundError):
            return (self.folder / "server.log").read_text(errors="replace")
        return ""

    def start(self) -> None:
        """Starts or restarts the broker, and returns when requests are answered. Raises BrokerError."""
        if self.running():
            raise BrokerError(f"broker {self.bootstrap}: is running already")
        if not (self.log_dirs / "meta.properties").exists():
            self._format()
        tried = self._archive.exists()
        try:
            self._launch()
        except BrokerError:
            if not tried:
                raise
            self._archive.unlink(missing_ok=True)  # a damaged archive stops the JVM with SIGBUS: try again without it
            self._launch()

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def _java(self, *words: str) -> list[str]:
        logging = f"-Dlog4j2.configurationFile={self.folder / 'log4j2.properties'}"
        own = self.security.java_words() if self.security else []
        return [*self.prefix, "java", *JVM, *own, f"-Xmx{self._heap}", logging, "-cp", self._jars, *words]

    def _shared(self) -> str:
        """Returns the option to load the class archive (saves 1 s of a start), or to write it at the first stop."""
        if self._archive.exists():
            return f"-XX:SharedArchiveFile={self._archive}"
        return f"-XX:ArchiveClassesAtExit={self._next_archive}"

    def _format(self) -> None:
        shared = [self._shared()] if self._archive.exists() else []
        words = ["kafka.tools.StorageTool", "format", "-t", self.cluster, "-c", str(self._properties)]
        words += self.security.format_words() if self.security else []
        done = subprocess.run(self._java(*shared, *words), capture_output=True, text=True, cwd=self.folder)
        if done.returncode:
            raise BrokerError(f"broker {self.bootstrap}: formatting failed:\n{(done.stdout + done.stderr)[-3000:]}")

    def _launch(self) -> None:
        words = self._java(self._shared(), "kafka.Kafka", str(self._properties))
        with open(self.folder / "server.log", "ab") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log, cwd=self.folder, start_new_session=True)
        end = time.monotonic() + READY_S
        while not self.answers():
            if not self.running() or time.monotonic() > end:
                self.kill()
                raise BrokerError(f"broker {self.bootstrap}: did not start:\n{self.log[-3000:]}")
            time.sleep(0.02)

    def answers(self, timeout: float = 1.0) -> bool:
        """Returns whether a request (ApiVersions 0) is answered; the port is open much earlier."""
        try:
            with socket.create_connection((HOST, self.port), timeout) as plain:
                link = self.security.wrap(plain) if self.security else plain
                with link:
                    link.sendall(struct.pack(">ihhih", 10, 18, 0, 7, -1))
                    return link.recv(10)[4:] == struct.pack(">ih", 7, 0)
        except OSError:
            return False

    def freeze(self) -> None:
        """SIGSTOP: connections stay open, without answers after it returns."""
        self._signal(signal.SIGSTOP)
        assert self.process is not None
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)  # on a busy machine its threads continue for a while

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self.process is None or not self.running():
            raise BrokerError(f"broker {self.bootstrap}: is not running")
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, like a power failure, except that the kernel keeps written data."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self._next_archive.unlink(missing_ok=True)

    def stop(self) -> None:
        """Sends SIGTERM, and SIGKILL if it does not end. Keeps the archive of classes of a normal stop."""
        if self.process is None or not self.running():
            return
        self.thaw()
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            if self.process.wait(STOP_S) in STOPPED and self._next_archive.exists():
                self._next_archive.replace(self._archive)
        self.kill()

    def close(self) -> None:
        """Stops the broker and releases the ports."""
        self.stop()
        for port in self._ports:
            port.close()

    def cpu_seconds(self) -> float:
        """CPU time of the broker's process so far (Linux)."""
        assert self.process is not None
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_bytes(self) -> int:
        """Resident memory of the broker's process (Linux)."""
        assert self.process is not None
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fetch() -> None:
    """Downloads missing jars and starts a broker once, which tests the jars and creates the archive of classes."""
    with tempfile.TemporaryDirectory(prefix="fleetpulse-kafka-") as folder, Broker(Path(folder)) as broker:
        sys.stderr.write(f"Apache Kafka answered on {broker.bootstrap}\n")


def run(port: int, folder: Path | None) -> None:
    """Runs a broker in the foreground until Ctrl-C or SIGTERM. Raises BrokerError if it ends by itself."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with (
        tempfile.TemporaryDirectory(prefix="fleetpulse-kafka-") as temporary,
        Broker(folder or Path(temporary), port=port) as broker,
    ):
        sys.stdout.write(f"{broker.bootstrap}\n")
        sys.stdout.flush()
        assert broker.process is not None
        with suppress(KeyboardInterrupt):
            broker.process.wait()
            raise BrokerError(f"broker {broker.bootstrap}: ended:\n{broker.log[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("fetch", help="download the jars and test them")
    runs = commands.add_parser("run", help="start a broker in the foreground")
    runs.add_argument("--port", type=int, default=0, help="default: a free one")
    runs.add_argument("--folder", type=Path, help="keeps the data here; default: a temporary one")
    chosen = parser.parse_args()
    try:
        if lacking := missing():
            raise BrokerError(f"{lacking}: run 'make parts'")
        fetch() if chosen.command == "fetch" else run(chosen.port, chosen.folder)
    except BrokerError as error:
        sys.exit(f"kafka_broker: {error}")


if __name__ == "__main__":
    main()
