"""Open cases of XIDs: feedback, removed entities, and the cost of many that hold."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from agents.collectors.gpu.xid_table import shipped_xid_table
from detectors.runner import Runner
from detectors.xid import cases as xid_cases
from detectors.xid.levels import level_of_codes
from detectors.xid.xid import Xid
from pipeline.model.entity_names import pager_title
from pipeline.model.records import LEVELS, SECOND, Event, Frame
from pipeline.model.topology import Topology

T0, STEP = 1_790_000_000 * SECOND, 10 * SECOND
GPUS = tuple(f"gpu:n{n}.{i}" for n in range(2) for i in range(4))
NODES = ("node:n0", "node:n1")
GPU = "gpu:n0.1"
HOUR = 3600 * SECOND


def run_frame(detector, time, *events, gone=(), generation=1.7e9, lives=None):
    """Returns findings of an instant. gone: nodes without data."""
    topology = Topology({gpu: [f"node:{gpu[4:6]}"] for gpu in GPUS})
    far = np.array([np.nan if node in gone else generation for node in NODES])
    own = np.array([np.nan if f"node:{gpu[4:6]}" in gone else (lives or {}).get(gpu, 1.7e9) for gpu in GPUS])
    frames = {
        "gpu": Frame(time, "gpu", GPUS, {"gpu.generation": own}, topology, events),
        "node": Frame(time, "node", NODES, {"node.generation": far}, topology),
    }
    return detector.observe(frames)


def xid(time, code=79, gpu=GPU, **data):
    return Event(time, gpu, "xid", {"xid": code, "name": "fell off the bus", "action": "reboot node", **data})


def held():
    """Returns a detector with a page of two hours ago."""
    detector = Xid()
    assert [f.level for f in run_frame(detector, T0, xid(T0))] == ["page"]
    for k in range(1, 721):
        run_frame(detector, T0 + k * STEP)
    assert set(detector.cases) == {GPU}
    return detector, T0 + 721 * STEP


def test_feedback_drops_a_case_and_the_next_xid_opens_a_new_one():
    detector = Xid()
    runner = Runner([detector])
    found = []
    for tick in range(300):
        time = T0 + tick * STEP
        events = [xid(time)] if tick in (5, 200) else []
        if tick == 10:
            events.append(Event(time, GPU, "feedback", {"verdict": "not_a_fault", "detector": "xid"}))
        found += [(tick, f.onset) for f in run_frame(runner, time, *events)]
        if tick == 10:
            assert not detector.cases
            assert not detector.conditions
    assert not [tick for tick, _ in found if 10 <= tick < 200]
    assert {onset for tick, onset in found if tick >= 200} == {T0 + 200 * STEP}


def test_feedback_on_a_program_drops_its_errors():
    detector = Xid()
    detector.programs.blamed["job:7"] = {"onset": T0, "last": T0, "gpus": [], "codes": [13]}
    detector.programs.bursts[GPU] = [[T0, "job:7", ""]]
    detector.conditions["program job:7"] = {"onset": T0, "level": "suspect", "reported": T0}
    for entity in ("job:7", GPU):
        detector.accept_as_normal(entity, {})
    assert not detector.programs.blamed
    assert not detector.programs.bursts
    assert not detector.conditions


def test_a_case_ends_after_three_days_without_data():
    detector = Xid()
    run_frame(detector, T0, xid(T0), xid(T0, gpu="gpu:n1.1"), xid(T0, gpu="gpu:made.up"))
    found = []
    for hour in range(1, 90):
        found += [(hour, f) for f in run_frame(detector, T0 + hour * HOUR, gone=("node:n0",))]
    over = {f.entity: hour for hour, f in found if f.evidence.get("cleared")}
    assert set(over) == {GPU, "gpu:made.up"}
    assert all(72 <= hour <= 75 for hour in over.values())
    assert "removed, no data for 72 h" in next(f.summary for _, f in found if f.evidence.get("cleared"))
    assert set(detector.cases) == {"gpu:n1.1"}


def test_a_pause_of_days_without_frames_ends_no_case():
    detector, time = held()
    run_frame(detector, time + 100 * HOUR, gone=("node:n0",))
    assert GPU in detector.cases
    run_frame(detector, time + 101 * HOUR)
    assert detector.cases[GPU]["away"] == 0


@pytest.mark.slow
def test_thousands_of_pages_that_hold_are_not_checked_without_events():
    detector = Xid()
    many = [f"gpu:x{k}.0" for k in range(500)]
    run_frame(detector, T0, *(xid(T0, gpu=gpu) for gpu in many))
    for k in range(1, 400):
        run_frame(detector, T0 + k * STEP)
    assert len(detector.cases) == 500
    asked = Counting(detector.cases)
    detector.cases = asked
    for k in range(400, 410):
        assert run_frame(detector, T0 + k * STEP) == []
    assert asked.reads == 0
    (found,) = run_frame(detector, T0 + 410 * STEP, xid(T0 + 410 * STEP, gpu=many[3]))
    assert found.entity == many[3]
    assert asked.reads < 30


class Counting(dict):
    """Counts how often a case is read."""

    reads = 0

    def __getitem__(self, key):
        self.reads += 1
        return super().__getitem__(key)


def test_a_page_is_repeated_every_minute_for_an_hour_and_then_left_to_the_desk():
    detector = Xid()
    ticks = [k for k in range(500) if run_frame(detector, T0 + k * STEP, *([xid(T0)] if k == 0 else []))]
    assert ticks[0] == 0
    assert {b - a for a, b in pairwise(ticks)} == {6}
    assert ticks[-1] == 360


@pytest.mark.parametrize("again", [{"generation": 1.9e9}, {"lives": {GPU: 1.9e9}}])
def test_a_page_that_holds_ends_when_its_gpu_or_server_restarts(again):
    detector, time = held()
    (over,) = run_frame(detector, time, **again)
    assert over.evidence["cleared"]
    assert not detector.cases


def test_a_page_that_holds_ends_after_a_service_restart_or_a_clock_step():
    detector, time = held()
    other = Xid()
    other.restore(detector.snapshot())
    run_frame(other, time)
    assert GPU in other.cases
    assert [f.evidence["cleared"] for f in run_frame(other, time + STEP, generation=1.9e9)] == [True]
    run_frame(detector, T0 + 5 * STEP)
    assert [f.evidence["cleared"] for f in run_frame(detector, T0 + 6 * STEP, generation=1.9e9)] == [True]


def test_a_reset_after_a_clock_step_ends_a_case_without_a_future_onset():
    detector = Xid()
    run_frame(detector, T0, xid(T0))
    time = T0 - HOUR
    (over,) = run_frame(detector, time, Event(time, GPU, "counter_reset", {}))
    assert over.evidence["cleared"]
    assert over.onset <= over.time


def test_cases_of_unknown_gpus_are_bounded():
    detector = Xid()
    run_frame(detector, T0, xid(T0))
    for k in range(12):
        time = T0 + (k + 1) * STEP
        found = run_frame(detector, time, *(xid(time, gpu=f"gpu:x{k}.{i}") for i in range(150)))
    assert len(detector.cases) == len(detector.conditions) == 1001
    assert GPU in detector.cases
    assert "gpu:x11.149" in detector.cases
    assert "gpu:x4.0" not in detector.cases
    over = [f for f in found if f.evidence.get("cleared")]
    assert len(over) == 150
    assert "more than 1000 cases of unknown entities" in over[0].summary
    other = Xid()
    other.restore(detector.snapshot())
    later = T0 + 13 * STEP
    more = [xid(later, gpu=f"gpu:y{i}.0") for i in range(5)]
    assert run_frame(other, later, *more) == run_frame(detector, later, *more)


def test_errors_of_gpus_are_kept_for_a_day():
    detector = Xid()
    for k, gpu in ((0, GPUS[1]), (20, GPUS[2]), (30, GPUS[1])):
        for wait in (0, 10, 20):
            time = T0 + k * HOUR + wait * SECOND
            run_frame(detector, time, *([xid(time, 13, gpu=gpu)] if wait == 0 else []))
    assert set(detector.programs.bursts) == {GPUS[1], GPUS[2]}
    time = T0 + 50 * HOUR
    for wait in (0, 10):
        run_frame(detector, time + wait * SECOND, *([xid(time, 13, gpu=GPUS[3])] if wait == 0 else []))
    assert set(detector.programs.bursts) == {GPUS[1], GPUS[3]}


def test_unknown_xids_are_bounded_and_a_known_one_still_pages():
    detector = Xid(pages=(98_765,))
    for code in range(20_000, 21_000):
        time = T0 + (code - 20_000) * STEP // 10
        run_frame(detector, time, xid(time, code))
    assert len(detector.cases[GPU]["codes"]) <= 64
    time = T0 + 101 * STEP
    for code in (79, 98_765):
        run_frame(detector, time, xid(time, code))
        assert str(code) in detector.cases[GPU]["codes"]
    assert detector.conditions[GPU]["level"] == "page"


def test_affected_gpus_are_named_up_to_a_bound():
    case = xid_cases.new_case(T0)
    for k in range(1000):
        xid_cases.add_affected(case, f"gpu:n{k}.0")
        xid_cases.add_affected(case, "gpu:n0.0")
    assert len(case["others"]) == 64


def test_a_title_keeps_its_instruction_when_the_driver_loses_the_gpu_too():
    detector = Xid()
    gpu = "gpu:n042.3"
    (first,) = run_frame(detector, T0, xid(T0, name="GPU has fallen off the bus", gpu=gpu))
    assert first.summary == "GPU 3 of n042: XID 79 GPU has fallen off the bus: reboot node"
    found = run_frame(detector, T0 + STEP, Event(T0 + SECOND, gpu, "gpu_lost", {"text": "lost"}))
    assert [f.summary for f in found] in ([], [first.summary])
    assert xid_cases.describe_case(gpu, detector.cases[gpu], {}) == first.summary
    assert xid_cases.case_evidence(detector.cases[gpu])["facts"] == ["not responding to its driver"]


@pytest.mark.parametrize("entity", ["gpu:n0.1", "gpu:n042.3", "gpu:gpu-rack12-node042.3"])
@pytest.mark.parametrize("driver", [None, "drain and reset GPU"])
@pytest.mark.parametrize("repeats", ["", "12 times in GPC 3 TPC 1 in 24 h"])
def test_every_title_of_an_xid_says_the_first_step_where_there_is_one(entity, driver, repeats):
    lost = {"gpu_lost": ["page", "not responding to its driver", False]}
    slow = {"slow_call": ["ticket", "slow driver call", False]}
    for known in shipped_xid_table().xids.values():
        for more in ({}, {"13": [1, "graphics engine exception", "", ""]}):
            for facts in ({}, lost, {**lost, **slow}):
                codes = {str(known.code): [1, known.name, known.action, known.next_action], **more}
                case = {**xid_cases.new_case(T0), "codes": codes, "facts": facts, "driver": driver, "repeats": repeats}
                title = xid_cases.describe_case(entity, case, {})
                worst = sorted(xid_cases.xid_codes(case), key=lambda c: -LEVELS.index(level_of_codes([c], {})))
                step = xid_cases.first_step(case, worst)
                assert len(title) <= 80
                if worst:
                    has_room = pager_title(entity, f"XID {worst[0]}: {step}").endswith(step)
                    assert title.endswith(f": {step}") == (has_room and bool(step)), title
                    assert f"XID {worst[0]}" in title


def test_a_call_that_hung_until_the_reset_keeps_the_xid_in_its_title():
    """A GSP timeout: calls of the driver hang until the GPU is reset, and the agent reports the call after that."""
    detector = Xid()
    gsp = {"name": "GSP RPC timeout", "action": "reset GPU"}
    run_frame(detector, T0, xid(T0, 119, **gsp))
    for k in range(1, 150):
        run_frame(detector, T0 + k * STEP)
    reset = T0 + 150 * STEP
    call = Event(reset + SECOND, GPU, "slow_call", {"seconds": 1500.0})
    found = run_frame(detector, reset + STEP, Event(reset, GPU, "counter_reset", {}), call)
    assert found[0].score == 0.0
    found += run_frame(detector, reset + 2 * STEP)
    assert found[-1].summary == "GPU 1 of n0: XID 119 and a driver call of 25 min, then reset"
    assert found[-1].level == "ticket"


@pytest.mark.parametrize(("seconds", "shown"), [(75.0, "75 s"), (1500.0, "25 min"), (9000.0, "2 h")])
def test_a_slow_call_has_a_duration_that_is_read_at_a_glance(seconds, shown):
    detector = Xid()
    found = run_frame(detector, T0, Event(T0, GPU, "slow_call", {"seconds": seconds}))
    found += run_frame(detector, T0 + STEP)
    assert found[-1].summary == f"GPU 1 of n0: driver call of {shown}"


def test_a_call_that_began_after_the_reset_is_not_put_down_to_the_xid_before_it():
    detector = Xid()
    run_frame(detector, T0, xid(T0, 119, name="GSP RPC timeout", action="reset GPU"))
    run_frame(detector, T0 + STEP, Event(T0 + STEP, GPU, "counter_reset", {}))
    late = T0 + 20 * STEP
    found = run_frame(detector, late, Event(late, GPU, "slow_call", {"seconds": 90.0}))
    found += run_frame(detector, late + STEP)
    assert found[-1].summary == "GPU 1 of n0: driver call of 90 s"
