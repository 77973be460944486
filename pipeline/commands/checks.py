"""The result of one check of `fleetpulse doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check. `unreachable` gives exit code 3, any other `fail` 1; `info` has no effect.

    is_cause: whether other checks fail because of it, so that it is to be mended first.
    """

    name: str
    state: Literal["ok", "info", "warn", "fail"]
    found: str
    meaning: str = ""
    fix: str = ""
    unreachable: bool = False
    is_cause: bool = False
