"""The collector `jobs` over known files: Slurm, torchrun, MPI, control groups, restarts, permissions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agents.collector import NoData
from agents.collectors.jobs import processes
from agents.collectors.jobs.jobs import Jobs
from agents.collectors.jobs.kubernetes import Pod
from agents.collectors.jobs.processes import ProcessScanner
from pipeline.model.records import SECOND, Event
from tests.agents.proc_tree import ProcTree

POD = "0b1c2d3e-1111-2222-3333-444455556666"
NOW = 1_800_000_000 * SECOND
SLURM = {"SLURM_JOB_ID": "81", "SLURM_STEP_ID": "0", "SLURM_JOB_NAME": "llama", "SLURM_NTASKS": "16"}
UUIDS = [f"GPU-{number:08d}-aaaa-bbbb-cccc-dddddddddddd" for number in range(4)]


@pytest.fixture
def tree(tmp_path: Path) -> ProcTree:
    return ProcTree(tmp_path / "proc")


@pytest.fixture
def make(tmp_path: Path, tree: ProcTree) -> Callable[..., Jobs]:
    """Returns a function that makes a collector over our own folder and clock."""

    def make_jobs(**more: object) -> Jobs:
        nowhere = tmp_path / "nowhere"
        sources = {
            "proc": tree.root,
            "facts": tmp_path / "facts",
            "driver": tmp_path / "driver",
            "others": nowhere,
            "pod_resources": nowhere,
            "account": nowhere,
            "memory": tmp_path / "jobs.json",
            "gpus": None,
        }
        jobs = Jobs(**{**sources, **more})
        jobs._now = lambda: NOW
        jobs.open("n1")
        return jobs

    return make_jobs


def gpus(tmp_path: Path) -> None:
    """Four GPUs as NVIDIA's driver lists them; minor numbers are in reverse order."""
    for number, uuid in enumerate(UUIDS):
        folder = tmp_path / "driver" / f"0000:{number + 1:02x}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t H100\nGPU UUID: \t {uuid}\nDevice Minor: \t {3 - number}\n")


def task(rank: int, **more: str) -> dict[str, str]:
    return {**SLURM, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 8), **more}


def events(jobs: Jobs, looks: int = 1) -> list[Event]:
    return [event for _ in range(looks) for event in jobs.read()[0].events]


