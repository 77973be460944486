"""The archive of `fleetpulse support`: complete or absent, with a line for what cannot be read, and files of TOML."""

from __future__ import annotations

import base64
import errno
import json
import os
import re
import tarfile
import time
import tomllib
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest

from pipeline.commands import support, support_secrets
from pipeline.commands.support_secrets import find_secrets, hide
from pipeline.config.addresses import HIDDEN
from pipeline.config.sections import Config, load_config
from pipeline.config.toml_text import write_toml
from pipeline.model.errors import UsageError

FILE = """# url = "old-key@hooks.example"
[spool]
directory = "{folder}/spool"
[store]
path = "{folder}/store/s.duckdb"
[kafka]
bootstrap_servers = "k1:9092"
password_file = "{folder}/kafka.password"
[api]
port = 1
[[groups]]
nodes = ["h200-*"]
[groups.collector.pci]
gpus_expected = 8
"""
DROP_IN = """[[notify.webhooks]]
name = "chat"
url = "https://user:pass word'q@hooks.example/key-of-a-webhook"
"""


@pytest.fixture
def site(tmp_path: Path) -> Config:
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "kafka.password").write_text("pa55-of-kafka\n")
    (tmp_path / "fleetpulse.toml").write_text(FILE.format(folder=tmp_path))
    (tmp_path / "conf.d" / "50-site.toml").write_text(DROP_IN)
    (tmp_path / "spool" / "n1").mkdir(parents=True)
    (tmp_path / "spool" / "n1" / "status.json").write_text('{"state": "ok"}')
    return load_config(tmp_path / "fleetpulse.toml", {})


def read(config: Config, target: Path) -> dict[str, str]:
    support.write_support(config, target, "[]")
    with tarfile.open(target) as archive:
        return {
            one.name.partition("/")[2]: archive.extractfile(one).read().decode()  # type: ignore[union-attr]
            for one in archive
        }


def put_journalctl(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    (folder / "bin").mkdir()
    (folder / "bin" / "journalctl").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "bin" / "journalctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")


