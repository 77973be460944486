"""The node's part of `fleetpulse doctor`: reads each collector once, as the agent does, and checks privileges.

Absent hardware is information, not a failure. A missing privilege is a warning with its fix. A collector that fails or
hangs is a failure, and so is a lost GPU (collectors/gpu/failures.py). The result is for the user who runs the command;
the privileges of the agent are in its own log. The drop-in files that grant privileges are in
deploy/fleetpulse-agent.service.d; docs/agent.md lists what else each one allows.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from agents.collector import Collector
from agents.collectors.gpu.failures import failures
from agents.collectors.registry import configured
from agents.node.health import status_file
from agents.node.once import UNHEARD, Look, once, unreachable
from pipeline.commands.checks import Check
from pipeline.config.sections import Config

DROP_INS = "fleetpulse-agent.service.d"
_NAMES = re.compile(r"\bCAP_[A-Z_]+")


@dataclass(frozen=True, slots=True)
class Right:
    """`collector` gets `gives` where `hardware` matches a path below the root, if it holds all of `capabilities`.

    drop_in: the file that gives them to the unit; "" if the unit has them as it is.
    """

    collector: str
    capabilities: tuple[str, ...]
    hardware: str
    gives: str
    drop_in: str


RIGHTS: tuple[Right, ...] = (
    Right("kernel_log", ("CAP_SYSLOG",), "dev/kmsg", "XIDs and every other event of the kernel", ""),
    Right(
        "nvme",
        ("CAP_SYS_ADMIN", "CAP_DAC_READ_SEARCH"),
        "dev/nvme[0-9]*",
        "spare, wear, media errors and warnings of NVMe disks",
        "nvme.conf",
    ),
    Right("powercap", ("CAP_DAC_READ_SEARCH",), "sys/class/powercap/*/energy_uj", "energy of CPUs", "rapl.conf"),
    Right("ipmi", ("CAP_DAC_OVERRIDE",), "dev/ipmi0", "the BMC's sensors and its log", "ipmi.conf"),
    Right(
        "ethtool",
        ("CAP_NET_ADMIN",),
        "sys/class/net/*/device",
        "temperature, light and bias of NIC modules",
        "optics.conf",
    ),
    Right(
        "jobs",
        ("CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH"),
        "dev/nvidia[0-9]*",
        "ranks of jobs by the environment of their processes",
        "jobs.conf",
    ),
)
_BITS = {
    "CAP_DAC_OVERRIDE": 1,
    "CAP_DAC_READ_SEARCH": 2,
    "CAP_NET_ADMIN": 12,
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21,
    "CAP_SYSLOG": 34,
}
"""Numbers of capabilities: include/uapi/linux/capability.h."""


def held(status: Path = Path("/proc/self/status")) -> frozenset[str]:
    """Capabilities of this process that count, of those that RIGHTS names."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status.read_text(), re.MULTILINE)
    bits = int(found[1], 16) if found else 0
    return frozenset(name for name, bit in _BITS.items() if bits >> bit & 1)


def lacking(holds: frozenset[str], root: Path = Path("/")) -> list[tuple[Right, tuple[str, ...]]]:
    """Rights that this process does not hold, though the hardware for which they are is there; with what is missing."""
    found = []
    for right in RIGHTS:
        missing = tuple(name for name in right.capabilities if name not in holds)
        if missing and next(iter(root.glob(right.hardware)), None) is not None:
            found.append((right, missing))
    return found


def named(trouble: str) -> tuple[str, ...]:
    """Capabilities that a collector asks for."""
    return tuple(dict.fromkeys(_NAMES.findall(trouble)))


def mend(collector: str, missing: tuple[str, ...]) -> str:
    """What gives a collector the capabilities it misses."""
    right = next((r for r in RIGHTS if r.collector == collector and set(missing) & set(r.capabilities)), None)
    if right is None:
        return f"AmbientCapabilities={' '.join(missing)} and CapabilityBoundingSet= likewise in the agent's unit"
    if not right.drop_in:
        return "run the agent by deploy/fleetpulse-agent.service, which has it; as a person: sudo fleetpulse doctor"
    return f"cp deploy/{DROP_INS}/{right.drop_in}.example /etc/systemd/system/{DROP_INS}/{right.drop_in}"


