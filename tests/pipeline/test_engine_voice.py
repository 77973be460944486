"""What persons say to a running engine holds at once and after a restart: mutes, modes, and "not a fault"."""

from __future__ import annotations

import pytest

from pipeline.config.sections import ModeRule
from pipeline.engine.engine import Engine
from pipeline.incidents import ledger
from pipeline.judging.mutes import warn_unknown_scope
from pipeline.model.errors import ConfigError, UsageError
from pipeline.model.records import Finding
from pipeline.model.topology import Topology
from tests.pipeline.test_engine import STEP, T0, HotForThree, Running


class Forgiving(HotForThree):
    """As before, and it keeps the feedback that it was shown."""

    def __init__(self):
        super().__init__()
        self.told = []

    def judge_events(self, events, topology, again=False):
        return []

    def observe(self, frames):
        self.told += [e for f in frames.values() for e in f.events if e.kind == "feedback"]
        return super().observe(frames)


class Voiced(Running):
    def __init__(self, site, modes=(), judge=Forgiving):
        super().__init__(site)
        self.now, self.modes, self.kind = T0, modes, judge

    def start(self):
        self.ingest = self.site.open()
        self.devices = self.ingest.devices
        self.judge = self.kind()
        self.engine = Engine(
            self.site.database,
            self.devices,
            Topology(),
            self.judge,
            lambda c, n: [],
            lambda: self.now,
            STEP,
            self.modes,
        )

    def play(self, first, temperatures):
        for i, value in enumerate(temperatures, first):
            self.site.send("n1", T0 + i * STEP, first=value)
            self.now = T0 + i * STEP
            self.run(self.now)
        self.run(T0 + (first + len(temperatures)) * STEP)


def started(site, modes=(), judge=Forgiving):
    running = Voiced(site, modes, judge)
    running.start()
    return running


def incidents(site):
    return site.rows("SELECT cause, state FROM incidents ORDER BY cause")


def test_a_muted_detector_opens_nothing_but_what_it_found_is_stored(site):
    running = started(site)
    running.engine.mute("hot", "*", 600, "new paste", "ann")
    running.play(1, [95] * 6)
    assert incidents(site) == []
    (evidence,) = {row[0] for row in site.rows("SELECT evidence ->> '$.muted.reason' FROM findings")}
    assert evidence == "new paste"


def test_a_mute_on_what_fades_is_told_with_it_and_so_is_its_end(site):
    """Else the page of an incident would show the evidence of its height: without the mute, or with one long over."""
    running = started(site)
    reason = "SELECT DISTINCT evidence ->> '$.muted.reason' FROM findings WHERE entity = 'gpu:n1.0'"
    running.play(1, [99] * 5)
    assert site.rows(reason) == [(None,)]
    made = running.engine.mute("hot", "*", 6000, "new paste", "ann")
    running.play(6, [95] * 3)
    assert site.rows(reason) == [("new paste",)]
    running.engine.unmute(made.id, "bob")
    running.play(9, [94] * 3)
    assert site.rows(reason) == [(None,)]
    assert site.rows("SELECT max(score) FROM findings WHERE entity = 'gpu:n1.0'") == [(99.0,)], "the height stays"


def test_a_mute_outlives_a_restart_and_ends_by_itself(site):
    running = started(site)
    running.engine.mute("hot", "gpu:n1.0", 60, "new paste", "ann")
    running.start()
    running.play(1, [95] * 5)
    assert [cause for cause, _ in incidents(site)] == ["gpu:n1.1"]
    running.play(6, [95] * 6)
    assert [cause for cause, _ in incidents(site)] == ["gpu:n1.0", "gpu:n1.1"]


class OnceLogged(Forgiving):
    """Tells the first page of each GPU alone, and that it holds."""

    def judge_events(self, events, topology, again=False):
        return []

    def observe(self, frames):
        before = set(self.since)
        super().observe(frames)
        frame = frames["gpu"]
        new = sorted(set(self.since) - before)
        return [Finding(frame.time, frame.time, e, "hot", "page", 1.0, f"{e} is gone", {"holds": True}) for e in new]


def test_what_was_told_once_under_a_mute_is_told_when_it_ends_also_after_a_restart(site):
    running = started(site, judge=OnceLogged)
    running.engine.mute("hot", "*", 60, "new paste", "ann")
    running.play(1, [95] * 3)
    assert incidents(site) == []
    running.start()
    running.play(4, [40] * 6)
    assert incidents(site) == [("gpu:n1.0", "open"), ("gpu:n1.1", "open")]
    (muted,) = {row[0] for row in site.rows("SELECT evidence ->> '$.muted' FROM findings")}
    assert muted is None, "and its evidence says so no longer"


