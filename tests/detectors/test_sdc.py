"""The vote over canary digests: exact, and without blame for software faults."""

from __future__ import annotations

import logging

import pytest

from benchmarks.detection.sdc_coverage import GOAL, measure_coverage, measure_false_alarms
from benchmarks.detection.sdc_replica import measured
from detectors.sdc.ledger import chance_of_streak, defect_odds
from detectors.sdc.sdc import SdcVote
from detectors.sdc.sdc_replica import SdcReplica
from pipeline.model.records import SECOND, Event, Frame
from pipeline.model.topology import Topology

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


def test_a_page_ends_after_more_right_answers_than_a_defective_gpu_would_give(site, watch):
    answers = rounds(lambda n: {5: f"wrong{n}"} if n in (2, 5) else {}, every=1)
    found = watch(SdcVote(), site, 600, answers)
    ended = [f.time for f in found if f.evidence.get("cleared")]
    assert len(ended) == 2  # of the suspect, then of the page
    right = (ended[1] - START) // STEP - 5
    assert 100 < right < 1000  # two errors, two right rounds between them: 10 right ones in a row mean nothing
    assert chance_of_streak(2, 2, right) <= 1e-4 < chance_of_streak(2, 2, right - 1)


def test_a_gpu_wrong_in_every_tenth_round_is_one_page_for_weeks(site, watch):
    answers = rounds(lambda n: {5: f"wrong{n}"} if n % 10 == 3 or n % 37 == 1 else {}, every=2)
    found = watch(SdcVote(), site, 1000, answers)
    assert len({f.onset for f in found if f.level == "page"}) == 1
    assert not any(f.evidence.get("cleared") for f in found[1:] if f.level == "page")


def test_a_replaced_gpu_ends_the_page_and_a_reset_does_not(site, watch):
    answers = rounds(lambda n: {5: "wrong"} if n in (1, 2) else {})

    def change(tick, values, uuid="GPU-1"):
        reset = [Event(START + 45 * STEP, BAD, "reset", {})] if tick == 45 else []
        events = [Event(e.time, e.entity, e.kind, {**e.data, "uuid": uuid}) for e in answers(tick, values)]
        return [*events, *reset]

    found = watch(SdcVote(), site, 100, change)
    assert found[-1].level == "page"
    assert not found[-1].evidence.get("cleared")
    other = watch(SdcVote(), site, 100, lambda tick, values: change(tick, values, "GPU-1" if tick < 50 else "GPU-2"))
    assert other[-1].evidence.get("cleared") is True
    assert other[-1].evidence["state"] == "exchanged"
    assert other[-1].time == START + 50 * STEP


def test_a_new_problem_in_each_round_is_judged(site, watch):
    def each(n):
        return f"problem{n}"

    found = watch(SdcVote(), site, 100, rounds(lambda n: {5: f"w{n}"} if n in (3, 4) else {}, canary=each))
    assert {f.entity for f in found} == {BAD}
    assert found[-1].level == "page"


def test_fewer_than_five_gpus_are_not_judged(site, watch):
    answers = rounds(lambda n: {1: "wrong"})
    few = lambda tick, values: [e for e in answers(tick, values) if e.entity.startswith("gpu:n0.")]  # noqa: E731
    assert watch(SdcVote(), site, 100, few) == []


def test_results_before_the_quorum_are_judged_when_it_is_reached(site, watch):
    answers = rounds(lambda n: {5: "wrong"} if n == 0 else {}, every=1000)

    def late(tick, values):
        order = [5, *(g for g in range(16) if g != 5)]
        events = answers(0, values)
        return [events[order[tick]]] if tick < 16 else ()

    found = watch(SdcVote(), site, 40, late)
    assert found[0].entity == BAD
    assert found[0].time == START + 4 * STEP


def test_a_wrong_answer_that_several_gpus_share_blames_none(site, watch):
    assert watch(SdcVote(), site, 200, rounds(lambda n: dict.fromkeys((1, 5, 9), "other"))) == []


