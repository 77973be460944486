"""The scorer on cases with known answers, made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from detectors.scoring.answer_rules import BY_CAUSE, BY_FAMILY, DELTA_MIN, alert_class
from detectors.scoring.score import (
    ANSWER_RULES,
    Alert,
    Alerts,
    Meta,
    Placement,
    Truth,
    add_field_rates,
    merge_scores,
    score_run,
)
from pipeline.model.records import SECOND, Event
from pipeline.model.topology import Topology

T0 = 1_790_000_000 * SECOND
HOUR = 3600
WORLD = Placement(
    Topology(
        {
            "rank:7.0": ["stage:7.0", "job:7", "gpu:n0.0"],
            "rank:7.1": ["stage:7.0", "job:7", "gpu:n0.1"],
            "gpu:n0.0": ["node:n0"],
            "gpu:n0.1": ["node:n0"],
            "port:n0.p0": ["node:n0", "leaf:l0"],
            "port:l0.p9": ["leaf:l0"],
            "node:n0": ["rack:r1"],
            "rack:r1": ["cdu:c0"],
        },
        {"port:n0.p0": {"peer": "port:l0.p9"}},
    )
)


def time_at(seconds):
    return T0 + int(seconds * SECOND)


def event(kind, entity, onset=0.0, end=3600.0, cls="hard", name="", visible=None, **more):
    seen = time_at(onset if visible is None else visible)
    return Truth(
        name or f"{kind}-{entity}-{onset}", kind, entity, (entity,), time_at(onset), time_at(end), cls, seen, **more
    )


def page(cause, detector, seconds, incident="", suspects=(), ticket=None):
    ticketed = time_at(seconds if ticket is None else ticket)
    return Alert(
        incident or f"{cause}-{seconds}", cause, detector, detector, (cause, *suspects), ticketed, time_at(seconds)
    )


def ticket(cause, detector, seconds, incident=""):
    return Alert(incident or f"{cause}-{seconds}", cause, detector, detector, (cause,), time_at(seconds), None)


def scored(events, alerts, days=10.0, **meta):
    return score_run(events, Alerts(tuple(alerts)), WORLD, Meta(days, **meta))


def counts(result):
    return result["found"], result["false"], result["duplicates"]


@pytest.mark.parametrize(
    ("kind", "root", "cause", "detector", "answers"),
    [
        ("straggler", "gpu:n0.0", "gpu:n0.0", "straggler", True),
        ("straggler", "gpu:n0.0", "rank:7.0", "straggler", True),
        ("straggler", "gpu:n0.0", "node:n0", "straggler", True),
        ("straggler", "gpu:n0.0", "node:n0", "thermal_edge", True),
        ("straggler", "gpu:n0.0", "rack:r1", "straggler", False),
        ("straggler", "gpu:n0.1", "rank:7.0", "straggler", False),
        ("straggler", "gpu:n0.0", "gpu:n0.0", "sdc", False),
        ("straggler", "node:n0", "gpu:n0.0", "straggler", False),
        ("sdc", "gpu:n0.0", "gpu:n0.0", "sdc", True),
        ("sdc", "gpu:n0.0", "gpu:n0.1", "sdc", False),
        ("link_degradation", "port:n0.p0", "leaf:l0", "link", True),
        ("link_degradation", "port:n0.p0", "port:l0.p9", "link", True),
        ("coolant", "cdu:c0", "cdu:c0", "straggler", True),
        ("coolant", "cdu:c0", "rank:7.0", "straggler", False),
        ("coolant", "cdu:c0", "cdu:c0", "coolant_leak", False),
        ("congestion", "leaf:l0", "leaf:l0", "link_congestion", True),
        ("congestion", "job:7", "job:7", "straggler_job", True),
        ("congestion", "port:n0.p0", "port:n0.p0", "link", False),
        ("sensor_fault", "gpu:n0.0", "gpu:n0.0", "thermal", False),
        ("sensor_fault", "gpu:n0.0", "gpu:n0.0", "telemetry", True),
        ("unheard of", "gpu:n0.0", "rack:r1", "anything", True),
        ("unheard of", "gpu:n0.0", "gpu:n0.1", "anything", False),
    ],
)
def test_detector_and_cause_must_count_for_the_kind(kind, root, cause, detector, answers):
    result = scored([event(kind, root)], [page(cause, detector, 60)])
    assert (result["found"], result["false"]) == ((1, 0) if answers else (0, 1))


def test_finding_everything_gives_perfect_figures():
    events = [event("sdc", "gpu:n0.0"), event("coolant", "cdu:c0"), event("straggler", "gpu:n0.1", cls="soft")]
    alerts = [page("gpu:n0.0", "sdc", 5), page("cdu:c0", "coolant", 5), page("rank:7.1", "straggler", 5)]
    result = scored(events, alerts)
    assert (result["recall"], result["precision"], result["f1"], result["top1"]) == (1.0, 1.0, 1.0, 1.0)
    assert (result["missed"], result["delay_median_s"]) == ([], 5.0)


def test_no_alerts_find_nothing_and_are_never_false():
    result = scored([event("sdc", "gpu:n0.0", name="x")], [])
    assert (*counts(result), result["recall"], result["precision"], result["f1"]) == (0, 0, 0, 0.0, None, None)
    assert (result["missed"], result["delay_median_s"]) == (["x"], None)


def test_an_alarm_that_is_always_on_finds_only_the_event_that_began_with_it():
    events = [event("sdc", "gpu:n0.0", onset * HOUR, onset * HOUR + 600) for onset in (1, 5, 9)]
    one = scored(events, [page("gpu:n0.0", "sdc", -HOUR)])
    assert counts(one) == (0, 1, 0)


def test_one_incident_that_never_ends_is_a_false_page_for_every_six_hours():
    alerts = [page("gpu:n0.0", "sdc", hour * HOUR, "a") for hour in range(24)]
    assert scored([], alerts)["false"] == 4  # at hours 0, 7, 14 and 21: each covers the alerts of the next 6 h


@pytest.mark.parametrize(("seconds", "found"), [(-61, 0), (-60, 1), (0, 1), (4200, 1), (4201, 0)])
def test_a_page_counts_from_a_minute_before_the_onset_to_ten_minutes_after_the_end(seconds, found):
    result = scored([event("sdc", "gpu:n0.0")], [page("gpu:n0.0", "sdc", seconds)])
    assert (result["found"], result["false"]) == (found, 1 - found)


def test_a_page_that_is_too_late_is_false_and_the_event_is_missed():
    result = scored([event("sdc", "gpu:n0.0", 0, 600)], [page("gpu:n0.0", "sdc", 1201)])
    assert counts(result) == (0, 1, 0)
    assert result["false_by_reason"] == {"nothing": 1}


def test_a_page_on_another_device_is_false_and_lists_the_fault_beside_it():
    result = scored([event("straggler", "gpu:n0.0", attribution="gpu")], [page("rack:r1", "straggler", 60)])
    assert counts(result) == (0, 1, 0)
    assert result["false_by_reason"] == {"wrong": 1}
    assert result["false_beside_faults"] == {"straggler": 1}
    assert result["attribution"]["NODE"]["COOLING"] == 1


def test_one_page_answers_only_one_of_two_faults():
    events = [event("straggler", "gpu:n0.0", name="a"), event("straggler", "gpu:n0.1", name="b")]
    result = scored(events, [page("node:n0", "straggler", 60)])
    assert (*counts(result), result["missed"]) == (1, 0, 0, ["b"])


def test_two_pages_find_two_faults_in_any_order():
    """The first page matches both events, the second only the one that the first would answer: none is lost."""
    events = [event("straggler", "gpu:n0.0", 50, name="a"), event("straggler", "gpu:n0.1", 0, name="b")]
    result = scored(events, [page("node:n0", "straggler", 60), page("gpu:n0.0", "straggler", 70)])
    assert counts(result) == (2, 0, 0)


def test_a_second_incident_for_the_same_event_is_a_duplicate_and_false():
    result = scored([event("sdc", "gpu:n0.0")], [page("gpu:n0.0", "sdc", 60), page("node:n0", "sdc", 70)])
    assert (*counts(result), result["precision"]) == (1, 1, 1, 0.5)


def test_further_alerts_of_one_incident_on_one_event_are_free_for_six_hours():
    long = event("sdc", "gpu:n0.0", 0, 48 * HOUR)
    inside = [page("gpu:n0.0", "sdc", seconds, "a") for seconds in (60, 70, 60 + 6 * HOUR)]
    assert counts(scored([long], inside)) == (1, 0, 0)
    assert counts(scored([long], [*inside, page("gpu:n0.0", "sdc", 61 + 6 * HOUR, "a")])) == (1, 1, 1)
    assert counts(scored([long], [replace(a, incident=f"{i}") for i, a in enumerate(inside)])) == (1, 2, 2)


def test_an_incident_that_pages_again_without_cause_is_false():
    events = [event("sdc", "gpu:n0.0", 0, 600)]
    result = scored(events, [page("gpu:n0.0", "sdc", 60, "a"), page("gpu:n0.0", "sdc", 5060, "a")])
    assert counts(result) == (1, 1, 0)


def test_an_incident_that_pages_again_may_answer_another_event():
    events = [event("sdc", "gpu:n0.0", 0, 600), event("sdc", "gpu:n0.0", 5000, 5600)]
    assert counts(scored(events, [page("gpu:n0.0", "sdc", 60, "a")])) == (1, 0, 0)
    result = scored(events, [page("gpu:n0.0", "sdc", 60, "a"), page("gpu:n0.0", "sdc", 5060, "a")])
    assert (*counts(result), result["precision"]) == (2, 0, 0, 1.0)


def test_a_page_within_a_benign_event_is_false_and_names_its_detector():
    harmless = [event("job_restart", "job:7", cls="benign", name=n, attribution="job") for n in ("a", "b")]
    result = scored(harmless, [page("gpu:n0.0", "straggler", 60, suspects=["rank:7.0"]), page("cdu:c0", "coolant", 60)])
    assert (result["events"], result["recall"], result["false"]) == (0, None, 2)
    assert result["false_by_reason"] == {"benign": 1, "nothing": 1}
    fooled = result["false_by_benign"]["job_restart"]
    assert fooled == {"events": 2, "fooled": 1, "pages": 1, "detectors": {"straggler": 1}, "said": {"NODE": 1}}
    assert result["not_sought"] == {"benign": {"events": 2, "found": 0}}


def test_a_fault_within_a_benign_event_can_be_found():
    events = [event("evaluation", "job:7", cls="benign"), event("straggler", "gpu:n0.0")]
    assert counts(scored(events, [page("rank:7.0", "straggler", 60)])) == (1, 0, 0)


def test_a_ticket_within_a_benign_event_is_not_a_false_page():
    result = scored([event("telemetry_gap", "node:n0", cls="benign")], [ticket("node:n0", "telemetry_blind", 60)])
    assert (result["false"], result["tickets"]["false"]) == (0, 1)


def test_an_invisible_event_need_not_be_found_and_finding_it_is_not_false():
    hidden = event("sdc", "gpu:n0.0", cls="invisible")
    assert (scored([hidden], [])["events"], scored([hidden], [])["recall"]) == (0, None)
    result = scored([hidden], [page("gpu:n0.0", "sdc", 60)])
    assert (result["events"], result["pages"], result["false"]) == (0, 0, 0)
    assert result["not_sought"]["invisible"] == {"events": 1, "found": 1}


def test_an_alert_answers_a_visible_event_before_an_invisible_one():
    events = [event("sdc", "gpu:n0.0", 50, cls="invisible"), event("sdc", "gpu:n0.0", 0)]
    assert scored(events, [page("gpu:n0.0", "sdc", 60)])["found"] == 1


def test_a_ticket_answers_only_kinds_for_which_a_ticket_is_enough():
    slow, acute = event("optic_degradation", "port:n0.p0"), event("link_down", "port:n0.p0")
    for fault, found, false in ((slow, 1, 0), (acute, 0, 1)):
        result = scored([fault], [ticket("port:n0.p0", "link", 60)])
        assert (result["found"], result["false"], result["pages"]) == (found, 0, 0)
        assert (result["tickets"]["right"], result["tickets"]["false"]) == (found, false)
    assert counts(scored([slow], [page("port:n0.p0", "link", 60)])) == (1, 0, 0)


def test_the_delay_ends_with_the_required_level():
    rising = page("port:n0.p0", "link", 900, ticket=100)
    assert scored([event("optic_degradation", "port:n0.p0")], [rising])["delay_median_s"] == 100.0
    assert scored([event("link_down", "port:n0.p0")], [rising])["delay_median_s"] == 900.0
    earlier = page("node:n0", "link", 500)
    assert scored([event("link_down", "port:n0.p0")], [rising, earlier])["delay_median_s"] == 500.0


def test_delays_count_from_the_onset_and_end_with_the_event():
    events = [event("sdc", f"gpu:n0.{i}", 0, 600) for i in (0, 1)]
    result = scored(events, [page("gpu:n0.0", "sdc", 100), page("gpu:n0.1", "sdc", 900)])
    assert (result["delay_median_s"], result["delay_p90_s"]) == (350.0, 600.0)
    assert (result["half_known_after_s"], result["ninety_percent_known_after_s"]) == (100.0, None)


def test_a_page_before_the_onset_has_no_delay_and_one_about_an_instant_has_its_own():
    assert scored([event("sdc", "gpu:n0.0")], [page("gpu:n0.0", "sdc", -50)])["delay_median_s"] == 0.0
    assert scored([event("sdc", "gpu:n0.0", 0, 0)], [page("gpu:n0.0", "sdc", 40)])["delay_median_s"] == 40.0


def test_the_delay_of_a_ramp_counts_from_when_it_is_visible():
    ramp = event("cold_plate", "gpu:n0.0", 0, 10 * HOUR, "soft", visible=4 * HOUR)
    assert scored([ramp], [page("gpu:n0.0", "thermal", 5 * HOUR)])["delay_median_s"] == HOUR
    assert scored([ramp], [page("gpu:n0.0", "thermal", 3 * HOUR)])["delay_median_s"] == 0.0


def test_an_event_that_is_never_visible_in_the_recording_is_small():
    ramp = event("optic_degradation", "port:n0.p0", 0, 10 * HOUR, visible=4 * HOUR)
    assert scored([ramp], [], end=time_at(5 * HOUR))["events"] == 1
    cut = scored([ramp], [], end=time_at(3 * HOUR))
    assert (cut["events"], cut["small"]["events"]) == (0, 1)


def test_localisation_is_exact_or_among_the_first_three():
    events = [event("straggler", "gpu:n0.0")]
    third = scored(events, [page("node:n0", "straggler", 60, suspects=("gpu:n0.1", "rank:7.0"))])
    assert (third["top1"], third["top3"]) == (0.0, 1.0)
    fourth = scored(events, [page("node:n0", "straggler", 60, suspects=("gpu:n0.1", "rank:7.1", "rank:7.0"))])
    assert (fourth["top1"], fourth["top3"]) == (0.0, 0.0)


def test_effects_below_delta_min_count_separately_and_finding_one_is_not_false():
    tiny = event("straggler", "gpu:n0.0", cls="soft", effect=0.019, effect_unit="time")
    enough = event("straggler", "gpu:n0.1", cls="soft", effect=0.02, effect_unit="time")
    result = scored([tiny, enough], [page("gpu:n0.0", "straggler", 60), page("gpu:n0.1", "straggler", 60)])
    assert (result["events"], result["found"], result["false"], result["right"]) == (1, 1, 0, 2)
    assert (result["small"]["events"], result["small"]["found"]) == (1, 1)
    assert (result["kinds"]["straggler"]["small"], result["kinds"]["straggler"]["small_found"]) == (1, 1)


@pytest.mark.parametrize(("effect", "unit"), [(None, None), (0.001, None), (None, "time"), (0.001, "parsec")])
def test_an_event_without_an_effect_in_a_known_unit_counts(effect, unit):
    assert scored([event("straggler", "gpu:n0.0", effect=effect, effect_unit=unit)], [])["events"] == 1


@pytest.mark.parametrize("unit", DELTA_MIN)
def test_an_effect_may_be_negative(unit):
    for share, counts in ((-0.99, 0), (-1.01, 1)):
        size = share * DELTA_MIN[unit]
        assert scored([event("straggler", "gpu:n0.0", effect=size, effect_unit=unit)], [])["events"] == counts


def test_a_soft_event_must_last_for_the_hold_plus_the_median_delay_of_its_kind():
    """One found after 300 s: events of 600 + 300 s count. Without any found, 600 s are enough."""
    events = [event("straggler", "gpu:n0.0", cls="soft", name="long")]
    events += [event("straggler", "gpu:n0.1", 9000, 9000 + s, "soft", name=f"{s}") for s in (599, 600, 899, 900)]
    found = scored(events, [page("gpu:n0.0", "straggler", 300)])
    assert (found["events"], found["small"]["events"], found["missed"]) == (2, 3, ["900"])
    silent = scored(events, [])
    assert (silent["events"], silent["small"]["events"]) == (4, 1)


def test_the_delay_of_a_small_effect_does_not_change_the_required_length():
    tiny = event("straggler", "gpu:n0.0", cls="soft", effect=0.001, effect_unit="time")
    large = event("straggler", "gpu:n0.1", 9000, 9700, "soft", effect=0.5, effect_unit="time")
    result = scored([tiny, large], [page("gpu:n0.0", "straggler", 3000)])
    assert (result["events"], result["small"]["events"], result["small"]["found"]) == (1, 1, 1)


def test_a_hard_event_counts_at_any_length():
    assert scored([event("gpu_off_bus", "gpu:n0.0", 0, 0)], [])["events"] == 1


def test_false_pages_per_thousand_node_days_have_an_interval():
    rate = scored([], [page("gpu:n0.0", "sdc", 60)], 500.0)["false_pages_per_1000_node_days"]
    assert rate["value"] == 2.0
    assert (rate["low"], rate["high"]) == pytest.approx((0.0506, 11.143), abs=1e-3)
    assert scored([], [], None)["false_pages_per_1000_node_days"] is None


def test_attribution_is_a_matrix_of_fault_class_and_alert_class():
    events = [
        event("straggler", "gpu:n0.0", attribution="gpu"),
        event("host_contention", "node:n0", attribution="host"),
        event("data_stall", "job:7", attribution="job"),
        event("link_down", "port:n0.p0", attribution="network"),
        event("coolant", "cdu:c9", attribution="cooling"),
    ]
    alerts = [
        page("gpu:n0.0", "straggler", 60),
        page("gpu:n0.1", "straggler", 60, suspects=["rank:7.1"]),  # blames a GPU for a fault of the job
        page("port:n0.p0", "link", 60),
    ]
    result = scored(events, alerts)
    rows = {row: {c: n for c, n in cells.items() if n} for row, cells in result["attribution"].items()}
    assert rows == {"NODE": {"NODE": 2}, "JOB": {"NODE": 1}, "NETWORK": {"NETWORK": 1}, "COOLING": {"not found": 1}}
    assert (result["attribution_right"]["right"], result["attribution_right"]["told"]) == (3, 4)


def test_recall_is_listed_by_tenths_of_severity():
    events = [event("sdc", "gpu:n0.0", i, severity=s) for i, s in enumerate((0.0, 0.09, 0.1, 1.0, None))]
    tenths = scored(events, [page("gpu:n0.0", "sdc", 0)])["severity"]
    assert {name: (block["found"], block["events"]) for name, block in tenths.items()} == {
        "0.0-0.1": (1, 2),
        "0.1-0.2": (0, 1),
        "0.9-1.0": (0, 1),
    }


def test_a_rank_that_moved_counts_as_the_gpu_that_it_was_on():
    starts = [(0, "gpu:n0.0"), (HOUR, "gpu:n0.1")]
    placed = [Event(time_at(s), "job:9", "job_start", {"ranks": {"rank:9.0": {"gpu": g}}}) for s, g in starts]
    world = Placement(WORLD.topology, placed)
    for seconds, gpu, found in ((60, 0, 1), (60, 1, 0), (HOUR + 60, 0, 0), (HOUR + 60, 1, 1)):
        alerts = Alerts((page("rank:9.0", "straggler", seconds),))
        assert score_run([event("straggler", f"gpu:n0.{gpu}", 0, 2 * HOUR)], alerts, world, Meta())["found"] == found


def test_cost_per_sample_and_fleet_size_are_figures():
    result = scored([event("sdc", "gpu:n0.0")], [page("gpu:n0.0", "sdc", 9)], gpus=64.0, cpu_seconds=3.0, samples=2e6)
    assert result["cpu_s_per_million_samples"] == 1.5
    (scale,) = result["scales"]
    assert (scale["gpus"], scale["runs"], scale["found"], scale["false"], scale["node_days"]) == (64.0, 1, 1, 0, 10.0)


def test_runs_are_added_up_exactly():
    """Three runs by hand: 3 events, 2 found after 100 and 300 s, 1 false page in 60 node-days."""
    one = scored([event("sdc", "gpu:n0.0", name="a")], [page("gpu:n0.0", "sdc", 100)], 10.0, gpus=8.0)
    two = scored([event("sdc", "gpu:n0.0", name="a")], [page("gpu:n0.0", "sdc", 300)], 20.0, gpus=8.0)
    three = scored([event("sdc", "gpu:n0.0", name="b")], [page("cdu:c0", "coolant", 300)], 30.0, gpus=64.0)
    result = merge_scores([one, two, three])
    assert (result["events"], result["found"], result["false"], result["node_days"]) == (3, 2, 1, 60.0)
    assert (result["recall"], result["delay_median_s"], result["missed"]) == (2 / 3, 200.0, ["b"])
    assert result["false_pages_per_1000_node_days"]["value"] == pytest.approx(1000 / 60)
    scales = [
        tuple(s[key] for key in ("gpus", "runs", "events", "found", "false", "node_days")) for s in result["scales"]
    ]
    assert scales == [(8.0, 2, 2, 2, 0, 30.0), (64.0, 1, 1, 0, 1, 30.0)]
    assert merge_scores([merge_scores([one, two]), three]) == result == merge_scores([one, merge_scores([two, three])])
    assert merge_scores([one]) == one


def test_small_events_are_decided_over_all_runs_together():
    long = event("straggler", "gpu:n0.0", cls="soft")
    short = event("straggler", "gpu:n0.0", 0, 700, "soft")
    alone = scored([short], [])
    assert alone["events"] == 1
    result = merge_scores([alone, scored([long], [page("gpu:n0.0", "straggler", 300)])])
    assert (result["events"], result["found"], result["small"]["events"]) == (1, 1, 1)


def test_precision_at_field_rates_matches_a_calculation_by_hand():
    """Recall 0.5, no false page in 10,000 node-days (upper bound 3.689 / 10): 3.25 / (3.25 + 0.3689) = 0.898."""
    events = [event("sdc", "gpu:n0.0"), event("coolant", "cdu:c0")]
    result = scored(events, [page("gpu:n0.0", "sdc", 60)])
    clean = scored([], [], 10_000.0)
    field = add_field_rates(result, [clean])["precision_at_field_rates"]
    assert (field["false_pages"], field["node_days"], field["recall"]) == (0, 10_000.0, 0.5)
    lines = [(p["faults_per_1000_node_days"], p["value"], p["low"], p["high"]) for p in field["precision"]]
    assert lines == [
        (6.5, 1.0, pytest.approx(0.89807, abs=1e-5), 1.0),
        (2.34, 1.0, pytest.approx(0.76029, abs=1e-5), 1.0),
    ]
    paged = scored([], [page("gpu:n0.0", "sdc", 60 + 9 * HOUR * i) for i in range(3)], 2_000.0)
    field = add_field_rates(result, [clean, paged])["precision_at_field_rates"]
    assert (field["false_pages"], field["node_days"]) == (3, 12_000.0)
    assert field["precision"][0]["value"] == pytest.approx(3.25 / 3.5)
    assert add_field_rates(scored([], []), [clean])["precision_at_field_rates"] is None


def test_every_simulated_kind_of_fault_has_its_line_in_the_table():
    from agents.sim.kinds import KINDS

    wanted = {name for name, kind in KINDS.items() if kind.detectability in ("hard", "soft")}
    assert wanted <= ANSWER_RULES.keys()
    assert {kind.effect_unit for kind in KINDS.values()} - {None} <= DELTA_MIN.keys()


PAGE = (Path(__file__).parents[2] / "docs/scoring.md").read_text()


def cells_of(name):
    line = next(text for text in PAGE.splitlines() if text.startswith(f"| `{name}` |"))
    return [cell.strip() for cell in line.strip("|").split("|")[1:]]


@pytest.mark.parametrize("kind", ANSWER_RULES)
def test_the_page_on_scoring_shows_the_table(kind):
    counting = ANSWER_RULES[kind]
    level, detectors, causes = cells_of(kind)
    assert level == counting.level
    assert set(detectors.split(", ")) == counting.detectors
    assert set(causes.split(", ")) == counting.causes


def test_the_page_on_scoring_shows_no_kind_that_is_not_in_the_table():
    shown = {line.split("`")[1] for line in PAGE.splitlines() if line.startswith("| `") and line.count("|") == 5}
    assert shown == set(ANSWER_RULES)


@pytest.mark.parametrize("unit", DELTA_MIN)
def test_the_page_on_scoring_shows_the_least_effects(unit):
    assert float(cells_of(unit)[0]) == DELTA_MIN[unit]


@pytest.mark.parametrize(
    ("detector", "cause", "paged", "party"),
    [
        ("telemetry", "pdu:p1", False, "POWER"),
        ("telemetry", "node:n1", True, "NODE"),
        ("telemetry", "node:n1", False, "TELEMETRY"),
        ("telemetry", "leaf:l1", True, "NETWORK"),
        ("telemetry", "site:all", True, "TELEMETRY"),
        ("telemetry_sensor", "gpu:n1.0", False, "TELEMETRY"),
        ("coolant", "rack:r1", True, "COOLING"),
    ],
)
def test_a_page_on_silence_is_about_what_died(detector, cause, paged, party):
    assert alert_class(detector, cause, paged) == party


@pytest.mark.parametrize("name", sorted({*BY_FAMILY, *BY_CAUSE}))
def test_the_page_on_scoring_shows_the_classes_of_alerts(name):
    wanted = {table[name] for table in (BY_FAMILY, BY_CAUSE) if name in table}
    lines = [line for line in PAGE.splitlines() if line.startswith("- says ") and f"`{name}`" in line]
    assert {line.split()[2].rstrip(":") for line in lines} == wanted
