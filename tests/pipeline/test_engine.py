"""The engine evaluates every frame once across restarts, and commits results and state in one transaction."""

import contextlib
import json
import threading

import duckdb
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.engine.engine import Engine
from pipeline.engine.people import People
from pipeline.incidents import ledger
from pipeline.incidents.desk import Desk
from pipeline.ingest.ingest import Committed
from pipeline.judging.presence import LastSeen
from pipeline.model.errors import UsageError
from pipeline.model.records import SECOND, Batch, Block, Event, Finding, Instant, Origin
from pipeline.model.signals import CATALOGUE
from pipeline.model.topology import Topology
from pipeline.transport import wire
from tests.examples import examples

STEP = 10 * SECOND
T0 = 1_780_000_000 * SECOND


class HotForThree:
    """A judge with state: a GPU above 90 Cel in three successive frames is a page with the onset of the first."""

    signals = ("gpu.temperature",)
    names = ("hot",)

    def listing(self):
        return []

    def calibration(self):
        return {}

    def calibration_rows(self, other=None):
        return []

    def __init__(self):
        self.since, self.count = {}, {}

    def judge_events(self, events, topology, again=False):
        return []

    def observe(self, frames):
        out = []
        frame = frames.get("gpu")
        for entity, value in zip(frame.entities, frame["gpu.temperature"], strict=True) if frame else ():
            if not value > 90:
                self.since.pop(entity, None)
                self.count.pop(entity, None)
                continue
            onset = self.since.setdefault(entity, frame.time)
            self.count[entity] = self.count.get(entity, 0) + 1
            if self.count[entity] >= 3:
                out.append(Finding(frame.time, onset, entity, "hot", "page", float(value), f"{entity} is hot"))
        return out

    def snapshot(self):
        yield "hot", [json.dumps([self.since, self.count]).encode()]

    def restore(self, state):
        self.since, self.count = json.loads(state["hot"])


class Running:
    """A site whose engine can stop and start at any time."""

    def __init__(self, site):
        self.site, self.engine = site, None

    def start(self):
        self.ingest = self.site.open()
        self.devices = self.ingest.devices
        self.engine = Engine(
            self.site.database, self.devices, Topology(), HotForThree(), lambda changes, now: [], lambda: T0 * 2, STEP
        )

    def run(self, watermark):
        while (committed := self.ingest.step()) is not None:
            self.engine.observe(committed)
        self.engine.advance(watermark)

    def results(self):
        findings = self.site.rows("SELECT detector, entity, epoch_us(onset), level, score FROM findings ORDER BY ALL")
        incidents = self.site.rows(
            "SELECT id, cause, epoch_us(opened), epoch_us(resolved), state FROM incidents ORDER BY ALL"
        )
        history = self.site.rows("SELECT incident, number, kind, epoch_us(time) FROM history ORDER BY ALL")
        return findings, incidents, history


def play_temperatures(site, temperatures, stops=()):
    """Sends one tick of 10 s per temperature; the engine restarts before the ticks in `stops`."""
    running = Running(site)
    running.start()
    for i, value in enumerate(temperatures):
        if i in stops:
            running.start()
        site.send("n1", T0 + i * STEP, first=value)
        running.run(T0 + i * STEP)
    running.run(T0 + len(temperatures) * STEP)
    return running


def test_an_action_of_a_user_cannot_run_between_two_frames(site, monkeypatch):
    running = Running(site)
    running.start()
    locked, advance = [], running.engine.framer.advance

    def watched(watermark):
        other = threading.Thread(target=lambda: locked.append(not running.engine.lock.acquire(blocking=False)))
        other.start()
        other.join()
        return advance(watermark)

    monkeypatch.setattr(running.engine.framer, "advance", watched)
    running.run(T0)
    assert locked == [True]


def test_a_finding_opens_an_incident_that_is_stored_with_it(site):
    findings, incidents, history = play_temperatures(site, [50, 95, 95, 95, 95]).results()
    assert [(d, e, t) for d, e, t, *_ in findings] == [("hot", f"gpu:n1.{g}", T0 + STEP) for g in range(2)]
    assert {i[4] for i in incidents} == {"open"}
    assert history[0][2] == "opened"


