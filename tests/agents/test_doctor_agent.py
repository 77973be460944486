"""`fleetpulse doctor` on the agent of its node: it runs, does not run, or hangs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from agents.node.doctor import check_agent
from agents.node.health import status_file
from agents.node.spool.spool import Spool
from pipeline.config.sections import Agent, Config
from pipeline.config.sections import Spool as SpoolSettings
from pipeline.model.records import TELEMETRY


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


def test_an_agent_that_does_not_run_is_a_warning(config: Config) -> None:
    assert check_agent(config).state == "info"
    write_status(config, 3600)
    assert check_agent(config).state == "warn"
