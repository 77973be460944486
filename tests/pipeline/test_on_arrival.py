"""Events that are a finding by themselves are judged as they arrive, however late, once, and over restarts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from detectors import configured
from detectors.runner import Runner
from pipeline.engine.engine import Engine
from pipeline.engine.restart import read_since
from pipeline.judging.frames import Framer
from pipeline.model.records import SECOND, Event, Finding, Rows
from pipeline.model.topology import Topology

T0 = 1_780_000_000 * SECOND
STEP = 10 * SECOND
GPU = "gpu:n1.0"
CLOCK = T0 + 7 * 86_400 * SECOND
XID = {"xid": 79, "name": "GPU has fallen off the bus", "action": "RESET_GPU"}


def xid(time: int, code: int = 79) -> Event:
    return Event(time, GPU, "xid", {**XID, "xid": code})


class Judged:
    """A store with an Engine and the detectors of XIDs and loops, which may be started anew at any time."""

    def __init__(self, site: Any) -> None:
        self.site, self.clock = site, CLOCK
        self.start()

    def start(self) -> None:
        self.ingest = self.site.open()
        self.runner = Runner([d for d in configured() if d.on_arrival])
        self.engine = Engine(
            self.site.database, self.ingest.devices, Topology(), self.runner, lambda *_: [], lambda: self.clock, STEP
        )

    def take(self) -> None:
        """Stores what was sent; nothing but events is judged."""
        while (committed := self.ingest.step(self.engine.framer.closed)) is not None:
            self.engine.observe(committed)

    def run(self, first: int, last: int) -> None:
        """Telemetry of a node, a row per frame, and their frames."""
        for tick in range(first, last):
            self.site.send("n1", T0 + tick * STEP, first=50)
        self.take()
        self.engine.advance(T0 + last * STEP)

    def late_xid(self) -> None:
        """Eleven frames, and then the XID of the seventh."""
        self.run(0, 11)
        self.site.send_events("n1", xid(T0 + 65 * SECOND))

    def paged_once(self) -> bool:
        return self.findings() == PAGE and self.history() == [("opened",)]

    def findings(self) -> list[Any]:
        return self.site.rows("SELECT detector, entity, epoch_us(onset), level FROM findings ORDER BY ALL")

    def history(self) -> list[Any]:
        return self.site.rows("SELECT kind FROM history ORDER BY incident, number")


@pytest.fixture
def judged(site: Any) -> Judged:
    return Judged(site)


PAGE = [("xid", GPU, T0 + 65 * SECOND, "page")]


def test_a_fatal_xid_pages_before_its_frame_closes(judged: Judged) -> None:
    judged.run(0, 3)
    judged.site.send_events("n1", xid(T0 + 65 * SECOND))
    judged.take()
    assert judged.findings() == PAGE
    assert judged.site.rows("SELECT severity, state FROM incidents") == [("page", "open")]


def test_its_frame_reports_it_no_second_time(judged: Judged) -> None:
    judged.run(0, 3)
    judged.site.send_events("n1", xid(T0 + 65 * SECOND))
    judged.take()
    judged.run(3, 9)
    assert judged.paged_once()


def test_a_fatal_xid_that_is_forty_seconds_late_pages_once(judged: Judged) -> None:
    judged.late_xid()
    judged.take()
    judged.run(11, 14)
    assert judged.paged_once()
    assert judged.engine.framer.late == {"events": 1}


@pytest.mark.parametrize("late", [40, 3600])
def test_an_xid_that_is_weighed_with_its_frame_is_judged_however_late(judged: Judged, late: int) -> None:
    judged.run(0, 2 + late // 10)
    judged.site.send_events("n1", xid(T0 + SECOND, code=48))
    judged.take()
    assert judged.findings() == []
    judged.run(2 + late // 10, 8 + late // 10)
    assert [(d, e, o) for d, e, o, _ in judged.findings()] == [("xid", GPU, T0 + SECOND)]


@pytest.mark.slow
@pytest.mark.parametrize("stops", [(1,), (2,), (3,), (1, 2, 3)])
def test_restarts_before_and_after_it_was_judged_page_once(judged: Judged, stops: Sequence[int]) -> None:
    judged.late_xid()
    if 1 in stops:  # stored, and the process ends before it is judged
        assert judged.ingest.step(judged.engine.framer.closed) is not None
        judged.start()
    judged.take()
    if 2 in stops:
        judged.start()
    judged.run(11, 13)
    if 3 in stops:
        judged.start()
    judged.run(13, 20)
    assert judged.paged_once()


def test_a_driver_that_is_loaded_anew_pages_nobody_on_arrival(judged: Judged) -> None:
    judged.run(0, 3)
    judged.site.send_events("n1", *(Event(T0 + 35 * SECOND, f"gpu:n1.{g}", "gpu_lost", {"present": 0}) for g in (0, 1)))
    judged.take()
    assert judged.findings() == []


def test_announced_work_pages_nobody_on_arrival(judged: Judged) -> None:
    judged.site.send_events("n1", Event(T0, GPU, "maintenance_start", {"seconds": 3600}))
    judged.run(0, 3)
    judged.site.send_events("n1", xid(T0 + 65 * SECOND))
    judged.run(3, 9)
    assert {level for *_, level in judged.findings()} == {"suspect"}


def test_an_incident_is_opened_when_people_could_see_it(judged: Judged) -> None:
    judged.run(0, 3)
    judged.site.send_events("n1", xid(T0 + 65 * SECOND))
    judged.take()
    assert judged.site.rows("SELECT epoch_us(onset), epoch_us(opened) FROM incidents") == [(T0 + 65 * SECOND, CLOCK)]
    assert judged.site.rows("SELECT DISTINCT epoch_us(time) FROM history") == [(CLOCK,)]


def test_late_rows_are_marked_and_a_restart_and_a_replay_judge_the_same_frames(judged: Judged) -> None:
    judged.run(0, 8)
    judged.site.send("n2", T0 + 3 * STEP, first=90)
    judged.take()
    judged.run(8, 9)
    late = [("gpu", T0 + 3 * STEP, f"gpu:n2.{g}") for g in range(2)]
    assert judged.site.rows("SELECT class, epoch_us(time), entity FROM late_rows ORDER BY ALL") == late
    again: list[Rows] = []
    read_since(judged.site.database, T0, CLOCK, lambda rows, events, until: again.extend(rows))
    assert sum(len(rows.time) for rows in again) == 9 * 2


# --- live and replay --------------------------------------------------------------------------------------------------


def collapse(time: int, **more: Any) -> Event:
    data = {"state": "active", "since": time - SECOND, "signal": "coolant.flow", "value": 9.0, "usual": 100.0}
    return Event(time, "cdu:c0", "flow_collapse", {**data, "share": 0.7, **more})


EVENTS = [
    xid(T0 + 12 * SECOND),
    Event(T0 + 12 * SECOND + 200_000, GPU, "xid", {"xid": 154, "action": "GPU Reset"}),
    Event(T0 + 13 * SECOND, GPU, "gpu_lost", {"present": 7}),
    collapse(T0 + 14 * SECOND),
    Event(
        T0 + 25 * SECOND, "leak_detector:r1", "leak", {"state": "active", "since": T0 + 25 * SECOND, "leak": "critical"}
    ),
    Event(T0 + 31 * SECOND, "gpu:n2.1", "temperature_rise", {"state": "active", "since": T0 + 30 * SECOND}),
]


def spoken(arrivals: Sequence[int]) -> list[Finding]:
    """All findings where each event arrives before the frame of that number closes; a replay has all frames alone."""
    runner, framer = Runner([d for d in configured() if d.on_arrival]), Framer(STEP, Topology(), lambda _: [])
    found: list[Finding] = []
    for tick in range(10):
        arrived = [e for e, at in zip(EVENTS, arrivals, strict=True) if at == tick]
        framer.add_events(arrived)
        found += runner.judge_events(arrived, Topology())
        for instant in framer.advance(T0 + (tick + 1) * STEP):
            found += runner.observe(instant.frames)
    return found


def keys(found: Sequence[Finding]) -> list[tuple[Any, ...]]:
    return sorted(
        (f.key, f.level, f.time, f.summary) for f in found if f.level == "page" or f.detector == "thermal_edge"
    )


def test_events_on_arrival_give_the_findings_of_a_replay_for_any_interleaving() -> None:
    runner, framer = Runner([d for d in configured() if d.on_arrival]), Framer(STEP, Topology(), lambda _: [])
    framer.add_events(EVENTS)
    replayed = [f for instant in framer.advance(T0 + 10 * STEP) for f in runner.observe(instant.frames)]
    assert {(f.detector, f.level) for f in replayed} >= {
        ("xid", "page"),
        ("coolant_edge", "page"),
        ("coolant_leak", "page"),
        ("thermal_edge", "suspect"),
    }
    for arrivals in (
        [0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 2, 3],
        [0, 1, 1, 0, 2, 1],
    ):  # one agent's events stay in their order
        assert keys(spoken(arrivals)) == keys(replayed)


def test_a_flow_that_collapses_alone_is_left_to_its_frame() -> None:
    runner = Runner(configured())
    assert runner.judge_events([collapse(T0, others={"coolant.pressure": 1.0})], Topology()) == []
    [found] = runner.judge_events([collapse(T0, others={"coolant.pressure": 0.2})], Topology())
    assert (found.level, found.entity, found.onset) == ("page", "cdu:c0", T0 - SECOND)
