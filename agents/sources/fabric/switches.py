"""What a switch is and is called: `ibnetdiscover` lines of switches, and a name that may stand in an entity."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from agents.sources.fabric.links import Link, guid

_FACT = re.compile(r"(vendid|devid|sysimgguid)=0x([0-9a-f]{1,16})$")
_SWITCH = re.compile(r'Switch\s+(\d{1,3}) "S-([0-9a-f]{16})"')
# NVIDIA's switch system writes its description so: MF0;NAME:MODEL/U1, in a modular chassis NAME:MODEL/L05/U1
_MANAGED = re.compile(r"MF0;([^:;]+):([^/;]+)((?:/[A-Z]\d{1,3})+)")
_UNFIT = re.compile(r"[^A-Za-z0-9_.-]+")
_LIKE_A_GUID = re.compile("[0-9a-f]{16}|")
_LONGEST = 48
"""Characters of a name; chosen: an entity stays readable in a table."""
_AGGREGATION = re.compile("aggregation node", re.IGNORECASE)
"""The switch's own reduction engine (SHARP) describes itself so and sits on a port of each switch, spines too."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Of one switch, as the topology tells; hexadecimal as printed."""

    ports: int
    vendor: str = ""
    device: str = ""
    system: str = ""


def parse_switches(text: str) -> dict[str, Facts]:
    """GUID -> facts of each switch in the topology that `ibnetdiscover` prints; what precedes a node is of it."""
    found: dict[str, Facts] = {}
    before: dict[str, str] = {}
    for line in text.splitlines():
        if not line.strip():
            before = {}
        elif fact := _FACT.match(line):
            before[fact[1]] = fact[2]
        elif switch := _SWITCH.match(line):
            system = guid(before["sysimgguid"]) if "sysimgguid" in before else ""
            facts = Facts(int(switch[1]), before.get("vendid", ""), before.get("devid", ""), system)
            found.setdefault(guid(switch[2]), facts)
    return found


def name_of(description: str) -> str:
    """What a switch may be called by its description; empty if that holds no name.

    `MF0;leaf-04:MQM9701/U1` is `leaf-04`, `MF0;core:CS7500/L05/U1` is `core-L05-U1`; runs of other characters than
    letters, digits, `_`, `.` and `-` become one `_`.
    """
    managed = _MANAGED.fullmatch(description)
    text = description
    if managed is not None:
        text = managed[1] if managed[3] == "/U1" else managed[1] + managed[3].replace("/", "-")
    return _UNFIT.sub("_", text).strip("_.-")[:_LONGEST]


def names(descriptions: Mapping[str, str]) -> dict[str, str]:
    """GUID -> name: by the description where no other switch has it, else the GUID without its colons."""
    wanted = {guid_: name_of(text) for guid_, text in descriptions.items()}
    often = Counter(wanted.values())
    return {g: n if often[n] == 1 and not _LIKE_A_GUID.fullmatch(n) else g.replace(":", "") for g, n in wanted.items()}


def leaves(links: Iterable[Link]) -> set[str]:
    """GUIDs of the switches that hosts hang on."""
    links = list(links)
    switches = {link.guid for link in links}
    return {
        link.guid
        for link in links
        if link.peer and link.peer.guid not in switches and not _AGGREGATION.search(link.peer.description)
    }
