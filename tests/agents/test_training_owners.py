"""Which users may report a rank: those who own its job, as far as the node knows the owner."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agents.collectors.gpu.slots import boot_id
from agents.collectors.jobs import ranks
from agents.collectors.jobs.gpu_assignment import GpuNumbers
from agents.collectors.jobs.process_identity import identify_process
from agents.collectors.jobs.processes import CgroupOwner, JobProcess
from agents.collectors.jobs.ranks import JobSources
from agents.collectors.training import datagram
from agents.collectors.training.datagram import STEP_BODY, RankSender
from agents.collectors.training.reported_ranks import JobOwners, ReportedRanks, resolve_uids
from agents.collectors.training.training import Training

VICTIM, IMPOSTOR = 1001, 1002


class OwnedRanks:
    """Ranks over files with the owners of jobs, and a clock set by hand."""

    def __init__(self, folder: Path) -> None:
        self.facts, self.memory, self.at = folder / "facts", folder / "jobs.json", 0.0
        self.facts.mkdir()
        owners = JobOwners("n1", self.facts, self.memory, lambda: self.at)
        self.ranks = ReportedRanks(
            "n1", lambda: 0, lambda: self.at, owners.find_owners, resolve_uids(["root", "no such user"])
        )

    def prolog(self, job: str, uid: int) -> None:
        (self.facts / f"{job}.env").write_text(f"SLURM_JOB_ID={job}\nSLURM_JOB_UID={uid}\n")
        self.at += 1.0

    def write_job_state(self, **users: int) -> None:
        """Writes the state file of `jobs`: a rank of each job, run by that user."""
        rows: list[Any] = [(f"rank:{job}.0", job, "", [], "", {"node": "n1", "uid": uid}) for job, uid in users.items()]
        self.memory.write_text(json.dumps({"boot": boot_id(), "jobs": {}, "ranks": rows}))
        self.at += 1.0

    def report(self, job: str, rank: int, uid: int) -> bool:
        """Returns whether a step was accepted."""
        before, self.at = self.ranks.refused, self.at + 0.01
        whole = datagram.encode_header(datagram.STEP, datagram.encode_identity(RankSender(job, rank)))
        self.ranks.receive(whole + STEP_BODY.pack(1, 0, 0, 0, 0, *[1.0] * 5), 0, uid)
        return self.ranks.refused == before


@pytest.fixture
def owned(tmp_path: Path) -> OwnedRanks:
    return OwnedRanks(tmp_path)


@pytest.mark.parametrize("known", ["prolog", "seen"])
def test_a_user_cannot_report_for_a_job_of_another_user(owned: OwnedRanks, known: str) -> None:
    owned.prolog("81", VICTIM) if known == "prolog" else owned.write_job_state(**{"81": VICTIM})
    assert not owned.report("81", 0, IMPOSTOR)
    assert owned.ranks.reason == f"from process 0 of user {IMPOSTOR}: job 81 belongs to user {VICTIM}"
    assert owned.report("81", 0, VICTIM)
    assert owned.report("82", 0, IMPOSTOR)


def test_a_false_first_reporter_is_removed_once_the_owner_is_known(owned: OwnedRanks) -> None:
    assert owned.report("81", 0, IMPOSTOR)
    assert not owned.report("81", 1, VICTIM)  # unknown so far; the job belongs to its first reporter
    owned.prolog("81", VICTIM)
    assert owned.report("81", 1, VICTIM)
    found = owned.ranks.collect()
    assert found.entities == ("rank:81.1",)
    assert found.refused == 2
    assert owned.ranks.reason.startswith(f"rank:81.0 of user {IMPOSTOR}")


def test_an_unknown_job_belongs_to_its_first_reporter(owned: OwnedRanks) -> None:
    assert owned.report("run7", 0, VICTIM)
    assert not owned.report("run7", 1, IMPOSTOR)
    assert owned.report("run7", 1, VICTIM)


def test_root_may_report_for_any_job_and_takes_none_over(owned: OwnedRanks) -> None:
    owned.prolog("81", VICTIM)
    assert owned.report("81", 5, 0)
    assert owned.report("81", 0, VICTIM)
    assert owned.report("run7", 0, 0)
    assert owned.report("run7", 1, VICTIM)


def test_the_prolog_takes_precedence_over_environments(owned: OwnedRanks) -> None:
    owned.write_job_state(**{"81": IMPOSTOR})
    owned.prolog("81", VICTIM)
    assert not owned.report("81", 0, IMPOSTOR)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"boot": 1}', '{"boot": "B", "ranks": [1]}', '{"ranks": 7}'])
def test_a_file_of_another_shape_or_boot_is_ignored(owned: OwnedRanks, text: str) -> None:
    owned.memory.write_text(text.replace('"B"', json.dumps(boot_id())))
    assert owned.report("81", 0, IMPOSTOR)


# --- claimed GPUs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("uid", "named"), [(IMPOSTOR, False), (VICTIM, True), (0, True)])
def test_a_rank_cannot_claim_a_gpu_of_another_users_job(tmp_path: Path, uid: int, named: bool) -> None:
    """Otherwise forged ranks with forged digests could raise or clear its incidents."""
    memory, at = tmp_path / "jobs.json", [0.0]
    row = ("rank:81.0", "81", "", ["gpu:n1.3"], "", {"node": "n1", "uid": VICTIM})
    memory.write_text(json.dumps({"boot": boot_id(), "jobs": {}, "ranks": [row]}))
    collector = Training(socket=str(tmp_path / "t.sock"), facts=tmp_path, jobs=memory)
    collector._clock = lambda: at[0]
    collector.open("n1")
    with contextlib.closing(collector):
        for gpu in (3, 4):
            whose = datagram.encode_identity(RankSender("own", gpu, gpu=gpu))
            whole = datagram.encode_header(datagram.STEP, whose) + STEP_BODY.pack(1, 0, 0, 0, 0, *[1.0] * 5)
            collector._ranks.receive(whole, 0, uid)
        found = collector.inventory()
    assert ("gpu:n1.3" in found["rank:own.3"].parents) == named
    assert "gpu:n1.4" in found["rank:own.4"].parents, "no job is known to hold it"
    assert "node:n1" in found["rank:own.3"].parents


# --- owners from the collector `jobs` --------------------------------------------------------------------------------


def ranks_of(*processes: JobProcess, **prolog: str) -> dict[str, Any]:
    environments = {job: {"SLURM_JOB_UID": uid} for job, uid in prolog.items()}
    found = ranks.find_ranks(JobSources(processes, environments, (), GpuNumbers(), "n1"))
    return {entity: rank.attributes["uid"] for entity, rank in found.items()}


def process(pid: int, uid: int, place: str = "", **environment: str) -> JobProcess:
    return JobProcess(
        pid, pid, uid, identify_process(environment, "n1"), cgroup=CgroupOwner(place, "0") if place else CgroupOwner()
    )


TASK = {"SLURM_JOB_ID": "81", "SLURM_STEP_ID": "0"}


def test_a_forged_environment_gives_no_rank_of_another_users_job() -> None:
    real = process(20, VICTIM, "81", SLURM_PROCID="0", **TASK)
    fake = process(10, IMPOSTOR, SLURM_PROCID="1", **TASK)
    named = process(11, IMPOSTOR, "90", FLEETPULSE_JOB="81", SLURM_JOB_ID="90", SLURM_PROCID="2", SLURM_STEP_ID="0")
    assert ranks_of(real, fake, named) == {"rank:81.0": VICTIM}
    assert ranks_of(fake, **{"81": str(VICTIM)}) == {}


def test_a_job_without_scheduler_belongs_to_the_user_of_its_first_process() -> None:
    first = process(10, VICTIM, TORCHELASTIC_RUN_ID="r", RANK="0")
    second = process(11, IMPOSTOR, TORCHELASTIC_RUN_ID="r", RANK="1")
    launched = process(12, 0, TORCHELASTIC_RUN_ID="r", RANK="2")
    assert ranks_of(first, second, launched) == {"rank:r.0": VICTIM, "rank:r.2": 0}


# --- over the real socket --------------------------------------------------------------------------------------------

AS_USER = """
import os
from agents.training import Steps
os.setgid({uid}); os.setuid({uid})
steps = Steps('81', 0)
steps.report(step=1, step_time={value})
"""


@pytest.fixture
def collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    monkeypatch.setenv("FLEETPULSE_TRAINING_SOCKET", str(tmp_path / "t.sock"))
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    (tmp_path / "facts").mkdir()
    made = Training(facts=tmp_path / "facts")
    made.open("n1")
    yield made
    made.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_kernels_credentials_are_compared_with_the_jobs_owner(collector: Training, tmp_path: Path) -> None:
    (tmp_path / "facts" / "81.env").write_text(f"SLURM_JOB_ID=81\nSLURM_JOB_UID={VICTIM}\n")
    for uid, value in ((IMPOSTOR, 9.0), (VICTIM, 1.0)):
        words = [sys.executable, "-c", AS_USER.format(uid=uid, value=value)]
        subprocess.run(words, check=True, cwd=Path(__file__).parents[2])
    end = time.monotonic() + 20
    readings = collector.read()
    while (not readings[0].entities or collector._ranks.refused < 1) and time.monotonic() < end:
        time.sleep(0.02)
        readings = collector.read()
    assert collector._ranks.refused == 1
    assert collector.inventory()["rank:81.0"].attributes["uid"] == VICTIM
