"""Text files of a recording: signals.toml, topology.toml and events.jsonl. Errors name file and line."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pipeline.model.errors import UsageError
from pipeline.model.records import Event, from_iso, iso
from pipeline.model.signals import Kind, Signal, extend_catalogue
from pipeline.model.toml_text import parse_toml
from pipeline.model.topology import Topology, kind_of

VERSION = 1
_KEYS = ("unit", "kind", "class", "help", "interval", "valid", "harm", "states", "normal")
_REQUIRED = _KEYS[:4]
_HARM = ("up", "down", "both")


def read_signals(path: str | Path) -> dict[str, Signal]:
    """The catalogue with the signals of a signals.toml, which take precedence. Raises UsageError naming file and
    key."""
    table = _read_toml(path, "signals.toml")
    _reject_unknown(table, ("version", "signals"), f"{path}")
    declared = table.get("signals", {})
    if not isinstance(declared, dict):
        raise UsageError(f'{path}: signals = {declared!r}; expected a table [signals."NAME"] per signal')
    return extend_catalogue(_parse_signal(name, line, f'{path}: [signals."{name}"]') for name, line in declared.items())


def read_topology(path: str | Path) -> Topology:
    """The topology in a topology.toml. Raises UsageError naming file and line."""
    table = _read_toml(path, "topology.toml")
    attributes = table.pop("attributes", {})
    table.pop("version")
    parents: dict[str, tuple[str, ...]] = {}
    for kind, lines in table.items():
        if not isinstance(lines, dict):
            raise UsageError(f"{path}: {kind} = {lines!r}; expected a table [{kind}] of entities and their parents")
        for name, above in lines.items():
            if not isinstance(above, list) or not all(isinstance(p, str) and ":" in p.strip(":") for p in above):
                raise UsageError(f'{path}: [{kind}] "{name}" = {above!r}; expected a list of entities like "node:n042"')
            parents[f"{kind}:{name}"] = tuple(above)
    if not isinstance(attributes, dict) or not all(isinstance(facts, dict) for facts in attributes.values()):
        raise UsageError(f'{path}: [attributes]: expected lines like "node:n042" = {{ sku = "X" }}')
    try:
        return Topology(parents, attributes)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def read_events(paths: Iterable[str | Path]) -> list[Event]:
    """Events of events.jsonl files in order of time. Raises UsageError naming file and line.

    An incomplete last line without its end was cut off during writing, and is skipped.
    """
    found = [event for path in paths for event in _read_event_file(Path(path))]
    found.sort(key=lambda e: (e.time, e.entity, e.kind))
    return found


def _read_event_file(path: Path) -> list[Event]:
    found = []
    *lines, last = _read_text(path, "events, one JSON object per line").split("\n")
    for number, line in enumerate(lines if _is_torn(last) else [*lines, last], 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            event = Event(from_iso(row["time"]), row["entity"], row["kind"], row.get("data") or {})
            sound = ":" in event.entity and isinstance(event.kind, str) and isinstance(event.data, dict)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{path}: line {number}: {_describe_error(error)}; expected time, entity, kind and data"
            ) from error
        if not sound:
            raise UsageError(f"{path}: line {number}: expected entity (kind:name), kind (text), data (object)")
        found.append(event)
    return found


def _is_torn(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return True
    return False


def _describe_error(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _read_text(path: str | Path, wanted: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}; expected {wanted}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not UTF-8 text: {error}; expected {wanted}") from error


def _read_toml(path: str | Path, wanted: str) -> dict[str, Any]:
    """The table in a TOML file of version 1."""
    try:
        table = parse_toml(_read_text(path, f"a {wanted}"))
    except ValueError as error:
        raise UsageError(f"{path}: is not TOML: {error}") from error
    found = table.get("version")
    if type(found) is not int or found != VERSION:
        raise UsageError(f"{path}: version = {found!r}; expected version = {VERSION}")
    return table


def _reject_unknown(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Raises UsageError on unknown keys, with a suggestion."""
    for key in table:
        if key not in known:
            close = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(known)}"
            raise UsageError(f"{where}: {key}: no such key; {hint}")


def _parse_signal(name: str, line: Any, where: str) -> Signal:
    """The signal of a [signals."NAME"] table."""
    if not isinstance(line, dict):
        raise UsageError(f"{where}: is {line!r}; expected a table")
    _reject_unknown(line, _KEYS, where)
    for key in _REQUIRED:
        if not isinstance(line.get(key), str) or not line[key]:
            found = f"= {line[key]!r}" if key in line else "is missing"
            raise UsageError(f"{where}: {key} {found}; expected a text")
    _check_choice(line["kind"], get_args(Kind), f"{where}: kind")
    _check_choice(line.get("harm", "both"), _HARM, f"{where}: harm")
    states, normal = (_parse_texts(line.get(key, []), f"{where}: {key}") for key in ("states", "normal"))
    if not set(normal) <= set(states):
        raise UsageError(f"{where}: normal = {list(normal)}; expected some of states = {list(states)}")
    return Signal(
        name,
        line["unit"],
        line["kind"],
        line["class"],
        "f8",
        line["help"],
        "declared",
        valid=_parse_valid(line.get("valid"), where),
        states=states,
        normal=normal,
        harm=line.get("harm", "both"),
        interval=_parse_interval(line.get("interval"), where),
    )


def _check_choice(value: Any, wanted: tuple[str, ...], where: str) -> None:
    if value not in wanted:
        close = difflib.get_close_matches(str(value), wanted, 1)
        hint = f"did you mean '{close[0]}'?" if close else f"expected one of {', '.join(wanted)}"
        raise UsageError(f"{where} = {value!r}: {hint}")


def _parse_texts(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise UsageError(f"{where} = {value!r}; expected a list of texts")
    return tuple(value)


def _parse_valid(value: Any, where: str) -> tuple[float, float]:
    if value is None:
        return -math.inf, math.inf
    if not isinstance(value, list) or len(value) != 2 or not all(map(_is_number, value)) or value[0] > value[1]:
        raise UsageError(f"{where}: valid = {value!r}; expected [lowest, highest]")
    return float(value[0]), float(value[1])


def _parse_interval(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if not _is_number(value) or value <= 0:
        raise UsageError(f"{where}: interval = {value!r}; expected seconds above 0")
    return float(value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and not math.isnan(value)


def event_to_json(event: Event) -> dict[str, Any]:
    """The JSON object of an event in events.jsonl."""
    return {"time": iso(event.time), "entity": event.entity, "kind": event.kind, "data": dict(event.data)}


def format_json_line(row: Mapping[str, Any]) -> str:
    """A JSON object as one line."""
    return json.dumps(row, separators=(",", ":"), ensure_ascii=False) + "\n"


def write_topology(
    path: Path, parents: Mapping[str, Sequence[str]], attributes: Mapping[str, Mapping[str, object]]
) -> None:
    """Writes topology.toml: one table per kind; entities without parents need no line."""
    path.write_text(format_topology(parents, attributes), encoding="utf-8")


def format_topology(parents: Mapping[str, Sequence[str]], attributes: Mapping[str, Mapping[str, object]]) -> str:
    """The text of topology.toml. Unknown attributes (None) are left out, since TOML has no null."""
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
    """A TOML basic string; JSON's escapes are valid TOML, except DEL."""
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
