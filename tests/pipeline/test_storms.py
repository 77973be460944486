"""Storms: which pages count, what a storm lists, and when it ends (docs/incidents.md "What the clock does")."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.config.receivers import InhibitRule
from pipeline.config.sections import Incidents
from pipeline.incidents.cases import Change
from pipeline.incidents.desk import ACTOR
from pipeline.incidents.life import STORM, LifeBook
from pipeline.incidents.matchers import parse_matchers
from pipeline.incidents.silences import make_scope_matchers
from pipeline.model.records import SECOND, Caller, Incident
from pipeline.model.topology import Topology
from tests.pipeline.living import HOUR, MINUTE, NOON, LivingSite

ANN = Caller("ann", "operator", "10.0.0.7")


@pytest.fixture
def site(tmp_path):
    made = LivingSite(tmp_path / "store.duckdb", Incidents(storm_pages=2))
    yield made
    made.database.close()


def storm_of(site: LivingSite) -> Incident:
    return next(i for i in site.shown().values() if i.detector == STORM)


def make_page(id_: str) -> Incident:
    return Incident(id_, f"host:{id_}", NOON, NOON, "page", "hot", "hot", f"host:{id_}", (f"host:{id_}",))


def report_hosts(site: LivingSite, *names: str) -> list[str]:
    return [site.report(f"host:{name}") for name in names]


@pytest.mark.slow
def test_pages_that_the_end_of_a_maintenance_window_would_send_at_once_join_a_storm(site):
    scopes = make_scope_matchers([f"host:h{i}" for i in range(8)])
    window = site.people.add_silence("maintenance", scopes, None, site.now + HOUR, "the hall", ANN)
    pages = report_hosts(site, *(f"h{i}" for i in range(8)))
    assert site.alerts() == []
    site.wait(60 + 16)
    storm = storm_of(site)
    sent = [incident for incident, kind in site.alerts() if kind == "firing"]
    assert sent == [*pages[:2], storm.id]
    assert list(storm.life.represents) == pages[2:]
    assert storm.summary == "Alert storm: 6 more pages, all Hot"
    assert {site.state(i) for i in pages} == {"open"}
    assert site.kinds(pages[0]) == ["opened", "silenced", "unsilenced"]
    assert site.kinds(pages[2]) == ["opened", "silenced", "unsilenced", "inhibited"]
    assert site.comments(pages[2])[-2:] == [f"{window.id} ended", f"part of {storm.id}"]
    site.restart()
    site.active = {}
    site.wait(12)
    assert site.state(storm.id) == "resolved"
    assert not [i for i, kind in site.alerts() if kind == "resolved" and i in pages[2:]]


@pytest.mark.slow
def test_pages_whose_silence_a_person_ends_join_the_storm_that_is_open(site):
    silence = site.people.add_silence("silence", parse_matchers(["entity=host:q"]), None, site.now + HOUR, "x", ANN)
    quiet = site.report("host:q")
    pages = report_hosts(site, "a", "b", "c")
    storm = storm_of(site)
    assert list(storm.life.represents) == pages[2:]
    site.people.expire_silence(silence.id, ANN)
    assert list(storm_of(site).life.represents) == [pages[2], quiet]
    assert (quiet, "firing") not in site.alerts()


@pytest.mark.slow
def test_pages_whose_acknowledgements_expire_at_once_join_a_storm(site):
    pages = []
    for i in range(5):
        pages += report_hosts(site, f"h{i}")
        site.wait(6)
    for page in pages:
        site.people.acknowledge(page, ANN, "mine")
    before = len(site.alerts())
    site.wait(121)
    storm = storm_of(site)
    again = [incident for incident, kind in site.alerts()[before:] if kind == "firing"]
    assert again == [*pages[:2], storm.id]
    assert list(storm.life.represents) == pages[2:]
    assert site.kinds(pages[4])[-2:] == ["acknowledgement_expired", "inhibited"]
    site.active = {}
    site.wait(12)
    assert sorted(i for i, kind in site.alerts() if kind == "resolved") == sorted([*pages, storm.id])


@pytest.mark.slow
def test_a_storm_that_was_silenced_or_acknowledged_is_sent_again_and_is_no_part_of_itself(site):
    report_hosts(site, "a", "b", "c")
    storm = storm_of(site)
    matchers = parse_matchers(["alertname=AlertStorm"])
    site.people.acknowledge(storm.id, ANN, "mine", hours=0.1)
    site.wait(7)
    site.people.add_silence("silence", matchers, None, site.now + MINUTE, "x", ANN)
    site.wait(2)
    assert site.kinds(storm.id) == ["opened", "acknowledged", "acknowledgement_expired", "silenced", "unsilenced"]
    assert storm_of(site).life.inhibited_by == ()
    assert site.alerts()[-1] == (storm.id, "firing")


@pytest.mark.slow
def test_a_page_that_was_acknowledged_and_is_worse_counts_for_a_storm(site):
    page = site.report("gpu:n0.0", level="ticket")
    site.people.acknowledge(page, ANN, "mine")
    report_hosts(site, "a", "b")
    site.report("gpu:n0.0")
    assert list(storm_of(site).life.represents) == [page]


@pytest.mark.slow
def test_a_merged_incident_leaves_the_list_and_the_count_of_its_storm(site):
    pages = report_hosts(site, *"abcdef")
    storm = storm_of(site)
    assert storm.summary == "Alert storm: 4 more pages, all Hot"
    site.people.merge(pages[0], pages[2:4], ANN, "one fault")
    storm = storm_of(site)
    assert list(storm.life.represents) == pages[4:]
    assert storm.summary == "Alert storm: 2 more pages, all Hot"
    assert storm.members == ("host:e", "host:f")
    site.people.comment(pages[2], ANN, "the same cable")
    site.people.merge(pages[4], [pages[5]], ANN, "one fault")
    assert storm_of(site).summary == "Alert storm: 1 more page, all Hot"
    site.restart()
    site.people.merge(pages[0], [pages[4]], ANN, "one fault")
    assert site.state(storm.id) == "resolved"
    assert site.alerts()[-1] == (storm.id, "resolved")


@pytest.mark.slow
def test_a_page_of_a_storm_that_has_ended_is_sent_when_it_returns(site):
    pages = report_hosts(site, "a", "b", "c")
    storm = storm_of(site)
    site.active = {}
    site.wait(11)
    assert site.state(storm.id) == "resolved"
    assert site.report("host:c") == pages[2]
    assert site.alerts()[-1] == (pages[2], "firing")
    assert site.stored(pages[2]).life.inhibited_by == ()


@pytest.mark.slow
def test_a_page_that_returns_while_its_storm_is_open_stays_a_part_of_it(site):
    pages = report_hosts(site, "a", "b", "c", "d")
    site.clear("host:c")
    site.wait(11)
    assert site.state(pages[2]) == "resolved"
    assert site.report("host:c") == pages[2]
    assert list(storm_of(site).life.represents) == pages[2:]
    assert (pages[2], "firing") not in site.alerts()


@pytest.mark.slow
def test_a_storm_that_lists_only_a_part_ends_with_the_last_of_all(site, monkeypatch):
    monkeypatch.setattr("pipeline.incidents.life.MAX_REPRESENTED", 1)
    pages = report_hosts(site, "a", "b", "c", "d")
    storm = storm_of(site)
    assert list(storm.life.represents) == pages[2:3]
    site.clear("host:c")
    site.wait(11)
    assert site.state(pages[2]) == "resolved"
    assert site.state(storm.id) == "open"
    site.clear("host:d")
    site.wait(11)
    assert site.state(storm.id) == "resolved"


COOLANT_OVER_HOT = InhibitRule(('detector="coolant"',), ('detector="hot"',))


@pytest.fixture
def cooled(tmp_path):
    """A site where an incident of coolant inhibits those of hosts."""
    made = LivingSite(tmp_path / "cooled.duckdb", Incidents(storm_pages=2), inhibit_rules=(COOLANT_OVER_HOT,))
    yield made
    made.database.close()


def list_sent(site: LivingSite, receiver="on-call") -> list[tuple[str, str]]:
    """(incident, firing or resolved) of what the thread of a receiver would send now."""
    site.notifier._held[receiver].release(site.now)
    rows = site.database.connection.execute(
        "SELECT incident, kind FROM outbox WHERE receiver = ? AND state = 'pending' ORDER BY created, number, rowid",
        [receiver],
    )
    return rows.fetchall()


@pytest.mark.slow
def test_pages_that_the_end_of_an_inhibition_would_send_at_once_join_a_storm(cooled):
    source = cooled.report("cdu:c1", detector="coolant")
    pages = []
    for i in range(6):
        cooled.now += SECOND
        pages += report_hosts(cooled, f"h{i}")
    assert list_sent(cooled) == [(source, "firing")]
    assert [i for i in cooled.shown().values() if i.detector == STORM] == []
    cooled.restart()
    cooled.wait(11)  # the pages of before are no longer counted
    cooled.people.resolve(source, ANN, "pump changed")
    storm = storm_of(cooled)
    assert list(storm.life.represents) == pages[2:]
    sent = [incident for incident, kind in list_sent(cooled) if kind == "firing"]
    assert sorted(sent) == sorted([source, *pages[:2], storm.id])
    assert cooled.kinds(pages[0]) == ["opened", "inhibited", "uninhibited"]
    assert cooled.kinds(pages[2]) == ["opened", "inhibited", "uninhibited", "inhibited"]
    assert cooled.comments(pages[2])[-1] == f"part of {storm.id}"
    cooled.active = {}
    cooled.wait(12)
    assert cooled.state(storm.id) == "resolved"
    ended = [incident for incident, kind in list_sent(cooled) if kind == "resolved"]
    assert sorted(ended) == sorted([source, *pages[:2], storm.id])


@pytest.mark.slow
def test_a_page_that_was_sent_before_it_was_inhibited_does_not_count_again(cooled):
    pages = report_hosts(cooled, "a", "b")
    assert {incident for incident, _ in list_sent(cooled)} == {*pages}
    cooled.wait(11)
    source = cooled.report("cdu:c1", detector="coolant")
    assert {incident for incident, _ in list_sent(cooled)} == {*pages, source}
    cooled.wait(11)
    cooled.people.resolve(source, ANN, "pump changed")
    other = report_hosts(cooled, "c", "d")
    assert [i for i in cooled.shown().values() if i.detector == STORM] == []
    assert {incident for incident, _ in list_sent(cooled)} == {*pages, source, *other}


@pytest.mark.slow
def test_a_page_whose_acknowledgement_expires_under_an_inhibition_is_sent_and_counts_when_that_ends(cooled):
    page = cooled.report("host:a")
    cooled.people.acknowledge(page, ANN, "mine")
    assert list_sent(cooled) == [(page, "firing")]
    source = cooled.report("cdu:c1", detector="coolant")
    cooled.wait(121)
    before = list_sent(cooled)
    assert cooled.kinds(page)[-1] == "acknowledgement_expired"
    assert before.count((page, "firing")) == 1
    cooled.people.resolve(source, ANN, "pump changed")
    assert list_sent(cooled).count((page, "firing")) == 2
    report_hosts(cooled, "b", "c")
    assert len(storm_of(cooled).life.represents) == 1


@pytest.mark.parametrize("first", [0, 1])
def test_a_page_that_opens_in_one_step_with_what_inhibits_it_does_not_count(cooled, first):
    """Whichever of them comes first in the step."""
    names = [("coolant", "cdu:c1"), ("hot", "host:a")]
    book = cooled.engine.life
    opened = [replace(make_page(f"inc-{d}"), detector=d, entity=e, cause=e) for d, e in names]
    changes = [Change("opened", page, NOON, ACTOR) for page in opened]
    book.publish(changes[::-1] if first else changes, NOON)
    assert len(book.pages) == 1
    assert book.shown["inc-hot"].life.inhibitor == "inc-coolant"
    ended = Change("resolved", replace(opened[0], resolved=NOON), NOON, ANN, "", (), opened[0])
    book.publish([ended], NOON)
    assert len(book.pages) == 2


def test_a_page_that_joins_a_storm_and_is_merged_in_one_step_is_not_in_its_list():
    book = LifeBook(Incidents(storm_pages=1), Topology({}))
    opened = [make_page(f"inc-{i}") for i in range(3)]
    changes = [Change("opened", page, NOON, ACTOR) for page in opened]
    ends = [
        Change("resolved", replace(page, resolved=NOON), NOON, ACTOR, "", (), page, folded_into="inc-0")
        for page in opened[1:]
    ]
    made = book.publish([*changes, *ends], NOON)
    assert [c.kind for c in made if c.incident.detector == STORM] == []
    made = book.publish([Change("opened", make_page("inc-4"), NOON, ACTOR), *ends[:1]], NOON)
    assert next(c for c in made if c.incident.detector == STORM).incident.life.represents == ("inc-4",)
