"""A stuck clock, a gray leaf, a restricted node: each shows its signature and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from agents.sim.faults.leaf import GrayLeaf
from agents.sim.faults.restriction import NodeRestriction
from agents.sim.faults.slow import ClockStuck
from agents.sim.fleet import FleetSimulator
from agents.sim.layout import Layout
from agents.sim.scenario import Fleet, Line, Rates, Scenario
from detectors.scoring.matching import answer_rule
from tests.agents.sim_hour import END, ONSET, WITHIN, Run, only_within, simulate_fault, simulate_quiet_hour

GPU, DEVICE = "gpu:sim-n002.3", 11
NODE, MINE = "node:sim-n002", slice(8, 16)
BUSY = 14 * 8  # GPUs of nodes that are not spare
BEFORE = slice(20, 90)


def ratio(run: Run, signal: str, when: slice = WITHIN) -> np.ndarray:
    """(ticks, devices) relative to the same hour without the fault."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(run.column(signal)[when] / simulate_quiet_hour().column(signal)[when])


def growth(run: Run, signal: str) -> np.ndarray:
    return np.diff(run.column(signal), axis=0, prepend=np.nan)


def others(changed: np.ndarray, mine: slice | np.ndarray) -> np.ndarray:
    return np.delete(changed, np.r_[mine] if isinstance(mine, slice) else mine, axis=1)


# --- a clock that is stuck low ----------------------------------------------------------------------------------------


def test_a_stuck_clock_is_low_without_a_throttle_bit_and_its_gpu_uses_less_power() -> None:
    run = simulate_fault(ClockStuck(lost=0.3, extent="gpu"), GPU)
    assert np.median(ratio(run, "gpu.sm_clock")[:, DEVICE]) == pytest.approx(0.7, abs=0.01)
    assert not run.changed("gpu", "gpu.throttle_reasons")[:240].any()
    assert 0.5 < np.median(ratio(run, "gpu.power")[:, DEVICE]) < 0.8
    assert np.median(run.column("gpu.temperature")[WITHIN, DEVICE]) < np.median(
        simulate_quiet_hour().column("gpu.temperature")[WITHIN, DEVICE] - 4
    )
    clock = run.changed("gpu", "gpu.sm_clock")[:240]
    assert not clock[:90].any()
    assert not others(clock, np.array([DEVICE])).any()


def test_the_rank_of_a_stuck_clock_is_slower_by_the_same_factor_and_its_job_waits() -> None:
    run = simulate_fault(ClockStuck(lost=0.3, extent="gpu"), GPU, 3600.0)
    compute = np.median(ratio(run, "rank.compute_time"), axis=0)
    assert compute[DEVICE] == pytest.approx(1 / 0.7, abs=0.01)
    assert np.delete(compute, DEVICE).max() < 1.01
    steps = np.median(ratio(run, "rank.step_time"), axis=0)
    job = run.simulator.schedule.job_at(DEVICE, ONSET)
    assert job is not None
    assert steps[DEVICE] > 1.1
    assert np.allclose(steps[: len(job.gpus)], steps[DEVICE], atol=0.01)
    assert np.median(ratio(run, "gpu.power")[:, 0]) < 0.97  # the others spin, which uses less power than computing


def test_a_clock_lock_lost_by_a_node_slows_all_its_gpus_and_blames_the_node() -> None:
    run = simulate_fault(ClockStuck(lost=0.2, extent="node"), GPU)
    assert np.allclose(np.median(ratio(run, "gpu.sm_clock"), axis=0)[MINE], 0.8, atol=0.01)
    assert not others(run.changed("gpu", "gpu.sm_clock")[:240], MINE).any()
    (line,) = run.simulator.truth()
    assert line["entities"] == [NODE, *(f"gpu:sim-n002.{i}" for i in range(8))]
    assert {e.entity for e in run.events("counter_reset")} >= {f"gpu:sim-n002.{i}" for i in range(8)}


def test_a_stuck_clock_ends_with_a_reset_after_its_job_is_drained() -> None:
    run = simulate_fault(ClockStuck(lost=0.3, extent="gpu"), GPU)
    assert {e.entity for e in run.events("counter_reset")} == {GPU, GPU.replace("gpu", "nvlink") + ".0"}
    assert min(stay.end for stay in run.simulator.schedule.allocations) == END
    (line,) = run.simulator.truth()
    assert (line["class"], line["parameters"]["attribution"]) == ("hard", "gpu")
    assert (line["parameters"]["effect"], line["parameters"]["effect_unit"]) == (0.3, "clock")


@pytest.mark.parametrize(("lost", "expected"), [(0.05, "soft"), (0.09, "soft"), (0.10, "hard"), (0.4, "hard")])
def test_a_stuck_clock_needs_a_page_where_it_makes_steps_longer_by_a_tenth(lost: float, expected: str) -> None:
    (line,) = simulate_fault(ClockStuck(lost=lost, extent="gpu"), GPU).simulator.truth()
    assert line["class"] == expected


