"""Faults of one end of a cable: sudden errors, links that go down or flap, NICs that stall, optics that age.

Raw bit errors of an aging optic rise by decades over days, until error correction fails.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from agents.sim.effects import Effects
from agents.sim.faults.gpu import hang_job
from agents.sim.faults.kind import DAY, HOUR, Chain, Fault, Kind, Rate, Span
from agents.sim.physics.noise import Floats

DARK = -40.0  # dB: no received light
_TIMEOUTS = 2.0  # per second, of the queue pairs of a rank that waits for a dead port; chosen
_STEP_S = 5.0  # s of a step: agents/sim/physics/jobs.py
_BURSTS = -4.2  # log10 of the raw BER of a link whose errors come in bursts: the FEC corrects that many single errors


@dataclass(frozen=True)
class LinkDegradation(Kind):
    """Dirty optic or cable: symbol and checksum errors rise, the link flaps, the job's collectives slow down."""

    name = "link_degradation"
    row = 14
    target = "nic"
    detectability = "hard"
    attribution = "network"
    seen = "symbol and checksum errors of the port, flaps with their events, step time of all ranks"
    unseen = "which end of the cable it is, from one end's counters"
    rate = Rate(0.001, "link-month", "assumed: 0.5 % of optical links a month degrade, a fifth of them abruptly")
    lasts = Span(600.0, 2 * HOUR)
    idle_soft = True
    signals = (
        *("nic.carrier_changes", "nic.symbol_errors", "nic.crc_errors", "nic.rx_errors", "nic.state"),
        "nic.phy_corrected_bits",
    )
    ranges: ClassVar = {"symbol_rate": (0.5, 5.0), "flap_every": (120.0, 300.0)}
    limits: ClassVar = {
        "symbol_rate": (0.0, 1e6),
        "flap_every": (1.0, 1e6),
        "flap_length": (0.1, 1e5),
        "collective": (1.0, 100.0),
    }
    severe = "symbol_rate"
    loaded = True
    symbol_rate: float | None = None  # symbol errors per second at full effect; 0.04/s is BER 1e-13 at 400 Gb/s
    flap_every: float | None = None  # mean time between flaps (s)
    flap_length: float = 12.0  # mean time a flap lasts (s); published flaps last 1 to 30 s
    collective: float = 1.1  # factor on the job's time in collectives; 2 while the link is down

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.symbol_rate is not None
        assert self.flap_every is not None
        port, grown = effects.port, effects.ramp(fault.onset, fault.end, 60.0)
        port.symbols.add(fault.device, self.symbol_rate * grown)
        port.crc.add(fault.device, 0.3 * self.symbol_rate * grown)  # some errors pass as whole packets; chosen
        port.raw_ber.raise_to(fault.device, np.where(grown > 0, _BURSTS, -99.0))
        effects.slow_job([fault.device], 1 + (self.collective - 1) * (grown > 0))
        for begin, end in fault.flap_times(self.flap_every, self.flap_length):
            flap_link(effects, fault.entity, fault.device, float(begin), float(end))


@dataclass(frozen=True)
class LinkDown(Kind):
    """Link goes down and stays down: no light, no traffic; the job on it hangs until its library times out."""

    name = "link_down"
    row = 15
    target = "nic"
    detectability = "hard"
    attribution = "network"
    seen = "state, speed and received light of the port, link_state, one carrier change; the end of its job"
    unseen = "whether cable, transceiver, port or the leaf's port failed"
    rate = Rate(0.00057, "link-month", "Alibaba HPN: 0.057 % of the links between NIC and leaf fail in a month")
    lasts = Span(240.0, 2 * HOUR, 24 * HOUR)
    idle_soft = True
    signals = ("nic.state", "nic.carrier_changes", "nic.link_downs", "nic.rx_power_min", "event:link_state")
    ranges: ClassVar = {"dies_after": (15.0, 90.0)}
    limits: ClassVar = {"dies_after": (0.1, 1e5)}
    dies_after: float | None = None  # s until the job has died: RDMA timeout times the number of retries

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        dies = stops_at(fault, self.dies_after)
        take_link_down(effects, fault.entity, fault.device, fault.onset, fault.end)
        effects.port.rx_power.add(fault.device, DARK * effects.active(fault.onset, fault.end))
        stall_job_at_port(effects, fault.device, fault.onset, dies)

    def job_death_time(self, fault: Fault) -> float:
        """Returns the second at which its library closes the connection."""
        return stops_at(fault, self.dies_after)


