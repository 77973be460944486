"""Optics: raw bit errors wander, error correction mends them up to a cliff, modules have a temperature and a power.

corrected bits = bits * raw BER             RS(544,514) mends 15 symbols of 10 bits in a codeword of 544
failed codewords = codewords * P(Binomial(544, 1 - (1 - BER)^10) > 15): none at 1e-5, one in hours at 2.4e-4
"""

from __future__ import annotations

from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.sim.effects import Effects
from agents.sim.layout import Layout
from agents.sim.physics.noise import Counter, Floats, generator
from agents.sim.physics.state import State

LINE_RATE = 4.25e11  # bits/s on the wire of a 400G port: IEEE 802.3 400GBASE-R, 8 lanes of 53.125 Gb/s PAM4 in pairs
_LEVEL, _LEVEL_SD = -7.5, 0.5  # log10 of the raw BER; published PAM4 links lie at 1e-8 to 1e-6. Spread chosen
_BEST, _WORST = -9.5, -6.0  # of a sound port; chosen
_WANDER, _WANDER_SPREAD, _TAU = 0.06, 0.6, 17_640.0
"""Wander of log10 BER: its spread (median of ports, and sd of its logarithm between them) and correlation time (s), as
measured hourly on 50 coherent optical ports over 7 to 15 days [Alibaba transport]."""
_QUICK, _QUICK_TAU = 0.5, 1200.0
"""Greatest share of its variance that moves within the hour, which ports have from none to this, and its time constant
(s): what one port's readings remember of the hour before lies between 0.5 and 0.99, same source."""
_KNOT_S = 600.0  # between these moments error rates are interpolated; chosen: half of the quick part's time
_STEADY, _JUMP_EVERY = 0.2, 16_200.0
"""Share of its variance that moves steadily; the rest comes in jumps, one in so many seconds. Fitted to the same ports'
steps from hour to hour: half of them within 0.024 of each other, one in fifty beyond 0.13."""
_WHITE = 0.023  # share: 0.01 decade from reading to reading, same source
_MOVES, _MOVE, _MOVE_SD = 1 / (120 * 86_400), 1.5, 0.3
"""Level changes per port and second: 6 of those 50 ports moved once in 15 days by about 1.5 decades (re-tuned)."""
_BITS, _CODEWORD, _MENDED = 10, 544, 15  # of RS(544,514): bits of a symbol, symbols of a codeword, symbols it mends
_GRID = np.linspace(-4.5, -2.0, 51)
_MOST = 1e5  # failed codewords per second beyond which a link has long gone down; chosen
_MODULE_C, _MODULE_SD, _RX_MW, _RX_DB = 47.0, 3.0, 1.2, 0.8  # of a 400G DR4 module, and between modules; chosen
_READ_EVERY = 60.0  # s between two readings of a module's EEPROM, as the agent does
_TOP = 0xFFFF  # what a module that does not answer gives: as temperature -1/256 C, as power 6.5535 mW (CMIS)


def failures(log_ber: NDArray[Any]) -> NDArray[np.float64]:
    """Codewords per second that error correction gives up, by the log10 of the raw BER."""
    return np.asarray(np.where(log_ber < _GRID[0], 0.0, 10 ** np.interp(log_ber, _GRID, _FAILED)))


def _table() -> NDArray[np.float64]:
    """log10 of the failed codewords per second on the grid."""
    symbol = 1 - (1 - 10.0**_GRID) ** _BITS
    share = [
        sum(comb(_CODEWORD, k) * p**k * (1 - p) ** (_CODEWORD - k) for k in range(_MENDED + 1, 60)) for p in symbol
    ]
    return np.log10(np.minimum(np.array(share) * LINE_RATE / (_BITS * _CODEWORD), _MOST))


_FAILED = _table()


