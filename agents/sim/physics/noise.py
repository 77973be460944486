"""Randomness of the simulator: one generator per seed, purpose and block, and the noise of real sensors.

Blocks have a fixed length, so that the same seed gives the same fleet however the chunks are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.sim.physics.state import State

Floats = NDArray[np.float32]
_TAILS = {"t4": (np.float32(2.0), np.float32(np.sqrt(2.0))), "t3": (np.float32(1.5), np.float32(np.sqrt(3.0)))}
"""Half the degrees of freedom of Student's t, and its standard deviation."""
_CLIP = np.float32(8.0)  # noise beyond 8 sigma is a fault, not noise; chosen


def generator(seed: int, *key: int) -> np.random.Generator:
    """Returns the generator of one purpose; equal keys give equal draws."""
    return np.random.default_rng([seed, *key])


def heavy(rng: np.random.Generator, shape: Sequence[int], tails: str = "t4") -> Floats:
    """Returns Student t draws scaled to unit variance, or normal ones: real telemetry has heavier tails than the
    normal distribution."""
    gauss = rng.standard_normal(shape, np.float32)
    if tails == "normal":
        return gauss
    half, deviation = _TAILS[tails]
    spread = np.sqrt(rng.standard_gamma(half, shape, np.float32) / half)  # t4 = normal / sqrt(chi2_4 / 4)
    return np.asarray(np.clip(gauss / (spread * deviation), -_CLIP, _CLIP), np.float32)


class Drift:
    """AR(1) noise of unit variance for a row of devices; its last value is kept between blocks.

    phi: correlation of two samples 10 s apart; at another interval it follows from the same time constant.
    tails: shape of its steps (`heavy`).
    """

    def __init__(
        self,
        state: State,
        name: str,
        rng: np.random.Generator,
        devices: int,
        phi: float,
        interval: float,
        tails: str = "t4",
    ) -> None:
        phi = phi ** (interval / 10.0)
        self._tails = tails
        self.phi, self._gain = np.float32(phi), np.float32(np.sqrt(1 - phi * phi))
        self._state, self._name = state, f"drift.{name}"
        state[self._name] = rng.standard_normal(devices, np.float32)

    def draw(self, rng: np.random.Generator, ticks: int) -> Floats:
        """Returns (ticks, devices) next values."""
        last = self._state[self._name]
        shape = ticks, len(last)
        out = heavy(rng, shape, self._tails) * self._gain
        for row in out if self.phi else ():
            row += self.phi * last
            last = row
        self._state[self._name] = last.copy()
        return out


def correlation(tau: float, factor: float) -> float:
    """Returns the correlation of two samples 10 s apart by a time constant (s) and a world's factor on it."""
    return float(np.exp(-10 / (tau * factor))) if factor else 0.0


class SlowDrift:
    """Slow noise of unit variance, as in the metrics of real servers: a slow part, interpolated between the ends of the
    blocks, and a quick one. Real correlation falls to 0.8 within 5 minutes and to 0.6 within an hour.

    share: of the variance, for the slow part.   slow: its time constant (s).
    """

    def __init__(
        self,
        state: State,
        name: str,
        rng: np.random.Generator,
        devices: int,
        interval: float,
        share: float = 0.7,
        slow: float = 7200.0,
        phi: float = 0.5,
    ) -> None:
        self._quick = Drift(state, f"{name}.quick", rng, devices, phi, interval)
        self._share, self._slow, self._interval = np.float32(share), slow, interval
        self._state, self._name = state, f"wander.{name}"
        state[self._name] = rng.standard_normal(devices, np.float32)

    def draw(self, rng: np.random.Generator, ticks: int) -> Floats:
        """Returns (ticks, devices) next values."""
        phi = np.exp(-ticks * self._interval / self._slow)
        last = self._state[self._name]
        step = rng.standard_normal(len(last), np.float32) * np.float32(np.sqrt(1 - phi * phi))
        now = (np.float32(phi) * last + step).astype(np.float32)
        self._state[self._name] = now
        way = (np.arange(1, ticks + 1, dtype=np.float32) / ticks)[:, None]
        slow = last + (now - last) * way
        quick = self._quick.draw(rng, ticks)
        return np.asarray(np.sqrt(self._share) * slow + np.sqrt(1 - self._share) * quick, np.float32)


