"""Which entity the straggler detector names; and work, policy, moves and changes of the job, which are not faults."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.base import kernel
from detectors.straggler.straggler import Straggler
from pipeline.model.records import SECOND, Event
from tests.detectors.cases.straggler import CASE, GPUS, GUILTY, NODES, RANKS, SIZE, WIDTH, healthy_values
from tests.detectors.cases.straggler import topology as make_topology

NODE = slice(4, 8)  # the ranks of node:n1
SINCE = 60


def findings(change, ticks=240, detector=None, topology=None):
    """Findings; `change(tick, values, topology)` changes healthy instants and may return events."""
    detector, topology, found = detector or Straggler(), topology or make_topology(), []
    for tick in range(ticks):
        values = healthy_values(tick, np.random.default_rng([tick, 7]))
        found += detector.observe(CASE.frames_of(tick, values, change(tick, values, topology) or (), topology))
    return found


def slow_down(who, factor, since=SINCE, until=10**9):
    def change(tick, values, _):
        if since <= tick < until:
            values["rank"]["rank.compute_time"][who] *= factor

    return change


def event(tick, entity, kind, **data):
    return Event(CASE.time(tick), entity, kind, data)


def entities(found, level="page"):
    return {f.entity for f in found if f.level == level}


def first(found, level="page"):
    return next(f for f in found if f.level == level)


def delay(finding):
    return (finding.time - CASE.time(SINCE)) / SECOND


def test_a_node_whose_ranks_are_slow_together_is_one_finding():
    found = findings(slow_down(NODE, [1.15, 1.12, 1.18, 1.15]))
    assert entities(found) == {"node:n1"}
    assert 300 <= delay(first(found)) <= 360
    assert first(found).evidence["cause"] == "cause not visible"
    assert first(found).evidence["ranks"] == list(RANKS[NODE])


@pytest.mark.slow
def test_cpu_pressure_is_named_as_the_cause_and_pages_after_the_hold():
    def change(tick, values, topology):
        slow_down(NODE, [1.12, 1.1, 1.15, 1.12])(tick, values, topology)
        values["node"]["node.cpu_pressure"][1] += 4e6 * max(0, tick - SINCE)

    page = first(findings(change))
    assert page.entity == "node:n1"
    assert "tasks wait for CPU 40 % of the time on node:n1" in page.evidence["cause"]
    assert 300 <= delay(page) <= 360


@pytest.mark.parametrize("pressed", [False, True])
def test_a_node_that_is_slow_for_five_minutes_does_not_page(pressed):
    def change(tick, values, topology):
        slow_down(NODE, 1.4, SINCE, SINCE + 30)(tick, values, topology)
        values["node"]["node.cpu_pressure"][1] += 5e6 * min(max(0, tick - SINCE), 30) * pressed

    assert entities(findings(change)) == set()


def test_a_slow_node_that_is_half_of_its_stage_pages():
    topology = make_topology()
    topology.merge({rank: [f"stage:7.{i // 8}", "job:7", GPUS[i]] for i, rank in enumerate(RANKS)})
    assert entities(findings(slow_down(NODE, 1.2), topology=topology)) == {"node:n1"}


def test_a_whole_slow_stage_of_two_nodes_gives_no_finding():
    topology = make_topology()
    topology.merge({rank: [f"stage:7.{i // 8}", "job:7", GPUS[i]] for i, rank in enumerate(RANKS)})
    assert findings(slow_down(slice(0, 8), 1.2), topology=topology) == []


@pytest.mark.slow
def test_other_slow_ranks_in_each_step_do_not_page():
    rng = np.random.default_rng(3)

    def change(tick, values, _):
        if tick >= SINCE:
            slow = rng.random(SIZE) < 0.1
            values["rank"]["rank.compute_time"][slow] *= 1 + rng.uniform(0.1, 0.3, int(slow.sum()))

    assert entities(findings(change, 900)) == set()


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.02, 0.08])
def test_a_node_a_little_slower_since_a_new_driver_does_not_page(share):
    def change(tick, values, topology):
        slow_down(NODE, 1 + share)(tick, values, topology)
        return [event(tick, "node:n1", "version", versions={"nvidia_driver": "2"})] if tick == SINCE else []

    assert entities(findings(change, 400)) == set()


def test_a_node_a_third_slower_since_a_new_driver_pages():
    """The driver is people's choice; that the job runs a third slower for it is harm."""

    def change(tick, values, topology):
        slow_down(NODE, 1.33)(tick, values, topology)
        return [event(tick, "node:n1", "version", versions={"nvidia_driver": "2"})] if tick == SINCE else []

    assert entities(findings(change)) == {"node:n1"}


