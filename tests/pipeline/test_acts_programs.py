"""Programs of a site, run for real: exit codes, output, a long one beside other acts, a killed executor, its words."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.acts.act import Act
from pipeline.acts.adapters.adapter import Adapter, StillRunning
from pipeline.acts.adapters.programs import TIMEOUT_S, Programs
from pipeline.acts.executor import Executor
from pipeline.acts.scheduler import SchedulerNode, SchedulerState
from pipeline.commands.executor import finish
from pipeline.model.errors import ConfigError, UsageError
from pipeline.store.database import Database
from tests.pipeline.acts_world import ALICE, ON, World
from tests.until import until

NODE = SchedulerNode("n03", False, "IDLE")


def make(script: str, clock: float = 0.0, level: str = "1", wait_s: float = 5.0) -> tuple[Programs, Act]:
    argv = ("sh", "-c", script, "diagnose", "{node}", "{level}")
    programs = Programs(replace(ON, exec={"diagnose": argv}), lambda: clock, wait_s)
    return programs, Act("ACT-1", "diagnose", ("node:n03",), "alice", "x", 0, 1, "on", params={"level": level})


class LongWorld(World):
    """A world whose diagnostics are programs that end once a file exists."""

    def __init__(self, database: Database, folder: Path) -> None:
        self.go, self.programs = folder / "go", list[Programs]()
        script = f"until [ -e {shlex.quote(str(self.go))} ]; do sleep 0.02; done; echo $1 passed"
        self.acts = replace(ON, exec={"diagnose": ("sh", "-c", script, "diagnose", "{node}")})
        super().__init__(database, self.acts)

    def start_executor(self) -> Executor:
        programs = Programs(self.acts, wait_s=0.01)
        self.programs.append(programs)

        def find(verb: str) -> Adapter:
            return programs if verb == "diagnose" else self.scheduler

        return Executor(self.board, self.config, self.scheduler, find, lambda: self.now)

    def settle(self, act: Act, state: str) -> None:
        def has_state() -> bool:
            self.run()
            return self.state(act) == state

        until(has_state, 30)


@pytest.fixture
def long(database: Database, tmp_path: Path) -> Iterator[LongWorld]:
    made = LongWorld(database, tmp_path)
    yield made
    made.go.touch()
    for running in (run for programs in made.programs for run in programs._running.values()):
        running.process.wait(10)
        running.output.close()


def test_exit_code_and_output_of_a_program_are_its_result() -> None:
    programs, act = make("echo $0 $1 level $2; echo late >&2")
    done = programs.carry_out(act, NODE)
    assert (done.done, done.output) == (True, "diagnose n03 level 1\nlate")
    assert done.facts == {"exit_code": "0", "level": "1"}
    programs, act = make("exit 3")
    done = programs.carry_out(act, NODE)
    assert (done.done, done.output, done.facts["exit_code"]) == (False, "exit code 3", "3")


@pytest.mark.parametrize(
    ("params", "missing"),
    [
        ({"level": "3"}, "level 3; expected {level} in it, or diagnose-3"),
        ({"level": "link-soak"}, "level link-soak; expected {level} in it, or diagnose-link-soak"),
        ({"gpu": "5"}, "gpu 5; expected {gpu} in it"),
        ({"level": "4", "gpu": "5"}, "gpu 5; expected {gpu} in it"),
    ],
)
def test_a_program_that_does_not_get_the_level_or_gpu_is_not_run_for_it(params: dict[str, str], missing: str) -> None:
    """Else a test of level 1 would count as one of level 3, which lets a node back after a relapse."""
    programs = Programs(replace(ON, exec={"diagnose": ("dcgmi", "diag", "-r", "1"), "diagnose-4": ("true",)}))
    act = replace(make("")[1], params=params)
    with pytest.raises(ConfigError) as refused:
        programs.list_commands(act, SchedulerState(0, {}))
    assert str(refused.value) == f"[acts.exec] diagnose: its program does not get {missing}"
    assert programs.list_commands(replace(act, params={"level": "1"}), SchedulerState(0, {})) == ("dcgmi diag -r 1",)
    assert programs.list_commands(replace(act, params={"level": "4"}), SchedulerState(0, {})) == ("true",)


def test_of_a_long_output_the_end_is_kept() -> None:
    programs, act = make("yes häßlich | head -n 20000; echo end")
    output = programs.carry_out(act, NODE).output
    assert (len(output), output[-3:]) == (4000, "end")


def test_a_program_that_is_missing_fails_with_its_name() -> None:
    programs = Programs(replace(ON, exec={"diagnose": ("/opt/none/diag", "{node}")}))
    done = programs.carry_out(make("")[1], NODE)
    assert (done.done, done.output) == (
        False,
        "/opt/none/diag n03: [Errno 2] No such file or directory: '/opt/none/diag'",
    )


def test_a_program_over_its_time_is_killed_with_what_it_started(tmp_path: Path) -> None:
    now = [0.0]
    script = f"sleep 600 & echo $! > {shlex.quote(str(tmp_path / 'child'))}; echo begun; wait"
    programs = Programs(replace(ON, exec={"diagnose": ("sh", "-c", script)}), lambda: now[0], 0.3)
    act = make("")[1]
    with pytest.raises(StillRunning, match="runs for 0 s"):
        programs.carry_out(act, NODE)
    now[0] = TIMEOUT_S + 1
    done = programs.carry_out(act, NODE)
    assert (done.done, done.output) == (False, "did not end within 4 h, and was killed: begun")
    child = Path("/proc", (tmp_path / "child").read_text().strip(), "stat")
    until(lambda: not child.exists() or " Z " in child.read_text(), 10)


def test_a_long_diagnostic_delays_no_other_act(long: LongWorld) -> None:
    slow = long.propose("diagnose", "n03")
    long.approve(slow)
    long.run()
    assert long.state(slow) == "executing"
    hold = long.propose("hold", "n11")
    long.approve(hold)
    long.run(3)
    assert (long.state(slow), long.state(hold)) == ("executing", "verified")
    long.go.touch()
    long.settle(slow, "verified")
    steps = [step["state"] for step in long.board.describe(slow.id)["history"]]
    assert (steps.count("executing"), steps.count("executed")) == (1, 1)
    assert long.board.find(slow.id).result["targets"]["node:n03"]["output"] == "n03 passed"


def test_a_diagnostic_of_two_nodes_runs_once_on_each(long: LongWorld) -> None:
    act = long.propose("diagnose", "n03", "n04")
    long.approve(act)
    long.run(2)
    long.go.touch()
    long.settle(act, "verified")
    said = long.board.find(act.id).result["targets"]
    assert [said[f"node:{name}"]["output"] for name in ("n03", "n04")] == ["n03 passed", "n04 passed"]


def test_a_killed_executor_counts_its_programs_as_failed(long: LongWorld) -> None:
    act = long.propose("diagnose", "n03")
    long.approve(act)
    long.run()
    long.executor = long.start_executor()
    long.run()
    assert (long.state(act), "interrupted" in long.board.find(act.id).result["reason"]) == ("failed", True)


def test_an_executor_that_was_slow_while_another_began_an_act_does_not_begin_it_again(long: LongWorld) -> None:
    act = long.propose("diagnose", "n03")
    long.approve(act)
    other, read = long.start_executor(), long.scheduler.read_state

    def read_slowly(now: int) -> SchedulerState:
        long.scheduler.read_state = read  # type: ignore[method-assign]
        other.run_once()
        return read(now)

    long.scheduler.read_state = read_slowly  # type: ignore[method-assign]
    long.run()
    assert sum(len(programs._running) for programs in long.programs) == 1
    assert long.state(act) == "executing"


def test_a_stop_waits_for_programs_and_begins_nothing(long: LongWorld) -> None:
    act = long.propose("diagnose", "n03")
    long.approve(act)
    long.run()
    later = long.board.propose("hold", ["node:n11"], ALICE, "fault", is_person=True)
    finish(long.executor, 30.0, lambda _: long.go.touch())
    assert (long.state(act), long.state(later)) == ("executed", "proposed")


def test_a_verb_without_a_program_is_refused_and_stops_no_other_act(long: LongWorld) -> None:
    wrong = long.board.propose("reset", ["node:n03"], ALICE, "fault", is_person=True)
    long.executor._find_adapter = lambda verb: Programs(long.acts) if verb == "reset" else long.scheduler
    right = long.board.propose("hold", ["node:n11"], ALICE, "fault", is_person=True)
    long.run()
    assert (long.state(wrong), long.state(right)) == ("refused", "awaiting_approval")
    assert "[acts.exec] reset: missing" in long.board.find(wrong.id).result["reason"]


def test_a_program_for_one_gpu_is_refused_without_a_gpu(long: LongWorld) -> None:
    acts = replace(long.acts, exec={"reset": ("nvidia-smi", "--gpu-reset", "-i", "{gpu}")})
    long.executor._find_adapter = lambda verb: Programs(acts)
    without = long.propose("reset", "n03")
    assert "its program needs a GPU" in long.board.find(without.id).result["reason"]
    named = long.propose("reset", "n03", params={"gpu": "5"})
    assert named.plan is not None
    assert named.plan.commands == ("nvidia-smi --gpu-reset -i 5",)


@pytest.mark.parametrize(
    "params", [{"level": "--help"}, {"level": "3 4"}, {"gpu": "-1"}, {"gpu": "0;reboot"}, {"level": ""}]
)
def test_a_parameter_is_never_an_option_of_a_program(long: LongWorld, params: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="expected a name or number"):
        long.board.propose("diagnose", ["node:n03"], ALICE, "fault", params=params, is_person=True)
