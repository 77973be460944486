"""The contract of all detectors; each observes its own fault (tests/detectors/cases)."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest

from detectors import DETECTORS, REMOVED, configured, explain, listing
from detectors.base.findings import CLEARS, COMPARED
from detectors.runner import Runner
from pipeline.model.entity_names import TITLE_LENGTH, entity_name
from pipeline.model.errors import ConfigError, UsageError
from pipeline.model.records import LEVELS, SECOND, Event, Frame
from pipeline.model.topology import Topology
from tests.detectors.cases.case import START, at_known_site, cases
from tests.detectors.snapshots import packed

CASES = cases()
every = pytest.mark.parametrize("case", CASES, ids=lambda case: case.detector.name)
REPEATS = 60 * SECOND


FOUND = {}
"""Detector -> its findings in its case: computed once for all tests that look at them."""


def run_case(case):
    name = case.detector.name
    if name not in FOUND:
        FOUND[name] = case.run_detector(case.detector(), range(case.ticks))
    return list(FOUND[name])


def test_every_detector_has_a_case():
    missing = sorted(cls.name for cls in set(DETECTORS) - {case.detector for case in CASES})
    assert not missing, f"write tests/detectors/cases/NAME.py, with its fault as CASE, for {missing}"
    assert {case.detector for case in CASES} == set(DETECTORS)


@pytest.mark.sample(every=4)
@every
def test_it_finds_its_fault_and_blames_only_the_faulty_entities(case):
    found = case.run_detector(at_known_site(case.detector()), range(case.ticks))
    assert {f.entity for f in found} == case.guilty
    assert max((LEVELS.index(f.level) for f in found), default=-1) == LEVELS.index(case.level)


@pytest.mark.sample(every=4)
@every
def test_it_reports_nothing_before_its_fault_begins(case):
    begin = case.time(case.fault) - case.step * SECOND
    assert all(f.time > begin for f in run_case(case))


@pytest.mark.sample(every=4)
@every
def test_it_is_silent_without_a_fault(case):
    assert case.run_detector(case.detector(), range(max(case.ticks, 600)), broken=False) == []


@pytest.mark.sample(every=4)
@every
@pytest.mark.parametrize("missing", ["instants", "cells"])
def test_no_title_shows_a_number_that_is_missing(case, missing):
    """Once the fault is there, it is read each 30 s only, or four of ten readings are lost."""
    detector, topology, found = at_known_site(case.detector()), case.topology(), []
    lost = np.random.default_rng(1)
    for tick in range(case.ticks):
        values, events = case.instant(tick, tick >= case.fault, np.random.default_rng([tick, 7]))
        unread = missing == "instants" and tick >= case.fault + 10 and tick % 3 > 0
        share = 1.0 if unread else 0.4 if missing == "cells" and tick >= case.fault else 0.0
        for columns in values.values():
            columns |= {name: np.where(lost.random(len(v)) < share, np.nan, v) for name, v in columns.items()}
        found += detector.observe(case.frames_of(tick, values, events, topology))
    assert not [f.summary for f in found if {"nan", "inf"} & set(f.summary.lower().replace("%", " ").split())]


@every
def test_findings_keep_to_the_contract(case):
    found = run_case(case)
    assert [f.time for f in found] == sorted(f.time for f in found)
    for f in found:
        assert f.onset <= f.time
        assert f.level in LEVELS
        assert f.detector == case.detector.name
        assert f.signals
        assert np.isfinite(f.score)


@every
def test_each_finding_has_a_title_and_the_end_of_its_condition(case):
    for f in run_case(case):
        assert isinstance(f.evidence.get(CLEARS), str), f.evidence
        assert len(f.evidence[CLEARS]) > 10
        assert f.entity.split(":", 1)[1] in f.summary or entity_name(f.entity).lower() in f.summary.lower()
        assert "\n" not in f.summary
        assert len(f.summary) <= TITLE_LENGTH
        compared = set(COMPARED) & f.evidence.keys()
        # a value is compared with an expected one, with all fields of a comparison
        assert not ({"value", "expected"} <= f.evidence.keys() and compared != set(COMPARED)), f.evidence


@every
def test_the_onset_stays_and_the_level_never_falls_while_a_condition_holds(case):
    found = run_case(case)
    for entity in case.guilty:
        mine = [f for f in found if f.entity == entity]
        by_onset = [f for f in mine if f.onset == mine[-1].onset]
        levels = [LEVELS.index(f.level) for f in by_onset]
        assert levels == sorted(levels)
        gaps = [b.time - a.time for a, b in itertools.pairwise(by_onset)]
        assert max(gaps, default=0) <= max(REPEATS, case.step * SECOND)


@every
def test_it_repeats_a_condition_that_holds_each_minute(case):
    """The Desk resolves after ten minutes without a finding."""
    found = run_case(case)
    last = case.time(case.ticks - 1)
    assert last - max(f.time for f in found) <= 2 * max(REPEATS, case.step * SECOND)


@pytest.mark.sample(every=4)
@every
def test_a_snapshot_resumes_midway_as_if_nothing_had_stopped(case):
    everything = run_case(case)
    stops = (case.fault // 2, case.fault + 5, (case.fault + case.ticks) // 2)
    first, topology, before = case.detector(), case.topology(), []
    for tick in range(max(stops) + 1):
        if tick in stops:
            second, found = case.detector(), list(before)
            second.restore(first.snapshot())
            for later in range(tick, case.ticks):
                found += second.observe(case.frames(later, True, topology))
            assert found == everything
        before += first.observe(case.frames(tick, True, topology))


@pytest.mark.sample(every=4)
@every
def test_a_runner_restores_its_state_from_bytes(case):
    first, second = Runner([case.detector()]), Runner([case.detector()])
    topology, stop = case.topology(), (case.fault + case.ticks) // 2
    for tick in range(stop):
        first.observe(case.frames(tick, True, topology))
    second.restore(packed(first))
    for tick in range(stop, case.ticks):
        frames = case.frames(tick, True, topology)
        assert second.observe(frames) == first.observe(frames)
    assert not first.errors + second.errors


@every
def test_a_snapshot_does_not_change_with_the_detector(case):
    detector, topology = case.detector(), case.topology()
    for tick in range(case.fault + 30):
        detector.observe(case.frames(tick, True, topology))
    taken = detector.snapshot()
    kept = repr(copy.deepcopy(taken))
    for tick in range(case.fault + 30, case.fault + 60):
        detector.observe(case.frames(tick, True, topology))
    assert repr(taken) == kept


@pytest.mark.sample(every=4)
@every
def test_the_order_of_entities_does_not_matter(case):
    def reverse_order(f: Frame) -> Frame:
        values = {k: v[::-1] for k, v in f.values.items()}
        return Frame(f.time, f.device_class, f.entities[::-1], values, f.topology, f.events)

    detector, topology, found = case.detector(), case.topology(), []
    for tick in range(case.ticks):
        frames = case.frames(tick, True, topology)
        found += detector.observe({c: reverse_order(f) for c, f in frames.items()})
    assert sorted((f.key, f.level, f.time) for f in found) == sorted((f.key, f.level, f.time) for f in run_case(case))


@pytest.mark.sample(every=4)
@every
def test_it_reads_no_signal_that_it_does_not_declare(case):
    """The pipeline makes frames of declared signals only. A second run with the same values gives the same findings."""
    named = set(case.detector().input_signals())

    def reduced(f: Frame) -> Frame:
        kept = {name: column for name, column in f.values.items() if name in named}
        events = tuple(e for e in f.events if f"event:{e.kind}" in named or e.kind in ALWAYS)
        return Frame(f.time, f.device_class, f.entities, kept, f.topology, events)

    detector, topology, found = case.detector(), case.topology(), []
    for tick in range(case.ticks):
        found += detector.observe({c: reduced(f) for c, f in case.frames(tick, True, topology).items()})
    assert found == run_case(case)


ALWAYS = {"maintenance_start", "maintenance_end", "version", "reset", "job_start", "job_end"}
"""Kinds that Gates read; detectors need not declare them."""


@every
def test_frames_without_measurements_are_accepted(case):
    detector, topology = case.detector(), case.topology()
    for tick in range(90):
        frames = case.frames(tick, False, topology)
        if tick % 3 == 0:
            frames = {c: emptied(f) for c, f in frames.items()}
        assert detector.observe(frames) == []


def emptied(f: Frame) -> Frame:
    values = {name: np.full(len(column), np.nan) for name, column in f.values.items()}
    return Frame(f.time, f.device_class, f.entities, values, f.topology, f.events)


@every
def test_missing_classes_empty_fleets_and_no_frames_are_accepted(case):
    detector = case.detector()
    assert detector.observe({}) == []
    frame = Frame(START, "node", ("node:n0",), {"node.load1": np.array([1.0])}, Topology())
    assert detector.observe({"node": frame}) == []
    assert detector.observe({c: Frame(START, c, (), {}, Topology()) for c in case.names}) == []


@every
def test_a_clock_that_is_set_back_is_accepted(case):
    detector, topology = case.detector(), case.topology()
    for tick in (*range(40), *range(20, 50), 5, *range(50, 60)):
        assert detector.observe(case.frames(tick, False, topology)) == []


@pytest.mark.sample(every=4)
@every
def test_many_nan_values_are_accepted(case):
    """Half of all values are lost at random, then all of some ticks."""
    detector, topology = case.detector(), case.topology()
    for tick in range(200):
        rng = np.random.default_rng(tick)
        frames = {}
        for c, f in case.frames(tick, False, topology).items():
            lost = {n: np.where(rng.random(len(v)) < 0.5, np.nan, v) for n, v in f.values.items()}
            frames[c] = Frame(f.time, f.device_class, f.entities, lost, f.topology, f.events)
        assert [f for f in detector.observe(frames) if f.level == "page"] == []


@every
def test_the_first_twenty_samples_are_silent(case):
    if case.exact:
        pytest.skip(f"there is nothing to learn: {case.exact}")
    assert case.run_detector(case.detector(), range(case.fault, case.fault + 20)) == []


@every
def test_its_page_names_its_source_its_needs_and_its_blind_spots(case):
    cls = case.detector
    assert "Source:" in (cls.__doc__ or ""), f"the docstring of {cls.__name__} needs a sentence that begins 'Source:'"
    assert cls().deciding_signals(), f"{cls.__name__} needs a signal or event in `needs` or `any_of`"
    assert cls.cannot_see.endswith("."), f"{cls.__name__}.cannot_see must be a sentence with a full stop"
    assert cls.family


def test_each_name_is_unique():
    names = [cls.name for cls in DETECTORS]
    assert len(set(names)) == len(names)


def test_configuration_builds_each_detector_and_refuses_unknown_keys():
    link = next(d for d in configured({"link": {"flaps": 5}}, "x.toml") if d.name == "link")
    assert link.flaps == 5
    with pytest.raises(ConfigError, match=r"x\.toml: \[detector\.lnk\].*did you mean 'link'"):
        configured({"lnk": {}}, "x.toml")
    with pytest.raises(ConfigError, match=r"flap: no such key; did you mean 'flaps'"):
        configured({"link": {"flap": 5}}, "x.toml")


@pytest.mark.parametrize("name", REMOVED)
def test_the_table_of_a_removed_detector_is_refused_with_the_reason_and_what_to_do(name):
    with pytest.raises(ConfigError, match=rf"x\.toml: \[detector\.{name}\]: removed, because .*; delete this table"):
        configured({name: {"mode": "live"}}, "x.toml")
    with pytest.raises(UsageError, match=f"'{name}' was removed, because "):
        explain(name)
    assert name not in {cls.name for cls in DETECTORS}


def test_the_list_of_detectors_is_plain_data():
    rows = listing()
    assert [row["name"] for row in rows] == [cls.name for cls in DETECTORS]


@pytest.mark.slow
def test_a_real_host_alone_gives_no_findings():
    """A node without jobs or fabric: one port that is up, one that was never up."""
    topology = Topology({"port:host.eth0": ["node:host"], "port:host.eth1": ["node:host"]})
    runner, found = Runner(configured()), []
    for tick in range(500):
        values = {"nic.state": np.array([1.0, 0.0]), "nic.carrier_changes": np.array([2.0, 1.0])}
        values["nic.crc_errors"] = np.zeros(2)
        load = Frame(START + tick * 10 * SECOND, "node", ("node:host",), {"node.load1": np.array([9.0])}, topology)
        nic = Frame(load.time, "nic", ("port:host.eth0", "port:host.eth1"), values, topology)
        found += runner.observe({"nic": nic, "node": load})
    assert found == []
    assert not runner.errors


@every
def test_a_finding_of_an_event_depends_on_the_event_alone_and_changes_no_state(case):
    """Also for malformed events; kinds that wait for their frame have no finding on arrival."""
    detector, topology = case.detector(), case.topology()
    for tick in range(0, case.fault, max(1, case.fault // 10)):
        detector.observe(case.frames(tick, True, topology))
    before = packed(Runner([detector]))
    fresh, time = case.detector(), case.time(case.fault)
    datas = ({}, {"state": "active"}, {"state": [], "since": "x"}, {"xid": 79, "present": 3}, {"xid": {}, "leak": 1})
    more = {"state": "active", "since": time - 1, "signal": "coolant.flow", "leak": "critical", "xid": 79, "present": 3}
    for kind in detector.on_arrival:
        for data in (*datas, more):
            event = Event(time, "gpu:stranger.0", kind, data)
            found = detector.judge_event(event, topology)
            assert found == fresh.judge_event(event, topology)
            assert found is None or (found.time, found.entity, found.onset <= time) == (time, event.entity, True)
    assert packed(Runner([detector])) == before
    waits = [Event(time, "gpu:stranger.0", kind, more) for kind in ("inventory", "digest", "unheard_of")]
    assert Runner([detector]).judge_events(waits, topology) == []


def test_the_kinds_that_are_judged_on_arrival_are_known():
    kinds = {kind for detector in configured() for kind in detector.on_arrival}
    edge = {"flow_collapse", "pressure_collapse", "leak", "temperature_rise", "xid", "gpu_lost"}
    assert kinds == {*edge, "site_silent", "site_heard"}
