"""A scenario: size of the fleet, duration and faults; and the built-in one, `demo`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from agents.sim.faults.corruption import SilentDataCorruption
from agents.sim.faults.facility import CoolantLoss
from agents.sim.faults.kind import Kind
from agents.sim.faults.link import LinkDegradation
from agents.sim.faults.slow import Straggler
from agents.sim.kinds import KINDS
from agents.sim.physics.noise import generator
from agents.sim.world import DEFAULT, World
from pipeline.model.records import from_iso

FAULTS = 5  # key of the generators that draw faults
_LIVE_KINDS: Mapping[str, Kind] = {
    "sdc": SilentDataCorruption(probability=0.6),  # visible in minutes, while most real defects take days; chosen
    "coolant": CoolantLoss(ramp=300.0),  # a pump that loses speed: GPUs warm for minutes, which can be watched; chosen
}


@dataclass(frozen=True)
class Fleet:
    """[fleet]: its size. `missing` is the share of rows whose floating-point values are lost."""

    nodes: int = 16
    gpus_per_node: int = 8
    missing: float = 0.0
    jitter: float = 0.0  # s, maximum added to the time of a sample; drawn for every sample


@dataclass(frozen=True)
class Jobs:
    """[jobs]: mean duration of a job; 0: two jobs that never end."""

    mean_hours: float = 0.0


@dataclass(frozen=True)
class Rates:
    """[rates]: random faults. Factors on the published rates of faults and of benign events; 0: none.

    kinds: [rates.kinds] rates of single kinds instead of the published ones, in the same unit.
    apart: half an hour between two random events on the same node. Exceptions: events on jobs (apart only from others
    on that job); benign events of whole loops, PDUs and racks (apart only from others on loops, PDUs and racks);
    consequences of another fault; and what a power cap affects beyond its PDU.
    """

    faults: float = 0.0
    confounders: float = 0.0
    apart: bool = True
    kinds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """One [[fault]]: a kind with its parameters, in [onset, end) seconds after the start; entity drawn if absent."""

    kind: Kind
    onset: float
    end: float
    entity: str | None = None


@dataclass(frozen=True)
class Live:
    """[live]: faults after `duration`, when the fleet continues in real time: one every `every` seconds."""

    every: float = 0.0  # 0: nothing
    hours: float = 168.0  # for a week; then no more faults


@dataclass(frozen=True, repr=False)
class Scenario:
    """The whole file. `start` in UTC microseconds; None: 2026-01-01, or chosen so that a stream fits the clock.

    world: [world] number; None: the default world. Without a world its repr has none: it is the key of stored results.
    """

    duration: float
    interval: float
    start: int | None = None
    fleet: Fleet = field(default_factory=Fleet)
    faults: tuple[Line, ...] = ()
    live: Live = field(default_factory=Live)
    source: str = "demo"
    jobs: Jobs = field(default_factory=Jobs)
    rates: Rates = field(default_factory=Rates)
    world: World | None = None

    def __repr__(self) -> str:
        shown = (f.name for f in fields(self) if f.name != "world" or self.world is not None)
        return f"Scenario({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def in_world(self, world: World) -> Scenario:
        """Returns the scenario in a world, with its interval, missing values, jitter and duration of jobs."""
        fleet = replace(self.fleet, missing=world.instruments.missing, jitter=world.instruments.jitter)
        return replace(self, interval=world.interval, fleet=fleet, jobs=Jobs(world.work.hours), world=world)

    @property
    def ticks(self) -> int:
        """Number of samples of each device; the first at 0, the last before `duration`."""
        return max(1, int(round(self.duration / self.interval, 6)))


DEFAULT_START = from_iso("2026-01-01T00:00:00Z")


def demo() -> Scenario:
    """Returns the demo: 64 nodes for 6 h, four kinds of faults in the last 90 minutes, two of them ended; then live."""
    faults = (
        Line(CoolantLoss(flow=0.35), 16_500.0, 17_700.0),
        Line(LinkDegradation(), 17_100.0, 18_600.0),
        Line(SilentDataCorruption(probability=0.7), 18_000.0, 64_800.0),
        Line(Straggler(slowdown=0.25), 19_200.0, 24_000.0),
        Line(LinkDegradation(), 20_400.0, 23_400.0),
    )
    world = replace(DEFAULT, instruments=replace(DEFAULT.instruments, margins=True))  # as drivers of H100 report them
    return Scenario(21_600.0, 10.0, None, Fleet(64, 8), faults, Live(every=150.0), world=world)


def live_lines(scenario: Scenario, seed: int) -> list[Line]:
    """Returns one fault every `every` seconds (x 0.8 to 1.2), each 5 to 12 min long; every eighth on a coolant loop."""
    if scenario.live.every <= 0:
        return []
    rng, names = generator(seed, FAULTS, 0, 1), ("link_degradation", "straggler", "sdc")
    lines: list[Line] = []
    time, end = scenario.duration + 15.0, scenario.duration + scenario.live.hours * 3600
    while time < end:
        name = "coolant" if len(lines) % 8 == 7 else names[len(lines) % 3]
        kind = _LIVE_KINDS.get(name) or KINDS[name]()
        lines.append(Line(kind, time, time + float(rng.uniform(300.0, 720.0))))
        time += scenario.live.every * float(rng.uniform(0.8, 1.2))
    return lines
