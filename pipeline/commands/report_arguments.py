"""The commands that read pages without a browser: `report`, `share`, `objectives`, `rma`. Rows of COMMANDS."""

from __future__ import annotations

from pipeline.commands.options import OUTPUT

TYPE_CHECKING = False  # like typing.TYPE_CHECKING, without importing typing
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

GROUPINGS = ("rack", "rail", "leaf", "loop", "job")
COLOURS = ("state", "temperature", "power", "ber", "step")
DAYS = (("--days",), {"type": float, "default": 7.0, "metavar": "N", "help": "length of the time (default: 7)"})
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
            (
                ("--weekly",),
                {
                    "action": "store_true",
                    "help": "objectives, losses, energy and failures of the last --days",
                },
            ),
            (("--json",), {"metavar": "FILE", "help": "with --weekly: the same as JSON; - is stdout"}),
            DAYS,
            (("--by",), {"choices": GROUPINGS, "default": "rack", "help": "groups of the picture (default: rack)"}),
            (("--colour",), {"choices": COLOURS, "default": "state", "help": "colour of the picture (default: state)"}),
            (("--within",), _WITHIN),
        ),
    ),
    "objectives": ("show error budgets, burn rates, lost GPU-hours, energy, failure rates and spares", (DAYS, OUTPUT)),
    "rma": (
        "write the packet for a return to the vendor: serials, slot, firmware, XIDs, counters, peers, tests, as a zip",
        (
            (
                ("subject",),
                {"metavar": "NODE|INCIDENT", "help": "a node, a device such as gpu:n042.3, or an incident"},
            ),
            (("--zip",), {"metavar": "FILE", "help": "where to (default: rma-NODE-TIME.zip); - is stdout"}),
            (("--hours",), {"type": float, "default": 24.0, "metavar": "H", "help": "before the onset and after (24)"}),
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
