"""Every command with its options as a table, and the parser made of it. Loads argparse alone: --help must be quick."""

from __future__ import annotations

import argparse
import os
import sys

TYPE_CHECKING = False  # as typing has it, without importing typing
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, NoReturn

FORMS = ("table", "json", "jsonl", "csv")
OUTPUT = (("--output",), {"choices": FORMS, "default": "table", "help": "form of the data on stdout (default: table)"})
CONFIG = (("--config",), {"metavar": "FILE", "help": "TOML (default: FLEETPULSE_CONFIG, else ./fleetpulse.toml)"})
INPUT = {"nargs": "+", "metavar": "FILE", "required": True}
TARGET = {"metavar": "FILE"}
RECORDING = (("--replay-recording",), {"metavar": "DIR", "help": "play this recording instead of looking at the node"})
SPEED = (("--speed",), {"type": float, "metavar": "N", "help": "with a recording: times its own speed (default: 1)"})


def seconds(text: str) -> float:
    """A length of time as `5s`, `500ms` or `5`, above 0 and at most 600 s; argparse says what was wrong."""
    unit = 0.001 if text.endswith("ms") else 1.0
    found = float(text.removesuffix("ms").removesuffix("s")) * unit
    if not 0 < found <= 600:
        raise ValueError(text)
    return found


COMMANDS: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "demo": ("run the whole system here over a simulated fleet, in a temporary folder", ()),
    "up": ("run agent, pipeline and dashboard on this host, without a broker", ()),
    "agent": ("collect, spool and send this node's telemetry", (RECORDING, SPEED)),
    "pipeline": ("ingest, store, detect, keep incidents, notify and serve the API", ()),
    "dashboard": ("serve the dashboard", ()),
    "init": (
        "make the store and the folders for state; say what was there already",
        ((("--acls",), {"action": "store_true", "help": "give agents and pipeline their rights on Kafka, too"}),),
    ),
    "doctor": ("check the set-up and say what mends it", (OUTPUT,)),
    "check": (
        "say whether this node is fit for a job, for prologs and monitoring",
        (
            (("--nagios",), {"action": "store_true", "help": "one line and the exit codes of a Nagios plugin"}),
            (
                ("--timeout",),
                {
                    "type": seconds,
                    "default": 5.0,
                    "metavar": "TIME",
                    "help": "most time, as 5s or 500ms (default: 5s)",
                },
            ),
            OUTPUT,
        ),
    ),
    "once": ("print one reading of this host", (OUTPUT, RECORDING)),
    "record": (
        "write what this node's collectors see, as files that can be played back",
        (
            (("--output",), {"metavar": "DIR", "required": True, "help": "a new or an empty folder"}),
            (("--seconds",), {"type": float, "metavar": "N", "help": "end after so long (default: on Ctrl-C)"}),
        ),
    ),
    "sql": (
        "query the store, read-only",
        ((("query",), {"metavar": "QUERY", "help": "one SELECT over our own tables"}), OUTPUT),
    ),
    "signals": ("list what is measured", (OUTPUT,)),
    "detectors": (
        "list the detectors: what each needs, and what it cannot see",
        (
            (
                ("names",),
                {"nargs": "*", "metavar": "[explain] NAME", "help": "how these judge, settings, budget"},
            ),
            OUTPUT,
        ),
    ),
    "mutes": (
        "list what is muted; mute a detector on a scope, or end a mute",
        ((("--all",), {"action": "store_true", "help": "those that are over too"}), OUTPUT),
    ),
    "simulate": (
        "produce a fleet with known faults, as files or as a stream",
        (
            (("--scenario",), {"metavar": "FILE", "help": "a TOML file, or the built-in 'demo'"}),
            (("--seed",), {"type": int, "default": 1, "metavar": "N", "help": "same seed, same fleet (default: 1)"}),
            (("--output",), {"metavar": "DIR", "help": "write telemetry, events, topology and truth there"}),
            (("--to",), {"choices": ("spool", "kafka"), "help": "stream it as agents would"}),
            (
                ("--speed",),
                {"type": float, "default": 1.0, "metavar": "N", "help": "times real time; 0: at once (default: 1)"},
            ),
            (("--backfill",), {"type": float, "metavar": "S", "help": "with --to: send this much history first"}),
            (("--list",), {"action": "store_true", "help": "name the kinds of faults and end"}),
        ),
    ),
    "replay": (
        "run recorded telemetry through the detectors",
        (
            (("--input",), {**INPUT, "help": "telemetry, Parquet or CSV"}),
            (("--events",), {**INPUT, "required": False, "default": [], "help": "events beside it, JSON lines"}),
            (("--signals",), {**TARGET, "help": "declares signals that the catalogue lacks, TOML"}),
            (("--topology",), {**TARGET, "help": "who is part of or fed by whom, TOML"}),
            (("--output",), {**TARGET, "required": True, "help": "findings, JSON lines"}),
            (("--incidents",), {**TARGET, "help": "run the Desk too; incidents, JSON lines"}),
        ),
    ),
    "score": (
        "compare findings and incidents with the truth",
        (
            (("--findings",), {**TARGET, "required": True, "help": "of a replay, JSON lines"}),
            (("--incidents",), {**TARGET, "help": "of a replay, JSON lines"}),
            (("--truth",), {**TARGET, "required": True, "help": "what really happened, JSON lines"}),
            (("--topology",), {**TARGET, "help": "who is part of or fed by whom, TOML"}),
            (("--events",), {**INPUT, "required": False, "default": [], "help": "of the run: where ranks moved to"}),
            (("--meta",), {**TARGET, "help": "origin and length of the recording, JSON"}),
            (("--json",), {**TARGET, "help": "write the figures there as JSON too"}),
            (("--clean",), {**INPUT, "required": False, "default": [], "help": "--json of runs without faults"}),
            OUTPUT,
        ),
    ),
}


