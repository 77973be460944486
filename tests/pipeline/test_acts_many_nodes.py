"""Acts of several nodes: what goes on at one node delays no other, and each adapter has its own limit of time."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from kubernetes import client

from pipeline.acts.act import Act
from pipeline.acts.adapters.adapter import Adapter, Outcome, StillRunning, check_owner
from pipeline.acts.adapters.kubernetes import Kubernetes
from pipeline.acts.adapters.programs import TIMEOUT_S, Programs
from pipeline.acts.adapters.slurm import parse_count
from pipeline.acts.lease import LEASE_S
from pipeline.acts.scheduler import SchedulerNode
from pipeline.config.acts import KubernetesAccess, Mode
from pipeline.model.errors import ConfigError, Refused
from pipeline.model.records import SECOND
from pipeline.store.database import Database
from tests.pipeline.acts_world import ON, World
from tests.until import until


class Budgets(World):
    """A world in which pods of some nodes are protected, and of others refused. asked: nodes, in order."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.protected, self.refused, self.asked = {"n03"}, set[str](), list[str]()
        carry_out = self.scheduler.carry_out

        def evict(act: Act, node: SchedulerNode) -> Outcome:
            if act.verb == "evict":
                self.asked.append(node.name)
                if node.name in self.protected:
                    raise StillRunning(f"pods of {node.name}: protected")
                if node.name in self.refused:
                    return Outcome(False, f"pods of {node.name} do not end")
            return carry_out(act, node)

        self.scheduler.carry_out = evict  # type: ignore[method-assign]

    def begin(self, *names: str) -> Act:
        """An eviction of nodes that are held; nodes with a job."""
        for name in names:
            hold = self.propose("hold", name)
            self.approve(hold)
            self.run(3)
        self.scheduler.run("81", names)
        act = self.propose("evict", *names)
        self.approve(act)
        self.run()
        return act


@pytest.fixture
def world(database: Database) -> Budgets:
    return Budgets(database)


def test_a_budget_that_protects_a_pod_of_one_node_delays_no_other_node(world: Budgets) -> None:
    act = world.begin("n03", "n11")
    assert (world.state(act), world.scheduler.nodes["n11"].jobs) == ("executing", ())
    assert world.scheduler.nodes["n03"].jobs == ("81",)
    world.run(2)
    assert world.asked.count("n11") == 1, "a finished node is not asked again"
    world.protected.clear()
    world.run(3)
    assert world.state(act) == "verified"


def test_of_nodes_of_which_one_is_refused_the_others_end_first(world: Budgets) -> None:
    world.protected, world.refused = {"n03", "n11"}, set()
    act = world.begin("n03", "n11")
    world.protected, world.refused = {"n03"}, {"n11"}
    world.run(3)
    assert (world.state(act), world.asked.count("n11")) == ("executing", 2)
    world.protected.clear()
    world.run()
    found = world.board.find(act.id)
    assert (found.state, found.result["reason"]) == ("failed", "node:n11: pods of n11 do not end")
    assert found.result["targets"]["node:n03"]["done"] is True


def test_after_a_refusal_no_further_node_is_begun(world: Budgets) -> None:
    world.protected, world.refused = set(), {"n03"}
    act = world.begin("n03", "n11")
    assert (world.state(act), world.asked) == ("failed", ["n03"])


def test_an_act_that_goes_on_has_the_time_that_its_adapter_gives_it(world: Budgets) -> None:
    world.scheduler.find_limit = lambda act: 7200.0  # type: ignore[method-assign]
    act = world.begin("n03", "n11")
    world.now += 7000 * SECOND
    world.run()
    assert world.state(act) == "executing"
    world.now += 300 * SECOND
    world.run()
    assert world.state(act) == "failed"
    assert world.board.find(act.id).result["reason"].startswith("its effect is unknown for 120 min: pods of n03")


def test_no_adapter_is_given_up_before_its_own_limit() -> None:
    act = Act("ACT-1", "evict", ("node:n03",), "alice", "x", 0, 1, "on")
    acts = replace(ON, kubernetes=KubernetesAccess(evict_minutes=90.0))
    assert Kubernetes(acts, client.ApiClient).find_limit(act) > 90 * 60
    assert Programs(ON).find_limit(replace(act, verb="reset")) > TIMEOUT_S