@pytest.mark.parametrize("others", [8, 10])
def test_without_a_majority_no_gpu_is_blamed(site, watch, others):
    assert watch(SdcVote(), site, 200, rounds(lambda n: {g: f"own{g}" for g in range(others)})) == []


def test_different_versions_are_different_questions(site, watch):
    answers = rounds(lambda n: {})

    def mixed(tick, values):
        return [
            Event(e.time, e.entity, e.kind, {**e.data, "version": "8", "digest": "new"} if i % 2 else e.data)
            for i, e in enumerate(answers(tick, values))
        ]

    assert watch(SdcVote(), site, 200, mixed) == []


def test_single_mismatches_of_many_gpus_do_not_outvote_the_right_answer(site, watch):
    detector = SdcVote()
    watch(detector, site, 400, rounds(lambda n: {n % 16: f"w{n}"}, every=2))
    (held,) = detector.votes.rounds.values()
    assert len(held["votes"]["right"]) == 15
    found = watch(detector, site, 20, rounds(lambda n: {5: "fresh"}, every=2), 400)
    assert BAD in {f.entity for f in found}


def test_memory_stays_bounded_over_many_problems(site, watch):
    detector = SdcVote()
    problems = rounds(lambda n: {n % 16: f"w{n}"}, every=2, canary=lambda n: f"p{n}")
    watch(detector, site, 300, problems)
    detector.votes.drop_expired(0)
    assert len(detector.votes.rounds) == 64
    assert all(len(record["wrong"]) <= 100 for record in detector.ledger.records.values())


def test_events_without_digest_or_on_other_entities_are_ignored(site, watch):
    def change(tick, values):
        return [
            Event(START + tick * STEP, BAD, "digest", {"canary": "x"}),
            Event(START + tick * STEP, BAD, "xid", {"code": 79}),
        ]

    assert watch(SdcVote(), site, 50, change) == []


# --- results with the known answer -------------------------------------------------------------------------------


def known(entity, digest, tick=0, canary="cpu.0"):
    data = {"canary": canary, "version": "7", "digest": digest, "expected": "right"}
    return Event(START + tick * STEP, entity, "digest", data)


def of_core(script):
    """Events by tick, as (entity, digest)."""
    return lambda tick, values: [known(entity, digest, tick) for entity, digest in script.get(tick, ())]


def test_a_lone_core_is_judged_by_the_known_answer(site, watch):
    found = watch(SdcVote(), site, 5, of_core({1: [("cpu:n1.7", "wrong")]}))
    assert [(f.entity, f.level) for f in found] == [("cpu:n1.7", "suspect")]
    assert (found[0].evidence["canary"], found[0].evidence["judged_by"]) == ("cpu.0", "known answer")
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


def test_a_wrong_answer_of_cores_on_three_nodes_is_other_software(site, watch):
    same = {t: [(f"cpu:n{t}.0", "other")] for t in range(3)}
    found = watch(SdcVote(), site, 5, of_core(same))
    assert {f.entity for f in found} == {"cpu:n0.0", "cpu:n1.0"}
    assert [f.entity for f in found if f.evidence.get("cleared")] == ["cpu:n0.0", "cpu:n1.0"]
    assert "other software" in found[-1].summary
    at_once = {1: [(f"cpu:n{n}.0", "other") for n in range(3)]}
    assert watch(SdcVote(), site, 5, of_core(at_once)) == []
    here = {1: [(f"cpu:n1.{core}", "other") for core in range(6)]}
    assert len({f.entity for f in watch(SdcVote(), site, 5, of_core(here))}) == 6


def test_a_mismatch_is_cleared_by_rounds_of_the_same_version(site, watch):
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
    assert (found[0].evidence["judged_by"], found[0].evidence["peers"]) == ("majority", 7)


