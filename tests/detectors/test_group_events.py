"""Equal deviations in a cohort are one ticket on the shared entity; chance, work, jobs and versions are none."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.base.cohorts import Peers
from detectors.base.gates import Gates
from detectors.base.group_events import HOLD, Group, GroupEvents, Quantity, shared_entities
from detectors.base.streams import Channel, Streams
from pipeline.judging.frames import Frame
from pipeline.model.records import SECOND, Event
from pipeline.model.topology import Topology

SIZE, LEARNT = 32, 400
GPUS = tuple(f"gpu:n{i // 8}.{i % 8}" for i in range(SIZE))
RACK = Topology(
    {g: [f"node:{g[4:6]}"] for g in GPUS} | {f"node:n{i}": ["rack:r1"] for i in range(4)} | {"rack:r1": ["cdu:c1"]},
    {g: {"sku": "H100"} for g in GPUS},
)
SOME = tuple(range(0, SIZE, 5)) + tuple(range(1, SIZE, 5))
QUANTITY = Quantity(("gpu.temperature",), "are hotter than the others", "are cooler than the others", "K")


class CohortRun:
    """One metric of 32 GPUs, a fault from tick `LEARNT` on in some of them."""

    def __init__(self, topology=RACK, rungs=(("rack", "@sku"), ("@sku",)), both=False):
        self.streams = Streams(Channel(floor=0.5, delta=1.0, both=both))
        self.group, self.gates, self.peers = GroupEvents(QUANTITY), Gates(), Peers(*rungs)
        self.blamed = ()
        self.topology, self.rng, self.tick = topology, np.random.default_rng(1), 0

    def frame(self, events=()):
        return Frame((1 + self.tick) * 10 * SECOND, "gpu", GPUS, {}, self.topology, tuple(events))

    def run_tick(self, changed=(), by=3.0, events=(), silent=()):
        self.tick += 1
        frame, values = self.frame(events), self.rng.normal(50, 0.3, SIZE)
        values[list(changed)] += by
        values[list(silent)] = np.nan
        self.gates.update({"gpu": frame})
        step = self.streams.step(values, self.peers.groups(frame), frame.time)
        cohort = lambda i: self.peers.cohort_name(frame, i)  # noqa: E731
        return self.group.update(frame, GPUS, step, cohort, self.gates, "thermal", blamed=self.blamed)

    def run(self, ticks, changed=(), **more):
        return [f for _ in range(ticks) for f in self.run_tick(changed, **more)]


@pytest.fixture
def cohort_run():
    fleet = CohortRun()
    assert fleet.run(LEARNT) == []
    return fleet


def test_thirteen_of_32_alike_are_one_ticket_on_their_rack(cohort_run):
    found = cohort_run.run(120, SOME)
    assert {(f.entity, f.level, f.detector) for f in found} == {("rack:r1", "ticket", "thermal")}
    first = found[0]
    assert first.evidence["struck"] == 14
    assert first.evidence["peers"] == SIZE
    assert first.summary.startswith("Rack r1: 14 of 32 GPUs are hotter than the others by 2.")
    assert first.evidence["group"] == "rack:r1, H100"
    assert first.evidence["median_effect"] == pytest.approx(3.0, abs=0.5)
    assert abs(first.onset - (1 + LEARNT) * 10 * SECOND) <= 120 * SECOND
    assert {f.onset for f in found} == {first.onset}
    assert HOLD <= first.time - first.onset <= HOLD + 300 * SECOND


def test_a_shift_of_less_than_ten_minutes_is_a_phase(cohort_run):
    assert cohort_run.run(50, SOME) + cohort_run.run(100) == []


def test_three_of_ten_are_not_group_event(cohort_run):
    assert cohort_run.run(200, range(9)) == []


@pytest.mark.parametrize(("struck", "blamed"), [((1, 4), {GPUS[1], GPUS[4]}), ((1, 3, 4), {"rack:few"})])
def test_two_of_a_cohort_of_six_are_two_suspects_and_three_are_a_ticket_on_their_rack(struck, blamed):
    fleet = CohortRun(Topology({g: [f"rack:{'few' if i < 6 else 'r1'}"] for i, g in enumerate(GPUS)}), (("rack",),))
    fleet.peers.least = 4
    fleet.run(LEARNT)
    found = fleet.run(120, struck)
    assert {f.entity for f in found} == blamed
    assert {f.level for f in found} == ({"suspect"} if len(struck) == 2 else {"ticket"})
    assert set(fleet.group.conditions) == blamed


@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize("struck", [(0,), (0, 2), (1, 3)])
def test_some_of_four_loops_are_blamed_and_not_all_four(nodes, struck):
    """One cohort over four loops of so many nodes: all GPUs of some loops are hot."""
    gpus = [f"gpu:n{n}.{i}" for n in range(4 * nodes) for i in range(8)]
    parents = {g: [g.split(".")[0].replace("gpu", "node")] for g in gpus}
    parents |= {f"node:n{n}": [f"rack:r{n}", "job:7"] for n in range(4 * nodes)}
    parents |= {f"rack:r{n}": [f"cdu:c{n // nodes}", "pdu:p0", "row:a"] for n in range(4 * nodes)}
    topology = Topology(parents)
    off = np.array([i for i, g in enumerate(gpus) if int(g[5:].split(".")[0]) // nodes in struck])
    group = Group("job:7, H100", False, off, np.arange(len(gpus)), 0.01)
    found = shared_entities(group, gpus, topology, "gpu")
    assert [e.split(":")[1][1:] for e in found] == [str(i) for i in struck]
    assert {e.split(":")[0] for e in found} <= ({"cdu", "rack", "node"} if nodes == 1 else {"cdu"})


@pytest.mark.parametrize(("usual", "blamed"), [(0.001, True), (0.01, True), (0.2, False)])
def test_a_group_is_blamed_only_where_few_are_off_elsewhere(usual, blamed):
    group = Group("rack:r1, H100", False, np.arange(0, SIZE, 3), np.arange(SIZE), usual)
    assert bool(shared_entities(group, GPUS, RACK, "gpu")) == blamed


def test_where_most_are_worse_the_others_are_reported_as_better(cohort_run):
    found = cohort_run.run(150, range(20))
    assert found
    assert "12 of 32 GPUs are cooler than the others" in found[-1].summary


def test_it_ends_with_the_fault(cohort_run):
    assert cohort_run.run(120, SOME)
    cohort_run.run(40)
    assert cohort_run.run(100) == []
    assert cohort_run.group.began == {}


def test_it_is_reported_for_as_long_as_it_lasts(cohort_run):
    found = cohort_run.run(3000, SOME)
    assert max(f.time for f in found) >= cohort_run.frame().time - 90 * SECOND


def test_members_below_the_others_are_reported_as_less():
    fleet = CohortRun(both=True)
    fleet.run(LEARNT)
    found = fleet.run(120, SOME, by=-3.0)
    assert found[0].evidence["direction"] == "less"
    assert "are cooler" in found[0].summary


def test_members_below_one_shared_entity_blame_that_entity():
    """Half of a stage is slow on one loop: the loop is what they share, not the stage."""
    halves = {f"node:n{i}": [f"rack:r{i}"] for i in range(4)} | {f"rack:r{i}": [f"cdu:c{i // 2}"] for i in range(4)}
    ranks = {f"rank:7.{i}": [g, "stage:7.0"] for i, g in enumerate(GPUS)} | {"stage:7.0": ["job:7"]}
    fleet = CohortRun(Topology(RACK.parents | halves | ranks, RACK.attributes), (("@sku",),))
    fleet.run(LEARNT)
    assert {f.entity for f in fleet.run(120, range(15))} == {"cdu:c0"}


def test_an_entity_that_the_detector_blames_is_not_reported_twice(cohort_run):
    cohort_run.blamed = ("rack:r1",)
    assert cohort_run.run(120, SOME) == []


def test_members_that_share_only_their_model_blame_the_fleet():
    apart = Topology({g: [f"rack:{g[-1]}"] for g in GPUS}, {g: {"sku": "H100"} for g in GPUS})
    fleet = CohortRun(apart, (("@sku",),))
    fleet.run(LEARNT)
    assert {f.entity for f in fleet.run(120, SOME)} == {"fleet:gpu"}


def test_announced_work_on_the_rack_is_not_an_event(cohort_run):
    work = Event(cohort_run.frame().time, "rack:r1", "maintenance_start", {"seconds": 7200})
    assert cohort_run.run_tick(events=[work]) + cohort_run.run(200, SOME) == []


def test_repeated_changes_of_one_member_hide_no_group_event(cohort_run):
    found = []
    for tick in range(120):
        event = Event(cohort_run.frame().time, GPUS[0], "reset", {})
        found += cohort_run.run_tick(SOME, events=[event] if tick % 50 == 0 else ())
    assert found


def test_new_software_restarts_the_hold(cohort_run):
    cohort_run.run(60, SOME)
    events = [Event(cohort_run.frame().time, gpu, "version", {}) for gpu in GPUS]
    assert cohort_run.run_tick(SOME, events=events) + cohort_run.run(50, SOME) == []
    assert cohort_run.run(30, SOME)


def test_the_start_of_their_job_restarts_the_hold(cohort_run):
    ranks = {f"rank:7.{i}": [g, "stage:7.0"] for i, g in enumerate(GPUS)} | {"stage:7.0": ["job:7"]}
    cohort_run.topology = Topology(RACK.parents | ranks, RACK.attributes)
    cohort_run.run(55, SOME)
    start = Event(cohort_run.frame().time, "job:7", "job_start", {})
    assert cohort_run.run_tick(SOME, events=[start]) + cohort_run.run(55, SOME) == []
    assert cohort_run.run(30, SOME)


def test_a_silence_of_two_minutes_ends_it_and_a_short_one_does_not(cohort_run):
    cohort_run.run(60, SOME)
    began = dict(cohort_run.group.began)
    cohort_run.run(6, SOME, silent=range(SIZE))
    cohort_run.run_tick(SOME)
    assert next(iter(cohort_run.group.began.values()))["since"] == next(iter(began.values()))["since"]
    cohort_run.run(20, silent=range(SIZE))
    assert cohort_run.group.began == {}


def test_a_clock_that_is_set_back_is_not_a_group_event(cohort_run):
    cohort_run.run(120, SOME)
    cohort_run.tick = 10
    assert cohort_run.run(60, SOME) == []


def test_a_restart_continues_bit_by_bit(cohort_run):
    cohort_run.run(50, SOME)
    other = CohortRun()
    other.streams.restore(cohort_run.streams.snapshot())
    other.group.restore(cohort_run.group.snapshot())
    other.gates.restore(cohort_run.gates.snapshot())
    other.tick, other.rng = cohort_run.tick, np.random.default_rng(5)
    cohort_run.rng = np.random.default_rng(5)
    cohort_run.group.conditions, cohort_run.group.began = (
        dict(cohort_run.group.conditions),
        dict(cohort_run.group.began),
    )
    assert other.run(60, SOME) == cohort_run.run(60, SOME)
