"""Real detectors behind the Engine: a restart neither repeats nor loses findings; an unknown snapshot is reported."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from detectors import configured
from detectors.runner import Runner
from pipeline.engine import restart
from pipeline.engine.engine import Engine
from pipeline.incidents import ledger
from pipeline.model.records import SECOND, Batch, Block, Origin
from pipeline.model.signals import CATALOGUE
from pipeline.store.detector_state import read_state, state_folder, write_state
from pipeline.transport import wire
from tests.detectors.cases import link, straggler
from tests.detectors.cases.case import Case
from tests.detectors.snapshots import read, written

TICKS = 130
TICKS_PER_MESSAGE = 5
"""Ticks per message: the transactions take the time, not the detectors. Chosen."""
RESTARTS = (30, 61, 66, 75, 90, 91, 122)
"""While it learns, when the fault begins, while it is a suspect, and while it is a page. Chosen."""


class CaseRun:
    """Runs a case through an Engine over a real store; it can restart at any tick."""

    def __init__(self, site: Any, case: Case) -> None:
        self.site, self.case = site, case
        site.allow_all_entities("n0")
        self.start()

    def start(self) -> None:
        """Starts with new objects and the old store, as after a restart."""
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

    def run_ticks(self, ticks: range) -> None:
        """Sends the data of these ticks in one message, stores and evaluates it."""
        shown = [self.case.instant(n, n >= self.case.fault, np.random.default_rng([n, 7]))[0] for n in ticks]
        blocks = tuple(
            Block(
                kind,
                self.case.names[kind],
                {name: _wire_array(name, [s[kind][name] for s in shown]) for name in columns},
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
        """Returns all findings, incidents and history."""
        findings = self.site.rows(
            "SELECT detector, entity, epoch_us(onset), level, score, summary FROM findings ORDER BY ALL"
        )
        history = self.site.rows("SELECT incident, number, kind, epoch_us(time) FROM history ORDER BY ALL")
        return findings, self.incidents(), history


def _wire_array(name: str, columns: list[NDArray[np.float64]]) -> NDArray[Any]:
    """Returns a signal over some ticks, in the type of its wire format."""
    return np.stack(columns).astype(CATALOGUE[name].type)


def run_case(site: Any, case: Case, stops: Collection[int] = (), last: int = TICKS) -> CaseRun:
    """Runs all ticks until `last`, a few per message; restarts before those in `stops`."""
    made = CaseRun(site, case)
    edges = sorted({*range(0, last, TICKS_PER_MESSAGE), *stops, last})
    for first, end in itertools.pairwise(edges):
        if first in stops:
            made.start()
        made.run_ticks(range(first, end))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("case", [straggler.CASE, link.CASE], ids=lambda c: c.detector.name)
def test_restarts_give_the_same_results_as_a_run_without(site: Any, new_site: Callable[[], Any], case: Case) -> None:
    other = new_site()
    wanted = run_case(other, case).results()
    other.shut()
    assert wanted[1], "the case opens an incident"
    assert run_case(site, case, RESTARTS).results() == wanted
    for spool in other.spools.values():
        spool.close()


def with_large_counter(case: Case) -> Case:
    """Returns the case with a counter above 2**53, too large for a float; a port of 400 Gbit/s reaches it in 6 h."""

    def instant(n: int, faulty: bool, rng: np.random.Generator) -> Any:
        values, *events = case.instant(n, faulty, rng)
        values["nic"]["nic.phy_bits"] = np.full(len(case.names["nic"]), 2**53 + 1 + 2 * n, np.uint64)
        return values, *events

    return replace(case, instant=instant)


@pytest.mark.slow
def test_a_restart_continues_although_a_counter_is_too_large_for_a_float(
    site: Any, new_site: Callable[[], Any]
) -> None:
    case, other = with_large_counter(link.CASE), new_site()
    wanted = run_case(other, case, last=80).results()
    other.shut()
    assert wanted[0], "the case gives findings"
    assert run_case(site, case, (35, 66), last=80).results() == wanted
    for spool in other.spools.values():
        spool.close()


@pytest.mark.slow
def test_a_restart_long_after_the_fault_reports_nothing_again(site: Any) -> None:
    running = run_case(site, straggler.CASE)
    before = running.results()
    for _ in range(3):
        running.start()
        running.engine.advance(straggler.CASE.time(TICKS))
    assert running.results()[1:] == before[1:]
    assert {i[4] for i in running.incidents()} == {"open"}


def rewrite_snapshot(running: CaseRun, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrites the judge's snapshot in the store as another version would have written it."""
    connection = running.site.database.connection
    store = running.site.database.path
    time, name = ledger.load_snapshot(connection, "judge")
    state = read(read_state(store, name))
    change(state)
    pieces = ((name, [piece]) for name, piece in written(state).items())
    with running.site.database.transaction() as held:
        ledger.save_snapshot(held, "judge", time, write_state(store, time, pieces))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda s: s["detectors"]["straggler"].popitem(),
            "straggler starts with empty state: the snapshot is of another version",
        ),
        (
            lambda s: s["detectors"].pop("straggler"),
            "straggler starts with empty state: the snapshot is of another version",
        ),
        (lambda s: s.pop("active"), "corroboration starts with empty state"),
        (lambda s: s.update(measured=[1]), "presence of signals starts with empty state"),
        (lambda s: s.clear(), "all detectors start with empty state: their snapshot has format 1"),
    ],
)
def test_a_snapshot_of_another_version_is_reported_and_neither_repeats_nor_closes_findings(
    site: Any, caplog: pytest.LogCaptureFixture, change: Callable[[dict[str, Any]], Any], said: str
) -> None:
    running = run_case(site, straggler.CASE, last=100)
    before = running.incidents()
    assert len(before) == 1
    rewrite_snapshot(running, change)
    running.start()
    assert said in caplog.text
    for first in range(100, TICKS, TICKS_PER_MESSAGE):
        running.run_ticks(range(first, min(first + TICKS_PER_MESSAGE, TICKS)))
    assert running.incidents() == before


@pytest.mark.slow
def test_a_full_disk_leaves_the_older_state_valid_and_evaluation_goes_on(
    site: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> str:
        raise OSError(28, "No space left on device")

    running = run_case(site, straggler.CASE, last=80)
    monkeypatch.setattr(restart, "write_state", refuse)
    for first in range(80, TICKS, TICKS_PER_MESSAGE):
        running.run_ticks(range(first, min(first + TICKS_PER_MESSAGE, TICKS)))
    assert "the newest one written stays valid" in caplog.text
    found = running.results()
    assert found[1]
    running.start()
    assert running.results() == found


@pytest.mark.slow
def test_a_state_file_that_is_gone_or_damaged_makes_the_detectors_learn_again_and_repeats_nothing(
    site: Any, caplog: pytest.LogCaptureFixture
) -> None:
    running = run_case(site, straggler.CASE, last=100)
    before = running.incidents()
    (path,) = state_folder(site.database.path).iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    running.start()
    assert "has a wrong checksum or is cut" in caplog.text
    path.unlink(missing_ok=True)
    running.start()
    assert running.incidents() == before
