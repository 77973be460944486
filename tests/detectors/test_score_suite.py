"""`make score`: run by run, without repetition, complete results or none, and a page that names its data."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from agents.sim.kinds import KINDS
from benchmarks.detection import goals, results, suite
from benchmarks.detection.fingerprint import fingerprint
from benchmarks.detection.page import Beside, page
from benchmarks.detection.scenarios import (
    FIRST_REPORTED,
    NAMES_OF_SCALES,
    REPORT,
    TRAIN,
    Run,
    expected,
    is_fault,
    kinds_of,
    numbers,
    planned,
)
from benchmarks.detection.suite import Segment, segments, work

WORLD = numbers(TRAIN, 1)[0]
TINY = (Run("clean", "all", 4, 1 / 32, WORLD), Run("raised", "device", 4, 1 / 16, WORLD))
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
    assert line.startswith(f"1 of 1: clean-all-4x0.03125-{WORLD}: 0 node-days, ")
    assert line.endswith("0 of 0 node-days, about 0 min left")


def test_results_of_other_code_are_named_and_do_not_count(tmp_path):
    every = [Segment(TINY[0], seed, tmp_path, f"key{seed}", "now") for seed in (1,)]
    assert suite.describe_missing(every, every).startswith("1 of 1 runs are missing")
    said = {"key": "of another", "code": "d1932239", "findings": [], "incidents": [], "truth": [], "placed": []}
    results.write(every[0].file, said)
    assert every[0].result() is None
    assert suite.describe_missing(every, every).endswith("do not count: 1 of d1932239")
    results.write(every[0].file, {k: v for k, v in said.items() if k != "code"})
    assert suite.describe_missing(every, every).endswith("do not count: 1 of unknown code")
    assert [p.name for p in tmp_path.iterdir()] == [every[0].file.name]


def test_the_fingerprint_covers_the_code_that_affects_findings_and_no_word_about_it(tmp_path):
    sources = {
        "benchmarks/detection/judge.py": "from detectors import link\nfrom pipeline.model import used\n",
        "detectors/link.py": '"""Finds links."""\na = 1\n',
        "detectors/scoring/score.py": "a = 1\n",
        "pipeline/model/used.py": "import pipeline.model.deeper\n",
        "pipeline/model/deeper.py": "a = 1\n",
        "pipeline/api/server.py": "a = 1\n",
    }
    for name, source in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    first = fingerprint(tmp_path)
    (tmp_path / "detectors/scoring/score.py").write_text("a = 2\n")
    (tmp_path / "pipeline/api/server.py").write_text("a = 2\n")
    (tmp_path / "detectors/link.py").write_text('"""Other words."""\n\na = 1  # and more\n')
    assert fingerprint(tmp_path) == first
    (tmp_path / "pipeline/model/deeper.py").write_text("a = '# no comment'\n")
    second = fingerprint(tmp_path)
    (tmp_path / "pipeline/model/deeper.py").write_text("a = '# another text'\n")
    assert len({first, second, fingerprint(tmp_path)}) == 3


@pytest.mark.slow
def test_the_page_states_that_its_data_is_simulated_and_how_much_there_is(done):
    lines = [(s.run, s.seed, s.result()) for s in done]
    text = page("small", "0123456789abcdef", lines, 9)
    assert "**All of this is simulated.**" in text
    days = sum(run.node_days for run in TINY)
    assert f"It stands on {days:.3g} node-days of 8-GPU nodes: 2 of 9 runs" in text
    assert "reduced version" in text
    assert "fingerprint `0123456789abcdef`" in text
    for quantity, *_ in goals.GOALS:
        assert f"| {quantity} |" in text
    assert goals.UNMEASURED in text
    assert page("small", "0123456789abcdef", lines, 9) == text


def test_the_page_can_be_written_when_only_clean_runs_are_finished(done):
    text = page("certified", "0123456789abcdef", [(done[0].run, 10, done[0].result())], 9)
    assert "reduced version" not in text
    assert text.count(goals.UNMEASURED) >= len(goals.GOALS) - 4


def test_a_score_from_a_result_is_that_of_its_run(done):
    found = results.scored(done[1].result())
    assert found["node_days"] == pytest.approx(TINY[1].node_days)
    assert found["cpu_s_per_million_samples"] > 0


@pytest.mark.parametrize("scale", NAMES_OF_SCALES)
def test_every_scale_has_all_suites_and_every_kind_of_fault(scale):
    runs = [run for run, _ in planned(scale)]
    assert {run.suite for run in runs} == {"clean", "raised", "hookless"}
    affected = {kind.name for run in runs if run.suite == "raised" for kind in kinds_of(run.name)}
    assert affected == {name for name, kind in KINDS.items() if is_fault(kind)}


def halves(runs):
    return {run.structure().half for run in runs}


def test_a_certification_has_20_unseen_worlds_of_1000_clean_node_days_and_enough_faults_of_each_kind():
    runs = [run for run, _ in planned("certified") if run.structure().half == REPORT]
    clean = {run.world: run.node_days for run in runs if run.suite == "clean"}
    assert len(clean) >= 20
    assert min(clean.values()) >= 1000
    for kind in KINDS.values():
        if is_fault(kind):
            mine = [run for run in runs if run.suite == "raised" and kind in kinds_of(run.name)]
            assert expected(kind) * len(mine) >= 60, kind.name


def test_a_certification_begins_with_clean_and_raised_runs_of_unseen_worlds_one_world_after_the_other():
    runs = [run for run, _ in planned("certified")]
    worlds, suites = numbers(REPORT, 20, FIRST_REPORTED), [run.suite for run in runs]
    begun = runs[: suites.index("hookless")]
    assert list(dict.fromkeys(run.world for run in begun)) == worlds
    assert all(len({run.suite for run in begun if run.world == world}) == 2 for world in worlds)
    unseen = [run.structure().half == REPORT for run in runs]
    assert unseen == sorted(unseen, reverse=True)


def test_work_on_detectors_reads_training_structures_only():
    for scale in ("training", "small"):
        assert halves(run for run, _ in planned(scale)) == {TRAIN}


def test_the_next_certification_skips_worlds_that_were_reported():
    first = {run.world for run, _ in planned("certified", 0) if run.structure().half == REPORT}
    assert first.isdisjoint(run.world for run, _ in planned("certified", 20) if run.structure().half == REPORT)


def test_segments_have_unique_names_and_keys(tmp_path):
    todo = segments("training", tmp_path, "code")
    assert len({s.file for s in todo}) == len({s.key for s in todo}) == len(todo)


def test_results_of_another_world_do_not_count():
    one, other = (Run("clean", "all", 4, 0.03, world) for world in numbers(TRAIN, 2))
    assert results.key_of(one.scenario(), 10, "code") != results.key_of(other.scenario(), 10, "code")


def test_the_page_shows_the_measured_value_of_each_part(done):
    lines = [(s.run, s.seed, s.result()) for s in done]
    assert "## What each part" not in page("small", "0123", lines, 9)
    text = page("small", "0123", lines, 9, Beside(ablations="Seeds 0.\n\n| whole | 512 |\n"))
    assert text.rstrip().endswith("| whole | 512 |")
    assert "## What each part of the method is worth" in text
