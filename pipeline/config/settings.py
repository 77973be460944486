"""Builds dataclasses from TOML tables. Fields define keys, types and constraints; a wrong value raises ConfigError."""

from __future__ import annotations

import difflib
import functools
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from pipeline.config.addresses import hide_addresses
from pipeline.model.errors import ConfigError
from pipeline.model.toml_text import parse_toml

T = TypeVar("T")
KEY = "fleetpulse.key"
"""Field metadata: the key in the file, where it is not the field's name because Python reserves the word."""
NO_SECTIONS = ("source", "digest", "replaced")
"""Fields of a whole configuration that say what it was read from: no section in a file."""


def constraint(text: str, holds: Callable[[Any], bool]) -> Mapping[str, Any]:
    """Field metadata: the value must satisfy `holds`; `text` describes the allowed values in the error.

    `holds` may raise a ConfigError, for example about a file that the value names; its text is included.
    """
    return {"fleetpulse.constraint": (text, holds)}


def _is_host(text: str) -> bool:
    """Returns whether the system could look a name or address up: of a name, no part is empty or too long."""
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    return re.search(r"[\s/\0]", text) is None


HOST = constraint("a name or address of a host, such as 127.0.0.1", _is_host)


_MEMORY_FORM = re.compile(
    r"((?:\d+\.?\d*|\.\d+)(?:e\d+)?)\s*(bytes?|b|[kmgt](?:i?b)?|(?:kilo|mega|giga|tera)bytes?|%)",
    re.IGNORECASE | re.ASCII,
)


LEAST_MEMORY, LEAST_SHARE = 64_000_000, 1.0
"""Least limit of DuckDB (bytes), and as a share of the memory (percent). Measured: an empty store starts with 6 MB, not
with 4. Chosen: ten times that, as rows come on top; of a share, that of a machine with 8 GB."""


def _is_memory(text: str) -> bool:
    """Returns whether DuckDB 2.0 reads a text as a limit of memory; "none" and negative sizes are none."""
    text = text.strip(" \t\n\v\f\r")
    if text.lower() in ("none", "-1"):
        return True
    found = _MEMORY_FORM.fullmatch(text.removeprefix("-"))
    if found is None or (text.startswith("-") and found[2] == "%"):
        return False
    number, unit = float(found[1]), found[2].lower()
    if unit == "%":
        return LEAST_SHARE <= number <= 100
    size = number * (1024 if unit[1:3] == "ib" else 1000) ** ("kmgt".find(unit[0]) + 1)
    return 0 < size < 2**63 and (text.startswith("-") or size >= LEAST_MEMORY)


MEMORY = constraint(
    "a size such as 2GB or 1.5GiB, at least 64MB (with less a start or a commit may find no memory), or a share such "
    "as 50%, at least 1%",
    _is_memory,
)


_type_hints: Callable[[Any], dict[str, Any]] = functools.cache(typing.get_type_hints)
"""Kept: evaluating the text of every annotation took 3.8 of the 4.1 ms of a configuration with 22 sections."""


class EnvironmentText(str):
    """The text of an environment variable, parsed by the type of its key."""

    __slots__ = ("name",)
    name: str

    @property
    def location(self) -> str:
        """Returns `environment: NAME`, for error messages."""
        return f"environment: {self.name}"

    def parse_as(self, wanted: Any) -> Any:
        """The text itself for a string key without quotes, else its value as TOML if it parses."""
        if wanted in (str, Path) and not self.startswith(("'", '"')):
            return str(self)
        try:
            return parse_toml(f"v = {self}")["v"]
        except ValueError:
            return str(self)


