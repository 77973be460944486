"""A mark of the audit, `NUMBER:HASH` of its newest row, to keep outside of the store.

The chain of hashes finds a row that was changed, moved or removed between others. It cannot find that the newest rows
were removed, or that a person who may write to the store calculated all hashes again. A mark from before finds both.
"""

from __future__ import annotations

import re
from typing import Literal

import duckdb

from pipeline.model.errors import UsageError

State = Literal["found", "changed", "missing", "older"]
"""What became of a marked row. missing: the audit ends before it; older: it is older than the rows that are kept."""
_MARK = re.compile(r"(\d{1,18}):([0-9a-f]{64})")


def read_marks(cursor: duckdb.DuckDBPyConnection) -> tuple[int, str]:
    """Returns the number of the oldest row, and the mark of the newest; 0 and "" of an empty audit."""
    first = cursor.execute("SELECT min(number) FROM audit").fetchone()
    last = cursor.execute("SELECT number, hash FROM audit ORDER BY number DESC LIMIT 1").fetchone()
    return (0, "") if last is None or first is None else (int(first[0]), f"{last[0]}:{last[1]}")


def check_mark(cursor: duckdb.DuckDBPyConnection, mark: str) -> State:
    """Returns what became of the row of a mark. Raises UsageError if it is none."""
    found = _MARK.fullmatch(mark)
    if found is None:
        raise UsageError(f"mark = {mark[:100]!r}: expected NUMBER:HASH, as `fleetpulse audit verify` prints it")
    number, first = int(found[1]), read_marks(cursor)[0]
    row = cursor.execute("SELECT hash FROM audit WHERE number = $1", [number]).fetchone()
    if row is None:
        return "older" if number < first else "missing"
    return "found" if row[0] == found[2] else "changed"
