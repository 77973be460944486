"""What an XID or SXid means: xid.toml as shipped, and over it the file of the user, entry by entry and key by key."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.config.settings import constraint
from pipeline.model.errors import ConfigError

SHIPPED = Path(__file__).with_name("xid.toml")
SEVERITIES = ("info", "warning", "critical")
"""In rising order."""
REACHES = ("none", "link", "fabric")


@dataclass(frozen=True, slots=True)
class Xid:
    """One XID. group: the table's `class`. follows, peers: what it may be a consequence of, see xid.toml."""

    code: int
    name: str
    group: str = "unknown"
    severity: str = "warning"
    action: str = "contact support: this code is not in the table"
    then: str = "contact support"
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
    then: str = "contact support"


@dataclass(frozen=True, slots=True)
class Table:
    """All codes that are known; `xid` and `sxid` give an answer for the others too."""

    version: str
    source: str
    xids: Mapping[int, Xid]
    sxids: Mapping[int, SXid]

    def xid(self, code: int) -> Xid:
        return self.xids.get(code) or Xid(code, f"unknown XID {code}")

    def sxid(self, code: int) -> SXid:
        return self.sxids.get(code) or SXid(code, f"unknown SXid {code}")


def load(user: Path | None = None) -> Table:
    """The shipped table with the entries of `user` over it. ConfigError names file, entry and key."""
    table = shipped()
    return table if user is None else _merged(table, user)


WANTED = constraint("a file over the table of XIDs, docs/xids.md", lambda path: path is None or bool(load(path)))
"""Of a setting that names such a file: the file is looked at before anything starts."""


@functools.cache
def shipped() -> Table:
    return _merged(Table("", "", {}, {}), SHIPPED)


def _merged(table: Table, path: Path) -> Table:
    found = read_toml(path)
    for key in found:
        if key not in ("version", "source", "xid", "sxid"):
            raise ConfigError(f"{path}: {key}: no such key; wanted version, source, [[xid]] and [[sxid]]")
    xids, sxids = dict(table.xids), dict(table.sxids)
    for number, entry in entries(path, found, "xid"):
        codes, keys = _checked(f"{path}: [[xid]] number {number}", entry, _XID_KEYS)
        xids |= {code: replace(table.xids.get(code) or Xid(code, f"XID {code}"), **keys) for code in codes}
    for number, entry in entries(path, found, "sxid"):
        codes, keys = _checked(f"{path}: [[sxid]] number {number}", entry, _SXID_KEYS)
        sxids |= {code: replace(table.sxids.get(code) or SXid(code, f"SXid {code}"), **keys) for code in codes}
    version, source = str(found.get("version", "unversioned")), str(found.get("source", path))
    if table.version:
        version, source = f"{table.version}, {path.name} {version}", f"{table.source}; {source}"
    return Table(version, source, xids, sxids)


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises ConfigError where it cannot be read or is no TOML."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}; wanted a readable TOML file") from None


def entries(path: Path, found: Mapping[str, Any], kind: str) -> list[tuple[int, dict[str, Any]]]:
    """The tables of an array of tables, numbered from 1. Raises ConfigError where `kind` is anything else."""
    listed = found.get(kind, [])
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise ConfigError(f"{path}: {kind}: wanted tables [[{kind}]]")
    return list(enumerate(listed, 1))


Check = tuple[str, str, Callable[[Any], bool], Callable[[Any], Any]]


def _text(key: str, name: str = "") -> Check:
    return name or key, "a text of 1 to 200 characters", lambda v: isinstance(v, str) and 0 < len(v) <= 200, str


def _choice(key: str, choices: tuple[str, ...]) -> Check:
    return key, f"one of {', '.join(choices)}", lambda v: v in choices, str


def _codes(key: str, words: tuple[str, ...]) -> Check:
    wanted = "a list of codes" + "".join(f' or "{word}"' for word in words)
    return key, wanted, lambda v: isinstance(v, list) and all(_code(c) or c in words for c in v), frozenset


def _code(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 31


_XID_KEYS: Mapping[str, Check] = {
    "name": _text("name"),
    "class": _text("class", "group"),
    "severity": _choice("severity", SEVERITIES),
    "action": _text("action"),
    "then": _text("then"),
    "products": (
        "products",
        "a list of texts",
        lambda v: isinstance(v, list) and all(isinstance(p, str) for p in v),
        tuple,
    ),
    "follows": _codes("follows", ("any",)),
    "peers": _codes("peers", ("sxid",)),
}
_SXID_KEYS: Mapping[str, Check] = {
    "name": _text("name"),
    "severity": _choice("severity", SEVERITIES),
    "reach": _choice("reach", REACHES),
    "action": _text("action"),
    "then": _text("then"),
}


def _checked(place: str, entry: Mapping[str, Any], known: Mapping[str, Check]) -> tuple[list[int], dict[str, Any]]:
    codes = entry.get("codes")
    if not isinstance(codes, list) or not codes or not all(_code(code) for code in codes):
        raise ConfigError(f"{place}: codes = {codes!r}: wanted a list of codes such as [79]")
    keys = {}
    for key, value in entry.items():
        if key == "codes":
            continue
        if key not in known:
            raise ConfigError(f"{place}: {key}: no such key; wanted codes, {', '.join(known)}")
        name, wanted, holds, convert = known[key]
        if not holds(value):
            raise ConfigError(f"{place}: {key} = {value!r}: wanted {wanted}")
        keys[name] = convert(value)
    return codes, keys
