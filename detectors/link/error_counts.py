"""CUSUM on the errors of a link: Poisson, or negative binomial as far as errors come in bunches on the whole fabric.

Errors of the last five minutes, for links that err slowly: so many in a window as chance would hardly make.

A CUSUM is the quickest on the mean (Moustakides, Ann. Stat. 14, 1986), but most likely to be in time for a given
deadline is the count within it (Neyman and Pearson, 1933; as a window that slides: Naus, J. Am. Stat. Assoc. 77, 1982).
At a BER of 1e-13 and 400 Gb/s the sum of `limit` 21 over links at 1e-15 needs eight errors in 300 s, the window six:
0.976 of such links are paged within 300 s instead of 0.946, and four errors of a fabric at 1e-16, 0.997.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.state import check_one_length, grown
from detectors.link.counters import Places, Readings
from pipeline.model.records import SECOND

LENGTH = 300.0
"""s: within it a BER of 1e-13 is to be found. Chosen."""
CHANCE = 5e-9
"""Of so many errors in one window of a sound link. 10,000 links have 2.9 million windows a day, and one that slides
alarms at most as many times more often as there are errors in it: below 0.1 a day."""


@dataclass
class Window:
    """Errors of each port within the window; costs nothing where there are none.

    recent:  (N,) capped errors of the last LENGTH s.
    batches: what makes them: when a reading began, when it ended, its ports and their errors; oldest first.
    """

    recent: Floats = field(default_factory=lambda: np.empty(0))
    batches: list[tuple[int, int, Places, Floats]] = field(default_factory=list)

    def take(self, at: Places, errors: Floats, size: int, time: int, seconds: float) -> None:
        """Adds the errors of one reading that began `seconds` ago, and drops those that are too old."""
        self.recent = grown(self.recent, size, 0)
        began = time - int(seconds * SECOND)
        while self.batches and not time - LENGTH * SECOND <= self.batches[0][0] <= began:
            _, _, old, counted = self.batches.pop(0)
            self.recent[old] -= counted
        if len(at) and began >= time - LENGTH * SECOND:
            self.batches.append((began, time, at.copy(), errors.copy()))
            self.recent[at] += errors

    def beyond(self, at: Places, mean: Floats, bunched: float, least: float) -> Places:
        """Of the ports `at` those with more than `least` errors, and more than chance makes of `mean` in the window.

        bunched: of the window's negative binomial; 0: Poisson.
        """
        mine = self.recent[at]
        many = np.flatnonzero(mine > least)
        if not len(many):
            return at[:0]
        return at[many[at_least(mine[many], mean[many], bunched) < CHANCE]]

    def since(self, port: int) -> int:
        """When the first reading of the window began in which a port had errors; it must have some."""
        return min(began for began, _, at, _ in self.batches if port in at)

    def snapshot(self) -> dict[str, Any]:
        return {"recent": self.recent.copy(), "batches": [[b, t, a.copy(), n.copy()] for b, t, a, n in self.batches]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.recent = np.array(state["recent"])
        self.batches = [(int(b), int(t), np.array(a), np.array(n)) for b, t, a, n in state["batches"]]


def at_least(count: Floats, mean: Floats, bunched: float) -> Floats:
    """P(that many errors or more), term by term: Poisson, or negative binomial of variance mean * (1 + a * mean)."""
    size = np.inf if bunched < 1e-6 else 1 / bunched
    odds = mean if np.isinf(size) else bunched * mean / (1 + bunched * mean)
    term = np.exp(-mean) if np.isinf(size) else np.exp(-size * np.log1p(bunched * mean))
    below = np.zeros(len(count))
    for k in range(int(np.ceil(count.max(initial=0)))):
        below += np.where(k < count, term, 0.0)
        term = term * odds * (1.0 if np.isinf(size) else size + k) / (k + 1)
    return np.asarray(np.maximum(1.0 - below, 0.0))


Floats = NDArray[np.float64]
PHYSICAL = (
    *("nic.symbol_errors", "nic.phy_symbol_errors", "nic.crc_errors", "nic.phy_crc_errors"),
    *("nic.integrity_errors", "nic.link_recoveries"),
)
"""Left over after correction, by the receiver of the port: no load of the network makes any of them."""
PACKETS = ("nic.port_rx_errors",)
"""Packets received with an error: damaged ones, but also those that found no room (IBTA 16.1.3.5)."""
_BURST = 30.0  # s over which errors are capped: the interval at which fabrics are polled
_DAY = 86_400.0
_PRIOR = 3e5
"""Readings at the healthy rate and without bunches that are taken for granted: an hour of 830 ports. Chosen."""
_BEST = 0.1
"""Of the healthy rate, the least that a fabric is taken to have, however few errors it shows: a link that errs ten
times as often as the rest, but less than a sound one may, would page once in five years. Chosen."""
_KNOWN = 600.0
"""s in which one counter of all ports is read before errors alone page: until then nobody knows whether they come in
bunches here, and what came in them would be told of as faults. Chosen."""
_MOST_BUNCHED = 64.0  # above it, a BER of 1e-12 would no longer be found within 90 s. Chosen
_UNKNOWN, _SLOWEST, _FASTEST = 400_000.0, 100_000.0, 10_000_000.0
"""Mbit/s of a port that does not tell its speed, the least that counts (on slower links five errors an hour, of which
a plug makes some, would be a fault), and what none has. Chosen."""


def likelihood(count: Floats, healthy: Floats, faulty: Floats, bunched: float | Floats) -> Floats:
    """ln of P(count | faulty) / P(count | healthy) for means of `healthy` and `faulty` errors in the time.

    bunched: a of the negative binomial, whose variance is mean * (1 + a * mean); 0, or next to it: Poisson.
    """
    a = np.maximum(bunched, 1e-6)
    gain = count * np.log(faulty / healthy)
    return np.asarray(gain - (count + 1 / a) * (np.log1p(a * faulty) - np.log1p(a * healthy)))


@dataclass
class Cohort:
    """How often one counter of all ports errs, and how much in bunches: moments over about the last day."""

    readings: float = 0.0
    first: float = 0.0
    second: float = 0.0

    def learn(self, readings: int, seconds: float) -> None:
        """Takes one instant without errors, `seconds` after the one before."""
        keep = math.exp(-min(max(seconds, 0.0), _DAY) / _DAY)
        self.readings = self.readings * keep + readings
        self.first, self.second = self.first * keep, self.second * keep

    def add(self, first: float, second: float) -> None:
        """Adds errors and their squares."""
        self.first, self.second = self.first + first, self.second + second

    def share(self, healthy: float) -> float:
        """What this fabric errs, as a share of the mean `healthy` of a reading: from `_BEST` to 1."""
        mean = (self.first + _PRIOR * healthy) / (self.readings + _PRIOR)
        return min(max(mean / healthy, _BEST), 1.0)

    def bunched(self, mean: float) -> float:
        """a of the negative binomial: 0 where errors are as even as chance makes them, bounded.

        With far fewer errors than `mean`, the variance beyond Poisson's is told in units of it: the distribution is
        then as wide at the healthy rate as what was seen.
        """
        return float(self.bunched_with(np.zeros(1), np.zeros(1), mean)[0])

    def bunched_with(self, first: Floats, second: Floats, mean: float) -> Floats:
        """The same with other errors and their squares added, as often as there are of them."""
        readings = self.readings + _PRIOR
        seen, square = (self.first + first) / readings, (self.second + second) / readings
        beyond = np.maximum(square - seen * seen - seen, 0.0)
        return np.asarray(np.minimum(beyond / np.maximum(seen, max(mean, 1e-12)) ** 2, _MOST_BUNCHED))


def _floats() -> Floats:
    return np.empty(0)


def _places() -> Places:
    return np.empty(0, np.int64)


def _flags() -> NDArray[np.bool_]:
    return np.empty(0, np.bool_)


@dataclass
class Counted:
    """One counter of all ports and what speaks against each of them."""

    readings: Readings = field(default_factory=Readings)
    cohort: Cohort = field(default_factory=Cohort)
    sum: Floats = field(default_factory=_floats)  # log-likelihood ratio, at least 0
    since: Places = field(default_factory=_places)  # when it last left zero: the onset
    total: Floats = field(default_factory=_floats)  # errors since then, not capped
    used: Floats = field(default_factory=_floats)  # errors that have counted in the present 30 s
    opened: Places = field(default_factory=_places)  # when these began
    first: Floats = field(default_factory=_floats)  # moments of its readings since the onset
    second: Floats = field(default_factory=_floats)
    bad: NDArray[np.bool_] = field(default_factory=_flags)  # it has been above the limit since then
    judged: int = 0  # time of the newest judgement
    read: float = 0.0  # s for which any port has told it
    window: Window = field(default_factory=Window)

    def lengthen(self, size: int) -> None:
        if len(self.sum) >= size:
            return
        for name in _FIELDS:
            setattr(self, name, grown(getattr(self, name), size, 0))

    def capped(self, at: Places, count: Floats, time: int, cap: float) -> Floats:
        """Of the errors of some ports at most `cap` in 30 s from the first on."""
        over = (time - self.opened[at] >= _BURST * SECOND) | (time < self.opened[at])
        fresh = at[over]
        self.opened[fresh], self.used[fresh] = time, 0.0
        taken = np.minimum(count, cap - self.used[at])
        self.used[at] += taken
        return np.asarray(taken)

    def top(self, limit: float) -> float:
        """The most that speaks against a port: no page before it is known how this counter errs."""
        return limit if self.read < _KNOWN else 2 * limit

    def known(self, active: Places) -> Cohort:
        """The cohort with what is not over yet: bunches show at once, long before the sums of their ports are zero."""
        sound, more = active[~self.bad[active]], self.cohort
        return Cohort(more.readings, more.first + self.first[sound].sum(), more.second + self.second[sound].sum())

    def beside(self, active: Places, mean: float) -> Floats:
        """How bunched the errors of the others are, for each port: none is taken for sound by its own bunches."""
        sound = ~self.bad[active]
        first, second = self.first[active] * sound, self.second[active] * sound
        return self.cohort.bunched_with(first.sum() - first, second.sum() - second, mean)

    def close(self, over: Places) -> None:
        """Ends what is over; errors of ports that never were above the limit are those of sound ones."""
        sound = over[~self.bad[over]]
        self.cohort.add(float(self.first[sound].sum()), float(self.second[sound].sum()))
        self.total[over] = self.first[over] = self.second[over] = 0.0
        self.bad[over] = False


@dataclass(frozen=True, slots=True)
class Setting:
    """What Errors is told by the detector's configuration; the rates are bit error rates."""

    healthy: float
    faulty: float
    limit: float
    cap: float


