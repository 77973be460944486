"""Dead messages sent again: their receiver, also one that drops keys that it knows, ends with what fires."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.receivers import InhibitRule, Notify, PagerDuty, Route
from pipeline.notify.dead_messages import replay_payloads
from tests.pipeline.lossy_site import C_OVER_ALL, GROUPED, A, B, C, Hooked, Make
from tests.pipeline.notifier_harness import Receiver
from tests.pipeline.receiver_servers import Service, serve, stop


def test_a_page_that_ended_and_fires_again_is_sent_again_as_it_fires_now(hooked: Make, receiver: Receiver) -> None:
    site = hooked()
    site.turn(A)
    site.lose()
    for _ in range(2):
        site.turn(A)
        site.deliver()
    assert site.replay() == [f"inc-{A}.1.hook"]
    assert [body["status"] for _, body in receiver.posts] == ["resolved", "firing", "firing"]
    assert len({key for key, _ in receiver.posts}) == 3
    assert (site.shown(), site.count("dead")) == (site.true(), 0)
    assert site.replay() == [], "once"


@pytest.mark.parametrize("is_over", [False, True])
@pytest.mark.parametrize("lost", [0, 1])
def test_old_labels_of_a_page_do_not_fire_for_ever(hooked: Make, lost: int, is_over: bool) -> None:
    site = hooked()
    for number, act in enumerate((site.open_ticket, site.raise_severity)):
        act(A)
        (site.lose if number == lost else site.deliver)()
    if is_over:
        site.turn(A)
        site.deliver()
        assert (A, "warning") in site.shown() or not lost
    site.replay()
    assert site.shown() == site.true()
    if not is_over:
        site.turn(A)
        site.deliver()
    assert site.shown() == set()


def test_an_alert_that_a_group_ended_meanwhile_does_not_fire_again(hooked: Make, receiver: Receiver) -> None:
    site = hooked(GROUPED)
    site.turn(A)
    site.turn(B)
    site.lose()
    site.turn(A)
    site.deliver()
    assert len(site.replay()) == 3, "the message, and both rows that it says"
    assert [a["status"] for a in receiver.posts[-1][1]["alerts"]] == ["resolved", "firing"]
    assert (site.shown(), site.count("dead"), site.count("grouped")) == (site.true(), 0, 0)


def test_an_end_from_before_a_receiver_was_configured_again_ends_no_page_that_fires(
    hooked: Make, receiver: Receiver
) -> None:
    site = hooked()
    site.turn(A)
    site.deliver()
    site.turn(A)
    site.configure(False)
    site.turn(A)
    site.configure(True)
    site.deliver()
    assert site.count("dead") == 1
    site.replay()
    assert (site.shown(), site.count("dead")) == ({(A, "critical")}, 0)
    assert [body["status"] for _, body in receiver.posts] == ["firing"], "it never seemed to be over"


def test_a_page_that_ended_while_its_receiver_was_not_configured_is_ended(hooked: Make, receiver: Receiver) -> None:
    site = hooked()
    site.turn(A)
    site.configure(False)
    site.turn(A)
    site.configure(True)
    site.replay()
    assert [body["status"] for _, body in receiver.posts] == ["firing", "resolved"]


# --- what routes or inhibition hold ------------------------------------------------------------------


def lose_it(site: Hooked) -> None:
    site.turn(A)
    site.lose()
    site.turn(C)


def lose_it_and_let_it_get_worse(site: Hooked) -> None:
    lose_it(site)
    site.deliver()
    site.write_change("worsened", A)


def lose_it_while_it_is_held(site: Hooked) -> None:
    site.turn(C)
    site.turn(A)
    site.deliver()
    site.configure(False)
    site.configure(True)


def lose_its_end_below_what_was_accepted(site: Hooked) -> None:
    site.open_ticket(A)
    site.deliver()
    site.raise_severity(A)
    site.lose()
    site.write_change("worsened", A)
    site.deliver()
    site.turn(C)
    site.deliver()
    site.write_change("worsened", A)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("act", [lose_it, lose_it_and_let_it_get_worse, lose_it_while_it_is_held])
def test_a_dead_page_waits_while_a_rule_inhibits_its_incident(hooked: Make, act: Any, restarts: bool) -> None:
    site = hooked(rules=C_OVER_ALL)
    act(site)
    site.deliver()
    assert site.replay()
    assert (site.shown(), site.count("dead")) == ({(C, "critical")}, 0)
    if restarts:
        site.restart()
    site.turn(C)
    site.deliver()
    assert site.shown() == {(A, "critical")}
    assert site.receiver.alerts.count(("firing", A)) == 1, "once"


@pytest.mark.parametrize("act", [lose_it, lose_it_and_let_it_get_worse, lose_it_while_it_is_held])
def test_a_dead_page_that_ends_while_a_rule_inhibits_it_is_never_sent(hooked: Make, act: Any) -> None:
    site = hooked(rules=C_OVER_ALL)
    act(site)
    site.deliver()
    site.replay()
    site.turn(A)
    site.turn(C)
    site.deliver()
    assert A not in [cause for _, cause in site.receiver.alerts]
    assert (site.count("dead"), site.count("held")) == (0, 0)


@pytest.mark.parametrize("ends", [False, True])
def test_what_is_sent_in_place_of_a_dead_page_waits_while_a_rule_inhibits_its_incident(
    hooked: Make, ends: bool
) -> None:
    site = hooked(rules=C_OVER_ALL)
    site.turn(A)
    site.lose()
    site.write_change("worsened", A)
    site.deliver()
    site.turn(C)
    site.deliver()
    site.replay()
    if ends:
        site.turn(A)
        site.deliver()
    assert site.receiver.alerts.count(("firing", A)) == 1
    site.turn(C)
    site.deliver()
    assert site.receiver.alerts.count(("firing", A)) == 2 - ends
    assert (site.shown(), site.count("dead"), site.count("held")) == (site.true(), 0, 0)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_dead_end_is_sent_while_a_newer_page_of_its_incident_waits(hooked: Make, restarts: bool) -> None:
    site = hooked(rules=C_OVER_ALL)
    lose_its_end_below_what_was_accepted(site)
    site.deliver()
    assert site.shown() == {(A, "warning"), (A, "critical"), (C, "critical")}
    site.replay()
    assert site.shown() == site.shown(drops=False) == site.true()
    if restarts:
        site.restart()
    site.turn(C)
    site.deliver()
    assert (site.shown(), site.count("held")) == (site.true(), 0)
    site.turn(A)
    site.deliver()
    assert site.shown() == set()


def test_what_a_dead_message_of_a_group_said_is_left_to_its_group_when_the_message_is_no_longer_kept(
    hooked: Make, receiver: Receiver
) -> None:
    site = hooked(GROUPED)
    site.turn(A)
    site.lose()
    site.turn(B)
    site.deliver()
    site.pass_time(8 * 24 * 3600)
    site.notifier._clean_outbox()
    assert site.count("dead") == 1, "what the message said of an incident that is open"
    assert site.replay() == [f"inc-{A}.1.hook"]
    assert len({body["groupKey"] for _, body in receiver.posts}) == 1
    assert (site.shown(), site.count("dead"), site.count("held")) == (site.true(), 0, 0)


@pytest.mark.parametrize("holding", [(), ("hook",)])
def test_the_number_of_queries_of_a_replay_does_not_grow_with_its_incidents(hooked: Make, holding: Any) -> None:
    site = hooked(rules=C_OVER_ALL)
    counts = []
    for number in (1, 20):
        for at in range(number):
            site.turn(f"gpu:n{number}.{at}")
        site.lose()
        lost, counted = site.count("dead"), CountedStore(site.database)
        assert len(replay_payloads(counted, [], "hook", "ada", site.now, holding)) == lost >= number
        counts.append(counted.count)
    assert counts[0] == counts[1]


class CountedStore:
    """Counts the statements of its transactions."""

    def __init__(self, database: Any) -> None:
        self.cursor, self._database, self.count = database.cursor, database, 0

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Any]:
        with self._database.transaction() as self._connection:
            yield self

    def execute(self, *given: Any) -> Any:
        self.count += 1
        return self._connection.execute(*given)


# --- acknowledgements ---------------------------------------------------------------------------------


class Paged(Hooked):
    """As before, with a PagerDuty."""

    def __init__(self, folder: Path, receiver: Receiver, pager: Service, route: Route | None, rules: Any) -> None:
        super().__init__(folder, receiver, None, ())
        self.pager, key = pager, folder / "key"
        key.write_text("0123456789abcdef0123456789ABCDEF")
        key.chmod(0o600)
        paged = (PagerDuty("hook", key, url=pager.url),)
        self.with_hook = Notify(pagerduty=paged, route=route, inhibit_rules=tuple(rules))
        self.configure(True)

    def lose(self) -> None:
        self.pager.behave = ["400"] * 50
        super().lose()
        self.pager.behave = []

    def actions(self) -> list[str]:
        return [body["event_action"] for body in self.pager.bodies("/v2/enqueue")]


@pytest.fixture
def paged(tmp_path: Path, receiver: Receiver) -> Iterator[Any]:
    made: list[Paged] = []
    pager, thread = serve()

    def make(route: Route | None = None, rules: Sequence[InhibitRule] = ()) -> Paged:
        made.append(Paged(tmp_path, receiver, pager, route, rules))
        return made[-1]

    yield make
    for one in made:
        one.close()
    stop(pager, thread)


@pytest.mark.parametrize(("route", "rules"), [(None, ()), (None, C_OVER_ALL), (GROUPED, ()), (GROUPED, C_OVER_ALL)])
def test_a_dead_page_that_a_person_took_meanwhile_is_taken_in_pagerduty(paged: Any, route: Any, rules: Any) -> None:
    site = paged(route, rules)
    site.turn(A)
    site.lose()
    site.acknowledge(A)
    site.deliver()
    assert "trigger" not in site.actions()
    site.replay()
    assert site.actions()[-2:] == ["trigger", "acknowledge"]
    assert site.actions().count("trigger") == 1


@pytest.mark.parametrize("route", [None, GROUPED])
def test_a_newer_state_that_is_sent_in_place_of_a_dead_page_is_taken_in_pagerduty(paged: Any, route: Any) -> None:
    site = paged(route)
    site.turn(A)
    site.lose()
    site.write_change("worsened", A)
    site.deliver()
    site.acknowledge(A)
    site.deliver()
    site.replay()
    assert site.actions()[-2:] == ["trigger", "acknowledge"]


def test_an_acknowledgement_that_waits_when_its_receiver_is_removed_is_sent_when_it_is_back(paged: Any) -> None:
    site = paged()
    site.turn(A)
    site.deliver()
    site.acknowledge(A)
    site.configure(False)
    site.configure(True)
    site.deliver()
    assert site.actions() == ["trigger", "acknowledge"]
