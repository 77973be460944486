"""Parsers of the fabric tools: `iblinkinfo --line`, `ibqueryerrors` and `ibnetdiscover`.

iblinkinfo prints one line per port. Before the arrow is the switch, after it what the peer reports about itself, so a
peer's description, whatever it contains, can only corrupt itself.

With every threshold at zero ibqueryerrors prints each error counter that is not zero. A switch with all counters zero
costs one query. A counter that is not printed is therefore zero, unless its port did not respond.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from agents.collectors.nic.rdma_counters import RDMA_COUNTERS, PortCounter
from pipeline.model.switch_names import AGGREGATION

PortKey = tuple[str, int]
"""A switch's GUID, as sysfs writes GUIDs, and the number of a port."""

# infiniband-diags, iblinkinfo.c: print_port, in line mode
_NEAR = re.compile(
    r'0x([0-9a-f]{1,16}) "(.*?)" +(\d{1,5}) +(\d{1,3})\[[^]]{0,8}\] +==\(([^()]{0,64}(?:\(FDR10\))?[^()]{0,64})\)==> *'
)
_FAR = re.compile(r'0x([0-9a-f]{1,16}) +(\d{1,5}) +(\d{1,3})\[[^]]{0,8}\] +"(.*)"')
_TRAINED = re.compile(r"(\d{1,2})X +(?:(\d{1,3}(?:\.\d{1,5})?) Gbps|FDR10)")
MAX_LINE = 1024
"""Longest line that is parsed. Chosen: a line with two full descriptions has 240 characters."""
MAX_DESCRIPTION = 64
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


_FDR10 = 10.0  # a vendor-specific speed that the tools may print by name: 10 Gb/s of data, with another coding


@dataclass(frozen=True, slots=True)
class LinkPeer:
    """The far end: GUID of its port (of the switch, if it is one), LID, port and description."""

    guid: str
    lid: int
    port: int
    description: str


@dataclass(frozen=True, slots=True)
class SwitchPort:
    """One port of a switch. speed in Mbit/s; missing values are NaN."""

    guid: str
    description: str
    lid: int
    port: int
    logical: float
    physical: float
    width: float
    speed: float
    peer: LinkPeer | None

    @property
    def key(self) -> PortKey:
        """Switch and port number."""
        return self.guid, self.port


def format_guid(digits: str) -> str:
    """Returns `248a070300020100` as `248a:0703:0002:0100`, as the kernel writes it."""
    whole = digits.zfill(16)
    return ":".join(whole[i : i + 4] for i in range(0, 16, 4))


def clean_description(description: str) -> str:
    """Returns a description without padding and unprintable characters, cut to the standard's length."""
    return "".join(c if c.isprintable() else " " for c in description).strip()[:MAX_DESCRIPTION]


def parse_link_line(line: str) -> SwitchPort | None:
    """Returns the port that a line describes; None if it describes none."""
    near = _NEAR.match(line) if len(line) <= MAX_LINE else None
    if near is None:
        return None
    state = near[5]
    logical, _, physical = state.partition("/")
    word = logical.split()[-1] if logical.split() else ""
    trained, far = _TRAINED.search(logical), _FAR.match(line, near.end())
    width, lane = (
        (float(trained[1]), _LANE.get(float(trained[2] or _FDR10), math.nan)) if trained else (math.nan, math.nan)
    )
    peer = LinkPeer(format_guid(far[1]), int(far[2]), int(far[3]), clean_description(far[4])) if far else None
    return SwitchPort(
        format_guid(near[1]),
        clean_description(near[2]),
        int(near[3]),
        int(near[4]),
        _LOGICAL.get(word, math.nan),
        _PHYSICAL.get(physical.strip(), math.nan),
        width,
        width * lane,
        peer,
    )


