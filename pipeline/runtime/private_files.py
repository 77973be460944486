"""State is private: folders 0700, files 0600, whoever creates them first. What is open to others is found and named.

Processes that keep state set UMASK (fleetpulse.py), which also covers the files that DuckDB creates when it likes: the
write-ahead log and its folder of temporary files. The spool sets its modes itself, as any program may write one.
"""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.config.sections import Config

UMASK = 0o077
FOLDER, FILE = 0o700, 0o600
SECRET_KEYS = ("token_file", "password_file", "key_file", "headers_file")
"""Keys, in any section, of files that hold a secret."""
_OTHERS, _WRITABLE = 0o077, 0o022
_STATUS = frozenset({"status.json", "status.json.new"})
"""The agent's status file, which any user may read for `fleetpulse check` (agents/node/health/report.py)."""
_NAMED = 3  # open paths that one message names; chosen: the mend covers all of them


def make_folder(path: Path) -> None:
    """Creates a folder and its missing parents, all of them 0700; one that exists keeps its mode. Raises OSError."""
    for folder in (*reversed(path.parents), path):
        if not folder.is_dir():
            folder.mkdir(mode=FOLDER, exist_ok=True)


def opener(path: str, flags: int) -> int:
    """For `open(..., opener=)`: a file that this creates is 0600."""
    return os.open(path, flags, FILE)


def secret_files(config: Config) -> dict[str, Path]:
    """Configuration key -> the file that it names and that holds a token, password or private key."""
    found: dict[str, Path] = {}
    sections = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    _find_secrets("", sections, found)
    return found


def _find_secrets(where: str, value: Any, found: dict[str, Path]) -> None:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        value = {str(i): one for i, one in enumerate(value)}
    for key, below in value.items() if isinstance(value, Mapping) else ():
        name = f"{where}.{key}" if where else str(key)
        if key in SECRET_KEYS and below:
            found[name] = Path(below).expanduser()
        _find_secrets(name, below, found)


def open_secrets(config: Config) -> list[str]:
    """A sentence for each secret that users other than its owner can open."""
    return [
        f"{key} = '{path}' has mode {mode:04o}: other users of this host may read it; run: chmod 600 {path}"
        for key, path in secret_files(config).items()
        if (mode := _mode(path, links=True)) is not None and mode & _OTHERS
    ]


def state_tops(config: Config) -> Iterator[Path]:
    """Folder, file, log and temporary files of the store, and the folder of the spool."""
    store = config.store.path
    yield store.parent
    for suffix in ("", ".wal", ".tmp"):
        yield store.with_name(store.name + suffix)
    yield config.spool.directory


def state_paths(config: Config) -> Iterator[Path]:
    """All of `state_tops`, and whatever lies in the spool."""
    yield from state_tops(config)
    for folder, folders, files in os.walk(config.spool.directory):
        yield from (Path(folder, name) for name in (*folders, *files))


def open_state(paths: Iterable[Path]) -> list[tuple[Path, int]]:
    """(path, mode) of what users other than its owner may enter, read or write; links and absent files are left out."""
    found = ((path, _mode(path)) for path in paths)
    return [(path, mode) for path, mode in found if mode is not None and mode & _closed(path)]


def _closed(path: Path) -> int:
    """What others may not do with it."""
    return _WRITABLE if path.name in _STATUS else _OTHERS


def told(found: list[tuple[Path, int]]) -> str:
    """The first few of `open_state` as text."""
    named = ", ".join(f"{path} ({mode:04o})" for path, mode in found[:_NAMED])
    return named + (f" and {len(found) - _NAMED} more" if len(found) > _NAMED else "")


def mend(found: list[tuple[Path, int]]) -> str:
    """The command that closes them; a folder that others use too is not closed but left."""
    shared = next((path for path, mode in found if mode & stat.S_ISVTX), None)
    if shared is not None:
        return f"use a folder of its own instead of {shared}: [store] path, [spool] directory"
    tops = [path for path, _ in found if not any(parent in path.parents for parent, _ in found)]
    return f"chmod -R go= {' '.join(map(str, tops[:_NAMED]))}"


def warnings(config: Config) -> list[str]:
    """What a service says at its start of files that are open to other users; each is a check of `doctor` too."""
    found = open_state(state_tops(config))
    state = [f"state is open to other users: {told(found)}; run: {mend(found)}"] if found else []
    return state + open_secrets(config)


def _mode(path: Path, links: bool = False) -> int | None:
    """None where there is nothing, or a link that is not to be followed."""
    try:
        found = os.stat(path, follow_symlinks=links).st_mode
        return None if stat.S_ISLNK(found) else stat.S_IMODE(found)
    except OSError:
        return None
