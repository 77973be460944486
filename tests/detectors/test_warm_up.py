"""The pipeline compiles before it reads: machine code for the first frames exists."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import gc, sys
from numba.core.dispatcher import Dispatcher
import detectors, fleetpulse
from detectors.runner import warm_up


def signatures():
    own = (o for o in gc.get_objects() if isinstance(o, Dispatcher) and o.py_func.__module__.startswith("detectors"))
    return {f"{d.py_func.__module__}.{d.py_func.__name__}": set(d.signatures) for d in own}


warm_up(detectors.configured({}, ""))
before = signatures()
assert any(before.values())
words = ["--input", "out/telemetry-gpu.parquet", "out/telemetry-node.parquet", "out/telemetry-nic.parquet"]
words += ["--events", "out/events.jsonl", "--topology", "out/topology.toml", "--output", "findings.jsonl"]
assert fleetpulse.main(["simulate", "--scenario", "s.toml", "--seed", "1", "--output", "out"]) == 0
assert fleetpulse.main(["replay", *words]) == 0
new = {name: found - before[name] for name, found in signatures().items() if found - before[name]}
assert not new, new
"""
SCENARIO = "version = 1\nduration = 1200\ninterval = 10\n[fleet]\nnodes = 8\ngpus_per_node = 4\n"


@pytest.mark.slow
def test_after_the_warm_up_a_replay_of_a_fleet_compiles_nothing(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(SCENARIO)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "is off for this frame" not in done.stderr