# --- a leaf that silently loses packets -------------------------------------------------------------------------------

LEAF, LOST = "leaf:sim-l3", 0.5


def ports(run: Run) -> np.ndarray:
    found = np.flatnonzero(run.simulator.layout.leaf_of_port == 2)
    return found[found < BUSY]


def test_a_gray_leaf_lowers_the_traffic_of_all_its_ports_and_they_wait() -> None:
    run = simulate_fault(GrayLeaf(lost=LOST, part="leaf"), LEAF)
    mine, sent, sound = ports(run), growth(run, "nic.tx_bytes"), growth(simulate_quiet_hour(), "nic.tx_bytes")
    less = np.median(sent[WITHIN] / sound[WITHIN], axis=0)
    rest = np.delete(less[:BUSY], mine)
    assert np.median(less[mine] / np.median(rest)) == pytest.approx(1 - 0.9 * LOST, abs=0.05)
    assert rest.min() > 0.8  # slower steps send less on average, on all ports of the jobs
    waits = np.median(growth(run, "nic.port_tx_wait")[WITHIN], axis=0)
    assert waits[mine].min() > 5 * np.delete(waits[:BUSY], mine).max()
    assert only_within(run.changed("rank", "rank.communication_time"), 3)


def test_a_gray_leaf_sets_no_congestion_marks_and_counts_almost_no_errors() -> None:
    run = simulate_fault(GrayLeaf(lost=0.6, part="leaf"), LEAF)
    for name in ("ecn_marked", "cnp_sent"):
        assert np.nansum(growth(run, f"nic.{name}")[WITHIN]) < np.nansum(
            growth(simulate_quiet_hour(), f"nic.{name}")[WITHIN]
        )
    counted = ("symbol_errors", "crc_errors", "rx_errors", "rx_dropped", "out_of_sequence", "link_downs", "state")
    assert not any(run.changed("nic", f"nic.{name}").any() for name in counted)
    timeouts = growth(run, "nic.ack_timeouts")[1:]
    assert timeouts[:, ports(run)].sum() == timeouts.sum() <= 10
    assert not run.events("link_state", "switch_state", "kernel")


def test_a_gray_leaf_makes_the_collectives_of_all_its_jobs_longer_by_the_same_factor() -> None:
    run = simulate_fault(GrayLeaf(lost=LOST, part="leaf"), LEAF)
    assert not run.changed("rank", "rank.compute_time")[:90].any()
    begin, more = 0.8 * LOST / (1 - LOST), run.column("rank.step_time") - simulate_quiet_hour().column("rank.step_time")
    assert np.allclose(np.nanmedian(more[WITHIN], axis=0), begin, atol=0.06)
    (line,) = run.simulator.truth()
    assert (line["entity"], line["class"], line["parameters"]["attribution"]) == (LEAF, "hard", "network")
    longer = np.nanmedian(run.column("rank.step_time")[WITHIN] / simulate_quiet_hour().column("rank.step_time")[WITHIN])
    assert line["parameters"]["effect"] == pytest.approx(longer - 1, abs=0.02)
    assert line["parameters"]["effect_unit"] == "time"


def test_a_gray_leaf_needs_a_page_only_if_a_job_is_slowed_by_a_tenth_for_long() -> None:
    for lost, level in ((0.6, "page"), (0.3, "ticket")):  # of collectives that take a sixth of a step
        (line,) = simulate_fault(GrayLeaf(lost=lost, part="leaf"), LEAF).simulator.truth()
        assert answer_rule("gray_leaf", line["class"]).level == level


def test_a_line_card_affects_half_of_the_ports_and_their_jobs() -> None:
    run = simulate_fault(GrayLeaf(lost=LOST, part="card"), LEAF)
    waits, sound = (
        np.median(growth(each, "nic.port_tx_wait")[WITHIN, :BUSY], axis=0) for each in (run, simulate_quiet_hour())
    )
    assert set(np.flatnonzero(waits > 3 * sound)) == set(ports(run)[:8].tolist())
    assert run.simulator.truth()[0]["entity"] == LEAF


# --- a node whose coolant is restricted -------------------------------------------------------------------------------


def clogged(lost: float, hours: float = 0.05) -> Run:
    return simulate_fault(NodeRestriction(lost=lost, hours=hours, work=900.0, course="ramp"), NODE)


