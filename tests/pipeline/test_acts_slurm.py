"""Acts at a real Slurm: hold under a running job, refusal, eviction, release, a person's undo, a dying controller."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pipeline.acts.act import Act
from pipeline.acts.adapters.slurm import Slurm, run_command
from pipeline.config.acts import ActLimits
from pipeline.model.records import SECOND
from pipeline.store.database import Database
from tests import slurm_cluster
from tests.pipeline.acts_world import ALICE, BOB, ON, SchedulerSite
from tests.until import until

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
LOOSE = ActLimits(rack_nodes=8, fleet_share=0.5, ceiling_share=0.75, two_people_gpus=1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm_cluster.Cluster]:
    with slurm_cluster.Cluster(tmp_path_factory.mktemp("slurm"), 4) as made:
        yield made


class Site(SchedulerSite):
    """A board whose executor works at the real Slurm."""

    def __init__(self, cluster: slurm_cluster.Cluster, database: Database) -> None:
        def run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
            os.environ["SLURM_CONF"] = f"{cluster.folder}/slurm.conf"
            return run_command(words)

        self.slurm = Slurm(ON, run)
        super().__init__(database, LOOSE, self.slurm)


@pytest.fixture
def site(cluster: slurm_cluster.Cluster, database: Database) -> Site:
    for node in cluster.nodes:
        if "DRAIN" in cluster.run("sinfo", "-h", "-N", "-n", node, "-o", "%T").upper():
            cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
    return Site(cluster, database)


def test_a_hold_drains_under_a_running_job_and_a_release_gives_the_node_back(
    site: Site, cluster: slurm_cluster.Cluster
) -> None:
    job = cluster.batch("sleep 300", "-w", "gpu001", "--gpus=2", "--no-requeue")
    until(lambda: cluster.run("squeue", "-h", "-j", job, "-o", "%T").strip() == "RUNNING", 30)
    act = site.propose("hold", "gpu001", incident="INC-1")
    assert act.plan is not None
    assert (act.state, [(hit.job, hit.gpus) for hit in act.plan.jobs]) == ("awaiting_approval", [(job, 2)])
    assert act.plan.commands[0].startswith("scontrol update NodeName=gpu001 State=DRAIN 'Reason=fleetpulse:ACT-")
    site.approve(act)
    site.settle(act, "verified")
    shown = cluster.run("scontrol", "-o", "show", "node", "gpu001")
    assert f"Reason={act.mark} INC-1 alice fault" in shown
    assert cluster.run("squeue", "-h", "-j", job, "-o", "%T").strip() == "RUNNING"
    evict = site.propose("evict", "gpu001")
    assert evict.plan is not None
    assert (evict.plan.commands, evict.plan.people) == ((f"scancel {job}",), 2)
    site.approve(evict)
    site.settle(evict, "verified")
    release = site.propose("release", "gpu001")
    site.approve(release)
    site.settle(release, "verified")
    assert "DRAIN" not in cluster.run("scontrol", "-o", "show", "node", "gpu001")


def test_a_batch_job_that_may_start_again_is_requeued_not_cancelled(site: Site, cluster: slurm_cluster.Cluster) -> None:
    job = cluster.batch("sleep 300", "-w", "gpu002", "--gpus-per-node=1", "--requeue")
    until(lambda: cluster.run("squeue", "-h", "-j", job, "-o", "%T").strip() == "RUNNING", 30)
    hold = site.propose("hold", "gpu002")
    site.approve(hold)
    site.settle(hold, "verified")
    evict = site.propose("evict", "gpu002")
    assert evict.plan is not None
    assert evict.plan.commands == (f"scontrol requeue {job}",)
    site.approve(evict)
    site.settle(evict, "verified")
    assert cluster.run("squeue", "-h", "-j", job, "-o", "%T").strip() == "PENDING"
    cluster.run("scancel", job)


@pytest.mark.parametrize("option", ["--requeue", "--no-requeue"])
def test_a_job_on_two_nodes_that_are_evicted_together_is_ended_once(
    option: str, site: Site, cluster: slurm_cluster.Cluster
) -> None:
    job = cluster.batch("sleep 300", "-w", "gpu001,gpu002", "-N", "2", "--gpus-per-node=1", option)
    until(lambda: cluster.run("squeue", "-h", "-j", job, "-o", "%T").strip() == "RUNNING", 30)
    hold = site.propose("hold", "gpu001", "gpu002")
    site.approve(hold)
    site.settle(hold, "verified")
    evict = site.propose("evict", "gpu001", "gpu002")
    site.approve(evict)
    site.settle(evict, "verified")
    states = cluster.run("squeue", "-h", "-j", job, "-o", "%T").split() if option == "--requeue" else []
    assert states == (["PENDING"] if option == "--requeue" else [])
    if states:
        cluster.run("scancel", job)


def test_a_job_requeued_at_one_node_is_not_cancelled_when_it_leaves_the_other_between_two_readings(
    site: Site, cluster: slurm_cluster.Cluster
) -> None:
    job = cluster.batch("sleep 300", "-w", "gpu001,gpu002", "-N", "2", "--gpus-per-node=1", "--requeue")
    until(lambda: cluster.run("squeue", "-h", "-j", job, "-o", "%T").strip() == "RUNNING", 30)
    hold = site.propose("hold", "gpu001", "gpu002")
    site.approve(hold)
    site.settle(hold, "verified")
    evict = site.propose("evict", "gpu001", "gpu002")
    listing = ["squeue", "-h", "-w", "gpu002", "-o", "%A"]
    last_seen = [run_command(listing)]
    assert last_seen[0].stdout.strip() == job

    def read_just_before_it_left(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        if list(words) != listing or not last_seen:
            return run_command(words)
        until(lambda: cluster.run("squeue", "-h", "-j", job, "-o", "%T").strip() == "PENDING", 60)
        return last_seen.pop()

    site.slurm._run = read_just_before_it_left
    site.approve(evict)
    site.settle(evict, "verified")
    assert not last_seen
    assert cluster.run("squeue", "-h", "-j", job, "-o", "%T").strip() == "PENDING"
    cluster.run("scancel", job)


def test_what_others_drained_is_refused_and_keeps_its_reason(site: Site, cluster: slurm_cluster.Cluster) -> None:
    cluster.run("scontrol", "update", "NodeName=gpu002", "State=DRAIN", "Reason=NHC: check_fs failed")
    for verb in ("hold", "release"):
        act = site.propose(verb, "gpu002")
        assert act.state == "refused"
        assert "NHC: check_fs failed" in act.result["reason"]
    assert "Reason=NHC: check_fs failed" in cluster.run("scontrol", "-o", "show", "node", "gpu002")


def test_slurm_accepts_the_undo_of_a_hold_of_a_node_that_it_had_marked_down(
    site: Site, cluster: slurm_cluster.Cluster
) -> None:
    cluster.kill_node("gpu003")
    site.check_undo_of_a_down_node(cluster.run, "gpu003")
    cluster.start_node("gpu003")


def test_a_persons_resume_is_recorded_and_not_fought(site: Site, cluster: slurm_cluster.Cluster) -> None:
    act = site.propose("hold", "gpu003")
    site.approve(act)
    site.settle(act, "verified")
    cluster.run("scontrol", "update", "NodeName=gpu003", "State=RESUME")
    site.settle(act, "cancelled")
    site.run(3)
    assert "DRAIN" not in cluster.run("scontrol", "-o", "show", "node", "gpu003")
    steps = [(step["state"], step["actor"]) for step in site.board.describe(act.id)["history"]]
    assert steps[-1] == ("cancelled", "executor")


@pytest.mark.parametrize("saved", [True, False], ids=["saved", "lost"])
def test_a_controller_that_dies_in_mid_act_is_waited_for_and_read_first(
    site: Site, cluster: slurm_cluster.Cluster, saved: bool
) -> None:
    """It loses what it had not written, such as the drain of the first node: that is then done again."""
    cluster.save_state()
    act = site.propose("hold", "gpu003", "gpu004")
    site.approve(act, BOB)
    carry_out = site.slurm.carry_out

    def kill_after_the_first(act_: Act, node: object) -> object:
        done = carry_out(act_, node)  # type: ignore[arg-type]
        if saved:
            cluster.save_state()
        cluster.kill_controller()
        return done

    site.slurm.carry_out = kill_after_the_first  # type: ignore[method-assign, assignment]
    site.run()
    assert site.state(act) == "executing"
    site.slurm.carry_out = carry_out  # type: ignore[method-assign]
    cluster.start_controller()
    site.settle(act, "verified")
    commands = [step["state"] for step in site.board.describe(act.id)["history"]]
    assert commands.count("executed") == 1
    assert all("DRAIN" in cluster.run("scontrol", "-o", "show", "node", n) for n in ("gpu003", "gpu004"))


def test_what_a_dying_controller_may_lose_is_not_verified(site: Site, cluster: slurm_cluster.Cluster) -> None:
    cluster.save_state()
    hold = site.propose("hold", "gpu003")
    site.approve(hold)
    site.run(2)
    assert site.state(hold) == "verifying"
    assert "DRAIN" in cluster.run("scontrol", "-o", "show", "node", "gpu003")
    site.settle(hold, "verified")
    cluster.save_state()
    release = site.propose("release", "gpu003")
    site.approve(release)
    site.run(2)
    assert site.state(release) == "verifying"
    cluster.kill_controller()
    cluster.start_controller()
    site.now += 6 * 60 * SECOND
    site.run(2)
    if "DRAIN" in cluster.run("scontrol", "-o", "show", "node", "gpu003"):  # it had not written the release
        assert site.state(release) == "failed"
        assert site.board.find(hold.id).held == ("node:gpu003",)
        release = site.propose("release", "gpu003")
        site.approve(release)
    site.settle(release, "verified")
    assert site.board.find(hold.id).held == ()


def test_the_account_of_a_job_hides_no_job_forges_none_and_stops_no_act(
    site: Site, cluster: slurm_cluster.Cluster
) -> None:
    """Without accounting any bytes are an account: with separators, lines that look like other jobs, and no UTF-8."""
    ids = list[str]()
    for account in ("a|b", "a\nb", "99|gpu:4|gpu004\n{}|root", "ab\udcff"):
        words = ("-w", "gpu001", "--gpus=1", "-n1", "-A", account.format(*ids))
        ids.append(cluster.batch("sleep 300", *words))
    running = ("squeue", "-h", "-w", "gpu001", "-t", "R", "-o", "%A")
    until(lambda: set(cluster.run(*running).split()) == set(ids), 30)
    found = site.slurm.read_state(site.now)
    assert (found.nodes["gpu001"].jobs, found.nodes["gpu004"].jobs) == (tuple(sorted(ids)), ())
    assert [found.jobs[id_].account for id_ in ids] == ["", "a", "99|gpu:4|gpu004", "ab\ufffd"]
    assert set(ids) <= set(found.jobs)
    assert "99" not in found.jobs
    for id_ in ids:
        cluster.run("scancel", id_)


def test_names_and_reasons_from_outside_stay_words_of_one_command(site: Site, cluster: slurm_cluster.Cluster) -> None:
    act = site.board.propose("hold", ["node:gpu004"], ALICE, "x'; State=RESUME $(reboot) \"`", is_person=True)
    site.run()
    site.approve(act)
    site.settle(act, "verified")
    shown = cluster.run("scontrol", "-o", "show", "node", "gpu004")
    assert f"Reason={act.mark} alice x__ State=RESUME _(reboot) __" in shown
    assert site.now > SECOND
    assert Path(cluster.folder).is_dir()


def test_among_64_nodes_a_job_loses_one_and_a_node_whose_slurmd_is_dead_is_held(
    database: Database, tmp_path: Path
) -> None:
    with slurm_cluster.Cluster(tmp_path, 64) as large:
        site = Site(large, database)
        job = large.batch("sleep 600", "-N", "64", "--gres=gpu:4")
        until(lambda: large.run("squeue", "-h", "-j", job, "-o", "%T").strip() == "RUNNING", 60)
        large.kill_node("gpu042")
        act = site.propose("hold", "gpu042")
        assert act.plan is not None
        shown = {guard.name: guard.now for guard in act.plan.guards}
        assert shown["nodes_out_in_fleet"] == "1 of 64 nodes out from all causes"
        assert shown["nodes_out_per_job"] == f"1 of 64 nodes of job {job}"
        assert [(hit.job, hit.nodes, hit.gpus) for hit in act.plan.jobs] == [(job, 64, 256)]
        assert act.plan.people == 2
        site.approve(act)
        site.settle(act, "verified")
        assert f"Reason={act.mark}" in large.run("scontrol", "-o", "show", "node", "gpu042")
        second = site.propose("hold", "gpu007")
        assert second.plan is not None
        assert [guard.name for guard in second.plan.failing] == ["nodes_out_per_job"]
        large.kill_node("gpu050")  # and what slurmctld does about it after SlurmdTimeout:
        large.run("scontrol", "update", "NodeName=gpu050", "State=DOWN", "Reason=Not responding")
        down = site.propose("hold", "gpu050")
        assert down.state == "awaiting_approval", down.result
        site.approve(down)
        site.settle(down, "verified")
        assert f"Reason={down.mark}" in large.run("scontrol", "-o", "show", "node", "gpu050")


def test_a_reboot_keeps_the_hold_and_is_not_verified_before_the_node_is_back(
    site: Site, cluster: slurm_cluster.Cluster
) -> None:
    """Also with ReturnToService=2, where a node that is DOWN gets work again as soon as its slurmd registers."""
    hold = site.propose("hold", "gpu003")
    site.approve(hold)
    site.settle(hold, "verified")
    reboot = site.propose("reboot", "gpu003")
    assert reboot.plan is not None
    assert reboot.plan.commands == (f"scontrol reboot 'reason={hold.mark} alice fault' gpu003",)
    site.approve(reboot)
    site.settle(reboot, "verifying")
    shown = lambda: cluster.run("scontrol", "-o", "show", "node", "gpu003")  # noqa: E731
    until(lambda: "REBOOT_ISSUED" in shown(), 30)
    site.now += 600 * SECOND  # longer than verify_minutes
    site.run(3)
    assert site.state(reboot) == "verifying"
    assert site.board.find(hold.id).held == ("node:gpu003",)
    assert f"Reason={hold.mark} alice fault : reboot issued" in shown()
    cluster.start_node("gpu003", "-b")
    site.settle(reboot, "verified")
    cluster.start_node("gpu003")
    assert "State=IDLE+DRAIN " in shown()
    site.run(3)
    assert site.board.find(hold.id).held == ("node:gpu003",)
    release = site.propose("release", "gpu003")
    site.approve(release)
    site.settle(release, "verified")
