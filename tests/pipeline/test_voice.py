"""Modes and mutes decide what the Desk hears; what was found is stored whatever they say."""

from __future__ import annotations

import pytest

from pipeline.config.sections import ModeRule, load_config
from pipeline.judging.mutes import FindingFilter, Mute, check_mute
from pipeline.model.errors import ConfigError, UsageError
from pipeline.model.records import SECOND, Finding
from pipeline.model.topology import Topology

T0 = 1_780_000_000 * SECOND
TOPOLOGY = Topology({"gpu:n0.0": ["node:n0"], "gpu:n1.0": ["node:n1"], "node:n0": ["rack:r1"], "node:n1": ["rack:r1"]})


def found(entity="gpu:n0.0", detector="straggler", time=T0):
    return Finding(time, time, entity, detector, "page", 1.0, f"{entity} is slow", {"clears": "x"}, ("s",))


def mute(detector="straggler", scope="node:n0", since=T0, until=T0 + 100 * SECOND, ended=None):
    return Mute("m1", detector, scope, since, until, "being repaired", "ann", ended)


def heard(voice, *findings):
    return [f.entity for f in voice.filter_findings(findings, nothing_stands, T0)[1]]


def nothing_stands(finding):
    return None


def test_without_rules_everything_is_heard_as_it_is():
    every, told = FindingFilter(TOPOLOGY).filter_findings([found()], nothing_stands, T0)
    assert every == told == [found()]


def test_recording_stores_and_tells_nobody():
    every, told = FindingFilter(TOPOLOGY, [ModeRule("record", "straggler")]).filter_findings(
        [found(), found(detector="link")], nothing_stands, T0
    )
    assert [f.evidence.get("mode") for f in every] == ["record", None]
    assert [f.detector for f in told] == ["link"]


def test_acting_is_told_to_the_desk():
    _, told = FindingFilter(TOPOLOGY, [ModeRule("act", "straggler", "rack:r1")]).filter_findings(
        [found()], nothing_stands, T0
    )
    assert told[0].evidence["mode"] == "act"


def test_the_nearest_scope_decides():
    rules = [ModeRule("record"), ModeRule("notify", scope="rack:r1"), ModeRule("record", scope="node:n1")]
    assert heard(FindingFilter(TOPOLOGY, rules), found(), found("gpu:n1.0"), found("gpu:elsewhere.0")) == ["gpu:n0.0"]


def test_on_one_scope_the_detector_comes_before_all_detectors():
    rules = [ModeRule("notify", "straggler"), ModeRule("record")]
    assert heard(FindingFilter(TOPOLOGY, rules), found(), found(detector="link")) == ["gpu:n0.0"]


def test_of_two_alike_the_later_line_holds():
    assert heard(FindingFilter(TOPOLOGY, [ModeRule("record"), ModeRule("notify")]), found()) == ["gpu:n0.0"]


def test_a_mute_silences_its_detector_on_its_scope_and_below():
    voice = FindingFilter(TOPOLOGY, mutes=[mute()])
    assert heard(voice, found(), found("node:n0"), found("gpu:n1.0"), found(detector="link")) == [
        "gpu:n1.0",
        "gpu:n0.0",
    ]


def test_what_is_muted_is_stored_with_the_reason():
    every, told = FindingFilter(TOPOLOGY, mutes=[mute()]).filter_findings([found()], nothing_stands, T0)
    assert told == []
    assert every[0].evidence["muted"]["reason"] == "being repaired"


@pytest.mark.parametrize(("seconds", "is_heard"), [(-1, True), (0, False), (99, False), (100, True)])
def test_a_mute_holds_from_its_beginning_to_its_end(seconds, is_heard):
    assert bool(heard(FindingFilter(TOPOLOGY, mutes=[mute()]), found(time=T0 + seconds * SECOND))) is is_heard


def test_a_mute_that_was_ended_holds_no_longer():
    voice = FindingFilter(TOPOLOGY, mutes=[mute(ended=T0 + 50 * SECOND)])
    assert heard(voice, found(time=T0 + 49 * SECOND)) == []
    assert heard(voice, found(time=T0 + 50 * SECOND)) == ["gpu:n0.0"]


def test_stars_stand_for_every_detector_or_everywhere():
    assert heard(FindingFilter(TOPOLOGY, mutes=[mute("*", "rack:r1")]), found(), found(detector="link")) == []
    assert heard(FindingFilter(TOPOLOGY, mutes=[mute("straggler", "*")]), found("gpu:far.0")) == []


