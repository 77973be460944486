"""Measures the small suite anew, prints what changed and writes tests/detectors/scenario_suite.toml.

python -m benchmarks.detection.renew
"""

from __future__ import annotations

import difflib
import sys

from benchmarks.detection.small import TABLE, measured, text


def main() -> int:
    before = TABLE.read_text() if TABLE.exists() else ""
    after = text(measured())
    diff = difflib.unified_diff(before.splitlines(True), after.splitlines(True), "stored", "measured", n=1)
    sys.stdout.writelines(diff)
    if before == after:
        print(f"{TABLE}: nothing changed", file=sys.stderr)
        return 0
    TABLE.write_text(after)
    print(f"{TABLE}: written; say in the commit why the figures moved", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
