"""Instruments that lie, against real heat, real loss of flow, caps, service and GPUs that do nothing."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest

from detectors.telemetry.gpu_instruments import Wrong
from detectors.telemetry.instruments import Middles, Swing
from detectors.telemetry.telemetry_sensor import LoopInstruments, TelemetrySensor
from pipeline.model.records import SECOND, Event, Frame
from pipeline.model.signals import class_of_entity
from pipeline.model.topology import Topology

START, FAULT, END = 1_790_000_000 * SECOND, 160, 320
NODES = tuple(f"node:n{n}" for n in range(4))
GPUS = tuple(f"gpu:{n[5:]}.{i}" for n in NODES for i in range(8))
INLETS = tuple(f"sensor:{n[5:]}.{what}" for n in NODES for what in ("inlet", "fan"))
NAMES = {"gpu": GPUS, "coolant": ("cdu:c0",), "sensor": INLETS}


class Plant:
    """Four nodes that train on one loop; load dips for a minute every half hour, as checkpoints do."""

    def __init__(self) -> None:
        parents = {n: ["rack:r0"] for n in NODES} | {e: [f"node:{e.split(':')[1][:2]}"] for e in (*GPUS, *INLETS)}
        self.topology, self.detector = Topology({**parents, "rack:r0": ["cdu:c0"]}), TelemetrySensor()
        self.findings, self.rng, self.own = [], np.random.default_rng(3), np.random.default_rng(4).normal(0, 0.1, 32)

    def told(self, tick):
        load = 0.4 if tick % 90 < 9 else 1.0
        power = (80 + 560 * load) * (1 + 0.03 * self.rng.standard_normal(32))
        level = 80 + 560 * (0.4 if 2 <= tick % 90 < 11 else 1.0)
        heat = 33 + 0.037 * (1 + self.own) * level + 0.3 * self.rng.standard_normal(32)
        inlet, fan = np.full(8, np.nan), np.full(8, np.nan)
        inlet[::2] = np.rint(2 * (24 + 0.3 * self.rng.standard_normal(4))) / 2
        fan[1::2] = 6000.0
        return {
            "gpu": {
                "gpu.temperature": np.rint(heat),
                "gpu.memory_temperature": np.rint(heat + 9),
                "gpu.power": np.rint(power),
            },
            "coolant": {
                "coolant.flow": 700 * (1 + 0.004 * self.rng.standard_normal(1)),
                "coolant.pressure": 2 * (1 + 0.008 * self.rng.standard_normal(1)),
                "pump.speed": 3200 * (1 + 0.003 * self.rng.standard_normal(1)),
                "coolant.supply_temperature": 32 + 0.1 * self.rng.standard_normal(1),
                "coolant.return_temperature": 44 + 0.2 * self.rng.standard_normal(1),
            },
            "sensor": {"sensor.temperature": inlet, "sensor.fan_speed": fan},
        }

    def run(self, change=lambda told, tick: None, events=(), end=END):
        for tick in range(end):
            told = self.told(tick)
            if tick >= FAULT:
                change(told, tick)
            mine = [e for e in events if START + tick * 10 * SECOND <= e.time < START + (tick + 1) * 10 * SECOND]
            frames = {
                c: Frame(
                    START + tick * 10 * SECOND,
                    c,
                    NAMES[c],
                    v,
                    self.topology,
                    tuple(e for e in mine if class_of_entity(e.entity) == c),
                )
                for c, v in told.items()
            }
            self.findings += self.detector.observe(frames)
        return {(f.entity, f.signals[0], f.evidence["mode"]) for f in self.findings}


@pytest.fixture
def plant():
    return Plant()


def test_a_sound_plant_says_nothing(plant):
    assert plant.run() == set()


def test_a_temperature_that_jumps_alone_is_the_thermometer(plant):
    def biased(told, tick):
        told["gpu"]["gpu.temperature"][9] += 6

    assert plant.run(biased) == {(GPUS[9], "gpu.temperature", "biased")}
    assert {f.level for f in plant.findings} == {"ticket"}


def test_real_heat_of_one_gpu_is_not_the_thermometer(plant):
    def hot(told, tick):
        told["gpu"]["gpu.temperature"][9] += 6
        told["gpu"]["gpu.memory_temperature"][9] += 6

    assert plant.run(hot) == set()


def test_a_temperature_that_stands_still_while_load_moves_is_stuck(plant):
    def stuck(told, tick):
        told["gpu"]["gpu.temperature"][9] = 56.0

    assert (GPUS[9], "gpu.temperature", "stuck") in plant.run(stuck)
    assert {f.entity for f in plant.findings} == {GPUS[9]}


def test_a_power_that_stands_still_while_heat_moves_is_stuck(plant):
    def stuck(told, tick):
        told["gpu"]["gpu.power"][9] = 640.0

    assert (GPUS[9], "gpu.power", "stuck") in plant.run(stuck)


def test_a_temperature_that_swings_alone_is_noisy(plant):
    def noisy(told, tick):
        told["gpu"]["gpu.temperature"][9] += np.rint(8 * np.sin(2.6 * tick))

    assert (GPUS[9], "gpu.temperature", "noisy") in plant.run(noisy, end=440)


def test_a_power_that_its_temperature_does_not_follow_is_biased(plant):
    def biased(told, tick):
        told["gpu"]["gpu.power"][9] += 110

    assert (GPUS[9], "gpu.power", "biased") in plant.run(biased)
    assert {f.entity for f in plant.findings} == {GPUS[9]}


def test_a_cap_of_all_gpus_says_nothing(plant):
    def capped(told, tick):
        told["gpu"]["gpu.power"] *= 0.85
        told["gpu"]["gpu.temperature"] -= 3
        told["gpu"]["gpu.memory_temperature"] -= 3

    assert plant.run(capped) == set()


def test_a_flow_that_moves_alone_is_the_flow_meter_and_a_real_loss_is_not(plant):
    def meter(told, tick):
        told["coolant"]["coolant.flow"] *= 0.8

    assert plant.run(meter) == {("cdu:c0", "coolant.flow", "biased")}

    def real(told, tick):
        told["coolant"]["coolant.flow"] *= 0.8
        told["coolant"]["coolant.pressure"] *= 0.64
        told["coolant"]["pump.speed"] *= 0.8
        told["coolant"]["coolant.return_temperature"] += 3

    assert Plant().run(real) == set()


def test_a_supply_that_its_return_does_not_follow_is_the_thermometer_and_a_setpoint_is_not(plant):
    def thermometer(told, tick):
        told["coolant"]["coolant.supply_temperature"] += 4

    assert plant.run(thermometer) == {("cdu:c0", "coolant.supply_temperature", "biased")}

    def setpoint(told, tick):
        told["coolant"]["coolant.supply_temperature"] += 3
        told["coolant"]["coolant.return_temperature"] += 3

    assert Plant().run(setpoint) == set()


def test_an_inlet_that_moves_alone_is_its_sensor_unless_its_fans_say_otherwise(plant):
    def lone(told, tick):
        told["sensor"]["sensor.temperature"][2] += 5

    assert plant.run(lone, end=500) == {("sensor:n1.inlet", "sensor.temperature", "biased")}

    def warm(told, tick):
        lone(told, tick)
        told["sensor"]["sensor.fan_speed"][3] = 9000.0

    assert Plant().run(warm, end=500) == set()


def test_after_announced_service_a_small_offset_is_learnt(plant):
    def offset(told, tick):
        told["gpu"]["gpu.temperature"][9] += 2

    begin, done = START + (FAULT - 30) * 10 * SECOND, START + FAULT * 10 * SECOND
    work = [Event(begin, GPUS[9], "maintenance_start", {"seconds": 300.0}), Event(done, GPUS[9], "maintenance_end", {})]
    assert plant.run(offset, work) == set()


def test_idle_gpus_that_tell_the_same_for_ever_say_nothing(plant):
    def idle(told, tick):
        told["gpu"]["gpu.power"][:] = 80.0
        told["gpu"]["gpu.temperature"][:] = 35.0
        told["gpu"]["gpu.memory_temperature"][:] = 44.0

    assert plant.run(idle) == set()


def test_medians_of_groups_leave_out_what_is_missing():
    groups = np.array([0, 1, 0, -1, 0, 1], np.int32)
    values = np.array([1.0, 4.0, 3.0, 9.0, np.nan, 8.0])
    assert Middles().of(values, groups)[[0, 1, 2, 4, 5]].tolist() == [2.0, 6.0, 2.0, 2.0, 6.0]
    assert np.isnan(Middles().of(values, groups)[3])


def test_a_spare_whose_normal_was_learnt_idle_is_not_blamed_when_it_works(plant):
    own = np.linspace(-0.1, 0.1, 32)  # boards of one kind draw a little more or less while they do nothing

    def idle(told):
        told["gpu"]["gpu.power"] = np.rint((80 + plant.rng.standard_normal(32)) * (1 + own))
        told["gpu"]["gpu.temperature"] = np.rint(36 + 0.3 * plant.rng.standard_normal(32))
        told["gpu"]["gpu.memory_temperature"] = told["gpu"]["gpu.temperature"] + 9

    working = plant.told
    plant.told = lambda tick: (told := working(tick), idle(told) if tick < FAULT else None)[0]
    assert plant.run(end=700) == set()


def test_a_bias_that_begins_after_a_spare_went_to_work_is_found(plant):
    working = plant.told

    def told(tick):
        told = working(tick)
        if tick < 60:
            told["gpu"]["gpu.power"][:], told["gpu"]["gpu.temperature"][:] = 80.0, 36.0
            told["gpu"]["gpu.memory_temperature"][:] = 45.0
        elif tick >= 400:
            told["gpu"]["gpu.power"][9] += 110
        return told

    plant.told = told
    assert plant.run(end=640) == {(GPUS[9], "gpu.power", "biased")}


def test_a_reading_that_is_missing_as_a_job_begins_stands_not_still(plant):
    working = plant.told

    def told(tick):
        told = working(tick)
        if tick < 240:
            told["gpu"]["gpu.power"][:], told["gpu"]["gpu.temperature"][:] = 80.0, 36.0
            told["gpu"]["gpu.memory_temperature"][:] = 45.0
        elif tick < 249:
            told["gpu"]["gpu.temperature"][9] = np.nan
        return told

    plant.told = told
    assert plant.run() == set()


def test_a_setpoint_that_moves_while_jobs_end_is_not_the_thermometer(plant):
    def setpoint(told, tick):
        shift = min(2.5, 0.02 * (tick - FAULT))
        told["coolant"]["coolant.supply_temperature"] += shift
        told["coolant"]["coolant.return_temperature"] += shift - 6  # no heat to carry away
        told["gpu"]["gpu.temperature"] += shift - 0.037 * (told["gpu"]["gpu.power"] - 80)
        told["gpu"]["gpu.memory_temperature"] += shift - 0.037 * (told["gpu"]["gpu.power"] - 80)
        told["gpu"]["gpu.power"][:] = 80.0

    assert plant.run(setpoint, end=500) == set()


def test_without_gpus_a_return_that_load_moved_proves_nothing_of_the_supply():
    loops, found, told = LoopInstruments(), [], Plant().told(0)["coolant"]
    for tick in range(200):
        late = tick >= 100
        values = {name: v + 0.0 for name, v in told.items()}
        values["coolant.supply_temperature"] += 2.5 * late
        values["coolant.return_temperature"] -= 5.0 * late
        frame = Frame(START + tick * 30 * SECOND, "coolant", ("cdu:c0",), values, Topology(), ())
        loops.feel(frame, None)
        found += list(loops.look(frame, np.ones(1, bool)))
    assert found == []


def test_a_node_that_overheats_and_throttles_has_no_liars(plant):
    def hot(told, tick):
        busy = plant.rng.random(8) < 0.5  # held at its limit, each GPU swings between load and none
        told["gpu"]["gpu.power"][8:16] = np.where(busy, 260.0, 80.0)
        told["gpu"]["gpu.temperature"][8:16] = np.rint(np.where(busy, 87.0, 70.0 + 12 * plant.rng.random(8)))
        told["gpu"]["gpu.memory_temperature"][8:16] = told["gpu"]["gpu.temperature"][8:16] + 7

    assert plant.run(hot, end=600) == set()


def test_a_core_that_swings_with_its_memory_is_truly_hot_and_cold(plant):
    def swings(told, tick):
        by = np.rint(8 * np.sin(2.6 * tick))
        told["gpu"]["gpu.temperature"][9] += by
        told["gpu"]["gpu.memory_temperature"][9] += by

    assert plant.run(swings, end=440) == set()


def test_two_wrong_instruments_of_one_gpu_are_one_finding_that_names_both(plant):
    wrong = [
        Wrong(GPUS[9], s, "stuck", START + k, 0.0, "K", "stands", {})
        for k, s in enumerate(("gpu.power", "gpu.temperature"))
    ]
    for each in wrong:
        plant.detector.known[f"{each.entity}|{each.signal}"] = {"wrong": asdict(each), "last": START}
    frame = Frame(START, "gpu", GPUS, plant.told(0)["gpu"], plant.topology, ())
    (finding,) = plant.detector.observe({"gpu": frame})
    assert finding.signals == ("gpu.power", "gpu.temperature")
    assert set(finding.evidence["instruments"]) == {"gpu.power", "gpu.temperature"}


def test_what_a_person_calls_no_fault_is_learnt_anew(plant):
    def biased(told, tick):
        told["gpu"]["gpu.temperature"][9] += 6

    assert plant.run(biased)
    frame = Frame(START + END * 10 * SECOND, "gpu", GPUS, plant.told(END)["gpu"], plant.topology, ())
    plant.detector.accept_as_normal(GPUS[9], {"gpu": frame})
    assert not plant.detector.known
    cells = plant.detector.gpus.parts["apart"].cells
    assert (cells[:, 9] == 0).all()
    assert (cells[:, 8] != 0).any()


@pytest.mark.parametrize("slope", [0.0, 1.0, 10.0])
def test_a_steep_ramp_is_no_noise_and_true_noise_is(slope):
    rng, swing = np.random.default_rng(2), Swing()
    held = []
    for k in range(400):
        value = 100 + 0.1 * rng.standard_normal(1) + slope * min(max(k - 200, 0), 60)
        held.append(float(swing.step(value, 0.05, 4.0)[1][0]))
    assert max(held) < 20
    noisy = (100 + rng.standard_normal(1) for _ in range(60))
    assert max(float(swing.step(value, 0.05, 4.0)[1][0]) for value in noisy) >= 20


def test_what_is_learnt_anew_before_its_first_reading_does_no_harm():
    Swing().reset(np.array([True, False]))


def test_a_temperature_that_was_learnt_anew_since_proves_nothing_of_a_power_that_moved_before(plant):
    """A job whose stages share a node lets two of its GPUs draw and heat more: real, however often heat is learnt."""

    def more(told, tick):
        told["gpu"]["gpu.power"][9] += 90
        told["gpu"]["gpu.temperature"][9] += 3
        told["gpu"]["gpu.memory_temperature"][9] += 3
        if tick == FAULT + 120:
            plant.detector.gpus.parts["heat"].reset(np.arange(32) == 9)

    assert plant.run(more, end=700) == set()


def test_a_power_that_moves_by_less_than_its_thermometer_can_show_is_not_judged(plant):
    def slight(told, tick):
        told["gpu"]["gpu.power"][9] += 40

    assert plant.run(slight, end=600) == set()
