"""Error counters of ports: a CUSUM over all errors, and a count of those within five minutes.

The CUSUM adds log-likelihood ratios of the faulty against the healthy rate: Poisson, or negative binomial as far as
errors come in bunches on the whole fabric. A CUSUM is the quickest test on the mean (Moustakides, Ann. Stat. 14, 1986);
the most likely to be in time for a given deadline is the count within it (Neyman and Pearson, 1933; as a sliding
window: Naus, J. Am. Stat. Assoc. 77, 1982). At a BER of 1e-13 and 400 Gb/s the sum at `limit` 21 over links at 1e-15
needs eight errors in 300 s, the window six: 0.976 of such links page within 300 s instead of 0.946, and with four
errors on a fabric at 1e-16 0.997.

A third sum, of minutes with errors against ten times the healthy rate, finds links that decay slowly: at 1e-14, 14
errors an hour, in tens of minutes, as the 125 min window of UFM's PDR plugin does for isolation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detectors.base.state import State, memory, notes, part, parts, piece_of
from detectors.link.counters import CounterReadings, Indices, UsualErrors, is_saturated
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
_SLOW_RATIO = 10.0
"""Times the healthy rate that is a decaying link's; and the least ratio of a faulty rate to the usual one of a site:
a decade. Chosen."""
SLOW_LIMIT = 18.0
"""Limit of the sum of minutes with errors. Each error of a healthy link begins an excursion above it with a probability
of at most e**-18 * 10: at 1e-15 10,000 links have 3.5e5 errors and so 0.05 tickets a day."""
_YOUNG_S = 7200.0
"""s for which a counter must be read before slow decay is judged: until then most ports of a fabric at 1e-15 have fewer
than three errors, so how they differ is not known. Chosen."""
_LONGEST_S = 600.0  # s without a reading after which the sums of a port end: nothing is known of it. Chosen
_MINUTE = 60 * SECOND
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

    def add_errors(self, at: Indices, errors: Floats, began: Indices, time: int) -> None:
        """Adds the errors of readings that began at `began`, and drops readings that are too old."""
        self.grow(int(at.max(initial=-1)) + 1)
        oldest = time - int(WINDOW_S * SECOND)
        while self.batches and not oldest <= self.batches[0][0] <= time:
            _, _, old, counted = self.batches.pop(0)
            self.recent[old] -= counted
        for begin in np.unique(began[began >= oldest]).tolist():
            mine = began == begin
            self.batches.append((begin, time, at[mine], errors[mine]))
            self.recent[at[mine]] += errors[mine]
        self.batches.sort(key=lambda batch: batch[0])

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
    usual: UsualErrors = part(UsualErrors)
    rates: dict[str, float] = notes(lambda: {"": 0.0})  # speed (Mbit/s), or "" -> usual errors per bit
    exposed: int = notes(int)  # time up to which `usual` knows the bits of all ports
    newest: Indices = memory(0, np.int64)  # when it was last read
    slow: Floats = memory(0.0)  # log-likelihood ratio of minutes with errors
    slow_since: Indices = memory(0, np.int64)
    slow_total: Floats = memory(0.0)  # errors since then
    minute: Indices = memory(0, np.int64)  # when the newest minute that counted began
    judged: int = notes(int)  # time of the newest judgement
    read: float = notes(float)  # s for which any port has reported the counter

    def cap_errors(self, at: Indices, count: Floats, time: int, cap: Floats) -> Floats:
        """Returns the errors of some ports, at most `cap` of each in 30 s from the first on."""
        over = (time - self.opened[at] >= _CAP_S * SECOND) | (time < self.opened[at])
        fresh = at[over]
        self.opened[fresh], self.used[fresh] = time, 0.0
        capped = np.minimum(count, np.maximum(cap - self.used[at], 0.0))
        self.used[at] += capped
        return np.asarray(capped)

    def max_sum(self, limit: float) -> float:
        """Returns the highest sum: no suspect before a minute has shown what is usual here, no page before _KNOWN_S."""
        if self.read >= _KNOWN_S and self.usual.whole.any():
            return 2 * limit
        return limit if self.usual.whole.any() or self.usual.exposure.any() else limit / 2

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
        counter = piece_of(self.counters, signal, ErrorCounter)
        counter.grow(len(now))
        at, growth, seconds = counter.readings.measure_growth(now, time, restarted)
        fresh = counter.total[at] == 0
        counter.since[at[fresh]] = time - (seconds[fresh] * SECOND).astype(np.int64)  # since the last reading
        return at, growth

    def update_sums(
        self,
        signal: str,
        at: Indices,
        growth: Floats,
        up: Bools,
        time: int,
        limits: ErrorLimits,
        young: Bools | None = None,
    ) -> None:
        """Adds an instant: `growth` errors at the ports `at`, none at others that are up and report the counter.

        young: (N,) ports whose errors do not count yet.

        A port that is not read keeps its sums: they change with its next reading, by all the time between.
        """
        counter = self.counters[signal]
        seconds = (time - counter.judged) / SECOND if counter.judged else 0.0
        reported = counter.readings.reported(len(up)) & up
        readings = int(np.count_nonzero(reported))
        counter.judged = time
        counter.moments.add_readings(readings, seconds)
        counter.read += min(max(seconds, 0.0), _LONGEST_S) if readings or counter.read else 0.0
        self._update_usual(counter, up if young is None else up & ~young, time, limits)
        active = np.flatnonzero(counter.sum + counter.slow)
        if len(at) or len(active) or counter.window.batches:
            self._update_active(counter, active, (at, growth), reported, time, limits)
        np.copyto(counter.newest[: len(up)], time, where=reported)

    def _update_active(
        self,
        counter: ErrorCounter,
        active: Indices,
        grew: tuple[Indices, Floats],
        reported: Bools,
        time: int,
        limits: ErrorLimits,
    ) -> None:
        at, growth = grew
        faulty = self.bits_per_second(at) * _SLOW_RATIO * self._usual_rates(counter, at)
        capped = counter.cap_errors(at, growth, time, np.maximum(limits.cap, faulty * _CAP_S))
        counter.window.add_errors(at, capped, np.where(counter.newest[at] > 0, counter.newest[at], time), time)
        errors, whole = np.zeros((2, len(counter.sum)))
        errors[at], whole[at] = capped, growth
        counter.usual.grow(len(errors))
        counter.usual.errors[at] += capped
        active = np.union1d(active, at)
        counter.total[at] += growth
        counter.first[at] += capped
        counter.second[at] += capped**2
        known = counter.open_moments(active)
        away = active[(counter.newest[active] > 0) & (time - counter.newest[active] > _LONGEST_S * SECOND)]
        counter.sum[away] = counter.slow[away] = 0.0
        read = active[(active < len(reported)) & (counter.newest[active] > 0)]
        read = read[reported[read] | (errors[read] > 0)]
        seconds = np.minimum((time - counter.newest[read]) / SECOND, _LONGEST_S)
        read, seconds = read[seconds > 0], seconds[seconds > 0]
        if len(read):
            means = (seconds, *self._mean_errors(counter, known, read, seconds, limits))
            self._update_cusum(counter, known, read, errors[read], means)
            self._update_slow(counter, read, (errors[read], whole[read]), means, time, limits)
            here = np.flatnonzero(errors[read] > 0)
            self._apply_window(counter, known, read[here], (seconds[here], means[1][here]), limits)
            counter.sum[read] = np.minimum(counter.sum[read], 2 * limits.limit)
            counter.bad[read] |= counter.sum[read] > limits.limit
        counter.sum[active] = np.minimum(counter.sum[active], counter.max_sum(limits.limit))
        counter.end_episodes(active[counter.sum[active] <= 0])

    def _update_usual(self, counter: ErrorCounter, up: Bools, time: int, limits: ErrorLimits) -> None:
        """Adds a minute of bits of all ports that report the counter, and measures what is usual at each speed.

        Where that is far more than before, the sums begin again: they were judged by another normal.
        """
        if 0 <= time - counter.exposed < _MINUTE:
            return
        known, size = up & np.isfinite(counter.readings.last[: len(up)]), len(up)
        if not known.any():  # the first minute begins with the first ports whose errors count
            return
        passed = min(max((time - counter.exposed) / SECOND, 0.0), _LONGEST_S) if counter.exposed else 0.0
        counter.exposed = time
        bits = np.where(known, self.bits_per_second(np.arange(size)) * passed, 0.0)
        changed = counter.usual.add(np.empty(0, np.int64), np.empty(0), bits, time)
        if not changed and counter.usual.whole.any():
            return
        before, counter.rates = counter.rates, {"": counter.usual.highest_usual()}
        if counter.usual.past.any():
            speeds = np.unique(self.mbits[:size][known])
            for speed in speeds[np.isfinite(speeds)].tolist():
                counter.rates[f"{speed:g}"] = counter.usual.highest_usual(self.mbits[:size] == speed)
        if any(rate > 2 * max(limits.healthy, before.get(speed, 0.0)) for speed, rate in counter.rates.items()):
            counter.sum[:] = counter.slow[:] = 0.0
            counter.end_episodes(np.flatnonzero(counter.total))

    def _usual_rates(self, counter: ErrorCounter, at: Indices) -> Floats:
        """Returns the highest usual errors per bit at the speed of some ports."""
        return np.array([counter.rates.get(f"{speed:g}", counter.rates[""]) for speed in self.mbits[at].tolist()])

    def _mean_errors(
        self, counter: ErrorCounter, known: ErrorMoments, at: Indices, seconds: Floats, limits: ErrorLimits
    ) -> tuple[Floats, Floats]:
        """Returns the errors per second of some ports if they are healthy, and if they are faulty."""
        bits = self.bits_per_second(at)
        share = known.healthy_share(float((bits * seconds).mean()) * limits.healthy)
        healthy = bits * np.maximum(limits.healthy * share, self._usual_rates(counter, at))
        return healthy, np.maximum(bits * limits.faulty, _SLOW_RATIO * healthy)

    def _update_cusum(
        self,
        counter: ErrorCounter,
        known: ErrorMoments,
        at: Indices,
        errors: Floats,
        means: tuple[Floats, Floats, Floats],
    ) -> None:
        seconds, healthy, faulty = means
        others = counter.overdispersion_of_others(at, float((healthy * seconds).mean()))
        ratio = log_likelihood_ratio(errors, healthy * seconds, faulty * seconds, others)
        counter.sum[at] = np.maximum(counter.sum[at] + ratio, 0.0)

    def _update_slow(
        self,
        counter: ErrorCounter,
        at: Indices,
        errors: tuple[Floats, Floats],
        means: tuple[Floats, Floats, Floats],
        time: int,
        limits: ErrorLimits,
    ) -> None:
        """Adds a minute with errors as one error, however many it has. errors: capped, and all."""
        seconds, healthy, _ = means
        counts = (errors[0] > 0) & ((time - counter.minute[at] >= _MINUTE) | (time < counter.minute[at]))
        counter.minute[at[counts]] = time
        before = counter.slow[at]
        faulty = _SLOW_RATIO * np.maximum(healthy, self.bits_per_second(at) * limits.healthy)
        ratio = counts * np.log(faulty / healthy) - (faulty - healthy) * seconds
        most = 1.25 * SLOW_LIMIT if counter.read >= _YOUNG_S else SLOW_LIMIT / 2
        counter.slow[at] = np.clip(before + ratio, 0.0, most)
        fresh = at[before <= 0]
        counter.slow_since[fresh] = time - (seconds[before <= 0] * SECOND).astype(np.int64)
        counter.slow_total[fresh] = 0.0
        counter.slow_total[at] += errors[1]

    def _apply_window(
        self,
        counter: ErrorCounter,
        known: ErrorMoments,
        at: Indices,
        means: tuple[Floats, Floats],
        limits: ErrorLimits,
    ) -> None:
        """Raises above the limit the sums of ports with more errors in the window than chance makes."""
        if not len(at):
            return
        seconds, healthy = float(means[0].mean()), means[1]
        # readings are bunched one by one: the overdispersion of their sum is smaller by their number
        overdispersion = known.overdispersion(float(healthy.mean()) * seconds) * seconds / WINDOW_S
        # a site's usual rate is no bound: half way, by decades, to the faulty rate chance alone may explain the errors
        usual = healthy > self.bits_per_second(at) * limits.healthy
        most = np.where(usual, np.sqrt(_SLOW_RATIO), 1.0) * healthy * WINDOW_S
        raised = counter.window.ports_beyond_chance(at, most, overdispersion, limits.cap)
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

    def decaying_ports(self) -> Indices:
        """Returns the ports whose errors are too many for hours, though not for minutes."""
        found = [np.flatnonzero(c.slow > SLOW_LIMIT) for c in self.counters.values()]
        return np.unique(np.concatenate(found)) if found else np.empty(0, np.int64)

    def confirmed(self, at: Indices) -> Bools:
        """Returns which of some ports have been above the limit since their onset, by a counter that is known here."""
        found = np.zeros(len(at), np.bool_)
        for counter in (c for c in self.counters.values() if len(at) and at.max() < len(c.bad)):
            found |= counter.bad[at] & (counter.max_sum(1.0) > 1.0)
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
