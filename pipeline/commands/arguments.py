"""The commands with their options as a table, and the parser built from it. Imports only argparse, for a fast
--help."""

from __future__ import annotations

import argparse
import os
import sys

TYPE_CHECKING = False  # like typing.TYPE_CHECKING, without importing typing
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, NoReturn

FORMS = ("table", "json", "jsonl", "csv")
OUTPUT = (("--output",), {"choices": FORMS, "default": "table", "help": "form of the data on stdout (default: table)"})
CONFIG = (("--config",), {"metavar": "FILE", "help": "TOML (default: FLEETPULSE_CONFIG, else ./fleetpulse.toml)"})
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
    """Returns the seconds of `5s`, `500ms` or `5`, above 0 and at most 600. Raises ValueError for argparse."""
    unit = 0.001 if text.endswith("ms") else 1.0
    found = float(text.removesuffix("ms").removesuffix("s")) * unit
    if not 0 < found <= 600:
        raise ValueError(text)
    return found


def _option(name: str, text: str, **settings: object) -> tuple[tuple[str], dict[str, object]]:
    """Returns an option or argument; its metavar is its name in capitals."""
    named = {} if settings.get("action") or settings.get("choices") else {"metavar": name.strip("-").upper()}
    return (name,), {**named, **settings, "help": text}


INCIDENT, INCIDENT_IDS = _option("id", "id of the incident"), _option("id", "ids of incidents", nargs="+")
COMMENT = _option("--comment", "what you know, for the history", metavar="TEXT")
WHY = _option("--comment", "why, for the history", metavar="TEXT", required=True)
REASON = _option("--reason", "why, for the next person on call", metavar="TEXT", required=True)
VERSION = _option("--if-version", "refuse unless it still has this version", type=int, metavar="N", dest="expected")
ALL = _option("--all", "also what has ended", action="store_true")
HOURS = _option("--hours", "duration, at most 720", type=float, metavar="H", required=True)
MORE_HOURS = _option("--hours", "hours to add to its end", type=float, metavar="H", required=True)
STARTS = _option("--starts", "start, ISO 8601 (default: now)", metavar="TIME")
SINCE = _option("--since", "from this time on, ISO 8601", metavar="TIME")
MATCHERS = _option("matchers", "such as 'rack=~\"r1|r2\"' severity!=info", nargs="+", metavar="MATCHER")
SILENCE = _option("id", "id from the list")
STATES = ("open", "acknowledged", "silenced", "resolved")
STATE = _option("--state", "only those in a state", choices=STATES)
PEOPLE: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "incidents": ("list unresolved incidents, or show one with its history", (STATE, ALL, OUTPUT)),
    "ack": (
        "acknowledge incidents until they expire or become worse",
        (
            INCIDENT_IDS,
            COMMENT,
            _option("--hours", "until it expires; 0: never (default: as configured)", type=float, metavar="H"),
            VERSION,
            OUTPUT,
        ),
    ),
    "assign": (
        "assign an incident to a person",
        (INCIDENT, _option("to", "the person; '-': nobody", metavar="PERSON"), COMMENT, VERSION, OUTPUT),
    ),
    "comment": ("add a comment to incidents", (INCIDENT_IDS, WHY, VERSION, OUTPUT)),
    "resolve": (
        "resolve incidents",
        (
            INCIDENT_IDS,
            COMMENT,
            _option("--not-a-fault", "a false alarm: learning detectors accept the state", action="store_true"),
            VERSION,
            OUTPUT,
        ),
    ),
    "reopen": ("reopen resolved incidents until a person resolves them", (INCIDENT_IDS, WHY, VERSION, OUTPUT)),
    "merge": (
        "make other open incidents part of one",
        (INCIDENT, _option("others", "ids of the others", nargs="+", metavar="OTHER"), WHY, VERSION, OUTPUT),
    ),
    "split": (
        "make some members an incident of their own",
        (INCIDENT, _option("entities", "members that leave", nargs="+", metavar="ENTITY"), WHY, VERSION, OUTPUT),
    ),
    "feedback": (
        "say whether an incident was useful, a wrong page, or known",
        (
            INCIDENT,
            _option("verdict", "wrong counts in the page budget", choices=("useful", "wrong", "known")),
            *(COMMENT, VERSION, OUTPUT),
        ),
    ),
    "silences": ("list, add, preview, edit, extend or expire silences", (ALL, OUTPUT)),
    "maintenance": ("list, add, extend or end maintenance windows", (ALL, OUTPUT)),
    "handover": (
        "show what is open, muted and pending, and what changed since your shift began",
        (
            _option("--hours", "length of the shift (default: 8)", type=float, default=8.0, metavar="H"),
            _option("--since", "start of the shift, ISO 8601", metavar="TIME"),
            OUTPUT,
        ),
    ),
    "audit": (
        "show who changed what, from where and why, and what was refused",
        (
            SINCE,
            _option("--actor", "only of a person", metavar="NAME"),
            _option("--target", "only about an id", metavar="ID"),
            _option("--limit", "most rows (default: 100)", type=int, default=100, metavar="N"),
            OUTPUT,
        ),
    ),
    "token": ("create, list or revoke tokens with roles, on the host of the pipeline", (OUTPUT,)),
    "completion": (
        "print completion for a shell",
        (_option("shell", "the shell that reads it", choices=("bash", "zsh", "fish")),),
    ),
}
"""What people do to incidents, through the running pipeline."""


