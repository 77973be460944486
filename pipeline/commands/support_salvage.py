"""What `fleetpulse support` can use of a configuration that is wrong: sections that are right, and what to hide.

The keys that name secrets may stand in a file that is no TOML, so its lines are searched for them too.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.config.files import GROUPS, find_file, list_files, merge_tables, read_table
from pipeline.config.layers import PREFIX
from pipeline.config.sections import Config
from pipeline.config.settings import build_section
from pipeline.model.errors import FleetpulseError
from pipeline.runtime.private_files import CERTIFICATE_KEYS, SECRET_KEYS

_LINE = re.compile(r"""^\s*["']?([\w.-]+)["']?\s*=\s*(\S.*)$""", re.MULTILINE)
_TEXT = re.compile(r""""([^"\n]*)"|'([^'\n]*)'""")
_SECRET_NAME = re.compile(r"pass|secret|token|credential|(^|_)key$|(^|_)keys$", re.IGNORECASE)
"""Keys that exist nowhere in a right configuration, but hold secrets in a wrong one, such as `password`."""


@dataclasses.dataclass(frozen=True)
class Salvage:
    """The valid sections of a wrong configuration; secrets: texts to hide; files: those with contents to hide."""

    config: Config
    secrets: tuple[str, ...]
    files: tuple[Path, ...]
    addresses: tuple[str, ...]


def salvage_config(given: str | None, environ: Mapping[str, str]) -> Salvage:
    """Returns the valid sections of the files that can be read."""
    path = find_file(given, environ)
    tables, pairs = [], [(name.rpartition("__")[2].lower(), text) for name, text in _list_variables(environ)]
    for one in _list_files(path) if path else ():
        try:
            tables.append(read_table(one))
            pairs += _list_texts("", tables[-1])
        except FleetpulseError:
            pairs += _search_lines(one)
    merged: dict[str, Any] = {}
    for table in tables:
        merged = merge_tables(merged, table)
    source = str(path) if path else "defaults"
    try:
        config = build_section(Config, {**_keep_right(merged), "source": source}, source)
    except FleetpulseError:  # sections that contradict each other
        config = Config(source=source)
    files = [Path(text).expanduser() for key, text in pairs if key in (*SECRET_KEYS, *CERTIFICATE_KEYS) and text]
    secrets = [text for key, text in pairs if _SECRET_NAME.search(key) and not key.endswith("_file")]
    return Salvage(config, tuple(secrets), tuple(files), tuple(text for _, text in pairs if "://" in text))


def _list_variables(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    yield from ((name, text) for name, text in environ.items() if name.startswith(PREFIX))


def _list_files(path: Path) -> list[Path]:
    try:
        return list_files(path)
    except FleetpulseError:  # the archive's part `files` says why
        return [path]


def _keep_right(table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sections that are right alone."""
    right = {}
    for name, value in table.items():
        if name == GROUPS:
            continue
        try:
            build_section(Config, {name: value}, name)
        except FleetpulseError:
            continue
        right[name] = value
    return right


def _list_texts(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yields (key, text) of all texts below a value; those of a list have its key."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from _list_texts(str(name), one)
    elif isinstance(value, list):
        for one in value:
            yield from _list_texts(key, one)
    elif value is not None:
        yield key, str(value)


def _search_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yields (key, text) of each line `key = value` of a file that is no TOML; each text in quotes, or all of it."""
    try:
        text = path.read_text(errors="replace") if path.is_file() else ""
    except OSError:
        return
    for found in _LINE.finditer(text):
        key = found[1].rpartition(".")[2]
        quoted = [one[1] or one[2] for one in _TEXT.finditer(found[2])]
        yield from ((key, one) for one in (*quoted, found[2].strip().strip("\"'")) if one)
