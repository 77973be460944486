"""Acts and time: what counts is when something took effect, not when it was asked for or last changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pipeline.acts import ledger
from pipeline.acts.act import MAX_REASON, Act, Approval
from pipeline.acts.adapters.adapter import Outcome
from pipeline.acts.board import Board, Work
from pipeline.acts.executor import MAX_WAITS
from pipeline.acts.remote import encode_facts, parse_facts
from pipeline.acts.scheduler import SchedulerNode, SchedulerState
from pipeline.commands.act_board import read_recovery
from pipeline.config.acts import Acts
from pipeline.engine.act_facts import FactSource, find_held_since, find_leaving
from pipeline.incidents.jobs import Place
from pipeline.model.errors import Refused, Unreachable
from pipeline.model.records import SECOND
from pipeline.store.database import Database
from pipeline.store.latest import CurrentValues
from tests.pipeline.acts_world import ALICE, BOB, CAROL, ON, ROBOT, World
from tests.pipeline.living import LivingSite

MINUTE = 60 * SECOND


@pytest.fixture
def world(database: Database) -> World:
    database.connection.execute("DELETE FROM events")
    return World(database)


def hold(world: World, *names: str) -> Act:
    """Holds nodes through all steps."""
    act = world.propose("hold", *names)
    world.approve(act)
    world.run(3)
    assert world.state(act) == "verified"
    return world.board.find(act.id)


def write_event(database: Database, kind: str, entity: str, node: str, time: int, data: str = "{}") -> None:
    database.connection.execute(
        "INSERT INTO events VALUES (make_timestamptz($1::BIGINT), $2, $3, $4, 's', $5, false, NULL)",
        [time, entity, kind, data, node],
    )


def test_a_hold_counts_from_when_the_scheduler_accepted_it(world: World) -> None:
    act = world.propose("hold", "n03")
    world.approve(act)
    world.scheduler.away = False
    original = world.scheduler.carry_out

    def answer_late(act_: Act, node: SchedulerNode) -> Outcome:
        world.now += 5 * MINUTE
        return original(act_, node)

    world.scheduler.carry_out = answer_late  # type: ignore[method-assign]
    world.run(3)
    times = {step.state: step.time for step in ledger.load_steps(world.database.connection, act.id)}
    assert times["executed"] - times["executing"] == 5 * MINUTE
    held = {"n03": world.board.find(act.id)}
    assert find_held_since(world.database.connection, held) == {"n03": times["executed"]}


def test_only_a_checkpoint_after_the_last_approval_is_waited_for(tmp_path: Path) -> None:
    site = LivingSite(tmp_path / "store.duckdb")
    first, second = site.now - 10 * MINUTE, site.now - 2 * MINUTE
    approvals = (Approval("bob", first, "h"), Approval("carol", second, "h"))
    # `updated` is not the approval: whatever changes the act later, such as a new limit, must not move the moment
    about = {"state": "approved", "approvals": approvals, "updated": site.now, "when": "after_checkpoint"}
    act = Act("ACT-1", "hold", ("node:n1",), "robot", "x", first, site.now, "on", **about)  # type: ignore[arg-type]
    for job, time in (("80", second - MINUTE), ("81", second + MINUTE)):
        write_event(site.database, "checkpoint", f"job:{job}", "n1", time)
    places = site.engine.impact.jobs.places
    places.of |= {"rank:run-7.0": Place("job:run-7", (), "node:n1"), "rank:run-8.0": Place("job:run-8", (), "node:n2")}
    places.on |= {"node:n1": ["rank:run-7.0"], "node:n2": ["rank:run-8.0"]}
    assert FactSource(site.engine, Acts()).collect(act).checkpoints == {"81"}
    facts = FactSource(site.engine, Acts()).collect(act)
    assert facts.running == {"n1": ["run-7"]}
    assert parse_facts(json.loads(json.dumps(encode_facts(facts)))) == facts
    waiting = replace(act, state="awaiting_approval", approvals=())
    assert FactSource(site.engine, Acts()).collect(waiting).checkpoints == frozenset()
    site.database.close()


@pytest.mark.parametrize(
    ("on_node", "running", "written", "begins"),
    [
        (("81",), ("81",), ("81",), True),
        (("81",), ("81",), ("run-7",), False),
        (("ml/train-0",), ("run-7",), ("run-7",), True),  # torchrun's own name in a pod
        (("ml/train-0",), ("run-7",), (), False),
        (("ml/train-0",), (), ("run-7",), False),  # the checkpoint of a job elsewhere
        (("ml/train-0", "ml/web"), ("run-7",), ("run-7",), False),  # which of the two it is remains unknown
        (("ml/a", "ml/b"), ("run-7", "run-8"), ("run-7", "run-8"), True),
        (("ml/a", "81"), ("run-7", "81"), ("run-7",), False),
        ((), (), (), True),
    ],
)
def test_jobs_are_the_same_by_name_or_by_being_alone_on_the_node(
    world: World, on_node: tuple[str, ...], running: tuple[str, ...], written: tuple[str, ...], begins: bool
) -> None:
    for job in on_node:
        world.scheduler.run(job, ("n03",))
    world.facts |= {"running": {"n03": running}, "checkpoints": frozenset(written)}
    act = world.propose("hold", "n03", when="after_checkpoint")
    world.approve(act)
    world.run(3)
    assert world.state(act) == ("verified" if begins else "approved")


def test_an_act_that_never_gets_an_answer_fails_half_an_hour_after_it_began(world: World) -> None:
    act = world.propose("hold", "n03")
    world.approve(act)

    def stay_away(act_: Act, node: SchedulerNode) -> Outcome:
        raise Unreachable("scontrol: Socket timed out")

    world.scheduler.carry_out = stay_away  # type: ignore[method-assign]
    world.run()
    for _ in range(4):  # nodes can be read all the time, so that each round tries it again
        world.now += 8 * MINUTE
        world.run()
    found = world.board.find(act.id)
    assert (found.state, found.result["held"]) == ("failed", ["node:n03"])
    assert "its effect is unknown for 30 min" in found.result["reason"]


def test_the_first_of_two_approvals_expires_as_well(world: World) -> None:
    hold(world, "n03")
    act = world.propose("evict", "n03", who=ROBOT, person=False)
    assert world.approve(act, BOB).state == "awaiting_approval"
    world.now += 16 * MINUTE
    assert world.approve(act, CAROL).state == "awaiting_approval"
    assert [a.who for a in world.board.find(act.id).approvals] == ["carol"]
    assert world.approve(act, BOB).state == "approved", "he may approve again"


def test_an_interrupted_act_does_not_count_against_its_own_rate(tmp_path: Path) -> None:
    site = LivingSite(tmp_path / "store.duckdb")
    act = Act("ACT-1", "hold", ("node:n1",), "alice", "x", site.now, site.now, "on", state="executing")
    with site.database.transaction() as connection:
        ledger.save_act(connection, act, "executor", "", [], site.now)
        ledger.save_act(connection, replace(act, id="ACT-2", key="2"), "executor", "", [], site.now)
    assert FactSource(site.engine, Acts()).collect(act).recent == 1
    site.database.close()


def test_holds_that_were_rolled_back_open_the_breaker_like_failed_ones(database: Database) -> None:
    world = World(database, ON)
    original = world.scheduler.carry_out
    for first, second in (("n03", "n11"), ("n04", "n12"), ("n05", "n13")):
        act = world.propose("hold", first, second)
        world.approve(act)

        def refuse(act_: Act, node: SchedulerNode, taken: str = second) -> Outcome:
            return Outcome(False, "no") if node.name == taken else original(act_, node)

        world.scheduler.carry_out = refuse  # type: ignore[method-assign]
        world.run()
        assert world.state(act) == "rolled_back"
    assert world.board.read_breaker() == "3 acts failed within an hour"


def test_of_acts_that_are_not_over_none_is_left_out(world: World) -> None:
    made = {world.board.propose("ticket", [f"node:n{i:02d}"], ALICE, "x", is_person=True).id for i in range(3)}
    connection = world.database.connection
    assert {act.id for act in ledger.load_acts(connection, only_open=True, most=1)} == made
    assert len(ledger.load_acts(connection, most=1)) == 1


@pytest.mark.parametrize("other", [("other", "b"), ("executor", "b")])
@pytest.mark.parametrize("quiet", [0, 31])
def test_an_executor_that_was_slow_begins_nothing_once_another_one_is_at_work(
    world: World, other: tuple[str, str], quiet: int
) -> None:
    """Also if the other one is as slow, and its right has lapsed too: else both begin, and neither sees the other."""
    world.executor.instance = "a"
    act = world.propose("hold", "n03")
    world.approve(act)
    read = world.scheduler.read_state

    def read_slowly(now: int) -> SchedulerState:
        world.scheduler.read_state = read  # type: ignore[method-assign]
        world.now += 31 * SECOND
        world.board.claim(*other)
        world.now += quiet * SECOND
        return read(world.now)

    world.scheduler.read_state = read_slowly  # type: ignore[method-assign]
    world.run()
    assert (world.state(act), world.scheduler.log) == ("approved", [])
    assert "another one asked for work in between" in world.executor._waits[act.id]
    world.now += 31 * SECOND
    world.run()
    assert (world.state(act), len(world.scheduler.log)) == ("executed", 1), "its turn comes"


def test_an_executor_that_was_slow_goes_on_with_nothing_that_another_one_ended(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would drain a node for an act that failed by now, and no person could release it."""
    world.executor.instance = "a"
    act = world.propose("hold", "n03")
    world.approve(act)
    carry_out, read = world.scheduler.carry_out, world.scheduler.read_state

    def lose(act_: Act, node: SchedulerNode) -> Outcome:
        raise Unreachable("slurmctld does not answer")

    monkeypatch.setattr(world.scheduler, "carry_out", lose)
    world.run()
    assert world.state(act) == "executing"

    def read_slowly(now: int) -> SchedulerState:
        world.now += 31 * SECOND
        world.board.claim("executor", "b")
        world.board.report(act.id, "failed", "executor", {"reason": "a guard fails", "held": []})
        return read(world.now)

    monkeypatch.setattr(world.scheduler, "carry_out", carry_out)
    monkeypatch.setattr(world.scheduler, "read_state", read_slowly)
    world.run()
    assert (world.state(act), world.scheduler.log) == ("failed", [])


