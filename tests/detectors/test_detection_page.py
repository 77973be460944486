"""The page of figures, from hand-made results with known cells: each figure is computed from the named runs."""

from __future__ import annotations

import functools
import re

import pytest

from benchmarks.detection import goals, sdc_replica, trials
from benchmarks.detection.page import page
from benchmarks.detection.results import scored
from benchmarks.detection.scenarios import REPORT, TRAIN, Run, numbers
from benchmarks.detection.trials import STANDS_ON, TRIALS, TRIED, read, write
from pipeline.model.records import SECOND, from_iso, iso

START = from_iso("2026-01-01T00:00:00Z")
UNSEEN = numbers(REPORT, 2)
META = {"nodes": 1000, "gpus": 8000, "start": iso(START), "cpu_seconds": 1.0, "samples": 1e6}
PARENTS = {f"gpu:n{n}.0": [f"node:n{n}"] for n in range(40)} | {f"node:n{n}": [] for n in range(40)}


def time_at(seconds):
    return iso(START + round(seconds * SECOND))


def line(number, kind, onset, length, entity=None, detectability="soft", **parameters):
    detectable = {"detectable": time_at(onset + parameters.pop("seen"))} if "seen" in parameters else {}
    return {
        "id": f"fault-{number}",
        "kind": kind,
        "entity": entity or f"gpu:n{number}.0",
        "onset": time_at(onset),
        "end": time_at(onset + length),
        "class": detectability,
        "parameters": {"attribution": "gpu", **parameters, **detectable},
    }


def alert(entity, moment, detector="straggler", level="page"):
    """A finding and the incident that it opens."""
    finding = {
        "time": time_at(moment),
        "onset": time_at(moment),
        "entity": entity,
        "detector": detector,
        "level": level,
    }
    expected = {"opened": time_at(moment), "severity": level, "detector": detector, "entity": entity, "cause": entity}
    more = {"candidates": [entity], "members": [entity], "resolved": None, "summary": "", "conditions": []}
    return finding, {"id": f"{entity} {moment}", **expected, **more}


def result(truth=(), alerts=(), days=1.0, placed=(), world=UNSEEN[0], half=REPORT):
    """The result of a run of 1,000 nodes."""
    about = {"number": world, "half": half, "text": "air, RoCE"}
    findings, incidents = [f for f, _ in alerts], [i for _, i in alerts]
    meta = {**META, "end": time_at(86_400 * days), "world": about}
    message = {"findings": findings, "incidents": incidents, "truth": list(truth), "placed": list(placed)}
    return {
        "key": "",
        "node_days": 1000 * days,
        "samples": 1,
        "seconds": {},
        "meta": meta,
        "parents": PARENTS,
        **message,
    }


def run(suite, world=UNSEEN[0]):
    return (Run(suite, "all", 1000, 1.0, world), 10)


def seen_of(truth, alerts):
    found = scored(result(truth, alerts))
    return goals.Seen(None, found, list(zip(truth, found["records"]["events"], strict=True)))


def cells(text, begins):
    """Cells of the table lines with this beginning."""
    return [
        tuple(cell.strip() for cell in row.strip("|").split(" | "))
        for row in text.splitlines()
        if row.startswith(f"| {begins} |")
    ]


TWO = [line(n, "straggler", 10_000, 5000, effect=0.25, effect_unit="time") for n in (1, 2)]
RAISED = result(TWO, [alert("gpu:n1.0", 10_100), *(alert(f"gpu:n{n}.0", 40_000) for n in (7, 8, 9))])
CLEAN = result((), [alert("gpu:n5.0", 30_000)], days=2.0)
LINES = [(*run("clean"), CLEAN), (*run("raised"), RAISED)]


