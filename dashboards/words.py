"""How things are said on screen: names, ages, moments, amounts and what to do next. Pure text, no markup."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.model.entity_names import KINDS, entity_name
from pipeline.model.records import SECOND, Severity, State, from_iso, iso
from pipeline.model.signals import CATALOGUE

SEVERITY: Mapping[Severity, str] = {"page": "CRITICAL", "ticket": "WARNING", "watch": "WATCH"}
STATE: Mapping[State, str] = {
    "open": "Open",
    "acknowledged": "Acknowledged",
    "silenced": "Silenced",
    "resolved": "Resolved",
}
NODE_STATE = {"critical": "critical", "degraded": "degraded", "watch": "watch", "no_data": "no data", "ok": "ok"}
_ENTITY = re.compile(rf"\b(?:{'|'.join(KINDS)}):[\w-]+(?:\.[\w/@-]+)*")
_ACRONYMS = {"gpu": "GPU", "gpus": "GPUs", "sm": "SM", "nic": "NIC", "ecc": "ECC", "crc": "CRC", "pcie": "PCIe"}
_LABELS = {
    "value": "Measured",
    "expected": "Expected",
    "slowdown": "Times slower than peers",
    "peers": "Peers compared",
    "mismatches": "Wrong results",
    "holds": "Stays until a clean retest or a reset",
    "corroborated_by": "Also seen in",
    "down_s": "Down for",
    "flaps": "Times down and up again",
}
_UNITS = {"Cel": "°C", "1": "", "share": "", "decade": "decades", "us": "µs"}
_BIG = ((1e12, "T"), (1e9, "G"), (1e6, "M"))
_ADVICE: Mapping[str, str] = {
    "sdc": (
        "Do not trust results of {entity} since the onset. Take it out of new work, repeat the canary on it and on a "
        "neighbour, and check which checkpoints were written since."
    ),
    "straggler": (
        "The whole job waits for {entity}. Compare clocks, throttle reasons and temperature with its peers; "
        "if it stays slow, move its rank to a spare."
    ),
    "link": (
        "Look at both ends of {entity}: seating and cleanliness first, then swap cable or transceiver. "
        "Until then expect resends on every collective that crosses it."
    ),
    "coolant": (
        "Send somebody to {entity}: pump, valves and filter. GPUs behind it throttle next; "
        "move work away before they do."
    ),
}


def counted(kinds: Mapping[str, int]) -> list[str]:
    """Numbers by kind, the most numerous last: `1 node`, `8 GPUs`."""
    ordered = sorted(kinds.items(), key=lambda pair: (pair[1], pair[0]))
    return [amount(number, *KINDS.get(kind, (kind, kind))) for kind, number in ordered]


def amount(number: int, one: str, many: str) -> str:
    """`1 node`, `1,024 nodes`."""
    return f"{number:,} {one if number == 1 else many}"


def age(seconds: float) -> str:
    """Two units at most: `4 s`, `12 min`, `2 h 05 min`, `3 d 4 h`. What lies ahead of our clock is `0 s`."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def clock(time: int, now: int) -> str:
    """`11:43:02Z`, with the date in front unless it is today's."""
    text = iso(time)
    return f"{text[11:19]}Z" if text[:10] == iso(now)[:10] else f"{text[:10]} {text[11:19]}Z"


def ago(time: int, now: int) -> str:
    """`11:43:02Z (12 min ago)`."""
    return f"{clock(time, now)} ({age((now - time) / SECOND)} ago)"


def quantity(value: float, unit: str = "") -> str:
    """Three significant digits where that is enough, with the unit as people write it."""
    said = "" if unit.startswith("{") and unit.endswith("}") else unit_name(unit)
    tail = f" {said}" if said else ""
    if not math.isfinite(value):
        return "not measured"
    for scale, prefix in _BIG:
        if abs(value) >= scale and unit in ("By", "B", "Hz", "W", "", "By/s"):
            return f"{value / scale:.3g} {prefix}{said.replace('By', 'B')}"
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}{tail}"
    return f"{value:,.0f}{tail}" if abs(value) >= 100 else f"{value:.3g}{tail}"


def unit_name(unit: str) -> str:
    """A UCUM unit as people write it: `Cel` -> `°C`, `{error}` -> `error`, `1` -> ``."""
    return _UNITS.get(unit, unit.replace("{", "").replace("}", ""))


def named(text: str) -> str:
    """Words with entities by name and units as one writes them."""
    return _ENTITY.sub(lambda found: entity_name(found[0]), text.strip()).replace(" Cel", " °C")


def signal_name(name: str) -> str:
    """A signal within a sentence: `coolant.supply_temperature` -> `supply temperature`."""
    known = CATALOGUE.get(name)
    return known.column.replace("_", " ") if known else name


def detector_name(name: str) -> str:
    """`*` stands for all of them."""
    return "all detectors" if name == "*" else name


def scope_name(scope: str) -> str:
    """`*` stands for the whole site."""
    return "everywhere" if scope == "*" else entity_name(scope)


def plain(text: str) -> str:
    """A detector's sentence for people: entities by name, units as one writes them, a capital unless a name leads."""
    text = named(text)
    return text[:1].upper() + text[1:] if text.partition(" ")[0].rstrip(":,").isalpha() else text


def label(key: str) -> str:
    """The name of a fact: `supply_temperature` -> `Supply temperature`, with acronyms as acronyms."""
    if key in _LABELS:
        return _LABELS[key]
    parts = key.removesuffix("_s").replace(".", " ").replace("_", " ").split()
    text = " ".join(_ACRONYMS.get(part, part) for part in parts)
    return text[:1].upper() + text[1:]


def fact(value: Any, unit: str = "") -> str:
    """The value of a fact."""
    if value is None:
        return "not measured"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return quantity(float(value), unit)
    if isinstance(value, Mapping):
        return (
            ", ".join(f"{label(str(k)).lower()} {fact(v)}" for k, v in value.items() if v not in ("", None)) or "none"
        )
    if isinstance(value, (list, tuple)):
        shown = ", ".join(fact(v) for v in value[:8])  # eight fit in a line of the table
        return shown + (f" and {len(value) - 8:,} more" if len(value) > 8 else "") if value else "none"
    return _text(str(value)) or "none"


def _text(text: str) -> str:
    """A lone entity by its name, a moment without its zeros; everything else as it is."""
    if _ENTITY.fullmatch(text):
        return entity_name(text)
    try:
        return f"{iso(from_iso(text))[:19].replace('T', ' ')}Z" if len(text) == 27 else text
    except ValueError:
        return text


def advice(detector: str, entity: str) -> str:
    """What to do next, by the detector that first spoke; a detector without a line gets the general one."""
    family = detector.partition(".")[0].partition("_")[0]
    text = _ADVICE.get(family, "Compare {entity} with its peers below, and note here what you find.")
    return text.format(entity=entity_name(entity))


def joined(parts: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))
