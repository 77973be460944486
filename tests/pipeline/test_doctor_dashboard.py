"""The doctor finds a dashboard that may not read the API: its pages would show no data."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.commands.doctor_dashboard import check_dashboard, check_login
from pipeline.commands.units import install_units
from pipeline.config.dashboard import Dashboard, Oidc
from pipeline.config.sections import Api, Config
from pipeline.runtime import systemd
from tests.pipeline.api.test_api_acts import Served

ROOT = Path(__file__).parents[2]


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    made = Served(tmp_path, monkeypatch)  # type: ignore[no-untyped-call]
    yield made
    made.close()  # type: ignore[no-untyped-call]


def test_a_token_that_the_api_accepts_is_ok_and_another_one_fails(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    config = dataclasses.replace(served.config, dashboard=Dashboard(token_file=file))
    file.write_text(f"# written by init\ndashboard:{served.tokens['viewer']}\noperator:x\n")
    assert check_dashboard(config).state == "ok"
    file.write_text(f"dashboard:{'0' * 32}\noperator:{served.tokens['operator']}\n")
    found = check_dashboard(config)
    assert (found.state, "the API refuses its first token (HTTP 401)" in found.found) == ("fail", True)
    file.unlink()
    assert "cannot be read" in check_dashboard(config).found


@pytest.mark.parametrize(
    ("first", "state"), [("fleetpulse\0pipeline", "info"), ("fleetpulse\0up", "fail"), ("init", "fail")]
)
def test_in_the_pipelines_container_the_dashboard_is_another_one(
    first: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`doctor --wait` in the container, the gate of upgrades with compose and on Kubernetes, never passed."""
    monkeypatch.setattr(systemd, "_read_first_process", lambda: f"/usr/bin/python\0/opt/bin/{first}\0".split("\0"))
    config = Config(api=Api(token_file=tmp_path / "tokens"))
    assert check_dashboard(config).state == state


def test_without_a_token_for_the_dashboard_it_fails_unless_its_unit_passes_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_dashboard(Config()).state == "ok"
    config = Config(api=Api(token_file=tmp_path / "tokens"))
    monkeypatch.setattr(systemd, "UNIT_FOLDER", tmp_path / "none")
    found = check_dashboard(config)
    assert (found.state, found.fix) == ("fail", f'[dashboard] token_file = "{tmp_path / "tokens"}"')
    monkeypatch.setattr(systemd, "UNIT_FOLDER", tmp_path)
    assert check_dashboard(config).state == "info"


def test_a_server_of_wheels_whose_unit_passes_the_token_passes_the_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`setup --units` leaves the token to the unit as a package does; `doctor --wait` never ended well there."""
    config = Config(api=Api(token_file=tmp_path / "tokens"))
    monkeypatch.setattr(systemd, "UNIT_FOLDER", tmp_path / "none")
    monkeypatch.setattr(systemd, "HOST_UNITS", tmp_path / "etc/systemd/system")
    program = tmp_path / "venv/bin/fleetpulse"
    install_units("server", ROOT / "deploy" / "systemd", program, tmp_path / "etc")
    assert check_dashboard(config).state == "fail", "the units are of another installation"
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    assert (check_dashboard(config).state, systemd.has_unit("pipeline"), systemd.has_unit("agent")) == (
        "info",
        True,
        False,
    )


@pytest.mark.parametrize(("minutes", "state"), [(0.0, "ok"), (5.0, "ok"), (60.0, "info"), (720.0, "warn")])
def test_the_check_of_the_login_says_how_late_a_revoked_one_is_noticed(minutes: float, state: str) -> None:
    login = Oidc("https://id.example.org", "f", Path("s"), unchecked_minutes=minutes)
    board = Dashboard(oidc=login, roles={"ops": "operator"}, token_file=Path("t"))
    found = check_login(Config(dashboard=board))
    assert found.state == state
    assert "within 300 s while" in found.found
    assert (f"up to {minutes:g} min later" in found.found) == (state != "ok")
    assert ("unchecked_minutes" in found.fix) == (state != "ok")
    assert check_login(Config()).found == "no [dashboard.oidc]"
