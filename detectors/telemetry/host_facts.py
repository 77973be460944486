"""What was told of a host and its GPUs before they fell silent: machine checks, GPUs off the bus, asked-for reboots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from detectors.base.event_data import read_integer, read_text
from pipeline.model.records import SECOND, Event, Frame
from pipeline.model.topology import Topology

REMEMBERED = 24 * 3600 * SECOND
"""A fault that nobody mended may take so long to end a host, as a disk that is read-only; chosen."""
_HOST = frozenset({"cpu", "disk", "file system", "hardware", "memory", "pcie", "kernel", "thermal"})
"""Classes of the kernel's lines that can end a host; those of NICs and GPUs end a job at most."""
GONE = frozenset({38, 54, 62, 64, 74, 79, 95, 109, 119, 120, 140, 143, 151})
"""XIDs after which a GPU may answer no more until it is reset or its node booted: NVIDIA's catalogue of XIDs."""
_RECOVERY = 154  # tells what the driver wants done
_BOOT = frozenset({79})  # NVIDIA: reboot bare metal


class HostFacts:
    """The newest such fact of each entity; a host that speaks of a new boot has left them behind."""

    def __init__(self) -> None:
        self._told: dict[str, dict[str, Any]] = {}
        self._reboot: dict[str, list[Any]] = {}  # node -> when, and what asked for it
        self._rejected: dict[str, dict[str, Any]] = {}  # node -> when, and which rules reject all that it sends

    def hear(self, frames: Mapping[str, Frame], time: int) -> None:
        """Takes the events of an instant."""
        for frame in frames.values():
            for event in frame.events:
                if (text := _fatal(event)) is not None:
                    self._told[event.entity] = {"time": event.time, "text": text}
                if event.kind == "messages_rejected":
                    rules = event.data.get("rules")
                    names = sorted(map(str, rules))[:3] if isinstance(rules, dict) else []
                    self._rejected[event.entity] = {"time": event.time, "rules": ", ".join(names)[:80]}
                if _asks_for_boot(event):
                    node = frame.topology.above_of_kind(event.entity, "node")
                    self._reboot[node or event.entity] = [event.time, event.entity]
        if self._told or self._reboot or self._rejected:
            self._rejected = {e: k for e, k in self._rejected.items() if time - k["time"] <= REMEMBERED}
            self._told = {e: k for e, k in self._told.items() if time - k["time"] <= REMEMBERED}
            self._reboot = {e: k for e, k in self._reboot.items() if time - k[0] <= REMEMBERED}

    def of(self, entity: str, until: int) -> tuple[int, str] | None:
        """When and what was told last of an entity up to `until`."""
        known = self._told.get(entity)
        return None if known is None or known["time"] > until else (known["time"], known["text"])

    def asked(self, node: str) -> str | None:
        """What of the node asked for a reboot within a day, the newest one."""
        return str(self._reboot[node][1]) if node in self._reboot else None

    def rejected(self, node: str, since: int) -> str | None:
        """The rules by which the pipeline rejects all that a node sends, as it told after `since`."""
        known = self._rejected.get(node)
        return None if known is None or known["time"] < since else str(known["rules"])

    def booted(self, node: str, topology: Topology) -> None:
        """A node speaks again after a silence: what was told of it and its GPUs before is over."""
        self._reboot.pop(node, None)
        self._rejected.pop(node, None)
        if self._told:
            self._told = {e: k for e, k in self._told.items() if e != node and node not in topology.above(e)}

    def snapshot(self) -> dict[str, Any]:
        return {
            "told": {e: dict(k) for e, k in self._told.items()},
            "reboot": {e: list(k) for e, k in self._reboot.items()},
            "rejected": {e: dict(k) for e, k in self._rejected.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._told, self._reboot = dict(state["told"]), {e: list(k) for e, k in state["reboot"].items()}
        self._rejected = {e: dict(k) for e, k in state.get("rejected", {}).items()}


def _fatal(event: Event) -> str | None:
    """In words what an event says, if it may end what it is about."""
    data = event.data
    if event.kind == "kernel" and data.get("severity") == "critical" and read_text(data.get("class")) in _HOST:
        return f"the kernel told: {read_text(data.get('text'))[:120]}"
    if event.kind == "xid" and (code := read_integer(data.get("xid"))) in GONE:
        return f"XID {code} ({read_text(data.get('name'))[:80]})"
    if event.kind == "gpu_lost":
        return "its driver no longer sees it"
    if event.kind == "sxid" and data.get("fatal") is True:
        return f"fatal SXid {read_integer(data.get('sxid'))} ({read_text(data.get('name'))[:80]})"
    return None


def _asks_for_boot(event: Event) -> bool:
    data = event.data
    if event.kind == "xid":
        code = read_integer(data.get("xid"))
        return code in _BOOT or (code == _RECOVERY and "Reboot" in read_text(data.get("text")))
    return event.kind == "recovery_action" and "reboot" in f"{data.get('action')} {data.get('to')}".lower()
