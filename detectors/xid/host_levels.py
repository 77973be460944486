"""How loud it is what a server's kernel log, its PCIe counters and its BMC tell of the server's own parts.

Source: Linux kernel (drivers/edac, arch/x86/kernel/cpu/mce, drivers/pci/pcie/aer.c, mm/memory-failure.c), the event
states of IPMI 2.0 (table 42-3) and the severities of Redfish message registries (DSP0266). What kills processes or
takes a disk or a bus away pages; what the kernel mended or only warns of does not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from detectors.base.event_data import text
from pipeline.records import Event, Level

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
        return "aer", "page", f"its PCIe device {text(event.data.get('device'))[:80]} counted a fatal error"
    if event.kind == "sel":
        return _logged(event)
    if event.kind == "redfish":
        return _of_bmc(event)
    return None


def _logged(event: Event) -> tuple[str, Level, str] | None:
    kind, what = text(event.data.get("type")), text(event.data.get("event"))
    pattern = _SEL.get(kind)
    if pattern is None or event.data.get("asserted") is False or not pattern.search(what):
        return None
    return kind, "page", f"its BMC logged of {text(event.data.get('sensor'))[:80] or kind}: {what[:120]}"


def _of_bmc(event: Event) -> tuple[str, Level, str] | None:
    message, about = text(event.data.get("message")), text(event.data.get("origin"))
    critical = str(event.data.get("severity")).lower() == "critical"
    if not critical or not _REDFISH.search(message) or _LEAVE.search(about) or _LEAVE.search(message):
        return None
    return "redfish", "page", f"its BMC says: {message[:120]}"