@dataclass(frozen=True)
class LinkFlap(Kind):
    """Link goes down for seconds, once or several times; each time the job's next steps take twice as long."""

    name = "link_flap"
    row = 16
    target = "nic"
    detectability = "hard"
    attribution = "network"
    seen = "link_state down and up, carrier changes, link downs, timeouts; steps of twice the length"
    unseen = "the cause; a flap between two samples appears only in counters and events"
    rate = Rate(0.01, "link-day", "assumed: Alibaba HPN counts 5,000 to 60,000 flaps a day, number of links unknown")
    lasts = Span(120.0, 240.0, 1200.0)
    idle_soft = True
    signals = ("nic.carrier_changes", "nic.link_downs", "nic.ack_timeouts", "nic.state", "event:link_state")
    limits: ClassVar = {"flaps": (1, 1000)}
    effect_unit = "flaps"
    flaps: int | None = None  # number of flaps; drawn: geometric, mean 2

    def drawn(self, rng: np.random.Generator) -> Self:
        """Returns the fault with a drawn number of flaps unless it is given."""
        drawn = int(rng.geometric(0.5))
        return replace(super().drawn(rng), flaps=self.flaps or drawn)

    def effect(self) -> float | None:
        """Returns the size of its effect."""
        return self.flaps

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.flaps is not None
        rng = fault.rng()
        places = (fault.end - fault.onset) / self.flaps
        for number in range(self.flaps):
            length = min(float(rng.uniform(1.0, 30.0)), 0.5 * places)
            begin = fault.onset + number * places + float(rng.uniform(0.0, 0.3)) * places * (number > 0)
            steps = int(rng.integers(1, 4))
            take_link_down(effects, fault.entity, fault.device, begin, begin + length)
            slow = share(effects, begin, min(begin + 2 * steps * _STEP_S, fault.end))
            effects.lengthen_steps([fault.device], slow)


@dataclass(frozen=True)
class NicStall(Kind):
    """Firmware of a NIC hangs: the link is up, but nothing is sent or received; its job hangs, then dies."""

    name = "nic_stall"
    row = 19
    target = "nic"
    detectability = "hard"
    attribution = "network"
    seen = (
        "byte counters that do not increase, timeouts, completions with errors, the driver's message; the end of its "
        "job"
    )
    unseen = "what the firmware was doing"
    rate = Rate(0.33, "1M GPU-hours", "Llama 3: 7 interruptions by NICs in 21.2M GPU-hours")
    lasts = Span(300.0, 1800.0, 4 * HOUR)
    idle_soft = True
    signals = ("nic.rx_bytes", "nic.tx_bytes", "nic.req_cqe_errors", "nic.ack_timeouts", "event:kernel")
    ranges: ClassVar = {"dies_after": (30.0, 300.0), "cqe_rate": (1.0, 20.0)}
    limits: ClassVar = {"dies_after": (0.1, 1e5), "cqe_rate": (0.0, 1e6)}
    severe = "cqe_rate"
    loaded = True
    dies_after: float | None = None  # s until the job has died
    cqe_rate: float | None = None  # completions with an error, per second, until then

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.cqe_rate is not None
        dies = stops_at(fault, self.dies_after)
        effects.port.stalled.add(fault.device, effects.active(fault.onset, fault.end))
        effects.port.cqe.add(fault.device, self.cqe_rate * effects.active(fault.onset, dies))
        stall_job_at_port(effects, fault.device, fault.onset, dies)
        effects.port.reset.add(fault.device, effects.impulse(fault.end) > 0)  # its driver is reloaded
        text = f"mlx5_core {_pci(fault.entity)}: poll_health:816: device's health compromised - reached miss count"
        data = {"pattern": "mlx5_health", "class": "nic", "severity": "critical", "device": _pci(fault.entity)}
        seq = zlib.crc32(f"{fault.entity} {fault.onset}".encode()) % 1_000_000
        effects.add_event(fault.onset + 4.0, fault.entity, "kernel", None, **data, text=text, seq=seq)

    def job_death_time(self, fault: Fault) -> float:
        """Returns the second at which its library closes the connection."""
        return stops_at(fault, self.dies_after)


