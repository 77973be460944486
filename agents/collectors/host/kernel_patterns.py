"""Patterns of kernel log lines that are reported: kernel_log.toml, and before it the patterns of the user's file."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.collectors.gpu.xid_table import SEVERITIES, numbered_entries, read_toml
from pipeline.config.settings import constraint
from pipeline.model.errors import ConfigError
from pipeline.runtime.guides import guide

SHIPPED = Path(__file__).with_name("kernel_log.toml")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_KEYS = ("name", "class", "severity", "words", "match", "enabled")


@dataclass(frozen=True, slots=True)
class LogPattern:
    """One kind of line. group: the table's `class`."""

    name: str
    group: str
    severity: str
    words: tuple[str, ...]
    match: re.Pattern[str]


@dataclass(frozen=True, slots=True)
class PatternMatch:
    """A line that matched. detail: the groups of the expression except device and pci."""

    pattern: LogPattern
    device: str | None
    pci: str | None
    detail: Mapping[str, str]


class LogPatterns:
    """All patterns behind one prefilter: a line without any of their words costs one search."""

    def __init__(self, version: str, patterns: tuple[LogPattern, ...], words: tuple[str, ...] = ()) -> None:
        """words: what else the prefilter lets through."""
        self.version, self.patterns = version, patterns
        every = sorted({*words, *(word for pattern in patterns for word in pattern.words)})
        self._any = re.compile("|".join(map(re.escape, every)) or r"(?!)")

    def may_match(self, text: str) -> bool:
        """Returns whether the line can match at all."""
        return self._any.search(text) is not None

    def find_match(self, text: str) -> PatternMatch | None:
        """Returns the first match; None if there is none."""
        for pattern in self.patterns:
            if not any(word in text for word in pattern.words):
                continue
            if matched := pattern.match.search(text):
                groups = {key: value for key, value in matched.groupdict().items() if value}
                return PatternMatch(pattern, groups.pop("device", None), groups.pop("pci", None), groups)
        return None


def load_patterns(user: Path | None = None, words: tuple[str, ...] = ()) -> LogPatterns:
    """Returns the shipped patterns with the user's before them. Raises ConfigError with file, pattern, key and the
    expected value.
    """
    version, known = shipped_patterns()
    patterns = {pattern.name: pattern for pattern in known}
    if user is not None:
        own, removed, found = _read_file(user)
        first = {pattern.name: pattern for pattern in own}
        rest = {name: p for name, p in patterns.items() if name not in first and name not in removed}
        patterns, version = {**first, **rest}, f"{version}, {user.name} {found.get('version', 'unversioned')}"
    return LogPatterns(version, tuple(patterns.values()), words)


PATTERNS_SETTING = constraint(
    f"a file of patterns, {guide('xids.md')}", lambda path: path is None or bool(load_patterns(path))
)
"""Metadata of a setting that names such a file. The file is checked before anything starts."""


@functools.cache
def shipped_patterns() -> tuple[str, tuple[LogPattern, ...]]:
    """Returns version and patterns of kernel_log.toml."""
    patterns, _, found = _read_file(SHIPPED)
    return str(found["version"]), tuple(patterns)


def _read_file(path: Path) -> tuple[list[LogPattern], set[str], dict[str, Any]]:
    """Returns (patterns, names that are disabled, the whole file)."""
    found, patterns, removed = read_toml(path), [], set()
    for key in found:
        if key not in ("version", "source", "pattern"):
            raise ConfigError(f"{path}: {key}: unknown key; expected version, source or [[pattern]]")
    for number, entry in numbered_entries(path, found, "pattern"):
        place = f"{path}: [[pattern]] number {number}"
        if entry.get("enabled") is False and isinstance(entry.get("name"), str):
            removed.add(entry["name"])
        else:
            patterns.append(_parse_pattern(place, entry))
    return patterns, removed, found


def _parse_pattern(place: str, entry: Mapping[str, Any]) -> LogPattern:
    for key in entry:
        if key not in _KEYS:
            raise ConfigError(f"{place}: {key}: unknown key; expected {', '.join(_KEYS)}")
    name, group, severity, words = (entry.get(key) for key in ("name", "class", "severity", "words"))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{place}: name = {name!r}: expected 1 to 64 of a-z 0-9 _, a letter first")
    if not isinstance(group, str) or not 0 < len(group) <= 64:
        raise ConfigError(f"{place}: class = {group!r}: expected a text of 1 to 64 characters")
    if severity not in SEVERITIES:
        raise ConfigError(f"{place}: severity = {severity!r}: expected one of {', '.join(SEVERITIES)}")
    if not isinstance(words, list) or not words or not all(isinstance(word, str) and word for word in words):
        raise ConfigError(f"{place}: words = {words!r}: expected a list of texts, one of which is in every such line")
    return LogPattern(name, group, str(severity), tuple(words), _compile(place, entry.get("match")))


def _compile(place: str, text: object) -> re.Pattern[str]:
    try:
        return re.compile(str(text)) if isinstance(text, str) and text else _raise_no_expression(place, text)
    except re.error as error:
        raise ConfigError(f"{place}: match = {text!r}: {error}; expected a regular expression") from None


def _raise_no_expression(place: str, text: object) -> re.Pattern[str]:
    raise ConfigError(f"{place}: match = {text!r}: expected a regular expression")
