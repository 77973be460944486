"""The units of fleetpulse and their drop-ins, as `systemctl cat` shows them, without the secrets that they may contain.

A drop-in decides which user runs a service, what it may use and which secrets it gets: many failed starts begin there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.config.addresses import HIDDEN, hide_in_text
from pipeline.runtime.systemd import HOST_UNITS

FOLDERS = (
    Path("/usr/lib/systemd/system"),
    Path("/usr/local/lib/systemd/system"),
    Path("/run/systemd/system"),
    HOST_UNITS,
)
"""systemd.unit(5), lowest precedence first."""
_MAX_BYTES = 1 << 20
"""Bytes of a file that are read. Chosen: a unit has a few KiB."""
_CREDENTIAL = re.compile(r"(\s*SetCredential(?:Encrypted)?\s*=\s*[^:]*).*", re.DOTALL)
_VARIABLE = re.compile(r"(\w*(?:PASS|SECRET|TOKEN|KEY|CREDENTIAL)\w*(?<!_FILE)=).*", re.IGNORECASE | re.DOTALL)
"""The rest of the line is hidden with the value: quotes may hold what belongs to it."""


def collect_units(folders: Sequence[Path] = FOLDERS) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of each unit: its file and its drop-ins of all folders, each after a line with its path."""
    names = {path.name.removesuffix(".d") for folder in folders for path in _list_found(folder)}
    for name in sorted(names):
        files = [folder / name for folder in folders if (folder / name).exists()]
        files += [path for folder in folders for path in sorted((folder / f"{name}.d").glob("*.conf"))]
        yield f"units/{name}.txt", "\n".join(f"# {path}\n{_read(path)}" for path in files)


def hide_secrets(text: str) -> str:
    """Returns the text of a unit without credentials that it sets, passwords in its variables, and more of addresses
    than the host."""
    return hide_in_text("".join(map(_hide_line, re.findall(r"(?:.*\\\n)*.*\n?", text))))


def _list_found(folder: Path) -> list[Path]:
    return [*folder.glob("fleetpulse-*.service"), *folder.glob("fleetpulse-*.service.d")]


def _hide_line(line: str) -> str:
    """Returns a line, with those that continue it, without a secret."""
    end = "\n" if line.endswith("\n") else ""
    if found := _CREDENTIAL.fullmatch(line):
        return f"{found[1]}:{HIDDEN}{end}"
    if line.lstrip().startswith("Environment="):
        return _VARIABLE.sub(rf"\g<1>{HIDDEN}{end}", line)
    return line


def _read(path: Path) -> str:
    try:
        if not path.is_file():
            return f"# {path.resolve()}: is no regular file\n"
        with open(path, errors="replace") as file:
            return hide_secrets(file.read(_MAX_BYTES))
    except OSError as error:
        return f"# cannot be read: {error.strerror}\n"
