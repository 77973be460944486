"""Network ports with their optics, and NVLinks: traffic follows the job, congestion follows traffic; only faults cause
many errors.

The raw bit error rate of an optic drifts; error correction hides the errors up to a cliff:

corrected bits = bits * raw BER             RS(544,514) corrects 15 symbols of 10 bits in a codeword of 544
failed codewords = codewords * P(Binomial(544, 1 - (1 - BER)^10) > 15): none at 1e-5, one in hours at 2.4e-4

One NVLink per GPU represents its 18: its speed falls in steps, its errors are those of all. Every link on its own would
be the largest class of the fleet, for counters that almost never change.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.sim.effects import Channel, Effects
from agents.sim.layout import Layout
from agents.sim.physics.counter_generations import resets
from agents.sim.physics.jobs import GpuActivity
from agents.sim.physics.noise import Counter, Drift, Floats, generator, rare
from agents.sim.physics.state import State
from agents.sim.schedule import Job, Schedule
from agents.sim.world import World

LINE_RATE = 4.25e11  # bits/s on the wire of a 400G port: IEEE 802.3 400GBASE-R, 8 lanes of 53.125 Gb/s PAM4 in pairs
_BETTER, _WORST = 2.0, -6.0  # decades below the fleet's level, and log10 of the raw BER, of a healthy port; chosen
_WANDER, _WANDER_SPREAD, _TAU = 0.06, 0.6, 17_640.0
"""Drift of log10 BER: its spread (median of ports, and sd of its logarithm between them) and correlation time (s), as
measured hourly on 50 coherent optical ports over 7 to 15 days [Alibaba transport]."""
_QUICK, _QUICK_TAU = 0.5, 1200.0
"""Maximum share of the variance that changes within an hour (each port has between 0 and this), and its time constant
(s): the hourly autocorrelation of a port is 0.5 to 0.99, same source."""
_KNOT_S = 600.0  # s between the points of interpolated error rates; chosen: half of _QUICK_TAU
_STEADY, _JUMP_EVERY = 0.2, 16_200.0
"""Share of the variance that changes continuously; the rest comes in jumps, with this mean interval (s). Fitted to the
hourly changes of the same ports: half of them within 0.024, one in fifty beyond 0.13."""
_WHITE = 0.023  # share: 0.01 decade from reading to reading, same source
_MOVES, _MOVE, _MOVE_SD = 1 / (120 * 86_400), 1.5, 0.3
"""Level changes per port and second: 6 of those 50 ports moved once in 15 days by about 1.5 decades (re-tuned)."""
_BITS, _CODEWORD, _CORRECTED = (
    10,
    544,
    15,
)  # of RS(544,514): bits of a symbol, symbols of a codeword, correctable symbols
_GRID = np.linspace(-4.5, -2.0, 51)
_MOST = 1e5  # failed codewords per second beyond which a link has long gone down; chosen
_MODULE_C, _MODULE_SD, _RX_MW, _RX_DB = 47.0, 3.0, 1.2, 0.8  # of a 400G DR4 module, and between modules; chosen
_READ_EVERY = 60.0  # s between two readings of a module's EEPROM, as the agent does
_TOP = 0xFFFF  # reading of a module that does not respond: as temperature -1/256 C, as power 6.5535 mW (CMIS)


def failures(log_ber: NDArray[Any]) -> NDArray[np.float64]:
    """Returns codewords per second that error correction cannot correct, by the log10 of the raw BER."""
    return np.asarray(np.where(log_ber < _GRID[0], 0.0, 10 ** np.interp(log_ber, _GRID, _FAILED)))


def _table() -> NDArray[np.float64]:
    """Returns the log10 of the failed codewords per second on the grid."""
    symbol = 1 - (1 - 10.0**_GRID) ** _BITS
    share = [
        sum(comb(_CODEWORD, k) * p**k * (1 - p) ** (_CODEWORD - k) for k in range(_CORRECTED + 1, 60)) for p in symbol
    ]
    return np.log10(np.minimum(np.array(share) * LINE_RATE / (_BITS * _CODEWORD), _MOST))


_FAILED = _table()


class Optics:
    """State of the optics of all ports; advances block by block."""

    def __init__(self, layout: Layout, interval: float, seed: int, state: State) -> None:
        rng, n = generator(seed, 33), layout.gpus
        self.interval, self.seed, self.state = interval, seed, state
        self._spread = _WANDER * np.exp(_WANDER_SPREAD * rng.standard_normal(n))
        fabric = layout.world.fabric
        self._line = LINE_RATE * fabric.speed / SPEED
        self._usual, self._best = fabric.ber, fabric.ber - _BETTER
        level = (fabric.ber + fabric.ber_sd * rng.standard_normal(n)).clip(self._best, _WORST)
        state["optic.level"], state["optic.wander"] = level, rng.standard_normal(n)
        state["optic.quick"], quick = rng.standard_normal(n), rng.uniform(0, _QUICK, n)
        self._slowly, self._quickly = np.sqrt(1 - quick) * self._spread, np.sqrt(quick) * self._spread
        self._heat = (_MODULE_C + _MODULE_SD * rng.standard_normal(n)).astype(np.float32)
        self._light = _RX_MW * 10 ** (_RX_DB * rng.standard_normal(n) / 10)
        past = rng.integers(10**17, 10**18, n)
        self._bits = Counter(state, "nic.phy_bits", past)
        self._corrected = Counter(state, "nic.phy_corrected_bits", (past * 10**level).astype(np.int64))

    def step(
        self, block: int, down: NDArray[np.bool_], reset: NDArray[np.bool_] | None, effects: Effects
    ) -> tuple[dict[str, NDArray[Any]], NDArray[np.int64] | None]:
        """Returns (columns of class nic, failed codewords in each tick; None if there is none)."""
        rng, ticks = generator(self.seed, 34, block), len(effects.time)
        log_ber = self._ber(rng, ticks, effects)
        per_tick = self._line * self.interval
        bits = np.full(down.shape, int(per_tick), np.int64)
        mean = np.float32(per_tick) * np.exp2(log_ber * np.float32(np.log2(10)))
        corrected = mean + np.sqrt(mean + (np.float32(_WHITE) * mean) ** 2) * rng.standard_normal(
            mean.shape, np.float32
        )
        corrected = np.maximum(corrected, 0).astype(np.int64)
        if down.any():
            bits[down] = 0
            corrected[down] = 0
        columns: dict[str, NDArray[Any]] = {
            "nic.phy_bits": self._bits.add(bits, reset),
            "nic.phy_corrected_bits": self._corrected.add(corrected, reset),
            **self._module(rng, effects),
        }
        return columns, self._failed(block, log_ber, down, effects)

    def _ber(self, rng: np.random.Generator, ticks: int, effects: Effects) -> Floats:
        """Returns (ticks, ports) the log10 of the raw BER: level and drift, continued from the last block, plus
        faults."""
        level, wander, long = self.state["optic.level"], self.state["optic.wander"], ticks * self.interval
        before = level + self._slowly * wander
        phi, often = np.exp(-long / _TAU), 1 - np.exp(-long / _JUMP_EVERY)
        steady, jumps = rng.standard_normal((2, len(level)))
        jumps *= (rng.random(len(level)) < often) / np.sqrt(often)
        pushed = np.sqrt(_STEADY) * steady + np.sqrt(1 - _STEADY) * jumps  # unit variance
        wander = phi * wander + np.sqrt(1 - phi * phi) * pushed
        moved, size = rng.random(len(level)) < _MOVES * long, rng.normal(_MOVE, _MOVE_SD, len(level))
        level = np.where(moved, level + np.where(level > self._usual, -size, size), level).clip(self._best, _WORST)
        self.state["optic.level"], self.state["optic.wander"] = level, wander
        change = (level + self._slowly * wander - before).astype(np.float32)
        share = (np.arange(1, ticks + 1, dtype=np.float32) / np.float32(ticks))[:, None]
        log_ber = before.astype(np.float32) + share * change + self._flicker(rng, ticks)
        added = effects.port.raw_ber
        if added:
            total = np.log10(10.0**log_ber + 10.0 ** added.array())
            log_ber = np.where(added.array() > self._best - 3, total, log_ber).astype(np.float32)
        return np.asarray(log_ber, np.float32)

    def _flicker(self, rng: np.random.Generator, ticks: int) -> Floats:
        """Returns (ticks, ports) the quick part of the drift, interpolated between points some minutes apart."""
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
        """Returns uncorrectable codewords; they have their own generator, so that healthy ports do not change."""
        if not effects.port.raw_ber:
            return None
        rate = np.where(down, 0, failures(log_ber))
        return np.asarray(generator(self.seed, 35, block).poisson(rate * self.interval), np.int64)

    def _module(self, rng: np.random.Generator, effects: Effects) -> dict[str, NDArray[Any]]:
        """Returns the EEPROM readings, once a minute; resolution 1/256 K and 0.1 uW (CMIS)."""
        hold, ticks = max(1, round(_READ_EVERY / self.interval)), len(effects.time)
        hold = min(hold, ticks)
        shape = (-(-ticks // hold), len(self._heat))
        port = effects.port
        heat = self._heat + np.float32(0.3) * rng.standard_normal(shape, np.float32)
        light = self._light * (1 + 0.02 * rng.standard_normal(shape, np.float32))
        if port.module_temperature:
            heat = heat + port.module_temperature.array()[::hold]
        if port.rx_power:
            light = light * 10 ** (port.rx_power.array()[::hold] / 10)
        heat, light = np.rint(heat * 256) / 256, np.rint(light * 1e4) / 1e4
        if port.sentinel:
            silent = port.sentinel.array()[::hold]
            heat, light = np.where(silent, -1 / 256, heat), np.where(silent, _TOP / 1e4, light)
        return {
            "nic.module_temperature": np.repeat(heat.astype(np.float32), hold, axis=0)[:ticks],
            "nic.rx_power_min": np.repeat(light.astype(np.float32), hold, axis=0)[:ticks],
        }


SPEED = 400_000.0  # Mbit/s of an NDR or 400 GbE port
_IDLE, _PACKET = 2e4, 4096  # bytes/s of an idle port, bytes per packet (RoCE MTU)
_SERVED = 0.02  # share of the line that a service uses at full load; chosen
_LEAP_SHARE, _LEAP = 0.01, (2.0, 4.0)
"""Traffic of all ports of a node together: spread of its logarithm from tick to tick (position within a step),
probability of a tick with a multiple of the traffic, and that multiple, as between the same senders. A single port
varies by another 2 %: counters of steady ports vary by 2 % around their 6 min median [cisco-ie telemetry]; collectives
are less smooth."""
_SAVED = 0.05  # share of the line that a checkpoint uses: 11 GB of optimizer state per GPU in 45 s; chosen
_DROP_PER_HOUR, _SEQUENCE_PER_HOUR, _RECOVERY_PER_HOUR = 0.01, 0.05, 0.001  # per port; chosen
_WAIT_TICKS = 1e6  # ticks of port_xmit_wait in a second; its unit is the device's own (IBTA 16.1.4.1). Chosen
_WAITS, _CNP_SHARE = 0.01, 0.25
"""Of a training port: share of the time without credits, marked packets per second (the bursts of a collective), and
congestion notifications per marked packet: a NIC sends one in 50 us and flow at most. Chosen."""
_CRC_SHARE = (
    0.3  # of failed codewords that hit a packet and not the idle pattern, at a quarter of the line rate; chosen
)
_RETRAIN = 30.0  # symbol errors while a link that comes up is trained, on average; chosen
_NARROW, _CEILING = 1 << 32, (1 << 16) - 1  # a 32-bit register; where the classic counter of symbol errors stops (IBTA)
_COUNTERS = (
    *("rx_bytes", "tx_bytes", "rx_packets", "tx_packets", "rx_errors", "tx_errors", "rx_dropped", "tx_dropped"),
    *("crc_errors", "carrier_changes", "symbol_errors", "link_recoveries", "link_downs", "port_tx_wait"),
    *("ack_timeouts", "out_of_sequence", "cnp_sent", "cnp_handled", "ecn_marked", "req_cqe_errors"),
)
_PFC = ("rx_pause", "tx_pause", "rx_pause_duration", "tx_pause_duration")
_PAUSES, _PAUSE_US = 2000.0, 20  # pause frames per second of a port that always waits, and us of each; chosen
Counts = NDArray[np.int64]


class JobLevels:
    """Share of a line that each job uses at full pace; 0 without a job."""

    def __init__(self, schedule: Schedule, level: Callable[[Job], float]) -> None:
        self._jobs, self._level, self._known = schedule.jobs, level, np.zeros(1, np.float32)
        self.uneven = any(not job.networked for job in schedule.jobs)

    def of(self, job: NDArray[np.int32]) -> Floats:
        """Returns the level of each number of a job, -1 for none."""
        known = len(self._known) - 1
        if (needed := int(job.max()) + 1) > known:
            more = [self._level(one) for one in self._jobs[known:needed]]
            self._known = np.array([*self._known[:-1].tolist(), *more, 0.0], np.float32)
        return np.asarray(self._known[job], np.float32)


def _traffic_level(seed: int, world: World, job: Job) -> float:
    """Returns the share of the line of a job; quartiles of senders in [AcmeTrace] are those of the default world."""
    if not job.trains:
        return _SERVED
    return float(generator(seed, 36, job.number).uniform(*world.fabric.traffic)) if job.networked else 0.0


def _ports_that_share(layout: Layout) -> Floats:
    """Returns (ports,) how many GPUs' traffic a port carries."""
    ports = layout.world.fabric.ports
    each = layout.gpus_per_node / ports if 0 < ports < layout.gpus_per_node else 1.0
    return np.where(layout.port_used, each, 0.0).astype(np.float32)


