"""An optic that loses 0.6 decades a day from 3e-7 on, by the hour, among fifteen of its kind."""

from __future__ import annotations

import numpy as np

from detectors.link.link_optic import LinkOptic
from tests.detectors.cases.case import Case, Instant
from tests.detectors.cases.link import GUILTY, PORTS, topology

FAULT, TICKS, BITS = 60, 180, 1e15
WANDER = 0.03  # decades, of healthy ports from hour to hour


def levels(broken: bool) -> np.ndarray:
    """(TICKS, 16) log10 of the raw BER of each hour."""
    rng = np.random.default_rng(3)
    found = -7.5 + 0.4 * rng.standard_normal(16) + WANDER * rng.standard_normal((TICKS, 16))
    if broken:
        hours = np.arange(TICKS - FAULT)
        found[FAULT:, GUILTY] = -6.5 + 0.6 * hours / 24 + WANDER * rng.standard_normal(len(hours))
    return found


CORRECTED = {broken: np.cumsum(np.floor(BITS * 10 ** levels(broken)), axis=0) for broken in (False, True)}


def instant(tick: int, broken: bool, rng: np.random.Generator) -> Instant:
    # the hours before the fault are the same with and without it
    counted = CORRECTED[broken] if broken else CORRECTED[False]
    hour = min(tick, TICKS - 1)
    values = {
        "nic.phy_bits": np.full(16, 1e16 + BITS * tick),
        "nic.phy_corrected_bits": counted[hour] + max(0, tick - hour) * BITS * 10**-7.5,
        "nic.module_temperature": 47.0 + rng.standard_normal(16),
        "nic.rx_power_min": 1.2 + 0.02 * rng.standard_normal(16),
        "nic.state": np.ones(16),
    }
    return {"nic": values}, []


CASE = Case(
    *(LinkOptic, {"nic": PORTS}, topology, instant, frozenset({PORTS[GUILTY]}), "ticket", FAULT, TICKS),
    step=3600,
)