class Optics:
    """State of the optics of all ports; advances block by block."""

    def __init__(self, layout: Layout, interval: float, seed: int, state: State) -> None:
        rng, n = generator(seed, 33), layout.gpus
        self.interval, self.seed, self.state = interval, seed, state
        self._spread = _WANDER * np.exp(_WANDER_SPREAD * rng.standard_normal(n))
        level = (_LEVEL + _LEVEL_SD * rng.standard_normal(n)).clip(_BEST, _WORST)
        state["optic.level"], state["optic.wander"] = level, rng.standard_normal(n)
        state["optic.quick"], quick = rng.standard_normal(n), rng.uniform(0, _QUICK, n)
        self._slowly, self._quickly = np.sqrt(1 - quick) * self._spread, np.sqrt(quick) * self._spread
        self._heat = (_MODULE_C + _MODULE_SD * rng.standard_normal(n)).astype(np.float32)
        self._light = _RX_MW * 10 ** (_RX_DB * rng.standard_normal(n) / 10)
        past = rng.integers(10**17, 10**18, n)
        self._bits = Counter(state, "nic.phy_bits", past)
        self._mended = Counter(state, "nic.phy_corrected_bits", (past * 10**level).astype(np.int64))

    def advance(
        self, block: int, down: NDArray[np.bool_], reset: NDArray[np.bool_] | None, effects: Effects
    ) -> tuple[dict[str, NDArray[Any]], NDArray[np.int64] | None]:
        """(columns of class nic, failed codewords in each tick; None if there is none)."""
        rng, ticks = generator(self.seed, 34, block), len(effects.time)
        log_ber = self._ber(rng, ticks, effects)
        per_tick = LINE_RATE * self.interval
        bits = np.full(down.shape, int(per_tick), np.int64)
        mean = np.float32(per_tick) * np.exp2(log_ber * np.float32(np.log2(10)))
        mended = mean + np.sqrt(mean + (np.float32(_WHITE) * mean) ** 2) * rng.standard_normal(mean.shape, np.float32)
        mended = np.maximum(mended, 0).astype(np.int64)
        if effects.port.down:
            bits[down] = 0
            mended[down] = 0
        columns: dict[str, NDArray[Any]] = {
            "nic.phy_bits": self._bits.add(bits, reset),
            "nic.phy_corrected_bits": self._mended.add(mended, reset),
            **self._module(rng, effects),
        }
        return columns, self._failed(block, log_ber, down, effects)

    def _ber(self, rng: np.random.Generator, ticks: int, effects: Effects) -> Floats:
        """(ticks, ports) log10 of the raw BER: level and wander, on from the last block, and what faults add."""
        level, wander, long = self.state["optic.level"], self.state["optic.wander"], ticks * self.interval
        before = level + self._slowly * wander
        phi, often = np.exp(-long / _TAU), 1 - np.exp(-long / _JUMP_EVERY)
        steady, jumps = rng.standard_normal((2, len(level)))
        jumps *= (rng.random(len(level)) < often) / np.sqrt(often)
        pushed = np.sqrt(_STEADY) * steady + np.sqrt(1 - _STEADY) * jumps  # unit variance
        wander = phi * wander + np.sqrt(1 - phi * phi) * pushed
        moved, size = rng.random(len(level)) < _MOVES * long, rng.normal(_MOVE, _MOVE_SD, len(level))
        level = np.where(moved, level + np.where(level > _LEVEL, -size, size), level).clip(_BEST, _WORST)
        self.state["optic.level"], self.state["optic.wander"] = level, wander
        change = (level + self._slowly * wander - before).astype(np.float32)
        share = (np.arange(1, ticks + 1, dtype=np.float32) / np.float32(ticks))[:, None]
        log_ber = before.astype(np.float32) + share * change + self._flicker(rng, ticks)
        added = effects.port.raw_ber
        if added:
            total = np.log10(10.0**log_ber + 10.0 ** added.whole())
            log_ber = np.where(added.whole() > _BEST - 3, total, log_ber).astype(np.float32)
        return np.asarray(log_ber, np.float32)

    def _flicker(self, rng: np.random.Generator, ticks: int) -> Floats:
        """(ticks, ports) the quick part of the wander, interpolated between moments some minutes apart."""
        knots = max(1, round(ticks * self.interval / _KNOT_S))
        phi = np.exp(-ticks * self.interval / knots / _QUICK_TAU)
        path = [self.state["optic.quick"]]
        for step in rng.standard_normal((knots, len(path[0]))):
            path.append(phi * path[-1] + np.sqrt(1 - phi * phi) * step)
        self.state["optic.quick"] = path[-1]
        at = np.arange(1, ticks + 1) * (knots / ticks)
        weights = np.maximum(1 - np.abs(at[:, None] - np.arange(knots + 1)), 0).astype(np.float32)
        return np.asarray(weights @ (self._quickly * np.array(path)).astype(np.float32))

    def _failed(
        self, block: int, log_ber: Floats, down: NDArray[np.bool_], effects: Effects
    ) -> NDArray[np.int64] | None:
        """Codewords beyond mending; draws of their own, so that the sound ports stay as they are."""
        if not effects.port.raw_ber:
            return None
        rate = np.where(down, 0, failures(log_ber))
        return np.asarray(generator(self.seed, 35, block).poisson(rate * self.interval), np.int64)

    def _module(self, rng: np.random.Generator, effects: Effects) -> dict[str, NDArray[Any]]:
        """What the EEPROM says, read once a minute: 1/256 K and 0.1 uW are its steps (CMIS)."""
        hold, ticks = max(1, round(_READ_EVERY / self.interval)), len(effects.time)
        hold = min(hold, ticks)
        shape = (-(-ticks // hold), len(self._heat))
        port = effects.port
        heat = self._heat + np.float32(0.3) * rng.standard_normal(shape, np.float32)
        light = self._light * (1 + 0.02 * rng.standard_normal(shape, np.float32))
        if port.module_temperature:
            heat = heat + port.module_temperature.whole()[::hold]
        if port.rx_power:
            light = light * 10 ** (port.rx_power.whole()[::hold] / 10)
        heat, light = np.rint(heat * 256) / 256, np.rint(light * 1e4) / 1e4
        if port.sentinel:
            silent = port.sentinel.whole()[::hold]
            heat, light = np.where(silent, -1 / 256, heat), np.where(silent, _TOP / 1e4, light)
        return {
            "nic.module_temperature": np.repeat(heat.astype(np.float32), hold, axis=0)[:ticks],
            "nic.rx_power_min": np.repeat(light.astype(np.float32), hold, axis=0)[:ticks],
        }
