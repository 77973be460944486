"""The finding filter: modes and mutes decide which findings reach the Desk; all findings are stored."""

from __future__ import annotations

import pytest

from pipeline.config.sections import ModeRule, load_config
from pipeline.judging.mutes import FindingFilter, Mute, check_mute
from pipeline.model.errors import ConfigError, UsageError
from pipeline.model.records import SECOND, Finding
from pipeline.model.topology import Topology

T0 = 1_780_000_000 * SECOND
TOPOLOGY = Topology({"gpu:n0.0": ["node:n0"], "gpu:n1.0": ["node:n1"], "node:n0": ["rack:r1"], "node:n1": ["rack:r1"]})


def make_finding(entity="gpu:n0.0", detector="straggler", time=T0):
    return Finding(time, time, entity, detector, "page", 1.0, f"{entity} is slow", {"clears": "x"}, ("s",))


def make_mute(detector="straggler", scope="node:n0", since=T0, until=T0 + 100 * SECOND, ended=None):
    return Mute("m1", detector, scope, since, until, "being repaired", "ann", ended)


def passed_entities(finding_filter, *findings):
    return [f.entity for f in finding_filter.filter_findings(findings, none_open, T0)[1]]


def none_open(finding):
    return None


def test_without_rules_all_findings_pass_unchanged():
    stored, reported = FindingFilter(TOPOLOGY).filter_findings([make_finding()], none_open, T0)
    assert stored == reported == [make_finding()]


def test_mode_record_stores_findings_and_reports_none():
    stored, reported = FindingFilter(TOPOLOGY, [ModeRule("record", "straggler")]).filter_findings(
        [make_finding(), make_finding(detector="link")], none_open, T0
    )
    assert [f.evidence.get("mode") for f in stored] == ["record", None]
    assert [f.detector for f in reported] == ["link"]


def test_mode_act_is_passed_to_the_desk():
    _, reported = FindingFilter(TOPOLOGY, [ModeRule("act", "straggler", "rack:r1")]).filter_findings(
        [make_finding()], none_open, T0
    )
    assert reported[0].evidence["mode"] == "act"


def test_the_nearest_scope_applies():
    rules = [ModeRule("record"), ModeRule("notify", scope="rack:r1"), ModeRule("record", scope="node:n1")]
    assert passed_entities(
        FindingFilter(TOPOLOGY, rules), make_finding(), make_finding("gpu:n1.0"), make_finding("gpu:elsewhere.0")
    ) == ["gpu:n0.0"]


def test_on_one_scope_a_detector_rule_comes_before_a_rule_for_all_detectors():
    rules = [ModeRule("notify", "straggler"), ModeRule("record")]
    assert passed_entities(FindingFilter(TOPOLOGY, rules), make_finding(), make_finding(detector="link")) == [
        "gpu:n0.0"
    ]


def test_of_two_equal_rules_the_later_one_applies():
    assert passed_entities(FindingFilter(TOPOLOGY, [ModeRule("record"), ModeRule("notify")]), make_finding()) == [
        "gpu:n0.0"
    ]


def test_a_mute_covers_its_detector_on_its_scope_and_below():
    finding_filter = FindingFilter(TOPOLOGY, mutes=[make_mute()])
    assert passed_entities(
        finding_filter, make_finding(), make_finding("node:n0"), make_finding("gpu:n1.0"), make_finding(detector="link")
    ) == [
        "gpu:n1.0",
        "gpu:n0.0",
    ]


def test_a_muted_finding_is_stored_with_the_reason():
    stored, reported = FindingFilter(TOPOLOGY, mutes=[make_mute()]).filter_findings([make_finding()], none_open, T0)
    assert reported == []
    assert stored[0].evidence["muted"]["reason"] == "being repaired"


@pytest.mark.parametrize(("seconds", "passes"), [(-1, True), (0, False), (99, False), (100, True)])
def test_a_mute_applies_from_its_start_to_its_end(seconds, passes):
    assert (
        bool(passed_entities(FindingFilter(TOPOLOGY, mutes=[make_mute()]), make_finding(time=T0 + seconds * SECOND)))
        is passes
    )


def test_an_ended_mute_no_longer_applies():
    finding_filter = FindingFilter(TOPOLOGY, mutes=[make_mute(ended=T0 + 50 * SECOND)])
    assert passed_entities(finding_filter, make_finding(time=T0 + 49 * SECOND)) == []
    assert passed_entities(finding_filter, make_finding(time=T0 + 50 * SECOND)) == ["gpu:n0.0"]


