"""Events that explain why a host or its GPUs fell silent: machine checks, lost GPUs, requested reboots, rejections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from detectors.base.event_data import read_integer, read_text
from detectors.base.state import State, notes
from pipeline.model.records import SECOND, Event, Frame
from pipeline.model.topology import Topology

REMEMBERED = 24 * 3600 * SECOND
"""us for which a fact counts: a fault that is not repaired, as a read-only disk, may end a host as late; chosen."""
_HOST = frozenset({"cpu", "disk", "file system", "hardware", "memory", "pcie", "kernel", "thermal"})
"""Classes of kernel log lines that can end a host; those of NICs and GPUs end a job at most."""
GONE = frozenset({38, 54, 62, 64, 74, 79, 95, 109, 119, 120, 140, 143, 151})
"""XIDs after which a GPU may not answer until it is reset or its node rebooted: NVIDIA's catalogue of XIDs."""
_RECOVERY = 154  # names the recovery action that the driver requires
_BOOT = frozenset({79})  # NVIDIA: reboot bare metal


@dataclass
class HostFacts(State):
    """The newest fatal fact, requested reboot and rejection of each entity; a new boot of a host clears its facts."""

    _fatal: dict[str, dict[str, Any]] = notes()  # entity -> time, text
    _reboot: dict[str, list[Any]] = notes()  # node -> time, and the entity that requires it
    _rejected: dict[str, dict[str, Any]] = notes()  # node -> time, and the rules that reject all that it sends

    def update(self, frames: Mapping[str, Frame], time: int) -> None:
        """Reads the events of an instant."""
        for frame in frames.values():
            for event in frame.events:
                if (text := _fatal_text(event)) is not None:
                    self._fatal[event.entity] = {"time": event.time, "text": text}
                if event.kind == "messages_rejected":
                    rules = event.data.get("rules")
                    names = sorted(map(str, rules))[:3] if isinstance(rules, dict) else []
                    self._rejected[event.entity] = {"time": event.time, "rules": ", ".join(names)[:80]}
                if _requires_reboot(event):
                    node = frame.topology.ancestor_of_kind(event.entity, "node")
                    self._reboot[node or event.entity] = [event.time, event.entity]
        if self._fatal or self._reboot or self._rejected:
            self._rejected = {e: k for e, k in self._rejected.items() if time - k["time"] <= REMEMBERED}
            self._fatal = {e: k for e, k in self._fatal.items() if time - k["time"] <= REMEMBERED}
            self._reboot = {e: k for e, k in self._reboot.items() if time - k[0] <= REMEMBERED}

    def last_fatal(self, entity: str, until: int) -> tuple[int, str] | None:
        """Returns time and text of the newest fatal fact of an entity up to `until`; None without one."""
        known = self._fatal.get(entity)
        return None if known is None or known["time"] > until else (known["time"], known["text"])

    def reboot_required_by(self, node: str) -> str | None:
        """Returns the entity of the node that required a reboot within a day, the newest one."""
        return str(self._reboot[node][1]) if node in self._reboot else None

    def rejected_by(self, node: str, since: int) -> str | None:
        """Returns the rules by which the pipeline rejects all that a node sends, as reported after `since`."""
        known = self._rejected.get(node)
        return None if known is None or known["time"] < since else str(known["rules"])

    def clear_node(self, node: str, topology: Topology) -> None:
        """Removes the facts of a node that reports again after a silence, and of its GPUs."""
        self._reboot.pop(node, None)
        self._rejected.pop(node, None)
        if self._fatal:
            self._fatal = {e: k for e, k in self._fatal.items() if e != node and node not in topology.ancestors(e)}


def _fatal_text(event: Event) -> str | None:
    """Returns in words what an event reports, if that can end its entity."""
    data = event.data
    if event.kind == "kernel" and data.get("severity") == "critical" and read_text(data.get("class")) in _HOST:
        return f"kernel: {read_text(data.get('text'))[:120]}"
    if event.kind == "xid" and (code := read_integer(data.get("xid"))) in GONE:
        return f"XID {code} ({read_text(data.get('name'))[:80]})"
    if event.kind == "gpu_lost":
        return "lost by its driver"
    if event.kind == "sxid" and data.get("fatal") is True:
        return f"fatal SXid {read_integer(data.get('sxid'))} ({read_text(data.get('name'))[:80]})"
    return None


def _requires_reboot(event: Event) -> bool:
    data = event.data
    if event.kind == "xid":
        code = read_integer(data.get("xid"))
        return code in _BOOT or (code == _RECOVERY and "Reboot" in read_text(data.get("text")))
    return event.kind == "recovery_action" and "reboot" in f"{data.get('action')} {data.get('to')}".lower()
