"""Each real scheduler plays all scenes: hold, refusal, release, undo, a dead scheduler, a killed executor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline.act_labs import LABS, STEPS, Play
from tests.pipeline.api.test_api_acts import Served

pytestmark = [pytest.mark.slow]
MARKS = {
    "slurm": pytest.mark.slurm,
    "slurm24": pytest.mark.slurm,
    "slurmrestd": pytest.mark.slurm,
    "kubernetes": pytest.mark.kubernetes,
}


@pytest.fixture(params=[pytest.param(name, marks=MARKS[name]) for name in LABS])
def play(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Play]:
    (tmp_path / "lab").mkdir()
    with LABS[request.param](tmp_path / "lab") as lab:
        served = Served(tmp_path, monkeypatch)  # type: ignore[no-untyped-call]
        try:
            yield Play(lab, served, tmp_path)
        finally:
            served.close()  # type: ignore[no-untyped-call]


def test_a_real_scheduler_plays_all_scenes(play: Play) -> None:
    if play.lab.dead:  # before SlurmdTimeout: then its job goes on without it
        assert play.play_dead_node().steps[-1][0] == "verified"
    # then: a scheduler may come back with its state of seconds ago
    steps = [state for state, _, _ in play.play_dead_scheduler().steps]
    assert (steps.count("executed"), steps.count("failed")) == (1, 0)
    held, released = play.play_hold_and_release()
    assert [state for state, _, _ in held.steps] == ["proposed", "awaiting_approval", "approved", *STEPS[1:]]
    assert [state for state, _, _ in released.steps][-1] == "verified"
    for refused in play.play_refused():
        assert [state for state, _, _ in refused.steps] == ["proposed", "refused"]
    assert play.play_undone().steps[-1][:2] == ("cancelled", "executor")
    killed = play.play_killed_executor()
    assert play.kills == len(STEPS)
    assert [state for state, _, _ in killed.steps].count("executed") == 1
    if play.lab.start_node:
        assert [scene.steps[-1][0] for scene in play.play_reboot()] == ["verified", "verified"]
