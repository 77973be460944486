"""`iblinkinfo --line`: every port of every switch with its state, speed and who is at the far end.

One line per port. What stands before the arrow is of the switch; what follows it is what the peer says of itself, so a
peer's description, whatever it holds, can spoil only itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

Place = tuple[str, int]
"""A switch's GUID, as sysfs writes GUIDs, and the number of a port."""

# infiniband-diags, iblinkinfo.c: print_port, in line mode
_NEAR = re.compile(
    r'0x([0-9a-f]{1,16}) "(.*?)" +(\d{1,5}) +(\d{1,3})\[[^]]{0,8}\] +==\(([^()]{0,64}(?:\(FDR10\))?[^()]{0,64})\)==> *'
)
_FAR = re.compile(r'0x([0-9a-f]{1,16}) +(\d{1,5}) +(\d{1,3})\[[^]]{0,8}\] +"(.*)"')
_TRAINED = re.compile(r"(\d{1,2})X +(?:(\d{1,3}(?:\.\d{1,5})?) Gbps|FDR10)")
MOST_LINE = 1024
"""Longest line that is looked at; chosen: a line of two full descriptions has 240 characters."""
DESCRIPTION = 64
"""Characters of a node's description (IBTA specification 14.2.5.2: 64 bytes)."""

# libibmad, dump.c: mad_dump_linkstate, mad_dump_physportstate -> numbers of IBTA specification 14.2.5.6
_LOGICAL = {"NoChange": 0, "Down": 1, "Init": 2, "Initialize": 2, "Armed": 3, "Active": 4}
_PHYSICAL = {
    "NoChange": 0,
    "Sleep": 1,
    "Polling": 2,
    "Disabled": 3,
    "PortConfigurationTraining": 4,
    "LinkUp": 5,
    "LinkErrorRecovery": 6,
    "PhyTest": 7,
}
# Gb/s that a lane signals -> Mb/s of data as the kernel counts it (drivers/infiniband/core/sysfs.c: rate_show)
_LANE = {
    2.5: 2_500,
    5.0: 5_000,
    10.0: 10_000,
    14.0625: 14_000,
    25.78125: 25_000,
    53.125: 50_000,
    106.25: 100_000,
    212.5: 200_000,
}


_FDR10 = 10.0  # a vendor's speed, which the tools may give by its name: 10 Gb/s of data, by another coding


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the far end: GUID of its port (where it is a switch, of that), LID, port and what it calls itself."""

    guid: str
    lid: int
    port: int
    description: str


@dataclass(frozen=True, slots=True)
class Link:
    """One port of a switch. speed in Mbit/s; NaN is what was not said."""

    guid: str
    description: str
    lid: int
    port: int
    logical: float
    physical: float
    width: float
    speed: float
    peer: Peer | None

    @property
    def place(self) -> Place:
        return self.guid, self.port


def guid(digits: str) -> str:
    """`248a070300020100` -> `248a:0703:0002:0100`, as the kernel writes it."""
    whole = digits.zfill(16)
    return ":".join(whole[i : i + 4] for i in range(0, 16, 4))


def cleaned(description: str) -> str:
    """A description without padding and what cannot be printed, at its length in the standard."""
    return "".join(c if c.isprintable() else " " for c in description).strip()[:DESCRIPTION]


def parse_line(line: str) -> Link | None:
    """One port; None if that is not what the line tells."""
    near = _NEAR.match(line) if len(line) <= MOST_LINE else None
    if near is None:
        return None
    state = near[5]
    logical, _, physical = state.partition("/")
    word = logical.split()[-1] if logical.split() else ""
    trained, far = _TRAINED.search(logical), _FAR.match(line, near.end())
    width, lane = (
        (float(trained[1]), _LANE.get(float(trained[2] or _FDR10), math.nan)) if trained else (math.nan, math.nan)
    )
    peer = Peer(guid(far[1]), int(far[2]), int(far[3]), cleaned(far[4])) if far else None
    return Link(
        guid(near[1]),
        cleaned(near[2]),
        int(near[3]),
        int(near[4]),
        _LOGICAL.get(word, math.nan),
        _PHYSICAL.get(physical.strip(), math.nan),
        width,
        width * lane,
        peer,
    )


def parse_links(text: str, known: Mapping[str, Link] = {}) -> dict[str, Link]:
    """Line -> port. known: the lines of the pass before, most of which are the same and cost nothing again.

    Port 0 is the switch itself and no link. Of two lines of one port the first holds.
    """
    found: dict[str, Link] = {}
    places: set[Place] = set()
    for line in text.splitlines():
        link = known.get(line) or parse_line(line)
        if link is not None and link.port and link.place not in places:
            places.add(link.place)
            found[line] = link
    return found
