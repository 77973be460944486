"""`fleetpulse support`: an archive for those who help: versions, configuration, checks, states, logs; no secrets.

What every file of secrets contains is replaced wherever it stands, addresses lose all but the host, and no telemetry
is in it. What cannot be read is a line that says why: the archive is for those who look for a fault.
"""

from __future__ import annotations

import functools
import importlib.metadata
import io
import itertools
import json
import os
import platform
import shutil
import stat
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pipeline.commands.arguments import read_version
from pipeline.commands.support_salvage import salvage_config
from pipeline.commands.support_secrets import find_secrets, hide, list_unread
from pipeline.commands.support_units import collect_units
from pipeline.config.addresses import hide_addresses
from pipeline.config.changes import flatten
from pipeline.config.files import DROP_INS, list_files, read_table
from pipeline.config.sections import Config, load_config
from pipeline.config.toml_text import write_toml
from pipeline.http import client
from pipeline.model.errors import ConfigError, FleetpulseError, UsageError

UNITS = ("agent", "gateway", "pipeline", "dashboard", "executor")
LOG_LINES, LOG_S = "2000", 60.0
"""Lines of each unit's log and the time they may take (s). Chosen."""
MAX_STATUS = 1 << 20
"""Bytes of a status file that are read. Chosen: an agent's has a few KiB."""
ANSWERS = {"readyz": "/readyz", "detectors": "/api/v1/detectors", "quality": "/api/v1/quality"}


def write_with_any(given: str | None, target: Path, doctor: str) -> tuple[list[str], str]:
    """Writes the archive, also with a configuration that is wrong: with the error, and its valid sections.

    Returns the names in it, and what to say before the message that it is written. Raises ConfigError if the given file
    does not exist.
    """
    try:
        config = load_config(given)
        return write_support(config, target, doctor), _describe_unread(list_unread(config))
    except ConfigError as error:
        if given and not os.path.lexists(given):
            raise
        salvage = salvage_config(given, os.environ)
        secrets = find_secrets(salvage.config, salvage)
        unread = list_unread(salvage.config, salvage)
        names = write_support(salvage.config, target, doctor, secrets, str(error), unread)
        said = f"the configuration is wrong, and the archive says so: {hide(str(error), secrets)}\nfleetpulse: "
        return names, said + _describe_unread(unread)


def _describe_unread(unread: list[str]) -> str:
    """Returns what to say of files of secrets that this user may not read."""
    if not unread:
        return ""
    return (
        f"warning: {len(unread)} files of secrets cannot be read by this user, so nothing of them is hidden in logs "
        f"and answers ({unread[0]}{', ...' if len(unread) > 1 else ''}); run it as root\nfleetpulse: "
    )


def write_support(
    config: Config,
    target: Path,
    doctor: str,
    secrets: list[str] | None = None,
    wrong: str = "",
    unread: list[str] | None = None,
) -> list[str]:
    """Writes the archive, readable for its owner alone; returns the names in it. doctor: its checks as JSON.

    It gets its name when it is complete. secrets: those of the configuration if not given.   wrong: the faults of
    the configuration.   unread: files of secrets that cannot be read, likewise; the archive names them.
    Raises UsageError if the file exists or cannot be written.
    """
    secrets = find_secrets(config) if secrets is None else secrets
    names = []
    parts = [("configuration-error.txt", f"{wrong}\n")] if wrong else []
    if unread := list_unread(config) if unread is None else unread:
        parts.append(("secrets-not-hidden.txt", "".join(f"{line}\n" for line in unread)))
    try:
        if os.path.lexists(target):
            raise UsageError(f"{target}: exists; expected a new file")
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
            try:
                with tarfile.open(fileobj=file, mode="w:gz") as archive:
                    for name, text in itertools.chain(parts, collect(config, doctor)):
                        content = hide(text, secrets).encode(errors="replace")
                        entry = tarfile.TarInfo(f"fleetpulse-support/{name}")
                        entry.size, entry.mtime, entry.mode = len(content), int(time.time()), 0o600
                        archive.addfile(entry, io.BytesIO(content))
                        names.append(name)
                file.flush()
                os.rename(file.name, target)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise UsageError(f"{target}: cannot be written: {error.strerror}") from error
    return names


