"""False alarms of the likelihood tests of links, by arithmetic, for `fleetpulse detectors explain`.

Lorden, Ann. Math. Stat. 42 (1971): a CUSUM of log-likelihood ratios has at least exp(limit) readings between false
alarms, whatever the two rates are.
"""

from __future__ import annotations

import math

from detectors.base.budget import DAY_S
from detectors.link.error_counts import CHANCE, LENGTH

_NODES = 1000
LINKS = 8  # ports of a node, as in NVIDIA's DGX H100
RULES = "a rule on logged facts: no statistical alarm rate"


def of_sum(limit: float, seconds: float, links: int) -> str:
    """Of a CUSUM that is fed every so many seconds, on so many links of a node."""
    readings = math.exp(limit)
    most = links * _NODES * DAY_S / seconds / readings
    return (
        f"sum at {limit:g}, read every {seconds:g} s: a sound link passes it at most once in {readings:.2g} readings;"
        f" with {links} a node that is at most {most:.2g} alarms per 1,000 node-days for each counter of errors"
    )


def of_window(links: int) -> str:
    """Of the window beside the sum: as many chances as it is long, each as often as there are errors in it."""
    most = links * _NODES * DAY_S / LENGTH * CHANCE
    return (
        f"window of {LENGTH:g} s: a sound link's errors pass it with a chance of {CHANCE:.0e} each; with {links} a node"
        f" that is at most {most:.2g} alarms per 1,000 node-days for each error that it takes, of which there are four"
        " to six"
    )


def of_trend(z: float, looks: float, ports: int) -> str:
    """Of Mann-Kendall's z, looked at so many times a day: normal without a trend, one-sided."""
    chance = math.erfc(z / math.sqrt(2)) / 2
    most = ports * _NODES * looks * chance
    return (
        f"trend at z > {z:g}: chance {chance:.1e} a look, {looks:g} looks a day; with {ports} ports a node that is at"
        f" most {most:.2g} tickets per 1,000 node-days, of which slope, level and peers leave a part"
    )
