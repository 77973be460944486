"""`fleetpulse doctor`: numbered checks, each ok, warn or fail, with what it means and the command that mends it.

A check is a function Config -> Check (or several), and one line in CHECKS. None changes anything; with Kafka, two tiny
records go into a topic that is there for this alone.

What `fleetpulse doctor` finds in the spool: a slow disk, damaged marks, files that belong elsewhere.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.commands.checks import Check
from pipeline.config.sections import Config
from pipeline.http import client
from pipeline.model.errors import FleetpulseError, NoAnswer, Unreachable
from pipeline.notify import delivery
from pipeline.runtime import private_files
from pipeline.transport import segments
from pipeline.transport.salvage import SegmentCheck

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
    strays = SegmentCheck()
    held = strays.list_segments(folder, segments.parse_epoch(folder))
    if segments.read_mark(folder) is None and (held or strays.found):
        yield f"{folder / 'mark'}: {'damaged' if (folder / 'mark').exists() else 'missing'}"
    for path, why in sorted(strays.found.items()):
        yield f"{path}: {why}"


LEAST_PYTHON = (3, 11)
PACKAGES = ("agents", "pipeline", "detectors", "dashboards")
DISK_FLOOR = 1 << 30
"""Bytes below which a disk is called nearly full: about an hour of hot telemetry of 1,000 nodes. Chosen."""
VOLATILE = ("tmpfs", "ramfs")
REMOTE = ("nfs", "lustre", "beegfs", "ceph", "gpfs", "cifs", "fuse.", "9p", "wekafs")
"""Beginnings of names of file systems that another host serves, or a process."""
SPOOL_ELSEWHERE = "[spool] directory = a folder on a local disk, such as '/var/lib/fleetpulse/spool'"
LIMIT_S = 60.0
"""Longest time of one check; chosen: that of the brokers asks each of them for some seconds."""
Examiner = Callable[[Config], "Check | list[Check]"]
COLUMNS = ("number", "check", "state", "found", "meaning", "mend")


def python_version(config: Config, version: tuple[int, ...] = sys.version_info[:3]) -> Check:
    """Python 3.11 or newer runs this."""
    found = ".".join(map(str, version))
    if version[:2] >= LEAST_PYTHON:
        return Check("python", "ok", found)
    return Check("python", "fail", found, "Fleetpulse needs Python 3.11 or newer", "make install PYTHON=python3.11")


def configuration(config: Config) -> Check:
    """The file was read already, otherwise no check would run; says which one is in force."""
    return Check("configuration", "ok", config.source)


def package_names(config: Config, claims: Mapping[str, Sequence[str]] | None = None) -> Check:
    """No other distribution installed a top-level package under one of our four names."""
    owners = importlib.metadata.packages_distributions() if claims is None else claims
    foreign = [f"{name} (of {d})" for name in PACKAGES for d in owners.get(name, ()) if d != "fleetpulse"]
    if not foreign:
        return Check("package names", "ok", "no other distribution claims " + ", ".join(PACKAGES))
    meaning = "another distribution installed a package of the same name: one of the two overwrites the other"
    return Check("package names", "fail", ", ".join(sorted(set(foreign))), meaning, "make clean install")


def store(config: Config) -> Check:
    """The store's file can be written, or a running pipeline has it."""
    if importlib.util.find_spec("duckdb") is None:
        return Check("store", "info", "the pipeline is not installed here (extra 'pipeline'): a node needs no store")
    path = config.store.path
    place = _writable(path.parent)
    if place is not None:
        meaning = "the pipeline could not keep anything"
        return Check("store", "fail", place, meaning, f"mkdir -p {path.parent} && chown $USER {path.parent}")
    if not path.exists():
        return Check("store", "warn", f"{path} is not there yet", "nothing was ever stored here", "fleetpulse init")
    try:
        holder = _holder(path)
    except FleetpulseError as error:
        meaning = "the pipeline does not start with this file"
        return Check("store", "fail", str(error), meaning, f"read docs/store.md, section Recovery; ls -l {path}*")
    return Check("store", "ok", f"{path}, {path.stat().st_size >> 20} MiB{f', held by {holder}' if holder else ''}")


