"""What differs between two configurations, key by key."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.config.addresses import hide_addresses
from pipeline.config.sections import Config
from pipeline.config.settings import KEY, NO_SECTIONS
from pipeline.model.errors import UsageError

_EMPTY: tuple[Any, ...] = (None, {}, [], "")
_Keys = Mapping[str, tuple[Any, bool]]
"""section.key -> value, and whether a dataclass declares the key: then only the table or the entry of a list around it
can be missing. A key of a raw table, as those of collectors and detectors, has its owner's default where it is missing,
which may be anything but empty."""
_LONGEST = 60
"""Characters of a value in a record. Chosen: ten keys with both values fit into a reason of the audit."""


def compare_configs(here: Config, there: Config) -> Sequence[Mapping[str, Any]]:
    """Returns the keys whose values differ; none only if the whole configurations are the same, apart from NO_SECTIONS.

    A table or list that one side leaves empty is shown by the keys of the other side, a receiver that only one side has
    by the keys of it that have a value.
    """
    first, second = _flatten_config(here), _flatten_config(there)
    differing = [key for key in dict.fromkeys([*first, *second]) if first.get(key) != second.get(key)]
    repeated = _list_repeated(first, second) | _list_repeated(second, first)
    nothing = (None, False)
    return [
        {"key": key, "here": first.get(key, nothing)[0], "there": second.get(key, nothing)[0]}
        for key in [key for key in differing if key not in repeated] or differing
    ]


def _list_repeated(side: _Keys, other: _Keys) -> set[str]:
    """Returns the empty keys of a side that the other side lacks, where its further keys show the difference."""
    above = {key[: found.start()] for key in other for found in re.finditer(r"[.\[]", key)}
    empty = {key: declared for key, (value, declared) in side.items() if key not in other and value in _EMPTY}
    return {key for key, declared in empty.items() if declared or key in above}


def flatten(config: Config) -> Iterator[tuple[str, Any]]:
    """Yields (section.key, value) of all keys, in the order of the page docs/configuration.md."""
    for key, (value, _) in _flatten_config(config).items():
        yield key, value


def _flatten_config(config: Config) -> _Keys:
    sections = [one.name for one in dataclasses.fields(config) if one.name not in NO_SECTIONS]
    return {key: found for name in sections for key, found in _flatten(name, getattr(config, name), True)}


def _flatten(name: str, value: Any, declared: bool) -> Iterator[tuple[str, tuple[Any, bool]]]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for one in dataclasses.fields(value):
            yield from _flatten(f"{name}.{one.metadata.get(KEY, one.name)}", getattr(value, one.name), True)
    elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
        for number, part in enumerate(value):
            yield from _flatten(f"{name}[{number}]", part, True)
    elif isinstance(value, Mapping) and value:
        for key, below in value.items():
            yield from _flatten(f"{name}.{key}", below, False)
    else:
        shown = str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
        yield name, (shown, declared)


def list_changes(before: Config, after: Config, fixed: Sequence[str], service: str) -> list[str]:
    """Returns each key that a reload changes with both values: `budget.days: 28.0 -> 3.0`. Of addresses the host.

    Raises UsageError if one of `fixed`, which need a restart, is among them: a reload goes on with the same files and
    names; with other ones it would be another service.
    """
    changed = compare_configs(before, after)
    if refused := [str(row["key"]) for row in changed if row["key"] in fixed]:
        raise UsageError(f"{after.source}: {', '.join(refused)} changed: restart the {service} for that")
    return [f"{row['key']}: {_show(row, 'here')} -> {_show(row, 'there')}" for row in changed]


def _show(row: Mapping[str, Any], side: str) -> str:
    """Returns a value as people may see it, cut to _LONGEST; of a key which one side lacks: none."""
    text = "none" if row[side] is None else str(hide_addresses(row[side], row["key"])) or "''"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
