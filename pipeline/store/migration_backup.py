"""The backup of a store before its schema is migrated, which is the way back to the version before."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

from pipeline.runtime.long_start import LongStart
from pipeline.store.backup import MANIFEST, STORE, BackupWriter, Checkpoints, identify, log_path

log = logging.getLogger("fleetpulse.store")


def migration_backup(store: Path, version: int) -> Path:
    """Returns the folder of the backup that is made before a store of this schema version is migrated."""
    return store.with_name(f"{store.name}.schema-{version}")


def back_up_before_migration(
    source: Checkpoints, store: Path, version: int, free_bytes: int, start: LongStart
) -> BackupWriter:
    """Makes the backup of a store that is about to be migrated, and removes older ones; the caller closes the writer.

    One of the same store, unchanged since, is kept: an earlier start ended between backup and migration. Raises
    Unreachable, and Interrupted if the process is stopping.
    """

    def report(line: str) -> None:
        log.info("backup: %s", line)
        start.tell(f"schema {version} of the store is backed up before its migration: {line}")

    writer = BackupWriter(migration_backup(store, version), free_bytes, report=report, each_piece=start.tell)
    try:
        kept = _is_of(writer, store)
        for old in store.parent.glob(f"{store.name}.schema-*"):
            if old != writer.folder and not (kept and old == writer.target):
                shutil.rmtree(old)
        if kept:
            log.info("backup: %s is complete, and the store has not changed since", writer.target)
        else:
            writer.write(source)
    except BaseException:
        writer.close()
        raise
    return writer


def _is_of(writer: BackupWriter, store: Path) -> bool:
    """Whether the target is a complete backup of the store as it is now, which has no log after a checkpoint."""
    handle = writer.open_once(store)
    logged = log_path(store)
    try:
        origin = json.loads((writer.target / MANIFEST).read_text()).get("origin")
    except (OSError, ValueError):
        return False
    has_log = logged.exists() and logged.stat().st_size > 0
    return not has_log and origin == identify(handle) and (writer.target / STORE).is_file()
