"""The vote over replicas' digests: which GPU or job it blames."""

from __future__ import annotations

import dataclasses

from detectors.sdc.sdc_replica import SdcReplica
from pipeline.model.records import SECOND, Event, Frame
from tests.detectors.cases.case import START, Case
from tests.detectors.cases.sdc import GPUS
from tests.detectors.cases.sdc_replica import CASE, RANKS, topology


def shown(change, ticks=400, of=None, detector=None, site=topology, first=0):
    """Returns findings over ticks of 10 s; change(step, rank index) -> digest or None; of: the indices of all ranks."""

    def instant(tick, broken, rng):
        if tick % 10:
            return {}, []
        events = []
        for i in of or range(16):
            digest = change(tick, i)
            data = {"step": tick, "bucket": "w", "digest": digest, "group": f"s{i // 8}"}
            if digest is not None:
                events.append(Event(START + tick * 10 * SECOND, RANKS[i], "replica_digest", data))
        return {}, events

    case = dataclasses.replace(CASE, instant=instant, topology=site)
    assert isinstance(case, Case)
    return case.run_detector(detector or SdcReplica(), range(first, ticks))


def right(tick, i):
    return f"{i // 8}.{tick}"


def test_one_step_with_other_bits_is_a_suspect_until_they_agree():
    found = shown(lambda t, i: "other" if (t, i) == (50, 3) else right(t, i))
    assert {(f.entity, f.level) for f in found} == {(GPUS[3], "suspect")}
    assert found[-1].evidence["cleared"] is True


def test_other_bits_in_two_steps_page_on_the_gpu_within_two_digests():
    found = shown(lambda t, i: f"other{t}" if t >= 50 and i == 3 else right(t, i))
    page = next(f for f in found if f.level == "page")
    assert page.entity == GPUS[3]
    assert page.time == START + 60 * 10 * SECOND
    assert page.onset == START + 50 * 10 * SECOND
    assert page.evidence["steps"] == [50, 60]
    assert page.evidence["peers"] == 7
    assert "rank 3 of job 7" in page.summary


def test_two_replicas_that_differ_blame_the_job():
    found = shown(lambda t, i: "other" if t >= 50 and i == 1 else right(t, i), of=(0, 1))
    assert {(f.entity, f.level) for f in found} == {("job:7", "suspect")}
    assert "unknown which" in found[0].evidence["why"]


def test_ranks_that_never_agreed_are_not_replicas():
    found = shown(lambda t, i: f"shard{i % 2}.{t}")
    assert {(f.entity, f.level) for f in found} == {("job:7", "suspect")}
    assert "never agreed" in found[0].evidence["why"]


def test_a_rank_that_always_differed_is_not_blamed():
    found = shown(lambda t, i: "own" if i == 0 else right(t, i))
    assert {f.entity for f in found} == {"job:7"}


def test_several_with_the_same_other_bits_are_software():
    found = shown(lambda t, i: f"other{t}" if t >= 50 and i in (2, 3) else right(t, i))
    assert {(f.entity, f.level) for f in found} == {("job:7", "suspect")}


def test_a_split_group_blames_no_gpu():
    found = shown(lambda t, i: f"own{i}" if t >= 50 and i < 4 else right(t, i))
    assert {(f.entity, f.level) for f in found} == {("job:7", "suspect")}


def test_a_divergence_that_follows_the_rank_blames_no_gpu():
    detector, moved = SdcReplica(), topology()
    shown(lambda t, i: "other" if t == 50 and i == 3 else right(t, i), detector=detector)
    parents = dict(moved.parents) | {RANKS[3]: ("stage:7.0", "job:7", "gpu:n9.0")}
    moved.merge(parents)
    again = lambda t, i: f"other{t}" if t >= 450 and i == 3 else right(t, i)  # noqa: E731
    found = shown(again, 500, detector=detector, site=lambda: moved, first=400)
    assert {f.entity for f in found if not f.evidence.get("cleared")} == {"job:7"}
    assert "another GPU" in found[-1].evidence["why"]


