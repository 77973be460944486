"""What each minute adds: GPU-hours lost per incident and job, and the energy of the GPUs of each job.

`impact_jobs` has totals only. `job_loss` has each addition, so that a loss belongs to a time: each row is the
difference between the total and the rows so far, so that a restart repeats and forgets nothing. `job_energy` has a row
per job and hour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import duckdb
import numpy as np
from numpy.typing import NDArray

from pipeline.model.records import SECOND

EVERY = 60 * SECOND
"""Time between two rows (us). Chosen: the shortest window of an alert is five of them."""
MOST_GAP = 300 * SECOND
"""Longest time over which the energy between two readings is counted (us). Chosen: five minutes; longer is no data."""
FRESH = 120 * SECOND
"""Age from which a reading of a GPU counts as missing (us). Chosen: as for ranks."""
HOUR = 3600 * SECOND
J_PER_KWH = 3.6e6
IDLE = ""
"""The job of GPUs that run none."""
_KEPT = 2 * 24 * HOUR
"""Resolved incidents that are still compared (us). Chosen: their loss is frozen at the resolution."""

_LOSS = """
INSERT INTO job_loss
WITH live AS (SELECT id FROM incidents
              WHERE resolved IS NULL OR resolved >= make_timestamptz($1::BIGINT - $2::BIGINT)),
     total AS (SELECT incident, job, sum(lost_gpu_hours) AS hours FROM impact_jobs
               WHERE incident IN (FROM live) GROUP BY ALL),
     known AS (SELECT incident, job, sum(gpu_hours) AS hours FROM job_loss WHERE incident IN (FROM live) GROUP BY ALL)
SELECT make_timestamptz($1::BIGINT), incident, job, coalesce(t.hours, 0) - coalesce(k.hours, 0)
FROM total t FULL JOIN known k USING (incident, job) WHERE abs(coalesce(t.hours, 0) - coalesce(k.hours, 0)) > 1e-6
"""
_ENERGY = """
INSERT INTO job_energy
SELECT unnest($1::VARCHAR[]), make_timestamptz($2::BIGINT), unnest($3::DOUBLE[]), unnest($4::DOUBLE[])
ON CONFLICT (job, hour) DO UPDATE SET kwh = job_energy.kwh + excluded.kwh,
    gpu_hours = job_energy.gpu_hours + excluded.gpu_hours
"""


def record_losses(connection: duckdb.DuckDBPyConnection, now: int) -> None:
    """Adds what incidents cost since the last call. Of a merged incident the loss moves with a negative row."""
    connection.execute(_LOSS, [now, _KEPT])


@dataclass(slots=True)
class GpuReadings:
    """Newest readings of all GPUs, in the order of their names. power: W.  energy: J, a counter.  times: UTC us.
    NaN: missing."""

    names: Sequence[str]
    power: NDArray[np.float64]
    energy: NDArray[np.float64]
    times: NDArray[np.int64]


@dataclass(slots=True)
class EnergyMeter:
    """Integrates the energy of GPUs between two calls, by job. Without an energy counter power times time counts."""

    _time: int = 0
    _energy: dict[str, float] = field(default_factory=dict)

    def measure(self, found: GpuReadings, jobs: Mapping[str, str], now: int) -> dict[str, tuple[float, float]]:
        """Returns job -> (kWh, GPU-hours measured) since the last call; empty at the first and after a gap.

        jobs: GPU -> job.
        """
        fresh = now - found.times <= FRESH
        before = np.array([self._energy.get(name, np.nan) for name in found.names])
        span = (now - self._time) / SECOND
        started = not self._time or not 0 < span <= MOST_GAP / SECOND
        self._time = now
        counted = fresh & np.isfinite(found.energy)
        self._energy = {n: float(e) for n, e, c in zip(found.names, found.energy, counted, strict=True) if c}
        if started:
            return {}
        joules = found.energy - before
        joules = np.where(counted & np.isfinite(joules) & (joules >= 0), joules, found.power * span)
        measured = fresh & np.isfinite(joules)
        sums: dict[str, tuple[float, float]] = {}
        for place in np.flatnonzero(measured).tolist():
            job = jobs.get(found.names[place], IDLE)
            kwh, hours = sums.get(job, (0.0, 0.0))
            sums[job] = kwh + float(joules[place]) / J_PER_KWH, hours + span / 3600
        return sums


def record_energy(connection: duckdb.DuckDBPyConnection, sums: Mapping[str, tuple[float, float]], now: int) -> None:
    """Adds energies to the rows of this hour."""
    if sums:
        kwh, hours = zip(*sums.values(), strict=True)
        connection.execute(_ENERGY, [list(sums), now // HOUR * HOUR, list(kwh), list(hours)])


def read_jobs_of_gpus(cursor: duckdb.DuckDBPyConnection) -> dict[str, str]:
    """Returns GPU -> the job that runs on it now. A job whose ranks name no GPU has all GPUs of their nodes."""
    rows = cursor.execute(
        """SELECT coalesce(d.entity, r.device), any_value(r.job) FROM job_rank r
           LEFT JOIN device d ON d.class = 'gpu' AND starts_with(r.device, 'node:') AND d.node = r.node
           WHERE r."until" IS NULL GROUP BY ALL"""
    ).fetchall()
    return {str(gpu): str(job) for gpu, job in rows}