class Links:
    """State of all ports; advances block by block."""

    def __init__(self, layout: Layout, schedule: Schedule, interval: float, seed: int, state: State) -> None:
        rng, n = generator(seed, 30), layout.gpus
        self.layout, self.interval, self.seed = layout, interval, seed
        self._fabric, noise = layout.world.fabric, layout.world.noise
        steady = 1.0 if noise.tau_factor else 0.0
        self._drift = Drift(state, "link", rng, n, 0.5 * steady, interval, noise.tails)
        self._burst = Drift(state, "link.burst", rng, layout.nodes, 0.37 * steady, interval, noise.tails)
        self._noise, self._levels = noise, JobLevels(schedule, partial(_traffic_level, seed, layout.world))
        self._line = self._fabric.speed / 8 * 1e6  # bytes/s
        spread = self._fabric.errors_sd * generator(seed, 36, 1 << 30).standard_normal(n)
        self._symbols = self._fabric.errors_per_hour * np.exp(spread)
        self._shared = _ports_that_share(layout)
        past = rng.integers(10**14, 10**15, (2, n))
        flips, symbols = 2 * rng.integers(1, 4, n), rng.poisson(0.5, n)
        starts = {
            "rx_bytes": past[0],
            "tx_bytes": past[1],
            "rx_packets": past[0] // _PACKET,
            "tx_packets": past[1] // _PACKET,
            "carrier_changes": flips,
            "symbol_errors": symbols,
            "link_downs": flips // 2,
            "port_tx_wait": past[1] // 10**6,
            "ecn_marked": past[0] // 10**8,
            "cnp_sent": past[0] // 10**9,
            "cnp_handled": past[1] // 10**9,
        }
        names = (*_COUNTERS, *(_PFC if self._fabric.kind == "roce" else ()))
        self._counters = {
            name: Counter(state, f"nic.{name}", starts.get(name, np.zeros(n, np.int64))) for name in names
        }
        self._optics = Optics(layout, interval, seed, state)

    def step(self, block: int, activity: GpuActivity, effects: Effects) -> dict[str, NDArray[Any]]:
        """Returns the columns of class nic."""
        rng, fault_rng = generator(self.seed, 31, block), generator(self.seed, 32, block)
        port, shape, restarted = effects.port, activity.load.shape, resets(effects, "nic")
        down = np.broadcast_to(port.down.values | ~self.layout.port_used, shape)
        optical, failed = self._optics.step(block, down, restarted, effects)
        noise = self._drift.draw(rng, shape[0])
        growth = self._traffic(rng, activity, noise, down | port.stalled.values, effects)
        growth |= self._congestion(rng, fault_rng, activity, noise, effects)
        growth |= self._errors(rng, fault_rng, failed, effects, shape)
        columns: dict[str, NDArray[Any]] = {
            "nic.state": (~down).astype(np.uint8),
            "nic.speed": np.where(
                down, np.float32(np.nan), np.float32(self._fabric.speed)
            ),  # sysfs has none while it is down
            **optical,
        }
        none = np.zeros(shape, np.int64)
        for name, counter in self._counters.items():
            gained = growth.get(name)
            if gained is not None or restarted is not None:
                columns[f"nic.{name}"] = counter.add(none if gained is None else gained, restarted)
            else:
                columns[f"nic.{name}"] = counter.repeat(shape[0])
        return columns | self._misread(columns, effects)

    def _traffic(
        self, rng: np.random.Generator, activity: GpuActivity, noise: Floats, still: NDArray[np.bool_], effects: Effects
    ) -> dict[str, Counts]:
        """Returns bytes and packets within each tick."""
        ticks, width = len(activity.pace), self.layout.gpus_per_node
        burst = np.exp(np.float32(self._noise.burst) * self._burst.draw(rng, ticks))
        leaps = rng.random(burst.shape, np.float32) < _LEAP_SHARE
        burst[leaps] *= rng.uniform(*_LEAP, int(leaps.sum())).astype(np.float32)
        share = self._level(effects) * self._pace(activity) * (1 + np.float32(self._noise.traffic) * noise)
        share *= np.repeat(burst, width, axis=1) * effects.port.goodput.values
        share += np.float32(_SAVED) * activity.saving
        rate = _IDLE + self._line * np.clip(share, 0, 1).astype(np.float64)
        sent = np.asarray(np.where(still, 0, rate) * self.interval, np.int64)
        received = sent + rng.integers(0, 1 << 16, sent.shape)
        received[still] = 0
        packets = {"rx_packets": received // _PACKET, "tx_packets": sent // _PACKET}
        return {"rx_bytes": received, "tx_bytes": sent, **packets}

    def _level(self, effects: Effects) -> Floats:
        """Returns (ticks, ports) the share of the line that the job there uses at full pace; 0 without a job."""
        return self._levels.of(effects.job_of_gpu) * np.float32(self._shared)

    def _pace(self, activity: GpuActivity) -> Floats:
        """Returns (ticks, ports) the pace of the jobs; 0 at ports that are not in use."""
        return activity.pace if self.layout.port_used.all() else activity.pace * self.layout.port_used

    def _congestion(
        self,
        rng: np.random.Generator,
        fault_rng: np.random.Generator,
        activity: GpuActivity,
        noise: Floats,
        effects: Effects,
    ) -> dict[str, Counts]:
        """Returns the congestion counters of normal operation: they follow the traffic, and are not faults of the
        port."""
        port, pace = effects.port, self._pace(activity)
        pace = pace * (self._levels.of(effects.job_of_gpu) > 0) if self._levels.uneven else pace
        wait = np.float32(_WAITS) * pace * np.maximum(1 + np.float32(0.3) * noise, 0)
        wait = np.minimum(wait + port.wait.values * (pace > 0), 1)
        mean = np.float32(self._fabric.marked * self.interval) * pace
        marked = mean + np.sqrt(mean * 4) * rng.standard_normal(pace.shape, np.float32)  # bursts: twice Poisson's sd
        marked = np.maximum(marked, 0).astype(np.int64)
        if port.cnp:
            marked += self._fault_errors(fault_rng, port.cnp) * (pace > 0) * round(1 / _CNP_SHARE)
        sent = (marked * _CNP_SHARE).astype(np.int64)
        # the packets that one node marks as congested were sent by the same rail's port of the node before it
        obeyed = np.roll(sent, -self.layout.gpus_per_node, axis=1) * (pace > 0)
        waited = (wait * np.float32(_WAIT_TICKS * self.interval)).astype(np.int64)
        found = {"port_tx_wait": waited, "ecn_marked": marked, "cnp_sent": sent, "cnp_handled": obeyed}
        if self._fabric.kind == "roce":
            found |= self._pauses(fault_rng, pace, wait, effects)
        return found

    def _pauses(self, rng: np.random.Generator, pace: Floats, wait: Floats, effects: Effects) -> dict[str, Counts]:
        """Returns PFC pause frames, and us of pause: more where data waits."""
        mean = np.float32(self.interval) * (
            self._fabric.pause * pace + np.float32(_PAUSES) * np.maximum(wait - _WAITS, 0)
        )
        frames = rng.poisson(mean).astype(np.int64)
        sent = frames // 8
        if effects.port.pause:
            sent = sent + self._fault_errors(rng, effects.port.pause)
        return {
            "rx_pause": frames,
            "tx_pause": sent,
            "rx_pause_duration": frames * _PAUSE_US,
            "tx_pause_duration": sent * _PAUSE_US,
        }

    def _errors(
        self,
        rng: np.random.Generator,
        fault_rng: np.random.Generator,
        failed: Counts | None,
        effects: Effects,
        shape: tuple[int, int],
    ) -> dict[str, Counts]:
        """Returns the rare errors of healthy ports, and errors from faults; counters not named here do not increase."""
        port, hours = effects.port, self.interval / 3600
        found = {
            "rx_dropped": rare(rng, _DROP_PER_HOUR * hours, shape),
            "symbol_errors": self._background(rng, hours, shape),
            "out_of_sequence": rare(rng, _SEQUENCE_PER_HOUR * hours, shape),
            "link_recoveries": rare(rng, _RECOVERY_PER_HOUR * hours, shape),
        }
        affected = (
            ("symbol_errors", port.symbols),
            ("crc_errors", port.crc),
            ("link_recoveries", port.recoveries),
            ("ack_timeouts", port.timeouts),
            ("req_cqe_errors", port.cqe),
        )
        for name, channel in affected:
            if channel:
                found[name] = found.get(name, 0) + self._fault_errors(fault_rng, channel)
        if failed is not None:
            hit = fault_rng.binomial(failed, _CRC_SHARE)
            found["symbol_errors"] += failed
            found["crc_errors"] = found.get("crc_errors", 0) + hit
        if port.flips:
            flips = port.flips.array()
            found |= {"carrier_changes": flips, "link_downs": port.drops.array()}
            found["symbol_errors"] += fault_rng.poisson(_RETRAIN * np.maximum(flips - port.drops.array(), 0))
        if "crc_errors" in found:
            found["rx_errors"] = found["crc_errors"]
            found["out_of_sequence"] += found["crc_errors"]  # a dropped packet makes the next one out of sequence
        return found

    def _background(self, rng: np.random.Generator, hours: float, shape: tuple[int, int]) -> Counts:
        """Returns (ticks, ports) symbol errors of healthy ports after error correction."""
        if self._fabric.errors_sd == 0:
            return rare(rng, self._fabric.errors_per_hour * hours, shape)
        return np.asarray(rng.poisson(self._symbols * hours, shape) * self.layout.port_used, np.int64)

    def _fault_errors(self, rng: np.random.Generator, rate: Channel) -> Counts:
        """Returns (ticks, ports) errors from faults; they have their own generator, so that healthy ports do not
        change."""
        return rng.poisson(rate.array() * self.interval)

    def _misread(self, columns: dict[str, NDArray[Any]], effects: Effects) -> dict[str, NDArray[Any]]:
        """Returns the columns of faulty registers: too narrow, saturated, or not readable."""
        port, out = effects.port, {}
        if port.narrow:
            stood = port.narrow.array()
            for name in ("nic.rx_packets", "nic.tx_packets"):
                narrow = (columns[name] + stood.astype(np.uint64)) % np.uint64(_NARROW)
                out[name] = np.where(stood > 0, narrow, columns[name])
        if port.saturated or port.sentinel:
            stuck = np.where(port.saturated.values, np.uint64(_CEILING), columns["nic.symbol_errors"])
            out["nic.symbol_errors"] = np.where(port.sentinel.values, np.uint64(_NARROW - 1), stuck)
        return out


NVLINK_SPEED = 18 * 200_000.0  # Mbit/s in one direction: 18 links of 25 GB/s [H100 datasheet]
_NVLINK_LINE = NVLINK_SPEED / 8 * 1e6 / 1024  # KiB/s
_NVLINK_LEVEL = (0.04, 0.20)  # of the line on average, for each job: tensor parallelism by how it is split; chosen
_REPLAY_PER_HOUR = 0.002  # per GPU; chosen: healthy links have a few in a year
_SWING = 0.03  # from tick to tick; chosen


class Nvlinks:
    """State of the NVLinks of all GPUs; advances block by block."""

    def __init__(self, layout: Layout, schedule: Schedule, interval: float, seed: int, state: State) -> None:
        rng, n = generator(seed, 37), layout.gpus
        self.layout, self.interval, self.seed = layout, interval, seed
        past = rng.integers(10**11, 10**12, n)
        starts = {"tx_data": past, "rx_data": past + rng.integers(0, 10**9, n), "replay_errors": rng.poisson(0.1, n)}
        names = ("replay_errors", "recovery_errors", "crc_errors", "tx_data", "rx_data")
        zero = np.zeros(n, np.int64)
        self._counters = {name: Counter(state, f"nvlink.{name}", starts.get(name, zero)) for name in names}
        self._levels = JobLevels(
            schedule, lambda job: float(generator(seed, 40, 1, job.number).uniform(*_NVLINK_LEVEL))
        )

    def step(self, block: int, activity: GpuActivity, effects: Effects) -> dict[str, NDArray[Any]]:
        """Returns the columns of class nvlink."""
        rng, fault_rng = generator(self.seed, 38, block), generator(self.seed, 39, block)
        gpu, shape = effects.gpu, activity.load.shape
        restarted, none = resets(effects, "nvlink"), np.zeros(shape, np.int64)
        growth = {**self._traffic(rng, activity, effects)}
        growth["replay_errors"] = rare(rng, _REPLAY_PER_HOUR / 3600 * self.interval, shape)
        if gpu.nvlink_replays:
            growth["replay_errors"] += fault_rng.poisson(gpu.nvlink_replays.array() * self.interval)
        if gpu.nvlink_crc:
            growth["crc_errors"] = fault_rng.poisson(gpu.nvlink_crc.array() * self.interval)
        if gpu.nvlink_recoveries:
            growth["recovery_errors"] = gpu.nvlink_recoveries.array()
        columns: dict[str, NDArray[Any]] = {
            "nvlink.state": np.broadcast_to(~gpu.nvlink_down.values, shape),
            "nvlink.speed": np.broadcast_to(np.float32(NVLINK_SPEED) * gpu.nvlink_speed.values, shape),
        }
        for name, counter in self._counters.items():
            if name in growth or restarted is not None:
                columns[f"nvlink.{name}"] = counter.add(growth.get(name, none), restarted)
            else:
                columns[f"nvlink.{name}"] = counter.repeat(shape[0])
        return columns

    def _traffic(
        self, rng: np.random.Generator, activity: GpuActivity, effects: Effects
    ) -> dict[str, NDArray[np.int64]]:
        """Returns KiB within each tick; each GPU of a node receives what its neighbour sends."""
        width, shape = self.layout.gpus_per_node, activity.pace.shape
        share = self._level(effects) * activity.pace * (1 + np.float32(_SWING) * rng.standard_normal(shape, np.float32))
        share = np.where(effects.gpu.nvlink_down.values, 0, np.clip(share, 0, effects.gpu.nvlink_speed.values))
        sent = np.asarray(share.astype(np.float64) * (_NVLINK_LINE * self.interval), np.int64)
        received = np.roll(sent.reshape(shape[0], -1, width), 1, axis=2).reshape(shape)
        return {"tx_data": sent, "rx_data": received}

    def _level(self, effects: Effects) -> Floats:
        """Returns (ticks, GPUs) the share of the line that the job there uses at full pace; 0 without a job."""
        return self._levels.of(effects.job_of_gpu)
