"""Acts at a real slurmrestd 24.11: hold, refusal, release, a person's undo, a wrong token, an unknown node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.acts.adapters.slurm import Slurm
from pipeline.acts.adapters.slurmrestd import Slurmrestd
from pipeline.config.acts import ActLimits, SlurmAccess
from pipeline.model.errors import Unreachable
from pipeline.store.database import Database
from tests import slurm_rest
from tests.parts import do_without
from tests.pipeline.acts_world import ON, SchedulerSite
from tests.until import until

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
LOOSE = ActLimits(rack_nodes=8, fleet_share=0.5, ceiling_share=0.75)


@pytest.fixture(scope="module")
def cluster() -> Iterator[slurm_rest.RestCluster]:
    if reason := slurm_rest.missing():
        do_without("slurmrestd", reason)
    with slurm_rest.RestCluster() as made:
        yield made


class Site(SchedulerSite):
    """A board whose executor works at the real slurmrestd."""

    def __init__(self, cluster: slurm_rest.RestCluster, database: Database, token: Path) -> None:
        self.rest = Slurmrestd(replace(ON, slurm=SlurmAccess(url=cluster.url, user="root", token_file=token)))
        super().__init__(database, LOOSE, self.rest)


@pytest.fixture
def site(cluster: slurm_rest.RestCluster, tmp_path: Path) -> Iterator[Site]:
    for node in ("gpu001", "gpu002"):
        if "drain" in cluster.run("sinfo", "-h", "-N", "-n", node, "-o", "%T"):
            cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
    # `idle*` is out of service
    until(lambda: all(state_of(cluster, node).split()[0].isalpha() for node in ("gpu001", "gpu002")), 60)
    token = tmp_path / "token"
    token.write_text(cluster.token())
    with closing(Database(tmp_path / "store.duckdb")) as database:
        yield Site(cluster, database, token)


def state_of(cluster: slurm_rest.RestCluster, node: str) -> str:
    return cluster.run("sinfo", "-h", "-N", "-n", node, "-o", "%T %E").strip()


def test_a_hold_drains_and_a_release_gives_the_node_back(site: Site, cluster: slurm_rest.RestCluster) -> None:
    act = site.propose("hold", "gpu001", incident="INC-1")
    assert act.plan is not None
    assert act.plan.commands[0].startswith(f"POST {cluster.url}/slurm/v0.0.40/node/gpu001 ")
    site.approve(act)
    site.settle(act, "verified")
    assert state_of(cluster, "gpu001").startswith(f"drained {act.mark} INC-1")
    back = site.propose("release", "gpu001")
    site.approve(back)
    site.settle(back, "verified")
    until(lambda: state_of(cluster, "gpu001").startswith("idle"), 30)


def test_what_others_drained_is_refused_and_keeps_its_reason(site: Site, cluster: slurm_rest.RestCluster) -> None:
    cluster.run("scontrol", "update", "NodeName=gpu002", "State=DRAIN", "Reason=ticket 4711")
    act = site.propose("hold", "gpu002")
    assert (act.state, act.result["reason"].partition(":")[0]) == ("refused", "in service")
    assert site.propose("release", "gpu002").state == "refused"
    assert state_of(cluster, "gpu002") == "drained ticket 4711"


def test_slurm_accepts_the_undo_of_a_hold_of_a_node_that_it_had_marked_down(
    site: Site, cluster: slurm_rest.RestCluster
) -> None:
    cluster.kill_node("gpu002")
    site.check_undo_of_a_down_node(cluster.run, "gpu002")
    cluster.start_node("gpu002")


def test_a_persons_resume_is_recorded_and_not_fought(site: Site, cluster: slurm_rest.RestCluster) -> None:
    act = site.propose("hold", "gpu001")
    site.approve(act)
    site.settle(act, "verified")
    cluster.run("scontrol", "update", "NodeName=gpu001", "State=RESUME")
    site.settle(act, "cancelled")
    until(lambda: state_of(cluster, "gpu001").startswith("idle"), 30)


def test_a_running_job_is_named_and_goes_on(site: Site, cluster: slurm_rest.RestCluster) -> None:
    job = cluster.run("sbatch", "--parsable", "-w", "gpu001", "--output=/dev/null", "--wrap=sleep 300").strip()
    until(lambda: cluster.run("squeue", "-h", "-j", job, "-o", "%T").strip() == "RUNNING", 30)
    act = site.propose("hold", "gpu001")
    assert act.plan is not None
    assert [hit.job for hit in act.plan.jobs] == [job]
    site.approve(act)
    site.settle(act, "verified")
    assert state_of(cluster, "gpu001").startswith("draining")
    assert cluster.run("squeue", "-h", "-j", job, "-o", "%T").strip() == "RUNNING"
    cluster.run("scancel", job)


REQUESTS = {
    "all": (("-N", "2", "--gpus=8"), 8),
    "per node": (("-N", "2", "--gpus-per-node=h100:2"), 4),
    "per task": (("-N", "1", "-n", "2", "--gpus-per-task=1"), 2),
    "per socket": (("-N", "1", "--sockets-per-node=1", "--gpus-per-socket=3"), 3),
    "as GRES": (("-N", "1", "--gres=gpu:h100:3"), 3),
    "none": (("-N", "1"), 0),
}


@pytest.mark.parametrize("how", REQUESTS)
def test_commands_and_rest_count_the_gpus_of_a_job_however_it_asked(
    how: str, site: Site, cluster: slurm_rest.RestCluster
) -> None:
    words, gpus = REQUESTS[how]
    job = cluster.run("sbatch", "--parsable", "--output=/dev/null", *words, "--wrap=sleep 300").strip()
    try:
        until(lambda: cluster.run("squeue", "-h", "-j", job, "-o", "%T").strip() == "RUNNING", 30)
        commands = Slurm(replace(ON, slurm=SlurmAccess(commands=cluster.commands)))
        seen = [adapter.read_state(0).jobs[job] for adapter in (commands, site.rest)]
        assert [(found.gpus, found.requeues) for found in seen] == [(gpus, True), (gpus, True)]
        assert seen[0].nodes == seen[1].nodes
    finally:
        cluster.run("scancel", job)
        until(lambda: not cluster.run("squeue", "-h", "-j", job), 30)


@pytest.mark.parametrize("text", ["SLURM_JWT=eyJhbGciOiJIUzI1NiJ9.e30.x", "nothing"])
def test_a_wrong_token_is_no_statement_about_the_nodes(
    site: Site, cluster: slurm_rest.RestCluster, tmp_path: Path, text: str
) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text(text)
    access = SlurmAccess(url=cluster.url, user="root", token_file=wrong)
    with pytest.raises(Unreachable, match="is refused"):
        Slurmrestd(replace(ON, slurm=access)).read_state(0)


def test_an_unknown_node_is_refused_before_anything_is_sent(site: Site) -> None:
    act = site.propose("hold", "gpu999")
    assert (act.state, act.result["reason"].partition(":")[0]) == ("refused", "known node")