COMMANDS: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "demo": ("run the whole system with a simulated fleet, in a temporary directory", ()),
    "up": ("run agent, pipeline and dashboard on this host, without a broker", ()),
    "agent": ("collect, spool and send this node's telemetry", (RECORDING, SPEED)),
    "gateway": ("receive OTLP and Prometheus remote write, spool and send it", ()),
    "pipeline": ("ingest, store, detect, manage incidents, notify and serve the API", ()),
    "dashboard": ("serve the dashboard", ()),
    "init": (
        "create the store and the state directories; report what exists",
        ((("--acls",), {"action": "store_true", "help": "also grant agents and pipeline their rights on Kafka"}),),
    ),
    "doctor": ("find problems and suggest fixes", (OUTPUT,)),
    "check": (
        "check whether this node is fit for a job, for prologs and monitoring",
        (
            (("--nagios",), {"action": "store_true", "help": "one line and the exit codes of a Nagios plugin"}),
            (
                ("--timeout",),
                {
                    "type": parse_seconds,
                    "default": 5.0,
                    "metavar": "TIME",
                    "help": "time limit, such as 5s or 500ms (default: 5s)",
                },
            ),
            OUTPUT,
        ),
    ),
    "once": ("print one reading of this host", (OUTPUT, RECORDING)),
    "record": (
        "record this node's telemetry as files for playback",
        (
            (("--output",), {"metavar": "DIR", "required": True, "help": "a new or empty directory"}),
            (("--seconds",), {"type": float, "metavar": "N", "help": "duration (default: until Ctrl-C)"}),
        ),
    ),
    "sql": (
        "query the store, read-only",
        ((("query",), {"metavar": "QUERY", "help": "one SELECT over the tables of the store"}), OUTPUT),
    ),
    "signals": ("list the signals", (OUTPUT,)),
    "detectors": (
        "list the detectors with required signals and blind spots",
        (
            (
                ("names",),
                {"nargs": "*", "metavar": "[explain] NAME", "help": "method, settings and false alarm budget of these"},
            ),
            OUTPUT,
        ),
    ),
    "backup": (
        "back up the store while the pipeline runs",
        (
            (("target",), {"metavar": "TARGET", "help": "a new folder; after a kill the same command goes on"}),
            OUTPUT,
        ),
    ),
    "restore": (
        "restore the store from a backup, while no pipeline runs",
        (
            (("source",), {"metavar": "SOURCE", "help": "the folder of a backup"}),
            (("--replace",), {"action": "store_true", "help": "move the store that exists to PATH.replaced"}),
            OUTPUT,
        ),
    ),
    "node": (
        "list nodes out of service, decommission a node, or return it",
        ((("--all",), {"action": "store_true", "help": "also returned nodes"}), OUTPUT),
    ),
    **PEOPLE,
    "mutes": (
        "list, add or end mutes",
        ((("--all",), {"action": "store_true", "help": "also expired mutes"}), OUTPUT),
    ),
    "budget": ("show how many wrong pages each detector had, or let it page again", (OUTPUT,)),
    "notify": ("show what was sent to receivers, test one, or send dead messages again", (*SENT, OUTPUT)),
    "routes": ("show the routes of alerts, or which one an alert takes", (OUTPUT,)),
    "calibration": (
        "show, pin or roll back the thresholds that the site has taught",
        (COMPARED, OUTPUT),
    ),
    "simulate": (
        "simulate a fleet with known faults, as files or as a stream",
        (
            (("--scenario",), {"metavar": "FILE", "help": "a TOML file, or the built-in 'demo'"}),
            (("--seed",), {"type": int, "default": 1, "metavar": "N", "help": "seed of the fleet (default: 1)"}),
            (("--output",), {"metavar": "DIR", "help": "directory for telemetry, events, topology and truth"}),
            (("--to",), {"choices": ("spool", "kafka"), "help": "stream it as agents would"}),
            (
                ("--speed",),
                {
                    "type": float,
                    "default": 1.0,
                    "metavar": "N",
                    "help": "factor of real time; 0: as fast as possible (default: 1)",
                },
            ),
            (("--backfill",), {"type": float, "metavar": "S", "help": "with --to: send this much history first"}),
            (("--list",), {"action": "store_true", "help": "list the kinds of faults and exit"}),
        ),
    ),
    "replay": (
        "run recorded telemetry through the detectors",
        (
            (("--input",), {**INPUT, "help": "telemetry, Parquet or CSV"}),
            (("--events",), {**INPUT, "required": False, "default": [], "help": "events beside it, JSON lines"}),
            (("--signals",), {**TARGET, "help": "declarations of signals outside the catalogue, TOML"}),
            (("--topology",), {**TARGET, "help": "parents of entities, TOML"}),
            (("--output",), {**TARGET, "required": True, "help": "findings, JSON lines"}),
            (("--incidents",), {**TARGET, "help": "also run the Desk; incidents, JSON lines"}),
            (("--calibration",), {**TARGET, "help": "exported thresholds of the site; default: the shipped ones"}),
        ),
    ),
    "score": (
        "compare findings and incidents with the truth",
        (
            (("--findings",), {**TARGET, "required": True, "help": "of a replay, JSON lines"}),
            (("--incidents",), {**TARGET, "help": "of a replay, JSON lines"}),
            (("--truth",), {**TARGET, "required": True, "help": "true faults, JSON lines"}),
            (("--topology",), {**TARGET, "help": "parents of entities, TOML"}),
            (
                ("--events",),
                {**INPUT, "required": False, "default": [], "help": "events of the run: moves of ranks, JSON lines"},
            ),
            (("--meta",), {**TARGET, "help": "origin and length of the recording, JSON"}),
            (("--json",), {**TARGET, "help": "also write the figures as JSON"}),
            (("--clean",), {**INPUT, "required": False, "default": [], "help": "--json files of runs without faults"}),
            OUTPUT,
        ),
    ),
}


