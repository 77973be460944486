"""Pages that a rule inhibits, at real receivers: worse states wait, acknowledged pages are not sent, storms count."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.receivers import InhibitRule, PagerDuty, Route, Webhook
from pipeline.config.sections import EscalationStep, Incidents
from pipeline.incidents.matchers import parse_matchers
from pipeline.incidents.storms import STORM
from pipeline.model.records import SECOND, Caller
from tests.pipeline.living import HOUR, LivingSite
from tests.pipeline.notifier_harness import Receiver
from tests.pipeline.receiver_servers import Service, serve, stop

ANN = Caller("ann", "operator", "10.0.0.7")
COOLANT_OVER_HOT = InhibitRule(('detector="coolant"',), ('detector="hot"',))
KEY = "0123456789abcdef0123456789ABCDEF"
HOSTS = tuple(f"host:h{i}" for i in range(4))


class HeardSite(LivingSite):
    """A site with a webhook and a PagerDuty that answer. Two pages are sent before a storm represents the others."""

    def __init__(self, folder: Path, hook: Receiver, pager: Service, rules: Incidents | None = None, **notify: Any):
        key = folder / "key"
        key.write_text(KEY)
        key.chmod(0o600)
        self.hook, self.pager = hook, pager
        super().__init__(
            folder / "store.duckdb",
            rules or Incidents(storm_pages=2),
            inhibit_rules=(COOLANT_OVER_HOT,),
            webhooks=(Webhook("hook", f"http://127.0.0.1:{hook.server_port}/"),),
            pagerduty=(PagerDuty("pager", key, url=pager.url),),
            **notify,
        )

    def send(self) -> None:
        """Sends all that is due, as the threads of the receivers do twice a second."""
        for name in self.notifier.receivers:
            while self.notifier.send_due(name):
                pass

    def pass_time(self, minutes: float) -> None:
        """Lets time pass in steps of a minute, in which the receivers get all due messages."""
        for _ in range(int(minutes)):
            self.wait(1)
            self.send()

    def posted(self, incident: str) -> list[list[tuple[str, str]]]:
        """(status, severity) of the alerts of an incident in each body that the webhook got."""
        found = []
        for _, body in self.hook.posts:
            mine = [a for a in body["alerts"] if a["labels"]["incident"] == incident]
            found += [[(a["status"], a["labels"]["severity"]) for a in mine]] if mine else []
        return found

    def events(self, key: str) -> list[str]:
        """The actions that PagerDuty got for a key."""
        return [body["event_action"] for body in self.pager.bodies("/v2/enqueue") if body["dedup_key"] == key]

    def storms(self) -> list[Any]:
        return [i for i in self.shown().values() if i.detector == STORM]


@pytest.fixture
def pager() -> Iterator[Service]:
    made, thread = serve()
    yield made
    stop(made, thread)


@pytest.fixture
def heard(tmp_path: Path, receiver: Receiver, pager: Service) -> Iterator[HeardSite]:
    made = HeardSite(tmp_path, receiver, pager)
    yield made
    made.database.close()


def open_all(site: LivingSite, level: str = "page") -> list[str]:
    found = []
    for host in HOSTS:
        site.now += SECOND
        found.append(site.report(host, level=level))
    return found


SENT, ENDED, PAGED = [("firing", "warning")], [("resolved", "warning")], [("firing", "critical")]


@pytest.mark.slow
def test_tickets_that_become_pages_under_an_inhibition_wait_and_count_for_a_storm(heard):
    tickets = open_all(heard, "ticket")
    heard.send()
    source = heard.report("cdu:c1", detector="coolant")
    heard.send()
    assert open_all(heard) == tickets
    heard.send()
    for one in tickets:
        assert heard.posted(one) == [SENT, ENDED], "the ticket ended; the page waits"
        assert heard.events(one) == ["trigger", "resolve"]
    heard.restart()
    heard.wait(11)
    heard.send()
    heard.people.resolve(source, ANN, "pump changed")
    heard.send()
    (storm,) = heard.storms()
    assert list(storm.life.represents) == tickets[2:]
    for one in tickets[:2]:
        assert heard.posted(one) == [SENT, ENDED, PAGED]
        assert heard.events(one) == ["trigger", "resolve", "trigger"]
    for one in tickets[2:]:
        assert heard.posted(one) == [SENT, ENDED]
    heard.active = {}
    heard.wait(12)
    heard.send()
    for one in tickets[:2]:
        assert heard.posted(one)[3:] == [[("resolved", "critical")]]
    for one in tickets[2:]:
        assert heard.posted(one) == [SENT, ENDED]
        assert heard.events(one) == ["trigger", "resolve"]


@pytest.mark.slow
def test_what_became_worse_under_an_inhibition_ends_and_returns_without_a_page(heard):
    (ticket,) = [heard.report("host:a", level="ticket")]
    heard.send()
    source = heard.report("cdu:c1", detector="coolant")
    heard.report("host:a")
    heard.send()
    heard.clear("host:a")
    heard.wait(11)
    heard.send()
    assert heard.state(ticket) == "resolved"
    assert heard.posted(ticket) == [SENT, ENDED], "no end of a page that was never sent"
    heard.restart()
    assert heard.report("host:a") == ticket
    heard.send()
    assert heard.posted(ticket) == [SENT, ENDED]
    heard.people.resolve(source, ANN, "pump changed")
    heard.send()
    assert heard.posted(ticket) == [SENT, ENDED, PAGED]
    assert heard.events(ticket) == ["trigger", "resolve", "trigger"]
    assert len(heard.engine.life.pages) == 1


@pytest.mark.slow
def test_a_page_that_is_worse_and_returned_before_its_receiver_could_be_told_is_sent_once(heard):
    """All within half a second: the messages are decided about together."""
    ticket = heard.report("host:a", level="ticket")
    heard.send()
    source = heard.report("cdu:c1", detector="coolant")
    heard.report("host:a")
    heard.people.resolve(ticket, ANN, "done")
    heard.people.reopen(ticket, ANN, "not done")
    heard.send()
    assert heard.posted(ticket) == [SENT, ENDED]
    heard.people.resolve(source, ANN, "pump changed")
    heard.send()
    assert heard.posted(ticket) == [SENT, ENDED, PAGED]


@pytest.mark.slow
def test_a_cause_that_changes_under_an_inhibition_is_sent_and_counts_when_that_ends(heard):
    pages = []
    for node in (1, 5, 6):
        pages.append(heard.report(f"gpu:n{node}.0"))
        heard.people.merge(pages[-1], [heard.report(f"gpu:n{node}.1")], ANN, "one fault")
        heard.wait(11)
    heard.send()
    source = heard.report("cdu:c1", detector="coolant")
    parts = [heard.people.split(page, [heard.stored(page).cause], ANN, "two faults").id for page in pages]
    heard.send()
    assert [heard.stored(page).cause for page in pages] == ["gpu:n1.1", "gpu:n5.1", "gpu:n6.1"]
    assert [heard.posted(page) for page in pages] == [[PAGED, [("resolved", "critical")]]] * 3
    heard.wait(11)
    heard.people.resolve(source, ANN, "pump changed")
    heard.send()
    (storm,) = heard.storms()
    assert list(storm.life.represents) == [pages[2], *parts]
    assert [heard.posted(page)[2:] for page in pages] == [[PAGED], [PAGED], []]
    assert [heard.events(page)[2:] for page in pages] == [["trigger"], ["trigger"], []]
    assert [heard.posted(part) for part in parts] == [[]] * 3


@pytest.mark.slow
def test_pages_that_a_person_took_while_they_were_inhibited_are_sent_and_count_when_that_expires(heard):
    source = heard.report("cdu:c1", detector="coolant")
    pages = open_all(heard)
    heard.send()
    for page in pages:
        heard.people.acknowledge(page, ANN, "the pump")
    heard.send()
    heard.restart()
    heard.people.resolve(source, ANN, "pump changed")
    heard.send()
    heard.wait(20)
    heard.send()
    assert [heard.posted(page) + heard.events(page) for page in pages] == [[]] * 4
    heard.people.resolve(pages[0], ANN, "cold again")
    heard.send()
    assert heard.posted(pages[0]) + heard.events(pages[0]) == []
    heard.wait(120)
    heard.send()
    (storm,) = heard.storms()
    assert list(storm.life.represents) == pages[3:]
    assert [heard.posted(page) for page in pages] == [[], [PAGED], [PAGED], []]
    assert [heard.events(page) for page in pages] == [[], ["trigger"], ["trigger"], []], "no end before"
    assert heard.events(storm.id) == ["trigger"]


@pytest.mark.slow
def test_a_page_that_was_taken_at_once_by_a_person_is_sent_where_nothing_inhibits_it(heard):
    page = heard.report("host:a")
    heard.people.acknowledge(page, ANN, "mine")
    heard.send()
    assert (heard.posted(page), heard.events(page)) == ([PAGED], ["trigger", "acknowledge"])


@pytest.mark.slow
def test_with_routes_too_pages_that_a_person_took_while_they_were_inhibited_are_sent_when_that_expires(
    tmp_path, receiver, pager
):
    route = Route("hook", group_by=("alertname",), group_wait="0s", group_interval="1m")
    site = HeardSite(tmp_path, receiver, pager, route=route)
    source = site.report("cdu:c1", detector="coolant")
    taken, other = site.report("host:a"), site.report("host:b")
    site.send()
    site.people.acknowledge(taken, ANN, "the pump")
    site.people.resolve(source, ANN, "pump changed")
    site.pass_time(5)
    assert (site.posted(taken), site.posted(other)) == ([], [PAGED])
    rows = site.database.connection.execute("SELECT incident, state FROM outbox WHERE kind = 'firing'").fetchall()
    assert (other, "delivered") in rows
    assert (taken, "muted") in rows, "delivered are only pages that were in a message"
    site.restart()
    site.wait(120)
    site.send()
    assert site.posted(taken) == [PAGED]
    site.database.close()


@pytest.mark.slow
def test_pages_count_for_a_storm_also_if_their_rule_is_no_longer_configured_after_a_restart(heard):
    """The receivers' threads may be the first to work after the restart."""
    heard.report("cdu:c1", detector="coolant")
    pages = open_all(heard)
    heard.send()
    heard.wait(11)
    heard.notify = replace(heard.notify, inhibit_rules=())
    heard.restart()
    heard.send()
    assert [heard.posted(page) for page in pages] == [[]] * 4
    heard.wait(1)
    heard.send()
    assert [heard.posted(page) for page in pages] == [[PAGED], [PAGED], [], []]
    assert list(heard.storms()[0].life.represents) == pages[2:]


