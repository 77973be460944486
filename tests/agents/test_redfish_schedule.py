"""The request budget of one BMC: order, pauses, and a coolant unit's row from its connectors."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from agents.collectors.bmc.redfish import Redfish
from agents.collectors.bmc.redfish_cooling import STALE_S, UnitTotals
from agents.collectors.bmc.redfish_document import EntityRow, ResourceScope
from agents.collectors.bmc.redfish_http import RedfishConnection, RedfishSession, RequestError, read_password
from agents.collectors.bmc.redfish_poller import EVENTS_PER_MINUTE, MAX_ENTITIES, ResultQueue
from agents.collectors.bmc.redfish_schedule import (
    MAX_BACKOFF_S,
    MAX_FAST_IN_A_ROW,
    PAUSE_SHARE,
    PollSchedule,
    PollTarget,
)
from agents.collectors.bmc.redfish_settings import BmcSettings
from agents.collectors.registry import configured_collectors
from pipeline.model.errors import ConfigError


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A schedule with a BMC of the given response times."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.schedule = PollSchedule(self.clock, random=lambda: 1.0)
        self.asked: list[tuple[float, str]] = []

    def add(self, path: str, kind: str, every: float, due: float = -1.0) -> PollTarget:
        target = PollTarget(path, kind, ResourceScope("b1"), every)
        self.schedule.schedule(target, due)
        return target

    def run(self, seconds: float, took: dict[str, float], default: float = 0.02) -> None:
        until = self.clock.now + seconds
        while self.clock.now < until:
            target = self.schedule.pop_due()
            if target is None:
                self.clock.now += min(until - self.clock.now + 1e-6, max(self.schedule.seconds_until_due(), 1e-6))
                continue
            began = self.clock.now
            self.asked.append((began, target.path))
            self.clock.now += took.get(target.path, default)
            self.schedule.record_success(target, began)

    def times(self, path: str) -> list[float]:
        return [time for time, asked in self.asked if asked == path]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_fast_sensors_keep_their_interval_during_an_inventory(bench: Bench) -> None:
    bench.add("flow", "connector", 1.0)
    bench.add("leak", "leak_detector", 5.0)
    for number in range(500):
        bench.add(f"outlet{number}", "outlet", 3600.0)
    bench.run(20, {})
    gaps = [b - a for a, b in pairwise(bench.times("flow"))]
    assert max(gaps) < 1.0 + 2 * 0.02 * (1 + PAUSE_SHARE)  # one request of the walk at most
    assert max(b - a for a, b in pairwise(bench.times("leak"))) < 5.1
    assert len({path for _, path in bench.asked}) == 502


def test_resources_that_lead_to_fast_sensors_are_read_first(bench: Bench) -> None:
    for path, kind in (("outlets", "outlets"), ("psus", "psus"), ("connectors", "connectors"), ("cdus", "cdus")):
        bench.add(path, kind, 3600.0)
    bench.run(1, {})
    assert [path for _, path in bench.asked] == ["cdus", "connectors", "psus", "outlets"]


def test_other_resources_are_read_even_with_too_many_fast_sensors(bench: Bench) -> None:
    for number in range(60):
        bench.add(f"flow{number}", "connector", 1.0)
    bench.add("psu", "psu", 5.0)
    bench.run(30, {}, default=0.1)
    assert len(bench.times("psu")) >= 4
    before = [path for _, path in bench.asked]
    first, second = [i for i, path in enumerate(before) if path == "psu"][:2]
    assert second - first >= MAX_FAST_IN_A_ROW


def test_urgent_targets_are_read_first(bench: Bench) -> None:
    for number in range(5):
        bench.add(f"flow{number}", "connector", 1.0)
    bench.schedule.schedule(PollTarget("leak", "leak_detector", ResourceScope("b1"), 5.0), urgent=True)
    bench.run(0.5, {})
    assert bench.asked[0][1] == "leak"


def test_a_pause_after_each_request_leaves_the_bmc_a_fifth_of_its_time(bench: Bench) -> None:
    bench.add("flow", "connector", 1.0)
    bench.run(3600, {}, default=180.0)
    gaps = [b - a for a, b in pairwise(bench.times("flow"))]
    assert min(gaps) >= 180 + 30
    assert len(gaps) >= 16


def test_a_slow_resource_takes_a_small_share_of_the_time(bench: Bench) -> None:
    bench.add("psu", "psu", 30.0)
    bench.add("flow", "connector", 1.0)
    bench.run(3600, {"psu": 60.0})
    assert len(bench.times("psu")) <= 4
    assert len(bench.times("flow")) > 3000


def test_a_bmc_without_response_is_retried_with_backoff_up_to_ten_minutes(bench: Bench) -> None:
    target = bench.add("flow", "connector", 1.0)
    waits = []
    for _ in range(12):
        assert bench.schedule.pop_due() is not None
        waits.append(bench.schedule.record_failure(target, bench.clock.now, bmc_down=True, retry_after=0.0))
        assert bench.schedule.pop_due() is None
        bench.clock.now += max(waits[-1], bench.schedule.seconds_until_due()) + 1e-6
    assert waits[:3] == [5.0, 10.0, 20.0]
    assert waits[-1] == MAX_BACKOFF_S
    bench.schedule.pop_due()
    bench.schedule.record_success(target, bench.clock.now)
    assert bench.schedule.failures_in_a_row == 0


def test_targets_that_failed_while_the_bmc_was_down_are_read_when_it_is_back(bench: Bench) -> None:
    target = bench.add("root", "root", 3600.0)
    until = bench.clock.now + 4 * 3600
    while bench.clock.now < until:
        assert bench.schedule.pop_due() is target
        bench.schedule.record_failure(target, bench.clock.now, bmc_down=True, retry_after=0.0)
        assert bench.schedule.seconds_until_due() < MAX_BACKOFF_S + 1
        bench.clock.now += bench.schedule.seconds_until_due() + 1e-6


def test_one_resource_without_response_is_read_at_growing_intervals(bench: Bench) -> None:
    dead = bench.add("dead", "psu", 30.0)
    bench.add("flow", "connector", 1.0)
    asked = []
    until = bench.clock.now + 4 * 3600
    while bench.clock.now < until:
        target = bench.schedule.pop_due()
        if target is None:
            bench.clock.now += max(bench.schedule.seconds_until_due(), 1e-3)
        elif target is dead:
            asked.append(bench.clock.now)
            began, bench.clock.now = bench.clock.now, bench.clock.now + 200
            bench.schedule.record_failure(target, began, bmc_down=True, retry_after=0.0)
        else:
            bench.schedule.record_success(target, bench.clock.now)
    assert len(asked) < 14
    assert asked[-1] - asked[-2] > 1800


def test_a_bmc_that_sends_retry_after_is_paused(bench: Bench) -> None:
    target = bench.add("flow", "connector", 1.0)
    bench.schedule.pop_due()
    assert bench.schedule.record_failure(target, bench.clock.now, bmc_down=True, retry_after=120.0) == 120.0


def test_a_failing_resource_is_read_at_growing_intervals_and_affects_no_other(bench: Bench) -> None:
    bad = bench.add("bad", "connector", 1.0)
    assert bench.schedule.pop_due() is bad
    assert bench.schedule.record_failure(bad, bench.clock.now, bmc_down=False, retry_after=0.0) == 0.0
    bench.add("flow", "connector", 1.0)
    bench.run(4, {})
    assert len(bench.times("flow")) == 4
    assert bench.times("bad") == []


def test_removed_targets_are_not_read(bench: Bench) -> None:
    bench.add("flow", "connector", 1.0)
    bench.schedule.unschedule("flow")
    assert bench.schedule.pop_due() is None
    assert bench.schedule.seconds_until_due() > 1e6


# --- units -----------------------------------------------------------------------------------------------------------


def connector(name: str, **values: float | None) -> EntityRow:
    return EntityRow(f"connector:{name}", "coolant", {f"coolant.{key}": value for key, value in values.items()})


def test_a_units_flow_is_the_sum_and_its_temperature_the_mean_of_its_connectors() -> None:
    units, members = UnitTotals(), ("connector:a", "connector:b")
    assert units.update("cdu:1", connector("a", flow=10.0, supply_temperature=30.0), 0.0, members) is None
    row = units.update("cdu:1", connector("b", flow=20.0, supply_temperature=32.0), 0.1, members)
    assert row is not None
    assert (row.entity, row.values["coolant.flow"], row.values["coolant.supply_temperature"]) == ("cdu:1", 30, 31)


def test_a_units_flow_is_missing_without_one_of_its_connectors() -> None:
    units, members = UnitTotals(), ("connector:a", "connector:b")
    units.update("cdu:1", connector("a", flow=10.0), 0.0, members)
    units.update("cdu:1", connector("b", flow=20.0), 0.0, members)
    row = units.update("cdu:1", connector("b", flow=None), 1.0, members)
    assert row is not None
    assert row.values["coolant.flow"] is None
    late = units.update("cdu:1", connector("b", flow=20.0), STALE_S + 1, members)
    assert late is not None
    assert late.values["coolant.flow"] is None


def test_a_connector_without_meter_or_removed_does_not_affect_the_sum() -> None:
    units = UnitTotals()
    units.update("cdu:1", connector("a", flow=10.0), 0.0, ("connector:a", "connector:b"))
    row = units.update("cdu:1", connector("b", pressure=1.0), 0.0, ("connector:a", "connector:b"))
    assert row is not None
    assert row.values["coolant.flow"] == 10
    alone = units.update("cdu:1", connector("a", flow=11.0), 0.1, ("connector:a",))
    assert alone is not None
    assert alone.values["coolant.flow"] == 11


# --- waiting results -------------------------------------------------------------------------------------------------


def test_each_value_is_returned_once_and_the_newest_counts() -> None:
    mail = ResultQueue(lambda: 0)
    mail.add_values(EntityRow("cdu:1", "coolant", {"coolant.flow": 1.0, "coolant.pressure": 2.0}))
    mail.add_values(EntityRow("cdu:1", "coolant", {"coolant.flow": 3.0, "coolant.pressure": None}))
    assert mail.take_all()[0] == {"cdu:1": ("coolant", {"coolant.flow": 3.0, "coolant.pressure": 2.0})}
    assert mail.take_all() == ({}, [])


def test_waiting_results_are_bounded() -> None:
    mail = ResultQueue(lambda: 0)
    taken = [mail.add_values(EntityRow(f"outlet:{n}", "power", {"power.draw": 1.0})) for n in range(MAX_ENTITIES + 2)]
    assert taken.count(False) == 2
    for number in range(EVENTS_PER_MINUTE + 5):
        mail.add_event("bmc:1", "redfish", {"n": number})
    mail.add_event("bmc:1", "bmc_lost", {}, always=True)
    assert (len(mail.take_all()[1]), mail.dropped) == (EVENTS_PER_MINUTE + 1, 5)


# --- configuration and credentials -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bmc", "message"),
    [
        ({"name": "a"}, "url: missing"),
        ({"name": "a", "url": "http://h"}, "expected https, or allow_http = true"),
        ({"name": "a", "url": "ftp://h"}, "expected http(s)://HOST"),
        ({"name": "a", "url": "https://u:p@h"}, "without user, path or query"),
        ({"name": "a", "url": "https://h/redfish/v1"}, "without user, path or query"),
        ({"name": "a b", "url": "https://h"}, "expected letters, digits"),
        ({"name": "a", "url": "https://h", "user": "u"}, "without password_file"),
        ({"name": "a", "url": "https://h", "password_file": "/x"}, "without user"),
        ({"name": "a", "url": "https://h", "read": ["power", "water"]}, "expected some of coolant, leaks"),
        ({"name": "a", "url": "https://h", "fast": 0.01}, "expected seconds, at least 0.2"),
        ({"name": "a", "url": "https://h", "timeout": 0}, "expected seconds, 1 to 600"),
        ({"name": "a", "url": "https://h", "parents": ["r1"]}, "expected kind:name each"),
        ({"name": "a", "url": "https://h", "pasword_file": "/x"}, "did you mean 'password_file'"),
    ],
)
def test_a_setting_of_a_bmc_that_cannot_work_is_refused(bmc: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        configured_collectors({"redfish": {"bmcs": [bmc]}}, "f.toml")
    assert message in str(refused.value)


def test_two_bmcs_of_one_name_are_refused() -> None:
    bmc = {"name": "a", "url": "https://h"}
    with pytest.raises(ConfigError, match=r"name = 'a' is used more than once"):
        configured_collectors({"redfish": {"bmcs": [bmc, bmc]}}, "f.toml")


def test_a_configured_bmc_reaches_the_collector_without_its_password(tmp_path: Path) -> None:
    password = tmp_path / "p"
    password.write_text("wet-secret")
    bmc = {"name": "a", "url": "https://h", "user": "u", "password_file": str(password), "leaks": 2}
    made = [c for c in configured_collectors({"redfish": {"bmcs": [bmc]}}, "f.toml") if isinstance(c, Redfish)]
    assert made[0].bmcs == (BmcSettings("a", "https://h", "u", password, leaks=2.0),)
    assert "wet-secret" not in repr(made[0])


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("secret", 0o604, "readable by every user of this host (mode 0604)"),
        ("secret", 0o602, "chmod 600"),
        ("", 0o600, "is empty"),
        (None, 0o600, "No such file"),
        (b"\xff\xfe\xfd", 0o600, "is not text"),
    ],
)
def test_a_password_file_that_is_public_empty_or_missing_is_reported(
    tmp_path: Path, text: str | bytes | None, mode: int, message: str
) -> None:
    path = tmp_path / "password"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        path.chmod(mode)
    with pytest.raises(RequestError, match=r"password_file .*") as refused:
        read_password(path)
    assert message in str(refused.value)
    assert "secret" not in str(refused.value).replace(str(path), "")


def test_proxy_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    client = RedfishConnection("http://127.0.0.1:1", timeout=1.0)
    with pytest.raises(RequestError, match="Connection refused") as failed:
        RedfishSession(client).get("/redfish/v1")
    assert failed.value.bmc_down
