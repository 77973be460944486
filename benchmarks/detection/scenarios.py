"""The suites by which detectors are measured: clean, raised and field, as scenarios for a seed.

clean:  no faults, all harmless events at their rate; what pages is false.
raised: faults of every kind, so many that each has at least 60 events over ten seeds; by family, so that faults of
        halls do not hide faults of one GPU, and apart, so that no node has two at the same time.
field:  everything at its published rate, as a training hall sees it.
held_out: kinds that no detector was tuned on, a suite of their own and in no figure of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from agents.sim.faults.kind import DAY, Kind
from agents.sim.kinds import CONFOUNDERS, KINDS
from agents.sim.layout import Layout
from agents.sim.scenario import Fleet, Jobs, Line, Rates, Scenario

TUNE, REPORT = range(50), range(50, 60)
"""Seeds to tune detectors on, and those that are reported next: results on tuning seeds are never quoted. Seeds 10 to
39 were meant to be reported, but were read; 40 to 49 were reported (docs/detection.md), and seeds that were read are
for tuning."""
SUITES = ("clean", "raised", "field", "held_out")
HELD_OUT = (12, 18, 27)
"""Rows of kinds of fault (`Kind.row`) that are first simulated when the detectors are frozen: a clock stuck low, a leaf
that silently loses large packets, a node's restricted coolant. They show how kinds fare that were not tuned for."""
INTERVAL = 10.0  # s; the default of [pipeline] frame
GPUS = 8  # per node
PER_RUN = 12.0
"""Expected events of a kind in a run: 120 over ten seeds, so that 60 are there although some find no free device."""
MORE: Mapping[str, float] = {
    "gpu_engine_fault": 3.0,
    "sdc": 2.0,
    "cold_plate": 2.0,
    "clock_stuck": 1.5,
    "gray_leaf": 2.0,
    "node_restriction": 2.2,
}
"""Factor for kinds of which a large part is invisible or no device's fault: that part does not count."""
FAMILIES: Mapping[str, frozenset[str]] = {
    "network": frozenset({"network"}),
    "facility": frozenset({"cooling", "power"}),
    "job": frozenset({"job"}),
    "telemetry": frozenset({"instrument", "telemetry"}),
}
"""Family of a raised run -> attributions of its kinds; the rest are `device`. What stops jobs is `outage` where it is
the network's and `fatal` where it is a device's: where no job runs for long, much of the rest would show nothing."""
STOPPING = {"device": "fatal", "network": "outage"}
NAMES = (*FAMILIES, *STOPPING.values(), "device", "slow")
_NOISE = {"missing": 0.01, "jitter": 5.0}  # 1 % of values lost, samples dated up to 5 s later: chosen, as agents do
_JOBS = Jobs(12.0)  # h; so that a day sees jobs come and go. Chosen


@dataclass(frozen=True)
class Run:
    """One scenario of a suite: `name` within it, and its size."""

    suite: str
    name: str
    nodes: int
    days: float

    @property
    def node_days(self) -> float:
        return self.nodes * self.days

    def scenario(self) -> Scenario:
        """For every seed the same; what the seed decides is drawn in the simulator."""
        unknown = {kind.name: 0.0 for kind in kinds_of("held_out")}
        alone = {"clean": Rates(0.0, 1.0, apart=False), "field": Rates(1.0, 1.0, apart=False, kinds=unknown)}
        rates = alone.get(self.suite) or _raised(self)
        lines = tuple(_slow_lines(self)) if self.name == "slow" else ()
        source = f"{self.suite}/{self.name}"
        fleet = Fleet(self.nodes, GPUS, **_NOISE)
        return Scenario(self.days * DAY, INTERVAL, None, fleet, lines, jobs=_JOBS, rates=rates, source=source)


def is_fault(kind: type[Kind]) -> bool:
    """Returns whether the fault can be found."""
    return kind not in CONFOUNDERS


def family(kind: type[Kind]) -> str:
    """Returns the raised run of a kind of fault; held-out kinds have a separate run."""
    if kind.row in HELD_OUT:
        return "held_out"
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
    return PER_RUN * MORE.get(kind.name, 1.0)


def _raised(run: Run) -> Rates:
    """Returns rates at which each kind of the family occurs as often as expected, and every other fault never."""
    layout, mine = Layout(run.nodes, GPUS), kinds_of(run.name)
    wanted = {}
    for name, kind in KINDS.items():
        if is_fault(kind):
            once = replace(kind.rate, value=1.0).of(layout) * run.days * DAY
            wanted[name] = expected(kind) / once if kind in mine and run.name != "slow" else 0.0
    return Rates(1.0, 1.0, kinds=wanted)


def _slow_lines(run: Run) -> Iterator[Line]:
    """Returns faults that take days: from the first quarter of the run to its end, each on another device."""
    mine = [kind for kind in kinds_of("slow") for _ in range(round(expected(kind)))]
    order = np.random.default_rng(len(mine)).permutation(len(mine))
    for place, number in enumerate(order.tolist()):
        yield Line(mine[number](), run.days * DAY / 4 * (place + 0.5) / len(mine), run.days * DAY)


def held_out() -> tuple[Run, ...]:
    """Returns the run of held-out kinds, if there are any."""
    return (Run("held_out", "held_out", 128, 1.0),) if kinds_of("held_out") else ()


_DAILY = ("device", "fatal", "network", "outage", "job", "telemetry")  # families for which a day is enough
SCALES: Mapping[str, tuple[tuple[Run, ...], range]] = {
    "full": (
        (
            Run("clean", "all", 256, 4.0),
            *(Run("raised", name, 128, 1.0) for name in _DAILY),
            Run("raised", "facility", 128, 4.0),
            Run("raised", "slow", 64, 8.0),
            Run("field", "all", 256, 4.0),
            *held_out(),
        ),
        REPORT,
    ),
    "small": (
        (
            Run("clean", "all", 256, 2.0),
            *(Run("raised", name, 128, 1.0) for name in _DAILY),
            Run("raised", "facility", 128, 1.5),
            Run("raised", "slow", 64, 3.0),
            Run("field", "all", 256, 1.0),
            *held_out(),
        ),
        REPORT[:2],
    ),
}
"""Runs and seeds of each scale: 10,240 clean node-days in full; in 20 minutes of two cores what `small` has."""


NAMES_OF_SCALES = (*SCALES, "certified")
_CERTIFIED = REPORT[:5]
"""Seeds of the raised and field runs of a certification: 60 expected events a kind, which the protocol asks for."""


def planned(scale: str, first: int = REPORT[0]) -> list[tuple[Run, int]]:
    """Runs and seeds of a scale, seed by seed. `certified`: clean runs of `full`, the others with sizes of `small`.

    first: the first seed, for results of a former certification.
    """
    later = first - REPORT[0]
    if scale != "certified":
        runs, seeds = SCALES[scale]
        return [(run, seed + later) for seed in seeds for run in runs]
    (full, every), (small, _) = SCALES["full"], SCALES["small"]
    clean = [run for run in full if run.suite == "clean"]
    rest = [run for run in small if run.suite != "clean"]
    return [(run, seed + later) for seed in every for run in (*clean, *(rest if seed in _CERTIFIED else ()))]
