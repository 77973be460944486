"""A simulated fleet continues bit by bit from a snapshot; a snapshot of another fleet is refused."""

from __future__ import annotations

import numpy as np
import pytest

from agents.sim.chunk import Chunk
from agents.sim.fleet import BLOCK, FleetSimulator
from agents.sim.scenario import Fleet, Jobs, Rates, Scenario
from pipeline.model.errors import UsageError

BUSY = Scenario(4 * 3600.0, 10.0, None, Fleet(24, 4, 0.01, 5.0), jobs=Jobs(1.0), rates=Rates(200.0, 50.0))
"""A fleet in which about a hundred things happen in four hours."""


def equal(one: Chunk, other: Chunk) -> bool:
    return (
        one.entities == other.entities
        and one.events == other.events
        and np.array_equal(one.late, other.late)
        and all(np.array_equal(one.present[c], other.present[c]) for c in one.present)
        and all(
            np.array_equal(v, other.columns[c][n], equal_nan=v.dtype.kind == "f")
            for c, block in one.columns.items()
            for n, v in block.items()
        )
    )


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("after", [1, 7])
def test_a_fleet_restored_from_a_snapshot_continues_bit_by_bit(after: int) -> None:
    first = FleetSimulator(BUSY, 3)
    whole, saved = [], b""
    for number, chunk in enumerate(first.chunks(), 1):
        whole.append(chunk)
        if number == after:
            saved = first.snapshot()
    again = FleetSimulator(BUSY, 3)
    again.restore(saved)
    assert again.ticks == after * BLOCK
    rest = list(again.chunks())
    assert len(rest) == len(whole) - after
    assert all(equal(one, other) for one, other in zip(whole[after:], rest, strict=True))
    assert again.truth() == first.truth()


def test_a_snapshot_of_another_fleet_is_refused() -> None:
    small = FleetSimulator(Scenario(600.0, 10.0, None, Fleet(2, 8)), 1)
    with pytest.raises(UsageError, match="expected a snapshot of the same scenario and seed"):
        FleetSimulator(BUSY, 1).restore(small.snapshot())


@pytest.mark.slow
def test_memory_does_not_grow_with_the_length_of_a_run() -> None:
    simulator = FleetSimulator(BUSY, 1)
    sizes = [len(simulator.snapshot()) for _ in simulator.chunks()]
    assert max(sizes) == min(sizes)


def test_rows_of_a_table_are_in_order_of_time_without_missing_ones() -> None:
    for chunk in FleetSimulator(BUSY, 2).chunks():
        for device_class in chunk.columns:
            table = chunk.table(device_class)
            assert (np.diff(table.time) >= 0).all()
            assert len(table.time) == np.count_nonzero(chunk.present[device_class])
            assert all(len(v) == len(table.time) for v in table.columns.values())


def test_samples_of_a_node_are_late_together_by_less_than_the_configured_maximum() -> None:
    late = np.concatenate([c.late for c in FleetSimulator(BUSY, 2).chunks()])
    assert late.min() >= 0
    assert 4_500_000 < np.median(late.max(axis=0)) < 10_000_000
