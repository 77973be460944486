"""KINDS: every fault and benign event of the simulator, by name.

A new kind is a class in `faults` or `confounders`, and a line in FAULTS or CONFOUNDERS.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from agents.sim.confounders.cluster import (
    Drain,
    Evaluation,
    JobRestart,
    LateTelemetry,
    LossSpike,
    Maintenance,
    MixedSilicon,
    NodeTransient,
    OwnCanary,
    SilentReboot,
    StageImbalance,
)
from agents.sim.confounders.site import (
    BmcSilence,
    CounterOddity,
    EcmpCollision,
    InletRise,
    PartialCap,
    PowerCap,
    SensorOffset,
    SetpointShift,
)
from agents.sim.faults.cluster import (
    DataStall,
    DiskFailing,
    DiskWear,
    HostContention,
    HostFault,
    JobHang,
    MemoryLeak,
    SlowCollectives,
)
from agents.sim.faults.corruption import SilentDataCorruption
from agents.sim.faults.facility import CoolantLeak, CoolantLoss, FacilityWater, HallAir, PduTrip, PsuLoss, Recirculation
from agents.sim.faults.gpu import GpuEngineFault, GpuOffBus, GspTimeout, NvlinkError
from agents.sim.faults.kind import Kind
from agents.sim.faults.leaf import Congestion, GrayLeaf, LeafCrash, PauseStorm
from agents.sim.faults.link import LinkDegradation, LinkDown, LinkFlap, NicStall, OpticDegradation
from agents.sim.faults.memory import HbmContained, HbmCorrectedBurst, HbmUncontained, RemapFailure, SramEcc
from agents.sim.faults.restriction import NodeRestriction
from agents.sim.faults.slow import ClockStuck, ColdPlate, MemoryHeat, PcieDowngrade, SlowReturn, Straggler
from agents.sim.faults.telemetry import SensorFault, TelemetryGap

FAULTS: tuple[type[Kind], ...] = (
    GpuOffBus,
    GpuEngineFault,
    HbmCorrectedBurst,
    HbmContained,
    HbmUncontained,
    RemapFailure,
    SramEcc,
    GspTimeout,
    SilentDataCorruption,
    ColdPlate,
    ClockStuck,
    PcieDowngrade,
    LinkDegradation,
    NvlinkError,
    OpticDegradation,
    LinkDown,
    LinkFlap,
    LeafCrash,
    GrayLeaf,
    NicStall,
    Congestion,
    Straggler,
    CoolantLoss,
    TelemetryGap,
    PsuLoss,
    PduTrip,
    FacilityWater,
    NodeRestriction,
    CoolantLeak,
    Recirculation,
    SensorFault,
    HostContention,
    HostFault,
    JobHang,
    DataStall,
    MemoryHeat,
    SlowReturn,
    PauseStorm,
    HallAir,
    SlowCollectives,
    MemoryLeak,
    DiskWear,
    DiskFailing,
)

CONFOUNDERS: tuple[type[Kind], ...] = (
    SetpointShift,
    PowerCap,
    InletRise,
    SensorOffset,
    JobRestart,
    Evaluation,
    StageImbalance,
    NodeTransient,
    MixedSilicon,
    Maintenance,
    LateTelemetry,
    LossSpike,
    OwnCanary,
    CounterOddity,
    EcmpCollision,
    SilentReboot,
    Drain,
    PartialCap,
    BmcSilence,
)

KINDS: dict[str, type[Kind]] = {kind.name: kind for kind in (*FAULTS, *CONFOUNDERS)}

_WIDTH = 100
TARGET_NAMES = {"gpu": "GPU", "nic": "port", "nvlink": "GPU's NVLink", "power": "PDU", "coolant": "coolant loop"}


def describe(kind: type[Kind]) -> dict[str, Any]:
    """Returns a kind as text fields: happens, seen, unseen, rate, and its parameters with their distributions."""
    return {
        "kind": kind.name,
        "row": kind.row,
        "class": kind.detectability,
        "target": TARGET_NAMES.get(kind.target, kind.target),
        "happens": " ".join((kind.__doc__ or "").split()),
        "seen": kind.seen,
        "unseen": kind.unseen,
        "rate": f"{kind.rate.value:g} per {kind.rate.per}",
        "source": kind.rate.source,
        "parameters": {name: _drawn_from(kind, name) for name in kind().parameters()},
    }


def list_kinds() -> str:
    """Returns the output of `simulate --list`: faults first, then benign events, by row."""
    return "\n".join(_describe_kind(kind) for kind in sorted(KINDS.values(), key=_place)) + "\n"


def _place(kind: type[Kind]) -> tuple[bool, int, str]:
    return kind.detectability == "benign", kind.row, kind.name


def _drawn_from(kind: type[Kind], name: str) -> str:
    span = kind.ranges.get(name)
    return f" {span[0]:g} to {span[1]:g}" if span else ""


def _describe_kind(kind: type[Kind]) -> str:
    """Returns one kind as text."""
    fields = describe(kind)
    given = ", ".join(f"{name}{span}" for name, span in fields["parameters"].items())
    texts = {
        "happens": fields["happens"],
        "seen": kind.seen,
        "not seen": kind.unseen,
        "rate": f"{fields['rate']}; {kind.rate.source}",
        "set": given,
    }
    lines = (line for label, text in texts.items() for line in _wrapped(label, text))
    return "\n".join([f"{kind.name}: {kind.detectability}, affects {_with_article(fields['target'])}", *lines]) + "\n"


def _with_article(word: str) -> str:
    """Returns a word with its article."""
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def _wrapped(label: str, text: str) -> Iterator[str]:
    yield from textwrap.wrap(text, _WIDTH, initial_indent=f"  {label:9s} ", subsequent_indent=" " * 12)
