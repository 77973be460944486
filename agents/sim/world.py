"""World: the structure of a site, which the physics reads; draw_world() draws one from published facts.

The defaults are one liquid-cooled training hall. A drawn world differs in kind, not only in noise: cooling, part,
fabric, work, instruments, interval, missing collectors, habits. Ranges are wider than the published ones.

| what | drawn from | published |
|---|---|---|
| thermal resistance, plate | 0.02 to 0.045 K/W | 0.03 for H100 cold plates |
| thermal resistance, air | 0.04 to 0.09 K/W at full fans | A100 SXM: 400 W, 40 K above the inlet (HGX) |
| air inlet | 18 to 35 Celsius | ASHRAE TC 9.9: 18 to 27, allowed to 32 (A1), 35 (A2) |
| coolant supply | 18 to 45 Celsius | ASHRAE W17 to W45 |
| slowdown, shutdown | 83 to 92, 3 to 8 K above | NVML of A100, H100, H200, B200 |
| power and clock of equal GPUs | 1 to 8 % | Sinha, SC'22: 8 % time, up to 20 % power; Llama 3: 1 to 2 % |
| thermal resistance of equal GPUs | 3 to 20 % | Zenodo V100 and A100 fleets: 10 K between GPUs of a node |
| persistent imbalance of experts | 3 to 6 % | MoE papers: capacity 1.25; What-if, OSDI'25 |
| step time | 0.5 to 60 s | Llama 3, MegaScale: 2 to 30 s |
| post-FEC bit errors | 1e-16 to 1e-13 | IEEE 802.3: 1e-12 to 1e-15; IBTA: 1e-15 |
| BMC refresh | 30 to 60 s | Redfish telemetry of iDRAC and XCC |
| missing values | 0 to 5 % | SMD, ASD, AcmeTrace: below 1 to 4 % |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np

Range = tuple[float, float]
HALVES = ("train", "report")
"""Detectors are tuned on worlds of the first half; those of the second are looked at for a report alone."""


@dataclass(frozen=True)
class Part:
    """GPU model: W, MHz, bytes and Celsius. `above_*`: K of its memory above the core."""

    name: str = "H100-SXM"
    board_w: float = 700.0
    load_w: float = 780.0  # what a full load would draw without the board's limit
    idle_w: float = 78.0
    clock: float = 1755.0
    memory: float = 80.0 * 2**30
    slowdown: float = 87.0
    shutdown: float = 95.0
    above_idle: float = 14.0
    above_load: float = 6.0


@dataclass(frozen=True)
class Cooling:
    """How heat leaves a GPU. kind: liquid, hybrid (plates for GPUs, air for the rest) or air."""

    kind: str = "liquid"
    r_th: float = 0.030  # K/W from GPU to coolant, or to the air at full fan speed
    r_spread: float = 0.10  # of the logarithm, between equal GPUs
    warming: float = 0.0074  # K/W by which the coolant warms below the GPU; air: part of r_th
    behind: float = 3.0  # K by which the GPU behind another one gets warmer coolant or air, at the board's limit
    heat_j_k: float = 440.0  # J/K of a GPU with its plate or sink
    capture: float = 0.85  # share of a node's heat that the loop takes
    supply: float = 32.0  # Celsius
    supply_loop: float = 0.4  # K between loops
    supply_daily: float = 0.5  # K, amplitude over a day
    supply_noise: float = 0.15
    supply_tau: float = 95.0
    night: float = 0.0  # K by which supply and inlet are lowered from 22 h to 6 h

    @property
    def has_loop(self) -> bool:
        """Whether coolant loops exist."""
        return self.kind != "air"


@dataclass(frozen=True)
class Air:
    """Inlet air and fans of nodes. Fans: share of the full speed, which rises with inlet and hottest GPU."""

    inlet: float = 24.0
    rack_sd: float = 0.6
    node_sd: float = 0.4
    row_sd: float = 0.0
    daily: float = 0.4
    drift: float = 0.2
    step: float = 0.5  # K, resolution of the BMC
    rpm: float = 6000.0  # at 24 Celsius
    most_rpm: float = 12_000.0
    rpm_per_k: float = 900.0
    least: float = 0.3  # share of the full speed of an idle node that air cools
    per_k: float = 0.02  # share of the full speed per K of its hottest GPU above `aim`
    aim: float = 60.0
    tau: float = 20.0  # s of a fan's controller
    exponent: float = 0.8  # convection grows with the air's speed to this power (turbulent flow: 0.8)


@dataclass(frozen=True)
class Spread:
    """Spreads between equal devices. `*_offset`: standard deviation of instruments' constant errors."""

    lottery: float = 0.012  # of power and clock
    temperature_offset: float = 0.0  # K
    power_offset: float = 0.0  # share
    inlet_offset: float = 0.0  # K
    rank: float = 0.004  # share of the compute time


