"""Reservoirs that sink before a rope is wet: fast and slow leaks, refills, temperature, maintenance."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.heat.coolant_leak import CoolantLeak
from pipeline.model.records import SECOND, Event, Frame
from pipeline.model.signals import class_of_entity
from pipeline.model.topology import Topology

START = 1_790_000_000 * SECOND
LOOPS = ("cdu:c0", "cdu:c1")


def run_detector(level, hours, events=(), wet=None, step=30):
    """`level(hour)` of the first loop; `wet`: hour from which its rope is wet."""
    rng, detector, out = np.random.default_rng(4), CoolantLeak(), []
    topology = Topology({"leak_detector:r1": ("rack:r1",), "rack:r1": ("cdu:c0",)})
    for tick in range(int(hours * 3600 / step)):
        hour, time = tick * step / 3600, START + tick * step * SECOND
        levels = np.array([level(hour), 0.8]) + 0.002 * rng.standard_normal(2)
        due = tuple(e for e in events if time <= e.time < time + step * SECOND)
        ropes = {"leak.state": np.array([2.0 if wet is not None and hour >= wet else 0.0])}
        mine = tuple(e for e in due if class_of_entity(e.entity) == "coolant")
        frames = {
            "coolant": Frame(time, "coolant", LOOPS, {"reservoir.level": levels}, topology, mine),
            "leak": Frame(time, "leak", ("leak_detector:r1",), ropes, topology),
        }
        out += detector.observe(frames)
    return out


@pytest.mark.parametrize(
    ("per_hour", "within", "level"),
    [(0.6, 0.4, "page"), (0.05, 1.6, "page"), (0.02, 2.5, "ticket"), (0.004, 15, "ticket")],
)
def test_a_reservoir_that_sinks_is_reported_before_its_rope_is_wet(per_hour, within, level):
    found = run_detector(lambda hour: 0.85 - per_hour * max(hour - 3, 0), 3 + within)
    assert {f.entity for f in found} == {"cdu:c0"}
    assert found[0].level == level
    assert found[0].evidence["hours_to_empty"] == pytest.approx(0.8 / per_hour, rel=0.4)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("per_hour", [0.0155, 0.02])
def test_a_leak_at_the_limit_stays_one_finding_until_it_is_filled_up(per_hour):
    found = run_detector(lambda hour: 0.85 - per_hour * max(min(hour, 13) - 3, 0) + 0.1 * (hour > 13), 16)
    assert {(f.entity, f.level) for f in found} == {("cdu:c0", "ticket")}
    assert len({f.onset for f in found}) == 1
    assert found[-1].time <= START + 13.2 * 3600 * SECOND


@pytest.mark.slow
def test_a_level_that_swings_with_the_temperature_is_not_a_leak():
    assert run_detector(lambda hour: 0.85 + 0.01 * np.sin(hour * np.pi / 12), 30) == []


def test_a_step_of_the_float_or_a_refill_is_not_a_leak():
    assert run_detector(lambda hour: 0.85 - 0.1 * (hour > 3) + 0.12 * (hour > 5), 8) == []


def test_coolant_drained_in_announced_work_is_not_a_leak():
    def level(hour):
        return 0.85 - 0.4 * min(max(hour - 3, 0), 1)

    work = [Event(START + 10_700 * SECOND, LOOPS[0], "maintenance_start", {"seconds": 5000})]
    work.append(Event(START + 15_000 * SECOND, LOOPS[0], "maintenance_end", {}))
    assert run_detector(level, 6, work) == []


def test_the_finding_on_the_rope_has_the_onset_of_the_falling_level():
    found = run_detector(lambda hour: 0.85 - 0.3 * max(hour - 3, 0), 4, wet=3.7)
    rope = next(f for f in found if f.entity == "leak_detector:r1")
    assert (rope.level, rope.onset) == ("page", found[0].onset)


@pytest.mark.slow
def test_a_slow_leak_pages_on_its_loop_too_once_a_rope_is_wet():
    found = run_detector(lambda hour: 0.85 - 0.02 * max(hour - 3, 0), 7, wet=6)
    loop = [f for f in found if f.entity == "cdu:c0"]
    assert {f.level for f in loop if f.time < START + 6 * 3600 * SECOND} == {"ticket"}
    assert {f.level for f in loop if f.time >= START + 6 * 3600 * SECOND} == {"page"}
    assert "rope wet" in loop[-1].summary
