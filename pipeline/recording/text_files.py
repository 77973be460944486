"""Text files of a recording: signals.toml, topology.toml and events.jsonl. Errors name file and line."""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pipeline.model.errors import UsageError
from pipeline.model.records import Event, from_iso, iso
from pipeline.model.signals import Kind, Signal, extend_catalogue
from pipeline.model.topology import Topology, kind_of

VERSION = 1
_KEYS = ("unit", "kind", "class", "help", "interval", "valid", "harm", "states", "normal")
_REQUIRED = _KEYS[:4]
_HARM = ("up", "down", "both")


def read_signals(path: str | Path) -> dict[str, Signal]:
    """The catalogue with the signals of a signals.toml; a declaration wins. Raises UsageError naming file and key."""
    table = _toml(path, "signals.toml")
    _only(table, ("version", "signals"), f"{path}")
    declared = table.get("signals", {})
    if not isinstance(declared, dict):
        raise UsageError(f'{path}: signals = {declared!r}; wanted a table [signals."NAME"] per signal')
    return extend_catalogue(_signal(name, line, f'{path}: [signals."{name}"]') for name, line in declared.items())


def read_topology(path: str | Path) -> Topology:
    """The graph of a topology.toml. Raises UsageError naming file and line."""
    table = _toml(path, "topology.toml")
    attributes = table.pop("attributes", {})
    table.pop("version")
    parents: dict[str, tuple[str, ...]] = {}
    for kind, lines in table.items():
        if not isinstance(lines, dict):
            raise UsageError(f"{path}: {kind} = {lines!r}; wanted a table [{kind}] of entities and their parents")
        for name, above in lines.items():
            if not isinstance(above, list) or not all(isinstance(p, str) and ":" in p.strip(":") for p in above):
                raise UsageError(f'{path}: [{kind}] "{name}" = {above!r}; wanted a list of entities like "node:n042"')
            parents[f"{kind}:{name}"] = tuple(above)
    if not isinstance(attributes, dict) or not all(isinstance(facts, dict) for facts in attributes.values()):
        raise UsageError(f'{path}: [attributes]: wanted lines like "node:n042" = {{ sku = "X" }}')
    try:
        return Topology(parents, attributes)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def read_events(paths: Iterable[str | Path]) -> list[Event]:
    """Events of several events.jsonl in order of time. Raises UsageError naming file and line.

    A last line without its end that is no event was torn off while it was written, and is passed over.
    """
    found = [event for path in paths for event in _events(Path(path))]
    found.sort(key=lambda e: (e.time, e.entity, e.kind))
    return found


def _events(path: Path) -> list[Event]:
    found = []
    *lines, last = _read_text(path, "events, one JSON object per line").split("\n")
    for number, line in enumerate(lines if _torn(last) else [*lines, last], 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            event = Event(from_iso(row["time"]), row["entity"], row["kind"], row.get("data") or {})
            sound = ":" in event.entity and isinstance(event.kind, str) and isinstance(event.data, dict)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path}: line {number}: {_why(error)}; wanted time, entity, kind and data") from error
        if not sound:
            raise UsageError(f"{path}: line {number}: wanted entity (kind:name), kind (text), data (object)")
        found.append(event)
    return found


