"""Which events make this node unfit for a job, how severe they are, why, and what ends them.

A condition is critical only if it is certain and would cost the next job: a prolog drains the node for it. All others
are warnings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # `fleetpulse check` needs the names of the rules, and must not load NumPy, which records loads
    from pipeline.model.records import Event

Level = Literal["critical", "warning"]
Data = Mapping[str, Any]
REPAIR_WORDS = ("reset", "reboot", "restart the vm", "restart vm")
"""Words of actions that interrupt everything on the device; NVIDIA's own, of the XID catalogue."""


@dataclass(frozen=True, slots=True)
class HealthRule:
    """One kind of condition and the events that begin and end it.

    holds: whether an event of `kind` begins the condition (True) or ends it (False); None: neither.
    detail: the key of the data that distinguishes conditions of one entity; its value follows the name after a dot.
    ended_by: kinds of event of the same GPU that also end it, because they mean that the GPU restarted.
    survives_restart: whether it holds after a restart of the agent, because no collector reports it again.
    """

    name: str
    kind: str
    level: Level
    reason: str
    holds: Callable[[Data], bool | None]
    describe: Callable[[Data], str]
    detail: str = ""
    ended_by: tuple[str, ...] = ()
    survives_restart: bool = True

    def condition_name(self, event: Event) -> str:
        """The name of the condition that this event begins or ends: that of the rule, with its detail."""
        found = event.data.get(self.detail) if self.detail else None
        return self.name if found is None else f"{self.name}.{found}"


DEVICE_RESTARTED = ("gpu_back", "counter_reset")
"""Events of a GPU that was reset or whose driver was reloaded (agents/node/counter_generations.py)."""


def _is_fatal_xid(data: Data) -> bool | None:
    """Whether it is fatal in itself: consequences are covered by their root; XID 154 is a recovery action."""
    severe = data.get("severity") == "critical" and "root" not in data
    return True if severe and _needs_repair(data) and data.get("xid") != 154 else None


def _needs_repair(data: Data) -> bool:
    return any(word in str(data.get("action", "")).lower() for word in REPAIR_WORDS)


def _is_fatal_sxid(data: Data) -> bool | None:
    severe = data.get("severity") == "critical" and "root" not in data
    return True if severe and data.get("fatal") is not False and _needs_repair(data) else None


def _gpus_are_missing(data: Data) -> bool | None:
    present, expected = data.get("present"), data.get("expected")
    return present < expected if isinstance(present, int) and isinstance(expected, int) else None


def _link_is_down(data: Data) -> bool | None:
    return {"down": True, "up": False}.get(str(data.get("state")))


def _recovery_is_wanted(data: Data) -> bool | None:
    """Whether the driver requests an action: NVML by an event, the kernel log by XID 154; 0 ends it after a repair."""
    to = data.get("to")
    if data.get("xid") == 154:
        to = data.get("detail", {}).get("to")
    return None if to is None else bool(to)


def _describe_recovery(data: Data) -> str:
    return f"its driver requires: {data.get('action')}"


def _leak_at_level(level: str) -> Callable[[Data], bool | None]:
    def holds(data: Data) -> bool | None:
        """Returns whether the event begins (True) or ends (False) the condition; None: neither."""
        return False if data.get("state") == "cleared" else True if data.get("leak") == level else None

    return holds


def _is_active(data: Data) -> bool | None:
    return {"active": True, "cleared": False}.get(str(data.get("state")))


def _digest_is_wrong(data: Data) -> bool | None:
    found, expected = data.get("digest"), data.get("expected")
    return None if found is None or expected is None else found != expected


def _describe_lost_gpu(data: Data) -> str:
    known = ", ".join(f"{key} {data[key]}" for key in ("pci", "serial") if data.get(key))
    return f"lost, it does not respond to its driver{f' ({known})' if known else ''}"


def _describe_gpu_count(data: Data) -> str:
    missing = ", ".join(map(str, data.get("missing") or ()))
    counted = f"{data.get('present')} of {data.get('expected')} GPUs by {data.get('source')}"
    return f"{counted}{f', missing: {missing}' if missing else ''}"


