"""The kernel log's text of an XID or SXid, and the details that some codes put into it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agents.sources.xids import nvlink as nvlink_rules

RECOVERY: Mapping[int, str] = {
    # nvmlDeviceGpuRecoveryAction_t; 5 to 7 came with R580
    0: "none",
    1: "reset GPU",
    2: "reboot node",
    3: "drain peer-to-peer",
    4: "drain and reset GPU",
    5: "recover IMEX domain",
    6: "reset bus",
    7: "reboot system",
}

# kernel_rc.c of the open kernel modules prints `NVRM: Xid (PCI:%04x:%02x:%02x GPU-I:%02u GPU-CI:%02u): %d, pid=%s,
# name=%s, text`; process and instances only where known. Older drivers leave out PCI: and the process.
_XID = re.compile(
    r"NVRM: Xid \((?:PCI:)?(?P<pci>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2})?(?:\.[0-7])?(?P<uuid>GPU-[0-9a-f-]{36})?"
    r"(?: GPU-I:(?P<gi>\d{1,3}))?(?: GPU-CI:(?P<ci>\d{1,3}))?\): (?P<code>\d{1,9})(?P<rest>.*)",
    re.I | re.S,
)
_PROCESS = re.compile(r", pid=(?P<pid>'?<?[\w/.-]{1,64}>?'?)(?:, name=(?P<name>[^,]{0,64}))?", re.S)
_SXID = re.compile(
    r"(?P<switch>nvidia-nvswitch\d{0,4}): SXid \(PCI:(?P<pci>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2})(?:\.[0-7])?\): "
    r"(?P<code>\d{1,9}),?\s{0,4}(?P<rest>.*)",
    re.I | re.S,
)
_UUID = re.compile(
    r"NVRM: GPU at PCI:(?P<pci>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2})(?:\.[0-7])?: (?P<uuid>GPU-[0-9a-f-]{36})", re.I
)
_LINK = re.compile(r"\bLink (-?\d{1,4})\b")
_SWITCH_ENGINE = re.compile(r"Severity (\d{1,4}) Engine instance (\d{1,4}) Sub-engine instance (\d{1,4})")


@dataclass(frozen=True, slots=True)
class XidLine:
    """What one line says of an XID. pci without function, in lower case; None: not told."""

    code: int
    text: str
    pci: str | None = None
    uuid: str | None = None
    pid: int | None = None
    process: str | None = None
    gpu_instance: int | None = None
    compute_instance: int | None = None


@dataclass(frozen=True, slots=True)
class SXidLine:
    """What one line says of an NVSwitch error. fatal: None where the line does not say."""

    code: int
    switch: str
    pci: str
    text: str
    fatal: bool | None = None
    detail: Mapping[str, Any] | None = None


def xid_line(text: str) -> XidLine | None:
    """The XID that a line reports; None if it reports none."""
    found = _XID.search(text)
    if found is None:
        return None
    rest = found["rest"]
    process = _PROCESS.match(rest)
    if process is not None:
        rest = rest[process.end() :]
    name = process["name"] if process else None
    pid = process["pid"] if process else ""
    return XidLine(
        code=int(found["code"]),
        text=rest.lstrip(", ").strip(),
        pci=normal_pci(found["pci"]) if found["pci"] else None,
        uuid=found["uuid"],
        pid=int(pid) if pid.isascii() and pid.isdigit() else None,
        process=name.strip() if name and "<unknown>" not in name else None,
        gpu_instance=_number(found["gi"]),
        compute_instance=_number(found["ci"]),
    )


def sxid_line(text: str) -> SXidLine | None:
    """The NVSwitch error that a line reports or details; None if there is none."""
    found = _SXID.search(text)
    if found is None:
        return None
    rest = found["rest"].strip()
    fatal = True if rest.startswith("Fatal") else False if rest.startswith("Non-fatal") else None
    detail: dict[str, Any] = {}
    if link := _LINK.search(rest):
        detail["link"] = int(link[1])
    if engine := _SWITCH_ENGINE.search(rest):
        detail |= dict(zip(("severity_code", "engine", "sub_engine"), map(int, engine.groups()), strict=True))
    if rest.startswith("Data {"):
        detail["data"] = re.findall(r"0x[0-9a-fA-F]{1,16}", rest)[:16]
    return SXidLine(int(found["code"]), found["switch"], normal_pci(found["pci"]), rest, fatal, detail)


def uuid_line(text: str) -> tuple[str, str] | None:
    """(pci, uuid) of the line that the driver prints before the first XID of a GPU."""
    found = _UUID.search(text)
    return (normal_pci(found["pci"]), found["uuid"]) if found else None


def normal_pci(address: str) -> str:
    """Domain with four digits, bus and device, in lower case, without function: 00000000:5D:00.0 -> 0000:5d:00."""
    domain, bus, device = address.lower().split(".")[0].split(":")
    return f"{int(domain, 16):04x}:{bus}:{device}"


def detail(line: XidLine, driver: int | None = None) -> dict[str, Any]:
    """What the text of this code tells beyond its number; empty where it tells nothing that is known."""
    found: dict[str, Any] = {}
    if line.code == 74:
        found = nvlink_rules.registers(line.text)
    elif 144 <= line.code <= 150:
        found = nvlink_rules.unit_status(line.code, line.text, driver)
    for pattern in _DETAILS.get(line.code, ()):
        if matched := pattern.search(line.text):
            found |= {key: _plain(key, value) for key, value in matched.groupdict().items() if value is not None}
    if line.code == 13 and (esr := _ESR.findall(line.text)):
        found["esr"] = dict(esr[:8])
    if line.code == 154 and "to_code" in found:
        code = int(str(found["to_code"]), 16)
        found |= {"to": code, "action": RECOVERY.get(code, str(found["to_text"]))}
    for key in ("gpu_instance", "compute_instance"):
        if getattr(line, key) is not None:
            found[key] = getattr(line, key)
    return found


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


def _plain(key: str, value: str) -> int | str | bool:
    """Decimal numbers and Yes/No as such; the rest, and addresses, as text without the driver's digit grouping."""
    if value in ("Yes", "No"):
        return value == "Yes"
    if value.startswith("0x"):
        return value.replace("_", "")
    return int(value) if key in _DECIMAL else value.strip()


