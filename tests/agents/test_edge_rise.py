"""The rule for a fast rise of temperature: quick when coolant is lost, silent for any load."""

from __future__ import annotations

import numpy as np
import pytest

from agents.collector import Reading
from agents.node.edge.rules import EdgeRules
from pipeline.config.sections import Edge as Settings
from pipeline.model.records import SECOND, Event

START = 1_790_000_000 * SECOND
COOLANT = 32.0


class Plate:
    """A GPU on a cold plate or heat sink: a part of the resistance responds immediately, the rest with a lag."""

    def __init__(self, resistance: float, lag: float, quick: float, rng: np.random.Generator) -> None:
        self.resistance, self.lag, self.quick, self.rng = resistance, lag, quick, rng
        self.slow = self.fast = 0.0
        self.lost: float | None = None

    def settle(self, power: float) -> None:
        self.slow, self.fast = (1 - self.quick) * self.resistance * power, self.quick * self.resistance * power

    def step(self, power: float, seconds: float = 1.0) -> float:
        """The temperature, rounded by NVML, after some time at a power; without flow only the heat capacity counts."""
        if self.lost is not None:
            self.lost += power / 440 * seconds
        else:
            target = self.resistance * power
            self.slow += ((1 - self.quick) * target - self.slow) * (1 - np.exp(-seconds / self.lag))
            self.fast += (self.quick * target - self.fast) * (1 - np.exp(-seconds / 1.0))
        return float(np.rint(COOLANT + self.slow + self.fast + (self.lost or 0.0) + self.rng.normal(0, 0.2)))


def run(plate: Plate, powers: np.ndarray, every: int = 1, stop: int | None = None, noise: float = 0.0) -> list[Event]:
    """Reads the power every second and the temperature every few seconds; the flow stops at `stop`."""
    edge, found = EdgeRules(Settings()), []
    plate.settle(float(powers[0]))
    for i, power in enumerate(powers):
        if i == stop:
            plate.lost = 0.0
        warmth = plate.step(float(power))
        shown = max(0.0, float(power) * (1 + noise * plate.rng.standard_normal()))
        columns = {"gpu.power": np.array([shown], np.float32)}
        if i % every == 0:
            columns["gpu.temperature"] = np.array([warmth], np.float32)
        found += edge.evaluate(START + i * SECOND, [Reading("gpu", ("gpu:n1.0",), columns)])
    return found


@pytest.mark.parametrize(("every", "most"), [(1, 4), (5, 15)])
def test_lost_flow_at_full_power_is_reported_within_seconds(every: int, most: int) -> None:
    for seed in range(5):
        plate = Plate(0.03, 12.0, 0.3, np.random.default_rng(seed))
        found = run(plate, np.full(300, 1000.0), every, stop=200 + seed, noise=0.02)
        assert [(e.kind, e.data["state"]) for e in found] == [("temperature_rise", "active")]
        assert 0 < found[0].time - START - (200 + seed) * SECOND <= most * SECOND
        assert found[0].data["slope"] > 0.5
        assert found[0].data["since"] <= found[0].time


def loads(rng: np.random.Generator, seconds: int) -> np.ndarray:
    """Loads of jobs: start, stop, checkpoint, steps of all sizes, ramps, capping, phases within a training step."""
    out = np.empty(seconds)
    idle, full, i = rng.uniform(60, 120), rng.uniform(250, 1000), 0
    while i < seconds:
        length = int(rng.choice([3, 7, 15, 40, 120, 400]))
        level = rng.choice([idle, full, full, full * rng.uniform(0.3, 1.0)])
        part = np.full(length, level)
        shape = rng.integers(4)
        if shape == 1 and i:
            part = np.linspace(out[i - 1], level, length)
        elif shape == 2:
            part = level * (1 + 0.4 * np.sign(np.sin(np.arange(length) * rng.uniform(0.3, 3))))
        out[i : i + length] = part[: seconds - i]
        i += length
    return np.maximum(out, idle)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 5])
