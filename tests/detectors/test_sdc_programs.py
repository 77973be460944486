"""Broken canary programs, malformed results and restarts, for which no GPU is blamed."""

from __future__ import annotations

import math

import pytest

from benchmarks.detection.sdc_coverage import START, restarted_agents
from detectors.runner import Runner
from detectors.sdc.ledger import MismatchLedger, Proof
from detectors.sdc.sdc import SdcVote
from detectors.sdc.sdc_replica import SdcReplica
from detectors.sdc.votes import MAX_POLLED, AnswerPoll, CanaryVerdict, FalseMismatch
from pipeline.model.records import SECOND, Event, Frame
from pipeline.model.topology import Topology
from tests.detectors.snapshots import packed

ROUND, DAY = 1800 * SECOND, 86_400 * SECOND
BAD = (None, "x", [], ["a"], {}, {"a": 1}, True, -1, 10**30, 10**5000, math.nan, math.inf, 1.5, "")


def fleet(number: int) -> tuple[str, ...]:
    return tuple(f"gpu:n{i // 8}.{i % 8}" for i in range(number))


def above(names: tuple[str, ...], kind: type[Topology] = Topology) -> Topology:
    return kind({g: ("node:" + g[4:].rpartition(".")[0],) for g in names})


def result(entity: str, time: int, digest: str, version: str = "8", known: bool = True, **more: object) -> Event:
    expected = {"expected": "right"} if known else {}
    data = {"canary": "gpu.0", "version": version, "digest": digest, **expected, **more}
    return Event(time, entity, "digest", data)


def run_events(detector: SdcVote, names: tuple[str, ...], events: list[Event], topology: Topology, one_by_one: bool):
    """Returns findings on the events of a round, in one frame or one frame each."""
    found = []
    for part in [[e] for e in events] if one_by_one else [events]:
        frame = Frame(max(e.time for e in part), "gpu", names, {}, topology, tuple(part))
        found += detector.observe({"gpu": frame})
    return found


def run_rounds(answer, number=64, rounds=6, one_by_one=False, detector=None, **more):
    """Returns findings on a fleet that answers `answer(round, index)`: a digest, or (digest, version)."""
    names, found = fleet(number), []
    topology, detector = above(names), detector or SdcVote()
    for n in range(rounds):
        events = []
        for i, gpu in enumerate(names):
            digest, *version = answer(n, i) if isinstance(answer(n, i), tuple) else (answer(n, i),)
            wrong = {"again": 3} if digest != "right" and more.get("again") else {}
            time = START + n * ROUND + i * SECOND
            events.append(result(gpu, time, digest, *version, known=more.get("known", True), **wrong))
        found += run_events(detector, names, events, topology, one_by_one)
    return found


def entities_at_level(found, level):
    return {f.entity for f in found if f.level == level and not f.evidence.get("cleared")}


def held(detector):
    return {e for e, r in detector.ledger.records.items() if r["state"] != "cleared"}


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_release_that_every_gpu_fails_differently_blames_none(one_by_one):
    detector = SdcVote()
    answer = lambda n, i: ("right", "7") if n < 2 else (f"w{n}.{i}", "8")  # noqa: E731
    found = run_rounds(answer, one_by_one=one_by_one, detector=detector, again=True)
    assert entities_at_level(found, "page") == set()
    assert len(entities_at_level(found, "suspect")) <= 2  # the first two, before a third failed it too
    assert held(detector) == set()


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_broken_release_on_the_first_node_of_a_rollout_blames_no_gpu(one_by_one):
    detector = SdcVote()
    answer = lambda n, i: (f"w{n}.{i}", "8") if n > 1 and i < 8 else ("right", "7")  # noqa: E731
    found = run_rounds(answer, one_by_one=one_by_one, detector=detector, again=True)
    assert entities_at_level(found, "page") == set()
    assert held(detector) == set()


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_program_that_most_fail_does_not_page_in_any_order_of_results(one_by_one, known):
    detector = SdcVote()
    answer = lambda n, i: "right" if i < 24 else f"w{n}.{i}"  # noqa: E731
    found = run_rounds(answer, rounds=8, one_by_one=one_by_one, detector=detector, known=known)
    assert entities_at_level(found, "page") == set()
    assert held(detector) == set()
    if one_by_one:
        assert "most devices fail this canary version" in found[-1].summary


