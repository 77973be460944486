"""Network ports: traffic follows the pace of the job, congestion the traffic; only faults make many errors."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.sim.effects import Channel, Effects
from agents.sim.layout import Layout
from agents.sim.physics.jobs import Tempo
from agents.sim.physics.lives import resets
from agents.sim.physics.noise import Counter, Drift, Floats, generator, rare
from agents.sim.physics.optics import Optics
from agents.sim.physics.state import State

SPEED = 400_000.0  # Mbit/s of an NDR or 400 GbE port
_LINE, _IDLE, _PACKET = 50e9, 2e4, 4096  # bytes/s of the line and of an idle port, bytes per packet (RoCE MTU)
_LEVEL = (0.10, 0.26)  # of the line, on the mean: drawn for each job; quartiles of senders [AcmeTrace]
_BURST, _LEAP_SHARE, _LEAP = 0.015, 0.01, (2.0, 4.0)
"""Of a node's ports together: spread of the logarithm from tick to tick (where in its step the job is), and ticks in
which the traffic is a multiple, as between the same senders. What a port does beside its node: 2 %. Counters of
steady ports stray by 2 % about their median of 6 min [cisco-ie telemetry]; collectives are less smooth than those."""
_SAVED = 0.05  # of the line, that a checkpoint sends: 11 GB of optimizer state of each GPU in its 45 s; chosen
_SYMBOL_PER_HOUR = 0.01  # background per port: BER 7e-18 at 400 Gb/s, far better than the 1e-15 of factory tests
_DROP_PER_HOUR, _SEQUENCE_PER_HOUR, _RECOVERY_PER_HOUR = 0.01, 0.05, 0.001  # per port; chosen
_WAIT_TICKS = 1e6  # ticks of port_xmit_wait in a second; its unit is the device's own (IBTA 16.1.4.1). Chosen
_WAITS, _MARKED, _CNP_SHARE = 0.01, 40.0, 0.25
"""Of a training port: share of the time without credits, marked packets per second (the bursts of a collective), and
congestion notifications per marked packet: a NIC sends one in 50 us and flow at most. Chosen."""
_CRC_SHARE = (
    0.3  # of failed codewords that hit a packet and not the idle pattern, at a quarter of the line rate; chosen
)
_RETRAIN = 30.0  # symbol errors while a link that comes up is trained, on the mean; chosen
_NARROW, _CEILING = 1 << 32, (1 << 16) - 1  # a 32-bit register; where the classic counter of symbol errors stops (IBTA)
_COUNTERS = (
    *("rx_bytes", "tx_bytes", "rx_packets", "tx_packets", "rx_errors", "tx_errors", "rx_dropped", "tx_dropped"),
    *("crc_errors", "carrier_changes", "symbol_errors", "link_recoveries", "link_downs", "port_tx_wait"),
    *("ack_timeouts", "out_of_sequence", "cnp_sent", "cnp_handled", "ecn_marked", "req_cqe_errors"),
)
Counts = NDArray[np.int64]


class Links:
    """State of all ports; advances block by block."""

    def __init__(self, layout: Layout, interval: float, seed: int, state: State) -> None:
        rng, n = generator(seed, 30), layout.gpus
        self.layout, self.interval, self.seed = layout, interval, seed
        self._drift = Drift(state, "link", rng, n, 0.5, interval)
        self._burst = Drift(state, "link.burst", rng, layout.nodes, 0.37, interval)
        self._levels: list[float] = []  # of the jobs
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
        self._counters = {
            name: Counter(state, f"nic.{name}", starts.get(name, np.zeros(n, np.int64))) for name in _COUNTERS
        }
        self._optics = Optics(layout, interval, seed, state)

    def advance(self, block: int, tempo: Tempo, effects: Effects) -> dict[str, NDArray[Any]]:
        """Columns of class nic."""
        rng, harm = generator(self.seed, 31, block), generator(self.seed, 32, block)
        port, shape, anew = effects.port, tempo.load.shape, resets(effects, "nic")
        down = np.broadcast_to(port.down.values, shape)
        optical, failed = self._optics.advance(block, down, anew, effects)
        noise = self._drift.draw(rng, shape[0])
        growth = self._traffic(rng, tempo, noise, down | port.stalled.values, effects)
        growth |= self._congestion(rng, harm, tempo, noise, effects)
        growth |= self._errors(rng, harm, failed, effects, shape)
        columns: dict[str, NDArray[Any]] = {
            "nic.state": (~down).astype(np.uint8),
            "nic.speed": np.where(down, np.float32(np.nan), np.float32(SPEED)),  # sysfs has none while it is down
            **optical,
        }
        none = np.zeros(shape, np.int64)
        for name, counter in self._counters.items():
            gained = growth.get(name)
            if gained is not None or anew is not None:
                columns[f"nic.{name}"] = counter.add(none if gained is None else gained, anew)
            else:
                columns[f"nic.{name}"] = counter.still(shape[0])
        return columns | self._misread(columns, effects)

    def _traffic(
        self, rng: np.random.Generator, tempo: Tempo, noise: Floats, still: NDArray[np.bool_], effects: Effects
    ) -> dict[str, Counts]:
        """Bytes and packets within each tick."""
        ticks, width = len(tempo.pace), self.layout.gpus_per_node
        burst = np.exp(np.float32(_BURST) * self._burst.draw(rng, ticks))
        leaps = rng.random(burst.shape, np.float32) < _LEAP_SHARE
        burst[leaps] *= rng.uniform(*_LEAP, int(leaps.sum())).astype(np.float32)
        share = self._level(effects) * tempo.pace * (1 + np.float32(0.02) * noise)
        share *= np.repeat(burst, width, axis=1) * effects.port.goodput.values
        share += np.float32(_SAVED) * tempo.saving
        rate = _IDLE + _LINE * np.clip(share, 0, 1).astype(np.float64)
        sent = np.asarray(np.where(still, 0, rate) * self.interval, np.int64)
        received = sent + rng.integers(0, 1 << 16, sent.shape)
        received[still] = 0
        packets = {"rx_packets": received // _PACKET, "tx_packets": sent // _PACKET}
        return {"rx_bytes": received, "tx_bytes": sent, **packets}

    def _level(self, effects: Effects) -> Floats:
        """(ticks, ports) share of the line that the job there uses at full pace; of no job 0."""
        job = effects.job_of_gpu
        for number in range(len(self._levels), int(job.max()) + 1):
            self._levels.append(float(generator(self.seed, 36, number).uniform(*_LEVEL)))
        return np.asarray([*self._levels, 0.0], np.float32)[job]

    def _congestion(
        self, rng: np.random.Generator, harm: np.random.Generator, tempo: Tempo, noise: Floats, effects: Effects
    ) -> dict[str, Counts]:
        """What a busy network says of itself: it follows the traffic, and is no fault of the port."""
        port, pace = effects.port, tempo.pace
        wait = np.float32(_WAITS) * pace * np.maximum(1 + np.float32(0.3) * noise, 0)
        wait = np.minimum(wait + port.wait.values * (pace > 0), 1)
        mean = np.float32(_MARKED * self.interval) * pace
        marked = mean + np.sqrt(mean * 4) * rng.standard_normal(pace.shape, np.float32)  # bursts: twice Poisson's sd
        marked = np.maximum(marked, 0).astype(np.int64)
        if port.cnp:
            marked += self._struck(harm, port.cnp) * (pace > 0) * round(1 / _CNP_SHARE)
        sent = (marked * _CNP_SHARE).astype(np.int64)
        # the packets that one node marks as congested were sent by the same rail's port of the node before it
        obeyed = np.roll(sent, -self.layout.gpus_per_node, axis=1) * (pace > 0)
        waited = (wait * np.float32(_WAIT_TICKS * self.interval)).astype(np.int64)
        return {"port_tx_wait": waited, "ecn_marked": marked, "cnp_sent": sent, "cnp_handled": obeyed}

    def _errors(
        self,
        rng: np.random.Generator,
        harm: np.random.Generator,
        failed: Counts | None,
        effects: Effects,
        shape: tuple[int, int],
    ) -> dict[str, Counts]:
        """What rarely happens to sound ports; a counter that is not named here stands still."""
        port, hours = effects.port, self.interval / 3600
        found = {
            "rx_dropped": rare(rng, _DROP_PER_HOUR * hours, shape),
            "symbol_errors": rare(rng, _SYMBOL_PER_HOUR * hours, shape),
            "out_of_sequence": rare(rng, _SEQUENCE_PER_HOUR * hours, shape),
            "link_recoveries": rare(rng, _RECOVERY_PER_HOUR * hours, shape),
        }
        struck = (
            ("symbol_errors", port.symbols),
            ("crc_errors", port.crc),
            ("link_recoveries", port.recoveries),
            ("ack_timeouts", port.timeouts),
            ("req_cqe_errors", port.cqe),
        )
        for name, channel in struck:
            if channel:
                found[name] = found.get(name, 0) + self._struck(harm, channel)
        if failed is not None:
            hit = harm.binomial(failed, _CRC_SHARE)
            found["symbol_errors"] += failed
            found["crc_errors"] = found.get("crc_errors", 0) + hit
        if port.flips:
            flips = port.flips.whole()
            found |= {"carrier_changes": flips, "link_downs": port.drops.whole()}
            found["symbol_errors"] += harm.poisson(_RETRAIN * np.maximum(flips - port.drops.whole(), 0))
        if "crc_errors" in found:
            found["rx_errors"] = found["crc_errors"]
            found["out_of_sequence"] += found["crc_errors"]  # what is thrown away is missed by the next packet
        return found

    def _struck(self, rng: np.random.Generator, rate: Channel) -> Counts:
        """(ticks, ports) errors that faults make; draws of their own, so that the sound ports stay as they are."""
        return rng.poisson(rate.whole() * self.interval)

    def _misread(self, columns: dict[str, NDArray[Any]], effects: Effects) -> dict[str, NDArray[Any]]:
        """Counters that do not show what they counted: registers that are too narrow, full, or not readable."""
        port, out = effects.port, {}
        if port.narrow:
            stood = port.narrow.whole()
            for name in ("nic.rx_packets", "nic.tx_packets"):
                narrow = (columns[name] + stood.astype(np.uint64)) % np.uint64(_NARROW)
                out[name] = np.where(stood > 0, narrow, columns[name])
        if port.saturated or port.sentinel:
            stuck = np.where(port.saturated.values, np.uint64(_CEILING), columns["nic.symbol_errors"])
            out["nic.symbol_errors"] = np.where(port.sentinel.values, np.uint64(_NARROW - 1), stuck)
        return out
