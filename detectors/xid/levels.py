"""How loud each XID is, by its number, by what its line says of itself, and above all by what the driver wants done.

Source: NVIDIA's catalogue of XIDs (docs.nvidia.com/deploy/xid-errors). Where it says reset, reboot or check the
cabling, somebody is woken; where it says restart the application, update or contact support, a ticket is enough; what
it says to ignore, and what programs do to themselves, is a suspect.

How loud it is what a server's kernel log, its PCIe counters and its BMC tell of the server's own parts.

Source: Linux kernel (drivers/edac, arch/x86/kernel/cpu/mce, drivers/pci/pcie/aer.c, mm/memory-failure.c), the event
states of IPMI 2.0 (table 42-3) and the severities of Redfish message registries (DSP0266). What kills processes or
takes a disk or a bus away pages; what the kernel mended or only warns of does not.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from detectors.base.event_data import read_integer, read_text
from pipeline.model.records import LEVELS, Event, Level
from pipeline.model.signals import CATALOGUE

RECOVERY = 154
"""Tells what the driver wants done, which goes before what the catalogue says of the XID that it is about."""
UNCORRECTED = frozenset({48, 171})
"""Uncorrectable error of device memory: alone it wants a reset at once, with a remapped row one when the job ends."""
REMAPPED = frozenset({63, 156})
UNCONTAINED = frozenset({64, 95, 140, 172})
"""With one of these an uncorrectable error is not over with its process."""
NVLINK = frozenset({74, 136, *range(144, 151), 155})
"""Judged with the counters of the links by the detector link_nvlink."""
COPY = frozenset({*range(39, 42), *range(70, 73), *range(75, 78), 85, *range(126, 136)})
"""Copy engine: hardware or program, the catalogue says."""
PROGRAM = frozenset({11, 13, 25, 31, 32, 43, 45, 60, 68, 69, *range(82, 85), 86, 88, 89, *range(96, 106), 137, 139})
"""What the catalogue blames on the application, and what follows when a process is cleaned up."""
CLEANUP = frozenset({43, 45})
"""Come when a process ends, whoever ended it."""
REPEATING = frozenset({13, 31}) | COPY
"""A program's as a rule, the GPU's where it alone has them again and again."""
PAGE = frozenset({46, 48, 54, 62, 64, 79, 95, 109, 110, 119, 120, 140, 143, 150, 158, 167, 169, 171, 172})
"""167 and 169 have no published action: a fatal PCIe timeout and a halted controller want a reset; chosen."""
TICKET = frozenset({8, 63, 78, 80, 92, 94, 142, 151, 156, 157, 159, 161, *range(163, 167), 168, 170}) | COPY
"""63, 92, 156 and 157 are to be ignored by the catalogue: what they cost is spare memory, and a reset when it suits."""
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
"""nvmlDeviceGpuRecoveryAction_t: what is to be drained first works on until its job ends, which suits office hours."""
_LOUD = ("reset", "reboot", "imex")  # of the same in the words of other versions of a driver
_HIGHEST = 99_999  # of XIDs, SXids and other small numbers: XIDs have three digits, SXids five
SCORE: Mapping[Level, float] = {"suspect": 1.0, "ticket": 2.0, "page": 3.0}
"""How strong a finding of each level is."""


def level_of(codes: Collection[int], own: Mapping[int, Level]) -> Level:
    """The highest level of some XIDs by their numbers; own: those that the site set. Numbers in no table: a ticket."""
    found = [own.get(code) or _shipped(code) for code in codes if code != RECOVERY]
    if UNCORRECTED & set(codes) and REMAPPED & set(codes) and not UNCONTAINED & set(codes):
        found = [own.get(c) or ("ticket" if c in UNCORRECTED else _shipped(c)) for c in codes if c != RECOVERY]
    return max(found, key=LEVELS.index, default="suspect")


def set_by_site(suspects: Collection[int], tickets: Collection[int], pages: Collection[int]) -> dict[int, Level]:
    """Levels that a site set otherwise; the loudest counts."""
    found: dict[int, Level] = dict.fromkeys(suspects, "suspect")
    return found | dict.fromkeys(tickets, "ticket") | dict.fromkeys(pages, "page")


def _shipped(code: int) -> Level:
    if code in PAGE:
        return "page"
    return "suspect" if code in SUSPECT else "ticket"


def level_of_action(action: str) -> Level:
    """How loud an action of the driver is: none is well again, and what nobody knows wakes nobody."""
    words = action.lower()
    if action in _OF_ACTION or "drain" in words:
        return _OF_ACTION.get(action, "ticket")
    return "page" if any(word in words for word in _LOUD) else "ticket"


def action_named(state: object) -> str | None:
    """The driver's word for an action that is told by its number or word; None: it tells neither."""
    if (place := read_integer(state, 0, _HIGHEST)) is not None:
        return _ACTIONS[place] if place < len(_ACTIONS) else f"recovery action {place}, which is not known"
    return read_text(state)[:80] or None


def number(data: Mapping[str, Any], key: str) -> int | None:
    """A whole number of an event's data; None where it is none."""
    return read_integer(data.get(key), 0, _HIGHEST)


