"""A scheduler that loses its last changes in a crash, and releases that are interrupted."""

from __future__ import annotations

import pytest
from kubernetes import client

from pipeline.acts.act import Act
from pipeline.acts.adapters.adapter import NotYet, Outcome
from pipeline.acts.adapters.kubernetes import parse_node
from pipeline.acts.adapters.slurm import find_undo, parse_nodes
from pipeline.acts.adapters.slurmrestd import parse_nodes as parse_rest
from pipeline.acts.scheduler import SchedulerNode
from pipeline.config.acts import KubernetesAccess
from pipeline.incidents.audit import list_audit
from pipeline.model.records import SECOND
from pipeline.store.database import Database
from tests.pipeline.acts_world import Killed, World


@pytest.fixture
def world(database: Database) -> World:
    made = World(database)
    made.scheduler.saved_after_s = 10.0
    return made


def begin(world: World, verb: str, *names: str) -> Act:
    """An act that the scheduler shows, and might still lose."""
    act = world.propose(verb, *names)
    world.approve(act)
    world.run(4)
    assert world.state(act) == "verifying"
    return act


def finish(world: World, verb: str, *names: str) -> Act:
    act = begin(world, verb, *names)
    world.run(10)
    assert world.state(act) == "verified"
    return act


def test_an_act_is_verified_only_once_the_scheduler_no_longer_loses_it(world: World) -> None:
    act = begin(world, "hold", "n03")
    steps = {step["state"]: step["time"] for step in world.board.describe(act.id)["history"]}
    world.run(20)
    assert world.state(act) == "verified"
    steps |= {step["state"]: step["time"] for step in world.board.describe(act.id)["history"]}
    assert (steps["executed"][17:19], steps["verified"][17:19]) == ("01", "12")


def test_a_hold_that_the_scheduler_lost_fails_and_is_not_a_persons_undo(world: World) -> None:
    act = begin(world, "hold", "n03")
    world.scheduler.by_hand("n03", False)
    world.now += 6 * 60 * SECOND
    world.run(2)
    found = world.board.find(act.id)
    assert (found.state, found.held) == ("failed", ())
    assert found.result["reason"] == "the scheduler shows no effect on node:n03 (IDLE)"


def test_a_release_that_the_scheduler_lost_fails_and_can_be_done_again(world: World) -> None:
    hold = finish(world, "hold", "n03")
    before = world.scheduler.nodes["n03"]
    release = begin(world, "release", "n03")
    assert world.board.find(hold.id).held == ("node:n03",), "it is ours until the release is verified"
    world.scheduler.nodes["n03"] = before
    world.now += 6 * 60 * SECOND
    world.run(2)
    assert (world.state(release), world.board.find(hold.id).held) == ("failed", ("node:n03",))
    finish(world, "release", "n03")
    assert world.board.find(hold.id).held == ()


@pytest.mark.parametrize(
    ("state", "reason", "absent"),
    [
        ("DOWN*", "Not responding", True),
        ("DOWN", "Node unexpectedly rebooted", True),
        ("DOWN", "broken fan", False),
        ("DOWN*+DRAIN", "Not responding", False),
        ("IDLE*", "", False),
    ],
)
def test_a_node_that_slurm_itself_marked_down_can_be_held(world: World, state: str, reason: str, absent: bool) -> None:
    said = f" Reason={reason} [root@1789000000]" if reason else ""
    node = parse_nodes(f"NodeName=n03 Arch=x86_64 State={state} ThreadsPerCore=1{said}\n", {})["n03"]
    assert (node.absent, node.is_taken) == (absent, node.out and not absent)
    rest = parse_rest({"nodes": [{"name": "n03", "state": state.replace("*", "").split("+"), "reason": reason}]}, {})
    assert rest["n03"].absent == absent
    world.scheduler.nodes["n03"] = node
    act = world.propose("hold", "n03")
    assert act.state == ("refused" if node.is_taken else "awaiting_approval")


