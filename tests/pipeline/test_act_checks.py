"""Which checks of a held node count for its release: diagnostics of the whole node, canaries as agents send them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from agents.collectors.canary.ledger import ResultLedger
from pipeline.acts import ledger
from pipeline.acts.act import Act, State, Verb
from pipeline.acts.board import Board
from pipeline.acts.guards import Question, evaluate_guards
from pipeline.acts.scheduler import SchedulerNode, SchedulerState
from pipeline.config.acts import ActLimits
from pipeline.engine.act_checks import Checks, find_checks
from pipeline.engine.act_facts import FactSource
from pipeline.model.records import SECOND
from pipeline.store.database import Database
from tests.pipeline.acts_world import ON, ROOT, START
from tests.pipeline.living import LivingSite

HOUR = 3600 * SECOND
GPUS = ("gpu:n1.0", "gpu:n1.1")
STEPS: tuple[State, ...] = ("executing", "executed", "verified")
ROUND = {"canary": "matmul.1", "version": "v1", "expected": "a1", "runs": 9}
"""What all lines of a canary's program have in common here."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Database]:
    with closing(Database(tmp_path / "store.duckdb")) as made:
        yield made


def make_act(id_: str, verb: Verb, **more: object) -> Act:
    return Act(id_, verb, ("node:n1",), "alice", "x", START, START, "on", **more)  # type: ignore[arg-type] # by name


def save(store: Database, act: Act, at: int, steps: tuple[State, ...] = STEPS) -> None:
    """Writes an act that was carried out at a time."""
    with store.transaction() as c:
        for state in steps:
            ledger.save_act(c, replace(act, state=state, updated=at), "executor", "", [], at)


def write_canary(store: Database, device: str, at: int, line: Mapping[str, object], death: str = "") -> None:
    """Writes the event that an agent makes of a line of its canary's program, or of the signal that ended it."""
    results = ResultLedger(lambda name: name, 0.0, lambda: at)
    event = results.record_line({**ROUND, "device": device, **line})
    event = results.record_death(death) if death else event
    assert event is not None
    store.connection.execute(
        "INSERT INTO events VALUES (make_timestamptz($1::BIGINT), $2, 'digest', $3, 's', 'n1', false, NULL)",
        [at, event.entity, json.dumps(event.data)],
    )


def check(store: Database, since: int = START) -> Checks:
    return find_checks(store.connection, {"n1": since}, {"n1": GPUS})["n1"]


def test_right_canaries_on_all_gpus_are_a_check(store: Database) -> None:
    for gpu in GPUS:
        write_canary(store, gpu, START - HOUR, {"digest": "a1"})
    assert check(store) == Checks("", False, ""), "before the hold"
    write_canary(store, GPUS[0], START + HOUR, {"digest": "a1"})
    write_canary(store, "cpu:n1.0", START + HOUR, {"digest": "a1"})
    assert check(store) == Checks("", False, ""), "one GPU is left out"
    write_canary(store, GPUS[1], START + HOUR, {"digest": "a1"})
    assert check(store) == Checks("canary right on 2 GPUs", False, "")


def test_a_node_without_gpus_is_checked_by_any_right_canary(store: Database) -> None:
    write_canary(store, "cpu:n1.0", START + HOUR, {"digest": "a1"})
    found = find_checks(store.connection, {"n1": START}, {"n1": ()})
    assert found["n1"].passed == "canary right on 1 devices"


@pytest.mark.parametrize(
    ("line", "death"),
    [({"digest": "b2", "wrong": ["bf16"], "again": 3}, ""), ({"digest": "b2"}, ""), ({"begin": True}, "SIGILL")],
)
def test_a_wrong_canary_counts_until_a_long_diagnostic_of_the_node_passed(
    store: Database, line: Mapping[str, object], death: str
) -> None:
    write_canary(store, GPUS[1], START + HOUR, line, death)
    for gpu in GPUS:
        write_canary(store, gpu, START + 2 * HOUR, {"digest": "a1"})
    save(store, make_act("ACT-1", "diagnose", params={"level": "1"}), START + 3 * HOUR)
    assert check(store).failed == "canary of gpu:n1.1 wrong 1 times", "neither right ones nor a short test are enough"
    save(store, make_act("ACT-2", "diagnose", params={"level": "3"}), START + 4 * HOUR)
    assert check(store).failed == ""
    write_canary(store, GPUS[1], START + 5 * HOUR, line, death)
    assert check(store).failed == "canary of gpu:n1.1 wrong 2 times"


