"""The CPU canary end to end: a bad core is reported, a sound one is not, and time and events stay bounded."""

from __future__ import annotations

import io
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.collector import NoData
from agents.collectors.canary.canary import Canary, memory_limit
from agents.collectors.canary.child_process import CanaryProcess, module_command
from agents.collectors.canary.cpu_program import MAX_REST_S, RestingPace
from agents.collectors.canary.known_answers import load_known_answers
from agents.collectors.canary.ledger import CLEAN_ROUNDS, MAX_DEVICES, ResultLedger
from agents.collectors.canary.problems import PROBLEMS, VARIANTS, VERSION
from agents.collectors.canary.schedule import CoreRotation, ProgramSchedule, list_cores
from agents.collectors.registry import configured_collectors
from agents.node.agent import Agent
from detectors.runner import Runner
from detectors.sdc.sdc import SdcVote
from pipeline.config.sections import Agent as AgentSection
from pipeline.config.sections import Config
from pipeline.config.sections import Spool as SpoolSection
from pipeline.judging.frames import Framer
from pipeline.model.errors import ConfigError
from pipeline.model.records import EVENTS, SECOND, Event
from pipeline.model.signals import CATALOGUE
from pipeline.model.topology import Topology
from pipeline.transport import Message, wire

Drain = Callable[[Path], tuple[list[Message], list[tuple[int, int, str]]]]
PROGRAM = Path(__file__).with_name("canary_program.py")
START = 1_790_000_000 * SECOND
PATIENCE_S = 240.0  # at lowest priority it hardly gets a core while other tests run
BAD = min(os.sched_getaffinity(0))


@dataclass
class OnBadCore(Canary):
    """A canary on a machine with one bad core."""

    isolated: ClassVar[bool] = False
    fault: ClassVar[str] = "output"

    def _cpu_command(self, seconds: float) -> list[str]:
        words = super()._cpu_command(seconds)
        return [sys.executable, str(PROGRAM), str(BAD), self.fault, *words[words.index("--cores") :]]


def collect_events(canary: Canary, enough: Callable[[list[Event]], bool]) -> list[Event]:
    """Reads until there are enough events; returns them."""
    canary.open("n1")
    found: list[Event] = []
    until = time.monotonic() + PATIENCE_S
    while not enough(found):
        assert time.monotonic() < until, found
        time.sleep(0.02)
        found += [event for reading in canary.read() for event in reading.events]
    canary.close()
    return found


def eager(kind: type[Canary] = Canary, **more: float) -> Canary:
    """Returns a canary that may use half a core and reports every round."""
    canary = kind(gpu=False, share=0.5, every=0.3, **{"tell": 0.0, **more})
    canary._rest_factor = 0.0
    return canary


# --- sound machines ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_core_of_this_machine_gives_the_known_answers() -> None:
    wanted = {f"cpu:n1.{core}" for core in list_cores()}
    found = collect_events(eager(), lambda events: {e.entity for e in events} == wanted)
    assert {e.kind for e in found} == {"digest"}
    assert all(e.data["golden"] is True and e.data["digest"] == e.data["expected"] for e in found)
    assert all(e.data["version"] == VERSION and e.data["runs"] == len(PROBLEMS) for e in found)


def test_counts_of_each_core_are_reported() -> None:
    canary = eager()
    collect_events(canary, lambda events: len(events) >= 1)
    canary.open("n1")
    (reading,) = canary.read()
    assert reading.device_class == "canary"
    assert reading.entities == tuple(f"cpu:n1.{core}" for core in list_cores())
    assert set(reading.columns) == {name for name in canary.signals if name.startswith("canary.")}
    assert canary.inventory().keys() == set(reading.entities)
    canary.close()


def test_its_program_runs_pinned_with_lowest_priority_and_ends() -> None:
    child = CanaryProcess(module_command("agents.collectors.canary.cpu_program", "--cores", f"{BAD}", "--minutes", "1"))
    try:
        until = time.monotonic() + PATIENCE_S
        while not child.read_lines() and time.monotonic() < until:
            time.sleep(0.01)
        assert os.sched_getaffinity(child.pid) == {BAD}
    finally:
        child.close()
    assert child.death_signal == "SIGKILL"
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


def test_closing_ends_the_running_program() -> None:
    canary = Canary(gpu=False, share=1.0, every=0.1)
    canary.open("n1")
    turns = canary._cpu_schedule
    assert turns is not None
    until = time.monotonic() + PATIENCE_S
    while not turns.running_pid and time.monotonic() < until:
        time.sleep(0.01)
        canary.read()
    pid = turns.running_pid
    assert pid
    canary.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# --- bad machines -----------------------------------------------------------------------------------------------------


