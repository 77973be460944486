"""`fleetpulse doctor` on a node, which lacks the pipeline's packages, and users without a home."""

from __future__ import annotations

import importlib.util
import pwd
from pathlib import Path

import pytest

import fleetpulse
from pipeline.commands import doctor
from pipeline.config.sections import Api, Config, Spool, load_config, state_directory
from tests.daemons import free_ports


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Config:
    """An installation without DuckDB, and the configuration of a node on which nothing runs."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "duckdb" else found(name, *a))
    (port,) = free_ports(1)
    return Config(spool=Spool(directory=tmp_path / "spool"), api=Api(port=port))


@pytest.mark.parametrize("check", [doctor.store, doctor.receivers, doctor.topology, doctor.api])
def test_what_only_a_pipeline_needs_does_not_fail_on_a_node(node: Config, check: object) -> None:
    found = check(node)  # type: ignore[operator]
    assert (found.state, found.fix) == ("info", "")


@pytest.mark.parametrize(
    ("installed", "fix"), [(True, "systemctl enable --now fleetpulse-agent"), (False, "fleetpulse init")]
)
def test_the_fix_for_a_missing_spool_fits_the_installation(
    node: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, installed: bool, fix: str
) -> None:
    monkeypatch.setattr(doctor, "UNIT_FOLDER", tmp_path if installed else tmp_path / "none")
    assert doctor.spool(node).fix == fix


def test_a_user_without_a_home_keeps_state_where_its_unit_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a dynamic user of systemd where libnss-systemd is not installed: no HOME, no entry in the user database."""
    for name in ("HOME", "XDG_STATE_HOME", "STATE_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)

    def unknown(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for given, found in (
        (None, "/var/lib/fleetpulse"),
        ("/var/lib/fleetpulse", "/var/lib/fleetpulse"),
        ("/var/lib/one:/var/lib/two", "/var/lib/one/fleetpulse"),
    ):
        monkeypatch.setenv("XDG_STATE_HOME", "")
        if given:
            monkeypatch.setenv("STATE_DIRECTORY", given)
        fleetpulse.set_state_home()
        assert state_directory() == Path(found)
    assert load_config(None, {}).spool.directory == Path("/var/lib/one/fleetpulse/spool")