@pytest.mark.parametrize("known", [True, False])
def test_forty_defective_gpus_of_three_thousand_are_all_blamed(known):
    answer = lambda n, i: f"w{n}.{i}" if i < 40 else "right"  # noqa: E731
    found = run_rounds(answer, 3000, rounds=2, known=known)
    assert entities_at_level(found, "page") == set(fleet(40))


def test_one_defective_gpu_of_eight_pages_after_a_failed_retest():
    found = run_rounds(lambda n, i: f"w{n}" if n == 1 and i == 3 else "right", 8, rounds=2, again=True)
    assert entities_at_level(found, "page") == {"gpu:n0.3"}


@pytest.mark.parametrize("known", [True, False])
def test_one_defective_gpu_of_eight_pages_after_two_single_mismatches(known):
    found = run_rounds(lambda n, i: f"w{n}" if n > 1 and i == 3 else "right", 8, rounds=4, one_by_one=True, known=known)
    assert entities_at_level(found, "page") == {"gpu:n0.3"}


def test_right_answers_of_cores_do_not_count_for_gpus():
    names, detector = fleet(16), SdcVote()
    cores = [result(f"cpu:n0.{i}", START, "right") for i in range(128)]
    wrong = [result(g, START + ROUND, f"w{g}", again=3) for g in names]
    found = run_events(detector, names, cores, above(names), False) + run_events(
        detector, names, wrong, above(names), False
    )
    assert found == []


PROOF = Proof(mismatches=2, odds=9.0, agreeing=5)


def test_a_mismatch_before_the_broken_release_stays_a_suspect():
    ledger = MismatchLedger()
    for version, time in (("7", START), ("8", START + 2 * DAY)):
        of_ = ("gpu:n0.0", time, False, "gpu.0", version, "w", "right", 8, 7, True)
        record = ledger.record_wrong(CanaryVerdict(*of_, {}), 0, False, PROOF, START - DAY)
    assert record["state"] == "confirmed"
    assert ledger.remove_mismatches(FalseMismatch("broken", "8", kind="gpu", since=START), PROOF) == []
    assert (record["state"], record["count"], record["wrong"][0]["version"]) == ("suspect", 1, "7")


def test_a_poll_of_a_large_fleet_keeps_an_even_share_and_the_newest_answer_of_each():
    poll = AnswerPoll()
    for time in range(3):  # wrong devices report three times as often
        for i, gpu in enumerate(fleet(20_000)):
            if i % 4 == 0 or time == 0:
                poll.add_answer(gpu, time, i % 4 > 0)
    count = poll.count_answers()
    assert MAX_POLLED / 4 < len(poll.answers) <= MAX_POLLED
    assert 0.15 < count[False] / len(poll.answers) < 0.35
    again = AnswerPoll()
    again.restore(poll.snapshot())
    assert again.snapshot() == poll.snapshot()


# --- the ledger's days ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("second", "level"), [(20, "page"), (60, "suspect")])
def test_two_mismatches_page_only_within_the_days_of_the_ledger(second, level):
    names, detector, found = fleet(16), SdcVote(), []
    topology = above(names)
    for day in range(second + 1):
        events = [result(g, START + day * DAY, "right") for g in names[1:]]
        events += [result(names[0], START + day * DAY, f"w{day}")] if day in (1, second) else []
        found += run_events(detector, names, events, topology, False)
    assert found[-1].evidence["mismatches"] == 2
    assert found[-1].level == level


@pytest.mark.parametrize(
    ("rounds", "version", "others", "level"),
    [
        (1_000, "8", 15, "page"),  # 64 times as likely a defect as an upset
        (100_000, "8", 15, "suspect"),  # less likely than an upset
        (1_000, "7", 15, "suspect"),  # the new version may be wrong on it
        (1_000, "8", 3, "suspect"),  # or its known answer, that few others gave
    ],
)
def test_one_mismatch_pages_only_if_a_defect_is_far_more_likely_than_an_upset_or_a_bad_program(
    rounds, version, others, level
):
    names, detector = fleet(16), SdcVote()
    topology = above(names)
    before = [result(names[0], START, "right", version, rounds=rounds)]
    before += [result(g, START, "right") for g in names[1 : others + 1]]
    run_events(detector, names, before, topology, False)
    (found,) = run_events(detector, names, [result(names[0], START + ROUND, "w")], topology, False)
    assert (found.level, found.evidence["mismatches"]) == (level, 1)


