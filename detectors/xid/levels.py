"""Levels of faults that the driver, the kernel log, PCIe counters and the BMC report of GPUs and servers.

XIDs: by number, by the message itself, and with precedence by the recovery action of the driver. Source: NVIDIA's
catalogue of XIDs (docs.nvidia.com/deploy/xid-errors). Where it says reset, reboot or check the cabling, it is a page;
restart the application, update or contact support, a ticket; what it says to ignore, and what programs cause
themselves, a suspect.

Servers: Linux kernel (drivers/edac, arch/x86/kernel/cpu/mce, drivers/pci/pcie/aer.c, mm/memory-failure.c), the event
states of IPMI 2.0 (table 42-3) and the severities of Redfish message registries (DSP0266). What kills processes or
takes a disk or a bus away pages; what the kernel corrected or only warns of does not.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from detectors.base.event_data import read_integer, read_text
from pipeline.model.records import LEVELS, Event, Level
from pipeline.model.signals import CATALOGUE

RECOVERY = 154
"""Its data has the recovery action of the driver, which takes precedence over the catalogue's."""
UNCORRECTED = frozenset({48, 171})
"""Uncorrectable error of device memory: alone it needs an immediate reset, with a remapped row when the job ends."""
REMAPPED = frozenset({63, 156})
UNCONTAINED = frozenset({64, 95, 140, 172})
"""With one of these an uncorrectable error does not end with its process."""
NVLINK = frozenset({74, 136, *range(144, 151), 155})
"""Judged with the counters of the links by the detector `link_nvlink`."""
COPY = frozenset({*range(39, 42), *range(70, 73), *range(75, 78), 85, *range(126, 136)})
"""Copy engine: by the catalogue hardware or a program."""
PROGRAM = frozenset({11, 13, 25, 31, 32, 43, 45, 60, 68, 69, *range(82, 85), 86, 88, 89, *range(96, 106), 137, 139})
"""What the catalogue blames on the application, and what follows when a process is cleaned up."""
CLEANUP = frozenset({43, 45})
"""Logged when a process ends, for whatever reason."""
REPEATING = frozenset({13, 31}) | COPY
"""As a rule caused by a program; by the GPU if it alone has them repeatedly."""
PAGE = frozenset({46, 48, 54, 62, 64, 79, 95, 109, 110, 119, 120, 140, 143, 150, 158, 167, 169, 171, 172})
"""167 and 169 have no published action: a fatal PCIe timeout and a halted controller need a reset; chosen."""
TICKET = frozenset({8, 63, 78, 80, 92, 94, 142, 151, 156, 157, 159, 161, *range(163, 167), 168, 170}) | COPY
"""The catalogue says to ignore 63, 92, 156 and 157: they use spare memory, and need a reset at a convenient time."""
SUSPECT = PROGRAM | {37, 38, 44, 66, 67, 93, 106, 107, 121, 141, 152, 153, 160, 162} | (NVLINK - PAGE)
HOLDS = frozenset({63, 156})
"""Tickets that last until the GPU is reset: the remapped row is in use until then."""
ALL = PAGE | TICKET | SUSPECT | {RECOVERY}
_ACTIONS = CATALOGUE["gpu.recovery_action"].states
_OF_ACTION: Mapping[str, Level] = {
    **dict.fromkeys(_ACTIONS, "page"),
    "none": "suspect",
    "drain peer-to-peer": "ticket",
    "drain and reset GPU": "ticket",
}
"""nvmlDeviceGpuRecoveryAction_t: a GPU that is to be drained first works until its job ends: a ticket is enough."""
_PAGE_WORDS = ("reset", "reboot", "imex")  # of the same actions in other versions of a driver
_MAX_CODE = 99_999  # of XIDs, SXids and other small numbers: XIDs have three digits, SXids five
SCORE: Mapping[Level, float] = {"suspect": 1.0, "ticket": 2.0, "page": 3.0}
"""Score of a finding of each level."""


def level_of_codes(codes: Collection[int], own: Mapping[int, Level]) -> Level:
    """Returns the highest level of some XIDs; unknown ones are tickets. own: levels that the site set."""
    found = [own.get(code) or _default_level(code) for code in codes if code != RECOVERY]
    if UNCORRECTED & set(codes) and REMAPPED & set(codes) and not UNCONTAINED & set(codes):
        found = [own.get(c) or ("ticket" if c in UNCORRECTED else _default_level(c)) for c in codes if c != RECOVERY]
    return max(found, key=LEVELS.index, default="suspect")


def rank_codes(codes: Iterable[int], own: Mapping[int, Level]) -> list[int]:
    """Returns XIDs, the most severe first. own: configured levels."""
    return sorted(codes, key=lambda code: -LEVELS.index(level_of_codes([code], own)))


def site_levels(suspects: Collection[int], tickets: Collection[int], pages: Collection[int]) -> dict[int, Level]:
    """Returns the configured levels by XID; the highest counts."""
    found: dict[int, Level] = dict.fromkeys(suspects, "suspect")
    return found | dict.fromkeys(tickets, "ticket") | dict.fromkeys(pages, "page")


def _default_level(code: int) -> Level:
    if code in PAGE:
        return "page"
    return "suspect" if code in SUSPECT else "ticket"


def level_of_action(action: str) -> Level:
    """Returns the level of a recovery action of the driver; an unknown one is a ticket."""
    words = action.lower()
    if action in _OF_ACTION or "drain" in words:
        return _OF_ACTION.get(action, "ticket")
    return "page" if any(word in words for word in _PAGE_WORDS) else "ticket"


def action_name(state: object) -> str | None:
    """Returns the driver's word for an action from its number or word; None if it is neither."""
    if (number := read_integer(state, 0, _MAX_CODE)) is not None:
        return _ACTIONS[number] if number < len(_ACTIONS) else f"unknown recovery action {number}"
    return read_text(state)[:80] or None


