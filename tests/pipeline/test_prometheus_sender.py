"""A real Prometheus writes what it scrapes to a gateway, through Kafka into the store: values compared one by one."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from pipeline.config.sections import Kafka
from pipeline.foreign import series as mapping
from pipeline.foreign.series import ADD, COUNT, MATCH, MAX, MIN
from pipeline.ingest.ingest import Ingest
from pipeline.ingest.offsets import load_offsets
from pipeline.model.records import SECOND
from pipeline.model.signals import CATALOGUE
from pipeline.store.database import Database
from pipeline.store.devices import Devices
from pipeline.transport.kafka import KafkaTransport
from tests import sender_build
from tests.kafka_broker import Address
from tests.kafka_clients import make_topics
from tests.parts import do_without
from tests.pipeline.test_doctor import free_port
from tests.scraped_pages import Pages, Series
from tests.until import until

pytestmark = pytest.mark.prometheus
MESSAGES = {1: "prometheus.WriteRequest", 2: "io.prometheus.write.v2.Request"}
NODE = "n7"
JOBS = ("dcgm", "app", "node")


@pytest.fixture(scope="module")
def node_exporter() -> Iterator[str]:
    """The address of a real node_exporter's page."""
    program = shutil.which("prometheus-node-exporter") or shutil.which("node_exporter")
    if program is None:
        do_without("node_exporter", "no prometheus-node-exporter here; run 'make parts'")
    port = free_port()
    words = [program, f"--web.listen-address=127.0.0.1:{port}"]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as process:
        until(lambda: answers(port))
        yield f"http://127.0.0.1:{port}/metrics"
        process.terminate()


