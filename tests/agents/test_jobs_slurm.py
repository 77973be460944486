"""Real Slurm jobs over two nodes with GPUs: ranks by environment and by the prolog, and their end."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agents.collector import Reading
from agents.collectors.jobs.jobs import Jobs
from tests.parts import do_without
from tests.slurm_cluster import Cluster, missing

pytestmark = pytest.mark.slurm
LIMIT_S = 40.0
WAIT = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.1)"
WORKER = f"{shlex.quote(sys.executable)} -c {shlex.quote(WAIT)}"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if lacking := missing():
        do_without("slurm", lacking)
    with Cluster(tmp_path_factory.mktemp("slurm") / "lab") as found:
        yield found


def agents(slurm: Cluster, proc: Callable[[str], Path]) -> dict[str, Jobs]:
    """The collectors of both nodes."""
    nowhere = slurm.folder / "nowhere"
    made = {
        node: Jobs(
            *(1.0, 5.0),
            proc=proc(node),
            facts=slurm.facts(node),
            driver=nowhere,
            others=nowhere,
            pod_resources=nowhere,
            account=nowhere,
        )
        for node in slurm.nodes
    }
    for node, jobs in made.items():
        jobs.open(node)
    return made


def until(made: dict[str, Jobs], ready: Callable[[dict[str, Reading]], bool]) -> list[Reading]:
    """Reads a few times per second until the condition holds; returns all readings."""
    seen: list[Reading] = []
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        now = {node: jobs.read()[0] for node, jobs in made.items()}
        seen += now.values()
        if ready(now):
            return seen
        time.sleep(0.25)
    raise AssertionError(f"not within {LIMIT_S:g} s: {[jobs.inventory() for jobs in made.values()]}")


def ranks(reading: Reading) -> set[str]:
    return set(reading.entities)


def test_a_job_over_two_nodes_has_ranks_gpus_and_an_end(slurm: Cluster, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    script = f"srun --ntasks-per-node=2 --gpus-per-task=2 {WORKER} {stop}"
    number = slurm.batch(script, "--nodes=2", "--ntasks-per-node=2", "--gres=gpu:4", "--job-name=llama")
    made = agents(slurm, slurm.proc)
    wanted = {
        node: {f"rank:{number}.{2 * place + local}" for local in range(2)} for place, node in enumerate(slurm.nodes)
    }
    seen = until(made, lambda now: all(ranks(now[node]) == wanted[node] for node in made))
    seen += until(made, lambda now: all(jobs.read()[0].entities for jobs in made.values()))
    for place, (node, jobs) in enumerate(made.items()):
        found = jobs.inventory()
        facts = {"name": "llama", "scheduler": "slurm", "user": "root", "world_size": 4}
        assert found[f"job:{number}"].attributes == facts
        for local in range(2):
            rank = found[f"rank:{number}.{2 * place + local}"]
            assert rank.parents == (f"job:{number}", f"gpu:{node}.{2 * local}", f"gpu:{node}.{2 * local + 1}")
            assert (rank.attributes["local_rank"], rank.attributes["node"]) == (local, node)
    stop.touch()
    seen += until(made, lambda now: not any(map(ranks, now.values())))
    events = [event for reading in seen for event in reading.events]
    ends = [set(event.data["ranks"]) for event in events if event.kind == "job_end"]
    assert ends == list(wanted.values()) or ends == list(wanted.values())[::-1]
    assert {event.entity for event in events} == {f"job:{number}"}
    until(made, lambda now: not any(any(slurm.facts(node).iterdir()) for node in made))  # the epilog removed them


def test_torchrun_in_slurm_gives_its_workers_as_ranks_and_not_its_launcher(slurm: Cluster, tmp_path: Path) -> None:
    """The launcher has Slurm's rank 0 or 1, one per node; the workers have torchrun's ranks 0 to 3."""
    stop, launcher = tmp_path / "stop", tmp_path / "launcher.sh"
    worker = f"{WORKER} {stop}"
    launcher.write_text(
        "#!/bin/bash\nfor local in 0 1; do\n"
        "RANK=$((SLURM_NODEID * 2 + local)) LOCAL_RANK=$local LOCAL_WORLD_SIZE=2 WORLD_SIZE=4 GROUP_RANK=$SLURM_NODEID "
        f"FLEETPULSE_STAGES=2 {worker} &\ndone\nwait\n"
    )
    launcher.chmod(0o755)
    options = ("--nodes=2", "--ntasks-per-node=1", "--gres=gpu:2")
    number = slurm.batch(f"srun {launcher}", *options)
    made = agents(slurm, slurm.proc)
    wanted = [{f"rank:{number}.0", f"rank:{number}.1"}, {f"rank:{number}.2", f"rank:{number}.3"}]
    until(made, lambda now: [ranks(reading) for reading in now.values()] == wanted)
    first, second = (jobs.inventory() for jobs in made.values())
    one, two = slurm.nodes
    assert first[f"rank:{number}.1"].parents == (f"stage:{number}.0", f"job:{number}", f"gpu:{one}.1")
    assert second[f"rank:{number}.2"].parents == (f"stage:{number}.1", f"job:{number}", f"gpu:{two}.0")
    assert second[f"stage:{number}.1"].parents == (f"job:{number}",)
    stop.touch()
    until(made, lambda now: not any(map(ranks, now.values())))


def test_without_readable_processes_the_prolog_gives_the_gpus_of_a_job(slurm: Cluster, tmp_path: Path) -> None:
    """A node on which the agent may read no environment: a tree without readable environments."""
    stop = tmp_path / "stop"
    number = slurm.batch(f"srun {WORKER} {stop}", "--nodes=2", "--ntasks-per-node=1", "--gres=gpu:3")
    blind = tmp_path / "proc"
    (blind / "7").mkdir(parents=True)
    for name in ("stat", "7/stat", "7/cgroup"):
        (blind / name).touch()
    made = agents(slurm, lambda node: blind)
    for jobs in made.values():
        assert jobs._processes is not None
        jobs._processes.refused.add(7)  # root may read everything, so the refusal itself is tested in test_jobs.py
        jobs._processes._times_read[7] = 3
    wanted = [{f"rank:{number}.{node}"} for node in slurm.nodes]
    until(made, lambda now: [ranks(reading) for reading in now.values()] == wanted)
    for node, jobs in made.items():
        held = tuple(f"gpu:{node}.{index}" for index in range(3))
        assert jobs.inventory()[f"rank:{number}.{node}"].parents == (f"job:{number}", *held)
        assert jobs.inventory()[f"job:{number}"].attributes["user"] == "root"
    stop.touch()
    until(made, lambda now: not any(map(ranks, now.values())))


def test_parts_of_a_heterogeneous_job_are_one_job_and_array_tasks_are_several(slurm: Cluster, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    parts = "#SBATCH --ntasks=1 --gres=gpu:1\n#SBATCH hetjob\n#SBATCH --ntasks=1 --gres=gpu:4\n"
    number = slurm.batch(f"{parts}srun --het-group=0,1 {WORKER} {stop}")
    made = agents(slurm, slurm.proc)
    found: dict[str, tuple[str, ...]] = {}

    def both_have_ranks(now: dict[str, Reading]) -> bool:
        found.clear()
        for jobs in made.values():
            found.update({entity: device.parents for entity, device in jobs.inventory().items()})
        return {f"rank:{number}.0", f"rank:{number}.1"} <= found.keys() and len(found[f"rank:{number}.1"]) == 5

    until(made, both_have_ranks)
    assert found[f"rank:{number}.0"][0] == found[f"rank:{number}.1"][0] == f"job:{number}"
    stop.touch()
    until(made, lambda now: not any(map(ranks, now.values())))
    stop.unlink()
    array = slurm.batch(f"exec {WORKER} {stop}", "--array=1-2", "--gres=gpu:2")
    until(made, lambda now: sum(len(ranks(reading)) for reading in now.values()) == 2)
    facts = [facts for jobs in made.values() for e, facts in jobs.inventory().items() if e.startswith("job:")]
    assert {one.attributes["array"] for one in facts} == {f"{array}_1", f"{array}_2"}
    stop.touch()
    until(made, lambda now: not any(map(ranks, now.values())))
