"""Recovery: NVIDIA's recommendation on plans, shown verbatim and never undercut; when a reboot by Slurm is over."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.acts.adapters.slurm import Slurm, parse_nodes
from pipeline.acts.guards import NVML_ACTIONS
from pipeline.acts.scheduler import SchedulerNode
from pipeline.model.signals import CATALOGUE
from pipeline.store.database import Database
from tests.pipeline.acts_world import ON, World


@pytest.fixture
def world(database: Database) -> World:
    return World(database)


def test_the_recovery_action_of_the_driver_stands_on_each_plan_with_nvmls_own_name(world: World) -> None:
    states = CATALOGUE["gpu.recovery_action"].states
    assert set(NVML_ACTIONS) == set(states)
    world.facts["recovery"] = {"n03": "reboot node"}
    for verb in ("hold", "diagnose", "ticket", "evict", "reset", "release"):
        plan = world.propose(verb, "n03").plan
        assert plan is not None
        (said,) = [guard.now for guard in plan.guards if guard.name == "recovery_action"]
        assert said == "n03: reboot node (NVML_GPU_RECOVERY_ACTION_NODE_REBOOT)"


@pytest.mark.parametrize("action", ["recover IMEX domain", "reset bus", "reboot system", "reboot node"])
def test_the_reset_of_a_gpu_is_less_than_a_bus_an_imex_domain_or_a_node_needs(world: World, action: str) -> None:
    hold = world.propose("hold", "n03")
    world.approve(hold)
    world.run(3)
    world.facts["recovery"] = {"n03": action}
    plan = world.propose("reset", "n03").plan
    assert plan is not None
    assert [guard.name for guard in plan.failing] == ["recovery_action"]


@pytest.mark.parametrize(
    ("state", "reason", "over"),
    [
        ("IDLE+DRAIN+REBOOT_REQUESTED", "fault", None),
        ("DOWN+DRAIN+REBOOT_ISSUED", "fault : reboot issued", None),
        ("DOWN*+DRAIN", "fault : reboot issued", None),
        ("DOWN+DRAIN", "fault : reboot issued : reboot timed out", None),
        ("DOWN+DRAIN+NOT_RESPONDING", "fault : reboot issued", None),
        ("IDLE+DRAIN", "fault : reboot issued", True),
    ],
)
def test_a_reboot_by_slurm_is_over_when_the_node_is_back(
    world: World, state: str, reason: str, over: bool | None
) -> None:
    act = replace(world.propose("hold", "n03"), verb="reboot")
    node = parse_nodes(f"NodeName=n03 State={state} CurrentWatts=0 Reason={reason} [root@1789000000]", {})["n03"]
    assert Slurm(ON).find_effect(act, node) is over


def test_a_second_reboot_has_the_reason_of_the_hold_alone(world: World) -> None:
    act = replace(world.propose("hold", "n03"), verb="reboot")
    node = SchedulerNode("n03", True, "DOWN+DRAIN", f"{act.mark} alice fault : reboot complete")
    (command,) = Slurm(ON).list_commands(act, replace(world.scheduler.read_state(0), nodes={"n03": node}))
    assert command == f"scontrol reboot 'reason={act.mark} alice fault' n03"
