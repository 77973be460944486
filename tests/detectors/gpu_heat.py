"""Physics of GPUs for the tests of heat: cold plates and fans, inlets that swing over a day, many loads and sensors.

Air: R = Ra + Rb / fan^0.8 (forced convection, Incropera and DeWitt, section 7), fans that hold the hottest GPU near a
target, a second row of GPUs behind the first one. Liquid: constant R on a loop's supply.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pipeline.model.records import SECOND, Frame
from pipeline.model.topology import Topology

START = 1_790_000_000 * SECOND
Floats = NDArray[np.float64]


@dataclass
class HeatWorld:
    """A few nodes of 8 GPUs. rise(tick hours) of faults: (gpu, from hour, factor of R).

    cooling: air or liquid.   reference: measured, stale (each 60 s), none.   step: K of the thermometers.   lag: s of a
    die.   load: training, serving, mixed, single (one job after another on one to eight GPUs of a node).
    """

    cooling: str = "liquid"
    reference: str = "measured"
    step: float = 1.0
    lag: float = 15.0
    interval: float = 10.0
    load: str = "training"
    nodes: int = 4
    seed: int = 1
    inlet: float = 24.0
    swing: float = 4.0
    faults: list[tuple[int, float, float]] = field(default_factory=list)
    node_faults: list[tuple[int, float, float]] = field(default_factory=list)
    limit: float | None = None

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        n = self.size = self.nodes * 8
        self.node = np.arange(n) // 8
        self.gpus = tuple(f"gpu:n{k // 8}.{k % 8}" for k in range(n))
        parents = {g: (f"node:n{k // 8}",) for k, g in enumerate(self.gpus)}
        parents |= {f"node:n{m}": (f"rack:r{m // 4}",) for m in range(self.nodes)}
        self.sensors = tuple(f"sensor:n{m}.inlet" for m in range(self.nodes))
        if self.cooling == "liquid":
            parents |= {f"rack:r{r}": ("cdu:c1",) for r in range((self.nodes + 3) // 4)}
        parents |= {s: (f"node:n{m}",) for m, s in enumerate(self.sensors)}
        self.topology = Topology(parents, {g: {"sku": "X"} for g in self.gpus})
        self.own = np.exp(rng.normal(0, 0.08, n))
        self.watts = 700.0 * np.exp(rng.normal(0, 0.02, n))
        self.local = rng.normal(0, 1.0, self.nodes)

    def frames(self, hours: float) -> Iterator[dict[str, Frame]]:
        """Yields the frames of some hours."""
        rng = np.random.default_rng(self.seed + 100)
        n, dt = self.size, self.interval
        level, until, active = np.full(n, 0.9), np.zeros(self.nodes), np.ones(n)
        core, fan, ar = np.full(n, 40.0), np.full(self.nodes, 0.5), np.zeros(self.nodes)
        stale = np.full(self.nodes, self.inlet)
        for tick in range(int(hours * 3600 / dt)):
            now = tick * dt
            for m in np.flatnonzero(now >= until).tolist():
                until[m] = now + rng.exponential(3600.0 if self.load != "serving" else 900.0) + 300
                mine = self.node == m
                if self.load == "training":
                    level[mine] = rng.uniform(0.8, 0.95) if rng.random() < 0.9 else 0.0
                elif self.load == "mixed":
                    level[mine] = rng.choice([0.0, 0.3, 0.6, 0.9], p=[0.2, 0.2, 0.3, 0.3])
                elif self.load == "single":
                    level[mine] = rng.choice([0.0, 0.5, 0.9], 8, p=[0.5, 0.2, 0.3])
            if self.load == "serving":
                level = np.clip(
                    level + np.sqrt(dt / 300) * 0.2 * rng.standard_normal(n) - dt / 300 * (level - 0.5), 0, 1
                )
            dip = (now % 1200 < 60) and self.load in ("training", "mixed")
            busy = np.where(dip, 0.3 * level, level) * active
            power = np.maximum(90 + (self.watts - 90) * busy * (1 + 0.03 * rng.standard_normal(n) * (busy > 0)), 60)
            ar = ar * np.exp(-dt / 900) + 0.3 * np.sqrt(1 - np.exp(-2 * dt / 900)) * rng.standard_normal(self.nodes)
            air = self.inlet + self.local + self.swing * np.sin(2 * np.pi * now / 86_400) + ar
            own = self.own.copy()
            for gpu, since, factor in self.faults:
                own[gpu] *= factor if now >= since * 3600 else 1.0
            for m, since, factor in self.node_faults:
                own[self.node == m] *= factor if now >= since * 3600 else 1.0
            if self.cooling == "air":
                hottest = core.reshape(-1, 8).max(axis=1)
                fan = np.clip(fan + dt / (30 + dt) * 0.02 * (hottest - 72), 0.3, 1.0)
                speed = np.repeat(fan, 8)
                r = (0.025 + 0.03 / speed**0.8) * own
                front = np.roll(power.reshape(-1, 2, 4), 0, 1)[:, 0]
                behind = np.zeros((self.nodes, 2, 4))
                behind[:, 1] = 0.009 * front
                base = np.repeat(air, 8) + behind.reshape(-1) / speed
            else:
                r, base = 0.03 * own, np.full(n, 32.0 + 0.5 * np.sin(2 * np.pi * now / 7200))
            core = core + (1 - np.exp(-dt / self.lag)) * (base + r * power - core)
            q = self.step
            shown = np.rint((core + 0.2 * rng.standard_normal(n)) / q) * q
            columns: dict[str, Floats] = {
                "gpu.temperature": shown,
                "gpu.memory_temperature": np.rint((core + 12 + 8 * power / 700) / q) * q,
                "gpu.power": power + 2 * rng.standard_normal(n),
                "gpu.throttle_reasons": np.where(core > (self.limit or 1e9), 64.0, 0.0),
            }
            if self.limit is not None:
                columns |= {"gpu.thermal_margin": self.limit - shown, "gpu.slowdown_margin": np.zeros(n)}
            time = START + round(now * SECOND)
            out = {"gpu": Frame(time, "gpu", self.gpus, columns, self.topology)}
            if self.reference != "none" and self.cooling == "liquid":
                supply = np.array([base[0] + 0.05 * rng.standard_normal()])
                out["coolant"] = Frame(
                    time, "coolant", ("cdu:c1",), {"coolant.supply_temperature": supply}, self.topology
                )
            elif self.reference != "none":
                if self.reference == "measured" or now % 60 < dt:
                    stale = np.rint(air)
                out["sensor"] = Frame(time, "sensor", self.sensors, {"sensor.temperature": stale.copy()}, self.topology)
            yield out