def test_stars_match_every_detector_or_every_scope():
    assert (
        passed_entities(
            FindingFilter(TOPOLOGY, mutes=[make_mute("*", "rack:r1")]), make_finding(), make_finding(detector="link")
        )
        == []
    )
    assert (
        passed_entities(FindingFilter(TOPOLOGY, mutes=[make_mute("straggler", "*")]), make_finding("gpu:far.0")) == []
    )


def test_expired_mutes_are_dropped():
    finding_filter = FindingFilter(TOPOLOGY, mutes=[make_mute()])
    finding_filter.drop_expired(T0 + 99 * SECOND)
    assert finding_filter.mutes
    finding_filter.drop_expired(T0 + 100 * SECOND)
    assert not finding_filter.mutes


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
def test_an_invalid_mute_is_refused(wanted, message):
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
def test_an_invalid_mode_is_refused_with_its_place(tmp_path, text, message):
    file = tmp_path / "f.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(file, {})


def test_a_mute_keeps_open_conditions_open_without_a_higher_severity():
    """Its incident stays open: a mute does not clear the condition."""
    _, reported = FindingFilter(TOPOLOGY, mutes=[make_mute()]).filter_findings(
        [make_finding()], lambda finding: "suspect", T0
    )
    assert [f.level for f in reported] == ["suspect"]


def test_a_cleared_finding_passes_a_mute():
    cleared = Finding(T0, T0, "gpu:n0.0", "straggler", "page", 1.0, "gpu:n0.0 is healthy", {"cleared": True}, ("s",))
    assert passed_entities(FindingFilter(TOPOLOGY, mutes=[make_mute()]), cleared) == ["gpu:n0.0"]


LATER = T0 + 3 * 3600 * SECOND


def logged_once(level="page", **more):
    return Finding(T0, T0, "gpu:n0.0", "xid", level, 1.0, "gpu:n0.0 fell off the bus", {"holds": True, **more}, ("s",))


def test_a_finding_logged_once_under_a_mute_is_reported_when_the_mute_ends():
    finding_filter = FindingFilter(TOPOLOGY, mutes=[make_mute("xid", until=LATER)])
    assert passed_entities(finding_filter, logged_once()) == []
    assert finding_filter.filter_findings([], none_open, LATER - SECOND) == ([], [])
    stored, reported = finding_filter.filter_findings([], none_open, LATER)
    assert stored == reported
    assert [(f.entity, f.level, f.onset, f.time) for f in reported] == [("gpu:n0.0", "page", T0, LATER)]
    assert "muted" not in reported[0].evidence
    assert finding_filter.filter_findings([], none_open, LATER + SECOND) == ([], []), "reported once"


def test_a_finding_logged_once_is_reported_when_recording_ends():
    finding_filter = FindingFilter(TOPOLOGY, [ModeRule("record", "xid")])
    assert passed_entities(finding_filter, logged_once()) == []
    after = FindingFilter(TOPOLOGY, [ModeRule("act", "xid")])
    after.held.restore(finding_filter.held.snapshot())
    (reported,) = after.filter_findings([], none_open, LATER)[1]
    assert (reported.level, reported.evidence) == ("page", {"holds": True, "mode": "act"})


def test_a_finding_cleared_under_a_mute_is_not_reported():
    finding_filter = FindingFilter(TOPOLOGY, mutes=[make_mute("xid", until=LATER)])
    finding_filter.filter_findings([logged_once()], none_open, T0)
    finding_filter.filter_findings([logged_once(cleared=True)], none_open, T0 + SECOND)
    assert finding_filter.filter_findings([], none_open, LATER) == ([], [])


def test_a_finding_in_an_open_incident_is_not_reported_again_unless_it_became_worse():
    for standing, comes in (("page", 0), ("suspect", 1)):
        finding_filter = FindingFilter(TOPOLOGY, mutes=[make_mute("xid", until=LATER)])
        finding_filter.filter_findings([logged_once()], lambda finding, level=standing: level, T0)
        assert len(finding_filter.filter_findings([], none_open, LATER)[1]) == comes


def test_a_finding_reported_again_when_the_mute_ends_is_reported_once():
    finding_filter = FindingFilter(TOPOLOGY, mutes=[make_mute("xid", until=LATER)])
    finding_filter.filter_findings([logged_once()], none_open, T0)
    renewed = Finding(LATER, LATER, "gpu:n0.0", "xid", "page", 2.0, "again", {"holds": True}, ("s",))
    assert finding_filter.filter_findings([renewed], none_open, LATER)[1] == [renewed]
    assert finding_filter.filter_findings([], none_open, LATER + SECOND) == ([], [])
