"""GET /api/v1/rank-strip: lateness of ranks against their stage, as bytes, for jobs of any size."""

from __future__ import annotations

import base64
import time
from typing import Any

import numpy as np
import pytest

from pipeline.api.rank_strip import (
    LOW,
    STEP,
    TOP,
    RankStrip,
    _merge_rows,
    compare_with_stage,
    encode_levels,
)
from tests.pipeline.api.conftest import NOW, StoreBackend


def add_steps(backend: StoreBackend, times: dict[str, float], minutes: int = 30) -> None:
    """Adds a reading each 10 s of the compute time of ranks of job 81, all in one stage."""
    with backend.database.transaction() as connection:
        for name, seconds in times.items():
            number = int(name.rpartition(".")[2])
            connection.execute(
                """INSERT INTO hot_rank (time, device, compute_time)
                   SELECT make_timestamptz($now - i * 10000000), $device, $seconds FROM range($count) r(i)""",
                {"now": NOW, "device": number, "seconds": seconds, "count": minutes * 6},
            )


def strip_of(client, **query: Any) -> tuple[dict[str, Any], np.ndarray]:
    found = client.get("/api/v1/rank-strip", params={"job": "job:81", **query}).json()
    RankStrip.model_validate(found)
    raw = np.frombuffer(base64.b64decode(found["levels"]), np.uint8)
    return found, raw.reshape(found["rows"], found["columns"])


@pytest.fixture
def one_stage(backend: StoreBackend) -> StoreBackend:
    backend.topology.merge({f"rank:81.{i}": ("stage:81.0", "job:81", f"gpu:n{i // 2 + 1}.{i % 2}") for i in range(6)})
    return backend


def test_a_slow_rank_is_a_row_of_high_levels_with_its_gpu_and_node(client, one_stage) -> None:
    add_steps(one_stage, {f"rank:81.{i}": 0.5 for i in range(5)} | {"rank:81.5": 0.6})
    found, levels = strip_of(client)
    assert (found["rows"], found["ranks"], found["per_row"], found["measured"]) == (6, 6, 1, "rank.compute_time")
    assert found["labels"][5] == "rank:81.5"
    assert found["gpus"][5] == "gpu:n3.1"
    known = levels[:, -60:]
    assert set(known[0].tolist()) - {0} == {round(-LOW / STEP) + 1}  # as its peers
    assert set(known[5].tolist()) - {0} == {round((0.2 - LOW) / STEP) + 1}
    assert (levels[:, 0] == 0).all()  # before the first reading
    (slow,) = found["slow"]
    assert found["labels"][slow["row"]] == slow["rank"]
    assert (slow["rank"], slow["node"], round(slow["now"], 3), slow["share"]) == ("rank:81.5", "node:n3", 0.2, 1.0)
    assert found["late_ranks"] == 1


def test_some_ranks_can_be_chosen(client, one_stage) -> None:
    add_steps(one_stage, {f"rank:81.{i}": 0.5 for i in range(6)})
    found, levels = strip_of(client, first=4, ranks=1)
    assert (found["labels"], found["first_rank"], levels.shape[0]) == (["rank:81.4"], 4, 1)
    assert strip_of(client, first=99)[0]["labels"] == ["rank:81.5"]


def test_without_compute_times_nothing_is_called_in_time(client, one_stage) -> None:
    found, levels = strip_of(client)
    assert (found["measured"], int(levels.max()), found["slow"]) == (None, 0, [])


def test_other_jobs_and_wrong_parameters_are_answered(client) -> None:
    assert client.get("/api/v1/rank-strip", params={"job": "job:<b>"}).status_code == 404
    assert client.get("/api/v1/rank-strip", params={"job": "node:n1"}).status_code == 400
    assert client.get("/api/v1/rank-strip", params={"job": "job:81", "hours": 25}).status_code == 400


def test_a_small_stage_is_compared_with_its_own_past() -> None:
    times = np.array([[1.0, 1.0, 1.2]])
    assert compare_with_stage(times, np.zeros(1, np.int32))[0].round(3).tolist() == [0.0, 0.0, 0.2]


def test_levels_have_a_place_for_no_value_and_end_at_the_scale() -> None:
    found = encode_levels(np.array([[np.nan, LOW, 0.0, 9.0, -9.0]]))
    assert found.tolist() == [[0, 1, round(-LOW / STEP) + 1, TOP, 1]]


def test_neighbours_share_a_row_that_shows_the_latest() -> None:
    values = np.array([[0.0, np.nan], [0.2, np.nan], [0.1, 0.3]])
    assert np.nan_to_num(_merge_rows(values, 2), nan=-1).tolist() == [[0.2, -1.0], [0.1, 0.3]]


def test_sixteen_thousand_ranks_are_compared_in_a_fraction_of_a_second() -> None:
    times = np.random.default_rng(1).normal(0.5, 0.005, (16_384, 180))
    stages = (np.arange(16_384) // 2048).astype(np.int32)
    begun = time.process_time()
    rows = _merge_rows(compare_with_stage(times, stages), 32)
    levels = encode_levels(rows)
    assert levels.shape == (512, 180)
    assert levels.nbytes == 92_160
    assert time.process_time() - begun < 2.0
