"""What a command prints in place of a table without rows: of what there is nothing, and by which options."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from pipeline.runtime.guides import guide

_MISSING: Mapping[tuple[str, str], str] = {
    ("incidents", ""): "no unresolved incidents",
    ("silences", ""): "no silences that are active or pending",
    ("maintenance", ""): "no maintenance windows that are active or pending",
    ("silences", "preview"): "no open incidents that match",
    ("mutes", ""): "no active mutes",
    ("notify", ""): "no messages",
    ("notify", "receivers"): f"no receivers: see [[notify.webhooks]] and others in {guide('receivers.md')}",
    ("notify", "replay"): "no dead messages",
    ("audit", ""): "no rows of the audit",
    ("audit", "verify"): "no rows of the audit",
    ("act", ""): "no acts that are not over",
    ("act", "run"): "no steps yet",
    ("node", ""): "no nodes out of service",
    ("token", ""): "no tokens",
    ("share", ""): "no values in common",
    ("sql", ""): "no rows",
    ("objectives", ""): f"no objective has jobs yet: see [[impact.objectives]] in {guide('objectives.md')}",
    ("objectives", "losses"): "no lost GPU-hours",
    ("objectives", "energy"): "no jobs with energy",
    ("objectives", "failures"): "no failures",
    ("objectives", "nodes"): "no nodes that failed",
    ("objectives", "spares"): "no parts that failed",
}
"""(command, verb) -> words; a verb without words has those of the list."""
_ALL: Mapping[str, str] = {
    "incidents": "no incidents",
    "silences": "no silences",
    "maintenance": "no maintenance windows",
    "mutes": "no mutes",
    "act": "no acts",
    "node": "no nodes were ever taken out of service",
}
"""Command -> words with --all."""
_FILTERS = ("state", "incident", "receiver", "since", "actor", "target", "days", "within", "matchers")


def describe_nothing(given: argparse.Namespace) -> str:
    """Returns a line such as `no messages with --state dead --incident INC-7`."""
    command, verb = given.command, getattr(given, "verb", None) or ""
    words = _MISSING.get((command, verb)) or _MISSING.get((command, "")) or "no rows"
    if command in _ALL and (getattr(given, "all", False) or getattr(given, "state", None)):
        words = _ALL[command]
    used = [(name, value) for name in _FILTERS if (value := getattr(given, name, None))]
    shown = " ".join(f"{' '.join(v)}" if isinstance(v, list) else f"--{name} {v}" for name, v in used)
    return f"{words}{f' with {shown}' if shown and not words.endswith('match') else f' {shown}' if shown else ''}"
