"""Kinds of nodes: contention, failed parts, silence, and benign events that look similar."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from agents.collectors.host.kernel_patterns import load_patterns
from agents.sim.chunk import Chunk
from agents.sim.confounders.cluster import LateTelemetry, Maintenance, MixedSilicon, NodeTransient, OwnCanary
from agents.sim.effects import Effects
from agents.sim.faults.cluster import HostContention, HostFault
from agents.sim.faults.kind import Fault, Kind
from agents.sim.faults.telemetry import TelemetryGap
from agents.sim.fleet import FleetSimulator
from agents.sim.physics import canary
from agents.sim.scenario import Fleet, Line, Scenario
from agents.sim.scenario_file import parse
from pipeline.model.errors import UsageError
from pipeline.model.event_kinds import EVENT_KINDS
from pipeline.model.records import Event

NODES, TICK, NODE = 9, 10.0, 1  # jobs on nodes 0 to 4 and 5 to 7, a spare one; node 1 has the fault
ONSET, END = 1205.0, 2105.0
FIRST, LAST = 121, 210  # ticks within [ONSET, END): FIRST to LAST - 1 and the one at 2100 s
NAME = "sim-n002"
GPUS = slice(8, 16)
OTHERS = [n for n in range(NODES) if n != NODE]


@cache
def simulate_fault(
    kind: Kind | None, entity: str = f"node:{NAME}", end: float = END
) -> tuple[FleetSimulator, list[Chunk]]:
    lines = () if kind is None else (Line(kind, ONSET, end, entity),)
    simulator = FleetSimulator(Scenario(3600.0, TICK, None, Fleet(NODES, 8), lines), 11)
    return simulator, list(simulator.chunks())


def column(chunks: list[Chunk], device_class: str, signal: str) -> np.ndarray:
    """(ticks, devices) of a class of hardware; NaN where there is no row."""
    values = np.concatenate([c.columns[device_class][signal] for c in chunks]).astype(float)
    values[~np.concatenate([c.present[device_class] for c in chunks])] = np.nan
    return values


def compute(chunks: list[Chunk]) -> np.ndarray:
    """(ticks, 64) compute time of the GPUs that no spare node has, where nothing moves."""
    return np.concatenate([c.columns["rank"]["rank.compute_time"] for c in chunks]).astype(float)


def longer(kind: Kind, entity: str = f"node:{NAME}", end: float = END) -> np.ndarray:
    return compute(simulate_fault(kind, entity, end)[1]) / compute(simulate_fault(None)[1])


def events_of_kind(chunks: list[Chunk], kind: str) -> list[tuple[float, Event]]:
    start = int(chunks[0].times[0])
    return [((e.time - start) / 1e6, e) for c in chunks for _, e in c.events if e.kind == kind]


def untouched(chunks: list[Chunk], device_class: str, signal: str) -> bool:
    """Whether nothing changed before the onset or on other nodes."""
    one, sound = column(chunks, device_class, signal), column(simulate_fault(None)[1], device_class, signal)
    width = one.shape[1] // NODES
    rest = [i for n in OTHERS for i in range(n * width, (n + 1) * width)]
    return bool(
        np.array_equal(one[:FIRST], sound[:FIRST], equal_nan=True)
        and np.array_equal(one[:, rest], sound[:, rest], equal_nan=True)
    )


# --- faults -----------------------------------------------------------------------------------------------------------


def test_contention_slows_the_worst_rank_of_a_node_by_the_drawn_factor_and_the_others_by_less() -> None:
    kind = HostContention(slowdown=0.4)
    median = np.median(longer(kind)[FIRST + 2 : LAST - 2], axis=0)
    assert median[GPUS].max() == pytest.approx(1.4, abs=0.02)
    assert 1.4 * 0.6 - 0.02 < 1 + 0.4 * 0.6 - 0.02 < median[GPUS].min()
    assert np.allclose(np.delete(median, range(8, 16)), 1.0, atol=0.01)
    assert np.array_equal(longer(kind)[:FIRST], np.ones_like(longer(kind)[:FIRST]))
    assert np.median(longer(kind)[LAST + 5 :]) == pytest.approx(1, abs=0.01)


def test_contention_shows_in_pressure_load_and_the_gaps_of_its_gpus_and_slows_the_whole_job() -> None:
    kind = HostContention(slowdown=0.4)
    chunks, sound = simulate_fault(kind)[1], simulate_fault(None)[1]
    within = slice(FIRST + 2, LAST - 2)
    pressure = np.diff(column(chunks, "node", "node.cpu_pressure"), axis=0)[within] / (1e6 * TICK)
    assert pressure[:, NODE].min() > 0.5
    assert pressure[:, OTHERS].max() < 0.05
    load = column(chunks, "node", "node.load1") / column(sound, "node", "node.load1")
    assert load[within, NODE].min() > 2
    for signal in ("gpu.sm_active", "gpu.power"):
        part = column(chunks, "gpu", signal)[within, GPUS] / column(sound, "gpu", signal)[within, GPUS]
        assert 0.5 < np.median(part) < 0.97
    steps = [np.concatenate([c.columns["rank"]["rank.step_time"] for c in c_])[within] for c_ in (chunks, sound)]
    assert np.median(steps[0][:, 0] / steps[1][:, 0]) > 1.05
    assert np.allclose(steps[0][:, 40:], steps[1][:, 40:])
    for device_class, signal in (("node", "node.load1"), ("node", "node.cpu_pressure")):
        assert untouched(chunks, device_class, signal)


def test_a_failing_memory_module_counts_and_logs_errors_and_ends_node_and_job() -> None:
    kind = HostFault("dimm", corrected_rate=2.0, warning=600.0)
    simulator, chunks = simulate_fault(kind, end=3205.0)
    corrected = column(chunks, "node", "node.memory_corrected")
    assert corrected[FIRST + 58, NODE] - corrected[FIRST - 1, NODE] == pytest.approx(2.0 * 590, rel=0.15)
    assert np.ptp(corrected[:, OTHERS], axis=0).max() <= 2
    uncorrected = column(chunks, "node", "node.memory_uncorrected")
    assert np.nanmax(uncorrected[:, NODE]) == 1
    assert np.nanmax(uncorrected[:, OTHERS]) == 0
    lines = [(t, e.data["pattern"]) for t, e in events_of_kind(chunks, "kernel")]
    assert [p for _, p in lines] == ["edac_corrected"] * (len(lines) - 1) + ["edac_uncorrected"]
    assert len(lines) > 5
    assert lines[-1][0] == 1805.0
    first, _, then = simulator.schedule.allocations
    assert (first.end, first.last) == (1805.0, False)
    assert NODE not in set((then.gpus // 8).tolist())


@pytest.mark.parametrize(
    ("part", "patterns"),
    [
        ("cpu", ["machine_check"]),
        ("chassis", []),
        ("io_board", ["aer_fatal"]),
        ("ssd", ["io_error", "file_system_read_only"]),
    ],
)
def test_each_part_fails_with_its_own_log_lines_and_its_node_is_out_until_repair(
    part: str, patterns: list[str]
) -> None:
    simulator, chunks = simulate_fault(HostFault(part, 1.0, 600.0), end=3205.0)
    assert [e.data["pattern"] for _, e in events_of_kind(chunks, "kernel")] == patterns
    assert {e.entity for _, e in events_of_kind(chunks, "kernel")} <= {f"node:{NAME}"}
    (stop,) = [s.end for s in simulator.schedule.allocations if s.end < np.inf]
    assert ONSET <= stop <= ONSET + 60
    there = ~np.isnan(column(chunks, "node", "node.uptime")[:, NODE])
    silent = np.flatnonzero(~there)
    begin = ONSET + (0.6 * 2000 if part == "ssd" else 0)
    assert begin <= silent[0] * TICK <= begin + 40
    assert silent[-1] == 320
    assert len(silent) == silent[-1] - silent[0] + 1
    uptime = column(chunks, "node", "node.uptime")[:, NODE]
    assert (uptime[322], uptime[321]) == (10.0, 0.0)
    busy = simulator.schedule.running_jobs(np.arange(stop + TICK, 3200.0, TICK), 72)
    assert (busy[:, GPUS] == -1).all()


def test_a_failing_disk_blocks_processes_until_the_node_is_drained() -> None:
    chunks = simulate_fault(HostFault("ssd", 1.0, 600.0), end=3205.0)[1]
    blocked = column(chunks, "node", "node.tasks_blocked")
    assert np.nanmin(blocked[FIRST : FIRST + 60, NODE]) == 64
    assert np.nanmax(blocked[FIRST + 70 :, NODE]) == 0
    assert np.nanmax(blocked[:, OTHERS]) == 0


def test_parts_fail_at_the_published_rates() -> None:
    drawn = [HostFault().drawn(np.random.default_rng(seed)).part for seed in range(1100)]
    counts = {part: drawn.count(part) for part in ("cpu", "dimm", "chassis", "io_board", "ssd")}
    assert sum(counts.values()) == 1100
    assert all(150 < counts[part] < 250 for part in ("cpu", "dimm", "chassis", "io_board"))
    assert 250 < counts["ssd"] < 350


def test_an_unknown_part_is_refused_with_the_list_of_known_ones() -> None:
    line = {"kind": "host_fault", "part": "engine", "onset": 1}
    with pytest.raises(UsageError, match=r"part = 'engine'; expected one of cpu, dimm, chassis, io_board, ssd"):
        parse({"version": 1, "duration": 60, "interval": 10, "fault": [line]}, "x.toml")


def test_the_agent_recognizes_every_simulated_kernel_line() -> None:
    known = {pattern.name: pattern for pattern in load_patterns().patterns}
    for part in ("cpu", "io_board", "ssd"):
        for _, event in events_of_kind(simulate_fault(HostFault(part, 1.0, 600.0), end=3205.0)[1], "kernel"):
            pattern = known[str(event.data["pattern"])]
            assert pattern.match.search(str(event.data["text"]))
            assert (event.data["class"], event.data["severity"]) == (pattern.group, pattern.severity)
            assert set(event.data) <= set(EVENT_KINDS["kernel"].data)


def test_a_silent_agent_is_a_telemetry_fault_and_its_node_continues_to_work() -> None:
    simulator, chunks = simulate_fault(TelemetryGap())
    there = np.concatenate([c.present["gpu"] for c in chunks])[:, GPUS]
    assert not there[FIRST : LAST + 1].any()
    assert there[:FIRST].all()
    assert there[LAST + 1 :].all()
    (line,) = simulator.truth()
    assert (line["class"], line["parameters"]["attribution"]) == ("hard", "telemetry")
    steps = np.concatenate([c.columns["rank"]["rank.step"] for c in chunks])
    sound = np.concatenate([c.columns["rank"]["rank.step"] for c in simulate_fault(None)[1]])
    assert np.array_equal(steps, sound)


# --- benign -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trace", ["pressure", "none"])
def test_a_transient_slows_the_ranks_of_one_node_sometimes_without_another_sign(trace: str) -> None:
    kind = NodeTransient(trace, 0.3)
    chunks = simulate_fault(kind, end=1405.0)[1]
    factor = longer(kind, end=1405.0)
    assert np.median(factor[FIRST + 2 : 139, GPUS], axis=0).max() == pytest.approx(1.3, abs=0.02)
    assert np.median(factor[145:, GPUS]) == pytest.approx(1, abs=0.01)
    pressure = np.diff(column(chunks, "node", "node.cpu_pressure")[:, NODE])[FIRST + 1 : 139] / (1e6 * TICK)
    assert (pressure.min() > 0.3) if trace == "pressure" else (pressure.max() < 0.05)


def test_maintenance_is_announced_and_the_node_drained_rebooted_and_returned() -> None:
    simulator, chunks = simulate_fault(Maintenance("firmware"), end=2705.0)
    (begin, start), (end, over) = (
        events_of_kind(chunks, "maintenance_start")[0],
        events_of_kind(chunks, "maintenance_end")[0],
    )
    assert (begin, end, start.entity, over.entity) == (ONSET, 2705.0, f"node:{NAME}", f"node:{NAME}")
    assert start.data == {"reason": "firmware", "seconds": 1500.0}
    ((changed, version),) = events_of_kind(chunks, "version")
    assert set(version.data["versions"]) == set(version.data["before"]) == {"bios_version"}  # type: ignore[call-overload]
    flaps = events_of_kind(chunks, "link_state")
    assert [e.data["state"] for _, e in flaps].count("down") == [e.data["state"] for _, e in flaps].count("up") == 2
    assert all(e.entity.startswith(f"port:{NAME}.") for _, e in flaps)
    silent = np.flatnonzero(np.isnan(column(chunks, "node", "node.uptime")[:, NODE])) * TICK
    assert max(t for t, _ in flaps) < silent[0] < silent[-1] < changed < end
    running = simulator.schedule.running_jobs(np.arange(ONSET + TICK, 2700.0, TICK), 72)
    assert (running[:, GPUS] == -1).all()
    busy = column(chunks, "node", "node.cpu_busy_time")[:, NODE]
    back = int(silent[-1] / TICK) + 1
    assert [t for t, e in events_of_kind(chunks, "inventory") if e.entity == f"node:{NAME}"] == [
        0.0,
        ONSET,
        back * TICK,
    ]
    assert busy[back] < busy[FIRST] / 1000
    assert column(chunks, "node", "node.uptime")[back, NODE] == 0
    assert (simulator.truth()[0]["class"], simulator.truth()[0]["entities"]) == ("benign", [])


def test_maintenance_events_come_from_the_planner_even_while_the_node_is_down() -> None:
    simulator, chunks = simulate_fault(Maintenance("none"))
    sender_names = {s for c in chunks for s, e in c.events if e.kind.startswith("maintenance")}
    assert sender_names == {simulator.layout.nodes}
    assert not events_of_kind(chunks, "version")


@pytest.mark.parametrize("change", ["driver", "vbios"])
def test_another_version_is_reported_and_slows_the_node_permanently_by_a_constant_offset(change: str) -> None:
    simulator, chunks = simulate_fault(MixedSilicon(change, 0.06, 600.0), end=86_400.0)
    ((when, version),) = events_of_kind(chunks, "version")
    assert ONSET < when < events_of_kind(chunks, "maintenance_end")[0][0] == ONSET + 600
    assert set(version.data["versions"]) == {"nvidia_driver" if change == "driver" else "vbios"}  # type: ignore[call-overload]
    last, sound = chunks[-1], simulate_fault(None)[1][-1]
    assert sorted(last.entities["rank"]) == sorted(sound.entities["rank"])  # the job is back, and on the same GPUs
    place = [last.entities["rank"].index(name) for name in sound.entities["rank"]]
    ranks = [c.columns["rank"]["rank.compute_time"].astype(float) for c in (last, sound)]
    compute = np.median(ranks[0][:, place] / ranks[1], axis=0)
    clocks = [column([c], "gpu", "gpu.sm_clock")[:, :64] for c in (last, sound)]
    clock = np.median(clocks[0] / clocks[1], axis=0)
    mine, peers = compute[GPUS], np.delete(compute[:40], range(8, 16))
    slower = 1.06 if change == "driver" else 1 / 0.94
    assert np.allclose(mine / np.median(peers), slower, atol=0.01)
    assert np.allclose(clock[GPUS], 1.0 if change == "driver" else 0.94, atol=0.01)
    assert np.allclose(np.delete(clock, range(8, 16)), 1.0)
    assert simulator.truth()[0]["end"] == "2026-01-01T01:00:00.000000Z"


def test_a_wrong_clock_dates_samples_later_and_reports_the_jump() -> None:
    chunks = simulate_fault(LateTelemetry("skew", 4.0, 20.0))[1]
    late = np.concatenate([c.late for c in chunks])
    assert (late[FIRST : LAST + 1, NODE] == 4_000_000).all()
    assert late[:FIRST].max() == late[LAST + 1 :].max() == late[:, OTHERS].max() == 0
    offset = column(chunks, "node", "node.clock_offset")
    assert np.allclose(offset[FIRST : LAST + 1, NODE], -4.0, atol=0.001)
    assert np.abs(offset[:, OTHERS]).max() < 0.001
    assert [(t, e.data["seconds"]) for t, e in events_of_kind(chunks, "clock_jump")] == [(ONSET, 4.0), (END, -4.0)]
    assert all(np.diff(c.sample_times("gpu"), axis=0).min() > 0 for c in chunks)


def test_a_restarting_agent_leaves_a_gap_shorter_than_a_minute() -> None:
    chunks = simulate_fault(LateTelemetry("hole", 4.0, 44.0))[1]
    silent = np.concatenate([c.silent for c in chunks])
    assert np.flatnonzero(silent[:, NODE]).tolist() == [121, 122, 123, 124]
    assert silent[:, OTHERS].sum() == 0


def test_our_canary_loads_a_gpu_slows_its_rank_and_reports_its_time() -> None:
    kind, entity, end = OwnCanary(0.25), f"gpu:{NAME}.3", ONSET + 40
    simulator, chunks = simulate_fault(kind, entity, end)
    factor = longer(kind, entity, end)[:, 11]
    assert factor[FIRST + 1 : FIRST + 6].max() == pytest.approx(1.25, abs=0.01)
    assert np.allclose(factor[:FIRST], 1)
    assert np.median(factor[FIRST + 10 :]) == pytest.approx(1, abs=0.01)
    ((when, event),) = [(t, e) for t, e in events_of_kind(chunks, "digest") if e.data["took"] > 1]
    assert (when, event.entity, event.data["took"]) == (end, entity, 40.0)
    assert event.data["began"] == simulator.time_at(ONSET)
    others = [e.data for _, e in events_of_kind(chunks, "digest") if e is not event]  # its keys do not show the canary
    assert {frozenset(data) for data in others} == {frozenset(event.data)}
    assert event.data["digest"] == canary.digest(str(event.data["canary"]))
    assert set(event.data) <= set(EVENT_KINDS["digest"].data)


def test_a_canary_shorter_than_a_tick_costs_its_share_of_it() -> None:
    simulator = simulate_fault(None)[0]
    kind = OwnCanary(0.2)
    fault = Fault(1, kind, "gpu:sim-n001.0", 0, 103.0, 108.0, (1, 2))
    effects = Effects(np.arange(60) * TICK, -TICK, simulator.layout, 2, np.zeros((60, 72), np.int32))
    kind.act(fault, effects)
    slowed = effects.gpu.compute.array()[:, 0]
    assert slowed[11] == pytest.approx(1 + 0.2 * 0.5)
    assert slowed.sum() == pytest.approx(60.1)