def test_mutes_that_are_over_are_let_go():
    voice = FindingFilter(TOPOLOGY, mutes=[mute()])
    voice.drop_expired(T0 + 99 * SECOND)
    assert voice.mutes
    voice.drop_expired(T0 + 100 * SECOND)
    assert not voice.mutes


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (("stragler", "rack:r1", 60.0, "x"), "no such detector"),
        (("straggler", "rack", 60.0, "x"), "expected an entity"),
        (("straggler", "rack:r1", 0.0, "x"), "at most 30 days"),
        (("straggler", "rack:r1", 31 * 86_400.0, "x"), "at most 30 days"),
        (("straggler", "rack:r1", 60.0, "  "), "reason: is empty"),
        (("*", "*", 60.0, "x"), "mutes everything"),
    ],
)
def test_a_mute_that_nobody_could_want_is_refused(wanted, message):
    with pytest.raises(UsageError, match=message):
        check_mute(*wanted, known=("straggler",))


def test_the_configuration_has_modes(tmp_path):
    file = tmp_path / "f.toml"
    file.write_text('[[modes]]\ndetector = "straggler"\nscope = "rack:r1"\nmode = "record"\n[[modes]]\nmode = "act"\n')
    assert load_config(file, {}).modes == (ModeRule("record", "straggler", "rack:r1"), ModeRule("act"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[modes]]\nmode = "page"\n', "expected one of 'record', 'notify', 'act'"),
        ('[[modes]]\ndetector = "link"\n', "mode: missing"),
        ('[[modes]]\nmode = "act"\nscope = "rack"\n', "expected an entity such as"),
    ],
)
def test_a_wrong_mode_is_refused_with_its_place(tmp_path, text, message):
    file = tmp_path / "f.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(file, {})


def test_a_mute_ends_nothing_that_still_is_and_makes_it_no_louder():
    """Its incident stays open: that is not the quiet that ends one."""
    _, told = FindingFilter(TOPOLOGY, mutes=[mute()]).filter_findings([found()], lambda finding: "suspect", T0)
    assert [f.level for f in told] == ["suspect"]


def test_that_something_was_cleared_is_heard_through_a_mute():
    cleared = Finding(T0, T0, "gpu:n0.0", "straggler", "page", 1.0, "gpu:n0.0 is well", {"cleared": True}, ("s",))
    assert heard(FindingFilter(TOPOLOGY, mutes=[mute()]), cleared) == ["gpu:n0.0"]


LATER = T0 + 3 * 3600 * SECOND


def logged_once(level="page", **more):
    return Finding(T0, T0, "gpu:n0.0", "xid", level, 1.0, "gpu:n0.0 fell off the bus", {"holds": True, **more}, ("s",))


def test_what_was_logged_once_under_a_mute_comes_up_when_the_mute_ends():
    voice = FindingFilter(TOPOLOGY, mutes=[mute("xid", until=LATER)])
    assert heard(voice, logged_once()) == []
    assert voice.filter_findings([], nothing_stands, LATER - SECOND) == ([], [])
    every, told = voice.filter_findings([], nothing_stands, LATER)
    assert every == told
    assert [(f.entity, f.level, f.onset, f.time) for f in told] == [("gpu:n0.0", "page", T0, LATER)]
    assert "muted" not in told[0].evidence
    assert voice.filter_findings([], nothing_stands, LATER + SECOND) == ([], []), "once is enough"


def test_what_was_logged_once_comes_up_when_it_is_recorded_no_longer():
    voice = FindingFilter(TOPOLOGY, [ModeRule("record", "xid")])
    assert heard(voice, logged_once()) == []
    after = FindingFilter(TOPOLOGY, [ModeRule("act", "xid")])
    after.held.restore(voice.held.snapshot())
    (told,) = after.filter_findings([], nothing_stands, LATER)[1]
    assert (told.level, told.evidence) == ("page", {"holds": True, "mode": "act"})


def test_what_was_cleared_under_a_mute_does_not_come_up():
    voice = FindingFilter(TOPOLOGY, mutes=[mute("xid", until=LATER)])
    voice.filter_findings([logged_once()], nothing_stands, T0)
    voice.filter_findings([logged_once(cleared=True)], nothing_stands, T0 + SECOND)
    assert voice.filter_findings([], nothing_stands, LATER) == ([], [])


def test_what_its_incident_tells_already_does_not_come_up_but_what_became_worse_does():
    for standing, comes in (("page", 0), ("suspect", 1)):
        voice = FindingFilter(TOPOLOGY, mutes=[mute("xid", until=LATER)])
        voice.filter_findings([logged_once()], lambda finding, level=standing: level, T0)
        assert len(voice.filter_findings([], nothing_stands, LATER)[1]) == comes


def test_what_is_told_anew_when_the_mute_ends_is_told_once():
    voice = FindingFilter(TOPOLOGY, mutes=[mute("xid", until=LATER)])
    voice.filter_findings([logged_once()], nothing_stands, T0)
    anew = Finding(LATER, LATER, "gpu:n0.0", "xid", "page", 2.0, "again", {"holds": True}, ("s",))
    assert voice.filter_findings([anew], nothing_stands, LATER)[1] == [anew]
    assert voice.filter_findings([], nothing_stands, LATER + SECOND) == ([], [])
