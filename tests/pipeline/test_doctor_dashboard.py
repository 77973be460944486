"""The doctor finds a dashboard that may not read the API: its pages would show no data."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.commands.doctor_dashboard import check_dashboard, check_login
from pipeline.commands.units import install_units
from pipeline.config.dashboard import Dashboard, Oidc, ProxyLogin
from pipeline.config.sections import Api, Config, Store
from pipeline.runtime import credentials, systemd
from tests.pipeline.api.test_api_acts import Served

ROOT = Path(__file__).parents[2]
OIDC = {"oidc": Oidc("https://id.example.org", "f", Path("s"))}


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
    ("token", "state", "found"),
    [
        ("dashboard", "ok", "the API accepts its token"),
        ("viewer", "fail", "its first token, of viewer, may not act on behalf of others"),
        ("board", "warn", "its first token is operator, and [dashboard] roles has admin"),
        ("gone", "fail", "the API refuses its first token (HTTP 401)"),
    ],
)
@pytest.mark.parametrize("login", [OIDC, {"proxy_login": ProxyLogin("X-User", "X-Groups")}])
def test_with_a_login_its_token_must_name_people(
    served: Served, tmp_path: Path, login: Any, token: str, state: str, found: str
) -> None:
    """With the token of a viewer, which the fix was, each person got 403 and the check was ok."""
    made = served.tokens | {"gone": "0" * 32}
    made["board"] = served.token(tmp_path, "board", "operator", on_behalf_of=True)  # type: ignore[no-untyped-call]
    file = tmp_path / "dashboard-token"
    file.write_text(f"dashboard:{made[token]}\n")
    board = Dashboard(token_file=file, roles={"sre": "operator", "root": "admin"}, **login)
    check = check_dashboard(dataclasses.replace(served.config, dashboard=board))
    assert (check.state, check.found.endswith(found)) == (state, True), check.found
    fix = "fleetpulse token create dashboard --role admin --on-behalf-of --days 0; dashboard:TOKEN as the first line of"
    assert check.fix == ("" if state == "ok" else f"{fix} {file}")


def test_the_token_of_a_copy_is_written_into_the_file_that_it_is_made_from(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy ends with its unit: one of a unit that is off is no fault."""
    units, source = tmp_path / "units", tmp_path / "dashboard-token"
    for module, name, value in ((credentials, "CREDENTIALS", tmp_path), (credentials, "DROP_INS", units)):
        monkeypatch.setattr(module, name, value)
    copy = tmp_path / "fleetpulse-dashboard.service" / "dashboard-token"
    (units / "fleetpulse-dashboard.service.d").mkdir(parents=True)
    drop_in = f"[Service]\nLoadCredential=dashboard-token:{source}\n"
    (units / "fleetpulse-dashboard.service.d" / "login.conf").write_text(drop_in)
    config = dataclasses.replace(served.config, dashboard=Dashboard(token_file=copy))
    assert (check_dashboard(config).state, "its unit is off" in check_dashboard(config).found) == ("info", True)
    copy.parent.mkdir()
    copy.write_text(f"dashboard:{'0' * 32}\n")
    assert check_dashboard(config).fix.endswith(f"first line of {source}; then systemctl restart fleetpulse-dashboard")


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


def test_an_api_with_tokens_of_the_command_alone_asks_the_dashboard_for_one(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without [api] token_file the check was ok, and the pages showed 401."""
    monkeypatch.setenv("FLEETPULSE_TOKEN", served.tokens["viewer"])  # whoever runs doctor has one
    check = check_dashboard(served.config)
    made = "fleetpulse token create dashboard --role viewer --days 0"
    assert (check.state, check.fix) == ("fail", f"{made}; dashboard:TOKEN into a file for [dashboard] token_file")
    served.stop.set()
    served.server.join(5)
    down = dataclasses.replace(served.config, store=Store(path=served.file.with_name("store.duckdb")))
    assert check_dashboard(down).state == "fail", "an API that is down asks for one as well"
    served.file.with_name("store.duckdb.tokens").write_text("[")
    assert check_dashboard(down).state == "info"


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
