"""What one check of `fleetpulse doctor` found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Check:
    """What one check found. `unreachable` makes the command end with 3, any other fail with 1; info is no judgement."""

    name: str
    state: Literal["ok", "info", "warn", "fail"]
    found: str
    meaning: str = ""
    mend: str = ""
    unreachable: bool = False
