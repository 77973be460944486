"""Our own files: topology.toml, the format of a recording, and CSV with one parent a line."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.model.toml_text import parse_toml
from pipeline.model.topology import kind_of
from pipeline.topology.source import MAX_NUMBER, Link, Naming, SourceFile, SourceTopology, add_link

_VERSION = 1
MAX_KEY_PARTS = 256
"""Most dots before the `=` of a line: tomllib takes time with their square. Chosen: as a name has characters."""
_REQUIRED = ("entity", "parent")


def read_toml(files: Sequence[SourceFile], naming: Naming) -> SourceTopology:
    """Lines of topology.toml: one table a kind, an entity and its parents a line; `[attributes]`, `[[link]]`."""
    found = SourceTopology()
    for file in files:
        table = _parse_toml(file)
        version = table.pop("version", None)
        if type(version) is not int or version != _VERSION:
            raise file.fault("", f"version = {_shown(version)}", f"version = {_VERSION}")
        attributes, links = table.pop("attributes", {}), table.pop("link", [])
        for kind, lines in table.items():
            for name, above in _pairs(file, f"[{kind}]", lines):
                place = f'[{kind}] "{name[:60]}"'
                if not isinstance(above, list) or not all(isinstance(p, str) for p in above):
                    raise file.fault(place, f"is {_shown(above)}", 'a list of entities like "rack:r1"')
                found.define(file, place, naming.entity(kind, name), (_named(naming, p) for p in above))
        for entity, facts in _pairs(file, "[attributes]", attributes):
            if not isinstance(facts, dict):
                raise file.fault(f'[attributes] "{entity[:60]}"', "is no table", '{ sku = "X" }')
            found.add(file, f'[attributes] "{entity[:60]}"', _named(naming, entity), (), **facts)
        _add_links(found, file, links, naming)
    return found


def _parse_toml(file: SourceFile) -> dict[str, Any]:
    for number, line in enumerate(file.text.splitlines(), 1):
        if (parts := line.partition("=")[0].count(".")) > MAX_KEY_PARTS:
            raise file.fault(f"line {number}", f"a key of {parts + 1} parts", f"at most {MAX_KEY_PARTS}")
    try:
        return parse_toml(file.text)
    except ValueError as error:
        raise file.fault("", f"is not TOML: {error}", "a topology.toml") from error


def _shown(value: Any) -> str:
    """A value for a message: of a list or a table, which may be huge or deep, and of a huge number, its type."""
    if isinstance(value, list):
        return f"a list with a {next((type(part).__name__ for part in value if not isinstance(part, str)), 'str')}"
    if isinstance(value, dict):
        return "a table"
    return f"{value!r}" if not isinstance(value, int) or abs(value) <= MAX_NUMBER else "a number of over 64 bits"


def _pairs(file: SourceFile, place: str, table: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(table, dict):
        raise file.fault(place, f"is {type(table).__name__}", "a table")
    yield from table.items()


def _named(naming: Naming, entity: str) -> str:
    kind, colon, name = entity.partition(":")
    return naming.entity(kind, name) if colon else entity


def _add_links(found: SourceTopology, file: SourceFile, links: Any, naming: Naming) -> None:
    """Adds the cables of `[[link]]` tables: a = "port:n1.mlx5_0", b = "port:l1.4", serial = "..."."""
    if not isinstance(links, list):
        raise file.fault("[[link]]", f"is {type(links).__name__}", "tables with a and b")
    for number, row in enumerate(links):
        place = f"[[link]] {number}"
        texts = {k: v for k, v in row.items() if isinstance(v, str)} if isinstance(row, dict) else {}
        ends = [texts.pop(end, "") for end in "ab"]
        if not all(kind_of(end) == "port" for end in ends if end) or not any(ends):
            raise file.fault(place, f"a = {ends[0][:60]!r}, b = {ends[1][:60]!r}", 'ports like "port:n1.mlx5_0"')
        if not all(ends):
            found.open_ends.append(next(end for end in ends if end))
            continue
        owners = {end: _owner_of(found, end) for end in ends}
        add_link(found, file, place, Link(ends[0], ends[1], texts), owners)


def _owner_of(found: SourceTopology, port: str) -> str:
    """The device of a port: its first parent in the file, else the node of its name."""
    above = found.parents.get(port)
    return above[0] if above else f"node:{port.partition(':')[2].rpartition('.')[0]}"


def read_csv(files: Sequence[SourceFile], naming: Naming) -> SourceTopology:
    """Lines `entity,parent` with further columns as attributes of the entity; several lines, several parents."""
    found = SourceTopology()
    for file in files:
        rows = csv.reader(io.StringIO(file.text.removeprefix("\ufeff")), strict=True)
        try:
            header = [name.strip() for name in next(rows, [])]
            if header[:2] != list(_REQUIRED) or len(set(header)) < len(header):
                raise file.fault("line 1", f"columns {','.join(header)[:80]!r}", "entity,parent and further names")
            for row in rows:
                if row and not row[0].startswith("#"):
                    _add_row(found, file, f"line {rows.line_num}", header, row, naming)
        except csv.Error as error:
            raise file.fault(f"line {rows.line_num}", f"is not CSV: {error}", "entity,parent") from error
    return found


def _add_row(
    found: SourceTopology, file: SourceFile, place: str, header: Sequence[str], row: list[str], naming: Naming
) -> None:
    if len(row) != len(header):
        raise file.fault(place, f"{len(row)} fields", f"{len(header)}, as in line 1")
    values = dict(zip(header, (value.strip() for value in row), strict=True))
    entity, parent = (_named(naming, values.pop(name)) for name in _REQUIRED)
    found.add(file, place, entity, (parent,) if parent else (), **values)