def wrong(found: list[Event]) -> list[Event]:
    return [e for e in found if e.data.get("golden") is False]


def test_a_flipped_bit_gives_the_core_the_problem_and_failed_retests() -> None:
    found = collect_events(eager(OnBadCore, tell=3600.0), lambda events: bool(wrong(events)))
    event = wrong(found)[0]
    assert event.entity == f"cpu:n1.{BAD}"
    assert event.data["canary"].startswith("gemm-f32-random.")
    assert event.data["digest"] != event.data["expected"] == load_known_answers()[VERSION][event.data["canary"]]
    assert event.data["wrong"] == [p.name for p in PROBLEMS if p.name.startswith("gemm-f32")] + ["alu-divide-f32"]
    assert (event.data["again"], event.data["format"], event.data["range"]) == (3, "f32", "random")
    assert all(e.entity == event.entity for e in wrong(found))


def test_a_bit_flipped_once_passes_its_retests() -> None:
    class Once(OnBadCore):
        fault = "once"

    event = wrong(collect_events(eager(Once), lambda events: bool(wrong(events))))[0]
    assert (event.data["wrong"], event.data["again"]) == (["gemm-f32-random"], 0)


def test_changed_memory_is_found_by_the_march() -> None:
    class WithBadMemory(OnBadCore):
        fault = "memory"

    event = wrong(collect_events(eager(WithBadMemory), lambda events: bool(wrong(events))))[0]
    assert event.data["wrong"] == ["march-solid", "march-checker", "march-address"]


def test_a_core_that_crashes_the_program_counts_as_a_wrong_answer() -> None:
    class CrashingProgram(OnBadCore):
        fault = "dies"

    event = wrong(collect_events(eager(CrashingProgram), lambda events: bool(wrong(events))))[0]
    assert (event.entity, event.data["digest"]) == (f"cpu:n1.{BAD}", "died SIGSEGV")


def test_a_program_killed_from_outside_counts_against_no_core() -> None:
    class KilledProgram(OnBadCore):
        fault = "killed"

    canary = eager(KilledProgram)
    canary.open("n1")
    turns = canary._cpu_schedule
    assert turns is not None
    until = time.monotonic() + PATIENCE_S
    found: list[Event] = []
    while not turns.ledger.get_tally(str(BAD)).yields and time.monotonic() < until:
        time.sleep(0.02)
        found += [event for reading in canary.read() for event in reading.events]
    canary.close()
    assert turns.ledger.get_tally(str(BAD)).yields
    assert wrong(found) == []


@pytest.mark.slow
def test_a_bad_core_becomes_a_finding_of_the_detector(tmp_path: Path, drain: Drain) -> None:
    spool = SpoolSection(directory=tmp_path / "spool")
    canary = eager(OnBadCore, tell=3600.0)
    canary.interval = 0.05
    agent = Agent(Config(agent=AgentSection(node="n1", interval=0.05), spool=spool), [canary], log=io.StringIO())
    try:
        events: list[Event] = []
        until = time.monotonic() + PATIENCE_S
        while not wrong(events):
            assert time.monotonic() < until
            time.sleep(0.05)
            agent.tick(agent.clock.now())
            messages = [m for m in drain(tmp_path / "spool")[0] if m.partition.topic == EVENTS]
            events = [e for m in messages for e in wire.decode_events(m.value).events]
    finally:
        agent.close()
    parents = next(
        e.data["entities"] for e in events if e.kind == "inventory" and f"cpu:n1.{BAD}" in e.data["entities"]
    )
    topology = Topology({name: facts["parents"] for name, facts in parents.items()})
    framer, judge = Framer(10 * SECOND, topology, lambda _: ()), Runner([SdcVote()])
    framer.add_events(events)
    findings = [f for instant in framer.advance(agent.clock.now() + 60 * SECOND) for f in judge.observe(instant.frames)]
    assert {(f.detector, f.entity) for f in findings} == {("sdc", f"cpu:n1.{BAD}")}
    assert findings[0].evidence["judged_by"] == "known answer"
    assert topology.ancestors(f"cpu:n1.{BAD}") == ("node:n1",)


# --- time and events --------------------------------------------------------------------------------------------------


def ledger(tell: float = 3600.0, now: Callable[[], int] = lambda: START) -> ResultLedger:
    return ResultLedger(lambda core: f"cpu:n1.{core}", tell, now)


