"""Tokens that `fleetpulse init` creates."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from dashboards.client import read_token
from pipeline.api import tokens
from pipeline.commands import init
from pipeline.config.sections import Api, Config, Spool, Store
from pipeline.model.errors import ConfigError, UsageError


def config(folder: Path, token_file: Path) -> Config:
    return Config(
        api=Api(host="0.0.0.0", token_file=token_file),
        spool=Spool(directory=folder / "spool"),
        store=Store(path=folder / "store.duckdb"),
    )


def test_init_creates_the_configured_token_file_and_keeps_an_existing_one(tmp_path: Path) -> None:
    file, said = tmp_path / "tokens", []
    assert init.initialize(config(tmp_path, file), said.append) == 0
    assert f"tokens: {file} created, for dashboard and operator" in said
    assert file.stat().st_mode & 0o777 == 0o600
    first = file.read_text()
    assert init.initialize(config(tmp_path, file), said.append) == 0
    assert f"tokens: {file} already exists" in said
    assert file.read_text() == first


def test_every_created_token_belongs_to_its_user_and_the_dashboard_uses_the_first(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    tokens.create_token_file(file)
    known = tokens.read_tokens(Api(host="0.0.0.0", token_file=file))
    lines = dict(line.split(":") for line in file.read_text().splitlines())
    assert tuple(lines) == tokens.INITIAL_USERS
    assert len(set(lines.values())) == len(lines)
    assert [known.find_user(f"Bearer {token}") for token in lines.values()] == list(tokens.INITIAL_USERS)
    assert known.find_user(f"Bearer {read_token(file)}") == "dashboard"


def test_a_token_file_that_cannot_be_created_is_reported_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="absent/tokens cannot be created"):
        init.initialize(config(tmp_path, tmp_path / "absent" / "tokens"), lambda _: None)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_tokens_that_root_creates_belong_to_the_owner_of_the_store(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, 12346)
    roles = tokens.find_role_file(tmp_path / "store.duckdb")
    tokens.create_role_token(roles, "ann", "viewer", by="root", now=0, days=1)
    assert {path.stat().st_uid for path in tmp_path.iterdir()} == {12345}
    assert roles.stat().st_mode & 0o777 == 0o600


def test_no_token_both_approves_for_people_and_carries_out_acts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="must not approve"):
        tokens.create_role_token(tmp_path / "t", "ann", "admin", 1, "root", 0, on_behalf_of=True, executor=True)
    assert tokens.load_role_tokens(tmp_path / "t") == []


def test_a_token_of_before_with_both_rights_carries_out_nothing(tmp_path: Path) -> None:
    roles = tmp_path / "t"
    made, text = tokens.create_role_token(roles, "ann", "admin", 0, "root", 0, on_behalf_of=True)
    tokens.change_role_tokens(roles, lambda known: [replace(token, executor=True) for token in known])
    assert (tokens.load_role_tokens(roles)[0].executor, made.executor) == (True, False)
    caller = tokens.Tokens({}, roles, lambda: 1).find_user(f"Bearer {text}")
    assert caller is not None
    assert (caller.on_behalf_of, caller.is_executor) == (True, False)


def test_a_file_of_tokens_that_became_unreadable_keeps_the_known_ones_and_is_read_when_it_is_right(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    roles = tokens.find_role_file(tmp_path / "store.duckdb")
    _, text = tokens.create_role_token(roles, "ann", "viewer", by="root", now=0, days=1)
    known = tokens.Tokens({}, roles, lambda: 1)
    before = roles.read_text()
    roles.write_text("[")
    assert known
    assert (caller := known.find_user(f"Bearer {text}")) is not None
    assert caller == "ann"
    assert "the tokens of before stay valid" in caplog.text
    roles.write_text(before.replace('"ann"', '"bob"'))
    assert known
    assert (caller := known.find_user(f"Bearer {text}")) is not None
    assert caller == "bob"
    roles.write_text("[")
    with pytest.raises(ConfigError, match="cannot be read"):
        tokens.Tokens({}, roles, lambda: 1)
