"""`fleetpulse support`: an archive for those who help: versions, configuration, checks, states, logs; no secrets.

What every file of secrets contains is replaced wherever it stands, addresses lose all but the host, and no telemetry
is in it.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import platform
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from pipeline.commands.arguments import read_version
from pipeline.config.addresses import HIDDEN, hide_addresses, hide_in_text
from pipeline.config.changes import flatten
from pipeline.config.sections import Config
from pipeline.http import client
from pipeline.model.errors import FleetpulseError, UsageError
from pipeline.runtime.private_files import list_secret_files, open_private

UNITS = ("agent", "gateway", "pipeline", "dashboard", "executor")
LOG_LINES = "2000"
ANSWERS = {"readyz": "/readyz", "detectors": "/api/v1/detectors", "quality": "/api/v1/quality"}
MIN_SECRET = 6
"""Shortest text that is replaced (characters): shorter ones occur in any text. Chosen."""


def write_support(config: Config, target: Path, doctor: str) -> list[str]:
    """Writes the archive, readable for its owner alone; returns the names in it. doctor: its checks as JSON.

    Raises UsageError if the file exists or cannot be written.
    """
    secrets = find_secrets(config)
    names = []
    try:
        with open(target, "xb", opener=open_private) as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            for name, text in collect(config, doctor):
                content = hide(text, secrets).encode()
                entry = tarfile.TarInfo(f"fleetpulse-support/{name}")
                entry.size, entry.mtime, entry.mode = len(content), int(time.time()), 0o600
                archive.addfile(entry, io.BytesIO(content))
                names.append(name)
    except FileExistsError:
        raise UsageError(f"{target}: exists; expected a new file") from None
    except OSError as error:
        raise UsageError(f"{target}: cannot be written: {error.strerror}") from error
    return names


def collect(config: Config, doctor: str) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of each file of the archive."""
    yield "version.txt", f"fleetpulse {read_version()}\n"
    yield "system.txt", describe_system()
    yield "packages.txt", "".join(sorted(f"{d.name} {d.version}\n" for d in importlib.metadata.distributions()))
    values = {key: hide_addresses(value, key) for key, value in flatten(config)}
    yield "configuration.json", json.dumps(values, indent=1, default=str)
    yield "doctor.json", doctor
    yield "folders.txt", "".join(map(describe_folder, (config.spool.directory, config.store.path.parent)))
    for path in sorted(config.spool.directory.glob("**/*status.json")):
        yield f"status/{path.parent.name}-{path.name}", path.read_text(errors="replace")
    for name, route in ANSWERS.items():
        yield f"api/{name}.json", ask(config, route)
    if shutil.which("journalctl"):
        for unit in UNITS:
            words = ["journalctl", "--no-pager", "--lines", LOG_LINES, "--unit", f"fleetpulse-{unit}"]
            done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=60)
            yield f"log/{unit}.txt", done.stdout or done.stderr


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


def find_secrets(config: Config) -> list[str]:
    """Returns what the files of secrets contain, as text and as JSON and addresses write it; the longest first.

    Of each line: all of it, what follows a colon, and the words of that (`Authorization: Bearer TOKEN`). Of addresses
    in the configuration: the password.
    """
    found = {part for _, value in flatten(config) for part in _find_passwords(value)}
    for path in list_secret_files(config).values():
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            value = line.partition(":")[2].strip()
            found |= {line.strip(), value, *value.split()}
    written = {form for text in found for form in (text, json.dumps(text)[1:-1], quote(text, safe=""))}
    return sorted((text for text in written if len(text) >= MIN_SECRET), key=len, reverse=True)


def _find_passwords(value: Any) -> Iterator[str]:
    """Yields what stands between the scheme and the last @ of an address, after its first colon if it has one."""
    if isinstance(value, (list, Mapping)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _find_passwords(one)
    elif isinstance(value, str) and "://" in value and "@" in value:
        name, _, password = value.partition("://")[2].rpartition("@")[0].partition(":")
        yield from (password or name, unquote(password or name))


def hide(text: str, secrets: list[str]) -> str:
    """Returns the text without secrets, and addresses without user, path and query, in which services have keys."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return hide_in_text(text)