def test_field_precision_uses_recall_of_raised_runs_and_false_pages_of_clean_runs():
    """1 of 2 found; 1 page in 2,000 clean node-days: 6.5 x 0.5 / (6.5 x 0.5 + 0.5)."""
    text = page("full", "0123456789abcdef", LINES, 3)
    ((_, _, _, _, mixed),) = cells(text, "Faulty node, mixed faults")
    p, q = 3.25 / 3.75, 1.17 / 1.67
    at_high, at_low = f"P {p:.3f}, F1 {p / (p + 0.5):.3f} at 6.5", f"P {q:.3f}, F1 {q / (q + 0.5):.3f} at 2.34"
    assert mixed == f"R 0.500; {at_high}; {at_low} faults per 1,000 node-days"
    assert [row[1] for row in cells(text, "6.5")] == [f"{p:.3f}"]
    assert [row[1] for row in cells(text, "2.34")] == [f"{q:.3f}"]


def test_each_suite_has_its_own_false_pages_and_the_goal_uses_those_of_the_clean_suite():
    text = page("full", "0123456789abcdef", LINES, 3)
    rows = {suite: cells(section_of(text, "False pages"), suite) for suite in ("clean", "raised")}
    assert {suite: found[0][3] for suite, found in rows.items()} == {"clean": "1", "raised": "3"}
    ((*_, pages),) = cells(text, "False pages, all families")
    assert pages.startswith("0.50 (")


def test_without_a_clean_run_there_is_no_precision_in_the_field():
    text = page("full", "0123456789abcdef", LINES[1:], 3)
    assert cells(text, "Faulty node, mixed faults")[0][-1] == goals.UNMEASURED
    assert not cells(text, "6.5")


def test_a_score_counts_the_incidents_of_its_result():
    found = scored(RAISED)
    assert (found["incidents"], found["found"], found["false"]) == (4, 1, 3)
    assert scored({**RAISED, "incidents": []})["incidents"] == 0


def test_an_alert_on_a_moved_rank_is_scored_by_its_location_at_that_time():
    affected = line(1, "straggler", 10_000, 5000, "gpu:n1.0", effect=0.25, effect_unit="time")
    message = [alert("rank:81.0", 10_100)]
    places = [(0, "gpu:n2.0"), (9000, "gpu:n1.0"), (12_000, "gpu:n3.0")]
    placed = [
        {
            "time": time_at(moment),
            "entity": "job:81",
            "kind": "job_start",
            "data": {"ranks": {"rank:81.0": {"gpu": gpu, "stage": "stage:81.0"}}},
        }
        for moment, gpu in places
    ]
    assert scored(result([affected], message, placed=placed))["found"] == 1
    assert scored(result([affected], message, placed=placed[:1]))["found"] == 0


def test_an_answer_after_the_time_of_the_goal_does_not_count():
    slow = [line(n, "straggler", 10_000, 60_000, effect=0.05, effect_unit="time") for n in (1, 2)]
    seen = seen_of(slow, [alert("gpu:n1.0", 10_600), alert("gpu:n2.0", 40_000)])
    measured = {row[0]: row[-1] for row in goals.rows(seen)}
    assert measured["Fail-slow 5 %"] == "R 0.500 (1 of 2) within 1,800 s; median 600 s"


@pytest.mark.parametrize(
    ("effect", "length", "expected"),
    [(0.25, 1300, "R 1.000 (1 of 1)"), (0.25, 1100, goals.UNMEASURED), (0.09, 1300, goals.UNMEASURED)],
)
def test_fail_slow_counts_faults_that_are_large_and_last(effect, length, expected):
    seen = seen_of(
        [line(1, "straggler", 10_000, length, effect=effect, effect_unit="time")], [alert("gpu:n1.0", 10_100)]
    )
    measured = {row[0]: row[-1] for row in goals.rows(seen)}
    assert measured["Fail-slow >= 10 % lasting >= 20 min"].startswith(expected)


