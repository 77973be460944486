"""Ends of grouped alerts: a receiver gets the end of what it got, once, and no end of what it never got; the rows say
what was in its messages."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.receivers import InhibitRule, Notify, Route, Webhook
from pipeline.model.records import SECOND, Life
from pipeline.notify import held_rows
from pipeline.notify.alertmanager import ALERT_FIELDS
from pipeline.notify.dead_messages import replay_payloads
from tests.pipeline.notifier_harness import NotifierHarness, Receiver
from tests.pipeline.test_inhibited_pages import ANN, ENDED, PAGED, SENT, HeardSite, heard, open_all, pager

__all__ = ["heard", "pager"]
ROUTE = Route("hook", group_by=("alertname",), group_wait="0s", group_interval="1m")
HOUR = 3600 * SECOND
SOURCE, TARGETS = "cdu:c1", ("gpu:n1.0", "gpu:n2.0", "gpu:n3.0")


@pytest.fixture
def harness(tmp_path: Path, receiver: Receiver) -> Any:
    rule = InhibitRule((f'cause="{SOURCE}"',), ('cause=~"gpu:.*"',))
    hook = Webhook("hook", f"http://127.0.0.1:{receiver.server_port}/")
    made = NotifierHarness(tmp_path, [], Notify(webhooks=(hook,), route=ROUTE, inhibit_rules=(rule,)))
    yield made
    made.close()


def pass_time(harness: NotifierHarness, seconds: int = 70) -> None:
    """Lets time pass: a group is flushed, and its message is sent."""
    harness.send_due(0, "hook")
    for _ in range(2):
        harness.send_due(seconds / 2, "hook")


def change_routes(harness: NotifierHarness, route: Route | None) -> None:
    """Starts again with other routes."""
    assert harness.notify is not None
    harness.notify = replace(harness.notify, route=route)
    harness.restart()


def told(receiver: Receiver, cause: str) -> list[str]:
    """What the receiver got of a cause, one status per message."""
    return [a["status"] for _, b in receiver.posts for a in b["alerts"] if a["labels"]["cause"] == cause]


def rows(harness: NotifierHarness, cause: str) -> list[tuple[str, str, str]]:
    assert harness.database is not None
    query = "SELECT kind, state, answer FROM outbox WHERE incident = ? ORDER BY number"
    return harness.database.cursor().execute(query, [f"inc-{cause}"]).fetchall()


SENT_ROW, NEVER = "HTTP 200", "ended before it was sent"


def test_an_alert_that_was_sent_ends_once_though_a_message_without_it_came_between(
    harness: NotifierHarness, receiver: Receiver
) -> None:
    """The group's last message shows only alerts that are not inhibited."""
    one, two, _ = TARGETS
    harness.write_change("opened", one)
    pass_time(harness)
    harness.write_change("opened", SOURCE)
    harness.write_change("opened", two)
    pass_time(harness)
    harness.restart()
    harness.write_change("opened", "cdu:c2")
    harness.resolve("cdu:c2")
    pass_time(harness)
    assert told(receiver, one) == ["firing"]
    harness.resolve(one)
    harness.resolve(two)
    pass_time(harness)
    assert (told(receiver, one), told(receiver, two)) == (["firing", "resolved"], [])
    assert rows(harness, one) == [("firing", "delivered", SENT_ROW), ("resolved", "delivered", SENT_ROW)]
    assert rows(harness, two) == [("firing", "muted", NEVER), ("resolved", "muted", NEVER)]


AWAY = replace(ROUTE, receiver="other", repeat_interval="1h")


@pytest.mark.parametrize("after", [None, AWAY], ids=["routes_are_gone", "they_lead_elsewhere"])
def test_a_group_ends_with_its_alerts_when_no_route_leads_to_it_any_more(
    harness: NotifierHarness, receiver: Receiver, after: Route | None
) -> None:
    assert harness.notify is not None
    other = replace(harness.notify.webhooks[0], name="other")
    harness.notify = replace(harness.notify, webhooks=(*harness.notify.webhooks, other))
    harness.restart()
    harness.write_change("opened", SOURCE)
    pass_time(harness)
    change_routes(harness, after)
    harness.resolve(SOURCE)
    pass_time(harness)
    change_routes(harness, replace(ROUTE, repeat_interval="1h"))
    pass_time(harness, 3 * 3600)
    said = told(receiver, SOURCE)
    assert (said[0], set(said[1:])) == ("firing", {"resolved"})
    assert harness.database is not None
    assert harness.database.cursor().execute("SELECT count(*) FROM notify_groups").fetchone() == (0,)