@pytest.mark.parametrize(
    ("held", "before", "undone"),
    [
        ("DOWN+DRAIN", ("DOWN", "Node unexpectedly rebooted"), ("UNDRAIN", "Node unexpectedly rebooted")),
        ("DOWN*+DRAIN", ("DOWN*", "Not responding"), ("UNDRAIN", "Not responding")),
        ("DOWN+DRAIN", ("DOWN+DRAIN", "fleetpulse:ACT-1 x"), ("UNDRAIN", "Not responding")),  # after an interruption
        ("DOWN*+DRAIN", ("IDLE", ""), ("UNDRAIN", "Not responding")),  # it died in between
        ("IDLE+DRAIN", ("IDLE", ""), ("RESUME", "")),
        ("MIXED+DRAIN+POWERED_DOWN", ("MIXED", ""), ("RESUME", "")),
    ],
)
def test_the_undo_of_a_hold_gives_no_work_to_a_node_that_was_down(
    held: str, before: tuple[str, str], undone: tuple[str, str]
) -> None:
    lines = (
        f"NodeName=n03 State={state} Reason={reason} [slurm@1789000000]"
        for state, reason in ((held, "fleetpulse:ACT-1 x"), before)
    )
    fresh, planned = (parse_nodes(line, {})["n03"] for line in lines)
    assert find_undo(fresh, planned) == undone


def test_what_follows_the_reason_of_a_node_is_no_part_of_it() -> None:
    said = "NodeName=n03 State=DOWN CurrentWatts=0 Reason=Not responding [slurm@1789000000] Comment=old fan [1]"
    node = parse_nodes(said, {})["n03"]
    assert (node.reason, node.absent) == ("Not responding", True)


@pytest.mark.parametrize("state", ["IDLE*", "MIXED+NOT_RESPONDING"])
def test_nodes_that_do_not_answer_slurm_count_as_out_before_it_marks_them_down(world: World, state: str) -> None:
    text = f"NodeName=n03 Arch=x86_64 State={state} ThreadsPerCore=1\n"
    assert parse_nodes(text, {})["n03"].unusable
    assert parse_rest({"nodes": [{"name": "n03", "state": ["IDLE", "NOT_RESPONDING"]}]}, {})["n03"].unusable
    for name in ("n03", "n04", "n11", "n12"):
        world.scheduler.nodes[name] = parse_nodes(text.replace("n03", name), {})[name]
    other = world.propose("hold", "n20")
    assert (other.state, other.result["reason"].partition(":")[0]) == ("refused", "nodes out in fleet")
    itself = world.propose("hold", "n03")
    assert itself.state == "awaiting_approval", "held, it gets no work when it answers again"


@pytest.mark.parametrize(
    ("ready", "cordoned", "taint", "absent"),
    [
        ("Unknown", False, "node.kubernetes.io/unreachable", True),
        ("False", False, "node.kubernetes.io/not-ready", True),
        ("Unknown", True, "node.kubernetes.io/unreachable", False),
        ("Unknown", False, "node.kubernetes.io/out-of-service", False),
        ("True", False, "team/reserved", False),
    ],
)
def test_a_node_that_kubernetes_itself_finds_unreachable_can_be_held(
    ready: str, cordoned: bool, taint: str, absent: bool
) -> None:
    node = client.V1Node(
        metadata=client.V1ObjectMeta(name="n03", resource_version="7"),
        spec=client.V1NodeSpec(unschedulable=cordoned, taints=[client.V1Taint(key=taint, effect="NoSchedule")]),
        status=client.V1NodeStatus(conditions=[client.V1NodeCondition(type="Ready", status=ready)]),
    )
    found = parse_node(node, ())
    assert (found.out, found.absent, found.is_taken) == (True, absent, not absent)


@pytest.mark.parametrize(
    ("keys", "out", "reason"),
    [
        (("nvidia.com/gpu",), False, ""),
        (("nvidia.com/gpu", "broken"), True, "broken"),
        (("fleetpulse.io/held",), True, "fleetpulse.io/held"),  # a person uncordoned it and left the taint
    ],
)
def test_a_taint_that_reserves_a_node_takes_it_not_out_and_one_that_is_left_is_named(
    keys: tuple[str, ...], out: bool, reason: str
) -> None:
    node = client.V1Node(
        metadata=client.V1ObjectMeta(name="n03", annotations={"fleetpulse.io/held-for": "fleetpulse:ACT-1 alice"}),
        spec=client.V1NodeSpec(taints=[client.V1Taint(key=key, effect="NoSchedule") for key in keys]),
        status=client.V1NodeStatus(conditions=[client.V1NodeCondition(type="Ready", status="True")]),
    )
    found = parse_node(node, (), KubernetesAccess().dedicated_taints)
    assert (found.out, found.reason, found.mark) == (out, reason, "")