@dataclass(frozen=True)
class Noise:
    """Noise of readings. tails: normal, t4 or t3; `tau_factor` scales all correlation times, 0 is white."""

    tails: str = "t4"
    tau_factor: float = 1.0
    power: float = 0.04
    clock: float = 0.002
    temperature: float = 0.3
    step_time: float = 0.004
    traffic: float = 0.02  # of one port
    burst: float = 0.015  # of all ports of a node together, of the logarithm


@dataclass(frozen=True)
class Instruments:
    """Resolution, refresh and harmless lies of instruments. `glitches`: per 1,000 device-days and signal."""

    temperature_step: float = 1.0
    power_step: float = 1.0
    coolant_step: float = 0.01  # K; flow: 10 times as many L/min
    bmc_refresh: float = 0.0  # s in which a BMC repeats a reading
    drift: float = 0.0  # K a day, of inlet sensors
    glitches: float = 0.0
    margins: bool = False  # gpu.thermal_margin and gpu.slowdown_margin are read
    standby: int = 0  # power supplies of a node in cold redundancy
    missing: float = 0.0  # share of values
    jitter: float = 0.0  # s, at most half the interval
    absent: tuple[str, ...] = ()  # groups of GROUPS that no collector reads


@dataclass(frozen=True)
class Fabric:
    """Ports. kind: both (every counter of either), ib or roce."""

    kind: str = "both"
    rails: bool = True  # port r of all nodes of a pod on one leaf; else all ports of a rack
    ports: int = 0  # of a node in use; the others are down on purpose; 0: all
    speed: float = 400_000.0  # Mbit/s
    errors_per_hour: float = 0.01  # symbol errors of a port after FEC
    errors_sd: float = 0.0  # of its logarithm, between ports
    ber: float = -7.5  # log10 of the raw bit error rate
    ber_sd: float = 0.5
    traffic: Range = (0.10, 0.26)  # of the line, of a job
    pause: float = 0.0  # PFC pause frames per second of a port at full pace
    marked: float = 40.0  # marked packets per second of a port at full pace


@dataclass(frozen=True)
class Work:
    """Jobs. `shares`: kind of job -> share of the busy nodes; kinds of JOB_KINDS."""

    shares: tuple[tuple[str, float], ...] = (("dense", 1.0),)
    idle: float = 0.125  # share of the nodes without a job
    scattered: bool = False  # jobs use nodes all over the hall
    hooked: float = 1.0  # share of training jobs whose ranks report
    hours: float = 0.0  # mean duration of a large job; 0: that of [jobs]
    step: Range = (5.0, 5.0)  # s
    collective: Range = (0.16, 0.16)  # share of a step
    experts: Range = (0.0, 0.0)  # persistent imbalance of the ranks of a moe job
    level: float = 0.25  # share by which the lightest job draws less power than the most
    checkpoint_every: Range = (1200.0, 2400.0)
    checkpoint_takes: Range = (45.0, 45.0)
    pause_every: Range = (0.0, 0.0)  # s between evaluations, rollouts or data loads; 0: none
    pause_share: Range = (0.0, 0.0)  # of that time


