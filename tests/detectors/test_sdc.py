"""The vote over canary digests: exact, and careful about what is not a broken GPU."""

from __future__ import annotations

import pytest

from detectors.sdc import SdcVote
from pipeline.records import SECOND, Event

START, STEP = 1_790_000_000 * SECOND, 10 * SECOND
BAD = "gpu:n1.1"  # index 5


def rounds(answers_of, every=10, canary=lambda n: "gemm"):
    """A round of all 16 GPUs each 100 s; `answers_of(round)` gives the wrong answers by GPU index."""

    def change(tick, values):
        if tick % every:
            return ()
        number = tick // every
        wrong = answers_of(number)
        common = {"canary": canary(number), "version": "7"}
        return [
            Event(START + tick * STEP, f"gpu:n{g // 4}.{g % 4}", "digest", {**common, "digest": wrong.get(g, "right")})
            for g in range(16)
        ]

    return change


def test_one_mismatch_is_a_suspect_that_a_right_answer_clears(site, watch):
    found = watch(SdcVote(), site, 100, rounds(lambda n: {5: "wrong"} if n == 3 else {}))
    assert {(f.entity, f.level) for f in found} == {(BAD, "suspect")}
    assert [f.evidence.get("cleared") for f in found][-1] is True
    assert found[-1].time == START + 40 * STEP
    assert {f.onset for f in found} == {START + 30 * STEP}


def test_two_mismatches_page_also_with_right_answers_between(site, watch):
    found = watch(SdcVote(), site, 100, rounds(lambda n: {5: f"wrong{n}"} if n in (3, 6) else {}))
    page = next(f for f in found if f.level == "page")
    assert page.time == START + 60 * STEP
    assert page.evidence["mismatches"] == 2
    assert page.evidence["holds"] is True


def test_a_page_holds_through_nine_right_answers_and_ends_with_the_tenth(site, watch):
    found = watch(SdcVote(), site, 300, rounds(lambda n: {5: "wrong"} if n in (1, 2) else {}))
    assert [f.time for f in found if f.evidence.get("cleared")] == [START + 120 * STEP]
    assert found[-1].evidence.get("cleared")


def test_a_reset_of_the_gpu_or_its_node_ends_the_condition(site, watch):
    for entity in (BAD, "node:n1"):
        answers = rounds(lambda n: {5: "wrong"} if n in (1, 2) else {})

        def change(tick, values, answers=answers, entity=entity):
            reset = [Event(START + 45 * STEP, entity, "reset", {})] if tick == 45 else []
            return [*answers(tick, values), *reset]

        found = watch(SdcVote(), site, 100, change)
        assert found[-1].evidence.get("cleared")
        assert found[-1].time == START + 45 * STEP


def test_a_new_problem_each_round_is_judged_all_the_same(site, watch):
    def each(n):
        return f"problem{n}"

    found = watch(SdcVote(), site, 100, rounds(lambda n: {5: f"w{n}"} if n in (3, 4) else {}, canary=each))
    assert {f.entity for f in found} == {BAD}
    assert found[-1].level == "page"


def test_fewer_than_five_gpus_judge_nobody(site, watch):
    answers = rounds(lambda n: {1: "wrong"})
    few = lambda tick, values: [e for e in answers(tick, values) if e.entity.startswith("gpu:n0.")]  # noqa: E731
    assert watch(SdcVote(), site, 100, few) == []


def test_results_that_came_before_the_quorum_are_judged_when_it_is_there(site, watch):
    answers = rounds(lambda n: {5: "wrong"} if n == 0 else {}, every=1000)

    def late(tick, values):
        order = [5, *(g for g in range(16) if g != 5)]
        events = answers(0, values)
        return [events[order[tick]]] if tick < 16 else ()

    found = watch(SdcVote(), site, 40, late)
    assert found[0].entity == BAD
    assert found[0].time == START + 4 * STEP


def test_an_answer_that_several_gpus_share_is_another_version_and_blames_nobody(site, watch):
    assert watch(SdcVote(), site, 200, rounds(lambda n: dict.fromkeys((1, 5, 9), "other"))) == []


@pytest.mark.parametrize("others", [8, 10])
def test_without_a_majority_nobody_is_blamed(site, watch, others):
    assert watch(SdcVote(), site, 200, rounds(lambda n: {g: f"own{g}" for g in range(others)})) == []


def test_different_versions_are_different_questions(site, watch):
    answers = rounds(lambda n: {})

    def mixed(tick, values):
        return [
            Event(e.time, e.entity, e.kind, {**e.data, "version": "8", "digest": "new"} if i % 2 else e.data)
            for i, e in enumerate(answers(tick, values))
        ]

    assert watch(SdcVote(), site, 200, mixed) == []