def test_a_power_cap_on_a_part_of_a_stage_is_policy():
    capped = slice(8, 16)

    def change(tick, values, topology):
        slow_down(capped, 1.12)(tick, values, topology)
        if tick >= SINCE:
            values["gpu"]["gpu.throttle_reasons"][capped] = 0x4
            values["gpu"]["gpu.sm_clock"][capped] /= 1.12

    assert findings(change) == []


def test_a_rank_slower_than_the_others_while_all_are_capped_pages():
    def change(tick, values, topology):
        slow_down(slice(0, SIZE), 1.12, 40)(tick, values, topology)
        slow_down(9, 1.2)(tick, values, topology)
        values["gpu"]["gpu.throttle_reasons"][:] = 0x4 * (tick >= 40)

    assert entities(findings(change)) == {RANKS[9]}


@pytest.mark.slow
def test_a_second_cap_on_a_node_while_all_are_capped_does_not_page():
    def change(tick, values, topology):
        slow_down(slice(0, SIZE), 1.1, 40)(tick, values, topology)
        slow_down(NODE, 1.1)(tick, values, topology)
        values["gpu"]["gpu.throttle_reasons"] = np.full(SIZE, 0x4 * (tick >= 40), float)
        values["gpu"]["gpu.sm_clock"][NODE] /= 1.1 if tick >= SINCE else 1.0
        values["gpu"]["gpu.power"][NODE] *= 0.85 if tick >= SINCE else 1.0

    found = findings(change)
    assert entities(found) == set()
    assert all("policy" in f.evidence["cause"] for f in found[1:])


def test_a_node_that_learned_under_a_higher_cap_than_its_stage_is_a_suspect_at_most_when_both_caps_end():
    others = np.setdiff1d(np.arange(SIZE), np.arange(SIZE)[NODE])

    def change(tick, values, topology):
        of_others, own = tick < SINCE, tick < 2 * SINCE
        values["gpu"]["gpu.throttle_reasons"][others] = 0x4 * of_others
        values["gpu"]["gpu.throttle_reasons"][NODE] = 0x4 * own
        for who, slowdown in ((others, 1.1 if of_others else 1.0), (NODE, 1.02 * (1.04 if own else 1.0))):
            slow_down(who, slowdown, 0)(tick, values, topology)
            values["gpu"]["gpu.sm_clock"][who] /= slowdown

    assert {f.level for f in findings(change)} <= {"suspect"}


@pytest.mark.parametrize(("drawn", "pages"), [(0.75, set()), (1.0, {"node:n1"})])
def test_a_slow_node_while_all_are_always_capped_is_policy_only_if_it_draws_less(drawn, pages):
    def change(tick, values, topology):
        slow_down(NODE, 1.1)(tick, values, topology)
        values["gpu"]["gpu.throttle_reasons"] = np.full(SIZE, 4.0)
        values["gpu"]["gpu.power"] = np.full(SIZE, 600.0)
        if tick >= SINCE:
            values["gpu"]["gpu.sm_clock"][NODE] /= 1.1
            values["gpu"]["gpu.power"][NODE] *= drawn

    found = findings(change)
    assert entities(found) == pages
    assert pages or all("policy" in f.evidence["cause"] for f in found[1:])


def test_a_slow_capped_node_without_power_readings_from_before_does_not_page():
    def change(tick, values, topology):
        slow_down(NODE, 1.1)(tick, values, topology)
        values["gpu"]["gpu.throttle_reasons"] = np.full(SIZE, 4.0)
        values["gpu"]["gpu.power"] = np.full(SIZE, 600.0 if tick >= SINCE else np.nan)
        if tick >= SINCE:
            values["gpu"]["gpu.sm_clock"][NODE] /= 1.1
            values["gpu"]["gpu.power"][NODE] *= 0.75

    found = findings(change)
    assert entities(found, "suspect")
    assert entities(found) == set()


