"""The kinds of event: what happened, to what, and what the event's data hold. One line per kind.

A transport may carry only these, and of these only what is not `internal` (pipeline/ingest/admission.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.model.signals import CLASS_OF_KIND


@dataclass(frozen=True, slots=True)
class EventKind:
    """One kind of event. `entity` says to which kinds of entity it happens; `data` names the keys of its data.

    entity:   kinds, or "device" (kinds that have signals), or "any"; admission rejects an event of another entity.
    internal: only the pipeline writes it; admission rejects it from a transport.
    """

    name: str
    entity: str
    help: str
    data: tuple[str, ...]
    source: str
    internal: bool = False

    def happens_to(self, kind: str) -> bool:
        """Whether it can happen to entities of that kind."""
        return (
            self.entity == "any"
            or (self.entity == "device" and kind in CLASS_OF_KIND)
            or kind in self.entity.split(", ")
        )


_KINDS = (
    EventKind("inventory", "node", "Which entities there are, with parents and attributes: at start, on change and hourly", ("entities",), "every collector"),
    EventKind("collector", "node", "A collector's state changed", ("collector", "state", "reason"), "agent"),
    EventKind("gap", "node", "Messages were lost before they could be sent", ("topic", "epoch", "first", "next", "cause"), "agent"),
    EventKind("disk_slow", "node", "Messages wait long for the disk of the agent's spool, or no longer do (state cleared)", ("state", "since", "seconds", "waiting", "lost"), "agent"),
    EventKind("counter_reset", "any", "Counters of a device went back: they begin a new generation", ("signals",), "agent"),
    EventKind("sel", "node", "The BMC wrote an entry into its system event log", ("record", "timestamp", "sensor", "type", "event", "asserted", "reading", "threshold", "raw"), "IPMI Get SEL Entry"),
    EventKind("aer", "node", "A PCIe device counted new errors; told once in 5 minutes for each device and kind", ("device", "kind", "growth", "total", "errors", "id"), "pci"),
    EventKind("gpu_count", "node", "The number of GPUs changed, or is not what is expected", ("expected", "present", "missing", "source"), "pci, nvml"),
    EventKind("gpu_lost", "gpu", "A GPU does not answer its driver any more, or the driver does not count it", ("gpu", "pci", "serial", "uuid", "present"), "nvml"),
    EventKind("gpu_back", "gpu", "A GPU that was lost answers again", ("gpu", "pci", "serial", "uuid"), "nvml"),
    EventKind("execution_errors", "node", "Executions of a program on Trainium or Inferentia failed in the last period", ("pid", "tag", "period", "devices", "errors"), "neuron"),
    EventKind("gpu_processes", "gpu", "The processes with a compute context on a GPU are others than before; looked at every 30 s", ("pids",), "nvml"),
    EventKind("slow_call", "gpu", "A call to NVIDIA's driver took long; told at most once a minute for each GPU", ("gpu", "call", "seconds"), "nvml"),
    EventKind("nvml_refused", "gpu", "A GPU refuses calls or fields that it had answered; told at most once a minute, asked again after 10 s, then more seldom", ("gpu", "calls", "count"), "nvml"),
    EventKind("task_blocked", "node", "A process has been in uninterruptible sleep for long", ("pid", "comm", "seconds", "wchan"), "tasks"),
    EventKind("clock_error", "node, site", "The pipeline measured that a node's clock is ahead (above 0) or behind, by when messages arrive; 0: it is right again, or not heard for an hour. Of site:all, what most senders share: the pipeline's own clock, or a delay on the way", ("seconds", "senders"), "the pipeline, by when messages arrive", internal=True),
    EventKind("messages_rejected", "node", "Nothing of a node's telemetry was admitted since then, by which rules; told once, until some is admitted", ("count", "rules", "since"), "the pipeline, by its dead letters", internal=True),
    EventKind("clock_jump", "node", "The wall clock was set", ("seconds",), "clock"),
    EventKind("service", "service", "A service's state changed", ("unit", "from", "to", "since"), "services"),
    EventKind("version", "any", "Versions of software or firmware changed", ("versions", "before"), "versions"),
    EventKind("maintenance_start", "any", "People begin to work on it: what happens to it until the end is no fault", ("reason", "seconds"), "whoever plans the work: an operator, a scheduler"),
    EventKind("maintenance_end", "any", "The work on it is done", ("reason",), "whoever plans the work: an operator, a scheduler"),
    EventKind("link_state", "port", "A port's link came up or went down", ("state", "from", "to"), "infiniband, network, fabric"),
    EventKind("link_peer", "port", "Another device than before is at the far end of a port's link", ("peer", "guid", "port", "from", "from_guid", "from_port"), "fabric, lldp"),
    EventKind("switch_state", "leaf, spine", "A switch (leaf or spine) is no longer seen in its fabric, or is seen again", ("state", "guid", "ports"), "fabric"),
    EventKind("fabric_tool", "node", "A tool that reads the fabric fails, or works again", ("tool", "state", "reason"), "fabric"),
    EventKind("counter_saturated", "port", "A counter stands at its highest value and counts no more; told once", ("signal", "value", "bits"), "infiniband, fabric"),
    EventKind("counter_wrapped", "port", "A counter passed its highest value and counts on from 0", ("signal", "before", "bits"), "infiniband"),
    EventKind("xid", "gpu, node", "NVIDIA's driver reported an error of a GPU; the node where no driver says which GPU it is", ("xid", "name", "class", "severity", "action", "then", "action_source", "pci", "uuid", "pid", "process", "text", "source", "sources", "detail", "root", "count", "since", "seq", "facility"), "kernel_log, xid"),
    EventKind("sxid", "node", "An NVSwitch reported an error", ("sxid", "name", "severity", "reach", "action", "then", "switch", "pci", "fatal", "text", "detail", "root", "count", "since", "seq", "facility"), "kernel_log"),
    EventKind("recovery_action", "gpu", "What NVIDIA's driver wants done with a GPU changed", ("from", "to", "action", "pci", "root"), "nvml, xid"),
    EventKind("kernel", "device", "A line of the kernel log that tells of a fault", ("pattern", "class", "severity", "device", "text", "detail", "count", "since", "seq", "facility"), "kernel_log"),
    EventKind("kernel_log_overrun", "node", "Records of the kernel log were overwritten before they were read", ("missed", "path"), "kernel_log"),
    EventKind("exporter", "exporter", "A scraped endpoint stopped answering, or answers again", ("state", "reason"), "prometheus"),
    EventKind("job_start", "job", "A job has ranks on this node that it had not: each with its stage and GPU as far as known", ("ranks", "name", "scheduler", "user", "namespace", "array", "world_size"), "jobs"),
    EventKind("job_end", "job", "No process of a job is left on this node, at two looks", ("ranks", "seconds"), "jobs"),
    EventKind("replica_digest", "rank", "Digest of a bucket of parameters after a step: ranks of one group must agree", ("step", "bucket", "digest", "group"), "training"),
    EventKind("checkpoint", "job", "A training job wrote a checkpoint", ("seconds", "step", "rank"), "training"),
    EventKind("digest", "device", "A core or GPU computed known problems: told for right answers at times, for wrong ones at once", ("canary", "version", "digest", "expected", "golden", "format", "range", "wrong", "again", "runs", "rounds", "lacking", "took", "began", "uuid"), "canary"),
    EventKind("leak", "leak_detector", "A leak detector went to warning or critical, or is well again (state cleared)", ("state", "since", "leak", "value"), "edge rules over leak.state"),
    EventKind("flow_collapse", "device", "Coolant flow fell below a share of its usual value in two looks running, or recovered (state cleared)", ("state", "since", "value", "usual", "share", "signal", "why", "others"), "edge rules over coolant.flow"),
    EventKind("pressure_collapse", "device", "Coolant pressure fell below a share of its usual value in two looks running, or recovered (state cleared)", ("state", "since", "value", "usual", "share", "signal", "why", "others"), "edge rules over coolant.pressure, coolant.supply_pressure"),
    EventKind("temperature_rise", "device", "A temperature rises faster than its power explains, or no longer does (state cleared)", ("state", "since", "value", "rise", "seconds", "slope", "power_moved", "limit", "signal"), "edge rules over gpu.temperature and gpu.power, coolant.supply_temperature"),
    EventKind("feedback", "any", "A person said of a finding that nothing is wrong: a detector that learns takes that for normal", ("verdict", "detector", "incident", "user", "comment"), "a person, over the API", internal=True),
    EventKind("site_silent", "site", "No agent of a site was heard for 35 s", ("agents", "since", "nodes", "reading", "shares"), "the pipeline, by wall clock", internal=True),
    EventKind("site_heard", "site", "An agent of a site that was silent is heard again", ("agents", "since", "nodes", "reading", "shares"), "the pipeline, by wall clock", internal=True),
    EventKind("redfish", "device", "A BMC told of an event on its stream: of what it is about, else of the BMC; at most 120 a minute for each BMC", ("message", "message_id", "severity", "type", "event", "timestamp", "arguments", "origin", "log_entry"), "Redfish server-sent events"),
    EventKind("bmc_lost", "bmc", "A BMC does not answer any more", ("reason",), "redfish"),
    EventKind("bmc_back", "bmc", "A BMC that was lost answers again", ("latency",), "redfish"),
)  # fmt: skip

EVENT_KINDS: Mapping[str, EventKind] = {kind.name: kind for kind in _KINDS}
