"""Measures the small suite again, prints the differences and writes tests/detectors/scenario_suite.toml.

python -m benchmarks.detection.renew
"""

from __future__ import annotations

import difflib
import sys
import tomllib

from benchmarks.detection.small import TABLE, Table, differences, measured, text


def moved(before: str, after: Table) -> list[str]:
    """Returns figures outside the tolerance of the stored table; all of them, if it has another form."""
    try:
        return differences(tomllib.loads(before), after)
    except KeyError as error:
        return [f"the stored table has no {error}: everything is new"]


def main() -> int:
    before, now = TABLE.read_text() if TABLE.exists() else "", measured()
    after = text(now)
    diff = difflib.unified_diff(before.splitlines(True), after.splitlines(True), "stored", "measured", n=1)
    sys.stdout.writelines(diff)
    for line in moved(before, now):
        print(f"moved: {line}")
    if before == after:
        print(f"{TABLE}: nothing changed", file=sys.stderr)
        return 0
    TABLE.write_text(after)
    print(f"{TABLE}: written; say in the commit why the figures moved", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
