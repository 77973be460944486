"""Which entries of lists of tables are not in force, as a file that is read later has the same list.

Such lists are receivers of alerts, escalations, policies, BMCs. That a later list replaces the earlier one is a rule of
configurations, but two files of two people are easily taken for one list: then alerts stay out, and nothing else says
so. Groups and variables are made to replace, an empty list too: nothing is said of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.config.layers import Layers, flatten_keys

_NAMES = ("name", "node")
"""Keys that name an entry of a list; one without them is named by its number."""
_SHOWN = 5  # entries that a line names


def describe_replaced(layers: Layers, files: Iterable[str | Path]) -> tuple[str, ...]:
    """Returns a line for each list of tables of which a later file replaces a part. files: which layers are files."""
    names = set(map(str, files))
    last: dict[str, tuple[str, list[Mapping[str, Any]]]] = {}
    found = []
    for layer in layers:
        for keys, value in flatten_keys(layer.table) if layer.where in names else ():
            key = ".".join(keys)
            where, before = last.get(key, ("", []))
            if value and (lost := _list_lost(before, value)):
                found.append(f"{where}: {_describe(key, lost, layer.where)}")
            last[key] = layer.where, value if _is_list_of_tables(value) else []
    return tuple(found)


def _is_list_of_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def _list_lost(before: Sequence[Mapping[str, Any]], after: Any) -> list[str]:
    """Returns what names the entries that a later list lacks: one of the same name takes the place of the earlier."""
    kept = after if _is_list_of_tables(after) else []
    names = {_find_name(one) for one in kept} - {""}
    lost = [(number, one) for number, one in enumerate(before, 1) if one not in kept and _find_name(one) not in names]
    return [_find_name(one) or f"entry {number}" for number, one in lost]


def _find_name(entry: Mapping[str, Any]) -> str:
    return next((name for key in _NAMES if isinstance(name := entry.get(key), str)), "")


def _describe(key: str, lost: Sequence[str], after: str) -> str:
    more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
    verb = "are" if len(lost) > 1 else "is"
    return (
        f"[[{key}]] {', '.join(lost[:_SHOWN])}{more} {verb} not in force, as {after} has [[{key}]] too, and a list of "
        "a later file replaces that of an earlier one; expected all entries in one of the two files"
    )