def test_programs_of_two_nodes_run_at_the_same_time_and_wait_once(tmp_path: Path) -> None:
    script = f"touch {shlex.quote(str(tmp_path))}/$0; until [ -e {shlex.quote(str(tmp_path))}/go ]; do sleep 0.02; done"
    acts = replace(ON, exec={"diagnose": ("sh", "-c", script, "{node}")})
    programs = Programs(acts, wait_s=0.01)
    act = Act("ACT-1", "diagnose", ("node:n03", "node:n11"), "alice", "x", 0, 1, "on")
    nodes = [SchedulerNode(name, False, "IDLE") for name in ("n03", "n11")]
    for node in nodes:
        with pytest.raises(StillRunning):
            programs.carry_out(act, node)
    until(lambda: {"n03", "n11"} <= {file.name for file in tmp_path.iterdir()}, 10)
    (tmp_path / "go").touch()
    for node in nodes:
        programs._running[act.id, node.name].process.wait(10)
        assert programs.carry_out(act, node).done


def test_an_executor_keeps_its_right_to_act_through_a_long_round(world: Budgets) -> None:
    first = world.propose("hold", "n03")
    world.approve(first)
    world.board.claim("executor")
    world.now += round(LEASE_S * 0.8) * SECOND
    world.board.begin(first.id, (), "executor")
    world.now += round(LEASE_S * 0.8) * SECOND
    with pytest.raises(Refused, match="is at work"):
        world.board.claim("standby")
    world.now += round(LEASE_S) * SECOND
    world.board.begin(
        first.id, (), "executor"
    )  # no other command has asked: it is about to run a command, and stays alone
    with pytest.raises(Refused, match="is at work"):
        world.board.claim("standby")
    world.now += round(LEASE_S) * SECOND
    world.board.report(first.id, "executed", "executor", {})  # too late: the right is not taken again by a report
    assert world.board.claim("standby")


def test_an_error_that_nobody_expected_stops_no_other_act_and_ends_its_own(world: Budgets) -> None:
    evict = world.scheduler.carry_out

    def break_down(act: Act, node: SchedulerNode) -> Outcome:
        if node.name == "n03":
            raise ValueError("invalid literal for int(): '2K'")
        return evict(act, node)

    world.scheduler.carry_out = break_down  # type: ignore[method-assign]
    first, second = world.propose("hold", "n03"), world.propose("hold", "n11")
    world.approve(first)
    world.approve(second)
    world.run(3)
    assert (world.state(first), world.state(second)) == ("executing", "verified")
    assert "invalid literal" in world.board.show(world.board.find(first.id))["waits_for"]
    world.now += 31 * 60 * SECOND
    world.run()
    assert (world.state(first), world.board.find(first.id).held) == ("failed", ("node:n03",))


@pytest.mark.parametrize("state", ["executing", "verifying"])
def test_an_act_whose_adapter_is_gone_from_the_configuration_does_not_stay_open_for_ever(
    world: Budgets, state: str
) -> None:
    act = world.propose("hold", "n03")
    world.approve(act)
    if state == "executing":
        world.board.begin(act.id, (), "executor")
    else:
        world.run()

    def refuse(verb: str) -> Adapter:
        raise ConfigError(f"[acts] adapter of {verb}: missing")

    world.executor._find_adapter = refuse
    world.run()
    assert world.state(act) == state
    world.now += 31 * 60 * SECOND
    world.run()
    assert world.state(act) == "failed"


def test_a_node_that_a_person_took_over_or_that_got_a_job_is_not_rebooted() -> None:
    act = Act("ACT-2", "reboot", ("node:n03",), "alice", "x", 0, 1, "on")
    held = SchedulerNode("n03", True, "IDLE+DRAIN", "fleetpulse:ACT-1 alice")
    assert check_owner(act, held, held) is None
    for fresh in (replace(held, reason="NHC: disk"), replace(held, out=False), replace(held, jobs=("81",))):
        decided = check_owner(act, fresh, held)
        assert decided is not None
        assert not decided.done


@pytest.mark.parametrize(("text", "count"), [("8", 8), ("2K", 2048), ("1.5K", 1536), ("", 1), ("N/A", 1)])
def test_a_number_of_squeue_may_be_shortened(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(("own", "mode", "state"), [("off", "dry-run", "refused"), ("dry-run", "on", "refused")])
def test_the_executors_own_mode_decides_whatever_the_pipeline_is_configured_to_do(
    own: Mode, mode: Mode, state: str, database: Database
) -> None:
    world = World(database, replace(ON, hold=mode))
    world.executor.config = replace(ON, hold=own)
    act = world.propose("hold", "n03")
    assert world.state(act) == state
    assert f"[acts] hold is {own} at the executor, {mode} at the pipeline" in world.board.find(act.id).result["reason"]
    world.executor.config = ON
    act = world.propose("hold", "n03")
    world.approve(act)
    world.executor.config = replace(ON, hold=own)
    world.run()
    assert (world.state(act), world.scheduler.log) == ("refused", [])
