"""Branches of a loop, each with its own meter: a restricted one is told from its loop and from a meter that lies."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.heat.coolant import Coolant
from pipeline.records import SECOND
from pipeline.topology import Topology
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


def shown(flow, meter, load=lambda tick: 1.0, ticks=200, racks=RACKS):
    """What is said of branches at a pressure that their unit holds; `flow`, `meter` (tick): of the guilty one."""
    detector, graph, found = Coolant(), topology(), []
    for tick in range(ticks):
        rng = np.random.default_rng([tick, 1])
        true, lies = np.full(RACKS, 40.0), np.ones(RACKS)
        true[GUILTY], lies[GUILTY] = 40.0 * flow(tick), meter(tick)
        power = 600.0 * load(tick) * (1 + 0.02 * rng.standard_normal(len(GPUS)))
        warmed = 15.1 * 8 * 5 * 0.6 * load(tick) / true + 0.1 * rng.standard_normal(RACKS)
        supply = 32.0 + 0.1 * rng.standard_normal(RACKS)
        coolant = {"coolant.flow": true * lies * (1 + 0.01 * rng.standard_normal(RACKS))}
        coolant |= {"coolant.supply_temperature": supply, "coolant.return_temperature": supply + warmed}
        coolant |= {"coolant.pressure": 1.5 * (1 + 0.005 * rng.standard_normal(RACKS))}
        values = {"coolant": {name: column[:racks] for name, column in coolant.items()}, "gpu": {"gpu.power": power}}
        found += detector.observe(SITE.framed(tick, values, [], graph))
    return found


def falls(share):
    return lambda tick: share if tick >= FAULT else 1.0


def steady(tick):
    return 1.0


@pytest.mark.parametrize("share", [0.8, 0.6])
def test_a_restricted_branch_at_a_held_pressure_pages_and_blames_no_other_and_not_the_loop(share):
    found = shown(falls(share), steady)
    assert {f.entity for f in found} == {BRANCHES[GUILTY]}
    page = next(f for f in found if f.level == "page")
    assert page.time - SITE.time(FAULT) <= 700 * SECOND
    assert page.evidence["corroborated_by"] == ["coolant.return_temperature"]


@pytest.mark.parametrize("share", [0.8, 0.6])
def test_a_flow_meter_that_lies_stays_a_suspect_since_the_heat_falls_with_it(share):
    found = shown(steady, falls(share), ticks=400)
    assert {(f.entity, f.level) for f in found} == {(BRANCHES[GUILTY], "suspect")}
    assert found[-1].evidence["meter_doubted"]


def test_a_lying_meter_is_not_believed_because_the_load_rose_with_it():
    found = shown(steady, falls(0.8), load=lambda tick: 1.3 if tick >= FAULT else 1.0, ticks=300)
    assert {f.level for f in found} == {"suspect"}


def test_a_site_of_few_branches_gets_a_ticket_and_idle_gpus_bear_nothing_out():
    few = shown(falls(0.8), steady, racks=3)
    assert {f.level for f in few} == {"suspect", "ticket"}
    idle = shown(falls(0.8), steady, load=lambda tick: 0.1)
    assert {f.level for f in idle} == {"suspect"}


def test_loads_that_swing_say_nothing():
    assert shown(steady, steady, load=lambda tick: 0.4 if tick % 90 > 60 else 1.0, ticks=500) == []
