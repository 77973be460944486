"""Which file an error is about, for keys that are checked by their owner, such as a detector, after all are merged."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pipeline.config.layers import Layers, find_origin, list_layers
from pipeline.config.sections import Config, build_config
from pipeline.model.errors import ConfigError

T = TypeVar("T")


def check_with_origin(config: Config, check: Callable[[Config], T]) -> T:
    """Returns check(config). A ConfigError of it names the drop-in, group or variable with which it began."""
    try:
        return check(config)
    except ConfigError as error:
        where = _find_origin(config, check, str(error))
        if where != config.source:
            check(dataclasses.replace(config, source=where))
        raise


def _find_origin(config: Config, check: Callable[[Config], Any], wrong: str) -> str:
    def make(layers: Layers, where: str) -> None:
        check(build_config(layers, where))

    file = Path(config.source)
    try:
        layers = list_layers(file if file.is_file() else None, os.environ)
    except ConfigError:  # it was replaced since the configuration was read
        return config.source
    return find_origin(layers, config.source, make, wrong)
