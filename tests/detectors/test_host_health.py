"""Hosts that will stop: memory, file systems and disks that run out or wear out, at several intervals."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.host.host_health import HostHealth
from pipeline.model.records import SECOND, Frame
from pipeline.model.topology import Topology
from tests.detectors.cases.case import START

NODES = tuple(f"node:n{n}" for n in range(5))
JOB = {f"gpu:n{n}.0": [f"node:n{n}"] for n in range(5)} | {f"rank:7.{n}": ["job:7", f"gpu:n{n}.0"] for n in range(5)}
DISKS = tuple(f"disk:n{n}.nvme0" for n in range(5))
WHOLE = 2e12


def run_memory(available, hours, step, job=True, detector=None):
    """available: (s, rng) -> (5,) shares; findings of all ticks."""
    topology, rng = Topology(JOB if job else {}), np.random.default_rng(5)
    detector, found = detector or HostHealth(), []
    for at in range(0, int(hours * 3600), step):
        columns = {"node.memory_available": WHOLE * available(at, rng), "node.memory_total": np.full(5, WHOLE)}
        found += detector.observe({"node": Frame(START + at * SECOND, "node", NODES, columns, topology)})
    return found


def leak(per_hour, begins=7200.0, level=0.7, noise=0.01):
    def available(at, rng):
        shares = level + noise * rng.standard_normal(5)
        shares[2] -= min(max(at - begins, 0.0) / 3600 * per_hour, level)
        return np.clip(shares, 0.001, 1.0)

    return available


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(("step", "noise"), [(1, 0.001), (10, 0.01), (60, 0.02)])
def test_a_leak_of_hours_is_a_ticket_with_its_time_left_and_pages_within_the_hour(step, noise):
    hours = 2 + 0.7 / 0.15
    found = run_memory(leak(0.15, noise=noise), hours, step)
    assert {f.entity for f in found} == {"node:n2"}
    page = next(f for f in found if f.level == "page")
    left = [(START + hours * 3600 * SECOND - f.time) / SECOND for f in (found[0], page)]
    assert found[0].level == "ticket"
    assert 5000 < left[0] < 12_000
    assert 1500 < left[1] <= 3700
    assert 0.7 < found[0].evidence["seconds_left"] / left[0] < 1.4


def test_without_a_job_a_leak_is_no_page():
    found = run_memory(leak(0.15), 6.6, 60, job=False)
    assert {f.level for f in found} == {"ticket"}


@pytest.mark.slow
def test_a_leak_of_days_is_a_ticket_days_ahead():
    found = run_memory(leak(0.004, begins=86_400.0, level=0.6), 140, 60, job=False)
    ahead = (START + (24 + 0.6 / 0.004) * 3600 * SECOND - found[0].time) / SECOND / 86_400
    assert ahead > 2


def test_it_is_over_when_the_memory_is_free_again():
    def freed(at, rng):
        return leak(0.15)(at, rng) if at < 20_000 else 0.7 + 0.01 * rng.standard_normal(5)

    found = run_memory(freed, 8, 60)
    assert found
    assert found[-1].time < START + 20_000 * SECOND, "immediately, not with the next mean"


@pytest.mark.slow
def test_jobs_that_load_their_data_steadily_are_not_a_leak():
    """Each hour 30 minutes of a steady fall from 90 % to 20 %, as into /dev/shm, after a first one that was seen."""

    def loading(at, rng):
        return 0.9 - 0.7 * min(at % 3600 / 1800, 1.0) + 0.005 * rng.standard_normal(5)

    found = run_memory(loading, 12, 10)
    assert [f for f in found if f.time > START + 2 * 3600 * SECOND] == []
    assert {f.level for f in found} <= {"ticket"}


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("kind", ["level", "saw", "drift", "steps"])
def test_busy_memory_without_a_leak_is_silent(kind):
    courses = {
        "level": lambda at: 0.1,
        "saw": lambda at: 0.3 + 0.2 * (at % 900) / 900,
        "drift": lambda at: 0.5 - 0.2 * np.cos(at / 9000),
        "steps": lambda at: 0.9 if at < 5000 else 0.15,
    }
    assert run_memory(lambda at, rng: courses[kind](at) + 0.02 * rng.standard_normal(5), 60, 60) == []


def space(names, rest, whole, minutes, **more):
    found, detector, topology = [], HostHealth(), Topology({name: [f"node:{name[11:13]}"] for name in names})
    for minute in range(minutes):
        columns = {"filesystem.available": rest(minute) * whole, "filesystem.total": whole}
        columns |= {f"filesystem.{k}": v for k, v in more.items()}
        time = START + minute * 60 * SECOND
        found += detector.observe({"filesystem": Frame(time, "filesystem", names, columns, topology)})
    return found


def test_a_shared_file_system_that_fills_is_one_finding():
    names = (*(f"filesystem:n{n}./scratch" for n in range(5)), "filesystem:n0./")
    whole = np.array([1e15] * 5 + [1e11])

    def rest(minute):
        return np.array([max(0.5 - 0.002 * max(minute - 60, 0), 0.0)] * 5 + [0.2])

    found = space(names, rest, whole, 200)
    assert {f.entity for f in found} == {"filesystem:n0./scratch"}
    assert "on 5 nodes" in found[0].summary
    assert found[0].level == "ticket"


def test_a_full_file_system_is_a_ticket_but_not_one_that_is_read_only():
    names = tuple(f"filesystem:n{n}./" for n in range(3))
    rest, whole, read_only = np.array([0.02, 0.5, 0.0]), np.array([1e11, 2e11, 3e11]), np.array([0.0, 0.0, 1.0])
    found = space(names, lambda minute: rest, whole, 30, read_only=read_only)
    assert {(f.entity, f.level, f.summary) for f in found} == {
        ("filesystem:n0./", "ticket", "File system / of n0: 2% space left")
    }


def disks(ticks, job=False, step=600, **changed):
    """changed: signal -> tick -> value of disk 2."""
    usual = {"critical_warning": 0.0, "spare": 1.0, "spare_threshold": 0.1, "endurance_used": 0.3, "state": 1.0}
    usual |= {"power_on_time": 20_000.0, "media_errors": 4.0}
    found, detector = [], HostHealth()
    topology = Topology({**{d: [f"node:{d[5:7]}"] for d in DISKS}, **(JOB if job else {})})
    for tick in range(ticks):
        columns = {f"disk.{name}": np.full(5, value) for name, value in usual.items()}
        for name, course in changed.items():
            columns[f"disk.{name}"][2] = course(tick)
        found += detector.observe({"disk": Frame(START + tick * step * SECOND, "disk", DISKS, columns, topology)})
    return found


@pytest.mark.parametrize(
    ("signal", "value", "job", "level", "words"),
    [
        ("critical_warning", 0x1, True, "ticket", "spare blocks below the threshold"),
        ("critical_warning", 0x4, True, "ticket", "reliability degraded by media errors"),
        ("critical_warning", 0x8, True, "page", "read-only, writes fail"),
        ("critical_warning", 0x8, False, "ticket", "read-only, writes fail"),
        ("critical_warning", 0x2, True, "ticket", "temperature beyond its limits"),
        ("spare", 0.05, True, "ticket", "spare blocks below the threshold"),
        ("endurance_used", 1.02, True, "ticket", "102% of its rated life used"),
        ("endurance_used", 0.97, True, "ticket", "97% of its rated life used, 26 d left"),
        ("media_errors", 7.0, True, "ticket", "3 new media errors, data lost"),
        ("state", 5.0, True, "page", "dead"),
    ],
)
def test_each_sign_of_a_failing_disk_has_its_level(signal, value, job, level, words):
    found = disks(40, job, **{signal: lambda tick: value if tick >= 20 else {"media_errors": 4.0}.get(signal, 0.5)})
    assert {(f.entity, f.level) for f in found} == {(DISKS[2], level)}
    assert found[0].summary.endswith(words)
    assert found[0].time <= START + 21 * 600 * SECOND


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("step", [60, 600, 3600])
@pytest.mark.parametrize("daily", [0.03, 0.12])
def test_a_disk_that_is_written_far_beyond_its_rating_is_a_ticket_with_the_time_left(step, daily):
    day = 86_400 // step
    found = disks(int(3 * day), step=step, endurance_used=lambda tick: np.floor(20 + 100 * daily * tick / day) / 100)
    assert {(f.entity, f.level) for f in found} == {(DISKS[2], "ticket")}
    assert found[0].time - START <= (0.04 / daily * 86_400 + 2 * step) * SECOND
    assert found[0].summary.endswith(" d left")


@pytest.mark.slow
def test_a_disk_that_is_worn_as_rated_or_replaced_by_an_older_one_is_silent():
    assert disks(30 * 144, endurance_used=lambda tick: np.floor(20 + 0.1 * tick / 144) / 100) == []
    assert disks(500, endurance_used=lambda tick: [0.1, 0.5, 0.3, 0.6, 0.7][tick // 100]) == []


def test_worn_disks_with_years_left_and_glitches_are_silent():
    assert disks(60, endurance_used=lambda tick: 0.9) == []
    assert disks(60, critical_warning=lambda tick: 0x1F if tick == 30 else 0.0) == []
    assert disks(60, spare=lambda tick: 0.0 if tick == 30 else 1.0) == []
    assert disks(60, media_errors=lambda tick: np.nan if tick % 2 else 4.0) == []


def test_a_warning_that_ends_or_is_not_read_any_more_ends():
    def ending(tick):
        return 0x4 if 20 <= tick < 30 else 0.0

    assert disks(60, critical_warning=ending)[-1].time <= START + 31 * 600 * SECOND
    gone = disks(100, critical_warning=lambda tick: 0x4 if tick < 30 else np.nan)
    assert gone[-1].time <= START + (30 * 600 + 4 * 3600) * SECOND


def test_a_chassis_fault_is_a_ticket_after_two_readings_and_an_open_door_is_none():
    def run(mask):
        detector, found = HostHealth(), []
        for tick in range(30):
            column = {"node.chassis_faults": np.array([0.0, mask if tick >= 10 else 0.0])}
            frame = Frame(START + tick * 60 * SECOND, "node", NODES[:2], column, Topology({}))
            found += detector.observe({"node": frame})
        return found

    found = run(0x40)
    assert (found[0].entity, found[0].level, found[0].summary) == (
        "node:n1",
        "ticket",
        "Node n1: BMC reports cooling or fan fault",
    )
    assert found[0].time == START + 11 * 60 * SECOND
    assert run(0x12) == []