def build_section(cls: type[T], table: Mapping[str, Any], where: str, section: str = "") -> T:
    """An instance of dataclass `cls` from a TOML table. Raises ConfigError on unknown, missing or mistyped keys."""
    hints = _type_hints(cls)
    known = {f.metadata.get(KEY, f.name): f for f in fields(cls) if f.init}  # type: ignore[arg-type] # T is a dataclass by contract
    for key, value in table.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, 1)
            hint = (
                f"did you mean '{close[0]}'?"
                if close
                else f"known: {', '.join(k for k in known if k not in NO_SECTIONS)}"
            )
            raise ConfigError(
                f"{describe_key(where, section, key, value)}: no such {'key' if section else 'section'}; {hint}"
            )
    for name, f in known.items():
        if name not in table and f.default is MISSING and f.default_factory is MISSING:
            raise ConfigError(f"{describe_key(where, section, name)}: missing; a value is required")
    converted = {
        k: _convert(v, hints[known[k].name], where, f"{section}.{k}" if section else k) for k, v in table.items()
    }
    for key, value in converted.items():
        text, holds = known[key].metadata.get("fleetpulse.constraint", ("", None))
        if holds is not None:
            check_value(describe_key(where, section, key, table[key]), value, text, holds)
    try:
        return cls(**{known[key].name: value for key, value in converted.items()})
    except ConfigError as error:  # keys that do not go together
        raise ConfigError(f"{where}: [{section}] {error}") from None


def check_value(where: str, value: Any, text: str, holds: Callable[[Any], bool]) -> None:
    """Raises ConfigError if the value at `where` does not satisfy `holds`; `text` describes the allowed values."""
    shown = _hide(str(value) if isinstance(value, Path) else value, where)
    try:
        if holds(value):
            return
    except ConfigError as error:
        raise ConfigError(f"{where} = {shown!r}: {error}; expected {text}") from None
    raise ConfigError(f"{where} = {shown!r}: expected {text}")


def _hide(value: Any, key: str) -> Any:
    """Returns a value as errors may show it: of an address the host, also if its password has spaces or quotes."""
    shown = hide_addresses(value, key)
    return tuple(shown) if isinstance(value, tuple) else shown


def _convert(value: Any, wanted: Any, where: str, key: str) -> Any:
    """`value` converted to type `wanted`. Raises ConfigError."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is types.UnionType:
        return _convert(value, arguments[0], where, key)
    if isinstance(value, EnvironmentText):
        where, value = value.location, value.parse_as(wanted)
    if is_dataclass(wanted) and isinstance(wanted, type):
        return build_section(wanted, _table(value, where, key), where, key)
    if origin is not None and origin is not tuple and isinstance(origin, type) and issubclass(origin, Mapping):
        return {k: _convert(v, arguments[1], where, f"{key}.{k}") for k, v in _table(value, where, key).items()}
    if origin is tuple and isinstance(value, list):
        return tuple(_convert(v, arguments[0], where, f"{key}[{i}]") for i, v in enumerate(value))
    if origin is typing.Literal:
        if value in arguments:
            return value
        raise ConfigError(
            f"{describe_key(where, key)} = {_hide(value, key)!r}: expected one of {', '.join(map(repr, arguments))}"
        )
    if wanted is Path and isinstance(value, str):
        return Path(value).expanduser()
    if wanted is float and type(value) in (int, float):
        return float(value)
    if wanted is Any or type(value) is wanted:
        return value
    name = "list" if origin is tuple else getattr(wanted, "__name__", str(wanted))
    raise ConfigError(
        f"{describe_key(where, key)} = {_hide(value, key)!r}: expected {name}, got {type(value).__name__}"
    )


def _table(value: Any, where: str, key: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise ConfigError(f"{where}: [{key}] is {_hide(value, key)!r}; expected a table")


def describe_key(where: str, section: str, key: str = "", value: Any = None) -> str:
    """`FILE: [section] key` for a message, or the environment variable of `value`; `section` may include the key."""
    where = value.location if isinstance(value, EnvironmentText) else where
    if not key:
        section, _, key = section.rpartition(".")
    return f"{where}: [{section}] {key}" if section else f"{where}: {key}"
