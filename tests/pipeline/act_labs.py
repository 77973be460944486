"""Real schedulers for acts, and the six scenes that each must play: what happened is kept as a log for people.

Hold, what others took out, release, a person's undo, a scheduler that dies between two nodes, and the executor's
process killed with signal 9 after each step. `benchmarks.acts_log` writes docs/acts_log.md from them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.acts.act import Act
from pipeline.acts.adapters import make_adapter
from pipeline.acts.adapters.adapter import Outcome
from pipeline.acts.executor import Executor
from pipeline.acts.remote import RemoteBoard
from pipeline.acts.scheduler import SchedulerNode
from pipeline.config.acts import ActLimits, Acts, KubernetesAccess, SlurmAccess
from pipeline.model.records import SECOND
from tests import kubernetes_cluster, slurm_cluster, slurm_rest
from tests.parts import do_without
from tests.until import until

STEPS = ("awaiting_approval", "executing", "executed", "verifying", "verified")
"""States after which the executor's process is killed."""
LIMITS = ActLimits(rack_nodes=8, fleet_share=1.0, ceiling_share=1.0, acts_per_10_minutes=1000, two_people_gpus=1024)
ON = Acts(hold="on", release="on", reboot="on", limits=LIMITS)
NODES = 64
"""Nodes of the large lab. Source: a rack row of a training cluster; Slurm starts as many on this machine."""
LIMIT_S = 120.0
"""Longest wait for a state (s). Chosen: ten starts of the process on a busy machine."""
CONFIG = """\
[api]
port = {port}
[acts]
hold = "on"
release = "on"
adapter = "{adapter}"
[acts.limits]
fleet_share = 1.0
ceiling_share = 1.0
acts_per_10_minutes = 1000
[executor]
token_file = "{folder}/executor.token"
poll_seconds = 1
{more}
"""


@dataclass(frozen=True)
class Lab:
    """A real scheduler. show: how it shows a node.  more: lines of the executor's configuration.

    take_out, give_back: what another administrator does with its own commands.   stop, start: of its controller.
    save: waits until it would not lose a change in a crash.
    dead: a node whose daemon was killed, under a job on all nodes; "" if there is none.
    start_node: starts a node's daemon again, with `-b` as after a boot; None where the scheduler reboots no node.
    empty: ends all jobs.
    """

    title: str
    nodes: tuple[str, ...]
    acts: Acts
    more: str
    show: Callable[[str], str]
    take_out: Callable[[str], object]
    give_back: Callable[[str], object]
    stop: Callable[[], None]
    start: Callable[[], None]
    save: Callable[[], None] = lambda: None
    environ: Mapping[str, str] = field(default_factory=dict)
    dead: str = ""
    start_node: Callable[..., None] | None = None
    empty: Callable[[], None] = lambda: None


@contextmanager
def slurm_lab(folder: Path) -> Iterator[Lab]:
    """Slurm 22.05 of Debian 12, by its commands."""
    if reason := slurm_cluster.missing():
        do_without("slurm", reason)
    with slurm_cluster.Cluster(folder, 2) as cluster:
        conf = f"{cluster.folder}/slurm.conf"
        os.environ["SLURM_CONF"] = conf
        yield Lab(
            "Slurm 22.05, command line",
            cluster.nodes,
            replace(ON, adapter="slurm"),
            "",
            *_slurm_commands(cluster.run),
            cluster.kill_controller,
            cluster.start_controller,
            cluster.save_state,
            {"SLURM_CONF": conf},
            start_node=cluster.start_node,
        )


@contextmanager
def slurmrestd_lab(folder: Path) -> Iterator[Lab]:
    """Slurm 24.11 of Debian 13, by slurmrestd."""
    if reason := slurm_rest.missing():
        do_without("slurmrestd", reason)
    with slurm_rest.RestCluster() as cluster:
        token = folder / "slurm.token"
        token.write_text(cluster.token(3600))
        yield Lab(
            "Slurm 24.11, slurmrestd",
            ("gpu001", "gpu002"),
            replace(ON, adapter="slurmrestd", slurm=SlurmAccess(url=cluster.url, user="root", token_file=token)),
            f'[acts.slurm]\nurl = "{cluster.url}"\nuser = "root"\ntoken_file = "{token}"',
            *_slurm_commands(cluster.run),
            cluster.kill_controller,
            cluster.start_controller,
            cluster.save_state,
        )


