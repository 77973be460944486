"""The energy of lost GPU-hours: one definition for all figures of the report, at the mean power of each job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Loss:
    """Lost GPU-hours and their energy (kWh), None if that of no job was measured."""

    hours: float = 0.0
    kwh: float | None = None

    def plus(self, hours: float, rate: float | None) -> Loss:
        """Adds hours at a rate (kWh per GPU-hour)."""
        return Loss(self.hours + hours, self.kwh if rate is None else (self.kwh or 0.0) + hours * rate)


@dataclass(frozen=True, slots=True)
class EnergyRates:
    """kWh per lost GPU-hour: of each job with measured energy, and the mean of these for the others."""

    jobs: Mapping[str, float]
    mean: float | None

    def of(self, job: str) -> float | None:
        """Returns the rate of a job; None if no energy was measured at all."""
        return self.jobs.get(job, self.mean)


def find_rates(used: Iterable[tuple[str, float, float]]) -> EnergyRates:
    """Returns the rates of (job, kWh, GPU-hours for which they were measured)."""
    jobs, kwh, hours = {}, 0.0, 0.0
    for job, own_kwh, own_hours in used:
        kwh, hours = kwh + own_kwh, hours + own_hours
        if own_hours > 0:
            jobs[job] = own_kwh / own_hours
    return EnergyRates(jobs, kwh / hours if hours else None)
