"""The page budget: wrong pages are counted, a detector that spends its budget opens tickets, and pages again later."""

from __future__ import annotations

import pytest

from pipeline.config.sections import Budget, Config
from pipeline.config.settings import build_section
from pipeline.engine.engine import Engine
from pipeline.engine.people import People
from pipeline.judging.mutes import FindingFilter
from pipeline.judging.page_budget import LEAST, PageBudget, family_of, poisson_lower
from pipeline.model.errors import ConfigError, UsageError
from pipeline.model.records import SECOND, Finding
from pipeline.model.topology import Topology
from tests.pipeline.test_engine import STEP, T0, HotForThree, Running

DAY = 86_400 * SECOND


@pytest.mark.parametrize(("count", "lower"), [(1, 0.051), (3, 0.818), (10, 5.43), (40, 30.2)])
def test_the_lower_limit_is_that_of_the_poisson_distribution(count, lower):
    assert poisson_lower(count) == pytest.approx(lower, rel=0.05, abs=0.02)


def test_a_detector_is_lowered_when_its_wrong_pages_are_more_than_luck_and_raised_when_there_is_room():
    budget = PageBudget()
    assert budget.review({"link": LEAST - 1}, 100.0, T0) == []
    (ticket,) = budget.review({"link": LEAST}, 100.0, T0)
    assert (ticket.entity, ticket.level, ticket.evidence["holds"]) == ("detector:link", "ticket", True)
    assert len(ticket.summary) <= 80
    assert budget.lowers("link", "page")
    assert not budget.lowers("link_stall", "page")
    assert budget.review({"link": LEAST}, 100.0, T0) == []
    (end,) = budget.review({"link": LEAST - 1}, 100.0, T0)
    assert end.evidence["cleared"] is True
    assert not budget.lowers("link", "page")


def test_a_large_fleet_may_have_more_wrong_pages():
    budget = PageBudget()
    budget.review({"link": 5}, 100_000.0, T0)
    assert not budget.lowered
    budget.review({"link": 15}, 100_000.0, T0)
    assert budget.lowered == {"link"}


def test_a_family_that_spends_its_budget_together_lowers_its_worst_detector():
    budget = PageBudget()
    budget.review({"thermal": 2, "coolant": 1, "straggler": 2}, 500.0, T0)
    assert budget.lowered == {"thermal"}
    assert family_of("thermal_inlet") == family_of("coolant") == "coolant"


def test_detectors_of_logged_facts_are_never_lowered():
    budget = PageBudget()
    budget.review({"xid": 50, "coolant_leak": 50, "sdc": 50, "telemetry": 9}, 100.0, T0)
    assert not budget.lowered


def test_without_the_budget_nothing_is_lowered():
    budget = PageBudget(Budget(enabled=False))
    budget.review({"link": 99}, 100.0, T0)
    assert not budget.lowered


def test_a_configured_budget_replaces_the_default_of_its_detector_or_family():
    config = build_section(Config, {"budget": {"pages": {"straggler": 0.5, "straggler_job": 9.0}}}, "test").budget
    budget = PageBudget(config)
    assert budget.pages_allowed("straggler_inferred") == 0.5
    assert budget.pages_allowed("straggler_job") == 9.0
    with pytest.raises(ConfigError, match="at least 0"):
        build_section(Config, {"budget": {"pages": {"link": -1.0}}}, "test")


def test_a_page_of_a_lowered_detector_reaches_the_desk_as_a_ticket_and_is_stored_as_found():
    lowered = FindingFilter(Topology(), budget=PageBudget(lowered=frozenset({"hot"})))
    page = Finding(T0, T0, "gpu:n1.0", "hot", "page", 1.0, "hot")
    stored, reported = lowered.filter_findings([page], lambda _: None, T0)
    assert (stored[0].level, stored[0].evidence["over_budget"]) == ("page", True)
    assert [f.level for f in reported] == ["ticket"]