@contextmanager
def slurm_24_lab(folder: Path) -> Iterator[Lab]:
    """Slurm 24.11 of Debian 13, by its commands: NODES nodes, a job that runs on all, one slurmd killed."""
    del folder
    if reason := slurm_rest.missing():
        do_without("slurm 24.11", reason)
    with slurm_rest.RestCluster(nodes=NODES) as cluster:
        job = ("sbatch", "--parsable", "--no-kill", "--output=/dev/null", f"--nodes={NODES}", "--gpus-per-node=4")
        id_ = cluster.run(*job, "--wrap=sleep 3600").strip()
        until(lambda: cluster.run("squeue", "-h", "-j", id_, "-o", "%T").strip() == "RUNNING", 60)
        dead = cluster.nodes[-1]
        cluster.kill_node(dead)

        def empty() -> None:
            cluster.run("scancel", id_)
            until(lambda: not cluster.run("squeue", "-h", "-w", cluster.nodes[0]).strip(), 60)

        yield Lab(
            f"Slurm 24.11, command line: {NODES} nodes, a job on all of them, the slurmd of {dead} killed",
            cluster.nodes,
            replace(
                ON,
                adapter="slurm",
                slurm=SlurmAccess(commands=cluster.commands),
                limits=replace(LIMITS, two_people_gpus=64),
            ),
            f'[acts.slurm]\ncommands = "{cluster.commands}"',
            *_slurm_commands(cluster.run),
            cluster.kill_controller,
            cluster.start_controller,
            cluster.save_state,
            dead=dead,
            start_node=cluster.start_node,
            empty=empty,
        )


def _slurm_commands(
    run: Callable[..., str],
) -> tuple[Callable[[str], str], Callable[[str], object], Callable[[str], object]]:
    """Returns how Slurm shows a node, and how an administrator drains and resumes it."""

    def update(node: str, *words: str) -> None:
        run("scontrol", "update", f"NodeName={node}", *words)

    def resume(node: str) -> None:
        """Slurm refuses it while the node has not registered at a slurmctld that was started again, and where that came
        back with a state of before the drain."""

        def is_accepted() -> bool:
            try:
                update(node, "State=RESUME")
            except slurm_cluster.SlurmError as error:
                if "Invalid node state" not in str(error):
                    raise
                return "drain" not in run("sinfo", "-h", "-N", "-n", node, "-o", "%T").lower()
            return True

        until(is_accepted, 90)

    return (
        lambda node: " ".join(run("sinfo", "-h", "-N", "-n", node, "-o", "%N %T %E").split()),
        lambda node: update(node, "State=DRAIN", "Reason=NHC: check_fs failed"),
        resume,
    )


@contextmanager
def kubernetes_lab(folder: Path) -> Iterator[Lab]:
    """Kubernetes 1.35: API server, etcd, controllers, scheduler; kwok plays the kubelets."""
    if reason := kubernetes_cluster.missing():
        do_without("kubernetes", reason)
    with kubernetes_cluster.Cluster(folder) as cluster:
        for name in ("gpu1", "gpu2"):
            cluster.node(name, {"nvidia.com/gpu": "8"})

        def show(name: str) -> str:
            node = cluster.read("node", name)
            keys = [taint["key"] for taint in node["spec"].get("taints", ())]
            note = node["metadata"].get("annotations", {}).get("fleetpulse.io/held-for", "none")
            cordoned = "cordoned" if node["spec"].get("unschedulable") else "schedulable"
            return f"{name} {cordoned}, taints {', '.join(keys) or 'none'}, held for {note}"

        def give_back(name: str) -> None:
            cluster.kubectl("uncordon", name)
            if "fleetpulse.io/held" in show(name):
                cluster.kubectl("taint", "node", name, "fleetpulse.io/held-")

        yield Lab(
            "Kubernetes 1.35",
            ("gpu1", "gpu2"),
            replace(ON, adapter="kubernetes", kubernetes=KubernetesAccess(cluster.kubeconfig)),
            f'[acts.kubernetes]\nkubeconfig = "{cluster.kubeconfig}"',
            show,
            lambda name: cluster.kubectl("cordon", name),
            give_back,
            cluster.kill_apiserver,
            cluster.start_apiserver,
        )


LABS: Mapping[str, Callable[[Path], Any]] = {
    "slurm": slurm_lab,
    "slurm24": slurm_24_lab,
    "slurmrestd": slurmrestd_lab,
    "kubernetes": kubernetes_lab,
}


@dataclass(frozen=True)
class Scene:
    """One log: (state, who, comment) of each step of its act, and what the scheduler showed, as (when, text)."""

    title: str
    text: str
    steps: tuple[tuple[str, str, str], ...]
    shown: tuple[tuple[str, str], ...]


