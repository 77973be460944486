"""The pipeline process: one loop that survives external errors, and reports them on /readyz."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import duckdb
import pytest

from pipeline.commands.pipeline import PipelineBackend
from pipeline.commands.service import PipelineService
from pipeline.config import sections as configuration
from pipeline.config.sections import ModeRule
from pipeline.config.settings import build_section
from pipeline.model.errors import ConfigError, Retryable
from pipeline.model.records import SECOND
from tests.until import until

T0 = 1_780_000_000 * SECOND


class EmptyJudge:
    """A judge that finds nothing."""

    signals = frozenset()
    names = ()

    def listing(self):
        return [{"name": "nothing", "errors": 2}]

    def calibration(self):
        return {}

    def calibration_rows(self, other=None):
        return []

    def judge_events(self, events, topology, again=False):
        return []

    def observe(self, frames):
        return []

    def snapshot(self):
        return ()

    def restore(self, state):
        assert state == {}


@pytest.fixture
def service(site):
    table = {"store": {"path": str(site.folder / "store.duckdb")}, "spool": {"directory": str(site.folder / "spool")}}
    table["pipeline"] = {"commit_wait": 0.0}
    made = PipelineService(
        build_section(configuration.Config, table, "test"), EmptyJudge(), clock=lambda: T0 + 600 * SECOND
    )
    yield made
    made.close()


def drain(service):
    while service.run_step():
        pass


def test_the_watermark_is_the_newest_sample_minus_the_lateness_once_all_is_read(site, service):
    service.start_engine()
    assert service.compute_watermark() is None
    site.send("n1", T0, ticks=5)
    site.send("n2", T0 - 300 * SECOND)  # silent since then: must not hold the others
    drain(service)
    assert service.compute_watermark() == T0 + 4 * SECOND - 30 * SECOND


def test_unread_input_holds_the_watermark(site, service, monkeypatch):
    service.start_engine()
    site.send("n1", T0 + 500 * SECOND)
    drain(service)
    site.send("n2", T0)
    site.send("n2", T0 + SECOND)
    monkeypatch.setattr("pipeline.ingest.ingest.COMMIT_MESSAGES", 1)
    service.run_step()
    assert service.compute_watermark() == T0 + SECOND
    assert service.ingest.backlog() == T0 + SECOND


def test_a_long_span_that_is_stored_and_not_yet_evaluated_counts_as_backlog(site, service):
    service.start_engine()
    site.send("n1", T0)
    drain(service)
    assert PipelineBackend(service).read_health()["backlog"] is False
    site.send("n1", T0 + 500 * SECOND)
    service.ingest.step()
    assert service.ingest.progress.backlog is None
    assert PipelineBackend(service).read_health()["backlog"] is True
    drain(service)
    assert PipelineBackend(service).read_health()["backlog"] is False


@pytest.mark.slow
def test_before_the_first_step_has_ended_the_history_does_not_count_as_evaluated(site, service, monkeypatch):
    """The demo opens its dashboard when there is no backlog; it once did so between the first commit and its end."""
    service.start_engine()
    site.send("n1", T0)
    committed, seen = service.transport.commit_offset, []

    def get(partition, next_offset):
        seen.append(PipelineBackend(service).read_health()["backlog"])
        committed(partition, next_offset)

    monkeypatch.setattr(service.transport, "commit_offset", get)
    assert PipelineBackend(service).read_health()["backlog"] is True
    drain(service)
    assert seen == [True]
    assert PipelineBackend(service).read_health()["backlog"] is False


def test_a_pipeline_without_input_has_no_backlog_after_its_first_read(service):
    service.start_engine()
    assert service.run_step() is False
    assert (
        PipelineBackend(service).read_health()["backlog"],
        PipelineBackend(service).read_health()["lag_s"],
        service.compute_watermark(),
    ) == (False, None, None)


def test_a_long_start_is_not_reported_as_waiting_input(site, service, monkeypatch):
    site.send("n1", T0)
    monkeypatch.setattr(service, "clock", lambda: T0 + 700 * SECOND)
    assert service.list_unready_reasons() == ["starting: detectors are compiled, then stored data is evaluated"]
    service.start_engine()
    assert service.list_unready_reasons() == []


def test_a_receiver_that_is_down_makes_the_pipeline_unready_and_no_list_of_incidents_incomplete(service, monkeypatch):
    service.start_engine()
    monkeypatch.setattr(service.notifier, "describe_trouble", lambda: "receiver r: accepts no alerts")
    backend = PipelineBackend(service)
    assert backend.list_unready_reasons() == ["receiver r: accepts no alerts"]
    assert backend.list_evaluation_faults() == []


@pytest.mark.slow
def test_a_clock_ahead_of_ours_does_not_close_frames_early(site, service):
    """Other senders keep their lateness: the neighbour is 20 s late, and is waited for."""
    service.start_engine()
    site.send("n1", service.clock() + 3600 * SECOND)
    site.send("n2", service.clock() - 20 * SECOND)
    drain(service)
    assert service.compute_watermark() == service.clock() - 20 * SECOND


@pytest.mark.slow
def test_a_store_that_cannot_commit_is_reported_and_survived(site, service, monkeypatch):
    service.start_engine()
    site.send("n1", T0)
    stop = threading.Event()
    transaction, tries = service.database.transaction, []

    def full():
        tries.append(1)
        if len(tries) < 3:
            assert len(tries) == 1 or any("disk full" in reason for reason in service.list_unready_reasons())
            raise duckdb.IOException("disk full")
        stop.set()
        return transaction()

    monkeypatch.setattr(service.database, "transaction", full)
    monkeypatch.setattr(Retryable, "__init__", _send_now)
    service.run(stop)
    assert service.list_unready_reasons() == []
    assert service.ingest.counters["messages"] == 1


def _send_now(self, message, after_s=0.0):
    Exception.__init__(self, message)
    self.after_s = min(after_s, 0.01)


@pytest.mark.slow
def test_silent_agents_are_counted_and_do_not_change_readiness(site, service):
    service.start_engine()
    site.send("n1", T0)
    site.send("n2", T0 + 590 * SECOND)
    drain(service)
    sources = PipelineBackend(service).read_health()["sources"]
    assert (sources["agents"], sources["silent"]) == (2, 1)
    assert service.list_unready_reasons() == []


@pytest.mark.slow
def test_input_is_stalled_when_the_transport_is_gone_and_nothing_was_stored_for_a_while(site, service, monkeypatch):
    service.start_engine()
    site.send("n1", T0)
    drain(service)
    now = service.clock()
    monkeypatch.setattr(service, "clock", lambda: now + 16 * SECOND)
    assert not PipelineBackend(service).read_health()["stalled"]  # silent agents are not a fault of the pipeline
    (site.folder / "spool").rename(site.folder / "gone")
    assert PipelineBackend(service).read_health()["stalled"]
    assert any("does not exist" in reason for reason in service.list_unready_reasons())
    monkeypatch.setattr(service, "clock", lambda: now)
    assert not PipelineBackend(service).read_health()["stalled"]


@pytest.mark.slow
def test_a_partition_that_does_not_answer_while_others_do_is_a_reason_to_be_unready(site, service, monkeypatch):
    service.start_engine()
    site.send("n1", T0)
    site.send("n2", T0)
    drain(service)
    read, now = service.transport.read, service.clock()

    def mute(partition, *more):
        if partition.name == "n2":
            raise Retryable("no answer")
        return read(partition, *more)

    monkeypatch.setattr(service.transport, "read", mute)
    for second in range(0, 40, 10):
        monkeypatch.setattr(service, "clock", lambda second=second: now + second * SECOND)
        monkeypatch.setattr(service.ingest, "clock", service.clock)
        site.send("n1", T0 + (1 + second) * SECOND)
        service.run_step()
        assert service.list_unready_reasons() == []
    monkeypatch.setattr(service, "clock", lambda: now + 31 * SECOND)
    assert any("telemetry.v1/n2: cannot be read" in reason for reason in service.list_unready_reasons())
    monkeypatch.undo()
    drain(service)
    assert service.list_unready_reasons() == []


def test_a_note_before_the_start_is_answered_with_retry(service):
    with pytest.raises(Retryable, match="try again"):
        PipelineBackend(service).acknowledge("inc-1", "ada", "")


def test_metrics_count_incoming_messages(site, service):
    service.start_engine()
    site.send("n1", T0, ticks=3)
    drain(service)
    counters = PipelineBackend(service).read_counters()
    assert counters["fleetpulse_ingest_samples_total"] == 12
    assert counters["fleetpulse_ready"] == 1
    assert counters['fleetpulse_detector_errors_total{detector="nothing"}'] == 2


@pytest.mark.slow
def test_the_number_of_metrics_does_not_depend_on_the_number_of_nodes(site, service):
    service.start_engine()
    site.send("n0", T0)
    drain(service)
    few = PipelineBackend(service).read_counters()
    for number in range(1, 200):
        site.send(f"n{number}", T0 + SECOND)
    drain(service)
    many = PipelineBackend(service).read_counters()
    assert many["fleetpulse_agents"] == 200
    assert many.keys() == few.keys()
    assert not [name for name in many if "n199" in name]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def get(port, path):
    """Returns (status, JSON) of a GET; status 0 while nothing answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())
    except OSError:
        return 0, None


