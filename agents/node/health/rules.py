"""Which events make this node unfit for a job, how gravely, why, and what ends it. One rule per kind of condition.

Critical is only what is certain and would cost the next job: a prolog drains the node for it. The rest warns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # `fleetpulse check` reads the names of the rules and must not wait for NumPy, which records load
    from pipeline.model.records import Event

Level = Literal["critical", "warning"]
Data = Mapping[str, Any]
REPAIRS = ("reset", "reboot", "restart the vm", "restart vm")
"""Words of an action after which nothing runs on the device as before; NVIDIA's own, of the XID catalogue."""


@dataclass(frozen=True, slots=True)
class Rule:
    """holds: whether an event of `kind` begins the condition (True) or ends it (False); None: it says nothing of it.

    detail: the part of the data that tells conditions of one entity apart; it goes into the name after a dot.
    ended_by: kinds of event of the same entity that end it too, because they mean that the device began anew.
    outlives: whether it holds after a restart of the agent, because nothing tells it anew.
    """

    name: str
    kind: str
    level: Level
    why: str
    holds: Callable[[Data], bool | None]
    says: Callable[[Data], str]
    detail: str = ""
    ended_by: tuple[str, ...] = ()
    outlives: bool = True

    def called(self, event: Event) -> str:
        """The name of this condition: that of the rule, with its detail."""
        found = event.data.get(self.detail) if self.detail else None
        return self.name if found is None else f"{self.name}.{found}"


ANEW = ("gpu_back", "counter_reset")
"""A GPU whose counters went back was reset or its driver was loaded anew (agents/node/counter_generations.py)."""


def _fatal(data: Data) -> bool | None:
    """A consequence is told by its root; XID 154 is a recovery action."""
    grave = data.get("severity") == "critical" and "root" not in data
    return True if grave and _repair(data) and data.get("xid") != 154 else None


def _repair(data: Data) -> bool:
    return any(word in str(data.get("action", "")).lower() for word in REPAIRS)


def _fatal_switch(data: Data) -> bool | None:
    grave = data.get("severity") == "critical" and "root" not in data
    return True if grave and data.get("fatal") is not False and _repair(data) else None


def _fewer(data: Data) -> bool | None:
    present, expected = data.get("present"), data.get("expected")
    return present < expected if isinstance(present, int) and isinstance(expected, int) else None


def _down(data: Data) -> bool | None:
    return {"down": True, "up": False}.get(str(data.get("state")))


def _wanted(data: Data) -> bool | None:
    """NVML tells it in an event of its own, the kernel log as XID 154; 0 is the all-clear after a repair."""
    to = data.get("to")
    if data.get("xid") == 154:
        to = data.get("detail", {}).get("to")
    return None if to is None else bool(to)


def _of_driver(data: Data) -> str:
    return f"its driver wants: {data.get('action')}"


def _leaks(level: str) -> Callable[[Data], bool | None]:
    def holds(data: Data) -> bool | None:
        return False if data.get("state") == "cleared" else True if data.get("leak") == level else None

    return holds


def _active(data: Data) -> bool | None:
    return {"active": True, "cleared": False}.get(str(data.get("state")))


def _computes_wrong(data: Data) -> bool | None:
    found, expected = data.get("digest"), data.get("expected")
    return None if found is None or expected is None else found != expected


def _lost(data: Data) -> str:
    known = ", ".join(f"{key} {data[key]}" for key in ("pci", "serial") if data.get(key))
    return f"lost, it does not answer its driver{f' ({known})' if known else ''}"


def _count(data: Data) -> str:
    missing = ", ".join(map(str, data.get("missing") or ()))
    counted = f"{data.get('present')} of {data.get('expected')} GPUs by {data.get('source')}"
    return f"{counted}{f', missing: {missing}' if missing else ''}"


RULES: tuple[Rule, ...] = (
    Rule(
        "gpu_lost",
        "gpu_lost",
        "critical",
        "a job that is given this GPU fails when it first uses it, and takes its whole gang along",
        lambda data: True,
        _lost,
        ended_by=("gpu_back",),
    ),
    Rule(
        "gpu_count",
        "gpu_count",
        "critical",
        "the scheduler gives out GPUs that are not there",
        _fewer,
        _count,
        detail="source",
    ),
    Rule(
        "recovery_action",
        "recovery_action",
        "critical",
        "NVIDIA's driver itself asks for it; until then what runs on the GPU fails or is wrong",
        _wanted,
        _of_driver,
        ended_by=("gpu_back",),
    ),
    Rule(
        "recovery_action",
        "xid",
        "critical",
        "the same, of a driver that says it in the kernel log alone",
        _wanted,
        _of_driver,
        ended_by=ANEW,
    ),
    Rule(
        "xid",
        "xid",
        "critical",
        "an error of severity critical after which NVIDIA's catalogue, or the driver, wants a reset or reboot",
        _fatal,
        lambda data: f"XID {data.get('xid')} {data.get('name', '')}: {data.get('action')}",
        detail="xid",
        ended_by=ANEW,
    ),
    Rule(
        "sxid",
        "sxid",
        "critical",
        "a fatal error of an NVSwitch: the GPUs of this node do not reach each other until all are reset",
        _fatal_switch,
        lambda data: f"SXid {data.get('sxid')} {data.get('name', '')}: {data.get('action')}",
        detail="sxid",
        ended_by=ANEW,
    ),
    Rule(
        "link_down",
        "link_state",
        "warning",
        "collectives lose a rail; but a port may be down on purpose, which its event does not tell",
        _down,
        lambda data: f"its link went from {data.get('from')} to {data.get('to')}",
    ),
    Rule(
        "leak",
        "leak",
        "critical",
        "its controller may cut the power at any moment, and water and current do not wait for a job's end",
        _leaks("critical"),
        lambda data: "the leak detector says: critical",
    ),
    Rule(
        "leak",
        "leak",
        "warning",
        "some water, or a cable of a detector: a person must look",
        _leaks("warning"),
        lambda data: "the leak detector says: warning",
    ),
    Rule(
        "coolant",
        "flow_collapse",
        "warning",
        "what it cools gets hot; but the loop's other pump may take over, and temperatures tell",
        _active,
        lambda data: f"flow fell to {data.get('value')} of usually {data.get('usual')}",
        outlives=False,
    ),
    Rule(
        "coolant",
        "pressure_collapse",
        "warning",
        "the same",
        _active,
        lambda data: f"pressure fell to {data.get('value')} of usually {data.get('usual')}",
        outlives=False,
    ),
    Rule(
        "disk_slow",
        "disk_slow",
        "warning",
        "telemetry waits in memory; what does not fit there is lost, and a job's own checkpoints may wait, too",
        _active,
        lambda data: f"the disk of the spool is slow: a message has waited {data.get('seconds')} s for it",
        outlives=False,
    ),
    Rule(
        "canary",
        "digest",
        "warning",
        "it computed known problems wrongly; the pipeline weighs whether it does so again",
        _computes_wrong,
        lambda data: f"canary {data.get('canary')} gave {data.get('digest')}, wanted {data.get('expected')}",
        # no detail: a wrong round is named after its problem, the right one that clears it after the whole round
    ),
)

COLLECTOR = "collector"
"""Name, with the collector's after a dot, of the warning that a collector fails or hangs: it does not see."""
INCIDENTS = "incidents"
"""Name of the pipeline's open page incidents whose cause or members are on this node."""


def names() -> tuple[str, ...]:
    """What `[check] ignore` may name, also with `.DETAIL` behind."""
    return tuple(dict.fromkeys((*(rule.name for rule in RULES), COLLECTOR, INCIDENTS)))
