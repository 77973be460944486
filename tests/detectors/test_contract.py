"""What every detector keeps to, whatever it looks for."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest

from detectors import DETECTORS, configured, listing
from detectors.runner import Runner
from detectors.telemetry_blind import TelemetryBlind
from pipeline.errors import ConfigError
from pipeline.records import LEVELS, SECOND, Event, Frame
from pipeline.topology import Topology

START = 1_790_000_000 * SECOND
FAULT, TICKS = 60, 180
EXACT = {
    "sdc": "digests are exact, and they are events, not samples",
    "coolant_leak": "the leak detector's own controller has judged",
    "coolant_edge": "the agent's rule has learnt and judged",
    "thermal_edge": "the agent's rule has learnt and judged",
    "telemetry_blind": "an answer comes or it does not",
}
every = pytest.mark.parametrize("cls", DETECTORS, ids=lambda cls: cls.name)


def breaks(tick, values):
    """All troubles at once from tick 60 on: a slow rank, an erring port, wrong digests, a failed pump, a leak, heat."""
    events = []
    if tick % 6 == 0:
        answers = ["wrong" if gpu == 5 and tick >= FAULT else "right" for gpu in range(16)]
        data = {"canary": "gemm", "version": "1"}
        time = START + tick * 10 * SECOND
        events = [Event(time, f"gpu:n{g // 4}.{g % 4}", "digest", {**data, "digest": a}) for g, a in enumerate(answers)]
    if tick >= FAULT:
        values["rank"]["rank.compute_time"][3] *= 1.4
        values["gpu"]["gpu.sm_clock"][3] = 1400.0
        values["nic"]["nic.symbol_errors"][9] += 5.0 * (tick - FAULT)
        for signal in ("coolant.flow", "pump.speed"):
            values["coolant"][signal][0] *= 0.4
        values["leak"]["leak.state"][1] = 2.0
        values["bmc"]["bmc.reachable"][1] = 0.0
    return events + (edges(tick) if tick == FAULT else [])


def edges(tick):
    """What the agents' edge rules tell of it."""
    time = START + tick * 10 * SECOND
    says = {"state": "active", "since": time - SECOND}
    flow = says | {"signal": "coolant.flow", "value": 120.0, "usual": 300.0, "share": 0.7}
    heat = says | {"signal": "gpu.temperature", "value": 71.0, "rise": 11.0, "seconds": 5.0, "slope": 1.4}
    events = [Event(time, "leak_detector:c0.hose", "leak", says | {"leak": "critical", "value": 2})]
    events.append(Event(time, "cdu:c0", "flow_collapse", flow))
    return events + [Event(time, f"gpu:n3.{i}", "temperature_rise", heat) for i in range(3)]


def shown(site, watch, cls, ticks=TICKS, change=breaks):
    return watch(cls(), site, ticks, change)


@every
def test_it_finds_its_trouble_and_blames_only_the_guilty(cls, site, watch):
    guilty = {"straggler": "rank:7.3", "link": "port:n2.p1", "sdc": "gpu:n1.1", "coolant": "cdu:c0"}
    guilty |= {"coolant_leak": "leak_detector:c0.hose", "coolant_edge": "cdu:c0", "thermal_edge": "node:n3"}
    guilty["telemetry_blind"] = "bmc:row2"
    found = shown(site, watch, cls)
    assert {f.entity for f in found} == {guilty[cls.name]}
    assert {f.level for f in found} >= {"ticket" if cls is TelemetryBlind else "page"}


@every
def test_it_is_silent_when_all_is_quiet(cls, site, watch):
    assert shown(site, watch, cls, 1000, None) == []


@every
def test_the_same_frames_give_the_same_findings(cls, site, watch):
    assert shown(site, watch, cls) == shown(type(site)(), watch, cls)


@every
def test_findings_keep_to_the_contract(cls, site, watch):
    found = shown(site, watch, cls)
    assert [f.time for f in found] == sorted(f.time for f in found)
    for f in found:
        assert f.onset <= f.time
        assert f.level in LEVELS
        assert f.detector == cls.name
        assert f.signals
        assert np.isfinite(f.score)


@every
def test_the_onset_stays_and_the_level_never_falls_while_a_condition_holds(cls, site, watch):
    found = shown(site, watch, cls)
    by_onset = [f for f in found if f.onset == found[-1].onset]
    assert len(by_onset) > 5
    levels = [LEVELS.index(f.level) for f in by_onset]
    assert levels == sorted(levels)
    gaps = [b.time - a.time for a, b in itertools.pairwise(by_onset)]
    assert max(gaps) <= 60 * SECOND


@every
def test_a_snapshot_resumes_midway_as_if_nothing_had_stopped(cls, site, watch):
    whole = shown(site, watch, cls)
    for stop in (30, FAULT + 5, FAULT + 40):
        other = type(site)()
        first, second = cls(), cls()
        found = watch(first, other, stop, breaks)
        second.restore(first.snapshot())
        assert found + watch(second, other, TICKS - stop, breaks, stop) == whole


