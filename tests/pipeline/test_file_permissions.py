"""State is closed to other users in any order of creation; open state is named with the fix."""

from __future__ import annotations

import dataclasses
import importlib
import os
import pkgutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.node.health.report import FILE_MODE
from agents.node.spool.spool import Spool
from pipeline import config as config_folder
from pipeline.commands import doctor
from pipeline.config.acts import Acts, KubernetesAccess
from pipeline.config.sections import Api, Config, Gateway, Kafka, Store
from pipeline.config.sections import Spool as SpoolSection
from pipeline.model.records import TELEMETRY
from pipeline.runtime import private_files
from pipeline.transport import segments

ROOT = Path(__file__).parents[2]
NOT_SECRET = {"advice_file", "status_file"}


@pytest.fixture
def open_umask() -> Iterator[None]:
    """Sets the umask that lets the program choose all modes."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture(autouse=True)
def reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the folder of a test and those above it, which are 0700, as open to all."""
    real, opened = private_files._is_shut, (tmp_path, *tmp_path.parents)
    monkeypatch.setattr(private_files, "_is_shut", lambda folder, owners: folder not in opened and real(folder, owners))


def file_modes(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): stat.S_IMODE(p.lstat().st_mode) for p in folder.rglob("*")}


def config_of(folder: Path, **more: object) -> Config:
    return Config(store=Store(folder / "store.duckdb"), spool=SpoolSection(folder / "spool"), **more)  # type: ignore[arg-type]


@pytest.mark.usefixtures("open_umask")
def test_a_spool_is_private_with_all_its_files(tmp_path: Path) -> None:
    with Spool(tmp_path / "state" / "spool", "n1", TELEMETRY, free_bytes=0) as spool:
        spool.append(b"body", 1, 0)
        spool.sync()
        [epoch] = segments.epoch_folders(spool.home)
        segments.write_json(epoch / "pipeline.cursor", {"next": 1}, durable=False)
    found = file_modes(tmp_path)
    assert {name for name in found if name.endswith((".seg", "mark", "lock", ".cursor"))}
    assert {name: mode for name, mode in found.items() if mode & 0o077} == {}


@pytest.mark.slow
@pytest.mark.usefixtures("open_umask")
def test_init_creates_private_state(tmp_path: Path) -> None:
    """With the real command: the store's file and folders, the spool and the tokens."""
    state = tmp_path / "state"
    environ = {
        **os.environ,
        "FLEETPULSE__STORE__PATH": str(state / "store" / "store.duckdb"),
        "FLEETPULSE__SPOOL__DIRECTORY": str(state / "spool"),
        "FLEETPULSE__API__TOKEN_FILE": str(tmp_path / "tokens"),
    }
    subprocess.run([sys.executable, "fleetpulse.py", "init"], cwd=ROOT, env=environ, check=True, capture_output=True)
    found = file_modes(tmp_path)
    assert {"state/store/store.duckdb", "state/spool", "tokens"} <= set(found)
    assert {name: mode for name, mode in found.items() if mode & 0o077} == {}


def test_init_on_a_node_creates_nothing(tmp_path: Path) -> None:
    """It needs what only a server has, and left an empty directory of the store before it said so."""
    path = tmp_path / "fleetpulse.toml"
    path.write_text(f"[spool]\ndirectory = '{tmp_path / 'spool'}'\n[api]\ntoken_file = '{tmp_path / 'tokens'}'\n")
    node = "import sys; sys.modules['duckdb'] = None; import fleetpulse; sys.exit(fleetpulse.main(sys.argv[1:]))"
    words = [sys.executable, "-c", node, "init", "--config", str(path)]
    environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    ran = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert (ran.returncode, "needs duckdb, which only a server has" in ran.stderr) == (2, True), ran.stderr
    assert list(tmp_path.iterdir()) == [path]