_DECIMAL = frozenset(["gpc", "tpc", "sm", "partition", "subpartition", "seconds", "gsp_gpu", "function"])


def _all(*patterns: str) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(pattern) for pattern in patterns)


_CHANNEL = r"\bCh(?:annel)? (?P<channel>(?:0x)?[0-9a-fA-F]{1,16})\b"
_ESR = re.compile(r"\b(0x[0-9a-f]{1,16})=(0x[0-9a-f]{1,16})")
_ADDRESS = r"0x[0-9a-fA-F_]{1,20}"
_CONTAINED = (
    r"(?P<contained>Contained|Uncontained): (?P<unit>[A-Za-z][\w /-]{0,40}?) ?\((?P<sub_unit>[0-9a-fx, ]{1,40})\)"
)
_FLAGS = r"RST: (?P<reset_required>Yes|No), D-RST: (?P<drain_required>Yes|No)"
_ROW = (
    rf"New row (?:\((?P<row>{_ADDRESS})\) )?marked for remapping",
    rf"Rows? (?P<rows>{_ADDRESS}(?:(?:,| and) {_ADDRESS}){{0,8}}) ha(?:s|ve) been remapped",
    rf"\bpage\b[^(]{{0,80}}\((?P<page>{_ADDRESS})\)",
)
_GSP = (
    r"Timeout after (?P<seconds>\d{1,6})s of waiting for RPC response from GPU(?P<gsp_gpu>\d{1,4}) GSP",
    r"Expected function (?P<function>\d{1,6}) \((?P<function_name>\w{1,64})\)",
    r"\) \((?P<argument>0x[0-9a-fA-F]{1,16}) (?P<size>0x[0-9a-fA-F]{1,16})\)",
)
_DBE = (
    rf"\bphysAddr (?P<address>{_ADDRESS})",
    r"\b[Pp]artition (?P<partition>\d{1,4})",
    r"\b[Ss]ub-?partition (?P<subpartition>\d{1,4})",
    r"detected (?:on|in) (?:GPU )?(?:in )?the (?P<where>\w{1,40})",
)
# Texts of the driver as real logs show them; what a newer driver words differently is still in the event's text.
_DETAILS: Mapping[int, tuple[re.Pattern[str], ...]] = {
    13: _all(
        r"\(GPC (?P<gpc>\d{1,3}), TPC (?P<tpc>\d{1,3})(?:, SM (?P<sm>\d{1,3}))?\)(?:: (?P<error>[\w ]{1,80}))?",
        r"ChID (?P<channel>[0-9a-f]{1,8}), Class (?P<gpu_class>[0-9a-f]{1,8}), Offset (?P<offset>[0-9a-f]{1,8})",
    ),
    31: _all(
        _CHANNEL,
        r"MMU Fault: ENGINE (?P<engine>\w{1,40})(?: (?P<client>\w{1,60}))? faulted",
        rf"faulted @ (?P<address>{_ADDRESS})",
        r"Fault is of type (?P<fault>\w{1,60})(?: (?P<access>\w{1,60}))?",
    ),
    32: _all(_CHANNEL),
    43: _all(_CHANNEL),
    45: _all(_CHANNEL),
    48: _all(*_DBE),
    63: _all(*_ROW),
    64: _all(*_ROW),
    92: _all(*_DBE),
    94: _all(_CONTAINED, _FLAGS),
    95: _all(_CONTAINED, _FLAGS),
    109: _all(_CHANNEL, r"errorString (?P<error>[A-Z_ ]{1,60})"),
    119: _all(*_GSP),
    120: _all(
        r"GSP (?P<task>[\w-]{1,40}) (?:exception|Exception)(?:: (?P<error>[\w ]{1,80}))?",
        r"\(cause:(?P<cause>0x[0-9a-f]{1,16})\)",
        r"@ pc:(?P<pc>0x[0-9a-f]{1,16})",
    ),
    154: _all(
        r"changed from (?P<from_code>0x[0-9a-f]{1,8}) \((?P<from_text>[^)]{1,60})\) "
        r"to (?P<to_code>0x[0-9a-f]{1,8}) \((?P<to_text>[^)]{1,60})\)"
    ),
    171: _all(*_DBE),
    172: _all(*_DBE),
}
