"""Rolling work on nodes is one ticket; a node that dies during it pages as fast as at any other time."""

from __future__ import annotations

import pytest

from detectors.telemetry.telemetry import Telemetry
from pipeline.model.records import SECOND
from tests.detectors.test_telemetry import FAULT, JOB, NAMES, START, Site, event

OUT, EVERY = 10, 15
"""Instants of 10 s for which each node is silent, and from one to the next."""


def upgrade(site: Site, nodes: int = 8, dies: int | None = None, returns: bool = True) -> None:
    """Shows nodes that fall silent in turn. dies: one whose job ends with it; returns: the others report again."""
    ended = event("job:j", "job_end", FAULT + EVERY * (dies or 0), ranks=list(NAMES["rank"]))
    for tick in range(FAULT + EVERY * nodes + 60):
        place, since = divmod(tick - FAULT, EVERY)
        out = [n for n in range(min(place + 1, nodes)) if not returns or n == dies or (n == place and since < OUT)]
        events = [JOB] if tick == 0 else [ended] if dies is not None and tick == FAULT + EVERY * dies else []
        site.tick(tick, [NAMES["node"][n] for n in out if tick >= FAULT], events=events)


def tickets(site: Site) -> set[str]:
    return {f.entity for f in site.findings if f.level == "ticket"}


def test_a_rolling_upgrade_of_agents_is_one_ticket_from_the_third_node_on() -> None:
    site = Site()
    upgrade(site)
    assert tickets(site) == {*NAMES["node"][:2], "site:all"}
    work = [f for f in site.findings if f.entity == "site:all"]
    assert work[-1].summary == "Whole site: 8 nodes silent in turn, each back within 110 s: rolling work"
    assert work[-1].evidence["rolling_work"] == 8
    assert {f.level for f in site.findings} == {"suspect", "ticket"}


def test_nodes_that_fall_silent_in_turn_and_do_not_return_are_a_ticket_each() -> None:
    site = Site()
    upgrade(site, nodes=5, returns=False)
    assert tickets(site) == {*NAMES["node"][:5]}


@pytest.mark.parametrize("dies", [2, 5])
def test_a_node_that_dies_under_its_job_during_rolling_work_pages_at_once(dies: int) -> None:
    alone, site = Site(), Site()
    alone.run(20, silent=[NAMES["node"][dies]], first=[JOB], events=[event("job:j", "job_end", ranks=[*NAMES["rank"]])])
    upgrade(site, dies=dies)
    delays = []
    for each, began in ((alone, FAULT), (site, FAULT + EVERY * dies)):
        page = next(f for f in each.findings if f.level == "page")
        assert page.entity == NAMES["node"][dies]
        delays.append(page.time - (START + began * 10 * SECOND))
    assert delays[0] == delays[1]


def test_a_node_that_does_not_come_back_from_rolling_work_is_a_ticket_of_its_own() -> None:
    site = Site()
    for tick in range(FAULT + 120):
        place, since = divmod(tick - FAULT, EVERY)
        out = [n for n in range(4) if (n == place and since < OUT) or (n == 3 and place >= 3)]
        site.tick(tick, [NAMES["node"][n] for n in out if tick >= FAULT], events=[JOB] if tick == 0 else [])
    late = next(f for f in site.findings if f.level == "ticket" and f.entity == NAMES["node"][3])
    assert 200 * SECOND <= late.time - late.onset <= 250 * SECOND


@pytest.mark.parametrize("nodes", [1, 2])
def test_nodes_that_fall_silent_again_and_again_are_no_work_on_several(nodes: int) -> None:
    site = Site()
    for tick in range(FAULT + EVERY * 8):
        place, since = divmod(tick - FAULT, EVERY)
        out = [NAMES["node"][place % nodes]] if tick >= FAULT and since < OUT else []
        site.tick(tick, out, events=[JOB] if tick == 0 else [])
    assert tickets(site) == {*NAMES["node"][:nodes]}
    times = [f.time for f in site.findings if f.level == "ticket"]
    assert max(times) - min(times) > 5 * EVERY * 10 * SECOND, "each silence is a ticket"


def test_two_silences_in_turn_are_no_work_and_a_restart_in_between_changes_nothing() -> None:
    site = Site()
    upgrade(site, nodes=2)
    assert tickets(site) == {*NAMES["node"][:2]}
    restarted = Telemetry()
    restarted.rolling.restore(site.detector.rolling.snapshot())
    assert restarted.rolling.snapshot() == site.detector.rolling.snapshot()
