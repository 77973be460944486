"""Converts kernel log records to events: what the line says, what it means, and which entity it concerns.

Logs identify GPUs by PCI address, entities by index; the NVIDIA driver's /proc tree maps one to the other.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents.collectors.gpu import xid_text
from agents.collectors.gpu.slots import SlotIndexes, add_indexes
from agents.collectors.gpu.xid_table import XidTable
from agents.collectors.gpu.xid_text import SXidLine, XidLine, pci_without_function
from agents.collectors.host.kernel_patterns import LogPatterns, PatternMatch
from agents.collectors.host.kmsg import KmsgRecord
from pipeline.model.records import Event

REREAD_S = 60.0
"""Seconds before the tree is read again for an unknown address. Chosen: a driver that was loaded late is found."""
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.I)


@dataclass
class GpuAddresses:
    """Address and UUID -> index of each GPU. Read at start, and kept when the driver hangs or is reloaded.

    slots: the nvml collector's state file, whose indexes count: so an XID has the GPU of the other signals.

    NVML numbers GPUs in the order of their PCI addresses, without those that the driver excludes by configuration, like
    `nvidia-smi` and CUDA_DEVICE_ORDER=PCI_BUS_ID (CUDA programming guide, environment variables). The minor number of
    /dev/nvidiaN is another order.
    """

    root: Path
    by_pci: Mapping[str, int] = field(default_factory=dict)
    by_uuid: dict[str, str] = field(default_factory=dict)
    branch: int | None = None
    slots: Path | None = None
    _slots: SlotIndexes = field(init=False, repr=False)
    _last_read: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        self._slots = SlotIndexes(self.slots)

    def read(self, patience: float = 1.0) -> None:
        """Reads the tree. Its folder names need no driver; its files may hang, so they get `patience` seconds."""
        self._last_read, self.branch = time.monotonic(), self._driver_branch()
        addresses = self._list_addresses()
        if not addresses:
            return
        facts: dict[str, dict[str, str]] = {}
        reader = threading.Thread(target=self._read_information, args=(addresses, facts), daemon=True)
        reader.start()
        reader.join(patience)
        known = dict(facts)
        listed = [a for a in addresses if known.get(a, {}).get("GPU Excluded", "No") != "Yes"]
        self._take_slots()
        self.by_pci = add_indexes(self.by_pci, map(pci_without_function, listed))
        self.by_uuid |= {f["GPU UUID"]: pci_without_function(a) for a, f in known.items() if f.get("GPU UUID")}

    def index_of(self, pci: str | None) -> int | None:
        """Returns the index of the GPU at an address without function; None if unknown."""
        self._take_slots()
        if pci is not None and pci not in self.by_pci and time.monotonic() - self._last_read > REREAD_S:
            self.read()
        return None if pci is None else self.by_pci.get(pci)

    def _take_slots(self) -> None:
        """Takes the nvml collector's indexes; another address that had one of them gets none."""
        if slots := self._slots.load():
            taken = set(slots.values())
            self.by_pci = {pci: index for pci, index in self.by_pci.items() if index not in taken} | dict(slots)

    def _driver_branch(self) -> int | None:
        """Returns 575 of 575.57.08; None if there is no driver."""
        try:
            text = (self.root / "version").read_text("utf-8", "replace")
        except OSError:  # no driver, or another tree: the branch is unknown
            return None
        found = re.search(r"\b(\d{3})\.\d{1,3}(?:\.\d{1,3})?\b", text)
        return int(found[1]) if found else None

    def _list_addresses(self) -> list[str]:
        try:
            names = [path.name for path in (self.root / "gpus").iterdir()]
        except OSError:  # no driver
            return []
        return sorted((n for n in names if _ADDRESS.fullmatch(n)), key=lambda n: (int(n.split(":")[0], 16), n.lower()))

    def _read_information(self, addresses: list[str], facts: dict[str, dict[str, str]]) -> None:
        for address in addresses:
            try:
                text = (self.root / "gpus" / address / "information").read_text("utf-8", "replace")
            except OSError:  # removed between the two reads
                continue
            pairs = (line.partition(":") for line in text.splitlines())
            facts[address] = {key.strip(): value.strip() for key, _, value in pairs}


