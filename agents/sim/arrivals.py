"""When things break by themselves: published rates, made uneven as real fleets are.

A node's hazard is the rate x Gamma frailty (mean 1, shape 0.2: the worst 5 % of the nodes hold 44 % of the events) x
infant mortality (Weibull, shape 0.7: three times the rate at first, once after 30 days) x 2^((T - T0) / 10 K). What
strikes racks, loops, units, leaves and jobs is Poisson on them alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from agents.sim.faults.kind import Kind, Rate
from agents.sim.kinds import KINDS
from agents.sim.layout import Layout
from agents.sim.physics.noise import generator
from agents.sim.scenario import Line, Scenario

_FRAILTY, _INFANT, _INFANT_DAYS, _INFANT_MOST = 0.2, 0.7, 30.0, 3.0
_OLDEST_DAYS, _TEMPERATURE_SD = 730.0, 2.0  # of a node; K between nodes. Chosen
APART = 1800.0  # s between two events on the same nodes: longer than any detector's hold; chosen
_TRIES = 30
_KEY = 80


def lines(scenario: Scenario, layout: Layout, seed: int) -> list[Line]:
    """All that strikes by itself within the scenario, in order of onset."""
    found: list[Line] = []
    places = _Places(layout, generator(seed, _KEY), scenario.rates.apart)
    for name, kind in sorted(KINDS.items()):
        rates = scenario.rates
        scale = rates.confounders if kind.detectability == "benign" else rates.faults
        rate = rates.kinds.get(name)
        published = kind.rate if rate is None else replace(kind.rate, value=rate)
        found += _of_kind(kind, published, scale, scenario.duration, places, generator(seed, _KEY, 1, _number(name)))
    return sorted(found, key=lambda line: (line.onset, line.kind.name, line.entity or ""))


def _number(name: str) -> int:
    """A number of a kind that other kinds do not change: a new kind leaves the faults of a seed as they were."""
    return zlib.crc32(name.encode())


def _of_kind(
    kind: type[Kind], rate: Rate, scale: float, duration: float, places: _Places, rng: np.random.Generator
) -> Iterator[Line]:
    """Events of one kind, and what follows from each of them."""
    expected = rate.of(places.layout) * scale * duration
    for _ in range(int(rng.poisson(expected))):
        span = kind.lasting(places.layout, rng)
        spot = places.draw(kind, span, duration, rng)
        if spot is None:
            continue
        entity, onset = spot
        yield Line(kind(), onset, onset + span, entity)
        chain = kind.chain
        if chain and rng.random() < chain.probability:
            later, after = onset + chain.lead.draw(rng), KINDS[chain.kind]
            if later < duration:
                yield Line(after(), later, later + after.lasting(places.layout, rng), entity)


class _Places:
    """Where things strike: weights of the nodes, and what is struck already."""

    def __init__(self, layout: Layout, rng: np.random.Generator, apart: bool) -> None:
        self.layout, self.apart = layout, apart
        frailty = rng.gamma(_FRAILTY, 1 / _FRAILTY, layout.nodes)
        age = rng.uniform(0.1, _OLDEST_DAYS, layout.nodes) / _INFANT_DAYS
        infant = np.clip(age ** (_INFANT - 1), 1.0, _INFANT_MOST)
        warmth = 2.0 ** (rng.normal(0, _TEMPERATURE_SD, layout.nodes) / 10)
        hazard = frailty * infant * warmth
        self.hazard: NDArray[np.float64] = hazard / hazard.mean()
        self._struck: dict[int, list[tuple[float, float]]] = {}

    def draw(
        self, kind: type[Kind], span: float, duration: float, rng: np.random.Generator
    ) -> tuple[str | None, float] | None:
        """(entity, onset), the entity None where a job is meant; None if all tries met something that is struck."""
        held = min(span, kind.settles)
        for _ in range(_TRIES):
            onset = float(rng.uniform(0, duration))
            if kind.strikes == "job":
                return None, onset
            names = kind().candidates(self.layout)
            device = self._pick(kind.strikes, len(names), rng)
            nodes = self.layout.nodes_below(kind.strikes, device).tolist()
            if not self.apart or self._free(nodes, onset - APART, onset + held + APART):
                for node in nodes:
                    self._struck.setdefault(node, []).append((onset, onset + held))
                return names[device], onset
        return None

    def _pick(self, strikes: str, count: int, rng: np.random.Generator) -> int:
        """A place, by its node's hazard if it belongs to one node."""
        if strikes not in ("gpu", "nvlink", "nic", "node"):
            return int(rng.integers(count))
        width = 1 if strikes == "node" else self.layout.gpus_per_node
        weights = self.hazard[: -(-count // width)]
        node = int(np.searchsorted(np.cumsum(weights), rng.random() * weights.sum()))
        return min(node * width + int(rng.integers(width)), count - 1)

    def _free(self, nodes: list[int], begin: float, end: float) -> bool:
        return not any(a < end and b > begin for node in nodes for a, b in self._struck.get(node, ()))