def test_doctor_fails_on_open_state_and_its_fix_closes_it(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with Spool(tmp_path / "spool", "n1", TELEMETRY, free_bytes=0):
        pass
    (tmp_path / "store.duckdb").write_bytes(b"")
    tmp_path.chmod(0o755)
    (tmp_path / "store.duckdb").chmod(0o644)
    (tmp_path / "spool" / "n1").chmod(0o750)
    check = doctor.permissions(config)
    assert check.state == "fail"
    assert f"{tmp_path} (0755)" in check.found
    assert any("accessible to other users" in text for text in private_files.list_warnings(config))
    subprocess.run(check.fix, shell=True, check=True)
    assert doctor.permissions(config).state == "ok"
    assert private_files.list_warnings(config) == []


def test_what_is_below_a_folder_that_keeps_others_out_is_not_accessible(tmp_path: Path) -> None:
    """A store of mode 0644, as older versions made it, in the 0700 of its service: the gate of the upgrade failed."""
    state = tmp_path / "state"
    config = config_of(state)
    for folder in (state, state / "spool"):
        folder.mkdir(mode=0o700)
    for name in ("store.duckdb", "spool/x"):
        (state / name).touch()
        (state / name).chmod(0o644)
    assert doctor.permissions(config).state == "ok"
    assert private_files.list_warnings(config) == []
    for mode in (0o701, 0o710):
        state.chmod(mode)
        assert f"{state / 'store.duckdb'} (0644)" in doctor.permissions(config).found, mode
    state.chmod(0o700)
    if os.geteuid() == 0:
        above = tmp_path / "above"
        above.mkdir(mode=0o700)
        state.rename(above / "state")
        os.chown(above, 8600, 8600)
        (above / "state").chmod(0o755)
        assert doctor.permissions(config_of(above / "state")).state == "fail", "another user has the folder above"


def test_the_status_file_for_other_users_is_allowed_unless_others_can_write_it(tmp_path: Path) -> None:
    """`doctor` once failed on every host whose agent writes it beside the spool, and the agent reverted the fix."""
    tmp_path.chmod(0o700)
    with Spool(tmp_path / "spool", "n1", TELEMETRY, free_bytes=0):
        pass
    shown = tmp_path / "spool" / "n1" / "status.json"
    shown.write_text("{}")
    shown.chmod(FILE_MODE)
    assert doctor.permissions(config_of(tmp_path)).state == "ok"
    shown.parent.chmod(0o755)
    shown.parent.parent.chmod(0o755)
    assert private_files.find_open_state([shown]) == []
    shown.chmod(0o666)
    assert private_files.find_open_state([shown]) == [(shown, 0o666)]


def test_the_fix_never_closes_a_folder_that_all_users_share(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    check = doctor.permissions(config_of(tmp_path))
    assert check.state == "fail"
    assert "chmod" not in check.fix
    tmp_path.chmod(0o700)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_secret_readable_by_others_is_a_warning_of_doctor_and_at_start(tmp_path: Path, mode: int) -> None:
    token, key = tmp_path / "tokens", tmp_path / "key.pem"
    for path in (token, key):
        path.write_text("operator:0123456789abcdef\n")
        path.chmod(0o600)
    config = config_of(tmp_path, api=Api(token_file=token), kafka=Kafka(key_file=key))
    assert doctor.secrets(config).state == "ok"
    key.chmod(mode)
    check = doctor.secrets(config)
    assert check.state == "warn"
    assert f"kafka.key_file = '{key}' has mode {mode:04o}" in check.found
    assert check.fix == f"chmod 600 {key}"
    assert any(str(key) in text for text in private_files.list_warnings(config))
    environ = {**os.environ, "FLEETPULSE__API__TOKEN_FILE": str(key), "FLEETPULSE__STORE__PATH": str(tmp_path / "s")}
    environ["FLEETPULSE__SPOOL__DIRECTORY"] = str(tmp_path / "spool")
    said = subprocess.run(
        [sys.executable, "fleetpulse.py", "init"], cwd=ROOT, env=environ, capture_output=True, text=True
    )
    assert f"warning: api.token_file = '{key}'" in said.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another group, as a kubelet does")
def test_what_a_kubelet_made_for_the_group_of_the_pod_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fsGroup a volume is 2775 and a Secret's file 0440, both root's: `doctor` failed in each pod for good."""
    token, store = tmp_path / "token", tmp_path / "store.duckdb"
    for path, mode, owner in ((token, 0o440, 0), (store, 0o600, 8600), (tmp_path, 0o2775, 0)):
        path.touch()
        os.chown(path, owner, 8600)
        path.chmod(mode)
    config = config_of(tmp_path, api=Api(token_file=token))
    monkeypatch.setattr(os, "geteuid", lambda: 8600)
    monkeypatch.setattr(os, "getegid", lambda: 8600)

    def states() -> tuple[str, str, int]:
        found = len(private_files.list_warnings(config))
        return doctor.permissions(config).state, doctor.secrets(config).state, found

    monkeypatch.delenv(private_files.IN_A_POD, raising=False)
    assert states() == ("fail", "warn", 2)
    monkeypatch.setenv(private_files.IN_A_POD, "10.96.0.1")
    assert states() == ("ok", "ok", 0)
    store.chmod(0o640)  # the pod's own
    assert states() == ("fail", "ok", 1)
    store.chmod(0o600)
    os.chown(token, 0, 0)
    assert states() == ("ok", "warn", 1)


def test_secrets_of_collectors_are_checked_too(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("x")
    path.chmod(0o644)
    tables = {"redfish": {"bmcs": [{"url": "https://bmc", "password_file": str(path)}]}}
    config = dataclasses.replace(config_of(tmp_path), collector=tables)
    assert private_files.list_secret_files(config) == {"collector.redfish.bmcs.0.password_file": path}
    assert doctor.secrets(config).state == "warn"


def test_every_key_that_names_a_file_is_listed_as_secret_or_not() -> None:
    modules = [
        importlib.import_module(f"pipeline.config.{m.name}") for m in pkgutil.iter_modules(config_folder.__path__)
    ]
    types = [t for module in modules for t in vars(module).values() if isinstance(t, type)]
    sections = [t for t in types if dataclasses.is_dataclass(t)]
    named = {f.name for section in sections for f in dataclasses.fields(section) if f.name.endswith("_file")}
    assert named - NOT_SECRET - set(private_files.SECRET_KEYS) - set(private_files.CERTIFICATE_KEYS) == set()


def test_a_kubeconfig_and_a_certificate_file_with_its_key_are_secret_and_a_certificate_is_not(tmp_path: Path) -> None:
    cluster, chain, public = tmp_path / "kubeconfig", tmp_path / "chain.pem", tmp_path / "public.pem"
    cluster.write_text("kind: Config\n")
    public.write_text("-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n")
    chain.write_text(public.read_text() + "-----BEGIN EC PRIVATE KEY-----\nMHcC\n-----END EC PRIVATE KEY-----\n")
    for path in (cluster, chain, public):
        path.chmod(0o644)
    config = config_of(
        tmp_path,
        acts=Acts(kubernetes=KubernetesAccess(kubeconfig=cluster)),
        gateway=Gateway(certificate_file=chain),
        kafka=Kafka(certificate_file=public, ca_file=tmp_path / "gone"),
    )
    assert set(private_files.list_secret_files(config).values()) == {cluster, chain}
    check = doctor.secrets(config)
    assert (check.state, check.fix) == ("warn", f"chmod 600 {chain} {cluster}")