def line(core: str = "3", digest: str = "right", **more: object) -> dict[str, object]:
    data = {"device": core, "canary": "cpu.0", "version": "v", "digest": digest, "expected": "right", "runs": 36}
    return {**data, "golden": digest == "right", **more}


def test_right_rounds_are_summarized_and_wrong_ones_reported_immediately_with_retests() -> None:
    now = [START]
    book = ledger(now=lambda: now[0])
    results = []
    for minute in range(120):
        now[0] = START + 60 * minute * SECOND
        results.append(book.record_line(line(digest="wrong" if minute == 70 else "right")))
    at = [minute for minute, event in enumerate(results) if event]
    assert at == [0, 60, *range(70, 71 + CLEAN_ROUNDS)]
    assert [e.data["rounds"] for e in results if e][:3] == [1, 60, 10]
    assert book.get_tally("3").runs == 120 * 36
    assert book.get_tally("3").mismatches == 1


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300)
SAID = st.recursive(LEAVES, lambda x: st.lists(x, max_size=9) | st.dictionaries(st.text(), x), max_leaves=5)
KEYS = st.sampled_from([*line(), "begin", "yielded", "took", "wrong", "again", "uuid"])


@pytest.mark.slow
@given(message=st.dictionaries(KEYS, SAID))
def test_any_output_of_a_bad_core_gives_valid_events(message: dict[str, object]) -> None:
    book = ledger()
    for said_line in (message, {**line(), **message}):
        event = book.record_line(said_line)
        if event:
            json.dumps(dict(event.data), allow_nan=False)
            assert len(json.dumps(dict(event.data))) < 8000
    book.record_death("SIGSEGV")


def test_invented_devices_are_not_kept() -> None:
    book = ledger()
    for number in range(MAX_DEVICES + 10):
        book.record_line(line(str(number)))
    assert len(book.tallies) == MAX_DEVICES


