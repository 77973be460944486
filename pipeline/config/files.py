"""Which files a configuration is read from, and what they contain together: the file, its drop-ins, its groups.

Later ones win, key by key: FILE, then conf.d/*.toml beside it by name, then those [[groups]] whose patterns match the
name of this node, in order. Lists are replaced, not joined.
"""

from __future__ import annotations

import errno
import fnmatch
import hashlib
import json
import os
import re
import shlex
import socket
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.config import accepted
from pipeline.config.settings import EnvironmentText
from pipeline.model.errors import ConfigError
from pipeline.model.toml_text import parse_toml

DROP_INS = "conf.d"
GROUPS = "groups"
HOST = Path("/etc/fleetpulse/fleetpulse.toml")
"""Where packages and `fleetpulse setup` put it; what units name."""
MAX_CHARACTERS = 16_000_000
"""Longest file of a configuration. Chosen: ten times one with an entry for each of 10,000 BMCs."""
NODES = "nodes"
_CHOICE = re.compile(r"\[!?+\]?+[^\]]*\]")
"""A choice of characters in a pattern of fnmatch, whose first may be a closing bracket."""
NODE_VARIABLE = "FLEETPULSE__AGENT__NODE"
Table = dict[str, Any]
Texts = accepted.Texts


def find_file(path: str | Path | None, environ: Mapping[str, str]) -> Path | None:
    """Returns --config, else FLEETPULSE_CONFIG, else ./fleetpulse.toml or that of the host, if one exists."""
    if chosen := path or environ.get("FLEETPULSE_CONFIG"):
        return Path(chosen)
    if (kept := accepted.read_texts(environ)) is not None:
        return next(map(Path, kept), None)
    return next((usual for usual in (Path("fleetpulse.toml"), HOST) if _is_there(usual)), None)


