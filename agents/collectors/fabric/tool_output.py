"""`iblinkinfo --line`: every port of every switch with its state, speed and who is at the far end.

One line per port. What stands before the arrow is of the switch; what follows it is what the peer says of itself, so a
peer's description, whatever it holds, can spoil only itself.

`ibqueryerrors`: counters of all ports of all switches in one pass, and whose could not be had.

With every threshold at zero it prints each error counter that is not zero. A switch all of whose counters are zero
costs one query, so a counter that is not printed is zero, unless the port is among those that did not answer.

What a switch is and is called: `ibnetdiscover` lines of switches, and a name that may stand in an entity.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from agents.collectors.nic.rdma_counters import COUNTERS, PortCounter

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


# names of IBTA specification 16.1.3.5, as libibmad prints them -> the file that the kernel gives the same counter
_FILES = {
    "SymbolErrorCounter": "symbol_error",
    "LinkErrorRecoveryCounter": "link_error_recovery",
    "LinkDownedCounter": "link_downed",
    "LocalLinkIntegrityErrors": "local_link_integrity_errors",
    "ExcessiveBufferOverrunErrors": "excessive_buffer_overrun_errors",
    "PortRcvErrors": "port_rcv_errors",
    "PortRcvRemotePhysicalErrors": "port_rcv_remote_physical_errors",
    "PortRcvSwitchRelayErrors": "port_rcv_switch_relay_errors",
    "PortXmitDiscards": "port_xmit_discards",
    "VL15Dropped": "VL15_dropped",
    "PortXmitWait": "port_xmit_wait",
    "PortRcvConstraintErrors": "port_rcv_constraint_errors",
    "PortXmitConstraintErrors": "port_xmit_constraint_errors",
    "PortXmitData": "port_xmit_data",
    "PortRcvData": "port_rcv_data",
    "PortXmitPkts": "port_xmit_packets",
    "PortRcvPkts": "port_rcv_packets",
}
_BY_FILE = {counter.file: counter for counter in COUNTERS}
TABLE: Mapping[str, PortCounter] = {name: _BY_FILE[f"counters/{file}"] for name, file in _FILES.items()}
"""What the tools call a counter -> what it is at either end of the link."""
ERRORS = tuple(name for name, counter in TABLE.items() if counter.saturates)
TRAFFIC = tuple(name for name, counter in TABLE.items() if not counter.saturates)
THRESHOLDS = "".join(f"{name}=0\n" for name in ERRORS)
"""The threshold file that makes every counter above zero be printed."""

_PORT = re.compile(r"\s+GUID 0x([0-9a-f]{1,16}) port (\d{1,3}):")
_VALUE = re.compile(r"\[(\w{1,40}) == (\d{1,20})\b")
_FAILED = re.compile(r"query failed on .*, Lid (\d{1,5}) port (\d{1,3})$", re.MULTILINE)
_FAILURES = re.compile(r"^## +(\d{1,9}) PMA query failures$", re.MULTILINE)
_END = "## Summary:"
ALL_PORTS = 255
_MOST_LINE = 4096
"""Longest line that is looked at; chosen: 17 counters of 20 digits are 800 characters."""


@dataclass(frozen=True, slots=True)
class Counts:
    """values: of each port, raw by the tools' names. failed: (LID, port) that did not answer; port 255 is all of them.

    whole: whether the pass came to its end and named all that failed, so that what it leaves out is zero.
    """

    values: Mapping[Place, Mapping[str, int]] = field(default_factory=dict)
    failed: frozenset[tuple[int, int]] = frozenset()
    whole: bool = False

    def answered(self, lid: int, port: int) -> bool:
        """Whether what is not among the values of this port is zero."""
        return self.whole and (lid, port) not in self.failed and (lid, ALL_PORTS) not in self.failed


def parse_counts(text: str, talk: str = "", cut: bool = False) -> Counts:
    """One pass. talk: standard error; cut: whether some of it was not kept."""
    values: dict[Place, dict[str, int]] = {}
    for line in text.splitlines():
        head = _PORT.match(line) if len(line) <= _MOST_LINE else None
        if head is not None:
            values[guid(head[1]), int(head[2])] = {n: int(v) for n, v in _VALUE.findall(line, head.end()) if n in TABLE}
    named = _FAILED.findall(talk)
    told = _FAILURES.search(text)
    whole = _END in text and not cut and len(named) >= (int(told[1]) if told else 0)
    return Counts(values, frozenset((int(lid), int(port)) for lid, port in named), whole)


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