@pytest.mark.slow
def test_a_lower_cap_without_power_readings_does_not_page():
    def change(tick, values, topology):
        slow_down(NODE, 1.1)(tick, values, topology)
        del values["gpu"]["gpu.power"]
        values["gpu"]["gpu.throttle_reasons"] = np.full(SIZE, 4.0)
        values["gpu"]["gpu.sm_clock"][NODE] /= 1.1 if tick >= SINCE else 1.0

    found = findings(change)
    assert "policy" in found[-1].evidence["cause"]
    assert entities(found) == set()


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("phase", range(0, 30, 5))
def test_a_rank_that_is_slow_repeatedly_does_not_learn_that_as_usual(phase):
    def change(tick, values, topology):
        if tick >= SINCE and (tick + phase) % 30 < 18:
            values["rank"]["rank.compute_time"][GUILTY] *= 1.5

    findings(change, 300, detector := Straggler())
    assert detector.streams.cells[kernel.BASELINE, GUILTY] < 0.05


def test_a_node_that_is_still_slow_after_its_cap_ended_pages():
    def change(tick, values, topology):
        slow_down(NODE, 1.1, SINCE)(tick, values, topology)
        capped = SINCE <= tick < 2 * SINCE
        values["gpu"]["gpu.throttle_reasons"][NODE] = 4.0 * capped
        values["gpu"]["gpu.sm_clock"][NODE] /= 1.1 if capped else 1.0

    page = first(findings(change))
    assert page.entity == "node:n1"
    assert page.time >= CASE.time(2 * SINCE)


def test_a_cap_on_all_nodes_but_one_of_a_slow_stage_does_not_page():
    stage = slice(0, 3 * WIDTH)  # three nodes, too few to be compared with each other: they are with all of the job
    topology = make_topology()
    topology.merge({r: [f"stage:7.{i // (3 * WIDTH)}", "job:7", GPUS[i]] for i, r in enumerate(RANKS)})

    def change(tick, values, topology):
        slow_down(stage, 1.25)(tick, values, topology)
        capped = np.arange(SIZE) < 3 * WIDTH
        capped[NODE] = False
        if tick >= SINCE + 60:
            values["rank"]["rank.compute_time"][capped] *= 1.12
            values["gpu"]["gpu.throttle_reasons"][capped] = 0x4
            values["gpu"]["gpu.sm_clock"][capped] /= 1.12

    assert entities(findings(change, topology=topology)) == set()


def test_a_node_that_was_faster_than_its_stage_and_is_equal_now_does_not_page():
    def change(tick, values, topology):
        slow_down(NODE, 0.9, 0, SINCE)(tick, values, topology)
        if tick < SINCE:
            values["gpu"]["gpu.sm_clock"][NODE] *= 1.1

    assert findings(change) == []


def test_a_pause_of_the_job_does_not_count_as_slow_time():
    def change(tick, values, topology):
        slow_down(NODE, 1.3, SINCE, SINCE + 47)(tick, values, topology)
        values["rank"]["rank.step"][:] = 1000.0 + 2 * (min(tick, SINCE + 18) if tick < SINCE + 45 else tick)

    found = findings(change, 150)
    assert entities(found, "suspect") == {"node:n1"}
    assert entities(found) == set()


def test_a_rank_that_is_slow_from_its_first_step_on_another_gpu_is_a_ticket():
    def change(tick, values, topology):
        slow_down(GUILTY, 1.2)(tick, values, topology)
        if tick == SINCE:
            topology.merge({"gpu:n9.0": ["node:n9"], RANKS[GUILTY]: ["stage:7.0", "job:7", "gpu:n9.0"]})

    found = findings(change)
    assert entities(found, "ticket") == {RANKS[GUILTY]}
    assert delay(first(found, "ticket")) <= 240
    assert entities(found) == set()


@pytest.mark.slow
def test_a_rank_that_is_slow_from_the_restart_of_its_job_pages():
    def change(tick, values, topology):
        slow_down(GUILTY, 1.3)(tick, values, topology)
        ranks = {rank: {"gpu": gpu} for rank, gpu in zip(RANKS, GPUS, strict=True)}
        return [event(tick, "job:7", "job_start", ranks=ranks)] if tick == SINCE else []

    found = findings(change)
    assert entities(found) == {RANKS[GUILTY]}
    assert delay(first(found)) <= 330


def test_compiling_and_capturing_in_the_first_steps_gives_no_finding():
    rng = np.random.default_rng(5)

    def change(tick, values, topology):
        if tick < 20:
            values["rank"]["rank.compute_time"] *= 1 + np.exp(-tick / 5) * (2 + rng.exponential(0.5, SIZE))

    assert findings(change) == []


