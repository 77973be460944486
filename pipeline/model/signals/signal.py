"""What one signal is: a named measured quantity `CLASS.NAME` with a unit (UCUM, as in OpenTelemetry), kind and class.

Its wire type is a NumPy type code; a missing value is NaN in floats and the highest value in unsigned integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter", "state"]
TYPES = ("u1", "u2", "u4", "u8", "f4", "f8")
HEALTH = ("ok", "warning", "critical", "unavailable", "absent", "standby", "disabled")
"""States of a part as its BMC has them: Redfish Status.Health and, where that is not bad, Status.State."""
WELL = ("ok", "absent", "standby", "disabled")
"""States of HEALTH that are no fault: a bay may be empty, and a spare may stand by."""


@dataclass(frozen=True, slots=True)
class Signal:
    """One measured quantity. `valid` is inclusive; what lies outside is a broken reading and counts as missing.

    interval: seconds between two looks of our own collectors, where that is not every look.
    wraps: whether a counter starts again by design, at a value that differs from device to device: no reset then.
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
        """Name of the SQL column: the class is dropped from the front, other dots become underscores."""
        return column_of(self.name, self.device_class)


def column_of(name: str, device_class: str) -> str:
    """SQL column of signal `name` in the view of its class: gpu.sm_clock -> sm_clock, pump.speed -> pump_speed."""
    return name.removeprefix(f"{device_class}.").replace(".", "_")
