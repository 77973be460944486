"""What differs between two configurations, key by key."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.config.sections import Config
from pipeline.model.errors import UsageError


def compare_configs(here: Config, there: Config) -> Sequence[Mapping[str, Any]]:
    """Returns the keys whose values differ."""
    first, second = dict(flatten(here)), dict(flatten(there))
    keys = dict.fromkeys([*first, *second])
    return [
        {"key": key, "here": first.get(key), "there": second.get(key)}
        for key in keys
        if first.get(key) != second.get(key)
    ]


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


def list_changed_keys(before: Config, after: Config, fixed: Sequence[str], service: str) -> list[str]:
    """Returns the keys that a reload changes. Raises UsageError if one of `fixed`, which need a restart, is among them.

    A reload goes on with the same files and names: with other ones it would be another service.
    """
    changed = [str(row["key"]) for row in compare_configs(before, after)]
    if refused := [key for key in changed if key in fixed]:
        raise UsageError(f"{after.source}: {', '.join(refused)} changed: restart the {service} for that")
    return changed
