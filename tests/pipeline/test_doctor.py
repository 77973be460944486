"""`fleetpulse doctor`: each check against a healthy and a broken real service."""

from __future__ import annotations

import dataclasses
import http.server
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pytest

from pipeline.commands import doctor, init
from pipeline.commands.checks import Check
from pipeline.commands.next_steps import suggest_next
from pipeline.config.receivers import Notify, Webhook
from pipeline.config.sections import Api, Config, Site, Spool, Store
from pipeline.model.errors import HeldStore, Unreachable
from pipeline.runtime import systemd
from pipeline.store.database import explain_error


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """State in a temporary folder, and an API port that is closed."""
    return Config(
        store=Store(path=tmp_path / "store.duckdb"),
        spool=Spool(directory=tmp_path / "spool"),
        api=Api(port=free_port()),
    )


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def run_server(status: int, body: Any) -> Iterator[int]:
    """Runs a real HTTP server with one response to every request."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_an_old_python_fails_and_the_required_version_is_named(config: Config) -> None:
    assert doctor.python_version(config, (3, 10, 2)).state == "fail"
    assert doctor.python_version(config, (3, 11, 0)).state == "ok"


def test_a_foreign_package_of_the_same_name_is_named(config: Config) -> None:
    found = doctor.package_names(config, {"agents": ["fleetpulse", "openai-agents"], "numpy": ["numpy"]})
    assert found.state == "fail"
    assert "agents (of openai-agents)" in found.found
    assert doctor.package_names(config, {"agents": ["fleetpulse"]}).state == "ok"


def test_a_missing_store_is_a_warning_with_the_fix(config: Config) -> None:
    found = doctor.store(config)
    assert (found.state, found.fix) == ("warn", "fleetpulse init")


def test_a_node_without_the_pipeline_needs_no_store(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed with the extra `agent` alone; an old store there is ignored."""
    monkeypatch.setitem(sys.modules, "duckdb", None)
    config.store.path.write_text("")
    found = doctor.store(config)
    assert found.state == "info"
    assert "needs no store" in found.found