@pytest.mark.slow
def test_results_are_not_stored_twice_after_a_restart(site):
    running = play_temperatures(site, [95] * 6)
    before = running.results()
    running.start()
    running.run(T0 + 6 * STEP)
    assert running.results() == before


@pytest.mark.slow
def test_a_restart_between_state_and_snapshot_evaluates_the_frames_since_then_again(site, new_site):
    temperatures = [50] * 8 + [95] * 4 + [50] * 70
    wanted = play_temperatures(new_site(), temperatures).results()
    assert play_temperatures(site, temperatures, stops=range(1, 82, 3)).results() == wanted
    assert wanted[1][0][3] is not None  # quiet for ten minutes with telemetry present: resolved


@pytest.mark.slow
@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    hot=st.lists(st.booleans(), min_size=4, max_size=20),
    stops=st.sets(st.integers(1, 19), max_size=4),
)
def test_any_restarts_give_the_results_of_a_run_without_them(new_site, hot, stops):
    temperatures = [95 if h else 50 for h in hot]
    plain, broken = new_site(), new_site()
    wanted = play_temperatures(plain, temperatures).results()
    assert play_temperatures(broken, temperatures, stops).results() == wanted
    for site in (plain, broken):
        site.shut()
        for spool in site.spools.values():
            spool.close()


def test_a_note_and_its_history_are_stored_together_or_not_at_all(site, monkeypatch):
    running = play_temperatures(site, [95] * 5)
    engine = running.engine
    incident = min(i.id for i in engine.desk.incidents.values() if i.state == "open")
    People(engine).acknowledge(incident, "ada", "mine")
    assert {row[0]: row[4] for row in running.results()[1]}[incident] == "acknowledged"

    def broken(*_):
        raise OSError("no disk")

    monkeypatch.setattr("pipeline.engine.engine.ledger.write_changes", broken)
    with pytest.raises(OSError, match="no disk"):
        People(engine).resolve(incident, "ada", "done")
    assert engine.desk.incidents[incident].state == "acknowledged"


def test_a_note_on_an_unknown_incident_is_refused(site):
    engine = play_temperatures(site, [50]).engine
    with pytest.raises(UsageError, match="inc-nope"):
        People(engine).comment("inc-nope", "ada", "?")


@pytest.mark.slow
def test_rows_that_an_older_version_stored_in_the_future_are_not_evaluated_after_a_restart(site):
    running = play_temperatures(site, [50] * 8)
    site.database.connection.execute("INSERT INTO hot_gpu (time, device) VALUES ('2199-01-01', 0)")
    running.start()
    assert all(int(rows.time.max()) < T0 * 2 for block in running.engine.framer._rows.values() for rows in block)


def test_inventory_updates_the_topology_and_a_circle_is_left_out(site, caplog):
    running = Running(site)
    running.start()
    good = Event(T0, "node:n1", "inventory", {"entities": {"gpu:n1.0": {"parents": ["node:n1"]}}})
    bad = Event(T0, "node:n2", "inventory", {"entities": {"node:n2": {"parents": ["node:n2"]}}})
    running.engine.observe(Committed(events=[good, bad]))
    assert running.engine.topology.ancestors("gpu:n1.0") == ("node:n1",)
    assert [record.getMessage().split(":")[1] for record in caplog.records] == ["n2 refused"]
    assert "circle" in caplog.text


def test_the_inventories_of_many_nodes_change_the_topology_once(site):
    running = Running(site)
    running.start()
    before = running.engine.topology.version
    inventories = {f"n{i}": {f"gpu:n{i}.0": {"parents": [f"node:n{i}"], "attributes": {"sku": "x"}}} for i in range(5)}
    events = [Event(T0, f"node:{n}", "inventory", {"entities": entities}) for n, entities in inventories.items()]
    running.engine.observe(Committed(events=events))
    assert running.engine.topology.version == before + 1
    assert running.engine.topology.attributes["gpu:n4.0"] == {"sku": "x"}