def processor_seconds(pid):
    """Returns the processor time of a process; its start takes a multiple of it on a busy machine."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_the_process_serves_survives_a_kill_and_ends_on_sigterm(site, tmp_path):
    port, now = free_port(), time.time_ns() // 1000
    for second in range(50):
        site.send("n1", now - (100 - second) * SECOND)
    (tmp_path / "fleetpulse.toml").write_text(
        f"[api]\nport = {port}\n[store]\npath = '{site.folder}/store.duckdb'\n"
        f"[spool]\ndirectory = '{site.folder}/spool'\n"
    )
    command = [
        sys.executable,
        os.path.abspath("fleetpulse.py"),
        "pipeline",
        "--config",
        str(tmp_path / "fleetpulse.toml"),
    ]
    start = lambda: subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path)  # noqa: E731
    began, first = time.monotonic(), start()
    until(lambda: get(port, "/readyz")[0] == 200, 240)  # in a new checkout it compiles first
    slowness = max(1.0, (time.monotonic() - began) / processor_seconds(first.pid))
    first.kill()
    first.communicate()
    second = start()
    until(lambda: get(port, "/api/v1/entities?kind=gpu")[1] is not None)
    until(lambda: len(get(port, "/api/v1/entities?kind=gpu")[1]["entities"]) == 2)
    began = time.monotonic()
    second.send_signal(signal.SIGTERM)
    _, talk = second.communicate(timeout=60)
    assert time.monotonic() - began < 5 * slowness  # 2 s alone
    assert second.returncode == 0
    assert "Traceback" not in talk
    site.open()
    assert site.rows("SELECT count(*), count(DISTINCT (time, entity)) FROM gpu") == [(100, 100)]


@pytest.mark.slow
def test_a_fault_in_evaluation_is_reported_and_storing_continues(site, service, caplog):
    service.start_engine()

    def broken(frames):
        raise ZeroDivisionError("a detector's arithmetic")

    service.engine.judge.observe = broken
    for second in range(0, 100, 10):
        site.send("n1", T0 + second * SECOND)
        drain(service)
    assert any("evaluation failed: ZeroDivisionError" in reason for reason in service.list_unready_reasons())
    assert caplog.text.count("storing continues") == 1
    assert site_rows(service, "SELECT count(*) FROM gpu") == 20


@pytest.mark.slow
@pytest.mark.parametrize("when", ["live", "at the start"])
def test_the_stop_does_not_wait_for_the_evaluation_of_a_backlog_and_the_next_start_evaluates_it(site, service, when):
    """Six hours of history took longer than the three seconds after which a supervisor kills the process."""
    stop, seen, now = threading.Event(), [], service.clock
    if when == "at the start":
        for second in range(0, 500, 10):
            site.send("n1", T0 + second * SECOND)
        while service.ingest.step() is not None:
            pass

    def observe(frames):
        seen.append(1)
        if len(seen) == 3:
            stop.set()
        return []

    service.judge.observe = observe
    if when == "live":
        service.start_engine()
        for second in range(0, 500, 10):
            site.send("n1", T0 + second * SECOND)
    service.run(stop)
    assert len(seen) == 3
    assert service.list_unready_reasons() in ([], ["starting: detectors are compiled, then stored data is evaluated"])
    service.close()
    again = PipelineService(service.config, EmptyJudge(), clock=now)
    try:
        again.judge.observe = lambda frames: seen.append(1) or []
        again.start_engine()
        drain(again)
        assert again.engine.progress.judged >= T0 + 400 * SECOND
        assert len(seen) >= 43
    finally:
        again.close()


def site_rows(service, query):
    return service.database.connection.execute(query).fetchall()[0][0]


def test_the_file_of_a_stopped_pipeline_has_the_newest_row_of_each_device(site, service):
    service.start_engine()
    newest = "SELECT epoch_us(max(time)) FROM latest_gpu"
    for time_ in (T0, T0 + SECOND):
        site.send("n1", time_)
        drain(service)
    assert site_rows(service, newest) == T0  # the next write is due after a while
    service.close()
    with duckdb.connect(str(service.config.store.path), read_only=True) as stopped:
        assert stopped.execute(newest).fetchall() == [(T0 + SECOND,)]


@pytest.mark.slow
def test_a_restart_keeps_the_silent_nodes(site, service):
    service.start_engine()
    site.send("n1", T0)
    site.send("n2", T0 + 590 * SECOND)
    drain(service)
    service.close()
    again = PipelineService(service.config, EmptyJudge(), clock=service.clock)
    try:
        assert (
            PipelineBackend(again).read_health()["sources"]["agents"],
            PipelineBackend(again).read_health()["sources"]["silent"],
        ) == (2, 1)
    finally:
        again.close()


def test_an_invalid_receiver_url_is_refused_with_the_name_of_the_file(site):
    hook = {"name": "pager", "url": "https://10.0.0.5/x"}
    table = {"store": {"path": str(site.folder / "other.duckdb")}, "notify": {"webhooks": [hook]}}
    with pytest.raises(ConfigError, match=r"test\.toml: \[\[notify\.webhooks\]\] pager: url = .*allow_private"):
        PipelineService(
            build_section(configuration.Config, {**table, "source": "test.toml"}, "test.toml"), EmptyJudge()
        )


def test_the_detectors_are_listed_with_their_modes(site):
    path = {"store": {"path": str(site.folder / "s.duckdb")}, "spool": {"directory": str(site.folder / "spool")}}
    modes = [ModeRule("record", "nothing", "rack:r1"), ModeRule("act", "other"), ModeRule("notify")]
    config = replace(build_section(configuration.Config, path, "test"), modes=modes)
    made = PipelineService(config, EmptyJudge())
    try:
        (row,) = PipelineBackend(made).list_detectors()
        assert [(m["detector"], m["scope"], m["mode"]) for m in row["modes"]] == [
            ("nothing", "rack:r1", "record"),
            ("*", "*", "notify"),
        ]
        assert len(PipelineBackend(made).list_modes()) == 3
    finally:
        made.close()


@pytest.mark.slow
def test_the_loop_seals_hours_older_than_hot_hours_and_the_view_stays_the_same(site):
    table = {
        "store": {"path": str(site.folder / "store.duckdb"), "hot_hours": 1.0},
        "spool": {"directory": str(site.folder / "spool")},
        "pipeline": {"commit_wait": 0.0},
    }
    config = build_section(configuration.Config, table, "test")
    clock = [T0 + 3 * 3600 * SECOND]
    service = PipelineService(config, EmptyJudge(), clock=lambda: clock[0])
    try:
        site.send("n1", T0, ticks=5)
        for ago in (600, 60):  # the frame of the first closes with the second, and is in the snapshot
            site.send("n1", clock[0] - ago * SECOND, ticks=5)
        service.start_engine()
        drain(service)
        read = service.database.connection.execute
        before = read("SELECT epoch_us(time), entity, temperature FROM gpu ORDER BY ALL").fetchall()
        clock[0] += 600 * SECOND
        until(
            lambda: not service.run_step() and read("SELECT count(*) FROM sealed WHERE step = 0").fetchall() == [(1,)]
        )
        assert read("SELECT epoch_us(time), entity, temperature FROM gpu ORDER BY ALL").fetchall() == before
        assert read("SELECT count(*) FROM recent_gpu").fetchall() == [(20,)]
        assert PipelineBackend(service).read_counters()["fleetpulse_store_sealed_rows_total"] == 10
    finally:
        service.close()