def test_only_the_gpus_of_a_restricted_node_are_hotter_at_the_same_power() -> None:
    run = clogged(0.3)
    hotter = np.median(
        run.column("gpu.temperature")[WITHIN] - simulate_quiet_hour().column("gpu.temperature")[WITHIN], axis=0
    )
    assert 5 < hotter[MINE].min() <= hotter[MINE].max() < 15
    assert not run.changed("gpu", "gpu.power").any()
    assert not run.changed("gpu", "gpu.throttle_reasons").any()
    assert not others(run.changed("gpu", "gpu.temperature"), MINE).any()
    assert only_within(run.changed("gpu", "gpu.temperature")[:, MINE], 60)
    (line,) = run.simulator.truth()
    assert (line["class"], line["parameters"]["attribution"], line["parameters"]["effect"]) == ("soft", "node", 0.3)


def test_the_loop_loses_only_the_flow_of_the_restricted_node_and_keeps_its_pressure() -> None:
    run = clogged(0.64)
    flow = ratio(run, "coolant.flow")
    assert np.median(flow) == pytest.approx(1 - 0.64 / 16, abs=0.003)
    for signal in ("coolant.pressure", "pump.speed", "coolant.supply_temperature"):
        assert not run.changed("coolant", signal).any()
    assert not run.events("flow_collapse", "pressure_collapse")


def test_a_node_with_too_little_coolant_throttles_with_its_bit_set_and_slows_its_job() -> None:
    run = clogged(0.68)
    bits = run.column("gpu.throttle_reasons").astype(int)
    assert (bits[150:235, MINE] & 0x40).any(axis=0).all()
    assert not others(bits, MINE)[:, : BUSY - 8].any()
    assert np.median(ratio(run, "gpu.sm_clock")[30:, MINE]) < 0.95
    assert run.column("gpu.temperature")[WITHIN, MINE].max() < 95
    assert np.nanmedian(ratio(run, "rank.compute_time")[30:, MINE]) > 1.05
    assert run.simulator.truth()[0]["class"] == "hard"


@pytest.mark.parametrize(("lost", "hours", "verdict"), [(0.54, 0.05, "soft"), (0.56, 0.05, "hard"), (0.7, 1.0, "soft")])
def test_a_restriction_is_a_logged_fact_once_gpus_throttle(lost: float, hours: float, verdict: str) -> None:
    assert clogged(lost, hours).simulator.truth()[0]["class"] == verdict


def test_a_ramp_is_visible_from_a_tenth_of_the_flow_on() -> None:
    (line,) = clogged(0.4, 0.25).simulator.truth()
    assert line["parameters"]["detectable"] == "2026-01-01T00:18:45.000000Z"  # a quarter of 900 s
    assert line["parameters"]["effect_unit"] == "flow"


def test_after_a_service_a_node_has_less_coolant_immediately() -> None:
    run = Run(Line(NodeRestriction(lost=0.4, hours=1.0, work=600.0, course="service"), ONSET, 3600.0, NODE))
    start, end = run.events("maintenance_start", "maintenance_end")
    assert (start.entity, start.data["seconds"], end.time - start.time) == (NODE, 600.0, 600 * 10**6)
    assert np.isnan(run.column("node.uptime")[:, 1]).any()
    stays = [stay for stay in run.simulator.schedule.allocations if DEVICE in stay.gpus]
    assert [stay.end for stay in stays[:1]] == [ONSET + 60]
    assert stays[1].begin >= ONSET + 600  # on the same node again
    heat = run.column("gpu.temperature")
    hotter = np.nanmedian(heat[270:], axis=0) - np.nanmedian(heat[BEFORE], axis=0)
    assert hotter[MINE].min() > 8
    assert abs(np.median(np.delete(hotter[:BUSY], np.r_[MINE]))) < 2
    (line,) = run.simulator.truth()
    assert line["parameters"]["detectable"] == "2026-01-01T00:25:00.000000Z"
    assert line["class"] == "soft"


def test_a_random_ramp_grows_first_and_then_stays() -> None:
    layout, rng = Layout(16, 8), np.random.default_rng(1)
    for kind, seconds in (NodeRestriction.draw_random(layout, rng) for _ in range(60)):
        assert isinstance(kind, NodeRestriction)
        assert kind.hours is not None
        assert seconds > 2 * 3600 + (kind.hours * 3600 if kind.course == "ramp" else 0.0)


def test_kinds_with_rate_zero_do_not_change_the_random_faults_of_the_others() -> None:
    """Draws depend on the kind's name: a seed gives the same other faults whatever their rate."""
    names = [kind.name for kind in (ClockStuck, GrayLeaf, NodeRestriction)]

    def lines(rate: float) -> list[tuple[str, str, float]]:
        rates = Rates(5.0, 1.0, apart=False, kinds=dict.fromkeys(names, rate))
        made = FleetSimulator(Scenario(86_400.0, 10.0, None, Fleet(32, 8), rates=rates), 4)
        return [(f.kind.name, f.entity, f.onset) for f in made.faults if f.kind.target != "job"]

    simulate_fault, without = lines(10.0), lines(0.0)
    assert {name for name, _, _ in simulate_fault} & set(names)
    assert [line for line in simulate_fault if line[0] not in names] == without
