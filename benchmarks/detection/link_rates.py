"""Measures how soon a link of a given bit error rate is paged, and how often a healthy one is: counters made by
Poisson.

    python -m benchmarks.detection.link_rates [--links 200] [--days 2] [--seed 0]

Post-FEC symbol errors of 400 Gb/s links, read every 10 s. Recall and delay go through the detector with all its rules,
false alarms through its error counting alone. Figures are simulated: errors of real links also come in bursts, which
the negative binomial models.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detectors.link.error_counts import ErrorCounter, ErrorLimits, PortErrors
from detectors.link.link import Link
from pipeline.model.records import SECOND, Frame
from pipeline.model.topology import Topology

SPEED = 400_000.0  # Mbit/s
INTERVAL = 10  # s; the default of [pipeline] frame
START = 1_790_000_000 * SECOND
DAY = 86_400 // INTERVAL  # ticks
_WARM = 60  # ticks before the onset: for ten minutes errors alone do not page
_FABRIC = 50  # healthy links for each bad one
_AT_ONCE = 100_000  # links whose false alarms are counted in parallel
_SIGNAL = "nic.symbol_errors"
DETECTED, SOUND = {1e-12: 90.0, 1e-13: 300.0}, (1e-16, 1e-15)
"""BER -> s within which it must be paged; and the BERs of healthy links."""
BUNCHED = (100.0, 1000.0)
"""a of fabrics whose errors come in bunches: at 1e-15 1.2 and 2.5 errors in a burst, on the mean. Chosen."""
REPORTING = 0.1
"""Share of the ports of a mixed fleet that report the counter; the others are up and report others. Chosen."""
USUAL = 1e-16
LEARNT: tuple[float | None, ...] = (None, 1e-15, USUAL)
"""BER that the detector has learned when a link fails: none, or that of the fabric over a day; the last is usual."""


@dataclass(frozen=True)
class Delays:
    """Seconds from the onset to the page of each bad link; NaN: not within the measured time."""

    ber: float
    delays: NDArray[np.float64]
    learnt: float | None = None

    @property
    def recall(self) -> float:
        """Returns the share paged within the required time."""
        return float(np.mean(self.delays <= DETECTED[self.ber]))

    def as_text(self) -> str:
        q = np.nanquantile(self.delays, [0.5, 0.9, 0.99])
        within = f"{self.recall:.4f} of {len(self.delays)} within {DETECTED[self.ber]:.0f} s"
        after = "from a cold start" if self.learnt is None else f"after a day at {self.learnt:g}"
        return f"BER {self.ber:g} {after}: {within}; delay median {q[0]:.0f} s, p90 {q[1]:.0f} s, p99 {q[2]:.0f} s"


@dataclass(frozen=True)
class Alarms:
    """False alarms of healthy links."""

    ber: float
    count: int
    link_days: float
    bunched: float = 0.0
    reporting: float = 1.0

    def as_text(self) -> str:
        rate = self.count / self.link_days * 10_000
        most = (self.count + 3.0) / self.link_days * 10_000  # rule of three: 95 % limit where there is none
        evenly = f", in bunches (a = {self.bunched:g})" if self.bunched else ""
        evenly += f", reported by {self.reporting:g} of the ports" if self.reporting < 1 else ""
        found = f"{self.count} false alarms in {self.link_days:,.0f} link-days"
        return f"BER {self.ber:g}{evenly}: {found}: {rate:.3f} per 10,000 links and day (about {most:.2f} at most)"


def per_second(ber: float) -> float:
    """Returns the errors per second of a link."""
    return ber * SPEED * 1e6


def delays(ber: float, links: int, seed: int, learnt: float | None = USUAL) -> Delays:
    """Bad links in a large healthy fabric, each from a random time within a tick.

    learnt: the BER of the healthy fabric that the detector has watched for a day before; None: it has just been
    started.
    """
    rng, size = np.random.default_rng([seed, round(-np.log10(ber))]), links * (_FABRIC + 1)
    names = tuple(f"port:n{i}.p0" for i in range(size))
    topology = Topology({name: (f"leaf:l{i % (size // 64 + 1)}",) for i, name in enumerate(names)})
    place = {name: i for i, name in enumerate(names[:links])}
    link, total, late = _started(rng, size, learnt), np.zeros(size), rng.uniform(0, INTERVAL, links)
    found = np.full(links, np.nan)
    for tick in range(_WARM + 2 * int(DETECTED[ber]) // INTERVAL):
        total += rng.poisson(per_second(learnt or USUAL) * INTERVAL, size)
        if tick >= _WARM:
            total[:links] += rng.poisson(per_second(ber) * (INTERVAL - late * (tick == _WARM)))
        values = {"nic.state": np.ones(size), "nic.speed": np.full(size, SPEED), _SIGNAL: total.copy()}
        frame = Frame(START + tick * INTERVAL * SECOND, "nic", names, values, topology)
        for f in link.observe({"nic": frame}):
            if f.level == "page" and (i := place.get(f.entity, -1)) >= 0 and np.isnan(found[i]):
                # a tick contains the counts of the seconds before it
                found[i] = (tick - _WARM + 1) * INTERVAL - late[i]
    return Delays(ber, found, learnt)


def _started(rng: np.random.Generator, size: int, learnt: float | None) -> Link:
    """Returns a detector that has watched a healthy fabric of that size for a day if it has learned a BER."""
    link, counter = Link(), ErrorCounter()
    if learnt is None:
        return link
    counter.moments.add_readings(size * DAY, 0.0)
    counter.read = float(DAY * INTERVAL)
    counter.usual.grow(size)
    counter.usual.whole[:] = SPEED * 1e6 * DAY * INTERVAL
    errors = float(rng.poisson(per_second(learnt) * INTERVAL * size * DAY))
    counter.moments.add_errors(errors, errors)
    link.errors.counters[_SIGNAL] = counter
    return link


def alarms(ber: float, days: float, seed: int, bunched: float = 0.0, reporting: float = 1.0) -> Alarms:
    """Sound links side by side from a cold start; an alarm is a link whose sum, of minutes or of hours, passes its
    limit.

    reporting: share of all ports, which are up, that report the counter; only these count as link-days.
    bunched: a of a negative binomial, whose variance is mean * (1 + a * mean): logarithmic bursts that come at random.
    """
    mean = per_second(ber) * INTERVAL
    bursts = np.log1p(bunched * mean) / bunched if bunched else mean
    rng, size, link = np.random.default_rng([seed, 99]), round(_AT_ONCE * reporting), Link()
    limits = ErrorLimits(link.healthy_ber, link.faulty_ber, link.limit, link.error_cap)
    errors, total, none = PortErrors(), np.zeros(size), np.empty(0, np.int64)
    errors.update_speeds(np.full(_AT_ONCE, SPEED))
    count, above, up = 0, none, np.ones(_AT_ONCE, np.bool_)
    silent = np.full(_AT_ONCE - size, np.nan)
    ticks = max(1, round(days * DAY))
    for tick in range(ticks):
        erring = rng.integers(0, size, rng.poisson(bursts * size))
        many = rng.logseries(bunched * mean / (1 + bunched * mean), len(erring)) if bunched else 1
        np.add.at(total, erring, many)
        time = START + tick * INTERVAL * SECOND
        at, growth = errors.measure_growth(_SIGNAL, np.concatenate([total, silent]), time, none)
        errors.update_sums(_SIGNAL, at, growth, up, time, limits)
        now = np.union1d(errors.ports_above(link.limit), errors.decaying_ports())
        count += len(np.setdiff1d(now, above))
        above = now
    return Alarms(ber, count, size * ticks / DAY, bunched, reporting)


def figures(links: int, days: float, seed: int) -> Iterator[Delays | Alarms]:
    """Runs all measurements."""
    for ber in DETECTED:
        for learnt in LEARNT:
            yield delays(ber, links, seed, learnt)
    for ber in SOUND:
        for bunched in (0.0, *BUNCHED):
            yield alarms(ber, days, seed, bunched)
    yield alarms(max(SOUND), days, seed, reporting=REPORTING)


def main() -> int:
    parser = argparse.ArgumentParser(description="recall, delay and false alarms of bit error rates")
    parser.add_argument("--links", type=int, default=200, help="bad links of each rate")
    parser.add_argument("--days", type=float, default=2.0, help=f"of {_AT_ONCE:,} healthy links")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for figure in figures(options.links, options.days, options.seed):
        print(figure.as_text(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