def test_single_mismatches_of_many_gpus_never_outvote_the_right_answer(site, watch):
    detector = SdcVote()
    watch(detector, site, 2000, rounds(lambda n: {n % 16: f"w{n}"}, every=2))
    assert max(map(len, detector.rounds["gemm|7"]["votes"].values())) == 16
    found = watch(detector, site, 20, rounds(lambda n: {5: "fresh"}, every=2), 2000)
    assert BAD in {f.entity for f in found}


def test_memory_stays_bounded_over_many_problems(site, watch):
    detector = SdcVote()
    watch(detector, site, 1000, rounds(lambda n: {n % 16: f"w{n}"}, every=2, canary=lambda n: f"p{n}"))
    assert len(detector.rounds) == 64
    assert all(len(entries) <= 100 for entries in detector.ledger.values())


def test_events_without_digest_or_on_other_entities_are_left_alone(site, watch):
    def change(tick, values):
        return [
            Event(START + tick * STEP, BAD, "digest", {"canary": "x"}),
            Event(START + tick * STEP, BAD, "xid", {"code": 79}),
        ]

    assert watch(SdcVote(), site, 50, change) == []


# --- results that bear the known answer -------------------------------------------------------------------------------


def known(entity, digest, tick=0, canary="cpu.0"):
    data = {"canary": canary, "version": "7", "digest": digest, "expected": "right"}
    return Event(START + tick * STEP, entity, "digest", data)


def of_core(script):
    """Events by tick, as (entity, digest)."""
    return lambda tick, values: [known(entity, digest, tick) for entity, digest in script.get(tick, ())]


def test_a_lone_core_is_judged_by_the_known_answer(site, watch):
    found = watch(SdcVote(), site, 5, of_core({1: [("cpu:n1.7", "wrong")]}))
    assert [(f.entity, f.level) for f in found] == [("cpu:n1.7", "suspect")]
    assert "cpu.0 7 against the known answer" in found[0].summary
    assert found[0].evidence["expected"] == "right"


def test_a_core_is_cleared_by_one_right_answer_and_pages_for_two_wrong_ones(site, watch):
    once = {1: [("cpu:n1.7", "wrong")], 3: [("cpu:n1.7", "right")]}
    found = watch(SdcVote(), site, 6, of_core(once))
    assert found[-1].evidence.get("cleared") is True
    twice = {
        1: [("cpu:n1.7", "wrong")],
        3: [("cpu:n1.7", "worse")],
        **{t: [("cpu:n1.7", "right")] for t in range(5, 14)},
    }
    found = watch(SdcVote(), site, 30, of_core(twice))
    assert found[-1].level == "page"
    assert found[-1].evidence["holds"] is True


def test_a_wrong_answer_of_cores_of_three_nodes_is_another_software_and_of_one_nodes_cores_is_not(site, watch):
    same = {1: [(f"cpu:n{n}.0", "other") for n in range(3)]}
    assert {f.entity for f in watch(SdcVote(), site, 5, of_core(same))} == {"cpu:n0.0", "cpu:n1.0"}
    here = {1: [(f"cpu:n1.{core}", "other") for core in range(6)]}
    assert len({f.entity for f in watch(SdcVote(), site, 5, of_core(here))}) == 6


def test_a_wrong_answer_under_the_name_of_one_problem_is_cleared_by_rounds_of_the_same_version(site, watch):
    script = {1: [known("cpu:n1.7", "wrong", 1, "gemm-f32-up.3")], 2: [known("cpu:n1.7", "right", 2)]}
    found = watch(SdcVote(), site, 5, lambda tick, values: script.get(tick, ()))
    assert found[-1].evidence.get("cleared") is True


def test_cores_without_a_known_answer_are_voted_on(site, watch):
    def change(tick, values):
        answers = {f"cpu:n0.{c}": "bad" if c == 3 else "good" for c in range(8)} if tick == 1 else {}
        return [
            Event(START + tick * STEP, e, "digest", {"canary": "c", "version": "1", "digest": d})
            for e, d in answers.items()
        ]

    found = watch(SdcVote(), site, 4, change)
    assert {f.entity for f in found} == {"cpu:n0.3"}
    assert "against 7 others" in found[0].summary


def test_known_answers_of_a_large_fleet_keep_no_results(site, watch):
    detector = SdcVote()
    script = {t: [(f"cpu:n{t}.{c}", f"w{t}.{c}" if c == 0 else "right") for c in range(50)] for t in range(40)}
    watch(detector, site, 40, of_core(script))
    held = detector.rounds["cpu.0|7"]
    assert held["waiting"] == []
    assert len(held["votes"]) <= 9
    assert max(map(len, held["votes"].values())) == 32


def test_a_core_that_is_wrong_in_ever_new_ways_keeps_a_bounded_number_of_answers(site, watch):
    detector = SdcVote()
    watch(detector, site, 40, of_core({t: [("cpu:n1.7", f"w{t}")] for t in range(40)}))
    assert len(detector.rounds["cpu.0|7"]["votes"]) <= 9
