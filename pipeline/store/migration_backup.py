"""The backup of a store before its schema is migrated, which is the way back to the version before."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from pipeline.model.errors import UsageError
from pipeline.runtime.long_start import LongStart
from pipeline.store.backup import BackupWriter, Checkpoints, Report, identify, log_path
from pipeline.store.backup_check import find_damage, read_manifest

log = logging.getLogger("fleetpulse.store")


def migration_backup(store: Path, version: int) -> Path:
    """Returns the folder of the backup that is made before a store of this schema version is migrated."""
    return store.with_name(f"{store.name}.schema-{version}")


def back_up_before_migration(
    source: Checkpoints, store: Path, version: int, free_bytes: int, start: LongStart
) -> BackupWriter:
    """Makes the backup of a store that is about to be migrated, and removes older ones; the caller closes the writer.

    One of the same store, unchanged since, is kept if each of its files has its checksum: an earlier start ended
    between backup and migration. Raises Unreachable, and Interrupted if the process is stopping.
    """

    def report(line: str) -> None:
        log.info("backup: %s", line)
        start.tell(f"schema {version} of the store is backed up before its migration: {line}")

    writer = BackupWriter(migration_backup(store, version), free_bytes, report=report, each_piece=start.tell)
    try:
        kept = _is_of(writer, store) and _is_sound(writer.target, report, start)
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
    """Whether the target names itself a backup of the store as it is now, which has no log after a checkpoint."""
    handle = writer.open_once(store)
    logged = log_path(store)
    try:
        origin = read_manifest(writer.target).get("origin")
    except UsageError:
        return False
    has_log = logged.exists() and logged.stat().st_size > 0
    return not has_log and origin == identify(handle)


def _is_sound(target: Path, report: Report, start: LongStart) -> bool:
    """Whether all files of the backup are there with their checksums: it becomes the only way back."""
    report(f"checksums of {target}, which an earlier start wrote")
    try:
        damage = find_damage(target, report, start.tell)
    except (OSError, UsageError) as error:
        damage = [str(error)]
    if damage:
        log.warning("backup: %s is damaged and is written again: %s (%d in all)", target, damage[0], len(damage))
    return not damage
