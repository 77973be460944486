"""The quantities of docs/realism.md: unit, source and function of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.realism import measures
from benchmarks.realism.real import Halves, Real, halves
from benchmarks.realism.sample import Sample, in_time, pooled, sample
from benchmarks.realism.simulated import BUSY, FULL, Simulated

CORE, HBM = ("GPU_TEMP_C", "gpu.temperature"), ("MEMORY_TEMP_C", "gpu.memory_temperature")
MINUTE, FIVE_MINUTES = 60.0, 300.0


@dataclass(frozen=True)
class Quantity:
    """One line of the page.

    above: both sides only where they exceed this.   centred: medians taken off both sides.
    judged: no verdict where the two sides are different things by choice, as the share of idle GPUs is.
    """

    name: str
    title: str
    unit: str
    source: str
    figure: str
    real: Callable[[Real], Halves]
    simulated: Callable[[Simulated], Sample | None]
    above: float | None = None
    centred: bool = False
    judged: bool = True


@dataclass(frozen=True)
class Compared:
    """Both sides of a quantity. shares: parts of the real and of the simulated values that exceed `above`."""

    quantity: Quantity
    halves: Halves
    simulated: Sample | None
    shares: tuple[float, float] | None

    @property
    def real(self) -> Sample:
        return pooled(self.halves)


def compare(quantity: Quantity, real: Real, simulated: Simulated) -> Compared:
    """Takes both sides under the quantity's condition."""
    both, made = quantity.real(real), quantity.simulated(simulated)
    shares = None
    if quantity.above is not None:
        limit = quantity.above
        whole = pooled(both)
        shares = (whole.share_above(limit), made.share_above(limit) if made else float("nan"))
        both, made = tuple(half.above(limit) for half in both), made.above(limit) if made else None
    if made is not None and not len(made.values):
        made = None
    if quantity.centred:
        both, made = tuple(half.centred() for half in both), made.centred() if made else None
    return Compared(quantity, both, made, shares)


def _ports(measure: Callable[[Any], Sample]) -> dict[str, Any]:
    return {
        "real": lambda r: r.ports(measure),
        "simulated": lambda s: measure(s.decades) if s.decades else None,
    }


def _heat(pair: tuple[str, str]) -> dict[str, Any]:
    return {"real": lambda r: r.temperature(pair[0]), "simulated": lambda s: s.temperature(pair[1])}


def _working(pair: tuple[str, str]) -> dict[str, Any]:
    return {
        "real": lambda r: r.hottest(pair[0], BUSY),
        "simulated": lambda s: s.hottest(pair[1], BUSY),
        "centred": True,
    }


def _hosts(folder: str, seconds: float, measure: Callable[[Any], Sample]) -> dict[str, Any]:
    return {
        "real": lambda r: tuple(measure(half) for half in r.servers(folder)),
        "simulated": lambda s: measure(s.metrics(seconds)),
    }


def _loop(column: str, signal: str) -> dict[str, Any]:
    return {"real": lambda r: r.loop(column), "simulated": lambda s: s.loop(signal)}


def _step_factors(s: Simulated) -> Sample | None:
    return in_time([measures.step_factor(times) for _, times, _ in s.steps]) if s.steps else None


def _of_jobs(measure: Callable[..., Any], s: Simulated) -> Sample | None:
    return sample(np.concatenate([np.ravel(measure(*job)) for job in s.steps])) if s.steps else None


