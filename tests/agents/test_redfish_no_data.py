"""A BMC that answers without data: its resources are still read soon, and it does not count as healthy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from agents.collectors.bmc import redfish_http as clients
from agents.collectors.bmc.redfish import Redfish
from agents.collectors.bmc.redfish_document import ResourceScope
from agents.collectors.bmc.redfish_schedule import MAX_FAST_RETRY_S, PollSchedule, PollTarget
from agents.collectors.bmc.redfish_settings import BmcSettings
from pipeline.config.settings import build_section
from pipeline.model.errors import ConfigError
from pipeline.model.records import Event
from tests.agents.redfish_double import Double
from tests.agents.redfish_faults import Fault
from tests.agents.redfish_trees import FLOW, LEAK, cdu


class BmcReader:
    """Reads one BMC until a condition holds."""

    def __init__(self, double: Double, password: Path, **how: object) -> None:
        who = {"user": double.user, "password_file": password, "allow_http": True, "read": ("coolant", "leaks")}
        self.collector = Redfish(bmcs=(BmcSettings("b", double.url, **{**who, **how}),))  # type: ignore[arg-type]
        self.events: list[Event] = []
        self.reachable = -1.0
        self.seen: set[str] = set()
        self.collector.open("n1")

    def until(self, holds: Callable[[], bool], patience: float = 20.0) -> None:
        until = time.monotonic() + patience
        while time.monotonic() < until:
            for reading in self.collector.read():
                self.events += reading.events
                self.seen |= set(reading.columns)
                if "bmc.reachable" in reading.columns:
                    self.reachable = float(reading.columns["bmc.reachable"][0])
            if holds():
                return
            time.sleep(0.02)
        raise AssertionError(f"not within {patience} s: {self.events}")

    def events_of_kind(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]


@pytest.fixture
def double() -> Iterator[Double]:
    with Double(cdu()) as made:
        yield made


@pytest.fixture
def start_reader(tmp_path: Path) -> Iterator[Callable[..., BmcReader]]:
    opened: list[BmcReader] = []

    def begin(double: Double, **how: object) -> BmcReader:
        password = tmp_path / "password"
        password.touch(0o600)
        password.write_text(double.password)
        opened.append(BmcReader(double, password, **how))
        return opened[-1]

    yield begin
    for one in opened:
        one.collector.close()


def test_a_failing_leak_resource_is_read_every_half_minute() -> None:
    now = [0.0]
    schedule = PollSchedule(lambda: now[0], lambda: 1.0)
    leak = PollTarget(LEAK, "leak_detector", ResourceScope("b"), 5.0)
    schedule.schedule(leak)
    read_times = []
    while now[0] < 3 * 3600:
        if schedule.pop_due() is leak:
            read_times.append(now[0])
            schedule.record_failure(leak, now[0], bmc_down=False, retry_after=0.0)
        now[0] += 1.0
    assert max(b - a for a, b in pairwise(read_times)) <= MAX_FAST_RETRY_S + 2


@pytest.mark.parametrize("status", [pytest.param(404, marks=pytest.mark.slow), 500])
def test_a_bmc_with_only_errors_is_reported_lost_with_a_reason_and_back(
    double: Double, start_reader: Callable[..., BmcReader], status: int
) -> None:
    reader = start_reader(double)
    reader.until(lambda: {"coolant.flow", "leak.state"} <= reader.seen)
    double.fault("/redfish/*", Fault(status=status))
    reader.until(lambda: bool(reader.events_of_kind("bmc_lost")) and reader.reachable == 0)
    assert f"HTTP {status}" in reader.events_of_kind("bmc_lost")[0].data["reason"]
    double.clear_fault()
    reader.until(lambda: bool(reader.events_of_kind("bmc_back")) and reader.reachable == 1, 45.0)
    reader.seen.clear()
    reader.until(lambda: {"coolant.flow", "leak.state"} <= reader.seen)
    assert len(reader.events_of_kind("bmc_lost")) == len(reader.events_of_kind("bmc_back")) == 1


@pytest.mark.slow
def test_one_failing_sensor_does_not_make_its_bmc_lost(double: Double, start_reader: Callable[..., BmcReader]) -> None:
    reader = start_reader(double)
    reader.until(lambda: {"coolant.flow", "leak.state"} <= reader.seen)
    double.fault(FLOW, Fault(status=404))
    before = len(double.requests)
    reader.until(lambda: len(double.requests) > before + 30)
    assert reader.reachable == 1
    assert not reader.events_of_kind("bmc_lost")


def test_html_responses_are_not_a_healthy_bmc(double: Double, start_reader: Callable[..., BmcReader]) -> None:
    double.fault("/redfish/*", Fault(body=b"<html>It works!</html>"))
    reader = start_reader(double)
    reader.until(lambda: reader.reachable == 0)
    assert "not JSON" in reader.events_of_kind("bmc_lost")[0].data["reason"]


@pytest.mark.slow
def test_a_bmc_with_an_endless_response_is_unreachable(
    double: Double, start_reader: Callable[..., BmcReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "CONNECT_S", 0.5)
    double.fault("/redfish/*", Fault(drip=0.9))
    reader = start_reader(double, timeout=1.0)
    reader.until(lambda: reader.reachable == 0)
    assert "no response within 1 s" in reader.events_of_kind("bmc_lost")[0].data["reason"]


def test_a_duplicate_bmc_is_named_and_nothing_else_is_printed() -> None:
    names = ("cdu1", "cdu2", "cdu1")
    with pytest.raises(ConfigError) as error:
        Redfish(bmcs=tuple(BmcSettings(name, "https://h") for name in names))
    assert "'cdu1'" in str(error.value)
    assert "cdu2" not in str(error.value)


@pytest.mark.parametrize("url", ["https://h:99999", "https://h:0", "https://h:port", "https://[h"])
def test_an_impossible_port_is_a_configuration_error(url: str) -> None:
    with pytest.raises(ConfigError, match="1 to 65535"):
        build_section(Redfish, {"bmcs": [{"name": "a", "url": url}]}, "f.toml", "collector.redfish")


def test_a_thread_that_ended_is_a_collector_fault_and_not_a_quiet_bmc(
    double: Double, start_reader: Callable[..., BmcReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = start_reader(double)
    reader.until(lambda: "coolant.flow" in reader.seen)
    (one,) = reader.collector._pollers

    def broken() -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(one, "_next_target", broken)
    one.join(10.0)
    with pytest.raises(RuntimeError, match=r"its thread ended: RuntimeError: can't start new thread"):
        reader.collector.read()