class Bursts:
    """Bursts of work, as in the metrics of real servers: 0 most of the time.

    Fitted to the changes of [SMD] and [ASD] from minute to minute, of which 1 to 2 % lie beyond 5 deviations: some
    bursts an hour, of 1 to 3 min, with Pareto-distributed sizes from 5 to 30 deviations.
    """

    _PER_HOUR, _LASTS, _LEAST, _MOST, _ALPHA = 2.0, (60.0, 180.0), 5.0, 30.0, 1.5

    def __init__(self, state: State, name: str, devices: int, interval: float) -> None:
        self._interval, self._state, self._name = interval, state, f"bursts.{name}"
        longest = max(1, round(self._LASTS[1] / interval))
        state[self._name] = np.zeros((longest, devices), np.float32)  # the part in the next block

    def draw(self, rng: np.random.Generator, ticks: int) -> Floats:
        """Returns (ticks, devices) sizes."""
        carried = self._state[self._name]
        out = np.concatenate([carried, np.zeros((ticks, carried.shape[1]), np.float32)])
        count = rng.poisson(self._PER_HOUR / 3600 * self._interval * ticks * carried.shape[1])
        begins, devices = rng.integers(0, ticks, count), rng.integers(0, carried.shape[1], count)
        lengths = np.maximum(np.rint(rng.uniform(*self._LASTS, count) / self._interval), 1).astype(int)
        sizes = np.minimum(self._LEAST * (1 + rng.pareto(self._ALPHA, count)), self._MOST)
        each = zip(begins.tolist(), devices.tolist(), lengths.tolist(), sizes.tolist(), strict=True)
        for begin, device, length, size in each:
            out[begin : begin + length, device] += size
        self._state[self._name] = out[ticks:].copy()
        return out[:ticks]


def stepped(values: NDArray[Any], step: float) -> Floats:
    """Returns values rounded to an instrument's resolution."""
    return np.asarray(np.rint(values / step) * step, np.float32)


def rare(rng: np.random.Generator, rate: float, shape: tuple[int, int]) -> NDArray[np.int64]:
    """Returns (ticks, devices) Poisson counts of mean `rate` each; fast if nearly all are 0."""
    out = np.zeros(shape, np.int64)
    where = rng.integers(0, out.size, rng.poisson(rate * out.size))
    np.add.at(out.reshape(-1), where, 1)
    return out


class Counter:
    """A device's counter: starts at its past value, falls only if the device restarts.

    name: the signal; agents/sim/physics/counter_generations.py finds the reading before a reset by it.
    """

    def __init__(self, state: State, name: str, start: NDArray[np.int64]) -> None:
        self._state, self._name = state, f"counter.{name}"
        state[self._name] = start

    @property
    def last(self) -> NDArray[np.int64]:
        """Returns (devices,) the newest readings."""
        return self._state[self._name]

    def add(self, increments: NDArray[Any], reset: NDArray[np.bool_] | None = None) -> NDArray[np.uint64]:
        """Returns (ticks, devices) readings after each increment; in a tick of `reset` only that increment is left."""
        gains, last = np.asarray(increments, np.int64), self._state[self._name]
        out = np.empty(gains.shape, np.int64)
        for gain, row in zip(gains, out, strict=True):  # five times faster than cumsum along columns
            last = np.add(last, gain, out=row)
        for tick, device in [] if reset is None else np.argwhere(reset).tolist():
            out[tick:, device] -= out[tick, device] - int(increments[tick, device])
        self._state[self._name] = out[-1].copy()
        return out.view(np.uint64)

    def repeat(self, ticks: int) -> NDArray[np.uint64]:
        """Returns (ticks, devices) readings of a block without increments."""
        return np.broadcast_to(self._state[self._name], (ticks, len(self._state[self._name]))).view(np.uint64)
