"""Benign network events: colliding flows, and counters that misbehave as real ones do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from agents.sim.chunk import Chunk
from agents.sim.confounders.site import CounterOddity, EcmpCollision
from agents.sim.faults.kind import Kind
from agents.sim.fleet import FleetSimulator
from agents.sim.scenario import Fleet, Line, Scenario

ONSET, END = 1200.0, 4800.0
PORT = "port:sim-n002.mlx5_1"


def simulate_fault(kind: Kind, seed: int = 1) -> tuple[FleetSimulator, Sequence[Chunk]]:
    made = FleetSimulator(Scenario(5400.0, 10.0, None, Fleet(8, 8), (Line(kind, ONSET, END, PORT),)), seed)
    return made, list(made.chunks())


def columns(chunks: Sequence[Chunk], signal: str) -> np.ndarray:
    return np.concatenate([c.columns["nic"][signal] for c in chunks]).astype(float)


def resets(made: FleetSimulator, chunks: Sequence[Chunk]) -> list[float]:
    return [(e.time - made.start) / 1e6 for c in chunks for _, e in c.events if e.kind == "counter_reset"]


def falls(values: np.ndarray) -> list[int]:
    return (np.flatnonzero(np.diff(values) < 0) + 1).tolist()


def test_colliding_flows_have_less_traffic_and_no_errors() -> None:
    made, chunks = simulate_fault(EcmpCollision(goodput=0.6, collective=1.05))
    sound = list(FleetSimulator(Scenario(5400.0, 10.0, None, Fleet(8, 8)), 1).chunks())
    sent, usual = (np.diff(columns(c, "nic.tx_bytes"), axis=0)[125:475].sum(axis=0) for c in (chunks, sound))
    share = sent[:56] / usual[:56]
    fewer = np.flatnonzero(share < 0.8)
    assert 2 <= len(fewer) <= 4
    assert made.faults[0].device in fewer
    assert len(set(made.layout.leaf_of_port[fewer].tolist())) == 1
    assert np.delete(share, fewer).min() > 0.97
    for name in ("symbol_errors", "crc_errors", "out_of_sequence", "carrier_changes"):
        assert np.array_equal(columns(chunks, f"nic.{name}"), columns(sound, f"nic.{name}"))
    line = made.truth()[0]
    assert (line["class"], line["entities"]) == ("benign", [])


def test_a_reloaded_driver_begins_a_new_counter_generation() -> None:
    made, chunks = simulate_fault(CounterOddity(variant="reset"))
    port = made.faults[0].device
    for name in ("rx_bytes", "tx_packets", "phy_bits", "phy_corrected_bits"):
        assert falls(columns(chunks, f"nic.{name}")[:, port]) == [120]
        assert not falls(columns(chunks, f"nic.{name}")[:, port + 1])
    generation = columns(chunks, "nic.generation")[:, port]
    assert np.flatnonzero(np.diff(generation)).tolist() == [119]
    assert generation[-1] == made.start / 1e6 + ONSET
    assert resets(made, chunks) == [ONSET]


def test_a_narrow_packet_counter_wraps_between_two_loads_of_its_driver() -> None:
    made, chunks = simulate_fault(CounterOddity(variant="wrap"))
    packets = columns(chunks, "nic.tx_packets")[:, made.faults[0].device]
    assert packets[121:479].max() < 2**32
    fell = falls(packets)
    assert fell[0] == 120
    assert fell[-1] == 480
    assert len(fell) >= 3
    for tick in fell[1:-1]:  # a wrap is not reported
        assert packets[tick - 1] > 0.9 * 2**32
        assert packets[tick] < 0.1 * 2**32
    assert resets(made, chunks) == [ONSET, END]


def test_a_saturated_counter_stays_at_its_maximum_until_the_driver_is_reloaded() -> None:
    made, chunks = simulate_fault(CounterOddity(variant="saturate"))
    symbols = columns(chunks, "nic.symbol_errors")[:, made.faults[0].device]
    assert (symbols[120:480] == 65535).all()
    assert symbols[[0, 119, 480, 539]].max() < 10
    assert resets(made, chunks) == [ONSET, END]


def test_a_counter_without_response_sometimes_reads_as_all_bits_set() -> None:
    made, chunks = simulate_fault(CounterOddity(variant="sentinel"))
    port = made.faults[0].device
    symbols = columns(chunks, "nic.symbol_errors")[:, port]
    odd = symbols == 2**32 - 1
    assert 5 < odd.sum() < 120
    assert not odd[:120].any()
    assert not odd[480:].any()
    heat, light = columns(chunks, "nic.module_temperature")[:, port], columns(chunks, "nic.rx_power_min")[:, port]
    assert (heat[light > 6.5] == np.float32(-1 / 256)).all()
    assert (light > 6.5).any()
    assert resets(made, chunks) == []


@pytest.mark.parametrize("seed", range(3))
def test_each_counter_variant_occurs_and_blames_no_entity(seed: int) -> None:
    kinds = [
        FleetSimulator(Scenario(60.0, 10.0, None, Fleet(2, 8), (Line(CounterOddity(), 0.0, 30.0),)), s)
        for s in range(8 * seed, 8 * seed + 8)
    ]
    assert len({k.faults[0].kind.variant for k in kinds}) >= 2
    assert all(k.truth()[0]["entities"] == [] for k in kinds)
