"""The commands with which people change incidents, with their options."""

from __future__ import annotations

from pipeline.commands.options import (
    ALL,
    AUDITED,
    COMMENT,
    INCIDENT,
    INCIDENT_IDS,
    OUTPUT,
    STATE,
    VERSION,
    WHY,
    option,
    parse_hours,
    parse_owned_hours,
    parse_time,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

PEOPLE: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "incidents": ("list unresolved incidents, or show one with its history", (STATE, ALL, OUTPUT)),
    "ack": (
        "acknowledge incidents until they expire or become worse",
        (
            INCIDENT_IDS,
            COMMENT,
            option(
                *("--hours", "until it expires, at most 168; 0: never (default: as configured)"),
                type=parse_owned_hours,
                metavar="H",
            ),
            VERSION,
            OUTPUT,
        ),
    ),
    "assign": (
        "assign an incident to a person",
        (INCIDENT, option("to", "the person; '-': none", metavar="PERSON"), COMMENT, VERSION, OUTPUT),
    ),
    "comment": ("add a comment to incidents", (INCIDENT_IDS, WHY, VERSION, OUTPUT)),
    "resolve": (
        "resolve incidents",
        (
            INCIDENT_IDS,
            COMMENT,
            option("--not-a-fault", "a false alarm: learning detectors accept the state", action="store_true"),
            VERSION,
            OUTPUT,
        ),
    ),
    "reopen": ("reopen resolved incidents until a person resolves them", (INCIDENT_IDS, WHY, VERSION, OUTPUT)),
    "merge": (
        "make other open incidents part of one",
        (INCIDENT, option("others", "ids of the others", nargs="+", metavar="OTHER"), WHY, VERSION, OUTPUT),
    ),
    "split": (
        "make some members an incident of their own",
        (INCIDENT, option("entities", "members that leave", nargs="+", metavar="ENTITY"), WHY, VERSION, OUTPUT),
    ),
    "feedback": (
        "say whether an incident was useful, a wrong page, or known",
        (
            INCIDENT,
            option("verdict", "wrong counts in the page budget", choices=("useful", "wrong", "known")),
            *(COMMENT, VERSION, OUTPUT),
        ),
    ),
    "silences": ("list, add, preview, edit, extend or expire silences", (ALL, OUTPUT)),
    "maintenance": ("list, add, extend or end maintenance windows", (ALL, OUTPUT)),
    "handover": (
        "show open, silenced and pending incidents, and what changed since your shift began",
        (
            option("--hours", "length of the shift (default: 8)", type=parse_hours, default=8.0, metavar="H"),
            option("--since", "start of the shift, ISO 8601", type=parse_time, metavar="TIME"),
            OUTPUT,
        ),
    ),
    "audit": ("show who changed what, from where and why, and refused attempts", (*AUDITED, OUTPUT)),
    "act": ("list acts on machines, plan, show, follow or cancel one", (ALL, OUTPUT)),
    "token": ("create, list or revoke tokens with roles, on the host of the pipeline", (OUTPUT,)),
    "completion": (
        "print completion for a shell",
        (
            option(
                *("shell", "the shell that reads it; incidents, resolved: the ids that it completes"),
                choices=("bash", "zsh", "fish", "incidents", "resolved"),
            ),
        ),
    ),
}
"""What people do to incidents, through the running pipeline."""