def take_link_down(effects: Effects, entity: str, port: int, begin: float, end: float) -> None:
    """Takes a link down from `begin` to `end`: state, counters and events as the agent reports them."""
    if end <= effects.since or begin > effects.until:
        return
    effects.port.down.add(port, effects.active(begin, end))
    effects.port.drops.add(port, effects.impulse(begin))
    for moment, before, now in ((begin, "active", "down"), (end, "down", "active")):
        effects.port.flips.add(port, effects.impulse(moment))
        state = "up" if now == "active" else "down"
        effects.add_event(moment, entity, "link_state", None, **{"state": state, "from": before, "to": now})
    working = effects.job_of_gpu[:, port] >= 0
    effects.port.timeouts.add(port, _TIMEOUTS * share(effects, begin, end) * working)


def flap_link(effects: Effects, entity: str, port: int, begin: float, end: float) -> None:
    """Takes a link down and up once, and stalls the job's collectives during that time."""
    if end > effects.since and begin <= effects.until:
        take_link_down(effects, entity, port, begin, end)
        effects.slow_job([port], 1 + share(effects, begin, end))


def stall_job_at_port(effects: Effects, port: int, begin: float, dies: float) -> None:
    """Makes the job on a port wait for data that never arrives, until it dies."""
    hang_job(effects, port, begin, dies)
    working = effects.job_of_gpu[:, port] >= 0
    effects.port.timeouts.add(port, _TIMEOUTS * share(effects, begin, dies) * working)


def share(effects: Effects, begin: float, end: float) -> Floats:
    """Returns (ticks,): the part of the time since the previous tick in [begin, end)."""
    before = np.concatenate([[effects.since], effects.time[:-1]])
    inside = np.minimum(effects.time, end) - np.maximum(before, begin)
    return np.asarray(np.clip(inside / (effects.time - before), 0, 1), np.float32)


def stops_at(fault: Fault, dies_after: float | None) -> float:
    """Returns the second at which the job on the affected part has died."""
    assert dies_after is not None
    return min(fault.onset + dies_after, fault.end)


def _pci(entity: str) -> str:
    """Returns the address of a NIC; chosen: one behind each PCIe switch of the node."""
    return f"0000:{0x18 + 0x11 * int(entity.rpartition('_')[2]) % 0xE0:02x}:00.0"


_NEW, _CLIFF, _WORST = -9.0, -3.3, -2.6
"""log10 of the raw BER that it adds: where nothing is visible; where codewords fail every second and the link flaps;
maximum, above which a link does not train. RS(544,514) corrects up to about 2.4e-4."""
_USUAL, _DECADE = -7.5, 1.0  # log10 of a healthy port's raw BER; the smallest detectable rise
_SETTLES = HOUR  # time to reach `start`
_FAILS = -3.62  # log10 of 2.4e-4: the first codeword in hours fails
_COLLECTIVE = 1.1  # factor on the job's collectives while packets are sent again; chosen
_CAUSES = ("dirt", "dirt", "heat")  # two of three from dirt, one from a hot module; chosen


