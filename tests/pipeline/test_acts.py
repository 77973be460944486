"""Acts from proposal to verification: who may do what, guards at both moments, marks, kills, the breaker."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.acts import ledger
from pipeline.acts.act import parse_act
from pipeline.acts.lease import Lease
from pipeline.config.acts import ActPolicy, Acts
from pipeline.incidents.audit import check_chain, list_audit
from pipeline.model.errors import Refused, UsageError
from pipeline.model.records import SECOND, Caller
from pipeline.store.database import Database
from tests.pipeline.acts_world import ALICE, BOB, CAROL, ON, ROBOT, ROOT, Killed, World


@pytest.fixture
def world(database: Database) -> World:
    return World(database)


def hold(world: World, *names: str) -> str:
    """Holds nodes through all steps and returns the act's id."""
    act = world.propose("hold", *names)
    world.approve(act)
    world.run(3)
    assert world.state(act) == "verified"
    return act.id


# --- the way through all states -----------------------------------------------------------------------


def test_a_hold_is_planned_approved_executed_and_verified_with_our_mark_at_the_scheduler(world: World) -> None:
    act = world.propose("hold", "n03", incident="INC-1")
    assert (act.state, act.plan is not None and act.plan.commands) == ("awaiting_approval", ("hold node:n03",))
    world.approve(act, ALICE)
    world.run(3)
    node = world.scheduler.nodes["n03"]
    assert (world.state(act), node.out, node.mark) == ("verified", True, act.mark)
    assert "INC-1" in node.reason
    steps = [step.state for step in ledger.load_steps(world.database.connection, act.id)]
    assert steps == ["proposed", "awaiting_approval", "approved", "executing", "executed", "verifying", "verified"]


def test_a_dry_run_goes_the_same_way_and_runs_nothing(database: Database) -> None:
    world = World(database, replace(ON, hold="dry-run"))
    act = world.propose("hold", "n03")
    world.approve(act)
    world.run(3)
    found = world.board.find(act.id)
    assert (found.state, found.result, found.is_open) == ("executed", {"dry_run": True}, False)
    assert world.scheduler.log == []


def test_a_verb_that_is_off_is_refused(database: Database) -> None:
    world = World(database, Acts())
    with pytest.raises(Refused, match=r"\[acts\] evict is off"):
        world.propose("evict", "n03")


@pytest.mark.slow
def test_a_release_ends_the_hold_and_the_node_gets_work_again(world: World) -> None:
    held = hold(world, "n03")
    act = world.propose("release", "n03")
    world.approve(act)
    world.run(3)
    assert (world.state(act), world.scheduler.nodes["n03"].out) == ("verified", False)
    assert not world.board.find(held).is_in_force


def test_of_a_hold_of_two_nodes_one_may_be_released_alone(world: World) -> None:
    held = hold(world, "n03", "n11")
    act = world.propose("release", "n03")
    world.approve(act)
    world.run(3)
    assert world.board.find(held).held == ("node:n11",)
    assert world.state(act) == "verified"


@pytest.mark.slow
def test_evict_ends_the_jobs_of_a_held_node_and_leaves_the_hold(world: World) -> None:
    held = hold(world, "n03")
    world.scheduler.run("81", ("n03", "n04"))
    act = world.propose("evict", "n03")
    assert act.plan is not None
    assert (act.plan.people, [hit.job for hit in act.plan.jobs]) == (2, ["81"])
    world.approve(act)
    world.run(3)
    assert (world.state(act), world.scheduler.nodes["n03"].jobs) == ("verified", ())
    assert world.board.find(held).is_in_force


def test_an_act_for_idle_nodes_waits_until_no_job_is_left(world: World) -> None:
    world.scheduler.run("81", ("n03",))
    act = world.propose("hold", "n03", when="when_idle")
    world.approve(act)
    world.run(2)
    assert world.state(act) == "approved"
    world.scheduler.nodes["n03"] = replace(world.scheduler.nodes["n03"], jobs=())
    world.run(3)
    assert world.state(act) == "verified"