@every
def test_a_snapshot_does_not_change_with_the_detector(cls, site, watch):
    detector = cls()
    watch(detector, site, FAULT + 30, breaks)
    taken = detector.snapshot()
    kept = copy.deepcopy(taken)
    watch(detector, site, 30, breaks, FAULT + 30)
    for name, value in kept.items():
        same = taken[name].tobytes() == value.tobytes() if isinstance(value, np.ndarray) else taken[name] == value
        assert same, name


@every
def test_the_order_of_entities_does_not_matter(cls, site, watch):
    class Turned(type(site)):
        def frames(self, tick, values, events=()):
            found = super().frames(tick, values, events)
            return {c: turned(f) for c, f in found.items()}

    def turned(f: Frame) -> Frame:
        return Frame(
            f.time, f.device_class, f.entities[::-1], {k: v[::-1] for k, v in f.values.items()}, f.topology, f.events
        )

    whole, other = shown(site, watch, cls), shown(Turned(), watch, cls)
    assert [f.key for f in whole] == [f.key for f in other]
    assert [f.level for f in whole] == [f.level for f in other]


@every
def test_it_looks_at_no_signal_that_it_does_not_name(cls, site, watch):
    """The pipeline makes frames of nothing else."""
    named = {*cls.needs, *cls.wants}

    class Reduced(type(site)):
        def frames(self, tick, values, events=()):
            return {c: reduced(f) for c, f in super().frames(tick, values, events).items()}

    def reduced(f: Frame) -> Frame:
        kept = {name: column for name, column in f.values.items() if name in named}
        return Frame(f.time, f.device_class, f.entities, kept, f.topology, f.events)

    assert shown(Reduced(), watch, cls) == shown(site, watch, cls)


@every
def test_it_bears_frames_in_which_nothing_was_measured(cls, site, watch):
    def nothing(tick, values):
        for columns in values.values():
            for column in columns.values():
                column[:] = np.nan

    detector = cls()
    assert watch(detector, site, 30, nothing) == []
    assert watch(detector, site, 60, None, 30) == []
    assert watch(detector, site, 30, nothing, 90) == []


@every
def test_it_bears_missing_classes_empty_fleets_and_no_frames_at_all(cls, site):
    detector = cls()
    assert detector.observe({}) == []
    frame = Frame(START, "node", ("node:n0",), {"node.load1": np.array([1.0])}, Topology())
    assert detector.observe({"node": frame}) == []
    empty = {c: Frame(START, c, (), {}, Topology()) for c in ("gpu", "nic", "rank", "coolant")}
    assert detector.observe(empty) == []


@every
def test_entities_may_join_and_vanish(cls, site, watch):
    """The last entity of each class comes late and goes early; the fault is found as if it were not there."""
    names = {c: list(n) for c, n in site.names.items()}

    def fleet(tick, values):
        events = breaks(tick, values)
        late = tick < 25
        site.names = {c: n[:-1] if late else n for c, n in names.items()}
        for columns in values.values():
            for signal in list(columns):
                if late:
                    columns[signal] = columns[signal][:-1].copy()
                elif tick > 120:
                    columns[signal][-1] = np.nan
        return [e for e in events if not (late and e.entity == "gpu:n3.3")]

    found = watch(cls(), site, TICKS, fleet)
    assert len({f.entity for f in found}) == 1
    assert found[-1].level == ("ticket" if cls is TelemetryBlind else "page")


@every
def test_the_first_twenty_samples_are_silent(cls, site, watch):
    if cls.name in EXACT:
        pytest.skip(f"there is nothing to learn: {EXACT[cls.name]}")

    def broken(tick, values):
        return breaks(tick + FAULT, values)

    assert watch(cls(), site, 20, broken) == []


@every
def test_its_page_names_its_source_its_needs_and_what_it_cannot_see(cls):
    assert "Source:" in (cls.__doc__ or "")
    assert cls.needs
    assert cls.blind.endswith(".")
    assert cls.family


def test_each_name_is_there_once():
    names = [cls.name for cls in DETECTORS]
    assert len(set(names)) == len(names)


def test_configuration_builds_each_detector_and_refuses_what_it_does_not_know():
    link = next(d for d in configured({"link": {"flaps": 5}}, "x.toml") if d.name == "link")
    assert link.flaps == 5
    with pytest.raises(ConfigError, match=r"x\.toml: \[detector\.lnk\].*did you mean 'link'"):
        configured({"lnk": {}}, "x.toml")
    with pytest.raises(ConfigError, match=r"flap: no such key; did you mean 'flaps'"):
        configured({"link": {"flap": 5}}, "x.toml")


def test_the_list_of_detectors_is_plain_data():
    rows = listing()
    assert [row["name"] for row in rows] == [cls.name for cls in DETECTORS]
    assert all(row["settings"] for row in rows)


def test_a_real_host_alone_gives_no_findings(watch):
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
