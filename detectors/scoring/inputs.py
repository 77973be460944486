"""Reads findings, incidents, truth and meta from files. Errors name file, line and the expected value."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detectors.scoring.answer_rules import ANSWER_RULES
from pipeline.model.errors import UsageError
from pipeline.model.records import LEVELS, SECOND, from_iso
from pipeline.runtime.guides import guide

_DAY = 86_400 * SECOND
CLASSES = ("hard", "soft", "invisible", "benign")
SEVERITIES = ("page", "ticket", "watch")
_TYPO = 0.9
"""Similarity from which an unknown kind is a typo: one or two letters of a dozen. Chosen."""
Row = dict[str, Any]
_Types = Mapping[str, type | tuple[type, ...]]
_FINDING: _Types = {"time": str, "onset": str, "entity": str, "detector": str, "level": str}
_INCIDENT: _Types = {"id": str, "cause": str, "opened": str, "severity": str, "members": list}
_TRUTH: _Types = {"id": (str, int), "kind": str, "entity": str, "onset": str, "end": str}


@dataclass(frozen=True, slots=True)
class Truth:
    """One line of truth.jsonl. visible: from when it can be detected, later than the onset for ramps.

    entity:      its place.   entities: the faulty ones; the entity where none are given. An empty list makes the event
                 benign, whatever its class.
    attribution, severity, effect, effect_unit: of its parameters; None where the truth has none.
    """

    id: str
    kind: str
    entity: str
    entities: tuple[str, ...]
    onset: int
    end: int
    detectability: str
    visible: int
    attribution: str | None = None
    severity: float | None = None
    effect: float | None = None
    effect_unit: str | None = None


@dataclass(frozen=True, slots=True)
class Meta:
    """Length and size of a recording; None where meta.json has no value."""

    node_days: float | None = None
    nodes: float | None = None
    gpus: float | None = None
    end: int | None = None
    cpu_seconds: float | None = None
    samples: float | None = None


def read_findings(path: str | Path) -> list[Row]:
    """Returns the lines of findings.jsonl with `time` in us."""
    found = []
    for where, row in _lines(path, _FINDING):
        _check_choice(where, row, "level", LEVELS)
        times = {key: _time(where, row, key) for key in ("time", "onset")}
        if times["onset"] > times["time"]:
            raise UsageError(f"{where}: onset {row['onset']} is after time {row['time']}; expected it before: swapped?")
        found.append(row | times)
    return found


def read_incidents(path: str | Path) -> list[Row]:
    """Returns the lines of incidents.jsonl: `opened`, `onset` (else `opened`), `resolved` (None while open) in us."""
    found = []
    for where, row in _lines(path, _INCIDENT, unique=True):
        _check_choice(where, row, "severity", SEVERITIES)
        if not all(isinstance(member, str) for member in row["members"]):
            raise UsageError(f"{where}: members: found {row['members']!r}; expected a list of entities")
        opened = _time(where, row, "opened")
        resolved = None if row.get("resolved") is None else _time(where, row, "resolved")
        began = (
            "opened" if row.get("onset") is None else "onset"
        )  # after an outage an incident may be opened when it is already over
        onset = _time(where, row, began)
        if resolved is not None and resolved < onset:
            raise UsageError(f"{where}: resolved {row['resolved']} is before {began} {row[began]}: swapped?")
        named = {key: _name(where, row, key) for key in ("detector", "entity")}
        found.append(row | named | {"opened": opened, "onset": onset, "resolved": resolved})
    return found


def read_truth(path: str | Path) -> list[Truth]:
    """Returns the events in the order of truth.jsonl."""
    return [_truth(where, row) for where, row in _lines(path, _TRUTH, unique=True)]


def as_truth(lines: Iterable[Row]) -> list[Truth]:
    """Returns the events of lines in memory."""
    return [_truth(f"truth: line {number}", line) for number, line in enumerate(lines, 1)]


def read_meta(path: str | Path | None) -> Meta:
    """Returns length and size of a recording; all None without a file."""
    if path is None:
        return Meta()
    row = read_object(path, "meta.json as simulate writes it")
    for key in ("nodes", "start", "end"):
        if row.get(key) is None:
            raise UsageError(f"{path}: {key} is missing; expected nodes (number), start and end (times)")
    start, end = (_time(str(path), row, key) for key in ("start", "end"))
    nodes = _number(str(path), row, "nodes", 0.0, math.inf)
    if end < start:
        raise UsageError(f"{path}: end {row['end']} is before start {row['start']}: swapped?")
    more = {key: _number(str(path), row, key, 0.0, math.inf) for key in ("gpus", "cpu_seconds", "samples")}
    assert nodes is not None
    return Meta(nodes * (end - start) / _DAY, nodes, end=end, **more)


def read_object(path: str | Path, expected: str) -> Row:
    """Reads a file with one JSON object. expected: the file in words, for errors."""
    try:
        row = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: is not JSON: {error}; expected {expected}: was it cut off?") from error
    if not isinstance(row, dict):
        raise UsageError(f"{path}: found {type(row).__name__}; expected an object: {expected}")
    return row


def _truth(where: str, row: Row) -> Truth:
    onset, end = _time(where, row, "onset"), _time(where, row, "end")
    if end < onset:
        raise UsageError(f"{where}: end {row['end']} is before onset {row['onset']}; expected it after: swapped?")
    harmless = row.get("entities") == []
    detectability = row.get("class") or "soft"
    _check_choice(where, {"class": detectability}, "class", CLASSES)
    detectability = "benign" if harmless else detectability
    if detectability in ("hard", "soft"):
        _check_kind(where, row["kind"])
    more = row.get("parameters") or {}
    entities = row.get("entities") or [row["entity"]]
    if not isinstance(more, dict) or not isinstance(entities, list):
        raise UsageError(f"{where}: parameters must be an object and entities a list of names")
    return Truth(
        str(row["id"]),
        row["kind"],
        row["entity"],
        tuple(map(str, entities)),
        onset,
        end,
        detectability,
        max(onset, _time(where, more, "detectable")) if isinstance(more.get("detectable"), str) else onset,
        _name(where, more, "attribution"),
        _number(where, more, "severity", 0.0, 1.0),
        _number(where, more, "effect", -math.inf, math.inf),
        _name(where, more, "effect_unit"),
    )


def _check_kind(where: str, kind: str) -> None:
    """Raises UsageError on a kind that looks like a typo; other kinds that have no rule are own labels."""
    if kind not in ANSWER_RULES and (close := difflib.get_close_matches(kind, ANSWER_RULES, 1, _TYPO)):
        raise UsageError(
            f"{where}: kind {kind!r} is unknown; did you mean {close[0]!r}? {guide('scoring.md')} lists all"
        )


def _check_choice(where: str, row: Mapping[str, Any], key: str, known: Sequence[str]) -> None:
    if row[key] not in known:
        raise UsageError(f"{where}: {key} {row[key]!r}; expected one of {', '.join(known)}")


def _time(where: str, row: Mapping[str, Any], key: str) -> int:
    try:
        return from_iso(row[key])
    except (ValueError, TypeError, OverflowError) as error:
        raise UsageError(f"{where}: {key}: {error}; expected a time like 2026-01-01T00:00:00Z") from error


def _name(where: str, row: Mapping[str, Any], key: str) -> str | None:
    value = row.get(key)
    if value is not None and not isinstance(value, str):
        raise UsageError(f"{where}: {key}: found {str(value)[:40]!r}; expected a name")
    return value


def _number(where: str, row: Mapping[str, Any], key: str, low: float, high: float) -> float | None:
    value = row.get(key)
    if value is None:
        return None
    valid = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
    if not valid or not low <= value <= high:
        text = str(value) if isinstance(value, float) else repr(value)[:40]
        raise UsageError(f"{where}: {key}: found {text}; expected a finite number between {low:g} and {high:g}")
    return float(value)


def _lines(path: str | Path, types: _Types, unique: bool = False) -> list[tuple[str, Row]]:
    """Returns (file and line, object) of a JSON-lines file with the fields of `types`, each `id` once if `unique`."""
    found: list[tuple[str, Row]] = []
    first: dict[str, int] = {}
    for number, line in enumerate(_text(path).split("\n"), 1):  # not splitlines: a text may hold U+2028
        if not line.strip():
            continue
        where = f"{path}: line {number}"
        row = _object(where, line, types)
        if unique and first.setdefault(str(row["id"]), number) != number:
            raise UsageError(
                f"{where}: id {row['id']!r} is that of line {first[str(row['id'])]}; expected each id once"
            )
        found.append((where, row))
    return found


def _object(where: str, line: str, types: _Types) -> Row:
    expected = f"an object with {', '.join(types)}"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{where}: is not JSON: {error}; expected {expected}: was it cut off? Write it again"
        ) from error
    if not isinstance(row, dict):
        raise UsageError(f"{where}: found {type(row).__name__}; expected {expected}")
    if missing := [key for key in types if key not in row]:
        raise UsageError(f"{where}: {', '.join(missing)} missing; expected {expected}")
    if wrong := [key for key, kind in types.items() if not isinstance(row[key], kind)]:
        raise UsageError(f"{where}: {wrong[0]}: found {str(row[wrong[0]])[:40]!r}; expected {expected}")
    return row


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}; expected UTF-8 text") from error
