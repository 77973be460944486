"""Parses the kernel log's text of XIDs and SXids, and the details that some codes contain.

NVLink: the seven registers of XID 74, and the unit, reason and status of XID 144 to 150.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.model.toml_text import parse_toml

SHIPPED_NVLINK_RULES = Path(__file__).with_name("nvlink.toml")
UNIT_CODES_CHANGED = 575
"""Driver branch from which the unit is in bits 6:0 of intrInfo instead of 9:0 (the two columns of NVIDIA's
catalogue)."""

_LINK_74 = re.compile(r"link\s{1,4}(-?\d{1,4})\s{0,2}(?:\(((?:0x[0-9a-f]{1,16}[, ]{0,3}){1,8})\))?", re.I)
_HEX = re.compile(r"0x[0-9a-f]{1,16}", re.I)
_UNIT = re.compile(
    r"\b([A-Z][A-Z0-9_/]{2,60})\s{1,8}(Fatal|Non-?fatal)\s{1,8}(\w{1,8})\s{1,8}i(\d{1,3})\s{1,8}Link\s{1,4}(-?\d{1,4})"
    r"(?:\s{1,4}\(((?:0x[0-9a-f]{1,16}\s{0,4}){1,12}))?",
    re.I,
)


@dataclass(frozen=True, slots=True)
class RegisterBit:
    """Meaning of one bit of a register of XID 74. rank: the highest rank among the set bits decides."""

    meaning: str
    next_action: str
    rank: int
    repeats: int


@dataclass(frozen=True, slots=True)
class UnitRule:
    """Meaning of a status of a unit. reason: that of a link-down."""

    status: int
    reason: int
    severity: str
    action: str
    next_action: str


@dataclass(frozen=True, slots=True)
class NvlinkUnit:
    """One unit of NVLink 5 with its codes in intrInfo in both forms: (expected bits, mask)."""

    xid: int
    name: str
    before_575: tuple[int, int]
    from_575: tuple[int, int]
    rules: tuple[UnitRule, ...]


@dataclass(frozen=True, slots=True)
class NvlinkRules:
    """All rules of nvlink.toml."""

    version: str
    source: str
    bits: Mapping[tuple[int, int], RegisterBit]
    units: tuple[NvlinkUnit, ...]


@functools.cache
def shipped_nvlink_rules() -> NvlinkRules:
    """Returns the rules of nvlink.toml."""
    found = parse_toml(SHIPPED_NVLINK_RULES.read_text("utf-8"))
    bits = {
        (register["number"], bit): RegisterBit(rule["meaning"], rule["then"], rule["rank"], rule["repeats"])
        for register in found["register"]
        for rule in register["rules"]
        for bit in rule["bits"]
    }
    return NvlinkRules(found["version"], found["source"], bits, tuple(_parse_unit(unit) for unit in found["unit"]))


def _parse_unit(found: Mapping[str, Any]) -> NvlinkUnit:
    codes = [(int(found[form], 2), (1 << len(found[form])) - 1) for form in ("before_575", "from_575")]
    rules = (UnitRule(r["status"], r.get("reason", 0), r["severity"], r["action"], r["then"]) for r in found["rules"])
    return NvlinkUnit(found["xid"], found["name"], codes[0], codes[1], tuple(rules))


def decode_nvlink_registers(text: str) -> dict[str, Any]:
    """Returns the detail of XID 74: link, registers, which documented bits are set, and the verdict of the highest
    ranked one.
    """
    matched = _LINK_74.search(text)
    if matched is None:
        return {}
    detail: dict[str, Any] = {"link": int(matched[1])}
    values = [int(word, 16) for word in _HEX.findall(matched[2] or "")]
    if not values:
        return detail
    detail["registers"] = [hex(value) for value in values]
    known = shipped_nvlink_rules().bits
    found = [
        (number, bit, known.get((number, bit)))
        for number, value in enumerate(values, 1)
        for bit in range(64)
        if value >> bit & 1
    ]
    detail["bits"] = [f"{number}.{bit} {rule.meaning if rule else 'not documented'}" for number, bit, rule in found][
        :32
    ]
    documented = [rule for _, _, rule in found if rule is not None]
    if documented:
        worst = max(documented, key=lambda rule: rule.rank)
        detail |= {"verdict": worst.meaning, "then": worst.next_action, "repeats": worst.repeats}
    return detail


def decode_unit_status(xid: int, text: str, driver: int | None = None) -> dict[str, Any]:
    """Returns the detail of XID 144 to 150: unit, severity and link as logged; status, reason and rule by number.

    driver: the driver branch (575 of 575.57.08), which decides where the unit is in intrInfo; None: both forms are
    tried.
    """
    matched = _UNIT.search(text)
    if matched is None:
        return {}
    name, severity, channel, instance, link, numbers = matched.groups()
    fatal = severity.lower() == "fatal"
    detail: dict[str, Any] = {"unit": name, "severity": "fatal" if fatal else "nonfatal", "channel": channel}
    detail |= {"instance": int(instance), "link": int(link)}
    values = [int(word, 16) for word in _HEX.findall(numbers or "")]
    if len(values) < 2:
        return detail
    info, status = values[:2]
    reason = info >> 20 & 0x3F  # bits 25:20, as in every rule of the catalogue
    detail |= {"intr_info": hex(info), "error_status": hex(status), "reason": reason}
    unit = _find_unit(xid, name, info, driver)
    rule = _find_rule(unit, status, reason) if unit else None
    if rule is not None:
        detail |= {"rule_severity": rule.severity, "action": rule.action, "then": rule.next_action}
    return detail


def _find_unit(xid: int, name: str, info: int, driver: int | None) -> NvlinkUnit | None:
    """Returns the unit by its code in intrInfo; by its name if the driver branch is unknown or no code matches."""
    units = [unit for unit in shipped_nvlink_rules().units if unit.xid == xid]
    forms = [driver >= UNIT_CODES_CHANGED] if driver is not None else [False, True]
    for new in forms:
        coded = [u for u in units if info & (code := u.from_575 if new else u.before_575)[1] == code[0]]
        same = [unit for unit in coded if _names_match(unit.name, name)]
        if same or (coded and driver is not None):
            return (same or coded)[0]
    return next((unit for unit in units if _names_match(unit.name, name)), None)


def _names_match(known: str, logged: str) -> bool:
    """Returns whether two names match. Names in the table join those of older and newer drivers:
    NETIR_LINK_EVT/NETIR_LINK_DOWN.
    """
    return logged == known or bool(set(known.split("/")) & set(logged.split("/")))


def _find_rule(unit: NvlinkUnit, status: int, reason: int) -> UnitRule | None:
    """Returns the rule of exactly this status, else the most severe of those whose single bit is set in it."""
    for rule in unit.rules:
        if rule.status == status and rule.reason == reason:
            return rule
    if unit.name.startswith("NETIR"):  # the status of these units is a number, not a set of bits
        return None
    partly = [rule for rule in unit.rules if rule.status & status]
    order = ("none", "as XID 154 says", "reset GPU")
    return max(partly, key=lambda rule: order.index(rule.action), default=None)


RECOVERY_ACTION_NAMES: Mapping[int, str] = {
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
    """Content of one XID line. pci without function, in lower case; None: not in the line."""

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
    """Content of one NVSwitch error line. fatal: None if it is not in the line."""

    code: int
    switch: str
    pci: str
    text: str
    fatal: bool | None = None
    detail: Mapping[str, Any] | None = None


def parse_xid_line(text: str) -> XidLine | None:
    """Returns the XID that a line reports; None if it reports none."""
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
        pci=pci_without_function(found["pci"]) if found["pci"] else None,
        uuid=found["uuid"],
        pid=int(pid) if pid.isascii() and pid.isdigit() else None,
        process=name.strip() if name and "<unknown>" not in name else None,
        gpu_instance=_optional_int(found["gi"]),
        compute_instance=_optional_int(found["ci"]),
    )


def parse_sxid_line(text: str) -> SXidLine | None:
    """Returns the NVSwitch error that a line reports or details; None if there is none."""
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
    return SXidLine(int(found["code"]), found["switch"], pci_without_function(found["pci"]), rest, fatal, detail)


def parse_uuid_line(text: str) -> tuple[str, str] | None:
    """Returns (pci, uuid) of the line that the driver prints before the first XID of a GPU; None for other lines."""
    found = _UUID.search(text)
    return (pci_without_function(found["pci"]), found["uuid"]) if found else None


def pci_without_function(address: str) -> str:
    """Returns a PCI address in the kernel's form, without function: 00000000:5D:00.0 -> 0000:5d:00."""
    domain, bus, device = address.lower().split(".")[0].split(":")
    return f"{int(domain, 16):04x}:{bus}:{device}"


