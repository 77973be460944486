"""`fleetpulse doctor` on a node, which lacks the pipeline's packages, and users without a home."""

from __future__ import annotations

import importlib.util
import os
import pwd
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.commands import doctor
from pipeline.commands.next_steps import suggest_next
from pipeline.config.sections import Api, Config, Spool, load_config, state_directory
from pipeline.model.errors import Unreachable
from pipeline.runtime import systemd
from pipeline.runtime.state_home import set_state_home
from tests.daemons import free_ports

ROOT = Path(__file__).parents[2]


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
    monkeypatch.setattr(systemd, "UNIT_FOLDER", tmp_path if installed else tmp_path / "none")
    assert doctor.spool(node).fix == fix


def test_a_server_with_kafka_is_not_told_to_make_a_spool(node: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next step was `fleetpulse init`, or to start an agent on the server."""
    with_kafka = replace(node, pipeline=replace(node.pipeline, transport="kafka"))
    assert doctor.spool(with_kafka).state == "warn", "a node has an agent"
    monkeypatch.undo()
    found = doctor.spool(with_kafka)
    assert (found.state, found.fix) == ("info", "")
    assert "with Kafka a server needs none" in found.found


@pytest.fixture
def unconfigured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Config:
    """A host with a package whose file has no key; nothing runs there."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(systemd, "UNIT_FOLDER", tmp_path)

    def no_answer(config: Config, route: str) -> tuple[int, object]:
        raise Unreachable("the API does not answer")

    monkeypatch.setattr(doctor.client, "get", no_answer)
    file = tmp_path / "fleetpulse.toml"
    file.write_text((ROOT / "deploy/packages/fleetpulse.toml").read_text())
    return load_config(file, {})


CREATED = (doctor.configuration, doctor.store, doctor.spool, doctor.api)


def test_on_a_packaged_host_without_a_configuration_doctor_says_setup_and_says_it_once(unconfigured: Config) -> None:
    """`init` there would make a store in the home of the person, and the units would not find it."""
    found = [check(unconfigured) for check in CREATED]
    assert {(check.state, check.fix) for check in found} == {("warn", "fleetpulse setup")}
    assert suggest_next(unconfigured, found)[1:] == ["    1. configuration: fleetpulse setup"]


def test_after_setup_doctor_says_what_is_next_and_without_a_package_init(
    unconfigured: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    configured = replace(unconfigured, site=replace(unconfigured.site, name="east"))
    assert [check(configured).fix for check in CREATED] == [
        *("", "fleetpulse init"),
        *("systemctl enable --now fleetpulse-agent", "systemctl enable --now fleetpulse-pipeline"),
    ]
    monkeypatch.setattr(systemd, "UNIT_FOLDER", tmp_path / "none")
    assert [check(unconfigured).fix for check in CREATED] == [
        *("", "fleetpulse init"),
        *("fleetpulse init", "fleetpulse up"),
    ]
    with_kafka = replace(unconfigured, pipeline=replace(unconfigured.pipeline, transport="kafka"))
    assert doctor.api(with_kafka).fix == "fleetpulse pipeline"


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
        set_state_home()
        assert state_directory() == Path(found)
    assert load_config(None, {}).spool.directory == Path("/var/lib/one/fleetpulse/spool")


ON_A_NODE = """import sys
for module in ("duckdb", "numba", "pyarrow", "fastapi", "uvicorn", "jinja2", "yaml", "streamlit", "altair"):
    sys.modules[module] = None
import fleetpulse
for words in map(str.split, sys.argv[1:]):
    print(words[0], fleetpulse.main(words))
"""
OF_A_SERVER = (
    *("sql SELECT", "pipeline", "dashboard", "incidents", "audit", "executor"),
    *("token list", "node list", "backup x", "restore x", "detectors list"),
)


def test_commands_of_a_server_say_so_on_a_node(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    words = [sys.executable, "-c", ON_A_NODE, *OF_A_SERVER]
    done = subprocess.run(words, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == [f"{command.split()[0]} 2" for command in OF_A_SERVER]
    assert "fleetpulse sql: needs duckdb, which only a server has: run it there" in done.stderr
    assert "Traceback" not in done.stderr