@pytest.mark.parametrize(
    ("moment", "slope", "expected"),
    [
        (36_400, 1.0, "R 1.000 (1 of 1 that came to the cliff, 24 h ahead of it); ticket P 1.000 (0 false)"),
        (36_500, 1.0, "R 0.000 (0 of 1"),
        (None, 1.0, "R 0.000 (0 of 1"),
        (10_000, 0.1, goals.UNMEASURED),  # no cliff within the recording
    ],
)
def test_an_optic_counts_if_its_ticket_is_a_day_before_its_failure(moment, slope, expected):
    """From 1e-5 at an hour, a decade a day: 2.4e-4 after 1.38 days and an hour more, 122,832 s."""
    port, length = "port:n1.mlx5_0", 160_000
    affected = line(1, "optic_degradation", 0, length, port, slope=slope, start=-5.0, seen=2250)
    message = [] if moment is None else [alert(port, moment, "link_optic", "ticket")]
    seen = seen_of([affected], message)
    assert {row[0]: row[-1] for row in goals.rows(seen)}["Optic precursor"].startswith(expected)


@pytest.mark.parametrize(
    ("rise", "moment", "expected"),
    [
        (0.30, 43_700, "R 1.000 (1 of 1"),  # due: half a day, 43,200 s, and 10 min
        (0.30, 43_900, "R 0.000 (0 of 1"),
        (0.14, 45_000, goals.UNMEASURED),
        (0.151, 45_000, goals.UNMEASURED),  # it was reached only at the end
    ],
)
def test_the_delay_of_a_cold_plate_counts_from_the_resistance_of_the_goal(rise, moment, expected):
    affected = line(1, "cold_plate", 0, 86_000, seen=20_000, rise=rise, days=1.0, effect=rise, effect_unit="resistance")
    seen = seen_of([affected], [alert("gpu:n1.0", moment, "thermal", "ticket")])
    measured = {row[0]: row[-1] for row in goals.rows(seen)}["R_th +15 % on one GPU"]
    assert measured.split("; slow wear: ")[1].startswith(expected)


def test_results_of_trials_are_in_the_table_of_goals():
    none = {row[0]: row[-1] for row in goals.rows(goals.Seen(None, None, []))}
    expected = {name: f"measured {name}" for name in TRIALS}
    some = {row[0]: row[-1] for row in goals.rows(goals.Seen(None, None, [], expected))}
    assert none["SDC with replica hooks"] == goals.UNMEASURED
    shown = " ".join(some.values())
    # false alarms of healthy links are counted besides those of the clean runs, here none
    assert [name for name in TRIALS if f"measured {name}" not in shown] == ["link_alarms"]


def test_tickets_of_other_detectors_do_not_count_for_the_precision_of_link_optic():
    port = "port:n1.mlx5_0"
    affected = line(1, "optic_degradation", 0, 160_000, port, slope=1.0, start=-5.0, seen=2250)
    wrong = alert("port:n2.mlx5_0", 50_000, "link_optic", "ticket")
    for detector, expected in (("link", "0.000 (1 false)"), ("link_optic", "0.500 (1 false)")):
        seen = seen_of([affected], [alert(port, 30_000, detector, "ticket"), wrong])
        assert {row[0]: row[-1] for row in goals.rows(seen)}["Optic precursor"].endswith(f"ticket P {expected}")


