"""`make score`: run by run, without repetition, complete results or none, and a page that names its data."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from agents.sim.kinds import KINDS
from benchmarks.detection import goals, results, suite
from benchmarks.detection.page import Beside, page
from benchmarks.detection.scenarios import HELD_OUT, PER_RUN, SCALES, TUNE, Run, is_fault, kinds_of, planned
from benchmarks.detection.suite import Segment, segments, work

TINY = (Run("clean", "all", 4, 0.03), Run("raised", "device", 4, 0.05))
LATER = float("inf")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Both runs of a tiny scale, evaluated."""
    folder = tmp_path_factory.mktemp("score")
    todo = [Segment(run, 10, folder, results.key_of(run.scenario(), 10, "code")) for run in TINY]
    assert all(work(segment, LATER) for segment in todo)
    return todo


@pytest.mark.slow
def test_a_finished_run_is_reused_and_one_of_other_code_is_not(done):
    assert all(segment.result() for segment in done)
    other = replace(done[0], key=results.key_of(TINY[0].scenario(), 10, "other code"))
    assert other.result() is None


@pytest.mark.slow
def test_an_incomplete_result_does_not_count(done, tmp_path):
    torn = tmp_path / done[0].file.name
    torn.write_bytes(done[0].file.read_bytes()[:-20])
    assert replace(done[0], folder=tmp_path).result() is None


@pytest.mark.slow
def test_a_run_stopped_by_the_time_limit_continues_later_to_the_same_result(done, tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "CHECKPOINT_H", 0.4)
    segment = replace(done[1], folder=tmp_path)
    stale = tmp_path / f"{segment.name}-0123456789abcdef.checkpoint"
    stale.touch()
    assert work(segment, 0.0) is False
    assert segment.checkpoint.exists()
    assert not stale.exists(), "a checkpoint of other code is of no use"
    assert segment.result() is None
    assert work(segment, LATER) is True
    assert [p.name for p in tmp_path.iterdir()] == [segment.file.name]
    untimed = [{k: v for k, v in s.result().items() if k not in ("seconds", "meta")} for s in (segment, done[1])]
    assert untimed[0] == untimed[1]


@pytest.mark.slow
def test_each_finished_run_is_logged_with_its_rate_and_the_remaining_time(tmp_path):
    log_lines = []
    todo = [Segment(TINY[0], 10, tmp_path, "key")]
    suite.run(todo, 1, time.time() + 600, log_lines.append)
    (line,) = log_lines
    assert line.startswith("1 of 1: clean-all-4x0.03-10: 0 node-days, ")
    assert line.endswith("0 of 0 node-days, about 0 min left")


def test_the_fingerprint_covers_exactly_the_code_that_affects_findings(tmp_path):
    for name in ("agents/sim/fleet.py", "detectors/link.py", "detectors/scoring/score.py", "pipeline/api/server.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a = 1\n")
    first = results.fingerprint(tmp_path)
    for name in ("detectors/scoring/score.py", "pipeline/api/server.py"):
        (tmp_path / name).write_text("a = 2\n")
    assert results.fingerprint(tmp_path) == first
    (tmp_path / "detectors/link.py").write_text("a = 2\n")
    assert results.fingerprint(tmp_path) != first


def test_the_page_states_that_its_data_is_simulated_and_how_much_there_is(done):
    lines = [(s.run, s.seed, s.result()) for s in done]
    text = page("small", "0123456789abcdef", lines, 9)
    assert "**All of this is simulated.**" in text
    days = sum(run.node_days for run in TINY)
    assert f"It stands on {days:.3g} node-days of 8-GPU nodes at 10 s: 2 of 9 runs" in text
    assert "reduced version" in text
    assert "fingerprint `0123456789abcdef`" in text
    for quantity, *_ in goals.GOALS:
        assert f"| {quantity} |" in text
    assert goals.UNMEASURED in text
    assert page("small", "0123456789abcdef", lines, 9) == text


def test_the_page_can_be_written_when_only_clean_runs_are_finished(done):
    text = page("full", "0123456789abcdef", [(done[0].run, 10, done[0].result())], 9)
    assert "reduced version" not in text
    certified = page("certified", "0123456789abcdef", [(done[0].run, 10, done[0].result())], 9)
    assert "The clean runs are the whole" in certified
    assert text.count(goals.UNMEASURED) >= len(goals.GOALS) - 4


def test_a_score_from_a_result_is_that_of_its_run(done):
    found = results.scored(done[1].result())
    assert found["node_days"] == pytest.approx(TINY[1].node_days)
    assert found["cpu_s_per_million_samples"] > 0