def test_slurm_tasks_are_ranks_with_gpus_and_worker_processes_are_not(
    make: Callable[..., Jobs], tree: ProcTree
) -> None:
    tree.start(10, {"SLURM_JOB_ID": "81", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"})  # the batch script
    for rank in (8, 9):
        tree.start(
            20 + rank, task(rank, SLURM_STEP_GPUS="4,5", CUDA_VISIBLE_DEVICES="4,5", SLURM_STEP_TASKS_PER_NODE="2")
        )
        tree.start(40 + rank, task(rank))  # a data loader
    jobs = make()
    reported = events(jobs, 3)
    assert [event.kind for event in reported] == ["job_start"]
    assert reported[0].data == {
        "ranks": {"rank:81.8": {"gpu": "gpu:n1.4"}, "rank:81.9": {"gpu": "gpu:n1.5"}},
        "name": "llama",
        "scheduler": "slurm",
        "world_size": 16,
    }
    found = jobs.inventory()
    assert list(found) == ["job:81", "rank:81.8", "rank:81.9"]
    assert found["rank:81.9"].attributes["pid"] == 29
    assert "hunter2" not in repr((jobs, found, jobs._processes))


def test_a_rank_restarted_within_two_scans_continues_and_otherwise_ends(
    make: Callable[..., Jobs], tree: ProcTree
) -> None:
    tree.start(20, task(0))
    jobs = make()
    assert len(events(jobs, 3)) == 1
    tree.end(20)
    assert events(jobs) == []
    tree.start(21, task(0))
    assert events(jobs, 3) == []
    assert jobs.inventory()["rank:81.0"].attributes["pid"] == 21
    tree.end(21)
    assert jobs.read()[0].entities == ("rank:81.0",)
    assert [(e.kind, e.entity, e.data["ranks"]) for e in events(jobs)] == [("job_end", "job:81", ["rank:81.0"])]
    assert jobs.inventory() == {}


def test_a_jobs_duration_ends_with_the_last_scan_that_found_it(make: Callable[..., Jobs], tree: ProcTree) -> None:
    tree.start(20, task(0))
    jobs = make()
    moments = iter(range(NOW, NOW + 100 * SECOND, 10 * SECOND))
    jobs._now = lambda: next(moments)
    found = events(jobs, 3)
    tree.end(20)
    found += events(jobs, 3)
    assert [(event.kind, event.data.get("seconds")) for event in found] == [("job_start", None), ("job_end", 20.0)]


def test_a_reused_pid_is_another_process(make: Callable[..., Jobs], tree: ProcTree) -> None:
    tree.start(20, task(0))
    jobs = make()
    events(jobs, 6)
    tree.end(20)
    tree.start(20, {"SLURM_JOB_ID": "82", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3"}, at=999)
    assert {(event.kind, event.entity) for event in events(jobs, 4)} == {("job_end", "job:81"), ("job_start", "job:82")}
    assert jobs.read()[0].entities == ("rank:82.3",)


def test_a_program_started_by_exec_is_found_within_one_rescan(make: Callable[..., Jobs], tree: ProcTree) -> None:
    tree.start(20)
    jobs = make()
    assert events(jobs, 4) == []
    tree.exec(20, {"RANK": "3", "LOCAL_RANK": "3", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"})
    assert [event.entity for event in events(jobs, processes.RESCAN_EVERY + 2)] == ["job:n1-29500"]


def test_a_gpu_taken_by_another_job_moves_to_it_and_the_inventory_is_sent(
    make: Callable[..., Jobs], tree: ProcTree
) -> None:
    tree.start(20, task(0, CUDA_VISIBLE_DEVICES="2"))
    jobs = make()
    events(jobs, 6)
    tree.end(20)
    tree.start(21, task(0, CUDA_VISIBLE_DEVICES="3"))
    entities = [jobs.read()[0].entities for _ in range(3)]
    assert () in entities  # left out of one scan, so that the agent sends the inventory
    assert jobs.inventory()["rank:81.0"].parents == ("job:81", "gpu:n1.3")


def test_a_restarted_agent_repeats_no_start_and_reports_missed_ends(
    make: Callable[..., Jobs], tree: ProcTree, tmp_path: Path
) -> None:
    tree.start(20, task(0))
    tree.start(30, {**task(1), "SLURM_JOB_ID": "82"})
    first = make()
    assert {event.entity for event in events(first, 3)} == {"job:81", "job:82"}
    tree.end(20)
    second = make()
    assert [(event.kind, event.entity) for event in events(second, 4)] == [("job_end", "job:81")]
    for damage in (
        "",
        "{",
        "[]",
        json.dumps({"boot": 1}),
        (tmp_path / "jobs.json").read_text().replace("82", "8")[:-9],
    ):
        (tmp_path / "jobs.json").write_text(damage)
        assert [event.kind for event in events(make(), 3)] == ["job_start"]


def test_without_readable_environments_control_groups_and_prolog_give_the_job(
    make: Callable[..., Jobs],
    tree: ProcTree,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus(tmp_path)
    tree.start(20, task(3), cgroup="0::/system.slice/slurmstepd.scope/job_81/step_0/user/task_3")
    tree.start(21, cgroup="0::/system.slice/slurmstepd.scope/job_81/step_extern/user/task_0")
    (tmp_path / "facts").mkdir()
    (tmp_path / "facts" / "81.env").write_text("SLURM_JOB_ID=81\nSLURM_JOB_USER=ada\nSLURM_JOB_GPUS=1-2\nPATH=/x\n")

    def refuse(path: str, most: int) -> bytes:
        if path.endswith("/environ"):
            raise PermissionError(13, "Permission denied", path)
        return read(path, most)

    read = processes._read_bytes
    monkeypatch.setattr(processes, "_read_bytes", refuse)
    jobs = make()
    (began,) = events(jobs, 4)
    assert began.data == {"ranks": {"rank:81.n1": {"gpu": "gpu:n1.1"}}, "scheduler": "slurm", "user": "ada"}
    assert jobs.inventory()["rank:81.n1"].parents == ("job:81", "gpu:n1.1", "gpu:n1.2")
    log = capsys.readouterr().err
    assert log.count("\n") == 1
    assert "permission denied for the environment of 2 processes: requires CAP_SYS_PTRACE" in log


def test_ranks_in_a_pod_belong_to_the_pods_job_with_or_without_labels(
    make: Callable[..., Jobs], tree: ProcTree, tmp_path: Path
) -> None:
    """One pod with two GPUs has two torchrun processes, the pause container and a data loader."""
    gpus(tmp_path)
    common = {"HOSTNAME": "llama-0", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500", "WORLD_SIZE": "4"}
    common |= {"LOCAL_WORLD_SIZE": "2", "NVIDIA_VISIBLE_DEVICES": ",".join(UUIDS[2:])}
    cgroup = f"0::/kubepods/burstable/pod{POD}/{'ab' * 32}"
    tree.start(5, cgroup=f"0::/kubepods/burstable/pod{POD}/{'cd' * 32}")
    for rank in (2, 3, 30):
        tree.start(10 + rank, {**common, "RANK": str(rank % 27), "LOCAL_RANK": str(rank % 2)}, cgroup)
    for pod in (
        Pod("ml", "llama-0", POD, {"job-name": "llama"}, tuple(UUIDS[2:]), requested=2),
        Pod("ml", "llama-0", labels={}, devices=tuple(UUIDS[2:]), requested=2),
    ):
        jobs = make(memory=None)
        assert jobs._pods is not None
        jobs._pods.pods = (pod,)
        (began,) = events(jobs, 3)
        assert began.data["ranks"] == {f"rank:{pod.job}.{rank}": {"gpu": f"gpu:n1.{rank}"} for rank in (2, 3)}
        assert (began.entity, began.data["world_size"]) == (f"job:{pod.job}", 4)
        assert jobs.inventory()[f"rank:{pod.job}.3"].attributes["pod"] == "llama-0"
    tree.exec(13, {**common, "RANK": "3", "LOCAL_RANK": "1", "FLEETPULSE_JOB": "mine"})
    assert {event.entity for event in events(jobs, 8)} == {"job:mine"}


def test_real_processes_with_torchrun_variables_are_found_in_the_real_proc(make: Callable[..., Jobs]) -> None:
    common = {"TORCHELASTIC_RUN_ID": "test.run", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    words = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    started = [
        subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            env={
                **common,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "CUDA_VISIBLE_DEVICES": "6,7",
                "PP_RANK": str(rank),
            },
        )
        for rank in range(2)
    ]
    jobs = make(proc=Path("/proc"))
    try:
        end = time.monotonic() + 20
        while {"rank:test-run.0", "rank:test-run.1"} - jobs.inventory().keys() and time.monotonic() < end:
            jobs.read()
        found = jobs.inventory()
        assert found["rank:test-run.1"].parents == ("stage:test-run.1", "job:test-run", "gpu:n1.7")
        assert found["rank:test-run.1"].attributes["pid"] == started[1].pid
    finally:
        for process in started:
            process.communicate()
    while "rank:test-run.0" in jobs.read()[0].entities and time.monotonic() < end:
        pass
    assert "job:test-run" not in jobs.inventory()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_environments_of_other_users_are_refused_and_counted() -> None:
    program = (
        "import os, sys\nfrom pathlib import Path\nfrom agents.collectors.jobs.processes import ProcessScanner\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "found = ProcessScanner(Path('/proc'), 'n1'); found.scan()\nprint(len(found.refused))"
    )
    root = Path(__file__).parents[2]
    ran = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert int(ran.stdout) > 0


def test_processes_are_read_in_two_scans_and_then_in_turn(tree: ProcTree, monkeypatch: pytest.MonkeyPatch) -> None:
    for pid in range(100, 400):
        tree.start(pid)
    read: list[str] = []
    plain = processes._read_bytes
    monkeypatch.setattr(processes, "_read_bytes", lambda path, most: (read.append(path), plain(path, most))[1])
    found = ProcessScanner(tree.root, "n1")
    for _ in range(2):
        read.clear()
        found.scan()
        assert sum(path.endswith("environ") for path in read) == 300
    read.clear()
    found.scan()
    assert sum(path.endswith("environ") for path in read) == 300 / processes.RESCAN_EVERY
    assert len(found.members) == 0


def test_members_are_limited(tree: ProcTree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "MAX_MEMBERS", 5)
    for pid in range(20, 40):
        tree.start(pid, task(pid))
    found = ProcessScanner(tree.root, "n1")
    assert len(found.scan()) == 5


def test_an_error_in_one_process_hides_no_job_and_is_logged_once(
    make: Callable[..., Jobs], tree: ProcTree, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = processes.identify_process

    def identify(environment: dict[str, str], node: str) -> object:
        if environment.get("SLURM_JOB_ID") == "99":
            raise ZeroDivisionError("by a\nzero")
        return plain(environment, node)

    monkeypatch.setattr(processes, "identify_process", identify)
    tree.start(20, {**task(0), "SLURM_JOB_ID": "99"})
    tree.start(21, task(0))
    jobs = make(memory=None)
    assert [event.entity for event in events(jobs, 8)] == ["job:81"]
    assert capsys.readouterr().err == (
        "collector jobs: 1 processes are left out, expected no error: "
        "the first is pid 20: ZeroDivisionError: by a?zero\n"
    )
    tree.end(20)
    events(jobs)
    assert capsys.readouterr().err == "collector jobs: processes: resolved\n"


def test_no_proc_is_no_data(tmp_path: Path, make: Callable[..., Jobs]) -> None:
    with pytest.raises(NoData, match="mount /proc there"):
        make(proc=tmp_path / "absent")


def test_state_of_another_boot_is_ignored(make: Callable[..., Jobs], tree: ProcTree, tmp_path: Path) -> None:
    tree.start(20, task(0))
    assert [event.kind for event in events(make(), 3)] == ["job_start"]
    assert events(make(), 3) == []
    kept = json.loads((tmp_path / "jobs.json").read_text())
    (tmp_path / "jobs.json").write_text(json.dumps({**kept, "boot": "8d1f0c1e-0000-4000-8000-000000000000"}))
    assert [event.kind for event in events(make(), 3)] == ["job_start"]


@pytest.mark.parametrize("step", ["extern", "4294967295"])
def test_slurms_extern_step_is_not_a_rank(make: Callable[..., Jobs], tree: ProcTree, step: str) -> None:
    tree.start(21, cgroup=f"0::/system.slice/slurmstepd.scope/job_81/step_{step}/user/task_0")
    jobs = make(memory=None)
    assert events(jobs, 4) == []
    assert not [entity for entity in jobs.inventory() if entity.startswith("rank:")]
    tree.start(22, cgroup="0::/system.slice/slurmstepd.scope/job_81/step_0/user/task_0")
    (began,) = events(jobs, 8)
    assert began.entity == "job:81"