def parse_links(text: str, previous: Mapping[str, SwitchPort] = {}) -> dict[str, SwitchPort]:
    """Returns the port of each line. previous: lines of the previous poll, most of which are unchanged and need no
    parsing.

    Port 0 is the switch itself, not a link. If two lines describe one port, the first counts.
    """
    found: dict[str, SwitchPort] = {}
    places: set[PortKey] = set()
    for line in text.splitlines():
        link = previous.get(line) or parse_link_line(line)
        if link is not None and link.port and link.key not in places:
            places.add(link.key)
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
_BY_FILE = {counter.file: counter for counter in RDMA_COUNTERS}
COUNTERS_BY_TOOL_NAME: Mapping[str, PortCounter] = {name: _BY_FILE[f"counters/{file}"] for name, file in _FILES.items()}
"""The tools' name of a counter -> the counter as at either end of the link."""
ERROR_COUNTERS = tuple(name for name, counter in COUNTERS_BY_TOOL_NAME.items() if counter.saturates)
TRAFFIC_COUNTERS = tuple(name for name, counter in COUNTERS_BY_TOOL_NAME.items() if not counter.saturates)
THRESHOLD_FILE = "".join(f"{name}=0\n" for name in ERROR_COUNTERS)
"""Threshold file with which every counter above zero is printed."""

_PORT = re.compile(r"\s+GUID 0x([0-9a-f]{1,16}) port (\d{1,3}):")
_VALUE = re.compile(r"\[(\w{1,40}) == (\d{1,20})\b")
_FAILED = re.compile(r"query failed on .*, Lid (\d{1,5}) port (\d{1,3})$", re.MULTILINE)
_FAILURES = re.compile(r"^## +(\d{1,9}) PMA query failures$", re.MULTILINE)
_END = "## Summary:"
ALL_PORTS = 255
_MAX_COUNTER_LINE = 4096
"""Longest line that is parsed. Chosen: 17 counters of 20 digits are 800 characters."""


@dataclass(frozen=True, slots=True)
class CounterReadings:
    """values: raw values of each port by the tools' names. failed_ports: (LID, port) that did not respond; port 255
    means all.

    complete: whether the run reached its end and listed all failures, so that counters that are not printed are zero.
    """

    values: Mapping[PortKey, Mapping[str, int]] = field(default_factory=dict)
    failed_ports: frozenset[tuple[int, int]] = frozenset()
    complete: bool = False

    def answered(self, lid: int, port: int) -> bool:
        """Returns whether counters of this port that are not in `values` are zero."""
        return self.complete and (lid, port) not in self.failed_ports and (lid, ALL_PORTS) not in self.failed_ports


def parse_counts(text: str, errors: str = "", errors_cut: bool = False) -> CounterReadings:
    """Parses one run. errors: standard error; errors_cut: whether some of it was not kept."""
    values: dict[PortKey, dict[str, int]] = {}
    for line in text.splitlines():
        head = _PORT.match(line) if len(line) <= _MAX_COUNTER_LINE else None
        if head is not None:
            values[format_guid(head[1]), int(head[2])] = {
                n: int(v) for n, v in _VALUE.findall(line, head.end()) if n in COUNTERS_BY_TOOL_NAME
            }
    named = _FAILED.findall(errors)
    reported = _FAILURES.search(text)
    whole = _END in text and not errors_cut and len(named) >= (int(reported[1]) if reported else 0)
    return CounterReadings(values, frozenset((int(lid), int(port)) for lid, port in named), whole)


_FACT = re.compile(r"(vendid|devid|sysimgguid)=0x([0-9a-f]{1,16})$")
_SWITCH = re.compile(r'Switch\s+(\d{1,3}) "S-([0-9a-f]{16})"')


@dataclass(frozen=True, slots=True)
class SwitchInfo:
    """Properties of one switch from the topology; hexadecimal as printed."""

    ports: int
    vendor: str = ""
    device: str = ""
    system_guid: str = ""


def parse_switches(text: str) -> dict[str, SwitchInfo]:
    """Returns the properties of each switch by GUID, from `ibnetdiscover`. The lines before a node belong to it."""
    found: dict[str, SwitchInfo] = {}
    before: dict[str, str] = {}
    for line in text.splitlines():
        if not line.strip():
            before = {}
        elif fact := _FACT.match(line):
            before[fact[1]] = fact[2]
        elif switch := _SWITCH.match(line):
            system = format_guid(before["sysimgguid"]) if "sysimgguid" in before else ""
            facts = SwitchInfo(int(switch[1]), before.get("vendid", ""), before.get("devid", ""), system)
            found.setdefault(format_guid(switch[2]), facts)
    return found


def find_leaves(links: Iterable[SwitchPort]) -> set[str]:
    """Returns the GUIDs of the switches to which hosts are connected."""
    links = list(links)
    switches = {link.guid for link in links}
    return {
        link.guid
        for link in links
        if link.peer and link.peer.guid not in switches and not AGGREGATION.search(link.peer.description)
    }
