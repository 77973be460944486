"""Meaning of XIDs and SXids: the shipped xid.toml, overridden by the user's file entry by entry and key by key."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.config.settings import constraint
from pipeline.model.errors import ConfigError
from pipeline.model.regular_files import read_regular_text
from pipeline.model.toml_text import parse_toml
from pipeline.runtime.guides import guide

SHIPPED = Path(__file__).with_name("xid.toml")
SEVERITIES = ("info", "warning", "critical")
"""In ascending order."""
REACHES = ("none", "link", "fabric")


@dataclass(frozen=True, slots=True)
class Xid:
    """One XID. group: the table's `class`. follows, peers: what it may be a consequence of, see xid.toml."""

    code: int
    name: str
    group: str = "unknown"
    severity: str = "warning"
    action: str = "contact support: this code is not in the table"
    next_action: str = "contact support"
    products: tuple[str, ...] = ()
    follows: frozenset[int | str] = frozenset()
    peers: frozenset[int | str] = frozenset()


@dataclass(frozen=True, slots=True)
class SXid:
    """One NVSwitch error. reach: none, link or fabric."""

    code: int
    name: str
    severity: str = "warning"
    reach: str = "link"
    action: str = "contact support: this code is not in the table"
    next_action: str = "contact support"


@dataclass(frozen=True, slots=True)
class XidTable:
    """All known codes. `find_xid` and `find_sxid` return an entry for unknown ones too."""

    version: str
    source: str
    xids: Mapping[int, Xid]
    sxids: Mapping[int, SXid]

    def find_xid(self, code: int) -> Xid:
        """Returns the entry of an XID."""
        return self.xids.get(code) or Xid(code, f"unknown XID {code}")

    def find_sxid(self, code: int) -> SXid:
        """Returns the entry of an SXid."""
        return self.sxids.get(code) or SXid(code, f"unknown SXid {code}")


def load_xid_table(user: Path | None = None) -> XidTable:
    """Returns the shipped table with the entries of `user` over it.

    Raises ConfigError that names file, entry and key.
    """
    table = shipped_xid_table()
    return table if user is None else _merge_file(table, user)


XID_TABLE_SETTING = constraint(
    f"a file over the table of XIDs, {guide('xids.md')}", lambda path: path is None or bool(load_xid_table(path))
)
"""Metadata of a setting that names such a file. The file is checked before anything starts."""


@functools.cache
def shipped_xid_table() -> XidTable:
    """Returns the shipped table."""
    return _merge_file(XidTable("", "", {}, {}), SHIPPED)


def _merge_file(table: XidTable, path: Path) -> XidTable:
    found = read_toml(path)
    for key in found:
        if key not in ("version", "source", "xid", "sxid"):
            raise ConfigError(f"{path}: {key}: unknown key; expected version, source, [[xid]] or [[sxid]]")
    xids, sxids = dict(table.xids), dict(table.sxids)
    for number, entry in numbered_entries(path, found, "xid"):
        codes, keys = _check_entry(f"{path}: [[xid]] number {number}", entry, _XID_KEYS)
        xids |= {code: replace(table.xids.get(code) or Xid(code, f"XID {code}"), **keys) for code in codes}
    for number, entry in numbered_entries(path, found, "sxid"):
        codes, keys = _check_entry(f"{path}: [[sxid]] number {number}", entry, _SXID_KEYS)
        sxids |= {code: replace(table.sxids.get(code) or SXid(code, f"SXid {code}"), **keys) for code in codes}
    version, source = str(found.get("version", "unversioned")), str(found.get("source", path))
    if table.version:
        version, source = f"{table.version}, {path.name} {version}", f"{table.source}; {source}"
    return XidTable(version, source, xids, sxids)


def read_toml(path: Path) -> dict[str, Any]:
    """Returns the tables of a TOML file. Raises ConfigError if it cannot be read or is not TOML."""
    try:
        return parse_toml(read_regular_text(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}; expected a readable TOML file") from None


def numbered_entries(path: Path, found: Mapping[str, Any], kind: str) -> list[tuple[int, dict[str, Any]]]:
    """Returns the tables of an array of tables, numbered from 1. Raises ConfigError if `kind` is anything else."""
    listed = found.get(kind, [])
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise ConfigError(f"{path}: {kind}: expected tables [[{kind}]]")
    return list(enumerate(listed, 1))


KeyCheck = tuple[str, str, Callable[[Any], bool], Callable[[Any], Any]]


def _text_check(key: str, name: str = "") -> KeyCheck:
    return name or key, "a text of 1 to 200 characters", lambda v: isinstance(v, str) and 0 < len(v) <= 200, str


def _choice_check(key: str, choices: tuple[str, ...]) -> KeyCheck:
    return key, f"one of {', '.join(choices)}", lambda v: v in choices, str


def _codes_check(key: str, words: tuple[str, ...]) -> KeyCheck:
    wanted = "a list of codes" + "".join(f' or "{word}"' for word in words)
    return key, wanted, lambda v: isinstance(v, list) and all(_is_code(c) or c in words for c in v), frozenset


def _is_code(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 31


_XID_KEYS: Mapping[str, KeyCheck] = {
    "name": _text_check("name"),
    "class": _text_check("class", "group"),
    "severity": _choice_check("severity", SEVERITIES),
    "action": _text_check("action"),
    "then": _text_check("then", "next_action"),
    "products": (
        "products",
        "a list of texts",
        lambda v: isinstance(v, list) and all(isinstance(p, str) for p in v),
        tuple,
    ),
    "follows": _codes_check("follows", ("any",)),
    "peers": _codes_check("peers", ("sxid",)),
}
_SXID_KEYS: Mapping[str, KeyCheck] = {
    "name": _text_check("name"),
    "severity": _choice_check("severity", SEVERITIES),
    "reach": _choice_check("reach", REACHES),
    "action": _text_check("action"),
    "then": _text_check("then", "next_action"),
}


def _check_entry(
    place: str, entry: Mapping[str, Any], known: Mapping[str, KeyCheck]
) -> tuple[list[int], dict[str, Any]]:
    codes = entry.get("codes")
    if not isinstance(codes, list) or not codes or not all(_is_code(code) for code in codes):
        raise ConfigError(f"{place}: codes = {codes!r}: expected a list of codes such as [79]")
    keys = {}
    for key, value in entry.items():
        if key == "codes":
            continue
        if key not in known:
            raise ConfigError(f"{place}: {key}: unknown key; expected codes, {', '.join(known)}")
        name, wanted, holds, convert = known[key]
        if not holds(value):
            raise ConfigError(f"{place}: {key} = {value!r}: expected {wanted}")
        keys[name] = convert(value)
    return codes, keys
