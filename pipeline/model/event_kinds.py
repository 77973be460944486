"""The kinds of event: what happened, to which kinds of entity, and the keys of the data. One line per kind.

A transport may carry only these kinds, and none that is `internal` (pipeline/ingest/admission.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.model.signals import CLASS_OF_KIND


@dataclass(frozen=True, slots=True)
class EventKind:
    """One kind of event. `data` are the keys of its data.

    entity:   the kinds of entity it may happen to, "device" (kinds with signals) or "any"; admission rejects others.
    internal: written only by the pipeline; admission rejects it from a transport.
    """

    name: str
    entity: str
    help: str
    data: tuple[str, ...]
    source: str
    internal: bool = False

    def applies_to(self, kind: str) -> bool:
        """Whether it may happen to entities of that kind."""
        return (
            self.entity == "any"
            or (self.entity == "device" and kind in CLASS_OF_KIND)
            or kind in self.entity.split(", ")
        )


_KINDS = (
    EventKind("inventory", "node", "Which entities there are, with parents and attributes: at start, on change and hourly", ("entities",), "every collector"),
    EventKind("collector", "node", "A collector's state changed", ("collector", "state", "reason"), "agent"),
    EventKind("configuration", "node", "The agent read its configuration again after SIGHUP: the changed keys with values, or why it was refused", ("outcome", "reason"), "agent"),
    EventKind("gap", "node", "Messages were lost before they could be sent", ("topic", "epoch", "first", "next", "cause"), "agent"),
    EventKind("disk_slow", "node", "Messages wait long for the disk of the agent's spool, or no longer do (state cleared)", ("state", "since", "seconds", "waiting", "lost"), "agent"),
    EventKind("counter_reset", "any", "Counters of a device went back: they begin a new generation", ("signals",), "agent"),
    EventKind("sel", "node", "The BMC wrote an entry into its system event log", ("record", "timestamp", "sensor", "type", "event", "asserted", "reading", "threshold", "raw"), "IPMI Get SEL Entry"),
    EventKind("aer", "node", "A PCIe device counted new errors; at most one event per 5 minutes, device and kind", ("device", "kind", "growth", "total", "errors", "id"), "pci"),
    EventKind("gpu_count", "node", "The number of GPUs at the start of the collector, and when it changed", ("expected", "present", "missing", "source"), "pci, nvml"),
    EventKind("gpu_lost", "gpu", "A GPU no longer responds to its driver, or the driver no longer lists it", ("gpu", "pci", "serial", "uuid", "present"), "nvml"),
    EventKind("gpu_back", "gpu", "A lost GPU responds again", ("gpu", "pci", "serial", "uuid"), "nvml"),
    EventKind("execution_errors", "node", "Executions of a program on Trainium or Inferentia failed in the last period", ("pid", "tag", "period", "devices", "errors"), "neuron"),
    EventKind("gpu_processes", "gpu", "The set of processes with a compute context on a GPU changed; checked every 30 s", ("pids",), "nvml"),
    EventKind("slow_call", "gpu", "A call to NVIDIA's driver took long; at most one event per minute and GPU", ("gpu", "call", "seconds"), "nvml"),
    EventKind("nvml_refused", "gpu", "A GPU refuses calls or fields that it answered before; at most one event per minute, retried after 10 s, then less often", ("gpu", "calls", "count"), "nvml"),
    EventKind("task_blocked", "node", "A process has been in uninterruptible sleep for a long time", ("pid", "comm", "seconds", "wchan"), "tasks"),
    EventKind("clock_error", "node, site", "A node's clock is ahead (above 0) or behind, by arrival time of its messages; 0: correct again, or no message for an hour. For site:all, an error that most senders share: the pipeline's own clock or a delay in transport", ("seconds", "senders"), "the pipeline, by arrival time of messages", internal=True),
    EventKind("messages_rejected", "node", "All telemetry of a node has been rejected since then, with the rules; one event until some is admitted", ("count", "rules", "since"), "the pipeline, by its dead letters", internal=True),
    EventKind("clock_jump", "node", "The wall clock was set", ("seconds",), "clock"),
    EventKind("service", "service", "A service's state changed", ("unit", "from", "to", "since"), "services"),
    EventKind("version", "any", "Versions of software or firmware changed", ("versions", "before"), "versions"),
    EventKind("maintenance_start", "any", "Planned work on the entity begins: what happens to it until the end is not a fault", ("reason", "seconds"), "the planner of the work: an operator, a scheduler"),
    EventKind("maintenance_end", "any", "The planned work is done", ("reason",), "the planner of the work: an operator, a scheduler"),
    EventKind("link_state", "port", "A port's link came up or went down", ("state", "from", "to"), "infiniband, network, fabric"),
    EventKind("link_peer", "port", "The device at the far end of a port's link changed", ("peer", "guid", "port", "from", "from_guid", "from_port"), "fabric, lldp"),
    EventKind("switch_state", "leaf, spine", "A switch (leaf or spine) disappeared from its fabric, or is back", ("state", "guid", "ports"), "fabric"),
    EventKind("fabric_tool", "node", "A tool that reads the fabric fails, or works again", ("tool", "state", "reason"), "fabric"),
    EventKind("counter_saturated", "port", "A counter is stuck at its highest value; one event", ("signal", "value", "bits"), "infiniband, fabric"),
    EventKind("counter_wrapped", "port", "A counter wrapped at its highest value and continues from 0", ("signal", "before", "bits"), "infiniband"),
    EventKind("xid", "gpu, node", "NVIDIA's driver reported an error of a GPU; of the node if the GPU cannot be identified", ("xid", "name", "class", "severity", "action", "then", "action_source", "pci", "uuid", "pid", "process", "text", "source", "sources", "detail", "root", "count", "since", "seq", "facility"), "kernel_log, xid"),
    EventKind("sxid", "node", "An NVSwitch reported an error", ("sxid", "name", "severity", "reach", "action", "then", "switch", "pci", "fatal", "text", "detail", "root", "count", "since", "seq", "facility"), "kernel_log"),
    EventKind("recovery_action", "gpu", "The recovery action that NVIDIA's driver recommends for a GPU changed", ("from", "to", "action", "pci", "root"), "nvml, xid"),
    EventKind("kernel", "device", "A line of the kernel log that reports a fault", ("pattern", "class", "severity", "device", "text", "detail", "count", "since", "seq", "facility"), "kernel_log"),
    EventKind("kernel_log_overrun", "node", "Records of the kernel log were overwritten before they were read", ("missed", "path"), "kernel_log"),
    EventKind("exporter", "exporter", "A scraped endpoint stopped responding, or responds again", ("state", "reason"), "prometheus"),
    EventKind("job_start", "job", "A job has new ranks on this node, each with its stage and GPU if known", ("ranks", "name", "scheduler", "user", "namespace", "array", "world_size"), "jobs"),
    EventKind("job_end", "job", "No process of a job is left on this node, in two consecutive readings", ("ranks", "seconds"), "jobs"),
    EventKind("replica_digest", "rank", "Digest of a bucket of parameters after a step: ranks of one group must agree", ("step", "bucket", "digest", "group"), "training"),
    EventKind("checkpoint", "job", "A training job wrote a checkpoint", ("seconds", "step", "rank"), "training"),
    EventKind("digest", "device", "A core or GPU computed problems with known answers; correct results are reported at intervals, wrong ones immediately", ("canary", "version", "digest", "expected", "golden", "format", "range", "wrong", "again", "runs", "rounds", "lacking", "took", "began", "uuid"), "canary"),
    EventKind("leak", "leak_detector", "A leak detector went to warning or critical, or recovered (state cleared)", ("state", "since", "leak", "value"), "edge rules over leak.state"),
    EventKind("flow_collapse", "device", "Coolant flow fell below a share of its usual value in two consecutive readings, or recovered (state cleared)", ("state", "since", "value", "usual", "share", "signal", "why", "others"), "edge rules over coolant.flow"),
    EventKind("pressure_collapse", "device", "Coolant pressure fell below a share of its usual value in two consecutive readings, or recovered (state cleared)", ("state", "since", "value", "usual", "share", "signal", "why", "others"), "edge rules over coolant.pressure, coolant.supply_pressure"),
    EventKind("temperature_rise", "device", "A temperature rises faster than the power explains, or no longer does (state cleared)", ("state", "since", "value", "rise", "seconds", "slope", "power_moved", "limit", "signal"), "edge rules over gpu.temperature and gpu.power, coolant.supply_temperature"),
    EventKind("feedback", "any", "A person marked a finding as a false alarm: learning detectors take the present values as normal", ("verdict", "detector", "incident", "user", "comment"), "a person, over the API", internal=True),
    EventKind("calibration", "site", "A person pinned, released or rolled back the thresholds of the site", ("action", "version", "user", "calibration"), "a person, over the API", internal=True),
    EventKind("site_silent", "site", "No message from any agent of a site for 35 s", ("agents", "since", "nodes", "reading", "shares"), "the pipeline, by wall clock", internal=True),
    EventKind("site_heard", "site", "An agent of a silent site sends again, or its last node is out of service", ("agents", "since", "nodes", "reading", "shares", "out_of_service"), "the pipeline, by wall clock", internal=True),
    EventKind("redfish", "device", "A BMC sent an event on its stream; of the part it is about, else of the BMC; at most 120 per minute and BMC", ("message", "message_id", "severity", "type", "event", "timestamp", "arguments", "origin", "log_entry"), "Redfish server-sent events"),
    EventKind("bmc_lost", "bmc", "A BMC no longer responds", ("reason",), "redfish"),
    EventKind("bmc_back", "bmc", "A lost BMC responds again", ("latency",), "redfish"),
)  # fmt: skip

EVENT_KINDS: Mapping[str, EventKind] = {kind.name: kind for kind in _KINDS}
CANARY_IS_RIGHT = "(data ->> '$.digest') = (data ->> '$.expected')"
"""SQL over `data` of an event `digest`: whether the answer is the known one. A result without a known answer is neither
right nor wrong by itself."""
CANARY_IS_WRONG = "(data ->> '$.digest') <> (data ->> '$.expected')"
