"""Several real processes under one parent: supervised, stopped together, none left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.runtime.supervise import PARENT, StopRequested, Supervisor, report_death

SLEEPS = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
IGNORES_SIGTERM = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)",
]
ROOT = Path(__file__).parents[2]


class LineCollector(list[str]):
    """Collects the lines of children, and lets a test wait for a line without sleeping."""

    def __init__(self) -> None:
        super().__init__()
        self.news = threading.Condition()

    def __call__(self, line: str) -> None:
        with self.news:
            self.append(line)
            self.news.notify_all()

    def wait_for(self, line: str) -> None:
        with self.news:
            assert self.news.wait_for(lambda: line in self, 20), list(self)


def test_a_child_that_dies_is_reported_with_its_last_lines(capsys: pytest.CaptureFixture[str]) -> None:
    supervisor = Supervisor(LineCollector())
    supervisor.start("good", SLEEPS)
    program = "import sys; print('first'); print('the reason', file=sys.stderr); sys.exit(7)"
    supervisor.start("bad", [sys.executable, "-c", program])
    try:
        dead = supervisor.wait(20)
        assert dead is not None
        assert dead.name == "bad"
        report_death(dead)
    finally:
        supervisor.stop_all()
    said = capsys.readouterr().err
    assert "bad ended with exit code 7" in said
    assert "the reason" in said


def test_a_killed_child_is_reported_with_the_signal(capsys: pytest.CaptureFixture[str]) -> None:
    lines = LineCollector()
    supervisor = Supervisor(lines)
    child = supervisor.start("victim", SLEEPS)
    lines.wait_for("victim: up")
    child.process.kill()
    dead = supervisor.wait(20)
    assert dead is child
    report_death(child)
    assert "victim was killed by SIGKILL" in capsys.readouterr().err


def test_the_exit_of_an_optional_child_is_not_a_failure() -> None:
    supervisor = Supervisor(LineCollector())
    child = supervisor.start("task", [sys.executable, "-c", "pass"])
    child.process.wait(20)
    assert supervisor.find_dead(may_end=["task"]) is None
    assert supervisor.find_dead() is child


def test_the_stop_leaves_nothing_running_even_if_a_child_ignores_sigterm() -> None:
    lines = LineCollector()
    supervisor = Supervisor(lines)
    children = [supervisor.start("quick", SLEEPS), supervisor.start("deaf", IGNORES_SIGTERM)]
    for name in ("quick", "deaf"):
        lines.wait_for(f"{name}: up")
    supervisor.stop_all(timeout_s=0.5)
    assert [child.process.poll() for child in children] == [-signal.SIGTERM, -signal.SIGKILL]


def test_a_stop_request_ends_the_wait() -> None:
    supervisor = Supervisor(LineCollector())
    supervisor.start("good", SLEEPS)
    supervisor.request_stop()
    with pytest.raises(StopRequested):
        supervisor.wait(20)
    supervisor.stop_all()


def test_a_signal_requests_the_stop_and_the_handlers_are_restored() -> None:
    supervisor, before = Supervisor(LineCollector()), signal.getsignal(signal.SIGTERM)
    with supervisor.handle_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(StopRequested):
            supervisor.wait(20)
    assert signal.getsignal(signal.SIGTERM) is before


def test_only_the_last_lines_are_kept() -> None:
    supervisor = Supervisor(LineCollector())
    child = supervisor.start("talker", [sys.executable, "-c", "for i in range(1000): print(i)"])
    child.process.wait(20)
    child.poll_status()
    assert list(child.last) == [str(i) for i in range(980, 1000)]


def test_children_end_when_the_parent_is_killed() -> None:
    """The kernel sends them SIGTERM: nothing is left running after kill -9 of the parent."""
    sleeper = (
        "import os, time; from pipeline.runtime.supervise import stop_with_parent; stop_with_parent();"
        "print(os.getpid(), flush=True); time.sleep(600)"
    )
    program = (
        "import sys; from pipeline.runtime.supervise import Supervisor;"
        "s = Supervisor(lambda line: print(line, flush=True));"
        f"s.start('c', [sys.executable, '-c', {sleeper!r}]); s.wait(600)"
    )
    environ = {k: v for k, v in os.environ.items() if k != PARENT} | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", program], env=environ, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline().removeprefix("c: "))
        parent.kill()
        parent.wait(20)
        until = time.monotonic() + 20
        while Path(f"/proc/{child}/cmdline").exists() and Path(f"/proc/{child}/cmdline").read_bytes():
            assert time.monotonic() < until, "the child outlived its parent"
            time.sleep(0.05)  # another process is busy: there is no event for its end


def test_a_suspended_child_is_named_until_it_continues() -> None:
    supervisor = Supervisor(lambda line: None)
    child = supervisor.start("sleeper", [sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        os.kill(child.process.pid, signal.SIGSTOP)
        _wait_until(lambda: supervisor.list_suspended() == [f"sleeper is suspended: kill -CONT {child.process.pid}"])
        os.kill(child.process.pid, signal.SIGCONT)
        _wait_until(lambda: supervisor.list_suspended() == [])
    finally:
        supervisor.stop_all(1.0)


def _wait_until(holds: Callable[[], object]) -> None:
    for _ in range(1000):
        if holds():
            return
        threading.Event().wait(0.01)
    raise AssertionError("not within ten seconds")
