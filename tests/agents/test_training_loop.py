"""A real data-parallel training through agent, spool, pipeline and store: steps, norms, digests, the slow rank."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import detectors
from detectors.runner import Runner
from pipeline.commands.service import PipelineService
from pipeline.config import sections
from pipeline.model.errors import Retryable

ROOT = Path(__file__).parents[2]
SCRIPT = """
import select, sys
from agents.training import Steps
steps = Steps("lasting", 0)
while not select.select([sys.stdin], [], [], 0.02)[0]:
    steps.report(step_time=0.02, tokens=1)
"""
MINE = "entity LIKE 'rank:mlp.%'"  # the agent also finds ranks of jobs that other tests run on this machine
WORLD, COUNT, SLOW, FLIPPED = 4, 40, 2, 1
SLOWER = 0.05  # as in training_loop.py
PATIENCE_S = 60.0
AGENT = """
[site]
name = "s1"
[agent]
node = "n1"
[spool]
directory = "{folder}/spool"
free_bytes = 0
[collector.training]
socket = "{folder}/t.sock"
interval = 0.5
"""


def environment(folder: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "FLEETPULSE_"))}
    path = {"PYTHONPATH": str(ROOT), "FLEETPULSE_TRAINING_SOCKET": str(folder / "t.sock")}
    return {**kept, **path, "OMP_NUM_THREADS": "1", **more}


def waited(holds: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        assert time.monotonic() < end, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(0.05)
    return found


class Store:
    """The pipeline over the agent's spool."""

    def __init__(self, folder: Path) -> None:
        settings = sections.Config(
            spool=sections.Spool(folder / "spool", free_bytes=0), store=sections.Store(folder / "store.duckdb")
        )
        self.service = PipelineService(settings, Runner(detectors.configured({}, "")))
        self.service.start_engine()

    def rows(self, query: str) -> Sequence[tuple[Any, ...]]:
        with contextlib.suppress(Retryable):
            while self.service.run_step():
                pass
        with contextlib.closing(self.service.database.cursor()) as cursor:
            return cursor.execute(query).fetchall()