JOB_KINDS = ("dense", "moe", "serving", "single", "swarm")
"""dense, moe: many nodes. serving: never ends, follows requests. single: a node for hours. swarm: for minutes."""


@dataclass(frozen=True)
class World:
    """One site's structure. `habits`: benign kind -> its rate in its unit, for kinds that only worlds have."""

    number: int = 0
    half: str = "train"
    structure: tuple[str, ...] = ()
    interval: float = 10.0
    part: Part = field(default_factory=Part)
    cooling: Cooling = field(default_factory=Cooling)
    air: Air = field(default_factory=Air)
    spread: Spread = field(default_factory=Spread)
    noise: Noise = field(default_factory=Noise)
    instruments: Instruments = field(default_factory=Instruments)
    fabric: Fabric = field(default_factory=Fabric)
    work: Work = field(default_factory=Work)
    habits: tuple[tuple[str, float], ...] = ()

    @property
    def is_drawn(self) -> bool:
        """Whether it is another world than that of the defaults."""
        return bool(self.structure)

    def hottest(self, flow: float = 1.0, warmer: float = 0.0) -> float:
        """Returns Celsius of a node's hottest GPU at full load, if so much of the coolant or air is left, and it is
        `warmer` by K."""
        cooling, power = self.cooling, min(self.part.board_w, self.part.load_w * (1 - self.work.level / 3))
        own, left = cooling.r_th * np.exp(_HOTTEST * cooling.r_spread), max(flow, 1e-3)
        if cooling.has_loop:
            resistance = own * (0.3 + 0.7 / left) + cooling.warming / left
            return float(cooling.supply + warmer + cooling.behind + resistance * power)
        resistance = own * (0.35 + 0.65 * left**-self.air.exponent)
        return float(self.air.inlet + warmer + cooling.behind + resistance * power)

    def describe(self) -> dict[str, Any]:
        """Returns all its parameters, for meta.json."""
        return asdict(self)

    def reads(self, name: str) -> bool:
        """Returns whether a collector reads a signal, or reports an event `event:KIND`."""
        return not name.startswith(self._unread)

    @cached_property
    def _unread(self) -> tuple[str, ...]:
        groups = set(self.instruments.absent) | ({"loop"} if not self.cooling.has_loop else set())
        return tuple(name for group in groups for name in GROUPS[group]) + _OF_FABRIC[self.fabric.kind]


_HOTTEST = 0.39
"""Standard deviations of the resistance at which 99 % of the default world's loaded nodes throttle a GPU at times, with
45 % of the flow: measured there."""
DEFAULT = World()

GROUPS: dict[str, tuple[str, ...]] = {
    "profiling": ("gpu.sm_active", "gpu.memory_utilization"),
    "hbm": ("gpu.memory_temperature",),
    "bmc": ("sensor.", "psu."),
    "loop": (
        *("coolant.", "pump.", "reservoir.", "leak."),
        *("event:flow_collapse", "event:pressure_collapse", "event:leak"),
    ),
    "pdu": ("power.",),
    "hook": ("rank.", "event:checkpoint"),
    "nvlink": ("nvlink.",),
    "optics": ("nic.phy_", "nic.module_temperature", "nic.rx_power_min"),
    "energy": ("gpu.energy",),
    "disks": ("disk.",),
}
"""Group of signals and events -> prefixes of their names."""
_OF_FABRIC = {
    "both": (),
    "ib": ("nic.ecn_marked", "nic.cnp_"),
    "roce": ("nic.port_tx_wait", "nic.link_recoveries"),
}
"""Fabric -> counters that its driver does not have: congestion notifications are RoCE's, credits InfiniBand's."""

