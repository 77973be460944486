"""The messages to the service manager, over a real socket of its kind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.runtime.systemd import SystemdNotifier

ROOT = Path(__file__).parents[2]
Manager = Callable[[str], socket.socket]


@pytest.fixture
def manager() -> Iterator[Manager]:
    """Receives at an address, as systemd does."""
    opened: list[socket.socket] = []

    def listen(address: str) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        listener.bind("\0" + address[1:] if address.startswith("@") else address)
        opened.append(listener)
        return listener

    yield listen
    for listener in opened:
        listener.close()


def received(listener: socket.socket) -> list[list[str]]:
    """All received messages, each as its lines."""
    found = []
    while True:
        try:
            found.append(listener.recv(4096).decode().split("\n"))
        except BlockingIOError:
            return found


@pytest.fixture(params=["path", "abstract"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "notify") if request.param == "path" else f"@fleetpulse-test-{os.getpid()}"


def test_ready_alive_and_stopping_arrive_at_either_kind_of_address(manager: Manager, address: str) -> None:
    listener = manager(address)
    notify = SystemdNotifier({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())})
    notify.notify_ready(1.0)
    notify.notify_alive("12 collectors, 11 well")
    notify.notify_alive("12 collectors, 11 well")
    notify.notify_stopping()
    notify.close()
    notify.close()
    assert received(listener) == [
        ["READY=1"],
        ["WATCHDOG=1", "STATUS=12 collectors, 11 well"],
        ["WATCHDOG=1"],
        ["STOPPING=1"],
    ]
    assert notify.error is None


def test_a_watchdog_shorter_than_the_agents_interval_is_extended(manager: Manager, tmp_path: Path) -> None:
    listener = manager(address := str(tmp_path / "notify"))
    notify = SystemdNotifier({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "30000000"})
    notify.notify_ready(60.0)
    notify.close()
    assert received(listener) == [["READY=1", "WATCHDOG_USEC=240000000"]]


@pytest.mark.parametrize(
    "environment",
    [{}, {"WATCHDOG_USEC": "soon"}, {"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}],
    ids=["no watchdog", "nonsense", "the watchdog of another process"],
)
def test_without_a_watchdog_of_ours_only_a_changed_status_is_sent(
    manager: Manager, tmp_path: Path, environment: dict[str, str]
) -> None:
    listener = manager(address := str(tmp_path / "notify"))
    notify = SystemdNotifier({"NOTIFY_SOCKET": address, **environment})
    notify.notify_alive()
    notify.notify_alive("well\nREADY=1")
    notify.notify_alive("well\nREADY=1")
    notify.close()
    assert received(listener) == [["STATUS=well READY=1"]]


@pytest.mark.parametrize("address", ["", "vsock:2:1234", "relative/path"])
def test_without_a_manager_nothing_happens(address: str) -> None:
    notify = SystemdNotifier({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1"} if address else {})
    notify.notify_ready(1.0)
    notify.notify_alive("well")
    notify.notify_stopping()
    notify.close()
    assert notify.error is None


def test_a_missing_manager_is_recorded_and_costs_nothing(tmp_path: Path) -> None:
    notify = SystemdNotifier({"NOTIFY_SOCKET": str(tmp_path / "gone")})
    notify.notify_ready(1.0)
    assert notify.error == "NOTIFY_SOCKET: No such file or directory"
    notify.close()


def test_a_manager_that_reads_nothing_never_blocks_and_gets_the_status_later(manager: Manager, tmp_path: Path) -> None:
    listener = manager(address := str(tmp_path / "notify"))
    notify = SystemdNotifier({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "30000000"})
    while notify.error is None:
        notify.notify_alive("full")  # until the kernel's queue of the socket is full
    notify.notify_alive("news")
    assert notify.error == "NOTIFY_SOCKET: Resource temporarily unavailable"
    received(listener)
    notify.notify_alive("news")
    notify.close()
    assert received(listener) == [["WATCHDOG=1", "STATUS=news"]]


PROGRAM = """
import sys
from pathlib import Path
from agents.node.agent import run
from agents.collectors.host.host import Host
from pipeline.config.sections import Agent, Config, Spool
sys.exit(run(Config(agent=Agent("n1", 0.1), spool=Spool(Path(sys.argv[1]))), collectors=[Host()]))
"""


@pytest.mark.slow
def test_the_agent_notifies_ready_alive_from_its_loop_and_stopping(manager: Manager, tmp_path: Path) -> None:
    listener = manager(address := str(tmp_path / "notify"))
    listener.setblocking(True)
    listener.settimeout(20)
    environ = {**os.environ, "NOTIFY_SOCKET": address, "WATCHDOG_USEC": "30000000"}
    words = [sys.executable, "-c", PROGRAM, str(tmp_path / "spool")]
    agent = subprocess.Popen(words, cwd=ROOT, env=environ, stderr=subprocess.DEVNULL)
    try:
        first = listener.recv(4096)
        pings = [listener.recv(4096) for _ in range(5)]
        agent.terminate()
        rest = [listener.recv(4096)]
        while rest[-1] != b"STOPPING=1":
            rest.append(listener.recv(4096))
        assert agent.wait(10) == 0
    finally:
        agent.kill()
        agent.wait()
    assert first == b"READY=1"
    assert all(ping.startswith(b"WATCHDOG=1") for ping in [*pings, *rest[:-1]])
