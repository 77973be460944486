"""A change that is refused takes back nothing that was written before it, and a restart forgets no rank that ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.engine.engine import PendingResults
from pipeline.incidents import storms
from pipeline.incidents.changes import QUIET_END, Change
from pipeline.incidents.desk import ACTOR
from pipeline.model.errors import Refused
from tests.pipeline.living import LivingSite


@pytest.fixture
def site(tmp_path: Path) -> Iterator[LivingSite]:
    made = LivingSite(tmp_path / "store.duckdb")
    yield made
    made.database.close()


def refuse(desk: Any) -> list[Change]:
    raise Refused("already resolved")


def test_an_incident_that_resolved_before_a_refused_act_stays_resolved(site: LivingSite) -> None:
    page = site.report("gpu:n0.0")
    before = site.shown()[page]
    ended = Change(
        "resolved", replace(before, resolved=site.now, state="resolved"), site.now, ACTOR, QUIET_END, (), before
    )
    site.engine._pending = PendingResults(site.now + 1, changes=[ended], replay=[list])
    with pytest.raises(Refused):
        site.engine.apply(refuse)
    assert site.state(page) == "resolved"
    assert site.shown()[page].resolved == site.now


def test_a_rank_that_ended_before_a_restart_is_not_awaited(site: LivingSite) -> None:
    for number, rank in enumerate(("rank:9.0", "rank:1.0")):  # of a job that ended, and of one that runs
        site.database.connection.execute(
            "INSERT INTO device VALUES ('rank', $1, 'local', $2, 'n0', false)", [number, rank]
        )
    site.restart()
    site.engine._last_seen.now = site.now
    assert [site.engine._last_seen.is_present(rank) for rank in ("rank:9.0", "rank:1.0")] == [True, False]


def test_a_storm_of_an_older_version_is_a_page() -> None:
    assert [storms.severity_of(key) for key in ((), ("Hot",), ("Hot", storms.TICKETS))] == ["page", "page", "ticket"]