@contextlib.contextmanager
def running_agent(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs an agent whose socket is open."""
    (folder / "agent.toml").write_text(AGENT.format(folder=folder))
    words = [sys.executable, str(ROOT / "fleetpulse.py"), "agent", "--config", str(folder / "agent.toml")]
    with (folder / "log").open("ab") as log:
        running = subprocess.Popen(words, env=environment(folder), stderr=log, cwd=folder)
    try:
        waited(lambda: listens(folder / "t.sock") or running.poll() is not None, "the agent's socket")
        assert running.poll() is None, (folder / "log").read_text()
        yield running
    finally:
        running.send_signal(signal.SIGTERM)
        running.wait(20)


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a running agent."""
    folder = tmp_path_factory.mktemp("training")
    with running_agent(folder):
        yield folder


@pytest.fixture(scope="module")
def trained(agent: Path) -> Iterator[tuple[Store, list[dict[str, Any]]]]:
    """The store after a training that is stored completely, and each rank's own report."""
    words = [sys.executable, str(ROOT / "tests/agents/training_loop.py"), *map(str, (agent, COUNT, SLOW, FLIPPED))]
    ranks = [
        subprocess.Popen(
            words,
            env=environment(agent, FLEETPULSE_JOB="mlp", RANK=str(rank), WORLD_SIZE=str(WORLD)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for rank in range(WORLD)
    ]
    try:
        reports = [json.loads(rank.stdout.readline()) for rank in ranks if rank.stdout is not None]
        store = Store(agent)
        query = f"SELECT count(DISTINCT entity) FROM rank WHERE step = {COUNT}"
        waited(lambda: "rank" in tables(store) and store.rows(query)[0][0] == WORLD, "the last step of every rank")
        digests = "SELECT count(*) FROM events WHERE kind = 'replica_digest'"
        waited(lambda: store.rows(digests)[0][0] == WORLD * COUNT * 2, "every digest")
    finally:
        for rank in ranks:
            rank.communicate(b"\n", timeout=20)
    yield store, reports
    store.service.close()


def tables(store: Store) -> set[str]:
    return {name for (name,) in store.rows("SELECT table_name FROM information_schema.tables")}


@pytest.mark.slow
def test_all_steps_of_all_ranks_arrive(
    trained: tuple[Store, list[dict[str, Any]]],
) -> None:
    store, reports = trained
    found = store.rows(
        f"SELECT entity, max(step), max(tokens), max(drops), max(refused) FROM rank WHERE {MINE} GROUP BY 1 ORDER BY 1"
    )
    assert found == [(f"rank:mlp.{rank}", COUNT, COUNT * 64, 0, 0) for rank in range(WORLD)]
    assert [(reported["dropped"], reported["refused"]) for reported in reports] == [(0, 0)] * WORLD


@pytest.mark.slow
def test_loss_and_gradient_norm_match_the_script(trained: tuple[Store, list[dict[str, Any]]]) -> None:
    store, reports = trained
    for reported in reports:
        query = f"SELECT step, loss, gradient_norm FROM rank WHERE entity = 'rank:mlp.{reported['rank']}' ORDER BY time"
        before = 0
        for step, loss, norm in store.rows(query):
            assert math.isclose(loss, reported["steps"][step - 1]["loss"], rel_tol=1e-6)
            if step > before:
                norms = [one["norm"] for one in reported["steps"][before:step]]
                assert math.isclose(norm, max(norms), rel_tol=1e-6)
            before = step
    assert reports[0]["steps"][-1]["loss"] < reports[0]["steps"][0]["loss"]  # the loss falls


def test_the_slow_rank_has_long_compute_times_and_the_others_wait(
    trained: tuple[Store, list[dict[str, Any]]],
) -> None:
    store, _ = trained
    query = (
        "SELECT entity, median(compute_time), median(communication_time), median(step_time) FROM rank "
        f"WHERE {MINE} GROUP BY 1 ORDER BY 1"
    )
    for entity, computing, waiting, whole in store.rows(query):
        assert whole > SLOWER / 2  # a rank that begins a step late waits less
        if entity == f"rank:mlp.{SLOW}":
            assert computing > SLOWER
        else:
            assert computing < SLOWER / 2
            assert waiting > SLOWER / 3


def test_a_flipped_bit_changes_only_its_ranks_digests_from_that_step_on(
    trained: tuple[Store, list[dict[str, Any]]],
) -> None:
    store, _ = trained
    query = (
        "SELECT entity, (data->>'step')::INT, data->>'bucket', data->>'digest', data->>'group' FROM events "
        "WHERE kind = 'replica_digest'"
    )
    digests: dict[tuple[int, str], dict[str, str]] = {}
    for entity, step, bucket, digest, group in store.rows(query):
        assert group == "dp0"
        digests.setdefault((step, bucket), {})[entity] = digest
    for (step, bucket), by_rank in digests.items():
        assert len(by_rank) == WORLD
        values = list(by_rank.values())
        odd = {entity for entity, digest in by_rank.items() if values.count(digest) == 1}
        differs = bucket == "layer1" and step >= COUNT // 2
        if differs:
            assert odd == {f"rank:mlp.{FLIPPED}"}
        elif step <= COUNT // 2:
            assert odd == set()
    assert (COUNT // 2, "layer1") in digests


@pytest.mark.slow
def test_a_training_survives_its_agent_and_its_step_counts_continue(tmp_path: Path) -> None:
    path = tmp_path / "t.sock"
    script = subprocess.Popen([sys.executable, "-c", SCRIPT], env=environment(tmp_path), stdin=subprocess.PIPE)
    try:
        with running_agent(tmp_path) as first:
            store = Store(tmp_path)
            seen = waited(lambda: newest(store), "a step")
            first.kill()
            first.wait()
            waited(lambda: not listens(path), "its worker to end")
        with running_agent(tmp_path):
            found = waited(lambda: [row for row in newest(store) if row[0] > seen[0][0] + 50], "more steps")
        ((step, tokens, drops),) = found
        assert step == tokens  # dropped steps still count in the totals
        assert drops > 0
        store.service.close()
    finally:
        script.communicate(b"\n", timeout=20)


def listens(path: Path) -> bool:
    """Whether an agent is bound to the socket; a killed worker leaves the file behind."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as trial:
        try:
            trial.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        return True


def newest(store: Store) -> Sequence[tuple[int, int, int]]:
    if "rank" not in tables(store):
        return []
    query = "SELECT step, tokens, drops FROM rank WHERE entity = 'rank:lasting.0' ORDER BY time DESC LIMIT 1"
    return [(step, tokens, drops) for step, tokens, drops in store.rows(query)]
