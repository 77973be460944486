"""Names of InfiniBand switches from their descriptions: the same for an agent that reads the fabric and for a file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

# NVIDIA's switch system writes its description so: MF0;NAME:MODEL/U1, in a modular chassis NAME:MODEL/L05/U1
_MANAGED = re.compile(r"MF0;([^:;]+):([^/;]+)((?:/[A-Z]\d{1,3})+)")
_UNFIT = re.compile(r"[^A-Za-z0-9_.-]+")
_LIKE_A_GUID = re.compile("[0-9a-f]{16}|")
_MAX_NAME = 48
"""Characters of a name. Chosen: an entity stays readable in a table."""
AGGREGATION = re.compile("aggregation node", re.IGNORECASE)
"""Description of the switch's own reduction engine (SHARP), which is on a port of each switch, spines included."""


def switch_name_of(description: str) -> str:
    """Returns the name of a switch from its description; empty if it contains none.

    `MF0;leaf-04:MQM9701/U1` is `leaf-04`, `MF0;core:CS7500/L05/U1` is `core-L05-U1`. Runs of characters other than
    letters, digits, `_`, `.` and `-` become one `_`.
    """
    managed = _MANAGED.fullmatch(description)
    text = description
    if managed is not None:
        text = managed[1] if managed[3] == "/U1" else managed[1] + managed[3].replace("/", "-")
    return _UNFIT.sub("_", text).strip("_.-")[:_MAX_NAME]


def unique_switch_names(descriptions: Mapping[str, str]) -> dict[str, str]:
    """Returns the name of each switch by GUID: from its description if unique, else the GUID without colons."""
    wanted = {guid_: switch_name_of(text) for guid_, text in descriptions.items()}
    often = Counter(wanted.values())
    return {g: n if often[n] == 1 and not _LIKE_A_GUID.fullmatch(n) else g.replace(":", "") for g, n in wanted.items()}
