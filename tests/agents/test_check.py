"""`fleetpulse check` as a prolog calls it: real processes, status files, servers with bad responses or none."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.node.health import check, incidents, status_file
from agents.node.health.report import open_health
from pipeline.commands.arguments import build_parser
from pipeline.config.sections import Config, load_config
from pipeline.model.records import SECOND, Event, Origin

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"(OK|WARNING|CRITICAL|UNKNOWN) - ([^|\n]+) \| (age=[\d.]+s;;30;0 )?critical=\d+;;;0 warning=\d+;;;0 "
                  r"time=[\d.]+s;;;0;[\d.]+\n")  # fmt: skip
LOST = Event(1_800_000_000 * SECOND, "gpu:n1.3", "gpu_lost", {"pci": "0000:1b:00.0"})
DOWN = Event(1_800_000_000 * SECOND, "port:n1.mlx5_0", "link_state", {"state": "down", "from": "active", "to": "down"})


class Node:
    """A node n1 with its own configuration and folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "spool" / "n1").mkdir(parents=True)
        self.file = folder / "fleetpulse.toml"
        self.configure()

    def configure(self, text: str = "") -> None:
        self.file.write_text(f"{text}\n[agent]\nnode = 'n1'\n[spool]\ndirectory = '{self.folder}/spool'\n")

    def write_status(self, *events: Event, simulated: bool = False) -> None:
        """Writes the agent's status after these events."""
        origin = Origin("local", "n1", bytes(16), simulated)
        open_health(load_config(self.file), origin, lambda *_: None, {}).update((), events, (), 0)

    def check(self, *words: str, nagios: bool = True) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "fleetpulse.py"), "check", "--config", str(self.file), *words]
        clean = {k: v for k, v in os.environ.items() if not k.startswith("FLEETPULSE")}
        return subprocess.run(
            [*command, *(["--nagios"] if nagios else [])], env=clean, capture_output=True, text=True, timeout=60
        )

    def verdict(self, *words: str) -> tuple[int, str, str]:
        """Exit code, state and text of the Nagios line."""
        done = self.check(*words)
        found = LINE.fullmatch(done.stdout)
        assert found, (done.stdout, done.stderr)
        assert done.stderr == ""
        return done.returncode, found[1], found[2]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@contextmanager
