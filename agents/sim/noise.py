"""Randomness of the simulator: one generator per seed, purpose and block, and the noise of real sensors.

Blocks have a fixed length, so that the same seed gives the same fleet however the chunks are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
_T4_SD = np.float32(np.sqrt(2.0))  # standard deviation of Student's t with 4 degrees of freedom
_CLIP = np.float32(8.0)  # noise beyond 8 sigma is a fault, not noise; chosen


def generator(seed: int, *key: int) -> np.random.Generator:
    """The generator of one purpose; equal keys give equal draws."""
    return np.random.default_rng([seed, *key])


def heavy(rng: np.random.Generator, shape: Sequence[int]) -> Floats:
    """Student t4 draws scaled to unit variance: real telemetry has heavier tails than the normal distribution."""
    gauss = rng.standard_normal(shape, np.float32)
    spread = np.sqrt(rng.standard_gamma(2.0, shape, np.float32) / np.float32(2.0))  # t4 = normal / sqrt(chi2_4 / 4)
    return np.asarray(np.clip(gauss / (spread * _T4_SD), -_CLIP, _CLIP), np.float32)


class Drift:
    """AR(1) noise of unit variance for a row of devices; remembers where the last block ended."""

    def __init__(self, rng: np.random.Generator, devices: int, phi: float) -> None:
        self.phi, self._gain = np.float32(phi), np.float32(np.sqrt(1 - phi * phi))
        self._last = rng.standard_normal(devices, np.float32)

    def draw(self, rng: np.random.Generator, ticks: int) -> Floats:
        """(ticks, devices) next values."""
        out = heavy(rng, (ticks, len(self._last))) * self._gain
        last = self._last
        for row in out:
            row += self.phi * last
            last = row
        self._last = last.copy()
        return out


def rare(rng: np.random.Generator, rate: float, shape: tuple[int, int]) -> NDArray[np.int64]:
    """(ticks, devices) Poisson counts of mean `rate` each; quick when nearly all are 0."""
    out = np.zeros(shape, np.int64)
    where = rng.integers(0, out.size, rng.poisson(rate * out.size))
    np.add.at(out.reshape(-1), where, 1)
    return out


class Counter:
    """A counter as a device keeps it: never falls, starts at what the past left."""

    def __init__(self, start: NDArray[np.int64]) -> None:
        self.value = start

    def add(self, increments: NDArray[Any]) -> NDArray[np.uint64]:
        """(ticks, devices) readings after each of the increments."""
        out = self.value + np.cumsum(increments, axis=0, dtype=np.int64)
        self.value = out[-1].copy()
        return out.astype(np.uint64)
