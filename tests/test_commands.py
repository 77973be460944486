"""The command line as a user sees it: exit codes, data on stdout, logs on stderr. Every call is a real process."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, str(ROOT / "fleetpulse.py")]
COMMANDS = (
    "agent pipeline dashboard up demo init once simulate replay score doctor sql signals detectors mutes check".split()  # noqa: SIM905
)


class CommandRunner:
    """A new folder, with a configuration that keeps its state there and uses free ports."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith("FLEETPULSE")} | {"NO_COLOR": "1"}
        self.config = folder / "fleetpulse.toml"
        self.port = free_port()
        self.config.write_text(
            f"[api]\nport = {self.port}\n"
            f"[store]\npath = '{folder}/store.duckdb'\n[spool]\ndirectory = '{folder}/spool'\n"
        )

    def call(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs one command to its end."""
        return subprocess.run(
            [*COMMAND, *words],
            cwd=self.folder,
            env=self.environ | variables,
            capture_output=True,
            text=True,
            timeout=120,
            stdin=subprocess.DEVNULL,
        )

    @contextmanager
    def running(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """Runs a service; it is killed if it does not end within the block."""
        with (self.folder / "service.log").open("w") as log:
            process = subprocess.Popen(
                [*COMMAND, *words], cwd=self.folder, env=self.environ, stdout=log, stderr=log, text=True
            )
            try:
                yield process
            finally:
                process.kill()
                process.wait()

    def log(self) -> str:
        return (self.folder / "service.log").read_text()

    def wait_for_api(self, process: subprocess.Popen[str], path: str = "/healthz") -> None:
        """Waits until the API answers 200; fails if the service ended instead."""
        while process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5):
                    return
            except OSError:
                time.sleep(0.05)  # another process is busy: there is no event to wait for
        raise AssertionError(self.log())


@pytest.fixture
def runner(tmp_path: Path) -> CommandRunner:
    return CommandRunner(tmp_path)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def expect_refusal(ran: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """Checks for exit status `code`, one message on stderr and nothing on stdout."""
    assert (ran.returncode, ran.stdout) == (code, ""), ran.stderr
    assert "Traceback" not in ran.stderr
    assert all(word in ran.stderr for word in words), ran.stderr


def test_help_lists_every_command_and_each_has_its_own_help(runner: CommandRunner) -> None:
    top = runner.call("--help")
    assert top.returncode == 0
    assert [name for name in COMMANDS if name not in top.stdout] == []
    for name in COMMANDS:
        own = runner.call(name, "--help")
        assert own.returncode == 0
        assert "--config FILE" in own.stdout


def test_the_version_is_printed_on_stdout(runner: CommandRunner) -> None:
    ran = runner.call("--version")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("fleetpulse ")


def test_no_command_is_a_usage_error(runner: CommandRunner) -> None:
    expect_refusal(runner.call(), 2, "usage: fleetpulse")


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nonsense"], "--nonsense"),
        (["nonsense"], "no command 'nonsense'"),
        (["pipelin"], "did you mean 'pipeline'?"),
        (["replay"], "--input"),
        (["replay", "--input", "missing.parquet", "--output", "o"], "missing.parquet"),
        (["once", "--output", "xml"], "xml"),
        (["simulate"], "--scenario"),
        (["simulate", "--scenario", "missing.toml", "--output", "o"], "missing.toml"),
        (["simulate", "--scenario", "demo"], "--output"),
        (["score", "--findings", "missing.jsonl", "--truth", "missing.jsonl"], "missing.jsonl"),
        (["sql"], "QUERY"),
    ],
)
def test_a_usage_error_is_exit_2_with_the_expected_value(runner: CommandRunner, words: list[str], said: str) -> None:
    expect_refusal(runner.call(*words), 2, said)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("replay", "score", "signals", "detectors")])
def test_every_command_refuses_a_bad_configuration(runner: CommandRunner, name: str) -> None:
    (runner.folder / "bad.toml").write_text("[api]\nprot = 1\n")
    more = {"sql": ["SELECT 1"], "simulate": ["--scenario", "demo", "--output", "o"]}.get(name, [])
    expect_refusal(
        runner.call(name, *more, "--config", "bad.toml"), 2, "bad.toml", "[api] prot", "did you mean 'port'?"
    )


@pytest.mark.parametrize("name", ["agent", "once", "doctor", "record"])
def test_an_invalid_collector_setting_is_exit_2_in_every_command_that_runs_collectors(
    runner: CommandRunner, name: str
) -> None:
    (runner.folder / "bad.toml").write_text("[collector.host]\ndeadline = -1\n")
    more = ["--output", "rec"] if name == "record" else []
    said = "[collector.host] deadline = -1.0: expected seconds, above 0 and at most 25"
    expect_refusal(runner.call(name, *more, "--config", "bad.toml"), 2, "bad.toml", said)


@pytest.mark.parametrize(
    ("text", "words"),
    [("[api]\nport = 'x'\n", ["port", "expected int"]), ("[apii]\n", ["apii", "'api'"]), ("[api\n", ["not TOML"])],
)
def test_errors_in_the_file_are_named(runner: CommandRunner, text: str, words: list[str]) -> None:
    (runner.folder / "bad.toml").write_text(text)
    expect_refusal(runner.call("pipeline", "--config", "bad.toml"), 2, "bad.toml", *words)


@pytest.mark.slow
def test_once_reads_this_host_in_every_output_format(runner: CommandRunner) -> None:
    found = runner.call("once", "--output", "json")
    assert found.returncode == 0
    assert any(entity.startswith("node:") for entity in json.loads(found.stdout)["entities"])
    lines = runner.call("once", "--output", "jsonl").stdout.splitlines()
    assert all("entity" in json.loads(line) for line in lines)
    assert next(csv.reader(io.StringIO(runner.call("once", "--output", "csv").stdout)))[:2] == ["time", "entity"]
    assert "node.uptime" in runner.call("once").stdout


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [("signals", 40), ("detectors", 4), ("doctor", 8)])
def test_listings_are_printed_in_every_output_format(runner: CommandRunner, name: str, least: int) -> None:
    rows = json.loads(runner.call(name, "--output", "json").stdout)
    assert len(rows) >= least
    assert len(runner.call(name, "--output", "jsonl").stdout.splitlines()) == len(rows)
    assert len(list(csv.reader(io.StringIO(runner.call(name, "--output", "csv").stdout)))) == len(rows) + 1
    assert len(runner.call(name).stdout.splitlines()) > len(rows) - 1


def test_a_reader_that_closes_early_is_not_an_error(runner: CommandRunner) -> None:
    with subprocess.Popen(
        [*COMMAND, "signals"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=runner.environ
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 0


@pytest.mark.slow
def test_doctor_reports_an_unreachable_broker_with_exit_3(runner: CommandRunner) -> None:
    runner.config.write_text(
        runner.config.read_text() + "[pipeline]\ntransport = 'kafka'\n[kafka]\nbootstrap_servers = '127.0.0.1:1'\n"
    )
    ran = runner.call("doctor", "--config", str(runner.config))
    assert ran.returncode == 3
    assert "127.0.0.1:1" in ran.stdout


@pytest.mark.slow
def test_init_creates_missing_parts_and_reports_existing_ones(runner: CommandRunner) -> None:
    first, second = (runner.call("init", "--config", str(runner.config)) for _ in range(2))
    assert (first.returncode, second.returncode) == (0, 0)
    assert first.stderr.count(" created") == 2
    assert second.stderr.count("already exists") == 3
    assert (runner.folder / "spool").stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_init_for_kafka_names_unreachable_brokers(runner: CommandRunner) -> None:
    away = {"FLEETPULSE__PIPELINE__TRANSPORT": "kafka", "FLEETPULSE__KAFKA__BOOTSTRAP_SERVERS": "127.0.0.1:1"}
    ran = runner.call("init", "--config", str(runner.config), **away)
    assert (ran.returncode, ran.stdout) == (3, "")
    assert "127.0.0.1:1: connection refused" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.slow
def test_sql_without_pipeline_and_store_is_exit_3(runner: CommandRunner) -> None:
    expect_refusal(runner.call("sql", "SELECT 1", "--config", str(runner.config)), 3, str(runner.port), "store.duckdb")


@pytest.mark.slow
def test_sql_reads_the_file_when_no_pipeline_runs(runner: CommandRunner) -> None:
    runner.call("init", "--config", str(runner.config))
    ran = runner.call("sql", "SELECT count(*) AS n FROM gpu", "--config", str(runner.config), "--output", "json")
    assert json.loads(ran.stdout) == [{"n": 0}]


@pytest.mark.slow
@pytest.mark.parametrize("query", ["DROP TABLE events", "SELECT * FROM read_csv('/etc/passwd')", "SELECT 1; SELECT 2"])
def test_sql_beyond_reading_our_tables_is_refused_with_exit_4(runner: CommandRunner, query: str) -> None:
    runner.call("init", "--config", str(runner.config))
    expect_refusal(runner.call("sql", query, "--config", str(runner.config)), 4)


@pytest.mark.slow
def test_a_simulated_fleet_is_replayed_and_scored(runner: CommandRunner) -> None:
    (runner.folder / "small.toml").write_text(
        "version = 1\nduration = 3600\ninterval = 10\n[fleet]\nnodes = 4\n"
        "[[fault]]\nkind = 'coolant'\nonset = 2400\nend = 3600\n"
    )
    made = runner.call("simulate", "--scenario", "small.toml", "--seed", "3", "--output", "truth")
    assert made.returncode == 0, made.stderr
    telemetry = sorted(str(path) for path in (runner.folder / "truth").glob("telemetry-*.parquet"))
    ran = runner.call(
        *("replay", "--input", *telemetry, "--events", "truth/events.jsonl", "--topology", "truth/topology.toml"),
        *("--output", "findings.jsonl", "--incidents", "incidents.jsonl"),
    )
    assert ran.returncode in (0, 1), ran.stderr
    findings = [json.loads(line) for line in (runner.folder / "findings.jsonl").read_text().splitlines()]
    assert {"coolant"} <= {finding["detector"] for finding in findings}
    assert [f["time"] for f in findings] == sorted(f["time"] for f in findings)
    scored = runner.call(
        *("score", "--findings", "findings.jsonl", "--incidents", "incidents.jsonl", "--truth", "truth/truth.jsonl"),
        *("--topology", "truth/topology.toml", "--meta", "truth/meta.json", "--json", "score.json"),
    )
    assert scored.returncode == 0, scored.stderr
    assert json.loads((runner.folder / "score.json").read_text())


@pytest.mark.slow
def test_the_pipeline_answers_sql_and_stops_with_exit_0(runner: CommandRunner) -> None:
    runner.call("init", "--config", str(runner.config))
    (runner.folder / "small.toml").write_text("version = 1\nduration = 100\ninterval = 10\n[fleet]\nnodes = 2\n")
    sent = runner.call(
        *("simulate", "--config", str(runner.config), "--scenario", "small.toml", "--to", "spool", "--speed", "0")
    )
    assert sent.returncode == 0, sent.stderr
    with runner.running("pipeline", "--config", str(runner.config)) as process:
        runner.wait_for_api(process)
        while rows(runner)[0]["n"] < 2 * 8 * 10:
            assert process.poll() is None, runner.log()
        held = runner.call("doctor", "--config", str(runner.config), "--output", "json")
        assert f"held by process {process.pid}" in held.stdout
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0, runner.log()
    assert "Traceback" not in runner.log()


def rows(runner: CommandRunner) -> Any:
    ran = runner.call("sql", "SELECT count(*) AS n FROM gpu", "--config", str(runner.config), "--output", "json")
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_agent_stops_with_exit_0_on_a_signal(runner: CommandRunner, number: signal.Signals) -> None:
    with runner.running("agent", "--config", str(runner.config)) as process:
        while "started" not in runner.log():
            assert process.poll() is None, runner.log()
            time.sleep(0.05)  # another process is busy: there is no event to wait for
        process.send_signal(number)
        assert process.wait(10) == 0, runner.log()
    assert "Traceback" not in runner.log()


@pytest.mark.slow
def test_the_demo_shows_incidents_and_ends_within_5_seconds(runner: CommandRunner) -> None:
    """The whole system: history, incidents, printed alerts, the page, and nothing left after Ctrl-C."""
    page = free_port()
    runner.environ |= {"FLEETPULSE__API__PORT": str(runner.port), "FLEETPULSE__DASHBOARD__PORT": str(page)}
    runner.environ |= {"TMPDIR": str(runner.folder)}
    with runner.running("demo") as process:
        until = time.monotonic() + 240
        while not responds(f"http://127.0.0.1:{page}/_stcore/health"):
            assert process.poll() is None, runner.log()
            assert time.monotonic() < until, runner.log()
            time.sleep(0.5)  # another process is busy: there is no event to wait for
        with urllib.request.urlopen(f"http://127.0.0.1:{runner.port}/api/v1/incidents", timeout=10) as found:
            incidents = json.load(found)["incidents"]
        assert {i["cause"].partition(":")[0] for i in incidents} >= {"cdu", "port", "gpu"}
        assert all(i["simulated"] for i in incidents)
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == 0, runner.log()
    said = runner.log()
    assert "ALERT SIMULATED FIRING critical" in said
    assert "Traceback" not in said
    assert list(runner.folder.glob("fleetpulse-demo-*")) == []
    assert not responds(f"http://127.0.0.1:{runner.port}/healthz")


def responds(url: str) -> bool:
    """Returns whether a GET gives 200."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


@pytest.mark.slow
def test_a_detector_prints_its_description_limits_and_settings(runner: CommandRunner) -> None:
    said = runner.call("detectors", "sdc")
    assert said.returncode == 0
    assert "Blind spots: " in said.stdout
    assert "  quorum = 5" in said.stdout
    expect_refusal(runner.call("detectors", "sdcc"), 2, "did you mean 'sdc'?")


@pytest.mark.slow
def test_a_service_that_has_closed_everything_ends_at_once_but_runs_exit_handlers() -> None:
    """Without it, the interpreter would collect the objects of compiled code first: 0.9 s of CPU."""
    program = (
        "import atexit, gc, sys, fleetpulse\n"
        "main = fleetpulse.main\n"
        "atexit.register(print, 'handler')\n"
        "gc.callbacks.append(lambda *_: print('collected'))\n"
        "print('shown', end=' ')\n"
        "fleetpulse._end_process({code})\n"
        "print('not ended')\n"
    )
    run = lambda text: subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=ROOT)  # noqa: E731
    ended = run(program.format(code=3))
    assert (ended.returncode, ended.stdout) == (3, "shown handler\n")
    within = run(program.replace("main = fleetpulse.main\n", "").format(code=3))  # another program that calls it
    assert (within.returncode, "not ended" in within.stdout) == (0, True)
