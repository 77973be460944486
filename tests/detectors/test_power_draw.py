"""Power at equal clock and activity: one board more or less, and loads, caps, meters and moves with the same signs."""

from __future__ import annotations

import numpy as np

from detectors.power.power_draw import DrawFit, PowerDraw
from pipeline.model.records import SECOND, Event, Frame
from tests.detectors.cases.power_draw import CASE, COUNT, GPUS, GUILTY, WIDTH, drawn, topology

SINCE, TICKS = 120, 300


def run_detector(change, ticks=TICKS, detector=None, placed=True):
    """Findings; `change(tick, share, load, meter)` alters the physics, and may return a change of the values."""
    detector, graph, out = detector or PowerDraw(), topology(placed), []
    for tick in range(ticks):
        share = np.exp(np.random.default_rng(3).normal(0, 0.03, COUNT))
        load, meter, events = np.full(COUNT, 0.8), np.ones(COUNT), []
        after = change(tick, share, load, meter) if tick >= SINCE else None
        values = drawn(np.random.default_rng([tick, 1]), share, load, meter)
        if after is not None:
            events = after(values["gpu"]) or []
        out += detector.observe(CASE.frames_of(tick, values, events, graph))
    return out


def board(factor, gpus=(GUILTY,)):
    def change(tick, share, load, meter):
        share[list(gpus)] *= factor

    return change


def levels(found):
    return {f.level for f in found}


def test_a_board_that_draws_15_percent_more_or_less_is_a_suspect_within_half_an_hour():
    for factor, side in ((1.15, "more"), (0.85, "less")):
        found = run_detector(board(factor))
        assert {f.entity for f in found} == {GPUS[GUILTY]}
        assert levels(found) == {"suspect"}
        assert found[0].time - CASE.time(SINCE) <= 1500 * SECOND
        assert abs(found[0].onset - CASE.time(SINCE)) <= 420 * SECOND
        assert side in found[-1].summary
        assert abs(found[-1].evidence["effect"] - (factor - 1)) < 0.04
        assert found[-1].signals[0] == "gpu.power"


def test_it_is_a_ticket_after_the_patience_if_its_temperature_follows():
    found = run_detector(board(1.2), detector=PowerDraw(patience=1200.0))
    assert found[-1].level == "ticket"
    assert " more than expected at this load, and is warmer" in found[-1].summary


def test_a_wrong_meter_stays_a_suspect():
    def change(tick, share, load, meter):
        meter[GUILTY] = 1.2

    found = run_detector(change, detector=PowerDraw(patience=700.0))
    assert levels(found) == {"suspect"}
    assert "likely its meter" in found[-1].summary


def test_without_a_known_job_or_the_activity_of_the_multiprocessors_it_stays_a_suspect():
    assert levels(run_detector(board(1.2), detector=PowerDraw(patience=700.0), placed=False)) == {"suspect"}

    def change(tick, share, load, meter):
        share[GUILTY] *= 1.2

    class WithoutActivity(PowerDraw):
        def observe(self, frames):
            f = frames["gpu"]
            kept = {k: v for k, v in f.values.items() if k != "gpu.sm_active"}
            return super().observe({"gpu": Frame(f.time, "gpu", f.entities, kept, f.topology, f.events)})

    found = run_detector(change, detector=WithoutActivity(patience=700.0))
    assert levels(found) == {"suspect"}
    assert found[-1].evidence["activity"] == "gpu.utilization"


def test_five_percent_gives_no_finding():
    assert run_detector(board(1.05)) == []


def test_more_power_for_more_work_gives_no_finding():
    """One GPU, and then all, work less: their power is on the line."""

    def one(tick, share, load, meter):
        load[GUILTY] = 0.55

    def swinging(tick, share, load, meter):
        load[:] = 0.8 if tick // 7 % 2 else 0.3

    assert run_detector(one) == []
    assert run_detector(swinging) == []


def test_a_heavier_model_of_a_whole_job_or_node_gives_no_finding():
    assert run_detector(board(1.25, range(COUNT))) == []
    assert run_detector(board(1.25, range(WIDTH, 2 * WIDTH))) == []


def test_idle_and_capped_gpus_are_not_judged():
    def idle(tick, share, load, meter):
        load[GUILTY], meter[GUILTY] = 0.01, 1.6

    def capped(tick, share, load, meter):
        share[GUILTY] *= 0.7
        return lambda gpu: gpu["gpu.throttle_reasons"].__setitem__(GUILTY, 0x4)

    assert run_detector(idle) == []
    assert run_detector(capped) == []


def test_announced_work_and_new_firmware_reset_the_baseline():
    node = f"node:n{GUILTY // WIDTH}"

    def changed_by(kind, tick_of):
        def change(tick, share, load, meter):
            share[GUILTY] *= 1.2
            data = {"seconds": 600} if kind == "maintenance_start" else {}
            event = Event(CASE.time(tick), node, kind, data)
            return (lambda gpu: [event]) if tick == tick_of else None

        return change

    assert run_detector(changed_by("version", SINCE + 2)) == []
    assert run_detector(changed_by("maintenance_start", SINCE)) == []


def test_a_fault_that_ends_is_not_reported_any_more():
    def change(tick, share, load, meter):
        if tick < 260:
            share[GUILTY] *= 1.2

    found = run_detector(change, ticks=480)
    assert found
    assert found[-1].time < CASE.time(330)


def test_absurd_and_constant_values_are_not_ticket():
    def absurd(tick, share, load, meter):
        return lambda gpu: [column.__setitem__(slice(None, None, 3), np.inf) for column in gpu.values()] and None

    def constant(tick, share, load, meter):
        return lambda gpu: [column.fill(1.0) for column in gpu.values()] and None

    for change in (absurd, constant):
        assert levels(run_detector(change)) <= {"suspect"}


def test_it_is_off_without_any_activity():
    needs = ("gpu.power", "gpu.sm_clock")
    assert PowerDraw().choose_signals((), needs, {}) == ["gpu.sm_active or gpu.utilization"]
    assert PowerDraw().choose_signals((), (*needs, "gpu.utilization"), {}) == []


def test_the_line_finds_idle_power_and_slope_and_one_broken_board_bends_it_little():
    fit, graph = DrawFit(), topology()
    rng = np.random.default_rng(0)
    for tick in range(60):
        work = rng.uniform(0.4, 1.9, COUNT)
        power = 90 + 390 * work
        power[GUILTY] *= 3 if tick > 15 else 1
        frame = Frame(CASE.time(tick), "gpu", GPUS, {}, graph)
        line = fit.expect(frame, work, power, np.ones(COUNT, bool), 30.0)
    others = np.arange(COUNT) != GUILTY
    assert np.abs(line[others] / (90 + 390 * work[others]) - 1).max() < 0.03
    assert list(fit.snapshot()["sums"]) == ["H100|sm_active"]
