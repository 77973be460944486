"""The budget of one BMC: what comes first, how long it is left alone, and a coolant unit's row of its connectors'."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from agents.collectors.bmc.redfish import Redfish
from agents.collectors.bmc.redfish_cooling import STALE_S, UnitTotals
from agents.collectors.bmc.redfish_document import Place, Row
from agents.collectors.bmc.redfish_http import Client, Failure, Session, password_of
from agents.collectors.bmc.redfish_poller import EVENTS_PER_MINUTE, MAX_ENTITIES, Mailbox
from agents.collectors.bmc.redfish_schedule import BACKOFF_MOST_S, FAST_IN_A_ROW, PAUSE_SHARE, Schedule, Target
from agents.collectors.bmc.redfish_settings import Bmc
from agents.collectors.registry import configured
from pipeline.model.errors import ConfigError


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A schedule whose BMC takes as long for an answer as is said."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.schedule = Schedule(self.clock, chance=lambda: 1.0)
        self.asked: list[tuple[float, str]] = []

    def add(self, path: str, kind: str, every: float, due: float = -1.0) -> Target:
        target = Target(path, kind, Place("b1"), every)
        self.schedule.put(target, due)
        return target

    def run(self, seconds: float, took: dict[str, float], default: float = 0.02) -> None:
        until = self.clock.now + seconds
        while self.clock.now < until:
            target = self.schedule.next()
            if target is None:
                self.clock.now += min(until - self.clock.now + 1e-6, max(self.schedule.wait(), 1e-6))
                continue
            began = self.clock.now
            self.asked.append((began, target.path))
            self.clock.now += took.get(target.path, default)
            self.schedule.answered(target, began)

    def times(self, path: str) -> list[float]:
        return [time for time, asked in self.asked if asked == path]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_fast_sensors_keep_their_second_while_an_inventory_is_walked(bench: Bench) -> None:
    bench.add("flow", "connector", 1.0)
    bench.add("leak", "leak_detector", 5.0)
    for number in range(500):
        bench.add(f"outlet{number}", "outlet", 3600.0)
    bench.run(20, {})
    gaps = [b - a for a, b in pairwise(bench.times("flow"))]
    assert max(gaps) < 1.0 + 2 * 0.02 * (1 + PAUSE_SHARE)  # one request of the walk at most
    assert max(b - a for a, b in pairwise(bench.times("leak"))) < 5.1
    assert len({path for _, path in bench.asked}) == 502


def test_what_leads_to_the_fast_sensors_is_read_before_the_rest(bench: Bench) -> None:
    for path, kind in (("outlets", "outlets"), ("psus", "psus"), ("connectors", "connectors"), ("cdus", "cdus")):
        bench.add(path, kind, 3600.0)
    bench.run(1, {})
    assert [path for _, path in bench.asked] == ["cdus", "connectors", "psus", "outlets"]


def test_the_rest_gets_its_turn_where_fast_sensors_alone_are_too_many(bench: Bench) -> None:
    for number in range(60):
        bench.add(f"flow{number}", "connector", 1.0)
    bench.add("psu", "psu", 5.0)
    bench.run(30, {}, default=0.1)
    assert len(bench.times("psu")) >= 4
    before = [path for _, path in bench.asked]
    first, second = [i for i, path in enumerate(before) if path == "psu"][:2]
    assert second - first >= FAST_IN_A_ROW


def test_what_is_urgent_comes_before_all(bench: Bench) -> None:
    for number in range(5):
        bench.add(f"flow{number}", "connector", 1.0)
    bench.schedule.put(Target("leak", "leak_detector", Place("b1"), 5.0), urgent=True)
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


def test_a_bmc_that_does_not_answer_is_left_alone_ever_longer_up_to_ten_minutes(bench: Bench) -> None:
    target = bench.add("flow", "connector", 1.0)
    waits = []
    for _ in range(12):
        assert bench.schedule.next() is not None
        waits.append(bench.schedule.failed(target, bench.clock.now, away=True, after=0.0))
        assert bench.schedule.next() is None
        bench.clock.now += max(waits[-1], bench.schedule.wait()) + 1e-6
    assert waits[:3] == [5.0, 10.0, 20.0]
    assert waits[-1] == BACKOFF_MOST_S
    bench.schedule.next()
    bench.schedule.answered(target, bench.clock.now)
    assert bench.schedule.failing == 0


def test_what_was_asked_while_nothing_answered_is_asked_at_once_when_it_does(bench: Bench) -> None:
    target = bench.add("root", "root", 3600.0)
    until = bench.clock.now + 4 * 3600
    while bench.clock.now < until:
        assert bench.schedule.next() is target
        bench.schedule.failed(target, bench.clock.now, away=True, after=0.0)
        assert bench.schedule.wait() < BACKOFF_MOST_S + 1
        bench.clock.now += bench.schedule.wait() + 1e-6


def test_one_resource_that_never_answers_is_asked_ever_more_seldom(bench: Bench) -> None:
    dead = bench.add("dead", "psu", 30.0)
    bench.add("flow", "connector", 1.0)
    asked = []
    until = bench.clock.now + 4 * 3600
    while bench.clock.now < until:
        target = bench.schedule.next()
        if target is None:
            bench.clock.now += max(bench.schedule.wait(), 1e-3)
        elif target is dead:
            asked.append(bench.clock.now)
            began, bench.clock.now = bench.clock.now, bench.clock.now + 200
            bench.schedule.failed(target, began, away=True, after=0.0)
        else:
            bench.schedule.answered(target, bench.clock.now)
    assert len(asked) < 14
    assert asked[-1] - asked[-2] > 1800


def test_a_bmc_that_asks_for_time_gets_it(bench: Bench) -> None:
    target = bench.add("flow", "connector", 1.0)
    bench.schedule.next()
    assert bench.schedule.failed(target, bench.clock.now, away=True, after=120.0) == 120.0


def test_a_resource_that_gives_errors_is_asked_ever_more_seldom_and_costs_no_other(bench: Bench) -> None:
    bad = bench.add("bad", "connector", 1.0)
    assert bench.schedule.next() is bad
    assert bench.schedule.failed(bad, bench.clock.now, away=False, after=0.0) == 0.0
    bench.add("flow", "connector", 1.0)
    bench.run(4, {})
    assert len(bench.times("flow")) == 4
    assert bench.times("bad") == []


def test_what_was_dropped_is_not_asked_for(bench: Bench) -> None:
    bench.add("flow", "connector", 1.0)
    bench.schedule.drop("flow")
    assert bench.schedule.next() is None
    assert bench.schedule.wait() > 1e6


# --- units -----------------------------------------------------------------------------------------------------------


def connector(name: str, **values: float | None) -> Row:
    return Row(f"connector:{name}", "coolant", {f"coolant.{key}": value for key, value in values.items()})


def test_a_units_flow_is_the_sum_and_its_temperature_the_mean_of_its_connectors() -> None:
    units, members = UnitTotals(), ("connector:a", "connector:b")
    assert units.row("cdu:1", connector("a", flow=10.0, supply_temperature=30.0), 0.0, members) is None
    row = units.row("cdu:1", connector("b", flow=20.0, supply_temperature=32.0), 0.1, members)
    assert row is not None
    assert (row.entity, row.values["coolant.flow"], row.values["coolant.supply_temperature"]) == ("cdu:1", 30, 31)


def test_a_units_flow_is_missing_while_one_of_its_connectors_lacks_it() -> None:
    units, members = UnitTotals(), ("connector:a", "connector:b")
    units.row("cdu:1", connector("a", flow=10.0), 0.0, members)
    units.row("cdu:1", connector("b", flow=20.0), 0.0, members)
    row = units.row("cdu:1", connector("b", flow=None), 1.0, members)
    assert row is not None
    assert row.values["coolant.flow"] is None
    late = units.row("cdu:1", connector("b", flow=20.0), STALE_S + 1, members)
    assert late is not None
    assert late.values["coolant.flow"] is None


def test_a_connector_without_a_meter_does_not_spoil_the_sum_and_one_that_went_is_not_waited_for() -> None:
    units = UnitTotals()
    units.row("cdu:1", connector("a", flow=10.0), 0.0, ("connector:a", "connector:b"))
    row = units.row("cdu:1", connector("b", pressure=1.0), 0.0, ("connector:a", "connector:b"))
    assert row is not None
    assert row.values["coolant.flow"] == 10
    alone = units.row("cdu:1", connector("a", flow=11.0), 0.1, ("connector:a",))
    assert alone is not None
    assert alone.values["coolant.flow"] == 11


# --- what waits for a look -------------------------------------------------------------------------------------------


def test_each_value_is_given_once_and_the_newest_holds() -> None:
    mail = Mailbox(lambda: 0)
    mail.put(Row("cdu:1", "coolant", {"coolant.flow": 1.0, "coolant.pressure": 2.0}))
    mail.put(Row("cdu:1", "coolant", {"coolant.flow": 3.0, "coolant.pressure": None}))
    assert mail.take()[0] == {"cdu:1": ("coolant", {"coolant.flow": 3.0, "coolant.pressure": 2.0})}
    assert mail.take() == ({}, [])


def test_what_waits_is_bounded() -> None:
    mail = Mailbox(lambda: 0)
    taken = [mail.put(Row(f"outlet:{n}", "power", {"power.draw": 1.0})) for n in range(MAX_ENTITIES + 2)]
    assert taken.count(False) == 2
    for number in range(EVENTS_PER_MINUTE + 5):
        mail.tell("bmc:1", "redfish", {"n": number})
    mail.tell("bmc:1", "bmc_lost", {}, always=True)
    assert (len(mail.take()[1]), mail.lost) == (EVENTS_PER_MINUTE + 1, 5)


# --- configuration and credentials -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bmc", "said"),
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
def test_a_setting_of_a_bmc_that_cannot_work_is_refused(bmc: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        configured({"redfish": {"bmcs": [bmc]}}, "f.toml")
    assert said in str(refused.value)


def test_two_bmcs_of_one_name_are_refused() -> None:
    bmc = {"name": "a", "url": "https://h"}
    with pytest.raises(ConfigError, match=r"name = 'a' stands more than once"):
        configured({"redfish": {"bmcs": [bmc, bmc]}}, "f.toml")


def test_a_configured_bmc_reaches_the_collector_and_its_password_is_nowhere_in_it(tmp_path: Path) -> None:
    password = tmp_path / "p"
    password.write_text("wet-secret")
    bmc = {"name": "a", "url": "https://h", "user": "u", "password_file": str(password), "leaks": 2}
    made = [c for c in configured({"redfish": {"bmcs": [bmc]}}, "f.toml") if isinstance(c, Redfish)]
    assert made[0].bmcs == (Bmc("a", "https://h", "u", password, leaks=2.0),)
    assert "wet-secret" not in repr(made[0])


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("secret", 0o604, "open to every user of this host (mode 0604)"),
        ("secret", 0o602, "chmod 600"),
        ("", 0o600, "is empty"),
        (None, 0o600, "No such file"),
        (b"\xff\xfe\xfd", 0o600, "is not text"),
    ],
)
def test_a_password_file_that_is_open_empty_or_absent_is_told(
    tmp_path: Path, text: str | bytes | None, mode: int, said: str
) -> None:
    path = tmp_path / "password"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        path.chmod(mode)
    with pytest.raises(Failure, match=r"password_file .*") as refused:
        password_of(path)
    assert said in str(refused.value)
    assert "secret" not in str(refused.value).replace(str(path), "")


def test_the_environment_gives_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    client = Client("http://127.0.0.1:1", timeout=1.0)
    with pytest.raises(Failure, match="Connection refused") as failed:
        Session(client).get("/redfish/v1")
    assert failed.value.away