AXES: dict[str, tuple[str, ...]] = {
    "cooling": ("air", "hybrid", "liquid"),
    "part": ("A100-SXM", "H100-SXM", "H200-SXM", "B200-SXM"),
    "fabric": ("ib rails", "ib racks", "roce rails", "roce racks"),
    "work": ("dense", "moe", "serving", "swarm", "research", "mixed"),
    "noise": ("white", "drifting", "heavy"),
    "instruments": ("fine", "whole", "coarse"),
    "interval": ("1", "10", "10", "10", "30", "30", "60", "60"),
    "missing": ("none", "none", "profiling", "bmc", "loop", "hook", "nvlink", "several"),
    "habits": ("announced", "careless", "capped"),
}
"""Axis of the structure -> its values; repeats are weights."""
_PARTS = {
    "A100-SXM": Part("A100-SXM", 400.0, 430.0, 55.0, 1410.0, 80.0 * 2**30),
    "H100-SXM": Part(),
    "H200-SXM": Part("H200-SXM", 700.0, 760.0, 75.0, 1980.0, 141.0 * 2**30),
    "B200-SXM": Part("B200-SXM", 1000.0, 1080.0, 120.0, 1965.0, 180.0 * 2**30),
}
_WARM_DAY_K = 6.0  # by which the warmest place of a hall is above its mean on the warmest day; chosen
_LEAST_R = {True: 0.035, False: 0.018}  # K/W of the best sinks in air, and plates: below the published ranges
_SHARES = {
    "dense": (("dense", 1.0),),
    "moe": (("moe", 0.8), ("dense", 0.2)),
    "serving": (("serving", 0.7), ("single", 0.3)),
    "swarm": (("swarm", 0.15), ("single", 0.25), ("dense", 0.6)),
    "research": (("single", 0.7), ("dense", 0.3)),
    "mixed": (("dense", 0.35), ("moe", 0.2), ("serving", 0.25), ("single", 0.15), ("swarm", 0.05)),
}
_HABITS = {
    "announced": (),
    "careless": (("silent_reboot", 20.0), ("drain", 20.0), ("bmc_silence", 50.0), ("counter_oddity", 100.0)),
    "capped": (("partial_cap", 30.0), ("drain", 10.0), ("bmc_silence", 10.0)),
}


def draw_structure(number: int) -> tuple[str, ...]:
    """Returns the structure of a world: one value of each axis."""
    rng = np.random.default_rng([0x57, number])
    return tuple(values[int(rng.integers(len(values)))] for values in AXES.values())


def half_of(structure: tuple[str, ...]) -> str:
    """Returns the half of a structure: by its hash, so that no structure is in both."""
    return HALVES[blake2b("/".join(structure).encode(), digest_size=1).digest()[0] & 1]


def draw_world(number: int) -> World:
    """Returns the world of a number, from 0; the same for ever."""
    structure = draw_structure(number)
    drawn = _Draw(number, dict(zip(AXES, structure, strict=True)))
    return World(
        number,
        half_of(structure),
        structure,
        float(drawn.axis["interval"]),
        part := drawn.part(),
        drawn.cooling(part),
        drawn.air(part),
        drawn.spread(),
        drawn.noise(),
        drawn.instruments(),
        drawn.fabric(),
        drawn.work(),
        _HABITS[drawn.axis["habits"]],
    )


def worlds(half: str, count: int) -> list[World]:
    """Returns the first worlds of a half."""
    return [draw_world(number) for number, _ in zip(_numbers(half), range(count), strict=False)]


def _numbers(half: str) -> Iterator[int]:
    number = 0
    while True:
        if half_of(draw_structure(number)) == half:
            yield number
        number += 1