@pytest.mark.slow
def test_a_job_that_restarts_on_its_gpus_keeps_its_baseline():
    """Restarted while a GPU is slow: the fault is not learned."""

    def change(tick, values, topology):
        slow_down(GUILTY, 1.15)(tick, values, topology)
        if tick == SINCE:
            topology.remove_entities([*RANKS, "stage:7.0", "stage:7.1"])
        if SINCE <= tick < SINCE + 20:
            values["rank"] = {name: np.full(SIZE, np.nan) for name in values["rank"]}
        if tick == SINCE + 20:
            topology.merge(make_topology().parents)
            return [event(tick, "job:7", "job_start", ranks={rank: {} for rank in RANKS})]
        return []

    assert entities(findings(change, 400)) == {RANKS[GUILTY]}


@pytest.mark.parametrize("entity", ["node:n1", "rack:r1", GPUS[GUILTY]])
def test_announced_work_is_not_a_straggler(entity):
    def change(tick, values, topology):
        slow_down(GUILTY, 1.3, SINCE, SINCE + 100)(tick, values, topology)
        return [event(tick, entity, "maintenance_start", seconds=3600)] if tick == SINCE - 1 else []

    assert findings(change) == []


def test_slow_writers_of_a_checkpoint_are_not_judged():
    def change(tick, values, topology):
        for begin in range(SINCE, 240, 30):
            slow_down(GUILTY, 1.5, begin, begin + 12)(tick, values, topology)
            if tick == begin:
                return [event(tick, "job:7", "checkpoint", seconds=120.0)]
        return []

    assert findings(change) == []


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    "seconds", [float("inf"), float("nan"), -5, True, "60", None, 10**400], ids=lambda v: repr(v)[:9]
)
def test_a_checkpoint_or_canary_of_invalid_length_is_ignored(seconds):
    def change(tick, values, topology):
        slow_down(GUILTY, 1.3)(tick, values, topology)
        if tick not in (SINCE - 5, SINCE + 20):
            return []
        checkpoint = event(tick, "job:7", "checkpoint", seconds=seconds)
        return [checkpoint, event(tick, GPUS[GUILTY], "digest", began=seconds, took=seconds)]

    assert entities(findings(change)) == {RANKS[GUILTY]}


@pytest.mark.slow
def test_an_endless_checkpoint_excludes_a_job_for_an_hour_at_most():
    def change(tick, values, topology):
        slow_down(GUILTY, 1.3)(tick, values, topology)
        return [event(tick, "job:7", "checkpoint", seconds=1e12)] if tick == SINCE - 5 else []

    found = findings(change, 500)
    assert entities(found) == {RANKS[GUILTY]}
    assert found[0].time >= CASE.time(SINCE - 5 + 360)


@pytest.mark.slow
def test_a_slow_rank_accepted_as_normal_gives_no_finding():
    detector, topology = Straggler(), make_topology()

    def change(tick, values, _):
        slow_down(GUILTY, 1.15)(tick, values, _)
        if tick == 100:
            detector.accept_as_normal(RANKS[GUILTY], CASE.frames_of(tick, values, (), topology))

    found = findings(change, 300, detector, topology)
    assert max(f.time for f in found) <= CASE.time(100)


def test_the_state_holds_running_ranks_and_not_ended_ones():
    detector, topology = Straggler(), make_topology()
    names = dict(CASE.names)
    for job in range(8, 20):
        topology.remove_entities([e for e in topology.parents if e.startswith(("rank:", "stage:"))])
        fresh = tuple(f"rank:{job}.{i}" for i in range(SIZE))
        topology.merge({rank: [f"stage:{job}.0", f"job:{job}", GPUS[i]] for i, rank in enumerate(fresh)})
        names["rank"] = (*names["rank"], *fresh)
        for tick in range(3):
            values = healthy_values(tick, np.random.default_rng(tick))
            old = np.full(len(names["rank"]) - SIZE, np.nan)
            values["rank"] = {name: np.append(old, column) for name, column in values["rank"].items()}
            case = type(CASE)(Straggler, names, make_topology, CASE.instant, CASE.guilty)
            detector.observe(case.frames_of(job * 400 + tick, values, (), topology))
    assert len(detector.slow.since) <= 2 * SIZE
    assert len(detector.slots.groups) <= 2 * SIZE


def test_a_whole_job_that_is_slow_gives_no_finding():
    assert findings(slow_down(slice(0, SIZE), 1.5)) == []


@pytest.mark.slow
def test_a_job_of_one_node_is_compared_rank_by_rank():
    topology = make_topology()
    topology.merge({gpu: ["node:n0"] for gpu in GPUS})
    found = findings(slow_down(GUILTY, 1.2), topology=topology)
    assert entities(found) == {RANKS[GUILTY]}
    assert NODES * WIDTH == SIZE
