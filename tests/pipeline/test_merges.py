"""Who works on an incident that takes in others, and what its history says."""

from __future__ import annotations

import pytest

from pipeline.model.records import SECOND, Caller
from tests.pipeline.living import LivingSite

ANN, BOB = Caller("ann", "operator", "10.0.0.7"), Caller("bob", "operator", "10.0.0.8")


@pytest.fixture
def site(tmp_path):
    made = LivingSite(tmp_path / "store.duckdb")
    yield made
    made.database.close()


def history(site: LivingSite, id_: str) -> list[tuple[str, str]]:
    return list(zip(site.kinds(id_), site.comments(id_), strict=True))


def test_a_merged_incident_begins_with_what_its_cause_explains_not_with_a_stranger(site):
    """A GPU of another rack was hot an hour before: the row of impact and the page must not begin there."""
    hour = 3600 * SECOND
    other = site.report("gpu:n5.0", onset=site.now - hour)
    kept, began = site.report("gpu:n0.0"), site.now
    site.people.merge(kept, [other], ANN, "same batch of pads")
    assert site.stored(kept).onset == began
    site.wait(2)
    site.restart()
    assert site.stored(kept).onset == began
    site.report("gpu:n0.0", detector="cold", onset=began - hour)
    assert site.stored(kept).onset == began - hour, "what the cause explains dates it back"


@pytest.mark.slow
def test_a_merge_takes_over_who_works_on_what_was_merged(site):
    one, two = site.report("gpu:n5.0"), site.report("gpu:n4.3")
    site.people.acknowledge(two, BOB, "on it", hours=5)
    site.people.assign(two, BOB, "bob", "")
    until = site.stored(two).life.acknowledged_until
    kept = site.people.merge(one, [two], ANN, "same")
    assert (kept.state, kept.life.acknowledged_by, kept.life.assignee) == ("acknowledged", "bob", "bob")
    assert kept.life.acknowledged_until == until
    assert history(site, one)[1:] == [
        ("merged", f"{two}: same"),
        ("acknowledged", f"by bob, as {two} was"),
        ("assigned", f"to bob, as {two} was"),
    ]
    site.restart()
    assert site.stored(one).life == kept.life


@pytest.mark.slow
def test_a_merge_keeps_the_own_acknowledgement_and_owner(site):
    one, two = site.report("gpu:n5.0"), site.report("gpu:n4.3")
    site.people.acknowledge(one, ANN, "mine")
    site.people.assign(one, ANN, "ann", "")
    site.people.acknowledge(two, BOB, "on it", hours=5)
    site.people.assign(two, BOB, "bob", "")
    kept = site.people.merge(one, [two], ANN, "same")
    assert (kept.life.acknowledged_by, kept.life.assignee) == ("ann", "ann")
    assert site.kinds(one)[-1] == "merged"


@pytest.mark.slow
def test_an_acknowledged_ticket_does_not_acknowledge_the_page_that_takes_it_in(site):
    page, ticket = site.report("gpu:n5.0"), site.report("gpu:n4.3", level="ticket")
    site.people.acknowledge(ticket, BOB, "on it")
    kept = site.people.merge(page, [ticket], ANN, "same")
    assert (kept.state, kept.life.acknowledged_by) == ("open", "")


@pytest.mark.slow
@pytest.mark.parametrize(("heard", "state", "by"), [(True, "acknowledged", "bob"), (False, "open", "")])
def test_a_ticket_that_takes_in_a_page_is_heard_if_somebody_heard_the_page(site, heard, state, by):
    page, ticket = site.report("gpu:n5.0"), site.report("gpu:n4.3", level="ticket")
    site.people.acknowledge(ticket, ANN, "on it")
    if heard:
        site.people.acknowledge(page, BOB, "on it")
    kept = site.people.merge(ticket, [page, page], ANN, "same")
    assert (kept.severity, kept.state, kept.life.acknowledged_by) == ("page", state, by)
    rows = history(site, ticket)[2:4]
    assert [kind for kind, _ in rows] == ["severity_raised", "merged"]
    assert rows[1][1] == f"{page}: same"