def test_known_answers_of_a_large_fleet_keep_no_results(site, watch):
    detector = SdcVote()
    script = {t: [(f"cpu:n{t}.{c}", f"w{t}.{c}" if c == 0 else "right") for c in range(50)] for t in range(40)}
    watch(detector, site, 40, of_core(script))
    (held,) = detector.votes.rounds.values()
    assert held["waiting"] == []
    assert len(held["votes"]) <= 9
    assert 256 <= len(detector.votes.known["cpu|7"].answers) <= 512


def test_different_wrong_answers_of_a_core_are_bounded(site, watch):
    detector = SdcVote()
    watch(detector, site, 40, of_core({t: [("cpu:n1.7", f"w{t}")] for t in range(40)}))
    (held,) = detector.votes.rounds.values()
    assert len(held["votes"]) <= 9


# --- retest, odds, evidence -------------------------------------------------------------------------------------------


def result(entity, digest, tick, **more):
    event = known(entity, digest, tick)
    return Event(event.time, entity, "digest", {**event.data, **more})


def at(script):
    return lambda tick, values: script.get(tick, ())


def test_a_failed_retest_pages_if_another_gpu_is_right(site, watch):
    alone = {5: [result(BAD, "wrong", 5, again=3)]}
    found = watch(SdcVote(), site, 8, at(alone))
    assert found[-1].level == "suspect"  # the shipped answer may be wrong: no other GPU has computed it yet
    found = watch(SdcVote(), site, 8, at({1: [known("gpu:n0.0", "right", 1)], **alone}))
    assert found[0].level == "page"
    assert found[0].evidence["retest"] == "failed"
    assert found[0].evidence["reproduced"] == 3
    assert found[0].evidence["reproduced"] == 3


def test_a_suspect_requests_a_retest_and_is_reported_even_if_that_is_right(site, watch):
    script = {5: [result(BAD, "wrong", 5, again=0), known(BAD, "right", 5.5)], 6: [known(BAD, "right", 6)]}
    script[5][1] = Event(script[5][0].time + SECOND, BAD, "digest", script[5][1].data)
    found = watch(SdcVote(), site, 8, at(script))
    assert [f.evidence.get("retest") for f in found] == ["asked", "clean"]
    assert found[-1].evidence["cleared"] is True


def test_an_error_of_the_program_is_not_an_answer(site, watch):
    script = {t: [result(BAD, "raised RuntimeError", t, again=3), known("gpu:n0.0", "right", t)] for t in (1, 3, 5)}
    assert watch(SdcVote(), site, 8, at(script)) == []


def test_a_repeated_result_counts_once(site, watch):
    found = watch(SdcVote(), site, 8, at({5: [known(BAD, "wrong", 5)], 6: [known(BAD, "wrong", 5)]}))
    assert {f.level for f in found} == {"suspect"}


def test_the_odds_rise_with_each_mismatch_and_fall_with_right_rounds():
    assert defect_odds(0, 0, "gpu") == pytest.approx(1.3e-3, rel=0.01)
    assert defect_odds(0, 1000, "gpu") < defect_odds(0, 10, "gpu") < defect_odds(0, 0, "gpu")
    assert defect_odds(1, 100, "gpu") > defect_odds(1, 10_000, "gpu") > 1
    assert defect_odds(2, 10_000, "gpu") > 1000 * defect_odds(1, 10_000, "gpu")
    assert defect_odds(1, 100, "cpu") < defect_odds(1, 100, "gpu")
    assert defect_odds(90, 0, "gpu") <= 1.001e12


