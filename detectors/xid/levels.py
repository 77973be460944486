"""How loud each XID is, by its number, by what its line says of itself, and above all by what the driver wants done.

Source: NVIDIA's catalogue of XIDs (docs.nvidia.com/deploy/xid-errors). Where it says reset, reboot or check the
cabling, somebody is woken; where it says restart the application, update or contact support, a ticket is enough; what
it says to ignore, and what programs do to themselves, is a suspect.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from detectors.base.event_data import text, whole
from pipeline.records import LEVELS, Event, Level
from pipeline.signals import CATALOGUE

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
    if (place := whole(state, 0, _HIGHEST)) is not None:
        return _ACTIONS[place] if place < len(_ACTIONS) else f"recovery action {place}, which is not known"
    return text(state)[:80] or None


def number(data: Mapping[str, Any], key: str) -> int | None:
    """A whole number of an event's data; None where it is none."""
    return whole(data.get(key), 0, _HIGHEST)


def wanted(event: Event) -> str | None:
    """What the driver wants done, as it says itself: `none` is the all-clear; None: it says nothing."""
    data = event.data
    if event.kind == "recovery_action" or number(data, "xid") == RECOVERY:
        detail = data.get("detail")
        to = action_named(data.get("to", detail.get("to") if isinstance(detail, Mapping) else None))
        return to if to in _ACTIONS else text(data.get("action"))[:80] or to
    return text(data.get("action"))[:80] or None if data.get("action_source") == "driver" else None


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
