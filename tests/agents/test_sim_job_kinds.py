"""Kinds of jobs: hangs, stalls, restarts, evaluations, uneven work and loss spikes, each within its window."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from agents.sim.chunk import Chunk
from agents.sim.confounders.cluster import Evaluation, JobRestart, LossSpike, StageImbalance
from agents.sim.fault_plan import truth_lines
from agents.sim.faults.cluster import DataStall, JobHang
from agents.sim.faults.kind import Kind
from agents.sim.fleet import FleetSimulator
from agents.sim.scenario import Fleet, Line, Scenario

NODES, TICK = 9, 10.0  # two jobs: the first on nodes 1 to 5, the second on 6 to 8; one node is spare
ONSET, END = 1205.0, 2105.0
FIRST, LAST = 121, 210  # ticks within [ONSET, END)
MINE, OTHERS = slice(0, 5), slice(5, 8)  # nodes of job 1 and 2


@cache
def simulate_fault(kind: Kind | None) -> tuple[FleetSimulator, list[Chunk]]:
    lines = () if kind is None else (Line(kind, ONSET, END, "job:sim-81"),)
    simulator = FleetSimulator(Scenario(3600.0, TICK, None, Fleet(NODES, 8), lines), 11)
    return simulator, list(simulator.chunks())


def column(kind: Kind | None, device_class: str, signal: str) -> np.ndarray:
    """(ticks, devices) of hardware."""
    return np.concatenate([c.columns[device_class][signal] for c in simulate_fault(kind)[1]]).astype(float)


def ranks(kind: Kind | None, job: str, signal: str) -> np.ndarray:
    """(ticks, ranks) of one job; NaN where a rank has no row."""
    rows: dict[int, dict[str, float]] = {}
    simulator, chunks = simulate_fault(kind)
    for chunk in chunks:
        table, names = chunk.table("rank"), chunk.entities["rank"]
        for time, device, value in zip(table.time, table.device, table.columns[signal], strict=True):
            if names[device].startswith(f"rank:{job}."):
                rows.setdefault(int(time), {})[names[device]] = float(value)
    members = next(j for j in simulator.schedule.jobs if j.name == job).names
    times = [simulator.time_at(k * TICK) for k in range(360)]
    return np.array([[rows.get(t, {}).get(name, np.nan) for name in members] for t in times])


def gpus(nodes: slice) -> slice:
    return slice(nodes.start * 8, nodes.stop * 8)


def same_elsewhere(kind: Kind, *signals: tuple[str, str], but: slice = MINE) -> None:
    """Checks that nothing changes before the onset or on the other job."""
    for device_class, signal in signals:
        one, sound = column(kind, device_class, signal), column(None, device_class, signal)
        width = one.shape[1] // NODES
        assert np.array_equal(one[:FIRST], sound[:FIRST], equal_nan=True), signal
        others = slice(but.stop * width, None)
        assert np.array_equal(one[:, others], sound[:, others], equal_nan=True), signal


def events(kind: Kind, name: str) -> list[float]:
    simulator, chunks = simulate_fault(kind)
    return [(e.time - simulator.start) / 1e6 for c in chunks for _, e in c.events if e.kind == name]


# --- hang -------------------------------------------------------------------------------------------------------------


def test_a_hung_job_spins_at_full_utilisation_and_a_quarter_of_its_power_without_traffic() -> None:
    kind, within = JobHang(), slice(FIRST + 4, LAST)
    power = column(kind, "gpu", "gpu.power")[within, gpus(MINE)] / 700
    assert power.min() > 0.20
    assert power.max() < 0.40
    assert (column(kind, "gpu", "gpu.utilization")[within, gpus(MINE)] > 0.95).all()
    sent = np.diff(column(kind, "nic", "nic.tx_bytes"), axis=0)
    busy = np.median(sent[:FIRST, gpus(MINE)])
    assert sent[within, gpus(MINE)].max() < 1e-4 * busy
    same_elsewhere(kind, ("gpu", "gpu.power"), ("nic", "nic.tx_bytes"), ("gpu", "gpu.utilization"))


def test_the_steps_of_a_hung_job_stop_until_the_watchdog_restarts_it() -> None:
    kind = JobHang()
    steps = ranks(kind, "sim-81", "rank.step")
    assert np.ptp(steps[FIRST:LAST]) == 0
    first, then = (s for s in simulate_fault(kind)[0].schedule.allocations if s.job.name == "sim-81")
    assert (first.end, first.last) == (END, False)
    assert np.isnan(steps[LAST + 1 : int(then.begin // TICK)]).all()
    assert (np.diff(steps[-40:], axis=0) >= 0).all()
    assert steps[-1, 0] > steps[LAST, 0] + 100
    assert set(events(kind, "job_end")) == {END}
    assert not [
        t for t in events(kind, "checkpoint") if ONSET <= t < END and t not in events(JobRestart(), "checkpoint")
    ]


def test_no_checkpoint_is_written_during_a_hang_or_a_data_stall() -> None:
    for kind in (JobHang(), DataStall(pressure=0.9)):
        reported = [
            (e.time - simulate_fault(kind)[0].start) / 1e6
            for c in simulate_fault(kind)[1]
            for _, e in c.events
            if e.kind == "checkpoint" and e.entity == "job:sim-81"
        ]
        assert not [t for t in reported if ONSET + TICK < t < END - TICK]
        written = np.diff(column(kind, "node", "node.disk_written"), axis=0)[FIRST + 1 : LAST - 1, MINE]
        assert written.max() < 1e8


# --- stall ------------------------------------------------------------------------------------------------------------


def test_a_job_without_data_is_idle_and_all_its_nodes_wait_for_io() -> None:
    kind, within = DataStall(pressure=0.8), slice(FIRST, LAST - 1)
    waits = np.diff(column(kind, "node", "node.io_pressure"), axis=0)[within] / (1e6 * TICK)
    assert waits[:, MINE].min() == pytest.approx(0.8, abs=0.02)
    assert waits[:, OTHERS].max() < 0.1
    assert column(kind, "node", "node.tasks_blocked")[within, MINE].min() == round(64 * 0.8)
    assert column(kind, "node", "node.tasks_blocked")[:FIRST].max() == 0
    assert column(kind, "gpu", "gpu.power")[FIRST + 4 : LAST, gpus(MINE)].max() < 150
    same_elsewhere(kind, ("gpu", "gpu.power"), ("node", "node.io_pressure"), ("nic", "nic.tx_bytes"))


def test_the_step_after_a_stall_is_as_long_as_the_stall_with_normal_compute_time() -> None:
    kind = DataStall(pressure=0.8)
    took, compute = (ranks(kind, "sim-81", f"rank.{n}") for n in ("step_time", "compute_time"))
    assert np.ptp(ranks(kind, "sim-81", "rank.step")[FIRST:LAST]) == 0
    longest = took[LAST : LAST + 3].max(axis=0)
    assert (np.abs(longest - (END - ONSET)) < 3 * TICK).all()
    assert (took[LAST + 4 :] < 20).all()
    assert (took[:LAST] < 20).all()
    assert np.nanmax(compute[LAST : LAST + 3]) < 1.3 * np.nanmedian(compute)
    assert (ranks(kind, "sim-82", "rank.step_time") < 20).all()


# --- benign -----------------------------------------------------------------------------------------------------------


def test_a_restarted_job_ends_at_the_onset_starts_again_and_warms_up() -> None:
    kind = JobRestart()
    assert set(events(kind, "job_end")) == {ONSET}
    then = simulate_fault(kind)[0].schedule.allocations[-1]
    begin = int(np.ceil(then.begin / TICK))
    compute = ranks(kind, "sim-81", "rank.compute_time")
    usual = np.nanmedian(compute[:FIRST], axis=0)
    assert np.isnan(compute[FIRST:begin]).all()
    assert np.median(compute[begin + 2 : begin + 5] / usual) > 1.2
    assert np.median(compute[begin + 110 :] / usual) == pytest.approx(1, abs=0.02)
    assert column(kind, "gpu", "gpu.power")[FIRST + 3 : begin, gpus(MINE)].max() < 120
    same_elsewhere(kind, ("gpu", "gpu.power"), ("nic", "nic.tx_bytes"))


def test_an_evaluating_job_makes_no_steps_and_uses_less_power() -> None:
    kind = Evaluation()
    assert np.ptp(ranks(kind, "sim-81", "rank.step")[FIRST:LAST]) == 0
    power = column(kind, "gpu", "gpu.power")
    usual = np.median(power[:FIRST], axis=0)[gpus(MINE)]
    part = np.median(power[FIRST + 4 : LAST], axis=0)[gpus(MINE)] / usual
    assert 0.45 < part.min() <= part.max() < 0.75
    assert not events(kind, "job_end")
    same_elsewhere(kind, ("gpu", "gpu.power"), ("nic", "nic.tx_bytes"))


def test_an_uneven_job_slows_one_whole_stage_by_the_drawn_factor_and_no_other() -> None:
    kind = StageImbalance(pattern="stage", longer=0.2)
    simulator = simulate_fault(kind)[0]
    longer = ranks(kind, "sim-81", "rank.compute_time") / ranks(None, "sim-81", "rank.compute_time")
    median = np.median(longer[FIRST + 2 : LAST - 2], axis=0)
    stages = simulator.schedule.jobs[0].stage_of_rank
    slow = {int(s) for s in stages[median > 1.1]}
    assert len(slow) == 1
    assert np.allclose(median[np.isin(stages, list(slow))], 1.2, atol=0.02)
    assert np.allclose(median[~np.isin(stages, list(slow))], 1.0, atol=0.02)
    assert np.array_equal(longer[:FIRST], np.ones_like(longer[:FIRST]))
    assert np.median(longer[LAST + 5 :]) == pytest.approx(1, abs=0.01)
    assert np.array_equal(
        ranks(kind, "sim-82", "rank.compute_time"), ranks(None, "sim-82", "rank.compute_time"), equal_nan=True
    )


def test_uneven_sequences_slow_different_ranks_in_each_step() -> None:
    kind = StageImbalance(pattern="random", longer=0.3)
    longer = ranks(kind, "sim-81", "rank.compute_time") / ranks(None, "sim-81", "rank.compute_time")
    slow = longer[FIRST + 2 : LAST - 2] > 1.1
    assert 0.05 < slow.mean() < 0.2
    assert slow.any(axis=0).all()
    assert slow.mean(axis=0).max() < 0.4
    assert longer.max() < 1.45


def test_in_a_loss_spike_loss_and_gradient_of_all_ranks_jump_together_and_return() -> None:
    kind = LossSpike(jump=2.0)
    for signal, jump in (("rank.loss", 2.0), ("rank.gradient_norm", 4.0)):
        factor = ranks(kind, "sim-81", signal) / ranks(None, "sim-81", signal)
        assert np.allclose(factor[:FIRST], 1)
        assert np.ptp(factor, axis=1).max() < 0.01 * jump
        assert 0.9 * jump < factor[FIRST : FIRST + 4].max() <= jump + 0.01
        assert np.allclose(factor[LAST + 2 :], 1)
    for signal in ("rank.compute_time", "rank.step_time"):
        assert np.array_equal(ranks(kind, "sim-81", signal), ranks(None, "sim-81", signal), equal_nan=True)


def test_normal_events_of_jobs_blame_no_entity() -> None:
    for kind in (JobRestart(), Evaluation(), StageImbalance(pattern="stage", longer=0.2), LossSpike(jump=2.0)):
        (line,) = simulate_fault(kind)[0].truth()
        assert (line["class"], line["entities"], line["parameters"]["attribution"]) == ("benign", [], "job")
    (line,) = simulate_fault(JobHang())[0].truth()
    assert (line["class"], line["entity"], "entities" in line) == ("hard", "job:sim-81", False)


@pytest.mark.parametrize(
    ("ranks", "hooked", "wanted"),
    [(16, True, "hard"), (16, False, "hard"), (8, True, "soft"), (8, False, "invisible")],
)
def test_a_hang_shows_in_traffic_or_in_the_steps_that_ranks_report(ranks: int, hooked: bool, wanted: str) -> None:
    simulator, _ = simulate_fault(JobHang())
    job = replace(simulator.schedule.jobs[0], ranks=ranks, hooked=hooked)
    schedule = replace(simulator.schedule, jobs=(job,))
    (line,) = truth_lines(simulator.faults, schedule, simulator.layout, 0, 1e9, lambda job: 0.0)
    assert line["class"] == wanted