VERBS: Mapping[str, Mapping[str, tuple[str, tuple[Any, ...]]]] = {
    "incidents": {
        "list": ("list incidents (the default)", (STATE, ALL, OUTPUT)),
        "show": ("show one incident with its history; as JSON with findings", (INCIDENT, OUTPUT)),
    },
    "silences": {
        "list": ("list silences that have not ended (the default)", (ALL, OUTPUT)),
        "add": ("silence what matches all matchers", (MATCHERS, HOURS, REASON, STARTS, OUTPUT)),
        "preview": ("list the open incidents that matchers match now", (MATCHERS, OUTPUT)),
        "edit": (
            "change a silence",
            (
                SILENCE,
                _option("matchers", "in place of those it has", nargs="*", metavar="MATCHER"),
                _option("--ends", "new end, ISO 8601", metavar="TIME"),
                _option("--reason", "new reason", metavar="TEXT"),
                VERSION,
                OUTPUT,
            ),
        ),
        "extend": ("make a silence end later", (SILENCE, MORE_HOURS, VERSION, OUTPUT)),
        "expire": ("end a silence now", (SILENCE, VERSION, OUTPUT)),
    },
    "maintenance": {
        "list": ("list windows that have not ended (the default)", (ALL, OUTPUT)),
        "add": (
            "announce work on entities and all below them",
            (
                _option("scopes", "entities such as rack:r12", nargs="+", metavar="SCOPE"),
                *(HOURS, REASON, STARTS, OUTPUT),
            ),
        ),
        "extend": ("make a window end later", (SILENCE, MORE_HOURS, VERSION, OUTPUT)),
        "end": ("end a window; alerts follow 15 minutes later", (SILENCE, VERSION, OUTPUT)),
    },
    "token": {
        "list": ("list tokens (the default)", (OUTPUT,)),
        "create": (
            "create a token and print it once",
            (
                _option("owner", "name of the person or program"),
                _option("--role", "what it may do", choices=("viewer", "operator", "admin"), required=True),
                _option("--days", "until it expires, at most 366; 0: never (default: 90)", type=float, default=90.0),
                (
                    ("--on-behalf-of",),
                    {"action": "store_true", "help": "for the dashboard: it may name the person for whom it writes"},
                ),
                OUTPUT,
            ),
        ),
        "revoke": ("revoke a token at once", (_option("id", "id from the list"), OUTPUT)),
    },
    "node": {
        "list": (
            "list nodes out of service (the default)",
            ((("--all",), {"action": "store_true", "help": "also returned nodes"}), OUTPUT),
        ),
        "decommission": (
            "take a node out of service for good: its incidents are resolved, and nothing is expected of it",
            (
                (("node",), {"metavar": "NODE", "help": "its name, such as n042"}),
                (("--reason",), {"metavar": "TEXT", "required": True, "help": "why, for the next person on call"}),
                OUTPUT,
            ),
        ),
        "return": (
            "put a node back into service",
            ((("node",), {"metavar": "NODE", "help": "its name, such as n042"}), OUTPUT),
        ),
    },
    "mutes": {
        "list": (
            "list active mutes (the default)",
            ((("--all",), {"action": "store_true", "help": "also expired mutes"}), OUTPUT),
        ),
        "add": (
            "mute a detector: findings are stored, but open no incidents",
            (
                (("detector",), {"metavar": "DETECTOR", "help": "its name, or '*' for all"}),
                (
                    ("scope",),
                    {"metavar": "SCOPE", "help": "an entity such as rack:r12 and all below it; '*': everywhere"},
                ),
                (("--hours",), {"type": float, "metavar": "H", "required": True, "help": "duration, at most 720"}),
                (("--reason",), {"metavar": "TEXT", "required": True, "help": "why, for the next person on call"}),
                OUTPUT,
            ),
        ),
        "end": ("end a mute now", ((("id",), {"metavar": "ID", "help": "id from the list"}), OUTPUT)),
    },
    "budget": {
        "show": ("show the budgets, and which detectors are lowered to tickets (the default)", (OUTPUT,)),
        "reset": (
            "forget the wrong pages of a detector until now, so that it pages again",
            ((("detector",), {"metavar": "DETECTOR", "help": "its name"}), OUTPUT),
        ),
    },
    "notify": {
        "list": ("list messages, newest first (the default)", (*SENT, OUTPUT)),
        "receivers": ("show which receivers accept messages", (OUTPUT,)),
        "test": (
            "send a marked alert and its end to a receiver; print what it answers",
            (
                (("name",), {"metavar": "NAME", "help": "name of the receiver"}),
                (
                    ("--severity",),
                    {
                        "choices": ("info", "warning", "critical"),
                        "help": "label severity (default: info, which pages nobody)",
                    },
                ),
                OUTPUT,
            ),
        ),
        "replay": (
            "send dead messages again",
            (
                (("ids",), {"nargs": "*", "metavar": "ID", "help": "ids from the list"}),
                (("--receiver",), {"metavar": "NAME", "help": "all dead messages of this receiver"}),
                OUTPUT,
            ),
        ),
    },
    "routes": {
        "show": ("show the routes (the default)", (OUTPUT,)),
        "test": (
            "show the receivers, group and intervals of an alert",
            (
                (("labels",), {"nargs": "+", "metavar": "LABEL=VALUE", "help": "such as severity=critical rack=r12"}),
                OUTPUT,
            ),
        ),
    },
    "calibration": {
        "show": ("show thresholds, evidence, and what passed them in a week (the default)", (COMPARED, OUTPUT)),
        "history": ("list the versions, and who pinned or rolled back", (OUTPUT,)),
        "pin": (
            "keep the thresholds of a version, or those of now, until unpin",
            ((("of_version",), {"type": int, "nargs": "?", "metavar": "VERSION", "help": "default: now"}), OUTPUT),
        ),
        "unpin": ("follow the site again", (OUTPUT,)),
        "rollback": (
            "forget what was learnt since a version, and learn on from it",
            ((("of_version",), {"type": int, "metavar": "VERSION", "help": "from the history"}), OUTPUT),
        ),
        "export": (
            "print a calibration as JSON, for replay --calibration",
            ((("--version",), {"type": int, "metavar": "VERSION", "help": "default: now", "dest": "of_version"}),),
        ),
    },
}
"""Subcommands; without one, the first applies."""


