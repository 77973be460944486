"""Opening the store's file: what lies there is looked at first, so that a wrong path is not taken for damage."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path

import duckdb

from pipeline.model.errors import DamagedStore, UsageError
from pipeline.store.faults import RECOVERY, explained

MAGIC, MAGIC_AT = b"DUCK", 8
_HEAD = 64  # bytes that tell what a file is
_FOREIGN = {b"SQLite format 3\0": "an SQLite database", b"PAR1": "a Parquet file", b"\x1f\x8b": "a gzip file"}


def open_file(path: Path, settings: Mapping[str, str], read_only: bool = False) -> duckdb.DuckDBPyConnection:
    """A connection to the store's file; `read_only` changes nothing. Raises UsageError, or what faults.py lists."""
    _check_file(path)
    try:
        return duckdb.connect(str(path), read_only=read_only, config=dict(settings))
    except duckdb.Error as error:
        raise explained(path, error) from error


def _check_file(path: Path) -> None:
    """Raises UsageError if what lies at `path` cannot be a store of ours; an absent file can."""
    where = f"[store] path = '{path}'"
    try:
        if stat.S_ISFIFO(path.stat().st_mode):
            raise UsageError(f"{where}: is a pipe, and opening it would wait for ever; set another path")
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(
            f"{where}: cannot be read: {error.strerror}; expected a file that this user may read and write"
        ) from error
    log = path.with_name(path.name + ".wal")
    if not head and log.exists():
        raise DamagedStore(
            f"store {path}: the file is empty although its log {log} is there, so it was cut off. Check the disk; move "
            f"{path.name} and {log.name} aside, put a copy back or start with a new store. {RECOVERY}"
        )
    if not head:
        raise UsageError(f"{where}: is empty: it holds nothing, remove it: rm {path}")
    if head[MAGIC_AT : MAGIC_AT + len(MAGIC)] == MAGIC:
        return
    kind = next((name for magic, name in _FOREIGN.items() if head.startswith(magic)), None)
    found = f"is {kind}" if kind else f"is not a DuckDB file (it begins with {head[:16]!r})"
    raise UsageError(f"{where}: {found}: set another path; if it was the store, it is damaged: {RECOVERY}")
