"""`fleetpulse topology`: check the sources of the site, show where an entity is, convert files of other systems."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from pipeline.commands.output import render_rows
from pipeline.commands.site_reload import list_settings
from pipeline.config.sections import Config
from pipeline.http import client
from pipeline.model.errors import NoAnswer, Unreachable, UsageError
from pipeline.model.topology import ParentGraph
from pipeline.runtime.guides import guide
from pipeline.topology.check import Problem, check_against_telemetry, check_sources
from pipeline.topology.merge import MergedTopology, merge_sources, overlay_lines
from pipeline.topology.site import SourceSetting, find_faults, read_source

WIDTH = 120
"""Columns of a table for people; the last column is cut to fit."""
PROBLEMS = ("level", "check", "source", "entity", "text", "hint")
_MOST_ROWS = 200
"""Problems that are shown as a table; more are counted. Chosen: what a person reads; JSON has all."""
_SUFFIXES = {".toml": "toml", ".csv": "csv", ".conf": "slurm", ".yaml": "slurm_yaml", ".yml": "slurm_yaml"}
_ANSWER_S = 60.0
"""Longest wait for the pipeline (s). Chosen: the list of 2,000,000 entities takes 10 s."""
Say = Callable[[str], None]


def run_topology(config: Config, given: argparse.Namespace, say: Say) -> int:
    """Runs a subcommand; returns 0, or 1 if the check has findings. Raises UsageError for a bad file."""
    format_ = getattr(given, "format", None)  # of check and import
    if given.verb == "show":
        sys.stdout.write(_show(config, given.entity, given.time, given.output))
        return 0
    if given.verb == "import":
        sys.stdout.write(_convert(given.files, format_))
        return 0
    if given.verb is None:
        raise UsageError("topology: no subcommand; expected check, show or import (fleetpulse topology --help)")
    settings = _settings_of(given.files, format_) if given.files else list_settings(config.topology)
    if not settings:
        raise UsageError(
            "topology check: no files and no sources configured; expected FILE, or [topology] path or sources "
            f"({guide('topology.md')})"
        )
    return _check(config, settings, given, say)


def _settings_of(files: Sequence[str], format_: str | None) -> list[SourceSetting]:
    return [SourceSetting(name, format_ or _guess_format(Path(name)), Path(name)) for name in files]


def _guess_format(path: Path) -> str:
    """The format of a file by its name and first characters. Raises UsageError."""
    if path.suffix in _SUFFIXES:
        return _SUFFIXES[path.suffix]
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            head = file.read(1 << 20)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}; expected a file") from error
    signs = {"switchguid=": "ibnetdiscover", "/api/dcim/": "netbox", '"lldp"': "lldp", '"metadata"': "kubernetes"}
    found = next((name for sign, name in signs.items() if sign in head), None)
    if found is None:
        raise UsageError(f"{path}: format unknown; expected --format FORMAT")
    return found


def _check(config: Config, settings: Sequence[SourceSetting], given: argparse.Namespace, say: Say) -> int:
    named, faults = find_faults(settings)
    merged = merge_sources(list(named.items()))
    problems = check_sources(named, merged)
    if named and not getattr(given, "offline", False):
        problems += _compare(config, merged, say)
    _print_problems(problems, given.output)
    kinds = Counter(entity.partition(":")[0] for entity in merged.parents)
    shown = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(8))
    say(f"{len(named)} sources read: {shown or 'no entities'}; {len(problems)} findings")
    for fault in faults.values():
        say(f"fleetpulse: {fault}")
    if faults:
        return 2
    return 1 if any(problem.level != "note" for problem in problems) else 0


def _compare(config: Config, merged: MergedTopology, say: Say) -> list[Problem]:
    """Compares with what the running pipeline knows; without one, says so."""
    try:
        rows = _get(config, "/api/v1/entities")["entities"]
    except (NoAnswer, Unreachable) as error:
        say(f"not compared with telemetry: {error}")
        return []
    reported: dict[str, list[str]] = {}
    lines: dict[str, tuple[str, ...]] = {}
    for row in rows:
        reported.setdefault(row["kind"], []).append(row["entity"])
        lines[row["entity"]] = tuple(row["parents"])
    graph = ParentGraph({**lines, **overlay_lines(merged.parents, lines)})
    return check_against_telemetry(merged, reported, graph)


def _get(config: Config, path: str) -> Any:
    status, answer = client.get(config, path, _ANSWER_S)
    if status != 200:
        raise client.make_error(status, answer, f"{client.base_url(config)}{path}")
    return answer


def _print_problems(problems: Sequence[Problem], form: str) -> None:
    rows = [asdict(problem) for problem in problems]
    if form != "table":
        sys.stdout.write(render_rows(rows, PROBLEMS, form))  # type: ignore[arg-type]
        return
    if rows:
        sys.stdout.write(
            render_rows(_shortened(rows[:_MOST_ROWS]), ("level", "check", "entity", "text"), "table", WIDTH)
        )
    if len(rows) > _MOST_ROWS:
        counts = Counter(row["check"] for row in rows[_MOST_ROWS:])
        sys.stdout.write("... and " + ", ".join(f"{n} {check}" for check, n in counts.most_common()) + "\n")


def _shortened(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows with the hint beside the text, and long names cut in the middle."""
    return [
        {**row, "entity": _cut(row["entity"]), "text": " - ".join(filter(None, (row["text"], row["hint"])))}
        for row in rows
    ]