def decode_detail(line: XidLine, driver: int | None = None) -> dict[str, Any]:
    """Returns what the text of this code contains beyond its number; empty if nothing is known about it."""
    found: dict[str, Any] = {}
    if line.code == 74:
        found = decode_nvlink_registers(line.text)
    elif 144 <= line.code <= 150:
        found = decode_unit_status(line.code, line.text, driver)
    for pattern in _DETAILS.get(line.code, ()):
        if matched := pattern.search(line.text):
            found |= {
                key: _convert_value(key, value) for key, value in matched.groupdict().items() if value is not None
            }
    if line.code == 13 and (esr := _ESR.findall(line.text)):
        found["esr"] = dict(esr[:8])
    if line.code == 154 and "to_code" in found:
        code = int(str(found["to_code"]), 16)
        found |= {"to": code, "action": RECOVERY_ACTION_NAMES.get(code, str(found["to_text"]))}
    for key in ("gpu_instance", "compute_instance"):
        if getattr(line, key) is not None:
            found[key] = getattr(line, key)
    return found


def _optional_int(text: str | None) -> int | None:
    return None if text is None else int(text)


def _convert_value(key: str, value: str) -> int | str | bool:
    """Converts decimal numbers and Yes/No. Everything else, addresses included, stays text, without the driver's digit
    grouping.
    """
    if value in ("Yes", "No"):
        return value == "Yes"
    if value.startswith("0x"):
        return value.replace("_", "")
    return int(value) if key in _DECIMAL else value.strip()


