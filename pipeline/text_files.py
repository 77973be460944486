"""Writes the text files beside recorded telemetry, lines of events.jsonl and topology.toml; declarations.py reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.model.records import Event, iso
from pipeline.model.topology import kind_of


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
        lines += [f"{_text(e.split(':', 1)[1])} = {_value(parents[e])}" for e in mine]
    if attributes:
        lines += ["", "[attributes]", *(f"{_text(entity)} = {_value(facts)}" for entity, facts in attributes.items())]
    return "\n".join(lines) + "\n"


def _text(text: str) -> str:
    """A TOML basic string; JSON's escapes are TOML's, but for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(one) for one in value if one is not None)}]"
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_text(str(key))} = {_value(one)}" for key, one in value.items() if one is not None)
        return f"{{ {inside} }}"
    return repr(value) if isinstance(value, int | float) else _text(str(value))
