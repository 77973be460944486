"""JSON and YAML documents of a source, without what makes such a parser expensive: nesting, aliases, duplicate keys."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import yaml

from pipeline.topology.source import SourceFile

MAX_NESTING = 64
"""Levels of nested lists and objects. Chosen: exports of the systems that are read have at most ten."""
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_OPENS = (yaml.MappingStartEvent, yaml.SequenceStartEvent)
_CLOSES = (yaml.MappingEndEvent, yaml.SequenceEndEvent)


def parse_json(file: SourceFile, expected: str) -> Any:
    """The document in a file. Raises UsageError."""
    try:
        return json.loads(file.text)
    except RecursionError as error:
        raise file.fault("", "JSON nested too deep", expected) from error
    except ValueError as error:
        raise file.fault("", f"is not JSON: {error}", expected) from error


def parse_yaml(file: SourceFile, expected: str) -> Any:
    """The first document in a file. Raises UsageError, also for aliases, which let a small file be a huge document."""
    depth = 0
    try:
        for event in yaml.parse(file.text, Loader=_Loader):
            depth += isinstance(event, _OPENS) - isinstance(event, _CLOSES)
            if isinstance(event, yaml.AliasEvent):
                raise file.fault(f"line {event.start_mark.line + 1}", "a YAML alias (*)", "the value itself")
            if depth > MAX_NESTING:
                raise file.fault(f"line {event.start_mark.line + 1}", "nested too deep", expected)
        return yaml.load(file.text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise file.fault("", f"is not YAML: {' '.join(str(error).split())}", expected) from error


def list_rows(found: Any, file: SourceFile, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) of a list of objects. Raises UsageError if it is none."""
    if not isinstance(found, list):
        raise file.fault(place, f"is {type(found).__name__}", "a list of objects")
    for number, row in enumerate(found):
        if not isinstance(row, dict):
            raise file.fault(f"{place}[{number}]", f"is {type(row).__name__}", "an object")
        yield f"{place}[{number}]", row


def get_text(row: Any, *path: str) -> str:
    """The text or number at a path of keys; empty if there is none."""
    for key in path:
        row = row.get(key) if isinstance(row, dict) else None
    return str(row) if isinstance(row, (str, int, float)) and not isinstance(row, bool) else ""


def require_text(row: Any, file: SourceFile, place: str, *path: str) -> str:
    """Like `get_text`. Raises UsageError if it is missing or empty."""
    if not (found := get_text(row, *path).strip()):
        raise file.fault(f"{place}.{'.'.join(path)}", "is missing or no text", "a name")
    return found


def first_of(row: Any, paths: Iterable[tuple[str, ...]]) -> str:
    """The first text that is present."""
    return next((text for path in paths if (text := get_text(row, *path))), "")