def test_what_was_sent_alone_before_there_were_routes_stays_alone_until_its_end(
    harness: NotifierHarness, receiver: Receiver
) -> None:
    change_routes(harness, None)
    harness.write_change("opened", SOURCE)
    pass_time(harness)
    change_routes(harness, BOTH)
    harness.write_change("acknowledged", SOURCE, state="acknowledged", life=Life(acknowledged_by="ann"))
    pass_time(harness)
    harness.write_change("acknowledgement_expired", SOURCE, state="open", life=Life())
    pass_time(harness)
    harness.resolve(SOURCE)
    pass_time(harness)
    assert told(receiver, SOURCE) == ["firing", "firing", "resolved"]
    assert len({b["groupKey"] for _, b in receiver.posts}) == 1
    sent = [kind for kind, state, _ in rows(harness, SOURCE) if state == "delivered"]
    assert sent == ["firing", "firing", "resolved"]


BELOW = {"receiver": "hook", "matchers": ['severity="critical"'], "continue": True}
BOTH = replace(ROUTE, routes=({**BELOW, "group_by": ["severity"]}, {**BELOW, "group_by": ["cause"]}))


@pytest.mark.parametrize(
    ("before", "after", "groups"),
    [(ROUTE, replace(ROUTE, group_by=("severity",)), 1), (None, ROUTE, 1), (BOTH, BOTH, 2), (BOTH, ROUTE, 2)],
    ids=["group_by_changed", "routes_are_new", "two_routes_lead_to_it", "two_routes_led_to_it"],
)
def test_a_receiver_gets_the_end_of_what_it_got_wherever_it_was_sent(
    harness: NotifierHarness, receiver: Receiver, before: Route | None, after: Route | None, groups: int
) -> None:
    change_routes(harness, before)
    harness.write_change("opened", SOURCE)
    pass_time(harness)
    change_routes(harness, after)
    pass_time(harness)
    assert told(receiver, SOURCE) == ["firing"] * groups
    harness.resolve(SOURCE)
    pass_time(harness)
    pass_time(harness, 5 * 3600)
    assert told(receiver, SOURCE) == ["firing"] * groups + ["resolved"] * groups
    assert {state for _, state, _ in rows(harness, SOURCE)} == {"delivered"}
    assert harness.database is not None
    assert harness.database.cursor().execute("SELECT count(*) FROM notify_groups").fetchone() == (0,)


def test_who_acknowledges_a_group_in_pagerduty_takes_what_it_fires_now_and_nothing_else(
    harness: NotifierHarness, receiver: Receiver
) -> None:
    """Alerts of an earlier life of the group, and those that left it with other labels, are not in it."""
    one, two, three = TARGETS
    change_routes(harness, replace(ROUTE, group_by=("severity",)))
    harness.write_change("opened", three, severity="ticket")
    pass_time(harness)
    harness.resolve(three)
    pass_time(harness)
    harness.write_change("opened", one, severity="ticket")
    harness.write_change("opened", two, severity="ticket")
    pass_time(harness)
    group = receiver.posts[-1][0].partition(".")[0]
    harness.write_change("severity_raised", one, severity="page")
    pass_time(harness)
    assert harness.database is not None
    assert held_rows.list_group_incidents(harness.database.cursor(), "hook", group) == [f"inc-{two}"]
    harness.resolve(two)
    pass_time(harness)
    assert held_rows.list_group_incidents(harness.database.cursor(), "hook", group) == []


GROUP_OF_OLDER_VERSIONS = ("id", "key", "labels", "flush_at", "alerts", "firing", "resolved", "acknowledged", "sent_at")


