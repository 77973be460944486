"""`fleetpulse config`: checks the files of the configuration, shows what they amount to, compares two of them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.commands.start_checks import check_receivers
from pipeline.config import files
from pipeline.config.addresses import hide_addresses
from pipeline.config.changes import compare_configs, flatten
from pipeline.config.layers import PREFIX, Layer, list_layers
from pipeline.config.origin import check_with_origin
from pipeline.config.sections import Config, build_config, load_config
from pipeline.model.errors import ConfigError

Rows = Sequence[Mapping[str, Any]]
SHOWN = ("key", "value", "from")
COMPARED = ("key", "here", "there")
CHECKED = ("file", "state", "found")
DEFAULT = "default"


def run_config(given: argparse.Namespace) -> tuple[Rows, Sequence[str]]:
    """Returns the rows of a verb and their columns. Raises ConfigError about a configuration that is wrong."""
    environ = dict(os.environ)
    if given.verb in ("show", "diff") and given.node:
        environ[files.NODE_VARIABLE] = given.node
    if given.verb == "diff":
        found = compare_configs(load_config(given.config, environ), load_config(given.other, environ))
        return [
            {**row, **{s: hide_addresses(row[s], row["key"]) for s in ("here", "there")}} for row in found
        ], COMPARED
    if given.verb == "show":
        rows = show_config(load_config(given.config, environ), given.config, environ)
        return [row for row in rows if not given.changed or row["from"] != DEFAULT], SHOWN
    check_with_origin(load_config(given.config), check_receivers)
    return check_files(files.find_file(given.config, environ), environ), CHECKED


def show_empty(rows: Rows) -> Rows:
    """Returns rows of a table in which an empty list or text is written out; blank is then a key that is missing."""
    return [{key: repr(one) if one in ([], "", {}) else one for key, one in row.items()} for row in rows]


def check_files(path: Path | None, environ: Mapping[str, str]) -> Rows:
    """Returns a row per file and group, all of which are valid. Raises ConfigError for a group of other nodes too."""
    if path is None:
        return [{"file": "", "state": "ok", "found": "no file: every key has its default"}]
    layers: list[Layer] = []
    rows, groups = [], []
    for file in files.list_files(path):
        table = files.read_table(file)
        found = files.take_groups(str(file), table)
        layers.append(Layer(str(file), table))
        groups += found
        rows.append({"file": str(file), "state": "ok", "found": f"{len(table)} sections, {len(found)} groups"})
    for where, patterns, table in groups:
        _check_group(layers, Layer(where, table), environ)
        rows.append({"file": where, "state": "ok", "found": f"for nodes {', '.join(patterns)}"})
    return rows


def _check_group(layers: list[Layer], group: Layer, environ: Mapping[str, str]) -> None:
    """Raises ConfigError for a group that is wrong. Other nodes may lack the variables of this one: they count only
    where the files need them without the group too."""
    try:
        check_receivers(build_config([*layers, group], group.where))
    except ConfigError:
        if _are_sound(layers):
            raise
        check_receivers(build_config([*layers, group, *list_layers(None, environ)], group.where))


def _are_sound(layers: list[Layer]) -> bool:
    try:
        check_receivers(build_config(layers, ""))
    except ConfigError:
        return False
    return True


def show_config(config: Config, path: str | None, environ: Mapping[str, str]) -> Rows:
    """Returns one row per key in force, and what set it: a file, a group, a variable of the environment, a default."""
    file = files.find_file(path, environ)
    layers = list(files.read_layers(file, environ)) if file else []
    variables = {name.removeprefix(PREFIX).lower().replace("__", "."): name for name in environ}
    rows = []
    for key, value in flatten(config):
        origin = DEFAULT
        for where, table in layers:
            origin = where if _is_set(table, key) else origin
        variable = next((name for k, name in variables.items() if key == k or key.startswith((f"{k}.", f"{k}["))), None)
        rows.append({"key": key, "value": hide_addresses(value, key), "from": variable or origin})
    return rows


def _is_set(table: Mapping[str, Any], key: str) -> bool:
    """Returns whether a table sets a key; one element of a list is set with the list."""
    found: Any = table
    for part in key.split("."):
        name = part.partition("[")[0]
        if not isinstance(found, dict) or name not in found:
            return False
        found = found[name]
        if "[" in part:
            return True
    return True
