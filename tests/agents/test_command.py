"""A command under limits: it ends in time with its children, whatever its output."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from agents.collectors import command as commands
from agents.collectors.command import CommandError, CommandRunner


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_hung_command_is_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with pytest.raises(CommandError, match=r"did not finish within 0\.3 s"):
        CommandRunner(0.3, 1000).run(("/bin/sh", "-c", f"sleep 60 & echo $! > {pids}; sleep 60"))
    until = time.monotonic() + 5
    while is_alive(int(pids.read_text())) and time.monotonic() < until:
        time.sleep(0.02)
    assert not is_alive(int(pids.read_text()))


def test_a_command_that_closes_its_output_and_keeps_running_is_killed() -> None:
    with pytest.raises(CommandError, match="did not finish"):
        CommandRunner(0.3, 1000).run(("/bin/sh", "-c", "exec >/dev/null 2>&1; sleep 60"))


def test_a_command_with_endless_output_is_killed() -> None:
    with pytest.raises(CommandError, match="printed more than 1 MiB"):
        CommandRunner(20, 1 << 20).run(("/bin/sh", "-c", "yes"))


def test_a_missing_command_and_a_failing_one_are_reported() -> None:
    with pytest.raises(CommandError, match="/nonexistent: No such file"):
        CommandRunner(1, 1).run(("/nonexistent",))
    found = CommandRunner(5, 1000).run(("/bin/sh", "-c", "echo out; echo word >&2; exit 3"))
    assert (found.code, found.text, found.errors) == (3, "out\n", "word\n")


def test_a_stop_from_another_thread_kills_the_command_and_refuses_further_ones() -> None:
    command = CommandRunner(60, 1000)
    threading.Timer(0.2, command.stop).start()
    began = time.monotonic()
    with pytest.raises(CommandError, match="stopped"):
        command.run(("/bin/sh", "-c", "sleep 60"))
    with pytest.raises(CommandError, match="stopped"):
        command.run(("/bin/sh", "-c", "sleep 60"))
    assert time.monotonic() - began < 10


def test_standard_error_is_cut_and_marked_as_cut() -> None:
    found = CommandRunner(20, 1000).run(("/bin/sh", "-c", "yes no answer | head -c 1000000 >&2"))
    assert found.errors_cut
    assert 0 < len(found.errors) < 1_000_000


def test_a_command_blocked_in_the_kernel_is_left_behind_and_blocks_further_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(commands, "_KILL_WAIT_S", 0.2)
    monkeypatch.setattr(commands.os, "killpg", lambda *_: None)  # as for a process in state D: the signal stays pending
    made = CommandRunner(0.2, 1 << 20)
    began = time.monotonic()
    with pytest.raises(CommandError, match="did not finish within"):
        made.run(["sleep", "60"])
    assert time.monotonic() - began < 5.0
    with pytest.raises(CommandError, match=r"the previous run is still blocked in the kernel \(pid \d+\)"):
        made.run(["true"])
    held = made._leftover
    assert held is not None
    os.kill(held.pid, signal.SIGKILL)
    held.wait(10)
    assert made.run(["true"]).code == 0
