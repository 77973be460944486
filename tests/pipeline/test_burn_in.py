"""Nodes in their burn-in have tighter limits: a ticket pages, and the first error is a ticket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.commands.burn_in import BurnInWatch
from pipeline.config.acts import Acts
from pipeline.config.sections import Config
from pipeline.model.records import SECOND
from tests.pipeline.living import MINUTE, LivingSite

DAY = 86_400 * SECOND
RELEASE = """
INSERT INTO acts SELECT 'ACT-1', 'ACT-1', 'verified', 'release', ['node:n1'], '', 'alice', t, t, t, 1, false,
  '{"mode": "on"}' FROM (SELECT make_timestamptz($1::BIGINT) AS t)"""


class Site:
    """A living site and its watch; node n1 was released a while ago."""

    def __init__(self, folder: Path, days: float = 7.0) -> None:
        self.living = LivingSite(folder / "store.duckdb")  # type: ignore[no-untyped-call]
        self.config = Config(acts=Acts(burn_in_days=days))
        service: Any = SimpleNamespace(
            engine=self.living.engine,
            database=self.living.database,
            config=self.config,
            clock=lambda: self.living.now,
        )
        self.watch = BurnInWatch(service)

    def release(self, ago: int) -> None:
        """Node n1 was released so long ago (us)."""
        connection, time = self.living.database.connection, self.living.now - ago
        connection.execute(RELEASE, [time])
        connection.execute(
            "INSERT INTO act_history VALUES ('ACT-1', 1, make_timestamptz($1::BIGINT), 'executed', 'executor', '')",
            [time],
        )

    def run(self) -> bool:
        """One look, a minute later."""
        self.living.wait(1)  # type: ignore[no-untyped-call]
        return self.watch.run()

    def incidents(self) -> list[tuple[str, str, str]]:
        self.living.engine.advance_life()
        return [(i.cause, i.severity, i.summary) for i in self.living.shown().values()]  # type: ignore[no-untyped-call]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.living.database.close()


def test_a_ticket_on_a_node_in_burn_in_becomes_a_page_once(site: Site) -> None:
    site.release(DAY)
    site.living.report("gpu:n1.2", "gpu:n2.2", level="ticket")  # type: ignore[no-untyped-call]
    assert (site.run(), site.run()) == (True, False)
    assert site.incidents() == [
        ("gpu:n1.2", "page", "gpu:n1.2: hot (burn-in)"),
        ("gpu:n2.2", "ticket", "gpu:n2.2: hot"),
    ]


def test_after_the_burn_in_and_before_the_release_a_ticket_stays_one(site: Site) -> None:
    site.release(8 * DAY)
    site.living.report("gpu:n1.2", level="ticket")  # type: ignore[no-untyped-call]
    assert not site.run()
    site.living.database.connection.execute(
        "UPDATE act_history SET time = make_timestamptz($1::BIGINT)", [site.living.now]
    )  # the ticket is older than the release
    assert not site.run()


def test_the_first_error_of_a_gpu_in_burn_in_is_a_ticket_and_one_elsewhere_is_none(site: Site) -> None:
    site.release(DAY)
    connection = site.living.database.connection
    for device, entity in enumerate(("gpu:n1.3", "gpu:n2.3")):
        connection.execute("INSERT INTO device VALUES ('gpu', $1, 's', $2, $3, false)", [device, entity, entity[4:6]])
        for minute, rows in ((-4, 2), (-1, 3)):
            connection.execute(
                """INSERT INTO hot_gpu (time, device, late, rows_corrected)
                   VALUES (make_timestamptz($1::BIGINT), $2, false, $3)""",
                [site.living.now + minute * MINUTE, device, rows],
            )
    assert site.run()
    assert site.incidents() == [("gpu:n1.3", "ticket", "GPU 3 of n1: rows corrected +1 (burn-in)")]
    site.living.wait(30)  # type: ignore[no-untyped-call]
    assert not site.run()


def test_errors_right_after_the_release_do_not_count(site: Site) -> None:
    site.release(0)
    site.living.database.connection.execute("INSERT INTO device VALUES ('gpu', 0, 's', 'gpu:n1.3', 'n1', false)")
    assert not site.run()


def test_without_a_burn_in_nothing_changes(tmp_path: Path) -> None:
    site = Site(tmp_path, days=0)
    site.release(DAY)
    site.living.report("gpu:n1.2", level="ticket")  # type: ignore[no-untyped-call]
    assert not site.run()
    site.living.database.close()
