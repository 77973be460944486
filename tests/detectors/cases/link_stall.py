"""A port without traffic and with failed completions, beside busy ports; all were busy before."""

from __future__ import annotations

import numpy as np

from detectors.link.link_stall import LinkStall
from tests.detectors.cases.case import Case, Instant
from tests.detectors.cases.link import FAULT, GUILTY, PORTS, topology


def instant(tick: int, broken: bool, rng: np.random.Generator) -> Instant:
    moved = 1e12 + 1e10 * tick + np.floor(1e8 * rng.random(16))
    failed = np.zeros(16)
    if broken:
        moved[GUILTY] = 1e12 + 1e10 * FAULT + 2e9
        failed[GUILTY] = 30.0 * (tick - FAULT + 1)
    values = {
        "nic.state": np.ones(16),
        "nic.rx_bytes": moved,
        "nic.tx_bytes": moved + 1e6,
        "nic.req_cqe_errors": failed,
    }
    return {"nic": values}, []


CASE = Case(LinkStall, {"nic": PORTS}, topology, instant, frozenset({PORTS[GUILTY]}))
