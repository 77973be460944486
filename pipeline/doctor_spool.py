"""What `fleetpulse doctor` finds in the spool: a slow disk, damaged marks, files that belong elsewhere."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pipeline.checks import Check
from pipeline.config.sections import Config
from pipeline.transport import segments
from pipeline.transport.salvage import Strays

SLOW_S = 1.0
"""A disk that takes so long for 4 KiB is slow; chosen: the agent writes once a second, a sound disk takes some ms."""
ANSWER_S = 10.0
"""Longest wait for the disk; chosen."""
SHOWN = 3
"""Faults that are named; the others are counted."""


def disk_speed(config: Config, answer_s: float = ANSWER_S, synced: Callable[[int], object] = os.fsync) -> Check:
    """The spool's disk takes 4 KiB and says that they are durable. The file is removed again."""
    directory = config.spool.directory
    took: list[float | OSError] = []
    if not directory.is_dir():
        return Check("spool's speed", "info", f"{directory} is not there yet")
    thread = threading.Thread(target=_measure, args=(directory, took, synced), daemon=True)
    thread.start()
    thread.join(answer_s)
    meaning = "telemetry waits in the agent's memory, and is lost when that is full"
    mend = f"iostat -x 1; another disk: [spool] directory; what waits: [spool] queue_bytes ({config.spool.queue_bytes})"
    if not took:
        return Check("spool's speed", "fail", f"{directory}: no answer within {answer_s:g} s", meaning, mend)
    if isinstance(took[0], OSError):
        return Check("spool's speed", "fail", f"{directory}: {took[0].strerror}", meaning, mend)
    found = f"{directory}: 4 KiB durable in {took[0] * 1000:.0f} ms"
    if took[0] >= SLOW_S:
        return Check("spool's speed", "warn", found, meaning, mend)
    return Check("spool's speed", "ok", found)


def _measure(directory: Path, took: list[float | OSError], synced: Callable[[int], object]) -> None:
    path, began = directory / f".doctor-{os.getpid()}", time.monotonic()
    try:
        with open(path, "wb", buffering=0) as file:
            file.write(bytes(4096))
            synced(file.fileno())
        took.append(time.monotonic() - began)
    except OSError as error:
        took.append(error)
    with contextlib.suppress(OSError):
        path.unlink()


def spool_files(config: Config) -> Check:
    """Every stream has a sound mark, and no file that belongs elsewhere."""
    found = [fault for folder in _folders(config.spool.directory) for fault in _faults(folder)]
    if not found:
        return Check("spool's files", "ok", "marks and names of segments are sound")
    more = f" (and {len(found) - SHOWN} more)" if len(found) > SHOWN else ""
    return Check(
        "spool's files",
        "warn",
        "; ".join(found[:SHOWN]) + more,
        "what is sound is read all the same; what is not counts as a gap",
        "start the agent, which writes a new mark; move files that belong elsewhere out of the folder",
    )


def _folders(directory: Path) -> Iterator[Path]:
    """The newest epoch of each stream, which is the one that is written."""
    for home in sorted(directory.glob("*/*/")) if directory.is_dir() else ():
        yield from segments.epoch_folders(home)[-1:]


def _faults(folder: Path) -> Iterator[str]:
    strays = Strays()
    held = strays.segments(folder, segments.epoch_of(folder))
    if segments.read_mark(folder) is None and (held or strays.found):
        yield f"{folder / 'mark'}: {'damaged' if (folder / 'mark').exists() else 'missing'}"
    for path, why in sorted(strays.found.items()):
        yield f"{path}: {why}"
