"""When things break by themselves: published rates, made uneven as real fleets are, and with room between them.

A node's hazard is the rate x Gamma frailty (mean 1, shape 0.2: the worst 5 % of the nodes hold 44 % of the events) x
infant mortality (Weibull, shape 0.7: three times the rate at first, once after 30 days) x 2^((T - T0) / 10 K). What
strikes racks, loops, units, leaves and jobs is Poisson on them alone.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from agents.sim.bounds import MOST_EVENTS
from agents.sim.faults.kind import Kind, Rate
from agents.sim.kinds import KINDS
from agents.sim.layout import Layout
from agents.sim.physics.noise import generator
from agents.sim.scenario import Line, Scenario
from pipeline.errors import UsageError

_FRAILTY, _INFANT, _INFANT_DAYS, _INFANT_MOST = 0.2, 0.7, 30.0, 3.0
_OLDEST_DAYS, _TEMPERATURE_SD = 730.0, 2.0  # of a node; K between nodes. Chosen
APART = 1800.0  # s between two events on the same nodes: longer than any detector's hold; chosen
_TRIES = 30
_SHARED = ("coolant", "power", "rack")  # places of the site that many nodes hang on
_KEY = 80
DRAWN = (_KEY, 2)  # key of the generators of what strikes by itself: its own, so that no [[fault]] changes it


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What strikes by itself, in order of onset, and how many more found no free place."""

    lines: tuple[Line, ...]
    dropped: int


def draw(scenario: Scenario, layout: Layout, seed: int) -> Arrivals:
    """All that strikes by itself within the scenario. Raises UsageError if that is more than can be planned."""
    expected = {name: _rate(scenario, kind).of(layout) * scenario.duration for name, kind in sorted(KINDS.items())}
    if sum(expected.values()) > MOST_EVENTS:
        raise _too_many(scenario, expected)
    found: list[Line] = []
    places = _Places(layout, generator(seed, _KEY), scenario.rates.apart)
    for name, number in expected.items():
        found += _of_kind(KINDS[name], number, scenario.duration, places, generator(seed, _KEY, 1, _number(name)))
    order = sorted(found, key=lambda line: (line.onset, line.kind.name, line.entity or ""))
    return Arrivals(tuple(order), places.dropped)


def _factor(kind: type[Kind]) -> str:
    return "confounders" if kind.detectability == "benign" else "faults"


def _rate(scenario: Scenario, kind: type[Kind]) -> Rate:
    """The rate that a scenario gives a kind."""
    rates = scenario.rates
    return replace(kind.rate, value=rates.kinds.get(kind.name, kind.rate.value) * getattr(rates, _factor(kind)))


def _too_many(scenario: Scenario, expected: dict[str, float]) -> UsageError:
    """Names the key that most of the events come from."""
    worst, rates = max(expected, key=lambda name: expected[name]), scenario.rates
    factor = _factor(KINDS[worst])
    where = f"{factor} = {getattr(rates, factor):g}"
    if worst in rates.kinds and getattr(rates, factor) <= 1:
        where = f"kinds.{worst} = {rates.kinds[worst]:g}"
    return UsageError(
        f"{scenario.source}: [rates] {where}: {sum(expected.values()):.3g} events in {scenario.duration:g} s, "
        f"{expected[worst]:.3g} of them {worst}; wanted at most {MOST_EVENTS:,} in all: a lower rate, or less time"
    )


def _number(name: str) -> int:
    """A number of a kind that other kinds do not change: but for room taken under `apart`, new ones move nothing."""
    return zlib.crc32(name.encode())


def _of_kind(
    kind: type[Kind], expected: float, duration: float, places: _Places, rng: np.random.Generator
) -> Iterator[Line]:
    """Events of one kind, and what follows from each of them."""
    for _ in range(int(rng.poisson(expected))):
        born, span = kind.arriving(places.layout, rng)
        spot = places.draw(kind, span, duration, rng)
        if spot is None:
            continue
        entity, onset = spot
        yield Line(born, onset, onset + span, entity)
        chain = kind.chain
        if chain and rng.random() < chain.probability:
            later = onset + chain.lead.draw(rng)
            if later < duration:
                after, length = KINDS[chain.kind].arriving(places.layout, rng)
                yield Line(after, later, later + length, entity)


