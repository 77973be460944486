"""Link soak and burn-in over telemetry that simulated nodes sent through a pipeline: from spool to verdict."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agents.sim.command import SimulateOptions, simulate
from pipeline.acts.act import Act
from pipeline.acts.adapters.adapter import Outcome
from pipeline.acts.executor import Executor
from pipeline.acts.scheduler import SchedulerNode
from pipeline.commands.act_board import make_board
from pipeline.commands.burn_in import BurnInWatch
from pipeline.commands.service import PipelineService
from pipeline.config import sections as configuration
from pipeline.config.settings import build_section
from pipeline.model.records import SECOND, from_iso
from pipeline.recording.writer import RecordingWriter
from tests.pipeline.acts_world import ALICE, BOB, ON, Scheduler
from tests.pipeline.test_service import EmptyJudge

NOW = from_iso("2026-06-01T12:00:00Z")
TEXT = """version = 1
duration = 3000
interval = 10
[fleet]
nodes = 4
gpus_per_node = 4
[[fault]]
kind = "link_flap"
onset = 2500
end = 2990
"""


class Telemetry:
    """A pipeline that has read all of the scenario, and a board whose clock is moved through it."""

    def __init__(self, folder: Path) -> None:
        (folder / "scenario.toml").write_text(TEXT)
        tables = {"store": {"path": str(folder / "s.duckdb")}, "spool": {"directory": str(folder / "spool")}}
        config = build_section(configuration.Config, tables, "test")
        order = SimulateOptions(str(folder / "scenario.toml"), 1, "spool", 0.0)
        simulate(order, config, RecordingWriter(folder / "out"), lambda _: False, lambda: NOW, lambda _: None)
        (truth,) = map(json.loads, (folder / "out" / "truth.jsonl").read_text().splitlines())
        self.port = str(truth["entity"])
        self.node = self.port.partition(":")[2].rpartition(".")[0]
        self.now = NOW
        self.service = PipelineService(config, EmptyJudge(), clock=self.clock)
        self.service.start_engine()
        while self.service.run_step():
            pass
        self.start = NOW - 3000 * SECOND
        self.board = make_board(self.service, self.require_engine)
        self.board.config = ON
        self.scheduler = Scheduler(0)
        self.scheduler.nodes = {self.node: SchedulerNode(self.node, False, "IDLE")}
        self.executor = Executor(self.board, ON, self.scheduler, lambda verb: self.scheduler, self.clock)

    def clock(self) -> int:
        return self.now

    def require_engine(self):  # type: ignore[no-untyped-def]
        assert self.service.engine is not None
        return self.service.engine

    def act(self, verb: str, second: float, **params: str) -> Act:
        """An act at a second of the scenario, through all its states."""
        self.now = self.start + round(second * SECOND)
        made = self.board.propose(verb, [f"node:{self.node}"], ALICE, "x", params=params, is_person=True)
        self.executor.run_once()
        plan = self.board.find(made.id).plan
        assert plan is not None
        self.board.approve(made.id, BOB, plan.hash(made), True)
        for _ in range(4):
            self.executor.run_once()
        return self.board.find(made.id)

    def soak(self, begin: float, minutes: float) -> Act:
        """A link soak whose program takes some minutes."""
        carry_out = self.scheduler.carry_out

        def take_time(act: Act, node: SchedulerNode) -> Outcome:
            self.now += round(minutes * 60 * SECOND)
            return carry_out(act, node)

        self.scheduler.carry_out = take_time  # type: ignore[method-assign]
        try:
            return self.act("diagnose", begin, level="link-soak")
        finally:
            self.scheduler.carry_out = carry_out  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def telemetry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Telemetry]:
    made = Telemetry(tmp_path_factory.mktemp("soak"))
    with closing(made.service):
        yield made


@pytest.mark.slow
def test_soak_and_burn_in_follow_what_the_nodes_sent(telemetry: Telemetry) -> None:
    hold = telemetry.act("hold", 300)
    assert hold.state == "verified"
    clean = telemetry.soak(600, 8)
    assert (clean.state, clean.result.get("reason")) == ("verified", None)
    below = telemetry.service.topology.descendants(f"node:{telemetry.node}")
    links = sum(entity.startswith(("port:", "nvlink:")) for entity in below)
    assert (links, clean.result["link_soak"]) == (8, "8 links carried traffic, 0 errors")
    release = telemetry.act("release", 1200)
    assert release.state == "verified", release.result
    assert release.plan is not None
    checked = next(guard for guard in release.plan.guards if guard.name == "checked_after")
    assert checked.passed
    assert clean.id in checked.now
    # the link flaps at second 2,500, in its burn-in
    telemetry.now = telemetry.start + 2980 * SECOND
    assert BurnInWatch(telemetry.service).run()
    shown = {i.cause: i.summary for i in telemetry.require_engine().life.shown.values() if i.resolved is None}
    said = [summary for summary in shown.values() if summary.endswith("(burn-in)")]
    assert said, shown
    again = telemetry.act("hold", 2300)
    assert again.state == "verified", again.result
    flapping = telemetry.soak(2420, 9)
    assert flapping.state == "failed"
    assert telemetry.port.rpartition(".")[2] in flapping.result["reason"], flapping.result
