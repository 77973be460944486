"""Artificial fabrics of several kinds for the tests of links: rails or one leaf per rack, InfiniBand or RoCE, polls at
any interval and phase, missing collectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from pipeline.model.records import SECOND, Event, Frame
from pipeline.model.topology import Topology

START, STEP = 1_790_000_000 * SECOND, 10  # s of a frame
GAUGES = frozenset({"nic.state", "nic.speed", "nic.phys_state", "nic.generation"})
Values = dict[str, np.ndarray]
Change = Callable[["Fabric", int, Values], None]


@dataclass
class Fabric:
    """Nodes with ports, jobs on them, and counters that grow in each frame of 10 s.

    rails:   a leaf for each rail; else one for each four nodes.   roce: marks and pauses, else credit waits.
    poll:    s between two readings of a node, each at its own phase.   jobs: nodes of each job.
    missing: share of the samples that are lost.
    """

    nodes: int = 16
    ports: int = 4
    rails: bool = True
    roce: bool = False
    poll: int = 10
    jobs: Sequence[Sequence[int]] = ()
    missing: float = 0.0
    speed: float = 400_000.0
    seed: int = 1
    order: np.ndarray | None = None
    totals: Values = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        size = self.nodes * self.ports
        order = np.arange(size) if self.order is None else self.order
        self.node = order // self.ports
        self.leaf = order % self.ports if self.rails else self.node // 4
        self.names = tuple(f"port:n{i // self.ports}.p{i % self.ports}" for i in order.tolist())
        parents = {p: [f"node:n{n}", f"leaf:l{f}"] for p, n, f in zip(self.names, self.node, self.leaf, strict=True)}
        for number, nodes in enumerate(self.jobs):
            for n in nodes:
                parents[f"gpu:n{n}.0"] = [f"node:n{n}"]
                parents[f"rank:{number}.{n}"] = [f"job:{number}", f"gpu:n{n}.0"]
        self.topology = Topology(parents)
        self.usual = np.exp(0.2 * np.random.default_rng(self.seed + 1).standard_normal(size))[order]
        self.phase = np.random.default_rng(self.seed + 2).integers(0, max(self.poll // STEP, 1), self.nodes)
        self.load = 0.15 * np.ones(size)  # of the line

    def port(self, name: str) -> int:
        """Returns the index of a port."""
        return self.names.index(name)

    def frames(self, ticks: int, change: Change | None = None, first: int = 0) -> Iterator[dict[str, Frame]]:
        """Yields the frames; `change(fabric, tick, growth)` may alter the growth of the counters in a tick."""
        size = len(self.names)
        for tick in range(first, first + ticks):
            noise = lambda sd: np.exp(sd * self.rng.standard_normal(size))  # noqa: E731
            moved = self.load * self.speed * 125_000 * STEP * noise(0.05)
            growth = {"nic.tx_bytes": moved, "nic.rx_bytes": moved * noise(0.02)}
            if self.roce:
                growth["nic.ecn_marked"] = 400 * self.usual * noise(0.2)
                growth["nic.cnp_handled"] = 100 * self.usual * noise(0.2)
                growth["nic.tx_pause"] = self.rng.poisson(1.0, size).astype(float)
                growth["nic.tx_pause_duration"] = 20.0 * growth["nic.tx_pause"]
                growth["nic.out_of_sequence"] = self.rng.poisson(1.0, size).astype(float)
            else:
                growth["nic.port_tx_wait"] = 1e5 * self.usual * noise(0.2)
                growth["nic.symbol_errors"] = np.zeros(size)
            gauges = {"nic.state": np.ones(size), "nic.speed": np.full(size, self.speed)}
            values = growth | gauges
            if change:
                change(self, tick, values)
            for name in [n for n in values if n not in GAUGES]:
                self.totals[name] = self.totals.get(name, np.full(size, 1e9)) + np.floor(values[name])
                values[name] = self.totals[name].copy()
            yield {"nic": self._frame(tick, values)}

    def _frame(self, tick: int, values: Values, events: Sequence[Event] = ()) -> Frame:
        every = max(self.poll // STEP, 1)
        silent = (tick + self.phase[self.node]) % every != 0
        silent = silent | (self.rng.random(len(self.names)) < self.missing)
        shown = {name: np.where(silent, np.nan, column) for name, column in values.items()}
        for column in shown.values():
            column.flags.writeable = False
        return Frame(START + tick * STEP * SECOND, "nic", self.names, shown, self.topology, tuple(events))
