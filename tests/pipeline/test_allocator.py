"""The allocator's thresholds are raised with glibc and left alone elsewhere."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROBE = """
import resource
from pipeline.runtime.memory import tune_allocator

def faults(rounds=50, size=4 << 20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        bytes(bytearray(size))  # both are touched, as a response and its copy are
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

usual = faults()
print(tune_allocator(), faults() < usual / 4)
"""


def test_large_blocks_are_kept_for_the_next_response_with_glibc() -> None:
    # in a separate process: the thresholds stay raised
    ran = subprocess.run([sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True, timeout=60)
    glibc = sys.platform == "linux" and platform.libc_ver()[0] == "glibc"
    raised, kept = ran.stdout.split() if ran.stdout else (ran.stderr, "")
    assert raised == str(glibc), ran.stderr
    assert kept == "True" or not glibc
