"""Jobs that hang, wait for data or slow down as a whole; and jobs that evaluate, save or stop for a known reason."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.straggler.job_throughput import JobNow
from detectors.straggler.straggler_job import StragglerJob
from pipeline.model.records import SECOND, Event
from tests.detectors.cases.case import at_known_site
from tests.detectors.cases.straggler import CASE, GPUS, HOSTS, NODES, SIZE, healthy_values, topology

SINCE = 60


def findings(change, ticks=240, detector=None):
    """Findings; `change(tick, values)` changes healthy instants and may return events."""
    detector, graph, found = detector or StragglerJob(), topology(), []
    for tick in range(ticks):
        values = healthy_values(tick, np.random.default_rng([tick, 7]))
        values["nic"] = {"nic.tx_bytes": 1e12 + 4e10 * np.full(NODES, float(tick))}
        found += detector.observe(framed(tick, values, change(tick, values) or (), graph))
    return found


def framed(tick, values, events, graph):
    names = {**CASE.names, "nic": tuple(f"port:n{n}.p0" for n in range(NODES))}
    graph.merge({port: [HOSTS[n]] for n, port in enumerate(names["nic"])})
    return type(CASE)(StragglerJob, names, topology, CASE.instant, CASE.guilty).frames_of(tick, values, events, graph)


def stop_steps(tick, values, watts, busy=1.0, until=10**9):
    """Changes values so that there is no step from tick SINCE to `until`, at a power of `watts`."""
    if SINCE <= tick < until:
        values["rank"] = healthy_values(SINCE - 1, np.random.default_rng(0))["rank"]
        values["gpu"]["gpu.power"] = np.full(SIZE, watts)
        values["gpu"]["gpu.utilization"] = np.full(SIZE, busy)
        values["nic"] = {"nic.tx_bytes": np.full(NODES, 1e12 + 4e10 * SINCE)}


def levels(found):
    return {(f.entity, f.level) for f in found}


def test_a_hang_pages_on_the_job_after_six_minutes():
    found = findings(lambda tick, values: stop_steps(tick, values, 180.0), 160)
    page = next(f for f in found if f.level == "page")
    assert page.entity == "job:7"
    assert 360 <= (page.time - CASE.time(SINCE - 1)) / SECOND <= 420
    assert "no step for 6 min" in page.summary
    assert "GPUs at 31 % of usual power" in page.summary, "30 %, and what the last look before it still learned"


def pausing(*pauses):
    """A change with pauses (first tick, ticks) in which the job looks as if it hung and then goes on."""

    def change(tick, values):
        for first, ticks in pauses:
            if first <= tick < first + ticks:
                before = healthy_values(first - 1, np.random.default_rng(0))["rank"]
                values["rank"] = before
                values["gpu"]["gpu.power"] = np.full(SIZE, 180.0)
                values["nic"] = {"nic.tx_bytes": np.full(NODES, 1e12 + 4e10 * first)}

    return change


def without_steps(change):
    """The same change of a job that reports nothing of its ranks."""

    def changed(tick, values):
        events = change(tick, values)
        del values["rank"]
        return events

    return changed


def long_watched(level):
    """Returns a detector that has watched the job for three hours, or for none, so that it only suspects it."""
    detector = StragglerJob()
    if level == "page":
        detector.activity.jobs["job:7"] = [CASE.time(0), 600.0, 100, CASE.time(0) - 3 * 3600 * SECOND]
    return detector


@pytest.mark.parametrize("level", ["suspect", "page"])
def test_a_job_without_step_reports_hangs_when_it_has_sent_nothing_for_six_minutes(level):
    change = without_steps(lambda tick, values: stop_steps(tick, values, 180.0 if level == "page" else 240.0))
    found = findings(change, 160, long_watched(level))
    assert levels(found) == {("job:7", "suspect"), ("job:7", level)}
    page = next(f for f in found if f.level == level and f.time >= CASE.time(SINCE) + 360 * SECOND)
    assert page.time <= CASE.time(SINCE) + 420 * SECOND
    assert "hangs, no traffic for 6 min, GPUs at" in page.summary
    assert page.signals[0] == "nic.tx_bytes"
    assert {f.onset for f in found} == {page.onset}


def test_a_job_without_step_reports_may_pause_as_long_as_before():
    found = findings(without_steps(pausing((60, 72), (200, 80))), 320, long_watched("page"))
    found = [f for f in found if f.level == "page"]
    assert found
    assert max(f.time for f in found) < CASE.time(150)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("it computes between collectives", lambda tick, values: stop_steps(tick, values, 400.0)),
        ("it ended: its GPUs idle", lambda tick, values: stop_steps(tick, values, 90.0, busy=0.0)),
        ("its power is not measured", lambda tick, values: stop_steps(tick, values, np.nan)),
        ("it stops for five minutes", lambda tick, values: stop_steps(tick, values, 180.0, until=SINCE + 30)),
        (
            "its ports are not read",
            lambda tick, values: stop_steps(tick, values, 180.0) or (values.pop("nic") and None),
        ),
    ],
)
def test_a_job_without_step_reports_does_not_hang_when(what, change):
    def stopped(tick, values):
        change(tick, values)
        if tick < SINCE:
            values.setdefault("nic", {"nic.tx_bytes": 1e12 + 4e10 * np.full(NODES, float(tick))})

    assert "page" not in {f.level for f in findings(without_steps(stopped), 160, long_watched("page"))}, what


def test_a_hang_at_a_third_of_the_power_pages_however_new_the_job_is():
    found = findings(without_steps(lambda tick, values: stop_steps(tick, values, 180.0)), 160)
    assert levels(found) == {("job:7", "suspect"), ("job:7", "page")}


def test_a_fault_logged_when_a_job_without_step_reports_stops_explains_it():
    def change(tick, values):
        stop_steps(tick, values, 180.0)
        return [Event(CASE.time(SINCE), "gpu:n2.1", "xid", {"xid": 79})] if tick == SINCE else []

    assert levels(findings(without_steps(change))) == {("job:7", "suspect")}


def test_a_job_without_step_reports_that_never_sent_is_not_known_to_hang():
    def change(tick, values):
        stop_steps(tick, values, 180.0)
        values["nic"] = {"nic.tx_bytes": np.full(NODES, 1e12)}

    assert findings(without_steps(change)) == []


def test_a_job_that_paused_and_went_on_may_pause_as_long_again():
    """The first pause of 12 min is paged, as nothing is known of this job; the second one is not reported."""
    found = [f for f in findings(pausing((60, 72), (200, 80)), 320) if f.level == "page"]
    assert found
    assert max(f.time for f in found) < CASE.time(150)


def test_a_hang_far_longer_than_a_jobs_pauses_pages():
    found = [f for f in findings(pausing((60, 40), (200, 100)), 320) if f.level == "page"]
    assert CASE.time(200) + 600 * SECOND <= max(f.time for f in found)


def seen(name, nodes=2, watts=180.0):
    """A job that makes no step, at a power out of 600 W."""
    names = tuple(f"node:n{n}" for n in range(nodes))
    return JobNow(name, names, 0, 0, True, False, 1.0, watts, 600.0, 0.0)


def test_a_new_job_may_pause_as_long_as_19_in_20_jobs_of_its_site():
    detector = StragglerJob()
    detector.pauses = {f"job:{n}": n * 100 * SECOND for n in range(5, 9)}
    assert detector._hangs_after(seen("job:new")) == 800.0, "the longest of few"
    assert detector._hangs_after(seen("job:8")) == 1200.0
    detector.pauses = {f"job:{n}": (390 + n) * SECOND for n in range(39)} | {"job:odd": 3000 * SECOND}
    assert detector._hangs_after(seen("job:new")) == 428.0, "one odd job does not decide"
    detector.pauses = {f"job:{n}": 3 * 3600 * SECOND for n in range(9)}
    assert detector._hangs_after(seen("job:new")) == 3600.0, "where jobs pause for hours"
    detector.pauses = {"job:1": 900 * SECOND}
    assert detector._hangs_after(seen("job:new")) == detector.hang, "one job says nothing of others"


def test_the_pauses_of_a_running_job_are_known_however_many_others_paused_since():
    detector = StragglerJob()
    findings(pausing((60, 30)), 120, detector)
    detector.pauses |= {f"job:gone{n}": 400 * SECOND for n in range(100)}
    findings(pausing((60, 30)), 120, detector)
    assert "job:7" in detector.pauses
    assert len(detector.pauses) == 33, "those of the newest 32 jobs that have ended"


def test_a_job_that_draws_more_than_a_third_of_its_power_hangs_after_fifteen_minutes():
    found = findings(lambda tick, values: stop_steps(tick, values, 260.0), 240, long_watched("page"))
    page = min(f.time for f in found if f.level == "page")
    assert 900 <= (page - CASE.time(SINCE - 1)) / SECOND <= 960, "evaluations draw as much, and are shorter"


def test_a_job_that_draws_half_of_its_power_evaluates():
    found = findings(lambda tick, values: stop_steps(tick, values, 290.0), 240, long_watched("page"))
    assert {f.level for f in found} <= {"suspect"}


def test_a_job_of_one_node_hangs_after_an_hour_since_it_never_sends():
    detector = StragglerJob()
    assert detector._hangs_after(seen("job:small", nodes=1)) == 3600.0
    assert detector._hangs_after(seen("job:large")) == detector.hang


def test_a_job_that_ends_within_five_minutes_is_not_a_hang():
    def change(tick, values):
        stop_steps(tick, values, 180.0)
        if tick >= SINCE + 30:
            values["rank"] = {name: np.full(SIZE, np.nan) for name in values["rank"]}

    assert "page" not in {f.level for f in findings(change)}


@pytest.mark.parametrize(
    "event",
    [
        Event(CASE.time(SINCE), "gpu:n2.1", "xid", {"xid": 79}),
        Event(CASE.time(SINCE), "port:n2.p0", "link_state", {"state": "down"}),
        Event(CASE.time(SINCE), "gpu:n2.1", "gpu_lost", {}),
    ],
    ids=lambda e: e.kind,
)
def test_an_event_at_the_time_of_the_stop_explains_a_hang(event):
    def change(tick, values):
        stop_steps(tick, values, 180.0)
        return [event] if tick == SINCE else []

    found = findings(change)
    assert levels(found) == {("job:7", "suspect")}
    assert found[-1].evidence["explained_by"].endswith(event.entity)


def test_an_evaluation_at_normal_power_is_not_a_hang():
    assert findings(lambda tick, values: stop_steps(tick, values, 380.0, until=SINCE + 90)) == []


def test_a_job_that_still_sends_is_not_a_hang():
    def change(tick, values):
        sent = values["nic"]
        stop_steps(tick, values, 180.0)
        values["nic"] = sent

    assert findings(change) == []


def test_a_long_checkpoint_that_was_reported_is_not_a_stall():
    def change(tick, values):
        stop_steps(tick, values, 150.0, 0.3, SINCE + 40)
        values["node"]["node.io_pressure"] += 8e6 * min(max(0, tick - SINCE), 40)
        return [Event(CASE.time(SINCE), "job:7", "checkpoint", {"seconds": 400.0})] if tick == SINCE else []

    assert findings(change) == []


def test_a_data_stall_is_a_ticket_on_the_job_and_ends_with_the_next_step():
    def change(tick, values):
        stop_steps(tick, values, 100.0, 0.3, SINCE + 40)
        values["node"]["node.io_pressure"] += 8e6 * min(max(0, tick - SINCE), 40)

    found = findings(change)
    assert levels(found) == {("job:7", "ticket")}
    assert "I/O wait 80 %" in found[-1].summary
    assert max(f.time for f in found) <= CASE.time(SINCE + 41)


def slow_steps(tick, values, compute, network, who=slice(0, SIZE)):
    """Makes compute time of `who` and network time of all steps longer from tick 200 on."""
    rank = values["rank"]
    usual = rank["rank.compute_time"].max() + 1.0
    if tick >= 200:
        rank["rank.compute_time"][who] += compute
    step = rank["rank.compute_time"].max() + 1.0 + (network if tick >= 200 else 0.0)
    rank["rank.step_time"] = np.full(SIZE, step)
    rank["rank.communication_time"] = step - rank["rank.compute_time"]
    assert step >= usual - 1e-9


@pytest.mark.parametrize("tickets", [False, True])
def test_longer_collectives_are_attributed_to_the_network(tickets):
    found = findings(lambda tick, values: slow_steps(tick, values, 0.0, 1.5), 420, StragglerJob(tickets=tickets))
    assert levels(found) == {("job:7", "suspect"), ("job:7", "page")}
    assert "in collectives" in found[-1].summary
    assert found[-1].evidence["attribution"] == "NETWORK"


@pytest.mark.parametrize("tickets", [False, True])
def test_collectives_that_take_a_little_longer_are_a_ticket_at_most(tickets):
    found = findings(
        lambda tick, values: slow_steps(tick, values, 0.0, 0.7), 420, at_known_site(StragglerJob(tickets=tickets))
    )
    assert levels(found) == {("job:7", "suspect")} | ({("job:7", "ticket")} if tickets else set())


def test_jobs_that_start_between_two_looks_at_the_pace_are_followed():
    graph, detector = topology(), StragglerJob()
    names = dict(CASE.names)
    for tick in range(60):
        values = healthy_values(tick, np.random.default_rng([tick, 7]))
        if tick % 7 == 6:  # three frames after a look
            job = 100 + tick
            fresh = tuple(f"rank:{job}.{i}" for i in range(SIZE))
            graph.merge({rank: [f"stage:{job}.0", f"job:{job}", *GPUS[i : i + 1]] for i, rank in enumerate(fresh)})
            names["rank"] = (*names["rank"], *fresh)
        more = len(names["rank"]) // SIZE
        values["rank"] = {name: np.tile(column, more) for name, column in values["rank"].items()}
        case = type(CASE)(StragglerJob, names, topology, CASE.instant, CASE.guilty)
        assert detector.observe(case.frames_of(tick, values, (), graph)) == []


@pytest.mark.slow
def test_a_slow_job_accepted_as_normal_is_found_only_once_it_is_slower_still():
    detector, accepted = StragglerJob(), 330

    def change(tick, values):
        slow_steps(tick, values, 0.0, 1.5 if tick < 700 else 4.0)
        if tick == accepted:
            detector.accept_as_normal("job:8", {})
            detector.accept_as_normal("job:7", {})

    ticks = [round((f.time - CASE.time(0)) / (CASE.time(1) - CASE.time(0))) for f in findings(change, 900, detector)]
    before, after = [t for t in ticks if t < accepted], [t for t in ticks if t >= accepted]
    assert before, "it was found"
    assert after, "it is found again"
    assert min(after) >= 700, "but only once it is slower still"


def test_a_stage_that_computes_longer_stays_a_suspect_on_the_job():
    found = findings(lambda tick, values: slow_steps(tick, values, 1.5, 0.0, slice(16, SIZE)), 420)
    assert levels(found) == {("job:7", "suspect")}
    assert "in its slowest stage" in found[-1].summary


@pytest.mark.parametrize(("pressed", "expected"), [(0.4, ("node:n0", "page")), (0.05, ("job:7", "suspect"))])
def test_a_job_on_one_node_that_steps_slower_while_tasks_wait_for_processors_pages_the_node(pressed, expected):
    graph, detector, found = topology(), StragglerJob(), []
    graph.merge({gpu: [HOSTS[0]] for gpu in GPUS})
    for tick in range(420):
        values = healthy_values(tick, np.random.default_rng([tick, 7]))
        slow_steps(tick, values, 1.5, 0.0)
        values["node"]["node.cpu_pressure"][0] += pressed * 1e7 * max(tick - 200, 0)
        values["nic"] = {"nic.tx_bytes": np.full(NODES, 1e12)}
        found += detector.observe(framed(tick, values, (), graph))
    assert max(levels(found), key=lambda each: each[1] == "page") == expected
    if expected[1] == "page":
        assert "job 7 steps" in found[-1].summary
        assert "tasks wait for CPU" in found[-1].summary
        assert found[-1].evidence["attribution"] == "HOST"


def test_one_slow_rank_is_left_to_the_straggler_detector():
    assert findings(lambda tick, values: slow_steps(tick, values, 2.0, 0.0, 20), 420) == []


def test_a_power_cap_explains_a_slow_job():
    def change(tick, values):
        slow_steps(tick, values, 1.5, 0.0)
        values["gpu"]["gpu.throttle_reasons"] = np.full(SIZE, 0x4 * (tick >= 200), float)

    assert findings(change, 420) == []


def test_a_power_cap_does_not_explain_collectives_that_take_twice_as_long():
    def change(tick, values):
        slow_steps(tick, values, 0.4, 1.5)
        values["gpu"]["gpu.throttle_reasons"] = np.full(SIZE, 0x4 * (tick >= 200), float)

    assert ("job:7", "page") in levels(findings(change, 420))


def test_a_job_without_power_readings_is_never_a_hang():
    def change(tick, values):
        stop_steps(tick, values, 180.0)
        values["gpu"] = {}

    assert findings(change) == []


@pytest.mark.parametrize("entity", ["node:n2", "rack:r1", "job:7"])
def test_a_hang_during_announced_work_does_not_page_and_is_explained(entity):
    def change(tick, values):
        stop_steps(tick, values, 180.0)
        return (
            [Event(CASE.time(SINCE - 5), entity, "maintenance_start", {"seconds": 7200})] if tick == SINCE - 5 else []
        )

    found = findings(change, 180)
    assert levels(found) == {("job:7", "suspect")}
    assert "announced maintenance on" in found[-1].evidence["explained_by"]


def test_work_on_another_node_does_not_explain_a_hang():
    def change(tick, values):
        stop_steps(tick, values, 180.0)
        return [Event(CASE.time(50), "node:elsewhere", "maintenance_start", {"seconds": 7200})] if tick == 50 else []

    assert ("job:7", "page") in levels(findings(change, 180))


@pytest.mark.parametrize("xid", [{"a": 1}, float("nan"), "79", None, 10**400], ids=lambda v: repr(v)[:9])
def test_an_xid_without_a_number_still_explains_a_hang(xid):
    def change(tick, values):
        stop_steps(tick, values, 180.0)
        return [Event(CASE.time(SINCE), "gpu:n2.1", "xid", {"xid": xid})] if tick == SINCE else []

    assert findings(change, 160)[-1].evidence["explained_by"] == "xid of gpu:n2.1"


def in_turn(turns, change, apart=1):
    """The same change on nodes of which every `turns`-th is read at a tick; apart 0: all of them at every such tick."""

    def changed(tick, values):
        events = change(tick, values)
        for found in values.values():
            for name, column in found.items():
                node = np.arange(len(column)) * NODES // len(column)
                found[name] = np.where(apart * node % turns == tick % turns, column, np.nan)
        return events

    return changed


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("reports", [True, False])
@pytest.mark.parametrize(("turns", "apart"), [(2, 1), (4, 1), (4, 0), (6, 0)])
def test_a_hang_pages_though_the_nodes_are_read_at_different_moments(turns, apart, reports):
    change = in_turn(turns, lambda tick, values: stop_steps(tick, values, 180.0), apart)
    found = findings(change if reports else without_steps(change), 180)
    page = next(f for f in found if f.level == "page")
    assert page.entity == "job:7"
    assert 330 <= (page.time - CASE.time(SINCE - 1)) / SECOND <= 480


@pytest.mark.parametrize(("turns", "apart"), [(4, 1), (4, 0)])
def test_longer_collectives_page_though_the_nodes_are_read_at_different_moments(turns, apart):
    found = findings(in_turn(turns, lambda tick, values: slow_steps(tick, values, 0.0, 1.5), apart), 420)
    assert ("job:7", "page") in levels(found)


def test_steps_that_became_far_longer_while_tasks_wait_for_data_are_a_ticket():
    def change(tick, values):
        slow_steps(tick, values, 0.0, 15.0)
        values["node"]["node.io_pressure"] += 6e6 * min(max(0, tick - 200), 120)

    found = findings(change, 360)
    assert levels(found) == {("job:7", "suspect"), ("job:7", "ticket")}
    ticket = next(f for f in found if f.level == "ticket")
    assert "waits for data" in ticket.summary
    assert ticket.evidence["attribution"] == "JOB"
