"""False alarm rates of the likelihood tests of links, in words, for `fleetpulse detectors explain`.

Lorden, Ann. Math. Stat. 42 (1971): a CUSUM of log-likelihood ratios has at least exp(limit) readings between false
alarms, whatever the two rates are.
"""

from __future__ import annotations

import math

from detectors.base.budget import DAY_S
from detectors.link.error_counts import WINDOW_CHANCE, WINDOW_S

_NODES = 1000
PORTS_PER_NODE = 8  # as in NVIDIA's DGX H100
RULE = "a rule on logged facts: no statistical alarm rate"


def describe_cusum_rate(limit: float, seconds: float, links: int) -> str:
    """Returns the rate of a CUSUM that is updated every `seconds`, with so many links on a node."""
    readings = math.exp(limit)
    most = links * _NODES * DAY_S / seconds / readings
    return (
        f"sum at {limit:g}, updated every {seconds:g} s: a healthy link exceeds it at most once in {readings:.2g}"
        f" readings; with {links} per node at most {most:.2g} alarms per 1,000 node-days for each error counter"
    )


def describe_window_rate(links: int) -> str:
    """Returns the rate of the sliding window: one chance per window length for each error in it."""
    most = links * _NODES * DAY_S / WINDOW_S * WINDOW_CHANCE
    return (
        f"window of {WINDOW_S:g} s: the errors of a healthy link exceed it with probability {WINDOW_CHANCE:.0e}; with"
        f" {links} per node at most {most:.2g} alarms per 1,000 node-days for each error required, which are 4 to 6"
    )


def describe_trend_rate(z: float, checks_per_day: float, ports: int) -> str:
    """Returns the rate of a one-sided Mann-Kendall test, whose z is normal where there is no trend."""
    chance = math.erfc(z / math.sqrt(2)) / 2
    most = ports * _NODES * checks_per_day * chance
    return (
        f"trend at z > {z:g}: probability {chance:.1e} per check, {checks_per_day:g} checks a day; with {ports} ports"
        f" per node at most {most:.2g} tickets per 1,000 node-days before slope, level and peers are checked"
    )
