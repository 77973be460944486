"""Slurm's topology.conf (topology.conf(5): tree and block) and topology.yaml (since 24.11).

A switch with nodes is a leaf, the switches over leaves are spines, those over spines cores. A block is a `block`.
The switches of Slurm are what its administrator wrote, which may be racks or pods: `kinds` of the source renames them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.topology.documents import list_rows, parse_yaml, require_text
from pipeline.topology.hostlist import expand_hosts
from pipeline.topology.source import MAX_PARENTS, Naming, SourceFile, SourceTopology

_PAIR = re.compile(r"([A-Za-z]+)=(?:\"([^\"]*)\"|(\S*))(?:\s+|$)")
_KEYS = {
    "switchname": ("nodes", "switches", "linkspeed"),
    "blockname": ("nodes",),
    "blocksizes": (),
}
_LEVELS = ("leaf", "spine", "core")
_EXPECTED = "SwitchName=, BlockName= or BlockSizes= (topology.conf)"
MAX_BELOW = 1_000_000
"""Most names below the switches and blocks of a source: 30 characters of a host list are 200,000. Chosen: each of the
65,533 nodes that Slurm allows below 15 of them."""
_WIDEST = 1_000_000  # characters of a line; chosen: 65,533 names of 15 characters


@dataclass
class _HostLists:
    """Expands the host lists of a source; size: names that it has below switches and blocks so far."""

    size: int = 0

    def expand(self, file: SourceFile, place: str, text: str, owners: int = 1) -> list[str]:
        """The names that a line puts below a number of owners. Raises UsageError."""
        names = _hosts(file, place, text)
        self.size += owners * len(names)
        if self.size > MAX_BELOW:
            raise file.fault(place, f"over {MAX_BELOW:,} names below switches and blocks", "a smaller file")
        return names


@dataclass
class _Switches:
    """known: name -> (place, nodes, switches below it).  heights: of those whose height is known."""

    lists: _HostLists
    known: dict[str, tuple[str, list[str], list[str]]] = field(default_factory=dict)
    heights: dict[str, int] = field(default_factory=dict)

    def add(self, file: SourceFile, place: str, names: Sequence[str], nodes: str, below: str) -> None:
        """Adds the switches of a line. Raises UsageError."""
        if not names:
            raise file.fault(place, "no name of a switch", "SwitchName=NAME")
        if len(names) > MAX_PARENTS:  # what is below them would have so many parents
            raise file.fault(place, f"{len(names)} switches of the same nodes or switches", f"at most {MAX_PARENTS}")
        hosts, switches = (self.lists.expand(file, place, text, len(names)) for text in (nodes, below))
        if bool(hosts) == bool(switches):
            raise file.fault(place, f"switch {names[0]!r} with {'both' if hosts else 'neither'}", "nodes or switches")
        for name in names:
            if name in self.known:
                raise file.fault(place, f"switch {name!r} again, first in {self.known[name][0]}", "each switch once")
            self.known[name] = place, hosts, switches

    def write(self, file: SourceFile, found: SourceTopology, naming: Naming) -> None:
        """Adds the tree; an unknown or circular child raises UsageError."""
        kinds = {name: _LEVELS[min(self._height(file, name, ()), 2)] for name in self.known}
        for name, (place, nodes, below) in self.known.items():
            entity = naming.entity(kinds[name], name)
            found.add(file, place, entity, ())
            for node in nodes:
                found.add(file, place, naming.entity("node", node), (entity,))
            for child in below:
                found.add(file, place, naming.entity(kinds[child], child), (entity,))

    def _height(self, file: SourceFile, name: str, path: tuple[str, ...]) -> int:
        """Levels of switches below one; visits each switch once, however many paths lead to it."""
        if name in self.heights:
            return self.heights[name]
        place, nodes, below = self.known[name]
        if name in path:
            raise file.fault(place, f"switches form a circle: {' -> '.join((*path, name))}", "a tree")
        if len(path) > _DEEPEST:
            raise file.fault(place, f"switch {name!r} below {len(path)} levels of switches", f"at most {_DEEPEST}")
        if unknown := next((child for child in below if child not in self.known), None):
            raise file.fault(place, f"switch {unknown!r} has no line", "a line for each switch")
        height = 0 if nodes else 1 + max(self._height(file, child, (*path, name)) for child in below)
        if height > _DEEPEST:
            raise file.fault(place, f"switch {name!r} over {height} levels of switches", f"at most {_DEEPEST}")
        self.heights[name] = height
        return height


_DEEPEST = 12
"""Most levels of switches. Chosen: below the 16 of our topology."""


def read_conf(files: Sequence[SourceFile], naming: Naming) -> SourceTopology:
    """The switches and blocks of topology.conf."""
    found, lists = SourceTopology(), _HostLists()
    for file in files:
        tree = _Switches(lists)
        for number, values in _lines(file):
            place = f"line {number}"
            if "switchname" in values:
                names = _hosts(file, place, values["switchname"])
                tree.add(file, place, names, values.get("nodes", ""), values.get("switches", ""))
            elif "blockname" in values:
                nodes = lists.expand(file, place, values.get("nodes", ""))
                _add_block(found, file, place, values["blockname"], nodes, naming)
        tree.write(file, found, naming)
    return found


def _lines(file: SourceFile) -> Iterator[tuple[int, Mapping[str, str]]]:
    """(number, key -> value) of each line; `\\` at its end continues it, `#` begins a comment."""
    begun, whole = 0, ""
    for number, line in enumerate(file.text.splitlines(), 1):
        text = line.partition("#")[0].rstrip()
        begun = begun or number
        if len(whole) + len(text) > _WIDEST:
            raise file.fault(f"line {begun}", f"over {_WIDEST:,} characters", _EXPECTED)
        if text.endswith("\\"):
            whole += text[:-1]
            continue
        if whole := (whole + text).strip():
            yield begun, _parse_line(file, begun, whole)
        begun, whole = 0, ""
    if whole.strip():
        raise file.fault(f"line {begun}", "ends with a continuation", "a further line")


def _parse_line(file: SourceFile, number: int, line: str) -> Mapping[str, str]:
    values: dict[str, str] = {}
    at = 0
    while at < len(line):
        pair = _PAIR.match(line, at)
        if pair is None or pair[1].lower() in values:
            raise file.fault(f"line {number}", f"{line[at : at + 60]!r}", _EXPECTED)
        values[pair[1].lower()], at = pair[2] or pair[3], pair.end()
    first = next(iter(values))
    if first not in _KEYS or not values[first]:
        raise file.fault(f"line {number}", f"{line[:60]!r}", _EXPECTED)
    if unknown := set(values) - {first, *_KEYS[first]}:
        raise file.fault(f"line {number}", f"key {sorted(unknown)[0]!r}", ", ".join(_KEYS[first]) or f"{first} alone")
    return values


def _hosts(file: SourceFile, place: str, text: str) -> list[str]:
    try:
        return expand_hosts(text)
    except ValueError as error:
        raise file.fault(place, f"host list: {error}", "names like n[001-016],m3") from error


def _add_block(
    found: SourceTopology, file: SourceFile, place: str, name: str, nodes: Sequence[str], naming: Naming
) -> None:
    entity = naming.entity("block", name)
    if entity in found.parents:
        raise file.fault(place, f"block {name!r} again", "each block once")
    found.add(file, place, entity, ())
    for node in nodes:
        found.add(file, place, naming.entity("node", node), (entity,))


def read_yaml(files: Sequence[SourceFile], naming: Naming) -> SourceTopology:
    """The switches and blocks of all topologies in topology.yaml; a flat one has none."""
    found, lists = SourceTopology(), _HostLists()
    for file in files:
        document = parse_yaml(file, "topology.yaml of Slurm")
        for place, row in list_rows(document, file, "topologies"):
            require_text(row, file, place, "topology")
            if "tree" in row:
                tree = _Switches(lists)
                for at, switch in list_rows(_part(row, file, place, "tree", "switches"), file, f"{place}.switches"):
                    name = require_text(switch, file, at, "switch")
                    tree.add(file, at, [name], *(_text(switch, file, at, key) for key in ("nodes", "children")))
                tree.write(file, found, naming)
            elif "block" in row:
                for at, block in list_rows(_part(row, file, place, "block", "blocks"), file, f"{place}.blocks"):
                    name = require_text(block, file, at, "block")
                    nodes = lists.expand(file, at, _text(block, file, at, "nodes"))
                    _add_block(found, file, at, name, nodes, naming)
            elif "flat" not in row:
                raise file.fault(place, f"keys {', '.join(map(str, row))[:60]}", "tree, block or flat")
    return found


def _part(row: Mapping[str, Any], file: SourceFile, place: str, kind: str, key: str) -> Any:
    if not isinstance(row[kind], dict):
        raise file.fault(f"{place}.{kind}", f"is {type(row[kind]).__name__}", f"an object with {key}")
    return row[kind].get(key)


def _text(row: Mapping[str, Any], file: SourceFile, place: str, key: str) -> str:
    value = row.get(key, "")
    if not isinstance(value, str):
        raise file.fault(f"{place}.{key}", f"is {type(value).__name__}", "a host list")
    return value
