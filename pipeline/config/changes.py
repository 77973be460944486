"""What differs between two configurations, key by key."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.config.addresses import hide_addresses
from pipeline.config.sections import Config
from pipeline.model.errors import UsageError

_EMPTY: tuple[Any, ...] = ({}, [], "")
_LONGEST = 60
"""Characters of a value in a record. Chosen: ten keys with both values fit into a reason of the audit."""


def compare_configs(here: Config, there: Config) -> Sequence[Mapping[str, Any]]:
    """Returns the keys whose values differ.

    A table that one side leaves empty is shown by the keys of the other side, a receiver that only one side has by the
    keys of it that have a value.
    """
    first, second = dict(flatten(here)), dict(flatten(there))
    keys = dict.fromkeys([*first, *second])
    rows = [{"key": key, "here": first.get(key), "there": second.get(key)} for key in keys]
    return [row for row in rows if row["here"] != row["there"] and not _is_empty_side(row["here"], row["there"])]


def _is_empty_side(here: Any, there: Any) -> bool:
    """Returns whether one side has an empty table, list or text, and the other has not that key at all."""
    return (here is None and there in _EMPTY) or (there is None and here in _EMPTY)


def flatten(config: Config) -> Iterator[tuple[str, Any]]:
    """Yields (section.key, value) of all keys, in the order of the page docs/configuration.md."""
    for section in dataclasses.fields(config):
        if section.name != "source":
            yield from _flatten(section.name, getattr(config, section.name))


def _flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for one in dataclasses.fields(value):
            yield from _flatten(f"{name}.{one.name}", getattr(value, one.name))
    elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
        for number, part in enumerate(value):
            yield from _flatten(f"{name}[{number}]", part)
    elif isinstance(value, Mapping) and value:
        for key, below in value.items():
            yield from _flatten(f"{name}.{key}", below)
    else:
        yield name, str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value


def list_changes(before: Config, after: Config, fixed: Sequence[str], service: str) -> list[str]:
    """Returns each key that a reload changes with both values: `budget.days: 28.0 -> 3.0`. Of addresses the host.

    Raises UsageError if one of `fixed`, which need a restart, is among them: a reload goes on with the same files and
    names; with other ones it would be another service.
    """
    changed = compare_configs(before, after)
    if refused := [str(row["key"]) for row in changed if row["key"] in fixed]:
        raise UsageError(f"{after.source}: {', '.join(refused)} changed: restart the {service} for that")
    return [f"{row['key']}: {_show(row['here'])} -> {_show(row['there'])}" for row in changed]


def _show(value: Any) -> str:
    """Returns a value as people may see it, cut to _LONGEST; of a key which one side lacks: none."""
    text = "none" if value is None else str(hide_addresses(value)) or "''"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