VERBS: Mapping[str, Mapping[str, tuple[str, tuple[Any, ...]]]] = {
    "mutes": {
        "list": (
            "list what is muted, as without a verb",
            ((("--all",), {"action": "store_true", "help": "those that are over too"}), OUTPUT),
        ),
        "add": (
            "mute a detector: what it finds is stored, and opens no incident",
            (
                (("detector",), {"metavar": "DETECTOR", "help": "its name, or '*' for all of them"}),
                (("scope",), {"metavar": "SCOPE", "help": "an entity and all below it, as rack:r12; '*': everywhere"}),
                (("--hours",), {"type": float, "metavar": "H", "required": True, "help": "how long, at most 720"}),
                (("--reason",), {"metavar": "TEXT", "required": True, "help": "why, for whoever wonders"}),
                OUTPUT,
            ),
        ),
        "end": ("end a mute now", ((("id",), {"metavar": "ID", "help": "as the list has it"}), OUTPUT)),
    },
}
"""What some commands do by a word of their own; without one, the first."""


UNKNOWN = 3
"""Exit code of a Nagios plugin that does not know; 2, which argparse has for bad usage, would be CRITICAL."""


class Parser(argparse.ArgumentParser):
    """Tells bad usage as monitoring wants it where --nagios is among the words: one line on stdout, UNKNOWN."""

    words: list[str] | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        self.words = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        words = sys.argv[1:] if self.words is None else self.words
        if not any(word.startswith("--nag") for word in words):  # mistyped too
            super().error(message)
        line = f"UNKNOWN - {self.prog}: {' '.join(message.split())}\n".replace("|", "/")
        try:  # noqa: SIM105 - contextlib would be one more thing to load
            os.write(1, line.encode(errors="replace"))
        except OSError:  # a stdout that is full or closed: the exit code says it
            pass
        self.exit(UNKNOWN)


def parser() -> argparse.ArgumentParser:
    """The parser of all commands; a namespace has `command`, `config` and the options of its command."""
    top = Parser(prog="fleetpulse", description="Watches the health of AI training fleets.", allow_abbrev=False)
    top.add_argument("--version", action="store_true", help="say the version and end")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    for name, (text, options) in COMMANDS.items():
        one = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
        _take(one, options)
        if name in VERBS:
            verbs = one.add_subparsers(dest="verb", metavar="VERB")
            for verb, (said, own) in VERBS[name].items():
                does = f"{said[0].upper()}{said[1:]}."
                _take(verbs.add_parser(verb, help=said, description=does, allow_abbrev=False), own, inner=True)
    return top


def _take(parser: argparse.ArgumentParser, options: tuple[Any, ...], inner: bool = False) -> None:
    """Gives a parser its options; an inner one leaves unsaid ones as the outer one has them."""
    for flags, settings in (CONFIG, *options):
        quiet = inner and flags[0].startswith("-") and not settings.get("required")
        parser.add_argument(*flags, **{**settings, **({"default": argparse.SUPPRESS} if quiet else {})})


def version() -> str:
    """Of the installed package."""
    from importlib import metadata

    try:
        return metadata.version("fleetpulse")
    except metadata.PackageNotFoundError:
        return "of this folder, not installed"


def suggestion(word: str) -> str:
    """What a mistyped command may have meant, as the end of a sentence; nothing if it is like none."""
    import difflib

    close = difflib.get_close_matches(word, COMMANDS, 1)
    return f"; did you mean '{close[0]}'?" if close else ""
