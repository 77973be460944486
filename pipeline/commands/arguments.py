"""The commands with their options as a table, and the parser built from it. Imports only argparse, for a fast
--help."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection

from pipeline.commands.options import (
    COMPARED,
    CONFIG,
    INPUT,
    OUTPUT,
    RECORDING,
    SENT,
    SPEED,
    TARGET,
    parse_seconds,
)
from pipeline.commands.people_arguments import PEOPLE
from pipeline.commands.report_arguments import REPORTS
from pipeline.commands.site_arguments import SITE
from pipeline.commands.verbs import VERBS
from pipeline.runtime.guides import guide

TYPE_CHECKING = False  # like typing.TYPE_CHECKING, without importing typing
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, NoReturn

COMMANDS: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "demo": ("run the whole system with a simulated fleet, in a temporary directory", ()),
    "up": ("run agent, pipeline and dashboard on this host, without a broker", ()),
    "agent": ("collect, spool and send this node's telemetry", (RECORDING, SPEED)),
    "gateway": ("receive OTLP and Prometheus remote write, spool and send it", ()),
    "pipeline": ("ingest, store, detect, manage incidents, notify and serve the API", ()),
    "dashboard": ("serve the dashboard", ()),
    "executor": ("carry out approved acts with the credentials of the scheduler", ()),
    "init": (
        "create the store and the state directories; report what exists",
        ((("--acls",), {"action": "store_true", "help": "also grant agents and pipeline their rights on Kafka"}),),
    ),
    **SITE,
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
    **REPORTS,
    "mutes": (
        "list, add or end mutes",
        ((("--all",), {"action": "store_true", "help": "also expired mutes"}), OUTPUT),
    ),
    "budget": ("show how many wrong pages each detector had, or let it page again", (OUTPUT,)),
    "notify": ("show messages to receivers, test one, or send dead messages again", (*SENT, OUTPUT)),
    "routes": ("show the routes of alerts, or which one an alert takes", (OUTPUT,)),
    "topology": ("check the sources of the site's topology, or show where an entity is", (OUTPUT,)),
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
    about, guides = "Monitors the health of AI training fleets.", f"Guides: {guide('index.md')}"
    raw = argparse.RawDescriptionHelpFormatter  # the other one breaks a path at its hyphens
    top = Parser(prog="fleetpulse", description=about, epilog=guides, formatter_class=raw, allow_abbrev=False)
    top.add_argument("--version", action="store_true", help="print the version and exit")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    for name, (text, options) in COMMANDS.items():
        one = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
        _add_options(one, options)
        if name in VERBS:
            verbs = one.add_subparsers(dest="verb", metavar="VERB")
            for verb, (summary, own) in VERBS[name].items():
                description = f"{summary[0].upper()}{summary[1:]}."
                below = verbs.add_parser(verb, help=summary, description=description, allow_abbrev=False)
                _add_options(below, own, {flags[0] for flags, _ in (CONFIG, *options)})
    return top


def _add_options(parser: argparse.ArgumentParser, options: tuple[Any, ...], outer: Collection[str] = ()) -> None:
    """Adds options to a parser. outer: options of its command, which keep the values that are given there."""
    for flags, settings in (CONFIG, *options):
        quiet = flags[0] in outer and not settings.get("required")
        parser.add_argument(*flags, **{**settings, **({"default": argparse.SUPPRESS} if quiet else {})})


def read_version() -> str:
    """Returns the version of the installed package and the commit of which it was built, or of a checkout."""
    from importlib import metadata

    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    try:
        version = metadata.version("fleetpulse")
    except metadata.PackageNotFoundError:
        version = "from source, not installed"
    try:
        with open(os.path.join(root, "pipeline", "commit")) as file:
            return f"{version} ({file.read().strip()})"
    except OSError:  # run in a checkout, or installed as a link to one
        from pipeline.commands.checkout import find_commit

        return f"{version} (checkout {find_commit(root) or 'of an unknown commit'})"


def suggest_command(word: str) -> str:
    """Returns a suggestion for a mistyped command as the end of a sentence, empty if none is similar."""
    import difflib

    close = difflib.get_close_matches(word, COMMANDS, 1)
    return f"; did you mean '{close[0]}'?" if close else ""
