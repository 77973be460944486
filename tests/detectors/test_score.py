"""The scorer: what answers an event, what is false, and intervals against tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from detectors.intervals import poisson, wilson
from detectors.score import COLUMNS, COUNTS, Alert, Truth, figures, rows, score, summary
from pipeline.errors import UsageError
from pipeline.records import SECOND, iso
from pipeline.topology import Topology

T0 = 1_790_000_000 * SECOND
TOPOLOGY = Topology(
    {
        "rank:7.0": ["stage:7.0", "job:7", "gpu:n0.0"],
        "gpu:n0.0": ["node:n0"],
        "gpu:n0.1": ["node:n0"],
        "port:n0.p0": ["node:n0", "leaf:l0"],
        "node:n0": ["rack:r1"],
        "rack:r1": ["cdu:c0"],
    }
)


def at(seconds):
    return T0 + int(seconds * SECOND)


def event(kind, entity, onset=0.0, end=600.0, cls="hard", name=""):
    return Truth(name or f"{kind}-{entity}-{onset}", kind, (entity,), at(onset), at(end), cls, at(onset))


def alert(cause, detector, *seconds, suspects=()):
    return Alert(tuple(map(at, seconds)), cause, detector, (cause, *suspects))


def scored(events, alerts, days=10.0):
    return figures(events, alerts, TOPOLOGY, days)


@pytest.mark.parametrize(
    ("kind", "root", "cause", "detector", "answers"),
    [
        ("straggler", "gpu:n0.0", "gpu:n0.0", "straggler", True),
        ("straggler", "gpu:n0.0", "rank:7.0", "straggler", True),
        ("straggler", "gpu:n0.0", "node:n0", "straggler", True),
        ("straggler", "gpu:n0.0", "rack:r1", "straggler", False),
        ("straggler", "gpu:n0.1", "rank:7.0", "straggler", False),
        ("straggler", "gpu:n0.0", "gpu:n0.0", "sdc", False),
        ("sdc", "gpu:n0.0", "gpu:n0.0", "sdc", True),
        ("sdc", "gpu:n0.0", "gpu:n0.1", "sdc", False),
        ("link_degradation", "port:n0.p0", "leaf:l0", "link", True),
        ("coolant", "cdu:c0", "cdu:c0", "straggler", True),
        ("coolant", "cdu:c0", "rank:7.0", "straggler", False),
        ("unheard of", "gpu:n0.0", "rack:r1", "anything", True),
    ],
)
def test_detector_and_cause_must_count_for_the_kind(kind, root, cause, detector, answers):
    result = scored([event(kind, root)], [alert(cause, detector, 60)])
    assert (result["found"], result["false"]) == ((1, 0) if answers else (0, 1))


@pytest.mark.parametrize(("seconds", "found"), [(-61, 0), (-60, 1), (0, 1), (1200, 1), (1201, 0)])
def test_a_page_counts_from_a_minute_before_the_onset_to_ten_minutes_after_the_end(seconds, found):
    assert scored([event("sdc", "gpu:n0.0")], [alert("gpu:n0.0", "sdc", seconds)])["found"] == found


def test_a_second_incident_for_the_same_event_is_a_duplicate_and_false():
    result = scored([event("sdc", "gpu:n0.0")], [alert("gpu:n0.0", "sdc", 60), alert("node:n0", "sdc", 70)])
    assert (result["found"], result["duplicates"], result["false"], result["precision"]) == (1, 1, 1, 0.5)


def test_an_incident_that_pages_again_may_answer_another_event():
    events = [event("sdc", "gpu:n0.0", 0, 600), event("sdc", "gpu:n0.0", 5000, 5600)]
    assert scored(events, [alert("gpu:n0.0", "sdc", 60)])["found"] == 1
    result = scored(events, [alert("gpu:n0.0", "sdc", 60, 5060)])
    assert (result["found"], result["false"], result["precision"]) == (2, 0, 1.0)


def test_a_page_within_a_benign_event_is_false_and_benign_events_are_not_looked_for():
    result = scored([event("sdc", "gpu:n0.0", cls="benign")], [alert("gpu:n0.0", "sdc", 60)])
    assert (result["events"], result["false"], result["not_counted"]) == (0, 1, {"benign": 1})
    assert result["recall"] is None


def test_delays_count_from_the_onset_and_end_with_the_event():
    events = [event("sdc", f"gpu:n0.{i}", 0, 600, name=str(i)) for i in (0, 1)]
    result = scored(events, [alert("gpu:n0.0", "sdc", 100), alert("gpu:n0.1", "sdc", 900)])
    assert (result["delay_median_s"], result["delay_p90_s"]) == (350.0, 600.0)


def test_localisation_is_exact_or_among_the_first_three():
    events = [event("straggler", "gpu:n0.0")]
    result = scored(events, [alert("node:n0", "straggler", 60, suspects=("gpu:n0.1", "rank:7.0"))])
    assert (result["top1"], result["top3"]) == (0.0, 1.0)


def test_false_pages_are_told_per_thousand_node_days_with_their_interval():
    rate = scored([], [alert("gpu:n0.0", "sdc", 60)], 500.0)["false_pages_per_1000_node_days"]
    assert rate["value"] == 2.0
    assert (rate["low"], rate["high"]) == pytest.approx((0.0506, 11.143), abs=1e-3)


def test_every_simulated_kind_of_fault_has_its_line_in_the_table():
    from agents.sim.faults import KINDS

    wanted = {name for name, kind in KINDS.items() if kind.detectability in ("hard", "soft")}
    assert wanted <= COUNTS.keys()


@pytest.mark.parametrize(
    ("count", "low", "high"), [(0, 0.0, 3.689), (1, 0.0253, 5.572), (3, 0.619, 8.767), (10, 4.795, 18.390)]
)
def test_poisson_intervals_are_those_of_the_tables(count, low, high):
    assert poisson(count) == pytest.approx((low, high), abs=1e-3)


def test_wilson_intervals_are_those_of_the_tables():
    assert wilson(9, 10) == pytest.approx((0.5958, 0.9821), abs=1e-4)
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(0, 0) is None


@pytest.fixture
def files(tmp_path):
    """One straggler, found; one page about nothing."""
    finding = {"onset": iso(at(10)), "detector": "straggler", "level": "page"}
    told = [
        {**finding, "time": iso(at(60)), "entity": "rank:7.0"},
        {**finding, "time": iso(at(120)), "entity": "rank:7.0"},
        {**finding, "time": iso(at(9000)), "entity": "rank:9.9"},
    ]
    cases = [
        {"id": "a", "cause": "gpu:n0.0", "opened": iso(at(50)), "resolved": iso(at(2000)), "members": ["rank:7.0"]},
        {"id": "b", "cause": "gpu:n9.9", "opened": iso(at(9000)), "resolved": None, "members": ["rank:9.9"]},
        {"id": "c", "cause": "gpu:n8.8", "opened": iso(at(9000)), "resolved": None, "members": [], "severity": "watch"},
    ]
    cases = [{"severity": "page", "detector": "straggler", "entity": c["cause"], **c} for c in cases]
    fault = {
        "id": "1",
        "kind": "straggler",
        "entity": "gpu:n0.0",
        "onset": iso(at(0)),
        "end": iso(at(600)),
        "class": "soft",
    }
    texts = {"findings": told, "incidents": cases, "truth": [fault]}
    for name, lines in texts.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "meta.json").write_text(json.dumps({"nodes": 10, "start": iso(T0), "end": iso(at(86_400))}))
    parents = '[rank]\n"7.0" = ["stage:7.0", "job:7", "gpu:n0.0"]\n[gpu]\n"n0.0" = ["node:n0"]\n'
    (tmp_path / "topology.toml").write_text("version = 1\n" + parents)
    return {n: tmp_path / f for n, f in (("topology", "topology.toml"), ("meta", "meta.json"))} | {
        n: tmp_path / f"{n}.jsonl" for n in texts
    }


def test_files_are_scored_by_incident_and_written_as_json(files, tmp_path):
    result = score(**files, json_file=tmp_path / "s.json")
    assert (result["found"], result["false"], result["alerts"], result["node_days"]) == (1, 1, 2, 10.0)
    assert result["delay_median_s"] == 60.0
    assert json.loads((tmp_path / "s.json").read_text())["kinds"]["straggler"]["recall"] == 1.0


def test_without_incidents_each_condition_is_an_alert(files):
    result = score(files["findings"], files["truth"], topology=files["topology"])
    assert (result["alerts"], result["found"], result["node_days"]) == (2, 1, None)


def test_the_table_has_a_row_per_kind_and_one_for_all(files):
    result = score(**files)
    table = list(rows(result))
    assert [row["kind"] for row in table] == ["straggler", "all"]
    assert all(set(row) == set(COLUMNS) for row in table)
    assert "1 false of 2 pages" in summary(result)


@pytest.mark.parametrize(
    ("name", "line", "wanted"),
    [
        ("findings", "{", "line 4"),
        ("findings", '{"time": "soon"}', "line 4"),
        ("truth", '{"id": "x"}', "line 2: kind, entity, onset, end missing"),
        ("incidents", "[]", "line 4"),
    ],
)
def test_a_bad_line_is_named(files, name, line, wanted):
    with files[name].open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UsageError, match=wanted):
        score(**files)


def test_a_meta_file_without_nodes_is_named(files):
    files["meta"].write_text("{}")
    with pytest.raises(UsageError, match=r"meta\.json.*nodes"):
        score(**files)


def test_the_page_on_scoring_shows_the_table():
    page = (Path(__file__).parents[2] / "docs/scoring.md").read_text()
    for kind, counting in COUNTS.items():
        line = next(text for text in page.splitlines() if text.startswith(f"| `{kind}` |"))
        told = [set(cell.strip().split(", ")) for cell in line.strip("|").split("|")[1:]]
        assert told == [set(counting.detectors), set(counting.causes)]
