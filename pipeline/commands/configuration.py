"""`fleetpulse config`: checks the files of the configuration, shows what they amount to, compares two of them."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.config import files
from pipeline.config.sections import PREFIX, Config, load_config
from pipeline.config.settings import build_section
from pipeline.model.errors import UsageError

Rows = Sequence[Mapping[str, Any]]
SHOWN = ("key", "value", "from")
COMPARED = ("key", "here", "there")
CHECKED = ("file", "state", "found")
DEFAULT = "default"


def run_config(given: argparse.Namespace) -> tuple[Rows, Sequence[str]]:
    """Returns the rows of a verb and their columns. Raises ConfigError about a configuration that is wrong."""
    if given.verb == "diff":
        return compare_configs(load_config(given.config), load_config(given.other)), COMPARED
    environ = dict(os.environ)
    if given.verb == "show":
        if given.node:
            environ[files.NODE_VARIABLE] = given.node
        rows = show_config(load_config(given.config, environ), given.config, environ)
        return [row for row in rows if not given.changed or row["from"] != DEFAULT], SHOWN
    load_config(given.config)
    return check_files(files.find_file(given.config, environ)), CHECKED


def check_files(path: Path | None) -> Rows:
    """Returns a row per file and group, all of which are valid. Raises ConfigError for a group of other nodes too."""
    if path is None:
        return [{"file": "", "state": "ok", "found": "no file: every key has its default"}]
    whole: files.Table = {}
    rows, groups = [], []
    for file in files.list_files(path):
        table = files.read_table(file)
        found = files.take_groups(str(file), table)
        whole = files.merge_tables(whole, table)
        groups += found
        rows.append({"file": str(file), "state": "ok", "found": f"{len(table)} sections, {len(found)} groups"})
    for where, patterns, table in groups:
        build_section(Config, files.merge_tables(whole, table), where)
        rows.append({"file": where, "state": "ok", "found": f"for nodes {', '.join(patterns)}"})
    return rows


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
        rows.append({"key": key, "value": value, "from": variable or origin})
    return rows


def compare_configs(here: Config, there: Config) -> Rows:
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


def list_changed_keys(before: Config, after: Config) -> list[str]:
    """Returns the keys that a reload changes, for the audit. Raises UsageError for those that need a new process.

    A reload reads the same store: another path would be another pipeline.
    """
    changed = [str(row["key"]) for row in compare_configs(before, after)]
    if fixed := [key for key in changed if key in ("store.path", "site.name")]:
        raise UsageError(f"{after.source}: {', '.join(fixed)} changed: restart the pipeline for that")
    return changed
