"""Dead messages sent again while the thread of their receiver runs: in their order, under keys of their own, with
their ends."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from pipeline.notify.dead_messages import replay_payloads
from tests.pipeline.lossy_site import C_OVER_ALL, GROUPED, STEPS, A, B, C, Hooked, Make, check_keys
from tests.pipeline.notifier_harness import Receiver


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("is_end_accepted", [False, True])
@pytest.mark.parametrize(("route", "rules"), [(None, ()), (None, C_OVER_ALL), (GROUPED, ())])
def test_a_page_is_sent_again_before_its_end_whichever_thread_runs_first(
    hooked: Make, receiver: Receiver, route: Any, rules: Any, is_end_accepted: bool, step: Any
) -> None:
    site = hooked()
    site.turn(A)
    site.lose()
    site.turn(A)
    (site.deliver if is_end_accepted else site.lose)()
    site.with_hook = replace(site.with_hook, route=route, inhibit_rules=tuple(rules))
    site.configure(True)
    site.replay(step)
    assert receiver.alerts[-2:] == [("firing", A), ("resolved", A)]
    assert (site.shown(), site.count("dead"), site.count("held")) == (set(), 0, 0)


@pytest.mark.parametrize("is_dead_again", [False, True])
@pytest.mark.parametrize("is_worse", [False, True])
def test_a_page_that_its_receiver_took_and_refused_is_ended_there(
    hooked: Make, receiver: Receiver, is_worse: bool, is_dead_again: bool
) -> None:
    site = hooked(rules=C_OVER_ALL)
    if is_worse:
        site.open_ticket(A)
        site.deliver()
    (site.raise_severity if is_worse else site.turn)(A)
    site.take_and_lose()
    site.turn(A)
    site.lose()
    assert site.shown() == {(A, "critical")}
    if is_dead_again:
        assert site.database is not None
        replay_payloads(site.database, [], "hook", "ada", site.now, site.notifier.holding)
        site.configure(False)
        site.configure(True)
    site.replay()
    assert receiver.alerts[-2:] == [("firing", A), ("resolved", A)]
    assert (site.shown(), site.shown(drops=False), site.count("dead")) == (set(), set(), 0)
    check_keys(site)


def test_a_page_that_waited_for_its_receiver_for_a_week_is_sent_again_with_its_end(hooked: Make) -> None:
    site = hooked(rules=C_OVER_ALL)
    site.turn(A)
    site.notifier._held["hook"].release(site.now)
    site.pass_time(8 * 24 * 3600)
    site.notifier._clean_outbox()
    assert site.count("dead") == 1
    site.turn(A)
    site.deliver()
    site.replay()
    assert site.receiver.alerts == [("firing", A), ("resolved", A)]


def test_what_is_sent_in_place_of_a_page_that_was_taken_has_a_key_of_its_own(hooked: Make) -> None:
    site = hooked(rules=C_OVER_ALL)
    site.open_ticket(A)
    site.deliver()
    site.raise_severity(A)
    site.take_and_lose()
    site.turn(C)
    site.deliver()
    site.replay()
    check_keys(site)
    site.turn(C)
    site.deliver()
    assert (site.shown(), site.shown(drops=False)) == (site.true(), site.true())
    check_keys(site)


@pytest.mark.sample(every=10)
@pytest.mark.parametrize("rules", [(), C_OVER_ALL])
@pytest.mark.parametrize("route", [None, GROUPED])
@pytest.mark.parametrize("seed", range(1, 11))
def test_whatever_was_lost_the_receiver_has_the_truth_afterwards(
    hooked: Make, route: Any, rules: Any, seed: int
) -> None:
    chosen = random.Random(seed)
    site = hooked(route, rules)
    for _ in range(30):
        step = chosen.choice(STEPS) if site.notify == site.with_hook else None
        act = chosen.choice(("turn", "turn", "turn", "worse", "deliver", "lose", "lose", "remove", "replay"))
        cause = chosen.choice((A, B, C))
        known = site.incidents.get(cause)
        if act == "remove":
            site.configure(site.notify != site.with_hook)
        elif act == "turn":
            site.act_in_round(step, partial(site.turn, cause))
        elif act == "worse" and known is not None and known.resolved is None:
            worse: Any = {"page": "ticket", "ticket": "page"}[known.severity]
            site.write_change("updated", cause, severity=worse)
        elif site.notify == site.with_hook and act in ("deliver", "lose"):
            getattr(site, act)()
        elif site.notify == site.with_hook and act == "replay":
            check_replay(site, step)
    site.configure(True)
    check_replay(site)
    if rules and C in {cause for cause, _ in site.true()}:
        site.restart()
        site.turn(C)  # it inhibits the others no longer
        check_replay(site)


def check_replay(site: Hooked, step: str | None = None) -> None:
    """A lost message is sent again after all else was accepted: then receivers have the truth, but that of what a rule
    holds only what they had before fires, or what a message of a group said."""
    site.deliver()
    before = site.shown(drops=False)
    site.replay(step)
    site.deliver()
    check_keys(site)
    is_inhibited = bool(site.with_hook.inhibit_rules) and C in {cause for cause, _ in site.true()}
    held = {one for one in site.true() if is_inhibited and one[0] != C}
    assert site.shown() == site.shown(drops=False)
    held_back = held - before if site.with_hook.route is None else set()
    assert site.true() - held <= site.shown() <= site.true() - held_back
    assert site.count("dead") == 0
