"""What a configuration is made of, in order: files, groups, variables of the environment; and which of them is wrong.

Only the whole configuration is judged: a drop-in or a variable may complete what comes before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pipeline.config import files
from pipeline.config.settings import NO_SECTIONS, EnvironmentText
from pipeline.model.errors import ConfigError

T = TypeVar("T")
PREFIX = "FLEETPULSE__"
"""Environment variables PREFIX + SECTION__KEY override keys."""


@dataclass(frozen=True)
class Layer:
    """A file, a group, or a variable; then `name` is the variable's and `text` its value."""

    where: str
    table: Mapping[str, Any]
    name: str = ""
    text: str = ""


Layers = Sequence[Layer]
Make = Callable[[Layers, str], T]
"""Builds something of layers, with errors that name the second argument. Raises ConfigError."""


def list_layers(path: Path | None, environ: Mapping[str, str], texts: files.Texts | None = None) -> list[Layer]:
    """Returns file, drop-ins, groups of this node, variables. Raises ConfigError for a file that cannot be read.

    texts: of the files, if they were read already.
    """
    layers = [Layer(where, table) for where, table in files.read_layers(path, environ, texts)]
    for layer in layers:
        for name in NO_SECTIONS:
            if name in layer.table:
                raise ConfigError(f"{layer.where}: [{name}] is not a section")
    names = [name for name in environ if name.startswith(PREFIX)]
    return [*layers, *(Layer(f"environment: {name}", {}, name, environ[name]) for name in names)]


def merge_layers(layers: Layers) -> tuple[files.Table, ConfigError | None]:
    """Returns their keys together, and the fault of a variable that can be no key of them."""
    table, wrong = files.Table(), None
    for layer in layers:
        try:
            above = _nest(table, layer.name, layer.text) if layer.name else layer.table
        except ConfigError as error:
            wrong = wrong or error
            continue
        table = files.merge_tables(table, above)
    return table, wrong


def make_with_origin(layers: Layers, source: str, make: Make[T]) -> T:
    """Returns make(layers, source). A ConfigError of it names the layer that is wrong in place of the source."""
    try:
        return make(layers, source)
    except ConfigError as error:
        where = find_origin(layers, source, make, str(error))
        if where != source:
            make(layers, where)
        raise


def find_origin(layers: Layers, source: str, make: Make[Any], wrong: str) -> str:
    """Returns with which layer an error begins: before it, all is sound. The source if it is about none of them.

    Where what comes before has another error, which a later layer ends, the layer is that of the key with which the
    error goes.
    """
    first, before = len(layers), _try(make, layers, source)
    if before != wrong:
        return source
    while first and before == wrong:
        first -= 1
        before = _try(make, layers[:first], source)
    if before is None:
        return layers[first].where
    needed = _reduce([one for layer in layers for one in _split(layer)], lambda some: _try(make, some, source) == wrong)
    ends = [one for one in needed if _try(make, [other for other in needed if other is not one], source) is None]
    return (ends or needed or [Layer(source, {})])[-1].where


def _try(make: Make[Any], layers: Layers, source: str) -> str | None:
    """Returns the fault of layers; None if there is none."""
    try:
        make(layers, source)
    except ConfigError as error:
        return str(error)
    return None


def _reduce(layers: list[Layer], is_enough: Callable[[Layers], bool]) -> list[Layer]:
    """Returns few layers that are enough, of which none can be left out: halves are tried, then ever smaller parts."""
    size = len(layers)
    while size:
        size, place, before = max(size // 2, 1), 0, len(layers)
        while place < len(layers):
            fewer = layers[:place] + layers[place + size :]
            layers, place = (fewer, place) if is_enough(fewer) else (layers, place + size)
        if size == 1 and len(layers) == before:
            break
    return layers


def _split(layer: Layer) -> Iterator[Layer]:
    """Yields a layer key by key; a list is one key, as later ones replace it."""
    if layer.name:
        yield layer
        return
    for keys, value in flatten_keys(layer.table):
        yield Layer(layer.where, _wrap(keys, value))


def flatten_keys(table: Mapping[str, Any]) -> Iterator[tuple[list[str], Any]]:
    """Yields (names, value) of each key of a table and those below it; a list is one key."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from (([key, *keys], below) for keys, below in flatten_keys(value))
        else:
            yield [key], value


def _wrap(keys: Sequence[str], value: Any) -> files.Table:
    for key in reversed(keys):
        value = {key: value}
    found: files.Table = value
    return found


def _nest(table: Mapping[str, Any], name: str, text: str) -> files.Table:
    """Returns what a variable sets above a table. Raises ConfigError for a name that can be no key of it."""
    keys = name.removeprefix(PREFIX).lower().split("__")
    if len(keys) < 2:
        raise ConfigError(f"environment: {name}: expected {PREFIX}SECTION__KEY")
    if keys[0] in NO_SECTIONS:
        raise ConfigError(f"environment: {name}: [{keys[0]}] is not a section")
    below: Any = table
    for key in keys[:-1]:
        below = below.get(key, {})
        if not isinstance(below, dict):
            raise ConfigError(f"environment: {name}: '{key}' is not a section")
    variable = EnvironmentText(text)
    variable.name = name
    return _wrap(keys, variable)
