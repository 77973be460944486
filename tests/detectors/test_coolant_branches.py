"""Branches of a loop, each with its own meter: a restricted branch differs from its loop and from a wrong meter."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.heat.coolant import Coolant
from pipeline.model.records import SECOND
from pipeline.model.topology import Topology
from tests.detectors.cases.case import Case

RACKS = 5
BRANCHES = tuple(f"connector:c1.{r}" for r in range(RACKS))
GPUS = tuple(f"gpu:n{r}.{i}" for r in range(RACKS) for i in range(8))
GUILTY, FAULT = 2, 60


def topology(_: object = None) -> Topology:
    parents = {gpu: (f"node:n{k // 8}",) for k, gpu in enumerate(GPUS)}
    parents |= {f"node:n{r}": (f"rack:r{r}",) for r in range(RACKS)}
    parents |= {f"rack:r{r}": (branch,) for r, branch in enumerate(BRANCHES)}
    return Topology(parents | dict.fromkeys(BRANCHES, ("cdu:c1",)))


SITE = Case(Coolant, {"coolant": BRANCHES, "gpu": GPUS}, topology, lambda *_: ({}, []), frozenset())


def run_detector(flow, meter, load=lambda tick: 1.0, ticks=200, racks=RACKS, change=None, lag=0):
    """Findings on branches at a pressure that their unit holds; `flow`, `meter` (tick): of the guilty one.

    change: (tick, values) removes readings.   lag: ticks by which the water follows the load.
    """
    detector, graph, found = Coolant(), topology(), []
    carried = load(0)
    for tick in range(ticks):
        rng = np.random.default_rng([tick, 1])
        true, lies = np.full(RACKS, 40.0), np.ones(RACKS)
        true[GUILTY], lies[GUILTY] = 40.0 * flow(tick), meter(tick)
        power = 600.0 * load(tick) * (1 + 0.02 * rng.standard_normal(len(GPUS)))
        carried += (load(tick) - carried) / (1 + lag)
        warmed = 15.1 * 8 * 5 * 0.6 * carried / true + 0.1 * rng.standard_normal(RACKS)
        supply = 32.0 + 0.1 * rng.standard_normal(RACKS)
        coolant = {"coolant.flow": true * lies * (1 + 0.01 * rng.standard_normal(RACKS))}
        coolant |= {"coolant.supply_temperature": supply, "coolant.return_temperature": supply + warmed}
        coolant |= {"coolant.pressure": 1.5 * (1 + 0.005 * rng.standard_normal(RACKS))}
        values = {"coolant": {name: column[:racks] for name, column in coolant.items()}, "gpu": {"gpu.power": power}}
        if change is not None:
            change(tick, values)
        found += detector.observe(SITE.frames_of(tick, values, [], graph))
    return found


def falls(share):
    return lambda tick: share if tick >= FAULT else 1.0


def steady(tick):
    return 1.0


@pytest.mark.parametrize(("share", "level"), [(0.8, "ticket"), (0.6, "page")])
def test_a_restricted_branch_at_a_held_pressure_is_the_only_one_blamed(share, level):
    found = run_detector(falls(share), steady)
    assert {f.entity for f in found} == {BRANCHES[GUILTY]}
    first = next(f for f in found if f.level != "suspect")
    assert first.level == level
    assert first.time - SITE.time(FAULT) <= 700 * SECOND
    assert first.evidence["corroborated_by"] == ["coolant.return_temperature"]


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.8, 0.6])
def test_a_wrong_flow_meter_stays_a_suspect_since_the_heat_falls_with_it(share):
    found = run_detector(steady, falls(share), ticks=400)
    assert {(f.entity, f.level) for f in found} == {(BRANCHES[GUILTY], "suspect")}
    assert found[-1].evidence["doubted"]


def test_a_wrong_meter_is_not_believed_because_the_load_rose_with_it():
    found = run_detector(steady, falls(0.8), load=lambda tick: 1.3 if tick >= FAULT else 1.0, ticks=300)
    assert {f.level for f in found} == {"suspect"}


def test_a_site_of_few_branches_gets_a_ticket_and_idle_gpus_confirm_nothing():
    few = run_detector(falls(0.8), steady, racks=3)
    assert {f.level for f in few} == {"suspect", "ticket"}
    idle = run_detector(falls(0.8), steady, load=lambda tick: 0.1)
    assert {f.level for f in idle} == {"suspect"}


def test_swinging_loads_give_no_finding():
    assert run_detector(steady, steady, load=lambda tick: 0.4 if tick % 90 > 60 else 1.0, ticks=500) == []


UNTIL = 50  # tick until which the heat is measured; the meter is wrong from ten ticks later on


def idle(tick):
    return 0.1 if tick >= UNTIL else 1.0


def no_return(tick, values):
    if tick >= UNTIL:
        values["coolant"]["coolant.return_temperature"] = np.full(RACKS, np.nan)


def no_power(tick, values):
    if tick >= UNTIL:
        del values["gpu"]


@pytest.mark.sample(every=5)
@pytest.mark.parametrize(("load", "change"), [(idle, None), (steady, no_return), (steady, no_power)])
@pytest.mark.parametrize("share", [0.85, 0.6])
def test_a_wrong_meter_while_the_heat_is_unknown_does_not_page_by_earlier_heat(share, load, change):
    found = run_detector(steady, falls(share), load, ticks=400, change=change)
    assert {(f.entity, f.level) for f in found} == {(BRANCHES[GUILTY], "suspect")}
    assert all(f.evidence["doubted"] for f in found)


@pytest.mark.slow
def test_an_earlier_confirmation_does_not_confirm_a_wrong_meter_later():
    """A connector that was half closed for a while under load, and its meter that is wrong when the GPUs are idle."""

    def flow(tick):
        return 0.85 if 60 <= tick < 115 else 1.0

    found = run_detector(flow, falls_at(300, 0.85), lambda tick: 0.1 if tick >= 112 else 1.0, ticks=600)
    assert {f.level for f in found} == {"suspect"}


def falls_at(since, share):
    return lambda tick: share if tick >= since else 1.0


def test_a_growing_meter_error_while_the_heat_is_unknown_is_not_believed():
    found = run_detector(
        steady, lambda tick: 0.88 if tick < 200 else 0.7, lambda tick: 1.0 if tick < 195 else 0.1, ticks=400
    )
    assert {f.level for f in found} <= {"suspect"}


@pytest.mark.slow
@pytest.mark.parametrize("period", [40, 90, 240])
def test_water_that_follows_a_swinging_load_late_does_not_confirm_a_wrong_meter(period):
    def load(tick):
        return 0.5 if tick % period > 0.7 * period else 1.0

    found = run_detector(steady, falls_at(300, 0.85), load, ticks=1200, lag=9)
    assert {f.level for f in found} <= {"suspect"}


@pytest.mark.slow
def test_a_restricted_branch_is_reported_between_the_swings_of_a_load():
    def load(tick):
        return 0.5 if tick % 240 > 120 else 1.0

    assert "ticket" in {f.level for f in run_detector(falls_at(300, 0.8), steady, load, ticks=700, lag=9)}
