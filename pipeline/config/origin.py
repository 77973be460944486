"""Which file an error is about, for keys that are checked by their owner, such as a detector, after all are merged."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from pipeline.config import files
from pipeline.config.sections import PREFIX, Config, override
from pipeline.config.settings import build_section
from pipeline.model.errors import ConfigError

T = TypeVar("T")


def check_with_origin(config: Config, check: Callable[[Config], T]) -> T:
    """Returns check(config). A ConfigError of it names the drop-in, group or variable with which it began."""
    try:
        return check(config)
    except ConfigError as error:
        wrong = str(error).replace(config.source, "")
        for layer in _list_layers(config):
            try:
                check(layer)
            except ConfigError as found:
                if str(found).replace(layer.source, "") == wrong:
                    raise found from None
        raise


def _list_layers(config: Config) -> Iterator[Config]:
    """Yields the configuration as it is after each file, group and variable of the environment, with that as its
    source; one that only those after it complete is left out."""
    table: files.Table = {}
    file = Path(config.source)
    for where, layer in files.read_layers(file, os.environ) if file.is_file() else ():
        table = files.merge_tables(table, layer)
        yield from _build(table, where)
    for name, text in os.environ.items():
        if name.startswith(PREFIX):
            override(table, name, text)
            yield from _build(table, f"environment: {name}")


def _build(table: files.Table, where: str) -> Iterator[Config]:
    with contextlib.suppress(ConfigError):
        yield build_section(Config, {**table, "source": where}, where)
