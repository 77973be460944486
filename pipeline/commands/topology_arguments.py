"""The arguments of `fleetpulse topology`."""

from __future__ import annotations

from pipeline.commands.options import parse_time

TYPE_CHECKING = False  # like typing.TYPE_CHECKING, without importing typing
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

FORMATS = ("toml", "csv", "netbox", "slurm", "slurm_yaml", "kubernetes", "ibnetdiscover", "lldp")


def make_verbs(output: Any) -> Mapping[str, tuple[str, tuple[Any, ...]]]:
    """Returns the subcommands; `output` is the option for the form of the data."""
    formats = (
        ("--format",),
        {"choices": FORMATS, "metavar": "FORMAT", "help": f"of the files: {', '.join(FORMATS)} (default: by name)"},
    )
    return {
        "check": (
            "read the configured sources, or files, and list problems in them",
            (
                (("files",), {"nargs": "*", "metavar": "FILE", "help": "files instead of the configured sources"}),
                formats,
                (("--offline",), {"action": "store_true", "help": "do not compare with the running pipeline"}),
                output,
            ),
        ),
        "show": (
            "show what an entity is part of, its members, since when, and which source says so",
            (
                (("entity",), {"metavar": "ENTITY", "help": "such as node:n042 or rack:r12"}),
                (("--time",), {"type": parse_time, "metavar": "TIME", "help": "ISO 8601 (default: now)"}),
                output,
            ),
        ),
        "import": (
            "print files of another system as a topology.toml",
            ((("files",), {"nargs": "+", "metavar": "FILE", "help": "files of one format"}), formats),
        ),
    }
