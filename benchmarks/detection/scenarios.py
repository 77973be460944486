"""The suites by which detectors are measured: clean and raised runs in worlds of different structure.

clean:  no faults, all harmless events at their rate; what pages is false.
raised: faults of every kind, so many that each has at least 30 events over all worlds; by family, so that faults of
        halls do not hide faults of one GPU, and apart, so that no node has two at the same time.
hookless: what makes single ranks slow, in the same worlds but with no job that reports its ranks' times.

A world is a structure drawn by agents/sim/world.py: cooling, fabric, workloads, noise, instruments. Detectors are
developed on one half of the structures; reported are worlds of the other half, which no work on detectors has seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from agents.sim.faults.kind import DAY, Kind
from agents.sim.kinds import CONFOUNDERS, KINDS
from agents.sim.layout import Layout
from agents.sim.scenario import Fleet, Line, Rates, Scenario
from agents.sim.world import World, draw_world, worlds

SUITES = ("clean", "raised", "hookless")
TRAIN, REPORT = "train", "report"
"""Halves of the structures: the first for work on detectors, the other for figures."""
FIRST_REPORTED = 43
"""Worlds of the reporting half that were reported before: they were read, so the next certification skips them."""
INTERVAL = 10.0  # s, of scenarios outside worlds; the default of [pipeline] frame
SLOW_INTERVAL = 60.0  # s, of runs of faults that take days: nothing in them needs more samples
GPUS = 8  # per node
PER_RUN = 3.0
"""Expected events of a kind in a run of its family. With WORLDS runs each kind that occurs in every world has
60, so that 30 are left where a world has no such device or no free one."""
SLOW_PER_RUN = 10.0
"""The same for runs of faults that take days: there are fewer."""
MORE: Mapping[str, float] = {
    "gpu_engine_fault": 3.0,
    "sdc": 2.0,
    "cold_plate": 7.0,
    "clock_stuck": 2.0,
    "gray_leaf": 4.0,
    "node_restriction": 2.2,
    "host_contention": 3.0,
    "recirculation": 8.0,
    "facility_water": 4.0,
    "data_stall": 3.0,
    "congestion": 1.5,
    "pause_storm": 1.5,
    "link_flap": 1.5,
    "slow_collectives": 1.5,
}
"""Factor for kinds of which a large part does not count (invisible, too short to be found) or finds no free place."""
FAMILIES: Mapping[str, frozenset[str]] = {
    "network": frozenset({"network"}),
    "facility": frozenset({"cooling"}),
    "power": frozenset({"power"}),
    "job": frozenset({"job"}),
    "telemetry": frozenset({"instrument", "telemetry"}),
}
"""Family of a raised run -> attributions of its kinds; the rest are `device`. What stops jobs is `outage` where it is
the network's and `fatal` where it is a device's: where no job runs for long, much of the rest would show nothing."""
STOPPING = {"device": "fatal", "network": "outage"}
SLOW_RANKS = ("straggler", "clock_stuck", "host_contention")
"""Kinds of fault of the hookless suite: a slow GPU, a low clock, a slow host."""
NAMES = (*FAMILIES, *STOPPING.values(), "device", "slow")


@dataclass(frozen=True)
class Run:
    """One scenario of a suite: `name` within it, and its size. world: number of its structure."""

    suite: str
    name: str
    nodes: int
    days: float
    world: int

    @property
    def node_days(self) -> float:
        return self.nodes * self.days

    def structure(self) -> World:
        """Returns its world."""
        world = _drawn(self.world)
        return replace(world, work=replace(world.work, hooked=0.0)) if self.suite == "hookless" else world

    def scenario(self) -> Scenario:
        """For every seed the same; what the seed decides is drawn in the simulator."""
        rates = Rates(0.0, 1.0, apart=False) if self.suite == "clean" else _raised(self)
        lines = tuple(_slow_lines(self)) if self.name == "slow" else ()
        source = f"{self.suite}/{self.name} in world {self.world}"
        made = Scenario(self.days * DAY, INTERVAL, None, Fleet(self.nodes, GPUS), lines, rates=rates, source=source)
        made = made.in_world(self.structure())
        return replace(made, interval=max(made.interval, SLOW_INTERVAL)) if self.name == "slow" else made


@cache
def _drawn(number: int) -> World:
    return draw_world(number)


def is_fault(kind: type[Kind]) -> bool:
    """Returns whether the fault can be found."""
    return kind not in CONFOUNDERS


def family(kind: type[Kind]) -> str:
    """Returns the raised run of a kind of fault."""
    if max(kind.lasts.low, kind.lasts.mean or 0.0) >= DAY:
        return "slow"
    named = next((name for name, attributions in FAMILIES.items() if kind.attribution in attributions), "device")
    stops_jobs = kind.job_stop is not Kind.job_stop or kind.job_death_time is not Kind.job_death_time
    return STOPPING.get(named, named) if stops_jobs else named


def kinds_of(name: str) -> list[type[Kind]]:
    """Returns the kinds of fault of a family, by name."""
    return [kind for _, kind in sorted(KINDS.items()) if is_fault(kind) and family(kind) == name]


def expected(kind: type[Kind]) -> float:
    """Returns the number of events of a kind for which a raised run is made."""
    return (SLOW_PER_RUN if family(kind) == "slow" else PER_RUN) * MORE.get(kind.name, 1.0)


def _raised(run: Run) -> Rates:
    """Returns rates at which each kind of the family occurs as often as expected, and every other fault never."""
    layout = Layout(run.nodes, GPUS, run.structure())
    mine = [KINDS[name] for name in SLOW_RANKS] if run.suite == "hookless" else kinds_of(run.name)
    wanted = {}
    for name, kind in KINDS.items():
        if is_fault(kind):
            once = replace(kind.rate, value=1.0).of(layout) * run.days * DAY
            wanted[name] = expected(kind) / once if kind in mine and once and run.name != "slow" else 0.0
    return Rates(1.0, 1.0, kinds=wanted)


def _slow_lines(run: Run) -> Iterator[Line]:
    """Returns faults that take days: from the first quarter of the run to its end, each on another device."""
    mine = [kind for kind in kinds_of("slow") for _ in range(round(expected(kind)))]
    order = np.random.default_rng(len(mine)).permutation(len(mine))
    for place, number in enumerate(order.tolist()):
        yield Line(mine[number](), run.days * DAY / 4 * (place + 0.5) / len(mine), run.days * DAY)


_DAILY = tuple(name for name in NAMES if name != "slow")  # families for which half a day is enough
_HALL = ("facility", "power")  # families that need several coolant loops and PDUs
WORLDS, SLOW_WORLDS = 20, 6
TRAINED = 8
"""Worlds of the training half beside the reported ones: enough for a mean and a worst world. Chosen."""


def _size(name: str, days: float) -> tuple[int, float]:
    """Returns nodes and days of a run of a family. Faults of a hall exclude each other, and last for hours."""
    return (128 if name in _HALL else 64), (2 * days if name == "facility" else days)


def _in_order(worlds: list[int], clean: tuple[int, float], days: float, slow: int) -> Iterator[tuple[Run, int]]:
    """Yields all runs in some worlds, the most valuable first: clean and raised world by world, then without hooks,
    then faults that take days. clean: nodes and days of a clean run; days: of a raised one; slow: worlds with a slow
    run."""
    for world in worlds:
        yield Run("clean", "all", *clean, world), world
        yield from ((Run("raised", name, *_size(name, days), world), world) for name in _DAILY)
    yield from ((Run("hookless", "all", 64, days, world), world) for world in worlds)
    yield from ((Run("raised", "slow", 64, 3.0, world), world) for world in worlds[:slow])


def numbers(half: str, count: int, first: int = 0) -> list[int]:
    """Returns the numbers of `count` worlds of a half, without its first ones."""
    return [world.number for world in worlds(half, first + count)[first:]]


NAMES_OF_SCALES = ("certified", "training", "small")


def planned(scale: str, first: int = FIRST_REPORTED) -> list[tuple[Run, int]]:
    """Returns runs and seeds of a scale, those that a figure needs most first.

    certified: 20,480 clean node-days in 20 reporting worlds, faults in the same; then the runs of `training`.
    training:  8 training worlds.   small: two of them, for 20 minutes of two cores.
    first:     the first reporting world, of a former certification to write its page again.
    """
    if scale == "small":
        return [*_in_order(numbers(TRAIN, 2), (256, 0.5), 0.5, 1)]
    training = [*_in_order(numbers(TRAIN, TRAINED), (512, 1.0), 0.5, 2)]
    if scale == "training":
        return training
    later = numbers(REPORT, WORLDS, first)
    return [*_in_order(later, (1024, 1.0), 0.5, SLOW_WORLDS), *training]