UNKNOWN = 3
"""Nagios exit code UNKNOWN; argparse's code for bad usage, 2, would be CRITICAL."""


class Parser(argparse.ArgumentParser):
    """Parser that reports bad usage with --nagios as one UNKNOWN line on stdout."""

    words: list[str] | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Keeps the words for `error`."""
        self.words = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Prints the message and exits; with --nagios as UNKNOWN."""
        words = sys.argv[1:] if self.words is None else self.words
        if not any(word.startswith("--nag") for word in words):  # also mistyped
            super().error(message)
        line = f"UNKNOWN - {self.prog}: {' '.join(message.split())}\n".replace("|", "/")
        try:  # noqa: SIM105 - importing contextlib takes time
            os.write(1, line.encode(errors="replace"))
        except OSError:  # stdout is full or closed: the exit code is enough
            pass
        self.exit(UNKNOWN)


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands; a namespace has `command`, `config` and the options of the command."""
    top = Parser(prog="fleetpulse", description="Monitors the health of AI training fleets.", allow_abbrev=False)
    top.add_argument("--version", action="store_true", help="print the version and exit")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    for name, (text, options) in COMMANDS.items():
        one = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
        _add_options(one, options)
        if name in VERBS:
            verbs = one.add_subparsers(dest="verb", metavar="VERB")
            for verb, (summary, own) in VERBS[name].items():
                description = f"{summary[0].upper()}{summary[1:]}."
                _add_options(
                    verbs.add_parser(verb, help=summary, description=description, allow_abbrev=False), own, inner=True
                )
    return top


def _add_options(parser: argparse.ArgumentParser, options: tuple[Any, ...], inner: bool = False) -> None:
    """Adds options to a parser; missing options of a subcommand keep the values of the command."""
    for flags, settings in (CONFIG, *options):
        quiet = inner and flags[0].startswith("-") and not settings.get("required")
        parser.add_argument(*flags, **{**settings, **({"default": argparse.SUPPRESS} if quiet else {})})


def read_version() -> str:
    """Returns the version of the installed package."""
    from importlib import metadata

    try:
        return metadata.version("fleetpulse")
    except metadata.PackageNotFoundError:
        return "from source, not installed"


def suggest_command(word: str) -> str:
    """Returns a suggestion for a mistyped command as the end of a sentence, empty if none is similar."""
    import difflib

    close = difflib.get_close_matches(word, COMMANDS, 1)
    return f"; did you mean '{close[0]}'?" if close else ""
