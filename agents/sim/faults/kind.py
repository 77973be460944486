"""Kind: the contract of everything that can happen to a simulated fleet, faults and benign events alike.

A kind is a frozen dataclass. Its fields are its parameters; its class defines target, rate and duration, what telemetry
shows and what it does not. A parameter left out (None) is drawn from the seed, within `ranges`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from agents.sim.effects import Effects
from agents.sim.physics.noise import generator
from agents.sim.schedule import Job, Stop

if TYPE_CHECKING:
    from agents.sim.layout import Layout

HOUR, DAY = 3600.0, 86_400.0
MONTH, YEAR = 30.44 * DAY, 365.25 * DAY
HARMS = 0.10  # share by which a job is slowed that needs a page: Greyhound's change of the mean (Wu et al. 2024)

Detectability = Literal["hard", "soft", "invisible", "benign"]
"""hard: a logged fact; soft: visible only in statistics; invisible: not visible; benign: no fault."""
Attribution = Literal[
    "gpu", "memory", "sdc", "node", "host", "network", "cooling", "power", "job", "instrument", "telemetry"
]

_EXPOSURE = {
    "1M GPU-hours": ("gpu", 1e6 * HOUR),
    "1,000 node-days": ("node", 1000 * DAY),
    "1,000 node-months": ("node", 1000 * MONTH),
    "link-day": ("nic", DAY),
    "link-month": ("nic", MONTH),
    "leaf-month": ("leaf", MONTH),
    "rack-year": ("rack", YEAR),
    "PDU-year": ("power", YEAR),
    "CDU-year": ("coolant", YEAR),
    "CDU-month": ("coolant", MONTH),
    "1M sensor-hours": ("gpu", 1e6 * HOUR / 3),  # power, temperature and clock of each GPU
}
"""Unit of a rate -> class of device, and device seconds per unit."""


@dataclass(frozen=True, slots=True)
class Rate:
    """How often a kind occurs: `value` times per `per` (see _EXPOSURE), and the source of that number."""

    value: float
    per: str
    source: str

    def of(self, layout: Layout) -> float:
        """Returns the expected events per second in the whole fleet."""
        what, seconds = _EXPOSURE[self.per]
        return self.value * len(layout.targets[what]) / seconds


@dataclass(frozen=True, slots=True)
class Span:
    """A time that is drawn: `low` + an exponential of `mean`, or uniform from `low` to `high`; at most `high`."""

    low: float = 0.0
    mean: float | None = None
    high: float = 30 * DAY

    def draw(self, rng: np.random.Generator) -> float:
        """Seconds; one draw in any case."""
        if self.mean is None:
            return float(rng.uniform(self.low, self.high))
        return float(min(self.low + rng.exponential(self.mean), self.high))


@dataclass(frozen=True, slots=True)
class Chain:
    """A kind that may follow on the same entity: with `probability`, after a `lead` from the onset."""

    kind: str
    probability: float
    lead: Span


@dataclass(frozen=True)
class Kind(ABC):
    """One kind with its parameters. The docstring of a subclass describes what happens, in one line.

    row:        line of the table of fault kinds, or of confounders, in docs/simulator.md.
    target:     gpu, nvlink, nic, node, psu, power (PDU), coolant (loop), rack, leaf, instrument or job.
    seen, unseen: what telemetry and events show of it, and what they do not.
    severe:     the parameter that measures its severity.   effect_unit: unit of `effect`.
    loaded:     only a device that a job uses shows it.
    exclusive:  s after its onset in which no other random event may affect the same nodes.
    world_only: it happens only in drawn worlds (agents/sim/world.py), a benign one as their habits have it, unless a
                scenario names its rate.
    idle_soft:  on a device without a job it loses no work: class soft in the truth, for which a ticket is enough.
    tail:       s after its end in which it still has effects: `apply` is called in them too.
    """

    name: ClassVar[str]
    row: ClassVar[int]
    target: ClassVar[str]
    detectability: ClassVar[Detectability]
    attribution: ClassVar[Attribution]
    seen: ClassVar[str]
    unseen: ClassVar[str]
    rate: ClassVar[Rate]
    lasts: ClassVar[Span]
    signals: ClassVar[tuple[str, ...]] = ()
    ranges: ClassVar[dict[str, tuple[float, float]]] = {}  # what a parameter is drawn from
    limits: ClassVar[dict[str, tuple[float, float]]] = {}  # what it may be set to
    choices: ClassVar[dict[str, tuple[str, ...]]] = {}  # values a parameter is drawn from; repeats are weights
    severe: ClassVar[str | None] = None
    effect_unit: ClassVar[str | None] = None
    loaded: ClassVar[bool] = False
    tail: ClassVar[float] = 0.0
    exclusive: ClassVar[float] = float("inf")
    world_only: ClassVar[bool] = False
    idle_soft: ClassVar[bool] = False
    chain: ClassVar[Chain | None] = None

    def drawn(self, rng: np.random.Generator) -> Self:
        """Returns the kind with every open parameter drawn; the number of draws does not depend on given parameters."""
        draws: dict[str, object] = {n: round(float(rng.uniform(*bounds)), 4) for n, bounds in self.ranges.items()}
        draws |= {n: words[int(rng.integers(len(words)))] for n, words in self.choices.items()}
        return replace(self, **{n: v for n, v in draws.items() if getattr(self, n) is None})

    def candidates(self, layout: Layout) -> Sequence[str]:
        """Returns the entities that it may affect when the scenario names none."""
        places = layout.targets[self.target]
        if self.target == "leaf" and not layout.port_used.all():
            return [places[leaf] for leaf in np.unique(layout.leaf_of_port[layout.port_used]).tolist()]
        if self.target == "nic" and not layout.port_used.all():
            busy = layout.busy_count("nic") if self.loaded else len(places)
            return [name for name, used in zip(places[:busy], layout.port_used.tolist(), strict=False) if used]
        return places[: layout.busy_count(self.target)] if self.loaded else places

    @classmethod
    def draw_duration(cls, layout: Layout, rng: np.random.Generator) -> float:
        """Returns a drawn duration (s)."""
        return cls.lasts.draw(rng)

    @classmethod
    def draw_random(cls, layout: Layout, rng: np.random.Generator) -> tuple[Kind, float]:
        """Returns a random fault of this kind and its duration (s); parameters that depend on each other are drawn
        here."""
        return cls(), cls.draw_duration(layout, rng)

    @abstractmethod
    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes what the fault does within the block into the channels."""

    def effect(self) -> float | None:
        """Returns the size of its full effect in `effect_unit`, a share or K, mostly its `severe` parameter; None if it
        has no size."""
        return float(getattr(self, self.severe)) if self.effect_unit and self.severe else None

    def detectable_from(self, fault: Fault) -> float:
        """Returns the second from which it is detectable: later than the onset if it grows slowly."""
        return fault.onset

    def truth_class(self, fault: Fault, layout: Layout) -> Detectability:
        """Returns its class in the truth: that of the kind, unless its parameters change it."""
        return self.detectability

    def job_class(self, job: Job) -> Detectability:
        """Returns the class in the truth of a fault of a job."""
        return self.detectability

    def attributed_part(self) -> Attribution:
        """Returns the part of the site that it is attributed to, unless its parameters change it."""
        return self.attribution

    @classmethod
    def exists(cls, layout: Layout) -> bool:
        """Returns whether the site has what it affects: an air-cooled hall has no coolant loops."""
        return bool(layout.targets.get(cls.target, ("job",)))

    @classmethod
    def suits(cls, job: Job) -> bool:
        """Returns whether it can happen to a job."""
        return job.trains

    def evidence(self, fault: Fault, layout: Layout) -> tuple[str, ...]:
        """Returns the signals and events of which at least one must be read for it to be visible."""
        return self.signals

    def faulty_entities(self, fault: Fault, layout: Layout) -> tuple[str, ...]:
        """Returns all faulty entities."""
        return (fault.entity,) if self.detectability != "benign" else ()

    def job_death_time(self, fault: Fault) -> float | None:
        """Returns the second at which the jobs on it have died; None: they survive."""
        return None

    def job_stop(self, fault: Fault, layout: Layout) -> Stop | None:
        """Returns the stop of jobs that it causes: at their death, with its nodes out of service until its end."""
        death = self.job_death_time(fault)
        if death is None:
            return None
        nodes = sorted(set(layout.nodes_below(self.target, fault.device).tolist()))
        return Stop(death, tuple(nodes), fault.end - death)

    def severity(self) -> float | None:
        """Returns 0 to 1: position of its `severe` parameter within the range."""
        if self.severe is None:
            return None
        low, high = self.ranges[self.severe]
        return min(max((float(getattr(self, self.severe)) - low) / (high - low), 0.0), 1.0)

    def parameters(self) -> dict[str, object]:
        """Returns its parameters for truth.jsonl."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class Fault:
    """A kind that affects one entity in [onset, end) seconds. `device`: its number in fleet order."""

    number: int
    kind: Kind
    entity: str
    device: int
    onset: float
    end: float
    rng_key: tuple[int, ...]

    def rng(self, *key: int) -> np.random.Generator:
        """Returns a generator of this fault: equal keys give equal draws in every block."""
        return generator(*self.rng_key, *key)

    def flap_times(self, every: float, length: float) -> NDArray[np.float64]:
        """Returns (n, 2) begin and end of each flap: the first within 20 s of onset, the next 0.5 to 1.5 x `every`
        later."""
        rng = self.rng()
        n = int((self.end - self.onset) / (0.5 * every)) + 1
        first = self.onset + rng.uniform(5.0, 20.0)
        begins = first + np.concatenate([[0.0], np.cumsum(rng.uniform(0.5, 1.5, n) * every)])
        ends = begins + rng.uniform(0.5, 1.5, len(begins)) * min(length, 0.3 * every)
        return np.stack([begins, ends], axis=1)[ends < self.end]