def test_bit_exact_figures_count_wrong_digests_and_pages_of_all_sdc_detectors():
    soft = [line(n, "sdc", 10_000, 50_000, effect_unit=None) for n in (1, 2)]
    hard = line(3, "sdc", 10_000, 50_000, detectability="hard")
    message = [alert("gpu:n1.0", 10_100, "sdc_gradient", "ticket"), alert("gpu:n2.0", 10_100, "sdc", "ticket")]
    raised = result([*soft, hard], message)
    clean = result((), [alert("gpu:n5.0", 30_000, "sdc_replica"), alert("gpu:n6.0", 30_000, "sdc")])
    text = page("full", "0123456789abcdef", [(*run("clean"), clean), (*run("raised"), raised)], 2)
    (goal,) = cells(text, "SDC, bit-exact mismatch")
    assert goal[-1] == "0 of 1 GPUs with wrong digests, 2 false pages in the clean runs"
    by_kind = section_of(text, "By kind of fault")
    assert [row[1:3] for row in cells(by_kind, "sdc (thin)")] == [("page", "0 / 1")]
    assert [row[1:3] for row in cells(by_kind, "sdc (soft) (thin)")] == [("ticket", "2 / 2")]
    assert "the simulator's own choice" in by_kind
    assert "the simulator's own choice" not in page("full", "0123456789abcdef", LINES, 3)


@pytest.fixture
def one_fingerprint(monkeypatch):
    """Computed once: it reads the source of 150 files."""
    monkeypatch.setattr(trials, "fingerprint", functools.cache(trials.fingerprint))


@pytest.mark.slow
@pytest.mark.usefixtures("one_fingerprint")
def test_lines_of_trials_show_their_size_and_whether_their_code_is_older(tmp_path):
    write(tmp_path, "resistance", "R 1.000", 1.0)
    write(tmp_path, "link_errors", "R 0.900", 1.0)
    now = trials.fingerprint()
    assert read(tmp_path, now)["resistance"] == f"R 1.000 (N: {STANDS_ON['resistance']})"
    assert read(tmp_path, "before")["link_errors"].endswith(", measured with other code)")
    assert STANDS_ON.keys() == TRIALS.keys()


def test_small_trials_are_never_on_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr(trials, "fingerprint", lambda: "0123456789abcdef")
    assert write(tmp_path, "resistance", "R 1.000", 0.5).name == TRIED
    assert read(tmp_path, "0123456789abcdef") == {}


def test_trials_of_full_size_use_seeds_that_smaller_ones_never_use(monkeypatch):
    seeds = []
    monkeypatch.setattr(
        sdc_replica, "trial", lambda kind, seed, number: seeds.append(seed) or sdc_replica.Outcome(1, 1, 0)
    )
    TRIALS["replica_digests"](1.0)
    assert set(seeds) == {trials.REPORTED_SEEDS[0]}
    TRIALS["replica_digests"](0.1)
    assert set(seeds) == {trials.REPORTED_SEEDS[0], trials.TUNING_SEEDS[0]}


@pytest.mark.parametrize(
    ("flow", "after", "expected"),
    [(0.9, 20, "R 1.000 (1 of 1) within 30 s; median 20 s"), (0.9, 40, "R 0.000 (0 of 1)"), (0.05, 20, "not yet")],
)
def test_a_pump_loss_counts_if_it_is_large_and_reported_in_time(flow, after, expected):
    affected = line(1, "coolant", 10_000, 5000, "cdu:c1", effect=flow, effect_unit="flow")
    seen = seen_of([affected], [alert("cdu:c1", 10_000 + after, "coolant")])
    assert {row[0]: row[-1] for row in goals.rows(seen)}["Coolant pump loss"].startswith(expected)


def section_of(text, name):
    return re.search(rf"## {name}\n(.*?)(?=\n## |\Z)", text, re.DOTALL)[1]


def certified(lines):
    """Figure -> its cells in the section of the certification."""
    text = section_of(page("certified", "0123", lines, len(lines)), "Certification: worlds that no detector has seen")
    rows = (
        tuple(cell.strip() for cell in row.strip("|").split(" | ")) for row in text.splitlines() if row.startswith("|")
    )
    return {row[0]: row for row in rows}


