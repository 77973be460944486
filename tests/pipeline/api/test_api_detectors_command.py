"""`fleetpulse detectors` with and without a running API: disabled and failing detectors, and their configuration."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import fleetpulse
from pipeline.api.server import create_app, start_server
from pipeline.config.sections import Api, Config


class FaultyBackend:
    """A backend with one detector that lacks a signal and one that fails."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def list_detectors(self) -> Sequence[dict[str, Any]]:
        changed = {"link": {"off": ["nic.state"]}, "xid": {"errors": 3}}
        return [{**row, **changed.get(row["name"], {})} for row in self._backend.list_detectors()]


@pytest.fixture
def site(backend: Any, tmp_path: Path) -> Iterator[str]:
    """Configuration of a pipeline with a running API."""
    stop, config = threading.Event(), Config(api=Api(port=0))
    serving = start_server(create_app(FaultyBackend(backend), config), config, stop)
    file = tmp_path / "site.toml"
    file.write_text(f"[api]\nport = {serving.port}\n[detector.sdc]\nquorum = 7\n")
    yield str(file)
    stop.set()
    serving.join(10)


def test_disabled_and_failing_detectors_are_read_from_the_running_pipeline(
    site: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fleetpulse.main(["detectors", "--config", site, "--output", "json"]) == 0
    out, err = capsys.readouterr()
    rows = {row["name"]: row for row in json.loads(out)}
    assert err == ""
    assert {name for name, row in rows.items() if row["off"]} == {"link"}
    assert {name: row["errors"] for name, row in rows.items() if row["errors"]} == {"xid": 3}
    assert rows["sdc"]["settings"]["quorum"] == 7
    assert fleetpulse.main(["detectors", "--config", site]) == 0
    head = capsys.readouterr().out.splitlines()[0].split()
    assert head == ["name", "family", "class", "off", "errors", "needs", "wants", "blind"]
    assert fleetpulse.main(["detectors", "link", "xid", "sdc", "--config", site]) == 0
    said = capsys.readouterr().out
    assert "Disabled: the input has no nic.state" in said
    assert "Failed on 3 frames" in said
    assert "  quorum = 7" in said


def test_without_a_running_pipeline_one_line_says_that_the_state_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "site.toml").write_text("[api]\nport = 9\n[detector.sdc]\nquorum = 7\n")
    assert fleetpulse.main(["detectors", "sdc", "--config", str(tmp_path / "site.toml")]) == 0
    out, err = capsys.readouterr()
    assert "  quorum = 7" in out
    assert err.startswith("fleetpulse: state in the pipeline unknown: API http://127.0.0.1:9 does not answer")
    assert err.count("\n") == 1


def test_an_invalid_detector_setting_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "site.toml").write_text("[detector.sdc]\nquorun = 7\n")
    assert fleetpulse.main(["detectors", "--config", str(tmp_path / "site.toml")]) == 2
    assert "quorun" in capsys.readouterr().err
