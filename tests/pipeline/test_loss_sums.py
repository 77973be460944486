"""Over random faults, merges and restarts all incidents together count no more than a job lost."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.pipeline.test_impact import MINUTE, World
from tests.pipeline.test_loss_counted_once import end_job, lost, merge, start_job

GPUS = 48
CAUSES = ("gpu:n0.3", "leaf:l1", "cdu:c0", "node:n2", "gpu:n4.0")


def live_through(world: World, draw: random.Random) -> float:
    """Lets job 81 run slower, hang, restart or end for some minutes; returns the GPU-hours that it lost by that."""
    minutes, kind = draw.randint(3, 20), draw.choice(["slow", "slow", "usual", "hang", "restart", "end", "silent"])
    if kind in ("slow", "usual"):
        step_time = draw.choice([1.1, 1.3, 2.0, 3.0]) if kind == "slow" else 1.0
        world.run(minutes, j81=step_time)
        return GPUS * minutes / 60 * (1 - 1 / step_time)
    if kind == "silent":
        return run_unseen(world, minutes, draw.choice([1.0, 1.3, 2.0]), draw.randint(0, 2))
    world.run(minutes, j81=0)
    if kind == "end":
        ranks = end_job(world, 81)
        world.run(minutes, j81=0)
        start_job(world, ranks)
        minutes *= 2
    elif kind == "restart":
        world.steps["job:81"] -= 300  # of 1 s
    world.run(1)
    return GPUS * minutes / 60 + (GPUS * 300 / 3600 if kind == "restart" else 0.0)


def run_unseen(world: World, minutes: int, step_time: float, hangs: int) -> float:
    """No rank reports the steps of job 81, which stands still for some of these minutes; returns what it lost."""
    world.hooked = {"job:82"}
    world.run(minutes, j81=step_time)
    world.run(hangs, j81=0)
    world.hooked = {"job:81", "job:82"}
    world.run(1)
    return GPUS * (minutes * (1 - 1 / step_time) + hangs) / 60


def end_some(world: World, draw: random.Random) -> float:
    """Merges or resolves an incident at times; returns the GPU-hours that a resolved one keeps."""
    if draw.random() > 0.3 or not world.book.tracked:
        return 0.0
    chosen = draw.choice(list(world.book.tracked))
    others, incident = [id_ for id_ in world.book.tracked if id_ != chosen], world.book.tracked[chosen].incident
    if others and draw.random() < 0.6:
        merge(world, incident, draw.choice(others))
        return 0.0
    before = lost(world)
    world.resolve(replace(incident))
    return before - lost(world)


@pytest.mark.parametrize("seed", range(20))
def test_incidents_together_count_no_more_than_was_lost(seed: int) -> None:
    draw, world = random.Random(seed), World()
    world.run(65)
    true = frozen = 0.0
    for episode in range(draw.randint(3, 7)):
        for more in range(draw.randint(0, 2)):
            onset = world.time - draw.choice([0, 0, 1, 5, 12]) * MINUTE
            world.open(draw.choice(CAUSES), onset=onset, id_=f"inc-{episode}{more}")
        true += live_through(world, draw)
        frozen += end_some(world, draw)
    world.run(12)
    assert lost(world) + frozen <= 1.06 * true + 0.8  # 0.8 GPU-h: a minute of all
