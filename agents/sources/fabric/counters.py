"""`ibqueryerrors`: counters of all ports of all switches in one pass, and whose could not be had.

With every threshold at zero it prints each error counter that is not zero. A switch all of whose counters are zero
costs one query, so a counter that is not printed is zero, unless the port is among those that did not answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from agents.sources.fabric.links import Place, guid
from agents.sources.nics.rdma_table import COUNTERS, Counter

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
TABLE: Mapping[str, Counter] = {name: _BY_FILE[f"counters/{file}"] for name, file in _FILES.items()}
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