def _torn(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return True
    return False


def _why(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _read_text(path: str | Path, wanted: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}; wanted {wanted}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not UTF-8 text: {error}; wanted {wanted}") from error


def _toml(path: str | Path, wanted: str) -> dict[str, Any]:
    """A TOML file of version 1."""
    try:
        table = tomllib.loads(_read_text(path, f"a {wanted}"))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: is not TOML: {error}") from error
    found = table.get("version")
    if type(found) is not int or found != VERSION:
        raise UsageError(f"{path}: version = {found!r}; wanted version = {VERSION}")
    return table


def _only(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Refuses unknown keys, with a suggestion."""
    for key in table:
        if key not in known:
            close = difflib.get_close_matches(key, known, 1)
            mend = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(known)}"
            raise UsageError(f"{where}: {key}: no such key; {mend}")


def _signal(name: str, line: Any, where: str) -> Signal:
    """One [signals."NAME"] table."""
    if not isinstance(line, dict):
        raise UsageError(f"{where}: is {line!r}; wanted a table")
    _only(line, _KEYS, where)
    for key in _REQUIRED:
        if not isinstance(line.get(key), str) or not line[key]:
            found = f"= {line[key]!r}" if key in line else "is missing"
            raise UsageError(f"{where}: {key} {found}; wanted a text")
    _one_of(line["kind"], get_args(Kind), f"{where}: kind")
    _one_of(line.get("harm", "both"), _HARM, f"{where}: harm")
    states, normal = (_texts(line.get(key, []), f"{where}: {key}") for key in ("states", "normal"))
    if not set(normal) <= set(states):
        raise UsageError(f"{where}: normal = {list(normal)}; wanted some of states = {list(states)}")
    return Signal(
        name,
        line["unit"],
        line["kind"],
        line["class"],
        "f8",
        line["help"],
        "declared",
        valid=_valid(line.get("valid"), where),
        states=states,
        normal=normal,
        harm=line.get("harm", "both"),
        interval=_interval(line.get("interval"), where),
    )


def _one_of(value: Any, wanted: tuple[str, ...], where: str) -> None:
    if value not in wanted:
        close = difflib.get_close_matches(str(value), wanted, 1)
        mend = f"did you mean '{close[0]}'?" if close else f"wanted one of {', '.join(wanted)}"
        raise UsageError(f"{where} = {value!r}: {mend}")


def _texts(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise UsageError(f"{where} = {value!r}; wanted a list of texts")
    return tuple(value)


def _valid(value: Any, where: str) -> tuple[float, float]:
    if value is None:
        return -math.inf, math.inf
    if not isinstance(value, list) or len(value) != 2 or not all(map(_number, value)) or value[0] > value[1]:
        raise UsageError(f"{where}: valid = {value!r}; wanted [lowest, highest]")
    return float(value[0]), float(value[1])


def _interval(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if not _number(value) or value <= 0:
        raise UsageError(f"{where}: interval = {value!r}; wanted seconds above 0")
    return float(value)


def _number(value: Any) -> bool:
    return type(value) in (int, float) and not math.isnan(value)


def event_json(event: Event) -> dict[str, Any]:
    """The line of events.jsonl."""
    return {"time": iso(event.time), "entity": event.entity, "kind": event.kind, "data": dict(event.data)}


def json_line(row: Mapping[str, Any]) -> str:
    """One object on one line."""
    return json.dumps(row, separators=(",", ":"), ensure_ascii=False) + "\n"


def write_topology(
    path: Path, parents: Mapping[str, Sequence[str]], attributes: Mapping[str, Mapping[str, object]]
) -> None:
    """topology.toml: one table per kind; entities without parents need no line."""
    path.write_text(topology_text(parents, attributes), encoding="utf-8")


def topology_text(parents: Mapping[str, Sequence[str]], attributes: Mapping[str, Mapping[str, object]]) -> str:
    """What topology.toml holds. Facts that are not known (None) have no place in TOML and are left out."""
    lines = ["version = 1"]
    kinds = dict.fromkeys(kind_of(entity) for entity, above in parents.items() if above)
    for kind in kinds:
        lines += ["", f"[{kind}]"]
        mine = (e for e, above in parents.items() if above and kind_of(e) == kind)
        lines += [f"{_toml_string(e.split(':', 1)[1])} = {_toml_value(parents[e])}" for e in mine]
    if attributes:
        lines += [
            "",
            "[attributes]",
            *(f"{_toml_string(entity)} = {_toml_value(facts)}" for entity, facts in attributes.items()),
        ]
    return "\n".join(lines) + "\n"


def _toml_string(text: str) -> str:
    """A TOML basic string; JSON's escapes are TOML's, but for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml_value(one) for one in value if one is not None)}]"
    if isinstance(value, Mapping):
        inside = ", ".join(
            f"{_toml_string(str(key))} = {_toml_value(one)}" for key, one in value.items() if one is not None
        )
        return f"{{ {inside} }}"
    return repr(value) if isinstance(value, int | float) else _toml_string(str(value))