QUANTITIES = (
    Quantity("gpu_power", "GPU power, as it is", "board limits", "acme", "gpu", Real.power, Simulated.power,
             judged=False),
    Quantity("gpu_power_busy", "GPU power while working", "board limits", "acme", "gpu",
             Real.power, Simulated.power, above=BUSY),
    Quantity("gpu_power_full", "GPU power at full load", "board limits", "acme", "gpu",
             Real.power, Simulated.power, above=FULL),
    Quantity("gpu_temperature", "GPU temperature, as it is", "°C", "acme", "gpu", **_heat(CORE), judged=False),
    Quantity("gpu_temperature_busy", "GPU temperature about its median", "K", "acme", "gpu",
             **_working(CORE)),
    Quantity("gpu_memory_temperature", "Memory temperature, as it is", "°C", "acme", "gpu", **_heat(HBM), judged=False),
    Quantity("gpu_memory_temperature_busy", "Memory temperature about its median", "K", "acme", "gpu",
             **_working(HBM)),
    Quantity("gpu_utilization_busy", "GPU utilisation above 0", "1", "acme", "gpu",
             lambda r: tuple(h.scaled(0.01) for h in r.acme(("util_gpu_kalos", "GPU_UTIL"))),
             lambda s: s.share("gpu.utilization"), above=0.0),
    Quantity("gpu_memory_used", "GPU memory in use, above 1 %", "1", "acme", "gpu",
             lambda r: tuple(h.scaled(0.01) for h in r.acme(("util_gpu_kalos", "GPU_MEM"))),
             lambda s: s.share("gpu.memory_used", "gpu.memory_total"), above=0.01),
    Quantity("port_traffic", "Traffic of a port that sends", "line rates", "acme", "port",
             Real.traffic, Simulated.traffic, above=0.001),
    Quantity("port_rate_noise", "Noise of a port's steady rate", "1", "cisco", "port",
             Real.rate_noise, Simulated.rate_noise),
    Quantity("ber_level", "Pre-FEC error rate of a port", "decades", "alibaba", "port", **_ports(measures.levels),
             judged=False),
    Quantity("ber_wander", "Its step from hour to hour", "decades", "alibaba", "port", **_ports(measures.wander)),
    Quantity("ber_persistence", "Its autocorrelation over one hour", "1", "alibaba", "port",
             **_ports(measures.persistence)),
    Quantity("ber_spread", "Its standard deviation over the days", "decades", "alibaba", "port",
             **_ports(measures.spreads)),
    Quantity("step_common", "Compute time of a step, common to all ranks", "ln", "bytedance", "rank",
             lambda r: (sample(measures.step_factor(r.steps[1])),), _step_factors),
    Quantity("rank_noise", "Compute time of a step, a rank's own part", "ln", "bytedance", "rank",
             lambda r: halves(measures.own_noise(r.steps[1])),
             lambda s: _of_jobs(lambda n, times, k: measures.own_noise(times), s)),
    Quantity("rank_pairs", "Two ranks of a stage at one step", "ln", "bytedance", "rank",
             lambda r: halves(measures.neighbours(*r.steps)), lambda s: _of_jobs(measures.neighbours, s)),
    Quantity("stage_factor", "Compute time of a stage against its job", "1", "bytedance", "rank",
             lambda r: (sample(measures.stage_factors(*r.steps)),), lambda s: _of_jobs(measures.stage_factors, s)),
    Quantity("server_power", "Power of a GPU server", "greatest powers", "acme", "host",
             Real.server_power, Simulated.server_power),
    Quantity("host_processors", "Processors of a host in use, above 1 %", "1", "acme", "host",
             lambda r: r.host("CPU_UTIL"), Simulated.processors, above=0.01),
    Quantity("host_memory", "Memory of a host in use", "1", "acme", "host",
             lambda r: r.host("MEM_UTIL"), Simulated.memory),
    Quantity("metric_phi_minute", "Autocorrelation of a host's metrics over 1 min", "1", "smd", "host",
             **_hosts("smd", MINUTE, measures.persistence)),
    Quantity("metric_tails_minute", "Tails of their changes over 1 min", "decades", "smd", "host",
             **_hosts("smd", MINUTE, measures.restless)),
    Quantity("metric_phi_5_minutes", "Autocorrelation of a host's metrics over 5 min", "1", "asd", "host",
             **_hosts("asd", FIVE_MINUTES, measures.persistence)),
    Quantity("metric_tails_5_minutes", "Tails of their changes over 5 min", "decades", "asd", "host",
             **_hosts("asd", FIVE_MINUTES, measures.restless)),
    Quantity("flow_noise", "Noise of a loop's flow, in its own deviations", "sd", "skab", "loop",
             **_loop("coolant.flow", "coolant.flow")),
    Quantity("pressure_noise", "Noise of a loop's pressure", "sd", "skab", "loop",
             **_loop("coolant.pressure", "coolant.pressure")),
    Quantity("coolant_temperature_noise", "Noise of a loop's temperature", "sd", "skab", "loop",
             **_loop("coolant.temperature", "coolant.supply_temperature")),
)  # fmt: skip
"""In the order of the page."""
