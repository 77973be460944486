"""Objectives of a simulated month beside arithmetic by hand; burn rates, energy, and what a restart changes: nothing.

The fleet: ten nodes of 8 GPUs for 30 days. Job a (account alpha) has n0 to n3 all the time, job b (account beta) n4 and
n5 for the first ten days.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from pipeline.config.objectives import Objective
from pipeline.config.sections import Config, Impact
from pipeline.objectives.budget import HOUR, Usage, judge
from pipeline.objectives.recorder import (
    IDLE,
    EnergyMeter,
    GpuReadings,
    read_jobs_of_gpus,
    record_energy,
    record_losses,
)
from pipeline.objectives.summary import Fleet, summarize
from pipeline.store.database import Database

DAY = 24 * HOUR
START = 20_454 * DAY  # midnight
END = START + 30 * DAY
OBJECTIVES = (
    Objective("goodput", "goodput", "fleet", 0.95),
    Objective("uptime", "availability", "fleet", 0.99),
    Objective("tenants", "goodput", "account:*", 0.99),
    Objective("alpha uptime", "availability", "account:alpha", 0.99),
    Objective("job b", "goodput", "job:b", 0.9),
)
IMPACT = Impact(
    price_per_gpu_hour=2.0,
    currency="EUR",
    price_per_kwh=0.10,
    carbon_kg_per_kwh=0.4,
    energy_factor=1.25,
    objectives=OBJECTIVES,
)
FLEET = Fleet(
    [f"n{i}" for i in range(10)],
    lambda entity: (
        f"node:{entity.partition(':')[2].partition('.')[0]}" if entity[:4] in ("gpu:", "node", "nic:") else None
    ),
)


def add_job(
    connection: duckdb.DuckDBPyConnection, job: str, account: str, nodes: range, hours: tuple[int, int]
) -> None:
    connection.execute(
        """INSERT INTO jobs VALUES ($1, make_timestamptz($2::BIGINT), CASE WHEN $3::BIGINT < $4::BIGINT THEN
           make_timestamptz($3::BIGINT) END, $1, $5, 'u', 'slurm', $6, $6, $7, NULL, true, 1.0, 1.0, NULL, false)""",
        [
            *(f"job:{job}", START + hours[0] * HOUR, START + hours[1] * HOUR, END, account, 8 * len(nodes)),
            [f"node:n{i}" for i in nodes],
        ],
    )


def add_incident(
    connection: duckdb.DuckDBPyConnection, id_: str, cause: str, detector: str, hours: tuple[int, int], **more: Any
) -> None:
    connection.execute(
        """INSERT INTO incidents VALUES ($1, $2, make_timestamptz($3::BIGINT), make_timestamptz($3::BIGINT),
           make_timestamptz($4::BIGINT), $5, $6, 0.9, 'resolved', 'summary', true, $7, $2,
           make_timestamptz($4::BIGINT), $8, NULL)""",
        [
            *(id_, cause, START + hours[0] * HOUR, START + hours[1] * HOUR, more.get("severity", "page")),
            *(more.get("members", [cause]), detector, more.get("life", "{}")),
        ],
    )


def lose(connection: duckdb.DuckDBPyConnection, id_: str, job: str, hours: tuple[int, int], rate: float) -> None:
    """An incident costs a job `rate` GPU-hours an hour, recorded hourly as the pipeline does each minute."""
    for hour in range(hours[0], hours[1]):
        lost = rate * (hour + 1 - hours[0])
        connection.execute("DELETE FROM impact_jobs WHERE incident = $1 AND job = $2", [id_, f"job:{job}"])
        connection.execute(
            "INSERT INTO impact_jobs VALUES ($1, $2, 'slow', 0.1, 8, 8, $3, 0, '')", [id_, f"job:{job}", lost]
        )
        record_losses(connection, START + (hour + 1) * HOUR - 1)


def add_hold(connection: duckdb.DuckDBPyConnection, id_: str, verb: str, node: str, hour: int, released: str) -> None:
    document = f'{{"mode": "on", "released": [{released}]}}'
    connection.execute(
        """INSERT INTO acts SELECT $1, $1, 'verified', $2, [$3], '', 'alice', t, t, t, 1, false, $4
           FROM (SELECT make_timestamptz($5::BIGINT) AS t)""",
        [id_, verb, f"node:{node}", document, START + hour * HOUR],
    )
    connection.execute(
        "INSERT INTO act_history VALUES ($1, 1, make_timestamptz($2::BIGINT), 'executed', 'executor', '')",
        [id_, START + hour * HOUR],
    )


@pytest.fixture(scope="module")
def month(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    with closing(Database(tmp_path_factory.mktemp("objectives") / "store.duckdb")) as made:
        c = made.connection
        add_job(c, "a", "alpha", range(4), (0, 720))
        add_job(c, "b", "beta", range(4, 6), (0, 240))
        add_incident(c, "I1", "gpu:n0.1", "xid", (120, 126))  # the job is dead for 6 h: 32 GPUs
        lose(c, "I1", "a", (120, 126), 32)
        add_hold(c, "ACT-1", "hold", "n0", 124, '"node:n0"')  # from the 4th hour, for 8 h: together 12 h out
        add_hold(c, "ACT-2", "release", "n0", 132, "")
        add_incident(c, "I2", "cdu:c1", "coolant", (288, 298), members=["gpu:n1.0", "gpu:n2.0"])  # slower by a quarter
        lose(c, "I2", "a", (288, 298), 32 * 0.2)
        add_incident(c, "I3", "nic:n4.0", "link", (72, 74))
        lose(c, "I3", "b", (72, 74), 16)
        add_incident(c, "I4", "gpu:n9.0", "thermal", (10, 20), life='{"feedback": "wrong"}')
        add_incident(c, "I5", "gpu:n8.0", "memory", (10, 20), severity="ticket")
        add_incident(c, "I7", "gpu:gone.1", "xid", (200, 600))  # of a node that is no longer part of the fleet
        add_incident(c, "I8", "gpu:n0.1", "xid", (121, 126), life='{"merged_into": "I1"}')
        add_incident(c, "I6", "pdu:p1", "telemetry", (700, 701), members=["node:n7", "node:n8"])  # two dead nodes
        c.execute(
            """INSERT INTO entity (entity, kind, site, simulated, parents, attributes)
               SELECT 'gpu:n' || n || '.' || g, 'gpu', 's', true, ['node:n' || n], '{"sku": "H100"}'
               FROM range(10) a(n), range(8) b(g)"""
        )
        for hour in range(720):
            record_energy(c, {"job:a": (16.0, 32.0), IDLE: (1.0, 20.0)}, START + hour * HOUR)
        yield made


@pytest.fixture(scope="module")
def report(month: Database) -> dict[str, Any]:
    return summarize(month.connection, replace(Config(), impact=IMPACT), FLEET, START, END)


def by_name(report: dict[str, Any], name: str, scope: str = "") -> dict[str, Any]:
    found: dict[str, Any] = next(o for o in report["objectives"] if o["name"] == name and scope in ("", o["scope"]))
    return found


@pytest.mark.slow
def test_goodput_of_the_fleet_is_as_by_hand(report: dict[str, Any]) -> None:
    total = 32 * 720 + 16 * 240  # 26,880 GPU-hours that jobs held
    lost = 32 * 6 + 32 * 0.2 * 10 + 16 * 2  # 288
    found = by_name(report, "goodput")
    assert (found["total_hours"], found["lost_hours"]) == (total, pytest.approx(lost))
    assert found["achieved"] == pytest.approx(1 - 288 / 26_880, abs=1e-6)
    assert found["budget_hours"] == pytest.approx(0.05 * 26_880)  # 1,344
    assert found["left_hours"] == pytest.approx(1344 - 288)
    assert found["left_share"] == pytest.approx(1056 / 1344, abs=1e-4)


def test_availability_counts_overlapping_reasons_once_and_dead_nodes_of_a_group(report: dict[str, Any]) -> None:
    lost = (
        12 + 2 + 2 * 1
    )  # n0: fault and hold together; n4: 2 h; two dead nodes for 1 h; the cooled nodes were in service
    found = by_name(report, "uptime")
    assert (found["total_hours"], found["lost_hours"]) == (10 * 720, pytest.approx(lost))
    assert found["left_hours"] == pytest.approx(72 - 16)
    assert report["availability"] == pytest.approx(1 - 16 / 7200)
    assert report["incidents"]["opened"] == 7, "one that was merged is no separate incident"
    alpha = by_name(report, "alpha uptime")
    assert (alpha["total_hours"], alpha["lost_hours"]) == (4 * 720, pytest.approx(12))


def test_each_tenant_and_a_job_have_their_own_budget(report: dict[str, Any]) -> None:
    alpha, beta = by_name(report, "tenants", "account:alpha"), by_name(report, "tenants", "account:beta")
    assert (alpha["lost_hours"], alpha["left_hours"]) == (pytest.approx(256), pytest.approx(0.01 * 23_040 - 256))
    assert alpha["left_share"] < 0  # missed
    assert (beta["lost_hours"], beta["left_hours"]) == (pytest.approx(32), pytest.approx(0.01 * 3840 - 32))
    assert by_name(report, "job b")["left_hours"] == pytest.approx(0.1 * 3840 - 32)


def test_losses_have_causes_money_energy_and_carbon(report: dict[str, Any]) -> None:
    lost = report["lost"]
    assert [(row["cause"], row["gpu_hours"]) for row in lost["by_cause"]] == [
        ("GPU", 192),
        ("Cooling", 64),
        ("Network", 32),
    ]
    assert (lost["gpu_hours"], lost["cost"], lost["currency"]) == (288, 576.0, "EUR")
    assert [(row["account"], row["gpu_hours"]) for row in lost["by_account"]] == [("alpha", 256), ("beta", 32)]
    kwh = 288 * 0.5 * 1.25  # 500 W a GPU, and a quarter for hosts and cooling
    assert (lost["kwh"], lost["kg_co2e"]) == (pytest.approx(kwh), pytest.approx(kwh * 0.4))


def test_energy_of_each_job_and_of_its_lost_hours(report: dict[str, Any]) -> None:
    energy = report["energy"]
    job = energy["by_job"][0]
    assert (job["job"], job["kwh"], job["cost"]) == ("job:a", 16 * 720 * 1.25, round(16 * 720 * 1.25 * 0.10, 2))
    assert job["kg_co2e"] == pytest.approx(16 * 720 * 1.25 * 0.4)
    assert job["lost_kwh"] == pytest.approx(256 * 0.5 * 1.25)
    assert energy["kwh"] == pytest.approx((16 + 1) * 720 * 1.25)
    assert energy["idle_kwh"] == pytest.approx(720 * 1.25)


def test_time_to_failure_by_type_and_cause_beside_published_fleets(report: dict[str, Any]) -> None:
    rows = {row["cause"]: row for row in report["failures"]}
    assert set(rows) == {"All hardware", "GPU", "Network"}  # not the wrong page, the ticket, or shared causes
    parts = {row["part"]: row["failures"] for row in report["spares"]["parts"]}
    assert (parts["GPU"], parts["Cable or transceiver"]) == (1, 1), "none of the node that left the fleet"
    total = rows["All hardware"]
    assert (total["type"], total["failures"], total["node_days"]) == ("H100", 2, 300)
    assert total["mttf_days"] == 150
    assert total["mttf_low_days"] == pytest.approx(300 / 6.2958, rel=1e-4)  # Garwood's interval of 2 at 90 %
    assert total["mttf_high_days"] == pytest.approx(300 / 0.35536, rel=1e-4)
    assert total["per_million_gpu_hours"] == pytest.approx(2 / (7200 * 8) * 1e6, abs=1e-3)
    assert total["per_thousand_node_days"] == pytest.approx(6.667, abs=1e-3)
    assert {row["fleet"].split()[0] for row in report["published"]} == {"Llama", "Meta", "Delta"}


def test_a_lemon_is_ranked_first_and_suggested_for_retirement(month: Database) -> None:
    with month.transaction() as c:
        for number in range(4):
            add_incident(c, f"L{number}", "gpu:n6.3", "xid", (300 + number, 301 + number))
        found = summarize(c, Config(), FLEET, START, END)
        for number in range(4):
            c.execute("DELETE FROM incidents WHERE id = $1", [f"L{number}"])
    first = found["ranking"][0]
    # 6 failures of 10 nodes: 0.6 expected; posterior mean (0.2 + 4) / (0.2 + 0.6)
    assert (first["node"], first["failures"], first["frailty"]) == ("n6", 4, pytest.approx(4.2 / 0.8))
    x = np.linspace(1e-9, 2.4, 200_001)  # P(Gamma(4.2, rate 0.8) >= 3) by trapezoids
    below = np.trapezoid(x**3.2 * np.exp(-x), x) / math.gamma(4.2)
    assert first["p_lemon"] == pytest.approx(1 - below, abs=1e-4)
    assert first["suggestion"] is None  # likely, but not sure enough: another fault would be
    assert found["spares"]["parts"][0]["part"] == "GPU"
    assert found["spares"]["parts"][0]["spares"] >= 1


def test_a_history_shorter_than_the_time_ahead_gives_no_number_of_spares(month: Database) -> None:
    with month.transaction() as c:
        found = summarize(c, replace(Config(), impact=Impact(spare_days=365.0)), FLEET, START, END)
    assert {(row["spares"], row["expected"]) for row in found["spares"]["parts"]} == {(None, None)}


def test_a_restart_repeats_and_forgets_no_loss(month: Database) -> None:
    before = month.connection.execute("SELECT count(*), sum(gpu_hours) FROM job_loss").fetchone()
    record_losses(month.connection, END)
    assert month.connection.execute("SELECT count(*), sum(gpu_hours) FROM job_loss").fetchone() == before


def test_the_loss_of_a_merged_incident_moves_without_changing_the_sum(tmp_path: Path) -> None:
    with closing(Database(tmp_path / "store.duckdb")) as made:
        c = made.connection
        add_incident(c, "I1", "gpu:n0.1", "xid", (0, 2))
        add_incident(c, "I2", "node:n0", "host", (0, 2))
        lose(c, "I1", "a", (0, 2), 8)
        c.execute("UPDATE impact_jobs SET incident = 'I2'")
        record_losses(c, START + 3 * HOUR)
        sums = c.execute("SELECT incident, sum(gpu_hours) FROM job_loss GROUP BY 1 ORDER BY 1").fetchall()
        assert sums == [("I1", 0.0), ("I2", 16.0)]


# --- burn rates -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lost", "alert"),
    [
        ({5 * 60: 0.72, 3600: 0.72}, "fast"),
        ({5 * 60: 0.73, 3600: 0.5}, ""),  # only the short window
        ({5 * 60: 0.0, 3600: 0.73}, ""),  # over already
        ({1800: 0.31, 6 * 3600: 0.31}, "medium"),
        ({6 * 3600: 0.06, 3 * 86_400: 0.06}, "slow"),
        ({}, ""),
    ],
)
def test_an_alert_needs_the_long_and_the_short_window_above_the_rate(lost: dict[int, float], alert: str) -> None:
    def measure(a: int, b: int) -> Usage:
        share = lost.get((b - a) // 1_000_000, 0.0) + 1e-9
        return Usage(100.0, 100.0 * share)

    assert judge(0.95, 30 * DAY, END, measure).alert == alert


def test_nothing_allocated_burns_nothing_and_a_short_window_has_no_slow_rule() -> None:
    found = judge(0.95, DAY, END, lambda a, b: Usage(0.0, 0.0))
    assert (found.usage.achieved, found.alert, set(found.burns)) == (None, "", {"fast", "medium"})
    assert found.as_json()["left_share"] is None


def test_the_month_alerts_in_the_outage_and_not_at_its_end(month: Database) -> None:
    during = summarize(month.connection, replace(Config(), impact=IMPACT), FLEET, START, START + 125 * HOUR)
    assert by_name(during, "goodput")["alert"] == "medium"  # 32 of 48 GPUs: burn 13.3
    assert (
        by_name(summarize(month.connection, replace(Config(), impact=IMPACT), FLEET, START, END), "goodput")["alert"]
        is None
    )


# --- energy -----------------------------------------------------------------------------------------------


def readings(power: list[float], energy: list[float], times: list[int]) -> GpuReadings:
    names = [f"gpu:n0.{i}" for i in range(len(power))]
    return GpuReadings(names, np.array(power), np.array(energy), np.array(times, np.int64))


def test_energy_counters_are_preferred_to_power_and_old_readings_do_not_count() -> None:
    meter, nan, second = EnergyMeter(), float("nan"), 1_000_000
    jobs = {"gpu:n0.0": "job:a", "gpu:n0.1": "job:a"}
    assert meter.measure(readings([500, 500, 100, 9], [1e6, nan, nan, nan], [START] * 4), jobs, START) == {}
    now = START + 60 * second
    found = meter.measure(readings([500, 500, 100, 9], [1e6 + 36_000, nan, nan, nan], [now, now, now, 0]), jobs, now)
    assert list(found["job:a"]) == pytest.approx([(36_000 + 30_000) / 3.6e6, 2 / 60])
    assert list(found[IDLE]) == pytest.approx([6000 / 3.6e6, 1 / 60])
    later = now + 60 * second
    reset = meter.measure(readings([500, 500, 100, 9], [0.0, nan, nan, nan], [later] * 4), jobs, later)
    assert reset["job:a"][0] == pytest.approx(60_000 / 3.6e6)  # a counter that began again: power times time
    gap = later + 400 * second
    assert meter.measure(readings([500, 500, 100, 9], [9e9] + [nan] * 3, [gap] * 4), jobs, gap) == {}


def test_a_job_without_known_gpus_has_all_of_its_nodes(tmp_path: Path) -> None:
    with closing(Database(tmp_path / "store.duckdb")) as made:
        c = made.connection
        for i in range(2):
            c.execute(f"INSERT INTO device VALUES ('gpu', {i}, 's', 'gpu:n0.{i}', 'n0', true)")
        c.execute(
            """INSERT INTO job_rank VALUES ('rank:9.0', 'job:9', NULL, 'node:n0', 'n0', now(), NULL, false, 'x', true),
               ('rank:8.0', 'job:8', NULL, 'gpu:n1.0', 'n1', now(), NULL, false, 'x', true),
               ('rank:7.0', 'job:7', NULL, 'gpu:n1.0', 'n1', now(), now(), false, 'x', true)"""
        )
        assert read_jobs_of_gpus(c) == {"gpu:n0.0": "job:9", "gpu:n0.1": "job:9", "gpu:n1.0": "job:8"}
