"""`fleetpulse doctor` on the agent of its node: it runs, does not run, or hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from agents.collectors.training.training import Training
from agents.node.doctor import check_agent, check_collectors
from agents.node.health import status_file
from agents.node.spool.spool import Spool
from pipeline.config.sections import Agent, Config, load_config
from pipeline.config.sections import Check as CheckSettings
from pipeline.config.sections import Spool as SpoolSettings
from pipeline.model.records import TELEMETRY
from pipeline.runtime import systemd
from tests.until import until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(agent=Agent(node="n1"), spool=SpoolSettings(directory=tmp_path / "spool"))


def write_status(config: Config, seconds_ago: float) -> None:
    """Writes the agent's status as of the given seconds ago."""
    path = status_file.spool_status_path(config.spool.directory, "n1")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")
    os.utime(path, (time.time() - seconds_ago,) * 2)


def test_an_agent_that_holds_its_spool_without_a_status_fails(config: Config) -> None:
    write_status(config, 31)
    with Spool(config.spool.directory, "n1", TELEMETRY, segment_bytes=1 << 16, free_bytes=0):
        found = check_agent(config)
    assert found.state == "fail"
    assert found.found == "has been hung or stopped for 31 s"


def test_an_agent_with_a_recent_status_is_ok(config: Config) -> None:
    write_status(config, 10)
    with Spool(config.spool.directory, "n1", TELEMETRY, segment_bytes=1 << 16, free_bytes=0):
        assert check_agent(config).state == "ok"


def test_an_agent_that_has_just_started_is_not_hung(config: Config) -> None:
    with Spool(config.spool.directory, "n1", TELEMETRY, segment_bytes=1 << 16, free_bytes=0):
        assert (check_agent(config).state, check_agent(config).found) == ("ok", "is starting")


def test_an_agent_that_has_run_and_does_not_is_a_failure_and_one_that_never_ran_is_none(config: Config) -> None:
    """The gate of upgrades passed with a dead agent."""
    assert check_agent(config).state == "info"
    write_status(config, 3600)
    found = check_agent(config)
    assert (found.state, found.found) == ("fail", "does not run, last status 3600 s ago")


def test_an_enabled_unit_whose_agent_never_came_up_is_a_failure_and_a_disabled_one_is_not(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(systemd, "UNIT_FOLDER", tmp_path)
    monkeypatch.setattr(systemd, "HOST_UNITS", tmp_path / "system")
    monkeypatch.setattr(systemd, "_ask_state", lambda unit: "inactive")
    write_status(config, 3600)
    found = check_agent(config)
    assert (found.state, found.found) == ("warn", "does not run, last status 3600 s ago; its unit is disabled")
    status_file.spool_status_path(config.spool.directory, "n1").unlink()
    assert check_agent(config).state == "info"
    enable(tmp_path / "system", "agent")
    found = check_agent(config)
    assert (found.state, found.found) == ("fail", "does not run, and has written no status")
    assert "systemctl disable --now fleetpulse-agent" in found.fix


def enable(folder: Path, service: str) -> None:
    """Makes the link that `systemctl enable` makes."""
    wants = folder / "multi-user.target.wants"
    wants.mkdir(parents=True, exist_ok=True)
    (wants / f"fleetpulse-{service}.service").symlink_to(f"/usr/lib/systemd/system/fleetpulse-{service}.service")


def test_beside_the_agent_of_this_host_doctor_says_that_it_runs_and_of_another_one_that_it_is_another(
    tmp_path: Path,
) -> None:
    """The agent has the socket of training steps to itself. That was `another agent on this node listens there`."""
    file, log, path = tmp_path / "fleetpulse.toml", tmp_path / "log", tmp_path / "training.sock"
    status = tmp_path / "spool" / "n1" / "status.json"
    text = '[agent]\nnode = "n1"\ncollectors = ["host", "training"]\ninterval = 0.2\n'
    file.write_text(f'{text}[spool]\ndirectory = "{tmp_path}/spool"\n[collector.training]\nsocket = "{path}"\n')
    config = load_config(file, {})
    words = [sys.executable, str(ROOT / "fleetpulse.py"), "agent", "--config", str(file)]
    with log.open("w") as said, subprocess.Popen(words, stderr=said, cwd=ROOT) as agent:
        try:
            until(lambda: (status.exists() and '"training": ["ok"' in status.read_text()) or agent.poll() is not None)
            assert (check_agent(config).name, check_agent(config).state) == ("agent", "ok")
            found = {check.name: check for check in check_collectors(config)}
            other = replace(config, spool=SpoolSettings(directory=tmp_path / "other"))
            foreign = {check.name: check for check in check_collectors(other)}
        finally:
            agent.terminate()
            assert agent.wait(10) == 0, log.read_text()
    training = found["collector training"]
    assert (training.state, training.found) == ("ok", "read by the agent of this host, which runs: ok")
    assert found["collector host"].state == "ok"
    assert "another agent on this node listens there" in foreign["collector training"].found


@pytest.mark.parametrize(
    ("collectors", "state", "said"),
    [
        ({"training": ["no data", "in use"]}, "info", ": no data: in use"),
        ({"training": ["hung", "x"]}, "fail", ": hung: x"),
    ],
)
def test_a_collector_that_the_agent_itself_cannot_read_is_reported_as_the_agent_has_it(
    config: Config, collectors: dict[str, list[str]], state: str, said: str
) -> None:
    write_report(config, collectors)
    (check,) = check_collectors(config, [Training()])
    assert (check.state, check.found) == (state, f"read by the agent of this host, which runs{said}")


def write_report(config: Config, collectors: dict[str, list[str]]) -> None:
    """Writes a status of now, as an agent does."""
    path = status_file.spool_status_path(config.spool.directory, "n1")
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {"version": status_file.VERSION, "node": "n1", "boot": status_file.read_boot_id(), "simulated": False}
    whole |= {"since_boot": status_file.seconds_since_boot(), "collectors": collectors, "conditions": []}
    path.write_text(json.dumps(whole))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_sees_by_the_status_that_the_agent_runs() -> None:
    """The spool is private. The status in /run is not: that user read that no telemetry is sent."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        status = folder / "status.json"
        status.write_text("{}")
        spool = SpoolSettings(directory=folder / "spool")
        config = Config(agent=Agent(node="n1"), spool=spool, check=CheckSettings(status_file=status))
        with Spool(spool.directory, "n1", TELEMETRY, segment_bytes=1 << 16, free_bytes=0):
            os.seteuid(65534)
            try:
                found = check_agent(config)
            finally:
                os.seteuid(0)
    assert (found.state, found.found) == ("ok", "wrote its status 0 s ago")