_DENIED = re.compile(r"\bCAP_|not readable|not permitted|not open to us|permission|refuses us|access ?denied", re.I)
"""How collectors, the kernel, NVML and D-Bus say that the source is there and closed to us."""
_MENDS = (
    (
        re.compile(r"libnvidia-ml|NVML.*librar|no NVIDIA driver$", re.I),
        "nvidia-smi  # if this host has GPUs: install the NVIDIA driver",
    ),
    (re.compile(r"driver.*not (loaded|running)|kernel module", re.I), "modprobe nvidia; dmesg | grep -i nvrm"),
    (
        re.compile(r"nvidia.*(permission|not permitted|refuses us)", re.I),
        "ls -l /dev/nvidia*  # wanted: readable and writable for us",
    ),
    (re.compile(r"ipmi_devintf"), "modprobe -a ipmi_si ipmi_devintf  # if this host has a BMC"),
    (re.compile(r"EDAC"), "modprobe the EDAC driver of this processor  # if its memory has ECC"),
    (re.compile(r"intel_rapl"), "modprobe intel_rapl_msr  # on bare metal"),
    (re.compile(r"system bus|systemd"), "systemctl status dbus  # only where this host runs systemd"),
    (re.compile(r"RDMA"), "ibv_devinfo  # if this host has RDMA adapters: load their driver"),
    (re.compile(r"nvidia-ml-py"), "pip install 'fleetpulse[agent]'"),
)
_AS_ROOT = "sudo fleetpulse doctor  # if that is ok: give the agent's user the right, docs/agent.md"
_LOST = "nvidia-smi; dmesg | grep -i -e xid -e nvrm  # then drain the node: it wants a reset, a reboot or a repair"
_MEANING_FAR = "what it would tell is watched by nobody"
_MEND_FAR = {
    "redfish": "look at its url, password_file and ca_file in [[collector.redfish.bmcs]]; then docs/redfish.md",
    "prometheus": "look at its url, token_file and ca_file in [[collector.prometheus.endpoints]]; then curl the url",
}
_MEANING_AGENT = "nothing of this node is sent"
_MEANING_CLOCK = "events and samples of this node lie wrong beside those of others"


def asking(config: Config) -> Callable[[Config], list[Check]]:
    """`collectors`, made ready. Raises ConfigError: a wrong setting is no finding, it ends doctor as any command."""
    return partial(collectors, asked=configured(config.collector, config.source, config.agent.collectors))


def agent(config: Config) -> Check:
    """The agent of this node says every 10 s how fit the node is; one that holds its spool and says nothing hangs."""
    written = next((age for path in status_file.places(config) if (age := _age(path)) is not None), None)
    alive_for = _held_since(config)
    if alive_for is None:
        if written is None:
            return Check("agent", "info", "no agent has run here")
        remedy = "systemctl start fleetpulse-agent  # or: fleetpulse agent"
        return Check("agent", "warn", f"does not run, last status {written:.0f} s ago", _MEANING_AGENT, remedy)
    age = alive_for if written is None else written
    if age <= status_file.STALE_S:
        return Check("agent", "ok", "starts" if written is None else f"wrote its status {age:.0f} s ago")
    remedy = "ps -o pid,stat,cmd -C fleetpulse  # T: kill -CONT PID; else systemctl restart fleetpulse-agent"
    return Check("agent", "fail", f"runs and has hung or been stopped for {age:.0f} s", _MEANING_AGENT, remedy)


def _age(path: Path) -> float | None:
    """Seconds since a file was written; None if it is not there."""
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return None