def test_lost_and_late_digests_are_judged_after_a_wait():
    found = shown(lambda t, i: None if (t // 10 + i) % 5 == 0 else "other" if t >= 50 and i == 3 else right(t, i))
    assert {f.entity for f in found} == {GPUS[3]}
    assert found[-1].level == "page"


def test_steps_repeated_after_a_restart_are_not_compared_with_earlier_ones():
    def change(tick, i):
        return right(tick, i) if tick != 100 or i < 8 else f"before.{i // 8}"

    detector = SdcReplica()
    assert shown(change, 101, of=tuple(range(12)), detector=detector) == []
    again = Event(START + 1010 * SECOND, "job:7", "job_start", {"ranks": {}})
    frames = CASE.frames_of(101, {"rank": {}}, [again], topology())
    assert detector.observe(frames) == []
    step = [
        Event(START + 1020 * SECOND, r, "replica_digest", {"step": 100, "bucket": "w", "digest": "new", "group": "s1"})
        for r in RANKS[8:]
    ]
    assert detector.observe(CASE.frames_of(102, {"rank": {}}, step, topology())) == []


def test_malformed_digests_are_ignored_and_idle_jobs_dropped():
    detector = SdcReplica()
    wrong = [
        Event(START, RANKS[0], "replica_digest", {"step": True, "bucket": "w", "digest": "a"}),
        Event(START, RANKS[0], "replica_digest", {"step": 1, "bucket": None, "digest": "a"}),
        Event(START, "gpu:n0.0", "replica_digest", {"step": 1, "bucket": "w", "digest": "a"}),
    ]
    assert detector.observe(CASE.frames_of(0, {}, wrong, topology())) == []
    assert detector.rounds.series == {}
    shown(right, 20, detector=detector)
    assert len(detector.rounds.series) == 2
    detector.observe(CASE.frames_of(20_000, {"rank": {}}, [Event(0, "job:9", "job_end", {})], topology()))
    assert detector.rounds.series == {}


def test_a_page_ends_a_day_after_the_last_digest_of_its_job():
    detector = SdcReplica()
    found = shown(lambda t, i: f"other{t}" if t >= 50 and i == 3 else right(t, i), 100, detector=detector)
    assert found[-1].level == "page"
    later = detector.observe(CASE.frames_of(9_000, {}, [Event(0, "job:9", "job_end", {})], topology()))
    assert [f.evidence.get("cleared") for f in later] == [True]


def test_a_gpu_that_diverges_once_in_twenty_digests_pages_the_second_time():
    """Each time it agreed again for longer than a suspect lasts."""
    found = shown(lambda t, i: f"other{t}" if i == 3 and t in (50, 250, 450) else right(t, i), ticks=700)
    levels = {f.onset: f.level for f in found if not f.evidence.get("cleared")}
    assert list(levels.values()) == ["suspect", "page"], "the third time it pages already: 20 right ones prove little"
    assert {f.entity for f in found} == {GPUS[3]}
    cleared = [f for f in found if f.evidence.get("cleared")]
    assert [f.level for f in cleared] == ["suspect"]


def test_a_page_ends_after_as_many_agreeing_steps_as_make_a_gpu_that_fails_as_often_unlikely():
    found = shown(lambda t, i: f"other{t}" if i == 3 and t in (50, 60) else right(t, i), ticks=1600)
    (over,) = [f for f in found if f.evidence.get("cleared")]
    assert 50 <= (over.time - START) // SECOND // 100 - 6 <= 140, "two of two wrong: about a hundred"


def test_a_dissent_in_the_last_step_of_a_job_is_not_remembered():
    """Its digest may be of a step that was cut off."""
    detector, site, found = SdcReplica(), topology(), []
    hours = [(h, "right") for h in range(12)] + [(12, "cut")] + [(h, "") for h in range(13, 40)]
    for hour, what in [*hours, *((h + 40, "right") for h in range(3)), (43, "cut")]:
        time, events = START + hour * 3600 * SECOND, []
        for i in range(8) if what else ():
            digest = f"other{hour}" if what == "cut" and i == 3 else right(hour, i)
            data = {"step": hour, "bucket": "w", "digest": digest, "group": "s0"}
            events.append(Event(time, RANKS[i], "replica_digest", data))
        found += detector.observe({"rank": Frame(time, "rank", RANKS, {}, site, tuple(events))})
    assert {f.level for f in found} == {"suspect"}
    assert len({f.onset for f in found}) == 2


def test_right_digests_of_the_parameters_do_not_clear_wrong_gradients():
    def instant(tick, broken, rng):
        if tick % 10:
            return {}, []
        events = []
        for i in range(8):
            for bucket in ("w", "replay"):
                digest = f"other{tick}" if bucket == "replay" and i == 3 and tick in (500, 510) else f"{bucket}{tick}"
                if bucket == "w" or tick in (100, 200, 500, 510):
                    data = {"step": tick, "bucket": bucket, "digest": digest, "group": "s0"}
                    events.append(Event(START + tick * 10 * SECOND, RANKS[i], "replica_digest", data))
        return {}, events

    case = dataclasses.replace(CASE, instant=instant, topology=topology)
    found = case.run_detector(SdcReplica(), range(3000))
    assert {(f.entity, f.level) for f in found} == {(GPUS[3], "suspect"), (GPUS[3], "page")}
    assert not any(f.evidence.get("cleared") for f in found)
