"""`fleetpulse support` with a configuration that is wrong: the archive says what, and has no secret of it."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from pipeline.commands.support import write_with_any
from pipeline.commands.support_secrets import find_secrets
from pipeline.config.sections import load_config
from pipeline.model.errors import ConfigError, UsageError

ROOT = Path(__file__).parents[2]
PLANTED = ("tok-operator-123456", "pa55-of-kafka", "key-of-a-webhook", "user-pw-1", "inline-pa55", "drop-in-pa55")

LOGGED = " ".join(PLANTED).replace("key-of", "https://hooks.example/T000/key-of")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site whose agent and whose log had secrets; the configuration has one where it must not be."""
    (tmp_path / "tokens").write_text("operator:tok-operator-123456\n")
    (tmp_path / "kafka.password").write_text("pa55-of-kafka\n")
    (tmp_path / "spool" / "n1").mkdir(parents=True)
    (tmp_path / "spool" / "n1" / "status.json").write_text(LOGGED)
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "10.toml").write_text('[kafka]\npassword = "drop-in-pa55"\n')
    path = tmp_path / "fleetpulse.toml"
    path.write_text(f"""
[api]
port = 1
token_file = "{tmp_path}/tokens"
[spool]
directory = "{tmp_path}/spool"
[kafka]
password_file = "{tmp_path}/kafka.password"
password = "inline-pa55"
[[notify.webhooks]]
name = "chat"
url = "https://user:user-pw-1@hooks.example/T000/key-of-a-webhook"
""")
    return path


def read_archive(target: Path) -> dict[str, str]:
    with tarfile.open(target) as archive:
        texts = {m.name: archive.extractfile(m).read().decode() for m in archive}  # type: ignore[union-attr]
    return {name.removeprefix("fleetpulse-support/"): text for name, text in texts.items()}


@pytest.mark.parametrize("broken", ["", "[broken", 'key = "unclosed', "x = \\x00"])
def test_the_archive_has_the_error_and_no_secret(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """It was not written at all, though the questions and answers send people there."""
    monkeypatch.setenv("FLEETPULSE__SPOOL__DIRECTORY", str(tmp_path / "spool"))
    site.write_text(site.read_text() + broken)
    with pytest.raises(ConfigError) as caught:
        load_config(site)
    names, said = write_with_any(str(site), tmp_path / "s.tar.gz", LOGGED)
    texts = read_archive(tmp_path / "s.tar.gz")
    assert names[0] == "configuration-error.txt"
    assert texts["configuration-error.txt"].startswith(str(caught.value)[:40])
    assert {"version.txt", "files/fleetpulse.toml", "files/conf.d/10.toml", "doctor.json", "folders.txt"} <= {*names}
    whole = said + "".join(texts.values())
    assert [secret for secret in PLANTED if secret in whole] == []
    assert broken == "" or "is not TOML" in texts["files/fleetpulse.toml"]
    if not broken:
        assert "status/n1-status.json" in names, "the valid part is in force: the folder of the spool"


def test_a_configuration_that_does_not_exist_and_a_target_that_does_are_errors(site: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        write_with_any(str(tmp_path / "none.toml"), tmp_path / "s.tar.gz", "")
    with pytest.raises(UsageError, match="exists; expected a new file"):
        write_with_any(str(site), site, "")


def test_keys_of_nodes_are_secrets(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "n1.key").write_text("first-key-of-n1\nsecond-key-of-n1\n")
    path = tmp_path / "fleetpulse.toml"
    path.write_text(f'[kafka]\nnode_keys = "{tmp_path}/keys"\n')
    assert {"first-key-of-n1", "second-key-of-n1"} <= {*find_secrets(load_config(path, {}))}


@pytest.mark.slow
def test_the_command_succeeds_and_says_what_is_wrong(site: Path, tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path / "state")}
    words = [sys.executable, str(ROOT / "fleetpulse.py"), "support", str(tmp_path / "s.tar.gz"), "--config", str(site)]
    ran = subprocess.run(words, capture_output=True, text=True, env=environ)
    assert ran.returncode == 0, ran.stderr
    assert "fleetpulse: the configuration is wrong, and the archive says so: " in ran.stderr
    assert "inline-pa55" not in ran.stderr
    assert "configuration-error.txt" in ran.stdout