def collect(config: Config, doctor: str) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of each file of the archive. Raises no OSError: a text says what could not be read."""
    yield "version.txt", f"fleetpulse {read_version()}\n"
    yield "system.txt", tell(describe_system)
    yield "packages.txt", tell(list_packages)
    values = {key: hide_addresses(value, key) for key, value in flatten(config)}
    yield "configuration.json", json.dumps(values, indent=1, default=str)
    yield from collect_files(config)
    yield from collect_units()
    yield "doctor.json", doctor
    folders = (config.spool.directory, config.store.path.parent)
    yield "folders.txt", "".join(tell(functools.partial(describe_folder, folder)) for folder in folders)
    try:
        found = sorted(config.spool.directory.glob("**/*status.json"))
    except OSError as error:
        found = []
        yield "status/not-listed.txt", f"{config.spool.directory}: cannot be listed: {error.strerror}\n"
    for path in found:
        yield f"status/{path.parent.name}-{path.name}", tell(functools.partial(read_status, path))
    for name, route in ANSWERS.items():
        yield f"api/{name}.json", ask(config, route)
    if shutil.which("journalctl"):
        for unit in UNITS:
            yield f"log/{unit}.txt", tell(functools.partial(read_log, unit))


def collect_files(config: Config) -> Iterator[tuple[str, str]]:
    """Yields (name, TOML) of the configuration's files, without comments, which may have old secrets."""
    path = Path(config.source)
    if not path.exists():  # the defaults
        return
    try:
        paths = list_files(path)
    except UsageError as error:
        paths = [path]
        yield f"files/{DROP_INS}.txt", f"{error}\n"
    for one in paths:
        name = one.name if one == path else f"{DROP_INS}/{one.name}"
        try:
            text = write_toml(hide_addresses(read_table(one)))
        except UsageError as error:
            text = f"# {error}\n"
        yield f"files/{name}", text


def tell(read: Callable[[], str]) -> str:
    """Returns what `read` returns, or why it cannot be read."""
    try:
        return read()
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}cannot be read: {error.strerror or error}\n"


def list_packages() -> str:
    """Returns name and version of each installed Python package."""
    return "".join(sorted(f"{found.name} {found.version}\n" for found in importlib.metadata.distributions()))


def read_status(path: Path) -> str:
    """Returns the text of a status file; what is no regular file, such as a FIFO, is named. Raises OSError."""
    if not stat.S_ISREG(path.stat().st_mode):
        return f"{path}: is no regular file\n"
    with open(path, errors="replace") as file:
        return file.read(MAX_STATUS)


def read_log(unit: str) -> str:
    """Returns the last lines of a unit's log, or what journalctl said instead. Raises OSError."""
    words = ["journalctl", "--no-pager", "--lines", LOG_LINES, "--unit", f"fleetpulse-{unit}"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=LOG_S)
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode(errors="replace")  # bytes, also where text was asked for
        return f"{said}\njournalctl took more than {LOG_S:g} s and was ended; try it: {' '.join(words)}\n"
    return done.stdout or done.stderr


def describe_system() -> str:
    """Returns kernel, distribution, glibc, Python, processors and memory."""
    release = Path("/etc/os-release")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts: dict[str, Any] = {
        "kernel": platform.release(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "memory_bytes": memory,
    }
    head = "".join(f"{key}: {value}\n" for key, value in facts.items())
    return head + (release.read_text(errors="replace") if release.exists() else "")


def describe_folder(folder: Path) -> str:
    """Returns names, sizes and modes of the files below a folder, without their content."""
    lines = [f"{folder}: {'' if folder.is_dir() else 'does not exist'}\n"]
    for path in sorted(folder.rglob("*"))[:5000] if folder.is_dir() else ():
        try:
            found = path.lstat()
        except OSError:
            continue
        lines.append(f"{found.st_mode:o} {found.st_size:>14} {path}\n")
    return "".join(lines)


def ask(config: Config, route: str) -> str:
    """Returns what the pipeline's API answers, or why it does not."""
    try:
        return json.dumps(client.get(config, route, 10.0)[1], indent=1)
    except FleetpulseError as error:
        return f"no answer: {error}\n"
