"""Faulty instruments, against real heat, real loss of flow, power caps, service and idle GPUs."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest

from detectors.telemetry.instruments import GroupMedians, InstrumentFault, NoiseLevel
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

    def values(self, tick):
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

    def run(self, change=lambda values, tick: None, events=(), end=END):
        for tick in range(end):
            values = self.values(tick)
            if tick >= FAULT:
                change(values, tick)
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
                for c, v in values.items()
            }
            self.findings += self.detector.observe(frames)
        return {(f.entity, f.signals[0], f.evidence["mode"]) for f in self.findings}


@pytest.fixture
def plant():
    return Plant()


def test_a_healthy_plant_has_no_findings(plant):
    assert plant.run() == set()


def test_a_temperature_that_jumps_alone_is_the_thermometer(plant):
    def biased(values, tick):
        values["gpu"]["gpu.temperature"][9] += 6

    assert plant.run(biased) == {(GPUS[9], "gpu.temperature", "biased")}
    assert {f.level for f in plant.findings} == {"ticket"}


def test_real_heat_of_one_gpu_is_not_the_thermometer(plant):
    def hot(values, tick):
        values["gpu"]["gpu.temperature"][9] += 6
        values["gpu"]["gpu.memory_temperature"][9] += 6

    assert plant.run(hot) == set()


def test_a_constant_temperature_while_load_changes_is_stuck(plant):
    def stuck(values, tick):
        values["gpu"]["gpu.temperature"][9] = 56.0

    assert (GPUS[9], "gpu.temperature", "stuck") in plant.run(stuck)
    assert {f.entity for f in plant.findings} == {GPUS[9]}


def test_a_constant_power_while_heat_changes_is_stuck(plant):
    def stuck(values, tick):
        values["gpu"]["gpu.power"][9] = 640.0

    assert (GPUS[9], "gpu.power", "stuck") in plant.run(stuck)


def test_a_temperature_that_varies_alone_is_noisy(plant):
    def noisy(values, tick):
        values["gpu"]["gpu.temperature"][9] += np.rint(8 * np.sin(2.6 * tick))

    assert (GPUS[9], "gpu.temperature", "noisy") in plant.run(noisy, end=440)


def test_a_power_that_its_temperature_does_not_follow_is_biased(plant):
    def biased(values, tick):
        values["gpu"]["gpu.power"][9] += 110

    assert (GPUS[9], "gpu.power", "biased") in plant.run(biased)
    assert {f.entity for f in plant.findings} == {GPUS[9]}


def test_a_power_cap_of_all_gpus_is_not_reported(plant):
    def capped(values, tick):
        values["gpu"]["gpu.power"] *= 0.85
        values["gpu"]["gpu.temperature"] -= 3
        values["gpu"]["gpu.memory_temperature"] -= 3

    assert plant.run(capped) == set()


@pytest.mark.slow
def test_a_flow_that_moves_alone_is_the_flow_meter_and_a_real_loss_is_not(plant):
    def meter(values, tick):
        values["coolant"]["coolant.flow"] *= 0.8

    assert plant.run(meter) == {("cdu:c0", "coolant.flow", "biased")}

    def real(values, tick):
        values["coolant"]["coolant.flow"] *= 0.8
        values["coolant"]["coolant.pressure"] *= 0.64
        values["coolant"]["pump.speed"] *= 0.8
        values["coolant"]["coolant.return_temperature"] += 3

    assert Plant().run(real) == set()


@pytest.mark.slow
def test_a_supply_that_its_return_does_not_follow_is_the_thermometer_and_a_setpoint_is_not(plant):
    def thermometer(values, tick):
        values["coolant"]["coolant.supply_temperature"] += 4

    assert plant.run(thermometer) == {("cdu:c0", "coolant.supply_temperature", "biased")}

    def setpoint(values, tick):
        values["coolant"]["coolant.supply_temperature"] += 3
        values["coolant"]["coolant.return_temperature"] += 3

    assert Plant().run(setpoint) == set()


@pytest.mark.slow
def test_an_inlet_that_moves_alone_is_its_sensor_unless_its_fans_follow(plant):
    def lone(values, tick):
        values["sensor"]["sensor.temperature"][2] += 5

    assert plant.run(lone, end=500) == {("sensor:n1.inlet", "sensor.temperature", "biased")}

    def warm(values, tick):
        lone(values, tick)
        values["sensor"]["sensor.fan_speed"][3] = 9000.0

    assert Plant().run(warm, end=500) == set()


class Inlets:
    """Six inlets of a rack that follow the room: 3 K over six hours; rounded, and read by the BMC every `every` s."""

    def __init__(self, quantum, every, noise=0.15, swing=3.0):
        self.quantum, self.every, self.noise, self.swing = quantum, every, noise, swing
        self.detector, self.rng = TelemetrySensor(), np.random.default_rng(8)
        self.topology = Topology({f"sensor:n{i}.inlet": ["rack:r0"] for i in range(6)})

    def run(self, hours, stuck_from=None, step=10):
        found, shown, offset = [], None, np.linspace(-1.2, 1.3, 6)
        for second in range(0, int(hours * 3600), step):
            if second % self.every < step:
                room = 24 + self.swing * np.sin(second / 3400)
                air = room + offset + self.noise * self.rng.standard_normal(6)
                now = np.round(air / self.quantum) * self.quantum
                if stuck_from is not None and second >= stuck_from * 3600 and shown is not None:
                    now[2] = shown[2]
                shown = now
            values = {"sensor.temperature": shown.copy()}
            frame = Frame(START + second * SECOND, "sensor", tuple(self.topology.parents), values, self.topology)
            found += self.detector.observe({"sensor": frame})
        return {(f.entity, f.evidence["mode"]) for f in found}


PHYSICS = [(0.1, 10), (0.5, 10), (0.5, 60), (1.0, 10), (1.0, 30), (1.0, 60)]


@pytest.mark.sample(every=5)
@pytest.mark.parametrize(("quantum", "every"), PHYSICS)
@pytest.mark.parametrize(("noise", "swing"), [(0.15, 0.2), (0.05, 0.4), (0.15, 3.0), (0.4, 3.0)])
def test_an_inlet_that_rounds_is_not_stuck_or_noisy(quantum, every, noise, swing):
    assert Inlets(quantum, every, noise, swing).run(8, step=30) == set()


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(("quantum", "every"), PHYSICS)
def test_an_inlet_that_stays_while_the_room_moves_by_several_steps_is_stuck(quantum, every):
    assert ("sensor:n2.inlet", "stuck") in Inlets(quantum, every).run(14, stuck_from=4, step=30)


@pytest.mark.slow
def test_memory_that_is_hotter_than_its_core_is_no_wrong_thermometer_and_one_that_is_colder_is(plant):
    def hot(values, tick):
        values["gpu"]["gpu.memory_temperature"][9] += 12

    def cold(values, tick):
        values["gpu"]["gpu.memory_temperature"][9] -= 12

    assert plant.run(hot) == set()
    assert Plant().run(cold) == {(GPUS[9], "gpu.memory_temperature", "biased")}


def test_a_core_that_is_hot_alone_and_throttles_is_no_wrong_thermometer(plant):
    def hot(values, tick):
        values["gpu"]["gpu.temperature"][9] += 12
        values["gpu"]["gpu.throttle_reasons"] = np.where(np.arange(32) == 9, 0x20, 0.0)

    assert plant.run(hot) == set()


def test_a_power_that_follows_its_clock_is_no_wrong_meter_where_fans_hold_the_temperature(plant):
    def slow(values, tick):
        clock = np.full(32, 1755.0)
        clock[9] = 1230.0
        values["gpu"]["gpu.sm_clock"] = clock
        values["gpu"]["gpu.power"][9] -= 130

    assert plant.run(slow) == set()


def test_an_idle_gpu_that_its_neighbours_warm_has_no_stuck_power_meter(plant):
    def idle(values, tick):
        values["gpu"]["gpu.utilization"] = np.where(np.arange(32) == 9, 0.0, 1.0)
        values["gpu"]["gpu.power"][9] = 55.0
        values["gpu"]["gpu.temperature"][9] = 40 + (tick // 20) % 5
        values["gpu"]["gpu.memory_temperature"][9] = 48 + (tick // 20) % 5

    assert {f for f in plant.run(idle) if f[2] == "stuck"} == set()


@pytest.mark.slow
def test_a_core_that_varies_with_its_power_is_not_noisy_however_coarse_it_is(plant):
    """Jobs of minutes: the power swings on each GPU by itself, and a thermometer rounds to 2 K."""
    swings = np.random.default_rng(6)

    def swarm(values, tick):
        by = np.where(swings.random(32) < 0.5, -250.0, 0.0)
        values["gpu"]["gpu.power"] += by
        for name in ("gpu.temperature", "gpu.memory_temperature"):
            values["gpu"][name] = np.rint((values["gpu"][name] + 0.02 * by) / 2) * 2

    assert plant.run(swarm, end=600) == set()


def test_the_meter_of_an_idle_gpu_that_toggles_by_its_rounding_step_is_not_noisy(plant):
    """It rounds to 5 W: little of 640 W, and a ninth of 45."""
    between, before = np.random.default_rng(8), plant.values

    def idle(tick):
        values = before(tick)
        values["gpu"]["gpu.power"] = np.full(32, 45.0)
        values["gpu"]["gpu.temperature"], values["gpu"]["gpu.memory_temperature"] = np.full(32, 35.0), np.full(32, 44.0)
        return values

    def toggles(values, tick):
        values["gpu"]["gpu.power"][9] += 5 * between.integers(0, 2)

    plant.values = idle
    assert plant.run(toggles, end=520) == set()


def test_a_coarse_meter_that_varies_alone_under_load_is_noisy(plant):
    between, before = np.random.default_rng(8), plant.values

    def noisy(values, tick):
        values["gpu"]["gpu.power"][9] *= 1 + 0.3 * between.standard_normal()

    plant.values = lambda tick: _coarse(before(tick))
    assert (GPUS[9], "gpu.power", "noisy") in plant.run(noisy, end=440)


def _coarse(values):
    """Power of a meter that averages, and rounds to 5 W."""
    values["gpu"]["gpu.power"] = np.full(32, 5 * np.rint(np.mean(values["gpu"]["gpu.power"]) / 5))
    return values


def test_after_announced_service_a_small_offset_is_learned(plant):
    def offset(values, tick):
        values["gpu"]["gpu.temperature"][9] += 2

    begin, done = START + (FAULT - 30) * 10 * SECOND, START + FAULT * 10 * SECOND
    work = [Event(begin, GPUS[9], "maintenance_start", {"seconds": 300.0}), Event(done, GPUS[9], "maintenance_end", {})]
    assert plant.run(offset, work) == set()


@pytest.mark.slow
def test_a_fault_that_shows_no_more_is_known_until_work_on_it_begins(plant):
    def biased(values, tick):
        values["gpu"]["gpu.temperature"][9] += 8 if tick < 300 else 0

    begin, done = START + 500 * 10 * SECOND, START + 540 * 10 * SECOND
    node = GPUS[9]
    work = [Event(begin, node, "maintenance_start", {"seconds": 300.0}), Event(done, node, "maintenance_end", {})]
    plant.run(biased, work, 700)
    assert max(f.time for f in plant.findings) == pytest.approx(begin, abs=90 * SECOND)
    assert {f.entity for f in plant.findings} == {GPUS[9]}


def test_idle_gpus_with_constant_readings_are_not_reported(plant):
    def idle(values, tick):
        values["gpu"]["gpu.power"][:] = 80.0
        values["gpu"]["gpu.temperature"][:] = 35.0
        values["gpu"]["gpu.memory_temperature"][:] = 44.0

    assert plant.run(idle) == set()


def test_medians_of_groups_leave_out_missing_values():
    groups = np.array([0, 1, 0, -1, 0, 1], np.int32)
    values = np.array([1.0, 4.0, 3.0, 9.0, np.nan, 8.0])
    assert GroupMedians().medians(values, groups)[[0, 1, 2, 4, 5]].tolist() == [2.0, 6.0, 2.0, 2.0, 6.0]
    assert np.isnan(GroupMedians().medians(values, groups)[3])


def test_a_spare_gpu_whose_baseline_is_from_idle_time_is_not_blamed_under_load(plant):
    own = np.linspace(-0.1, 0.1, 32)  # boards of one kind draw a little more or less while they do nothing

    def idle(values):
        values["gpu"]["gpu.power"] = np.rint((80 + plant.rng.standard_normal(32)) * (1 + own))
        values["gpu"]["gpu.temperature"] = np.rint(36 + 0.3 * plant.rng.standard_normal(32))
        values["gpu"]["gpu.memory_temperature"] = values["gpu"]["gpu.temperature"] + 9

    working = plant.values
    plant.values = lambda tick: (values := working(tick), idle(values) if tick < FAULT else None)[0]
    assert plant.run(end=700) == set()


def test_a_bias_that_begins_after_a_spare_went_to_work_is_found(plant):
    working = plant.values

    def values(tick):
        values = working(tick)
        if tick < 60:
            values["gpu"]["gpu.power"][:], values["gpu"]["gpu.temperature"][:] = 80.0, 36.0
            values["gpu"]["gpu.memory_temperature"][:] = 45.0
        elif tick >= 400:
            values["gpu"]["gpu.power"][9] += 110
        return values

    plant.values = values
    assert plant.run(end=640) == {(GPUS[9], "gpu.power", "biased")}


def test_a_reading_that_is_missing_as_a_job_begins_is_not_stuck(plant):
    working = plant.values

    def values(tick):
        values = working(tick)
        if tick < 240:
            values["gpu"]["gpu.power"][:], values["gpu"]["gpu.temperature"][:] = 80.0, 36.0
            values["gpu"]["gpu.memory_temperature"][:] = 45.0
        elif tick < 249:
            values["gpu"]["gpu.temperature"][9] = np.nan
        return values

    plant.values = values
    assert plant.run() == set()


def test_a_setpoint_that_moves_while_jobs_end_is_not_the_thermometer(plant):
    def setpoint(values, tick):
        shift = min(2.5, 0.02 * (tick - FAULT))
        values["coolant"]["coolant.supply_temperature"] += shift
        values["coolant"]["coolant.return_temperature"] += shift - 6  # no heat to carry away
        values["gpu"]["gpu.temperature"] += shift - 0.037 * (values["gpu"]["gpu.power"] - 80)
        values["gpu"]["gpu.memory_temperature"] += shift - 0.037 * (values["gpu"]["gpu.power"] - 80)
        values["gpu"]["gpu.power"][:] = 80.0

    assert plant.run(setpoint, end=500) == set()


def test_without_gpus_a_return_that_load_moved_proves_nothing_about_the_supply():
    loops, found, values = LoopInstruments(), [], Plant().values(0)["coolant"]
    for tick in range(200):
        late = tick >= 100
        values = {name: v + 0.0 for name, v in values.items()}
        values["coolant.supply_temperature"] += 2.5 * late
        values["coolant.return_temperature"] -= 5.0 * late
        frame = Frame(START + tick * 30 * SECOND, "coolant", ("cdu:c0",), values, Topology(), ())
        loops.update_climate(frame, None)
        found += list(loops.find_faults(frame, np.ones(1, bool)))
    assert found == []


def test_a_node_that_overheats_and_throttles_has_no_faulty_instrument(plant):
    def hot(values, tick):
        busy = plant.rng.random(8) < 0.5  # held at its limit, each GPU swings between load and none
        values["gpu"]["gpu.power"][8:16] = np.where(busy, 260.0, 80.0)
        values["gpu"]["gpu.temperature"][8:16] = np.rint(np.where(busy, 87.0, 70.0 + 12 * plant.rng.random(8)))
        values["gpu"]["gpu.memory_temperature"][8:16] = values["gpu"]["gpu.temperature"][8:16] + 7

    assert plant.run(hot, end=600) == set()


def test_a_core_that_varies_with_its_memory_is_not_noisy(plant):
    def swings(values, tick):
        by = np.rint(8 * np.sin(2.6 * tick))
        values["gpu"]["gpu.temperature"][9] += by
        values["gpu"]["gpu.memory_temperature"][9] += by

    assert plant.run(swings, end=440) == set()


def test_two_wrong_instruments_of_one_gpu_are_one_finding_that_names_both(plant):
    wrong = [
        InstrumentFault(GPUS[9], s, "stuck", START + k, 0.0, "K", "stands", {})
        for k, s in enumerate(("gpu.power", "gpu.temperature"))
    ]
    for each in wrong:
        plant.detector.known[f"{each.entity}|{each.signal}"] = {"wrong": asdict(each), "last": START}
    frame = Frame(START, "gpu", GPUS, plant.values(0)["gpu"], plant.topology, ())
    (finding,) = plant.detector.observe({"gpu": frame})
    assert finding.signals == ("gpu.power", "gpu.temperature")
    assert set(finding.evidence["instruments"]) == {"gpu.power", "gpu.temperature"}


def test_an_instrument_accepted_as_normal_is_learned_again(plant):
    def biased(values, tick):
        values["gpu"]["gpu.temperature"][9] += 6

    assert plant.run(biased)
    frame = Frame(START + END * 10 * SECOND, "gpu", GPUS, plant.values(END)["gpu"], plant.topology, ())
    plant.detector.accept_as_normal(GPUS[9], {"gpu": frame})
    assert not plant.detector.known
    cells = plant.detector.gpus.apart.cells
    assert (cells[:, 9] == 0).all()
    assert (cells[:, 8] != 0).any()


@pytest.mark.parametrize("slope", [0.0, 1.0, 10.0])
def test_a_steep_ramp_is_not_noise_and_real_noise_is(slope):
    rng, noise = np.random.default_rng(2), NoiseLevel()
    held = []
    for k in range(400):
        value = 100 + 0.1 * rng.standard_normal(1) + slope * min(max(k - 200, 0), 60)
        held.append(float(noise.step(value, 0.05, 4.0)[1][0]))
    assert max(held) < 20
    noisy = (100 + rng.standard_normal(1) for _ in range(60))
    assert max(float(noise.step(value, 0.05, 4.0)[1][0]) for value in noisy) >= 20


def test_a_reset_before_the_first_reading_is_harmless():
    NoiseLevel().reset(np.array([True, False]))


@pytest.mark.slow
def test_a_temperature_that_was_reset_since_proves_nothing_about_a_power_that_moved_before(plant):
    """Stages that share a node make two of its GPUs use more power: real heat, however often it is learned."""

    def more(values, tick):
        values["gpu"]["gpu.power"][9] += 90
        values["gpu"]["gpu.temperature"][9] += 3
        values["gpu"]["gpu.memory_temperature"][9] += 3
        if tick == FAULT + 120:
            plant.detector.gpus.heat.reset(np.arange(32) == 9)

    assert plant.run(more, end=700) == set()


def test_a_power_that_moves_by_less_than_its_thermometer_can_show_is_not_judged(plant):
    def slight(values, tick):
        values["gpu"]["gpu.power"][9] += 40

    assert plant.run(slight, end=600) == set()