def spool(config: Config) -> Check:
    """The spool's folder can be written."""
    directory = config.spool.directory
    place = _writable(directory)
    if place is not None:
        meaning = "the agent could not keep what is not yet stored"
        return Check("spool", "fail", place, meaning, f"mkdir -p {directory} && chown $USER {directory}")
    if not directory.exists():
        return Check("spool", "warn", f"{directory} is not there yet", "no agent ever ran here", "fleetpulse init")
    nodes = sum(1 for entry in directory.iterdir() if entry.is_dir())
    return Check("spool", "ok", f"{directory}, {nodes} node{'' if nodes == 1 else 's'}")


def disk(config: Config, floor: int = DISK_FLOOR) -> Check:
    """Store and spool have room to grow."""
    places = {_existing(config.store.path.parent), _existing(config.spool.directory)}
    free, place = min((shutil.disk_usage(p).free, p) for p in places)
    found = f"{free / (1 << 30):.1f} GiB free at {place}"
    if free >= floor:
        return Check("disk", "ok", found)
    meaning = f"below {floor / (1 << 30):.1f} GiB: the spool will drop its oldest and the pipeline is not ready"
    return Check("disk", "fail", found, meaning, f"df -h {place}; or lower [store] hot_hours, [spool] max_bytes")


def permissions(config: Config) -> Check:
    """State is closed to other users of this host."""
    found = private_files.open_state(private_files.state_paths(config))
    if not found:
        return Check("permissions", "ok", "state is closed to other users")
    meaning = "other users of this host may read telemetry, or change what is stored"
    text = f"open to other users: {private_files.told(found)}"
    return Check("permissions", "fail", text, meaning, private_files.mend(found))


def secrets(config: Config) -> Check:
    """Files with tokens, passwords and keys are closed to other users."""
    files = private_files.secret_files(config)
    found = private_files.open_secrets(config)
    if found:
        meaning = "who reads one of them is taken for us"
        paths = " ".join(str(path) for key, path in files.items() if any(key in text for text in found))
        return Check("secrets", "warn", "; ".join(found), meaning, f"chmod 600 {paths}")
    return Check("secrets", "ok", f"{len(files)} files, closed to other users" if files else "none configured")


def spool_disk(config: Config, mounts: Path = Path("/proc/self/mounts")) -> Check:
    """The spool lies on a disk of its own host: memory forgets it at the next boot, and another host may hang."""
    place = _existing(config.spool.directory).resolve()
    try:
        lines = [line.split(" ") for line in mounts.read_text().splitlines()]
    except OSError:
        return Check("spool's disk", "info", f"{place}: no {mounts} here, so its file system is unknown")
    around = [(len(line[1]), i, line[2]) for i, line in enumerate(lines) if place.is_relative_to(_unescaped(line[1]))]
    kind = max(around)[2] if around else "unknown"
    found = f"{place} is {kind}"
    if kind in VOLATILE:
        return Check("spool's disk", "warn", found, "what is not yet stored is lost at a reboot", SPOOL_ELSEWHERE)
    if kind.startswith(REMOTE):
        return Check("spool's disk", "warn", found, "a server that hangs would stop the agent", SPOOL_ELSEWHERE)
    return Check("spool's disk", "ok", found)


def transport(config: Config) -> Check | list[Check]:
    """What the transport needs: the spool nothing, Kafka brokers that let us in, topics, and clocks that agree."""
    if config.pipeline.transport == "spool":
        return Check("transport", "ok", "spool: no broker needed")
    from pipeline.commands import doctor_kafka  # loads the client, which the spool does not need

    return doctor_kafka.checks(config)


def api(config: Config) -> Check:
    """A pipeline answers on [api], and is ready."""
    try:
        status, answer = client.get(config, "/readyz")
    except NoAnswer as error:
        meaning = "a pipeline listens and does not answer: telemetry is not judged and nobody is alerted"
        mend = "ps -o pid,stat,cmd -C fleetpulse  # T: kill -CONT PID; else restart the pipeline"
        return Check("api", "fail", str(error), meaning, mend, unreachable=True)
    except Unreachable as error:
        return Check("api", "warn", str(error).partition(";")[0], "no pipeline runs here", "fleetpulse pipeline")
    if status == 200:
        return Check("api", "ok", f"{client.base_url(config)} is ready")
    reasons = answer.get("reasons", []) if isinstance(answer, dict) else []
    found = "; ".join(map(str, reasons)) or f"HTTP {status}"
    meaning = "a pipeline runs but does not take in telemetry"
    return Check("api", "fail", found, meaning, f"curl {client.base_url(config)}/readyz")


