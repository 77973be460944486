"""Feedback about a group applies to its members, and to no other entity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from detectors.base.detector import Detector, part
from detectors.base.streams import Channel, Streams
from detectors.base.topology_index import members_mask
from detectors.runner import Runner
from pipeline.model.records import SECOND, Event, Frame
from pipeline.model.topology import Topology

GPUS = tuple(f"gpu:n{n}.{i}" for n in range(3) for i in range(2))
TOPOLOGY = Topology(
    {
        **{gpu: (f"node:{gpu[4:6]}",) for gpu in GPUS},
        **{f"node:n{n}": (f"rack:r{n // 2}",) for n in range(3)},
        **{f"rank:7.{i}": ("stage:7.0", "job:7", gpu) for i, gpu in enumerate(GPUS[:3])},
        "rack:r0": ("cdu:c0",),
    }
)
START = 1_790_000_000 * SECOND


def frame(tick=0, events=()):
    values = {"gpu.power": np.random.default_rng(tick).normal(600, 5, len(GPUS))}
    return Frame(START + tick * 10 * SECOND, "gpu", GPUS, values, TOPOLOGY, tuple(events))


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (["gpu:n1.0"], {2}),
        (["node:n1"], {2, 3}),
        (["rack:r0"], {0, 1, 2, 3}),
        (["cdu:c0"], {0, 1, 2, 3}),
        (["job:7"], {0, 1, 2}),
        (["stage:7.0", "gpu:n2.1"], {0, 1, 2, 5}),
        (["rank:7.1"], set()),
        (["fleet:gpu"], set(range(6))),
        (["fleet:nic"], set()),
        (["site:all"], set(range(6))),
        (["node:typo"], set()),
        ([], set()),
    ],
)
def test_a_name_covers_itself_and_all_below_it(named, expected):
    assert set(np.flatnonzero(members_mask(named, frame())).tolist()) == expected


@dataclass
class StreamDetector(Detector):
    """Learns the power of GPUs, reports nothing. Source: this test."""

    name: ClassVar[str] = "watching"
    family: ClassVar[str] = "none"
    device_class: ClassVar[str] = "gpu"
    needs: ClassVar[tuple[str, ...]] = ("gpu.power",)
    cannot_see: ClassVar[str] = "Everything."
    streams: Streams = part(lambda: Streams(Channel(5.0, 20.0)))

    def observe(self, frames: Any) -> list[Any]:
        one = frames["gpu"]
        groups = np.zeros(len(one.entities), np.int32)
        self.streams.step(one["gpu.power"], groups, one.time)
        return []


@pytest.mark.parametrize(
    ("named", "expected"), [("rack:r0", {0, 1, 2, 3}), ("gpu:n2.0", {4}), ("fleet:gpu", set(range(6)))]
)
def test_streams_of_the_members_of_a_group_are_reset(named, expected):
    runner = Runner([StreamDetector()])
    for tick in range(30):
        runner.observe({"gpu": frame(tick)})
    before = runner.detectors[0].streams.cells.copy()
    feedback = Event(START, named, "feedback", {"verdict": "not_a_fault", "detector": "watching"})
    runner.detectors[0].accept_as_normal(feedback.entity, {"gpu": frame(30)})
    cells = runner.detectors[0].streams.cells
    assert set(np.flatnonzero((cells == 0).all(axis=0)).tolist()) == expected
    kept = [i for i in range(6) if i not in expected]
    assert (cells[:, kept] == before[:, kept]).all()
    runner.observe({"gpu": frame(31, [feedback])})
    assert not runner.errors