class BudgetedEngine(Running):
    """A site with HotForThree, whose clock follows the telemetry."""

    def __init__(self, site, budget=None):
        super().__init__(site)
        self.now, self.tick, self.budget = T0, 0, budget or Budget()

    def start(self):
        self.ingest = self.site.open()
        self.devices = self.ingest.devices
        self.engine = Engine(
            self.site.database,
            self.devices,
            Topology(),
            HotForThree(),
            lambda changes, now: [],
            lambda: self.now,
            STEP,
            budget=self.budget,
        )

    def play(self, temperature, ticks, node="n1"):
        for _ in range(ticks):
            self.site.send(node, T0 + self.tick * STEP, first=temperature)
            self.now = T0 + self.tick * STEP
            self.run(self.now)
            self.tick += 1

    def page_once(self, node):
        """Pages on the two GPUs of a node, which end by themselves."""
        self.play(95.0, 4, node)
        self.end(node)

    def end(self, node="n1"):
        """Ten minutes without a finding."""
        self.play(50.0, 2, node)
        self.tick += 64
        self.play(50.0, 2, node)

    def severities(self):
        rows = self.site.rows("SELECT severity FROM incidents WHERE cause LIKE 'gpu:n3.%'")
        return [severity for (severity,) in rows]


def started(site, **settings):
    running = BudgetedEngine(site, **settings)
    running.start()
    return running


@pytest.mark.slow
def test_a_detector_whose_pages_end_without_harm_or_action_opens_tickets_also_after_a_kill(site):
    running = started(site)
    running.page_once("n1")
    running.page_once("n2")
    running.engine.review_budget()
    assert site.rows("SELECT DISTINCT detector, reason FROM wrong_pages") == [("hot", "ended without harm or action")]
    assert running.engine.finding_filter.budget.lowered == {"hot"}
    running.start()  # as after kill -9: nothing but the store is left
    assert running.engine.finding_filter.budget.lowered == {"hot"}
    running.page_once("n3")
    assert running.severities() == ["ticket", "ticket"]
    own = site.rows("SELECT severity, state FROM incidents WHERE cause = 'detector:hot'")
    assert own == [("ticket", "open")]
    running.tick += 29 * DAY // STEP
    running.end()
    assert not running.engine.finding_filter.budget.lowered
    running.end()
    assert site.rows("SELECT state FROM incidents WHERE cause = 'detector:hot'") == [("resolved",)]


def test_a_page_that_somebody_acknowledged_costs_nothing(site):
    running = started(site)
    running.play(95.0, 4)
    for (id_,) in site.rows("SELECT id FROM incidents"):
        People(running.engine).acknowledge(id_, "ann", "on it")
    running.end()
    assert site.rows("SELECT DISTINCT state FROM incidents") == [("resolved",)]
    assert site.rows("SELECT count(*) FROM wrong_pages") == [(0,)]


@pytest.mark.slow
def test_pages_marked_as_not_a_fault_count_at_once_and_a_reset_forgets_them(site):
    running = started(site)
    for node in ("n1", "n2"):
        running.play(95.0, 4, node)
        for (id_,) in site.rows(f"SELECT id FROM incidents WHERE cause LIKE 'gpu:{node}.%'"):
            People(running.engine).mark_normal(id_, "ann", "always so")
    assert site.rows("SELECT DISTINCT reason FROM wrong_pages") == [("marked as not a fault",)]
    (row,) = running.engine.list_budgets()
    assert (row["detector"], row["wrong_pages"], row["lowered"]) == ("hot", 4, True)
    running.now += SECOND
    (row,) = People(running.engine).reset_budget("hot")
    assert (row["wrong_pages"], row["lowered"]) == (0, False)
    running.start()
    running.engine.review_budget()
    assert not running.engine.list_budgets()[0]["lowered"]
    with pytest.raises(UsageError, match="no such detector"):
        People(running.engine).reset_budget("hott")