def test_load_steps_job_starts_and_checkpoints_are_never_reported(every: int) -> None:
    for seed in range(12):
        rng = np.random.default_rng(seed)
        plate = Plate(rng.uniform(0.025, 0.075), rng.uniform(8, 40), rng.uniform(0, 0.6), rng)
        assert run(plate, loads(rng, 1800), every, noise=0.03) == [], f"seed {seed}"


def test_a_single_wrong_temperature_is_never_reported() -> None:
    edge = EdgeRules(Settings())
    for i in range(400):
        warmth = {100: 0.0, 150: 110.0, 200: np.nan, 250: 30.0, 252: 95.0}.get(i, 62.0)
        columns = {"gpu.power": np.array([600.0]), "gpu.temperature": np.array([warmth])}
        assert edge.evaluate(START + i * SECOND, [Reading("gpu", ("gpu:n1.0",), columns)]) == []


def test_without_known_power_nothing_is_reported() -> None:
    edge = EdgeRules(Settings())
    for i in range(100):
        columns = {"gpu.temperature": np.array([40.0 + i])}
        assert edge.evaluate(START + i * SECOND, [Reading("gpu", ("gpu:n1.0",), columns)]) == []


def test_a_gap_or_a_clock_change_clears_the_history() -> None:
    edge, time = EdgeRules(Settings()), START
    for i in range(300):
        time += (400 if i == 100 else -900 if i == 200 else 1) * SECOND
        warmth = 50.0 if i < 100 else 70.0 if i < 200 else 85.0
        columns = {"gpu.power": np.array([600.0]), "gpu.temperature": np.array([warmth])}
        assert edge.evaluate(time, [Reading("gpu", ("gpu:n1.0",), columns)]) == []


def coolant(values: np.ndarray) -> list[Event]:
    edge, found = EdgeRules(Settings()), []
    for i, value in enumerate(values):
        columns = {"coolant.supply_temperature": np.array([value], np.float32)}
        found += edge.evaluate(START + i * SECOND, [Reading("coolant", ("cdu:c1",), columns)])
    return found


def test_fast_warming_coolant_is_reported_once_and_again_when_it_stops() -> None:
    values = np.concatenate([np.full(60, 32.0), 32 + 1.2 * np.arange(15), np.full(60, 50.0)])
    found = coolant(np.rint(values))
    assert [e.data["state"] for e in found] == ["active", "cleared"]
    assert found[0].time - START <= 66 * SECOND


def test_a_new_set_point_and_a_change_of_units_are_not_reported() -> None:
    rng = np.random.default_rng(3)
    moved = 32 + 6 * np.clip((np.arange(600) - 200) / 90, 0, 1)  # 6 K in 90 s: a valve that moves fast
    swing = 3 * np.sin(np.clip(np.arange(600) - 400, 0, 120) / 120 * 2 * np.pi)  # a failover of two minutes
    for resolution in (1.0, 0.1):
        noisy = moved + swing + rng.normal(0, 0.15, 600)
        assert coolant(np.rint(noisy / resolution) * resolution) == []


def test_a_rise_ends_only_after_ten_calm_readings() -> None:
    ends = 75
    found = coolant(np.concatenate([np.full(60, 32.0), 32 + 1.2 * np.arange(15), np.full(60, 50.0)]))
    assert [e.data["state"] for e in found] == ["active", "cleared"]
    calm = ends + 13  # from then on no pair of readings rises by a tenth of a kelvin a second
    assert calm + 7 <= (found[1].time - START) / SECOND <= calm + 13


def test_a_rise_below_the_limit_is_not_reported_although_rounding_makes_it_steeper() -> None:
    for slope in (0.34, 0.4, 0.45):
        assert coolant(np.rint(32 + slope * np.clip(np.arange(160) - 60, 0, 60))) == []
