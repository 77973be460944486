"""Error counters of ports: a CUSUM over all errors, and a count of those within five minutes.

The CUSUM adds log-likelihood ratios of the faulty against the healthy rate: Poisson, or negative binomial as far as
errors come in bunches on the whole fabric. A CUSUM is the quickest test on the mean (Moustakides, Ann. Stat. 14, 1986);
the most likely to be in time for a given deadline is the count within it (Neyman and Pearson, 1933; as a sliding
window: Naus, J. Am. Stat. Assoc. 77, 1982). At a BER of 1e-13 and 400 Gb/s the sum at `limit` 21 over links at 1e-15
needs eight errors in 300 s, the window six: 0.976 of such links page within 300 s instead of 0.946, and with four
errors on a fabric at 1e-16 0.997.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detectors.base.state import State, memory, notes, part, parts
from detectors.link.counters import CounterReadings, Indices, is_saturated
from pipeline.model.records import SECOND

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
PHYSICAL = (
    *("nic.symbol_errors", "nic.phy_symbol_errors", "nic.crc_errors", "nic.phy_crc_errors"),
    *("nic.integrity_errors", "nic.link_recoveries"),
)
"""Errors left after correction, counted by the receiver of the port: the load of the network causes none of them."""
PACKETS = ("nic.port_rx_errors",)
"""Packets received with an error: damaged ones, but also those for which there was no buffer (IBTA 16.1.3.5)."""
WINDOW_S = 300.0
"""s: a BER of 1e-13 is to be found within it. Chosen."""
WINDOW_CHANCE = 5e-9
"""Probability of as many errors in one window of a healthy link. 10,000 links have 2.9 million windows a day, and a
sliding one alarms at most as many times more often as it holds errors: below 0.1 a day."""
_CAP_S = 30.0  # s over which errors are capped: the interval at which fabrics are polled
_DAY_S = 86_400.0
_PRIOR_READINGS = 3e5
"""Readings at the healthy rate and without bunches that are assumed at first: an hour of 830 ports. Chosen."""
_MIN_SHARE = 0.1
"""Lowest rate of a fabric as a share of the healthy rate, however few errors it shows: a link with ten times the errors
of the rest, but fewer than a healthy one may have, would page once in five years. Chosen."""
_KNOWN_S = 600.0
"""s for which some port must report a counter before its errors alone page: until then it is unknown whether they come
in bunches here. Chosen."""
_MAX_OVERDISPERSION = 64.0  # above it a BER of 1e-12 would no longer be found within 90 s. Chosen
_UNKNOWN_MBITS, _MIN_MBITS, _MAX_MBITS = 400_000.0, 100_000.0, 10_000_000.0
"""Speed assumed for a port that does not report it; the lowest that counts (on slower links five errors an hour, some
from plugging, would be a fault); and what no port has. Chosen."""


def log_likelihood_ratio(count: Floats, healthy: Floats, faulty: Floats, overdispersion: float | Floats) -> Floats:
    """Returns ln of P(count | faulty) / P(count | healthy) for means of `healthy` and `faulty` errors.

    overdispersion: a of the negative binomial, whose variance is mean * (1 + a * mean); at most 1e-6: Poisson.
    """
    a = np.maximum(overdispersion, 1e-6)
    gain = count * np.log(faulty / healthy)
    return np.asarray(gain - (count + 1 / a) * (np.log1p(a * faulty) - np.log1p(a * healthy)))


def probability_at_least(count: Floats, mean: Floats, overdispersion: float) -> Floats:
    """Returns P(`count` errors or more), term by term: Poisson, or negative binomial as in `log_likelihood_ratio`."""
    a = overdispersion
    size = np.inf if a < 1e-6 else 1 / a
    odds = mean if np.isinf(size) else a * mean / (1 + a * mean)
    term = np.exp(-mean) if np.isinf(size) else np.exp(-size * np.log1p(a * mean))
    below = np.zeros(len(count))
    for k in range(int(np.ceil(count.max(initial=0)))):
        below += np.where(k < count, term, 0.0)
        term = term * odds * (1.0 if np.isinf(size) else size + k) / (k + 1)
    return np.asarray(np.maximum(1.0 - below, 0.0))


@dataclass
class ErrorMoments(State):
    """How often one counter of all ports has errors, and how much in bunches: moments over about the last day."""

    readings: float = notes(float)
    first: float = notes(float)
    second: float = notes(float)

    def add_readings(self, readings: int, seconds: float) -> None:
        """Adds the readings of an instant, `seconds` after the one before, without their errors."""
        keep = math.exp(-min(max(seconds, 0.0), _DAY_S) / _DAY_S)
        self.readings = self.readings * keep + readings
        self.first, self.second = self.first * keep, self.second * keep

    def add_errors(self, first: float, second: float) -> None:
        """Adds errors and their squares."""
        self.first, self.second = self.first + first, self.second + second

    def healthy_share(self, healthy: float) -> float:
        """Returns the rate of this fabric as a share of the mean `healthy` of a reading: from _MIN_SHARE to 1."""
        mean = (self.first + _PRIOR_READINGS * healthy) / (self.readings + _PRIOR_READINGS)
        return min(max(mean / healthy, _MIN_SHARE), 1.0)

    def overdispersion(self, mean: float) -> float:
        """Returns a of the negative binomial: 0 where errors are as even as chance makes them, bounded.

        With far fewer errors than `mean`, the variance beyond Poisson's is expressed in units of `mean`: the
        distribution is then as wide at the healthy rate as the errors seen.
        """
        return float(self.overdispersion_with(np.zeros(1), np.zeros(1), mean)[0])

    def overdispersion_with(self, first: Floats, second: Floats, mean: float) -> Floats:
        """Returns the same with other errors and their squares added, once for each of them."""
        readings = self.readings + _PRIOR_READINGS
        seen, square = (self.first + first) / readings, (self.second + second) / readings
        beyond = np.maximum(square - seen * seen - seen, 0.0)
        return np.asarray(np.minimum(beyond / np.maximum(seen, max(mean, 1e-12)) ** 2, _MAX_OVERDISPERSION))


@dataclass
class ErrorWindow(State):
    """Errors of each port within the last WINDOW_S; costs nothing where there are none.

    recent:  (N,) capped errors within the window.
    batches: its readings: begin, end, ports and their errors; oldest first.
    """

    recent: Floats = memory(0.0)
    batches: list[tuple[int, int, Indices, Floats]] = notes(list)

    def add_errors(self, at: Indices, errors: Floats, size: int, time: int, seconds: float) -> None:
        """Adds the errors of a reading that began `seconds` ago, and drops readings that are too old."""
        self.grow(size)
        began = time - int(seconds * SECOND)
        while self.batches and not time - WINDOW_S * SECOND <= self.batches[0][0] <= began:
            _, _, old, counted = self.batches.pop(0)
            self.recent[old] -= counted
        if len(at) and began >= time - WINDOW_S * SECOND:
            self.batches.append((began, time, at.copy(), errors.copy()))
            self.recent[at] += errors

    def ports_beyond_chance(self, at: Indices, mean: Floats, overdispersion: float, least: float) -> Indices:
        """Returns those of `at` with more than `least` errors, and more than chance makes of `mean` in the window."""
        mine = self.recent[at]
        many = np.flatnonzero(mine > least)
        if not len(many):
            return at[:0]
        return at[many[probability_at_least(mine[many], mean[many], overdispersion) < WINDOW_CHANCE]]

    def first_error_time(self, port: int) -> int:
        """Returns when the first reading with errors of a port began; it must have some."""
        return min(began for began, _, at, _ in self.batches if port in at)


@dataclass
class ErrorCounter(State):
    """One counter of all ports, and the evidence against each of them."""

    readings: CounterReadings = part(CounterReadings)
    moments: ErrorMoments = part(ErrorMoments)
    window: ErrorWindow = part(ErrorWindow)
    sum: Floats = memory(0.0)  # log-likelihood ratio, at least 0
    since: Indices = memory(0, np.int64)  # when it last left zero: the onset
    total: Floats = memory(0.0)  # errors since the onset, not capped
    used: Floats = memory(0.0)  # errors that have counted in the present 30 s
    opened: Indices = memory(0, np.int64)  # when these began
    first: Floats = memory(0.0)  # moments of its readings since the onset
    second: Floats = memory(0.0)
    bad: Bools = memory(False, np.bool_)  # it has been above the limit since the onset
    judged: int = notes(int)  # time of the newest judgement
    read: float = notes(float)  # s for which any port has reported the counter

    def cap_errors(self, at: Indices, count: Floats, time: int, cap: float) -> Floats:
        """Returns the errors of some ports, at most `cap` in 30 s from the first on."""
        over = (time - self.opened[at] >= _CAP_S * SECOND) | (time < self.opened[at])
        fresh = at[over]
        self.opened[fresh], self.used[fresh] = time, 0.0
        capped = np.minimum(count, cap - self.used[at])
        self.used[at] += capped
        return np.asarray(capped)

    def max_sum(self, limit: float) -> float:
        """Returns the highest sum: no page before the counter was read for _KNOWN_S."""
        return limit if self.read < _KNOWN_S else 2 * limit

    def open_moments(self, active: Indices) -> ErrorMoments:
        """Returns the moments with episodes that are still open: bunches show before the sums of their ports are 0."""
        sound, found = active[~self.bad[active]], ErrorMoments()
        found.readings = self.moments.readings
        found.first = self.moments.first + self.first[sound].sum()
        found.second = self.moments.second + self.second[sound].sum()
        return found

    def overdispersion_of_others(self, active: Indices, mean: float) -> Floats:
        """Returns for each port the overdispersion without its own errors: its own bursts must not excuse it."""
        sound = ~self.bad[active]
        first, second = self.first[active] * sound, self.second[active] * sound
        return self.moments.overdispersion_with(first.sum() - first, second.sum() - second, mean)

    def end_episodes(self, over: Indices) -> None:
        """Ends episodes; errors of ports that never were above the limit count as those of healthy ones."""
        sound = over[~self.bad[over]]
        self.moments.add_errors(float(self.first[sound].sum()), float(self.second[sound].sum()))
        self.total[over] = self.first[over] = self.second[over] = 0.0
        self.bad[over] = False


@dataclass(frozen=True, slots=True)
class ErrorLimits:
    """Bit error rates of healthy and faulty links, the limit of the sum, and the most errors that count in 30 s."""

    healthy: float
    faulty: float
    limit: float
    cap: float


@dataclass
class PortErrors(State):
    """All error counters of all ports."""

    counters: dict[str, ErrorCounter] = parts(ErrorCounter)
    mbits: Floats = memory(np.nan)

    def update_speeds(self, speed: Floats) -> None:
        """Reads the speeds (Mbit/s, NaN) of ports; a port that is down keeps its last one."""
        self.grow(len(speed))
        new = np.flatnonzero(speed != self.mbits[: len(speed)])
        new = new[(speed[new] > 0) & (speed[new] < _MAX_MBITS)]
        self.mbits[new] = speed[new]

    def bits_per_second(self, at: Indices) -> Floats:
        """Returns the speed of some ports."""
        speed = self.mbits[at]
        return np.asarray(np.maximum(np.where(np.isnan(speed), _UNKNOWN_MBITS, speed), _MIN_MBITS) * 1e6)

    def measure_growth(self, signal: str, now: Floats, time: int, restarted: Indices) -> tuple[Indices, Floats]:
        """Returns (ports, growth) of a counter where it grew; nothing is judged yet."""
        counter = self.counters.setdefault(signal, ErrorCounter())
        counter.grow(len(now))
        at, growth, seconds = counter.readings.measure_growth(now, time, restarted)
        fresh = counter.total[at] == 0
        counter.since[at[fresh]] = time - (seconds[fresh] * SECOND).astype(np.int64)  # since the last reading
        return at, growth

    def update_sums(self, signal: str, at: Indices, growth: Floats, up: Bools, time: int, limits: ErrorLimits) -> None:
        """Adds an instant: `growth` errors at the ports `at`, none at others that are up and report the counter."""
        counter = self.counters[signal]
        seconds = (time - counter.judged) / SECOND if counter.judged else 0.0
        readings = int(np.count_nonzero(counter.readings.reported(len(up)) & up))
        counter.judged = time
        counter.moments.add_readings(readings, seconds)
        counter.read += max(seconds, 0.0) if readings else 0.0
        active = np.flatnonzero(counter.sum)
        if not len(at) and not len(active) and not counter.window.batches:
            return
        capped = counter.cap_errors(at, growth, time, limits.cap)
        counter.window.add_errors(at, capped, len(counter.sum), time, max(seconds, 0.0))
        errors = np.zeros(len(counter.sum))
        errors[at] = capped
        active = np.union1d(active, at)
        counter.total[at] += growth
        counter.first[at] += capped
        counter.second[at] += capped**2
        known = counter.open_moments(active)
        if seconds > 0 and len(active):
            self._update_cusum(counter, known, active, errors[active], seconds, limits)
        if seconds > 0 and len(at):
            self._apply_window(counter, known, at, seconds, limits)
        counter.sum[active] = np.minimum(counter.sum[active], counter.max_sum(limits.limit))
        counter.end_episodes(active[counter.sum[active] <= 0])

    def _update_cusum(
        self, counter: ErrorCounter, known: ErrorMoments, at: Indices, errors: Floats, seconds: float, to: ErrorLimits
    ) -> None:
        bits = self.bits_per_second(at) * seconds
        usual = float(bits.mean()) * to.healthy
        share = known.healthy_share(usual)
        others = counter.overdispersion_of_others(at, usual * share)
        ratio = log_likelihood_ratio(errors, bits * to.healthy * share, bits * to.faulty, others)
        counter.sum[at] = np.clip(counter.sum[at] + ratio, 0.0, 2 * to.limit)
        counter.bad[at] |= counter.sum[at] > to.limit

    def _apply_window(
        self, counter: ErrorCounter, known: ErrorMoments, at: Indices, seconds: float, limits: ErrorLimits
    ) -> None:
        """Raises above the limit the sums of ports with more errors in the window than chance makes."""
        bits = self.bits_per_second(at)
        share = known.healthy_share(float(bits.mean()) * seconds * limits.healthy)
        mean = bits * limits.healthy * share
        # readings are bunched one by one: the overdispersion of their sum is smaller by their number
        overdispersion = known.overdispersion(float(mean.mean()) * seconds) * seconds / WINDOW_S
        raised = counter.window.ports_beyond_chance(at, mean * WINDOW_S, overdispersion, limits.cap)
        counter.sum[raised] = np.maximum(counter.sum[raised], limits.limit + 1)
        counter.bad[raised] = True
        for port in raised[counter.window.recent[raised] > counter.total[raised]].tolist():
            counter.since[port], counter.total[port] = (
                counter.window.first_error_time(port),
                counter.window.recent[port],
            )

    def sums_by_counter(self, port: int) -> dict[str, float]:
        """Returns the sums of a port that are above 0, by counter."""
        return {s: float(c.sum[port]) for s, c in self.counters.items() if port < len(c.sum) and c.sum[port] > 0}

    def ports_above(self, limit: float) -> Indices:
        """Returns the ports with a sum above `limit`."""
        found = [np.flatnonzero(c.sum > limit) for c in self.counters.values()]
        return np.unique(np.concatenate(found)) if found else np.empty(0, np.int64)

    def confirmed(self, at: Indices) -> Bools:
        """Returns which of some ports have been above the limit since their onset, reported or not."""
        found = np.zeros(len(at), np.bool_)
        for counter in (c for c in self.counters.values() if len(at) and at.max() < len(c.bad)):
            found |= counter.bad[at]
        return found

    def onsets(self, at: Indices, limit: float) -> Indices:
        """Returns when the errors of some ports began, of the counters with a sum above `limit`."""
        found = np.full(len(at), np.iinfo(np.int64).max)
        for counter in (c for c in self.counters.values() if len(at) and at.max() < len(c.sum)):
            found = np.where(counter.sum[at] > limit, np.minimum(found, counter.since[at]), found)
        return found

    def saturated_counters(self, port: int, values: Mapping[str, Floats]) -> list[str]:
        """Returns the counters of a port that stand at the top of their registers and no longer count."""
        return [s for s in self.counters if s in values and is_saturated(port, values[s])]
