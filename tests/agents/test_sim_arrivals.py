"""Random faults occur at published rates, unevenly as in real fleets, and not all at one place and time."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest

from agents.sim import fault_plan
from agents.sim.fault_plan import draw_events
from agents.sim.kinds import KINDS
from agents.sim.layout import Layout
from agents.sim.physics.noise import generator
from agents.sim.scenario import Fleet, Line, Rates, Scenario
from agents.sim.scenario_file import parse
from pipeline.model.errors import UsageError

DAY = 86_400.0


def lines(scenario: Scenario, layout: Layout, seed: int) -> list[Line]:
    return list(draw_events(scenario, layout, seed).lines)


def scenario(nodes: int = 1000, days: float = 10.0, **rates: float) -> Scenario:
    return Scenario(days * DAY, 10.0, None, Fleet(nodes, 8), rates=Rates(**rates))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def layout() -> Layout:
    return Layout(1000, 8)


def test_without_rates_there_are_no_random_faults(layout: Layout) -> None:
    assert lines(scenario(), layout, 1) == []


def test_every_benign_event_occurs_at_least_twenty_times_in_a_thousand_node_days(layout: Layout) -> None:
    found = Counter(line.kind.name for line in lines(scenario(confounders=1.0), layout, 1))
    benign = {name for name, kind in KINDS.items() if kind.detectability == "benign" and not kind.world_only}
    assert set(found) == benign
    assert all(count >= 0.7 * 20 * 10 for count in found.values()), found  # 10,000 node-days, less what collides


def test_faults_occur_at_the_published_rates(layout: Layout) -> None:
    seeds = range(4)
    found = Counter(line.kind.name for seed in seeds for line in lines(scenario(faults=5.0, apart=False), layout, seed))
    for name, kind in KINDS.items():
        expected = kind.rate.of(layout) * 5 * 10 * DAY * len(seeds)
        if (
            kind.detectability == "benign"
            or kind.world_only
            or expected < 20
            or any(k.chain and k.chain.kind == name for k in KINDS.values())
        ):
            continue
        assert abs(found[name] - expected) < 4 * np.sqrt(expected), (name, found[name], expected)


def test_the_worst_twentieth_of_the_nodes_has_about_half_of_the_hazard() -> None:
    places = fault_plan._FaultSites(Layout(4000, 8), generator(1, 1), True)
    hazard = np.sort(places.hazard)[::-1]
    assert hazard.mean() == pytest.approx(1.0)
    assert 0.38 < hazard[:200].sum() / hazard.sum() < 0.56  # 44 % by frailty alone


def held(line: Line) -> tuple[float, float]:
    return line.onset, min(line.end, line.onset + line.kind.exclusive)


@pytest.mark.slow
def test_random_faults_on_one_node_are_half_an_hour_apart_and_faults_of_groups_never_overlap(layout: Layout) -> None:
    own, shared = defaultdict(list), defaultdict(list)
    index = {what: {n: i for i, n in enumerate(names)} for what, names in layout.targets.items()}
    chained = {kind.chain.kind for kind in KINDS.values() if kind.chain}
    for line in lines(scenario(days=4.0, faults=20.0, confounders=1.0), layout, 2):
        if line.entity is None or line.kind.name in chained:
            continue
        what = line.kind.target
        many, device = what in ("coolant", "power", "rack"), index[what][line.entity]
        places = layout.row_of(device).tolist() if what == "rack" else [device]  # warm air spreads over the row
        for node in (n for place in places for n in layout.nodes_below(what, place).tolist()):
            if many:
                shared[node].append(held(line))
            if not many or line.kind.detectability != "benign":
                own[node].append(held(line))
    assert len(own) == len(shared) == 1000
    for spans in (*own.values(), *shared.values()):
        spans.sort()
        assert all(b[0] - a[1] >= 1800 for a, b in pairwise(spans))


@pytest.mark.slow
def test_a_loop_has_its_benign_events_at_their_rate_even_among_many_faults() -> None:
    found = Counter(
        line.kind.name
        for seed in range(2)
        for line in lines(scenario(64, 20.0, faults=20.0, confounders=1.0), Layout(64, 8), seed)
    )
    for name in ("setpoint_shift", "inlet_rise", "power_cap"):
        expected = KINDS[name].rate.of(Layout(64, 8)) * 20 * DAY * 2
        assert abs(found[name] - expected) < 4 * np.sqrt(expected), (name, found[name], expected)


def test_random_faults_without_a_free_time_are_counted() -> None:
    few = Layout(4, 8)
    full, none = (
        draw_events(Scenario(DAY, 10.0, None, Fleet(4, 8), rates=Rates(0.0, 1.0, apart, {"maintenance": 2e4})), few, 1)
        for apart in (True, False)
    )
    assert none.dropped == 0
    assert full.dropped > 10
    assert len(full.lines) + full.dropped == len(none.lines)


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ({"faults": 1e12}, r"x\.toml: \[rates\] faults = 1e\+12: .* expected at most 1,000,000 in total"),
        ({"confounders": 1e9}, r"\[rates\] confounders = 1e\+09"),
        ({"faults": 1.0, "kinds": {"sdc": 1e15}}, r"\[rates\] kinds\.sdc = 1e\+15: .* of them sdc"),
    ],
)
def test_rates_with_too_many_events_are_refused(rates: dict[str, object], message: str) -> None:
    table = {"version": 1, "duration": 600, "interval": 10, "rates": rates}
    with pytest.raises(UsageError, match=message):
        draw_events(parse(table, "x.toml"), Layout(16, 8), 1)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_faults_and_another_seed_different_ones(layout: Layout) -> None:
    one, same, other = (lines(scenario(days=1, faults=20.0), layout, seed) for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_the_rate_of_one_kind_can_be_set(layout: Layout) -> None:
    table = {
        "version": 1, "duration": 10 * DAY, "interval": 10, "fleet": {"nodes": 1000},
        "rates": {"faults": 1.0, "kinds": {"link_flap": 0.0, "sdc": 50.0}},
    }  # fmt: skip
    found = Counter(line.kind.name for line in lines(parse(table, "x"), layout, 1))
    assert found["link_flap"] == 0
    assert 60 < found["sdc"] < 130  # 50 per 1M GPU-hours, 1.92M GPU-hours


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ({"kinds": {"link_flip": 1.0}}, "did you mean 'link_flap'"),
        ({"kinds": {"sdc": -1.0}}, "expected a rate per 1M GPU-hours"),
        ({"kinds": 3}, "kinds"),
        ({"faults": -1.0}, "out of range"),
        ({"fautls": 1.0}, "faults"),
    ],
)
def test_invalid_rates_are_refused(rates: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse({"version": 1, "duration": 600, "interval": 10, "rates": rates}, "x.toml")
