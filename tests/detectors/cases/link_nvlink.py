"""An NVLink with ten CRC errors per second, and replays of half of them."""

from __future__ import annotations

import numpy as np

from detectors.link.link_nvlink import LinkNvlink
from pipeline.model.topology import Topology
from tests.detectors.cases.case import Case, Instant

GPUS = tuple(f"gpu:n{n}.{g}" for n in range(2) for g in range(4))
LINKS = tuple(f"nvlink:{gpu[4:]}.{link}" for gpu in GPUS for link in range(2))
FAULT, GUILTY = 60, 5


def topology() -> Topology:
    """Two nodes of four GPUs with two links each."""
    parents: dict[str, list[str]] = {f"node:n{n}": ["rack:r1"] for n in range(2)}
    parents |= {gpu: [f"node:{gpu[4:6]}"] for gpu in GPUS}
    return Topology({**parents, **{link: [f"gpu:{link[7:11]}", f"node:{link[7:9]}"] for link in LINKS}})


def values(tick: int, errors: float = 0.0, link: int = GUILTY) -> dict[str, np.ndarray]:
    """Counters, state and speed of all links; one has had `errors`."""
    crc, again = np.full(len(LINKS), 3.0), np.full(len(LINKS), 1.0)
    crc[link] += errors
    again[link] += errors // 2
    return {
        "nvlink.state": np.ones(len(LINKS)),
        "nvlink.speed": np.full(len(LINKS), 200_000.0),
        "nvlink.crc_errors": crc,
        "nvlink.replay_errors": again,
        "nvlink.recovery_errors": np.zeros(len(LINKS)),
    }


def instant(tick: int, broken: bool, rng: np.random.Generator) -> Instant:
    return {"nvlink": values(tick, 100.0 * (tick - FAULT + 1) if broken else 0.0)}, []


CASE = Case(LinkNvlink, {"nvlink": LINKS}, topology, instant, frozenset({LINKS[GUILTY]}))
