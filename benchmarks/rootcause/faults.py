"""Findings of faults whose cause is known: what detectors report of a shared fault, and independent findings beside it.

Shares and delays are those that the detectors have on simulated faults (docs/detection.md): edge rules within seconds,
statistics after minutes, and a part of the members never. A finding is repeated every minute until its condition ends.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from benchmarks.rootcause.fleet import GPUS, NEW, Fleet
from pipeline.model.records import SECOND, Finding, Level

KINDS = ("cdu", "pdu", "leaf", "rail", "job", "version", "rack")
MINUTE = 60.0


@dataclass(frozen=True)
class Line:
    """A condition: reported from `found` to `end` (s), since `onset`. root: the true cause."""

    found: float
    end: float
    onset: float
    entity: str
    detector: str
    level: Level
    root: str

    def finding(self, time: int, start: int) -> Finding:
        """Returns the finding at `time` (us)."""
        onset = min(time, start + int(self.onset * SECOND))
        signals = (f"{self.detector}.signal",)
        return Finding(time, onset, self.entity, self.detector, self.level, 9.0, f"{self.entity} is wrong", {}, signals)


class Shared:
    """One shared fault at `begin` (s) that lasts for `lasts`; its findings have the root `cause`."""

    def __init__(self, fleet: Fleet, kind: str, begin: float, lasts: float, dice: random.Random) -> None:
        self.fleet, self.dice, self.begin, self.end = fleet, dice, begin, begin + lasts
        self.cause = f"version:nvidia_driver={NEW}" if kind == "version" else fleet.pick(kind, dice)
        self.lines = [*getattr(self, f"_{kind}")()]

    def _report(
        self, entities: Iterable[str], detector: str, level: Level, share: float, after: tuple[float, float]
    ) -> Iterator[Line]:
        """Yields findings of a share of the entities, `after` so many seconds, with back-dated onsets."""
        for entity in entities:
            if self.dice.random() < share:
                late = self.dice.uniform(*after)
                onset = self.begin + late * self.dice.uniform(0.1, 0.9)
                yield Line(self.begin + late, self.end, onset, entity, detector, level, self.cause)

    def _nodes(self) -> list[str]:
        return self.fleet.below[self.cause]

    def _gpus(self) -> list[str]:
        return [f"gpu:{node[5:]}.{i}" for node in self._nodes() for i in range(GPUS)]

    def _ranks_on(self, nodes: Iterable[str]) -> list[str]:
        mine = set(nodes)
        return [rank for ranks in self.fleet.ranks.values() for rank, node in ranks if node in mine]

    def _jobs_on(self, nodes: Iterable[str]) -> list[str]:
        mine = set(nodes)
        return [job for job, ranks in self.fleet.ranks.items() if any(node in mine for _, node in ranks)]

    def _cdu(self) -> Iterator[Line]:
        yield from self._report([self.cause], "coolant_edge", "page", 0.7, (2, 5))
        share = self.dice.uniform(0.5, 0.95)
        yield from self._report(self._gpus(), "thermal_edge", "page", share, (10, 90))
        yield from self._report(self._ranks_on(self._nodes()), "straggler", "page", 0.4, (90, 400))
        yield from self._report(self._jobs_on(self._nodes()), "straggler_job", "suspect", 0.5, (300, 900))

    def _rack(self) -> Iterator[Line]:
        share = self.dice.uniform(0.5, 0.95)
        yield from self._report(self._nodes(), "coolant", "ticket", share, (60, 200))
        yield from self._report(self._gpus(), "thermal", "ticket", share, (60, 300))
        yield from self._report(self._ranks_on(self._nodes()), "straggler", "page", 0.3, (90, 400))

    def _pdu(self) -> Iterator[Line]:
        yield from self._report([self.cause], "power", "page", 0.6, (1, 10))
        yield from self._report(self._nodes(), "telemetry", "page", 0.97, (20, 60))
        yield from self._report(self._jobs_on(self._nodes()), "straggler_job", "page", 0.7, (360, 500))

    def _leaf(self) -> Iterator[Line]:
        ports = self.fleet.ports[self.cause]
        yield from self._report(ports, "link", "page", self.dice.uniform(0.5, 1.0), (2, 30))
        yield from self._report(ports, "link_stall", "ticket", 0.3, (30, 200))
        nodes = [self.fleet.parents[port][0] for port in ports]
        yield from self._report(self._ranks_on(nodes), "straggler", "suspect", 0.2, (60, 300))
        yield from self._report(self._jobs_on(nodes), "straggler_job", "page", 0.5, (360, 600))

    def _rail(self) -> Iterator[Line]:
        yield from self._report(self.fleet.ports[self.cause], "link", "ticket", self.dice.uniform(0.4, 0.9), (10, 240))

    def _job(self) -> Iterator[Line]:
        ranks = [rank for rank, _ in self.fleet.ranks[self.cause]]
        yield from self._report([self.cause], "straggler_job", "page", 0.6, (100, 600))
        yield from self._report(ranks, "straggler", "suspect", self.dice.uniform(0.3, 0.9), (60, 400))

    def _version(self) -> Iterator[Line]:
        gpus = self.dice.sample(self._gpus(), len(self._gpus()) // GPUS)
        yield from self._report(gpus, "xid", "page", self.dice.uniform(0.3, 0.8), (10, 900))


_ALONE: tuple[tuple[str, str], ...] = (
    *(("gpu", d) for d in ("thermal", "memory", "xid", "straggler_inferred", "sdc")),
    *(("node", d) for d in ("power", "telemetry", "host_health", "coolant")),
    *(("port", d) for d in ("link", "link_stall")),
    ("rank", "straggler"),
)
"""Kind of device and detector of independent findings."""


def independent(fleet: Fleet, seconds: float, per_node_day: float, dice: random.Random) -> Iterator[Line]:
    """Yields findings with causes of their own: a rank's cause is its GPU. 70 % suspects, 20 % tickets, 10 % pages."""
    for _ in range(_poisson(per_node_day * len(fleet.nodes) * seconds / 86_400, dice)):
        kind, detector = dice.choice(_ALONE)
        node, i = dice.choice(fleet.nodes)[5:], dice.randrange(GPUS)
        root = {"gpu": f"gpu:{node}.{i}", "node": f"node:{node}", "port": f"port:{node}.mlx5_{i}"}.get(kind, "")
        entity = root
        if kind == "rank":
            entity, _ = dice.choice(dice.choice(sorted(fleet.ranks.values())))
            root = fleet.parents[entity][2]
        level: Level = dice.choices(("suspect", "ticket", "page"), (7, 2, 1))[0]  # type: ignore[assignment]
        onset = dice.uniform(0, seconds)
        found = onset + dice.uniform(1, 300)
        yield Line(found, found + dice.lognormvariate(math.log(1200), 1.0), onset, entity, detector, level, root)


def _poisson(mean: float, dice: random.Random) -> int:
    count, left = 0, math.exp(-mean)
    product = dice.random()
    while product > left:
        count, product = count + 1, product * dice.random()
    return count
