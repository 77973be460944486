"""The minute of the pipeline: losses and energy are recorded, and a budget that burns too fast is an incident."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.commands.objectives_keeper import ObjectivesKeeper, make_finding, name_objective
from pipeline.config.objectives import Objective
from pipeline.config.sections import Config, Impact
from pipeline.model.records import SECOND
from pipeline.objectives.budget import Standing, Usage
from pipeline.store.latest import CurrentValues
from tests.pipeline.living import HOUR, MINUTE, LivingSite

GOODPUT = Objective("goodput", "goodput", "fleet", 0.95, page=True)


class Service:
    """The parts of a service that the keeper uses, on a living site with one GPU that draws 360 W."""

    def __init__(self, site: LivingSite) -> None:
        self.site, self.database, self.engine, self.ingest = site, site.database, site.engine, self
        self.config = replace(Config(), impact=Impact(objectives=(GOODPUT,)))
        self.devices = site.engine.devices
        self.devices.load(site.database.connection)

    def clock(self) -> int:
        now: int = self.site.now
        return now

    def read_current(self, device_class: str, columns: list[str]) -> CurrentValues:
        power = np.array([360.0], np.float32)
        times = np.array([self.site.now], np.int64)
        return CurrentValues({"power": power}, {"power": times}, times, np.array([0], np.int32))


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    site = LivingSite(tmp_path / "store.duckdb")
    site.database.connection.execute("INSERT INTO device VALUES ('gpu', 0, 's', 'gpu:n0.0', 'n0', false)")
    yield Service(site)
    site.database.close()


def add_job(site: LivingSite, lost: float) -> None:
    connection = site.database.connection
    connection.execute(
        """INSERT INTO jobs VALUES ('job:9', make_timestamptz($1::BIGINT), NULL, 'j', 'team', 'u', 's', 8, 8,
           ['node:n0'], NULL, false, 1.0, 1.0, NULL, false)""",
        [site.now - 30 * 24 * HOUR],
    )
    connection.execute("INSERT INTO impact_jobs VALUES ('I', 'job:9', 'lost', 1, 8, 8, $1, 8, '')", [lost])
    connection.execute(
        """INSERT INTO incidents SELECT 'I', 'gpu:n0.0', t, t, NULL, 'page', ['gpu:n0.0'], 1, 'open', 's', false, 'xid',
           'gpu:n0.0', t, '{}', NULL FROM (SELECT make_timestamptz($1::BIGINT) AS t)""",
        [site.now],
    )


def minute(service: Service, keeper: ObjectivesKeeper) -> None:
    service.site.now += MINUTE
    assert keeper.run()
    service.site.step()  # type: ignore[no-untyped-call]


@pytest.mark.slow
def test_a_burning_budget_becomes_an_incident_that_resolves_by_itself(service: Service) -> None:
    keeper = ObjectivesKeeper(service)  # type: ignore[arg-type] # the parts of a service that it uses
    add_job(service.site, 8.0)  # all eight GPUs of an hour, in one minute
    for _ in range(3):
        minute(service, keeper)
    found = [i for i in service.engine.life.shown.values() if i.detector == "objective"]
    assert [(i.cause, i.severity, i.resolved) for i in found] == [("objective:goodput", "page", None)]
    assert found[0].summary.startswith("Objective goodput: error budget burns 19.9x, 97 % left")  # job 1 of the site
    for _ in range(75):
        minute(service, keeper)
    assert service.site.stored(found[0].id).resolved is not None


def test_energy_is_recorded_by_hour_and_the_minute_is_not_done_twice(service: Service) -> None:
    keeper = ObjectivesKeeper(service)  # type: ignore[arg-type]
    for _ in range(11):
        minute(service, keeper)
    assert not keeper.run()
    rows = service.database.connection.execute(
        "SELECT job, sum(kwh), sum(gpu_hours) FROM job_energy GROUP BY 1"
    ).fetchall()
    assert rows == [("", pytest.approx(360 * 600 / 3.6e6), pytest.approx(10 / 60))]


def test_the_energy_counter_is_in_millijoules(service: Service) -> None:
    """A GPU of 360 W uses 0.36 kWh an hour, by its counter as by its power."""
    now = service.site.now

    def read_current(device_class: str, columns: list[str]) -> CurrentValues:
        used = np.array([5e12 + 360e3 * (service.site.now - now) / SECOND], np.uint64)
        times = np.array([service.site.now], np.int64)
        return CurrentValues({"energy": used}, {"energy": times}, times, np.array([0], np.int32))

    service.read_current = read_current  # type: ignore[method-assign, assignment]
    keeper = ObjectivesKeeper(service)  # type: ignore[arg-type]
    for _ in range(11):
        minute(service, keeper)
    rows = service.database.connection.execute("SELECT sum(kwh), sum(gpu_hours) FROM job_energy").fetchall()
    assert rows == [(pytest.approx(0.06), pytest.approx(10 / 60))]


@pytest.mark.parametrize(("alert", "level"), [("fast", "page"), ("medium", "page"), ("slow", "ticket")])
def test_only_a_fast_burn_of_an_objective_that_may_page_pages(alert: str, level: str) -> None:
    burns: dict[str, Any] = {"fast": (20.0, 21.0), "medium": (7.0, 8.0), "slow": (2.0, 3.0)}
    standing = Standing(Usage(100, 3), 5.0, 2.0, burns, alert)
    assert make_finding(GOODPUT, "goodput", standing, 0, 0).level == level
    assert make_finding(replace(GOODPUT, page=False), "goodput", standing, 0, 0).level == "ticket"
    assert make_finding(GOODPUT, "g" * 200, standing, 0, 0).summary.startswith("Objective ggg")


def test_each_of_many_scopes_has_its_own_name() -> None:
    assert name_objective(replace(GOODPUT, scope="account:*"), "account:alpha") == "goodput alpha"
    assert name_objective(GOODPUT, "fleet") == "goodput"