@pytest.mark.slow
def test_time_over_the_share_is_deducted_from_the_next_turn() -> None:
    now = [0.0]
    burn = [sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"]
    began: list[float] = []

    def words(seconds: float) -> list[str]:
        began.append(now[0])
        return burn

    turns = ProgramSchedule(10.0, 0.01, 60.0, ledger(), words, 1.0, lambda: now[0])
    until = time.monotonic() + PATIENCE_S
    while now[0] < 100 and time.monotonic() < until:
        turns.poll()
        if turns.running_pid:
            time.sleep(0.01)
        else:
            now[0] += 1.0
    turns.close()
    # it needs at least 0.3 s, and its share is 0.01
    assert 2 <= len(began) <= 4
    assert turns.cpu_used_s / now[0] < 0.02


def test_a_program_that_does_not_end_is_killed_after_its_timeout() -> None:
    now = [0.0]
    turns = ProgramSchedule(1.0, 1.0, 5.0, ledger(), lambda _: ["/bin/sleep", "60"], 0.0, lambda: now[0])
    now[0] = 1.0
    turns.poll()
    child = turns._child
    assert child is not None
    child.started_at, now[0] = 1.0, 7.0
    turns.poll()
    assert not turns.running_pid
    assert turns.last_failure == "killed: it took too long"
    assert child.death_signal == "SIGKILL"


def test_a_missing_program_fails_and_is_tried_again() -> None:
    now = [0.0]
    turns = ProgramSchedule(1.0, 1.0, 5.0, ledger(), lambda _: ["/nonexistent"], 0.0, lambda: now[0])
    for second in (1.0, 2.0):
        now[0] = second
        assert turns.poll() == []
        assert "No such file" in turns.last_failure


def test_cores_are_tested_in_turn_and_suspects_first() -> None:
    turn = CoreRotation([0, 1, 2, 3])
    for core in ("0", "1"):
        turn.advance({"device": core, "begin": True})
    assert turn.order([]) == [2, 3, 0, 1]
    assert turn.order(["1", "x", "9"]) == [1, 2, 3, 0]
    turn.advance({"device": "1", "begin": True})
    assert turn.order([])[0] == 2


def test_an_offline_core_does_not_stop_the_others_from_being_tested() -> None:
    turn = CoreRotation([0, 1, 2, 3])
    came: set[int] = set()
    for _ in range(4):  # each turn has time for two cores; core 1 goes offline
        for core in turn.order([])[:2]:
            turn.advance({"device": str(core), "skipped": "x"} if core == 1 else {"device": str(core), "begin": True})
            came.add(core)
    assert came == {0, 1, 2, 3}


def test_threads_of_one_core_count_as_one_core(tmp_path: Path) -> None:
    for cpu in os.sched_getaffinity(0):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{BAD},{max(os.sched_getaffinity(0))}\n0-1\n"[:-5])
    assert list_cores(tmp_path) == [BAD]
    assert list_cores(tmp_path / "nothing") == sorted(os.sched_getaffinity(0))


@pytest.mark.slow
def test_it_rests_between_problems_to_leave_quota_to_others() -> None:
    began = time.monotonic()
    # a burn-in keeps its priority: a busy machine would give the idle one no time
    child = CanaryProcess(
        module_command("agents.collectors.canary.cpu_program", "--cores", BAD, "--minutes", 0.0001, "--rest", 20)
    )
    while not child.has_ended() and time.monotonic() < began + PATIENCE_S:
        time.sleep(0.01)
    (result,) = [line for line in child.read_lines() if "digest" in line]
    child.close()
    assert time.monotonic() - began > min(10 * result["took"], MAX_REST_S)  # a busy machine's problems take longer


def test_a_rest_is_a_multiple_of_the_processor_time_of_the_last_problem() -> None:
    pace = RestingPace(20.0)
    until = time.process_time() + 0.02
    while time.process_time() < until:
        pass
    began = time.monotonic()
    assert pace()
    assert time.monotonic() - began >= 20 * 0.02


def test_the_lowest_memory_limit_of_all_parent_groups_counts(tmp_path: Path) -> None:
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    service = root / "system.slice" / "a.service"
    service.mkdir(parents=True)
    proc.write_text("0::/system.slice/a.service\n")
    assert memory_limit(proc, root) == math.inf
    (service / "memory.max").write_text("max\n")
    (service.parent / "memory.max").write_text("134217728\n")
    assert memory_limit(proc, root) == 128 << 20
    old = root / "memory" / "pod"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("1048576\n")
    proc.write_text("7:cpu,cpuacct:/\n4:memory:/pod\n")
    assert memory_limit(proc, root) == 1 << 20
    assert memory_limit(tmp_path / "none", root) == math.inf


def test_cores_that_cannot_be_pinned_are_reported() -> None:
    turns = ProgramSchedule(
        1.0, 1.0, 5.0, ledger(), lambda _: ["/bin/echo", '{"device": "9", "skipped": "Invalid argument"}'], 0.0
    )
    until = time.monotonic() + PATIENCE_S
    while not turns.last_failure and time.monotonic() < until:
        time.sleep(0.01)
        assert turns.poll() == []
    assert turns.last_failure == "core 9 cannot be tested: Invalid argument"


# --- configuration ----------------------------------------------------------------------------------------------------


def test_invalid_intervals_are_refused() -> None:
    for key in ("every", "gpu_every"):
        with pytest.raises(ConfigError, match=f"{key} = 0.0: expected more than 0 s"):
            configured_collectors({"canary": {key: 0}}, "f.toml")


@pytest.mark.parametrize("share", [0, 1.5, -0.1])
def test_an_invalid_share_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=r"f\.toml: \[collector\.canary\] share = .*expected a share of time"):
        configured_collectors({"canary": {"share": share}}, "f.toml")


def test_without_torch_the_cores_are_still_tested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    driver = tmp_path / "version"
    driver.write_text("NVRM version: 590.48.01\n")
    canary = Canary(driver=driver)
    canary.open("n1")
    assert canary.read()
    canary.close()
    assert (f"GPUs are not tested: {canary._why_no_gpu()}\n" in capsys.readouterr().err) == bool(canary._why_no_gpu())
    only = Canary(driver=tmp_path / "none", cpu=False)
    with pytest.raises(NoData, match="no canary to run: no NVIDIA driver"):
        only.open("n1")
    assert not Canary(cpu=False, gpu=False).has_work()


def test_its_signals_are_in_the_catalogue_with_their_interval() -> None:
    assert {CATALOGUE[name].interval for name in Canary.signals} == {3600}
    assert VARIANTS * 3 < 64  # the detector's questions: of CPU, GPU, and those that GPUs vote on


@pytest.mark.slow
def test_run_by_hand_it_reports_how_many_problems_were_right(capfd: pytest.CaptureFixture[str]) -> None:
    child = CanaryProcess(module_command("agents.canaries", "--minutes", "0.01"))
    until = time.monotonic() + PATIENCE_S
    while not child.has_ended() and time.monotonic() < until:
        time.sleep(0.02)
    assert child.read_lines() == []
    assert child.last_text.endswith(" rounds: 0 wrong")
    assert child.status == 0
    child.close()