class _Draw:
    """Draws the parts of a world; each has its own generator, so that a new parameter moves only its part."""

    def __init__(self, number: int, axis: dict[str, str]) -> None:
        self.axis, self._number = axis, number

    def _rng(self, what: type) -> np.random.Generator:
        return np.random.default_rng([0x58, self._number, *what.__name__.encode()])

    def part(self) -> Part:
        """Draws limits of the part."""
        rng, part = self._rng(Part), _PARTS[self.axis["part"]]
        slowdown = float(rng.integers(83, 93))
        values = {f.name: getattr(part, f.name) for f in fields(part)}
        values |= {"slowdown": slowdown, "shutdown": slowdown + float(rng.integers(3, 9))}
        values |= {"above_idle": float(rng.uniform(2, 16)), "above_load": float(rng.uniform(2, 18))}
        return Part(**values)

    def cooling(self, part: Part) -> Cooling:
        """Draws cooling under which even the worst healthy GPU stays 5 K below its slowdown on the warmest day."""
        rng, kind, air = self._rng(Cooling), self.axis["cooling"], self.axis["cooling"] == "air"
        spread, night = float(rng.uniform(0.03, 0.20)), float(rng.choice((0.0, 0.0, 1.5, 4.0)))
        lag, behind = float(np.exp(rng.uniform(np.log(5), np.log(60)))), float(rng.uniform(0, 5))
        r_th, warming = (
            float(rng.uniform(0.04, 0.09) if air else rng.uniform(0.02, 0.045)),
            float(rng.uniform(3e-3, 0.01)),
        )
        warming = 0.0 if air else warming
        warmest = self._inlet() + _WARM_DAY_K if air else 18 + _WARM_DAY_K
        room = (part.slowdown - 5 - warmest - behind) / part.load_w - warming
        worst = room / np.exp(3 * spread)
        if r_th > worst:  # a hall whose parts vary more has better plates or sinks
            r_th = max(worst, _LEAST_R[air])
            spread = min(spread, max(float(np.log(room / r_th)) / 3, 0.02))
        if air:
            return Cooling(kind, r_th, spread, 0.0, behind, lag / r_th, night=night)
        most = part.slowdown - 5 - behind - (r_th * np.exp(3 * spread) + warming) * part.load_w - _WARM_DAY_K
        return Cooling(
            kind,
            r_th,
            spread,
            warming,
            behind,
            lag / r_th,
            float(rng.uniform(0.4, 0.7) if kind == "hybrid" else rng.uniform(0.75, 0.95)),
            float(min(rng.uniform(18, 45), max(most, 18))),
            float(rng.uniform(0.1, 1.0)),
            float(rng.uniform(0, 2.0)),
            float(rng.uniform(0.05, 0.4)),
            float(np.exp(rng.uniform(np.log(30), np.log(1800)))),
            night,
        )

    def _inlet(self) -> float:
        """Returns the inlet of the hall; at most what the hottest rows of a hall reach."""
        return float(np.random.default_rng([0x59, self._number]).uniform(18, 30))

    def air(self, part: Part) -> Air:
        """Draws inlets of 18 to 35 Celsius, rows and day included, and fans that reach full speed before a slowdown."""
        rng = self._rng(Air)
        rpm, least, aim = float(rng.uniform(3000, 9000)), float(rng.uniform(0.2, 0.5)), float(rng.uniform(40, 55))
        return Air(
            self._inlet(),
            float(rng.uniform(0.2, 1.0)),
            float(rng.uniform(0.2, 0.8)),
            float(rng.uniform(0, 1.0)),
            float(rng.uniform(0.2, 1.5)),
            float(rng.uniform(0.05, 0.4)),
            {"fine": 0.1, "whole": 0.5, "coarse": 1.0}[self.axis["instruments"]],
            rpm,
            rpm * float(rng.uniform(1.6, 2.5)),
            float(rng.uniform(0, 900)),
            least,
            max(float(rng.uniform(0.01, 0.03)), (1 - least) / (part.slowdown - 6 - aim)),
            aim,
            float(rng.uniform(5, 60)),
            float(rng.uniform(0.6, 0.9)),
        )

    def spread(self) -> Spread:
        """Draws spreads of manufacture and of instruments."""
        rng = self._rng(Spread)
        return Spread(*(float(rng.uniform(*r)) for r in ((0.01, 0.05), (0, 1.5), (0, 0.03), (0, 1.0), (0.002, 0.008))))

    def noise(self) -> Noise:
        """Draws noise of one shape: white, slowly drifting, or with heavy tails."""
        rng, shape = self._rng(Noise), self.axis["noise"]
        tails = "normal" if shape == "white" else str(rng.choice(("t3", "t4"))) if shape == "heavy" else "t4"
        factor = {"white": 0.0, "drifting": float(rng.uniform(3, 20)), "heavy": float(rng.uniform(0.3, 2))}[shape]
        ranges = ((0.01, 0.08), (0.001, 0.006), (0.1, 0.8), (0.002, 0.015), (0.01, 0.10), (0.01, 0.15))
        return Noise(tails, factor, *(float(rng.uniform(*r)) for r in ranges))

    def instruments(self) -> Instruments:
        """Draws resolution, refresh, lies and missing collectors."""
        rng, family, missing = self._rng(Instruments), self.axis["instruments"], self.axis["missing"]
        fine, coarse = family == "fine", family == "coarse"
        groups = sorted(GROUPS)
        several = rng.permutation(groups)[: int(rng.integers(2, 5))].tolist()
        absent = {"none": [], "several": several}.get(missing, [missing])
        return Instruments(
            0.1 if fine else 1.0,
            0.1 if fine else 5.0 if coarse else 1.0,
            0.01 if fine else 0.5 if coarse else 0.1,
            float(rng.choice((30.0, 60.0))) if coarse else float(rng.choice((0.0, 30.0))),
            float(rng.choice((0.0, 0.1, 0.5))),
            float(rng.choice((0.0, 1.0, 20.0))),
            bool(rng.random() < 0.4),
            int(rng.choice((0, 0, 1, 2))),
            float(rng.choice((0.0, 0.002, 0.01, 0.05))),
            min(float(rng.uniform(0, 0.5)) * float(self.axis["interval"]), 5.0),
            tuple(sorted(absent)),
        )

    def fabric(self) -> Fabric:
        """Draws ports, background errors and congestion."""
        rng, (kind, shape) = self._rng(Fabric), self.axis["fabric"].split()
        speed = float(rng.choice((200_000.0, 400_000.0, 400_000.0, 800_000.0)))
        after_fec = 10 ** float(rng.uniform(-16, -13.3)) * speed * 1e6 * 3600
        low = float(rng.uniform(0.02, 0.2))
        return Fabric(
            kind,
            shape == "rails",
            int(rng.choice((0, 0, 4))),
            speed,
            after_fec,
            float(rng.uniform(0, 0.4)),
            float(rng.uniform(-11, -6.5)),
            float(rng.uniform(0.2, 0.8)),
            (low, low + float(rng.uniform(0.05, 0.3))),
            float(rng.choice((0.0, 1.0, 100.0))) if kind == "roce" else 0.0,
            float(10 ** rng.uniform(0, 3)),
        )

    def work(self) -> Work:
        """Draws the mix of jobs, their steps and pauses."""
        rng, mix = self._rng(Work), self.axis["work"]
        hooked = 0.0 if self.axis["missing"] == "hook" else float(rng.choice((1.0, 1.0, 0.5)))
        low, share, every = np.exp(rng.uniform(np.log(0.5), np.log(20))), rng.uniform(0.05, 0.3), rng.uniform(300, 3600)
        experts = float(rng.uniform(0.03, 0.06))
        takes, most = float(rng.uniform(5, 60)), float(rng.choice((0.05, 0.2, 0.5)))
        return Work(
            _SHARES[mix],
            float(rng.uniform(0.05, 0.3)),
            bool(rng.random() < 0.5),
            hooked,
            float(rng.uniform(4, 48)),
            (float(low), float(low * rng.uniform(1, 3))),
            (float(share), float(share + rng.uniform(0, 0.15))),
            (experts * 0.7, experts),
            float(rng.uniform(0.1, 0.5)),
            (float(every), float(every * rng.uniform(1, 4))),
            (takes, takes * float(rng.uniform(1, 4))),
            (0.0, 0.0) if rng.random() < 0.5 else (float(every), float(3 * every)),
            (0.02, most),
        )
