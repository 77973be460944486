"""`fleetpulse dashboard` as a process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from dashboards import serve
from pipeline.config.sections import Api, Config, Dashboard
from pipeline.model.errors import Refused, UsageError
from tests.until import until

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from dashboards import serve
from pipeline.config.sections import Config, Dashboard
sys.exit(serve.run(Config(dashboard=Dashboard(port=int(sys.argv[1]), api_url=sys.argv[2]))))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health", timeout=1) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_dashboard_prints_its_address_and_stops_within_3_s_of_a_signal(api: Any, number: signal.Signals) -> None:
    port = free_port()
    command = [sys.executable, "-c", SCRIPT, str(port), api.url]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not is_healthy(port):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)  # polls a real process; it has no event for this
        began = time.monotonic()
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=10)
        assert time.monotonic() - began < 3
    assert process.returncode == 0
    assert f"dashboard: http://127.0.0.1:{port} (reads {api.url})" in stderr
    assert stdout == ""


def test_a_port_in_use_is_a_usage_error_that_names_the_key() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"\[dashboard\] port = {port}: .* expected a free port") as caught:
            serve.run(Config(dashboard=Dashboard(port=port)))
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "example.org"])
def test_pages_without_login_stay_on_loopback(host: str) -> None:
    with pytest.raises(Refused, match="loopback"):
        serve.run(Config(dashboard=Dashboard(host=host)))


def test_behind_a_proxy_the_pages_may_listen_beyond_loopback() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"cannot listen on 0\.0\.0\.0:{port}"):
            serve.run(Config(dashboard=Dashboard(host="0.0.0.0", port=port, behind_proxy=True)))


@pytest.mark.parametrize(
    ("config", "url"),
    [
        (Config(), "http://127.0.0.1:8600"),
        (Config(api=Api(host="0.0.0.0", port=9)), "http://127.0.0.1:9"),
        (Config(api=Api(host="::1")), "http://[::1]:8600"),
        (Config(dashboard=Dashboard(api_url="http://pipeline:8600")), "http://pipeline:8600"),
    ],
)
def test_the_pages_read_the_configured_api(config: Config, url: str) -> None:
    assert serve.environment(config)["FLEETPULSE_API_URL"] == url


def test_streamlit_sends_no_statistics_and_skips_garbage_collection_after_each_run() -> None:
    options = serve.options(Config())
    assert options["browser_gatherUsageStats"] is False
    assert options["runner_postScriptGC"] is False
    assert options["server_fileWatcherType"] == "none"
    assert options["client_toolbarMode"] == "minimal"
    assert options["theme_light_backgroundColor"] != options["theme_dark_backgroundColor"]


def test_an_unreadable_token_file_is_an_error_before_serving(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="token_file"):
        serve.run(Config(dashboard=Dashboard(port=free_port(), token_file=tmp_path / "absent")))


RELOADED = """
import sys
from dashboards import serve
from pipeline.config.sections import load_config
from pipeline.runtime import reload
code = serve.run(load_config(sys.argv[1]), lambda: load_config(sys.argv[1]))
reload.start_again() if code == reload.AGAIN else sys.exit(code)
"""


@pytest.mark.slow
def test_sighup_reads_the_configuration_again_with_a_row_of_the_audit(api: Any, tmp_path: Path) -> None:
    """In the same process; a wrong file changes nothing. Without an answer of the API, the log says so."""
    port, file, said = free_port(), tmp_path / "fleetpulse.toml", tmp_path / "log"
    base = f'[dashboard]\nport = {port}\napi_url = "{api.url}"\n'
    file.write_text(base)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (
        said.open("w") as log,
        subprocess.Popen([sys.executable, "-c", RELOADED, str(file)], env=environ, stderr=log) as process,
    ):
        try:
            until(lambda: is_healthy(port), 60)
            file.write_text(base + "connection = 3\n")
            process.send_signal(signal.SIGHUP)
            until(lambda: "not reloaded, nothing changed" in said.read_text())
            file.write_text(base + 'behind_proxy = true\nhost = "127.0.0..1"\n')
            process.send_signal(signal.SIGHUP)
            until(lambda: "expected a name or address of a host" in said.read_text())
            with socket.create_server(("127.0.0.1", 0)) as taken:
                file.write_text(base.replace(str(port), str(taken.getsockname()[1]), 1))
                process.send_signal(signal.SIGHUP)
                until(lambda: "expected a free port" in said.read_text())
            file.write_text(base + "connections = 30\n")
            process.send_signal(signal.SIGHUP)
            until(lambda: said.read_text().count("dashboard: http://") == 2)
            until(lambda: is_healthy(port), 60)
        finally:
            process.terminate()
            assert process.wait(10) == 0
    rows = [(body["outcome"], body["reason"]) for path, body in api.posted if path == "audit/reloads"]
    assert [outcome for outcome, _ in rows] == ["refused", "refused", "refused", "done"]
    assert rows[3][1] == "dashboard.connections: 512 -> 30"
    assert "did you mean 'connections'?" in rows[0][1]