def test_a_store_below_a_file_cannot_be_written(config: Config, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    broken = dataclasses.replace(config, store=Store(path=tmp_path / "file" / "store.duckdb"))
    assert doctor.store(broken).state == "fail"


def test_a_store_locked_by_another_process_is_ok_and_the_process_is_named(config: Config) -> None:
    program = f"import duckdb; c = duckdb.connect({str(config.store.path)!r}); print('open', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        found = doctor.store(config)
        said: list[str] = []
        init.initialize(config, said.append)
        other.communicate("\n")
    assert found.state == "ok"
    assert f"held by process {other.pid}" in found.found
    assert f"store: {config.store.path} already exists; process {other.pid} has it open" in said


@pytest.mark.parametrize(("said", "holder"), [(" (PID 4711)", "process 4711"), ("", "another process")])
def test_who_holds_a_store_is_a_field_of_the_error_and_not_read_from_its_text(said: str, holder: str) -> None:
    error = explain_error(Path("s.duckdb"), duckdb.IOException(f"Could not set lock on file: Conflicting lock{said}"))
    assert isinstance(error, HeldStore)
    assert error.holder == holder


def test_an_unlocked_store_is_ok(config: Config) -> None:
    duckdb.connect(str(config.store.path)).close()
    found = doctor.store(config)
    assert found.state == "ok"
    assert "held" not in found.found


def test_a_store_that_is_not_a_database_fails(config: Config) -> None:
    config.store.path.write_text("no database" * 1000)
    found = doctor.run_checks(config, [doctor.store])[0]
    assert found.state == "fail"
    assert str(config.store.path) in found.found


def test_the_spool_counts_its_nodes(config: Config) -> None:
    assert doctor.spool(config).state == "warn"
    (config.spool.directory / "n1").mkdir(parents=True)
    assert "1 node" in doctor.spool(config).found


def test_a_nearly_full_disk_fails(config: Config) -> None:
    assert doctor.disk(config, floor=1).state == "ok"
    assert doctor.disk(config, floor=1 << 62).state == "fail"


@pytest.mark.parametrize(
    ("kind", "state"), [("ext4", "ok"), ("tmpfs", "warn"), ("nfs4", "warn"), ("fuse.sshfs", "warn")]
)
def test_a_spool_in_memory_or_on_another_host_is_a_warning(
    config: Config, tmp_path: Path, kind: str, state: str
) -> None:
    config.spool.directory.mkdir()
    escaped = str(tmp_path).replace(" ", "\\040")
    (tmp_path / "mounts").write_text(f"/dev/vda / ext4 rw 0 0\nx {escaped} xfs rw 0 0\ny {escaped} {kind} rw 0 0\n")
    found = doctor.spool_disk(config, tmp_path / "mounts")
    assert (found.state, found.found) == (state, f"{config.spool.directory} is {kind}")
    assert bool(found.fix) == (state == "warn")


def test_a_local_disk_of_the_spool_is_ok(config: Config, tmp_path: Path) -> None:
    assert not doctor.spool_disk(config).found.endswith("unknown")
    assert doctor.spool_disk(config, tmp_path / "gone").state == "info"


def test_the_spool_needs_no_broker(config: Config) -> None:
    assert [check.state for check in doctor.run_checks(config, [doctor.transport])] == ["ok"]


@pytest.mark.parametrize(
    ("status", "body", "state"),
    [(200, {"ready": True}, "ok"), (503, {"reasons": ["disk is full"]}, "fail"), (500, "unexpected", "fail")],
)
def test_the_api_is_asked_for_its_readiness(config: Config, status: int, body: Any, state: str) -> None:
    with run_server(status, body) as port:
        found = doctor.api(dataclasses.replace(config, api=Api(port=port)))
    assert found.state == state
    assert status != 503 or "disk is full" in found.found


def test_an_api_that_wants_a_token_fails_with_that_reason_on_a_server_and_is_no_matter_of_a_node(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_server(401, {"error": "no token"}) as port:
        settings = dataclasses.replace(config, api=Api(port=port))
        found = doctor.api(settings)
        monkeypatch.setattr(doctor, "is_node", lambda: True)
        assert doctor.api(settings).state == "info"
    assert (found.state, "wants a token (HTTP 401)" in found.found) == ("fail", True)
    assert "token_file" in found.fix


def test_where_no_pipeline_was_started_the_api_is_a_warning(config: Config) -> None:
    assert doctor.api(config).state == "warn"
    init.initialize(config, lambda _: None)
    assert doctor.api(config).state == "warn", "a checkout after init, before up"


@pytest.mark.parametrize(
    ("enabled", "masked", "unit_state", "state"),
    [
        (True, False, "", "fail"),
        (False, False, "failed", "warn"),
        (False, False, "activating", "fail"),
        (False, False, "inactive", "warn"),
        (False, False, "", "warn"),
        (True, True, "inactive", "warn"),
    ],
)
def test_a_pipeline_that_should_run_and_does_not_is_a_failure(
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    enabled: bool,
    masked: bool,
    unit_state: str,
    state: str,
) -> None:
    """The gate of upgrades passed with a dead pipeline; one that was stopped and disabled on purpose is no failure."""
    wants, unit = tmp_path / "system" / "multi-user.target.wants", "fleetpulse-pipeline.service"
    wants.mkdir(parents=True)
    if enabled:
        (wants / unit).symlink_to(f"/usr/lib/systemd/system/{unit}")
    if masked:
        (wants.parent / unit).symlink_to("/dev/null")
    monkeypatch.setattr(systemd, "UNIT_FOLDER", tmp_path)
    monkeypatch.setattr(systemd, "HOST_UNITS", tmp_path / "system")
    monkeypatch.setattr(systemd, "_ask_state", lambda _: unit_state)
    found = doctor.api(dataclasses.replace(config, site=Site(name="east")))
    assert (found.state, doctor.exit_code([found])) == (state, 3 if state == "fail" else 0)
    assert "systemctl" in found.fix


def test_a_container_of_the_pipeline_whose_api_does_not_answer_yet_fails(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The gate in a Kubernetes pod passed while the pipeline was starting. Beside a gateway none is expected."""
    read, line = systemd._read_first_process, tmp_path / "cmdline"
    monkeypatch.setattr(systemd, "_read_first_process", lambda: read(line))
    for words, state in (
        (b"/sbin/docker-init\0--\0/opt/fleetpulse/bin/fleetpulse\0pipeline\0--config\0a.toml\0", "fail"),
        (b"/opt/fleetpulse/bin/fleetpulse\0gateway\0", "warn"),
    ):
        line.write_bytes(words)
        assert doctor.api(config).state == state


def test_a_process_that_has_the_store_open_but_does_not_answer_is_a_failure(config: Config) -> None:
    """As `fleetpulse up` while it starts: `doctor --wait` waits for it."""
    program = f"import duckdb; c = duckdb.connect({str(config.store.path)!r}); print('open', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        found = doctor.api(config)
        other.communicate("\n")
    assert (found.state, found.unreachable) == ("fail", True)
    assert found.meaning.startswith(f"process {other.pid} has the store open")


@pytest.mark.parametrize("url", ["alerts.example", "ftp://host/", "http://", "http://host:99999/", "http://[::1/"])
def test_an_unusable_webhook_fails(config: Config, url: str) -> None:
    hooks = (Webhook("good", "https://alerts.example/x"), Webhook("bad", url))
    found = doctor.receivers(dataclasses.replace(config, notify=Notify(webhooks=hooks)))
    assert isinstance(found, list)
    assert [(check.name, check.state) for check in found] == [("receiver good", "info"), ("receiver bad", "fail")]
    assert "bad" in found[1].found


def test_unreachable_wins_over_a_failed_check() -> None:
    failed, away = doctor.Check("a", "fail", ""), doctor.Check("b", "fail", "", unreachable=True)
    fine, warned = doctor.Check("c", "ok", ""), doctor.Check("d", "warn", "")
    assert [doctor.exit_code(c) for c in ([failed, away], [failed, fine], [fine, warned])] == [3, 1, 0]


def test_a_check_that_raises_an_error_is_a_failure(config: Config) -> None:
    def broken_check(_: Config) -> doctor.Check:
        raise Unreachable("not reachable")

    assert doctor.run_checks(config, [broken_check])[0].state == "fail"


def test_what_other_checks_fail_for_is_the_first_step(config: Config, tmp_path: Path) -> None:
    """Tokens that are not there were named after the pipeline that does not start without them."""
    missing = dataclasses.replace(config, api=dataclasses.replace(config.api, token_file=tmp_path / "tokens"))
    said = suggest_next(missing, [Check("api", "fail", "x", "", "start it"), doctor.secrets(missing)])
    assert [line.split()[1] for line in said[1:]] == ["secrets:", "api:"]


def test_the_checks_are_numbered_with_meaning_and_fix(config: Config) -> None:
    text = doctor.format_checks(doctor.run_checks(config))
    assert text.startswith(" 1 ok   configuration: defaults")
    assert "means: nothing was stored here so far" in text
    assert "fix: fleetpulse init" in text
    assert [row["number"] for row in doctor.check_rows(doctor.run_checks(config))] == list(
        range(1, len(doctor.CHECKS) + 1)
    )


def test_a_hanging_pipeline_is_a_failure_and_not_a_missing_one(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", config.api.port)):
        ask = doctor.client.get
        monkeypatch.setattr(doctor.client, "get", lambda config, path: ask(config, path, 0.2))
        found = doctor.api(config)
    assert (found.state, found.unreachable) == ("fail", True)
    assert "does not answer within 0.2 s" in found.found
    assert doctor.exit_code([found]) == 3
