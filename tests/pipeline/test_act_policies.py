"""Policies that propose acts for new incidents: what they match, their rate, and what they never do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.acts import ledger
from pipeline.acts.act import Act, Plan, State, Verb
from pipeline.acts.board import Board
from pipeline.config.acts import ActPolicy, Acts
from pipeline.engine.act_facts import FactSource, find_held_since, find_relapses
from pipeline.engine.act_policies import FRESH, PolicyProposer, find_targets, is_due, read_burn_ins
from pipeline.model.records import SECOND, Caller, Incident
from tests.pipeline.acts_world import ON, ROOT
from tests.pipeline.living import PARENTS, LivingSite

STEPS: tuple[State, ...] = ("executing", "executed", "verified")
HOT = ActPolicy("hot", detector="hot", scope="rack:r0", min_confidence=0.0, per_hour=2)


class Policies:
    """A living site with a board and policies."""

    def __init__(self, path: Path, *policies: ActPolicy, **modes: str) -> None:
        self.site = LivingSite(path)
        self.config: Acts = replace(ON, policies=policies, **modes)  # type: ignore[arg-type] # a test names modes
        self.restart()

    def restart(self) -> None:
        """Starts board and proposer again; what they propose for is in the store."""
        engine, config = self.site.engine, self.config
        facts = FactSource(engine, config).collect
        self.board = Board(self.site.database, config, lambda: self.site.now, facts, lambda: 40)
        self.proposer = PolicyProposer(self.board, lambda: engine)

    def run(self) -> list[tuple[str, tuple[str, ...]]]:
        """Lets five seconds pass and returns (verb, nodes) of the proposed acts."""
        self.site.now += 5 * SECOND
        return [(act.verb, act.targets) for act in self.proposer.run()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.duckdb"


def test_a_policy_proposes_one_act_for_a_new_incident_which_a_person_must_approve(path: Path) -> None:
    made = Policies(path, HOT)
    incident = made.site.report("gpu:n1.2")
    assert made.run() == [("hold", ("node:n1",))]
    act = made.board.list_acts()[0]
    assert (act.requested_by, act.incident, act.state, act.by_person) == ("policy:hot", incident, "proposed", False)
    assert act.reason.startswith("gpu:n1.2: hot (confidence 0.")
    assert made.run() == []


def test_a_restart_proposes_nothing_again_and_nothing_for_old_incidents(path: Path) -> None:
    made = Policies(path, HOT)
    made.site.report("gpu:n1.2")
    assert len(made.run()) == 1
    made.restart()
    assert made.run() == []
    assert len(made.board.list_acts()) == 1
    other = Policies(path.with_name("other.duckdb"), HOT)
    other.site.report("gpu:n1.2")
    other.site.now += FRESH
    assert other.run() == []


def test_a_detector_that_was_too_often_wrong_opens_the_breaker_instead_of_an_act(path: Path) -> None:
    made = Policies(path, HOT)
    made.site.engine.finding_filter.budget.lowered = frozenset({"hot"})
    made.site.report("gpu:n1.2")
    assert made.run() == []
    assert made.board.read_breaker() == "policy hot follows hot, whose pages were too often wrong"
    made.site.engine.finding_filter.budget.lowered = frozenset()
    made.board.close_breaker(ROOT, True, "budget reset, cause found")
    assert made.run() == [("hold", ("node:n1",))]


def test_a_detector_that_was_too_often_wrong_stops_no_others_through_a_verb_that_is_off(path: Path) -> None:
    made = Policies(path, HOT, hold="off")
    made.site.engine.finding_filter.budget.lowered = frozenset({"hot"})
    made.site.report("gpu:n1.2")
    assert (made.run(), made.board.read_breaker()) == ([], "")


def test_a_policy_keeps_its_rate(path: Path) -> None:
    made = Policies(path, HOT)
    for node in range(4):
        made.site.now += 60 * SECOND
        made.site.report(f"gpu:n{node}.0", onset=made.site.now)
        made.site.clear(f"gpu:n{node}.0")
    assert [nodes for _, nodes in made.run()] == [("node:n0",), ("node:n1",)]
    assert made.run() == []


def test_an_open_breaker_and_a_verb_that_is_off_propose_nothing_and_leave_no_refusals(path: Path) -> None:
    made = Policies(path, HOT, hold="off")
    made.site.report("gpu:n1.2")
    assert made.run() == []
    rows = made.site.database.connection.execute("SELECT count(*) FROM audit WHERE outcome = 'refused'").fetchone()
    assert rows == (0,)
    for number in range(3):
        made.board.propose("ticket", [f"node:n{number}"], ROOT, "x")
    other = Policies(path.with_name("other.duckdb"), replace(HOT, per_hour=9))
    with other.site.database.transaction() as connection:
        connection.execute("INSERT INTO act_breaker VALUES (now(), 'test', NULL, NULL, NULL)")
    other.site.report("gpu:n1.2")
    assert other.run() == []


def _incident(**changes: object) -> Incident:
    made = Incident("INC-1", "gpu:n1.2", 0, 0, "page", "hot", "hot", "gpu:n1.2", ("gpu:n1.2",), confidence=0.95)
    return replace(made, **changes)  # type: ignore[arg-type] # a test names fields


@pytest.mark.parametrize(
    ("policy", "incident", "nodes"),
    [
        (HOT, {}, ("node:n1",)),
        (replace(HOT, scope="*"), {}, ("node:n1",)),
        (replace(HOT, scope="node:n1"), {}, ("node:n1",)),
        (replace(HOT, scope="rack:r1"), {}, ()),
        (replace(HOT, detector="xid"), {}, ()),
        (replace(HOT, min_confidence=0.96), {}, ()),
        (HOT, {"confidence": None, "cause": "gpu:n1.2"}, ()),
        (replace(HOT, min_confidence=0.1), {"confidence": None}, ()),
        (HOT, {"cause": "node:n2"}, ("node:n2",)),
        (HOT, {"cause": "rack:r0"}, ("node:n0", "node:n1", "node:n2", "node:n3")),
        (replace(HOT, scope="node:n1"), {"cause": "rack:r0"}, ()),
        (HOT, {"cause": "job:1"}, ()),
        (HOT, {"cause": "cdu:unknown"}, ()),
    ],
)
def test_detector_confidence_and_scope_decide(
    policy: ActPolicy, incident: dict[str, object], nodes: tuple[str, ...], living: LivingSite
) -> None:
    assert find_targets(policy, _incident(**incident), living.topology) == nodes


@pytest.fixture(scope="module")
def living(tmp_path_factory: pytest.TempPathFactory) -> LivingSite:
    assert PARENTS["gpu:n1.2"] == ("node:n1",)
    return LivingSite(tmp_path_factory.mktemp("policies") / "store.duckdb")


@pytest.mark.parametrize(
    "changes", [{"state": "acknowledged"}, {"simulated": True}, {"opened": -FRESH}, {"opened": 60 * SECOND}]
)
def test_taken_simulated_and_old_incidents_get_no_act(changes: dict[str, object]) -> None:
    assert is_due(_incident(), 0)
    assert not is_due(_incident(**changes), 0)


def test_a_person_named_like_a_policy_and_a_policy_for_everywhere_approve_nothing(path: Path) -> None:
    everywhere = replace(HOT, scope="*", approve=True, name="all")
    named = replace(HOT, approve=True)
    made = Policies(path, everywhere, named)
    made.site.report("gpu:n1.2")
    assert len(made.run()) == 2
    by_name = {act.requested_by: act for act in made.board.list_acts()}
    plan = Plan(made.site.now, "slurm", ("hold",), (), (), {}, 1, ())
    assert made.board.plan(by_name["policy:all"].id, plan).state == "awaiting_approval"
    assert made.board.plan(by_name["policy:hot"].id, plan).state == "approved"
    forged = made.board.propose("hold", ["node:n2"], Caller("policy:hot", "operator", "10.0.0.1"), "x", is_person=True)
    assert made.board.plan(forged.id, plan).state == "awaiting_approval"


def test_in_the_burn_in_less_confidence_is_enough(living: LivingSite) -> None:
    weak = _incident(confidence=0.6)
    policy = replace(HOT, min_confidence=0.9, burn_in_confidence=0.5)
    assert find_targets(policy, weak, living.topology) == ()
    assert find_targets(policy, weak, living.topology, frozenset({"node:n1"})) == ("node:n1",)
    assert find_targets(policy, _incident(confidence=0.4), living.topology, frozenset({"node:n1"})) == ()


def _save(made: Policies, act: Act, days: float) -> None:
    """Writes an act that was carried out some days ago."""
    at = made.site.now - round(days * 86_400 * SECOND)
    with made.site.database.transaction() as c:
        for state in STEPS:
            ledger.save_act(c, replace(act, state=state, updated=at), "executor", "", [], at)


def _act(id_: str, verb: Verb, created: int, **more: object) -> Act:
    return Act(id_, verb, ("node:n1",), "alice", "x", created, created, "on", **more)  # type: ignore[arg-type] # by name


def test_a_node_that_was_held_again_in_its_burn_in_is_a_relapse(path: Path) -> None:
    made = Policies(path)
    connection, long_ago = made.site.database.connection, made.site.now - 9 * 86_400 * SECOND
    steps: tuple[tuple[Verb, float], ...] = (("hold", 9), ("release", 3), ("hold", 1))
    for number, (verb, days) in enumerate(steps):
        # the second hold was proposed before the release, and approved after it
        _save(made, _act(f"ACT-{number}", verb, long_ago), days)
    held = find_held_since(connection, {"n1": made.board.find("ACT-2")})
    assert held == {"n1": made.site.now - 86_400 * SECOND}
    assert find_relapses(connection, held, 7.0) == {"n1": "released by ACT-1 2.0 days before this hold"}
    assert find_relapses(connection, held, 1.0) == {}
    assert find_relapses(connection, {"n2": held["n1"]}, 7.0) == {}
    assert read_burn_ins(made.board, made.site.now) == {"node:n1"}