@pytest.mark.slow
def test_a_silence_that_ends_under_an_inhibition_sends_no_page_before_that_ends_too(heard):
    source = heard.report("cdu:c1", detector="coolant")
    silence = heard.people.add_silence("silence", parse_matchers(["detector=hot"]), None, heard.now + HOUR, "x", ANN)
    pages = open_all(heard)
    heard.send()
    heard.people.expire_silence(silence.id, ANN)
    heard.send()
    heard.wait(11)
    assert [heard.posted(page) for page in pages] == [[]] * 4
    heard.people.resolve(source, ANN, "pump changed")
    heard.send()
    assert [heard.posted(page) for page in pages] == [[PAGED], [PAGED], [], []]


@pytest.mark.slow
def test_a_silence_that_began_under_an_inhibition_holds_pages_after_that(heard):
    source, pages = heard.report("cdu:c1", detector="coolant"), open_all(heard)
    heard.send()
    silence = heard.people.add_silence("silence", parse_matchers(["detector=hot"]), None, heard.now + HOUR, "x", ANN)
    heard.send()
    heard.people.resolve(source, ANN, "pump changed")
    heard.wait(11)
    heard.send()
    assert [heard.posted(page) for page in pages] == [[]] * 4
    heard.people.expire_silence(silence.id, ANN)
    heard.send()
    assert [heard.posted(page) for page in pages] == [[PAGED], [PAGED], [], []]


