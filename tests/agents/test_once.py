"""One reading, in every format, also where there is no GPU."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from agents.agent import once, render_once
from pipeline.config import Agent, Config


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A node with a network tree of no interfaces, so that one collector surely has no data."""
    return Config(agent=Agent("n1"), collector={"network": {"root": str(tmp_path)}})


def test_once_says_per_collector_what_it_brought_or_why_not(config: Config) -> None:
    looks = {look.collector: look for look in once(config)}
    assert looks["host"].readings[0].entities == ("node:n1",)
    assert looks["network"].trouble.startswith("no data: no network interface")
    assert looks["nvml"].readings or looks["nvml"].trouble.startswith("no data: ")


def test_json_is_json_and_troubles_go_to_stderr_too(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    assert render_once(config, "json") == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["node"] == "n1"
    assert document["entities"]["node:n1"]["node.cpu_count"] >= 1
    assert document["collectors"]["host"] == "ok"
    assert document["collectors"]["network"].startswith("no data")
    assert "collector network: no data" in err


def test_jsonl_has_one_entity_per_line(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    render_once(config, "jsonl")
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "node:n1" in {row["entity"] for row in rows}
    assert all(row["time"].endswith("Z") and len(row["time"]) == 27 for row in rows)


def test_csv_has_one_signal_per_line_with_its_unit(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    render_once(config, "csv")
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    uptime = next(row for row in rows if row["signal"] == "node.uptime")
    assert (uptime["entity"], uptime["unit"]) == ("node:n1", "s")
    assert float(uptime["value"]) > 0


def test_the_table_shows_missing_as_a_dash(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    render_once(config, "table")
    out = capsys.readouterr().out
    assert "node:n1" in out
    assert "node.memory_total" in out
    assert "nan" not in out
