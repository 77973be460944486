"""A program whose newest line is read: a hung one is reported, and no second one is started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time

import pytest

from agents.collectors.accelerators import neuron
from agents.collectors.accelerators.neuron import MonitorProgram


def test_an_unkillable_program_is_reported_and_no_second_one_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(neuron, "EXIT_WAIT_S", 0.1)
    kill, kept = subprocess.Popen.kill, []

    def pending(process: subprocess.Popen[bytes]) -> None:
        """Leaves the first signal pending, as for a process in state D."""
        kept.append(process) if not kept else kill(process)

    monkeypatch.setattr(subprocess.Popen, "kill", pending)
    child = MonitorProgram(["sh", "-c", "exec sleep 60"], silence=0.1)
    try:
        until = time.monotonic() + 10
        while not (found := re.search(r"does not end: stuck in the kernel \(pid (\d+)\)", child.problem())):
            assert time.monotonic() < until, child.problem()
            time.sleep(0.02)
        assert child.pop_line() is None
        os.kill(int(found[1]), signal.SIGKILL)
        while "does not end" in child.problem():
            assert time.monotonic() < until, child.problem()
            time.sleep(0.02)
    finally:
        monkeypatch.undo()
        child.close()
