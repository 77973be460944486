"""Random worlds of alerts: whatever happens to incidents, receivers and routes, receivers hold what is true at the end;
and the oracle that says so finds faults that are put in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pipeline.config.receivers import Route
from pipeline.notify.open_alerts import HeldBack
from pipeline.notify.outbox import Notifier
from tests.pipeline.alert_examples import EXAMPLES
from tests.pipeline.alert_settings import Setting
from tests.pipeline.alert_worlds import World, find_faults, make_world, open_bench, shrink

OPEN, GPU = ("open", "gpu:n0.0", "page", "hot"), "gpu:n0.0"
TOLD = ("minutes", 4)
GROUPED = Setting(Route("hook", group_by=("rack",), group_wait="10s", group_interval="30s", repeat_interval="10m"))
ALONE = Setting()


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    with open_bench() as run:
        yield run


def describe(made: Any) -> str:
    return "\n".join([*made.oracle.lines[-60:], *map(str, find_faults(made))])


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("seed", [0, 2, 3])
def test_whatever_happens_under_one_configuration_receivers_hold_what_is_true(bench: Any, seed: int) -> None:
    made = bench(make_world(seed, 25, "fixed"))
    assert not find_faults(made), describe(made)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("seed", [0, 2])
def test_whatever_happens_while_routes_change_receivers_hold_what_is_true(bench: Any, seed: int) -> None:
    made = bench(make_world(seed, 25, "routes"))
    assert not find_faults(made), describe(made)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_small_world_ends_with_receivers_that_hold_what_is_true(bench: Any, name: str) -> None:
    made = bench(EXAMPLES[name])
    assert not find_faults(made), describe(made)


# --- the oracle finds faults that are put in ---------------------------------------------------------


def break_payloads(monkeypatch: pytest.MonkeyPatch, keep: Any) -> None:
    """The notifier loses the payloads that `keep` refuses."""
    real = Notifier.make_payloads

    def make(self: Notifier, changes: Any, now: int) -> list[Any]:
        return [payload for payload in real(self, changes, now) if keep(payload)]

    monkeypatch.setattr(Notifier, "make_payloads", make)


def find_rules(bench: Any, setting: Setting, *acts: Any) -> set[str]:
    return {one.rule for one in find_faults(bench(World(setting, 20, acts)))}


@pytest.mark.parametrize("setting", [ALONE, GROUPED], ids=["alone", "grouped"])
def test_an_end_that_is_lost_is_found(bench: Any, monkeypatch: pytest.MonkeyPatch, setting: Setting) -> None:
    acts = OPEN, TOLD, ("end", GPU, True), TOLD
    assert find_rules(bench, setting, *acts) == set()
    break_payloads(monkeypatch, lambda payload: payload.kind != "resolved")
    assert "fires for ever: resolved" in find_rules(bench, setting, *acts)


@pytest.mark.parametrize("setting", [ALONE, GROUPED], ids=["alone", "grouped"])
def test_a_page_that_is_lost_is_found(bench: Any, monkeypatch: pytest.MonkeyPatch, setting: Setting) -> None:
    break_payloads(monkeypatch, lambda payload: payload.kind != "firing")
    assert "page lost" in find_rules(bench, setting, OPEN)


def test_an_acknowledgement_that_expires_without_a_page_is_found(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    acts = OPEN, TOLD, ("acknowledge", GPU, 0.02), TOLD
    assert find_rules(bench, ALONE, *acts) == set()
    break_payloads(monkeypatch, lambda payload: '"event":"acknowledgement_expired"' not in payload.body)
    rules = find_rules(bench, ALONE, *acts)
    assert {"expired acknowledgement: no page", "page lost: acknowledged there"} <= rules


def test_an_acknowledgement_that_does_not_reach_pagerduty_is_found(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    acts = OPEN, TOLD, ("acknowledge", GPU, None), TOLD
    assert find_rules(bench, ALONE, *acts) == set()
    break_payloads(monkeypatch, lambda payload: payload.kind != "update")
    assert "acknowledged here, not there" in find_rules(bench, ALONE, *acts)


def test_a_page_that_is_sent_while_a_rule_inhibits_it_is_found(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    acts = ("open", "cdu:c0", "page", "coolant"), TOLD, OPEN, TOLD
    assert find_rules(bench, Setting(rules="rack"), *acts) == set()
    monkeypatch.setattr("pipeline.notify.open_alerts.OpenAlerts.find", lambda self, incident: HeldBack())
    assert "fires: inhibitor" in find_rules(bench, Setting(rules="rack"), *acts)


def test_a_page_that_is_sent_while_it_is_silenced_is_found(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    acts = ("silence", "detector=hot", 5400), OPEN, TOLD
    assert find_rules(bench, ALONE, *acts) == set()
    monkeypatch.setattr("pipeline.model.records.Incident.is_held_back", False)
    assert "fires: silenced" in find_rules(bench, ALONE, *acts)


def test_a_group_that_repeats_too_often_is_found(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.notify.routes.parse_duration", lambda text: {"10m": 60.0}.get(text, 10.0))
    assert "said twice" in find_rules(bench, GROUPED, OPEN, TOLD, TOLD)


def test_a_world_shrinks_to_the_acts_that_show_a_violation(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    break_payloads(monkeypatch, lambda payload: payload.kind != "firing")
    world = World(ALONE, 20, (("seconds", 1), ("away", "desk", "error"), OPEN, ("expire",), ("back", "desk")))
    assert shrink(bench, world, "page lost").acts == (OPEN,)
