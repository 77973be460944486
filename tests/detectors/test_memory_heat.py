"""Memory that is hotter than its core explains, in liquid and in air, with thermometers of 0.1 and 1 K."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.memory.memory import Memory
from pipeline.model.records import SECOND, Frame
from pipeline.model.topology import Topology

T0, COUNT, HOT = 1_790_000_000 * SECOND, 16, 5
NAMES = tuple(f"gpu:n{k // 8}.{k % 8}" for k in range(COUNT))
LIQUID, AIR = (33.0, 0.035), (28.0, 0.075)  # degrees of the coolant or inlet, K/W


def run(
    rise=None, place=LIQUID, quantum=1.0, step=10, hours=5.0, slowed=False, begins=2.0, seed=2, low=0.0, idle=(), few=8
):
    """rise: K per W by which the memory of GPU 5 gets hotter from `begins` h on; None: healthy. low: K that its core
    reads too low from then on. idle: h between which no job runs. few: GPUs of each node that jobs use. Returns
    (entity, level, s after the begin)."""
    coolant, resistance = place
    detector, rng = Memory(), np.random.default_rng(seed)
    topology = Topology({name: [f"node:{name[4:6]}"] for name in NAMES})
    own, found, core, phase = rng.normal(0, 0.05, COUNT), [], np.full(COUNT, coolant), 0.0
    for second in range(0, int(hours * 3600), step):
        load = 0.15 if second % 1800 < 90 else 1.0 if second % 7200 < 5000 else 0.6
        load = np.where((np.arange(COUNT) % 8 < few) & ~any(a * 3600 <= second < b * 3600 for a, b in idle), load, 0)
        power = 80 + 560 * load * (1 + 0.03 * rng.standard_normal(COUNT))
        core += (1 - np.exp(-step / 30)) * (coolant + resistance * (1 + own) * power - core)
        more = np.zeros(COUNT)
        if rise is not None and second >= begins * 3600:
            more[HOT] = rise * power[HOT]
        phase = 0.9 * phase + 0.3 * rng.standard_normal()
        memory = core + 6 + 0.004 * power + phase + more + 0.3 * rng.standard_normal(COUNT)
        values = {"gpu.power": power, "gpu.temperature": core, "gpu.memory_temperature": memory}
        values["gpu.temperature"] = core - low * (np.arange(COUNT) == HOT) * (second >= begins * 3600)
        for name in ("gpu.temperature", "gpu.memory_temperature"):
            values[name] = np.round(values[name] / quantum) * quantum
        bits = np.where((np.arange(COUNT) == HOT) & slowed & (second >= begins * 3600), 0x20, 0.0)
        values["gpu.throttle_reasons"] = bits
        frame = Frame(T0 + second * SECOND, "gpu", NAMES, values, topology)
        found += detector.observe({"gpu": frame})
    return [(f.entity, f.level, (f.time - T0) / SECOND - begins * 3600, f) for f in found]


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("place", "quantum", "step"), [(LIQUID, 1.0, 10), (AIR, 1.0, 30), (AIR, 0.1, 10), (LIQUID, 0.1, 60)]
)
def test_hot_memory_is_a_ticket_and_a_page_where_heat_slows_the_gpu(place, quantum, step):
    found = run(0.015, place, quantum, step)
    assert {f[:2] for f in found} == {(NAMES[HOT], "ticket")}
    assert found[0][2] < 3600
    assert "K hotter than its core explains" in found[0][3].summary
    slowed = run(0.015, place, quantum, step, slowed=True)
    assert {f[:2] for f in slowed} == {(NAMES[HOT], "page")}


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("place", "quantum", "step"), [(LIQUID, 1.0, 10), (AIR, 1.0, 30), (AIR, 0.1, 60)])
def test_healthy_memory_under_changing_load_is_silent(place, quantum, step, seed):
    assert run(None, place, quantum, step, hours=8, seed=seed) == []


@pytest.mark.slow
@pytest.mark.parametrize(("place", "quantum", "step"), [(LIQUID, 1.0, 10), (AIR, 0.1, 60)])
def test_a_core_that_reads_too_low_has_no_hot_memory(place, quantum, step):
    assert run(None, place, quantum, step, low=8.0) == []


@pytest.mark.slow
def test_hot_memory_goes_on_while_no_job_runs():
    found = run(0.015, step=30, hours=14, idle=[(4.0, 11.0)])
    assert {f[3].onset for f in found} == {found[0][3].onset}, "one condition, though no load shows it for 7 h"


@pytest.mark.slow
def test_memory_of_a_node_that_jobs_use_in_part_is_compared_with_the_busy_ones():
    found = run(0.015, few=6, idle=[(3.5, 3.6)])
    assert {f[:2] for f in found} == {(NAMES[HOT], "ticket")}


def test_without_a_thermometer_nothing_is_judged():
    gpu = Frame(T0, "gpu", NAMES, {"gpu.power": np.full(COUNT, 600.0)}, Topology({}))
    assert Memory().observe({"gpu": gpu}) == []
