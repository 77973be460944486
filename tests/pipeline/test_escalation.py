"""Steps of escalation at the receivers that only they lead to: what pages again, and from when they count."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config.receivers import Route
from pipeline.config.sections import EscalationStep, Incidents
from pipeline.incidents.matchers import parse_matchers
from pipeline.model.records import SECOND, Caller
from tests.pipeline.living import MINUTE, LivingSite
from tests.pipeline.notifier_harness import Receiver
from tests.pipeline.receiver_servers import Service
from tests.pipeline.test_inhibited_pages import ANN, HeardSite, pager

__all__ = ["pager"]
RULES = Incidents(storm_pages=2, escalation=(EscalationStep(10.0, ("pager",)),))
ALONE = Route("hook", group_by=("...",), group_wait="0s", group_interval="30s", repeat_interval="4h")


@pytest.fixture
def routed(tmp_path: Path, receiver: Receiver, pager: Service) -> Iterator[HeardSite]:
    """Routes lead to the webhook alone; only the step, after 10 minutes, leads to PagerDuty."""
    made = HeardSite(tmp_path, receiver, pager, RULES, route=ALONE)
    yield made
    made.database.close()


def escalate_page(site: HeardSite) -> str:
    page = site.report("gpu:n1.0")
    site.pass_time(11)
    assert (site.kinds(page)[-1], site.events(page)) == ("escalated", ["trigger"])
    return page


@pytest.mark.slow
def test_what_is_acknowledged_in_pagerduty_is_resolved_there_before_it_is_escalated_again(routed):
    page = escalate_page(routed)
    routed.people.acknowledge(page, ANN, "mine", None, 0.5)
    routed.send()
    routed.restart()
    routed.pass_time(31)
    assert (routed.state(page), routed.events(page)) == ("open", ["trigger", "acknowledge"])
    routed.pass_time(11)
    assert routed.events(page) == ["trigger", "acknowledge", "resolve", "trigger"]


@pytest.mark.slow
def test_what_a_person_acknowledged_in_pagerduty_is_resolved_there_before_it_is_escalated_again(routed):
    page = escalate_page(routed)
    routed.people.acknowledge(page, Caller("pagerduty:Bo", receiver="pager"), "", None, 0.5)
    routed.pass_time(42)
    assert routed.events(page) == ["trigger", "resolve", "trigger"]


@pytest.mark.slow
def test_what_nobody_acknowledged_in_pagerduty_stays_at_its_level_there_when_it_is_escalated(tmp_path, receiver, pager):
    steps = (EscalationStep(10.0, ("pager",)), EscalationStep(20.0, ("pager",)))
    site = HeardSite(tmp_path, receiver, pager, Incidents(escalation=steps))
    page = site.report("gpu:n1.0")
    site.pass_time(21)
    assert site.events(page) == ["trigger", "trigger", "trigger"]
    site.people.acknowledge(page, ANN, "mine", None, 0.5)
    site.pass_time(42)
    assert site.events(page)[3:] == ["acknowledge", "resolve", "trigger", "trigger"], "it pages when that expires"
    site.database.close()


@pytest.mark.slow
def test_an_escalated_page_with_another_cause_is_escalated_again_at_once(routed):
    page = escalate_page(routed)
    routed.people.merge(page, [routed.report("gpu:n1.1")], ANN, "one fault")
    routed.people.split(page, [routed.stored(page).cause], ANN, "two faults")
    assert routed.stored(page).cause == "gpu:n1.1"
    routed.pass_time(1)
    assert routed.kinds(page)[-2:] == ["split", "escalated"]
    assert routed.events(page) == ["trigger", "resolve", "trigger"]
    routed.restart()
    routed.pass_time(30)
    assert routed.events(page) == ["trigger", "resolve", "trigger"]
    routed.clear("gpu:n1.1", "gpu:n1.0")
    routed.pass_time(12)
    assert (routed.state(page), routed.events(page)[3:]) == ("resolved", ["resolve"])


@pytest.mark.slow
def test_an_acknowledged_page_with_another_cause_is_not_escalated_before_the_acknowledgement_expires(routed):
    page = escalate_page(routed)
    routed.people.merge(page, [routed.report("gpu:n1.1")], ANN, "one fault")
    routed.people.acknowledge(page, ANN, "mine", None, 0.5)
    routed.people.split(page, [routed.stored(page).cause], ANN, "two faults")
    routed.pass_time(31)
    assert routed.events(page) == ["trigger", "acknowledge", "resolve"]
    routed.pass_time(11)
    assert routed.events(page)[-1] == "trigger"


@pytest.mark.slow
def test_an_escalated_page_is_escalated_again_after_a_silence(routed):
    page = escalate_page(routed)
    matchers = parse_matchers(['entity="gpu:n1.0"'])
    routed.people.add_silence("silence", matchers, None, routed.now + 20 * MINUTE, "new cable", ANN)
    routed.pass_time(3)
    assert (routed.state(page), routed.events(page)) == ("silenced", ["trigger", "resolve"])
    routed.restart()
    routed.pass_time(18)
    assert (routed.state(page), routed.events(page)) == ("open", ["trigger", "resolve"]), "the time starts again"
    routed.pass_time(10)
    assert routed.events(page) == ["trigger", "resolve", "trigger"]


@pytest.mark.slow
def test_a_page_that_its_new_cause_takes_into_and_out_of_a_silence_waits_again_from_then_on(tmp_path):
    site = LivingSite(tmp_path / "s.duckdb", Incidents(escalation=(EscalationStep(10.0, ("boss",)),)))
    page, *others = [site.report(f"host:{name}") for name in "abc"]
    site.people.merge(page, others, ANN, "one fault")
    site.people.add_silence("silence", parse_matchers(['cause="host:b"']), None, site.now + 200 * MINUTE, "x", ANN)
    site.people.split(page, ["host:a"], ANN, "two faults")
    assert (site.state(page), site.stored(page).life.waits_since) == ("silenced", None)
    site.wait(20)
    site.people.split(page, ["host:b"], ANN, "three faults")
    assert (site.state(page), site.stored(page).life.waits_since) == ("open", site.now)
    site.wait(9)
    assert "escalated" not in site.kinds(page)
    site.wait(2)
    assert site.kinds(page)[-1] == "escalated"
    site.database.close()


@pytest.mark.slow
def test_a_storm_that_is_worse_than_when_a_person_took_it_is_escalated(routed):
    for number in range(3):
        routed.report(f"host:h{number}")
    (storm,) = routed.storms()
    routed.people.acknowledge(storm.id, ANN, "the hall", None, 0)
    for number in range(3, 5):
        routed.now += SECOND
        routed.report(f"host:h{number}")
    worse = routed.stored(storm.id)
    assert (routed.kinds(storm.id)[-1], worse.state, worse.life.escalation) == ("updated", "open", 0)
    assert worse.life.waits_since is not None
    routed.pass_time(9)
    assert routed.events(storm.id) == []
    routed.pass_time(2)
    assert (routed.kinds(storm.id)[-1], routed.events(storm.id)) == ("escalated", ["trigger"])


@pytest.mark.slow
def test_a_storm_that_goes_on_growing_is_escalated_when_nobody_took_it_for_as_long_as_the_step_says(routed):
    for number in range(3):
        routed.report(f"host:h{number}")
    (storm,) = routed.storms()
    routed.pass_time(5)
    for number in range(3, 8):
        routed.report(f"host:h{number}")
    assert "worsened" in routed.kinds(storm.id)
    routed.pass_time(6)
    assert (routed.kinds(storm.id)[-1], routed.events(storm.id)) == ("escalated", ["trigger"])