@pytest.mark.slow
def test_what_ends_together_with_its_source_is_not_paged_again(heard):
    page, ticket = heard.report("host:a"), heard.report("host:b", level="ticket")
    heard.send()
    heard.report("cdu:c1", detector="coolant")
    heard.report("host:b")
    heard.active = {}
    heard.wait(12)
    heard.send()
    assert (heard.posted(page), heard.posted(ticket)) == ([PAGED, [("resolved", "critical")]], [SENT, ENDED])


@pytest.mark.slow
def test_the_steps_of_escalation_count_from_the_end_of_an_inhibition(tmp_path, receiver, pager):
    steps = Incidents(escalation=(EscalationStep(15.0, ("hook",)), EscalationStep(30.0, ("pager",))))
    site = HeardSite(tmp_path, receiver, pager, steps)
    source, page = site.report("cdu:c1", detector="coolant"), site.report("host:a")
    site.pass_time(60)
    site.people.resolve(source, ANN, "pump changed")
    ended = site.now
    site.pass_time(14)
    assert site.kinds(page) == ["opened", "inhibited", "uninhibited"]
    assert site.stored(page).life.waits_since == ended
    site.pass_time(2)
    assert site.kinds(page)[3:] == ["escalated"]
    site.restart()
    site.pass_time(15)
    assert site.kinds(page)[3:] == ["escalated", "escalated"]
    site.database.close()


