"""`fleetpulse once` in every format, also without a GPU."""

from __future__ import annotations

import csv
import io
import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from agents.collector import Collector, Device, NoData, Reading
from agents.node.health import status_file
from agents.node.health.report import open_health
from agents.node.once import describe_slow_disk, print_once, read_once
from pipeline.config.sections import Agent, Config, Spool
from pipeline.model.records import Event, Origin


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A node without network interfaces, so that one collector certainly has no data."""
    return Config(agent=Agent("n1"), collector={"network": {"root": str(tmp_path)}})


def test_once_returns_readings_or_the_reason_per_collector(config: Config) -> None:
    looks = {look.collector: look for look in read_once(config)}
    assert looks["host"].readings[0].entities == ("node:n1",)
    assert looks["network"].problem.startswith("no data: no network interface")
    assert looks["nvml"].readings or looks["nvml"].problem.startswith("no data: ")


def test_json_is_valid_and_problems_go_to_stderr_too(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    assert print_once(config, "json") == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["node"] == "n1"
    assert document["entities"]["node:n1"]["node.cpu_count"] >= 1
    assert document["collectors"]["host"] == "ok"
    assert document["collectors"]["network"].startswith("no data")
    assert "collector network: no data" in err


@pytest.mark.slow
def test_a_slow_disk_of_the_running_agent_is_reported_on_stderr(
    tmp_path: Path, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(config, spool=Spool(tmp_path / "spool"))
    print_once(config, "json")
    assert "spool:" not in capsys.readouterr().err
    status_file.spool_status_path(tmp_path / "spool", "n1").parent.mkdir(parents=True)
    now = time.time_ns() // 1000
    fitness = open_health(config, Origin("local", "n1", bytes(16), False), lambda subject, text: None, {})
    slow = {"state": "active", "since": now, "seconds": 7.0, "waiting": 9, "lost": 0}
    fitness.update((), [Event(now, "node:n1", "disk_slow", slow)], (), now)
    print_once(config, "json")
    assert "spool: the disk of the spool is slow: a message has waited 7.0 s" in capsys.readouterr().err


@pytest.mark.slow
def test_a_disk_that_does_not_respond_does_not_block_it(tmp_path: Path, config: Config) -> None:
    place = status_file.spool_status_path(tmp_path / "spool", "n1")
    place.parent.mkdir(parents=True)
    os.mkfifo(place)  # opening it waits for a writer, and there is none
    began = time.monotonic()
    assert "has not responded for 2 s" in describe_slow_disk(replace(config, spool=Spool(tmp_path / "spool")))
    assert time.monotonic() - began < 10.0
    os.close(os.open(place, os.O_RDWR | os.O_NONBLOCK))


def test_jsonl_has_one_entity_per_line(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    print_once(config, "jsonl")
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "node:n1" in {row["entity"] for row in rows}
    assert all(row["time"].endswith("Z") and len(row["time"]) == 27 for row in rows)


@pytest.mark.slow
def test_csv_has_one_signal_per_line_with_its_unit(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    print_once(config, "csv")
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    uptime = next(row for row in rows if row["signal"] == "node.uptime")
    assert (uptime["entity"], uptime["unit"]) == ("node:n1", "s")
    assert float(uptime["value"]) > 0


def test_the_table_shows_missing_as_a_dash(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    print_once(config, "table")
    out = capsys.readouterr().out
    assert "node:n1" in out
    assert "node.memory_total" in out
    assert "nan" not in out


# --- collectors that fail, hang or are absent -------------------------------------------------------------------------


@dataclass
class Scripted(Collector):
    """Returns a load, a gap, no data, a fault, or a result only when it is closed."""

    name = "scripted"
    signals = ("node.load1", "node.load5")
    isolated = False
    does: str = "ok"
    _released: threading.Event = field(default_factory=threading.Event, init=False, repr=False)

    def read(self) -> tuple[Reading, ...]:
        if self.does == "no data":
            raise NoData("nothing here")
        if self.does == "fault":
            raise OSError("bus error")
        if self.does == "hangs":
            self._released.wait(60)
        columns = {"node.load1": np.array([1.5]), "node.load5": np.array([np.nan if self.does == "gap" else 2.5])}
        return (Reading("node", ("node:n1",), columns),)

    def inventory(self) -> Mapping[str, Device]:
        return {"node:n1": Device()}


class Other(Scripted):
    """Another one, with a long deadline."""

    name = "other"


@pytest.mark.parametrize(
    ("does", "code", "output"),
    [
        ("ok", 0, ""),
        ("no data", 0, "collector scripted: no data: nothing here\n"),
        ("fault", 1, "collector scripted: fault: OSError: bus error\n"),
        ("hangs", 1, "collector scripted: hung: no answer within 0.3 s\n"),
    ],
)
def test_a_collector_that_fails_or_hangs_is_exit_code_1_and_the_others_are_printed(
    config: Config, capsys: pytest.CaptureFixture[str], does: str, code: int, output: str
) -> None:
    one = Scripted(does=does, deadline=0.3)
    try:
        assert print_once(config, "table", [one, Other()]) == code
    finally:
        one._released.set()
    out, err = capsys.readouterr()
    assert "node.load1" in out
    assert err == output


def test_a_hang_with_a_short_deadline_does_not_wait_for_the_longest_deadline(config: Config) -> None:
    one, began = Scripted(does="hangs", deadline=0.3), time.monotonic()
    try:
        looks = {look.collector: look for look in read_once(config, [one, Other(deadline=30.0)])}
    finally:
        one._released.set()
    assert time.monotonic() - began < 10
    assert (looks["scripted"].failed, looks["other"].problem) == (True, "")


@pytest.mark.slow
def test_each_has_its_own_deadline_independent_of_the_others(config: Config) -> None:
    late = Other(does="hangs", deadline=30.0)
    threading.Timer(1.0, late._released.set).start()  # long after the other was abandoned
    one = Scripted(does="hangs", deadline=0.2)
    try:
        looks = {look.collector: look for look in read_once(config, [one, late])}
    finally:
        one._released.set()
    assert looks["scripted"].problem == "hung: no answer within 0.2 s"
    assert looks["other"].readings


def test_the_table_explains_a_dash_if_there_is_one(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    print_once(config, "table", [Scripted(does="gap")])
    out, err = capsys.readouterr()
    assert any(line.split() == ["node.load5", "-", "1"] for line in out.splitlines())
    assert err.splitlines()[-1].startswith("- : not measured in one reading, or not supported;")
    print_once(config, "json", [Scripted(does="gap")])
    assert capsys.readouterr().err == ""
