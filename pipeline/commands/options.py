"""Options and arguments that several commands share. Imports only argparse's words, for a fast --help."""

from __future__ import annotations

TYPE_CHECKING = False  # like typing.TYPE_CHECKING, without importing typing
if TYPE_CHECKING:
    pass

FORMS = ("table", "json", "jsonl", "csv")
OUTPUT = (("--output",), {"choices": FORMS, "default": "table", "help": "form of the data on stdout (default: table)"})
CONFIG = (
    ("--config",),
    {"metavar": "FILE", "help": "TOML (default: FLEETPULSE_CONFIG, ./fleetpulse.toml, or in /etc/fleetpulse)"},
)
INPUT = {"nargs": "+", "metavar": "FILE", "required": True}
TARGET = {"metavar": "FILE"}
COMPARED = (("--compare",), {"type": int, "metavar": "VERSION", "help": "beside those of an earlier version"})
SENT = (
    (
        ("--state",),
        {
            "choices": ("pending", "held", "grouped", "delivered", "dead", "muted"),
            "help": "only messages in this state",
        },
    ),
    (("--incident",), {"metavar": "ID", "help": "only those of one incident"}),
)
RECORDING = (("--replay-recording",), {"metavar": "DIR", "help": "play this recording instead of reading the node"})
SPEED = (
    ("--speed",),
    {"type": float, "metavar": "N", "help": "with a recording: factor of its speed (default: 1)"},
)


def parse_seconds(text: str) -> float:
    """Returns the seconds of `5s`, `500ms` or `5`, above 0 and at most 600. Raises ArgumentTypeError."""
    unit = 0.001 if text.endswith("ms") else 1.0
    try:
        found = float(text.removesuffix("ms").removesuffix("s")) * unit
    except ValueError:
        found = 0.0
    if not 0 < found <= 600:
        raise _refuse(text, "a time above 0 and at most 600s, such as 120s or 500ms")
    return found


MOST_HOURS = 87_600.0
"""Longest duration (h). Chosen: ten years; a longer one is a typing error, and its end may be no date."""


def parse_hours(text: str) -> float:
    """Returns hours above 0 and at most MOST_HOURS. Raises ArgumentTypeError."""
    if (found := parse_hours_or_zero(text)) == 0:
        raise _refuse(text, f"a number of hours above 0 and at most {MOST_HOURS:,.0f}")
    return found


def parse_hours_or_zero(text: str) -> float:
    """Like `parse_hours`, and 0, which means without an end."""
    return _parse_number(text, MOST_HOURS, f"a number of hours, at most {MOST_HOURS:,.0f}")


def _parse_number(text: str, most: float, expected: str) -> float:
    """Returns a number from 0 to `most`. Raises ArgumentTypeError, also for NaN."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= most:
        raise _refuse(text, expected)
    return found


MOST_OWNED_HOURS = 168.0
"""Longest acknowledgement (h), as the API takes it (pipeline/engine/people.py): a week."""


def parse_owned_hours(text: str) -> float:
    """Returns for how many hours an incident is acknowledged; 0: without an end. Raises ArgumentTypeError."""
    return _parse_number(
        text, MOST_OWNED_HOURS, f"a number of hours, at most {MOST_OWNED_HOURS:.0f}, or 0: it never expires"
    )


def parse_time(text: str) -> str:
    """Returns an ISO 8601 time as it was given. Raises ArgumentTypeError."""
    from datetime import datetime

    try:
        datetime.fromisoformat(text)
    except ValueError as error:
        raise _refuse(text, "a time like 2026-01-31T08:00:00Z, in UTC if it names no zone") from error
    return text


def _refuse(text: str, expected: str) -> Exception:
    from argparse import ArgumentTypeError

    return ArgumentTypeError(f"{text[:60]!r}; expected {expected}")


def option(name: str, text: str, **settings: object) -> tuple[tuple[str], dict[str, object]]:
    """Returns an option or argument; its metavar is its name in capitals."""
    named = {} if settings.get("action") or settings.get("choices") else {"metavar": name.strip("-").upper()}
    return (name,), {**named, **settings, "help": text}


INCIDENT, INCIDENT_IDS = option("id", "id of the incident"), option("id", "ids of incidents", nargs="+")
COMMENT = option("--comment", "what you know, for the history", metavar="TEXT")
WHY = option("--comment", "why, for the history", metavar="TEXT", required=True)
REASON = option("--reason", "why, for the next person on call", metavar="TEXT", required=True)
VERSION = option("--if-version", "refuse unless it still has this version", type=int, metavar="N", dest="expected")
ALL = option("--all", "also what has ended", action="store_true")
HOURS = option("--hours", "duration, at most 720", type=parse_hours, metavar="H", required=True)
MORE_HOURS = option("--hours", "hours to add to its end", type=parse_hours, metavar="H", required=True)
STARTS = option("--starts", "start, ISO 8601 (default: now)", type=parse_time, metavar="TIME")
SINCE = option("--since", "from this time on, ISO 8601", type=parse_time, metavar="TIME")
MATCHERS = option("matchers", "such as 'rack=~\"r1|r2\"' severity!=info", nargs="+", metavar="MATCHER")
SILENCE = option("id", "id from the list")
STATES = ("open", "acknowledged", "silenced", "resolved")
STATE = option("--state", "only those in a state", choices=STATES)
AUDITED = (
    SINCE,
    option("--actor", "only of a person", metavar="NAME"),
    option("--target", "only about an id", metavar="ID"),
    option("--limit", "most rows (default: 100)", type=int, default=100, metavar="N"),
)
