"""Tokens that `fleetpulse init` creates."""

from __future__ import annotations

from pathlib import Path

import pytest

from dashboards.client import read_token
from pipeline.api import tokens
from pipeline.commands import init
from pipeline.config.sections import Api, Config, Spool, Store
from pipeline.model.errors import UsageError


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