class Errors:
    """All error counters of all ports."""

    def __init__(self) -> None:
        self.counted: dict[str, Counted] = {}
        self._speed = np.empty(0)

    def speeds(self, speed: Floats) -> None:
        """Takes the speeds (Mbit/s, NaN) that ports were trained to; a port that is down keeps its last one."""
        self._speed = grown(self._speed, len(speed), np.nan)
        new = np.flatnonzero(speed != self._speed[: len(speed)])
        new = new[(speed[new] > 0) & (speed[new] < _FASTEST)]
        self._speed[new] = speed[new]

    def bits(self, at: Places) -> Floats:
        """Bits per second of some ports."""
        speed = self._speed[at]
        return np.asarray(np.maximum(np.where(np.isnan(speed), _UNKNOWN, speed), _SLOWEST) * 1e6)

    def take(self, signal: str, now: Floats, time: int, anew: Places) -> tuple[Places, Floats]:
        """(ports, growth) of a counter where it grew; nothing is judged yet."""
        counted = self.counted.setdefault(signal, Counted())
        counted.lengthen(len(now))
        at, growth, seconds = counted.readings.growth(now, time, anew)
        fresh = counted.total[at] == 0
        counted.since[at[fresh]] = time - (seconds[fresh] * SECOND).astype(np.int64)  # made since it was last read
        return at, growth

    def judge(
        self, signal: str, at: Places, growth: Floats, up: NDArray[np.bool_], time: int, setting: Setting
    ) -> None:
        """Weighs one instant: `growth` errors at the ports `at`, none at others that are up and told the counter."""
        counted = self.counted[signal]
        seconds = (time - counted.judged) / SECOND if counted.judged else 0.0
        readings = int(np.count_nonzero(counted.readings.told(len(up)) & up))
        counted.judged = time
        counted.cohort.learn(readings, seconds)
        counted.read += max(seconds, 0.0) if readings else 0.0
        active = np.flatnonzero(counted.sum)
        if not len(at) and not len(active) and not counted.window.batches:
            return
        taken = counted.capped(at, growth, time, setting.cap)
        counted.window.take(at, taken, len(counted.sum), time, max(seconds, 0.0))
        errors = np.zeros(len(counted.sum))
        errors[at] = taken
        active = np.union1d(active, at)
        counted.total[at] += growth
        counted.first[at] += taken
        counted.second[at] += taken**2
        known = counted.known(active)
        if seconds > 0 and len(active):
            self._weigh(counted, known, active, errors[active], seconds, setting)
        if seconds > 0 and len(at):
            self._compare(counted, known, at, seconds, setting)
        counted.sum[active] = np.minimum(counted.sum[active], counted.top(setting.limit))
        counted.close(active[counted.sum[active] <= 0])

    def _weigh(self, counted: Counted, known: Cohort, at: Places, errors: Floats, seconds: float, to: Setting) -> None:
        bits = self.bits(at) * seconds
        usual = float(bits.mean()) * to.healthy
        share = known.share(usual)
        ratio = likelihood(errors, bits * to.healthy * share, bits * to.faulty, counted.beside(at, usual * share))
        counted.sum[at] = np.clip(counted.sum[at] + ratio, 0.0, 2 * to.limit)
        counted.bad[at] |= counted.sum[at] > to.limit

    def _compare(self, counted: Counted, known: Cohort, at: Places, seconds: float, setting: Setting) -> None:
        """Lifts the sums of ports whose errors of the last minutes chance would not make, over the limit."""
        bits = self.bits(at)
        share = known.share(float(bits.mean()) * seconds * setting.healthy)
        mean = bits * setting.healthy * share
        # readings that are bunched each on its own: their sum is less so by their number
        bunched = known.bunched(float(mean.mean()) * seconds) * seconds / LENGTH
        lifted = counted.window.beyond(at, mean * LENGTH, bunched, setting.cap)
        counted.sum[lifted] = np.maximum(counted.sum[lifted], setting.limit + 1)
        counted.bad[lifted] = True
        for port in lifted[counted.window.recent[lifted] > counted.total[lifted]].tolist():
            counted.since[port], counted.total[port] = counted.window.since(port), counted.window.recent[port]

    def strength(self, port: int) -> dict[str, float]:
        """Counter -> what speaks against a port, of those that say anything."""
        return {s: float(c.sum[port]) for s, c in self.counted.items() if port < len(c.sum) and c.sum[port] > 0}

    def above(self, limit: float) -> NDArray[np.int64]:
        """Ports of which some counter says more than `limit`."""
        found = [np.flatnonzero(c.sum > limit) for c in self.counted.values()]
        return np.unique(np.concatenate(found)) if found else np.empty(0, np.int64)

    def were_above(self, at: Places) -> NDArray[np.bool_]:
        """(N,) which of some ports have been above the limit since their errors began, told of or not."""
        found = np.zeros(len(at), np.bool_)
        for counted in (c for c in self.counted.values() if len(at) and at.max() < len(c.bad)):
            found |= counted.bad[at]
        return found

    def since(self, at: Places, limit: float) -> Places:
        """When errors of each port of `at` began, of the counters that say more than `limit`."""
        found = np.full(len(at), np.iinfo(np.int64).max)
        for counted in (c for c in self.counted.values() if len(at) and at.max() < len(c.sum)):
            found = np.where(counted.sum[at] > limit, np.minimum(found, counted.since[at]), found)
        return found

    def full(self, port: int, values: Mapping[str, Floats]) -> list[str]:
        """Counters of a port that stand at the top of their registers and count no more."""
        return [s for s, c in self.counted.items() if s in values and c.readings.full(port, values[s])]

    def snapshot(self) -> dict[str, Any]:
        return {"speed": self._speed.copy(), "counted": {s: _plain(c) for s, c in self.counted.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._speed = state["speed"]
        self.counted = {signal: _counted(saved) for signal, saved in state["counted"].items()}


_FIELDS = ("sum", "since", "total", "used", "opened", "first", "second", "bad")
_MOMENTS = ("readings", "first", "second")


def _plain(counted: Counted) -> dict[str, Any]:
    arrays = {name: getattr(counted, name).copy() for name in _FIELDS}
    moments = {name: getattr(counted.cohort, name) for name in _MOMENTS}
    whole = {"readings": counted.readings.snapshot(), "window": counted.window.snapshot()}
    return {**arrays, "judged": counted.judged, "read": counted.read, "moments": moments, **whole}


def _counted(saved: Mapping[str, Any]) -> Counted:
    check_one_length(saved)
    counted = Counted(Readings(), Cohort(**saved["moments"]), **{name: saved[name] for name in _FIELDS})
    counted.judged, counted.read = int(saved["judged"]), float(saved.get("read", _KNOWN))
    counted.readings.restore(saved["readings"])
    counted.window.restore(saved.get("window", Window().snapshot()))
    return counted