@pytest.mark.slow
def test_a_part_of_what_a_person_took_is_no_page_before_that_expires(heard):
    one, two = heard.report("gpu:n5.0", detector="xid"), heard.report("gpu:n4.3", detector="xid")
    heard.people.merge(one, [two], ANN, "one fault")
    heard.people.acknowledge(one, ANN, "mine")
    heard.send()
    made = heard.people.split(one, ["gpu:n5.0"], ANN, "two faults")
    assert (made.state, made.life.waits_since) == ("acknowledged", None)
    heard.send()
    heard.restart()
    heard.notifier.write_missed()
    heard.send()
    assert heard.posted(made.id) + heard.events(made.id) == []
    split = heard.now
    heard.wait(121)
    heard.send()
    assert heard.posted(made.id) == [PAGED]
    assert heard.events(made.id) == ["trigger"]
    assert heard.events(one)[-2:] == ["resolve", "trigger"], "it was acknowledged there"
    assert [time > split for time in heard.engine.life.pages["Xid",]] == [True, True], "both parts count"


@pytest.mark.slow
def test_an_acknowledged_ticket_that_becomes_a_page_pages_in_pagerduty(heard):
    ticket = heard.report("host:a", level="ticket")
    heard.send()
    heard.people.acknowledge(ticket, ANN, "mine")
    heard.send()
    heard.report("host:a")
    heard.send()
    assert heard.events(ticket) == ["trigger", "acknowledge", "resolve", "trigger"]


@pytest.mark.slow
def test_a_split_undoes_a_merge_with_a_page_that_counts_for_a_storm(heard):
    pages = [heard.report(f"gpu:n{n}.0", detector="xid") for n in (4, 5)]
    heard.people.merge(pages[0], pages[1:], ANN, "one fault")
    heard.send()
    made = heard.people.split(pages[0], ["gpu:n5.0"], ANN, "two faults")
    heard.send()
    (storm,) = heard.storms()
    assert list(storm.life.represents) == [made.id]
    assert heard.posted(made.id) == []
    assert heard.now - heard.engine.life.pages["Xid",][-1] < SECOND


@pytest.mark.slow
def test_a_suspect_that_no_receiver_takes_inhibits_nothing_until_it_is_a_ticket(heard):
    source = heard.report("cdu:c9", detector="coolant", level="suspect")
    page = heard.report("gpu:n4.0")
    heard.send()
    assert (heard.stored(source).severity, heard.stored(page).life.inhibitor) == ("watch", "")
    assert (heard.posted(source), heard.posted(page)) == ([], [PAGED])
    heard.report("cdu:c9", detector="coolant", level="ticket")
    assert heard.stored(page).life.inhibitor == source
    other = heard.report("gpu:n5.0")
    heard.people.add_silence("silence", parse_matchers(["entity=cdu:c9"]), None, heard.now + HOUR, "x", ANN)
    heard.send()
    assert heard.posted(other) == [], "a silenced source inhibits"


@pytest.mark.slow
def test_a_watch_that_a_receiver_takes_inhibits(tmp_path):
    taker = Webhook("logbook", "http://127.0.0.1:1/", send_watch=True)
    site = LivingSite(tmp_path / "taken.duckdb", inhibit_rules=(COOLANT_OVER_HOT,), webhooks=(taker,))
    source = site.report("cdu:c9", detector="coolant", level="suspect")
    assert site.stored(site.report("gpu:n4.0")).life.inhibitor == source
    site.database.close()


@pytest.mark.slow
@pytest.mark.parametrize("rules", [(), (COOLANT_OVER_HOT,)])
def test_a_page_that_is_silenced_while_its_receiver_is_away_does_not_page_when_it_returns(tmp_path, receiver, rules):
    hook = Webhook("hook", f"http://127.0.0.1:{receiver.server_port}/")
    site = LivingSite(tmp_path / "away.duckdb", inhibit_rules=rules, webhooks=(hook,))
    receiver.statuses = [503] * 4
    page, heard = site.report("host:a"), site.report("host:b")
    for _ in range(3):
        site.now += SECOND
        site.notifier.send_due("hook")
    made = site.people.add_silence("silence", parse_matchers(["entity=host:a"]), None, site.now + HOUR, "x", ANN)
    receiver.statuses = []
    receiver.posts.clear()
    for _ in range(4):
        site.now += 60 * SECOND
        site.notifier.send_due("hook")
    got = [(body["status"], body["alerts"][0]["labels"]["incident"]) for _, body in receiver.posts]
    assert sorted(got) == sorted([("firing", heard), ("resolved", page)])
    site.people.expire_silence(made.id, ANN)
    site.notifier.send_due("hook")
    assert [body["status"] for _, body in receiver.posts] == [*(status for status, _ in got), "firing"]
    site.database.close()
