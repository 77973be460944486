"""User actions on a running engine take effect immediately and after a restart: mutes, modes, "not a fault"."""

from __future__ import annotations

import pytest

from pipeline.config.sections import ModeRule
from pipeline.engine.engine import Engine
from pipeline.engine.people import People
from pipeline.incidents import ledger
from pipeline.judging.mutes import warn_unknown_scopes
from pipeline.model.errors import ConfigError, UsageError
from pipeline.model.records import Finding
from pipeline.model.topology import Topology
from tests.pipeline.test_engine import STEP, T0, HotForThree, Running


class HotWithFeedback(HotForThree):
    """HotForThree that keeps the feedback events it receives."""

    def __init__(self):
        super().__init__()
        self.feedback = []

    def judge_events(self, events, topology, again=False):
        return []

    def observe(self, frames):
        self.feedback += [e for f in frames.values() for e in f.events if e.kind == "feedback"]
        return super().observe(frames)


class MutableEngine(Running):
    def __init__(self, site, modes=(), judge=HotWithFeedback):
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


def start_engine(site, modes=(), judge=HotWithFeedback):
    running = MutableEngine(site, modes, judge)
    running.start()
    return running


def incidents(site):
    return site.rows("SELECT cause, state FROM incidents ORDER BY cause")


def test_a_muted_detector_opens_no_incident_and_its_findings_are_stored(site):
    running = start_engine(site)
    People(running.engine).mute("hot", "*", 600, "new paste", "ann")
    running.play(1, [95] * 6)
    assert incidents(site) == []
    (evidence,) = {row[0] for row in site.rows("SELECT evidence ->> '$.muted.reason' FROM findings")}
    assert evidence == "new paste"


@pytest.mark.slow
def test_a_finding_under_a_mute_has_the_mute_as_evidence_until_the_mute_ends(site):
    """Otherwise the incident page would show the evidence of the peak: no mute, or one that ended long ago."""
    running = start_engine(site)
    reason = "SELECT DISTINCT evidence ->> '$.muted.reason' FROM findings WHERE entity = 'gpu:n1.0'"
    running.play(1, [99] * 5)
    assert site.rows(reason) == [(None,)]
    made = People(running.engine).mute("hot", "*", 6000, "new paste", "ann")
    running.play(6, [95] * 3)
    assert site.rows(reason) == [("new paste",)]
    People(running.engine).unmute(made.id, "bob")
    running.play(9, [94] * 3)
    assert site.rows(reason) == [(None,)]
    assert site.rows("SELECT max(score) FROM findings WHERE entity = 'gpu:n1.0'") == [(99.0,)], "the peak stays"


@pytest.mark.slow
def test_a_mute_survives_a_restart_and_expires(site):
    running = start_engine(site)
    People(running.engine).mute("hot", "gpu:n1.0", 60, "new paste", "ann")
    running.start()
    running.play(1, [95] * 5)
    assert [cause for cause, _ in incidents(site)] == ["gpu:n1.1"]
    running.play(6, [95] * 6)
    assert [cause for cause, _ in incidents(site)] == ["gpu:n1.0", "gpu:n1.1"]


class ReportsOnce(HotWithFeedback):
    """Reports each GPU's first page once, as a condition that holds."""

    def judge_events(self, events, topology, again=False):
        return []

    def observe(self, frames):
        before = set(self.since)
        super().observe(frames)
        frame = frames["gpu"]
        new = sorted(set(self.since) - before)
        return [Finding(frame.time, frame.time, e, "hot", "page", 1.0, f"{e} is gone", {"holds": True}) for e in new]


@pytest.mark.slow
def test_a_finding_reported_once_under_a_mute_is_reported_when_the_mute_ends_also_after_a_restart(site):
    running = start_engine(site, judge=ReportsOnce)
    People(running.engine).mute("hot", "*", 60, "new paste", "ann")
    running.play(1, [95] * 3)
    assert incidents(site) == []
    running.start()
    running.play(4, [40] * 6)
    assert incidents(site) == [("gpu:n1.0", "open"), ("gpu:n1.1", "open")]
    (muted,) = {row[0] for row in site.rows("SELECT evidence ->> '$.muted' FROM findings")}
    assert muted is None, "its evidence has no mute any more"


def test_a_mute_can_be_ended(site):
    running = start_engine(site)
    made = People(running.engine).mute("hot", "*", 6000, "new paste", "ann")
    running.now = T0 + STEP
    assert People(running.engine).unmute(made.id, "bob").ended == T0 + STEP
    running.play(2, [95] * 5)
    assert incidents(site)
    assert ledger.load_active_mutes(site.database.connection, T0 + 3 * STEP) == []
    with pytest.raises(KeyError):
        People(running.engine).unmute("nothing", "bob")


def test_a_mute_of_an_unknown_detector_is_refused(site):
    with pytest.raises(UsageError, match="no such detector; expected one of hot"):
        People(start_engine(site).engine).mute("cold", "*", 60, "x", "ann")


def test_a_mode_of_an_unknown_detector_is_refused_at_the_start(site):
    with pytest.raises(ConfigError, match=r"\[\[modes\]\] detector = 'cold'.*hot"):
        start_engine(site, [ModeRule("record", "cold")])


@pytest.mark.slow
def test_recorded_findings_open_no_incident(site):
    running = start_engine(site, [ModeRule("record", "hot")])
    running.play(0, [95] * 6)
    assert incidents(site) == []
    assert site.rows("SELECT DISTINCT evidence ->> '$.mode' FROM findings") == [("record",)]


