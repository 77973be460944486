"""A command under limits: it ends in time, with all that it started, whatever it prints."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from agents.collectors import command as commands
from agents.collectors.command import Command, CommandError


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_command_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with pytest.raises(CommandError, match=r"did not end within 0\.3 s"):
        Command(0.3, 1000).run(("/bin/sh", "-c", f"sleep 60 & echo $! > {pids}; sleep 60"))
    until = time.monotonic() + 5
    while alive(int(pids.read_text())) and time.monotonic() < until:
        time.sleep(0.02)
    assert not alive(int(pids.read_text()))


def test_a_command_that_closes_what_it_prints_to_and_stays_is_ended_too() -> None:
    with pytest.raises(CommandError, match="did not end"):
        Command(0.3, 1000).run(("/bin/sh", "-c", "exec >/dev/null 2>&1; sleep 60"))


def test_a_command_that_prints_without_end_is_ended() -> None:
    with pytest.raises(CommandError, match="printed more than 1 MiB"):
        Command(20, 1 << 20).run(("/bin/sh", "-c", "yes"))


def test_a_command_that_is_not_there_and_one_that_fails_say_so() -> None:
    with pytest.raises(CommandError, match="/nonexistent: No such file"):
        Command(1, 1).run(("/nonexistent",))
    found = Command(5, 1000).run(("/bin/sh", "-c", "echo out; echo word >&2; exit 3"))
    assert (found.code, found.text, found.talk) == (3, "out\n", "word\n")


def test_a_stop_from_another_thread_ends_what_runs_and_refuses_what_would_run() -> None:
    command = Command(60, 1000)
    threading.Timer(0.2, command.stop).start()
    began = time.monotonic()
    with pytest.raises(CommandError, match="stopped"):
        command.run(("/bin/sh", "-c", "sleep 60"))
    with pytest.raises(CommandError, match="stopped"):
        command.run(("/bin/sh", "-c", "sleep 60"))
    assert time.monotonic() - began < 10


def test_of_endless_complaints_the_first_are_kept_and_that_there_were_more_is_said() -> None:
    found = Command(20, 1000).run(("/bin/sh", "-c", "yes no answer | head -c 1000000 >&2"))
    assert found.cut
    assert 0 < len(found.talk) < 1_000_000


def test_one_that_the_kernel_holds_is_left_behind_and_none_follows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "_LEAVE_S", 0.2)
    monkeypatch.setattr(commands.os, "killpg", lambda *_: None)  # as for a process in state D: the signal stays pending
    made = Command(0.2, 1 << 20)
    began = time.monotonic()
    with pytest.raises(CommandError, match="did not end within"):
        made.run(["sleep", "60"])
    assert time.monotonic() - began < 5.0
    with pytest.raises(CommandError, match=r"the one before it still waits in the kernel \(pid \d+\)"):
        made.run(["true"])
    held = made._left
    assert held is not None
    os.kill(held.pid, signal.SIGKILL)
    held.wait(10)
    assert made.run(["true"]).code == 0