def webhooks(config: Config) -> Check:
    """Every receiver's address is one that can be posted to. Nothing is sent."""
    hooks = config.notify.webhooks
    bad = [f"{hook.name}: {why}" for hook in hooks if (why := delivery.refusal(hook))]
    if bad:
        meaning = "alerts to this receiver would go nowhere"
        return Check("webhooks", "fail", "; ".join(bad), meaning, "[[notify.webhooks]] url = 'https://HOST/PATH'")
    if not hooks:
        return Check("webhooks", "warn", "none", "incidents show on the dashboard only", "add [[notify.webhooks]]")
    return Check("webhooks", "ok", ", ".join(hook.name for hook in hooks))


CHECKS: tuple[Examiner, ...] = (
    configuration,
    python_version,
    package_names,
    store,
    spool,
    permissions,
    secrets,
    spool_files,
    disk,
    spool_disk,
    disk_speed,
    transport,
    api,
    webhooks,
)


def examine(config: Config, checks: Sequence[Examiner] = CHECKS, limit_s: float = LIMIT_S) -> list[Check]:
    """All checks in order. One that breaks, or does not end within `limit_s`, is itself a fail."""
    found: list[Check] = []
    for check in checks:
        made: list[Check] = []
        thread = threading.Thread(target=_examined, args=(check, config, made), daemon=True)
        thread.start()
        thread.join(limit_s)
        hangs = f"no end within {limit_s:g} s: a disk or server does not answer"
        found += made or [Check(check.__name__, "fail", hangs, "the check itself could not be made")]
    return found


def _examined(check: Examiner, config: Config, made: list[Check]) -> None:
    try:
        result = check(config)
    except (OSError, FleetpulseError) as error:
        result = Check(check.__name__, "fail", str(error), "the check itself could not be made")
    except Exception as error:  # noqa: BLE001 - in a thread it would be lost: it is told, as a fault of ours
        result = Check(check.__name__, "fail", f"{type(error).__name__}: {error}", "the check itself is at fault")
    made.extend([result] if isinstance(result, Check) else result)


def exit_code(checks: Sequence[Check]) -> int:
    """3 if a dependency is unreachable, else 1 if a check failed, else 0."""
    return 3 if any(c.unreachable for c in checks) else int(any(c.state == "fail" for c in checks))


def as_rows(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """The checks numbered from 1, as rows of COLUMNS."""
    return [
        {"number": i, "check": c.name, "state": c.state, "found": c.found, "meaning": c.meaning, "mend": c.mend}
        for i, c in enumerate(checks, 1)
    ]


def as_text(checks: Sequence[Check]) -> str:
    """One line per check; below those that are not ok what it means and the mend."""
    lines = []
    for i, c in enumerate(checks, 1):
        lines.append(f"{i:2d} {c.state:4s} {c.name}: {c.found}")
        lines.extend(f"        {label}: {text}" for label, text in (("means", c.meaning), ("mend", c.mend)) if text)
    return "\n".join(lines) + "\n"


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())


def _unescaped(point: str) -> Path:
    """A mount point as /proc/mounts writes it: blanks and backslashes are octal, getmntent(3)."""
    return Path(re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), point))


def _writable(folder: Path) -> str | None:
    """None if the folder can be written, or be made; else what stands against it."""
    place = _existing(folder)
    if not place.is_dir():
        return f"{place} is no folder"
    return None if os.access(place, os.W_OK | os.X_OK) else f"{place} cannot be written"


def _holder(path: Path) -> str | None:
    """The process that has the store open for writing; None if it is free, sound and of a version that we read.

    Opens it for reading alone, which changes neither the file nor its log. Raises FleetpulseError if it is not sound.
    """
    import duckdb

    from pipeline.store import database, schema

    try:
        with database.open_file(path, {"enable_external_access": "false"}, read_only=True) as connection:
            schema.check_version(connection)
    except duckdb.Error as error:
        raise database.explain_error(path, error) from error
    except Unreachable as error:
        if "lock on file" not in str(error):
            raise
        owner = re.search(r"PID (\d+)", str(error))
        return f"process {owner[1]}" if owner else "another process"
    return None
