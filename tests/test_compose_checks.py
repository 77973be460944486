"""What `make compose-test` says about a check that fails, with a stand-in of docker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "deploy" / "compose_test"
PROGRAM = """
from checks import run_doctor
from stack import CheckError, Stack
try:
    print("passed:", run_doctor(Stack()))
except CheckError as error:
    print("failed:", error)
"""
ROWS = [
    {"check": "kafka", "state": "ok", "found": "3 brokers"},
    {"check": "api", "state": "fail", "found": "HTTP 503"},
    *({"check": f"filler {n}", "state": "ok", "found": "x" * 200} for n in range(20)),
]


@pytest.mark.parametrize(
    ("code", "printed", "said"),
    [
        (1, json.dumps(ROWS), "failed: api: HTTP 503"),
        (3, json.dumps(ROWS), "failed: api: HTTP 503"),
        (0, json.dumps(ROWS[:1]), "passed: kafka ok"),
        (1, "no such service", "failed: doctor printed 'no such service', expected its checks"),
        (2, "[site]: wrong", "failed: docker compose"),
    ],
)
def test_doctors_failed_checks_are_named(code: int, printed: str, said: str, tmp_path: Path) -> None:
    """The end of the output was shown instead, which says nothing about the checks before it."""
    (tmp_path / "printed").write_text(printed)
    (tmp_path / "docker").write_text(f"#!/bin/sh\ncat {tmp_path}/printed\nexit {code}\n")
    (tmp_path / "docker").chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(FOLDER)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(said)