def test_a_canary_without_a_known_answer_is_neither_right_nor_wrong(store: Database) -> None:
    store.connection.execute(
        """INSERT INTO events VALUES (make_timestamptz($1::BIGINT), 'gpu:n1.0', 'digest',
           '{"canary": "m", "version": "v", "digest": "a1"}', 's', 'n1', false, NULL)""",
        [START + HOUR],
    )
    assert find_checks(store.connection, {"n1": START}, {"n1": GPUS[:1]})["n1"] == Checks("", False, "")


def test_only_a_long_diagnostic_that_began_after_the_hold_counts(store: Database) -> None:
    save(store, make_act("ACT-1", "diagnose", params={"level": "3"}), START)
    save(store, make_act("ACT-2", "diagnose", params={"level": "2"}), START + 2 * HOUR)
    assert check(store, START + HOUR) == Checks("diagnose level 2 passed (ACT-2)", False, "")
    assert check(store, START).deep
    others = find_checks(store.connection, {"n2": START}, {"n2": ()})
    assert others["n2"] == Checks("", False, "")


def test_a_diagnostic_of_one_gpu_is_no_check_of_its_node(store: Database) -> None:
    save(store, make_act("ACT-1", "diagnose", params={"level": "3", "gpu": "5"}), START + HOUR, ("executing", "failed"))
    save(store, make_act("ACT-2", "diagnose", params={"level": "3", "gpu": "0"}), START + 2 * HOUR)
    assert check(store) == Checks("", False, "diagnose level 3 failed (ACT-1)")
    save(store, make_act("ACT-3", "diagnose", params={"level": "3", "gpu": "5"}), START + 3 * HOUR)
    assert check(store) == Checks("", False, "")
    save(store, make_act("ACT-4", "diagnose", params={"level": "3"}), START + 4 * HOUR)
    assert check(store) == Checks("diagnose level 3 passed (ACT-4)", True, "")


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
    later: tuple[tuple[State, str], ...], failed: str, store: Database
) -> None:
    for number, (state, level) in enumerate((("failed", "3"), *later), 1):
        act = make_act(f"ACT-{number}", "diagnose", params={"level": level})
        save(store, act, START + number * HOUR, ("executing", state))
    assert check(store).failed == failed
    assert check(store, START + 24 * HOUR).failed == "", "before the hold"


def test_a_failed_diagnostic_is_found_behind_any_number_of_other_acts(
    store: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "MOST_ACTS", 2)
    save(store, make_act("ACT-1", "diagnose", params={"level": "3"}), START + HOUR, ("executing", "failed"))
    for number in range(2, 5):
        save(store, replace(make_act(f"ACT-{number}", "ticket"), created=START + HOUR), START + HOUR)
    assert check(store).failed == "diagnose level 3 failed (ACT-1)"


def test_a_node_whose_diagnostic_failed_is_not_released_for_a_shorter_one_that_passed(tmp_path: Path) -> None:
    site = LivingSite(tmp_path / "store.duckdb")
    facts_of = FactSource(site.engine, ON).collect
    board = Board(site.database, ON, lambda: site.now, facts_of, lambda: 40)
    save(site.database, make_act("ACT-0", "hold"), site.now - 48 * HOUR)
    save(site.database, make_act("ACT-1", "diagnose", params={"level": "1"}), site.now - HOUR)
    failed = make_act("ACT-2", "diagnose", params={"level": "3"})
    save(site.database, failed, site.now - 24 * HOUR, ("executing", "failed"))
    release = board.propose("release", ["node:n1"], ROOT, "x", is_person=True)
    facts = board.collect_facts(release.id)
    assert facts.checks == {"n1": "diagnose level 1 passed (ACT-1)"}
    world = SchedulerState(site.now, {"n1": SchedulerNode("n1", True, "DRAIN", "fleetpulse:ACT-0")})
    guards = evaluate_guards(Question(release, facts, world, ActLimits(), site.now))
    (checked,) = [guard for guard in guards if guard.name == "checked_after"]
    assert (checked.now, checked.passed) == ("n1: diagnose level 3 failed (ACT-2)", False)


def test_the_canaries_of_all_gpus_of_the_topology_count(tmp_path: Path) -> None:
    site = LivingSite(tmp_path / "store.duckdb")
    save(site.database, make_act("ACT-0", "hold"), site.now - 2 * HOUR)
    for gpu in range(3):
        write_canary(site.database, f"gpu:n1.{gpu}", site.now - HOUR, {"digest": "a1"})
    release = make_act("ACT-1", "release")
    assert FactSource(site.engine, ON).collect(release).checks == {}
    write_canary(site.database, "gpu:n1.3", site.now - HOUR, {"digest": "a1"})
    assert FactSource(site.engine, ON).collect(release).checks == {"n1": "canary right on 4 GPUs"}