def test_an_inventory_of_an_agent_makes_the_jobs_of_its_node_known(site):
    running = Running(site)
    running.start()
    entities = {"collector:n1.jobs": {"parents": ["node:n1"]}}
    running.engine.observe(Committed(events=[Event(T0, "node:n1", "inventory", {"entities": entities})]))
    listings = running.engine.impact.jobs.listings
    assert listings.is_waiting
    listings.settle([], T0)
    assert [listings.count_unlisted([node], T0) for node in ("node:n1", "node:n2")] == [0, 1]


def test_missing_telemetry_does_not_count_as_quiet():
    seen = LastSeen()
    gpus = ["gpu:n1.0", "gpu:n1.1"]
    seen.record_instant(Instant(T0, T0 + STEP, {}, {"gpu": (gpus, np.array([True, False]))}))
    assert seen.is_present("gpu:n1.0")
    assert not seen.is_present("gpu:n1.1")
    seen.record_instant(Instant(T0 + 7 * STEP, T0 + 8 * STEP, {}))
    assert not seen.is_present("gpu:n1.0")
    assert seen.is_present("rack:r1")  # it has no telemetry


def test_signals_with_a_long_interval_are_present_between_two_samples():
    seen = LastSeen()
    assert {CATALOGUE[name].interval for name in ("dimm.corrected", "dimm.uncorrected")} == {30}
    seen.record_instant(Instant(T0, T0 + STEP, {}, {"dimm": (["dimm:n1.mc0.dimm0"], np.array([True]))}))
    seen.record_instant(Instant(T0 + 8 * STEP, T0 + 9 * STEP, {}))
    assert seen.is_present("dimm:n1.mc0.dimm0")
    seen.record_instant(Instant(T0 + 10 * STEP, T0 + 11 * STEP, {}))
    assert not seen.is_present("dimm:n1.mc0.dimm0")


@pytest.mark.slow
def test_results_that_could_not_be_written_are_written_later_and_evaluated_once(site, new_site, monkeypatch):
    temperatures = [50, 95, 95, 95, 95, 50]
    wanted = play_temperatures(new_site(), temperatures).results()
    running = Running(site)
    running.start()
    record, tries = ledger.write_changes, []

    def often_full(*arguments):
        tries.append(1)
        if len(tries) % 3:
            raise duckdb.IOException("disk full")
        record(*arguments)

    monkeypatch.setattr("pipeline.engine.engine.ledger.write_changes", often_full)
    for i, value in enumerate(temperatures):
        site.send("n1", T0 + i * STEP, first=value)
        with contextlib.suppress(duckdb.IOException):
            running.run(T0 + i * STEP)
    for _ in range(3):
        with contextlib.suppress(duckdb.IOException):
            running.run(T0 + len(temperatures) * STEP)
    assert len(tries) > 5
    assert running.results() == wanted


def test_a_failing_desk_skips_one_frame_and_leaves_nothing_half_done(site, monkeypatch):
    running = Running(site)
    running.start()
    observe, calls = Desk.observe, []

    def once(desk, time, findings, *more):
        changes = observe(desk, time, findings, *more)
        if findings and not calls:
            calls.append(time)
            raise KeyError("a fault in the code")
        return changes

    monkeypatch.setattr(Desk, "observe", once)
    for i, value in enumerate([50, 95, 95, 95, 95, 95]):
        site.send("n1", T0 + i * STEP, first=value)
    running.run(T0 + 10 * STEP)
    assert running.engine.faults == 1
    stored = {row[0] for row in running.results()[1]}
    assert stored == set(running.engine.desk.incidents) != set()


@pytest.mark.slow
def test_missing_telemetry_before_a_restart_is_still_missing_after_it(site):
    """A hot GPU's telemetry stops while another node continues: a restart must not resolve the incident."""
    running = play_temperatures(site, [95] * 5)
    for second in range(5, 100):
        if second == 20:
            running.start()
        block = Block("node", ("node:n9",), {"node.load1": np.ones((1, 1), "f4")})
        times = np.array([T0 + second * STEP])
        body = wire.encode(Batch(Origin("local", "n9", b"b" * 16), times, (block,)))
        site.send_raw("n9", body)
        running.run(T0 + second * STEP)
    assert {row[4] for row in running.results()[1]} == {"open"}