def _cut(name: str, most: int = 40) -> str:
    return name if len(name) <= most else f"{name[: most // 2]}…{name[-(most // 2 - 1) :]}"


def _show(config: Config, entity: str, time: str | None, form: str) -> str:
    """Where an entity is, as text or JSON. Raises UsageError if nothing knows it."""
    asked = {"entity": entity, **({"time": time} if time else {})}
    found = _get(config, f"/api/v1/topology?{urlencode(asked)}")
    if not found["known"]:
        raise UsageError(
            f"topology show: {entity} is not known at {found['time'][:19]}Z; fleetpulse sql 'FROM entities' has all"
        )
    if form != "table":
        return json.dumps(found, indent=1) + "\n"
    peers = {row["parent"]: row["count"] for row in found["peers"]}
    rows = [
        {
            "relation": "part of",
            "entity": _cut(row["entity"], 60),
            "source": row["source"],
            "since": _short(row["since"]),
            "peers": peers.get(row["entity"], 0),
        }
        for row in found["parents"]
    ]
    direct = {row["entity"] for row in found["parents"]}
    rows += [{"relation": "above", "entity": _cut(name, 60)} for name in found["above"] if name not in direct]
    for row in found["children"]:
        names = ", ".join(name.partition(":")[2] for name in row["entities"][:6])
        rows.append(
            {"relation": f"{row['count']} {row['kind']}", "entity": names + (", ..." if row["count"] > 6 else "")}
        )
    head = f"{entity} at {found['time'][:19]}Z\n"
    return head + render_rows(rows, ("relation", "entity", "source", "since", "peers"), "table", WIDTH)


def _short(time: str | None) -> str:
    return "before records" if time is None else f"{time[:10]} {time[11:19]}"


def _convert(files: Sequence[str], format_: str | None) -> str:
    """Files of one format as a topology.toml."""
    merged = merge_sources([(s.name, read_source(s)) for s in _settings_of(files, format_)])
    by_kind: dict[str, list[str]] = {}
    for entity, above in merged.parents.items():
        kind, _, name = entity.partition(":")
        if above:
            by_kind.setdefault(kind, []).append(f"{json.dumps(name)} = {json.dumps(list(above))}")
    parts = ["version = 1\n"]
    parts += [f"\n[{kind}]\n" + "\n".join(lines) + "\n" for kind, lines in by_kind.items()]
    facts = [f"{json.dumps(e)} = {{ {_inline(table)} }}" for e, table in merged.attributes.items() if table]
    if facts:
        parts.append("\n[attributes]\n" + "\n".join(facts) + "\n")
    for link, _ in merged.links:
        texts = {"a": link.a, "b": link.b, **{k: v for k, v in link.facts.items() if v}}
        parts.append("\n[[link]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in texts.items()))
    return "".join(parts)


def _inline(table: Mapping[str, object]) -> str:
    return ", ".join(f"{json.dumps(key)} = {json.dumps(value)}" for key, value in table.items())
