"""Events that are findings by themselves are evaluated on arrival, however late, once, and across restarts."""

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


class ArrivalEngine:
    """A store with an Engine and the detectors of XIDs and loops; it can restart at any time."""

    def __init__(self, site: Any) -> None:
        self.site, self.clock = site, CLOCK
        self.start()

    def start(self) -> None:
        self.ingest = self.site.open()
        self.runner = Runner([d for d in configured() if d.on_arrival])
        self.engine = Engine(
            self.site.database, self.ingest.devices, Topology(), self.runner, lambda *_: [], lambda: self.clock, STEP
        )

    def store_messages(self) -> None:
        """Stores the sent messages; only events are evaluated."""
        while (committed := self.ingest.step(self.engine.framer.closed)) is not None:
            self.engine.observe(committed)

    def run(self, first: int, last: int) -> None:
        """Sends telemetry of a node, a row per frame, and closes the frames."""
        for tick in range(first, last):
            self.site.send("n1", T0 + tick * STEP, first=50)
        self.store_messages()
        self.engine.advance(T0 + last * STEP)

    def send_late_xid(self) -> None:
        """Sends eleven frames, and then the XID of the seventh."""
        self.run(0, 11)
        self.site.send_events("n1", xid(T0 + 65 * SECOND))

    def has_paged_once(self) -> bool:
        return self.findings() == PAGE and self.history() == [("opened",)]

    def findings(self) -> list[Any]:
        return self.site.rows("SELECT detector, entity, epoch_us(onset), level FROM findings ORDER BY ALL")

    def history(self) -> list[Any]:
        return self.site.rows("SELECT kind FROM history ORDER BY incident, number")


@pytest.fixture
def arrival_engine(site: Any) -> ArrivalEngine:
    return ArrivalEngine(site)


PAGE = [("xid", GPU, T0 + 65 * SECOND, "page")]


def test_a_fatal_xid_pages_before_its_frame_closes(arrival_engine: ArrivalEngine) -> None:
    arrival_engine.run(0, 3)
    arrival_engine.site.send_events("n1", xid(T0 + 65 * SECOND))
    arrival_engine.store_messages()
    assert arrival_engine.findings() == PAGE
    assert arrival_engine.site.rows("SELECT severity, state FROM incidents") == [("page", "open")]


def test_the_frame_of_the_xid_does_not_report_it_again(arrival_engine: ArrivalEngine) -> None:
    arrival_engine.run(0, 3)
    arrival_engine.site.send_events("n1", xid(T0 + 65 * SECOND))
    arrival_engine.store_messages()
    arrival_engine.run(3, 9)
    assert arrival_engine.has_paged_once()


def test_a_fatal_xid_that_is_forty_seconds_late_pages_once(arrival_engine: ArrivalEngine) -> None:
    arrival_engine.send_late_xid()
    arrival_engine.store_messages()
    arrival_engine.run(11, 14)
    assert arrival_engine.has_paged_once()
    assert arrival_engine.engine.framer.late == {"events": 1}


