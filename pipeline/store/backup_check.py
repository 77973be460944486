"""The check of a backup: whether each of its files is there and has its checksum."""

from __future__ import annotations

import json
import os
import re
import time as clocks
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline.model.errors import UsageError
from pipeline.store.backup import FORMAT, MANIFEST, PARTIAL, STORE, SUMS, Report, checksum

REPORT_EVERY_S = 5.0
"""Time between two reports of progress (s). Chosen: as while a backup is written."""
_SUM = re.compile(r"[0-9a-f]{64}  [^/].*")


def read_manifest(folder: Path) -> Mapping[str, Any]:
    """Returns the manifest of a complete backup. Raises UsageError if the folder is none."""
    try:
        found = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError as error:
        unfinished = folder.name.endswith(PARTIAL) or folder.with_name(folder.name + PARTIAL).exists()
        what = "was not completed: run fleetpulse backup again" if unfinished else "is no backup"
        raise UsageError(f"{folder}: {what} (it has no {MANIFEST})") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder / MANIFEST}: cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{folder / MANIFEST}: is a JSON {type(found).__name__}, expected an object")
    if found.get("format") != FORMAT:
        raise UsageError(f"{folder}: format {found.get('format')!r}, expected {FORMAT}: upgrade fleetpulse")
    return found


def find_damage(
    folder: Path,
    report: Report = lambda _: None,
    each_piece: Callable[[], None] = lambda: None,
    monotonic: Callable[[], float] = clocks.monotonic,
) -> list[str]:
    """Returns a line for each file of a backup that is missing or differs from its checksum, and for wrong lines.

    report: progress, for people.  each_piece: called for each MiB read; what it raises ends the check.
    """
    lines = (folder / SUMS).read_text(errors="replace").splitlines() if (folder / SUMS).exists() else []
    names = {line.partition("  ")[2] for line in lines}
    found = [f"{name}: not in {SUMS}" for name in _list_named(folder) if name not in names]
    read, reported = 0, monotonic()

    def count_piece() -> None:
        nonlocal read, reported
        each_piece()
        read += 1
        if monotonic() - reported >= REPORT_EVERY_S:
            reported = monotonic()
            report(f"checksums: {number} of {len(lines)} files, {read} MiB")

    for number, line in enumerate(lines, 1):
        digest, _, name = line.partition("  ")
        if _SUM.fullmatch(line) is None or ".." in Path(name).parts:
            found.append(
                f"{SUMS}: line {number} is {line[:80]!r}, expected a checksum, two spaces and a file of the backup"
            )
            continue
        try:
            with open(folder / name, "rb") as file:
                if checksum(file.fileno(), os.fstat(file.fileno()).st_size, count_piece) != digest:
                    found.append(f"{name}: differs from its checksum")
        except OSError as error:
            found.append(f"{name}: {error.strerror}")
    return found


def _list_named(folder: Path) -> list[str]:
    """Returns the files that a backup must have by its manifest. Raises UsageError if it is none."""
    manifest = read_manifest(folder)
    state = [f"state/{manifest['state']}"] if manifest.get("state") else []
    try:
        history = [f"history/{path}" for path, _ in manifest.get("history", ())]
    except (TypeError, ValueError) as error:
        raise UsageError(f"{folder / MANIFEST}: history: {error}; expected pairs of a path and its bytes") from error
    return [MANIFEST, STORE, *state, *history]
