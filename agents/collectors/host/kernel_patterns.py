"""Which lines of the kernel log matter: kernel_log.toml, and the patterns of the user's file before it."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.collectors.gpu.xid_table import SEVERITIES, entries, read_toml
from pipeline.config.settings import constraint
from pipeline.model.errors import ConfigError

SHIPPED = Path(__file__).with_name("kernel_log.toml")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_KEYS = ("name", "class", "severity", "words", "match", "enabled")


@dataclass(frozen=True, slots=True)
class Pattern:
    """One kind of line. group: the table's `class`."""

    name: str
    group: str
    severity: str
    words: tuple[str, ...]
    match: re.Pattern[str]


@dataclass(frozen=True, slots=True)
class Found:
    """A line that matched. detail: what the groups of the expression caught, apart from device and pci."""

    pattern: Pattern
    device: str | None
    pci: str | None
    detail: Mapping[str, str]


class Patterns:
    """All patterns behind one prefilter: a line without any of their words costs one search."""

    def __init__(self, version: str, patterns: tuple[Pattern, ...], words: tuple[str, ...] = ()) -> None:
        """words: what else the prefilter lets through."""
        self.version, self.patterns = version, patterns
        every = sorted({*words, *(word for pattern in patterns for word in pattern.words)})
        self._any = re.compile("|".join(map(re.escape, every)) or r"(?!)")

    def interesting(self, text: str) -> bool:
        """Whether the line can match at all."""
        return self._any.search(text) is not None

    def find(self, text: str) -> Found | None:
        """The first pattern that matches."""
        for pattern in self.patterns:
            if not any(word in text for word in pattern.words):
                continue
            if matched := pattern.match.search(text):
                groups = {key: value for key, value in matched.groupdict().items() if value}
                return Found(pattern, groups.pop("device", None), groups.pop("pci", None), groups)
        return None


def load(user: Path | None = None, words: tuple[str, ...] = ()) -> Patterns:
    """Shipped and own patterns. Raises ConfigError naming file, pattern, key and what is wanted."""
    version, known = shipped()
    patterns = {pattern.name: pattern for pattern in known}
    if user is not None:
        own, removed, found = _read(user)
        first = {pattern.name: pattern for pattern in own}
        rest = {name: p for name, p in patterns.items() if name not in first and name not in removed}
        patterns, version = {**first, **rest}, f"{version}, {user.name} {found.get('version', 'unversioned')}"
    return Patterns(version, tuple(patterns.values()), words)


WANTED = constraint("a file of patterns, docs/xids.md", lambda path: path is None or bool(load(path)))
"""Of a setting that names such a file: the file is looked at before anything starts."""


@functools.cache
def shipped() -> tuple[str, tuple[Pattern, ...]]:
    patterns, _, found = _read(SHIPPED)
    return str(found["version"]), tuple(patterns)


def _read(path: Path) -> tuple[list[Pattern], set[str], dict[str, Any]]:
    """(patterns, names that are switched off, the whole file)."""
    found, patterns, removed = read_toml(path), [], set()
    for key in found:
        if key not in ("version", "source", "pattern"):
            raise ConfigError(f"{path}: {key}: no such key; wanted version, source and [[pattern]]")
    for number, entry in entries(path, found, "pattern"):
        place = f"{path}: [[pattern]] number {number}"
        if entry.get("enabled") is False and isinstance(entry.get("name"), str):
            removed.add(entry["name"])
        else:
            patterns.append(_pattern(place, entry))
    return patterns, removed, found


def _pattern(place: str, entry: Mapping[str, Any]) -> Pattern:
    for key in entry:
        if key not in _KEYS:
            raise ConfigError(f"{place}: {key}: no such key; wanted {', '.join(_KEYS)}")
    name, group, severity, words = (entry.get(key) for key in ("name", "class", "severity", "words"))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{place}: name = {name!r}: wanted 1 to 64 of a-z 0-9 _, a letter first")
    if not isinstance(group, str) or not 0 < len(group) <= 64:
        raise ConfigError(f"{place}: class = {group!r}: wanted a text of 1 to 64 characters")
    if severity not in SEVERITIES:
        raise ConfigError(f"{place}: severity = {severity!r}: wanted one of {', '.join(SEVERITIES)}")
    if not isinstance(words, list) or not words or not all(isinstance(word, str) and word for word in words):
        raise ConfigError(f"{place}: words = {words!r}: wanted a list of texts, one of which is in every such line")
    return Pattern(name, group, str(severity), tuple(words), _expression(place, entry.get("match")))


def _expression(place: str, text: object) -> re.Pattern[str]:
    try:
        return re.compile(str(text)) if isinstance(text, str) and text else _no_expression(place, text)
    except re.error as error:
        raise ConfigError(f"{place}: match = {text!r}: {error}; wanted a regular expression") from None


def _no_expression(place: str, text: object) -> re.Pattern[str]:
    raise ConfigError(f"{place}: match = {text!r}: wanted a regular expression")
