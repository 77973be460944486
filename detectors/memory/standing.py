"""Where a GPU's counters stand, and its flags, as far as a reading of them can be believed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from detectors.base.counters import says_nothing
from detectors.memory.growth import Growth
from pipeline.records import Frame

_COUNTERS = ("gpu.sram_corrected", "gpu.rows_corrected", "gpu.rows_uncorrected")
_FLAGS = ("gpu.rows_pending", "gpu.rows_failed", "gpu.sram_threshold", "gpu.banks_none", "gpu.banks_low")


@dataclass
class Standing:
    """Readings that are judged by where they stand, not by their growth; a part()."""

    growth: Growth = field(default_factory=Growth)

    def read(self, frame: Frame) -> Frame:
        """The frame, with NaN for readings that say nothing and the level before for a counter that may have dipped."""
        values = dict(frame.values)
        levels = self.growth.levels(frame, _COUNTERS, frame["gpu.generation"])
        values.update((name, level) for name, level in zip(_COUNTERS, levels, strict=True) if name in values)
        for name in _FLAGS:
            if name in values and (odd := says_nothing(values[name])).any():
                values[name] = np.where(odd, np.nan, values[name])
        return replace(frame, values=values)

    def snapshot(self) -> dict[str, Any]:
        return {"growth": self.growth.snapshot()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.growth.restore(state["growth"])
