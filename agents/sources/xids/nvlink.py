"""The numbers in NVLink XIDs: the seven registers of XID 74 and the unit, reason and status of XID 144 to 150."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHIPPED = Path(__file__).with_name("nvlink.toml")
UNIT_CHANGED = 575
"""Driver branch from which the unit is in bits 6:0 of intrInfo and no longer in 9:0 (the catalogue's two columns)."""

_LINK_74 = re.compile(r"link\s{1,4}(-?\d{1,4})\s{0,2}(?:\(((?:0x[0-9a-f]{1,16}[, ]{0,3}){1,8})\))?", re.I)
_HEX = re.compile(r"0x[0-9a-f]{1,16}", re.I)
_UNIT = re.compile(
    r"\b([A-Z][A-Z0-9_/]{2,60})\s{1,8}(Fatal|Non-?fatal)\s{1,8}(\w{1,8})\s{1,8}i(\d{1,3})\s{1,8}Link\s{1,4}(-?\d{1,4})"
    r"(?:\s{1,4}\(((?:0x[0-9a-f]{1,16}\s{0,4}){1,12}))?",
    re.I,
)


@dataclass(frozen=True, slots=True)
class Bit:
    """What one bit of a register of XID 74 says. rank: the highest of the bits that are set decides."""

    meaning: str
    then: str
    rank: int
    repeats: int


@dataclass(frozen=True, slots=True)
class Rule:
    """What a status of a unit says; reason: of a link-down."""

    status: int
    reason: int
    severity: str
    action: str
    then: str


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit of NVLink 5 with its codes in intrInfo in both forms: (bits wanted, mask)."""

    xid: int
    name: str
    before_575: tuple[int, int]
    from_575: tuple[int, int]
    rules: tuple[Rule, ...]


@dataclass(frozen=True, slots=True)
class Rules:
    version: str
    source: str
    bits: Mapping[tuple[int, int], Bit]
    units: tuple[Unit, ...]


@functools.cache
def shipped() -> Rules:
    """The rules of nvlink.toml."""
    found = tomllib.loads(SHIPPED.read_text("utf-8"))
    bits = {
        (register["number"], bit): Bit(rule["meaning"], rule["then"], rule["rank"], rule["repeats"])
        for register in found["register"]
        for rule in register["rules"]
        for bit in rule["bits"]
    }
    return Rules(found["version"], found["source"], bits, tuple(_unit(unit) for unit in found["unit"]))


def _unit(found: Mapping[str, Any]) -> Unit:
    codes = [(int(found[form], 2), (1 << len(found[form])) - 1) for form in ("before_575", "from_575")]
    rules = (Rule(r["status"], r.get("reason", 0), r["severity"], r["action"], r["then"]) for r in found["rules"])
    return Unit(found["xid"], found["name"], codes[0], codes[1], tuple(rules))


def registers(text: str) -> dict[str, Any]:
    """Detail of XID 74: link, registers, which documented bits are set, and the verdict of the one that outranks."""
    matched = _LINK_74.search(text)
    if matched is None:
        return {}
    detail: dict[str, Any] = {"link": int(matched[1])}
    values = [int(word, 16) for word in _HEX.findall(matched[2] or "")]
    if not values:
        return detail
    detail["registers"] = [hex(value) for value in values]
    known = shipped().bits
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
        detail |= {"verdict": worst.meaning, "then": worst.then, "repeats": worst.repeats}
    return detail


def unit_status(xid: int, text: str, driver: int | None = None) -> dict[str, Any]:
    """Detail of XID 144 to 150: unit, severity and link as logged; status, reason and rule by the numbers.

    driver: the driver's branch (575 of 575.57.08), which says where in intrInfo the unit is; None: both are tried.
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
    reason = info >> 20 & 0x3F  # bits 25:20, the pattern of each rule of the catalogue
    detail |= {"intr_info": hex(info), "error_status": hex(status), "reason": reason}
    unit = _the_unit(xid, name, info, driver)
    rule = _the_rule(unit, status, reason) if unit else None
    if rule is not None:
        detail |= {"rule_severity": rule.severity, "action": rule.action, "then": rule.then}
    return detail


def _the_unit(xid: int, name: str, info: int, driver: int | None) -> Unit | None:
    """By its code in intrInfo; where the driver's branch is not known or the code says nothing, by its name."""
    units = [unit for unit in shipped().units if unit.xid == xid]
    forms = [driver >= UNIT_CHANGED] if driver is not None else [False, True]
    for new in forms:
        coded = [u for u in units if info & (code := u.from_575 if new else u.before_575)[1] == code[0]]
        same = [unit for unit in coded if _same(unit.name, name)]
        if same or (coded and driver is not None):
            return (same or coded)[0]
    return next((unit for unit in units if _same(unit.name, name)), None)


def _same(known: str, logged: str) -> bool:
    """Names of the table join what older and newer drivers print: NETIR_LINK_EVT/NETIR_LINK_DOWN."""
    return logged == known or bool(set(known.split("/")) & set(logged.split("/")))


def _the_rule(unit: Unit, status: int, reason: int) -> Rule | None:
    """The rule of exactly this status; else the gravest of those whose single bit is set in it."""
    for rule in unit.rules:
        if rule.status == status and rule.reason == reason:
            return rule
    if unit.name.startswith("NETIR"):  # their status is a number, not a set of bits
        return None
    partly = [rule for rule in unit.rules if rule.status & status]
    order = ("none", "as XID 154 says", "reset GPU")
    return max(partly, key=lambda rule: order.index(rule.action), default=None)
