"""Slow GPUs and hosts from the outside: which clocks and which idleness page, and who is never blamed."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.straggler import gpu_verdicts
from detectors.straggler.gpu_verdicts import Suspect
from detectors.straggler.straggler_inferred import StragglerInferred
from pipeline.model.records import SECOND, Event
from pipeline.model.topology import Topology
from tests.detectors.cases import straggler_inferred as site
from tests.detectors.cases.case import START, Case

SINCE = 60


def watched(change, ticks=150, topology=site.topology, detector=None):
    """What is said while `change(tick, values)`, which may return events, holds from tick SINCE on."""

    def instant(tick, broken, rng):
        values = site.quiet(tick, rng)
        events = change(tick, values) if broken else None
        return values, events or []

    case = Case(StragglerInferred, site.NAMES, topology, instant, frozenset(), fault=SINCE)
    return case.shown(detector or StragglerInferred(), range(ticks))


def clocks(gpus, factor, bits=0):
    def change(tick, values):
        values["gpu"]["gpu.sm_clock"][gpus] *= factor
        values["gpu"]["gpu.throttle_reasons"][gpus] = bits

    return change


def waiting(gpus, factor, node=None, share=0.4):
    """GPUs whose SMs work less; on `node` tasks wait for processors."""

    def change(tick, values):
        values["gpu"]["gpu.sm_active"][gpus] *= factor
        if node is not None:
            values["node"]["node.cpu_pressure"][node] += share * 1e7 * (tick - SINCE)

    return change


def told(found, level):
    return {f.entity for f in found if f.level == level}


def minutes(finding):
    return (finding.time - START) / SECOND / 60 - SINCE / 6


@pytest.mark.parametrize("bit", [0x8, 0x20, 0x40, 0x80])
def test_a_low_clock_under_a_throttle_bit_pages_within_two_minutes(bit):
    found = watched(clocks([5], 0.9, bit), 80)
    assert told(found, "page") == {"gpu:n1.1"}
    assert minutes(found[0]) <= 2
    assert f"0x{bit:x}" in found[-1].evidence["cause"]
    assert found[-1].signals == ("gpu.sm_clock", "gpu.throttle_reasons")


def test_a_low_clock_without_a_bit_is_a_suspect_and_pages_after_the_hold():
    found = watched(clocks([5], 0.92))
    page = next(f for f in found if f.level == "page")
    assert {f.entity for f in found} == {"gpu:n1.1"}
    assert minutes(found[0]) <= 3
    assert 9 <= minutes(page) <= 12
    assert page.evidence["effect"] == pytest.approx(0.08, abs=0.02)
    assert page.evidence["cohort"] == "stage:7.0"


def test_a_clock_stuck_from_the_first_sample_on_is_found_although_it_is_its_normal():
    def change(tick, values):
        values["gpu"]["gpu.sm_clock"][5] *= 0.6

    case = Case(
        StragglerInferred,
        site.NAMES,
        site.topology,
        lambda tick, _, rng: (change(tick, values := site.quiet(tick, rng)), (values, []))[1],
        frozenset(),
    )
    found = case.shown(StragglerInferred(), range(120))
    assert told(found, "page") == {"gpu:n1.1"}


def test_a_throttle_bit_without_a_lower_clock_says_nothing():
    assert watched(clocks([5], 1.0, 0x20)) == []


def test_a_node_whose_clocks_fall_is_one_finding():
    found = watched(clocks(slice(4, 8), 0.9, 0x40), 90)
    assert {f.entity for f in found if minutes(f) > 3} == {"node:n1"}
    assert "Node n1: 4 GPUs, SM clock" in found[-1].summary


def test_nodes_of_one_rack_that_fall_together_are_not_blamed_loudly():
    found = watched(clocks([0, 1, 2, 3, 16, 17, 18, 19], 0.9, 0x80), 120, rack_of_two)
    assert found
    assert told(found, "page") == set()
    assert "as on other nodes of its rack" in found[-1].summary


def rack_of_two():
    parents = {e: list(p) for e, p in site.topology().parents.items()}
    return Topology({**parents, **{host: [f"rack:{n % 4}"] for n, host in enumerate(site.HOSTS)}})


def test_a_power_cap_that_is_new_to_many_is_policy():
    found = watched(clocks(slice(4, 8), 0.9, 0x4))
    assert told(found, "page") == set()
    assert "policy" in found[-1].evidence["cause"]


def test_a_power_cap_of_all_says_nothing():
    assert watched(clocks(slice(None), 0.88, 0x4)) == []


def test_a_host_that_keeps_its_gpus_waiting_pages_the_node_after_ten_minutes():
    found = watched(waiting(slice(4, 8), 0.9, node=1), 150)
    page = next(f for f in found if f.level == "page")
    assert told(found, "page") == {"node:n1"}
    assert 10 <= minutes(page) <= 12
    assert "tasks wait for CPU 40 %" in page.summary
    assert page.evidence["attribution"] == "HOST"


def test_a_hosts_run_queue_tells_where_the_kernel_keeps_no_pressure():
    def change(tick, values):
        waiting(slice(4, 8), 0.9)(tick, values)
        values["node"]["node.load1"][1] = 300.0

    def without(tick, values):
        change(tick, values)
        del values["node"]["node.cpu_pressure"]

    found = watched(lambda t, v: without(t, v), 120)
    assert told(found, "page") <= {"node:n1"}


def test_idle_gpus_of_a_node_without_a_reason_are_suspects_only():
    found = watched(waiting(slice(4, 8), 0.9), 140)
    assert told(found, "suspect") == {"node:n1"}
    assert told(found, "page") == set()


def test_a_short_slowdown_of_a_host_pages_nobody():
    def change(tick, values):
        if tick < SINCE + 30:
            waiting(slice(4, 8), 0.75, node=1)(tick, values)

    assert told(watched(change, 140), "page") == set()


def test_a_gpu_that_waits_behind_a_narrow_pcie_link_pages():
    def change(tick, values):
        waiting([5], 0.9)(tick, values)
        values["gpu"]["gpu.pcie_width"][5] = 8

    found = watched(change, 90)
    assert told(found, "page") == {"gpu:n1.1"}
    assert "8 lanes" in found[-1].evidence["cause"]


def test_a_gpu_that_is_busier_than_its_peers_is_a_suspect_only():
    def change(tick, values):
        values["gpu"]["gpu.sm_active"][np.arange(site.SIZE) != 5] *= 0.92

    found = watched(change, 140)
    assert {f.entity for f in found} == {"gpu:n1.1"}
    assert told(found, "page") == set()


def test_gpus_whose_job_tells_compute_times_are_left_to_the_straggler_detector():
    def instant(tick, broken, rng):
        values = site.quiet(tick, rng)
        values["rank"] = {"rank.compute_time": np.full(site.SIZE, 4.0)}
        if broken:
            clocks([5], 0.8, 0x40)(tick, values)
            waiting(slice(8, 12), 0.8, node=2)(tick, values)
        return values, []

    case = Case(StragglerInferred, site.NAMES, site.topology, instant, frozenset())
    assert case.shown(StragglerInferred(), range(160)) == []


def test_ranks_that_tell_no_compute_times_change_nothing():
    def change(tick, values):
        values["rank"] = {"rank.step": np.full(site.SIZE, 1.0 * tick)}
        clocks([5], 0.9, 0x40)(tick, values)

    assert told(watched(change, 80), "page") == {"gpu:n1.1"}


def test_where_no_job_is_known_gpus_of_the_rack_are_the_peers():
    def bare():
        parents = {e: p for e, p in site.topology().parents.items() if not e.startswith(("rank", "stage"))}
        return Topology(parents)

    found = watched(clocks([5], 0.9, 0x20), 80, bare)
    assert told(found, "page") == {"gpu:n1.1"}
    assert found[-1].evidence["cohort"] == "rack:r0"
    assert watched(waiting(slice(4, 8), 0.8, node=1), 140, bare) == []


def test_the_whole_job_may_evaluate_or_write_a_checkpoint():
    def change(tick, values):
        values["gpu"]["gpu.sm_active"] *= 0.25 if tick % 40 < 5 else 0.6 if tick % 40 < 20 else 1

    assert watched(change, 240) == []


def test_idle_gpus_with_low_clocks_say_nothing():
    def change(tick, values):
        values["gpu"]["gpu.sm_clock"][4:8] = 345.0
        values["gpu"]["gpu.sm_active"][4:8] = 0.0
        values["gpu"]["gpu.utilization"][4:8] = 0.0
        values["gpu"]["gpu.throttle_reasons"][4:8] = 0x1

    assert watched(change) == []


def test_announced_work_and_the_version_after_it_page_nobody():
    def change(tick, values):
        clocks(slice(4, 8), 0.93)(tick, values)
        if tick == SINCE:
            return [Event(START + tick * 10 * SECOND, "node:n1", "maintenance_start", {"seconds": 600})]
        if tick == SINCE + 60:
            return [Event(START + tick * 10 * SECOND, "node:n1", "maintenance_end", {})]
        return []

    assert watched(change, 400) == []


def test_a_new_version_is_learnt_anew():
    def change(tick, values):
        clocks(slice(4, 8), 0.95)(tick, values)
        return [Event(START + tick * 10 * SECOND, "node:n1", "version", {"versions": {}})] if tick == SINCE else []

    assert watched(change, 300) == []


def test_gpus_that_fall_silent_or_nan_storms_say_nothing():
    def change(tick, values):
        for column in values["gpu"].values():
            column[::2] = np.nan
            if tick % 7 == 0:
                column[:] = np.nan

    assert watched(change, 300) == []


def test_what_a_person_calls_no_fault_is_learnt():
    detector = StragglerInferred()
    found = watched(clocks([5], 0.92), 130, detector=detector)
    assert found
    case = Case(
        StragglerInferred,
        site.NAMES,
        site.topology,
        lambda tick, _, rng: (clocks([5], 0.92)(tick, values := site.quiet(tick, rng)), (values, []))[1],
        frozenset(),
    )
    topology = site.topology()
    frames = case.frames(131, True, topology)
    detector.accept_as_normal("gpu:n1.1", frames)
    assert [f for t in range(132, 260) for f in detector.observe(case.frames(t, True, topology))] == []


def test_what_a_person_calls_no_fault_of_a_group_is_learnt_of_its_members():
    """The ticket names a stage, which no GPU is part of: its ranks are."""
    slow, detector = clocks(list(range(0, site.SIZE // 2, 2)), 0.85), StragglerInferred()
    found = watched(slow, SINCE + 150, detector=detector)
    group = next(f for f in found if "group" in f.evidence)
    detector.accept_as_normal(group.entity, {})
    case = Case(
        StragglerInferred,
        site.NAMES,
        site.topology,
        lambda tick, _, rng: (slow(tick, values := site.quiet(tick, rng)), (values, []))[1],
        frozenset(),
    )
    topology, ticks = site.topology(), range(SINCE + 150, SINCE + 350)
    assert [f for t in ticks for f in detector.observe(case.frames(t, True, topology))] == []


def test_a_job_that_moves_takes_its_peers_along():
    topology = site.topology()
    other = {f"rank:8.{i}": ["stage:8.0", "job:8", site.GPUS[i]] for i in range(site.SIZE)}
    detector = StragglerInferred()
    case = Case(
        StragglerInferred, site.NAMES, lambda: topology, lambda t, _, rng: (site.quiet(t, rng), []), frozenset()
    )
    found = []
    for tick in range(300):
        if tick == 100:
            topology.remove_entities([*site.RANKS, "stage:7.0", "stage:7.1", "job:7"])
            topology.merge({**other, "stage:8.0": ["job:8"]})
        found += detector.observe(case.frames(tick, False, topology))
    assert found == []


def test_gpus_of_another_product_in_the_same_job_are_not_taken_for_slow():
    def mixed():
        topology = site.topology()
        topology.merge({}, {gpu: {"sku": "A100" if i % 16 >= 8 else "H100"} for i, gpu in enumerate(site.GPUS)})
        return topology

    older = np.arange(site.SIZE) % 16 >= 8

    def instant(tick, broken, rng):
        values = site.quiet(tick, rng)
        values["gpu"]["gpu.sm_clock"][older] = 1290.0
        return values, []

    case = Case(StragglerInferred, site.NAMES, mixed, instant, frozenset())
    assert case.shown(StragglerInferred(), range(150)) == []


def test_a_stage_whose_clocks_all_fall_blames_no_gpu():
    assert watched(clocks(slice(0, 16), 0.9, 0x40)) == []


def test_the_gpus_of_a_job_on_one_node_are_compared_with_each_other():
    def single():
        parents = {gpu: ["node:n0"] for gpu in site.GPUS} | {"node:n0": ["rack:r0"]}
        return Topology(parents | {r: ["job:7", g] for r, g in zip(site.RANKS, site.GPUS, strict=True)})

    found = watched(clocks([5], 0.9, 0x40), 80, single)
    assert told(found, "page") == {"gpu:n1.1"}
    assert (found[-1].evidence["peers"], found[-1].evidence["cohort"]) == (31, "job:7")


def test_few_gpus_without_peers_say_nothing():
    def instant(tick, broken, rng):
        values = {c: {k: v[:4] for k, v in columns.items()} for c, columns in site.quiet(tick, rng).items()}
        if broken:
            values["gpu"]["gpu.sm_clock"][:] *= 0.8
        return values, []

    case = Case(StragglerInferred, site.NAMES, Topology, instant, frozenset(), fault=SINCE)
    assert case.shown(StragglerInferred(), range(150)) == []


@pytest.mark.parametrize("begin", [40, 90])
def test_gpus_that_appear_later_or_vanish_say_nothing(begin):
    def instant(tick, broken, rng):
        values = site.quiet(tick, rng)
        if tick < begin:
            values["gpu"] = {name: column[:24].copy() for name, column in values["gpu"].items()}
        elif tick > begin + 60:
            for column in values["gpu"].values():
                column[8:16] = np.nan
        return values, []

    case = Case(StragglerInferred, site.NAMES, site.topology, instant, frozenset())
    assert case.shown(StragglerInferred(), range(220)) == []


def test_a_finding_ends_when_the_job_does():
    topology, detector = site.topology(), StragglerInferred()

    def instant(tick, broken, rng):
        values = site.quiet(tick, rng)
        if tick < 120:
            clocks([5], 0.9, 0x40)(tick, values) if tick >= SINCE else None
        else:
            idle = values["gpu"]
            idle["gpu.sm_clock"][:] = 345.0
            idle["gpu.sm_active"][:] = idle["gpu.utilization"][:] = 0.0
            idle["gpu.throttle_reasons"][:] = 0x1
        return values, []

    case = Case(StragglerInferred, site.NAMES, lambda: topology, instant, frozenset())
    found = [f for t in range(200) for f in detector.observe(case.frames(t, True, topology))]
    assert found
    assert max(f.time for f in found) <= case.time(135)
    assert detector.conditions == {}


def test_clocks_of_a_gpu_are_not_learnt_anew_by_a_job_that_starts_on_it():
    """Else the next job would take a slow GPU for normal."""
    topology, detector = site.topology(), StragglerInferred()
    other = {f"rank:8.{i}": ["stage:8.0", "job:8", site.GPUS[i]] for i in range(site.SIZE)}

    def instant(tick, broken, rng):
        values = site.quiet(tick, rng)
        if tick >= SINCE:
            clocks([5], 0.94)(tick, values)
        return values, []

    case = Case(StragglerInferred, site.NAMES, lambda: topology, instant, frozenset())
    found = []
    for tick in range(400):
        if tick == 200:
            topology.remove_entities([*site.RANKS, "stage:7.0", "stage:7.1", "job:7"])
            topology.merge({**other, "stage:8.0": ["job:8"]})
        found += detector.observe(case.frames(tick, False, topology))
    assert {f.entity for f in found} == {"gpu:n1.1"}
    assert case.time(399) - found[-1].time <= 120 * SECOND
    assert len({f.onset for f in found}) == 1


def test_gpus_of_a_loop_that_grow_hot_and_throttle_one_by_one_are_left_to_the_coolant():
    def change(tick, values):
        gpu, since = values["gpu"], tick - SINCE
        gpu["gpu.temperature"] += min(30.0, 6.0 * since)
        struck = np.arange(site.SIZE) < since / 2
        gpu["gpu.sm_clock"][struck] *= 0.8
        gpu["gpu.throttle_reasons"][struck] = 0x40

    def instant(tick, broken, rng):
        values = site.quiet(tick, rng)
        values["gpu"]["gpu.temperature"] = np.full(site.SIZE, 55.0)
        if broken:
            change(tick, values)
        return values, []

    def looped():
        topology = site.topology()
        topology.merge({host: ["loop:l0", *topology.parents[host]] for host in site.HOSTS})
        return topology

    case = Case(StragglerInferred, site.NAMES, looped, instant, frozenset(), fault=SINCE)
    assert case.shown(StragglerInferred(), range(200)) == []


def test_a_gpu_that_was_mended_while_it_rested_is_not_blamed_again():
    def instant(tick, broken, rng):
        values = site.quiet(tick, rng)
        if SINCE <= tick < 140:
            clocks([5], 0.9)(tick, values)
        if 140 <= tick < 180:
            values["gpu"]["gpu.sm_active"][:] = values["gpu"]["gpu.utilization"][:] = 0.0
        return values, []

    case = Case(StragglerInferred, site.NAMES, site.topology, instant, frozenset())
    found = case.shown(StragglerInferred(), range(260))
    assert found
    assert found[-1].time < case.time(155)


def test_the_first_sentence_says_the_newest_clock_and_blames_the_node():
    first = watched(clocks([5], 0.85, 0x40), 80)[0]
    seen = first.evidence
    assert seen["value"] == pytest.approx(0.85 * seen["expected"], rel=0.02)
    assert seen["effect"] == pytest.approx(1 - seen["value"] / seen["expected"], abs=1e-6)
    assert f"SM clock {seen['value']:.0f} MHz, peers {seen['expected']:.0f}" in first.summary
    assert seen["attribution"] == "NODE"


def test_a_clock_that_is_back_for_a_moment_is_still_told_as_low():
    def change(tick, values):
        clocks([5], 0.85 if tick % 6 else 1.0)(tick, values)

    assert all(f.evidence["effect"] >= 0.03 for f in watched(change, 200))


def test_the_spread_is_in_the_unit_of_the_value():
    found = watched(clocks([5], 0.85, 0x40), 80) + watched(waiting(slice(4, 8), 0.9, node=1), 120)
    of_clock = [f.evidence["spread"] for f in found if f.evidence["unit"] == "MHz"]
    of_activity = [f.evidence["spread"] / f.evidence["expected"] for f in found if f.evidence["unit"] == "1"]
    assert min(of_clock) >= 1.0
    assert of_activity
    assert max(of_activity) <= 0.1


def test_words_are_made_only_when_they_are_due(monkeypatch):
    """Between two reports, a minute apart, nobody's sentence is built."""
    made = []
    words = Suspect.finding
    monkeypatch.setattr(Suspect, "finding", lambda self, *told: (made.append(self), words(self, *told))[1])
    built = []
    clocked = gpu_verdicts._compare_clock
    monkeypatch.setattr(gpu_verdicts, "_compare_clock", lambda *told: (built.append(1), clocked(*told))[1])
    watched(clocks([5], 0.85, 0x40), 120)
    assert 5 <= len(built) == len(made) <= 15
