"""Signal: a measured quantity `CLASS.NAME` with unit (UCUM, as in OpenTelemetry), kind and device class.

The wire type is a NumPy type code. A missing value is NaN in floats and the highest value in unsigned integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter", "state"]
TYPES = ("u1", "u2", "u4", "u8", "f4", "f8")
HEALTH = ("ok", "warning", "critical", "unavailable", "absent", "standby", "disabled")
"""States of a part as its BMC reports them: Redfish Status.Health, else Status.State if the health is OK."""
HEALTHY = ("ok", "absent", "standby", "disabled")
"""States of HEALTH that are not faults: a bay may be empty, and a spare may be on standby."""


@dataclass(frozen=True, slots=True)
class Signal:
    """One measured quantity. `valid` is inclusive; a value outside it is a broken reading and counts as missing.

    kind: gauge, a value now; counter, a count that only grows, sent raw; state, one of `states` or a bit mask.
    type: of the wire; u8 for a counter, f4 or f8 for a gauge with fractions.
    source: file, call or register that is read.
    otel: metric of OpenTelemetry's semantic conventions, if there is one; empty: `fleetpulse.` and the signal's name.
    states: names of the values 0, 1, 2, ... of a state; normal: those that are not faults.
    harm: the direction of change that is a fault.
    interval: seconds between two readings of our own collectors; None: every reading.
    wraps: whether a counter wraps by design, at a value that differs by device; a wrap is not a reset.
    """

    name: str
    unit: str
    kind: Kind
    device_class: str
    type: str
    help: str
    source: str = ""
    otel: str = ""
    valid: tuple[float, float] = (-math.inf, math.inf)
    states: tuple[str, ...] = ()
    normal: tuple[str, ...] = ()
    harm: Literal["up", "down", "both"] = "both"
    interval: float | None = None
    wraps: bool = False

    @property
    def column(self) -> str:
        """Name of the SQL column: without the leading class name, other dots as underscores."""
        return column_of(self.name, self.device_class)


def column_of(name: str, device_class: str) -> str:
    """SQL column of signal `name` in the view of its class: gpu.sm_clock -> sm_clock, pump.speed -> pump_speed."""
    return name.removeprefix(f"{device_class}.").replace(".", "_")
