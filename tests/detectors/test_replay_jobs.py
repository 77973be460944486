"""Replay follows jobs: ranks are where the events place them, from their time on."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from detectors.replay import replay
from pipeline.config.sections import Config
from pipeline.incidents.desk import Desk
from pipeline.model.records import SECOND, iso

START = 1_790_000_000 * SECOND
STEP = 10 * SECOND
RANKS = 16
MOVED, SLOW, OVER, TICKS = 150, 200, 400, 800  # ticks


def places(tick):
    """Rank 5 runs on a GPU of the spare node from MOVED on."""
    gpus = [f"gpu:n{r // 8}.{r % 8}" for r in range(RANKS)]
    if tick >= MOVED:
        gpus[5] = "gpu:n2.0"
    return {f"rank:7.{r}": {"stage": f"stage:7.{r // 8}", "gpu": gpu} for r, gpu in enumerate(gpus)}


@pytest.fixture
def recording(tmp_path):
    """Telemetry of 16 ranks; rank 5 moves, then is slow; the job is over at OVER, other GPUs go on."""
    rng, rows = np.random.default_rng(1), {"time": [], "entity": [], "rank.compute_time": []}
    for tick in range(OVER):
        seconds = np.where(np.arange(RANKS) < 8, 4.0, 4.4) * (1 + 0.005 * rng.standard_normal(RANKS))
        seconds[5] *= 1.3 if tick >= SLOW else 1.0
        rows["time"] += [START + tick * STEP] * RANKS
        rows["entity"] += [f"rank:7.{r}" for r in range(RANKS)]
        rows["rank.compute_time"] += seconds.tolist()
    write(tmp_path / "telemetry-rank.parquet", rows)
    gpus = [f"gpu:n{n}.{i}" for n in range(3) for i in range(8)]
    times = [START + tick * STEP for tick in range(TICKS) for _ in gpus]
    write(
        tmp_path / "telemetry-gpu.parquet",
        {"time": times, "entity": gpus * TICKS, "gpu.sm_clock": [1980.0] * len(times)},
    )
    events = [
        {"time": iso(START), "entity": "job:7", "kind": "job_start", "data": {"ranks": places(0)}},
        {"time": iso(START + MOVED * STEP), "entity": "job:7", "kind": "job_start", "data": {"ranks": places(MOVED)}},
        {"time": iso(START + OVER * STEP), "entity": "job:7", "kind": "job_end", "data": {"ranks": list(places(0))}},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    lines = [f'"n{n}.{i}" = ["node:n{n}"]' for n in range(3) for i in range(8)]
    (tmp_path / "topology.toml").write_text("\n".join(["version = 1", "[gpu]", *lines]))
    return tmp_path


def write(path, rows):
    table = pa.table({**rows, "time": pa.array(rows["time"], pa.timestamp("us", "UTC"))})
    pq.write_table(table, path)


def run(folder, **more):
    inputs = sorted(folder.glob("telemetry-*.parquet"))
    files = {"events": [folder / "events.jsonl"], "topology": folder / "topology.toml", **more}
    replay(Config(), inputs, folder / "f.jsonl", incidents=folder / "i.jsonl", desk=Desk, **files)
    return [[json.loads(line) for line in (folder / name).read_text().splitlines()] for name in ("f.jsonl", "i.jsonl")]


def test_a_slow_rank_is_compared_with_its_stage_and_blamed_at_its_location(recording):
    found, (incident,) = run(recording)
    assert {f["entity"] for f in found} == {"rank:7.5"}
    assert {(f["evidence"]["stage"], f["evidence"]["gpu"], f["evidence"]["node"]) for f in found} == {
        ("stage:7.0", "gpu:n2.0", "node:n2")
    }
    assert incident["cause"] == "gpu:n2.0"


def test_an_incident_of_a_rank_resolves_after_its_job_ended(recording):
    _, (incident,) = run(recording)
    assert incident["severity"] == "page"
    assert iso(START + OVER * STEP) < incident["resolved"] < iso(START + (OVER + 70) * STEP)


def test_without_events_the_stages_are_unknown(recording):
    found, incidents = run(recording, events=[])
    assert found == []
    assert incidents == []


@pytest.mark.slow
def test_an_inventory_event_has_the_effect_of_a_job_start(recording):
    """A recorded real fleet has both; an inventory is of a node, and removes entities that it no longer names."""
    lines = (recording / "events.jsonl").read_text().splitlines()
    entities = {
        rank: {"parents": [p["stage"], "job:7", p["gpu"]], "attributes": {"node": "n0"}}
        for rank, p in places(0).items()
    }
    entities |= {f"stage:7.{s}": {"parents": ["job:7"], "attributes": {}} for s in range(2)}
    entities["rank:7.5"]["parents"][2] = "gpu:n2.0"
    moment = START + MOVED * STEP
    inventory = {"time": iso(moment), "entity": "node:n0", "kind": "inventory", "data": {"entities": entities}}
    (recording / "events.jsonl").write_text("\n".join([lines[0], json.dumps(inventory), lines[2]]) + "\n")
    found, (incident,) = run(recording)
    assert {f["evidence"]["gpu"] for f in found} == {"gpu:n2.0"}
    assert incident["cause"] == "gpu:n2.0"