@pytest.mark.slow
@pytest.mark.parametrize("late", [40, 3600])
def test_an_xid_evaluated_with_its_frame_is_evaluated_however_late(arrival_engine: ArrivalEngine, late: int) -> None:
    arrival_engine.run(0, 2 + late // 10)
    arrival_engine.site.send_events("n1", xid(T0 + SECOND, code=48))
    arrival_engine.store_messages()
    assert arrival_engine.findings() == []
    arrival_engine.run(2 + late // 10, 8 + late // 10)
    assert [(d, e, o) for d, e, o, _ in arrival_engine.findings()] == [("xid", GPU, T0 + SECOND)]


@pytest.mark.slow
@pytest.mark.parametrize("stops", [(1,), (2,), (3,), (1, 2, 3)])
def test_restarts_before_and_after_the_evaluation_page_once(
    arrival_engine: ArrivalEngine, stops: Sequence[int]
) -> None:
    arrival_engine.send_late_xid()
    if 1 in stops:  # stored, and the process ends before the evaluation
        assert arrival_engine.ingest.step(arrival_engine.engine.framer.closed) is not None
        arrival_engine.start()
    arrival_engine.store_messages()
    if 2 in stops:
        arrival_engine.start()
    arrival_engine.run(11, 13)
    if 3 in stops:
        arrival_engine.start()
    arrival_engine.run(13, 20)
    assert arrival_engine.has_paged_once()


@pytest.mark.slow
def test_a_reloaded_driver_pages_no_one_on_arrival(arrival_engine: ArrivalEngine) -> None:
    arrival_engine.run(0, 3)
    arrival_engine.site.send_events(
        "n1", *(Event(T0 + 35 * SECOND, f"gpu:n1.{g}", "gpu_lost", {"present": 0}) for g in (0, 1))
    )
    arrival_engine.store_messages()
    assert arrival_engine.findings() == []


def test_announced_maintenance_pages_no_one_on_arrival(arrival_engine: ArrivalEngine) -> None:
    arrival_engine.site.send_events("n1", Event(T0, GPU, "maintenance_start", {"seconds": 3600}))
    arrival_engine.run(0, 3)
    arrival_engine.site.send_events("n1", xid(T0 + 65 * SECOND))
    arrival_engine.run(3, 9)
    assert {level for *_, level in arrival_engine.findings()} == {"suspect"}


def test_an_incident_is_opened_at_the_time_when_people_could_see_it(arrival_engine: ArrivalEngine) -> None:
    arrival_engine.run(0, 3)
    arrival_engine.site.send_events("n1", xid(T0 + 65 * SECOND))
    arrival_engine.store_messages()
    assert arrival_engine.site.rows("SELECT epoch_us(onset), epoch_us(opened) FROM incidents") == [
        (T0 + 65 * SECOND, CLOCK)
    ]
    assert arrival_engine.site.rows("SELECT DISTINCT epoch_us(time) FROM history") == [(CLOCK,)]


def test_late_rows_are_marked_and_a_restart_and_a_replay_evaluate_the_same_frames(
    arrival_engine: ArrivalEngine,
) -> None:
    arrival_engine.run(0, 8)
    arrival_engine.site.send("n2", T0 + 3 * STEP, first=90)
    arrival_engine.store_messages()
    arrival_engine.run(8, 9)
    late = [("gpu", T0 + 3 * STEP, f"gpu:n2.{g}") for g in range(2)]
    assert arrival_engine.site.rows("SELECT class, epoch_us(time), entity FROM late_rows ORDER BY ALL") == late
    again: list[Rows] = []
    read_since(arrival_engine.site.database, T0, CLOCK, lambda rows, events, until: again.extend(rows))
    assert sum(len(rows.time) for rows in again) == 9 * 2


# --- live and replay --------------------------------------------------------------------------------------------------


def flow_collapse(time: int, **more: Any) -> Event:
    data = {"state": "active", "since": time - SECOND, "signal": "coolant.flow", "value": 9.0, "usual": 100.0}
    return Event(time, "cdu:c0", "flow_collapse", {**data, "share": 0.7, **more})


EVENTS = [
    xid(T0 + 12 * SECOND),
    Event(T0 + 12 * SECOND + 200_000, GPU, "xid", {"xid": 154, "action": "GPU Reset"}),
    Event(T0 + 13 * SECOND, GPU, "gpu_lost", {"present": 7}),
    flow_collapse(T0 + 14 * SECOND),
    Event(
        T0 + 25 * SECOND, "leak_detector:r1", "leak", {"state": "active", "since": T0 + 25 * SECOND, "leak": "critical"}
    ),
    Event(T0 + 31 * SECOND, "gpu:n2.1", "temperature_rise", {"state": "active", "since": T0 + 30 * SECOND}),
]


def run_frames(arrivals: Sequence[int]) -> list[Finding]:
    """Returns all findings; each event arrives before the frame of that number closes, a replay has frames alone."""
    runner, framer = Runner([d for d in configured() if d.on_arrival]), Framer(STEP, Topology(), lambda _: [])
    found: list[Finding] = []
    for tick in range(10):
        arrived = [e for e, at in zip(EVENTS, arrivals, strict=True) if at == tick]
        framer.add_events(arrived)
        found += runner.judge_events(arrived, Topology())
        for instant in framer.advance(T0 + (tick + 1) * STEP):
            found += runner.observe(instant.frames)
    return found


def finding_keys(found: Sequence[Finding]) -> list[tuple[Any, ...]]:
    return sorted(
        (f.key, f.level, f.time, f.summary) for f in found if f.level == "page" or f.detector == "thermal_edge"
    )


def test_events_on_arrival_give_the_findings_of_a_replay_in_any_order() -> None:
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
    ):  # the events of one agent keep their order
        assert finding_keys(run_frames(arrivals)) == finding_keys(replayed)


def test_a_flow_that_collapses_alone_is_left_to_its_frame() -> None:
    runner = Runner(configured())
    assert runner.judge_events([flow_collapse(T0, others={"coolant.pressure": 1.0})], Topology()) == []
    [found] = runner.judge_events([flow_collapse(T0, others={"coolant.pressure": 0.2})], Topology())
    assert (found.level, found.entity, found.onset) == ("page", "cdu:c0", T0 - SECOND)
