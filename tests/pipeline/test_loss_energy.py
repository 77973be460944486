"""The energy of lost GPU-hours is one figure: by cause, tenant and job, and beside the energy of each job."""

from __future__ import annotations

import pytest

from dashboards.report.weekly import measured_note
from pipeline.config.sections import Impact
from pipeline.objectives.loss_energy import Loss, find_rates
from pipeline.objectives.recorder import IDLE
from pipeline.objectives.summary import list_energy, list_losses

USED = [("job:a", "alpha", "", 70.0, 100.0), ("job:b", "beta", "", 10.0, 50.0), (IDLE, None, None, 5.0, 40.0)]
"""Job, account, name, kWh, GPU-hours: 0.7 and 0.2 kWh per GPU-hour."""
LOST = [
    ("thermal", "gpu", "job:a", "alpha", 10.0, 1),
    ("thermal", "gpu", "job:b", "beta", 20.0, 1),
    ("link", "port", "job:b", "beta", 5.0, 1),
]


def test_jobs_of_unlike_power_have_one_figure_in_all_tables() -> None:
    hours = {"job:a": 10.0, "job:b": 25.0}
    rates = find_rates([(row[0], row[3], row[4]) for row in USED if row[0] != IDLE])
    lost, energy = list_losses(LOST, Impact(), rates), list_energy(USED, Impact(), hours, rates)
    expected = 10 * 0.7 + 25 * 0.2
    assert lost["kwh"] == energy["lost_kwh"] == pytest.approx(expected)
    for by in ("by_cause", "by_account", "by_job"):
        assert sum(row["kwh"] for row in lost[by]) == pytest.approx(expected)
    of_jobs = {row["job"]: row["lost_kwh"] for row in energy["by_job"]}
    assert of_jobs == {row["job"]: row["kwh"] for row in lost["by_job"]}
    assert (energy["kwh"], energy["idle_kwh"]) == (85.0, 5.0)


def test_lost_hours_count_at_the_mean_power_also_while_energy_was_not_measured() -> None:
    """Energy was measured for 10 of the 40 GPU-hours that it lost."""
    rates = find_rates([("job:a", 5.0, 10.0)])
    assert Loss().plus(40.0, rates.of("job:a")).kwh == pytest.approx(20.0)


def test_a_job_without_measured_energy_counts_at_the_mean_and_no_energy_at_all_is_unknown() -> None:
    assert find_rates([("job:a", 5.0, 10.0), ("job:b", 4.0, 8.0)]).of("job:c") == pytest.approx(0.5)
    unknown = find_rates([]).of("job:c")
    assert unknown is None
    assert Loss().plus(3.0, unknown) == Loss(3.0, None)


def test_the_page_says_for_how_much_of_the_time_energy_was_measured() -> None:
    short = {"energy": {"gpu_hours": 32.0}, "gpu_hours": 2742.0}
    assert measured_note(short) == "; measured for 32.0 h of 2,742 h of GPU time, so lost hours may count more"
    assert measured_note({"energy": {"gpu_hours": 2700.0}, "gpu_hours": 2742.0}) == ""