def test_a_slow_executor_that_is_alone_begins_also_after_a_restart_of_the_pipeline(world: World) -> None:
    world.executor.instance = "a"
    first, second = world.propose("hold", "n03"), world.propose("hold", "n11")
    world.approve(first)
    world.approve(second)
    world.board.claim("executor", "a")
    world.now += 31 * SECOND
    assert world.board.begin(first.id, (), "executor", "a").state == "executing"
    with pytest.raises(Refused, match="is at work"):
        world.board.claim("other", "b")  # the right was prolonged
    board = Board(world.database, world.config, lambda: world.now, world.collect)
    assert board.begin(second.id, (), "executor", "a").state == "executing"
    with pytest.raises(Refused, match="is at work"):
        board.claim("other", "b")
    with pytest.raises(Refused, match="another one asked"):
        board.begin(first.id, (), "other", "b")


def test_nodes_of_a_hold_that_began_count_as_out_before_the_scheduler_shows_them(world: World) -> None:
    """A house tool takes minutes, and a scheduler that died may have carried it out."""
    world.scheduler.run("81", ("n11",))
    world.facts["leaving"] = frozenset({"n11", "n19", "gone"})
    plan = world.propose("hold", "n03").plan
    assert plan is not None
    assert [(g.name, g.now) for g in plan.failing] == [
        ("nodes_out_in_fleet", "3 of 40 nodes out from all causes"),
    ]
    act = replace(world.propose("hold", "n04"), state="executing")
    ended, dry = replace(act, id="ACT-2", state="verified"), replace(act, id="ACT-3", mode="dry-run")
    asked = replace(act, id="ACT-4")
    assert find_leaving([act, ended, dry, asked], asked) == {"n04"}