def test_groups_and_rows_of_an_older_version_go_on_where_they_were(
    harness: NotifierHarness, receiver: Receiver
) -> None:
    """That one stored alerts that no message said, and named the group in rows before there was a message."""
    one, two, three = TARGETS
    harness.write_change("opened", one)
    pass_time(harness)
    assert harness.database is not None
    with harness.database.transaction() as connection:
        (text,) = connection.execute("SELECT state FROM notify_groups").fetchone() or ("",)
        group = json.loads(text)
        (said,) = group["alerts"].values()
        assert set(group) == {*GROUP_OF_OLDER_VERSIONS}, "they read it too, after a return to one"
        assert {"incident", "acknowledged", "sent", *ALERT_FIELDS} <= set(said)
        old = {name: said[name] for name in ("incident", "acknowledged", "sent", *ALERT_FIELDS)} | {"since": 1}
        unsaid = {**old, "fingerprint": "00", "incident": f"inc-{two}", "sent": False}
        group["alerts"] = {old["fingerprint"]: old, "00": unsaid}
        connection.execute("UPDATE notify_groups SET state = ?", [json.dumps(group)])
    harness.write_change("opened", two)
    harness.write_change("opened", three)
    harness.resolve(three)
    with harness.database.transaction() as connection:
        query = "UPDATE outbox SET state = 'grouped', part_of = ? WHERE state = 'held'"
        connection.execute(query, [group["id"]])
    harness.restart()
    pass_time(harness)
    harness.resolve(one)
    harness.resolve(two)
    pass_time(harness)
    both = "firing", "resolved"
    assert [told(receiver, cause) for cause in TARGETS] == [["firing", *both], [*both], []], "its message lists all"
    assert [{state for _, state, _ in rows(harness, cause)} for cause in TARGETS] == [
        {"delivered"},
        {"delivered"},
        {"muted"},
    ]


def test_what_an_older_version_held_below_a_newer_row_is_never_sent(
    harness: NotifierHarness, receiver: Receiver
) -> None:
    harness.write_change("opened", SOURCE)
    harness.write_change("opened", TARGETS[0])
    pass_time(harness)
    harness.resolve(TARGETS[0])
    assert harness.database is not None
    with harness.database.transaction() as connection:
        connection.execute("UPDATE outbox SET state = 'muted' WHERE state = 'held' AND kind = 'resolved'")
    harness.restart()
    harness.resolve(SOURCE)
    pass_time(harness)
    assert told(receiver, TARGETS[0]) == []
    assert {state for _, state, _ in rows(harness, TARGETS[0])} == {"muted"}


def test_a_page_that_waits_in_its_group_while_routes_go_and_that_ends_at_once_gets_no_end(
    harness: NotifierHarness, receiver: Receiver
) -> None:
    harness.write_change("opened", SOURCE)
    change_routes(harness, None)
    harness.resolve(SOURCE)
    pass_time(harness)
    assert told(receiver, SOURCE) == []


@pytest.mark.parametrize("again", [False, True], ids=["it_runs_on", "it_starts_again"])
def test_a_clock_that_was_hours_ahead_makes_no_group_wait(
    harness: NotifierHarness, receiver: Receiver, again: bool
) -> None:
    one, two, three = TARGETS
    harness.write_change("opened", one)
    pass_time(harness)
    harness.write_change("opened", two)
    harness.now -= 6 * HOUR
    if again:
        harness.restart()
    pass_time(harness)
    harness.write_change("opened", three)
    harness.resolve(one)
    pass_time(harness)
    assert [told(receiver, cause)[-1:] for cause in TARGETS] == [["resolved"], ["firing"], ["firing"]]


def test_what_waits_for_a_receiver_goes_at_once_after_a_start_with_a_clock_set_right(
    harness: NotifierHarness, receiver: Receiver
) -> None:
    change_routes(harness, None)
    harness.now += 6 * HOUR
    harness.write_change("opened", "cdu:c9")
    harness.now -= 6 * HOUR
    harness.restart()
    harness.send_due(1, "hook")
    assert told(receiver, "cdu:c9") == ["firing"]


def test_a_receiver_that_was_removed_for_a_while_gets_the_end_of_what_it_got_weeks_ago(
    harness: NotifierHarness, receiver: Receiver
) -> None:
    assert harness.notify is not None
    change_routes(harness, replace(ROUTE, repeat_interval="720h"))
    harness.write_change("opened", SOURCE)
    pass_time(harness)
    kept, other = harness.notify, replace(harness.notify.webhooks[0], name="other")
    harness.now += 20 * 24 * HOUR
    harness.notify = replace(kept, webhooks=(other,), route=replace(ROUTE, receiver="other"))
    harness.restart()
    harness.notify = kept
    harness.restart()
    harness.resolve(SOURCE)
    pass_time(harness)
    assert told(receiver, SOURCE) == ["firing", "resolved"]


def test_a_later_group_of_the_same_labels_has_keys_of_its_own(harness: NotifierHarness, receiver: Receiver) -> None:
    for number in range(2):
        harness.write_change("opened" if not number else "reopened", SOURCE, resolved=None, state="open")
        pass_time(harness)
        harness.resolve(SOURCE)
        pass_time(harness)
        harness.pass_time(9 * 24 * 3600)
        harness.tidy()
        harness.notifier._clean_outbox()
    keys = [key for key, _ in receiver.posts]
    assert len(set(keys)) == len(keys) == 4


