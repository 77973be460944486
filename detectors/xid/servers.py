"""What the GPUs of one server tell together: a driver that is loaded anew, and a GPU that explains its server."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from detectors.xid import host_levels
from detectors.xid.cases import Case
from pipeline.records import SECOND

_RELOAD = 120 * SECOND  # in which a driver is loaded anew: half a minute for 8 GPUs, fourfold; chosen


def reloads(case: Case, cases: Mapping[str, Case], mates: Collection[str], time: int) -> bool:
    """Whether all GPUs of a server went a moment ago without an XID: as a rule its driver is loaded anew."""
    if case["codes"] or "gpu_lost" not in case["facts"] or time - case["last"] > _RELOAD:
        return False
    return len(mates) > 1 and all("gpu_lost" in cases.get(e, {"facts": ()})["facts"] for e in mates)


def is_of_a_gpu(case: Case, cases: Mapping[str, Case], gpus: Collection[str]) -> bool:
    """Whether all that a server tells is that one of its GPUs left the bus."""
    if set(case["facts"]) - host_levels.PCIE - {"gpu_count"} or case["codes"]:
        return False
    mine = (cases[e] for e in gpus if e in cases)
    return any("79" in c["codes"] or "gpu_lost" in c["facts"] for c in mine)


def lacking(present: int, expected: int, missing: object) -> str:
    """How many GPUs a server has, and which it lacks, in words."""
    named = ", ".join(str(gpu)[:80] for gpu in missing[:16]) if isinstance(missing, list | tuple) else ""
    return f"has {present} of {expected} GPUs{f', without {named}' if named else ''}"
