"""JSON and YAML documents of a source, without what makes such a parser expensive: nesting, aliases, huge numbers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import yaml

from pipeline.model.names import quote_text
from pipeline.topology.source import SourceFile

MAX_NESTING = 64
"""Levels of nested lists and objects. Chosen: exports of the systems that are read have at most ten."""
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"
_PLAIN_TAGS = (None, f"{_TAG}str", f"{_TAG}map", f"{_TAG}seq")
"""Tags that a file may write, besides none: they ask for what is read anyway."""
_TRUE, _FALSE = ("yes", "true", "on"), ("no", "false", "off")
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
    """The document in a file: lists, objects, texts, true, false and None; numbers and times are texts as written.

    Raises UsageError, also for aliases, which let a small file be a huge document, and for tags such as !!int.
    """
    depth = 0
    try:
        for event in yaml.parse(file.text, Loader=_Loader):
            place = f"line {event.start_mark.line + 1}"
            depth += isinstance(event, _OPENS) - isinstance(event, _CLOSES)
            if isinstance(event, yaml.AliasEvent):
                raise file.fault(place, "a YAML alias (*)", "the value itself")
            if (tag := getattr(event, "tag", None)) not in _PLAIN_TAGS:
                found = f"a YAML tag (!!{tag.removeprefix(_TAG)[:60]})"
                raise file.fault(place, found, "the value without a tag")
            if depth > MAX_NESTING:
                raise file.fault(place, "nested too deep", expected)
        return _plain_value(yaml.compose(file.text, Loader=_Loader), file)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise file.fault("", f"is not YAML: {' '.join(str(error).split())}", expected) from error


def _plain_value(node: Any, file: SourceFile) -> Any:
    """What a node says. Not by PyYAML's constructors: those of numbers and times fail in ways of their own."""
    if isinstance(node, yaml.SequenceNode):
        return [_plain_value(part, file) for part in node.value]
    if isinstance(node, yaml.MappingNode):
        return _plain_object(node, file)
    if node is None or node.tag == f"{_TAG}null":
        return None
    text = str(node.value)
    if node.tag == f"{_TAG}bool" and text.lower() in (*_TRUE, *_FALSE):
        return text.lower() in _TRUE
    return text


def _plain_object(node: Any, file: SourceFile) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in node.value:
        place = f"line {key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise file.fault(place, "a key that is a list or an object", "a text as key")
        if key.value in found:
            raise file.fault(place, f"key {quote_text(key.value)} again", "each key once")
        found[key.value] = _plain_value(value, file)
    return found


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
