"""The archive of `fleetpulse support`: complete or absent, with a line for what cannot be read, and files of TOML."""

from __future__ import annotations

import os
import tarfile
import time
import tomllib
from pathlib import Path

import pytest

from pipeline.commands import support
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
    """Written back, with what was hidden filled in, they are the configuration again, with the groups of all nodes."""
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


def test_toml_that_is_written_is_read_as_the_same_values() -> None:
    text = (
        'top = "a\\u007f\\n\\"é😀"\nnone = []\n"a b" = [1, -2.5, inf, true, 2026-11-29, 10:00:00]\n[empty]\n'
        "[a.b.'c.d']\nwhen = 2026-11-29T10:00:00Z\nbig = 1e300\nmixed = [{x = 1}, 2]\n[[l]]\n[[l]]\n[[l.m]]\ny = {}\n"
    )
    assert tomllib.loads(write_toml(tomllib.loads(text))) == tomllib.loads(text)
    assert write_toml({}) == ""
