"""What a problem of a source means and what to do about it, in words."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dashboards.data_quality.answers import Problem
from dashboards.words import amount
from pipeline.model.entity_names import KINDS, entity_name

_WORDS = {
    "agent": ("agent", "agents"),
    "collector": ("collector", "collectors"),
    "bmc": ("BMC", "BMCs"),
    "exporter": ("exporter", "exporters"),
    "tool": ("fabric tool", "fabric tools"),
    "driver": ("GPU", "GPUs"),
    "disk": ("spool disk", "spool disks"),
    "clock": ("clock", "clocks"),
}
_COLLECTOR_STATES = {
    "fault": "fails",
    "hung": "hangs",
    "starting": "does not start",
    "no data": "has nothing to read",
    "overrun": "lost records",
}
_MEANINGS: Sequence[tuple[str, str]] = (
    (r"permission|not permitted|EACCES|EPERM|denied", "The agent may not read the source: a right is missing."),
    (r"no such file|not found|ENOENT|missing", "The file, device or program does not exist on the node."),
    (r"certificate|ssl|tls", "The TLS certificate is not accepted."),
    (r"401|403|unauthori|forbidden|password|credential", "The source refuses the user or password."),
    (r"refused", "Nothing listens on that address."),
    (
        r"timed? ?out|no answer|no response|deadline|does not respond",
        "The source did not answer within its time limit.",
    ),
    (r"unreachable|no route|name or service|resolve", "The network does not reach the address."),
    (r"driver|nvml|library|\.so", "The driver or its library does not work with this agent."),
    (r"disabled|not enabled|enabled = false", "The collector is not enabled in the agent's configuration."),
    (
        r"no (gpu|device|port|disk|bmc|infiniband|rank|sensor)",
        "The hardware is not there, or the kernel does not list it.",
    ),
)
"""Pattern of a reason -> what it means; the first that matches applies."""
_ADVICE = {
    ("agent", "silent"): (
        "If the node runs: `systemctl status fleetpulse-agent` and `fleetpulse doctor` there. If only its BMC answers: "
        "power cycle. If it is gone for good: `fleetpulse decommission`."
    ),
    (
        "agent",
        "rejected",
    ): "Look at the rejected messages below. Fix the sender, or the rule in [limits] or [admission].",
    ("agent", "newer than the pipeline"): "Upgrade the pipeline. Nothing is lost: messages wait in the spools.",
    ("agent", "never reported"): (
        "Install and start the agent there. If the node does not exist: remove it from [topology] or the inventory."
    ),
    ("clock", "ahead"): "`chronyc sources` and `timedatectl` on the node. Times are corrected until then.",
    ("clock", "behind"): "`chronyc sources` and `timedatectl` on the node. Times are corrected until then.",
    ("bmc", ""): "Ping the BMC and log in with the configured user. Reset it if it hangs; its node keeps running.",
    ("exporter", ""): "Check that the exporter runs and that the address in [collector.prometheus] is right.",
    ("tool", ""): "Run the tool by hand on the node that reads the fabric; check its path and rights.",
    ("driver", ""): "`nvidia-smi -q` on the node. If it hangs: drain the node and reset the GPU.",
    ("disk", ""): "`iostat -x 1` on the node. Move [spool] directory to a faster disk if it stays slow.",
    ("collector", "hung"): (
        "The call into the driver does not return. The agent starts the collector again by itself. If that repeats: "
        "`fleetpulse doctor` on the node, then drain and reboot it."
    ),
    (
        "collector",
        "overrun",
    ): "The kernel logged faster than it was read. Look for the source of the flood: `dmesg -T`.",
    ("collector", ""): "Run `fleetpulse doctor` on the node: it tests this collector and names the fix.",
}
"""(kind, state) -> what to do; (kind, "") for the other states."""


def title(problem: Problem) -> str:
    """Returns problem and place, such as `18 agents silent in rack r12`."""
    one = problem.count == 1
    if problem.kind == "collector":
        what = f"Collector {problem.part} {_COLLECTOR_STATES.get(problem.state, problem.state)}"
        return f"{what} on {_place(problem)}"
    if problem.kind == "tool":
        return f"Fabric tool {problem.part} fails on {_place(problem)}"
    word = amount(problem.count, *_WORDS.get(problem.kind, (problem.kind, problem.kind)))
    if one:
        name = entity_name(problem.examples[0])
        word = f"Clock of {name}" if problem.kind == "clock" else f"{name[:1].upper()}{name[1:]}"
    state = _state(problem, one)
    shared = "" if one or not problem.shared else f", all in {entity_name(problem.shared)}"
    spread = f" in {problem.racks:,} racks" if problem.racks > 1 and not shared else ""
    return f"{word} {state}{spread}{shared}"


def _state(problem: Problem, one: bool) -> str:
    if problem.state == "does not respond":
        return problem.state if one else "do not respond"
    if problem.kind == "clock":
        return f"{problem.reason} {problem.state}" if one else problem.state
    return "refuses calls" if one and problem.kind == "driver" else problem.state.replace("refuses", "refuse")


def _place(problem: Problem) -> str:
    if problem.nodes == 1 and problem.examples:
        return entity_name(f"node:{node_of(problem.examples[0])}")
    where = f", all in {entity_name(problem.shared)}" if problem.shared else ""
    return f"{amount(problem.nodes, *KINDS['node'])}{where}"


def node_of(entity: str) -> str:
    """Returns the node of a collector or agent; the name of anything else."""
    kind, _, name = entity.partition(":")
    return name.rpartition(".")[0] or name if kind == "collector" else name


def meaning(problem: Problem) -> str:
    """Returns what the reported reason means; "" if it is not known."""
    if problem.kind == "agent":
        return {
            "silent": "No message arrives. The node, its network or the agent is down.",
            "never reported": "The node is in the inventory, but no agent of it ever sent a message.",
            "rejected": "Messages arrive, but all are rejected.",
            "newer than the pipeline": "The agent writes a format that this pipeline cannot read yet.",
        }.get(problem.state, "")
    if problem.kind == "clock":
        return "Measured from the arrival of its messages. Events of this node can be dated wrongly until it is right."
    if problem.state == "hung":
        return "A reading did not return within its time limit."
    return next((text for pattern, text in _MEANINGS if re.search(pattern, problem.reason, re.IGNORECASE)), "")


def advice(problem: Problem) -> str:
    """Returns what to do."""
    return _ADVICE.get((problem.kind, problem.state)) or _ADVICE.get((problem.kind, ""), "")
