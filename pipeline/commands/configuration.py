"""`fleetpulse config`: checks the files of the configuration, shows what they amount to, compares two of them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.commands.group_checks import Check, Group, check_group
from pipeline.commands.start_checks import check_advice, check_listeners, check_receivers, find_missing_secrets
from pipeline.config import files
from pipeline.config.addresses import hide_addresses
from pipeline.config.changes import compare_configs, flatten
from pipeline.config.layers import PREFIX, Layer
from pipeline.config.origin import check_with_origin
from pipeline.config.sections import Config, load_config

Rows = Sequence[Mapping[str, Any]]
SHOWN = ("key", "value", "from")
COMPARED = ("key", "here", "there")
CHECKED = ("file", "state", "found")
DEFAULT = "default"


def run_config(given: argparse.Namespace, owners: Check = lambda _: None) -> tuple[Rows, Sequence[str]]:
    """Returns the rows of a verb and their columns. Raises ConfigError about a configuration that is wrong.

    owners: what else a group of other nodes must be.
    """
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
        if given.node:
            rows = [{**row, "from": "--node"} if row["from"] == files.NODE_VARIABLE else row for row in rows]
        return [row for row in rows if not given.changed or row["from"] != DEFAULT], SHOWN
    config = load_config(given.config)
    if given.agent:
        needed = {"file": config.source, "state": "ok", "found": "what an agent of this node needs"}
        return [needed, *_list_replaced(config)], CHECKED
    check_with_origin(config, check_receivers)
    check_with_origin(config, check_listeners)
    check_with_origin(config, check_advice)
    found = check_files(files.find_file(given.config, environ), environ, owners)
    return [*found, *_list_replaced(config), *_list_missing_secrets(config)], CHECKED


def _list_replaced(config: Config) -> Rows:
    """Returns a row per list of tables of which a part is not in force; that is allowed, so it is no error."""
    rows = (line.partition(": ") for line in config.replaced)
    return [{"file": where, "state": "warning", "found": found} for where, _, found in rows]


def _list_missing_secrets(config: Config) -> Rows:
    """Returns a row per secret's file that is not there, which is no error here: it may be made before the start."""
    return [
        {"file": str(path), "state": "missing", "found": f"{key}: no such file; expected before the pipeline starts"}
        for path, key in find_missing_secrets(config)
    ]


def show_empty(rows: Rows) -> Rows:
    """Returns rows of a table in which an empty list or text is written out; blank is then a key that is missing."""
    return [{key: repr(one) if one in ([], "", {}) else one for key, one in row.items()} for row in rows]


def check_files(path: Path | None, environ: Mapping[str, str], owners: Check) -> Rows:
    """Returns a row per file and group, all of which are valid. Raises ConfigError for a group of other nodes too."""
    if path is None:
        return [{"file": "", "state": "ok", "found": "no file: every key has its default"}]
    layers: list[Layer] = []
    rows: list[Mapping[str, Any]] = []
    groups: list[Group] = []
    for file in files.list_files(path):
        table = files.read_table(file)
        found = files.take_groups(str(file), table)
        layers.append(Layer(str(file), table))
        groups += [Group(Layer(where, sections), patterns) for where, patterns, sections in found]
        rows.append({"file": str(file), "state": "ok", "found": f"{len(table)} sections, {len(found)} groups"})
    for group in groups:
        check_group(layers, groups, group, environ, owners)
        rows.append({"file": group.layer.where, "state": "ok", "found": f"for nodes {', '.join(group.patterns)}"})
    return rows


def show_config(config: Config, path: str | None, environ: Mapping[str, str]) -> Rows:
    """Returns one row per key in force, and what set it: a file, a group, a variable of the environment, a default."""
    file = files.find_file(path, environ)
    layers = list(files.read_layers(file, environ)) if file else []
    variables = {
        name.removeprefix(PREFIX).lower().replace("__", "."): name for name in environ if name.startswith(PREFIX)
    }
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
