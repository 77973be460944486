"""TOML text of a table that was read from TOML: values on one line each, without the comments of the original."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def write_toml(table: Mapping[str, Any]) -> str:
    """Returns TOML with the same values: keys, a [section] per table, a [[section]] per table of a list."""
    lines = [f"{_key(name)} = {_value(one)}" for name, one in table.items() if not _tables(one)]
    for name, one in table.items():
        head = f"[{_key(name)}]" if isinstance(one, Mapping) else f"[[{_key(name)}]]"
        for section in _tables(one):
            lines += [head, *(f"{_key(key)} = {_value(value)}" for key, value in section.items())]
    return "".join(f"{line}\n" for line in lines)


def _tables(value: Any) -> list[Mapping[str, Any]]:
    """Returns the tables that a value is; none if it is another value, such as an empty list."""
    if isinstance(value, Mapping):
        return [value]
    found = value if isinstance(value, list) else []
    return found if all(isinstance(one, Mapping) for one in found) else []


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _text(name)


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_value(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return str(value)  # whole and other numbers; dates and times, whose text TOML reads
