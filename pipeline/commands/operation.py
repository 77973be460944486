"""`fleetpulse backup` and `fleetpulse restore` (docs/backup.md), and `fleetpulse node` (docs/decommission.md).

A restore can be killed at any step: until it is complete, PATH.restoring exists, which names the backup and keeps a
pipeline from starting; the same command goes on.

    marked    PATH.restoring is written
    aside     the old store is in PATH.replaced, with --replace
    copied    history, state and file are there, the file under another name
    named     the file has its name
    done      the mark is removed
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from pipeline.commands import own_pipeline
from pipeline.config.sections import Config
from pipeline.http import client
from pipeline.incidents.outside_acts import add_act
from pipeline.model.errors import DamagedStore, NoAnswer, Refused, Unavailable, Unreachable, UsageError
from pipeline.model.records import from_iso
from pipeline.runtime import private_files
from pipeline.runtime.systemd import has_unit
from pipeline.store import backup, history_files
from pipeline.store.backup import STORE, SUMS, BackupWriter, Report, StoreMoment
from pipeline.store.backup_check import find_damage, read_manifest
from pipeline.store.database import open_file, restore_marker
from pipeline.store.detector_state import state_folder
from pipeline.store.schema import SCHEMA_VERSION
from pipeline.transport.segments import sync_folder

COLUMNS = ("folder", "time", "schema", "files", "bytes", "partitions")
NODE_COLUMNS = ("node", "since", "user", "reason", "returned", "returned_by", "incidents")
_BEGIN_S = 60.0
"""Time limit of the requests to the pipeline (s). Chosen: one commit, at most one checkpoint."""
_START_S, _ASK_AGAIN_S = 300.0, 2.0
"""Longest wait for a pipeline that starts or reloads, and time between questions (s). Chosen: on two busy cores a first
start takes 1 to 2 minutes; the pipeline names 2 s in Retry-After."""
T = TypeVar("T")
_UNNAMED = ".restored"
_HOUR = 3600.0


class ApiSource:
    """The store of a running pipeline. See `backup.Source`."""

    def __init__(self, config: Config, report: Report = lambda _: None) -> None:
        self._config, self._report = config, report

    def describe(self) -> StoreMoment:
        """See `backup.Source.describe`.

        Raises Unreachable without a pipeline or if it runs on another host, Refused if it has another store,
        Unavailable if it has not started in time.
        """
        moment = StoreMoment.from_json(self._wait_for(self._ask))
        own_pipeline.check_store(self._config, Path(moment.store), moment.site)
        if not os.access(moment.store, os.R_OK):
            raise Unreachable(
                f"{moment.store}: the store of {client.base_url(self._config)} cannot be read here; run the command on "
                "the host of the pipeline, as its user"
            )
        return moment

    def begin(self) -> StoreMoment:
        """See `backup.Source.begin`."""
        begin = lambda: client.post(self._config, "/api/v1/backup/begin", {}, _BEGIN_S)  # noqa: E731
        return StoreMoment.from_json(self._wait_for(begin))

    def _ask(self) -> Any:
        status, answer = client.get(self._config, "/api/v1/backup", _BEGIN_S)
        if status != 200:
            raise client.make_error(status, answer, client.base_url(self._config) + "/api/v1/backup")
        return answer

    def _wait_for(self, ask: Callable[[], T]) -> T:
        """Returns ask(), which is repeated while the pipeline starts. Raises Unavailable after _START_S."""
        end, told = time.monotonic() + _START_S, False
        while True:
            try:
                return ask()
            except Unavailable as error:
                if time.monotonic() > end:
                    raise Unavailable(f"{error}; it did not start within {_START_S:g} s") from error
                if not told:
                    self._report(f"the pipeline is not ready yet, waiting at most {_START_S:g} s: {error}")
                told = True
            time.sleep(_ASK_AGAIN_S)

    def end(self, moment: str) -> bool:
        """See `backup.Source.end`. False if the pipeline does not answer any more, or starts."""
        with contextlib.suppress(Unreachable, Unavailable):
            path = f"/api/v1/backup/{quote(moment, safe='')}/end"
            return bool(client.post(self._config, path, {}, _BEGIN_S)["held"])
        return False


def run_backup(config: Config, target: Path, report: Report, step: Report = lambda _: None) -> list[Mapping[str, Any]]:
    """Makes a backup of the running pipeline, or of its files if none runs; returns one row with COLUMNS."""
    if target.exists():
        raise UsageError(f"{target}: exists; expected a folder that does not: choose another name")
    writer = BackupWriter(target.absolute(), config.store.free_bytes, report=report, step=step)
    try:
        with _open_source(config, report) as source:
            moment = writer.write(source)
    finally:
        writer.close()
    return [_describe(target, read_manifest(target), moment.history)]


@contextlib.contextmanager
def _open_source(config: Config, report: Report) -> Iterator[backup.Source]:
    """Yields the running pipeline; without one, the files of its store, which no other process may open during it."""
    source = ApiSource(config, report)
    try:
        source.describe()
    except NoAnswer:
        raise
    except Unreachable as error:
        if not config.store.path.exists():
            raise Unreachable(f"{error}; and there is no store {config.store.path}") from error
        if "does not answer" not in str(error):
            raise
        with open_file(config.store.path, {"memory_limit": config.store.memory_limit}) as connection:
            report("no pipeline is running: the files are copied directly")
            now = lambda: time.time_ns() // 1000  # noqa: E731
            held = backup.Checkpoints(config.store.path, threading.RLock(), connection.cursor, config.site.name, now)
            yield held
            held.release()
        add_act(config.store.path, "backup", str(config.store.path), "without a pipeline", time.time_ns() // 1000)
        return
    yield source


def _describe(folder: Path, manifest: Mapping[str, Any], history: Any) -> Mapping[str, Any]:
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    parts = {"schema": manifest["schema_version"], "files": len(history), "partitions": len(manifest["offsets"])}
    return {"folder": str(folder), "time": manifest["time"], "bytes": size, **parts}


# --- restore ----------------------------------------------------------------------------------------------------------


def run_restore(
    config: Config, source: Path, replace: bool, report: Report, step: Report = lambda _: None
) -> list[Mapping[str, Any]]:
    """Makes a backup the store of this configuration; returns one row with COLUMNS. Raises UsageError, Refused, ..."""
    source, store = source.absolute(), config.store.path.absolute()
    manifest = read_manifest(source)
    if manifest["schema_version"] > SCHEMA_VERSION:
        raise UsageError(
            f"{source}: schema version {manifest['schema_version']}, expected at most {SCHEMA_VERSION}: a newer "
            "fleetpulse wrote it; upgrade"
        )
    mark = _open_mark(store, source, replace)
    _require_unused(store)
    report("checksums: every file is read")
    if damaged := find_damage(source, report):
        raise DamagedStore(f"{source}: damaged: {'; '.join(damaged[:3])}" + _and_more(damaged))
    private_files.make_folder(store.parent)
    _check_space(config, source, store)
    _write_mark(store, mark)
    step("marked")
    if not mark["aside"]:
        _move_aside(store)
        _write_mark(store, {**mark, "aside": True})
    step("aside")
    _place_files(source, store)
    step("copied")
    os.rename(store.with_name(store.name + _UNNAMED), store)
    sync_folder(store.parent)
    step("named")
    if config.pipeline.transport == "spool":
        _forget_cursors(config.spool.directory)
    restore_marker(store).unlink()
    sync_folder(store.parent)
    add_act(store, "restore", str(source), f"as of {manifest['time']}", time.time_ns() // 1000)
    private_files.give_to_owner(store)
    step("done")
    report(_what_next(config, manifest))
    return [_describe(source, manifest, manifest["history"])]


def _and_more(found: list[str]) -> str:
    return f" and {len(found) - 3} more" if len(found) > 3 else ""


def _parts(store: Path) -> tuple[Path, ...]:
    """The paths of a store: file, log, state and history."""
    return (store, backup.log_path(store), state_folder(store), history_files.history_folder(store))


def _replaced(store: Path) -> Path:
    return store.with_name(f"{store.name}.replaced")


def _open_mark(store: Path, source: Path, replace: bool) -> dict[str, Any]:
    """Returns the mark of an interrupted restore of this backup, else a new one.

    Raises Refused if a store is there, unless `replace`, and if an earlier one was moved aside.
    """
    marker = restore_marker(store)
    if marker.exists():
        with contextlib.suppress(ValueError):
            found: dict[str, Any] = json.loads(marker.read_text())
            if found["source"] != str(source):
                raise Refused(
                    f"{store}: the restore of {found['source']} was interrupted: restore that one, or remove {marker}"
                )
            return found
    there = [path for path in _parts(store) if path.exists() and (path.is_file() or any(path.iterdir()))]
    if there and not replace:
        raise Refused(f"{there[0]}: exists; nothing was changed. --replace moves it to {_replaced(store)} and restores")
    if there and _replaced(store).exists():
        raise Refused(f"{_replaced(store)}: exists, from an earlier restore; remove it first, it is never overwritten")
    return {"source": str(source), "aside": False}


def _require_unused(store: Path) -> None:
    """Raises Unreachable if a process has the store open."""
    with contextlib.suppress(FileNotFoundError), open(store, "rb+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise Unreachable(f"{store}: a pipeline has it open; stop it first") from error


def _check_space(config: Config, source: Path, store: Path) -> None:
    """Raises Unreachable if there is no space for the backup."""
    shared = source.stat().st_dev == store.parent.stat().st_dev
    size = sum(p.stat().st_size for p in source.rglob("*") if p.is_file() and not (shared and "history" in p.parts))
    free = shutil.disk_usage(store.parent).free - config.store.free_bytes
    if size > free:
        raise Unreachable(
            f"{store.parent}: {size >> 20} MiB needed, {max(0, free) >> 20} MiB free beside [store] free_bytes; free "
            "space, or set another [store] path"
        )


def _write_mark(store: Path, mark: Mapping[str, Any]) -> None:
    marker = restore_marker(store)
    fresh = marker.with_name(marker.name + ".new")
    with open(fresh, "w", opener=private_files.open_private) as file:
        file.write(json.dumps(mark))
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, marker)
    sync_folder(store.parent)


def _move_aside(store: Path) -> None:
    """Moves the old store to PATH.replaced; after a kill, its remains."""
    for path in _parts(store):
        if path.exists():
            private_files.make_folder(_replaced(store))
            os.rename(path, _replaced(store) / path.name)
    sync_folder(store.parent)


def _place_files(source: Path, store: Path) -> None:
    """Copies or links the files of a backup, the store's under another name. Replaces those of an interrupted run.

    Only those with a checksum, which was compared: others in the folder are not of the backup.
    """
    names = {line.partition("  ")[2] for line in (source / SUMS).read_text().splitlines()}
    for folder, name in ((history_files.history_folder(store), "history"), (state_folder(store), "state")):
        shutil.rmtree(folder, ignore_errors=True)
        for path in sorted((source / name).rglob("*")):
            if path.is_file() and str(path.relative_to(source)) in names:
                _place(path, folder / path.relative_to(source / name), link=name == "history")
        for parent, _, _ in os.walk(folder):
            sync_folder(Path(parent))
    _place(source / STORE, store.with_name(store.name + _UNNAMED), link=False)
    sync_folder(store.parent)


def _place(source: Path, target: Path, link: bool) -> None:
    """Copies a file to the disk. link: it never changes, so on one disk both names may share it."""
    private_files.make_folder(target.parent)
    target.unlink(missing_ok=True)
    if link:
        with contextlib.suppress(OSError):
            return os.link(source, target)
    with open(source, "rb") as data, open(target, "wb", opener=private_files.open_private) as file:
        shutil.copyfileobj(data, file, 1 << 20)
        file.flush()
        os.fsync(file.fileno())
    return None


def _forget_cursors(spools: Path) -> None:
    """Removes the cursors of the lost store: agents keep what it had read, as far as it is still there."""
    for cursor in spools.glob("*/*/*/*.cursor"):
        cursor.unlink(missing_ok=True)


def _what_next(config: Config, manifest: Mapping[str, Any]) -> str:
    age = time.time() - from_iso(manifest["time"]) / 1e6
    older = manifest["schema_version"] < SCHEMA_VERSION
    kept = (
        f"Kafka keeps ([kafka] retention_hours = {config.kafka.retention_hours:g})"
        if config.pipeline.transport == "kafka"
        else "the spools still have"
    )
    start = "systemctl start fleetpulse-pipeline" if has_unit("pipeline") else "fleetpulse pipeline"
    return (
        f"restored as of {manifest['time']} ({age / _HOUR:.1f} h ago). "
        + (_say_migrates(manifest["schema_version"]) if older else "")
        + f"Start the pipeline: {start}. "
        + f"It reads {len(manifest['offsets'])} partitions on from the recorded offsets: what {kept} is stored again, "
        "once; the rest is counted in the table gaps. Alerts that waited then are sent; acknowledgements and mutes "
        "since then are lost."
    )


def _say_migrates(schema: int) -> str:
    return (
        f"To go back to the version that wrote schema {schema}, install that version before you start the pipeline: "
        f"this version migrates the store to schema {SCHEMA_VERSION} when it starts. "
    )


# --- nodes ------------------------------------------------------------------------------------------------------------


def run_node(config: Config, given: argparse.Namespace) -> list[Mapping[str, Any]]:
    """Returns decommissioned nodes (all: also returned ones), or the one that was decommissioned or returned."""
    own_pipeline.check_site(config)
    if given.verb in ("decommission", "return"):
        path = f"/api/v1/nodes/{quote(given.node, safe='')}/{given.verb}"
        body = {"reason": given.reason} if given.verb == "decommission" else {}
        return [client.post(config, path, body, _BEGIN_S)]
    status, answer = client.get(config, "/api/v1/nodes/decommissioned")
    if status != 200:
        raise client.make_error(status, answer, client.base_url(config) + "/api/v1/nodes/decommissioned")
    return [row for row in answer["nodes"] if getattr(given, "all", False) or row["returned"] is None]
