"""Jobs start, are stopped, move to spare nodes and end; a GPU has one job, a node that is out none."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from agents.sim.chunk import Chunk
from agents.sim.confounders.cluster import JobRestart, Maintenance
from agents.sim.effects import PlannedEvent
from agents.sim.fault_plan import FaultPlan
from agents.sim.fleet import FleetSimulator, sort_events
from agents.sim.layout import Layout
from agents.sim.physics.noise import generator
from agents.sim.scenario import Fleet, Jobs, Line, Rates, Scenario
from agents.sim.schedule import Allocation, Schedule, Stop, partitions, plan
from pipeline.model.event_kinds import EVENT_KINDS

DAY = 86_400.0
FOR_EVER = 0.0


def storm(nodes: int, seed: int, count: int = 40) -> list[Stop]:
    """Stops that take one to three nodes out for up to half a day."""
    rng = generator(seed, 999)
    return [
        Stop(
            float(rng.uniform(0, 5 * DAY)),
            tuple(rng.choice(nodes, min(nodes, int(rng.integers(1, 4))), replace=False).tolist()),
            float(rng.uniform(0, DAY / 2)),
        )
        for _ in range(count)
    ]


def overlap(one: Allocation, other: Allocation) -> bool:
    return one.begin < other.end and other.begin < one.end and bool(np.intersect1d(one.gpus, other.gpus).size)


def nodes_of(stay: Allocation, layout: Layout) -> set[int]:
    return set(layout.node_of_gpu[stay.gpus].tolist())


def of_job(schedule: Schedule, name: str) -> list[Allocation]:
    return [stay for stay in schedule.allocations if stay.job.name == name]


@pytest.mark.parametrize("nodes", [1, 2, 7, 8, 9, 16, 64])
def test_without_churn_every_partition_runs_one_endless_job(nodes: int) -> None:
    layout = Layout(nodes, 8)
    schedule = plan(layout, FOR_EVER, [], 1, DAY)
    assert len(schedule.jobs) == len(schedule.allocations) == (1 if nodes < 9 else 2)
    assert all((s.begin, s.end, s.warm, s.last) == (0.0, np.inf, True, True) for s in schedule.allocations)
    used = np.concatenate([s.gpus for s in schedule.allocations])
    assert sorted(used.tolist()) == list(range(layout.busy_count("gpu")))
    assert all(len(s.gpus) == s.job.ranks == len(s.job.names) for s in schedule.allocations)


@pytest.mark.parametrize("nodes", [1, 3, 8, 16, 64, 500])
def test_partitions_share_the_busy_nodes_without_a_gap(nodes: int) -> None:
    for many in (False, True):
        parts = partitions(Layout(nodes, 8), 12.0 * many, 1)
        assert [n for part in parts for n in part.nodes] == list(range(max(1, nodes - nodes // 8)))
        assert all(len(part.nodes) > 0 for part in parts)
    assert len(partitions(Layout(500, 8), 12.0, 1)) > 2 == len(partitions(Layout(500, 8), 0.0, 1))


def test_a_pipeline_has_at_most_as_many_stages_as_ranks_and_no_empty_one() -> None:
    for width in (1, 2, 8):
        for nodes in (1, 4, 16):
            for hours in (FOR_EVER, 4.0):
                for job in plan(Layout(nodes, width), hours, [], 3, DAY).jobs:
                    assert set(job.stage_of_rank.tolist()) == set(range(job.stages))
                    assert (np.diff(job.stage_of_rank) >= 0).all()


@pytest.mark.parametrize("hours", [FOR_EVER, 2.0, 12.0])
@pytest.mark.parametrize("nodes", [1, 4, 16, 40])
def test_a_gpu_has_at_most_one_job_and_a_node_that_is_out_has_none(nodes: int, hours: float) -> None:
    layout = Layout(nodes, 4)
    for seed in range(4):
        stops = storm(nodes, seed)
        schedule = plan(layout, hours, stops, seed, 6 * DAY)
        stays = schedule.allocations
        for i, stay in enumerate(stays):
            assert stay.begin <= stay.end
            assert len(set(stay.gpus.tolist())) == len(stay.gpus) == stay.job.ranks
            assert not [1 for other in stays[i + 1 :] if overlap(stay, other)]
            for stop in stops:
                out = bool(nodes_of(stay, layout) & set(stop.nodes))
                assert not (out and stay.begin < stop.at + stop.out and stop.at < stay.end)


def test_a_job_has_one_stay_at_a_time_and_only_its_last_stay_is_marked_as_last() -> None:
    schedule = plan(Layout(16, 8), 6.0, storm(16, 7), 7, 6 * DAY)
    assert len(schedule.jobs) > 10
    for job in schedule.jobs:
        mine = of_job(schedule, job.name)
        assert all(one.end <= other.begin for one, other in pairwise(mine))
        assert [s.last for s in mine] == [False] * (len(mine) - 1) + [mine[-1].last]
        assert not any(s.warm for s in mine if s.begin > 0)


def test_a_stopped_job_moves_to_a_spare_node_and_its_other_ranks_keep_their_nodes() -> None:
    layout = Layout(16, 8)
    schedule = plan(layout, FOR_EVER, [Stop(5000.0, (3,), DAY)], 1, 2 * DAY)
    first, then = of_job(schedule, schedule.jobs[0].name)
    assert (first.end, first.last, then.last) == (5000.0, False, True)
    assert 180 <= then.begin - first.end <= 600
    moved = np.flatnonzero(first.gpus != then.gpus)
    assert set(layout.node_of_gpu[first.gpus[moved]].tolist()) == {3}
    assert set(layout.node_of_gpu[then.gpus[moved]].tolist()) <= {14, 15}
    assert then.job is first.job  # and so the names of its ranks
    assert len(of_job(schedule, schedule.jobs[1].name)) == 1


def test_a_stopped_job_restarts_on_its_own_nodes_if_none_is_out() -> None:
    schedule = plan(Layout(16, 8), FOR_EVER, [Stop(5000.0, (3,), 0.0)], 1, DAY)
    first, then = of_job(schedule, schedule.jobs[0].name)
    assert np.array_equal(first.gpus, then.gpus)


def test_a_job_waits_for_a_node_that_returns_soon_unless_it_fails_again() -> None:
    layout, work = Layout(16, 8), Stop(5000.0, (3,), 1500.0, waits=True)
    first, then = of_job(plan(layout, FOR_EVER, [work], 1, DAY), "sim-81")
    assert then.begin == 6500.0
    assert np.array_equal(first.gpus, then.gpus)
    first, then = of_job(plan(layout, FOR_EVER, [work, Stop(5100.0, (3,), DAY)], 1, DAY), "sim-81")
    assert then.begin < 6500.0
    assert 3 not in nodes_of(then, layout)


def test_a_spare_node_that_is_out_is_not_used() -> None:
    layout = Layout(16, 8)
    schedule = plan(layout, FOR_EVER, [Stop(1000.0, (14,), DAY), Stop(5000.0, (3,), DAY)], 1, DAY)
    _, then = of_job(schedule, "sim-81")
    assert nodes_of(then, layout) == {0, 1, 2, 15, 4, 5, 6, 7}
    assert then.begin < 5700.0


def test_without_a_spare_node_a_job_waits_until_its_node_is_repaired() -> None:
    schedule = plan(Layout(1, 8), FOR_EVER, [Stop(1000.0, (0,), 7200.0)], 1, DAY)
    assert [(s.begin, s.end) for s in schedule.allocations] == [(0.0, 1000.0), (8200.0, np.inf)]


def test_with_all_nodes_out_nothing_runs_until_they_are_back() -> None:
    layout = Layout(16, 8)
    schedule = plan(layout, FOR_EVER, [Stop(1000.0, tuple(range(16)), 7200.0)], 1, DAY)
    running = schedule.running_jobs(np.arange(0.0, 12_000.0, 10.0), layout.gpus)
    out = slice(100, 820)
    assert (running[out] == -1).all()
    assert (running[99] >= 0).sum() == (running[821] >= 0).sum() == layout.busy_count("gpu")


def test_a_stop_before_the_first_step_keeps_the_node_free() -> None:
    schedule = plan(Layout(1, 8), FOR_EVER, [Stop(0.0, (0,), 3600.0)], 1, DAY)
    assert [s.begin for s in schedule.allocations if s.end > s.begin] == [3600.0]


def test_a_fault_on_a_waiting_job_delays_it_further() -> None:
    stops = [Stop(1000.0, (0,), 1000.0), Stop(1500.0, (0,), 9000.0)]
    assert [s.begin for s in plan(Layout(1, 8), FOR_EVER, stops, 1, DAY).allocations] == [0.0, 10_500.0]


def test_a_stop_by_job_number_ends_only_that_job_and_no_node_is_out() -> None:
    schedule = plan(Layout(16, 8), FOR_EVER, [Stop(4000.0, (), 0.0, 1)], 1, DAY)
    assert len(of_job(schedule, schedule.jobs[0].name)) == 1
    first, then = of_job(schedule, schedule.jobs[1].name)
    assert first.end == 4000.0
    assert np.array_equal(first.gpus, then.gpus)


def test_the_schedule_depends_on_the_seed_and_a_stop_changes_nothing_before_it() -> None:
    layout, stops = Layout(32, 8), storm(32, 1)
    one, same, other = (plan(layout, 4.0, stops, seed, 6 * DAY) for seed in (5, 5, 6))
    assert [(s.begin, s.end, s.gpus.tolist()) for s in one.allocations] == [
        (s.begin, s.end, s.gpus.tolist()) for s in same.allocations
    ]
    assert [s.begin for s in one.allocations] != [s.begin for s in other.allocations]
    more = plan(layout, 4.0, [*stops, Stop(3 * DAY, (), 0.0, 0), Stop(3 * DAY, (0, 1), 60.0)], 5, 6 * DAY)
    before = [[(s.begin, s.end, s.job.name) for s in plan_.allocations if s.end < 3 * DAY] for plan_ in (one, more)]
    assert before[0] == before[1]


def test_no_job_begins_after_the_horizon_and_running_ones_never_end() -> None:
    schedule = plan(Layout(16, 8), 2.0, [Stop(9 * DAY, (0,), 60.0)], 1, DAY)
    assert max(s.begin for s in schedule.allocations) < DAY
    assert sum(s.end == np.inf for s in schedule.allocations) >= 1
    assert all(s.end < DAY or s.end == np.inf for s in schedule.allocations)
    longer = plan(Layout(16, 8), 2.0, [], 1, 2 * DAY)
    assert [s.begin for s in longer.allocations if s.begin < DAY] == [s.begin for s in schedule.allocations]


def test_running_returns_the_job_of_each_gpu_at_each_tick() -> None:
    layout, stops = Layout(8, 4), storm(8, 2)
    schedule = plan(layout, 3.0, stops, 2, 6 * DAY)
    times = np.arange(0.0, 5 * DAY, 977.0)
    running = schedule.running_jobs(times, layout.gpus)
    for gpu in (0, 13, layout.gpus - 1):
        for k in range(0, len(times), 7):
            stay = schedule.job_at(gpu, float(times[k]))
            assert running[k, gpu] == (-1 if stay is None else stay.job.number)


# --- events of the schedule -------------------------------------------------------------------------------------------


def simulated(*lines: Line, nodes: int = 16, hours: float = 0.0, duration: float = 5400.0) -> FleetSimulator:
    return FleetSimulator(Scenario(duration, 10.0, None, Fleet(nodes, 8), lines, jobs=Jobs(hours)), 3)


def events_of_kind(chunks: list[Chunk], *kinds: str) -> list[tuple[int, int, str, str, dict[str, object]]]:
    return [(s, e.time, e.entity, e.kind, dict(e.data)) for c in chunks for s, e in c.events if e.kind in kinds]


def test_every_node_reports_start_and_end_of_its_ranks_with_the_keys_of_the_collector() -> None:
    simulator = simulated(Line(Maintenance(change="none"), 1203.0, 4000.0, "node:sim-n003"))
    chunks = list(simulator.chunks())
    layout = simulator.layout
    moved = [s for s in simulator.schedule.allocations if s.begin > 0]
    assert len(moved) == 1
    for sender, time, entity, kind, data in events_of_kind(chunks, "job_start", "job_end"):
        assert set(data) <= set(EVENT_KINDS[kind].data)
        ranks = data["ranks"]
        assert ranks
        if kind == "job_start" and time > simulator.time_at(0):
            node = layout.node_names[sender]
            assert entity == moved[0].job.entity
            for rank, place in ranks.items():  # type: ignore[attr-defined]
                number = int(rank.rsplit(".", 1)[1])
                assert place["gpu"] == layout.entities["gpu"][int(moved[0].gpus[number])]
                assert place["gpu"].startswith(f"gpu:{node}.")
                assert place["stage"] == f"stage:{moved[0].job.name}.{moved[0].job.stage_of_rank[number]}"
    ends = events_of_kind(chunks, "job_end")
    assert {time for _, time, *_ in ends} == {simulator.time_at(1203.0)}
    assert {sender for sender, *_ in ends} == set(range(8))
    starts = {
        sender for sender, time, *_ in events_of_kind(chunks, "job_start") if time == simulator.time_at(moved[0].begin)
    }
    assert starts == (set(range(8)) - {2}) | {14}


def test_every_change_is_followed_by_an_inventory_with_the_present_ranks() -> None:
    simulator = simulated(Line(JobRestart(), 1200.0, 3000.0, "job:sim-81"))
    chunks = list(simulator.chunks())
    lists = [(t, d["entities"]) for s, t, _, _, d in events_of_kind(chunks, "inventory") if s == 0]
    begin = simulator.schedule.allocations[-1].begin
    assert [t for t, _ in lists] == [simulator.time_at(t) for t in (0, 1200.0, begin, 3600.0)]
    counts = [sum(name.startswith("rank:") for name in entities) for _, entities in lists]  # type: ignore[attr-defined]
    assert counts == [8, 0, 8, 8]


def test_of_events_at_the_same_time_the_inventory_is_first_and_job_ends_precede_starts() -> None:
    kinds = ("digest", "job_start", "job_end", "inventory")
    mixed = [PlannedEvent(time, "job:sim-81", kind, {}) for kind in kinds for time in (20.0, 10.0)]
    wanted = ["inventory", "job_end", "job_start", "digest"]
    assert [(h.time, h.kind) for h in sort_events(mixed)] == [(t, k) for t in (10.0, 20.0) for k in wanted]


def test_with_churn_jobs_end_and_others_follow_with_events_in_order_of_time() -> None:
    chunks = list(simulated(hours=0.5, duration=3 * 3600.0, nodes=4).chunks())
    times = [e.time for c in chunks for _, e in c.events]
    assert times == sorted(times)
    ended, begun = ({entity for _, _, entity, *_ in events_of_kind(chunks, kind)} for kind in ("job_end", "job_start"))
    assert len(ended) >= 2
    assert ended <= begun


@pytest.mark.parametrize(("hours", "seed"), [(0.0, 1), (1.0, 2), (12.0, 3)])
def test_in_a_storm_of_all_kinds_no_job_runs_on_a_node_that_is_out(hours: float, seed: int) -> None:
    layout, rates = Layout(16, 8), Rates(60.0, 1.0, apart=False)
    planned = FaultPlan.plan(
        Scenario(5 * DAY, 10.0, None, Fleet(16, 8), jobs=Jobs(hours), rates=rates), layout, seed, False
    )
    stops = [stop for f in planned.faults if (stop := f.kind.job_stop(f, layout)) and stop.nodes and stop.at < 5 * DAY]
    assert len(stops) > 10
    for stop in stops:
        used = [stay for node in stop.nodes for stay in planned.schedule.allocations if node * 8 in stay.gpus]
        assert all(stay.end <= stop.at + 1e-6 or stay.begin >= stop.at + stop.out - 1e-6 for stay in used)
