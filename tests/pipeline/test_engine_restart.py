"""Real detectors behind the Engine: restarts midway neither flood nor forget; a snapshot of another version is told."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from detectors import configured
from detectors.runner import Runner
from pipeline.engine.engine import Engine
from pipeline.incidents import ledger
from pipeline.model.records import SECOND, Batch, Block, Origin
from pipeline.model.signals import CATALOGUE
from pipeline.transport import wire
from tests.detectors.cases import link, straggler
from tests.detectors.cases.case import Case

TICKS = 130
AT_ONCE = 5
"""Ticks that come in one message: the transactions take the time, not the judging. Chosen."""
RESTARTS = (30, 61, 66, 75, 90, 91, 122)
"""While it learns, when the fault begins, while it is a suspect, and while it is a page. Chosen."""


class Played:
    """A case shown to an Engine over a real store; it may be stopped and started at any tick."""

    def __init__(self, site: Any, case: Case) -> None:
        self.site, self.case = site, case
        site.speaks_for_all("n0")
        self.start()

    def start(self) -> None:
        """As after a restart: everything but the store is new."""
        self.ingest = self.site.open()
        detectors = [d for d in configured() if d.name == self.case.detector.name]
        self.runner = Runner(detectors)
        self.engine = Engine(
            self.site.database,
            self.ingest.devices,
            self.case.topology(),
            self.runner,
            lambda changes, now: [],
            lambda: self.case.time(10 * TICKS),
            self.case.step * SECOND,
        )

    def show(self, ticks: range) -> None:
        """What these instants measured, sent at once, stored and judged."""
        shown = [self.case.instant(n, n >= self.case.fault, np.random.default_rng([n, 7]))[0] for n in ticks]
        blocks = tuple(
            Block(
                kind, self.case.names[kind], {name: _stored(name, [s[kind][name] for s in shown]) for name in columns}
            )
            for kind, columns in shown[0].items()
        )
        times = np.array([self.case.time(n) for n in ticks])
        self.site.send_raw("n0", wire.encode(Batch(Origin("local", "n0", b"b" * 16), times, blocks)))
        while (committed := self.ingest.step()) is not None:
            self.engine.observe(committed)
        self.engine.advance(self.case.time(ticks[-1]))

    def incidents(self) -> list[Any]:
        found: list[Any] = self.site.rows(
            "SELECT id, cause, severity, epoch_us(opened), state FROM incidents ORDER BY ALL"
        )
        return found

    def results(self) -> tuple[list[Any], ...]:
        """All that was said: findings, incidents, history."""
        findings = self.site.rows(
            "SELECT detector, entity, epoch_us(onset), level, score, summary FROM findings ORDER BY ALL"
        )
        history = self.site.rows("SELECT incident, number, kind, epoch_us(time) FROM history ORDER BY ALL")
        return findings, self.incidents(), history


def _stored(name: str, columns: list[NDArray[np.float64]]) -> NDArray[Any]:
    """A signal over some instants, in the type in which it travels."""
    return np.stack(columns).astype(CATALOGUE[name].type)


def played(site: Any, case: Case, stops: Collection[int] = (), last: int = TICKS) -> Played:
    """All ticks until `last`, a few at once; stopped and started before those in `stops`."""
    made = Played(site, case)
    edges = sorted({*range(0, last, AT_ONCE), *stops, last})
    for first, end in itertools.pairwise(edges):
        if first in stops:
            made.start()
        made.show(range(first, end))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("case", [straggler.CASE, link.CASE], ids=lambda c: c.detector.name)
def test_restarts_midway_say_the_same_as_none(site: Any, new_site: Callable[[], Any], case: Case) -> None:
    other = new_site()
    wanted = played(other, case).results()
    other.shut()
    assert wanted[1], "the case opens an incident"
    assert played(site, case, RESTARTS).results() == wanted
    for spool in other.spools.values():
        spool.close()


def counting_far(case: Case) -> Case:
    """The case with a counter above 2**53, where a ulong does not fit a float: a port of 400 Gbit/s is there in 6 h."""

    def instant(n: int, faulty: bool, rng: np.random.Generator) -> Any:
        values, *events = case.instant(n, faulty, rng)
        values["nic"]["nic.phy_bits"] = np.full(len(case.names["nic"]), 2**53 + 1 + 2 * n, np.uint64)
        return values, *events

    return replace(case, instant=instant)


@pytest.mark.slow
def test_a_restart_judges_on_although_a_counter_is_too_large_for_a_float(
    site: Any, new_site: Callable[[], Any]
) -> None:
    case, other = counting_far(link.CASE), new_site()
    wanted = played(other, case, last=80).results()
    other.shut()
    assert wanted[0], "the case gives findings"
    assert played(site, case, (35, 66), last=80).results() == wanted
    for spool in other.spools.values():
        spool.close()


@pytest.mark.slow
def test_a_restart_long_after_the_fault_says_nothing_anew(site: Any) -> None:
    running = played(site, straggler.CASE)
    before = running.results()
    for _ in range(3):
        running.start()
        running.engine.advance(straggler.CASE.time(TICKS))
    assert running.results()[1:] == before[1:]
    assert {i[4] for i in running.incidents()} == {"open"}


def changed(running: Played, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrites the judge's snapshot in the store as another version might have left it."""
    connection = running.site.database.connection
    time, text = ledger.load_snapshot(connection, "judge")
    state = json.loads(text)
    change(state)
    with running.site.database.transaction() as held:
        ledger.save_snapshot(held, "judge", time, json.dumps(state))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda s: s["detectors"]["straggler"].popitem(),
            "straggler starts afresh: the snapshot is of another version",
        ),
        (lambda s: s["detectors"].pop("straggler"), "straggler starts afresh: the snapshot is of another version"),
        (lambda s: s.pop("active"), "corroboration starts afresh"),
        (lambda s: s.update(measured=[1]), "presence of signals starts afresh"),
        (lambda s: s.clear(), "all detectors start afresh: their snapshot has format 1"),
    ],
)
def test_a_snapshot_of_another_version_is_told_and_neither_floods_nor_closes_what_is_open(
    site: Any, caplog: pytest.LogCaptureFixture, change: Callable[[dict[str, Any]], Any], said: str
) -> None:
    running = played(site, straggler.CASE, last=100)
    before = running.incidents()
    assert len(before) == 1
    changed(running, change)
    running.start()
    assert said in caplog.text
    for first in range(100, TICKS, AT_ONCE):
        running.show(range(first, min(first + AT_ONCE, TICKS)))
    assert running.incidents() == before
