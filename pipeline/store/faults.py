"""What an error of the store means: whether a message is to blame, else who holds the file and what is wrong with it.

held by another process           Unreachable   stop it, or another [store] path
no room, no memory                Unreachable   free space; a larger [store] memory_limit
no right to it                    UsageError    another [store] path
written by a newer DuckDB         UsageError    upgrade
damaged file or log               DamagedStore  docs/store.md says how to recover
"""

from __future__ import annotations

import re
from pathlib import Path

import duckdb

from pipeline.model.errors import DamagedStore, FleetpulseError, Unreachable, UsageError, WireError

RECOVERY = "docs/store.md, section Recovery"
_OF_MESSAGE = (
    *(WireError, duckdb.DataError, duckdb.IntegrityError),  # what is checked here and by the store
    *(ValueError, TypeError, LookupError, ArithmeticError),  # what NumPy, Arrow and our code raise on values
)
_SIGNS_OF_DAMAGE = ("Corrupt", "corrupt", "Could not read enough bytes", "replaying WAL", "deserializ")


def is_of_message(error: Exception) -> bool:
    """Whether the content of a message can be the reason, so that looking for that message makes sense.

    All else (disk, memory, locks, an invalid database, what nobody foresaw) says nothing of any message: it is tried
    again, and no message is given up for it. A full disk at COMMIT is a TransactionException, a failed checkpoint a
    FatalException, a damaged block a bare duckdb.Error.
    """
    return isinstance(error, _OF_MESSAGE)


def explained(path: Path, error: Exception) -> FleetpulseError:
    """What an error of DuckDB on this file means, and what to do."""
    text = " ".join(str(error).split())
    if isinstance(error, FleetpulseError):
        return error
    if "lock on file" in text:
        holder = re.search(r"PID (\d+)", text)
        who = f"process {holder[1]}" if holder else "another process"
        return Unreachable(
            f"store {path}: {who} has it open; is another 'fleetpulse pipeline' running on it? Stop it, or set another "
            f"[store] path ({text})"
        )
    if "No space left" in text or "Disk quota" in text:
        return Unreachable(f"store {path}: its disk is full; free space: df -h {path.parent} ({text})")
    if "Permission denied" in text or "Read-only file system" in text:
        return UsageError(f"[store] path = '{path}': cannot be written by this user ({text})")
    if isinstance(error, duckdb.OutOfMemoryException):
        return Unreachable(f"store {path}: out of memory; raise [store] memory_limit ({text})")
    if "newer version of DuckDB" in text or "storage version" in text:
        return UsageError(f"[store] path = '{path}': written by a newer DuckDB; upgrade fleetpulse ({text})")
    if damaged(error):
        return DamagedStore(_damage(path, text))
    return Unreachable(f"store {path}: cannot be used: {text}")


def damaged(error: Exception) -> bool:
    """Whether DuckDB found bytes in the file or its log that cannot be right."""
    text = str(error)
    return isinstance(error, duckdb.Error) and any(sign in text for sign in _SIGNS_OF_DAMAGE)


def _damage(path: Path, text: str) -> str:
    log = path.with_name(path.name + ".wal")
    if "WAL" in text:
        return (
            f"store {path}: its write-ahead log {log} is damaged ({text}). The file itself opens without it: stop the "
            f"pipeline, move {log.name} aside; what was committed since the last checkpoint is lost. {RECOVERY}"
        )
    return (
        f"store {path}: the file is damaged ({text}). Check the disk; stop the pipeline, move {path.name} and "
        f"{log.name} aside, put a copy back or start with a new store. {RECOVERY}"
    )