def test_an_act_after_the_next_checkpoint_waits_for_it(world: World) -> None:
    world.scheduler.run("81", ("n03",))
    act = world.propose("hold", "n03", when="after_checkpoint")
    world.approve(act)
    world.run(2)
    assert world.state(act) == "approved"
    world.facts["checkpoints"] = frozenset({"81"})
    world.run(3)
    assert world.state(act) == "verified"


def test_acts_survive_their_json(world: World) -> None:
    import json

    from pipeline.acts.act import encode_act

    act = world.propose("hold", "n03", params={"why": "häß<b>"})
    assert parse_act(json.loads(encode_act(act))) == act


# --- who may --------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, dict[str, object]]] = {
    "a token approves": ("tokens never approve", {"who": ROBOT, "person": False}),
    "an administrator's token approves": ("tokens never approve", {"who": ROOT, "person": False}),
    "the requester approves what needs two": ("requester cannot approve", {"who": ALICE}),
    "the node's name is not typed": ("name of the node was typed", {"who": BOB, "typed": "n04"}),
    "an operator breaks the glass": ("needs the role admin", {"who": BOB, "break_glass": True, "comment": "x" * 20}),
    "break-glass without a reason": ("reason of at least", {"who": ROOT, "break_glass": True, "comment": "now"}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_approval_without_the_right_is_refused_and_audited(case: str, world: World) -> None:
    hold(world, "n03")
    act, (text, how) = world.propose("evict", "n03"), REFUSED[case]
    with pytest.raises(Refused, match=text):
        world.approve(act, **how)  # type: ignore[arg-type]
    world.run(3)
    assert world.state(act) == "awaiting_approval"
    newest = list_audit(world.database.connection)[0]
    assert (newest["outcome"], newest["target"], text in newest["reason"]) == ("refused", act.id, True)
    assert not any(verb == "evict" for verb, _, _ in world.scheduler.log)


def test_the_approval_of_another_plan_is_refused(world: World) -> None:
    act = world.propose("hold", "n03")
    with pytest.raises(Refused, match="plan has changed"):
        world.board.approve(act.id, BOB, "0" * 64, True)


def test_an_approval_expires_and_nothing_is_done(world: World) -> None:
    act = world.propose("hold", "n03")
    world.approve(act)
    world.now += 16 * 60 * SECOND
    world.run(2)
    assert (world.state(act), world.scheduler.log) == ("expired", [])


def test_an_expired_proposal_cannot_be_approved(world: World) -> None:
    act = world.propose("hold", "n03")
    world.now += 25 * 3600 * SECOND
    with pytest.raises(Refused, match="expired"):
        world.approve(act)


def test_a_replayed_request_makes_no_second_act_and_a_stolen_key_no_other_one(world: World) -> None:
    first = world.propose("hold", "n03", key="k1")
    assert world.propose("hold", "n03", key="k1").id == first.id
    with pytest.raises(Refused, match="key was used"):
        world.propose("hold", "n04", key="k1")


def test_an_approved_act_is_not_approved_or_executed_twice(world: World) -> None:
    act = world.propose("hold", "n03")
    world.approve(act)
    world.run(3)
    with pytest.raises(Refused, match="it is verified"):
        world.board.approve(act.id, CAROL, act.plan.hash(act) if act.plan else "", True)
    assert [entry[:2] for entry in world.scheduler.log] == [("hold", "n03")]


def test_two_different_people_must_approve_what_a_program_asked_for(world: World) -> None:
    hold(world, "n03")
    act = world.propose("evict", "n03", who=ROBOT, person=False)
    assert world.approve(act, BOB).state == "awaiting_approval"
    with pytest.raises(Refused, match="same person"):
        world.approve(act, BOB)
    assert world.approve(act, CAROL).state == "approved"


@pytest.mark.slow
def test_break_glass_lets_one_administrator_act_on_one_node_per_hour_and_tells_everybody(world: World) -> None:
    held = [hold(world, name) for name in ("n03", "n11")]
    first, second = (world.propose("evict", name, who=ROOT) for name in ("n03", "n11"))
    how = {"who": ROOT, "break_glass": True, "comment": "alone on call, job corrupts data"}
    assert world.approve(first, **how).state == "approved"  # type: ignore[arg-type]
    assert world.notices == ["Break-glass: root alone approved evict n03"]
    with pytest.raises(Refused, match="within the hour"):
        world.approve(second, **how)  # type: ignore[arg-type]
    assert len(held) == 2


def test_a_cancelled_act_does_nothing_and_a_running_one_is_not_cancelled(world: World) -> None:
    act = world.propose("hold", "n03")
    world.board.cancel(act.id, BOB, "wrong node")
    world.run(3)
    assert (world.state(act), world.scheduler.log) == ("cancelled", [])
    with pytest.raises(Refused, match="a release undoes it"):
        world.board.cancel(hold(world, "n04"), BOB, "")


@pytest.mark.parametrize("target", ["gpu:n03.1", "n03", "node:", "node:-a", "node:a b", "node:n[01-99]", "node:a,b"])
def test_only_single_nodes_are_targets(world: World, target: str) -> None:
    with pytest.raises(UsageError, match="expected a node"):
        world.board.propose("hold", [target], ALICE, "fault")


def test_a_changed_row_of_the_audit_is_found(world: World) -> None:
    hold(world, "n03")
    assert check_chain(world.database.connection) is None
    world.database.connection.execute("UPDATE audit SET actor = 'mallory' WHERE number = 2")
    assert check_chain(world.database.connection) == 2


# --- guards ---------------------------------------------------------------------------------------------


def failing(world: World, *names: str, verb: str = "hold", **more: object) -> set[str]:
    act = world.propose(verb, *names, **more)  # type: ignore[arg-type]
    assert act.plan is not None
    return {guard.name for guard in act.plan.failing}


def test_a_third_node_of_a_rack_needs_an_override_by_two_people(world: World) -> None:
    world.scheduler.by_hand("n01", True, "bad disk")
    act = world.propose("hold", "n02", "n03")
    assert act.plan is not None
    assert {guard.name for guard in act.plan.failing} == {"nodes_out_per_rack", "nodes_out_in_fleet"}
    assert act.plan.people == 2
    with pytest.raises(Refused, match="requester"):
        world.approve(act, ALICE)
    assert world.approve(act, BOB).state == "approved"


def test_an_approval_that_no_longer_holds_is_not_shown_and_may_be_given_again(world: World) -> None:
    world.scheduler.by_hand("n01", True, "bad disk")
    act = world.propose("hold", "n02", "n03", who=ROBOT, person=False)
    world.approve(act, BOB)
    assert [one["who"] for one in world.board.describe(act.id)["approvals"]] == ["bob"]
    world.now += round(ON.approval_minutes * 60 + 1) * SECOND
    assert world.board.describe(act.id)["approvals"] == []
    assert world.approve(act, BOB).state == "awaiting_approval"
    assert world.approve(act, ALICE).state == "approved"
    world.now += round(ON.approval_minutes * 60 + 1) * SECOND
    assert [one["who"] for one in world.board.describe(act.id)["approvals"]] == ["bob", "alice"]


def test_nobody_can_override_the_ceiling_of_the_fleet(world: World) -> None:
    for name in ("n00", "n08", "n16", "n24"):
        world.scheduler.by_hand(name, True, "maintenance")
    act = world.propose("hold", "n32")
    assert (act.state, "fleet ceiling" in act.result["reason"]) == ("refused", True)


def test_nodes_that_others_took_out_are_never_touched(world: World) -> None:
    world.scheduler.by_hand("n03", True, "NHC: disk full")
    assert failing(world, "n03") == {"in_service"}
    assert failing(world, "n03", verb="release") == {"owner"}
    assert world.scheduler.nodes["n03"].reason == "NHC: disk full"


def test_a_forged_owner_mark_is_not_released(world: World) -> None:
    world.scheduler.by_hand("n03", True, "fleetpulse:ACT-00000000 INC-1")
    assert failing(world, "n03", verb="release") == {"owner"}
    other = hold(world, "n11")
    world.scheduler.by_hand("n03", True, f"fleetpulse:{other} INC-1")
    assert failing(world, "n03", verb="release") == {"owner"}


def test_unknown_nodes_old_states_listed_nodes_and_busy_nodes_are_refused(world: World) -> None:
    assert "known_node" in failing(world, "n99")
    world.facts["excluded"] = ("n0*",)
    assert "exclusion_list" in failing(world, "n03")
    world.facts["excluded"] = ()
    world.facts["open_acts"] = {"n03": "ACT-1"}
    assert "one_act_per_node" in failing(world, "n03")


@pytest.mark.slow
def test_no_reset_where_the_driver_recommends_a_reboot_and_no_release_while_it_recommends_anything(
    world: World,
) -> None:
    hold(world, "n03")
    world.facts["recovery"] = {"n03": "reboot node"}
    assert failing(world, "n03", verb="reset") == {"recovery_action"}
    assert failing(world, "n03", verb="release") == {"recovery_action"}
    assert failing(world, "n03", verb="reboot") == set()


def test_reset_reboot_and_deep_diagnostics_need_a_node_that_is_held_and_idle(world: World) -> None:
    assert failing(world, "n03", verb="reboot") == {"held_and_idle"}
    assert failing(world, "n03", verb="diagnose", params={"level": "3"}) == {"held_and_idle"}
    assert failing(world, "n03", verb="diagnose", params={"level": "1"}) == set()
    hold(world, "n04")
    world.scheduler.run("81", ("n04",))
    assert failing(world, "n04", verb="reset") == {"held_and_idle"}


def test_a_node_is_released_without_a_check_only_by_two_people(world: World) -> None:
    hold(world, "n03")
    world.facts["checks"] = {}
    act = world.propose("release", "n03")
    assert act.plan is not None
    assert ([guard.name for guard in act.plan.failing], act.plan.people) == (["checked_after"], 2)


@pytest.mark.slow
def test_a_node_that_failed_in_its_burn_in_comes_back_after_a_deep_diagnostic_or_by_two_people(world: World) -> None:
    act = world.propose("hold", "n03")
    world.approve(act)
    world.run(3)
    world.facts["relapses"] = {"n03": "released by ACT-0 2.0 days before this hold"}
    refused = world.propose("release", "n03")
    assert refused.plan is not None
    assert [guard.name for guard in refused.plan.failing] == ["burn_in"]
    assert refused.plan.people == 2
    world.facts["deep_checks"] = frozenset({"n03"})
    again = world.propose("release", "n03")
    assert again.plan is not None
    assert (again.plan.failing, again.plan.people) == ((), 1)


def test_a_fault_of_a_rack_needs_one_plan_for_all_its_nodes(world: World) -> None:
    world.facts |= {"cause": "rack:r0", "cause_nodes": frozenset({"n00", "n01"})}
    assert "group_plan" in failing(world, "n00")
    assert "group_plan" not in failing(world, "n00", "n01")


def test_a_hold_under_a_large_job_needs_two_people(world: World) -> None:
    world.scheduler.run("81", tuple(f"n{i:02d}" for i in range(16)))
    act = world.propose("hold", "n03")
    assert act.plan is not None
    assert (act.plan.people, act.plan.people_why) == (2, ("job 81 has 128 GPUs, more than 64",))


def test_guards_are_evaluated_again_before_the_first_command(world: World) -> None:
    act = world.propose("hold", "n03")
    world.approve(act)
    world.scheduler.by_hand("n01", True, "a person")
    world.scheduler.by_hand("n02", True, "a person")
    world.run(2)
    assert (world.state(act), world.scheduler.log) == ("refused", [])
    assert "nodes_out_per_rack" in world.board.find(act.id).result["reason"]


def test_a_mode_that_was_switched_off_after_the_approval_stops_the_act(world: World) -> None:
    act = world.propose("hold", "n03")
    world.approve(act)
    world.board.config = replace(ON, hold="off")
    world.run(2)
    assert (world.state(act), world.scheduler.log) == ("refused", [])


# --- the scheduler, people and kills ----------------------------------------------------------------------


def test_a_persons_undo_is_recorded_and_not_fought(world: World) -> None:
    held = hold(world, "n03")
    world.scheduler.by_hand("n03", False)
    world.run(3)
    assert (world.board.find(held).state, world.scheduler.nodes["n03"].out) == ("cancelled", False)
    assert [entry[:2] for entry in world.scheduler.log] == [("hold", "n03")]


def test_a_scheduler_that_dies_in_mid_act_is_read_first_when_it_is_back(world: World) -> None:
    act = world.propose("hold", "n03", "n11")
    world.approve(act)
    original = world.scheduler.carry_out

    def die_after_the_first(act_: object, node: object) -> object:
        done = original(act_, node)  # type: ignore[arg-type]
        world.scheduler.away = True
        return done

    world.scheduler.carry_out = die_after_the_first  # type: ignore[method-assign, assignment]
    world.run(3)
    assert world.state(act) == "executing"
    world.scheduler.carry_out, world.scheduler.away = original, False  # type: ignore[method-assign]
    world.run(4)
    assert world.state(act) == "verified"
    assert [entry[:2] for entry in world.scheduler.log] == [("hold", "n03"), ("hold", "n11")]


def test_a_scheduler_that_stays_away_fails_the_act_which_stays_ours(world: World) -> None:
    act = world.propose("hold", "n03")
    world.approve(act)
    world.scheduler.kill_at = 2
    with pytest.raises(Killed):
        world.run()
    world.scheduler.away, world.executor = True, world.start_executor()
    world.now += 31 * 60 * SECOND
    world.run(2)
    found = world.board.find(act.id)
    assert (found.state, found.held) == ("failed", ("node:n03",))


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("calls", range(8))
def test_a_killed_executor_neither_repeats_nor_forgets_a_hold(world: World, calls: int) -> None:
    act = world.propose("hold", "n03", "n11")
    world.approve(act)
    world.scheduler.kill_at = calls
    for _ in range(6):
        try:
            world.run()
        except Killed:
            world.executor = world.start_executor()
    assert world.state(act) == "verified"
    assert sorted(entry[1] for entry in world.scheduler.log if entry[2] == "") == ["n03", "n11"]


def test_a_killed_diagnostic_is_not_repeated_and_says_so(world: World) -> None:
    act = world.propose("diagnose", "n03", params={"level": "1"})
    world.approve(act)
    world.scheduler.kill_at = 1
    with pytest.raises(Killed):
        world.run()
    world.executor = world.start_executor()
    world.run(2)
    assert (world.state(act), "interrupted" in world.board.find(act.id).result["reason"]) == ("failed", True)


def test_a_hold_that_fails_on_one_node_is_rolled_back_on_the_others(world: World) -> None:
    act = world.propose("hold", "n03", "n11")
    world.approve(act)
    original = world.scheduler.carry_out

    def taken(act_: object, node: object) -> object:
        world.scheduler.by_hand("n11", True, "a person was faster")
        return original(act_, node)  # type: ignore[arg-type]

    world.scheduler.carry_out = taken  # type: ignore[method-assign, assignment]
    world.run(2)
    assert (world.state(act), world.scheduler.nodes["n03"].out) == ("rolled_back", False)
    assert world.scheduler.nodes["n11"].reason == "a person was faster"


def test_a_second_executor_is_refused_while_the_first_is_at_work(world: World) -> None:
    world.run()
    with pytest.raises(Refused, match="is at work"):
        world.board.claim("another")
    world.now += 31 * SECOND
    assert world.board.claim("another") == []


def test_after_a_backward_clock_step_a_new_executor_gets_the_right_and_the_one_at_work_keeps_it() -> None:
    hour, lease = 3600 * SECOND, Lease()
    lease.take("one", "a", {}, 2 * hour)
    lease.keep("one", hour)
    with pytest.raises(Refused, match="is at work"):
        lease.take("two", "b", {}, hour)
    lease.take("one", "a", {}, 2 * hour)
    lease.take("two", "b", {}, hour)
    assert lease.holder == ("two", "b")


# --- policies and the breaker -----------------------------------------------------------------------------

POLICY = Caller("policy:thermal", "operator", "policy")


def test_a_policy_proposes_and_a_person_approves(world: World) -> None:
    act = world.propose("hold", "n03", who=POLICY, person=False)
    assert act.state == "awaiting_approval"
    assert world.approve(act, BOB).state == "approved"


def test_a_policy_that_a_site_switched_on_approves_within_its_rate_and_never_past_a_guard(database: Database) -> None:
    world = World(database, replace(ON, policies=(ActPolicy("thermal", scope="rack:r0", approve=True, per_hour=1),)))
    first = world.propose("hold", "n03", who=POLICY, person=False)
    assert first.state == "approved"
    world.run(3)
    assert world.state(first) == "verified"
    assert world.propose("hold", "n11", who=POLICY, person=False).state == "awaiting_approval"
    world.now += 3601 * SECOND
    world.facts["silent"] = frozenset({"n19"})
    assert world.propose("hold", "n19", who=POLICY, person=False).state == "refused"


def test_no_policy_takes_a_node_again_that_a_person_gave_back(database: Database) -> None:
    world = World(database, replace(ON, policies=(ActPolicy("thermal", scope="rack:r0", approve=True, per_hour=9),)))
    hold = world.propose("hold", "n03", who=POLICY, person=False)
    world.run(3)
    world.scheduler.by_hand("n03", False)
    world.run()
    assert world.state(hold) == "cancelled"
    assert world.propose("hold", "n03", who=POLICY, person=False).state == "awaiting_approval"
    assert world.propose("hold", "n02", who=POLICY, person=False).state == "approved", "nobody gave this one back"
    world.now += 25 * 3600 * SECOND
    assert world.propose("hold", "n03", who=POLICY, person=False).state == "approved"


@pytest.mark.slow
def test_three_failed_acts_open_the_breaker_which_only_a_person_closes(database: Database) -> None:
    world = World(database, replace(ON, policies=(ActPolicy("thermal", scope="rack:r0", approve=True, per_hour=9),)))
    for name in ("n03", "n11", "n19"):
        act = world.propose("diagnose", name, params={"level": "1"})
        world.approve(act)
        world.scheduler.kill_at = 1
        with pytest.raises(Killed):
            world.run()
        world.executor = world.start_executor()
        world.run(2)
    assert world.board.read_breaker() == "3 acts failed within an hour"
    assert world.notices == ["Acts by programs are stopped"]
    assert world.propose("hold", "n27", who=POLICY, person=False).state == "refused"
    assert world.propose("hold", "n27").state == "awaiting_approval"
    with pytest.raises(Refused, match="only a person"):
        world.board.close_breaker(ROBOT, False, "looks fine")
    world.board.close_breaker(ROOT, True, "bad diagnostic program, repaired")
    assert world.board.read_breaker() == ""
    world.board.review()
    assert world.board.read_breaker() == ""


def test_policies_that_propose_a_twentieth_of_the_fleet_in_five_minutes_open_the_breaker(world: World) -> None:
    for name in ("n03", "n11", "n19"):
        world.propose("hold", name, who=POLICY, person=False)
        world.board.review()
    assert world.board.read_breaker() == "policies proposed 3 nodes within 5 minutes; at most 2 of 40"