def _held_since(config: Config) -> float | None:
    """Age (s) of the lock of this node's spool that a process holds; None if none does."""
    for lock in (config.spool.directory / quote(config.agent.node, safe="")).glob("*/lock"):
        try:
            with lock.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _age(lock)
        except OSError:
            continue  # not ours to read: the check of the spool says so
    return None


def collectors(config: Config, asked: Sequence[Collector] | None = None) -> list[Check]:
    """One check per collector, then rights that only a part of a collector's signals needs, then the clock."""
    looks = once(config, asked)
    checks = [judged(look) for look in looks]
    told = {c.name for c in checks if c.state != "ok"}
    checks += [check for check in missing_rights(looks) if check.name not in told]
    return checks + clock(looks)


def judged(look: Look) -> Check:
    """What one look says of its collector."""
    name, trouble = f"collector {look.collector}", look.trouble
    reason = trouble.partition(": ")[2]
    if not trouble:
        wrong = failures(look.readings)
        if wrong:
            return Check(name, "fail", "; ".join(wrong), "jobs that use this GPU fail, or get fewer", _LOST)
        return _far(name, look) or Check(name, "ok", _brought(look))
    missing = named(reason)
    denied = bool(missing or _DENIED.search(reason))
    remedy = mend(look.collector, missing) if missing else _mend(reason) or (_AS_ROOT if denied else "")
    if look.failed:
        meaning = "its telemetry of this node is missing; the agent goes on without it"
        return Check(name, "fail", trouble, meaning, remedy or "dmesg | tail; then fleetpulse once, which says more")
    if denied:
        return Check(name, "warn", reason, "what it reads is there but closed to this user", remedy)
    return Check(name, "info", trouble, "nothing here for it to measure", remedy)


def _far(name: str, look: Look) -> Check | None:
    """BMCs and exporters that do not answer; one that is not heard yet may be slow."""
    silent = unreachable(look.readings)
    if not silent:
        return None
    found = "; ".join(f"{entity}: {reason}" for entity, reason in silent.items())
    state: Literal["warn", "fail"] = "warn" if set(silent.values()) == {UNHEARD} else "fail"
    return Check(name, state, found, _MEANING_FAR, _MEND_FAR.get(look.collector, ""))


def missing_rights(looks: Sequence[Look], holds: frozenset[str] | None = None, root: Path = Path("/")) -> list[Check]:
    """Collectors that work, and of which a part is closed to us."""
    working = {look.collector for look in looks if not look.trouble}
    checks = []
    for right, missing in lacking(held() if holds is None else holds, root):
        if right.collector in working and not _open(right, root):
            found = f"no {' and '.join(missing)}"
            meaning = f"without it this user does not get: {right.gives}"
            checks.append(Check(f"collector {right.collector}", "warn", found, meaning, mend(right.collector, missing)))
    return checks


def clock(looks: Sequence[Look]) -> list[Check]:
    """Whether something keeps the clock of this node, as the kernel has it."""
    signal = "node.clock_synchronized"
    values = [r.columns[signal][0] for look in looks for r in look.readings if signal in r.columns]
    if not values:
        return []
    if values[0]:
        return [Check("node clock", "ok", "synchronized")]
    return [Check("node clock", "warn", "nothing synchronizes it", _MEANING_CLOCK, "systemctl enable --now chrony")]


def _open(right: Right, root: Path) -> bool:
    """Whether the files themselves are open to us, by owner or group: then no capability is needed to read them."""
    needs_only_files = set(right.capabilities) <= {"CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH", "CAP_SYSLOG"}
    return needs_only_files and all(os.access(path, os.R_OK) for path in root.glob(right.hardware))


def _brought(look: Look) -> str:
    entities = {entity for reading in look.readings for entity in reading.entities}
    signals = {signal for reading in look.readings for signal in reading.columns}
    return f"{len(signals)} signals of {len(entities)} {'entity' if len(entities) == 1 else 'entities'}"


def _mend(reason: str) -> str:
    return next((remedy for pattern, remedy in _MENDS if pattern.search(reason)), "")
