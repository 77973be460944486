"""Agents and pipelines of the last version with wire version 1 beside today's, over one broker and one spool."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from pipeline.commands.service import PipelineService
from pipeline.config.sections import load_config
from tests.kafka_broker import Address
from tests.kafka_clients import make_topics
from tests.old_versions import WIRE_1, check_out, old_command
from tests.pipeline.kafka_pipeline import EmptyJudge, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.refusals]
SECONDS = 120.0
COUNT = "SELECT count(*) FROM node WHERE entity = 'node:{}' AND load1 IS NOT NULL"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return check_out(WIRE_1, tmp_path_factory.mktemp("old") / "tree")


class Site:
    """One spool folder, one transport, agents of two versions, and a pipeline of either."""

    def __init__(self, folder: Path, tree: Path, transport: str, servers: str = "127.0.0.1:1") -> None:
        self.folder, self.tree, self._transport, self._servers = folder, tree, transport, servers
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def config(self, name: str) -> Path:
        path = self.folder / f"{name}.toml"
        path.write_text(
            f'[agent]\nnode = "{name}"\ncollectors = ["host"]\n[pipeline]\ntransport = "{self._transport}"\n'
            f'[kafka]\nbootstrap_servers = "{self._servers}"\n[spool]\ndirectory = "{self.folder}/spool"\n'
            f'free_bytes = 0\n[store]\npath = "{self.folder}/store.duckdb"\n[api]\nport = 0\n'
        )
        return path

    def start(self, name: str, command: str, old: bool) -> None:
        words = (command, "--config", self.config(name))
        today = [sys.executable, os.path.abspath("fleetpulse.py"), *map(str, words)]
        with open(self.folder / f"{name}.log", "ab") as log:
            self.running[name] = subprocess.Popen(
                old_command(self.tree, *words) if old else today, stdout=log, stderr=log, cwd=self.folder
            )

    def stop(self, *names: str) -> None:
        for name in names:
            process = self.running.pop(name)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, (self.folder / f"{name}.log").read_text()[-2000:]

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()

    def open(self) -> PipelineService:
        """Returns today's pipeline on the store; the test runs its steps."""
        service = PipelineService(load_config(self.config("pipeline")), EmptyJudge())  # type: ignore[arg-type]
        service.start_engine()
        return service


@pytest.fixture
def new_site(tmp_path: Path, tree: Path) -> Iterator[Callable[..., Site]]:
    made: list[Site] = []

    def make(*words: str) -> Site:
        made.append(Site(tmp_path, tree, *words))
        return made[-1]

    yield make
    for site in made:
        site.close()


def rows(service: PipelineService, query: str) -> list[tuple[Any, ...]]:
    return service.database.connection.execute(query).fetchall()


def run_until(site: Site, service: PipelineService, done: Callable[[], bool], what: str) -> None:
    def turn() -> bool:
        ended = [n for n, process in site.running.items() if process.poll() is not None]
        assert not ended, [(site.folder / f"{name}.log").read_text()[-500:] for name in ended]
        service.run_step()
        return done()

    wait_until(turn, SECONDS, what)


@pytest.mark.parametrize("transport", ["kafka", "spool"])
def test_agents_of_both_versions_send_side_by_side_into_todays_pipeline(
    request: pytest.FixtureRequest, new_site: Callable[..., Site], transport: str
) -> None:
    servers = ()
    if transport == "kafka":
        address: Address = request.getfixturevalue("kafka")
        servers = (make_topics(address).bootstrap_servers,)
    site = new_site(transport, *servers)
    site.start("old1", "agent", old=True)
    site.start("new1", "agent", old=False)
    service = site.open()
    try:
        stored = lambda name: rows(service, COUNT.format(name))[0][0]  # noqa: E731
        run_until(site, service, lambda: min(map(stored, ("old1", "new1"))) >= 8, "rows of both agents")
        site.stop("old1", "new1")
        run_until(site, service, lambda: service.ingest.progress.backlog is None, "all is read")
        for name in ("old1", "new1"):
            doubled = f"SELECT time FROM node WHERE entity = 'node:{name}' AND load1 IS NOT NULL GROUP BY time"
            assert rows(service, f"{doubled} HAVING count(*) > 1") == []
        assert rows(service, "SELECT rule, reason FROM dead_letter") == []
        assert rows(service, "SELECT source, cause FROM gaps") == []
        assert rows(service, "SELECT count(DISTINCT node) FROM events WHERE kind = 'inventory'") == [(2,)]
    finally:
        service.close()


@pytest.mark.parametrize("transport", ["kafka", "spool"])
def test_telemetry_of_todays_agents_that_the_pipeline_of_then_refused_is_stored_once_after_its_upgrade(
    request: pytest.FixtureRequest, new_site: Callable[..., Site], transport: str
) -> None:
    servers = ()
    if transport == "kafka":
        servers = (make_topics(request.getfixturevalue("kafka")).bootstrap_servers,)
    site = new_site(transport, *servers)
    site.start("pipeline", "pipeline", old=True)
    site.start("old1", "agent", old=True)
    site.start("new1", "agent", old=False)
    time.sleep(20)  # a few messages of each; today's agents join the ticks of 5 s
    site.stop("old1", "new1")
    time.sleep(5)
    site.stop("pipeline")
    refused = count_dead_letters(site)
    assert refused > 0
    service = site.open()  # the upgrade, with a backup of the store
    try:
        assert rows(service, COUNT.format("old1"))[0][0] > 0
        assert rows(service, COUNT.format("new1")) == [(0,)]
        assert rows(service, "SELECT count(DISTINCT node) FROM events WHERE kind = 'inventory'") == [(2,)]
        run_until(site, service, lambda: service.ingest.counters["letters_reread"] == refused, "all are read again")
        assert rows(service, "SELECT count(*) FROM dead_letter") == [(0,)]
        assert rows(service, f"{COUNT.format('new1')} HAVING count(*) = count(DISTINCT time)")[0][0] >= 10
        assert rows(service, "SELECT source, cause FROM gaps") == []
        site.start("new1", "agent", old=False)
        before = rows(service, COUNT.format("new1"))[0][0]
        run_until(site, service, lambda: rows(service, COUNT.format("new1"))[0][0] > before, "the upgrade reads on")
        assert rows(service, "SELECT source, cause FROM gaps") == []
    finally:
        service.close()
    assert (site.folder / "store.duckdb.schema-1").exists()


def count_dead_letters(site: Site) -> int:
    """Returns the number in the store of an old pipeline that has ended; each is whole."""
    with duckdb.connect(str(site.folder / "store.duckdb"), read_only=True) as connection:
        found = connection.execute("SELECT reason, octet_length(payload) FROM dead_letter").fetchall()
    assert all("version 2" in reason and 0 < size < 65536 for reason, size in found), found
    return len(found)
