"""Calibration over HTTP and `fleetpulse calibration`: shown, exported, pinned, compared, refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

import fleetpulse
from pipeline.api import models
from pipeline.api.budget_routes import PageBudgets
from pipeline.api.page_rates import count_pages
from pipeline.api.server import create_app, start_server
from pipeline.config.sections import Api, Budget, Config
from pipeline.incidents import calibrations
from pipeline.model.records import SECOND
from tests.pipeline.api.conftest import NOW

PATH = "/api/v1/calibration"
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def version(backend: Any) -> int:
    """A stored version."""
    document = json.dumps(backend.export_calibration(None))
    with backend.database.transaction() as connection:
        return calibrations.add_calibration(connection, 1_790_000_000_000_000, "learned", "", None, document)


@pytest.fixture
def command(backend: Any, now: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Call]:
    """command(*words): (exit code, stdout, stderr) against a running API."""
    stop, config = threading.Event(), Config(api=Api(port=0))
    serving = start_server(create_app(backend, config, lambda: now), config, stop)
    file = tmp_path / "site.toml"
    file.write_text(f"[api]\nport = {serving.port}\n")

    def call(*words: str) -> tuple[int, str, str]:
        code = fleetpulse.main(["calibration", *words, "--config", str(file)])
        said = capsys.readouterr()
        return code, said.out, said.err

    yield call
    stop.set()
    serving.join(10)


def test_rows_show_what_is_in_force_and_an_earlier_version(client: httpx.Client, version: int) -> None:
    found = models.Calibration.model_validate(client.get(PATH, params={"version": version}).json())
    (row,) = [row for row in found.rows if row.statistic == "cores"]
    assert (row.detector, row.devices, row.other_factor) == ("thermal", 64, row.factor)
    assert [v.action for v in found.versions] == ["learned"]


def test_a_version_is_pinned_released_and_returned_to(client: httpx.Client, version: int) -> None:
    def act(action: str, number: int | None) -> list[models.CalibrationVersion]:
        answer = client.post(PATH, json={"action": action, "version": number})
        assert answer.status_code == 200, answer.text
        return models.CalibrationVersions.model_validate(answer.json()).versions

    pinned = act("pin", version)
    assert [(v.action, v.of, v.user, v.in_force) for v in pinned] == [
        ("pin", version, "local", False),
        ("learned", None, "", True),
    ]
    assert not any(v.in_force for v in act("unpin", None))
    assert act("rollback", version)[0].action == "rollback"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"action": "pin", "version": 99}, 404),
        ({"action": "rollback"}, 400),
        ({"action": "forget"}, 400),
        ({"action": "pin", "version": 0}, 400),
    ],
)
def test_a_change_that_cannot_be_made_is_refused(client: httpx.Client, body: dict[str, Any], status: int) -> None:
    assert client.post(PATH, json=body).status_code == status


@pytest.mark.slow
def test_the_command_shows_exports_pins_and_lists(command: Call, version: int, tmp_path: Path) -> None:
    code, out, err = command()
    assert (code, err) == (0, "")
    assert out.splitlines()[0].split()[:4] == ["detector", "statistic", "kind", "devices"]
    assert "other_factor" in command("show", "--compare", str(version))[1]
    code, out, _ = command("export", "--version", str(version))
    assert (code, json.loads(out)["format"]) == (0, 1)
    assert "pin" in command("pin", str(version))[1]
    assert "learned" in command("history")[1]
    code, out, err = command("rollback", "99")
    assert (code, out) == (2, "")
    assert "99" in err


def test_budgets_are_listed_and_a_lowered_detector_is_reset(client: httpx.Client, backend: Any) -> None:
    backend.budget.review({"straggler": 9}, 1000.0, 0)
    found = PageBudgets.model_validate(client.get("/api/v1/budget").json()).budgets
    assert [(b.detector, b.wrong_pages, b.lowered, b.exempt) for b in found] == [
        ("straggler", 9, True, False),
        ("xid", 0, False, True),
    ]
    answer = client.post("/api/v1/budget/straggler/reset", json={})
    assert not any(b.lowered for b in PageBudgets.model_validate(answer.json()).budgets)
    assert client.post("/api/v1/budget/stragler/reset", json={}).status_code == 400


def test_pages_are_counted_with_the_node_days_of_the_window(
    client: httpx.Client, backend: Any, open_incident: Any
) -> None:
    """Three nodes sent in the last four days; a ticket and a page before the window do not count."""
    for name, severity in (("A1", "page"), ("A2", "page"), ("A3", "ticket")):
        open_incident(name, "gpu:n1.0", severity)
    assert client.get("/api/v1/budget").json()["node_days"] is None  # not watched for a day yet
    with backend.database.transaction() as connection:
        connection.execute("INSERT INTO meta VALUES ('watched_since', ?)", [str(NOW - 4 * 86_400 * SECOND)])
        [(nodes,)] = connection.execute("SELECT count(*) FROM entity WHERE kind = 'node'").fetchall()
    open_incident("A4", "gpu:n1.1")
    with backend.database.transaction() as connection:
        early = NOW - int(Budget().days + 1) * 86_400 * SECOND
        connection.execute("UPDATE incidents SET opened = make_timestamptz(?) WHERE id = 'A1'", [early])
    with closing(backend.cursor()) as cursor:
        assert count_pages(cursor, NOW, Budget().days) == ({"straggler": 2}, 4.0 * nodes)
        assert count_pages(cursor, NOW, 2.0) == ({"straggler": 2}, 2.0 * nodes)


def test_each_budget_has_the_pages_of_its_detector(client: httpx.Client, open_incident: Any) -> None:
    open_incident("A1", "gpu:n1.0")
    found = PageBudgets.model_validate(client.get("/api/v1/budget").json())
    assert {row.detector: row.pages for row in found.budgets} == {"straggler": 1, "xid": 0}
    assert found.days == Budget().days
