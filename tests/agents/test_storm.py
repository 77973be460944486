"""Half an hour of faults, compressed: the agent survives, and each tick is stored or counted (benchmarks/storm.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.agents import nvml_stub

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_random_hangs_failures_and_kills_of_collectors_stop_no_agent_and_lose_no_uncounted_tick() -> None:
    if nvml_stub.compiler() is None:
        pytest.skip("no C compiler to build the stand-in for the NVIDIA driver's library")
    words = [sys.executable, "-m", "benchmarks.storm", "--hours", "0.5", "--every", "30", "--seed", "3"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 agent deaths, all checks passed" in done.stdout
    assert "Traceback" not in done.stderr