def test_a_mute_can_be_ended(site):
    running = started(site)
    made = running.engine.mute("hot", "*", 6000, "new paste", "ann")
    running.now = T0 + STEP
    assert running.engine.unmute(made.id, "bob").ended == T0 + STEP
    running.play(2, [95] * 5)
    assert incidents(site)
    assert ledger.load_active_mutes(site.database.connection, T0 + 3 * STEP) == []
    with pytest.raises(KeyError):
        running.engine.unmute("nothing", "bob")


def test_a_mute_of_a_detector_that_is_not_there_is_refused(site):
    with pytest.raises(UsageError, match="no such detector; expected one of hot"):
        started(site).engine.mute("cold", "*", 60, "x", "ann")


def test_a_mode_of_a_detector_that_is_not_there_is_refused_at_the_start(site):
    with pytest.raises(ConfigError, match=r"\[\[modes\]\] detector = 'cold'.*hot"):
        started(site, [ModeRule("record", "cold")])


def test_recorded_findings_open_nothing(site):
    running = started(site, [ModeRule("record", "hot")])
    running.play(0, [95] * 6)
    assert incidents(site) == []
    assert site.rows("SELECT DISTINCT evidence ->> '$.mode' FROM findings") == [("record",)]


def test_not_a_fault_resolves_and_tells_the_detector_once(site):
    running = started(site)
    running.play(0, [95] * 5)
    (id_,) = site.rows("SELECT id FROM incidents WHERE cause = 'gpu:n1.0'")[0]
    change = running.engine.resolve_as_not_a_fault(id_, "ann", "always so")
    assert change.incident.state == "resolved"
    running.now += STEP
    running.play(6, [95] * 3)
    assert [(e.entity, e.data["detector"], e.data["verdict"]) for e in running.judge.told] == [
        ("gpu:n1.0", "hot", "not_a_fault")
    ]


def test_a_verdict_outlives_a_restart_before_it_was_judged(site):
    running = started(site)
    running.play(0, [95] * 5)
    (id_,) = site.rows("SELECT id FROM incidents WHERE cause = 'gpu:n1.0'")[0]
    running.engine.resolve_as_not_a_fault(id_, "ann", "always so")
    running.start()
    running.play(6, [95] * 3)
    assert [e.entity for e in running.judge.told] == ["gpu:n1.0"]


def test_a_verdict_on_an_incident_that_is_not_there_changes_nothing(site):
    running = started(site)
    running.play(0, [95] * 5)
    with pytest.raises(KeyError):
        running.engine.resolve_as_not_a_fault("nothing", "ann", "x")
    assert site.rows("SELECT count(*) FROM events WHERE kind = 'feedback'") == [(0,)]
    assert {state for _, state in incidents(site)} == {"open"}


@pytest.mark.slow
def test_muting_what_is_open_keeps_it_open_and_tells_nothing_more(site):
    running = started(site)
    running.play(0, [95] * 5)
    running.engine.mute("hot", "*", 6000, "new paste", "ann")
    before = site.rows("SELECT count(*) FROM history")
    running.play(5, [95] * 80)
    assert {state for _, state in incidents(site)} == {"open"}
    assert site.rows("SELECT count(*) FROM history") == before


def test_a_mute_is_ended_once(site):
    running = started(site)
    made = running.engine.mute("hot", "*", 6000, "new paste", "ann")
    running.engine.unmute(made.id, "bob")
    with pytest.raises(KeyError):
        running.engine.unmute(made.id, "bob")


def test_a_mute_on_what_nobody_knows_is_taken_and_told(site):
    running = started(site)
    running.play(0, [50] * 3)
    said = running.engine.describe_unknown_scope("gpu:n1.o")
    assert said.startswith("scope = 'gpu:n1.o': unknown entity")
    assert running.engine.mute("hot", "gpu:n1.o", 600, "why", "ada").scope == "gpu:n1.o"
    for known in ("gpu:n1.0", "*", "fleet:gpu", "site:all"):
        assert running.engine.describe_unknown_scope(known) == ""


def test_a_scope_that_only_the_topology_knows_is_known_and_a_slip_is_met_with_a_suggestion():
    topology = Topology({"node:n1": ("rack:r12",), "rack:r12": ("cdu:c1",)})
    for known in ("node:n1", "rack:r12", "cdu:c1"):
        assert warn_unknown_scope(known, topology, lambda _: False) == ""
    assert warn_unknown_scope("rack:r21", topology, lambda _: False).endswith("did you mean 'rack:r12'?")