def test_what_a_refused_message_of_a_group_said_is_sent_again_by_that_message(
    harness: NotifierHarness, receiver: Receiver
) -> None:
    harness.write_change("opened", TARGETS[0])
    harness.write_change("opened", TARGETS[1])
    receiver.refuses = dict.fromkeys(TARGETS, 400)
    pass_time(harness, 3)
    assert harness.database is not None
    with harness.database.transaction() as connection:
        connection.execute("UPDATE outbox SET state = 'dead'")
    receiver.refuses, refused = {}, len(receiver.posts)
    query = "SELECT min(id) FROM outbox WHERE part_of IS NOT NULL"
    (part,) = harness.database.cursor().execute(query).fetchone() or ("",)
    ids = replay_payloads(harness.database, [part], None, "ada", harness.now)
    assert len(ids) == 3, "the message, and both rows that it says"
    pass_time(harness)
    (message,) = [body for _, body in receiver.posts[refused:]]
    assert [alert["status"] for alert in message["alerts"]] == ["firing", "firing"]
    assert {state for cause in TARGETS[:2] for _, state, _ in rows(harness, cause)} == {"delivered"}


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("seed", range(10))
def test_whatever_happens_ends_are_sent_of_what_was_sent_and_rows_say_what_was_sent(
    harness: NotifierHarness, receiver: Receiver, seed: int
) -> None:
    chosen = random.Random(seed)
    for _ in range(40):
        act_at_random(harness, receiver, chosen)
    receiver.statuses = []
    for cause, incident in sorted(harness.incidents.items()):
        if incident.resolved is None:
            harness.resolve(cause)
    for _ in range(4):
        pass_time(harness, 700)
    check_rows(harness, receiver)


def act_at_random(harness: NotifierHarness, receiver: Receiver, chosen: random.Random) -> None:
    """Something happens to one incident, or to the receiver, or time passes."""
    cause = chosen.choice((SOURCE, *TARGETS))
    known = harness.incidents.get(cause)
    act = chosen.choice(("turn", "turn", "turn", "take", "worse", "restart", "fail", "pass", "pass", "pass"))
    if act == "turn" and (known is None or known.resolved is not None):
        harness.write_change("opened" if known is None else "reopened", cause, resolved=None, state="open", life=Life())
    elif act == "turn":
        harness.resolve(cause)
    elif act == "take" and known is not None and known.state == "open":
        waits = chosen.random() < 0.5  # as of a page that a person takes while it is inhibited
        life = Life(acknowledged_by="ann", page_waits=waits)
        harness.write_change("acknowledged", cause, state="acknowledged", life=life)
    elif act == "worse" and known is not None and known.resolved is None:
        worse: Any = {"page": "ticket", "ticket": "page"}[known.severity]
        harness.write_change("updated", cause, severity=worse)
    elif act == "restart":
        harness.restart()
    elif act == "fail":
        receiver.statuses = [503] * chosen.randint(1, 4)
    elif act == "pass":
        pass_time(harness, chosen.choice((2, 30, 70)))


def check_rows(harness: NotifierHarness, receiver: Receiver) -> None:
    assert harness.database is not None
    fires, ends, fired = set(), Counter[str](), set()
    accepted = dict(receiver.posts)  # a repeated key is the same message
    for body in accepted.values():
        for alert in body["alerts"]:
            print_ = alert["fingerprint"]
            if alert["status"] == "firing":
                fires.add(print_)
                fired.add(print_)
                continue
            assert print_ in fires, "it ended an alert that it never got"
            fires.remove(print_)
            ends[print_] += 1
    assert not fires, "it got all ends"
    query = "SELECT kind, state, payload FROM outbox WHERE NOT starts_with(incident, 'grp-')"
    stored = harness.database.cursor().execute(query).fetchall()
    found = [(kind, state, json.loads(payload)["alerts"]) for kind, state, payload in stored]
    assert {state for _, state, _ in found} <= {"delivered", "muted"}
    delivered = [(kind, alerts[0]["fingerprint"]) for kind, state, alerts in found if state == "delivered"]
    assert {print_ for kind, print_ in delivered if kind == "firing"} == fired
    assert Counter(print_ for kind, print_ in delivered if kind == "resolved") == ends


# --- with the engine ------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path, receiver: Receiver, pager: Any) -> Any:
    made = HeardSite(tmp_path, receiver, pager, route=ROUTE)
    yield made
    made.database.close()