def api(answer: bytes, status_code: int = 200) -> Iterator[tuple[str, list[str]]]:
    """A server with one response to all requests; its URL, and the requests."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"{self.path} {self.headers.get('Authorization')}")
            self.send_response(status_code)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Logs nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def incident(**over: Any) -> dict[str, Any]:
    whole = {"id": "i7", "cause": "gpu:n1.3", "members": ["gpu:n1.3"], "severity": "page", "simulated": False}
    return whole | {"summary": "digest differs", "onset": "2026-01-01T00:00:00.000000Z", "state": "open"} | over


def body(*found: Any) -> bytes:
    return json.dumps({"incidents": list(found)}).encode()


@pytest.mark.slow
def test_a_node_without_problems_is_ok(node: Node) -> None:
    node.write_status()
    assert node.verdict()[:2] == (0, "OK")
    assert node.check(nagios=False).returncode == 0


@pytest.mark.slow
def test_a_lost_gpu_is_critical_and_named(node: Node) -> None:
    node.write_status(LOST, DOWN)
    assert node.verdict() == (2, "CRITICAL", "gpu:n1.3 lost, it does not respond to its driver (pci 0000:1b:00.0)")
    done = node.check("--output", "json", nagios=False)
    assert done.returncode == 1
    rows = json.loads(done.stdout)
    assert [(row["check"], row["state"]) for row in rows] == [("gpu_lost", "CRITICAL"), ("link_down", "WARNING")]


@pytest.mark.slow
def test_a_link_that_is_down_is_a_warning_and_keeps_no_job_away(node: Node) -> None:
    node.write_status(DOWN)
    assert node.verdict()[:2] == (1, "WARNING")
    assert node.check(nagios=False).returncode == 0


@pytest.mark.parametrize("name", ["gpu_lost", "gpu:n1.3"])
def test_an_ignored_condition_is_shown_but_does_not_count(node: Node, name: str) -> None:
    node.configure(f"[check]\nignore = ['{name}']")
    node.write_status(LOST)
    assert node.verdict()[:2] == (0, "OK")
    assert "ignored" in node.check(nagios=False).stdout


def test_an_unknown_name_in_ignore_is_an_error(node: Node) -> None:
    node.configure("[check]\nignore = ['gpu_lots']")
    node.write_status()
    done = node.check(nagios=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no condition 'gpu_lots'; did you mean 'gpu_lost'?" in done.stderr


def without_agent(node: Node) -> None:
    """No agent ever ran."""


def stale(node: Node) -> None:
    node.write_status(LOST)
    change(node, since_boot=status_file.seconds_since_boot() - 31)


def of_the_future(node: Node) -> None:
    node.write_status(LOST)
    change(node, since_boot=status_file.seconds_since_boot() + 100)


def of_another_boot(node: Node) -> None:
    node.write_status(LOST)
    change(node, boot="another")


def of_another_version(node: Node) -> None:
    node.write_status(LOST)
    change(node, version=2)


def of_another_node(node: Node) -> None:
    node.write_status(LOST)
    change(node, node="n2")


def of_a_recording(node: Node) -> None:
    node.write_status(LOST, simulated=True)


def torn(node: Node) -> None:
    node.write_status(LOST)
    file = node.folder / "spool/n1/status.json"
    file.write_text(file.read_text()[:-20])


def of_a_bad_configuration(node: Node) -> None:
    node.configure("[check]\nstatus = 1")


def change(bench: Node, /, **over: Any) -> None:
    file = bench.folder / "spool/n1/status.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | over))


NOBODY_KNOWS = [without_agent, stale, of_the_future, of_another_boot, of_another_version, of_another_node]
NOBODY_KNOWS += [of_a_recording, torn, of_a_bad_configuration]


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("happens", NOBODY_KNOWS, ids=lambda happens: happens.__name__)
def test_without_information_the_result_is_unknown_and_never_critical(node: Node, happens: Any) -> None:
    happens(node)
    assert node.verdict()[:2] == (3, "UNKNOWN")


@pytest.mark.slow
def test_a_hanging_file_system_ends_with_the_timeout(node: Node) -> None:
    """A pipe without a writer: opening it blocks in the kernel."""
    os.mkfifo(node.folder / "stuck")
    node.configure(f"[check]\nstatus_file = '{node.folder}/stuck'")
    began = time.monotonic()
    assert node.verdict("--timeout", "500ms")[:2] == (3, "UNKNOWN")
    assert time.monotonic() - began < 10  # plus the start of the interpreter on a busy machine


@pytest.mark.slow
def test_a_reader_of_the_output_does_not_wait_for_the_hanging_child(node: Node) -> None:
    os.mkfifo(node.folder / "stuck")
    node.configure(f"[check]\nstatus_file = '{node.folder}/stuck'")
    done = node.check("--timeout", "0.3")  # capture_output reads to the end
    assert "a file system or the network hangs" in done.stdout


@pytest.mark.slow
def test_a_frozen_api_is_unknown_in_time_and_hides_no_critical(node: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as frozen:  # accepts the connection and sends nothing
        node.configure(f"[check]\napi_url = 'http://127.0.0.1:{frozen.getsockname()[1]}'")
        node.write_status()
        code, state, text = node.verdict("--timeout", "2s")
        assert (code, state) == (3, "UNKNOWN")
        assert "timed out" in text
        node.write_status(LOST)
        assert node.verdict("--timeout", "2s")[:2] == (2, "CRITICAL")


@pytest.mark.slow
def test_an_api_that_sends_slowly_ends_with_the_timeout_too(node: Node) -> None:
    """Each byte arrives before the socket's own timeout: only the timeout of the whole check ends it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        stop = threading.Event()

        def trickle() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
                while not stop.wait(0.1):
                    try:
                        connection.sendall(b" ")
                    except OSError:  # the check has ended
                        return

        thread = threading.Thread(target=trickle)
        thread.start()
        node.configure(f"[check]\napi_url = 'http://127.0.0.1:{server.getsockname()[1]}'")
        node.write_status()
        try:
            assert node.verdict("--timeout", "700ms")[:2] == (3, "UNKNOWN")
        finally:
            stop.set()
            thread.join()


@pytest.mark.slow
def test_a_page_incident_on_this_node_warns_or_is_critical_as_configured(node: Node) -> None:
    node.write_status()
    (node.folder / "token").write_text("# for checks\nnode:secret-7\n")
    with api(body(incident(), incident(cause="gpu:n12.3", members=["gpu:n12.3"]))) as (url, asked):
        node.configure(f"[check]\napi_url = '{url}'\ntoken_file = '{node.folder}/token'")
        node.write_status()
        assert node.verdict() == (1, "WARNING", "gpu:n1.3 incident i7: digest differs")
        assert asked == ["/api/v1/incidents?state=open Bearer secret-7"]
        node.configure(f"[check]\napi_url = '{url}'\nincidents = 'critical'")
        assert node.verdict()[:2] == (2, "CRITICAL")
        node.configure(f"[check]\napi_url = '{url}'\nignore = ['incidents']")
        assert node.verdict()[:2] == (0, "OK")


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (b"{", 200),
        (b"[]", 200),
        (b'{"incidents": 7}', 200),
        (b"\xff" * 10, 200),
        (b"[" * 100_000, 200),
        (b"{}", 503),
        (b"{}", 401),
        (b" " * (incidents.MAX_BYTES + 1), 200),
    ],
    ids=["torn", "a list", "no list", "no text", "deep", "503", "401", "huge"],
)
def test_an_invalid_response_of_the_api_is_unknown(node: Node, answer: bytes, code: int) -> None:
    with api(answer, code) as (url, _):
        node.configure(f"[check]\napi_url = '{url}'")
        node.write_status()
        assert node.verdict()[:2] == (3, "UNKNOWN")