def test_a_second_executor_of_the_same_name_waits(world: World) -> None:
    world.board.claim("executor", "a1")
    with pytest.raises(Refused, match="another process of this name is at work"):
        world.board.claim("executor", "b2")
    assert world.board.claim("executor", "a1") == []
    world.now += 31 * SECOND
    assert world.board.claim("executor", "b2") == []


@pytest.mark.parametrize("other", [{"params": {"level": "3"}}, {"when": "when_idle"}, {"who": BOB}])
def test_a_key_belongs_to_one_request_of_one_requester(world: World, other: dict[str, object]) -> None:
    first = world.propose("diagnose", "n03", key="k")
    assert world.propose("diagnose", "n03", key="k").id == first.id
    with pytest.raises(Refused, match="was used for another act"):
        world.propose("diagnose", "n03", key="k", **other)  # type: ignore[arg-type]


def test_an_expired_first_approval_is_named_neither_in_the_plan_nor_counted(world: World) -> None:
    hold(world, "n03")
    act = world.propose("evict", "n03", who=ROBOT, person=False)
    world.approve(act, BOB)
    with pytest.raises(Refused, match="same person"):
        world.approve(act, BOB)
    world.now += 16 * MINUTE
    assert world.approve(act, BOB).state == "awaiting_approval"