@dataclass(slots=True)
class _Taken:
    """Times at which something strikes a node: apart from each other, in order."""

    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def free(self, begin: float, end: float) -> bool:
        """Whether nothing lies within half an hour of [begin, end)."""
        at = bisect_right(self.begins, begin)
        before, after = self.ends[at - 1 : at], self.begins[at : at + 1]
        return all(e <= begin - APART for e in before) and all(b >= end + APART for b in after)

    def take(self, begin: float, end: float) -> None:
        at = bisect_right(self.begins, begin)
        self.begins.insert(at, begin)
        self.ends.insert(at, end)


class _Places:
    """Where things strike: weights of the nodes, and what is struck already.

    Of each node there are two lists: faults and what strikes the node alone; and what strikes a loop, PDU or row
    that it shares with others. A benign event of such a place needs room on the second only: where much breaks, no
    loop has all its nodes free at once.
    """

    def __init__(self, layout: Layout, rng: np.random.Generator, apart: bool) -> None:
        self.layout, self.apart = layout, apart
        frailty = rng.gamma(_FRAILTY, 1 / _FRAILTY, layout.nodes)
        age = rng.uniform(0.1, _OLDEST_DAYS, layout.nodes) / _INFANT_DAYS
        infant = np.clip(age ** (_INFANT - 1), 1.0, _INFANT_MOST)
        warmth = 2.0 ** (rng.normal(0, _TEMPERATURE_SD, layout.nodes) / 10)
        hazard = frailty * infant * warmth
        self.hazard: NDArray[np.float64] = hazard / hazard.mean()
        self._cumulative = np.cumsum(self.hazard)
        self.dropped = 0
        self._nodes = cache(self._below)
        self._own = [_Taken() for _ in range(layout.nodes)]
        self._shared = [_Taken() for _ in range(layout.nodes)]

    def draw(
        self, kind: type[Kind], span: float, duration: float, rng: np.random.Generator
    ) -> tuple[str | None, float] | None:
        """(entity, onset), the entity None where a job is meant; None if all tries met something that is struck."""
        held, names = min(span, kind.settles), () if kind.strikes == "job" else kind().candidates(self.layout)
        for _ in range(_TRIES):
            onset = float(rng.uniform(0, duration))
            if kind.strikes == "job":
                return None, onset
            device = self._pick(kind.strikes, len(names), rng)
            taken = self._taken(kind, device) if self.apart else []
            if all(one.free(onset, onset + held) for one in taken):
                for one in taken:
                    one.take(onset, onset + held)
                return names[device], onset
        self.dropped += 1
        return None

    def _taken(self, kind: type[Kind], device: int) -> Sequence[_Taken]:
        """Where an event needs room."""
        nodes = self._nodes(kind.strikes, device)
        shared = [self._shared[node] for node in nodes] if kind.strikes in _SHARED else []
        alone = kind.strikes in _SHARED and kind.detectability == "benign"
        return shared if alone else [*shared, *(self._own[node] for node in nodes)]

    def _pick(self, strikes: str, count: int, rng: np.random.Generator) -> int:
        """A place, by its node's hazard if it belongs to one node."""
        if strikes not in ("gpu", "nvlink", "nic", "node"):
            return int(rng.integers(count))
        width = 1 if strikes == "node" else self.layout.gpus_per_node
        weights = self._cumulative[: -(-count // width)]
        node = int(np.searchsorted(weights, rng.random() * weights[-1]))
        return min(node * width + int(rng.integers(width)), count - 1)

    def _below(self, strikes: str, device: int) -> list[int]:
        """Nodes that a place reaches. Warm air and leaks strike a rack: they are given its whole row."""
        places = self.layout.row_of(device).tolist() if strikes == "rack" else [device]
        return [node for place in places for node in self.layout.nodes_below(strikes, place).tolist()]
