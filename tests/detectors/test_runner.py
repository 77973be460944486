"""The runner: isolation, corroboration, detectors that are off, and a snapshot as text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar

import pytest

from detectors import DETECTORS, configured
from detectors.detector import Detector, notes
from detectors.runner import Runner
from pipeline.records import SECOND, Event, Finding, Frame
from pipeline.topology import Topology

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
    blind: ClassVar[str] = "Everything."
    seen: dict[str, int] = notes()

    def observe(self, frames):
        self.seen["frames"] = self.seen.get("frames", 0) + 1
        if self.seen["frames"] % 2:
            raise ValueError("broken on purpose")
        time = frames["gpu"].time
        return [Finding(time, time, "gpu:n0.0", self.name, "suspect", 1.0, "seen")]


@dataclass
class Saying(Detector):
    """Says what it was given. Source: this test."""

    name: ClassVar[str] = "saying"
    family: ClassVar[str] = "none"
    device_class: ClassVar[str] = "gpu"
    needs: ClassVar[tuple[str, ...]] = ()
    blind: ClassVar[str] = "Everything."
    words: tuple[tuple[int, str, str], ...] = ()  # (tick, detector, entity)

    def observe(self, frames):
        time = next(iter(frames.values())).time
        tick = (time - START) // (10 * SECOND)
        return [Finding(time, time, e, d, "suspect", 1.0, d, {}, ()) for t, d, e in self.words if t == tick]


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


def heard(words, ticks=20):
    runner = Runner([Saying(words=tuple(words))])
    found = []
    for tick in range(ticks):
        found += runner.observe({"gpu": Frame(START + tick * 10 * SECOND, "gpu", (), {}, TOPOLOGY)})
    return found


def test_a_failing_detector_stops_no_other_and_is_counted_and_logged_once(site, watch, caplog):
    runner = Runner([Failing(), *configured()])
    found = watch(runner, site, 120, troubles)
    assert runner.errors == {"failing": 60}
    assert sum("failing" in r.message for r in caplog.records) == 1
    assert {f.detector for f in found} == {"failing", "straggler", "sdc", "coolant"}


def test_findings_are_the_same_with_each_detector_alone(site, watch):
    together = watch(Runner(configured()), site, 120, troubles)
    apart = [watch(Runner([cls()]), type(site)(), 120, troubles) for cls in DETECTORS]
    assert sorted(together, key=str) == sorted((f for found in apart for f in found), key=str)


@pytest.mark.parametrize("explains", [("link", "port:n0.p0"), ("coolant", "cdu:c0")])
@pytest.mark.parametrize("first", [3, 8])
def test_a_slow_rank_is_paged_when_its_link_or_loop_explains_it(explains, first):
    found = heard([(first, *explains), (6, "straggler", "rank:7.0")])
    page = next(f for f in found if f.level == "page")
    assert page.detector == "straggler"
    assert page.time == START + max(first, 6) * 10 * SECOND
    assert page.onset == START + 6 * 10 * SECOND
    assert page.evidence["corroborated_by"] == {"detector": explains[0], "entity": explains[1]}
    assert sum(f.level == "page" for f in found) == 1


@pytest.mark.parametrize(
    "words",
    [
        [(5, "link", "port:n1.p0"), (6, "straggler", "rank:7.0")],  # another node
        [(0, "link", "port:n0.p0"), (19, "straggler", "rank:7.0")],  # too long ago
        [(5, "link", "port:n0.p0"), (6, "sdc", "gpu:n0.0")],  # nothing but digests pages for wrong results
        [(5, "straggler", "rank:7.0"), (6, "straggler", "rank:7.0")],  # itself
    ],
)
def test_what_does_not_explain_it_raises_nothing(words):
    assert {f.level for f in heard(words)} == {"suspect"}


def test_a_detector_without_its_needs_is_off_and_named():
    runner = Runner(configured(), {"rank.compute_time", "event:digest"})
    assert [d.name for d in runner.detectors] == ["straggler", "sdc"]
    assert runner.off.keys() == {cls.name for cls in DETECTORS} - {"straggler", "sdc"}
    assert runner.off["link"] == ["nic.state"]
    assert runner.off["link_congestion"] == ["nic.tx_bytes", "nic.speed"]
    assert runner.off["anomaly"] == ["signal that no other detector uses"]


def test_a_snapshot_is_json_and_resumes_midway(site, watch):
    whole = watch(Runner(configured()), type(site)(), 150, troubles)
    for stop in (30, FAULT + 3, FAULT + 50):
        other = type(site)()
        first, second = Runner(configured()), Runner(configured())
        found = watch(first, other, stop, troubles)
        text = first.snapshot()
        json.loads(text)
        second.restore(text)
        assert second.snapshot() == text
        assert found + watch(second, other, 150 - stop, troubles, stop) == whole


def test_a_snapshot_of_another_version_starts_that_detector_afresh_and_says_so(site, watch, caplog):
    runner = Runner(configured())
    watch(runner, site, 30, troubles)
    state = json.loads(runner.snapshot())
    state["detectors"]["link"].popitem()
    other = Runner(configured())
    other.restore(json.dumps(state))
    assert [r.getMessage() for r in caplog.records] == [
        "detector link starts afresh: the snapshot is of another version"
    ]
    assert len(other.observe({})) == 0


def test_two_findings_of_one_detector_about_one_entity_are_both_told():
    found = heard([(5, "memory", "gpu:n0.0"), (5, "memory", "gpu:n0.0")])
    assert len(found) == 2