def read_code(data: Mapping[str, Any], key: str) -> int | None:
    """Returns an XID, SXid or other small number of an event's data; None if it is none."""
    return read_integer(data.get(key), 0, _MAX_CODE)


def recovery_action(event: Event) -> str | None:
    """Returns the recovery action of an event; `none` clears it; None if the event has no action."""
    data = event.data
    if event.kind == "recovery_action" or read_code(data, "xid") == RECOVERY:
        detail = data.get("detail")
        to = action_name(data.get("to", detail.get("to") if isinstance(detail, Mapping) else None))
        return to if to in _ACTIONS else read_text(data.get("action"))[:80] or to
    return read_text(data.get("action"))[:80] or None if data.get("action_source") == "driver" else None


def requires_reset(event: Event) -> bool:
    """Returns whether the line of a contained error shows that only a reset helps (`RST: Yes`, not `D-RST: Yes`)."""
    detail = event.data.get("detail")
    return isinstance(detail, Mapping) and detail.get("reset_required") is True


def faulty_unit(event: Event) -> str:
    """Returns the unit of the GPU that an XID 13 names; empty if it names none."""
    detail = event.data.get("detail")
    if not isinstance(detail, Mapping):
        return ""
    gpc, tpc = read_code(detail, "gpc"), read_code(detail, "tpc")
    return "" if gpc is None or tpc is None else f"GPC {gpc} TPC {tpc}"


_KERNEL: Mapping[str, tuple[Level, str]] = {
    "machine_check": ("page", "machine check"),
    "hardware_error_fatal": ("page", "fatal hardware error reported by firmware"),
    "hardware_error_recoverable": ("ticket", "uncorrected hardware error that was recovered"),
    "edac_uncorrected": ("page", "uncorrectable host memory error"),
    "memory_page_failed": ("ticket", "page of host memory failed and is offline"),
    "aer_fatal": ("page", "fatal PCIe error"),
    "aer_recovery_failed": ("page", "PCIe device did not recover from an error"),
    "aer_nonfatal": ("suspect", "uncorrected non-fatal PCIe error"),
    "pcie_link_down": ("ticket", "PCIe device lost"),
    "panic": ("page", "kernel panic"),
    "hard_lockup": ("page", "hard lockup of a processor"),
    "soft_lockup": ("suspect", "soft lockup of a processor"),
    "oops": ("ticket", "kernel oops"),
    "file_system_read_only": ("page", "file system is read-only"),
    "file_system_error": ("ticket", "file system errors"),
    "nvme_failed": ("ticket", "NVMe disk failed or resets"),
    "nvme_timeout": ("suspect", "NVMe disk timeout"),
    "io_error": ("suspect", "disk I/O error"),
    "gpu_uvm_fatal": ("page", "fatal UVM error: GPUs unusable until the driver is reloaded"),
    "thermal_critical": ("page", "part at critical temperature"),
}
GPU_PATTERNS: Mapping[str, tuple[Level, str]] = {
    "gpu_off_the_bus": ("page", "fell off the bus"),
    "gpu_init_failed": ("page", "driver cannot initialise it"),
    "gsp_errors_suppressed": ("suspect", "too many firmware timeouts to log"),
}
"""Kernel log patterns that name a GPU."""
PCIE = frozenset({"aer_fatal", "aer_recovery_failed", "pcie_link_down", "aer", "critical_interrupt"})
"""What a server reports as well when one of its GPUs falls off the bus."""
_SEL: Mapping[str, re.Pattern[str]] = {
    "processor": re.compile(r"^(internal error|thermal trip|uncorrectable)"),
    "memory": re.compile(r"^(uncorrectable error|parity error)"),
    "critical_interrupt": re.compile(r"uncorrectable|fatal|system error|parity error|channel check"),
    "os_stop": re.compile(r"^stopped while"),
}
_REDFISH = re.compile(
    r"uncorrectable|machine check|\bIERR\b|caterr|internal error|thermal trip|PCI.{0,40}fatal|fatal.{0,40}PCI", re.I
)
_LEAVE = re.compile(r"^NVIDIA|GPU|Leak|PowerSupply|\bPSU|Fan", re.I)  # other detectors judge those by measurements


def host_fault(event: Event) -> tuple[str, Level, str] | None:
    """Returns (kind, level, words) of a fault of the server itself; None for anything else."""
    if event.kind == "kernel":
        name = str(event.data.get("pattern"))
        level, words = _KERNEL.get(name, ("suspect", ""))
        return (name, level, words) if words else None
    if event.kind == "aer":
        if event.data.get("kind") != "fatal":
            return None
        return "aer", "page", f"fatal error of PCIe device {read_text(event.data.get('device'))[:80]}"
    if event.kind == "sel":
        return _sel_fault(event)
    if event.kind == "redfish":
        return _redfish_fault(event)
    return None


def _sel_fault(event: Event) -> tuple[str, Level, str] | None:
    kind, what = read_text(event.data.get("type")), read_text(event.data.get("event"))
    pattern = _SEL.get(kind)
    if pattern is None or event.data.get("asserted") is False or not pattern.search(what):
        return None
    return kind, "page", f"BMC log: {read_text(event.data.get('sensor'))[:80] or kind}: {what[:120]}"


def _redfish_fault(event: Event) -> tuple[str, Level, str] | None:
    message, about = read_text(event.data.get("message")), read_text(event.data.get("origin"))
    critical = str(event.data.get("severity")).lower() == "critical"
    if not critical or not _REDFISH.search(message) or _LEAVE.search(about) or _LEAVE.search(message):
        return None
    return "redfish", "page", f"BMC: {message[:120]}"
