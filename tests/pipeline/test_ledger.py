"""Rows of findings, incidents, history and outbox in a real store."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pytest

from pipeline.incidents import ledger
from pipeline.incidents.changes import Change
from pipeline.incidents.ledger import Payload
from pipeline.model.records import SECOND, Finding, Incident, Level, iso
from pipeline.store.database import Database

START = 1_790_000_000 * SECOND
IDENTITY = "inc-000000000001"


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    made = Database(tmp_path / "store.duckdb")
    yield made
    made.close()


def incident(**more: Any) -> Incident:
    plain = Incident(IDENTITY, "node:n1", START, START - 7, "page", "it's wrong", "link", "port:n1.a", ("port:n1.a",))
    return dataclasses.replace(plain, updated=START, **more)


def change(kind: Any = "opened", now: Incident | None = None, **more: Any) -> Change:
    return Change(kind, now or incident(), START, "fleetpulse", **more)


def finding(level: Level = "page", time: int = START, score: float = 1.5, **more: Any) -> Finding:
    return Finding(time, START, "port:n1.a", "link", level, score, f"{level} at {time - START}", **more)


def record_changes(
    database: Database,
    findings: Sequence[Finding] = (),
    changes: Sequence[Change] = (),
    payloads: Sequence[Payload] = (),
) -> None:
    with database.transaction() as connection:
        ledger.write_changes(connection, findings, changes, payloads, START)


def payload(kind: Any = "firing", receiver: str = "ops", body: str = "{}") -> Payload:
    return Payload(IDENTITY, receiver, kind, body, START)


def test_an_incident_is_read_back_as_it_was_written(database: Database) -> None:
    given = incident(confidence=0.25, resolved=START + 5, state="resolved", simulated=True)
    record_changes(database, [], [change(now=given)])
    (read,) = ledger.list_incidents(database.cursor())
    assert read == given.as_json()


def test_many_changes_in_one_transaction_leave_the_last_state_and_the_full_history(
    database: Database,
) -> None:
    steps = [incident(members=tuple(f"gpu:n1.{i}" for i in range(n))) for n in range(1, 6)]
    record_changes(database, [], [change(), *(change("updated", step) for step in steps)])
    detail = ledger.read_incident(database.cursor(), IDENTITY)
    assert len(detail["members"]) == 5
    assert [h["number"] for h in detail["history"]] == [1, 2, 3, 4, 5, 6]
    assert [len(h["incident"]["members"]) for h in detail["history"]] == [1, 1, 2, 3, 4, 5]
    record_changes(database, [], [change("resolved", incident(resolved=START, state="resolved"))])
    assert ledger.read_incident(database.cursor(), IDENTITY)["history"][-1]["number"] == 7


def test_a_new_title_alone_is_stored_without_a_history_entry(database: Database) -> None:
    record_changes(database, [], [change(), change("retitled", incident(summary="8 flaps in 23 min"))])
    detail = ledger.read_incident(database.cursor(), IDENTITY)
    assert detail["summary"] == "8 flaps in 23 min"
    assert [h["kind"] for h in detail["history"]] == ["opened"]


def test_incidents_are_listed_newest_first_and_by_state(database: Database) -> None:
    later = dataclasses.replace(incident(), id="inc-2", opened=START + 1, state="acknowledged")
    record_changes(database, [], [change(), change(now=later)])
    assert [i["id"] for i in ledger.list_incidents(database.cursor())] == ["inc-2", IDENTITY]
    assert [i["id"] for i in ledger.list_incidents(database.cursor(), "open")] == [IDENTITY]
    assert [i.id for i in ledger.load_open_incidents(database.cursor())] == [IDENTITY, "inc-2"]


def test_an_unknown_incident_is_a_key_error(database: Database) -> None:
    with pytest.raises(KeyError, match="inc-9: not found"):
        ledger.read_incident(database.cursor(), "inc-9")


def test_a_finding_is_one_row_with_its_highest_level_and_newest_time(database: Database) -> None:
    record_changes(database, [finding("suspect", START)], [change(finding_keys=(finding().key,))])
    record_changes(database, [finding("page", START + 1), finding("ticket", START + 2)])
    record_changes(database, [finding("suspect", START + 9, 99.0), finding("page", START + 8, 0.5)])
    (row,) = ledger.read_incident(database.cursor(), IDENTITY)["findings"]
    assert (row["level"], row["summary"], row["time"]) == ("page", "page at 1", iso(START + 9))


def test_a_finding_keeps_evidence_and_signals_and_drops_values_that_are_not_finite(database: Database) -> None:
    one = finding(score=float("nan"), evidence={"x": float("inf"), "who": ["a"]}, signals=("nic.a", "nic.b"))
    two = dataclasses.replace(finding(), onset=START - 1)
    record_changes(database, [one, two], [change(finding_keys=(one.key, two.key))])
    empty, full = ledger.read_incident(database.cursor(), IDENTITY)["findings"]
    assert full == {**one.as_json(), "score": None}
    assert empty["signals"] == []
    assert empty["evidence"] == {}


def test_the_findings_of_a_folded_incident_move_with_it(database: Database) -> None:
    record_changes(
        database,
        [finding()],
        [change(finding_keys=(finding().key,)), change(now=dataclasses.replace(incident(), id="inc-2"))],
    )
    over = incident(resolved=START, state="resolved")
    record_changes(database, [], [change("resolved", over, folded_into="inc-2")])
    assert ledger.read_incident(database.cursor(), IDENTITY)["findings"] == []
    assert len(ledger.read_incident(database.cursor(), "inc-2")["findings"]) == 1


def test_payloads_are_numbered_per_receiver_and_listed_without_their_bodies(database: Database) -> None:
    record_changes(database, [], [change()], [payload(), payload(receiver="b"), payload("resolved")])
    shown = ledger.read_incident(database.cursor(), IDENTITY)["notifications"]
    assert {n["id"] for n in shown} == {f"{IDENTITY}.1.ops", f"{IDENTITY}.2.ops", f"{IDENTITY}.1.b"}
    assert {n["state"] for n in shown} == {"pending"}
    assert all("payload" not in n for n in shown)
    assert ledger.count_payloads(database.cursor()) == {("ops", "pending"): 2, ("b", "pending"): 1}


def test_only_a_receiver_that_got_a_trigger_gets_the_resolve(database: Database) -> None:
    record_changes(database, [], [], [payload(receiver="a")])
    record_changes(database, [], [], [payload("resolved", "a"), payload("resolved", "b")])
    shown = [(n["receiver"], n["kind"]) for n in ledger.list_notifications(database.cursor())]
    assert sorted(shown) == [("a", "firing"), ("a", "resolved")]


def test_a_failed_transaction_leaves_nothing(database: Database) -> None:
    broken = dataclasses.replace(payload(), body=None)  # type: ignore[arg-type]
    with pytest.raises(duckdb.ConstraintException):
        record_changes(database, [finding()], [change()], [payload(), broken])
    assert ledger.list_incidents(database.cursor()) == []
    assert ledger.list_notifications(database.cursor()) == []


def test_a_snapshot_is_read_back_with_its_time(database: Database) -> None:
    assert ledger.load_snapshot(database.cursor(), "desk") is None
    for state in ("old", json.dumps({"a": "new"})):
        with database.transaction() as connection:
            ledger.save_snapshot(connection, "desk", START, state)
    assert ledger.load_snapshot(database.cursor(), "desk") == (START, '{"a": "new"}')


def test_a_large_number_of_findings_is_one_statement(database: Database) -> None:
    storm = [dataclasses.replace(finding(), entity=f"gpu:n{n}.0") for n in range(5000)]
    record_changes(database, storm)
    record_changes(database, storm)
    assert database.cursor().execute("SELECT count(*) FROM findings").fetchall() == [(5000,)]


def test_the_row_of_a_finding_does_not_depend_on_what_is_written_together(tmp_path: Path) -> None:
    found = [
        finding(time=START, score=8.0, evidence={"errors": 1}),
        finding(time=START + 1, score=8.0, evidence={"errors": 2}),
        finding("ticket", time=START + 2, evidence={"errors": 3, "mode": "shadow"}),
    ]
    stored = []
    for i, groups in enumerate(([found], [found[:1], found[1:]], [found[:2], found[2:]], [[f] for f in found])):
        made = Database(tmp_path / f"{i}.duckdb")
        for group in groups:
            with made.transaction() as connection:
                ledger.write_changes(connection, group, [], [], START)
        query = "SELECT epoch_us(time), level, score, summary, evidence FROM findings"
        [(*row, evidence)] = made.connection.execute(query).fetchall()
        stored.append((row, json.loads(evidence)))
        made.close()
    row = [START + 2, "page", 8.0, "page at 1"]
    assert stored == [(row, {"errors": 2, "mode": "shadow"})] * 4
