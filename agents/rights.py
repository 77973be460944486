"""Which signals need more than a plain user's rights, and what gives each right to the agent.

The file that gives it lies in deploy/fleetpulse-agent.service.d; docs/agent.md says what each right also allows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

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