def _is_there(path: Path) -> bool:
    """Returns whether a name exists, also of a link that leads nowhere: its reading says so.

    Nothing is there of the folder where this was started if this user may not enter it (`sudo -u` in /root).
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except PermissionError:
        return path.is_absolute()
    except OSError:
        return True
    return True


def list_files(path: Path) -> list[Path]:
    """Returns the file and its drop-ins, in the order in which they are read. Raises ConfigError."""
    return [path, *list_drop_ins(path)]


def list_drop_ins(path: Path) -> list[Path]:
    """Returns conf.d/*.toml beside the file; none without that folder. Raises ConfigError if it cannot be read.

    Names that begin with a dot are left out, as a shell does: editors have such files of their own there.
    """
    folder = path.parent / DROP_INS
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        check_links(folder, "a folder of TOML files")
        raise ConfigError(f"{folder}: cannot be read: {error.strerror}; expected a folder of TOML files") from error
    return sorted(folder / name for name in names if name.endswith(".toml") and name[0] != ".")


def read_table(path: Path) -> Table:
    """Returns the content of a TOML file. Raises ConfigError."""
    return _parse(str(path), _read(path))


def read_texts(path: Path | None, environ: Mapping[str, str]) -> Texts:
    """Returns the text of the file and its drop-ins, or what a reload kept of them. Raises ConfigError."""
    texts = accepted.read_texts(environ)
    if texts is None:
        texts = {str(path): _read(path)} if path else {}
        texts |= {str(file): _read(file) for file in (list_drop_ins(path) if path else ())}
        accepted.write_texts(environ, texts)
    return texts


def digest_texts(texts: Texts) -> str:
    """Returns what tells one text of the files from another, wherever they lie: SHA-256, its first 12 digits."""
    return hashlib.sha256(json.dumps(list(texts.values())).encode()).hexdigest()[:12]


def have_changed(texts: Texts, environ: Mapping[str, str]) -> bool:
    """Returns whether the files differ from their kept text, or cannot be read."""
    path = next(map(Path, texts), None) or find_file(None, environ)
    try:
        return read_texts(path, environ) != texts
    except ConfigError:
        return True


def _read(path: Path) -> str:
    """Returns the text of a file without its mark of the byte order (BOM), if it has one. Raises ConfigError."""
    try:
        kind = path.stat()
        if not stat.S_ISREG(kind.st_mode) and not stat.S_ISDIR(kind.st_mode) and path.resolve() != Path(os.devnull):
            raise ConfigError(f"{path}: is no regular file, and reading it may never end; expected a TOML file")
        with open(path, encoding="utf-8-sig") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except OSError as error:
        check_links(path)
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; expected a TOML file") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from error
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(
            f"{path}: has more than {MAX_CHARACTERS:,} characters; expected a TOML file of at most so many"
        )
    return text


def _parse(where: str, text: str) -> Table:
    try:
        return parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"{where}: is not TOML: {error}") from error


def check_links(path: Path, expected: str = "a TOML file") -> None:
    """Raises ConfigError for a path that never ends, as its symbolic links lead back to themselves."""
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError(
                f"{path}: its symbolic links lead back to themselves; expected {expected}, or a link to one; "
                f"remove the wrong link, which this shows: namei {shlex.quote(str(path))}"
            ) from error


def read_layers(
    path: Path | None, environ: Mapping[str, str], texts: Texts | None = None
) -> Iterator[tuple[str, Table]]:
    """Yields (where, table) of the file, of each drop-in and of each group of this node. Raises ConfigError.

    texts: of the files, if they were read already.
    """
    texts = read_texts(path, environ) if texts is None else texts
    layers = [(where, _parse(where, text)) for where, text in texts.items()]
    groups = [pair for where, table in layers for pair in take_groups(where, table)]
    node = EnvironmentText(environ.get(NODE_VARIABLE, "")).parse_as(str)  # it may be in quotes
    for where, table in layers:
        yield where, table
        named = table.get("agent", {})
        if NODE_VARIABLE not in environ and isinstance(named, dict) and isinstance(named.get("node"), str):
            node = named["node"]
    node = str(node) or socket.gethostname().split(".")[0]
    for where, patterns, table in groups:
        if any(fnmatch.fnmatchcase(node, pattern) for pattern in patterns):
            yield where, table


def take_groups(where: str, table: Table) -> list[tuple[str, Sequence[str], Table]]:
    """Removes [[groups]] from a table; returns (where, patterns of nodes, sections) of each. Raises ConfigError."""
    groups = table.pop(GROUPS, [])
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise ConfigError(f"{where}: {GROUPS} = {groups!r}: expected tables, each written [[{GROUPS}]]")
    found: list[tuple[str, Sequence[str], Table]] = []
    for number, group in enumerate(groups):
        name = f"{where}: [[{GROUPS}]] {number + 1}"
        patterns = group.pop(NODES, None)
        texts = [patterns] if isinstance(patterns, str) else patterns
        if not isinstance(texts, list) or not texts or not all(isinstance(one, str) and one for one in texts):
            raise ConfigError(f"{name}: {NODES} = {patterns!r}: expected patterns of node names, such as ['h200-*']")
        if unclosed := [one for one in texts if "[" in _CHOICE.sub("", one)]:
            raise ConfigError(
                f"{name}: {NODES} = {unclosed[0]!r}: a bracket is not closed, so no node matches; expected a pattern "
                "such as 'h200-[0-9]*'"
            )
        if fixed := sorted(key for key, value in group.items() if not isinstance(value, dict)):
            raise ConfigError(f"{name}: '{fixed[0]}' is no section; expected [{GROUPS}.SECTION] below it")
        if "node" in group.get("agent", {}):
            raise ConfigError(f"{name}: [agent] node cannot be set by a group: groups are chosen by it")
        found.append((name, texts, group))
    return found


def merge_tables(below: Mapping[str, Any], above: Mapping[str, Any]) -> Table:
    """Returns `below` with the keys of `above`, table by table."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = merge_tables(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