def test_false_pages_are_shown_as_the_mean_of_the_worlds_and_as_the_worst_of_them():
    """0 and 2 pages in 1,000 node-days; Garwood's lower bound of 2 is 0.242."""
    quiet = (*run("clean", UNSEEN[1]), result(world=UNSEEN[1]))
    noisy = result((), [alert("gpu:n5.0", 30_000), alert("gpu:n6.0", 60_000)])
    found = certified([(*run("clean"), noisy), quiet])
    assert found["false pages per 1,000 node-days, mean of the worlds"][1:] == ("0.3", "1.0", "1.00 (median 1.00)")
    assert found["false pages, worst world (95 % lower bound)"][-1] == "0.24"
    assert found["clean node-days, worlds"][-1] == "2,000 in 2"
    assert [found[str(world)][4] for world in UNSEEN] == ["2.00 (0.24 to 7.22)", "0.00 (0.00 to 3.69)"]


def test_a_page_of_a_part_of_the_runs_says_so():
    unfinished = "**Unfinished**: the other runs are in no figure below"
    assert unfinished in page("certified", "0123", LINES, len(LINES) + 1)
    assert unfinished not in page("certified", "0123", LINES, len(LINES))


def test_training_structures_have_their_own_column_and_are_in_no_other_figure():
    (known,) = numbers(TRAIN, 1)
    bad = result((), [alert(f"gpu:n{n}.0", 30_000) for n in range(9)], world=known, half=TRAIN)
    with_it = [*LINES, (*run("clean", known), bad)]
    found = certified(with_it)
    assert found["false pages per 1,000 node-days, mean of the worlds"][3:] == (
        "0.50 (median 0.50)",
        "9.00 (median 9.00)",
    )
    first, second = page("certified", "0123", with_it, 3), page("certified", "0123", LINES, 3)
    for section in ("Goals", "By kind of fault", "By severity", "Attribution", "By harmless event"):
        assert section_of(first, section) == section_of(second, section)


def test_slow_ranks_without_the_hook_are_counted_in_their_suite_alone():
    slow = [line(1, "straggler", 10_000, 5000, effect=0.25, effect_unit="time")]
    small = [line(2, "straggler", 10_000, 5000, effect=0.05, effect_unit="time")]
    name = "slow ranks of 10 % and more without the hook"
    assert certified(LINES)[name][-1] == goals.UNMEASURED
    hookless = result([*slow, *small], [alert("gpu:n1.0", 10_100)])
    found = certified([*LINES, (*run("hookless"), hookless)])
    assert found[name][-1] == "R 1.000 (1 of 1); median 100 s"
    assert found["faults"] == certified(LINES)["faults"]


def test_kinds_with_too_few_faults_are_named():
    assert certified(LINES)["faults"][-1] == "2; fewer than 30 of straggler"


@pytest.mark.parametrize(("after", "start", "end"), [(250, "1.000", "1.000"), (310, "0.000", "1.000")])
def test_flaps_are_scored_by_pages_soon_after_the_third_flap(after, start, end):
    affected = line(1, "link_flap", 10_000, 300, "port:n1.0", "hard", effect=3, effect_unit="flaps", flaps=3)
    seen = seen_of([affected], [alert("port:n1.0", 10_000 + after, "link")])
    expected = {row[0]: row[-1] for row in goals.rows(seen)}["Flap page"]
    assert f"R {start} ({'1' if start == '1.000' else '0'} of 1 within 60 s of the start" in expected
    assert f"R {end} ({'1' if end == '1.000' else '0'} of 1 within 60 s of the end" in expected


def test_fail_slow_shows_recall_with_precision_and_the_share_in_time():
    truth = [line(n, "straggler", 10_000, 5000, effect=0.25, effect_unit="time") for n in (1, 2)]
    expected = [alert("gpu:n1.0", 10_300), alert("gpu:n2.0", 12_000), alert("gpu:n7.0", 40_000)]
    measured = {row[0]: row[-1] for row in goals.rows(seen_of(truth, expected))}["Fail-slow >= 10 % lasting >= 20 min"]
    assert measured == "R 1.000 (2 of 2); median 1,150 s; 0.500 within 1,020 s; P 0.667 (1 false)"
