"""Findings on arrival, before their frames: people see them early, and the incidents equal those of a replay."""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.incidents import arrivals
from pipeline.incidents.arrivals import EarlyFinding, LiveDesk
from pipeline.incidents.changes import Change
from pipeline.incidents.desk import REFINE_WINDOW, Desk
from pipeline.model.records import SECOND, Finding, Incident
from tests.examples import examples
from tests.pipeline.test_incidents import START, STEP, fleet, found, story


class LiveDeskHarness:
    """An ArrivalDesk as an Engine calls it, and its stored changes. Frame k ends at START + (k + 1) * STEP."""

    def __init__(self) -> None:
        self.desk = self._new()
        self.clock = START
        self.stored: dict[str, Incident] = {}
        self.history: list[Change] = []

    @staticmethod
    def _new() -> LiveDesk:
        return LiveDesk(fleet(), lambda _: False, lambda _: None)

    def restart(self) -> None:
        state = self.desk.snapshot()
        self.desk = self._new()
        self.desk.restore(state)

    def report_early(self, *findings: Finding) -> list[Change]:
        self.clock += SECOND
        return self.store_changes(self.desk.observe_early([EarlyFinding(f.time, f, f) for f in findings], self.clock))

    def run_frame(self, number: int, *findings: Finding) -> list[Change]:
        """Runs a frame without the findings that arrived before; the Desk has them."""
        self.clock += SECOND
        time, end = START + number * STEP, START + (number + 1) * STEP
        every = [*self.desk.list_due(end), *findings]
        return self.store_changes(self.desk.observe(time, end, every, lambda _: True, self.clock))

    def store_changes(self, changes: list[Change]) -> list[Change]:
        """Stores changes as the ledger does; each change begins where the previous one ended."""
        for change in changes:
            assert (change.before is None) == (change.incident.id not in self.stored)
            if change.before is not None:
                known = self.stored[change.incident.id]
                assert without_opened(change.before) == without_opened(known)
            self.stored[change.incident.id] = change.incident
        self.history += changes
        return changes


def without_opened(incident: Incident) -> Incident:
    """Returns the incident as a change shows it before the change: its times are event times."""
    return dataclasses.replace(incident, opened=0, updated=0)


def describe(incidents: Iterable[Incident]) -> dict[str, dict[str, Any]]:
    """Returns the fields of each incident except `opened`, the time at which people could see it."""
    return {i.id: {**i.as_json(), "opened": None, "members": sorted(i.members)} for i in incidents}


def replay(script: Sequence[Sequence[Finding]]) -> tuple[Desk, dict[str, Incident]]:
    """Returns the result of a Desk that sees the frames alone."""
    desk, stored = Desk(fleet()), {}
    for number, findings in enumerate(script):
        for change in desk.observe(START + number * STEP, findings, lambda _: True):
            stored[change.incident.id] = change.incident
    return desk, stored


def with_frame_times(script: Sequence[Sequence[Finding]]) -> list[list[Finding]]:
    """Returns the findings with the time of their frame; two findings of one key in a frame are one finding."""
    return [
        list({f.key: dataclasses.replace(f, time=START + n * STEP) for f in findings}.values())
        for n, findings in enumerate(script)
    ]


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from((2, 8, 60)))
def test_early_findings_give_the_incidents_of_a_replay_whatever_their_order_and_lead_time(
    seed: int, ahead: int
) -> None:
    dice = random.Random(seed)
    script = with_frame_times(story(dice, 90))
    arriving: dict[int, list[Finding]] = defaultdict(list)
    framed: list[list[Finding]] = []
    for number, findings in enumerate(script):
        early = [f for f in findings if dice.random() < 0.3]
        for finding in early:
            arriving[max(0, number - dice.randrange(ahead))].append(finding)
        framed.append([f for f in findings if f not in early])
    live = LiveDeskHarness()
    for number, findings in enumerate(framed):
        while batch := arriving[number][:2]:
            del arriving[number][:2]
            live.report_early(*batch)
        if dice.random() < 0.1:
            live.restart()
        live.run_frame(number, *findings)
    desk, stored = replay(script)
    assert describe(live.desk.incidents.values()) == describe(desk.incidents.values())
    mine, wanted = describe(live.stored.values()), describe(stored.values())
    besides = {id_: line for id_, line in mine.items() if id_ not in wanted}
    assert {id_: mine.get(id_) for id_ in wanted} == wanted
    assert all(line["state"] == "resolved" for line in besides.values()), "only incidents that people saw too early"
    assert {c.folded_into for c in live.history if c.incident.id in besides and c.kind == "resolved"} <= {*mine}


SLOW = found("rank:81.5", "straggler", onset=START)
LEAK = dataclasses.replace(
    found("cdu:c1", "coolant", onset=START + REFINE_WINDOW + 6 * STEP), time=START + REFINE_WINDOW + 6 * STEP
)
FRAMES = REFINE_WINDOW // STEP + 8


