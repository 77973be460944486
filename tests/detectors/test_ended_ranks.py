"""Ranks that ended lose their columns: what detectors learned of others, and what they report, stays the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from detectors import configured
from detectors.base.state import N, State, memory
from detectors.runner import Runner
from pipeline.model.records import Finding, Frame
from tests.detectors.cases.case import Case, cases
from tests.detectors.snapshots import packed, read

ENDED_AT = 20
"""Tick of the last step of the ranks that ended."""
ENDED = tuple(f"rank:3.{i}" for i in range(12))
SIGNALS = ("rank.step", "rank.step_time", "rank.compute_time", "rank.communication_time", "rank.gradient_norm")


def takes_ranks(case: Case) -> bool:
    """Whether a detector reads signals or frames of ranks."""
    detector = case.detector()
    signals = detector.input_signals()
    return detector.device_class == "rank" or any(name.startswith("rank.") for name in signals)


CASES = {case.detector.name: case for case in cases() if takes_ranks(case)}


def interleave(living: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names with those of the ended ranks between them, as where jobs began one after the other."""
    names = list(living)
    for i, rank in enumerate(ENDED):
        names.insert(2 * i, rank)
    return tuple(names)


def with_ranks(frames: dict[str, Frame], tick: int) -> dict[str, Frame]:
    """Returns the frames with one of ranks: with steps of the case's only rank if it has none."""
    if "rank" in frames:
        return frames
    frame = next(iter(frames.values()))
    steps = np.array([1.0 + tick])
    return {**frames, "rank": Frame(frame.time, "rank", ("rank:7.0",), {"rank.step": steps}, frame.topology, ())}


def widen(frames: Mapping[str, Frame], tick: int) -> dict[str, Frame]:
    """Returns the frames with columns of the ended ranks, which had values until ENDED_AT."""
    ranks = frames["rank"]
    names = interleave(ranks.entities)
    living = np.array([name not in ENDED for name in names])
    values = {}
    for signal in dict.fromkeys((*ranks.values, *(SIGNALS if tick <= ENDED_AT else ()))):
        column = np.full(len(names), np.nan)
        column[~living] = 3.0 + tick if tick <= ENDED_AT else np.nan
        column[living] = ranks.values.get(signal, np.nan)
        column.flags.writeable = False
        values[signal] = column
    return {**frames, "rank": Frame(ranks.time, "rank", names, values, ranks.topology, ranks.events)}


def drop_ended(runner: Runner, case: Case, frame: Frame) -> Runner:
    """Returns a runner with the state of another one, without the ranks that ended. frame: of the others."""
    other, again = Runner([case.detector()]), Runner([case.detector()])
    other.restore(packed(runner))
    other.drop_ranks(np.array([name not in ENDED for name in interleave(frame.entities)]))
    again.restore(packed(other))
    return again


def run(case: Case, drop_at: int) -> tuple[list[Finding], dict[str, Any]]:
    """Returns the findings of a case and the state afterwards; from `drop_at` on, ended ranks have no columns."""
    runner, topology, found = Runner([case.detector()]), case.topology(), list[Finding]()
    for tick in range(case.ticks):
        if tick == drop_at:
            topology = case.topology()  # columns change with a new topology, as after a restart
        frames = with_ranks(case.frames(tick, True, topology), tick)
        if tick == drop_at:
            runner = drop_ended(runner, case, frames["rank"])
        found += runner.observe(widen(frames, tick) if tick < drop_at else frames)
    return found, read(packed(runner if drop_at < case.ticks else drop_ended(runner, case, frames["rank"])))


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("name", CASES)
def test_a_detector_reports_the_same_after_ended_ranks_lost_their_columns(name: str) -> None:
    case = CASES[name]
    whole, state = run(case, case.ticks)
    assert {finding.entity for finding in whole} >= case.guilty
    for drop_at in (ENDED_AT + 5, case.fault + 10):
        found, after = run(case, drop_at)
        assert found == whole
        np.testing.assert_equal(after, state)


def test_all_detectors_of_ranks_have_a_case() -> None:
    assert {"straggler", "straggler_job", "sdc_gradient", "sdc_replica", "telemetry"} <= CASES.keys()
    assert {d.name for d in configured() if d.device_class == "rank"} <= CASES.keys()


@dataclass
class Piece(State):
    """Two arrays with a cell per entity."""

    usual: NDArray[np.float64] = memory(0.0)
    hours: NDArray[np.int64] = memory(0, np.int64, shape=(2, N))


def test_cells_are_dropped_along_the_axis_of_the_entities_and_later_ones_stay() -> None:
    piece = Piece()
    piece.grow(5)
    piece.usual[:] = range(5)
    piece.hours[:] = [range(5), range(10, 15)]
    piece.keep_cells(np.array([True, False, True]))
    assert piece.usual.tolist() == [0, 2, 3, 4]
    assert piece.hours.tolist() == [[0, 2, 3, 4], [10, 12, 13, 14]]