def test_the_evidence_has_the_jobs_since_the_last_right_answer_the_location_and_the_coverage(site, watch):
    ranks = {"rank:9.0": {"stage": "stage:9.0", "gpu": BAD}, "rank:9.1": {"stage": "stage:9.0", "gpu": "gpu:n0.0"}}
    script = {
        1: [Event(START + STEP, "job:8", "job_start", {"ranks": {"rank:8.0": {"gpu": BAD}}})],
        2: [Event(START + 2 * STEP, "job:8", "job_end", {})],
        3: [known(BAD, "right", 3)],
        4: [Event(START + 4 * STEP, "job:9", "job_start", {"ranks": ranks})],
        6: [result(BAD, "wrong", 6, format="bf16", range="plain", wrong=["gemm-bf16"], again=0)],
    }
    found = watch(SdcVote(), site, 8, at(script))
    facts = found[0].evidence
    assert facts["jobs_in_doubt"] == ["job:9"]
    assert facts["last_clean_before"].endswith(":30.000000Z") or facts["last_clean_before"] != "unknown"
    assert facts["where"] == {
        "formats": ["bf16"],
        "ranges": ["plain"],
        "problems": ["gemm-bf16"],
        "points_to": "the unit that computes bf16: nothing else failed",
    }
    assert "40 %" in facts["coverage"]
    assert "next right answer" in facts["clears"]
    assert "1 job in doubt" in found[0].summary


def test_a_split_is_logged_once_and_blames_no_device(site, watch, caplog):
    with caplog.at_level(logging.WARNING, "fleetpulse.detectors"):
        assert watch(SdcVote(), site, 100, rounds(lambda n: {g: f"own{g}" for g in range(8)})) == []
    assert [r.message for r in caplog.records if "no device is blamed" in r.message]
    assert len(caplog.records) == 1


def test_gpus_with_another_driver_are_compared_separately(site, watch):
    site.topology.merge({}, {f"node:n{n}": {"driver": "570" if n < 2 else "575"} for n in range(4)})
    assert watch(SdcVote(), site, 100, rounds(lambda n: dict.fromkeys(range(8), "old"))) == []


def test_after_a_software_change_a_page_waits_for_a_right_gpu_on_the_node(site, watch):
    def change(right_beside):
        script = {
            1: [known("gpu:n0.0", "right", 1)],
            2: [Event(START + 2 * STEP, "node:n1", "version", {"versions": {"nvidia_driver": "575"}})],
            5: [result(BAD, "wrong", 5, again=3)],
            8: [known("gpu:n1.2", "right", 8)] if right_beside else [],
        }
        return at(script)

    assert {f.level for f in watch(SdcVote(), site, 60, change(False))} == {"suspect"}
    found = watch(SdcVote(), site, 60, change(True))
    assert next(f for f in found if f.level == "page").time == START + 8 * STEP


def test_a_program_that_most_devices_fail_blames_none(site, watch):
    each = [known(f"gpu:n{g // 4}.{g % 4}", f"own{g}", 5) for g in range(1, 9)]
    assert watch(SdcVote(), site, 8, at({1: [known("gpu:n0.0", "right", 1)], 5: each})) == []


@pytest.mark.parametrize("kind", [SdcVote, SdcReplica])
def test_the_onset_is_not_in_the_future_when_the_clock_steps_back(kind):
    detector = kind()
    detector.conditions["gpu:n0.0"] = {"onset": START + STEP, "level": "suspect", "reported": START + STEP}
    (found,) = detector.observe({"gpu": Frame(START, "gpu", ("gpu:n0.0",), {}, Topology())})
    assert found.evidence["cleared"]
    assert found.onset <= found.time


# --- what docs and benchmarks claim -----------------------------------------------------------------------------------


def test_healthy_gpus_are_never_blamed():
    found, _ = measure_false_alarms(10_000, 1000)
    assert found == []


def test_canaries_find_the_expected_share_of_defective_gpus():
    found = measure_coverage(200, 3)
    assert found.suspected[7] >= 0.98 * found.wrong[7]  # a mismatch of the last hour is reported in the next
    assert abs(found.wrong[7] - found.expected[7]) < 0.1
    assert found.expected[7] >= GOAL


def test_replicas_that_keep_diverging_page_within_a_thousand_steps():
    lasting = measured("lasting", 2, 0)
    assert lasting["paged"] == 1.0
    assert lasting["wrongly"] == 0
    assert measured("gradient", 1, 0)["suspected"] == 0.0
