"""Tokens, restores and backups without a pipeline are rows of the audit, once each."""

from __future__ import annotations

import getpass
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.api.tokens import create_role_token, find_role_file, load_role_tokens, revoke_role_token
from pipeline.incidents.audit import check_chain, list_audit
from pipeline.incidents.outside_acts import OutsideActs, add_act, find_act_file
from pipeline.model.records import SECOND
from pipeline.store.database import Database

NOW = 1_790_000_000 * SECOND


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    made = Database(tmp_path / "store.duckdb")
    yield made
    made.close()


def open_acts(folder: Path) -> OutsideActs:
    store = folder / "store.duckdb"
    roles = find_role_file(store)
    return OutsideActs(store, roles, lambda: load_role_tokens(roles))


def rows(database: Database) -> list[tuple[str, str, str]]:
    found = list_audit(database.connection)
    return [(row["actor"], row["action"], row["target"]) for row in reversed(found)]


def test_creating_and_revoking_a_token_are_rows_of_the_audit_once(database: Database, tmp_path: Path) -> None:
    path = find_role_file(tmp_path / "store.duckdb")
    token, text = create_role_token(path, "ann", "operator", 30.0, "root", NOW)
    acts = open_acts(tmp_path)
    acts.record(database, NOW)
    acts.record(database, NOW)
    revoke_role_token(path, token.id, "eve", NOW + SECOND)
    for again in (acts, open_acts(tmp_path)):
        again.record(database, NOW)
    assert rows(database) == [("root", "create token", token.id), ("eve", "revoke token", token.id)]
    assert text not in str(list_audit(database.connection))
    assert check_chain(database.connection) is None


def test_acts_of_commands_are_recorded_and_their_file_is_removed(database: Database, tmp_path: Path) -> None:
    store = tmp_path / "store.duckdb"
    acts = open_acts(tmp_path)
    acts.record(database, NOW)
    add_act(store, "restore", "/backups/monday", "as of yesterday", NOW)
    add_act(store, "backup", str(store), "", NOW)
    with find_act_file(store).open("a") as file:
        file.write("{torn")
    acts.record(database, NOW)
    me = getpass.getuser()
    assert rows(database) == [(me, "restore", "/backups/monday"), (me, "backup", str(store))]
    assert not find_act_file(store).exists()


def test_an_act_is_recorded_after_a_crash_between_reading_and_writing(database: Database, tmp_path: Path) -> None:
    store = tmp_path / "store.duckdb"
    add_act(store, "restore", "a", "", NOW)
    find_act_file(store).rename(store.with_name("store.duckdb.acts.read"))
    add_act(store, "restore", "b", "", NOW)
    acts = open_acts(tmp_path)
    acts.record(database, NOW)
    acts.record(database, NOW)
    assert [target for _, _, target in rows(database)] == ["a", "b"]
