"""The rule of two people: a person is a subject of the login provider, whatever name it has at the moment."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.acts import ledger
from pipeline.acts.act import Act
from pipeline.acts.approval import is_same_person
from pipeline.incidents.audit import AuditEntry, list_audit
from pipeline.model.errors import Refused
from pipeline.model.records import Caller
from pipeline.store.database import Database
from tests.pipeline.acts_world import BOB, ROBOT, ROOT, World


@pytest.fixture
def world(database: Database) -> World:
    return World(database)


def person(name: str, subject: str) -> Caller:
    return Caller(name, "operator", "10.0.0.1", is_person=True, subject=subject)


def propose_evict(world: World, who: Caller, is_person: bool = True, node: str = "n03") -> Act:
    """Proposes an act that needs two people, on a node that is held."""
    held = world.propose("hold", node)
    world.approve(held)
    world.run(3)
    assert world.state(held) == "verified"
    return world.propose("evict", node, who=who, person=is_person)


def test_a_requester_who_took_another_name_does_not_approve_the_own_act(world: World) -> None:
    act = propose_evict(world, person("alice@example.org", "s-1"))
    with pytest.raises(Refused, match="requester cannot approve"):
        world.approve(act, person("alice.b@example.org", "s-1"))
    newest = list_audit(world.database.connection)[0]
    assert (newest["outcome"], newest["actor"]) == ("refused", "alice.b@example.org")
    assert world.approve(act, person("bob@example.org", "s-2")).state == "approved"


def test_one_person_with_two_names_is_no_two_approvers(world: World) -> None:
    act = propose_evict(world, ROBOT, is_person=False)
    assert world.approve(act, person("bob", "s-2")).state == "awaiting_approval"
    with pytest.raises(Refused, match="the same person has approved"):
        world.approve(act, person("robert", "s-2"))
    assert world.approve(act, person("carol", "s-3")).state == "approved"


def test_an_act_with_approvals_of_one_subject_does_not_begin(world: World) -> None:
    """Also if it came about in another way than by the check of each approval."""
    act = propose_evict(world, ROBOT, is_person=False)
    world.approve(act, person("bob", "s-2"))
    one = world.board.find(act.id).approvals[0]
    with world.database.transaction() as connection:
        changed = replace(world.board.find(act.id), approvals=(one, replace(one, who="robert")), state="approved")
        ledger.save_act(connection, changed, "test", "", [AuditEntry("test", "x", act.id)], world.now)
    world.run()
    assert (world.state(act), [entry[0] for entry in world.scheduler.log]) == ("refused", ["hold"])


def test_people_are_the_same_by_name_or_by_subject() -> None:
    assert is_same_person(("alice", ""), ("alice", "s-1")), "a login before subjects were recorded"
    assert is_same_person(("alice", "s-1"), ("al", "s-1"))
    assert not is_same_person(("alice", ""), ("bob", "")), "a proxy gives names alone"
    assert is_same_person(("alice", "s-1"), ("alice", "s-2")), "two people of one name look alike to readers"


def test_subjects_are_not_shown_to_those_who_read_acts(world: World) -> None:
    act = propose_evict(world, person("alice", "s-secret-1"))
    world.approve(act, person("bob", "s-secret-2"))
    assert "s-secret" not in str(world.board.describe(act.id))


@pytest.mark.parametrize("killed_in", ["save_break_glass", "save_act"])
def test_a_break_glass_is_on_record_with_its_approval_or_neither_is(
    world: World, monkeypatch: pytest.MonkeyPatch, killed_in: str
) -> None:
    """A pipeline that is killed on the way keeps nobody who is alone on call from trying again."""
    act = propose_evict(world, BOB)

    def die(*given: object) -> None:
        raise KeyboardInterrupt

    how = {"who": ROOT, "break_glass": True, "comment": "alone on call, job corrupts data"}
    with monkeypatch.context() as patch:
        patch.setattr(ledger, killed_in, die)
        with pytest.raises(KeyboardInterrupt):
            world.approve(act, **how)  # type: ignore[arg-type]
    assert (world.state(act), world.notices) == ("awaiting_approval", [])
    assert "break glass" not in {row["action"] for row in list_audit(world.database.connection)}
    assert world.approve(act, **how).state == "approved"  # type: ignore[arg-type]
    newest = [row["action"] for row in list_audit(world.database.connection)[:2]]
    assert (newest, len(world.notices)) == (["approve act", "break glass"], 1)
    with pytest.raises(Refused, match="within the hour"):
        world.approve(propose_evict(world, BOB, node="n11"), **how)  # type: ignore[arg-type]