@pytest.mark.slow
def test_a_release_that_slurm_refuses_until_the_node_registers_is_tried_for_minutes_and_stays_ours(
    world: World,
) -> None:
    hold = finish(world, "hold", "n03")
    carry_out = world.scheduler.carry_out

    def refuse(act: Act, node: SchedulerNode) -> Outcome:
        raise NotYet(f"{node.name} has not registered")

    world.scheduler.carry_out = refuse  # type: ignore[method-assign]
    release = world.propose("release", "n03")
    world.approve(release)
    world.run(20)
    assert world.state(release) == "executing"
    steps = [step["state"] for step in world.board.describe(release.id)["history"]]
    assert steps.count("executing") == 1, "one row, not one for each try"
    world.now += 5 * 60 * SECOND
    world.run()
    found = world.board.find(release.id)
    assert (found.state, found.result["reason"]) == ("failed", "tried for 5 min: n03 has not registered")
    assert world.board.find(hold.id).held == ("node:n03",)
    world.scheduler.carry_out = carry_out  # type: ignore[method-assign]
    finish(world, "release", "n03")


def test_what_a_release_gave_back_before_it_failed_is_no_persons_undo(world: World) -> None:
    hold = finish(world, "hold", "n03", "n11")
    carry_out = world.scheduler.carry_out

    def refuse_the_second(act: Act, node: SchedulerNode) -> Outcome:
        return Outcome(False, "Invalid node state") if node.name == "n11" else carry_out(act, node)

    world.scheduler.carry_out = refuse_the_second  # type: ignore[method-assign]
    release = world.propose("release", "n03", "n11")
    world.approve(release)
    world.run(3)
    assert world.state(release) == "failed"
    found = world.board.find(hold.id)
    assert (found.state, found.held) == ("verified", ("node:n11",))
    said = world.board.describe(hold.id)["history"][-1]["comment"]
    assert said == f"node:n03: {release.id}, which failed, or a person gave it back (IDLE)"
    world.scheduler.by_hand("n11", False)
    world.run()
    assert (world.board.find(hold.id).held, world.state(hold)) == ((), "verified")


def test_a_pipeline_that_is_killed_while_a_release_is_verified_records_no_persons_undo(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = world.propose("hold", "n03")
    world.approve(hold)
    world.run(20)
    release = world.propose("release", "n03")
    world.approve(release)
    save, saved = world.board._save, []

    def die_after_the_first(act: Act, *given: object) -> Act:
        if saved:
            raise Killed
        saved.append(save(act, *given))  # type: ignore[arg-type] # as it was called
        return saved[0]

    report = world.board.report

    def report_until_killed(id_: str, state: str, *given: object) -> Act:
        if state == "verified":
            monkeypatch.setattr(world.board, "_save", die_after_the_first)
        return report(id_, state, *given)  # type: ignore[arg-type] # as it was called

    monkeypatch.setattr(world.board, "report", report_until_killed)
    with pytest.raises(Killed):
        world.run(20)
    monkeypatch.undo()
    world.executor = world.start_executor()
    world.run(20)
    assert (world.state(hold), world.state(release)) == ("verified", "verified")
    assert world.board.find(hold.id).held == ()
    ended = [row["action"] for row in list_audit(world.database.connection, target=hold.id)]
    assert ("end hold" in ended, "hold undone" in ended) == (True, False)


def test_a_node_that_another_drained_right_after_its_release_is_left_to_them(world: World) -> None:
    hold, release = finish(world, "hold", "n03"), begin(world, "release", "n03")
    world.scheduler.by_hand("n03", True, "NHC: check_fs failed")
    world.now += 6 * 60 * SECOND
    world.run(3)
    assert (world.state(release), world.state(hold)) == ("failed", "cancelled")
    assert world.scheduler.nodes["n03"].reason == "NHC: check_fs failed"


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("calls", range(8))
def test_a_killed_executor_neither_repeats_nor_forgets_a_release(world: World, calls: int) -> None:
    hold = finish(world, "hold", "n03", "n11")
    release = world.propose("release", "n03", "n11")
    world.approve(release)
    world.scheduler.kill_at = calls
    for _ in range(20):
        try:
            world.run()
        except Killed:
            world.executor = world.start_executor()
    assert world.state(release) == "verified"
    assert [entry[1] for entry in world.scheduler.log if entry[0] == "release"] == ["n03", "n11"]
    states = {step["state"] for step in world.board.describe(hold.id)["history"]}
    assert (world.board.find(hold.id).held, "cancelled" in states) == ((), False)
