"""The contract of every kind of fault and benign event: explained, sourced, drawn from the seed, within its window."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest

from agents.sim.chunk import Chunk
from agents.sim.faults.kind import Kind
from agents.sim.fleet import FleetSimulator
from agents.sim.kinds import CONFOUNDERS, FAULTS, KINDS
from agents.sim.layout import Layout
from agents.sim.scenario import Fleet, Line, Scenario
from agents.sim.scenario_file import parse
from pipeline.model.event_kinds import EVENT_KINDS
from pipeline.model.records import from_iso
from pipeline.model.signals import CATALOGUE

ONSET, END, TICKS = 1200.0, 2400.0, 360
FLEET = Fleet(16, 4)
SLOW_SIGNALS = {"gpu.temperature", "gpu.memory_temperature"}

each = pytest.mark.parametrize("name", sorted(n for n, k in KINDS.items() if k.exists(Layout(16, 4))))


def scenario(*lines: Line, seconds: float = TICKS * 10.0) -> Scenario:
    return Scenario(seconds, 10.0, None, FLEET, lines)


@cache
def sound(seed: int = 1) -> tuple[Chunk, ...]:
    return tuple(FleetSimulator(scenario(), seed).chunks())


@cache
def simulate_fault(name: str, seed: int = 1) -> tuple[FleetSimulator, tuple[Chunk, ...]]:
    simulator = FleetSimulator(scenario(Line(KINDS[name](), ONSET, END)), seed)
    return simulator, tuple(simulator.chunks())


def test_every_row_of_the_fault_table_has_a_kind() -> None:
    assert {kind.row for kind in FAULTS} == set(range(1, 42))
    assert {kind.row for kind in CONFOUNDERS} == set(range(1, 20))
    assert len(KINDS) == len(FAULTS) + len(CONFOUNDERS)


@each
def test_a_kind_describes_its_visible_and_invisible_effects(name: str) -> None:
    kind = KINDS[name]
    assert kind.__doc__
    assert len(kind.__doc__.split(". ")[0]) > 20
    assert len(kind.seen) > 10
    assert len(kind.unseen) > 5
    assert kind.attribution
    assert (kind.detectability == "benign") == (kind in CONFOUNDERS)


@each
def test_a_kind_has_a_rate_with_its_source_and_a_length(name: str) -> None:
    kind = KINDS[name]
    assert kind.rate.of(Layout(64, 8)) > 0
    assert len(kind.rate.source) > 5
    rng = np.random.default_rng(1)
    assert all(0 < kind.lasts.draw(rng) <= kind.lasts.high for _ in range(100))


@each
def test_the_signals_of_a_kind_are_in_the_catalogue(name: str) -> None:
    assert set(KINDS[name].signals) <= set(CATALOGUE) | {f"event:{kind}" for kind in EVENT_KINDS}


@each
def test_parameters_are_drawn_from_the_seed_within_their_ranges(name: str) -> None:
    kind = KINDS[name]
    one, same, other = (kind().drawn(np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert one == same
    assert not kind.ranges or one != other
    for parameter, (low, high) in kind.ranges.items():
        assert low <= float(getattr(one, parameter)) <= high
    assert set(kind.limits) | set(kind.ranges) <= set(one.parameters())
    severity = one.severity()
    assert severity is None or 0 <= severity <= 1


@pytest.mark.sample(every=4)
@each
def test_before_the_onset_a_fleet_is_the_same_as_without_the_fault(name: str) -> None:
    _, chunks = simulate_fault(name)
    for one, other in zip(chunks[:2], sound()[:2], strict=True):  # 120 ticks: until the onset
        assert list(one.columns) == list(other.columns)
        for device_class, block in one.columns.items():
            for signal, values in block.items():
                same = other.columns[device_class][signal]
                assert np.array_equal(values, same, equal_nan=values.dtype.kind == "f"), signal
        assert [e for e in one.events if e[1].time < chunks[0].times[0] + ONSET * 1e6] == [
            e for e in other.events if e[1].time < chunks[0].times[0] + ONSET * 1e6
        ]


@each
def test_a_fault_changes_telemetry_or_events_unless_it_is_invisible(name: str) -> None:
    simulator, chunks = simulate_fault(name)
    marked = any(
        not np.array_equal(values, other.columns[c].get(signal), equal_nan=values.dtype.kind == "f")
        for one, other in zip(chunks, sound(), strict=True)
        for c, block in one.columns.items()
        for signal, values in block.items()
    )
    has_events = [e for c in chunks for e in c.events] != [e for c in sound() for e in c.events]
    absent = any(
        not np.array_equal(a.silent, b.silent) or not np.array_equal(a.present[c], b.present[c])
        for a, b in zip(chunks, sound(), strict=True)
        for c in ("sensor", "gpu")
    )
    classes = {line["class"] for line in simulator.truth()}
    assert marked or has_events or absent or classes == {"invisible"}


@each
def test_devices_far_from_a_fault_do_not_change(name: str) -> None:
    """Noise of healthy devices does not depend on faults: a GPU of an idle node in another rack keeps its bits."""
    simulator, chunks = simulate_fault(name)
    far = simulator.layout.gpus - 1
    near = {n for f in simulator.faults for n in _nodes(simulator, f.kind, f.device)}
    if simulator.layout.nodes - 1 in near:
        pytest.skip("it strikes everything of so small a fleet")
    for signal in ("gpu.power", "gpu.temperature", "gpu.sm_clock"):
        mine, other = (np.concatenate([c.columns["gpu"][signal][:, far] for c in x]) for x in (chunks, sound()))
        moved = any(far in stay.gpus for stay in simulator.schedule.allocations)
        assert moved or np.array_equal(mine, other)


def _nodes(simulator: FleetSimulator, kind: Kind, device: int) -> set[int]:
    if kind.target == "job":
        return set(range(simulator.layout.nodes - simulator.layout.nodes // 8))
    return set(simulator.layout.nodes_below(kind.target, device).tolist())


@pytest.mark.sample(every=4)
@each
def test_the_same_seed_gives_the_same_bits_with_any_chunk_size(name: str) -> None:
    _, chunks = simulate_fault(name)
    cut = list(FleetSimulator(scenario(Line(KINDS[name](), ONSET, END)), 1).chunks(7))
    for device_class, block in chunks[0].columns.items():
        if device_class == "rank":
            continue  # which ranks a chunk has may change from block to block: compared by entity below
        for signal, values in block.items():
            one = np.concatenate([c.columns[device_class][signal] for c in chunks])
            other = np.concatenate([c.columns[device_class][signal] for c in cut])
            assert np.array_equal(one, other, equal_nan=values.dtype.kind == "f"), signal
    assert [e for c in chunks for e in c.events] == [e for c in cut for e in c.events]


@each
def test_values_are_in_wire_type_and_valid_range_and_events_are_known(name: str) -> None:
    for chunk in simulate_fault(name)[1]:
        for device_class, block in chunk.columns.items():
            for signal, values in block.items():
                low, high = CATALOGUE[signal].valid
                there = values[chunk.present[device_class]]
                there = there[~np.isnan(there)] if there.dtype.kind == "f" else there[there != _missing(there.dtype)]
                assert values.dtype == np.dtype(CATALOGUE[signal].type), signal
                assert not len(there) or name in TAMPERING or (low <= there.min() and there.max() <= high), signal
        for _, event in chunk.events:
            assert event.kind in EVENT_KINDS
            assert EVENT_KINDS[event.kind].applies_to(event.entity.partition(":")[0]), event
            known = EVENT_KINDS[event.kind].data
            assert set(event.data) <= set(known), (event.kind, set(event.data) - set(known))
            json.dumps(event.data)


TAMPERING = {"counter_oddity", "sensor_fault", "sensor_offset"}
"""Broken instruments may report impossible values, which the valid range excludes."""


def _missing(dtype: np.dtype) -> int:
    return int(np.iinfo(dtype).max)


@each
def test_the_truth_describes_the_fault(name: str) -> None:
    simulator, _ = simulate_fault(name)
    (line,) = simulator.truth()
    kind = KINDS[name]
    assert line["kind"] == name
    fault = simulator.faults[0]
    assert line["class"] in (kind.detectability, "invisible", fault.kind.truth_class(fault, simulator.layout))
    assert from_iso(line["onset"]) < from_iso(line["end"])
    assert line["parameters"]["row"] == kind.row
    json.dumps(line)
    guilty = line.get("entities", [line["entity"]])
    known = set(simulator.parents) | {p for parents in simulator.parents.values() for p in parents}
    assert {line["entity"], *guilty} <= known
    assert (not guilty) == (line["class"] == "benign") or kind.name in ("stage_imbalance",)
    if "detectable" in line["parameters"]:
        assert line["onset"] < line["parameters"]["detectable"] <= line["end"]


@each
def test_a_scenario_file_can_contain_any_kind_with_its_parameters(name: str) -> None:
    given = {k: v for k, v in KINDS[name]().drawn(np.random.default_rng(3)).parameters().items() if v is not None}
    table = {
        "version": 1,
        "duration": 600,
        "interval": 10,
        "fault": [{"kind": name, "onset": 100, "end": 200, **given}],
    }
    assert parse(table, "x.toml").faults[0].kind.parameters() == KINDS[name](**given).parameters()