# --- malformed events -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["canary", "version", "digest", "expected", "rounds", "again", "uuid", "wrong", "sm"])
@pytest.mark.parametrize("digest", ["right", "wrong"])
def test_a_malformed_result_hides_no_other(name, digest):
    names = fleet(16)
    topology = above(names)
    for value in BAD:
        detector = SdcVote()
        run_events(detector, names, [result(g, START, "right") for g in names], topology, False)
        strange = result(names[1], START + SECOND, digest)
        strange.data[name] = value
        events = [strange, result(names[3], START + SECOND, "bad", again=3, rounds=5)]
        assert names[3] in entities_at_level(run_events(detector, names, events, topology, False), "page")
        assert detector.results.last_right(names[1])[1] <= 10**6 + 1


def test_a_malformed_job_event_hides_no_digest():
    ranks = tuple(f"rank:7.{i}" for i in range(4))
    detector, topology = SdcReplica(), Topology(dict.fromkeys(ranks, ("job:7",)))
    data = {"step": 1, "bucket": "w", "digest": "a", "group": "g"}
    events = [Event(START, name, "job_end", {}) for name in ("job", "", ":")]
    events += [Event(START, r, "replica_digest", data) for r in ranks]
    for value in BAD:
        events += [Event(START, ranks[0], "replica_digest", data | {n: value}) for n in ("step", "bucket", "digest")]
    detector.observe({"rank": Frame(START, "rank", ranks, {}, topology, tuple(events))})
    assert detector.rounds.series["7|g|w"]["open"]["1"]["digests"].keys() == set(ranks)


# --- cost, restart, benchmark -----------------------------------------------------------------------------------------


class Counted(Topology):
    """Counts lookups of nodes."""

    asked = 0

    def ancestor_of_kind(self, entity, kind):
        self.asked += 1
        return super().ancestor_of_kind(entity, kind)


def test_wrong_results_after_a_software_change_need_few_topology_lookups():
    names, detector = fleet(400), SdcVote()
    topology = above(names, Counted)
    run_events(detector, names, [result(g, START, "right") for g in names], topology, False)
    changed = [Event(START + ROUND, f"node:n{k}", "version", {"versions": {"driver": "575"}}) for k in range(50)]
    wrong = [result(g, START + ROUND, f"w{i}" if i < 30 else "right", again=3) for i, g in enumerate(names)]
    topology.asked = 0
    found = run_events(detector, names, [*changed, *wrong], topology, False)
    assert len(entities_at_level(found, "suspect") | entities_at_level(found, "page")) == 30
    assert topology.asked <= 3 * len(names)


def test_a_restart_keeps_the_last_right_answers():
    names = fleet(16)
    topology = above(names)
    first, second = Runner([SdcVote()]), Runner([SdcVote()])

    def instant(k, *events):
        return {"gpu": Frame(START + k * 60 * SECOND, "gpu", names, {}, topology, events)}

    first.observe(instant(0, *(result(g, START, "right") for g in names)))
    first.observe(instant(1, result(names[3], START + 60 * SECOND, "bad")))
    second.restore(packed(first))
    changed = Event(START + 150 * SECOND, "node:n0", "version", {})
    again = result(names[3], START + 240 * SECOND, "worse", again=3)
    right = result(names[4], START + 300 * SECOND, "right")
    for k, events in enumerate([(), (changed,), (again,), (right,), ()], 2):
        found = first.observe(instant(k, *events))
        assert found == second.observe(instant(k, *events))
        if k == 2:
            assert found[0].evidence["last_right"] != "unknown"
    assert packed(first) == packed(second)


def test_restarted_agents_repeat_results_without_effect():
    before = tuple(result(g, START, "right") for g in fleet(400))
    again = list(restarted_agents(1, START + ROUND, before))
    assert len(again) == 8
    assert [e.time for e in again] == [START, START + ROUND] * 4
    assert [e.entity for e in restarted_agents(2, START + ROUND, before)] != [e.entity for e in again]
