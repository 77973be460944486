"""A reload is refused if the start after it would end with exit code 2, after which a unit stays down."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import fleetpulse
from pipeline.api.tokens import create_role_token, find_role_file
from pipeline.commands.start_checks import check_listeners, check_next_start
from pipeline.config.receivers import Notify, Webhook
from pipeline.config.sections import Api, Config, Incidents, Kafka, Pipeline, Store
from pipeline.config.settings import build_section
from pipeline.config.topology import TopologyFiles
from pipeline.model.errors import ConfigError, UsageError
from pipeline.model.regular_files import read_regular_text
from pipeline.runtime import credentials
from pipeline.runtime.secret_contents import read_digests

ROOT = Path(__file__).parents[2]
ADDRESS = ("127.0.0.1", 1)


@pytest.fixture
def now(tmp_path: Path) -> Config:
    return Config(store=Store(path=tmp_path / "s.duckdb"))


def test_a_taken_port_is_refused_and_that_of_this_process_is_not(now: Config) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        fresh = replace(now, api=Api(port=other.getsockname()[1]))
        with pytest.raises(ConfigError, match=r"\[api\] host = '127.0.0.1', port = \d+: cannot listen: .* in use"):
            check_next_start(now, fresh, ADDRESS)
        check_next_start(now, fresh, ("127.0.0.1", fresh.api.port))
        check_next_start(fresh, fresh, ADDRESS)


def test_what_a_start_reads_is_read_before(now: Config, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    login = Kafka(security_protocol="SASL_SSL", username="a", password_file=gone)
    hook = Webhook("w", "https://h.example/", token_file=gone)
    wrong = {
        "beyond loopback without tokens": replace(now, api=Api(host="0.0.0.0")),
        "token_file": replace(now, api=Api(token_file=gone)),
        "password_file": replace(now, kafka=login, pipeline=Pipeline(transport="kafka")),
        "advice_file": replace(now, incidents=Incidents(advice_file=gone)),
        "gone: cannot be read": replace(now, topology=TopologyFiles(path=gone)),
        r"w: token_file = .*gone": replace(now, notify=Notify(webhooks=(hook,))),
    }
    for said, fresh in wrong.items():
        with pytest.raises(UsageError, match=said):
            check_next_start(now, fresh, ADDRESS)
    check_next_start(now, now, ADDRESS)


@pytest.mark.parametrize(
    ("section", "allowed"),
    [
        ("api", 'token_file = "tokens"'),
        ("gateway", 'token_file = "tokens"'),
        ("dashboard", "behind_proxy = true"),
    ],
)
def test_config_check_refuses_to_listen_beyond_loopback_without_a_login(
    tmp_path: Path, section: str, allowed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file, drop_in = tmp_path / "fleetpulse.toml", tmp_path / "conf.d" / "50-site.toml"
    file.write_text(f"[store]\npath = '{tmp_path / 's.duckdb'}'\n")
    drop_in.parent.mkdir()
    drop_in.write_text(f'[{section}]\nhost = "0.0.0.0"\n')
    assert fleetpulse.main(["config", "check", "--config", str(file)]) == 2
    said = capsys.readouterr().err
    assert f"{drop_in}: [{section}] host = '0.0.0.0': " in said
    drop_in.write_text(f'[{section}]\nhost = "0.0.0.0"\n{allowed}\n')
    assert fleetpulse.main(["config", "check", "--config", str(file)]) == 0


def test_config_check_knows_that_the_unit_hands_out_the_tokens_of_the_api(
    now: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_api = replace(now, api=Api(host="0.0.0.0"))
    monkeypatch.setattr(credentials, "PACKAGED", tmp_path)
    shutil.copy(ROOT / "deploy" / "systemd" / "fleetpulse-agent.service", tmp_path)
    with pytest.raises(ConfigError, match="without tokens"):
        check_listeners(open_api)
    shutil.copy(ROOT / "deploy" / "systemd" / "fleetpulse-pipeline.service", tmp_path)
    check_listeners(open_api)


@pytest.mark.parametrize("key", ["acknowledge_hours", "acknowledge_ticket_hours", "idle_hours"])
def test_an_acknowledgement_beyond_the_end_of_the_calendar_is_refused(key: str) -> None:
    assert build_section(Incidents, {key: 2_400_000}, "test")
    with pytest.raises(ConfigError, match=key):
        build_section(Incidents, {key: 1e8}, "test")


def test_config_check_counts_tokens_with_roles_and_knows_none_where_it_cannot_look(now: Config, tmp_path: Path) -> None:
    open_api = replace(now, api=Api(host="0.0.0.0"))
    with pytest.raises(ConfigError, match="without tokens"):
        check_listeners(open_api)
    check_listeners(replace(open_api, store=Store(path=tmp_path / "elsewhere" / "s.duckdb")))
    create_role_token(find_role_file(now.store.path), "ada", "viewer", 0, "test", 0)
    check_listeners(open_api)


@pytest.fixture
def alarm() -> Iterator[None]:
    """Ends a test that reads for ever, with an error."""

    def ring(*_: object) -> None:
        raise TimeoutError("still reads")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("kind", ["fifo", "/dev/zero"])
def test_a_file_that_never_ends_is_refused_and_not_read(now: Config, tmp_path: Path, kind: str) -> None:
    """A reload hung for good at a pipe, and ate the memory at /dev/zero."""
    endless = Path(kind) if kind[0] == "/" else tmp_path / kind
    if endless.name == "fifo":
        os.mkfifo(endless)
    login = Kafka(security_protocol="SASL_SSL", username="a", password_file=endless)
    changes: list[Config] = [
        replace(now, api=Api(token_file=endless)),
        replace(now, incidents=Incidents(advice_file=endless)),
        replace(now, kafka=login, pipeline=Pipeline(transport="kafka")),
        replace(now, notify=Notify(webhooks=(Webhook("w", "https://h.example/", token_file=endless),))),
        replace(now, notify=Notify(webhooks=(Webhook("w", "https://h.example/", headers_file=endless),))),
    ]
    for fresh in changes:
        with pytest.raises(UsageError, match="is no regular file, and reading it may never end"):
            check_next_start(now, fresh, ADDRESS)
    assert set(read_digests(changes[0]).values()) == {(endless, b"")}


def test_a_secret_file_may_be_a_link_and_have_any_line_end(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a\r\nb\rc\n")
    (tmp_path / "link").symlink_to("file")
    assert read_regular_text(tmp_path / "link") == "a\nb\nc\n"
    assert read_regular_text(Path(os.devnull)) == ""
    with pytest.raises(IsADirectoryError):
        read_regular_text(tmp_path)
