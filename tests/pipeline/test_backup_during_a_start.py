"""`fleetpulse backup` of a pipeline that starts or reloads: the API answers 503, and is asked again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.commands import operation
from pipeline.config.sections import Api, Config, Store
from pipeline.http import client
from pipeline.model.errors import Unavailable

STARTS = (503, {"title": "Service Unavailable", "detail": "the pipeline starts again"})


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[operation.ApiSource, list[Any], list[str]]:
    """A source with the answers that it gets, in order, and what is reported. A question takes 100 s."""
    (tmp_path / "s.duckdb").touch()
    answers: list[Any] = []
    said: list[str] = []
    now = iter(range(0, 10**6, 100))
    monkeypatch.setattr(time, "sleep", lambda s: None)
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    monkeypatch.setattr(client, "_send", lambda config, request, timeout: answers.pop(0))
    config = Config(store=Store(tmp_path / "s.duckdb"), api=Api(port=1))
    return operation.ApiSource(config, said.append), answers, said


def moment(store: Path) -> dict[str, Any]:
    texts = dict.fromkeys(("id", "site", "duckdb", "state"), "x")
    numbers = dict.fromkeys(("time", "schema_version", "store_bytes", "log_bytes"), 1)
    return {**texts, **numbers, "store": str(store), "history": [], "offsets": []}


def test_a_pipeline_that_starts_is_asked_again_until_it_has_started(source: Any, tmp_path: Path) -> None:
    api, answers, said = source
    answers += [STARTS, STARTS, (200, moment(tmp_path / "s.duckdb"))]
    assert api.describe().id == "x"
    answers += [STARTS, (200, moment(tmp_path / "s.duckdb"))]
    assert api.begin().id == "x"
    assert [line.partition(":")[0] for line in said] == ["the pipeline is not ready yet, waiting at most 300 s"] * 2
    answers.append(STARTS)
    assert api.end("x") is False, "what it held ended with it; the copy is made again"


def test_a_pipeline_that_does_not_start_in_time_is_a_dependency_that_does_not_answer(source: Any) -> None:
    """It ended immediately, with exit code 1."""
    api, answers, _ = source
    answers += [STARTS] * 9
    with pytest.raises(
        Unavailable, match=r"the pipeline starts again .HTTP 503.; it did not start within 300 s"
    ) as found:
        api.describe()
    assert found.value.exit_code == 3
