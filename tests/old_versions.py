"""Earlier versions of Fleetpulse, from the history of this repository, to run beside today's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WIRE_1 = "409170b"
"""The last version whose agents sent wire version 1, and whose store had schema 1."""
SCHEMA_2 = "eb74ca1"
"""A version whose store had schema 2."""
SCHEMA_3 = "6e5de3d"
"""A version whose store had schema 3."""
ROOT = Path(__file__).parents[1]


def check_out(commit: str, folder: Path) -> Path:
    """Writes the files of a commit below a folder and returns it; skips the test in a clone without its history."""
    known = subprocess.run(["git", "-C", ROOT, "cat-file", "-e", f"{commit}^{{tree}}"], capture_output=True)
    if known.returncode:
        pytest.skip(f"this clone has no history: commit {commit} is unknown")
    folder.mkdir()
    packed = subprocess.Popen(["git", "-C", ROOT, "archive", commit], stdout=subprocess.PIPE)
    subprocess.run(["tar", "-x", "-C", folder], stdin=packed.stdout, check=True)
    assert packed.stdout is not None
    packed.stdout.close()
    assert packed.wait() == 0
    return folder


def run_old(tree: Path, script: str, *words: str | Path) -> str:
    """Runs a script with the packages of an earlier version; returns what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", script, *map(str, words)]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def old_command(tree: Path, *words: str | Path) -> list[str]:
    """Returns the words that run a command of an earlier version."""
    return [sys.executable, str(tree / "fleetpulse.py"), *map(str, words)]