class Play:
    """Plays the scenes in a lab, with the API of `served` (see `Served`) and an executor that speaks HTTP."""

    def __init__(self, lab: Lab, served: Any, folder: Path) -> None:
        self.lab, self.served, self.folder, self.kills = lab, served, folder, 0
        self.adapter = make_adapter(lab.acts.adapter, lab.acts)
        self.executor = Executor(
            RemoteBoard(served.config), lab.acts, self.adapter, lambda verb: self.adapter, lambda: served.site.now
        )
        file = folder / "executor.toml"
        about = {"port": served.server.port, "adapter": lab.acts.adapter, "folder": folder, "more": lab.more}
        file.write_text(CONFIG.format(**about))
        self.words = [sys.executable, "-c", "import sys, fleetpulse; sys.exit(fleetpulse.main())", "executor"]
        self.words += ["--config", str(file)]

    # --- what people and the executor do ------------------------------------------------------------

    def propose(self, verb: str, *nodes: str) -> str:
        """Alice proposes; the executor plans."""
        reason = "repaired" if verb == "release" else "corrupts data"
        body = {"verb": verb, "targets": [f"node:{node}" for node in nodes], "reason": reason}
        status, act = self.served.call("POST", "/acts", body, token="dashboard", person="alice")
        assert status == 200, act
        self.work()
        return str(act["id"])

    def approve(self, act: str) -> None:
        """Bob approves the plan that is shown, and types the name of the node."""
        shown = self.served.call("GET", f"/acts/{act}")[1]
        typed = shown["targets"][0].partition(":")[2]
        body = {"plan": shown["plan"]["hash"], "comment": "looked at it", "typed": typed}
        status, said = self.served.call("POST", f"/acts/{act}/approve", body, token="dashboard", person="bob")
        assert status == 200, (said, shown["history"][-1])  # a refusal's reason is in the step

    def work(self) -> None:
        """One round of the executor, a second later."""
        self.served.site.now += SECOND
        self.executor.run_once()

    def state(self, act: str) -> str:
        return str(self.served.board.find(act).state)

    def settle(self, act: str, state: str) -> None:
        """Lets the executor work until the act has a state."""

        def has_state() -> bool:
            self.work()
            return self.state(act) == state

        until(has_state, 60)

    def hold(self, *nodes: str) -> str:
        """A hold that is in force."""
        act = self.propose("hold", *nodes)
        self.approve(act)
        self.settle(act, "verified")
        return act

    def check(self, node: str) -> None:
        """A canary of the node is right after the hold."""
        self.served.site.now += SECOND
        self.served.site.database.connection.execute(
            """INSERT INTO events VALUES (make_timestamptz($1::BIGINT), $2, 'digest',
               '{"digest": "a1", "expected": "a1"}', 's', $3, false, NULL)""",
            [self.served.site.now, f"gpu:{node}.0", node],
        )

    def is_out(self, node: str) -> bool:
        """Whether the scheduler gives a node no new work."""
        return self.adapter.read_state(self.served.site.now).nodes[node].out

    def tell(self, title: str, text: str, act: str, **shown: str) -> Scene:
        steps = self.served.board.describe(act)["history"]
        said = tuple((step["state"], step["actor"], step["comment"]) for step in steps)
        return Scene(title, text, said, tuple((name.replace("_", " "), value) for name, value in shown.items()))

    # --- the scenes ---------------------------------------------------------------------------------

    def play_hold_and_release(self) -> list[Scene]:
        node, show = self.lab.nodes[0], self.lab.show
        before = show(node)
        act = self.hold(node)
        held = self.tell("A hold", "One proposes, another approves.", act, before=before, after=show(node))
        assert act in show(node)
        self.check(node)
        release = self.propose("release", node)
        self.approve(release)
        self.settle(release, "verified")
        assert not self.is_out(node)
        text = "After a check that ran since the hold."
        return [held, self.tell("A release", text, release, after=show(node))]

    def play_refused(self) -> list[Scene]:
        node, show = self.lab.nodes[1], self.lab.show
        self.lab.take_out(node)
        before, scenes = show(node), []
        for verb in ("hold", "release"):
            act = self.propose(verb, node)
            assert self.state(act) == "refused"
            scenes.append(
                self.tell(f"A refused {verb}", "Another administrator took the node out.", act, after=show(node))
            )
        assert show(node) == before
        self.lab.give_back(node)
        return scenes

    def play_undone(self) -> Scene:
        node, show = self.lab.nodes[0], self.lab.show
        act = self.hold(node)
        self.lab.give_back(node)
        self.settle(act, "cancelled")
        for _ in range(5):
            self.work()
        assert not self.is_out(node)
        text = "An administrator gives the node back at the scheduler. The hold ends, and nothing is done about it."
        return self.tell("A person's undo", text, act, five_rounds_later=show(node))

    def play_dead_scheduler(self) -> Scene:
        first, second = self.lab.nodes[:2]
        self.lab.save()  # what others changed in earlier scenes
        act = self.propose("hold", first, second)
        self.approve(act)
        carry_out = self.adapter.carry_out

        def die_after_the_first(act_: Act, node: SchedulerNode) -> Outcome:
            done = carry_out(act_, node)
            self.lab.stop()
            return done

        self.adapter.carry_out = die_after_the_first  # type: ignore[method-assign]
        self.work()
        assert self.state(act) == "executing"
        self.adapter.carry_out = carry_out  # type: ignore[method-assign]
        self.work()
        assert self.state(act) == "executing"
        self.lab.start()
        self.settle(act, "verified")
        shown = {name: self.lab.show(node) for name, node in (("first_node", first), ("second_node", second))}
        assert all(act in text for text in shown.values())
        text = "The scheduler is killed after the first of two nodes, and comes back. Until then the act is executing."
        scene = self.tell("A scheduler that dies in mid-act", text, act, **shown)
        for node in (first, second):
            self.lab.give_back(node)
        self.settle(act, "cancelled")
        return scene

    def play_dead_node(self) -> Scene:
        node, show = self.lab.dead, self.lab.show
        before = show(node)
        act = self.hold(node)
        assert act in show(node)
        plan = self.served.board.find(act).plan
        assert plan is not None
        (job,) = plan.jobs
        shown = {
            "before": before,
            "after": show(node),
            "job": f"{job.job}: {job.nodes} nodes, {job.gpus} GPUs",
            "two people": "; ".join(plan.people_why),
        }
        assert (job.nodes, job.gpus, plan.people) == (NODES, NODES * slurm_rest.GPUS, 2), job
        text = "The node does not answer, and a job runs on all nodes: the hold is accepted and seen all the same."
        return self.tell("A hold of a node whose slurmd is dead", text, act, **shown)

    def play_reboot(self) -> list[Scene]:
        """The node that the killed executor held is rebooted, and its slurmd started once more after that."""
        node, show, start = self.lab.nodes[0], self.lab.show, self.lab.start_node
        assert start is not None
        self.served.site.now += 31 * SECOND  # the lease of the killed executor is over
        self.lab.empty()
        self.served.board.config = replace(self.served.board.config, reboot="on")
        act = self.propose("reboot", node)
        self.approve(act)
        self.settle(act, "verifying")
        until(lambda: "reboot issued" in show(node), 60)
        issued = show(node)
        start(node, "-b")
        self.settle(act, "verified")
        shown = {"rebooting": issued, "rebooted": show(node)}
        start(node)
        for _ in range(5):
            self.work()
            assert self.is_out(node), show(node)
        text = "Of a node that is held and idle. It stays held: also when its slurmd registers once more."
        scene = self.tell("A reboot", text, act, **shown, slurmd_restarted=show(node))
        self.check(node)
        release = self.propose("release", node)
        self.approve(release)
        self.settle(release, "verified")
        return [scene, self.tell("A release after the reboot", "As any other.", release, after=show(node))]

    def play_killed_executor(self) -> Scene:
        node, act = self.lab.nodes[0], ""
        body = {"verb": "hold", "targets": [f"node:{node}"], "reason": "corrupts data"}
        act = self.served.call("POST", "/acts", body, token="dashboard", person="alice")[1]["id"]
        for step in STEPS:
            self.served.site.now += 31 * SECOND  # the dead executor's lease is over
            self.reach(act, step)
            if step == "awaiting_approval":
                self.approve(act)
        found = self.served.board.find(act)
        assert (found.state, found.held) == ("verified", (f"node:{node}",))
        assert act in self.lab.show(node)
        states = [step["state"] for step in self.served.board.describe(act)["history"]]
        assert [states.count(s) for s in ("executed", "verified", "failed", "rolled_back")] == [1, 1, 0, 0], states
        text = f"Its process gets signal 9 as soon as the act has each of {len(STEPS)} states, and is started again."
        return self.tell("An executor that is killed between its steps", text, act, after=self.lab.show(node))

    def reach(self, act: str, state: str) -> None:
        """Runs the executor's process until the act has a state or a later one, and kills it at that moment."""
        with open(self.folder / "executor.log", "ab") as log:
            process = subprocess.Popen(self.words, env={**os.environ, **self.lab.environ}, stdout=log, stderr=log)
        try:
            end = time.monotonic() + LIMIT_S
            later = STEPS[STEPS.index(state) :]
            while (now := self.state(act)) not in later:
                assert time.monotonic() < end, f"{act} is {now}, not {state}"
                assert process.poll() is None, (self.folder / "executor.log").read_text()[-2000:]
                time.sleep(0.002)  # polls a real process
            self.kills += 1
        finally:
            process.kill()  # signal 9
            process.wait()