PREFILTER_WORDS = ("NVRM: Xid (", "SXid (", "NVRM: GPU at PCI:")
"""What the prefilter must let through for this module."""
MAX_DETAIL = 200
"""Most characters of one detail. Chosen."""
_PCI = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass
class KernelEventDecoder:
    """Returns (key for counting repeats, event) for each record that matches."""

    node: str
    table: XidTable
    patterns: LogPatterns
    gpus: GpuAddresses
    sys: Path

    def decode(self, record: KmsgRecord, time: int) -> tuple[Hashable, Event] | None:
        """Returns the event of a record; None if it matches nothing."""
        text = record.text
        if not self.patterns.may_match(text):
            return None
        if "Xid (" in text:
            if (xid := xid_text.parse_xid_line(text)) is not None:
                return self._xid_event(xid, record, time)
            if (sxid := xid_text.parse_sxid_line(text)) is not None:
                return self._sxid_event(sxid, record, time)
        if (pair := xid_text.parse_uuid_line(text)) is not None:
            self.gpus.by_uuid[pair[1]] = pair[0]
            return None
        found = self.patterns.find_match(text)
        return None if found is None else self._pattern_event(found, record, time)

    def _xid_event(self, line: XidLine, record: KmsgRecord, time: int) -> tuple[Hashable, Event]:
        known, pci = self.table.find_xid(line.code), line.pci or self.gpus.by_uuid.get(line.uuid or "")
        detail = xid_text.decode_detail(line, self.gpus.branch)
        data: dict[str, Any] = {"xid": line.code, "name": known.name, "class": known.group}
        data |= {"severity": known.severity, "action": known.action, "then": known.next_action, "source": "kernel"}
        data |= _overrides_from_detail(line.code, detail)
        data |= {"pci": pci, "uuid": line.uuid, "pid": line.pid, "process": line.process}
        data |= {"text": line.text, "detail": detail, **_record_fields(record)}
        event = Event(time, self._gpu_entity(pci), "xid", {k: v for k, v in data.items() if v not in (None, "", {})})
        return ("xid", line.code, pci, detail.get("unit"), detail.get("link"), detail.get("to")), event

    def _sxid_event(self, line: SXidLine, record: KmsgRecord, time: int) -> tuple[Hashable, Event]:
        known = self.table.find_sxid(line.code)
        severity = known.severity
        if line.fatal is not None and line.code not in self.table.sxids:
            severity = "critical" if line.fatal else "warning"
        if line.fatal is None and line.detail:  # a second line that only adds details to the one before
            severity = "info"
        data: dict[str, Any] = {"sxid": line.code, "name": known.name, "severity": severity, "reach": known.reach}
        data |= {
            "action": known.action,
            "then": known.next_action,
            "switch": line.switch,
            "pci": line.pci,
            "fatal": line.fatal,
        }
        data |= {"text": line.text, "detail": dict(line.detail or {}), **_record_fields(record)}
        event = Event(time, f"node:{self.node}", "sxid", {k: v for k, v in data.items() if v not in (None, "", {})})
        return ("sxid", line.code, line.switch, (line.detail or {}).get("link")), event

    def _pattern_event(self, found: PatternMatch, record: KmsgRecord, time: int) -> tuple[Hashable, Event]:
        pattern = found.pattern
        data: dict[str, Any] = {"pattern": pattern.name, "class": pattern.group, "severity": pattern.severity}
        device = found.device or found.pci
        data |= {"device": device, "text": record.text, **_record_fields(record)}
        data["detail"] = {key: value.strip()[:MAX_DETAIL] for key, value in found.detail.items()}
        event = Event(
            time, self._entity_of(found), "kernel", {k: v for k, v in data.items() if v not in (None, "", {})}
        )
        return ("kernel", pattern.name, device), event

    def _entity_of(self, found: PatternMatch) -> str:
        """Returns the GPU, port or disk in the line, if the node has it; else the node."""
        device, pci = found.device or "", (found.pci or "").lower()
        if re.fullmatch(r"nvme\d{1,4}", device):
            return f"disk:{self.node}.{device}"
        if not re.match(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}", pci):
            return f"node:{self.node}"
        gpu = self._gpu_entity(xid_text.pci_without_function(pci))
        if gpu.startswith("gpu:"):
            return gpu
        port = self._port_name(pci) if _PCI.fullmatch(pci) else ""
        return f"port:{self.node}.{port}" if port else f"node:{self.node}"

    def _gpu_entity(self, pci: str | None) -> str:
        """Returns the GPU at an address; the node if no driver says which one that is."""
        index = self.gpus.index_of(pci)
        return f"node:{self.node}" if index is None else f"gpu:{self.node}.{index}"

    def _port_name(self, pci: str) -> str:
        """Returns the RDMA device of a PCI function with one port, from the kernel's own data; empty if it has none."""
        try:
            devices = [path.name for path in (self.sys / "bus/pci/devices" / pci / "infiniband").iterdir()]
            ports = list((self.sys / "class/infiniband" / devices[0] / "ports").iterdir()) if devices else []
        except OSError:  # no RDMA device, or just removed
            return ""
        return devices[0] if len(ports) == 1 else ""


def _overrides_from_detail(code: int, detail: dict[str, Any]) -> dict[str, Any]:
    """Returns what the details override in the table's entry. Removes action and next action from the details."""
    then, action = detail.pop("then", None), detail.pop("action", None)
    ruled = {"action": action, "then": then}
    if code == 154 and "to" in detail:
        return {"action": action, "severity": "critical" if detail["to"] else "info"}
    if code == 74 and (verdict := detail.get("verdict")):
        quiet = verdict in ("may be ignored", "ECC threshold passed, nothing uncorrectable")
        ruled |= {"action": "none" if quiet else then, "severity": "info" if quiet else None}
    if 144 <= code <= 150 and "unit" in detail:
        fatal = "fatal" in (detail["severity"], detail.get("rule_severity"))
        ruled["severity"] = "critical" if fatal else "warning"
    if detail.get("reset_required") or detail.get("drain_required"):  # XID 94 and 95 contain it
        ruled["action"] = "drain and reset GPU" if detail.get("drain_required") else "reset GPU"
    return {key: value for key, value in ruled.items() if value is not None}


def _record_fields(record: KmsgRecord) -> dict[str, Any]:
    """Returns the record's number, and its facility if a process, not the kernel, wrote it."""
    return {"seq": record.sequence, **({"facility": record.facility} if record.facility else {})}
