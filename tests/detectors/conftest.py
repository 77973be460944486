"""Fixtures of the detector tests: a small artificial site, frame by frame."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.model.records import SECOND, Event, Finding, Frame
from pipeline.model.signals import class_of_entity
from pipeline.model.topology import Topology

START = 1_790_000_000 * SECOND
STEP = 10 * SECOND
Floats = NDArray[np.float64]


class Site:
    """One rack of 4 nodes: 16 GPUs and ports, one leaf per rail, one job of 2 stages, 5 coolant loops; seeded noise."""

    def __init__(self, seed: int = 1) -> None:
        self.rng = np.random.default_rng(seed)
        gpus = [f"gpu:n{n}.{i}" for n in range(4) for i in range(4)]
        ports = [f"port:n{n}.p{i}" for n in range(4) for i in range(4)]
        ranks = [f"rank:7.{i}" for i in range(16)]
        self.names = {"gpu": gpus, "nic": ports, "rank": ranks, "coolant": [f"cdu:c{i}" for i in range(5)]}
        self.names |= {"bmc": ["bmc:row1", "bmc:row2"], "exporter": ["exporter:facility"]}
        self.names["leak"] = ["leak_detector:c0.tray", "leak_detector:c0.hose"]
        parents: dict[str, Sequence[str]] = {f"node:n{n}": ["rack:r1"] for n in range(4)} | {"rack:r1": ["cdu:c0"]}
        parents |= {rope: ["cdu:c0"] for rope in self.names["leak"]}
        for k in range(16):
            parents[gpus[k]] = [f"node:n{k // 4}"]
            parents[ports[k]] = [f"node:n{k // 4}", f"leaf:l{k % 4}"]
            parents[ranks[k]] = [f"stage:7.{k // 8}", "job:7", gpus[k]]
        self.topology = Topology(parents)
        self.counters = {"nic.carrier_changes": np.full(16, 2.0), "nic.symbol_errors": np.zeros(16)}
        self.slow = 1 + 0.1 * (np.arange(16) >= 8)

    def values(self) -> dict[str, dict[str, Floats]]:
        """Returns a healthy instant; the caller may change it."""
        noise = lambda n, sd: 1 + sd * self.rng.standard_normal(n)  # noqa: E731
        return {
            "gpu": {"gpu.sm_clock": np.full(16, 1980.0), "gpu.throttle_reasons": np.zeros(16)},
            "nic": {"nic.state": np.ones(16), **{k: v.copy() for k, v in self.counters.items()}},
            "rank": {"rank.compute_time": 4.0 * self.slow * noise(16, 0.01)},
            "coolant": {
                "coolant.flow": 300.0 * noise(5, 0.01),
                "coolant.supply_temperature": 32.0 + self.rng.standard_normal(5) * 0.2,
                "coolant.pressure": 2.0 * noise(5, 0.01),
                "pump.speed": 3200.0 * noise(5, 0.003),
            },
            "leak": {"leak.state": np.zeros(2)},
            "bmc": {"bmc.reachable": np.ones(2)},
            "exporter": {"exporter.up": np.ones(1)},
        }

    def frames(
        self, tick: int, values: Mapping[str, Mapping[str, Floats]], events: Iterable[Event] = ()
    ) -> dict[str, Frame]:
        """Returns read-only frames of one instant; entities missing at the end are not measured yet."""
        by_class: dict[str, list[Event]] = {}
        for event in events:
            mine = class_of_entity(event.entity)  # events of a class without a frame are added to another one
            by_class.setdefault(mine if mine in values else "gpu", []).append(event)
        found = {}
        for device_class, columns in values.items():
            for column in columns.values():
                column.flags.writeable = False
            mine = tuple(by_class.get(device_class, ()))
            names = tuple(self.names[device_class])
            found[device_class] = Frame(START + tick * STEP, device_class, names, columns, self.topology, mine)
        return found


Change = Callable[[int, dict[str, dict[str, Floats]]], "Iterable[Event] | None"]


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.fixture
def watch() -> Callable[..., list[Finding]]:
    """Observes `ticks` instants of a site with a detector or runner; `change(tick, values)` may add a fault."""

    def run(observer: object, site: Site, ticks: int, change: Change | None = None, first: int = 0) -> list[Finding]:
        found: list[Finding] = []
        for tick in range(first, first + ticks):
            values = site.values()
            events = (change(tick, values) or ()) if change else ()
            found += observer.observe(site.frames(tick, values, events))  # type: ignore[attr-defined]
        return found

    return run
