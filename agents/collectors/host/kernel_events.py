"""Records of the kernel log -> events: what the line says, what it means, and which entity it happened to.

PCI address -> GPU index, from the NVIDIA driver's /proc tree: logs name GPUs by address, entities by index.
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
from agents.collectors.gpu.xid_table import Table
from agents.collectors.gpu.xid_text import SXidLine, XidLine, normal_pci
from agents.collectors.host.kernel_patterns import Found, Patterns
from agents.collectors.host.kmsg import Record
from pipeline.model.records import Event

AGAIN_S = 60.0
"""How soon the tree is read again for an address that is not known; chosen: a driver that was loaded late is found."""
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.I)


@dataclass
class GpuPlaces:
    """Where each GPU is: address and UUID -> index. Read when nothing is wrong yet, and kept when the driver hangs.

    NVML counts GPUs in the order of their PCI addresses and leaves out those that the driver was told to exclude, as
    `nvidia-smi` and CUDA_DEVICE_ORDER=PCI_BUS_ID do (CUDA programming guide, environment variables). The minor number
    of /dev/nvidiaN is another order.
    """

    root: Path
    by_pci: Mapping[str, int] = field(default_factory=dict)
    by_uuid: dict[str, str] = field(default_factory=dict)
    branch: int | None = None
    _read: float = field(default=0.0, init=False, repr=False)

    def read(self, patience: float = 1.0) -> None:
        """Reads the tree anew. The names of its folders need no driver; its files may hang, so they get `patience`."""
        self._read, self.branch = time.monotonic(), self._driver_branch()
        addresses = self._addresses()
        if not addresses:
            return
        facts: dict[str, dict[str, str]] = {}
        reader = threading.Thread(target=self._facts, args=(addresses, facts), daemon=True)
        reader.start()
        reader.join(patience)
        known = dict(facts)
        listed = [a for a in addresses if known.get(a, {}).get("GPU Excluded", "No") != "Yes"]
        self.by_pci = {normal_pci(address): index for index, address in enumerate(listed)}
        self.by_uuid |= {f["GPU UUID"]: normal_pci(a) for a, f in known.items() if f.get("GPU UUID")}

    def index(self, pci: str | None) -> int | None:
        """The index of the GPU at an address without function; None where that is not known."""
        if pci is not None and pci not in self.by_pci and time.monotonic() - self._read > AGAIN_S:
            self.read()
        return None if pci is None else self.by_pci.get(pci)

    def _driver_branch(self) -> int | None:
        """575 of 575.57.08; None where no driver says."""
        try:
            text = (self.root / "version").read_text("utf-8", "replace")
        except OSError:  # no driver, or not its tree: the branch is not known
            return None
        found = re.search(r"\b(\d{3})\.\d{1,3}(?:\.\d{1,3})?\b", text)
        return int(found[1]) if found else None

    def _addresses(self) -> list[str]:
        try:
            names = [path.name for path in (self.root / "gpus").iterdir()]
        except OSError:  # no driver
            return []
        return sorted((n for n in names if _ADDRESS.fullmatch(n)), key=lambda n: (int(n.split(":")[0], 16), n.lower()))

    def _facts(self, addresses: list[str], facts: dict[str, dict[str, str]]) -> None:
        for address in addresses:
            try:
                text = (self.root / "gpus" / address / "information").read_text("utf-8", "replace")
            except OSError:  # went away between the two looks
                continue
            pairs = (line.partition(":") for line in text.splitlines())
            facts[address] = {key.strip(): value.strip() for key, _, value in pairs}


WORDS = ("NVRM: Xid (", "SXid (", "NVRM: GPU at PCI:")
"""What the prefilter must let through for this module."""
DETAIL = 200
"""Most characters of one detail; chosen."""
_PCI = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass
class Interpreter:
    """Gives (key that repeats are counted by, event) for each record that matters."""

    node: str
    table: Table
    patterns: Patterns
    places: GpuPlaces
    sys: Path

    def event(self, record: Record, time: int) -> tuple[Hashable, Event] | None:
        """None for a line that matters to nobody."""
        text = record.text
        if not self.patterns.interesting(text):
            return None
        if "Xid (" in text:
            if (xid := xid_text.xid_line(text)) is not None:
                return self._xid(xid, record, time)
            if (sxid := xid_text.sxid_line(text)) is not None:
                return self._sxid(sxid, record, time)
        if (pair := xid_text.uuid_line(text)) is not None:
            self.places.by_uuid[pair[1]] = pair[0]
            return None
        found = self.patterns.find(text)
        return None if found is None else self._kernel(found, record, time)

    def _xid(self, line: XidLine, record: Record, time: int) -> tuple[Hashable, Event]:
        known, pci = self.table.xid(line.code), line.pci or self.places.by_uuid.get(line.uuid or "")
        detail = xid_text.detail(line, self.places.branch)
        data: dict[str, Any] = {"xid": line.code, "name": known.name, "class": known.group}
        data |= {"severity": known.severity, "action": known.action, "then": known.then, "source": "kernel"}
        data |= _ruled(line.code, detail)
        data |= {"pci": pci, "uuid": line.uuid, "pid": line.pid, "process": line.process}
        data |= {"text": line.text, "detail": detail, **_origin(record)}
        event = Event(time, self._gpu(pci), "xid", {k: v for k, v in data.items() if v not in (None, "", {})})
        return ("xid", line.code, pci, detail.get("unit"), detail.get("link"), detail.get("to")), event

    def _sxid(self, line: SXidLine, record: Record, time: int) -> tuple[Hashable, Event]:
        known = self.table.sxid(line.code)
        severity = known.severity
        if line.fatal is not None and line.code not in self.table.sxids:
            severity = "critical" if line.fatal else "warning"
        if line.fatal is None and line.detail:  # a second line that only details the one before it
            severity = "info"
        data: dict[str, Any] = {"sxid": line.code, "name": known.name, "severity": severity, "reach": known.reach}
        data |= {
            "action": known.action,
            "then": known.then,
            "switch": line.switch,
            "pci": line.pci,
            "fatal": line.fatal,
        }
        data |= {"text": line.text, "detail": dict(line.detail or {}), **_origin(record)}
        event = Event(time, f"node:{self.node}", "sxid", {k: v for k, v in data.items() if v not in (None, "", {})})
        return ("sxid", line.code, line.switch, (line.detail or {}).get("link")), event

    def _kernel(self, found: Found, record: Record, time: int) -> tuple[Hashable, Event]:
        pattern = found.pattern
        data: dict[str, Any] = {"pattern": pattern.name, "class": pattern.group, "severity": pattern.severity}
        device = found.device or found.pci
        data |= {"device": device, "text": record.text, **_origin(record)}
        data["detail"] = {key: value.strip()[:DETAIL] for key, value in found.detail.items()}
        event = Event(time, self._entity(found), "kernel", {k: v for k, v in data.items() if v not in (None, "", {})})
        return ("kernel", pattern.name, device), event

    def _entity(self, found: Found) -> str:
        """The GPU, port or disk that the line names, where the node has it; else the node."""
        device, pci = found.device or "", (found.pci or "").lower()
        if re.fullmatch(r"nvme\d{1,4}", device):
            return f"disk:{self.node}.{device}"
        if not re.match(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}", pci):
            return f"node:{self.node}"
        gpu = self._gpu(xid_text.normal_pci(pci))
        if gpu.startswith("gpu:"):
            return gpu
        port = self._port(pci) if _PCI.fullmatch(pci) else ""
        return f"port:{self.node}.{port}" if port else f"node:{self.node}"

    def _gpu(self, pci: str | None) -> str:
        """The GPU at an address; the node where no driver says which that is."""
        index = self.places.index(pci)
        return f"node:{self.node}" if index is None else f"gpu:{self.node}.{index}"

    def _port(self, pci: str) -> str:
        """The RDMA device of a PCI function with one port, by the kernel's own bookkeeping; empty if it has none."""
        try:
            devices = [path.name for path in (self.sys / "bus/pci/devices" / pci / "infiniband").iterdir()]
            ports = list((self.sys / "class/infiniband" / devices[0] / "ports").iterdir()) if devices else []
        except OSError:  # no RDMA device, or it has just gone
            return ""
        return devices[0] if len(ports) == 1 else ""


def _ruled(code: int, detail: dict[str, Any]) -> dict[str, Any]:
    """What the details say against the table: they win. Takes action and then out of the details."""
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
    if detail.get("reset_required") or detail.get("drain_required"):  # XID 94 and 95 say it themselves
        ruled["action"] = "drain and reset GPU" if detail.get("drain_required") else "reset GPU"
    return {key: value for key, value in ruled.items() if value is not None}


def _origin(record: Record) -> dict[str, Any]:
    """Which record it was; a process that wrote into the log is told apart from the kernel."""
    return {"seq": record.sequence, **({"facility": record.facility} if record.facility else {})}
