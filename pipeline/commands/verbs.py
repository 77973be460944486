"""The subcommands of commands, with their options."""

from __future__ import annotations

from pipeline.commands.options import (
    ALL,
    AUDITED,
    COMMENT,
    COMPARED,
    HOURS,
    INCIDENT,
    MATCHERS,
    MORE_HOURS,
    OUTPUT,
    REASON,
    SENT,
    SILENCE,
    STARTS,
    STATE,
    VERSION,
    WHY,
    option,
    parse_time,
)
from pipeline.commands.report_arguments import DAYS
from pipeline.commands.topology_arguments import make_verbs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

ACTS = ("hold", "release", "evict", "diagnose", "reset", "reboot", "ticket")
ACT = option("id", "id of the act")
WAIT = option("--wait", "seconds to wait for the executor (default: 30)", type=float, default=30.0, metavar="S")
END = option("--wait", "seconds to wait for the end (default: 300)", type=float, default=300.0, metavar="S")
NODE_READS = option("--node", "as this node would read it, with its groups", metavar="NAME")
VERBS: Mapping[str, Mapping[str, tuple[str, tuple[Any, ...]]]] = {
    "config": {
        "check": (
            "check all files, drop-ins and groups (the default)",
            (option("--agent", "only what a start of this node's agent refuses", action="store_true"), OUTPUT),
        ),
        "show": (
            "show each key in force and what set it",
            (
                NODE_READS,
                option("--changed", "only keys that are not at their default", action="store_true"),
                OUTPUT,
            ),
        ),
        "diff": (
            "show the keys in which another file differs",
            (option("other", "the other file", metavar="FILE"), NODE_READS, OUTPUT),
        ),
    },
    "incidents": {
        "list": ("list incidents (the default)", (STATE, ALL, OUTPUT)),
        "show": ("show one incident with its history; as JSON with findings", (INCIDENT, OUTPUT)),
    },
    "objectives": {
        "list": ("list objectives with error budgets and burn rates (the default)", (DAYS, OUTPUT)),
        "losses": ("list lost GPU-hours by cause", (DAYS, OUTPUT)),
        "energy": ("list the energy of jobs", (DAYS, OUTPUT)),
        "failures": ("list time to failure by node type and cause, beside published fleets", (DAYS, OUTPUT)),
        "nodes": ("list the nodes that fail most", (DAYS, OUTPUT)),
        "spares": ("list how many spares of each part are enough", (DAYS, OUTPUT)),
    },
    "silences": {
        "list": ("list silences that have not ended (the default)", (ALL, OUTPUT)),
        "add": ("silence what matches all matchers", (MATCHERS, HOURS, REASON, STARTS, OUTPUT)),
        "preview": ("list the open incidents that matchers match now", (MATCHERS, OUTPUT)),
        "edit": (
            "change a silence",
            (
                SILENCE,
                option("matchers", "in place of those it has", nargs="*", metavar="MATCHER"),
                option("--ends", "new end, ISO 8601", type=parse_time, metavar="TIME"),
                option("--reason", "new reason", metavar="TEXT"),
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
                option("scopes", "entities such as rack:r12", nargs="+", metavar="SCOPE"),
                *(HOURS, REASON, STARTS, OUTPUT),
            ),
        ),
        "extend": ("make a window end later", (SILENCE, MORE_HOURS, VERSION, OUTPUT)),
        "end": ("end a window; alerts follow 15 minutes later", (SILENCE, VERSION, OUTPUT)),
    },
    "audit": {
        "list": ("list rows (the default)", (*AUDITED, OUTPUT)),
        "verify": (
            "check the hash chain: exit code 1 if a row was changed or removed",
            (option("--mark", "a mark that verify printed before: its row must be there", metavar="MARK"), OUTPUT),
        ),
    },
    "act": {
        "list": ("list acts that are not over (the default)", (ALL, OUTPUT)),
        "plan": (
            "propose an act and show its plan: commands, guards, jobs",
            (
                option("act", "what to do", choices=ACTS),
                option("nodes", "nodes, such as n042", nargs="+", metavar="NODE"),
                *(REASON, option("--incident", "the incident that it is for", metavar="ID")),
                option("--when", "when to begin", choices=("now", "when_idle", "after_checkpoint"), default="now"),
                option("--params", "such as level=3 or gpu=5", nargs="+", metavar="NAME=VALUE"),
                *(WAIT, OUTPUT),
            ),
        ),
        "show": ("show the plan of an act", (ACT, OUTPUT)),
        "approve": (
            "approve the plan: refused for tokens, as people approve in the dashboard",
            (ACT, COMMENT, option("--typed", "name of the node, for verbs without an undo", metavar="NODE"), OUTPUT),
        ),
        "run": ("follow an approved act to its end", (ACT, END, OUTPUT)),
        "cancel": ("cancel an act that has not begun", (ACT, WHY, OUTPUT)),
    },
    "token": {
        "list": ("list tokens (the default)", (OUTPUT,)),
        "create": (
            "create a token and print it once",
            (
                option("owner", "name of the person or program"),
                option("--role", "what it may do", choices=("viewer", "operator", "admin"), required=True),
                option("--days", "until it expires, at most 366; 0: never (default: 90)", type=float, default=90.0),
                option("--executor", "for `fleetpulse executor`: it carries out acts", action="store_true"),
                option(
                    "--on-behalf-of",
                    "for the dashboard: it may name the person who writes",
                    action="store_true",
                ),
                OUTPUT,
            ),
        ),
        "revoke": ("revoke a token immediately", (option("id", "id from the list"), OUTPUT)),
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
                HOURS,
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
                        "default": "info",
                        "help": "label severity (default: info, which pages no one)",
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
    "topology": make_verbs(OUTPUT),
    "calibration": {
        "show": ("show thresholds, evidence, and what passed them in a week (the default)", (COMPARED, OUTPUT)),
        "history": ("list the versions, and who pinned or rolled back", (OUTPUT,)),
        "pin": (
            "keep the thresholds of a version, or those of now, until unpin",
            ((("of_version",), {"type": int, "nargs": "?", "metavar": "VERSION", "help": "default: now"}), OUTPUT),
        ),
        "unpin": ("follow the site again", (OUTPUT,)),
        "rollback": (
            "forget values learnt since a version, and learn on from it",
            ((("of_version",), {"type": int, "metavar": "VERSION", "help": "from the history"}), OUTPUT),
        ),
        "export": (
            "print a calibration as JSON, for replay --calibration",
            ((("--version",), {"type": int, "metavar": "VERSION", "help": "default: now", "dest": "of_version"}),),
        ),
    },
}
"""Subcommands; without one, the first applies."""