@pytest.mark.parametrize(
    ("over", "concerns"),
    [
        ({}, True),
        ({"cause": "rack:r1"}, True),
        ({"cause": "node:n1", "members": []}, True),
        ({"cause": "gpu:n12.3", "members": ["gpu:n12.3", "node:n", "job:1"]}, False),
        ({"simulated": True}, False),
        ({"cause": "cdu:c1", "members": 7}, False),
    ],
)
def test_an_incident_concerns_a_node_by_its_cause_or_a_member(over: dict[str, Any], concerns: bool) -> None:
    assert incidents.concerns_node(incident(**over), "n1") is concerns


@given(st.text(max_size=600))
def test_no_character_in_a_text_breaks_the_line(text: str) -> None:
    row = check.CheckRow("x", check.CRITICAL, "", "", text)
    message = check.CheckResult((row,)).nagios_line(0.1, 5)
    assert message.isprintable() or not set(message) & set("\n\r\x00")
    assert message.count("|") == 1
    assert len(message.splitlines()) == 1


def test_a_text_that_the_locale_cannot_encode_does_not_fail(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    node.write_status(Event(LOST.time, LOST.entity, "gpu_lost", {"serial": "Ω\ud800"}))
    assert node.verdict()[:2] == (2, "CRITICAL")


def test_it_loads_nothing_heavy() -> None:
    """A prolog waits for it: loading NumPy alone would take longer than the whole check."""
    program = (
        "import contextlib, io, sys, fleetpulse\n"
        "with contextlib.redirect_stdout(io.StringIO()): fleetpulse.main(['check', '--nagios'])\n"
        "print(sorted(set(sys.modules) & {'numpy', 'urllib.request', 'ssl', 'asyncio', 'zstandard'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(("text", "seconds"), [("5s", 5.0), ("5", 5.0), ("500ms", 0.5), ("0.5s", 0.5)])
def test_the_timeout_accepts_usual_notations(text: str, seconds: float) -> None:
    assert build_parser().parse_args(["check", "--timeout", text]).timeout == seconds


@pytest.mark.parametrize("text", ["0", "-1s", "601", "nan", "inf", "s", "5m", ""])
def test_an_invalid_timeout_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        build_parser().parse_args(["check", f"--timeout={text}"])
    assert "--timeout" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["--timeout", "5min"], ["--timeout", "0s"], ["--timeout", "-1"], ["--bogus"], ["more"], ["--output", "x|y"]],
)
def test_for_nagios_bad_usage_is_unknown_in_one_line(node: Node, words: list[str]) -> None:
    node.write_status(LOST)
    done = node.check(*words)
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (3, "", 1)
    assert done.stdout.startswith("UNKNOWN - fleetpulse")
    assert "|" not in done.stdout
    assert node.check(*words, nagios=False).returncode == 2


def test_a_mistyped_nagios_option_is_unknown_too(node: Node) -> None:
    done = node.check("--nagio", nagios=False)
    assert (done.returncode, done.stdout) == (3, "UNKNOWN - fleetpulse: unrecognized arguments: --nagio\n")


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("words", ["--nagios", "", "--nagios --timeout 0"])
@pytest.mark.parametrize("where", [">/dev/full", ">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_verdict_that_cannot_be_printed_is_unknown(node: Node, words: str, where: str) -> None:
    node.write_status()
    line = f"{sys.executable} {ROOT}/fleetpulse.py check --config {node.file} {words} {where}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (3, "")


def test_the_status_of_the_running_agent_precedes_that_in_the_spool(tmp_path: Path) -> None:
    running, kept = status_file.status_paths(Config(), tmp_path)
    assert running.parent == tmp_path
    assert kept.name == "status.json"


def test_a_certain_state_precedes_an_unknown_one() -> None:
    rows = [check.CheckRow(state, state, "", "", "") for state in (check.OK, check.UNKNOWN, check.WARNING)]
    assert check.CheckResult(tuple(rows)).state == check.WARNING
    assert check.CheckResult(tuple(rows[:2])).state == check.UNKNOWN
    assert check.CheckResult((*rows, check.CheckRow("x", check.CRITICAL, "", "", ""))).state == check.CRITICAL
