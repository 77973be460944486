"""`once` and `doctor` report a BMC that cannot be read, and why: its first reading is empty, so they read again."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import pytest

from agents.collector import Reading
from agents.collectors.bmc.redfish import Redfish
from agents.collectors.bmc.redfish_settings import BmcSettings
from agents.node import doctor
from agents.node.once import find_unreachable, print_once, read_once
from pipeline.config.sections import Agent, Config
from pipeline.model.records import Event
from tests.agents.redfish_double import Double
from tests.agents.redfish_trees import cdu

CONFIG = Config(agent=Agent("n1"))


@pytest.fixture(autouse=True)
def _short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real BMC gets 5 s; those on loopback respond within one."""
    monkeypatch.setattr(Redfish, "settling", 1.0)


@pytest.fixture
def closed() -> str:
    """A port without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_doctor_fails_a_bmc_whose_port_is_closed_and_once_reports_it(
    closed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [Redfish(bmcs=(BmcSettings("b", closed, allow_http=True),))]
    found = {check.name: check for check in doctor.check_collectors(CONFIG, asked)}["collector redfish"]
    assert found.state == "fail"
    assert found.found.startswith("bmc:b: ")
    assert "refused" in found.found
    assert "[[collector.redfish.bmcs]]" in found.fix
    print_once(CONFIG, "jsonl", [Redfish(bmcs=(BmcSettings("b", closed, allow_http=True),))])
    assert "bmc:b: " in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("password", "message"), [("wrong", "HTTP 401"), (None, "No such file")])
def test_doctor_fails_a_bmc_that_refuses_the_login(tmp_path: Path, password: str | None, message: str) -> None:
    path = tmp_path / "password"
    if password is not None:
        path.touch(0o600)
        path.write_text(password)
    with Double(cdu()) as double:
        bmc = BmcSettings("b", double.url, double.user, path, allow_http=True)
        found = doctor.check_collectors(CONFIG, [Redfish(bmcs=(bmc,))])[0]
    assert found.state == "fail"
    assert message in found.found


@pytest.mark.slow
def test_once_shows_the_values_of_a_bmc_that_responds_within_seconds(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.touch(0o600)
    with Double(cdu()) as double:
        path.write_text(double.password)
        (look,) = read_once(CONFIG, [Redfish(bmcs=(BmcSettings("b", double.url, double.user, path, allow_http=True),))])
    signals = {name for reading in look.readings for name in reading.columns}
    assert {"coolant.flow", "leak.state", "bmc.reachable"} <= signals
    assert doctor.check_report(look).state == "ok"


def test_an_exporter_that_is_down_is_named_with_its_reason_and_one_that_is_back_is_not() -> None:
    def reading_of(value: float, state: str, reason: str) -> list[Reading]:
        event = Event(1, "exporter:e", "exporter", {"state": state, "reason": reason})
        up = Reading("exporter", ("exporter:e",), {"exporter.up": np.array([value])})
        return [up, Reading("exporter", (), {}, (event,))]

    down = reading_of(0.0, "down", "HTTP 503")
    assert find_unreachable(down) == {"exporter:e": "HTTP 503"}
    assert find_unreachable([*down, *reading_of(1.0, "up", "")]) == {}


def test_a_bmc_without_a_response_yet_is_a_warning() -> None:
    waits = Reading("bmc", ("bmc:b",), {"bmc.pending": np.array([5.0])})
    assert find_unreachable([waits]) == {"bmc:b": "no answer yet"}
