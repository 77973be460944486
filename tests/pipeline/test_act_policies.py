"""Policies that propose acts for new incidents: what they match, their rate, and what they never do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.acts import ledger
from pipeline.acts.act import Act, Plan, State, Verb
from pipeline.acts.board import Board
from pipeline.acts.guards import Question, evaluate_guards
from pipeline.acts.scheduler import SchedulerNode, SchedulerState
from pipeline.config.acts import ActLimits, ActPolicy, Acts
from pipeline.engine.act_facts import (
    FactSource,
    find_failed,
    find_held_since,
    find_relapses,
    is_deeply_checked,
    list_diagnostics,
)
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
        (HOT, {"confidence": None, "cause": "gpu:n1.2"}, ("node:n1",)),
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


def test_only_a_long_diagnostic_that_began_after_the_hold_counts(path: Path) -> None:
    made = Policies(path)
    now, day = made.site.now, 86_400 * SECOND
    _save(made, _act("ACT-1", "diagnose", now, params={"level": "3"}), 2)
    _save(made, _act("ACT-2", "diagnose", now, params={"level": "2"}), 0.2)
    done = list_diagnostics(made.site.database.connection)
    assert {act.id for act, _ in done} == {"ACT-1", "ACT-2"}
    assert not is_deeply_checked("n1", now - day, done), "one began before the hold, the other is short"
    assert is_deeply_checked("n1", now - 3 * day, done)
    assert not is_deeply_checked("n2", now - 3 * day, done)


@pytest.mark.parametrize(
    ("later", "failed"),
    [
        ((), "diagnose level 3 failed (ACT-1)"),
        ((("verified", "1"),), "diagnose level 3 failed (ACT-1)"),
        ((("verified", "link-soak"),), "diagnose level 3 failed (ACT-1)"),
        ((("verified", "3"),), ""),
        ((("verified", "4"),), ""),
        ((("verified", "3"), ("failed", "2")), "diagnose level 2 failed (ACT-3)"),
    ],
)
def test_a_diagnostic_that_failed_counts_until_one_that_tests_as_much_has_passed(
    later: tuple[tuple[State, str], ...], failed: str, path: Path
) -> None:
    made = Policies(path)
    held = made.site.now - 10 * 86_400 * SECOND
    for number, (state, level) in enumerate((("failed", "3"), *later), 1):
        act = _act(f"ACT-{number}", "diagnose", held, params={"level": level})
        at = held + number * 3600 * SECOND
        with made.site.database.transaction() as c:
            for step in ("executing", state):
                ledger.save_act(c, replace(act, state=step, updated=at), "executor", "", [], at)
    done = list_diagnostics(made.site.database.connection)
    assert find_failed("n1", held, done) == failed
    assert find_failed("n1", held + 86_400 * SECOND, done) == "", "before the hold"
    assert find_failed("n2", held, done) == ""


def test_a_node_whose_diagnostic_failed_is_not_released_for_a_shorter_one_that_passed(path: Path) -> None:
    made = Policies(path)
    _save(made, _act("ACT-0", "hold", made.site.now), 2)
    _save(made, _act("ACT-1", "diagnose", made.site.now, params={"level": "1"}), 0.2)
    other = _act("ACT-2", "diagnose", made.site.now, params={"level": "3"})
    at = made.site.now - 86_400 * SECOND
    with made.site.database.transaction() as c:
        for step in ("executing", "failed"):
            ledger.save_act(c, replace(other, state=step, updated=at), "executor", "", [], at)  # type: ignore[arg-type]
    release = made.board.propose("release", ["node:n1"], ROOT, "x", is_person=True)
    facts = made.board.collect_facts(release.id)
    assert facts.checks == {"n1": "diagnose level 1 passed (ACT-1)"}
    world = SchedulerState(made.site.now, {"n1": SchedulerNode("n1", True, "DRAIN", "fleetpulse:ACT-0")})
    guards = evaluate_guards(Question(release, facts, world, ActLimits(), made.site.now))
    (checked,) = [guard for guard in guards if guard.name == "checked_after"]
    assert (checked.now, checked.passed) == ("n1: diagnose level 3 failed (ACT-2)", False)
