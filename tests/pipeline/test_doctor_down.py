"""The doctor finds a unit that should run and does not, as systemd reports it; one that was disabled is kept off."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from agents.node.doctor import check_agent
from agents.node.health import status_file
from pipeline.commands import doctor
from pipeline.commands.doctor_dashboard import check_dashboard
from pipeline.commands.doctor_units import check_executor
from pipeline.config.dashboard import Dashboard
from pipeline.config.sections import Agent, Api, Config, Spool, Store
from pipeline.runtime import systemd

SHELL = shutil.which("sh")
PORT = "dashboard: 127.0.0.1:8501: Address already in use; expected a free port"


class Manager:
    """Programs `systemctl` and `journalctl` that answer what a test says of the units."""

    def __init__(self, folder: Path) -> None:
        self.units, self._folder = folder / "units", folder
        self.units.mkdir()

    def enable(self, service: str) -> None:
        """Makes the link that `systemctl enable` makes."""
        wants = self.units / "multi-user.target.wants"
        wants.mkdir(exist_ok=True)
        (wants / f"fleetpulse-{service}.service").symlink_to(f"/lib/systemd/system/fleetpulse-{service}.service")

    def disable(self, service: str) -> None:
        (self.units / "multi-user.target.wants" / f"fleetpulse-{service}.service").unlink()

    def answer(self, state: str, shown: str = "", said: str = "") -> None:
        """state: of all units.   shown: their properties, one a line.   said: the last line of their log."""
        for name, text in (("state", state), ("shown", shown), ("said", said)):
            (self._folder / name).write_text(f"{text}\n" if text else "")
        choose = f'case "$1" in is-active) cat {self._folder}/state;; show) cat {self._folder}/shown;; esac'
        for program, body in (("systemctl", choose), ("journalctl", f"cat {self._folder}/said")):
            path = self._folder / program
            path.write_text(f"#!{SHELL}\n{body}\n")
            path.chmod(0o755)


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manager:
    made = Manager(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(systemd, "UNIT_FOLDER", tmp_path)
    monkeypatch.setattr(systemd, "HOST_UNITS", made.units)
    return made


def test_a_dashboard_that_should_run_and_ended_fails_with_its_last_line(manager: Manager, tmp_path: Path) -> None:
    """With its port in use the gate passed: `ok dashboard: the API accepts its token`."""
    manager.enable("dashboard")
    shown = "ActiveState=failed\nSubState=failed\nResult=exit-code\nExecMainStatus=2\nStatusText=\nInvocationID=0a"
    manager.answer("failed", shown, PORT)
    # the copy of its token is there while it runs alone: its absence is no second cause
    copy = Dashboard(token_file=systemd.CREDENTIALS / "fleetpulse-dashboard.service/dashboard-token")
    found = check_dashboard(Config(api=Api(token_file=tmp_path / "tokens"), dashboard=copy))
    assert (found.state, found.found) == (
        "fail",
        f"its unit is failed (failed); it ended with exit-code 2; its last line: {PORT}",
    )
    assert "systemctl restart fleetpulse-dashboard; to keep it off: systemctl disable --now" in found.fix


@pytest.mark.parametrize("state", ["active", "reloading", ""])
def test_a_dashboard_that_runs_or_of_which_systemd_says_nothing_is_not_down(manager: Manager, state: str) -> None:
    manager.enable("dashboard")
    manager.answer(state)
    assert check_dashboard(Config()).found == "the API asks for no token"


def test_a_disabled_dashboard_is_kept_off(manager: Manager) -> None:
    manager.answer("inactive")
    assert check_dashboard(Config()).state == "ok"


def test_a_unit_that_ended_and_was_then_disabled_is_kept_off(manager: Manager, tmp_path: Path) -> None:
    """`to keep it off: systemctl disable --now` did not end the failure: systemd keeps the state `failed`."""
    config = Config(agent=Agent(node="n1"), spool=Spool(tmp_path / "spool"), store=Store(tmp_path / "store.duckdb"))
    config = replace(config, api=Api(port=1))
    status = status_file.spool_status_path(config.spool.directory, "n1")
    status.parent.mkdir(parents=True)
    status.write_text("{}")
    manager.answer("failed", "ActiveState=failed\nSubState=failed")
    for service in ("agent", "pipeline", "dashboard", "executor"):
        manager.enable(service)
    checks = (check_agent, doctor.api, check_dashboard, check_executor)
    assert [check(config).state for check in checks] == ["fail"] * 4
    for service in ("agent", "pipeline", "dashboard", "executor"):
        manager.disable(service)
    assert [check(config).state for check in checks] == ["warn", "warn", "ok", "info"]
    assert "its unit is disabled" in check_agent(config).found


def test_an_executor_that_systemd_starts_again_and_again_fails(manager: Manager) -> None:
    manager.answer("inactive")
    assert check_executor(Config()).state == "info"
    manager.enable("executor")
    shown = "ActiveState=activating\nSubState=auto-restart\nResult=exit-code\nExecMainStatus=243\nStatusText=waits"
    manager.answer("activating", shown)
    found = check_executor(Config())
    expected = "its unit is activating (auto-restart); it ended with exit-code 243 (CREDENTIALS); its status: waits"
    assert (found.state, found.found) == ("fail", expected)
    manager.answer("active")
    assert check_executor(Config()).state == "ok"