@dataclass(frozen=True)
class OpticDegradation(Kind):
    """Optic or connector degrades over days: raw bit errors rise by decades, then the FEC fails and the link flaps."""

    name = "optic_degradation"
    row = 14
    target = "nic"
    detectability = "soft"
    attribution = "network"
    seen = "corrected bits per bit, received light or module temperature; at the end symbol errors, recoveries, flaps"
    unseen = "any sign before the raw error rate has risen tenfold; from then on it counts as detectable"
    rate = Rate(0.004, "link-month", "assumed: 0.5 % of optical links a month degrade, four fifths of them slowly")
    lasts = Span(6 * HOUR, 2 * DAY, 14 * DAY)
    signals = (
        *("nic.phy_corrected_bits", "nic.phy_bits", "nic.rx_power_min", "nic.module_temperature"),
        *("nic.symbol_errors", "nic.crc_errors", "nic.link_recoveries", "nic.carrier_changes"),
    )
    ranges: ClassVar = {"slope": (0.1, 1.0), "start": (-8.0, -4.5), "loss": (0.5, 3.0), "heat": (10.0, 25.0)}
    limits: ClassVar = {
        "slope": (0.0, 100.0),
        "start": (-9.0, -2.6),
        "loss": (0.0, 40.0),
        "heat": (0.0, 60.0),
        "flap_every": (60.0, 1e6),
    }
    choices: ClassVar = {"cause": _CAUSES}
    severe = "slope"
    chain = Chain("link_down", 0.15, Span(3 * HOUR, DAY, 7 * DAY))
    slope: float | None = None  # decades a day
    start: float | None = None  # log10 of the raw BER that it reaches within an hour, as after a scratch
    loss: float | None = None  # dB of received light lost at the cliff, if the cause is dirt
    heat: float | None = None  # K by which the module is too hot at the cliff, if the cause is heat
    cause: str | None = None
    flap_every: float = 900.0  # mean time between flaps beyond the cliff (s)

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.loss is not None
        assert self.heat is not None
        device, port = fault.device, effects.port
        here, log_ber = effects.active(fault.onset, fault.end), self._log_ber(effects.time - fault.onset)
        port.raw_ber.raise_to(device, np.where(here, log_ber, -99.0))
        far = here * np.clip((log_ber - _NEW) / (_CLIFF - _NEW), 0, None)  # of the way to the cliff
        if self.cause == "dirt":
            port.rx_power.add(device, -self.loss * far)
        else:
            port.module_temperature.add(device, self.heat * far)
        failing = here & (log_ber > _CLIFF - 0.15)
        if failing.any():
            port.recoveries.add(device, 0.003 * failing)  # one in five minutes; chosen
            effects.slow_job([device], 1 + (_COLLECTIVE - 1) * failing)
        for begin, end in self._flaps(fault, effects.until):
            flap_link(effects, fault.entity, device, begin, end)

    def detectable_from(self, fault: Fault) -> float:
        """Returns the second from which on it can be detected."""
        return min(fault.onset + self._age_at(_USUAL + _DECADE), fault.end)

    def cliff_time(self, fault: Fault) -> float:
        """Returns the second from which error correction fails; the end if it never does."""
        return min(fault.onset + self._age_at(_FAILS), fault.end)

    def _log_ber(self, age: np.ndarray) -> np.ndarray:
        """Returns the log10 of the raw BER that it adds, by its age in s."""
        assert self.slope is not None
        assert self.start is not None
        settled = _NEW + (self.start - _NEW) * np.clip(age / _SETTLES, 0, 1)
        return np.minimum(settled + self.slope * np.maximum(age - _SETTLES, 0) / DAY, _WORST)

    def _age_at(self, log_ber: float) -> float:
        """Returns its age (s) when it adds this much."""
        assert self.slope is not None
        assert self.start is not None
        if log_ber <= self.start:
            return _SETTLES * (log_ber - _NEW) / max(self.start - _NEW, 1e-9)
        return _SETTLES + (log_ber - self.start) / max(self.slope, 1e-9) * DAY

    def _flaps(self, fault: Fault, until: float) -> Iterator[tuple[float, float]]:
        """Yields begin and end of each flap beyond the cliff that begins by `until`."""
        rng, begin = fault.rng(), fault.onset + self._age_at(_CLIFF)
        while (begin := begin + float(rng.uniform(0.3, 1.7)) * self.flap_every) < fault.end and begin <= until:
            end = begin + float(rng.uniform(1.0, 30.0))  # published flaps last 1 to 30 s
            if end < fault.end:
                yield begin, end