def test_a_slow_journal_is_a_line_in_the_archive(site: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a traceback, and a partial archive stayed."""
    put_journalctl(tmp_path, monkeypatch, "echo first line; exec sleep 60")
    monkeypatch.setattr(support, "LOG_S", 0.5)
    monkeypatch.setattr(support, "UNITS", ("agent",))
    began = time.monotonic()
    said = read(site, tmp_path / "a.tar.gz")["log/agent.txt"]
    assert "first line" in said
    assert "journalctl took more than 0.5 s and was ended; try it: journalctl --no-pager" in said
    assert time.monotonic() - began < 30


def test_what_cannot_be_read_is_a_line_in_the_archive(site: Config, tmp_path: Path) -> None:
    """The command said that the archive cannot be written, and a partial one stayed."""
    folder = tmp_path / "spool"
    for name in ("gone", "loop", "folder", "fifo"):
        (folder / name).mkdir()
    (folder / "gone" / "status.json").symlink_to("nowhere")
    (folder / "loop" / "status.json").symlink_to("status.json")
    (folder / "folder" / "status.json").mkdir()
    os.mkfifo(folder / "fifo" / "status.json")
    found = read(site, tmp_path / "a.tar.gz")
    assert found["status/n1-status.json"] == '{"state": "ok"}'
    told = {name: text for name, text in found.items() if name.startswith("status/") and "n1" not in name}
    assert all(str(folder) in text for text in told.values()), told
    assert {"status/fifo-status.json", "status/folder-status.json"} <= set(told)
    for name, text in told.items():
        assert ("is no regular file" if "fifo" in name or "folder" in name else "cannot be read") in text


def test_an_archive_that_was_not_completed_leaves_nothing(
    site: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(config: Config, route: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(support, "ask", stop)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        support.write_support(site, tmp_path / "a.tar.gz", "[]")
    assert sorted(tmp_path.iterdir()) == before
    with pytest.raises(UsageError, match="cannot be written: No such file or directory"):
        support.write_support(site, tmp_path / "nowhere" / "a.tar.gz", "[]")


def test_the_files_of_the_configuration_are_in_the_archive_without_their_secrets(site: Config, tmp_path: Path) -> None:
    """Written back with the hidden values filled in, they are the configuration again, with the groups of all nodes."""
    found = read(site, tmp_path / "a.tar.gz")
    assert [secret for secret in ("old-key", "word'q", "key-of-a", "pa55") if secret in "".join(found.values())] == []
    assert tomllib.loads(found["files/fleetpulse.toml"]) == tomllib.loads(FILE.format(folder=tmp_path))
    assert tomllib.loads(found["files/conf.d/50-site.toml"]) == {
        "notify": {"webhooks": [{"name": "chat", "url": f"https://hooks.example/{HIDDEN}"}]}
    }


def test_a_file_that_went_meanwhile_is_a_line_in_the_archive(site: Config, tmp_path: Path) -> None:
    (tmp_path / "conf.d" / "60-gone.toml").symlink_to("nowhere")
    assert "cannot be read: No such file" in read(site, tmp_path / "a.tar.gz")["files/conf.d/60-gone.toml"]


KUBECONFIG = """kind: Config
clusters:
- name: default
  cluster: { server: "https://10.0.0.1:6443" }
users:
- name: default
  user:
    client-certificate-data: cHVibGljIHBhcnQgb2YgaXQ=
    client-key-data: "a2V5IG9mIHRoZSBjbHVzdGVy"
    token: token-of-the-cluster
    password: |-
      QWVyeWxvbmdmb2xkZWRwYXNzd29yZGluYmFzZTY0MTIzNDU2Nzg5MA==
"""
CHAIN = """-----BEGIN CERTIFICATE-----
cHVibGljCg==public
-----END CERTIFICATE-----
-----BEGIN PRIVATE KEY-----
bGluZS1vbmU=line-one
bGluZS10d28=line-two
-----END PRIVATE KEY-----
"""


def test_of_a_kubeconfig_and_a_chain_with_its_key_what_logs_in_is_hidden_and_nothing_else(
    site: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("kubeconfig", KUBECONFIG), ("chain.pem", CHAIN)):
        (tmp_path / name).write_text(text)
    (tmp_path / "log").write_text(KUBECONFIG + CHAIN)
    put_journalctl(tmp_path, monkeypatch, f"cat {tmp_path}/log")
    with (tmp_path / "fleetpulse.toml").open("a") as file:
        keys = f"[acts.kubernetes]\nkubeconfig = '{tmp_path}/kubeconfig'\n"
        file.write(f"{keys}[gateway]\ncertificate_file = '{tmp_path}/chain.pem'\n")
    logged = read(load_config(tmp_path / "fleetpulse.toml", {}), tmp_path / "s.tar.gz")["log/pipeline.txt"]
    for secret in ("a2V5IG9m", "token-of-the-cluster", "QWVyeWxv", "line-one", "line-two"):
        assert secret not in logged
    for public in ("name: default", "cHVibGljCg==public", "cHVibGljIHBhcnQ", "10.0.0.1:6443", "-----BEGIN PRIVATE"):
        assert public in logged


@pytest.mark.parametrize("user", ["", "a:", "ab:", "operator:"])
@pytest.mark.parametrize("secret", ["pa55 w/rd+of=it", "umlaut-ä-and-'quotes'", 'back\\slash"1'])
def test_a_secret_is_hidden_in_each_form_in_which_logs_have_it(tmp_path: Path, secret: str, user: str) -> None:
    (tmp_path / "password").write_text(f"{secret}\n")
    (tmp_path / "fleetpulse.toml").write_text(f"[kafka]\npassword_file = '{tmp_path}/password'\n")
    secrets = find_secrets(load_config(tmp_path / "fleetpulse.toml", {}))
    basic = base64.b64encode(f"{user}{secret}".encode()).decode()
    for form in (secret, repr(secret), quote_plus(secret), quote(secret), json.dumps(secret), str([secret])):
        assert re.fullmatch(r"got [\['\"]*\(hidden\)[\]'\"]* here", hide(f"got {form} here", secrets)), form
    assert len(hide(basic, secrets).replace(HIDDEN, "")) <= len(user) * 4 // 3 + 6


EXEC = """[acts.exec]
reboot = [
    "/usr/bin/curl", "-X", "POST", "-H", "Authorization: Bearer tok-of-the-exec", "--data=a7f3e9b2c4d5e6f7a8", "{node}"
]
"""


def test_arguments_of_programs_are_hidden_with_the_secrets_among_them(
    site: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conf.d" / "60-acts.toml").write_text(EXEC)
    put_journalctl(tmp_path, monkeypatch, "echo ran curl POST tok-of-the-exec for n1")
    found = read(load_config(tmp_path / "fleetpulse.toml", {}), tmp_path / "s.tar.gz")
    shown = ["/usr/bin/curl", "-X", HIDDEN, "-H", HIDDEN, f"--data={HIDDEN}", "{node}"]
    assert json.loads(found["configuration.json"])["acts.exec.reboot"] == shown
    assert tomllib.loads(found["files/conf.d/60-acts.toml"])["acts"]["exec"]["reboot"] == shown
    assert found["log/pipeline.txt"] == f"ran curl POST {HIDDEN} for n1\n"
    assert "tok-of-the-exec" not in "".join(found.values())


@pytest.mark.parametrize("wrong", ["", "[api]\nprt = 1\n"])
def test_files_of_secrets_that_cannot_be_read_are_named(
    site: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    """Run without the right to read them, it hid nothing of them in logs, and said nothing."""
    file = tmp_path / "fleetpulse.toml"
    file.write_text(wrong + file.read_text().replace("[api]\n", "" if wrong else "[api]\n"))

    def refuse(path: Path) -> bytes:
        if path.name == "kafka.password":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return path.read_bytes()

    monkeypatch.setattr(support_secrets, "read_regular", refuse)
    names, said = support.write_with_any(str(file), tmp_path / "s.tar.gz", "[]")
    assert "warning: 1 files of secrets cannot be read by this user, so nothing of them is hidden" in said
    assert f"{tmp_path}/kafka.password: Permission denied" in said
    assert "secrets-not-hidden.txt" in names
    with tarfile.open(tmp_path / "s.tar.gz") as archive:
        part = archive.extractfile("fleetpulse-support/secrets-not-hidden.txt")
        assert part is not None
        assert part.read().decode() == f"{tmp_path}/kafka.password: Permission denied\n"


def test_toml_that_is_written_is_read_as_the_same_values() -> None:
    text = (
        'top = "a\\u007f\\n\\"é😀"\nnone = []\n"a b" = [1, -2.5, inf, true, 2026-11-29, 10:00:00]\n[empty]\n'
        "[a.b.'c.d']\nwhen = 2026-11-29T10:00:00Z\nbig = 1e300\nmixed = [{x = 1}, 2]\n[[l]]\n[[l]]\n[[l.m]]\ny = {}\n"
    )
    assert tomllib.loads(write_toml(tomllib.loads(text))) == tomllib.loads(text)
    assert write_toml({}) == ""