RULES: tuple[HealthRule, ...] = (
    HealthRule(
        "gpu_lost",
        "gpu_lost",
        "critical",
        "a job with this GPU fails when it first uses it, on all its nodes",
        lambda data: True,
        _describe_lost_gpu,
        ended_by=("gpu_back",),
    ),
    HealthRule(
        "gpu_count",
        "gpu_count",
        "critical",
        "the scheduler allocates GPUs that do not exist",
        _gpus_are_missing,
        _describe_gpu_count,
        detail="source",
    ),
    HealthRule(
        "recovery_action",
        "recovery_action",
        "critical",
        "NVIDIA's driver requires it; until then programs on the GPU fail or give wrong results",
        _recovery_is_wanted,
        _describe_recovery,
        ended_by=("gpu_back",),
    ),
    HealthRule(
        "recovery_action",
        "xid",
        "critical",
        "the same, from a driver that reports it only in the kernel log",
        _recovery_is_wanted,
        _describe_recovery,
        ended_by=DEVICE_RESTARTED,
    ),
    HealthRule(
        "xid",
        "xid",
        "critical",
        "an error of severity critical for which NVIDIA's catalogue or the driver requires a reset or reboot",
        _is_fatal_xid,
        lambda data: f"XID {data.get('xid')} {data.get('name', '')}: {data.get('action')}",
        detail="xid",
        ended_by=DEVICE_RESTARTED,
    ),
    HealthRule(
        "sxid",
        "sxid",
        "critical",
        "a fatal error of an NVSwitch: the GPUs of this node do not reach each other until all are reset",
        _is_fatal_sxid,
        lambda data: f"SXid {data.get('sxid')} {data.get('name', '')}: {data.get('action')}",
        detail="sxid",
        ended_by=DEVICE_RESTARTED,
    ),
    HealthRule(
        "link_down",
        "link_state",
        "warning",
        "collectives lose a rail; but a port may be down on purpose, which its event does not show",
        _link_is_down,
        lambda data: f"its link went from {data.get('from')} to {data.get('to')}",
    ),
    HealthRule(
        "leak",
        "leak",
        "critical",
        "its controller may cut the power at any moment; water near electricity cannot wait for the end of a job",
        _leak_at_level("critical"),
        lambda data: "leak detector: critical",
    ),
    HealthRule(
        "leak",
        "leak",
        "warning",
        "some water, or a detector's cable: a person must check",
        _leak_at_level("warning"),
        lambda data: "leak detector: warning",
    ),
    HealthRule(
        "coolant",
        "flow_collapse",
        "warning",
        "its devices get hot; but another pump of the loop may take over, and temperatures show the effect",
        _is_active,
        lambda data: f"flow fell to {data.get('value')}, usually {data.get('usual')}",
        survives_restart=False,
    ),
    HealthRule(
        "coolant",
        "pressure_collapse",
        "warning",
        "the same",
        _is_active,
        lambda data: f"pressure fell to {data.get('value')}, usually {data.get('usual')}",
        survives_restart=False,
    ),
    HealthRule(
        "disk_slow",
        "disk_slow",
        "warning",
        "telemetry waits in memory and is lost if it does not fit; checkpoints of jobs may be slow too",
        _is_active,
        lambda data: f"the disk of the spool is slow: a message has waited {data.get('seconds')} s for it",
        survives_restart=False,
    ),
    HealthRule(
        "canary",
        "digest",
        "warning",
        "wrong results for known problems; the pipeline checks whether that recurs",
        _digest_is_wrong,
        lambda data: f"canary {data.get('canary')} returned {data.get('digest')}, expected {data.get('expected')}",
        # no detail: a wrong round names its problem, but the correct one that clears it names the whole round
    ),
)

COLLECTOR = "collector"
"""Name of the warning that a collector fails or hangs; the collector's name follows after a dot."""
INCIDENTS = "incidents"
"""Name of the pipeline's open page incidents whose cause or members are on this node."""


def condition_names() -> tuple[str, ...]:
    """Names that `[check] ignore` accepts, also followed by `.DETAIL`."""
    return tuple(dict.fromkeys((*(rule.name for rule in RULES), COLLECTOR, INCIDENTS)))