@pytest.mark.parametrize("scale", sorted(SCALES))
def test_every_scale_has_every_suite_and_every_kind_of_fault(scale):
    runs, seeds = SCALES[scale]
    assert {run.suite for run in runs} - {"held_out"} == {"clean", "raised", "field"}
    affected = {kind.name for run in runs if run.suite == "raised" for kind in kinds_of(run.name)}
    assert affected == {name for name, kind in KINDS.items() if is_fault(kind) and kind.row not in HELD_OUT}
    assert not set(seeds) & set(TUNE), "seeds to tune on are never quoted"
    if scale == "full":
        assert PER_RUN * len(seeds) >= 2 * 60
        assert sum(run.node_days for run in runs if run.suite == "clean") * len(seeds) >= 10_000


def test_segments_are_ordered_by_seed_and_have_unique_names(tmp_path):
    todo = segments("full", tmp_path, "code")
    assert len({s.file for s in todo}) == len({s.key for s in todo}) == len(todo)
    assert [s.seed for s in todo] == sorted(s.seed for s in todo)


def test_a_certified_scale_has_all_clean_runs_and_a_part_of_the_others():
    planned_runs = planned("certified")
    clean = [run.node_days for run, _ in planned_runs if run.suite == "clean"]
    assert sum(clean) >= 10_000
    assert {run.suite for run, _ in planned_runs} >= {"clean", "raised", "field"}
    assert len(planned_runs) == len(set(planned_runs))


def test_results_of_frozen_code_count_beside_a_suite_evaluated_by_other_code(tmp_path, monkeypatch):
    held = (Run("held_out", "held_out", 8, 1.0),)
    monkeypatch.setattr(
        "benchmarks.detection.scenarios.SCALES", {"full": ((Run("clean", "all", 8, 1.0), *held), range(1))}
    )
    frozen, newer = segments("full", tmp_path, "frozen"), segments("full", tmp_path, "frozen", {"held_out": "newer"})
    assert [a.key == b.key for a, b in zip(frozen, newer, strict=True)] == [True, False]


def test_the_evaluating_code_can_be_set_for_all_suites_and_for_single_ones():
    assert suite.codes([], "now") == ("now", {})
    assert suite.codes(["clean=a", "b"], "now") == ("b", {"clean": "a"})


@pytest.mark.parametrize("given", [["a", "b"], ["clean=a", "clean=b"], ["cleen=a"], ["=a"]])
def test_code_of_an_unknown_suite_or_given_twice_is_refused_with_the_expected_form(given):
    with pytest.raises(ValueError, match=r"found '.*'; expected FINGERPRINT once, .* clean, raised, field, held_out"):
        suite.codes(given, "now")


def test_the_page_names_the_code_of_each_suite_if_they_differ(done):
    lines = [(s.run, s.seed, s.result()) for s in done]
    assert "of the clean suite" not in page("small", "0123", lines, 9)
    text = page("small", "0123", lines, 9, Beside(others={"clean": "4567"}))
    assert "fingerprint `0123` (`benchmarks.detection.results.fingerprint`), of the clean suite `4567`" in text


def test_held_out_kinds_of_a_newer_simulator_do_not_change_results_of_other_kinds(monkeypatch):
    """They do not occur in the other suites, so results of the frozen code still count."""
    run = Run("raised", "network", 8, 0.1)
    before = results.key_of(run.scenario(), 10, "code")
    row = KINDS["link_flap"].row
    new = type("ClockStuckAnew", (KINDS["gpu_off_bus"],), {"name": "clock_stuck_anew", "row": HELD_OUT[0]})
    monkeypatch.setitem(KINDS, "clock_stuck_anew", new)
    assert "clock_stuck_anew" in run.scenario().rates.kinds
    assert results.key_of(run.scenario(), 10, "code") == before
    monkeypatch.setattr("benchmarks.detection.scenarios.HELD_OUT", (*HELD_OUT, row))
    assert results.key_of(run.scenario(), 10, "code") != before, "it came, and comes no more"


def test_the_page_shows_the_measured_value_of_each_part(done):
    lines = [(s.run, s.seed, s.result()) for s in done]
    assert "## What each part" not in page("small", "0123", lines, 9)
    text = page("small", "0123", lines, 9, Beside(ablations="Seeds 0.\n\n| whole | 512 |\n"))
    assert text.rstrip().endswith("| whole | 512 |")
    assert "## What each part of the method is worth" in text
