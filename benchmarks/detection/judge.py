"""One simulated fleet through framer, detectors and Desk in one process, without files: judge().

Frames are dropped once judged; kept are incidents and, of each condition, its first finding and those that raised its
level. A run can be written to a checkpoint and continues from it as if it had never stopped.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.sim.chunk import Chunk
from agents.sim.fleet import FleetSimulator
from agents.sim.scenario import Scenario
from detectors import configured
from detectors.base.detector import Detector
from detectors.replay import ReplayedIncidents
from detectors.runner import Runner
from pipeline.incidents.desk import Desk
from pipeline.judging.frames import Framer
from pipeline.model.membership import Membership
from pipeline.model.records import LEVELS, SECOND, Finding, Incident, Rows
from pipeline.model.topology import Topology

STEP = 10 * SECOND
"""Grid of the frames: the default of [pipeline] frame."""
PARTS = ("simulation", "frames", "detectors", "desk")


@dataclass(frozen=True)
class Judged:
    """Findings, incidents and truth of a fleet. seconds: CPU time by part (PARTS); samples: values framed."""

    findings: list[Finding]
    incidents: list[Incident]
    truth: list[dict[str, Any]]
    node_days: float
    samples: int
    seconds: dict[str, float]
    simulator: FleetSimulator


class Numbers:
    """One number for each entity of a class, in order of first appearance, for as long as the run lasts."""

    def __init__(self) -> None:
        self._numbers: dict[str, dict[str, int]] = {}
        self._names: dict[str, tuple[str, ...]] = {}
        self._newest: dict[str, tuple[tuple[str, ...], NDArray[np.int32]]] = {}

    def of(self, device_class: str, entities: Sequence[str]) -> NDArray[np.int32]:
        """(N,) numbers of entities."""
        wanted = tuple(entities)
        known = self._newest.get(device_class)
        if known is None or known[0] != wanted:
            mine = self._numbers.setdefault(device_class, {})
            places = np.array([mine.setdefault(e, len(mine)) for e in wanted], np.int32)
            self._names[device_class] = tuple(mine)
            self._newest[device_class] = known = (wanted, places)
        return known[1]

    def names(self, device_class: str) -> tuple[str, ...]:
        """Entities by number, so far."""
        return self._names.get(device_class, ())


class Trial:
    """A simulated fleet with its framer, detectors and Desk, from the first tick on."""

    def __init__(self, scenario: Scenario, seed: int, detectors: Sequence[Detector] | None = None) -> None:
        self.simulator = FleetSimulator(scenario, seed)
        layout = self.simulator.layout  # hardware only: jobs are known from events
        self.topology = Topology(layout.parents, {e: a for e in layout.parents if (a := layout.attributes(e))})
        self.membership, self.numbers = Membership(self.topology), Numbers()
        self.runner = Runner(configured() if detectors is None else detectors)
        self.framer = Framer(STEP, self.topology, self.numbers.names, signals=self.runner.signals)
        self.cases = ReplayedIncidents(Desk(self.topology, _simulated))
        self.findings: list[Finding] = []
        self.levels: dict[tuple[str, str, int], int] = {}
        self.ticks = self.samples = self.last = 0
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def run(self, every: int | None = None) -> Iterator[int]:
        """Runs to the scenario's end; yields the number of processed ticks after every `every` ticks and at the end."""
        end = self.simulator.scenario.ticks
        chunks, due = self._timed("simulation", self.simulator.chunks(limit=end)), self.ticks + (every or end)
        for chunk in chunks:
            self._add_chunk(chunk)
            if due <= self.ticks < end:  # the end comes below, after its last frames
                due += every or end
                yield self.ticks
        self._judge(self.last + 2 * STEP)
        yield self.ticks

    def judged(self) -> Judged:
        """Returns the results so far. Raises RuntimeError if a detector failed."""
        if self.runner.errors:
            raise RuntimeError(f"detectors failed: {dict(self.runner.errors)}; see the log; expected none to")
        scenario = self.simulator.scenario
        seconds = self.ticks * scenario.interval
        truth, days = self.simulator.truth(seconds), scenario.fleet.nodes * seconds / 86_400
        return Judged(self.findings, self.cases.incidents(), truth, days, self.samples, self.seconds, self.simulator)

    def _add_chunk(self, chunk: Chunk) -> None:
        self.ticks, self.last = self.ticks + len(chunk.times), int(chunk.times[-1])
        self._frame(chunk)
        self._judge(self.last + 1)  # the cell of the last tick stays open: events until the next tick are in it

    def _frame(self, chunk: Chunk) -> None:
        began = time.process_time()
        for device_class in chunk.columns:
            table = chunk.table(device_class)
            self.samples += len(table.time) * len(table.columns)
            device = self.numbers.of(device_class, chunk.entities[device_class])[table.device]
            self.framer.add_rows(Rows(device_class, table.time, device, table.columns))
        self.framer.add_events(event for _, event in chunk.events)
        self.seconds["frames"] += time.process_time() - began

    def _judge(self, watermark: int) -> None:
        """Judges the frames that the watermark has passed."""
        for instant in self._timed("frames", self.framer.advance(watermark)):
            began = time.process_time()
            instant = self.membership.apply_instant(instant)
            found = self.runner.observe(instant.frames)
            judged = time.process_time()
            self.cases.observe(instant, found)
            self._keep(found)
            self.seconds["detectors"] += judged - began
            self.seconds["desk"] += time.process_time() - judged

    def _keep(self, found: Sequence[Finding]) -> None:
        """Keeps findings that are new or raise a level; a detector repeats the others every minute."""
        for finding in found:
            level = LEVELS.index(finding.level)
            if self.levels.get(finding.key, -1) < level:
                self.levels[finding.key] = level
                self.findings.append(finding)

    def _timed(self, part: str, source: Iterator[Any]) -> Iterator[Any]:
        """Yields the same items, and adds the time that they take to a part."""
        while True:
            began = time.process_time()
            item = next(source, None)
            self.seconds[part] += time.process_time() - began
            if item is None:
                return
            yield item

    def save(self, path: Path) -> None:
        """Writes a checkpoint, whole or not at all; only between two chunks."""
        state = {name: value for name, value in vars(self).items() if name != "simulator"}
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_bytes(pickle.dumps((self.simulator.snapshot(), state)))
        os.replace(partial, path)

    @classmethod
    def load(cls, path: Path, scenario: Scenario, seed: int) -> Trial:
        """Returns the trial of a checkpoint; only for own files that the same code wrote."""
        snapshot, state = pickle.loads(path.read_bytes())
        trial = cls(scenario, seed)
        trial.simulator.restore(snapshot)
        vars(trial).update(state)
        return trial


def judge(
    scenario: Scenario,
    seed: int,
    checkpoint: Path | None = None,
    hours: float = 6.0,
    may_continue: Callable[[Trial], bool] = lambda _: True,
) -> Judged | None:
    """Judges a whole scenario; None if `goes_on` returned False at a checkpoint.

    checkpoint: file that is written every `hours` of simulated time, from which the run continues if it exists; deleted
    at the end of the run.
    """
    resumed = checkpoint is not None and checkpoint.exists()
    trial = Trial.load(checkpoint, scenario, seed) if checkpoint and resumed else Trial(scenario, seed)
    every = max(1, round(hours * 3600 / scenario.interval))
    for done in trial.run(every):
        if done >= scenario.ticks:
            break
        if checkpoint is not None:
            trial.save(checkpoint)
        if not may_continue(trial):
            return None
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    return trial.judged()


def _simulated(_: str) -> bool:
    return True