def wanted(event: Event) -> str | None:
    """What the driver wants done, as it says itself: `none` is the all-clear; None: it says nothing."""
    data = event.data
    if event.kind == "recovery_action" or number(data, "xid") == RECOVERY:
        detail = data.get("detail")
        to = action_named(data.get("to", detail.get("to") if isinstance(detail, Mapping) else None))
        return to if to in _ACTIONS else read_text(data.get("action"))[:80] or to
    return read_text(data.get("action"))[:80] or None if data.get("action_source") == "driver" else None


def resets(event: Event) -> bool:
    """Whether the line of a contained error says itself that only a reset helps now (`RST: Yes`, not `D-RST: Yes`)."""
    detail = event.data.get("detail")
    return isinstance(detail, Mapping) and detail.get("reset_required") is True


def place(event: Event) -> str:
    """Part of the GPU that an XID 13 names; empty where it names none."""
    detail = event.data.get("detail")
    if not isinstance(detail, Mapping):
        return ""
    gpc, tpc = number(detail, "gpc"), number(detail, "tpc")
    return "" if gpc is None or tpc is None else f"GPC {gpc} TPC {tpc}"


_KERNEL: Mapping[str, tuple[Level, str]] = {
    "machine_check": ("page", "a processor reported a machine check"),
    "hardware_error_fatal": ("page", "its firmware reported a fatal hardware error"),
    "hardware_error_recoverable": ("ticket", "its firmware reported an uncorrected hardware error that was survived"),
    "edac_uncorrected": ("page", "an error of host memory could not be corrected"),
    "memory_page_failed": ("ticket", "a page of host memory failed and was taken out of use"),
    "aer_fatal": ("page", "a PCIe device reported a fatal error"),
    "aer_recovery_failed": ("page", "a PCIe device did not recover from an error"),
    "aer_nonfatal": ("suspect", "a PCIe device reported an uncorrected error that is not fatal"),
    "pcie_link_down": ("ticket", "a PCIe device was lost"),
    "panic": ("page", "its kernel panicked"),
    "hard_lockup": ("page", "a processor is locked up"),
    "soft_lockup": ("suspect", "a processor was stuck in the kernel"),
    "oops": ("ticket", "its kernel made an error and went on"),
    "file_system_read_only": ("page", "a file system stopped taking writes"),
    "file_system_error": ("ticket", "a file system has errors"),
    "nvme_failed": ("ticket", "a disk failed or is reset"),
    "nvme_timeout": ("suspect", "a disk answered late"),
    "io_error": ("suspect", "a disk returned an error"),
    "gpu_uvm_fatal": ("page", "the driver's memory manager failed: no program can use a GPU until it is loaded anew"),
    "thermal_critical": ("page", "a part reached its critical temperature"),
}
GPU_PATTERNS: Mapping[str, tuple[Level, str]] = {
    "gpu_off_the_bus": ("page", "fell off the bus, its driver says"),
    "gpu_init_failed": ("page", "could not be initialised by its driver"),
    "gsp_errors_suppressed": ("suspect", "has so many firmware timeouts that the driver tells only some"),
}
"""Lines that name a GPU."""
PCIE = frozenset({"aer_fatal", "aer_recovery_failed", "pcie_link_down", "aer", "critical_interrupt"})
"""What a GPU that falls off the bus makes its server say, too."""
_SEL: Mapping[str, re.Pattern[str]] = {
    "processor": re.compile(r"^(internal error|thermal trip|uncorrectable)"),
    "memory": re.compile(r"^(uncorrectable error|parity error)"),
    "critical_interrupt": re.compile(r"uncorrectable|fatal|system error|parity error|channel check"),
    "os_stop": re.compile(r"^stopped while"),
}
_REDFISH = re.compile(
    r"uncorrectable|machine check|\bIERR\b|caterr|internal error|thermal trip|PCI.{0,40}fatal|fatal.{0,40}PCI", re.I
)
_LEAVE = re.compile(r"^NVIDIA|GPU|Leak|PowerSupply|\bPSU|Fan", re.I)  # others judge those, by what they measure


def told(event: Event) -> tuple[str, Level, str] | None:
    """(kind, level, words) of a fault of the server itself; None for all else."""
    if event.kind == "kernel":
        name = str(event.data.get("pattern"))
        level, words = _KERNEL.get(name, ("suspect", ""))
        return (name, level, words) if words else None
    if event.kind == "aer":
        if event.data.get("kind") != "fatal":
            return None
        return "aer", "page", f"its PCIe device {read_text(event.data.get('device'))[:80]} counted a fatal error"
    if event.kind == "sel":
        return _logged(event)
    if event.kind == "redfish":
        return _of_bmc(event)
    return None


def _logged(event: Event) -> tuple[str, Level, str] | None:
    kind, what = read_text(event.data.get("type")), read_text(event.data.get("event"))
    pattern = _SEL.get(kind)
    if pattern is None or event.data.get("asserted") is False or not pattern.search(what):
        return None
    return kind, "page", f"its BMC logged of {read_text(event.data.get('sensor'))[:80] or kind}: {what[:120]}"


def _of_bmc(event: Event) -> tuple[str, Level, str] | None:
    message, about = read_text(event.data.get("message")), read_text(event.data.get("origin"))
    critical = str(event.data.get("severity")).lower() == "critical"
    if not critical or not _REDFISH.search(message) or _LEAVE.search(about) or _LEAVE.search(message):
        return None
    return "redfish", "page", f"its BMC says: {message[:120]}"