def waits_for(world: World, act: Act) -> str:
    return str(world.board.describe(act.id)["waits_for"])


def test_an_act_says_which_jobs_it_waits_for(world: World) -> None:
    world.scheduler.run("81", ("n03",))
    act = world.propose("hold", "n03", when="when_idle")
    assert waits_for(world, act) == "", "it waits for people"
    world.approve(act)
    world.run(2)
    assert waits_for(world, act) == "until no job is on the nodes: n03 has 81"
    later = world.propose("hold", "n11", when="after_checkpoint")
    world.approve(later)
    world.scheduler.run("82", ("n11",))
    world.run(2)
    assert waits_for(world, later) == "for a checkpoint since the approval: n11 has 82"
    world.facts["checkpoints"] = frozenset({"82"})
    world.run(4)
    assert (world.state(later), waits_for(world, later)) == ("verified", "")


def test_an_act_says_that_the_scheduler_does_not_answer(world: World) -> None:
    act = world.propose("hold", "n03")
    world.approve(act)
    world.scheduler.away = True
    world.run(2)
    assert waits_for(world, act) == "scontrol: Unable to contact slurm controller"
    world.scheduler.away = False
    world.run(4)
    assert (world.state(act), waits_for(world, act)) == ("verified", "")


def test_an_act_says_that_no_executor_is_there(world: World) -> None:
    act = world.board.propose("hold", ["node:n03"], ALICE, "fault")
    assert waits_for(world, act) == "no executor has asked for work since the pipeline started"
    world.run()
    world.approve(act)
    world.now += 300 * SECOND
    assert waits_for(world, act) == "executor executor has not asked for work for 5 min"


def test_a_thousand_waiting_acts_are_what_an_executor_says_at_most(world: World) -> None:
    act = world.propose("hold", "n03")
    world.executor._waits = {f"ACT-{number}": "x" * 900 for number in range(1200)}
    said: list[Mapping[str, str]] = []
    claim = world.board.claim

    def listen(who: str, instance: str = "", waits: Mapping[str, str] | None = None) -> list[Work]:
        said.append(waits or {})
        return claim(who, instance, waits)

    world.board.claim = listen  # type: ignore[method-assign]
    world.run()
    world.executor._wait(act, "y" * 900)
    world.run()
    assert (len(said[0]), said[1]) == (MAX_WAITS, {act.id: "y" * MAX_REASON})


def test_the_recovery_action_of_a_node_that_went_silent_counts_for_a_day(tmp_path: Path) -> None:
    site = LivingSite(tmp_path / "store.duckdb")
    site.engine.devices.assign_ids("gpu", "here", "n1", False, ("gpu:n1.0", "gpu:n1.1"))
    slots = np.arange(2, dtype=np.int32)
    seen = np.full(2, site.now, np.int64)
    values = {"recovery_action": np.array([2, 0], np.uint8)}  # reboot node, none
    current = CurrentValues(values, {"recovery_action": seen}, seen, slots)
    ingest = SimpleNamespace(read_current=lambda *_: current)
    service = SimpleNamespace(devices=site.engine.devices, ingest=ingest, clock=lambda: site.now)
    for hours, expected in ((0, {"n1": "reboot node"}), (23, {"n1": "reboot node"}), (25, {})):
        service.clock = lambda hours=hours: site.now + hours * 60 * MINUTE
        assert read_recovery(service, ("n1",)) == expected  # type: ignore[arg-type] # what it reads of a service
    site.database.close()
