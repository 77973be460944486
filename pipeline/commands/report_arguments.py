"""The commands that read the fleet page without a browser: `report` and `share`. Rows of arguments.COMMANDS."""

from __future__ import annotations

from pipeline.commands.options import OUTPUT

TYPE_CHECKING = False  # like typing.TYPE_CHECKING, without importing typing
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

GROUPINGS = ("rack", "rail", "leaf", "loop", "job")
COLOURS = ("state", "temperature", "power", "ber", "step")
_WITHIN = {"metavar": "ENTITY", "help": "only nodes of this rack, loop, job or other entity"}
REPORTS: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "report": (
        "write a report of the fleet as one HTML file to print, or its map as a picture",
        (
            (
                ("--html",),
                {"metavar": "FILE", "help": "state, incidents, data quality, detectors; - is stdout"},
            ),
            (("--png",), {"metavar": "FILE", "help": "the map alone"}),
            (("--by",), {"choices": GROUPINGS, "default": "rack", "help": "groups of the picture (default: rack)"}),
            (("--colour",), {"choices": COLOURS, "default": "state", "help": "colour of the picture (default: state)"}),
            (("--within",), _WITHIN),
        ),
    ),
    "share": (
        "show what some nodes have in common that others have not",
        (
            (
                ("entities",),
                {"nargs": "*", "metavar": "ENTITY", "help": "nodes, devices, or groups with all their nodes"},
            ),
            (("--incident",), {"metavar": "ID", "help": "the nodes that an incident reaches"}),
            (("--within",), _WITHIN),
            OUTPUT,
        ),
    ),
}
