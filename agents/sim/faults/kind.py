"""Kind: the contract of everything that can happen to a simulated fleet, faults and benign events alike.

A kind is a frozen dataclass: its fields are its parameters, its class says what it strikes, how often, what can be
seen of it and what cannot. A parameter left out (None) is drawn from the seed, within `ranges`.
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
from agents.sim.schedule import Stop

if TYPE_CHECKING:
    from agents.sim.layout import Layout

HOUR, DAY = 3600.0, 86_400.0
MONTH, YEAR = 30.44 * DAY, 365.25 * DAY

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
"""Unit of a rate -> of what in the fleet, and the seconds that are one of it."""


@dataclass(frozen=True, slots=True)
class Rate:
    """How often a kind strikes: `value` times in `per` (see _EXPOSURE), and who says so."""

    value: float
    per: str
    source: str

    def of(self, layout: Layout) -> float:
        """Expected events per second in the whole fleet."""
        what, seconds = _EXPOSURE[self.per]
        return self.value * len(layout.places[what]) / seconds


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
    """One kind with its parameters. Its docstring says what happens, in one line.

    row:      line of the table of fault kinds, or of confounders, that docs/simulator.md shows.
    strikes:  gpu, nic, node, power (PDU), coolant (loop), rack, leaf or job.
    seen, unseen: what telemetry and events show of it, and what they cannot.
    severe:   the parameter that says how bad it is.   effect_unit: of `effect`; see `effect`.
    loaded:   only a device that a job uses shows anything.
    settles:  s after its onset from which on other things may strike the same nodes by themselves.
    lingers:  s after its end in which it still has effects: `act` is called for them too.
    """

    name: ClassVar[str]
    row: ClassVar[int]
    strikes: ClassVar[str]
    detectability: ClassVar[Detectability]
    attribution: ClassVar[Attribution]
    seen: ClassVar[str]
    unseen: ClassVar[str]
    rate: ClassVar[Rate]
    lasts: ClassVar[Span]
    signals: ClassVar[tuple[str, ...]] = ()
    ranges: ClassVar[dict[str, tuple[float, float]]] = {}  # what a parameter is drawn from
    limits: ClassVar[dict[str, tuple[float, float]]] = {}  # what it may be set to
    choices: ClassVar[dict[str, tuple[str, ...]]] = {}  # words a parameter is drawn from, each as often as it stands
    severe: ClassVar[str | None] = None
    effect_unit: ClassVar[str | None] = None
    loaded: ClassVar[bool] = False
    lingers: ClassVar[float] = 0.0
    settles: ClassVar[float] = float("inf")
    chain: ClassVar[Chain | None] = None

    def drawn(self, rng: np.random.Generator) -> Self:
        """The kind with every open parameter drawn; the number of draws does not depend on given parameters."""
        draws: dict[str, object] = {n: round(float(rng.uniform(*bounds)), 4) for n, bounds in self.ranges.items()}
        draws |= {n: words[int(rng.integers(len(words)))] for n, words in self.choices.items()}
        return replace(self, **{n: v for n, v in draws.items() if getattr(self, n) is None})

    def candidates(self, layout: Layout) -> Sequence[str]:
        """Entities that it may strike when the scenario names none."""
        places = layout.places[self.strikes]
        return places[: layout.busy_count(self.strikes)] if self.loaded else places

    @classmethod
    def lasting(cls, layout: Layout, rng: np.random.Generator) -> float:
        """Seconds that one of this kind lasts, drawn."""
        return cls.lasts.draw(rng)

    @classmethod
    def arriving(cls, layout: Layout, rng: np.random.Generator) -> tuple[Kind, float]:
        """One that comes by itself, and the seconds that it lasts; what they depend on together is drawn here."""
        return cls(), cls.lasting(layout, rng)

    @abstractmethod
    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes what the fault does within the block into the channels."""

    def effect(self) -> float | None:
        """Size of what it does to `effect_unit`, a share or K, when fully grown: mostly the parameter that says how bad
        it is; None: it has no size."""
        return float(getattr(self, self.severe)) if self.effect_unit and self.severe else None

    def detectable(self, fault: Fault) -> float:
        """Second from which anything can be seen at all: later than the onset where it grows slowly."""
        return fault.onset

    def verdict(self, fault: Fault) -> Detectability:
        """How far this one can be seen: as its class says, unless its parameters say otherwise."""
        return self.detectability

    def blames(self) -> Attribution:
        """On which part of the site this one falls: as its class says, unless its parameters say otherwise."""
        return self.attribution

    def guilty(self, fault: Fault, layout: Layout) -> tuple[str, ...]:
        """All entities to blame."""
        return (fault.entity,) if self.detectability != "benign" else ()

    def job_death(self, fault: Fault) -> float | None:
        """Returns the second at which the jobs on it have died; None: they survive."""
        return None

    def stops(self, fault: Fault, layout: Layout) -> Stop | None:
        """Returns the stop of jobs that it causes: at their death, with its nodes out of service until its end."""
        death = self.job_death(fault)
        if death is None:
            return None
        nodes = sorted(set(layout.nodes_below(self.strikes, fault.device).tolist()))
        return Stop(death, tuple(nodes), fault.end - death)

    def severity(self) -> float | None:
        """0 to 1: where its worst parameter lies within its range."""
        if self.severe is None:
            return None
        low, high = self.ranges[self.severe]
        return min(max((float(getattr(self, self.severe)) - low) / (high - low), 0.0), 1.0)

    def parameters(self) -> dict[str, object]:
        """For truth.jsonl."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class Fault:
    """A kind that strikes one entity in [onset, end) seconds. `device` is its place in the fleet's order."""

    number: int
    kind: Kind
    entity: str
    device: int
    onset: float
    end: float
    rng_key: tuple[int, ...]

    def rng(self, *key: int) -> np.random.Generator:
        """A generator of the fault's own: equal keys give equal draws in every block."""
        return generator(*self.rng_key, *key)

    def moments(self, every: float, length: float) -> NDArray[np.float64]:
        """(n, 2) begin and end of each flap: the first within 20 s of onset, the next 0.5 to 1.5 x `every` later."""
        rng = self.rng()
        n = int((self.end - self.onset) / (0.5 * every)) + 1
        first = self.onset + rng.uniform(5.0, 20.0)
        begins = first + np.concatenate([[0.0], np.cumsum(rng.uniform(0.5, 1.5, n) * every)])
        ends = begins + rng.uniform(0.5, 1.5, len(begins)) * min(length, 0.3 * every)
        return np.stack([begins, ends], axis=1)[ends < self.end]