_DECIMAL = frozenset(["gpc", "tpc", "sm", "partition", "subpartition", "seconds", "gsp_gpu", "function"])


def _compile_all(*patterns: str) -> tuple[re.Pattern[str], ...]:
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
# Texts of the driver as in real logs. If a newer driver words them differently, they are still in the event's text.
_DETAILS: Mapping[int, tuple[re.Pattern[str], ...]] = {
    13: _compile_all(
        r"\(GPC (?P<gpc>\d{1,3}), TPC (?P<tpc>\d{1,3})(?:, SM (?P<sm>\d{1,3}))?\)(?:: (?P<error>[\w ]{1,80}))?",
        r"ChID (?P<channel>[0-9a-f]{1,8}), Class (?P<gpu_class>[0-9a-f]{1,8}), Offset (?P<offset>[0-9a-f]{1,8})",
    ),
    31: _compile_all(
        _CHANNEL,
        r"MMU Fault: ENGINE (?P<engine>\w{1,40})(?: (?P<client>\w{1,60}))? faulted",
        rf"faulted @ (?P<address>{_ADDRESS})",
        r"Fault is of type (?P<fault>\w{1,60})(?: (?P<access>\w{1,60}))?",
    ),
    32: _compile_all(_CHANNEL),
    43: _compile_all(_CHANNEL),
    45: _compile_all(_CHANNEL),
    48: _compile_all(*_DBE),
    63: _compile_all(*_ROW),
    64: _compile_all(*_ROW),
    92: _compile_all(*_DBE),
    94: _compile_all(_CONTAINED, _FLAGS),
    95: _compile_all(_CONTAINED, _FLAGS),
    109: _compile_all(_CHANNEL, r"errorString (?P<error>[A-Z_ ]{1,60})"),
    119: _compile_all(*_GSP),
    120: _compile_all(
        r"GSP (?P<task>[\w-]{1,40}) (?:exception|Exception)(?:: (?P<error>[\w ]{1,80}))?",
        r"\(cause:(?P<cause>0x[0-9a-f]{1,16})\)",
        r"@ pc:(?P<pc>0x[0-9a-f]{1,16})",
    ),
    154: _compile_all(
        r"changed from (?P<from_code>0x[0-9a-f]{1,8}) \((?P<from_text>[^)]{1,60})\) "
        r"to (?P<to_code>0x[0-9a-f]{1,8}) \((?P<to_text>[^)]{1,60})\)"
    ),
    171: _compile_all(*_DBE),
    172: _compile_all(*_DBE),
}