@pytest.mark.slow
def test_not_a_fault_resolves_the_incident_and_reaches_the_detector_once(site):
    running = start_engine(site)
    running.play(0, [95] * 5)
    (id_,) = site.rows("SELECT id FROM incidents WHERE cause = 'gpu:n1.0'")[0]
    shown = People(running.engine).mark_normal(id_, "ann", "always so")
    assert shown.state == "resolved"
    running.now += STEP
    running.play(6, [95] * 3)
    assert [(e.entity, e.data["detector"], e.data["verdict"]) for e in running.judge.feedback] == [
        ("gpu:n1.0", "hot", "not_a_fault")
    ]


@pytest.mark.slow
def test_feedback_survives_a_restart_before_it_was_evaluated(site):
    running = start_engine(site)
    running.play(0, [95] * 5)
    (id_,) = site.rows("SELECT id FROM incidents WHERE cause = 'gpu:n1.0'")[0]
    People(running.engine).mark_normal(id_, "ann", "always so")
    running.start()
    running.play(6, [95] * 3)
    assert [e.entity for e in running.judge.feedback] == ["gpu:n1.0"]


def test_feedback_on_an_unknown_incident_changes_nothing(site):
    running = start_engine(site)
    running.play(0, [95] * 5)
    with pytest.raises(KeyError):
        People(running.engine).mark_normal("nothing", "ann", "x")
    assert site.rows("SELECT count(*) FROM events WHERE kind = 'feedback'") == [(0,)]
    assert {state for _, state in incidents(site)} == {"open"}


@pytest.mark.slow
def test_muting_an_open_incident_keeps_it_open_without_further_changes(site):
    running = start_engine(site)
    running.play(0, [95] * 5)
    People(running.engine).mute("hot", "*", 6000, "new paste", "ann")
    before = site.rows("SELECT count(*) FROM history")
    running.play(5, [95] * 80)
    assert {state for _, state in incidents(site)} == {"open"}
    assert site.rows("SELECT count(*) FROM history") == before


def test_a_mute_is_ended_once(site):
    running = start_engine(site)
    made = People(running.engine).mute("hot", "*", 6000, "new paste", "ann")
    People(running.engine).unmute(made.id, "bob")
    with pytest.raises(KeyError):
        People(running.engine).unmute(made.id, "bob")


def test_a_mute_for_an_unknown_entity_is_accepted_with_a_warning(site):
    running = start_engine(site)
    running.play(0, [50] * 3)
    said = People(running.engine).describe_unknown_scopes(["gpu:n1.o"])
    assert said.startswith("scope = 'gpu:n1.o': unknown entity")
    assert People(running.engine).mute("hot", "gpu:n1.o", 600, "why", "ada").scope == "gpu:n1.o"
    for known in ("gpu:n1.0", "*", "fleet:gpu", "site:all"):
        assert People(running.engine).describe_unknown_scopes([known]) == ""


def test_a_scope_in_the_topology_is_known_and_a_typo_gets_a_suggestion():
    topology = Topology({"node:n1": ("rack:r12",), "rack:r12": ("cdu:c1",)})
    for known in ("node:n1", "rack:r12", "cdu:c1"):
        assert warn_unknown_scopes([known], topology, lambda _: False, "lab") == ""
    assert warn_unknown_scopes(["rack:r21"], topology, lambda _: False, "lab").endswith("did you mean 'rack:r12'?")


def test_the_site_of_the_pipeline_is_known_and_another_one_is_warned_of():
    topology = Topology({"node:n1": ("rack:r12",)})
    assert warn_unknown_scopes(["site:lab", "site:all"], topology, lambda _: False, "lab") == ""
    said = warn_unknown_scopes(["site:other", "site:lab"], topology, lambda _: False, "lab")
    assert said == "scope = 'site:other': not the site of this pipeline, site:lab; covers nothing below it"


class Calibrated(HotWithFeedback):
    """HotForThree with a calibration; keeps the events about it."""

    def calibration(self):
        return {"format": 1, "detectors": {"hot": {"heat": {}}}}

    def observe(self, frames):
        self.feedback += [e for f in frames.values() for e in f.events if e.kind == "calibration"]
        return super().observe(frames)


@pytest.mark.slow
def test_a_version_of_the_calibration_is_kept_every_day(site):
    running = start_engine(site, judge=Calibrated)
    running.play(0, [50] * 20)
    assert site.rows("SELECT version, action FROM calibrations") == [(1, "learned")]
    running.now += 86_400 * 1_000_000
    running.play(8640 + 20, [50] * 20)
    assert site.rows("SELECT version, action FROM calibrations ORDER BY version") == [(1, "learned"), (2, "learned")]


@pytest.mark.slow
def test_pinning_what_is_in_force_keeps_it_as_a_version_and_reaches_the_detectors_also_after_a_restart(site):
    running = start_engine(site, judge=Calibrated)
    running.play(0, [50] * 5)
    versions = People(running.engine).change_calibration("pin", None, "ann")
    assert [(v["action"], v["user"], v["in_force"]) for v in versions[:2]] == [
        ("pin", "ann", False),
        ("learned", "ann", True),
    ]
    running.start()
    running.play(6, [50] * 3)
    (event,) = [e for e in running.judge.feedback if e.kind == "calibration"]
    assert (event.data["action"], event.data["calibration"]["format"]) == ("pin", 1)


def test_an_unknown_version_of_the_calibration_changes_nothing(site):
    running = start_engine(site, judge=Calibrated)
    running.play(0, [50] * 3)
    before = site.rows("SELECT count(*) FROM calibrations")
    with pytest.raises(KeyError):
        People(running.engine).change_calibration("rollback", 77, "ann")
    assert site.rows("SELECT count(*) FROM calibrations") == before
