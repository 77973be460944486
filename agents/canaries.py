"""Canaries by hand, as a burn-in or in a prolog: all cores at once, and the GPUs in turn.

    python -m agents.canaries --minutes 5 [--gpu]

Exit code 0: every answer was right; 1: one was wrong, and lines of JSON on stdout say which; 3: nothing could run.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter

from agents.collectors.canary.child_process import Child, program
from agents.collectors.canary.ledger import FATAL, facts
from agents.collectors.canary.schedule import cores

_LISTEN_S = 0.1
"""How often programs are listened to; chosen."""
_LATE_S = 60.0
"""Seconds after which a program that should have ended is killed; chosen: the last round may be a slow one."""


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m agents.canaries", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--gpu", action="store_true", help="idle GPUs too, each for --minutes; needs torch")
    options = parser.parse_args(words)
    turn = int(time.time()) % 1000
    ran = [
        (
            f"cpu {c}",
            program(
                "agents.collectors.canary.cpu_program", "--cores", c, "--minutes", options.minutes, "--variant", turn
            ),
        )
        for c in cores()
    ]
    found = _watched(ran, 60 * options.minutes + _LATE_S)
    if options.gpu:
        seconds = 60 * options.minutes
        words = program("agents.collectors.canary.gpu_program", "--seconds", seconds, "--idle", 0, "--variant", turn)
        found += _watched([("gpu", words)], math.inf)
    sys.stderr.write(f"{found['runs']} problems in {found['rounds']} rounds: {found['wrong']} wrong\n")
    return 1 if found["wrong"] else 0 if found["runs"] else 3


def _watched(programs: list[tuple[str, list[str]]], seconds: float) -> Counter[str]:
    """What programs that run beside each other found; wrong answers are said as they come."""
    running = {name: Child(words) for name, words in programs}
    found: Counter[str] = Counter()
    until = time.monotonic() + seconds
    try:
        while running:
            time.sleep(_LISTEN_S)
            for name, child in list(running.items()):
                over = child.ended() or time.monotonic() > until
                for line in child.lines():
                    found += _counted(name, line)
                if over:
                    child.close()
                    found["wrong"] += child.died in FATAL
                    sys.stderr.write(f"{name}: {child.died} {child.last}\n" if child.status else "")
                    del running[name]
    finally:
        for child in running.values():
            child.close()
    return found


def _counted(name: str, line: dict[str, object]) -> Counter[str]:
    """The counts of one line."""
    data = facts(line)
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