def test_an_early_event_does_not_take_in_findings_that_began_before_it() -> None:
    live = LiveDeskHarness()
    assert [(c.kind, c.incident.cause) for c in live.report_early(LEAK)] == [("opened", "cdu:c1")]
    for number in range(FRAMES):
        live.run_frame(number, *[SLOW] if number == 1 else [])
    assert {i.cause: i.members for i in live.desk.incidents.values()} == {
        "cdu:c1": ("cdu:c1",),
        "gpu:n1.1": ("rank:81.5",),
    }
    assert [c.kind for c in live.history] == ["opened", "opened"], "its frame changes nothing"
    assert {c.incident.opened for c in live.history if c.incident.cause == "cdu:c1"} == {START + SECOND}


def test_an_early_incident_that_its_frame_folds_into_another_one_ends_as_folded() -> None:
    live, symptom = (
        LiveDeskHarness(),
        dataclasses.replace(found("rank:81.5", onset=START + 3 * STEP), time=START + 3 * STEP),
    )
    (alone,) = live.report_early(symptom)
    live.run_frame(1, found("cdu:c1", "coolant"))
    ended, (into,) = live.history[-1], [i for i in live.desk.incidents.values() if i.resolved is None]
    assert (ended.kind, ended.incident.id, ended.folded_into) == ("resolved", alone.incident.id, into.id)
    for number in range(2, 5):
        live.run_frame(number)
    assert live.desk.incidents[into.id].members == ("cdu:c1", "rank:81.5")
    desk, _ = replay([[], [found("cdu:c1", "coolant")], [], [symptom], []])
    assert describe(live.desk.incidents.values()) == describe(desk.incidents.values())


def test_a_persons_action_on_an_early_incident_is_kept() -> None:
    for act, state in (("acknowledge", "acknowledged"), ("resolve", "resolved")):
        live = LiveDeskHarness()
        (opened,) = live.report_early(LEAK)
        live.run_frame(0)
        live.store_changes([getattr(live.desk, act)(opened.incident.id, "ada", "mine", live.clock)])
        for number in range(1, FRAMES):
            live.run_frame(number)
        assert {i.id: i.state for i in live.desk.incidents.values()} == {opened.incident.id: state}
        assert [c.kind for c in live.history] == ["opened", state]


@pytest.mark.slow
@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 1 << 32))
def test_actions_in_between_leave_no_gap_in_the_history_and_no_open_incident_in_the_store_alone(seed: int) -> None:
    dice, live = random.Random(seed), LiveDeskHarness()
    script = with_frame_times(story(dice, 60))
    for number, findings in enumerate(script):
        ahead = [f for f in script[min(59, number + dice.randrange(9))] if dice.random() < 0.2]
        if ahead:
            live.report_early(*ahead)
        open_ = [i for i in live.desk.incidents.values() if i.state == "open"]
        if open_ and dice.random() < 0.2:
            act = dice.choice((live.desk.acknowledge, live.desk.resolve))
            live.store_changes([act(dice.choice(open_).id, "ada", "mine", live.clock)])
        live.run_frame(number, *findings)
    lasting = {i.id for i in live.desk.incidents.values() if i.resolved is None}
    assert {i.id for i in live.stored.values() if i.resolved is None} == lasting


def test_a_commented_early_incident_is_still_decided_by_its_frame() -> None:
    live = LiveDeskHarness()
    (opened,) = live.report_early(LEAK)
    assert live.desk.comment(opened.incident.id, "ada", "seen", live.clock).kind == "commented"
    assert live.desk.list_conditions(opened.incident.id) == [("coolant", "cdu:c1")]
    assert live.desk.list_due(START + FRAMES * STEP) == [LEAK]


def test_the_pipelines_own_findings_do_not_disturb_waiting_ones() -> None:
    live = LiveDeskHarness()
    live.report_early(LEAK)
    (told_,) = live.store_changes(live.desk.observe_own(START, [found("site:s1", "telemetry")]))
    assert (told_.kind, told_.incident.cause) == ("opened", "site:s1")
    for number in range(FRAMES):
        live.run_frame(number)
    assert sorted(i.cause for i in live.desk.incidents.values()) == ["cdu:c1", "site:s1"]
    assert [c.kind for c in live.history] == ["opened", "opened"]


def test_a_finding_that_is_held_back_waits_for_its_frame_and_is_not_shown() -> None:
    live = LiveDeskHarness()
    assert live.desk.observe_early([EarlyFinding(LEAK.time, LEAK, None)], live.clock) == []
    live.restart()
    assert (live.desk.incidents, live.desk.list_due(LEAK.time + 1)) == ({}, [LEAK])


def test_incidents_beyond_the_bound_of_waiting_ones_stay_as_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "MAX_EARLY", 3)
    live = LiveDeskHarness()
    for gpu in range(4):
        live.report_early(found(f"gpu:n{gpu}.0", "sdc"))
    assert live.desk.list_due(START + STEP) == []
    live.run_frame(0)
    assert len(live.desk.incidents) == len(live.history) == 4


def test_the_state_of_a_version_without_waiting_findings_is_loaded() -> None:
    old = Desk(fleet())
    old.observe(START, [SLOW])
    live = LiveDeskHarness()
    live.desk.restore(old.snapshot())
    assert live.desk.incidents == old.incidents
