"""Whom the straggler detector blames, and what never makes it blame anybody: work, policy, moves and the job itself."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.base import kernel
from detectors.straggler.straggler import Straggler
from pipeline.model.records import SECOND, Event
from tests.detectors.cases.straggler import CASE, GPUS, GUILTY, NODES, RANKS, SIZE, WIDTH, quiet, topology

NODE = slice(4, 8)  # the ranks of node:n1
SINCE = 60


def shown(change, ticks=240, detector=None, graph=None):
    """Findings while `change(tick, values)` alters quiet instants; it may return events."""
    detector, graph, found = detector or Straggler(), graph or topology(), []
    for tick in range(ticks):
        values = quiet(tick, np.random.default_rng([tick, 7]))
        found += detector.observe(CASE.framed(tick, values, change(tick, values, graph) or (), graph))
    return found


def slower(who, factor, since=SINCE, until=10**9):
    def change(tick, values, _):
        if since <= tick < until:
            values["rank"]["rank.compute_time"][who] *= factor

    return change


def event(tick, entity, kind, **data):
    return Event(CASE.time(tick), entity, kind, data)


def blamed(found, level="page"):
    return {f.entity for f in found if f.level == level}


def first(found, level="page"):
    return next(f for f in found if f.level == level)


def waited(finding):
    return (finding.time - CASE.time(SINCE)) / SECOND


def test_a_node_whose_ranks_are_slow_together_is_blamed_as_one():
    found = shown(slower(NODE, [1.15, 1.12, 1.18, 1.15]))
    assert blamed(found) == {"node:n1"}
    assert 600 <= waited(first(found)) <= 900
    assert first(found).evidence["cause"] == "cause not visible"
    assert first(found).evidence["ranks"] == list(RANKS[NODE])


def test_pressure_on_the_processors_is_named_and_waits_as_long_as_two_that_pass_by_themselves():
    def change(tick, values, graph):
        slower(NODE, [1.12, 1.1, 1.15, 1.12])(tick, values, graph)
        values["node"]["node.cpu_pressure"][1] += 4e6 * max(0, tick - SINCE)

    page = first(shown(change))
    assert page.entity == "node:n1"
    assert "node:n1 wait for a processor 40 % of the time" in page.evidence["cause"]
    assert 600 <= waited(page) <= 900


def test_two_slowdowns_of_a_node_that_meet_wake_nobody_though_both_show_pressure():
    def change(tick, values, graph):
        slower(NODE, 1.4, SINCE, SINCE + 30)(tick, values, graph)
        slower(NODE, 1.3, SINCE + 30, SINCE + 58)(tick, values, graph)
        values["node"]["node.cpu_pressure"][1] += 4e6 * max(0, min(tick, SINCE + 58) - SINCE)

    found = shown(change)
    assert any("wait for a processor" in f.evidence["cause"] for f in found)
    assert blamed(found) == set()


@pytest.mark.parametrize("pressed", [False, True])
def test_a_node_that_is_slow_for_five_minutes_wakes_nobody(pressed):
    def change(tick, values, graph):
        slower(NODE, 1.4, SINCE, SINCE + 30)(tick, values, graph)
        values["node"]["node.cpu_pressure"][1] += 5e6 * min(max(0, tick - SINCE), 30) * pressed

    assert blamed(shown(change)) == set()


def test_a_narrower_pcie_link_is_named_and_pages_at_once():
    def change(tick, values, graph):
        slower(GUILTY, 1.1)(tick, values, graph)
        values["gpu"]["gpu.pcie_width"][GUILTY] = 8.0 if tick >= SINCE else 16.0

    page = first(shown(change))
    assert page.entity == RANKS[GUILTY]
    assert "PCIe link at 8 lanes, its peers' at 16" in page.evidence["cause"]
    assert waited(page) <= 300


def test_a_slow_node_that_is_half_of_its_stage_is_still_told_from_the_job():
    graph = topology()
    graph.merge({rank: [f"stage:7.{i // 8}", "job:7", GPUS[i]] for i, rank in enumerate(RANKS)})
    assert blamed(shown(slower(NODE, 1.2), graph=graph)) == {"node:n1"}


def test_a_whole_stage_of_two_nodes_that_slows_blames_nobody():
    graph = topology()
    graph.merge({rank: [f"stage:7.{i // 8}", "job:7", GPUS[i]] for i, rank in enumerate(RANKS)})
    assert shown(slower(slice(0, 8), 1.2), graph=graph) == []


def test_other_ranks_in_each_step_are_the_jobs_own_doing():
    rng = np.random.default_rng(3)

    def change(tick, values, _):
        if tick >= SINCE:
            struck = rng.random(SIZE) < 0.1
            values["rank"]["rank.compute_time"][struck] *= 1 + rng.uniform(0.1, 0.3, int(struck.sum()))

    assert blamed(shown(change, 900)) == set()


def test_a_rank_with_more_tokens_is_not_slow():
    share = np.where(np.arange(SIZE) == GUILTY, 1.2, 1.0)

    def change(tick, values, graph):
        values["rank"]["rank.tokens"] = (
            1e9 + 1e6 * tick * np.ones(SIZE) + 1e6 * np.maximum(0, tick - SINCE) * (share - 1)
        )
        slower(GUILTY, 1.2, SINCE + 1)(tick, values, graph)

    assert shown(change) == []


@pytest.mark.parametrize("share", [0.02, 0.08])
def test_another_driver_makes_a_node_a_little_slower_for_good_and_nobody_is_told(share):
    def change(tick, values, graph):
        slower(NODE, 1 + share)(tick, values, graph)
        return [event(tick, "node:n1", "version", versions={"nvidia_driver": "2"})] if tick == SINCE else []

    assert shown(change, 400) == []


def test_a_change_of_software_that_costs_a_third_stays_a_suspect():
    def change(tick, values, graph):
        slower(NODE, 1.33)(tick, values, graph)
        return [event(tick, "node:n1", "version", versions={"nvidia_driver": "2"})] if tick == SINCE else []

    found = shown(change)
    assert blamed(found, "suspect") == {"node:n1"}
    assert blamed(found) == set()


def test_a_power_cap_on_a_part_of_a_stage_is_policy():
    capped = slice(8, 16)

    def change(tick, values, graph):
        slower(capped, 1.12)(tick, values, graph)
        if tick >= SINCE:
            values["gpu"]["gpu.throttle_reasons"][capped] = 0x4
            values["gpu"]["gpu.sm_clock"][capped] /= 1.12

    assert shown(change) == []


def test_who_is_slow_beside_others_while_all_are_under_a_power_cap_is_slow():
    def change(tick, values, graph):
        slower(slice(0, SIZE), 1.12, 40)(tick, values, graph)
        slower(9, 1.2)(tick, values, graph)
        values["gpu"]["gpu.throttle_reasons"][:] = 0x4 * (tick >= 40)

    assert blamed(shown(change)) == {RANKS[9]}


def test_a_second_cap_on_a_node_among_others_that_have_one_wakes_nobody():
    def change(tick, values, graph):
        slower(slice(0, SIZE), 1.1, 40)(tick, values, graph)
        slower(NODE, 1.1)(tick, values, graph)
        values["gpu"]["gpu.throttle_reasons"] = np.full(SIZE, 0x4 * (tick >= 40), float)
        values["gpu"]["gpu.sm_clock"][NODE] /= 1.1 if tick >= SINCE else 1.0

    found = shown(change)
    assert blamed(found) == set()
    assert all("policy" in f.evidence["cause"] for f in found[1:])


def test_who_learnt_under_a_cap_that_was_higher_than_that_of_its_stage_wakes_nobody_when_both_are_gone():
    others = np.setdiff1d(np.arange(SIZE), np.arange(SIZE)[NODE])

    def change(tick, values, graph):
        of_others, own = tick < SINCE, tick < 2 * SINCE
        values["gpu"]["gpu.throttle_reasons"][others] = 0x4 * of_others
        values["gpu"]["gpu.throttle_reasons"][NODE] = 0x4 * own
        for who, slowdown in ((others, 1.1 if of_others else 1.0), (NODE, 1.02 * (1.04 if own else 1.0))):
            slower(who, slowdown, 0)(tick, values, graph)
            values["gpu"]["gpu.sm_clock"][who] /= slowdown

    assert shown(change) == []


@pytest.mark.parametrize(("drawn", "pages"), [(0.75, set()), (1.0, {"node:n1"})])
def test_a_node_that_is_slow_while_all_are_always_under_a_cap_is_policy_only_if_it_draws_less(drawn, pages):
    def change(tick, values, graph):
        slower(NODE, 1.1)(tick, values, graph)
        values["gpu"]["gpu.throttle_reasons"] = np.full(SIZE, 4.0)
        values["gpu"]["gpu.power"] = np.full(SIZE, 600.0)
        if tick >= SINCE:
            values["gpu"]["gpu.sm_clock"][NODE] /= 1.1
            values["gpu"]["gpu.power"][NODE] *= drawn

    found = shown(change)
    assert blamed(found) == pages
    assert pages or all("policy" in f.evidence["cause"] for f in found[1:])


def test_a_node_under_a_cap_of_which_nobody_knows_what_it_drew_before_it_was_slow_wakes_nobody():
    def change(tick, values, graph):
        slower(NODE, 1.1)(tick, values, graph)
        values["gpu"]["gpu.throttle_reasons"] = np.full(SIZE, 4.0)
        values["gpu"]["gpu.power"] = np.full(SIZE, 600.0 if tick >= SINCE else np.nan)
        if tick >= SINCE:
            values["gpu"]["gpu.sm_clock"][NODE] /= 1.1
            values["gpu"]["gpu.power"][NODE] *= 0.75

    found = shown(change)
    assert blamed(found, "suspect")
    assert blamed(found) == set()


def test_a_lower_cap_where_no_power_is_measured_wakes_nobody():
    def change(tick, values, graph):
        slower(NODE, 1.1)(tick, values, graph)
        del values["gpu"]["gpu.power"]
        values["gpu"]["gpu.throttle_reasons"] = np.full(SIZE, 4.0)
        values["gpu"]["gpu.sm_clock"][NODE] /= 1.1 if tick >= SINCE else 1.0

    found = shown(change)
    assert "policy" in found[-1].evidence["cause"]
    assert blamed(found) == set()


@pytest.mark.parametrize("phase", range(0, 30, 5))
def test_a_rank_that_is_slow_now_and_then_is_never_taken_for_one_that_lost_its_lead(phase):
    def change(tick, values, graph):
        if tick >= SINCE and (tick + phase) % 30 < 18:
            values["rank"]["rank.compute_time"][GUILTY] *= 1.5

    shown(change, 300, detector := Straggler())
    assert detector.streams.cells[kernel.BASELINE, GUILTY] < 0.05


def test_a_node_that_is_slow_once_its_cap_is_gone_is_so_since_then():
    def change(tick, values, graph):
        slower(NODE, 1.1, SINCE)(tick, values, graph)
        values["gpu"]["gpu.throttle_reasons"][NODE] = 4.0 * (SINCE <= tick < 2 * SINCE)

    page = first(shown(change))
    assert page.entity == "node:n1"
    assert page.onset >= CASE.time(2 * SINCE)


def test_a_stage_that_is_slow_blames_nobody_when_a_cap_comes_over_all_its_nodes_but_one():
    stage = slice(0, 3 * WIDTH)  # three nodes, too few to be compared with each other: they are with all of the job
    graph = topology()
    graph.merge({r: [f"stage:7.{i // (3 * WIDTH)}", "job:7", GPUS[i]] for i, r in enumerate(RANKS)})

    def change(tick, values, graph):
        slower(stage, 1.25)(tick, values, graph)
        capped = np.arange(SIZE) < 3 * WIDTH
        capped[NODE] = False
        if tick >= SINCE + 60:
            values["rank"]["rank.compute_time"][capped] *= 1.12
            values["gpu"]["gpu.throttle_reasons"][capped] = 0x4
            values["gpu"]["gpu.sm_clock"][capped] /= 1.12

    assert blamed(shown(change, graph=graph)) == set()


def test_who_was_quicker_than_its_stage_and_is_as_slow_as_all_now_wakes_nobody():
    def change(tick, values, graph):
        slower(NODE, 0.9, 0, SINCE)(tick, values, graph)
        if tick < SINCE:
            values["gpu"]["gpu.sm_clock"][NODE] *= 1.1

    assert blamed(shown(change), "suspect") == {"node:n1"}
    assert blamed(shown(change)) == set()


def test_a_pause_of_the_job_is_no_time_for_which_a_rank_was_slow():
    def change(tick, values, graph):
        slower(NODE, 1.3, SINCE, SINCE + 47)(tick, values, graph)
        values["rank"]["rank.step"][:] = 1000.0 + 2 * (min(tick, SINCE + 18) if tick < SINCE + 45 else tick)

    found = shown(change, 150)
    assert blamed(found, "suspect") == {"node:n1"}
    assert blamed(found) == set()


def test_our_own_canary_on_a_gpu_is_no_straggler():
    def change(tick, values, graph):
        slower(GUILTY, 1.3, SINCE, SINCE + 7)(tick, values, graph)
        told = {"began": CASE.time(SINCE), "took": 60.0}
        return [event(tick, GPUS[GUILTY], "digest", **told)] if tick == SINCE + 6 else []

    found = shown(change)
    assert blamed(found) == set()
    assert all(f.time < CASE.time(SINCE + 6) for f in found)


def test_a_rank_that_moves_learns_anew_and_is_not_measured_by_its_old_gpu():
    def change(tick, values, graph):
        slower(GUILTY, 1.1)(tick, values, graph)
        if tick == SINCE:
            graph.merge({"gpu:n9.0": ["node:n9"], RANKS[GUILTY]: ["stage:7.0", "job:7", "gpu:n9.0"]})

    assert shown(change) == []


def test_the_first_steps_of_a_job_are_not_judged():
    def change(tick, values, graph):
        slower(GUILTY, 1.3, SINCE, SINCE + 90)(tick, values, graph)
        ranks = {rank: {"gpu": gpu} for rank, gpu in zip(RANKS, GPUS, strict=True)}
        return [event(tick, "job:7", "job_start", ranks=ranks)] if tick == SINCE else []

    assert shown(change) == []


def test_a_job_that_comes_back_on_its_gpus_still_knows_what_is_normal():
    """Restarted while a GPU is slow: the fault is not learnt."""

    def change(tick, values, graph):
        slower(GUILTY, 1.15)(tick, values, graph)
        if tick == SINCE:
            graph.remove_entities([*RANKS, "stage:7.0", "stage:7.1"])
        if SINCE <= tick < SINCE + 20:
            values["rank"] = {name: np.full(SIZE, np.nan) for name in values["rank"]}
        if tick == SINCE + 20:
            graph.merge(topology().parents)
            return [event(tick, "job:7", "job_start", ranks={rank: {} for rank in RANKS})]
        return []

    assert blamed(shown(change, 400)) == {RANKS[GUILTY]}


@pytest.mark.parametrize("entity", ["node:n1", "rack:r1", GPUS[GUILTY]])
def test_announced_work_is_no_straggler(entity):
    def change(tick, values, graph):
        slower(GUILTY, 1.3, SINCE, SINCE + 100)(tick, values, graph)
        return [event(tick, entity, "maintenance_start", seconds=3600)] if tick == SINCE - 1 else []

    assert shown(change) == []


def test_slow_writers_of_a_checkpoint_are_not_judged():
    def change(tick, values, graph):
        for begin in range(SINCE, 240, 30):
            slower(GUILTY, 1.5, begin, begin + 12)(tick, values, graph)
            if tick == begin:
                return [event(tick, "job:7", "checkpoint", seconds=120.0)]
        return []

    assert shown(change) == []


@pytest.mark.parametrize(
    "seconds", [float("inf"), float("nan"), -5, True, "60", None, 10**400], ids=lambda v: repr(v)[:9]
)
def test_a_checkpoint_or_canary_of_unknown_length_is_none(seconds):
    def change(tick, values, graph):
        slower(GUILTY, 1.3)(tick, values, graph)
        if tick not in (SINCE - 5, SINCE + 20):
            return []
        told = [event(tick, "job:7", "checkpoint", seconds=seconds)]
        return [*told, event(tick, GPUS[GUILTY], "digest", began=seconds, took=seconds)]

    assert blamed(shown(change)) == {RANKS[GUILTY]}


def test_a_checkpoint_that_never_ends_silences_a_job_for_an_hour_at_most():
    def change(tick, values, graph):
        slower(GUILTY, 1.3)(tick, values, graph)
        return [event(tick, "job:7", "checkpoint", seconds=1e12)] if tick == SINCE - 5 else []

    found = shown(change, 500)
    assert blamed(found) == {RANKS[GUILTY]}
    assert found[0].time >= CASE.time(SINCE - 5 + 360)


def test_a_canary_that_began_long_ago_excuses_no_rank_that_was_slow_before_it():
    def change(tick, values, graph):
        slower(GUILTY, 1.15)(tick, values, graph)
        if tick > 400 and tick % 5 == 0:
            return [event(tick, GPUS[GUILTY], "digest", began=0, took=20.0)]
        return []

    assert shown(change, 460)[-1].time >= CASE.time(455)


def test_what_a_person_calls_no_fault_is_normal_from_then_on():
    detector, graph = Straggler(), topology()

    def change(tick, values, _):
        slower(GUILTY, 1.15)(tick, values, _)
        if tick == 100:
            detector.accept_as_normal(RANKS[GUILTY], CASE.framed(tick, values, (), graph))

    found = shown(change, 300, detector, graph)
    assert blamed(found) == set()
    assert max(f.time for f in found) <= CASE.time(100)


def test_the_state_follows_the_living_ranks_and_not_those_that_ended():
    detector, graph = Straggler(), topology()
    names = dict(CASE.names)
    for job in range(8, 20):
        graph.remove_entities([e for e in graph.parents if e.startswith(("rank:", "stage:"))])
        fresh = tuple(f"rank:{job}.{i}" for i in range(SIZE))
        graph.merge({rank: [f"stage:{job}.0", f"job:{job}", GPUS[i]] for i, rank in enumerate(fresh)})
        names["rank"] = (*names["rank"], *fresh)
        for tick in range(3):
            values = quiet(tick, np.random.default_rng(tick))
            old = np.full(len(names["rank"]) - SIZE, np.nan)
            values["rank"] = {name: np.append(old, column) for name, column in values["rank"].items()}
            case = type(CASE)(Straggler, names, topology, CASE.instant, CASE.guilty)
            detector.observe(case.framed(job * 400 + tick, values, (), graph))
    assert len(detector.times.count) <= 2 * SIZE
    assert len(detector.slots.groups) <= 2 * SIZE


def test_all_of_a_job_slow_at_once_blames_nobody():
    assert shown(slower(slice(0, SIZE), 1.5)) == []


def test_a_job_of_one_node_is_compared_rank_by_rank():
    graph = topology()
    graph.merge({gpu: ["node:n0"] for gpu in GPUS})
    found = shown(slower(GUILTY, 1.2), graph=graph)
    assert blamed(found) == {RANKS[GUILTY]}
    assert NODES * WIDTH == SIZE
