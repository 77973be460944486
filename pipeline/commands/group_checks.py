"""What `config check` refuses about [[groups]], also of other nodes: a group is judged with what goes with it.

That are the files and those groups that apply to all of its nodes. What only some of its nodes have may complete it.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.commands.start_checks import check_receivers
from pipeline.config.layers import Layer, list_layers, make_with_origin
from pipeline.config.sections import Config, build_config
from pipeline.model.errors import ConfigError

Check = Callable[[Config], object]
"""Raises ConfigError for what the owners of keys refuse."""
_ROUTING = {"notify", "incidents"}
"""Sections of a pipeline, whose groups may be the only ones that have receivers."""
_STARS, _MARKS = ("", "7", "z-9.y"), "7z"


@dataclass(frozen=True)
class Group:
    """One of [[groups]]: its sections and the patterns of its nodes."""

    layer: Layer
    patterns: Sequence[str]


def check_group(
    files: Sequence[Layer], groups: Sequence[Group], group: Group, environ: Mapping[str, str], owners: Check
) -> None:
    """Raises ConfigError for a group that is wrong. Other nodes may lack the variables of this one: they count only
    where the files need them without the group too."""
    wide = [*files, *(one.layer for one in groups if one is group or _covers(one, group))]
    without = [layer for layer in wide if layer is not group.layer]
    variables, where = list_layers(None, environ), group.layer.where

    def build(layers: Sequence[Layer], source: str) -> None:
        config = build_config(layers, source)
        if group.layer.table.keys() & _ROUTING:
            check_receivers(config)

    def judge(layers: Sequence[Layer], source: str) -> None:
        owners(build_config(layers, source))

    try:
        make_with_origin(wide, where, build)
    except ConfigError:
        if _is_sound(without, build):
            raise
        make_with_origin([*wide, *variables], where, build)
    sets = itertools.chain([wide], _list_sets(files, groups, group))
    if any(_is_sound([*one, *more], judge) for one in sets for more in ([], variables)):
        return
    for more in ([], variables):
        if _is_sound([*without, *more], judge):
            judge([*wide, *more], where)


def _is_sound(layers: Sequence[Layer], check: Callable[[Sequence[Layer], str], None]) -> bool:
    try:
        check(layers, "")
    except ConfigError:
        return False
    return True


def _list_sets(files: Sequence[Layer], groups: Sequence[Group], group: Group) -> Iterator[list[Layer]]:
    """Yields what some nodes of a group have: its own, and those that another group names too."""
    for name in dict.fromkeys(name for one in groups for name in _list_names(one)):
        if _has_node(group, name):
            yield [*files, *(one.layer for one in groups if _has_node(one, name))]


def _covers(one: Group, other: Group) -> bool:
    """Returns whether `one` applies to all nodes of the other, as far as their examples show."""
    return all(_has_node(one, name) for name in _list_names(other))


def _has_node(group: Group, name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in group.patterns)


def _list_names(group: Group) -> list[str]:
    """Returns examples of names that the patterns match."""
    found = []
    for pattern in group.patterns:
        chosen = re.sub(r"\[([^]]+)\]", lambda match: match[1][0], pattern)
        names = [chosen.replace("*", star).replace("?", mark) for star in _STARS for mark in _MARKS]
        found += [name for name in names if fnmatch.fnmatchcase(name, pattern)] or [pattern]
    return list(dict.fromkeys(found))
