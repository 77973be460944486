"""The kinds of event that agents send: what happened, to what, and what the event's data hold. One line per kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EventKind:
    """One kind of event. `entity` is the kind of entity it happens to; `data` names the keys of its data."""

    name: str
    entity: str
    help: str
    data: tuple[str, ...]
    source: str


_KINDS = (
    EventKind("inventory", "node", "Which entities there are, with parents and attributes: at start, on change and hourly", ("entities",), "every collector"),
    EventKind("collector", "node", "A collector's state changed", ("collector", "state", "reason"), "agent"),
    EventKind("gap", "node", "Messages were lost before they could be sent", ("topic", "epoch", "first", "next", "cause"), "agent"),
    EventKind("counter_reset", "any", "Counters of a device went back: they begin a new generation", ("signals",), "agent"),
    EventKind("sel", "node", "The BMC wrote an entry into its system event log", ("record", "timestamp", "sensor", "type", "event", "asserted", "reading", "threshold", "raw"), "IPMI Get SEL Entry"),
    EventKind("aer", "node", "A PCIe device counted new errors; told once in 5 minutes for each device and kind", ("device", "kind", "growth", "total", "errors", "id"), "pci"),
    EventKind("gpu_count", "node", "The number of GPUs changed, or is not what is expected", ("expected", "present", "missing", "source"), "pci, nvml"),
    EventKind("gpu_lost", "gpu", "A GPU does not answer its driver any more, or the driver does not count it", ("gpu", "pci", "serial", "uuid"), "nvml"),
    EventKind("gpu_back", "gpu", "A GPU that was lost answers again", ("gpu", "pci", "serial", "uuid"), "nvml"),
    EventKind("gpu_processes", "gpu", "The processes with a compute context on a GPU are others than before; looked at every 30 s", ("pids",), "nvml"),
    EventKind("slow_call", "gpu", "A call to NVIDIA's driver took long; told at most once a minute for each GPU", ("gpu", "call", "seconds"), "nvml"),
    EventKind("nvml_refused", "gpu", "A GPU refuses calls or fields that it had answered; told at most once a minute, asked again after 10 s, then more seldom", ("gpu", "calls", "count"), "nvml"),
    EventKind("task_blocked", "node", "A process has been in uninterruptible sleep for long", ("pid", "comm", "seconds", "wchan"), "tasks"),
    EventKind("clock_jump", "node", "The wall clock was set", ("seconds",), "clock"),
    EventKind("service", "service", "A service's state changed", ("unit", "from", "to", "since"), "services"),
    EventKind("version", "node", "Versions of software or firmware changed", ("versions", "before"), "versions"),
    EventKind("link_state", "port", "A port's link came up or went down", ("state", "from", "to"), "infiniband, network"),
    EventKind("counter_saturated", "port", "A counter stands at its highest value and counts no more; told once", ("signal", "value", "bits"), "infiniband"),
    EventKind("counter_wrapped", "port", "A counter passed its highest value and counts on from 0", ("signal", "before", "bits"), "infiniband"),
    EventKind("xid", "gpu", "NVIDIA's driver reported an error of a GPU; the node where no driver says which GPU it is", ("xid", "name", "class", "severity", "action", "then", "action_source", "pci", "uuid", "pid", "process", "text", "source", "sources", "detail", "root", "count", "since", "seq", "facility"), "kernel_log, xid"),
    EventKind("sxid", "node", "An NVSwitch reported an error", ("sxid", "name", "severity", "reach", "action", "then", "switch", "pci", "fatal", "text", "detail", "root", "count", "since", "seq", "facility"), "kernel_log"),
    EventKind("recovery_action", "gpu", "What NVIDIA's driver wants done with a GPU changed", ("from", "to", "action", "pci", "root"), "nvml, xid"),
    EventKind("kernel", "any", "A line of the kernel log that tells of a fault", ("pattern", "class", "severity", "device", "text", "detail", "count", "since", "seq", "facility"), "kernel_log"),
    EventKind("kernel_log_overrun", "node", "Records of the kernel log were overwritten before they were read", ("missed", "path"), "kernel_log"),
)  # fmt: skip

EVENT_KINDS: Mapping[str, EventKind] = {kind.name: kind for kind in _KINDS}
