"""A group is blamed only if one fault of it is more likely than independent faults of its members."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from pipeline.incidents.desk import Desk
from pipeline.incidents.likelihood import DAY, HALF_LIFE, LEAST_RATE, BaseRates, Rate, weigh_pair
from pipeline.incidents.solver import log_odds
from pipeline.model.records import SECOND, Finding, Level
from pipeline.model.topology import Topology
from tests.pipeline.test_incidents import START, Case, found

QUIET = {"days": 7.0, "time": START, "counts": []}
"""A site that saw no condition in a week."""


def hall(loops: int = 4, racks: int = 2, nodes: int = 8, gpus: int = 2) -> Topology:
    """Returns a row of racks: some on each loop, two loops on a PDU, a leaf for each rack."""
    parents: dict[str, tuple[str, ...]] = {}
    for r in range(loops * racks):
        parents[f"rack:r{r}"] = (f"cdu:c{r // racks}", f"pdu:p{r // racks // 2}", "row:a")
        for n in range(r * nodes, (r + 1) * nodes):
            parents[f"node:n{n}"] = (f"rack:r{r}",)
            parents[f"port:n{n}.0"] = (f"node:n{n}", f"leaf:l{r}")
            parents |= {f"gpu:n{n}.{g}": (f"node:n{n}",) for g in range(gpus)}
    return Topology(parents)


def site(topology: Topology, rates: dict[str, Any] | None = None) -> Case:
    """Returns a Desk, of a new site or with measured rates."""
    case = Case(topology)
    if rates is not None:
        case.desk.load_json({**case.desk.as_json(), "rates": rates})
    return case


def noisy(rate: float, topology: Topology, family: str = "thermal") -> dict[str, Any]:
    """Returns measured rates of so many conditions of a family per day and unit."""
    number = {kind: sum(e.startswith(f"{kind}:") for e in topology.parents) for kind in ("gpu", "node", "rack", "port")}
    counts = [[family, kind, rate * 7 * units, START] for kind, units in number.items()]
    return {"days": 7.0, "time": START, "counts": counts}


def nodes(numbers: Iterable[int], detector: str = "thermal", level: Level = "page", seconds: int = 30) -> list[Finding]:
    """Returns findings about nodes, with onsets spread over so many seconds."""
    numbers = list(numbers)
    step = seconds * SECOND // max(1, len(numbers) - 1)
    first = START - seconds * SECOND
    return [found(f"node:n{n}", detector, level, first + i * step) for i, n in enumerate(numbers)]


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("size", [6, 8, 18, 36, 72])
@pytest.mark.parametrize("level", ["suspect", "ticket", "page"])
def test_half_of_a_rack_within_30_s_blames_the_rack(size: int, level: Level) -> None:
    case = site(hall(loops=2, racks=4, nodes=size))
    case.report_findings(*nodes(range(size, size + size // 2), level=level))
    assert case.causes() == {"rack:r1"}
    assert case.only().severity == ("page" if level == "page" else "ticket"), "a shared fault is corroborated"


@pytest.mark.parametrize("size", [2, 3, 4])
def test_two_nodes_of_a_small_rack_are_a_coincidence_until_the_site_is_known_to_be_quiet(size: int) -> None:
    topology = hall(loops=2, racks=4, nodes=size)
    new, quiet = site(topology), site(topology, QUIET)
    for case in (new, quiet):
        case.report_findings(*nodes((size, size + 1)))
    assert new.causes() == {f"node:n{size}", f"node:n{size + 1}"}
    assert quiet.causes() == {"rack:r1"}


@pytest.mark.parametrize("size", [18, 36, 72])
def test_a_fifth_of_a_rack_or_three_nodes_are_too_few(size: int) -> None:
    case = site(hall(loops=2, racks=4, nodes=size))
    case.report_findings(*nodes(range(3), level="suspect"))
    assert case.causes() == {f"node:n{n}" for n in range(3)}


def test_a_row_of_three_racks_without_loops_and_feeds_still_names_a_rack() -> None:
    parents = {f"rack:r{r}": ("row:a",) for r in range(3)} | {f"node:n{n}": (f"rack:r{n // 8}",) for n in range(24)}
    case = site(Topology(parents))
    case.report_findings(*nodes(range(8, 13)))
    assert case.causes() == {"rack:r1"}


def test_recirculation_in_a_row_is_one_incident() -> None:
    case = site(hall(loops=3, racks=2))
    case.report_findings(*(found(f"rack:r{r}", "thermal_inlet", "ticket") for r in (0, 2, 3, 5)))
    assert case.causes() == {"row:a"}


def test_racks_count_for_their_loop_and_their_nodes_not_as_silent() -> None:
    case = site(hall(loops=4, racks=6))
    case.report_findings(*(found(f"rack:r{r}", "coolant", "ticket") for r in range(5)))
    assert case.causes() == {"cdu:c0"}


def test_without_topology_nothing_is_shared() -> None:
    case = site(Topology())
    case.report_findings(*nodes(range(30)))
    assert len(case.causes()) == 30


def test_silent_members_count_against_a_cause_and_unmonitored_ones_do_not() -> None:
    topology = hall(loops=2, racks=2, nodes=16)
    some = [f"node:n{n}" for n in range(3)]
    gpus = {f"gpu:n{n}.0" for n in range(3, 16)}
    answers: list[tuple[Callable[[str], bool], int]] = [
        (lambda _: True, 3),
        (lambda entity: entity in some, 1),
        (lambda entity: entity in some or entity in gpus, 3),
    ]
    for is_monitored, incidents in answers:
        desk = Desk(topology)
        desk.observe(START + 40 * SECOND, nodes(range(3)), is_monitored=is_monitored)
        causes = {i.cause for i in desk.incidents.values()}
        assert causes == ({"rack:r0"} if incidents == 1 else set(some)), "a GPU below shows that a node is monitored"


def test_of_nested_causes_the_one_that_explains_most_without_silent_members_is_blamed() -> None:
    case = site(hall())
    case.report_findings(*nodes(range(16)))
    assert case.causes() == {"cdu:c0"}, "all of both racks: neither one rack nor the row"
    case = site(hall())
    case.report_findings(*nodes(range(8)))
    assert case.causes() == {"rack:r0"}, "all of one rack"


def test_two_of_four_loops_blame_the_two() -> None:
    case = site(hall())
    case.report_findings(*nodes([*range(16), *range(32, 48)]))
    assert case.causes() == {"cdu:c0", "cdu:c2"}


def test_what_hits_every_rack_alike_is_no_fault_of_a_rack() -> None:
    """Half of the nodes of each rack: a new driver, a warm day. None of the racks stands out."""
    topology = Topology({e: p for e, p in hall(nodes=16).parents.items() if not e.startswith("rack:")})
    case = site(topology)
    struck = [r * 16 + i for r in range(8) for i in range(8)]
    case.report_findings(*nodes(struck, level="suspect", seconds=60))
    assert not any(cause.startswith("rack:") for cause in case.causes())


@pytest.mark.parametrize(("rate", "blamed"), [(0.0, True), (0.1, True), (5.0, False), (50.0, False)])
def test_three_nodes_are_evidence_only_where_such_conditions_are_rare(rate: float, blamed: bool) -> None:
    topology = hall(nodes=4)
    case = site(topology, noisy(rate, topology))
    case.report_findings(*nodes(range(3), level="suspect"))
    assert ("rack:r0" in case.causes()) == blamed


def test_onsets_far_apart_need_more_members() -> None:
    for hours, blamed in ((0, True), (6, False)):
        case = site(hall(nodes=4))
        case.report_findings(*nodes(range(3), level="suspect", seconds=30 + hours * 3600))
        assert ("rack:r0" in case.causes()) == blamed
    case = site(hall(nodes=16))
    case.report_findings(*nodes(range(16), level="suspect", seconds=6 * 3600))
    assert case.causes() == {"rack:r0"}, "a fault that spreads slowly, and reaches all"


def test_a_suspect_of_yesterday_does_not_belong_to_the_fault_of_today() -> None:
    case = site(hall(nodes=16))
    old = found("node:n0", "thermal", "suspect", START - DAY)
    case.report_findings(old, *nodes(range(4, 14), level="suspect"))
    assert case.causes() == {"rack:r0", "node:n0"}


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("rate", [0.1, 0.5, pytest.param(2.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", range(3))
def test_unrelated_suspects_never_create_a_shared_cause(rate: float, seed: int) -> None:
    """Three days of independent suspects, each of which lasts for minutes or hours, after an hour of learning."""
    dice = random.Random(seed)
    topology = hall(loops=4, racks=2, nodes=(2, 4, 18)[seed])
    case = Case(topology)
    devices = [e for e in sorted(topology.parents) if e.startswith(("gpu:", "node:", "port:"))]
    families = {"gpu": ("thermal",), "node": ("thermal", "power"), "port": ("link",)}
    running: list[tuple[int, Finding]] = []
    for minute in range(1440 if seed == 2 else 3 * 1440):
        began = [d for d in devices if dice.random() < rate / 1440]
        for device in began:
            detector = dice.choice(families[device.split(":")[0]])
            lasts = case.time + int(dice.lognormvariate(math.log(1200), 1.0)) * SECOND
            running.append((lasts, found(device, detector, "suspect", case.time + 60 * SECOND)))
        running = [(end, finding) for end, finding in running if end > case.time]
        changes = case.report_findings(*(finding for _, finding in running), seconds=60)
        shared = {c.incident.cause for c in changes if c.kind in ("opened", "cause_changed")} - set(devices)
        assert not shared or minute < 60


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("seed", range(10))
def test_unrelated_suspects_change_nothing_about_a_shared_fault_nor_does_their_order(seed: int) -> None:
    dice, topology = random.Random(seed), hall(nodes=16)
    shared = nodes(dice.sample(range(16, 32), 8))
    strangers = [found(f"node:n{n}", "power", "suspect", START - n * 3600 * SECOND) for n in dice.sample(range(128), 9)]
    cases = [Case(topology) for _ in range(3)]
    for case, findings in zip(cases, (shared, [*shared, *strangers], [*strangers, *shared]), strict=True):
        case.report_findings(*dice.sample(findings, len(findings)))
        assert "rack:r1" in case.causes()
        (rack,) = [i for i in case.desk.incidents.values() if i.cause == "rack:r1"]
        assert {f.entity for f in shared} <= set(rack.members)
    assert cases[1].desk.snapshot() == cases[2].desk.snapshot()


@pytest.mark.parametrize(
    ("detector", "entities", "cause"),
    [
        ("link", [f"port:n{n}.0" for n in range(8, 16)], "leaf:l1"),
        ("telemetry", [f"node:n{n}" for n in range(32)], "pdu:p0"),
        ("thermal", [f"gpu:n{n}.{g}" for n in range(16) for g in range(2)], "cdu:c0"),
    ],
)
def test_a_storm_is_one_incident(detector: str, entities: list[str], cause: str) -> None:
    """A leaf crash, the trip of a PDU and the loss of a pump that is not monitored."""
    case = site(hall())
    dice = random.Random(1)
    left = dice.sample(entities, len(entities))
    while left:
        case.report_findings(*(found(e, detector, onset=case.time) for e in left[:7]))
        left = left[7:]
    assert case.causes() == {cause}


def test_the_history_shows_the_evidence() -> None:
    case = site(hall(nodes=16))
    (opened,) = case.report_findings(*nodes(range(8)))
    assert opened.comment == (
        "8 of 16 nodes within 30 s: one shared fault is over a million times as likely as separate ones"
    )
    case = site(hall(nodes=4))
    case.report_findings(*nodes(range(3))[:2])
    (changed, *_) = [c for c in case.report_findings(*nodes(range(3))) if c.kind == "cause_changed"]
    assert changed.comment.startswith("from node:n0 to rack:r0: 3 of 4 nodes within 30 s: one shared fault is ")
    assert changed.comment.endswith(" times as likely as separate ones")


def suspects(one: tuple[str, str], other: tuple[str, str], apart: int = 0) -> list[Finding]:
    (a, first), (b, second) = one, other
    return [found(a, first, "suspect", START - apart), found(b, second, "suspect")]


@pytest.mark.parametrize(
    ("one", "other", "corroborated"),
    [
        (("gpu:n1.0", "thermal"), ("gpu:n1.0", "power_draw"), True),  # one device
        (("node:n1", "power"), ("gpu:n1.0", "thermal"), True),  # a part of it
        (("gpu:n1.0", "straggler"), ("port:n1.0", "link"), True),  # a symptom
        (("gpu:n1.0", "thermal"), ("port:n1.0", "link"), False),  # neither causes the other
        (("gpu:n1.0", "thermal"), ("gpu:n1.1", "power_draw"), False),
        (("gpu:n1.0", "straggler"), ("port:n2.0", "link"), False),  # another node
        (("gpu:n1.0", "straggler"), ("gpu:n1.1", "sdc"), False),
    ],
)
def test_two_suspects_corroborate_each_other_only_along_a_physical_path(
    one: tuple[str, str], other: tuple[str, str], corroborated: bool
) -> None:
    case = site(hall())
    case.report_findings(*suspects(one, other))
    assert {i.severity for i in case.desk.incidents.values()} == ({"ticket"} if corroborated else {"watch"})


def test_two_suspects_where_such_suspects_are_frequent_or_began_hours_apart_stay_suspects() -> None:
    pair = (("gpu:n1.0", "thermal"), ("gpu:n1.0", "power_draw"))
    topology = hall()
    both = noisy(3.0, topology)
    both["counts"] += [["power", *row[1:]] for row in both["counts"]]
    for case, apart in ((site(topology, both), 0), (site(topology), 6 * 3600 * SECOND)):
        case.report_findings(*suspects(*pair, apart))
        assert {i.severity for i in case.desk.incidents.values()} == {"watch"}
    case = site(topology)
    case.report_findings(*suspects(*pair))
    (change, *_) = case.changes
    assert change.comment.startswith("thermal and power_draw within 1 s: one fault is ")
    assert change.comment.endswith(" times as likely as two")


@pytest.mark.parametrize(("capped", "severity"), [(True, "watch"), (False, "ticket")])
def test_power_caps_set_on_many_nodes_at_once_prove_no_fault_of_what_they_share(capped: bool, severity: str) -> None:
    case, evidence = site(hall()), {"power_cap": 400.0} if capped else {}
    slow = nodes(range(8), "straggler", "suspect")
    case.report_findings(*(replace(finding, evidence=evidence) for finding in slow))
    assert {i.severity for i in case.desk.incidents.values() if i.state == "open"} == {severity}
    assert len({i.cause for i in case.desk.incidents.values() if i.state == "open"}) == (8 if capped else 1)


def test_rates_are_measured_from_conditions_with_a_cause_of_their_own() -> None:
    case = site(hall())
    assert case.desk.as_json()["rates"]["counts"] == []
    for _ in range(3):
        case.report_findings(found("gpu:n1.0", "thermal", "suspect"))
    counted = {(family, kind): number for family, kind, number, _ in case.desk.as_json()["rates"]["counts"]}
    assert counted == {("thermal", "gpu"): 1, ("thermal", "node"): 1, ("thermal", "rack"): 1}
    case = site(hall())
    case.report_findings(*nodes(range(8)))
    assert case.desk.as_json()["rates"]["counts"] == [], "the members of a group are no independent conditions"


def test_the_conditions_that_are_weighed_do_not_count_against_themselves() -> None:
    """A leaf whose ports fail one after the other, at a small site."""
    case = site(hall(loops=1, racks=1, nodes=16))
    for n in range(6):
        case.report_findings(found(f"port:n{n}.0", "link", onset=case.time), seconds=1)
    assert case.causes() == {"leaf:l0"}


@pytest.mark.parametrize("job_first", [True, False])
@pytest.mark.parametrize("work", ["job:a", "stage:a.0"])
def test_a_job_that_a_leaf_slows_down_is_in_the_incident_of_the_leaf(work: str, job_first: bool) -> None:
    parents = dict(hall(loops=1).parents)
    parents |= {f"rank:a.{n}": ("stage:a.0", "job:a", f"gpu:n{n}.0") for n in (2, 11)}
    case = site(Topology(parents))
    both = [found(work, "straggler_job", onset=START + 60), found("leaf:l1", "link_congestion")]
    for finding in both if job_first else both[::-1]:
        case.report_findings(finding, seconds=60)
    assert case.causes() == {"leaf:l1"}
    case.report_findings(found("job:b", "straggler_job"))
    assert case.causes() == {"leaf:l1", "job:b"}


@pytest.mark.parametrize(("lasts", "causes"), [(True, {"leaf:l1"}), (False, {"leaf:l1", "job:a"})])
def test_a_job_that_becomes_slow_after_a_leaf_works_again_is_an_incident_of_its_own(
    lasts: bool, causes: set[str]
) -> None:
    parents = dict(hall(loops=1).parents)
    parents |= {f"rank:a.{n}": ("stage:a.0", "job:a", f"gpu:n{n}.0") for n in (2, 11)}
    case = site(Topology(parents))
    for minute in range(8):
        leaf = [found("leaf:l1", "link", "page")] if lasts or minute < 3 else []
        case.report_findings(*leaf, seconds=60)
    case.report_findings(found("job:a", "straggler_job", "ticket", onset=case.time - 60 * SECOND))
    assert case.causes() == causes


@pytest.mark.parametrize("knew_it", [True, False], ids=["the same GPU again", "another GPU"])
@pytest.mark.parametrize(
    ("lasts", "monitored", "apart"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_heat_that_begins_after_coolant_flows_again_is_an_incident_of_its_own(
    knew_it: bool, lasts: bool, monitored: bool, apart: bool
) -> None:
    case, again = site(hall(loops=1)), found("gpu:n1.1", "thermal_edge", "suspect")
    case.report_findings(found("cdu:c0", "coolant_edge"))
    for minute in range(12):
        flow = [found("cdu:c0", "coolant_edge")] if lasts or minute < 4 else []
        heat = [found(f"gpu:n{n}.0", "thermal_edge", "suspect") for n in range(6)] if minute < 6 else []
        case.report_findings(*flow, *heat, *([again] if knew_it and minute < 6 else []), seconds=60)
    new = replace(again, onset=case.time - 20 * SECOND)
    case.time += 10 * SECOND
    case.desk.observe(case.time, [new], None, None, lambda entity: monitored or entity != "cdu:c0")
    assert case.causes() == ({"cdu:c0", "gpu:n1.1"} if apart else {"cdu:c0"})
    cooling = next(i for i in case.desk.incidents.values() if i.cause == "cdu:c0")
    assert ("gpu:n1.1" in cooling.members) == (not apart)


def test_heat_soon_after_coolant_flows_again_and_heat_that_goes_on_are_still_its_symptoms() -> None:
    case = site(hall(loops=1))
    hot = found("gpu:n1.0", "thermal_edge", "suspect")
    for minute in range(40):
        case.report_findings(*([found("cdu:c0", "coolant_edge")] if minute < 4 else []), hot, seconds=60)
        if minute == 7:
            case.report_findings(found("gpu:n2.1", "thermal_edge", "suspect", case.time))
    assert case.causes() == {"cdu:c0"}
    assert set(case.only().members) == {"cdu:c0", "gpu:n1.0", "gpu:n2.1"}


@pytest.mark.parametrize(("lasting", "apart"), [(1, True), (4, False)])
@pytest.mark.parametrize("detector", ["thermal", "straggler"])
def test_heat_or_slowness_that_a_few_of_many_gpus_keep_after_cooling_came_back_is_their_own(
    detector: str, lasting: int, apart: bool
) -> None:
    case = site(hall(loops=1, nodes=16))
    gpus = [found(f"gpu:n{n}.0", detector, "ticket") for n in range(32)]
    for minute in range(16):
        flow = [found("cdu:c0", "coolant_edge")] if minute < 4 else []
        heat = [found("cdu:c0", "thermal")] if minute < 6 else []  # all its GPUs: a symptom, no sign of bad cooling
        case.report_findings(*flow, *heat, *(gpus if minute < 6 else gpus[:lasting]), seconds=60)
        if minute == 12:
            assert case.causes() == {"cdu:c0"}
    assert case.causes() == ({"cdu:c0", "gpu:n0.0"} if apart else {"cdu:c0"})


@pytest.mark.parametrize("hours", [0, 12])
def test_a_slow_gpu_is_no_symptom_of_a_ticket_about_another_gpu_of_its_node(hours: int) -> None:
    case = site(hall(loops=1))
    for _ in range(hours * 6 + 1):
        case.report_findings(found("gpu:n1.0", "memory", "ticket"), seconds=600)
    case.report_findings(found("gpu:n1.1", onset=START + hours * 3600 * SECOND))
    assert case.causes() == {"gpu:n1.0", "gpu:n1.1"}


@pytest.mark.parametrize(("cause", "detector"), [("cdu:c0", "coolant"), ("row:a", "thermal")])
@pytest.mark.parametrize(("signals", "apart"), [(("gpu.sm_clock",), True), (("gpu.throttle_reasons",), False)])
def test_what_is_slow_long_after_its_supply_failed_shows_it_in_its_event_reasons(
    cause: str, detector: str, signals: tuple[str, ...], apart: bool
) -> None:
    case = site(hall(loops=1))
    for _ in range(9):
        case.report_findings(found(cause, detector, onset=START), seconds=600)
    case.report_findings(found("gpu:n1.1", onset=START + 5000 * SECOND, signals=signals))
    assert case.causes() == ({cause, "gpu:n1.1"} if apart else {cause})


SITE = {"node": 1000, "gpu": 8000, "rack": 50}


def test_rates_start_at_the_shipped_one_and_follow_the_site_within_days() -> None:
    rates = BaseRates()
    assert [rates.rate("thermal", kind, SITE, 0).per_day for kind in SITE] == pytest.approx([0.1, 0.1 / 8, 0.1 * 20])
    for minute in range(2 * 1440):
        rates.advance(START + minute * 60 * SECOND)
    assert rates.rate("thermal", "node", SITE, 0).per_day == LEAST_RATE, "two quiet days of 1,000 nodes"
    for _ in range(4000):
        rates.count("thermal", ("node",))
    assert rates.rate("thermal", "node", SITE, 0).per_day == pytest.approx(2.0, rel=0.2)
    assert rates.rate("thermal", "node", SITE, 4000).per_day == LEAST_RATE
    assert rates.rate("power", "node", SITE, 0).per_day == LEAST_RATE
    assert BaseRates.from_json(json.loads(json.dumps(rates.as_json()))) == rates


def test_a_month_of_trouble_is_forgotten_and_a_gap_is_not_quiet() -> None:
    rates = BaseRates()
    rates.advance(START)
    for _ in range(700):
        rates.count("thermal", ("node",))
    rates.advance(START + 30 * DAY)
    assert rates.days < 0.01, "nothing was seen in the gap"
    for step in range(1, 30 * 144):
        rates.advance(START + 30 * DAY + step * 600 * SECOND)
    assert rates.days == pytest.approx(HALF_LIFE / DAY / math.log(2) * (1 - 0.5 ** (30 / 7)), rel=0.01)
    assert rates.rate("thermal", "node", {"node": 100}, 0).per_day < 0.05


def test_more_silent_members_more_frequent_conditions_and_more_time_always_lower_the_odds() -> None:
    def odds(silent: int, rate: float, seconds: int) -> float:
        days = max(4 * seconds * SECOND, 120 * SECOND) / DAY
        return float(log_odds(8e-5 * days, 5, silent, -math.expm1(-rate * days)))

    assert odds(0, 0.1, 1) > odds(1, 0.1, 1) > odds(20, 0.1, 1)
    assert odds(3, 0.01, 1) > odds(3, 0.1, 1) > odds(3, 10.0, 1)
    assert odds(3, 0.1, 60) > odds(3, 0.1, 600) > odds(3, 0.1, 6000)
    assert weigh_pair("gpu", 0, Rate(0.1, 1), Rate(0.1, 1)) > weigh_pair("gpu", DAY // 8, Rate(0.1, 1), Rate(0.1, 1))


@pytest.mark.parametrize("nodes_named", [1, 2, 5])
def test_parents_that_no_inventory_lists_are_weighed_too(nodes_named: int) -> None:
    """A recording of ports may name their nodes only as parents."""
    case = site(Topology({f"port:t{n}.{p}": (f"node:t{n}",) for n in range(nodes_named) for p in range(6)}))
    for _ in range(3):
        case.report_findings(
            *(found(f"port:t{n}.{p}", "link", "ticket") for n in range(nodes_named) for p in range(0, 6, 2))
        )
    assert {i.severity for i in case.desk.incidents.values()} == {"ticket"}


def rails(nodes: int = 16) -> Topology:
    """Returns nodes in two pods, each with a leaf for each of two rails."""
    parents: dict[str, tuple[str, ...]] = {}
    for n in range(nodes):
        parents[f"node:n{n}"] = (f"rack:r{n // 4}",)
        for rail in range(2):
            leaf = f"leaf:l{2 * (n // (nodes // 2)) + rail}"
            parents[f"port:n{n}.{rail}"] = (f"node:n{n}", leaf, f"rail:{rail}")
    return Topology(parents)


def test_a_leaf_that_is_reported_itself_is_part_of_the_rail_that_all_its_ports_are_on() -> None:
    case = site(rails())
    case.report_findings(*(found(f"port:n{n}.0", "link", "page") for n in range(16)), found("leaf:l0", "link", "page"))
    assert case.causes() == {"rail:0"}


def test_a_gpu_that_falls_silent_because_its_driver_hangs_stays_with_the_driver_version() -> None:
    topology = hall()
    versions = {f"node:n{n}": {"nvidia_driver": "new" if n % 3 == 0 else "old"} for n in range(64)}
    case = site(Topology(topology.parents, versions))
    case.report_findings(*(found(f"gpu:n{n}.0", "xid", "page") for n in range(0, 48, 3)))
    case.report_findings(*(found(f"gpu:n{n}.0", "telemetry", "page") for n in range(0, 48, 3)))
    assert case.causes() == {"version:nvidia_driver=new"}


def test_a_rank_that_was_slow_before_its_job_ended_belongs_to_a_fault_found_afterwards() -> None:
    plant = hall(loops=1)
    ranks = {f"rank:1.{n}": ("job:1", f"gpu:n{n}.0") for n in range(16)}
    topology = Topology({**plant.parents, **ranks})
    case = site(topology)
    case.report_findings(found("rank:1.3", "straggler", "page"))
    topology.remove_entities([*ranks, "job:1"])
    hot = [found(f"gpu:n{n}.{g}", "thermal", "page") for n in range(16) for g in range(2)]
    case.report_findings(*hot, found("cdu:c0", "coolant", "page"))
    assert case.causes() == {"cdu:c0"}
