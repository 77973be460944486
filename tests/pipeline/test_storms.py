"""Storms: which pages count, what a storm lists, and when it ends (docs/incidents.md "What the clock does")."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pipeline.config.receivers import InhibitRule, Route
from pipeline.config.sections import Incidents
from pipeline.incidents import storms
from pipeline.incidents.arrivals import LiveDesk
from pipeline.incidents.changes import Change
from pipeline.incidents.desk import ACTOR
from pipeline.incidents.life import LifeBook
from pipeline.incidents.matchers import parse_matchers
from pipeline.incidents.silences import make_scope_matchers
from pipeline.incidents.storms import STORM, decode_pages, encode_pages, is_unit_of_many
from pipeline.model.records import SECOND, Caller, Incident, Life
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
    assert site.comments(pages[2])[-2:] == [f"maintenance {window.id} of ann ended: the hall", f"part of {storm.id}"]
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
    monkeypatch.setattr("pipeline.incidents.storms.MAX_REPRESENTED", 1)
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
    assert book.pages == {}
    assert book.shown["inc-hot"].life.inhibitor == "inc-coolant"
    ended = Change("resolved", replace(opened[0], resolved=NOON), NOON, ANN, "", (), opened[0])
    book.publish([ended], NOON)
    assert book.pages == {("Hot",): (NOON,)}


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


# --- tickets --------------------------------------------------------------------------------------


def report_tickets(site: LivingSite, number: int) -> list[str]:
    return [site.report(f"host:t{i}", level="ticket") for i in range(number)]


def test_many_tickets_are_one_storm_ticket_that_hides_no_page_and_ends_with_the_last(tmp_path):
    site = LivingSite(tmp_path / "store.duckdb", Incidents(storm_pages=2, storm_tickets=3))
    tickets = report_tickets(site, 6)
    site.restart()
    tickets += [site.report("host:late", level="ticket")]
    storm = storm_of(site)
    sent = [incident for incident, kind in site.alerts() if kind == "firing"]
    assert sent == [*tickets[:3], *[storm.id] * 3], "again when it has doubled"
    assert (storm.severity, storm.life.storm[0], storm.life.waits_since) == ("ticket", "Hot", None)
    assert list(storm.life.represents) == tickets[3:]
    assert storm.summary == "Alert storm: 4 more tickets, all Hot"
    labels = site.bodies()[-1]["alerts"][-1]["labels"]
    assert (labels["alertname"], labels["severity"], labels["storm_of"]) == ("AlertStorm", "warning", "Hot")
    assert "receivers" not in labels
    pages = report_hosts(site, "a", "b")
    assert [i for i, kind in site.alerts()[-2:] if kind == "firing"] == pages, "pages are counted by themselves"
    site.active = {}
    site.wait(12)
    assert site.state(storm.id) == "resolved"
    assert not [i for i, kind in site.alerts() if kind == "resolved" and i in tickets[3:]]
    site.database.close()


def test_a_ticket_of_a_storm_that_becomes_a_page_is_sent(tmp_path):
    site = LivingSite(tmp_path / "store.duckdb", Incidents(storm_tickets=2))
    tickets = report_tickets(site, 4)
    storm = storm_of(site)
    site.people.acknowledge(storm.id, ANN, "a bad batch")
    assert {site.state(i) for i in tickets[2:]} == {"acknowledged"}
    site.report("host:t3")
    assert site.state(tickets[3]) == "open"
    assert site.bodies()[-1]["alerts"][-1]["labels"]["severity"] == "critical"
    assert list(storm_of(site).life.represents) == tickets[2:3]
    site.database.close()


@pytest.mark.parametrize("leaves", ["as a page", "merged"])
def test_a_storm_ends_when_the_last_leaves_it_that_is_remembered(tmp_path, leaves):
    """The other one that it lists resolved so long ago that only the store has it."""
    site = LivingSite(tmp_path / "store.duckdb", Incidents(storm_tickets=2))
    tickets = report_tickets(site, 4)
    storm = storm_of(site)
    site.clear("host:t2")
    site.wait(200)
    assert site.state(tickets[2]) == "resolved"
    assert tickets[2] not in site.shown()
    if leaves == "merged":
        site.people.merge(tickets[0], [tickets[3]], ANN, "one fault")
    else:
        site.report("host:t3")
        assert (tickets[3], "firing") in site.alerts()
    assert site.state(storm.id) == "resolved"
    site.restart()
    site.step()
    site.database.close()


@pytest.mark.slow
def test_tickets_of_two_receivers_have_two_storms(tmp_path):
    receivers = ("gpu-team", "facility")
    site = LivingSite(tmp_path / "routed.duckdb", Incidents(storm_tickets=2), receivers=receivers, route=ROUTES)
    for n in range(8):
        site.report(f"gpu:n{n}.0", level="ticket")
    found = [i for i in site.shown().values() if i.detector == STORM]
    assert sorted(storms.list_receivers(i.life.storm) for i in found) == [("facility",), ("gpu-team",)]
    for one in found:
        (receiver,) = storms.list_receivers(one.life.storm)
        site.notifier._held[receiver].release(site.now)
        fired = {a["labels"]["incident"] for body in list_grouped(site, receiver) for a in body["alerts"]}
        assert fired & {i.id for i in found} == {one.id}
    site.database.close()


# --- what a storm must not swallow ----------------------------------------------------------------


@pytest.mark.slow
def test_a_page_about_a_unit_of_many_is_sent_in_a_storm_of_its_own_alert(site):
    report_hosts(site, *"abcde")
    storm = storm_of(site)
    units = [site.report(e) for e in ("site:local", "rack:r0", "cdu:c1", "pdu:p1", "leaf:l1", "loop:l1", "row:w1")]
    sent = [incident for incident, kind in site.alerts() if kind == "firing"]
    assert set(units) <= set(sent)
    assert {site.stored(i).life.inhibited_by for i in units} == {()}
    assert len(storm_of(site).life.represents) == len(storm.life.represents)


def test_what_several_nodes_depend_on_is_a_unit_of_many_whatever_it_is_called():
    topology = Topology({"node:n0": ("shed:s",), "node:n1": ("shed:s",), "gpu:n0.0": ("node:n0",), "gpu:n1.0": ()})
    found = {e: is_unit_of_many(e, topology) for e in ("shed:s", "node:n0", "gpu:n0.0", "hall:1", "job:1", "port:a/b")}
    assert found == {**dict.fromkeys(found, False), "shed:s": True, "hall:1": True}


@pytest.mark.slow
def test_pages_of_another_alert_are_sent_until_they_are_a_storm_themselves(site):
    report_hosts(site, *"abcd")
    leaks = [site.report(f"host:{name}", detector="leak") for name in "wxyz"]
    storms = [i for i in site.shown().values() if i.detector == STORM]
    assert [i.life.storm for i in storms] == [("Hot",), ("Leak",)]
    assert list(storms[1].life.represents) == leaks[2:]
    assert storms[1].summary == "Alert storm: 2 more pages, all Leak"
    sent = [incident for incident, kind in site.alerts() if kind == "firing"]
    assert set(leaks[:2]) <= set(sent)
    labels = [body["alerts"][0]["labels"] for body in site.bodies()]
    assert {one["storm_of"] for one in labels if one["alertname"] == "AlertStorm"} == {"Hot", "Leak"}
    site.restart()
    more = site.report("host:v", detector="leak")
    assert list(storm_of_kind(site, "Leak").life.represents) == [*leaks[2:], more]
    site.active = {key: one for key, one in site.active.items() if key[0] == "hot"}
    site.wait(12)
    assert [site.state(i.id) for i in storms] == ["open", "resolved"]


def storm_of_kind(site: LivingSite, name: str) -> Incident:
    return next(i for i in site.shown().values() if i.life.storm[:1] == (name,))


@pytest.mark.slow
def test_a_page_that_becomes_one_about_a_unit_of_many_leaves_its_storm_and_is_sent(site):
    pages = [site.report(f"gpu:n{n}.0") for n in range(4)]
    storm = storm_of(site)
    assert list(storm.life.represents) == pages[2:]
    known = site.engine.desk.incidents[pages[2]]
    moved = replace(known, cause="rack:r0")
    site.engine.apply(lambda desk: [Change("cause_changed", moved, site.now, ACTOR, "", (), known)], (), [])
    assert list(storm_of(site).life.represents) == pages[3:]
    assert storm_of(site).summary == "Alert storm: 1 more page, all Hot"
    assert site.alerts()[-2:].count((pages[2], "firing")) == 1
    assert site.kinds(pages[2]) == ["opened", "inhibited", "cause_changed", "uninhibited"]
    known = site.engine.desk.incidents[pages[3]]
    moved = replace(known, cause="rack:r0")
    site.engine.apply(lambda desk: [Change("cause_changed", moved, site.now, ACTOR, "", (), known)], (), [])
    assert site.state(storm.id) == "resolved"
    assert (pages[3], "firing") in site.alerts()


ROUTES = Route(
    "gpu-team",
    group_by=("...",),
    group_wait="0s",
    group_interval="1s",
    routes=({"receiver": "facility", "matchers": ['rack="r1"']},),
)


@pytest.mark.slow
def test_a_storm_is_counted_and_sent_for_each_set_of_receivers(tmp_path):
    receivers = ("gpu-team", "facility")
    site = LivingSite(tmp_path / "routed.duckdb", Incidents(storm_pages=2), receivers=receivers, route=ROUTES)
    own = [site.report(f"gpu:n{n}.0") for n in range(4)]
    others = [site.report(f"gpu:n{n}.0") for n in range(4, 8)]
    storms = {i.life.storm: i for i in site.shown().values() if i.detector == STORM}
    assert {key: list(one.life.represents) for key, one in storms.items()} == {
        ("Hot", "gpu-team"): own[2:],
        ("Hot", "facility"): others[2:],
    }
    for receiver, pages, key in (("gpu-team", own, "gpu-team"), ("facility", others, "facility")):
        site.notifier._held[receiver].release(site.now)
        fired = {one["labels"]["incident"] for body in list_grouped(site, receiver) for one in body["alerts"]}
        assert fired == {*pages[:2], storms["Hot", key].id}
    site.database.close()


def list_grouped(site: LivingSite, receiver: str) -> list[dict]:
    query = "SELECT payload FROM outbox WHERE receiver = ? AND state = 'pending'"
    return [json.loads(text) for (text,) in site.database.connection.execute(query, [receiver]).fetchall()]


def silence(site: LivingSite, *matchers: str):
    return site.people.add_silence("silence", parse_matchers(matchers), None, site.now + HOUR, "x", ANN)


@pytest.mark.slow
@pytest.mark.parametrize(
    "matcher", ["entity=site:local", "cause=site:local", "scope=site:other", "entity!=host:c,site=local"]
)
def test_a_silence_that_neither_names_a_storm_nor_silences_all_its_pages_lets_it_page(site, matcher):
    report_hosts(site, *"abcd")
    storm = storm_of(site)
    silence(site, *matcher.split(","))
    assert storm_of(site).state == "open"
    assert (storm.id, "resolved") not in site.alerts()
    assert storm.id not in [i.id for i in site.people.preview_silence(parse_matchers(matcher.split(",")))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "named", ["alertname=AlertStorm", "detector=alert_storm", "storm_of=Hot", "storm_of=~Hot|Leak"]
)
def test_a_silence_that_names_a_storm_silences_it(site, named):
    report_hosts(site, *"abcd")
    storm, made = storm_of(site), silence(site, named)
    assert storm_of(site).life.silenced_by == (made.id,)
    assert site.alerts()[-1] == (storm.id, "resolved")
    assert site.kinds(storm.id)[-1] == "silenced"


@pytest.mark.slow
def test_a_storm_is_silenced_while_one_silence_silences_all_its_pages(site):
    made = silence(site, "entity=~host:c|host:d")
    pages = report_hosts(site, *"abcd")
    site.people.expire_silence(made.id, ANN)
    storm = storm_of(site)
    made = silence(site, "alertname=Hot")
    assert storm_of(site).life.silenced_by == (made.id,)
    assert site.alerts()[-1] == (storm.id, "resolved")
    site.people.expire_silence(made.id, ANN)
    assert (storm_of(site).state, site.alerts()[-1]) == ("open", (storm.id, "firing"))
    made = silence(site, "scope=site:local")
    assert storm_of(site).life.silenced_by == (made.id,)
    site.people.expire_silence(made.id, ANN)
    silence(site, "entity=host:c")
    assert (storm_of(site).state, site.state(pages[2])) == ("open", "silenced")


@pytest.mark.parametrize("is_acknowledged", [False, True])
def test_a_storm_beyond_its_list_is_sent_again_when_it_has_doubled(tmp_path, monkeypatch, is_acknowledged):
    monkeypatch.setattr(storms, "MAX_REPRESENTED", 4)
    site = LivingSite(tmp_path / "store.duckdb", Incidents(storm_pages=1))
    report_hosts(site, *(f"h{i}" for i in range(11)))
    if is_acknowledged:
        site.people.acknowledge(storm_of(site).id, "ann", "mine")
    sent, site.active = site.kinds(storm_of(site).id).count("worsened"), {}
    report_hosts(site, *(f"k{i}" for i in range(9 if is_acknowledged else 5)))
    assert site.kinds(storm_of(site).id).count("worsened") == sent
    assert storm_of(site).state == ("acknowledged" if is_acknowledged else "open")
    site.restart()
    report_hosts(site, "last")
    storm = storm_of(site)
    assert storm.summary == f"Alert storm: {20 if is_acknowledged else 16} more pages, all Hot"
    assert (len(storm.life.represents), storm.life.represented) == (4, 20 if is_acknowledged else 16)
    assert site.kinds(storm.id)[-1] == "worsened"
    assert storm.state == "open"
    site.database.close()


def test_an_acknowledged_storm_acknowledges_also_what_its_list_has_no_room_for(tmp_path, monkeypatch):
    monkeypatch.setattr(storms, "MAX_REPRESENTED", 4)
    site = LivingSite(tmp_path / "store.duckdb", Incidents(storm_pages=1))
    pages = report_hosts(site, *(f"h{i}" for i in range(11)))
    copies, real = list[int](), LiveDesk.incidents.fget
    monkeypatch.setattr(LiveDesk, "incidents", property(lambda desk: copies.append(1) or real(desk)))
    site.people.acknowledge(storm_of(site).id, "ann", "mine")
    assert len(copies) < 5, "a copy of all incidents for each page of a storm takes a minute with 2,000"
    assert [site.state(page) for page in pages] == ["open", *["acknowledged"] * 10]
    sent = len(site.alerts())
    site.wait(30)
    assert len(site.alerts()) == sent
    site.database.close()


def test_acknowledging_a_storm_leaves_the_pages_that_another_person_works_on(site):
    pages = report_hosts(site, *(f"h{i}" for i in range(6)))
    storm = storm_of(site)
    site.people.acknowledge(pages[3], "bob", "mine", hours=8)
    theirs, history = site.stored(pages[3]), site.kinds(pages[3])
    site.people.acknowledge(pages[4], "ann", "mine too")
    site.now += MINUTE
    site.people.acknowledge(storm.id, "ann", "all of it", hours=1)
    assert site.stored(pages[3]).life == theirs.life
    assert (theirs.life.acknowledged_by, site.kinds(pages[3])) == ("bob", history)
    taken = [site.stored(page).life for page in (storm.id, pages[2], pages[4], pages[5])]
    assert {(life.acknowledged_by, life.acknowledged_until) for life in taken} == {("ann", site.now + HOUR)}


def test_a_storm_of_an_older_version_has_its_number_in_its_title():
    old = replace(make_page("inc-old"), detector=STORM, life=Life(represents=("inc-0", "inc-1")))
    assert storms.count_members(replace(old, summary="Alert storm: 4980 more pages, all Hot")) == 4980
    assert storms.count_members(replace(old, summary="my storm")) == 2
    page = make_page("inc-5")
    made = storms.change_storm(replace(old, summary="Alert storm: 7 more pages"), old, [page], ["inc-5"], 2)
    assert (made.summary, made.life.represented) == ("Alert storm: 9 more pages, all Hot", 9)


def test_a_storm_of_an_older_version_goes_on_with_what_it_has_and_takes_no_more():
    book = LifeBook(Incidents(storm_pages=1), Topology({}))
    old = replace(make_page("inc-old"), detector=STORM, cause="site:local", entity="site:local")
    old = replace(old, summary="Alert storm: 1 more page", life=Life(represents=("inc-0",)))
    page = make_page("inc-0")
    book.load([old, replace(page, life=Life(inhibited_by=("inc-old",)))])
    book.publish([Change("opened", make_page(f"inc-{i}"), NOON, ACTOR) for i in (1, 2)], NOON)
    assert book.shown["inc-old"].life.represents == ("inc-0",)
    assert book.shown["inc-2"].life.inhibited_by != ("inc-old",)
    assert decode_pages('{"pages": [1, 2]}') == {}
    assert decode_pages(encode_pages(book.pages)) == book.pages == {("Hot",): (NOON, NOON)}
    book.publish([Change("resolved", replace(page, resolved=NOON), NOON, ANN, "", (), page)], NOON)
    assert book.shown["inc-old"].resolved == NOON
