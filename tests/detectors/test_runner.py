"""The runner: isolation, corroboration, detectors that are off, and a snapshot as text."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from detectors import DETECTORS, configured
from detectors.base.detector import Detector, memory, notes
from detectors.runner import Runner
from pipeline.model.records import SECOND, Event, Finding, Frame
from pipeline.model.topology import Topology
from tests.detectors.cases.case import cases
from tests.detectors.snapshots import packed, read, written

START = 1_790_000_000 * SECOND
FAULT = 60


def troubles(tick, values):
    """A slow rank and wrong digests, both from tick 60 on."""
    if tick >= FAULT:
        values["rank"]["rank.compute_time"][3] *= 1.15
        values["coolant"]["coolant.flow"][2] *= 0.5
    data = {"canary": "gemm", "version": "1"}
    answers = ["wrong" if g == 5 and tick >= FAULT else "right" for g in range(16)]
    time = START + tick * 10 * SECOND
    return [Event(time, f"gpu:n{g // 4}.{g % 4}", "digest", {**data, "digest": a}) for g, a in enumerate(answers)]


@dataclass
class Failing(Detector):
    """Fails in every second frame. Source: this test."""

    name: ClassVar[str] = "failing"
    family: ClassVar[str] = "none"
    device_class: ClassVar[str] = "gpu"
    needs: ClassVar[tuple[str, ...]] = ("gpu.power",)
    cannot_see: ClassVar[str] = "Everything."
    seen: dict[str, int] = notes()

    def observe(self, frames):
        self.seen["frames"] = self.seen.get("frames", 0) + 1
        if self.seen["frames"] % 2:
            raise ValueError("broken on purpose")
        time = frames["gpu"].time
        return [Finding(time, time, "gpu:n0.0", self.name, "suspect", 1.0, "seen")]


@dataclass
class Scripted(Detector):
    """Reports given findings. Source: this test."""

    name: ClassVar[str] = "scripted"
    family: ClassVar[str] = "none"
    device_class: ClassVar[str] = "gpu"
    needs: ClassVar[tuple[str, ...]] = ()
    cannot_see: ClassVar[str] = "Everything."
    script: tuple[tuple[int, str, str], ...] = ()  # (tick, detector, entity)

    def observe(self, frames):
        time = next(iter(frames.values())).time
        tick = (time - START) // (10 * SECOND)
        return [Finding(time, time, e, d, "suspect", 1.0, d, {}, ()) for t, d, e in self.script if t == tick]


TOPOLOGY = Topology(
    {
        "rank:7.0": ["stage:7.0", "job:7", "gpu:n0.0"],
        "gpu:n0.0": ["node:n0"],
        "port:n0.p0": ["node:n0"],
        "port:n1.p0": ["node:n1"],
        "node:n0": ["rack:r1"],
        "rack:r1": ["cdu:c0"],
    }
)


def reported(script, ticks=20):
    runner = Runner([Scripted(script=tuple(script))])
    found = []
    for tick in range(ticks):
        found += runner.observe({"gpu": Frame(START + tick * 10 * SECOND, "gpu", (), {}, TOPOLOGY)})
    return found


@pytest.mark.slow
def test_a_failing_detector_does_not_stop_others_and_is_counted_and_logged_once(site, watch, caplog):
    runner = Runner([Failing(), *configured()])
    found = watch(runner, site, 120, troubles)
    assert runner.errors == {"failing": 60}
    assert sum("failing" in r.message for r in caplog.records) == 1
    assert {f.detector for f in found} == {"failing", "straggler", "sdc", "coolant", "telemetry_blind"}


def test_a_failing_detector_is_a_ticket_with_its_lost_frames_once_a_minute(site, watch):
    found = [f for f in watch(Runner([Failing()]), site, 120, troubles) if f.detector == "telemetry_blind"]
    assert {(f.entity, f.level, f.onset) for f in found} == {("detector:failing", "ticket", START)}
    assert [f.evidence["lost"] for f in found[:3]] == [1, 4, 7]
    assert all(b.time - a.time == 60 * SECOND for a, b in itertools.pairwise(found))
    assert found[-1].summary == "Detector failing: fails, 58 frames lost: ValueError: broken on purpose"
    assert found[-1].signals == ("gpu.power",)


@dataclass
class FailingOnce(Failing):
    """Fails once, at tick 2, and again at tick 200. Source: this test."""

    def observe(self, frames):
        if (frames["gpu"].time - START) // (10 * SECOND) in (2, 200):
            raise KeyError("job:81")
        return []

    def judge_event(self, event, topology):
        raise ZeroDivisionError


def failures_of(runner, ticks):
    frames = ({"gpu": Frame(START + t * 10 * SECOND, "gpu", (), {}, TOPOLOGY)} for t in ticks)
    return [f for each in frames for f in runner.observe(each)]


def test_a_detector_that_works_again_for_ten_minutes_has_a_new_condition_when_it_fails_next():
    whole = failures_of(Runner([FailingOnce()]), range(300))
    assert [(f.time, f.onset) for f in whole] == [(START + t * 10 * SECOND,) * 2 for t in (2, 200)]
    first, second = Runner([FailingOnce()]), Runner([FailingOnce()])
    found = failures_of(first, range(100))
    second.restore(packed(first))
    assert found + failures_of(second, range(100, 300)) == whole


def test_a_detector_that_fails_on_an_event_is_a_ticket_of_the_next_frame():
    runner = Runner([FailingOnce()])
    FailingOnce.on_arrival = ("xid",)
    runner.judge_events([Event(START, "gpu:n0.0", "xid", {})], TOPOLOGY)
    (found,) = failures_of(runner, [1])
    assert (found.entity, found.level, found.evidence["error"]) == ("detector:failing", "ticket", "ZeroDivisionError: ")


@pytest.mark.slow
def test_findings_are_the_same_with_each_detector_alone(site, watch):
    together = watch(Runner(configured()), site, 120, troubles)
    apart = [watch(Runner([cls()]), type(site)(), 120, troubles) for cls in DETECTORS]
    assert sorted(together, key=str) == sorted((f for found in apart for f in found), key=str)


@pytest.mark.parametrize("explains", [("xid", "gpu:n0.0"), ("power", "node:n0")])
def test_a_slow_rank_names_the_xid_or_power_finding_that_explains_it_at_its_own_level(explains):
    found = reported([(3, *explains), (6, "straggler", "rank:7.0")])
    slow = next(f for f in found if f.detector == "straggler")
    assert slow.evidence["corroborated_by"] == {"detector": explains[0], "entity": explains[1]}
    assert {f.level for f in found} == {"suspect"}


@pytest.mark.parametrize(
    "script",
    [
        [(5, "link", "port:n1.p0"), (6, "straggler", "rank:7.0")],  # another node
        [(5, "link", "port:n0.p0"), (6, "straggler", "rank:7.0")],  # a port of its node, which may be another GPU's
        [(5, "thermal", "gpu:n0.1"), (6, "straggler", "rank:7.0")],  # another GPU of its node
        [(5, "coolant", "cdu:c0"), (6, "straggler", "rank:7.0")],  # a plant that is a suspect itself, of many
        [(0, "power", "node:n0"), (19, "straggler", "rank:7.0")],  # too long ago
        [(5, "power", "node:n0"), (6, "sdc", "gpu:n0.0")],  # nothing explains wrong results but digests
        [(5, "straggler", "rank:7.0"), (6, "straggler", "rank:7.0")],  # itself
    ],
)
def test_unrelated_findings_do_not_explain_it(script):
    assert not any("corroborated_by" in f.evidence for f in reported(script))


def test_a_detector_without_its_needs_is_off_and_listed():
    runner = Runner(configured(), {"rank.compute_time", "event:digest"})
    assert [d.name for d in runner.detectors] == ["straggler", "sdc"]
    assert runner.off.keys() == {cls.name for cls in DETECTORS} - {"straggler", "sdc"}
    assert runner.off["link"] == ["nic.state"]
    assert runner.off["link_congestion"] == ["nic.tx_bytes", "nic.speed"]
    assert runner.off["anomaly"] == ["declared signal that no other detector uses"]


@pytest.mark.slow
def test_a_snapshot_is_bytes_and_resumes_midway(site, watch):
    whole = watch(Runner(configured()), type(site)(), 150, troubles)
    stop = FAULT + 3  # test_contract.py stops each detector at three times
    other = type(site)()
    first, second = Runner(configured()), Runner(configured())
    found = watch(first, other, stop, troubles)
    kept = packed(first)
    second.restore(kept)
    assert packed(second) == kept
    assert found + watch(second, other, 150 - stop, troubles, stop) == whole


def test_a_snapshot_of_another_version_starts_that_detector_afresh_with_a_warning(site, watch, caplog):
    runner = Runner(configured())
    watch(runner, site, 30, troubles)
    state = read(packed(runner))
    state["detectors"]["link"].popitem()
    other = Runner(configured())
    other.restore(written(state))
    assert [r.getMessage() for r in caplog.records] == [
        "detector link starts with empty state: the snapshot is of another version"
    ]
    assert len(other.observe({})) == 0


@dataclass
class Remembering(Detector):
    """Fails where its two arrays have not the length of the frame, as compiled code would. Source: this test."""

    name: ClassVar[str] = "remembering"
    family: ClassVar[str] = "none"
    device_class: ClassVar[str] = "gpu"
    needs: ClassVar[tuple[str, ...]] = ("gpu.power",)
    cannot_see: ClassVar[str] = "Everything."
    first: Any = memory(0, np.int64)
    second: Any = memory(0, np.int64)
    flags: dict[str, int] = notes()

    def observe(self, frames):
        self.grow(len(frames["gpu"].entities))
        if self.flags.get("broken"):
            raise ValueError("this cannot be")
        self.first += 1
        self.second += self.first
        return []

    def accept_as_normal(self, entity, frames):
        raise RuntimeError("cannot accept")


def instant(tick, *events):
    gpus = tuple(f"gpu:n0.{i}" for i in range(4))
    return {"gpu": Frame(START + tick * 10 * SECOND, "gpu", gpus, {"gpu.power": np.full(4, 600.0)}, TOPOLOGY, events)}


def after(change, *detectors):
    """A runner that was shown ten instants, stopped, and restored from a changed snapshot."""
    detectors = detectors or (Remembering,)
    before, runner = Runner([d() for d in detectors]), Runner([d() for d in detectors])
    for tick in range(10):
        before.observe(instant(tick))
    state = read(packed(before))
    change(state)
    runner.restore(written(state))
    return runner


def test_arrays_of_different_lengths_start_the_detector_afresh(caplog):
    empty = np.zeros(0, np.int64)
    runner = after(lambda s: s["detectors"]["remembering"].update(second=empty))
    assert "detector remembering starts with empty state: its snapshot has another layout" in caplog.text
    runner.observe(instant(10))
    assert (runner.detectors[0].first == 1).all()
    assert not runner.errors


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("case", cases(), ids=lambda c: c.detector.name)
@pytest.mark.parametrize("every", [1, 2])
def test_a_snapshot_with_cut_arrays_does_not_stop_a_detector(case, every):
    """All arrays empty, or every second one; where that shows nowhere, the first failure starts the detector afresh."""
    topology, before = case.topology(), Runner([case.detector()])
    for tick in range(25):
        before.observe(case.frames(tick, False, topology))
    count = itertools.count()

    def cut(value):
        if isinstance(value, dict):
            return {k: cut(v) for k, v in value.items()}
        if not isinstance(value, np.ndarray):
            return value
        return value if next(count) % every else np.zeros([0] * value.ndim, value.dtype)

    state, runner = read(packed(before)), Runner([case.detector()])
    runner.restore(written({**state, "detectors": cut(state["detectors"])}))
    for tick in range(25, 40):
        runner.observe(case.frames(tick, False, topology))
    assert not runner.errors


def test_a_detector_that_fails_with_its_restored_state_starts_afresh_with_a_warning(caplog):
    runner = after(lambda s: s["detectors"]["remembering"]["flags"].update(broken=1))
    for tick in range(10, 13):
        runner.observe(instant(tick))
    assert not runner.errors
    assert (runner.detectors[0].first == 3).all()
    assert "detector remembering starts with empty state: it fails with the restored state" in caplog.text


def test_long_after_a_restart_a_failure_is_one_of_the_frame():
    runner = after(lambda _: None)
    for tick in range(10, 90):
        runner.observe(instant(tick))
    runner.detectors[0].flags["broken"] = 1
    runner.observe(instant(90))
    assert runner.errors == {"remembering": 1}
    assert (runner.detectors[0].first == 90).all()


def test_errors_are_logged_again_after_a_restart(caplog):
    runner = after(lambda _: None, Failing)
    assert not runner.errors
    caplog.clear()
    runner.observe(instant(10))
    runner.observe(instant(11))
    runner.observe(instant(12))
    assert runner.errors["failing"] >= 1
    assert sum("failing failed on a frame" in r.message for r in caplog.records) == 1


@pytest.mark.parametrize(
    ("change", "logged"),
    [
        (lambda s: s.update(active="garbage"), "corroboration starts with empty state"),
        (lambda s: s.update(active=[{"detector": "link"}]), "corroboration starts with empty state"),
        (lambda s: s.update(measured=[1]), "presence of signals starts with empty state"),
        (lambda s: s.update(measured={"time": "now"}), "presence of signals starts with empty state"),
        (lambda s: s["detectors"].update(other=[1]), ""),
    ],
)
def test_losing_only_the_shared_state_starts_no_detector_afresh(caplog, change, logged):
    runner = after(change)
    assert (runner.detectors[0].first == 10).all()
    assert logged in caplog.text
    assert runner.observe(instant(10)) == []


def test_a_detector_that_fails_on_feedback_does_not_stop_the_others(caplog):
    feedback = Event(START, "gpu:n0.1", "feedback", {"verdict": "not_a_fault", "detector": "remembering"})
    runner = Runner([Remembering(), Scripted(script=((3, "scripted", "gpu:n0.0"),))])
    found = runner.observe(instant(3, feedback))
    assert [f.detector for f in found] == ["scripted", "telemetry_blind"]
    assert runner.errors == {"remembering": 1}


def test_two_findings_of_one_detector_about_one_entity_are_both_reported():
    found = reported([(5, "memory", "gpu:n0.0"), (5, "memory", "gpu:n0.0")])
    assert len(found) == 2
