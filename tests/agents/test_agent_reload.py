"""SIGHUP makes a running agent read its configuration again: an event says what came of it, nothing is lost."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fleetpulse
from pipeline.commands import installed
from pipeline.model.records import EVENTS, TELEMETRY
from pipeline.transport import wire
from tests.agents.conftest import Drained
from tests.agents.ticks import split_ticks
from tests.until import until

ROOT = Path(__file__).parents[2]
BASE = '[agent]\nnode = "n1"\ncollectors = ["host"]\ninterval = 0.2\n[spool]\ndirectory = "{spool}"\n'

LOGIN = '[pipeline]\ntransport = "kafka"\n[kafka]\nsecurity_protocol = "SASL_SSL"\n[spool]'


class Running:
    """`fleetpulse agent` as a process, with its log, its file of configuration and its messages to systemd."""

    def __init__(self, folder: Path) -> None:
        self.spool, self.file, self.log = folder / "spool", folder / "fleetpulse.toml", folder / "log"
        self.base = BASE.format(spool=self.spool)
        self.file.write_text(self.base)
        self.manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.manager.bind(str(folder / "notify"))
        words = [sys.executable, str(ROOT / "fleetpulse.py"), "agent", "--config", str(self.file)]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "NOTIFY_SOCKET": str(folder / "notify")}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(words, stderr=log, env=environ)
        self.wait_for("collector host")

    def wait_for(self, text: str, times: int = 1) -> None:
        until(lambda: self.log.read_text().count(text) >= times or self.process.poll() is not None)
        assert self.process.poll() is None, self.log.read_text()

    def read_notifications(self) -> list[str]:
        found = []
        while True:
            try:
                found.append(self.manager.recv(4096).decode().partition("=")[0])
            except BlockingIOError:
                return found

    def reload(self, text: str) -> None:
        self.file.write_text(text)
        self.process.send_signal(signal.SIGHUP)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    agent = Running(tmp_path)
    yield agent
    agent.process.kill()
    agent.process.wait()
    agent.manager.close()


def read_reloads(drained: Drained) -> list[dict[str, Any]]:
    batches = [wire.decode_events(m.value) for m in drained[0] if m.partition.topic == EVENTS]
    return [dict(event.data) for batch in batches for event in batch.events if event.kind == "configuration"]


def test_a_reload_is_a_new_start_in_the_same_process_with_an_event_and_without_a_gap(
    running: Running, drain: Callable[[Path], Drained]
) -> None:
    running.reload(running.base.replace("interval = 0.2", "interval = 0.1"))
    running.wait_for("started, every 0.1 s")
    running.process.terminate()
    assert running.process.wait(10) == 0  # the same process ended, so it went on
    messages, gaps = drain(running.spool)
    assert gaps == []
    assert read_reloads((messages, gaps)) == [{"outcome": "done", "reason": "agent.interval: 0.2 -> 0.1"}]
    batches = [wire.decode(m.value) for m in messages if m.partition.topic == TELEMETRY]
    times = [tick.times[0] for batch in batches for tick in split_ticks([batch])]
    assert times == sorted(times)
    sent = [line for line in running.read_notifications() if line in ("READY", "RELOADING", "STOPPING")]
    assert sent == ["READY", "RELOADING", "READY", "STOPPING"]  # STOPPING before the end would have systemd kill it


def test_an_empty_list_in_place_of_a_default_is_applied(running: Running, drain: Callable[[Path], Drained]) -> None:
    """`trusted` names root and slurm where it is missing."""
    running.reload(running.base + "[collector.training]\ntrusted = []\n")
    running.wait_for("started, every", times=2)
    running.process.terminate()
    assert running.process.wait(10) == 0
    reason = "collector.training.trusted: none -> []"
    assert read_reloads(drain(running.spool)) == [{"outcome": "done", "reason": reason}]


def test_a_ca_file_that_is_a_pipe_changes_nothing_and_a_stop_still_ends_the_agent(
    running: Running, drain: Callable[[Path], Drained], tmp_path: Path
) -> None:
    """The agent waited at it for good, and ignored SIGTERM."""
    os.mkfifo(pipe := tmp_path / "pipe")
    running.reload(running.base + f"[opentelemetry]\nendpoint = 'https://127.0.0.1:1'\nca_file = '{pipe}'\n")
    running.wait_for("not reloaded, nothing changed")
    running.process.terminate()
    assert running.process.wait(10) == 0
    [found] = read_reloads(drain(running.spool))
    assert "[opentelemetry] ca_file" in found["reason"]
    assert "is no regular file" in found["reason"]


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("interval = 0.2", "intervall = 1"), "did you mean 'interval'?"),
        (('node = "n1"', 'node = "n2"'), "agent.node changed: restart the agent for that"),
        (('["host"]', '["hots"]'), "hots"),
        (("interval = 0.2", "interval = 0"), "expected seconds, above 0"),
        (("[spool]", LOGIN), "expected username and password_file"),
    ],
    ids=["an unknown key", "another name", "an unknown collector", "no interval", "a login without its password"],
)
def test_a_wrong_configuration_changes_nothing_and_is_an_event(
    running: Running, drain: Callable[[Path], Drained], change: tuple[str, str], why: str
) -> None:
    running.reload(running.base.replace(*change))
    running.wait_for("not reloaded, nothing changed")
    running.process.terminate()
    assert running.process.wait(10) == 0
    assert running.log.read_text().count("started, every 0.2 s") == 1
    (event,) = read_reloads(drain(running.spool))
    assert event["outcome"] == "refused"
    assert why in event["reason"]


def list_unusable(folder: Path) -> dict[str, str]:
    """Returns sections with which an agent cannot start, though each key alone is right -> what a refusal says."""
    keys, open_keys, text, binary = folder / "keys", folder / "open", folder / "text", folder / "binary"
    keys.mkdir()
    open_keys.mkdir()
    (open_keys / "n1.key").write_text("k" * 64)
    (open_keys / "n1.key").chmod(0o644)
    text.write_text("no certificate")
    binary.write_bytes(b"\xff\xfe")
    kafka, otlp = '[pipeline]\ntransport = "kafka"\n[kafka]\n', "[opentelemetry]\nendpoint = "
    return {
        f'{kafka}node_keys = "{keys}"\n': "no n1.key",
        f'{kafka}node_keys = "{folder}/gone"\n': "no n1.key",
        f'{kafka}node_keys = "{open_keys}"\n': "readable for every user",
        f'{otlp}"http://127.0.0.1:1"\nheaders_file = "{folder}/gone"\n': "headers_file: .*No such file",
        f'{otlp}"http://127.0.0.1:1"\nheaders_file = "{binary}"\n': "headers_file: .*cannot be read",
        f'{otlp}"http://h.example"\nheaders_file = "{text}"\n': "expected lines 'Name: value'",
        f'{otlp}"https://h.example"\nca_file = "{text}"\n': "ca_file: .*expected certificates in PEM",
        f'{otlp}"https://h.example"\nca_file = "{folder}/gone"\n': "ca_file: .*No such file",
    }


def test_a_reload_to_files_with_which_no_agent_starts_is_refused(
    running: Running, drain: Callable[[Path], Drained], tmp_path: Path
) -> None:
    """Each passes `config check`; the start ended with exit code 2, after which the unit stays down."""
    unusable = list_unusable(tmp_path)
    for number, more in enumerate(unusable, 1):
        running.reload(running.base + more)
        running.wait_for("configuration not reloaded, nothing changed", number)
    running.process.terminate()
    assert running.process.wait(10) == 0
    assert running.log.read_text().count("started, every") == 1
    reloads = read_reloads(drain(running.spool))
    assert [event["outcome"] for event in reloads] == ["refused"] * len(unusable)
    for event, why in zip(reloads, unusable.values(), strict=True):
        assert re.search(why, event["reason"])


def test_two_servers_of_an_agent_have_two_ports(
    running: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second would never listen. On a server they may be ports of other nodes."""
    same = "[opentelemetry]\nprometheus_port = 9464\n"
    running.reload(running.base.replace("[agent]\n", "[agent]\notlp_port = 9464\n") + same)
    said = "[opentelemetry] prometheus_port = 9464: that is [agent] otlp_port too; expected another port"
    running.wait_for(f"not reloaded, nothing changed: {running.file}: {said}")
    assert fleetpulse.main(["config", "check", "--config", str(running.file)]) == 0
    monkeypatch.setattr(installed, "is_node", lambda: True)
    assert fleetpulse.main(["config", "check", "--config", str(running.file)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("before", ['node = "n1"\n', "[opentelemetry]\n"])
def test_a_reload_to_a_port_in_use_changes_nothing(
    running: Running, drain: Callable[[Path], Drained], before: str
) -> None:
    """The next start would end with exit code 2, after which the unit stays down."""
    key = "otlp_port" if "node" in before else "prometheus_port"
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        text = running.base + "[opentelemetry]\n"
        running.reload(text.replace(before, f"{before}{key} = {occupied.getsockname()[1]}\n"))
        running.wait_for("not reloaded, nothing changed")
    running.process.terminate()
    assert running.process.wait(10) == 0
    (event,) = read_reloads(drain(running.spool))
    assert event["outcome"] == "refused"
    assert "Address already in use; expected a port that is free on 127.0.0.1" in event["reason"]


def test_an_unchanged_configuration_restarts_nothing(running: Running, drain: Callable[[Path], Drained]) -> None:
    running.reload(running.base)
    running.wait_for("configuration reloaded: nothing changed")
    running.process.terminate()
    assert running.process.wait(10) == 0
    assert running.log.read_text().count("started, every") == 1
    assert read_reloads(drain(running.spool)) == []
