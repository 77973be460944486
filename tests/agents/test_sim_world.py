"""Worlds: drawn from their number alone, structure in halves, each axis visible in telemetry, faults in all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from agents.sim.faults.cluster import DiskFailing, DiskWear, HostContention, MemoryLeak, SlowCollectives
from agents.sim.faults.facility import CoolantLoss, FacilityWater, HallAir, PsuLoss, Recirculation
from agents.sim.faults.kind import Kind
from agents.sim.faults.leaf import PauseStorm
from agents.sim.faults.slow import MemoryHeat, SlowReturn
from agents.sim.fleet import FleetSimulator
from agents.sim.kinds import KINDS
from agents.sim.scenario import Fleet, Line, Rates, Scenario
from agents.sim.scenario_file import parse
from agents.sim.world import (
    AXES,
    DEFAULT,
    GROUPS,
    Air,
    Cooling,
    Fabric,
    Instruments,
    Noise,
    Spread,
    Work,
    World,
    draw_structure,
    draw_world,
    half_of,
    worlds,
)
from pipeline.model.errors import UsageError
from pipeline.model.signals import CATALOGUE

HOUR = Scenario(3600.0, 10.0, None, Fleet(16, 8))
AIR = Cooling("air", 0.05, 0.1, 0.0, 2.0, 440.0)


class Site:
    """An hour of a small fleet in a world."""

    def __init__(self, world: World | None, *lines: Line, seconds: float = 3600.0, rates: Rates = HOUR.rates) -> None:
        scenario = replace(HOUR, world=world, duration=seconds, faults=lines, rates=rates)
        self.simulator = FleetSimulator(scenario, 3)
        self.chunks = list(self.simulator.chunks())

    def column(self, signal: str, device_class: str | None = None) -> np.ndarray:
        device_class = device_class or signal.split(".")[0]
        values = np.concatenate([c.columns[device_class][signal] for c in self.chunks]).astype(float)
        return np.where(np.concatenate([c.present[device_class] for c in self.chunks]), values, np.nan)

    def signals(self) -> set[str]:
        return {name for c in self.chunks for block in c.columns.values() for name in block}


def changed(**parts: object) -> World:
    """The default world with other parts."""
    return replace(DEFAULT, structure=("test",), **parts)  # type: ignore[arg-type]


@cache
def usual() -> Site:
    return Site(None)


def test_a_world_follows_from_its_number_alone() -> None:
    assert draw_world(17) == draw_world(17)
    assert len({repr(draw_world(number)) for number in range(50)}) == 50


def test_no_structure_is_in_both_halves() -> None:
    train, report = ({w.structure for w in worlds(half, 150)} for half in ("train", "report"))
    assert train
    assert report
    assert not train & report
    assert {half_of(draw_structure(n)) for n in range(20)} == {"train", "report"}
    assert all(w.half == "train" for w in worlds("train", 5))


@pytest.mark.slow
def test_each_value_of_an_axis_occurs_in_both_halves() -> None:
    for half in ("train", "report"):
        drawn = list(zip(*(w.structure for w in worlds(half, 200)), strict=True))
        assert [set(values) for values in drawn] == [set(values) for values in AXES.values()]


def test_the_default_world_is_the_fleet_without_a_world() -> None:
    other = Site(DEFAULT)
    for one, same in zip(usual().chunks, other.chunks, strict=True):
        assert one.events == same.events
        for device_class, block in one.columns.items():
            for signal, values in block.items():
                found = same.columns[device_class][signal]
                assert np.array_equal(values, found, equal_nan=values.dtype.kind == "f"), signal


def test_the_repr_of_a_scenario_names_a_world_only_if_it_has_one() -> None:
    assert "world" not in repr(HOUR)
    assert repr(HOUR).startswith("Scenario(duration=3600.0, interval=10.0, start=None, fleet=Fleet(")
    assert "number=3" in repr(HOUR.in_world(draw_world(3)))


def test_a_scenario_file_names_a_world_which_gives_what_the_file_leaves_out() -> None:
    world = draw_world(3)
    scenario = parse({"version": 1, "duration": 60, "world": {"number": 3}}, "x.toml")
    assert scenario.world == world
    assert scenario.interval == world.interval
    assert scenario.fleet.missing == world.instruments.missing
    given = parse({"version": 1, "duration": 60, "interval": 5, "fleet": {"missing": 0.3}, "world": {"number": 3}}, "x")
    assert (given.interval, given.fleet.missing) == (5.0, 0.3)
    with pytest.raises(UsageError, match="number = -1"):
        parse({"version": 1, "duration": 60, "interval": 5, "world": {"number": -1}}, "x")
    with pytest.raises(UsageError, match="interval: missing"):
        parse({"version": 1, "duration": 60}, "x")


def test_a_description_is_json() -> None:
    assert json.loads(json.dumps(draw_world(5).describe()))["number"] == 5


def test_every_group_of_missing_collectors_names_signals() -> None:
    for names in GROUPS.values():
        for name in names:
            assert name.startswith("event:") or any(signal.startswith(name) for signal in CATALOGUE), name


def test_air_cooled_gpus_follow_their_inlet_and_their_fans_lower_the_resistance() -> None:
    site = Site(changed(cooling=AIR, air=Air(daily=0.0, drift=0.0)))
    assert not {name for name in site.signals() if name.startswith(("coolant.", "leak."))}
    heat, power = site.column("gpu.temperature")[-60:], site.column("gpu.power")[-60:]
    inlet = np.repeat(site.column("sensor.temperature", "sensor")[-60:, 0::2], 8, axis=1)
    resistance = np.nanmean((heat - inlet) / power, axis=0).reshape(16, 8).mean(axis=1)
    speed = np.nanmean(site.column("sensor.fan_speed", "sensor")[-60:, 1::2], axis=0)
    busy = power.reshape(60, 16, 8).mean(axis=(0, 2)) > 300
    assert busy.any()
    assert not busy.all()
    assert speed[busy].min() > 1.3 * speed[~busy].max()
    assert resistance[busy].max() < 0.8 * resistance[~busy].min()


@pytest.mark.slow
def test_warm_air_warms_the_gpus_of_an_air_cooled_hall_alone() -> None:
    line = Line(Recirculation(rise=8.0, ramp=600.0), 900.0, 3600.0, "rack:sim-r1")
    air = Site(changed(cooling=AIR), line).column("gpu.temperature") - Site(changed(cooling=AIR)).column(
        "gpu.temperature"
    )
    plate = Site(None, line).column("gpu.temperature") - usual().column("gpu.temperature")
    assert np.nanmean(air[-60:]) > 2.0  # the fans take up the rest
    assert np.nanmax(np.abs(plate)) == 0.0


def test_a_hall_without_loops_has_no_fault_of_a_loop() -> None:
    with pytest.raises(UsageError, match=r"cdu:sim-c1"):
        Site(changed(cooling=AIR), Line(CoolantLoss(flow=0.3), 900.0, 1200.0, "cdu:sim-c1"))
    site = Site(changed(cooling=AIR), Line(CoolantLoss(flow=0.3), 900.0, 1200.0), rates=Rates(500.0))
    assert {line["kind"] for line in site.simulator.truth()}.isdisjoint({"coolant", "coolant_leak", "facility_water"})


@pytest.mark.slow
def test_a_heavier_plate_lags_more() -> None:
    def rise(heat_j_k: float) -> float:
        world = changed(cooling=replace(DEFAULT.cooling, heat_j_k=heat_j_k, supply_daily=0.0))
        heat = Site(world, Line(CoolantLoss(flow=0.3), 900.0, 2400.0)).column("gpu.temperature")
        return float(np.nanmean(heat[93] - heat[89]))

    assert rise(2000.0) < 0.5 * rise(200.0)


def test_noise_has_the_shape_of_the_world() -> None:
    def correlated(noise: Noise) -> float:
        power = Site(changed(noise=noise)).column("gpu.power")[:, :8]
        power = power[20:60] - np.nanmean(power[20:60], axis=0)
        return float(np.nanmean(power[1:] * power[:-1]) / np.nanmean(power**2))

    assert correlated(Noise(tau_factor=0.0, tails="normal")) < correlated(Noise(tau_factor=20.0)) - 0.3


def test_instruments_round_and_repeat_and_lie() -> None:
    instruments = Instruments(
        0.1, 5.0, 0.5, bmc_refresh=60.0, glitches=20_000.0, standby=2, absent=("profiling", "nvlink")
    )
    site = Site(changed(instruments=instruments))
    power, inlet = site.column("gpu.power"), site.column("sensor.temperature", "sensor")[:, 0::2]
    assert np.nanmax(np.abs(power / 5 - np.rint(power / 5))) == 0
    assert not {"gpu.sm_active", "nvlink.state"} & site.signals()
    heat = site.column("gpu.temperature")
    assert np.mean(np.abs(heat - np.rint(heat)) > 0.01) > 0.5
    assert {0.0, 255.0} < set(np.unique(heat[(heat == 0) | (heat > 150)]))
    moved = np.diff(np.where(np.abs(inlet - 24) < 5, inlet, np.nan), axis=0)
    assert np.nanmean(moved[:-1] != 0) < 0.17
    status = site.column("psu.status")
    assert set(np.unique(status)) == {0.0, 5.0}
    assert np.median(site.column("psu.output_power")[status == 5]) == 0


def test_a_standby_supply_takes_over_from_a_lost_one() -> None:
    line = Line(PsuLoss(part="supply", brake="no", extent="node"), 900.0, 3600.0, "psu:sim-n002.0")
    site = Site(changed(instruments=Instruments(standby=1)), line)
    assert site.column("psu.output_power")[-1, 6 + 5] > 0
    assert site.column("psu.status")[-1, 6:12].tolist() == [2.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_offsets_of_instruments_stay() -> None:
    site = Site(changed(spread=Spread(temperature_offset=2.0)))
    off = np.nanmean(site.column("gpu.temperature") - usual().column("gpu.temperature"), axis=0)
    assert 1.0 < off.std() < 3.0


def test_work_has_its_kinds_of_jobs() -> None:
    shares = (("serving", 0.3), ("single", 0.3), ("swarm", 0.1), ("moe", 0.3))
    work = Work(shares, 0.1, True, 0.5, 6.0, (0.5, 60.0), (0.1, 0.3), (0.03, 0.06), pause_every=(600.0, 900.0))
    site = Site(changed(work=replace(work, pause_share=(0.2, 0.4))))
    jobs = site.simulator.schedule.jobs
    assert {job.kind for job in jobs} == {"serving", "single", "swarm", "moe"}
    assert {job.hooked for job in jobs if job.trains} == {True, False}
    reporting = {name for c in site.chunks for name in c.entities["rank"]}
    assert reporting == {name for job in jobs if job.hooked for name in job.names}
    serving = next(s for s in site.simulator.schedule.allocations if s.job.kind == "serving")
    power = site.column("gpu.power")[:, serving.gpus]
    assert np.nanstd(power.mean(axis=1)) > 5.0
    single = next(s for s in site.simulator.schedule.allocations if s.job.kind == "single" and s.begin == 0)
    sent = np.diff(site.column("nic.tx_bytes")[:, single.gpus], axis=0)
    assert np.nanmax(sent) < 1e9


def test_busy_experts_stay_busy() -> None:
    work = Work((("moe", 1.0),), experts=(0.04, 0.05))
    site = Site(changed(work=work))
    stages = site.simulator.schedule.jobs[0].stage_of_rank
    usual_time = np.nanmedian(site.column("rank.compute_time", "rank")[:, : len(stages)], axis=0)
    slower = np.concatenate([usual_time[stages == s] / np.median(usual_time[stages == s]) - 1 for s in range(4)])
    assert 0.03 < slower.max() < 0.08
    assert 1 <= np.count_nonzero(slower > 0.03) < 0.3 * len(stages)


def test_a_fabric_has_its_own_counters_ports_and_errors() -> None:
    roce = Site(changed(fabric=Fabric("roce", rails=False, ports=4, pause=100.0, errors_per_hour=50.0, errors_sd=0.5)))
    ib = Site(changed(fabric=Fabric("ib", speed=800_000.0)))
    assert "nic.port_tx_wait" not in roce.signals()
    assert {"nic.rx_pause", "nic.cnp_sent"} <= roce.signals()
    assert "nic.cnp_sent" not in ib.signals()
    assert "nic.rx_pause" not in ib.signals()
    state = roce.column("nic.state")
    assert (state[:, 0::8] == 1).all()
    assert (state[:, 4::8] == 0).all()
    assert roce.simulator.layout.leaf_of_port[:64].tolist() == [0] * 64
    errors = roce.column("nic.symbol_errors")
    assert np.nanmean((errors[-1] - errors[0])[:4]) > 5
    assert np.nanmax(ib.column("nic.speed")) == 800_000


def test_margins_are_read_where_the_driver_has_them() -> None:
    site = Site(changed(instruments=Instruments(margins=True)))
    assert np.nanmedian(site.column("gpu.thermal_margin") + site.column("gpu.temperature")) == 85.0


@pytest.mark.slow
def test_at_night_the_set_point_is_lowered() -> None:
    site = Site(changed(cooling=replace(DEFAULT.cooling, night=4.0)), seconds=12 * 3600.0)
    supply = site.column("coolant.supply_temperature", "coolant")[:, 0]
    assert np.nanmedian(supply[:1800]) < np.nanmedian(supply[2600:]) - 3.0


def test_what_no_collector_reads_is_invisible() -> None:
    line = Line(PsuLoss(part="supply", brake="no", extent="node"), 900.0, 3600.0)
    (told,) = Site(changed(instruments=Instruments(absent=("bmc",))), line).simulator.truth()
    assert told["class"] == "invisible"
    (shown,) = Site(changed(), line).simulator.truth()
    assert shown["class"] == "hard"


def test_without_the_hook_no_rank_reports_and_ranks_have_no_stage() -> None:
    site = Site(changed(work=Work(hooked=0.0)), Line(HostContention(slowdown=0.4), 900.0, 3600.0))
    assert not any(c.entities["rank"] for c in site.chunks)
    start = next(e for c in site.chunks for _, e in c.events if e.kind == "job_start")
    assert all(set(place) == {"gpu"} for place in start.data["ranks"].values())
    assert site.simulator.truth()[0]["class"] == "soft"


SOME = tuple(w for w in worlds("train", 12) if w.interval > 1)[:6]


@pytest.mark.parametrize("world", SOME, ids=[f"world {w.number}" for w in SOME])
def test_every_kind_happens_in_drawn_worlds(world: World) -> None:
    scenario = replace(HOUR, duration=5400.0).in_world(world)
    layout = FleetSimulator(scenario, 1).layout
    kinds = [kind for kind in KINDS.values() if kind.exists(layout)]
    lines = tuple(_lines(kinds))
    simulator = FleetSimulator(replace(scenario, faults=lines, rates=Rates(0.0, 5.0)), 1)
    for chunk in simulator.chunks():
        for device_class, block in chunk.columns.items():
            shape = len(chunk.times), len(chunk.entities[device_class])
            assert all(values.shape == shape for values in block.values())
            assert all(world.reads(name) for name in block)
    truth = simulator.truth()
    assert {line["kind"] for line in truth} >= {kind.name for kind in kinds if kind.target != "job"}
    assert all(line["class"] == "benign" for line in truth if KINDS[line["kind"]].detectability == "benign")


def _lines(kinds: list[type[Kind]]) -> Iterator[Line]:
    for place, kind in enumerate(kinds):
        onset = 600.0 + 60.0 * place
        yield Line(kind(), onset, onset + 900.0)


@pytest.mark.slow
def test_healthy_gpus_do_not_throttle_in_any_world() -> None:
    warm = [world for world in worlds("train", 60) if world.cooling.kind == "air" and world.interval > 1]
    for world in [*worlds("train", 6), *warm]:
        scenario = replace(HOUR, duration=60 * world.interval * 2).in_world(world)
        throttled = [
            np.mean((chunk.columns["gpu"]["gpu.throttle_reasons"] & np.uint64(0x60)) > 0)
            for chunk in FleetSimulator(scenario, 1).chunks()
        ]
        assert np.mean(throttled) < 1e-3, world.number


def test_a_world_resumes_to_the_bit() -> None:
    world = draw_world(worlds("train", 3)[2].number)
    scenario = replace(HOUR, duration=world.interval * 180).in_world(world)
    whole = list(FleetSimulator(scenario, 2).chunks())
    first = FleetSimulator(scenario, 2)
    next(first.chunks(limit=60))
    resumed = FleetSimulator(scenario, 2)
    resumed.restore(first.snapshot())
    for one, same in zip(whole[1:], resumed.chunks(), strict=True):
        for device_class, block in one.columns.items():
            for signal, values in block.items():
                found = same.columns[device_class][signal]
                assert np.array_equal(values, found, equal_nan=values.dtype.kind == "f"), signal


def test_meta_json_has_the_description(tmp_path: Path) -> None:
    from agents.sim.command import SimulateOptions, simulate
    from pipeline.config.sections import Config

    class Sink:
        def __init__(self) -> None:
            self.meta: dict[str, object] = {}

        def telemetry(self, *_: object) -> None:
            pass

        def events(self, *_: object) -> None:
            pass

        def close(self, parents: object, attributes: object, truth: object, meta: dict[str, object]) -> None:
            self.meta = meta

    path = tmp_path / "x.toml"
    path.write_text("version = 1\nduration = 60\n[fleet]\nnodes = 2\n[world]\nnumber = 4\n")
    sink = Sink()
    assert simulate(SimulateOptions(str(path)), Config(), sink, lambda _: False, log=lambda _: None) == 0  # type: ignore[arg-type]
    assert sink.meta["world"]["number"] == 4  # type: ignore[index]


def test_a_leak_ends_with_the_kernel_and_the_job() -> None:
    line = Line(MemoryLeak(), 600.0, 3000.0, "node:sim-n002")
    site = Site(changed(), line)
    left = site.column("node.memory_available")[:, 1] / 2**41
    assert left[290] < 0.15 < 0.7 < left[30]
    assert left[305] > 0.7
    assert any("Out of memory" in str(e.data.get("text")) for c in site.chunks for _, e in c.events)
    assert any(e.kind == "job_end" for c in site.chunks for _, e in c.events)


def test_disks_wear_out_and_fail_and_are_read_every_ten_minutes() -> None:
    lines = (
        Line(DiskWear(daily=1.0), 0.0, 7200.0, "node:sim-n002"),
        Line(DiskFailing(), 0.0, 7200.0, "node:sim-n003"),
    )
    site = Site(changed(), *lines, seconds=7200.0)
    used, spare = site.column("disk.endurance_used"), site.column("disk.spare")
    assert used[-1, 1] - used[0, 1] == pytest.approx(0.08, abs=0.015)
    assert np.ptp(used[:, 4]) <= 0.01
    assert spare[-1, 2] == 0.0
    assert site.column("disk.critical_warning")[-1].tolist()[2:4] == [9.0, 0.0]
    assert np.count_nonzero(np.diff(spare[:, 2])) <= 12
    assert "disk.spare" not in usual().signals()


@pytest.mark.slow
def test_a_nic_that_pauses_its_leaf_still_moves_bytes() -> None:
    line = Line(PauseStorm(paused=0.6), 900.0, 3600.0, "port:sim-n002.mlx5_1")
    world = changed(fabric=Fabric("roce", pause=1.0))
    site, calm = Site(world, line), Site(world)
    sent = np.diff(site.column("nic.tx_pause")[200:], axis=0).mean(axis=0)
    assert sent[9] > 100 * np.median(sent) + 1000
    moved = np.diff(site.column("nic.rx_bytes")[200:], axis=0).mean(axis=0)
    assert 0.3 < moved[9] / np.diff(calm.column("nic.rx_bytes")[200:], axis=0).mean(axis=0)[9] < 0.9
    steps = np.nanmedian(site.column("rank.step_time", "rank")[200:])
    assert steps > 1.1 * np.nanmedian(calm.column("rank.step_time", "rank")[200:])


def test_a_job_with_slow_collectives_has_no_culprit() -> None:
    line = Line(SlowCollectives(slowdown=1.0), 900.0, 3600.0, "job:sim-81")
    slow = Site(None, line).column("rank.communication_time", "rank")
    calm = usual().column("rank.communication_time", "rank")
    more = np.nanmedian(slow[200:] - calm[200:], axis=0)
    mine = usual().simulator.schedule.jobs[0].ranks
    assert more[:mine].min() > 4.0
    assert more[:mine].max() / more[:mine].min() < 1.2
    assert np.abs(more[mine:]).max() == 0


def test_a_gpu_is_slow_from_the_first_step_after_its_repair() -> None:
    site = Site(None, Line(SlowReturn(slowdown=0.3, work=600.0), 900.0, 3600.0, "gpu:sim-n002.3"))
    allocation = [s for s in site.simulator.schedule.allocations if 11 in s.gpus][-1]
    assert allocation.begin >= 1500.0
    rank = int(np.flatnonzero(allocation.gpus == 11)[0])
    stage = allocation.job.stage_of_rank == allocation.job.stage_of_rank[rank]
    chunk = next(c for c in site.chunks if c.times[0] >= site.simulator.time_at(allocation.begin))
    begin = chunk.entities["rank"].index(allocation.job.names[0])
    mine = chunk.columns["rank"]["rank.compute_time"][0, begin : begin + allocation.job.ranks]
    assert mine[rank] > 1.2 * np.nanmedian(mine[stage])
    assert site.simulator.truth()[0]["class"] == "soft"


def test_hot_memory_leaves_the_core_as_it_is() -> None:
    site = Site(None, Line(MemoryHeat(rise=20.0, ramp=600.0), 600.0, 3600.0, "gpu:sim-n002.3"))
    core = site.column("gpu.temperature") - usual().column("gpu.temperature")
    memory = site.column("gpu.memory_temperature") - usual().column("gpu.memory_temperature")
    assert np.nanmax(np.abs(core)) == 0
    assert np.nanmedian(memory[200:, 11]) > 15


def test_the_air_of_a_hall_warms_all_its_rows() -> None:
    site = Site(None, Line(HallAir(rise=6.0, ramp=600.0), 600.0, 3600.0))
    inlet = site.column("sensor.temperature", "sensor")[:, 0::2]
    assert np.nanmin(inlet[-1] - inlet[10]) > 4.5
    assert set(site.simulator.truth()[0]["entities"]) == {"rack:sim-r1", "rack:sim-r2"}


def test_the_truth_says_whether_gpus_throttle() -> None:
    cool, warm = (changed(cooling=replace(DEFAULT.cooling, supply=supply)) for supply in (20.0, 48.0))
    line = Line(FacilityWater(rise=9.0, course="step"), 900.0, 3600.0)
    assert [Site(world, line).simulator.truth()[0]["class"] for world in (cool, warm)] == ["soft", "hard"]
    assert cool.hottest(0.4) < warm.hottest(0.4)
    air = changed(cooling=AIR)
    assert air.hottest(0.5) > air.hottest() + 10


def test_small_jobs_use_a_part_of_their_node() -> None:
    site = Site(changed(work=Work((("single", 1.0),))))
    sizes = {job.ranks for job in site.simulator.schedule.jobs}
    assert 8 in sizes
    assert len(sizes) > 2
    for allocation in site.simulator.schedule.allocations:
        assert len(set((allocation.gpus // 8).tolist())) == 1
