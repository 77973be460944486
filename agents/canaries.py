"""Runs canaries by hand, as a burn-in or in a prolog: all cores in parallel, then the GPUs in turn.

    python -m agents.canaries --minutes 5 [--gpu]

Exit code 0: every answer was right; 1: an answer was wrong, see the lines of JSON on stdout; 3: nothing could run.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter

from agents.collectors.canary.child_process import CanaryProcess, module_command
from agents.collectors.canary.ledger import FATAL_SIGNALS, clean_result
from agents.collectors.canary.schedule import list_cores

_POLL_S = 0.1
"""Seconds between two reads of the programs' output. Chosen."""
_LATE_S = 60.0
"""Seconds after which a program that should have ended is killed. Chosen: the last round may be a slow one."""


def main(words: list[str] | None = None) -> int:
    """Runs the canaries and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m agents.canaries", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--gpu", action="store_true", help="also test idle GPUs, each for --minutes; needs torch")
    options = parser.parse_args(words)
    turn = int(time.time()) % 1000
    ran = [
        (
            f"cpu {c}",
            module_command(
                "agents.collectors.canary.cpu_program", "--cores", c, "--minutes", options.minutes, "--variant", turn
            ),
        )
        for c in list_cores()
    ]
    found = _run_programs(ran, 60 * options.minutes + _LATE_S)
    if options.gpu:
        seconds = 60 * options.minutes
        words = module_command(
            "agents.collectors.canary.gpu_program", "--seconds", seconds, "--idle", 0, "--variant", turn
        )
        found += _run_programs([("gpu", words)], math.inf)
    sys.stderr.write(f"{found['runs']} problems in {found['rounds']} rounds: {found['wrong']} wrong\n")
    return 1 if found["wrong"] else 0 if found["runs"] else 3


def _run_programs(programs: list[tuple[str, list[str]]], seconds: float) -> Counter[str]:
    """Runs programs in parallel and returns their counts; wrong answers are written as they come."""
    running = {name: CanaryProcess(words) for name, words in programs}
    found: Counter[str] = Counter()
    until = time.monotonic() + seconds
    try:
        while running:
            time.sleep(_POLL_S)
            for name, child in list(running.items()):
                over = child.has_ended() or time.monotonic() > until
                for line in child.read_lines():
                    found += _count_line(name, line)
                if over:
                    child.close()
                    found["wrong"] += child.death_signal in FATAL_SIGNALS
                    sys.stderr.write(f"{name}: {child.death_signal} {child.last_text}\n" if child.status else "")
                    del running[name]
    finally:
        for child in running.values():
            child.close()
    return found


def _count_line(name: str, line: dict[str, object]) -> Counter[str]:
    """Returns the counts of one line."""
    data = clean_result(line)
    if "absent" in line:
        sys.stderr.write(f"{name}: {line['absent']}\n")
    if "digest" not in data:
        return Counter()
    wrong = "expected" in data and data["expected"] != data["digest"]
    if wrong:
        sys.stdout.write(json.dumps({"program": name, "device": line.get("device"), **data}) + "\n")
        sys.stdout.flush()
    return Counter({"runs": int(data.get("runs", 0)), "rounds": 1, "wrong": int(wrong)})


if __name__ == "__main__":
    sys.exit(main())