def states(site: HeardSite, incident: str) -> list[tuple[str, str]]:
    query = "SELECT kind, state FROM outbox WHERE incident = ? AND receiver = 'hook' ORDER BY number"
    return site.database.connection.execute(query, [incident]).fetchall()


@pytest.mark.slow
def test_pages_that_joined_a_storm_before_they_were_sent_get_no_end_when_all_ends_at_once(site: HeardSite) -> None:
    source = site.report("cdu:c1", detector="coolant")
    pages = open_all(site)
    site.pass_time(11)
    site.people.resolve(source, ANN, "pump changed")
    site.pass_time(2)
    site.active = {}
    site.wait(12)
    site.pass_time(2)
    assert [site.posted(page) for page in pages] == [[PAGED, [("resolved", "critical")]]] * 2 + [[]] * 2
    assert [states(site, page) for page in pages[:2]] == [[("firing", "delivered"), ("resolved", "delivered")]] * 2
    assert [states(site, page) for page in pages[2:]] == [[("firing", "muted"), ("resolved", "muted")]] * 2


@pytest.mark.slow
def test_a_page_that_a_person_took_and_resolved_unsent_gets_no_end_while_its_group_fires(site: HeardSite) -> None:
    source = site.report("cdu:c1", detector="coolant")
    taken, other = site.report("host:a"), site.report("host:b")
    site.send()
    site.people.acknowledge(taken, ANN, "the pump")
    site.people.resolve(source, ANN, "pump changed")
    site.pass_time(3)
    site.people.resolve(taken, ANN, "cold again")
    site.pass_time(3)
    assert (site.posted(taken), site.posted(other)) == ([], [PAGED])
    assert {state for _, state in states(site, taken)} == {"muted"}


@pytest.mark.slow
def test_a_ticket_that_became_a_page_of_a_storm_says_delivered_only_of_the_ticket(site: HeardSite) -> None:
    tickets = open_all(site, "ticket")
    site.send()
    source = site.report("cdu:c1", detector="coolant")
    open_all(site)
    site.pass_time(2)
    site.people.resolve(source, ANN, "pump changed")
    site.pass_time(2)
    site.active = {}
    site.wait(12)
    site.pass_time(2)
    assert [site.posted(one) for one in tickets[2:]] == [[SENT, ENDED]] * 2
    for one in tickets[2:]:
        assert [state for _, state in states(site, one)] == ["delivered", "delivered", "muted", "muted"]


@pytest.mark.slow
def test_the_acknowledgement_of_a_group_says_nothing_of_what_was_not_sent(
    tmp_path: Path, receiver: Receiver, pager: Any
) -> None:
    route = replace(ROUTE, receiver="pager", group_by=("site",))
    site = HeardSite(tmp_path, receiver, pager, route=route)
    source, page = site.report("cdu:c1", detector="coolant"), site.report("host:a")
    site.pass_time(2)
    site.people.acknowledge(source, ANN, "mine")
    site.pass_time(2)
    assert [body["event_action"] for body in pager.bodies("/v2/enqueue")] == ["trigger", "acknowledge"]
    query = "SELECT incident, kind, state FROM outbox WHERE NOT starts_with(incident, 'grp-') ORDER BY created, number"
    found = site.database.connection.execute(query).fetchall()
    assert (page, "firing", "held") in found
    assert [state for incident, _, state in found if incident == source] == ["delivered", "delivered"]
    site.database.close()


@pytest.mark.parametrize("is_new", [False, True], ids=["it_expired", "another_page_joined"])
def test_a_group_that_is_acknowledged_pages_again_when_one_of_its_pages_is_nobodys(
    tmp_path: Path, receiver: Receiver, pager: Any, is_new: bool
) -> None:
    site = HeardSite(tmp_path, receiver, pager, route=replace(ROUTE, receiver="pager", group_by=("site",)))
    page = site.report("host:a")
    site.pass_time(2)
    site.people.acknowledge(page, ANN, "mine")
    site.pass_time(2)
    assert [body["event_action"] for body in pager.bodies("/v2/enqueue")] == ["trigger", "acknowledge"]
    if is_new:
        site.report("host:b")
    site.pass_time(2 if is_new else 121)
    assert [body["event_action"] for body in pager.bodies("/v2/enqueue")[2:]] == ["resolve", "trigger"]
    site.pass_time(10)
    assert len(pager.bodies("/v2/enqueue")) == 4, "once"
    site.database.close()
