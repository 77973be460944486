"""Instruments that do not tell the truth: what they say in the place of what is."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.sim.effects import Tamper
from agents.sim.physics.noise import Floats


def tampered(values: NDArray[Any], tamper: Tamper, held: NDArray[np.float64]) -> NDArray[Any]:
    """A column as it is read; `held` keeps by number of the fault at what reading an instrument stands still."""
    out = values.copy()
    true = out[tamper.when, tamper.device]
    if tamper.hold is not None and np.isnan(held[tamper.hold]):
        known = true[np.isfinite(true)]
        held[tamper.hold] = known[0] if len(known) else np.nan
    said = true if tamper.hold is None else np.full_like(true, held[tamper.hold])
    out[tamper.when, tamper.device] = tamper.change(said)
    return out


def grain(signal: str, values: Floats) -> Floats:
    """Values in the steps in which the instrument of a signal tells them: GPUs give whole degrees and watts."""
    return np.rint(values) if signal.startswith("gpu.") else values