def answers(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


class Site:
    """Prometheus, gateway, brokers and a store; the processes may be killed and started again."""

    def __init__(self, folder: Path, pages: Pages, kafka: Kafka, version: int) -> None:
        self.folder, self.pages, self.kafka = folder, pages, kafka
        self.gateway_port, self.prometheus_port = free_port(), free_port()
        (folder / "gateway.toml").write_text(
            f'[pipeline]\ntransport = "kafka"\n[kafka]\nbootstrap_servers = "{kafka.bootstrap_servers}"\n'
            f'[spool]\ndirectory = "{folder / "spool"}"\nfree_bytes = 0\n'
            f'[gateway]\nport = {self.gateway_port}\nnode = "gw"\n'
        )
        (folder / "prometheus.yml").write_text(configuration(pages.port, self.gateway_port, MESSAGES[version]))
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.database = Database(folder / "store.duckdb")
        self.transport = KafkaTransport(kafka, load_offsets(self.database.connection))
        self.ingest = Ingest(
            self.database, self.transport, Devices(self.database.connection), lambda: time.time_ns() // 1000
        )

    def start_gateway(self) -> None:
        words = [sys.executable, "fleetpulse.py", "gateway", "--config", str(self.folder / "gateway.toml")]
        self._start("gateway", words, self.gateway_port)

    def start_prometheus(self) -> None:
        words = [str(sender_build.prometheus()), f"--config.file={self.folder / 'prometheus.yml'}"]
        words += [
            f"--storage.tsdb.path={self.folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{self.prometheus_port}",
        ]
        self._start("prometheus", [*words, "--enable-feature=exemplar-storage"], self.prometheus_port)

    def _start(self, name: str, words: list[str], port: int) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            self.running[name] = subprocess.Popen(words, stdout=log, stderr=log, cwd=Path(__file__).parents[2])
        until(lambda: answers(port), 60.0)

    def stop(self, name: str, number: int) -> None:
        process = self.running.pop(name)
        process.send_signal(number)
        process.wait(60)

    def close(self) -> None:
        for name in list(self.running):
            self.stop(name, signal.SIGKILL)
        self.transport.close()
        self.database.close()

    def query(self, text: str) -> list[tuple[object, ...]]:
        return self.database.connection.execute(text).fetchall()

    def count_pages(self, job: str) -> int:
        """The newest page of a job of which something is stored."""
        return max((page for _, page in self.list_pages(job)), default=0)

    def list_pages(self, job: str) -> list[tuple[int, int]]:
        """(time in us, number) of each stored page."""
        labels = f"{{instance={NODE}:1,job={job}}}"
        found = self.query(
            f"SELECT DISTINCT epoch_us(time), value FROM custom WHERE entity = 'custom:{NODE}.page_number{labels}'"
        )
        return [(int(str(at)), int(float(str(page)))) for at, page in found]

    def read_until(self, pages: int) -> None:
        """Stores until the page number `pages` of every job is in the store, and then what arrives in a second."""

        def holds() -> bool:
            self.ingest.step()
            return all(self.count_pages(job) >= pages for job in JOBS)

        until(holds, 180.0)
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            self.ingest.step()


def configuration(pages: int, gateway: int, message: str) -> str:
    jobs = "".join(
        f"  - job_name: {job}\n    metrics_path: /{job}\n"
        f"    static_configs: [{{targets: ['127.0.0.1:{pages}'], labels: {{instance: '{NODE}:1'}}}}]\n"
        + ("    scrape_native_histograms: true\n    scrape_protocols: [PrometheusProto]\n" if job == "app" else "")
        for job in JOBS
    )
    return (
        "global: {scrape_interval: 1s, scrape_timeout: 1s}\n"
        "storage: {tsdb: {out_of_order_time_window: 1h}}\n"
        f"scrape_configs:\n{jobs}"
        f"remote_write:\n  - url: http://127.0.0.1:{gateway}/api/v1/write\n    protobuf_message: {message}\n"
        "    send_exemplars: true\n    send_native_histograms: true\n    metadata_config: {send: false}\n"
        "    queue_config: {batch_send_deadline: 200ms, min_backoff: 50ms, max_backoff: 200ms}\n"
    )


@contextmanager
def site_of(folder: Path, kafka: Address, node_exporter: str, version: int) -> Iterator[Site]:
    if why := sender_build.missing(sender_build.prometheus()):
        do_without("prometheus", why)
    with ExitStack() as stack:
        pages = Pages(node_exporter)
        stack.callback(pages.close)
        site = Site(folder, pages, make_topics(kafka), version)
        stack.callback(site.close)
        site.start_gateway()
        site.start_prometheus()
        yield site


def find_places(series: Series, job: str) -> list[tuple[str, str, float, float, float]]:
    """(entity, signal, scale, offset, blank) of each place where a series is stored."""
    name, labels = series
    # Prometheus drops empty labels, and writes bounds as floats
    kept = {key: f"{text}.0" if key in ("le", "quantile") and text.isdigit() else text for key, text in labels if text}
    about = {**kept, "instance": f"{NODE}:1", "job": job}
    one = mapping.Series(name, "", "unknown", False, about)
    # what several series share stays custom, and so it does here
    mapped = [t for t in mapping.map_series(one, NODE) if t.merge not in (ADD, COUNT, MAX, MIN)]
    if any(t.merge == MATCH for t in mapped):
        return []
    found = mapped or [mapping.map_custom(one, NODE)]
    return [(t.entity, t.signal, t.scale, t.offset, t.blank) for t in found]


def read_values(site: Site) -> dict[tuple[str, str], dict[int, float]]:
    """(entity, signal) -> time -> value, of all classes."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for (name,) in site.query("SELECT DISTINCT class FROM device"):
        cursor = site.database.connection.execute(f'SELECT * EXCLUDE (time), epoch_us(time) AS at FROM "{name}"')
        names = [column[0] for column in cursor.description]
        at, entity = names.index("at"), names.index("entity")
        for row in cursor.fetchall():
            for column, value in zip(names, row, strict=True):
                if isinstance(value, (int, float)) and value == value and column != "at":
                    found.setdefault((row[entity], f"{name}.{column}"), {})[row[at]] = float(value)
    return found


def find_value(series: Mapping[int, float], at: int) -> float | None:
    """The value at a time; a request with other scrapes within 0.1 s makes one tick of them."""
    near = min(series, key=lambda time: abs(time - at), default=at + SECOND)
    return series[near] if abs(near - at) <= SECOND // 10 else None


def compare(site: Site, interrupted: Mapping[str, int] = {}) -> int:
    """The number of values that were scraped and are stored the same. Fails for each that is not.

    interrupted: page of each job that Prometheus may not have sent whole.
    """
    stored, compared, wrong = read_values(site), 0, []
    for job in JOBS:
        for at, number in site.list_pages(job):
            for series, value in site.pages.served[job][number].items():
                for entity, column, scale, offset, blank in find_places(series, job):
                    if not np.isfinite(value) or value >= blank:
                        continue
                    expected = np.asarray(value * scale + offset).astype(CATALOGUE[column].type)
                    if CATALOGUE[column].type[0] == "u":
                        expected = np.rint(value * scale + offset)
                    got = find_value(stored.get((entity, column), {}), at)
                    compared += 1
                    if got != float(expected) and not (got is None and number == interrupted.get(job)):
                        wrong.append((job, number, series[0], entity, column, got, float(expected)))
    assert wrong == [], f"{len(wrong)} of {compared}: {wrong[:5]}"
    return compared


@pytest.mark.parametrize("version", [1, 2])
def test_every_scraped_value_is_stored_at_the_time_of_its_scrape(
    kafka: Address, tmp_path: Path, node_exporter: str, version: int
) -> None:
    with site_of(tmp_path, kafka, node_exporter, version) as site:
        site.read_until(6)
        compared = compare(site)
        assert compared > 6 * 500  # the real node_exporter alone has that many
        pages = {job: sorted(number for _, number in site.list_pages(job)) for job in JOBS}
        # the first scrape may come before Prometheus follows its own write-ahead log
        assert all(found[0] <= 2 and found == list(range(found[0], found[-1] + 1)) for found in pages.values())
        measured = "SELECT DISTINCT entity FROM gpu WHERE temperature BETWEEN 50 AND 60 AND energy > 2.6e9 ORDER BY 1"
        assert site.query(measured) == [(f"gpu:{NODE}.0",), (f"gpu:{NODE}.1",)]
        late = dict(
            site.query(f"SELECT epoch_ms(time), value FROM custom WHERE entity LIKE 'custom:{NODE}.app_late{{%'")
        )
        assert len(late) >= 6
        # a request with another scrape within 0.1 s makes one tick of both
        assert all(any(v == late[at] and abs(at - t) <= 100 for t, v in site.pages.late.items()) for at in late)
        counters = site.ingest.counters
        assert counters["foreign_stale"] >= 1
        assert counters["foreign_exemplars"] >= 1
        assert counters["foreign_custom"] > counters["foreign_values"] / 2
        assert site.ingest.rejected == {}
        assert site.query("SELECT count(*) FROM gaps") == [(0,)]


@pytest.mark.slow
def test_restarts_of_gateway_and_prometheus_lose_and_double_nothing(
    kafka: Address, tmp_path: Path, node_exporter: str
) -> None:
    with site_of(tmp_path, kafka, node_exporter, version=2) as site:
        site.read_until(3)
        for _ in range(2):
            site.stop("gateway", signal.SIGKILL)
            seen = max(site.pages.served["dcgm"])
            until(lambda seen=seen: max(site.pages.served["dcgm"]) > seen + 2)  # type: ignore[misc]
            site.start_gateway()
            site.read_until(seen + 3)
        site.stop("prometheus", signal.SIGTERM)  # writes what it has before it ends
        last = {job: max(site.pages.served[job]) for job in JOBS}
        site.start_prometheus()
        site.read_until(max(last.values()) + 3)
        compare(site, interrupted=last)
        for job in JOBS:
            found = sorted(number for _, number in site.list_pages(job))
            missing = set(range(1, max(found) + 1)) - set(found)
            assert missing <= {last[job]}  # its end interrupted this scrape, or the way to its write-ahead log
        # of other classes a request may hold some signals of a device and the next one the others: two rows
        doubled = "SELECT epoch_us(time), entity, count(*) FROM custom GROUP BY ALL HAVING count(*) > 1 LIMIT 3"
        assert site.query(doubled) == []
        assert site.ingest.rejected == {}


def test_the_configuration_of_the_page_is_accepted(tmp_path: Path, certificate: Path) -> None:
    if why := sender_build.missing(sender_build.prometheus()):
        do_without("prometheus", why)
    page = (Path(__file__).parents[2] / "docs" / "otlp.md").read_text()
    block = page.partition("### Configuration of a Prometheus")[2].partition("###")[0]
    (tmp_path / "token").write_text("0123456789abcdef")
    found = textwrap.dedent(block).replace("/etc/prometheus/ca.pem", str(certificate))
    (tmp_path / "prometheus.yml").write_text(found.replace("/etc/prometheus/gateway.token", str(tmp_path / "token")))
    port = free_port()
    words = [str(sender_build.prometheus()), f"--config.file={tmp_path / 'prometheus.yml'}"]
    words += [f"--storage.tsdb.path={tmp_path / 'tsdb'}", f"--web.listen-address=127.0.0.1:{port}"]
    with open(tmp_path / "log", "wb") as log, subprocess.Popen(words, stdout=log, stderr=log) as process:
        until(lambda: b"Completed loading of configuration file" in (tmp_path / "log").read_bytes(), 60.0)
        process.kill()
