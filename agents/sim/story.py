"""Story: everything that will happen to a fleet, and when its jobs run, known before the first block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from agents.sim import arrivals
from agents.sim.faults.kind import Fault, Kind, Stop
from agents.sim.layout import Layout
from agents.sim.physics.noise import generator
from agents.sim.scenario import FAULTS, Line, Scenario, live_lines
from agents.sim.schedule import Job, Schedule, plan
from pipeline.errors import UsageError


@dataclass(frozen=True, slots=True)
class Story:
    """Faults and benign events in order of their numbers, and the schedule of jobs that follows from them."""

    faults: tuple[Fault, ...]
    schedule: Schedule

    @classmethod
    def of(cls, scenario: Scenario, layout: Layout, seed: int, live: bool) -> Story:
        """The story of a scenario and seed. First what strikes hardware, then jobs, then what strikes jobs."""
        given = [*scenario.faults, *(live_lines(scenario, seed) if live else ())]
        lines = list(enumerate([*given, *arrivals.lines(scenario, layout, seed)], 1))
        horizon = scenario.duration + (scenario.live.hours * 3600 if live else 0.0)
        hardware = list(
            _struck((n for n in lines if n[1].kind.strikes != "job"), layout.places, scenario, layout, seed)
        )
        stops = [stop for fault in hardware if (stop := fault.kind.stops(fault, layout))]
        on_jobs = _OnJobs(scenario, layout, seed)
        strikes = [(line.onset, partial(on_jobs, number, line)) for number, line in lines if line.kind.strikes == "job"]
        schedule = plan(layout, scenario.jobs.mean_hours, stops, seed, horizon, strikes)
        jobs = on_jobs.faults(schedule)
        return cls(tuple(sorted([*hardware, *jobs], key=lambda f: f.number)), schedule)


def _struck(
    lines: Iterable[tuple[int, Line]], places: Any, scenario: Scenario, layout: Layout, seed: int
) -> Iterator[Fault]:
    """Every line with entity and parameters drawn from the seed."""
    taken: set[str] = set()
    index = {what: {name: i for i, name in enumerate(names)} for what, names in places.items()}
    for number, line in lines:
        rng = generator(seed, FAULTS, number - 1)
        kind = line.kind.drawn(rng)
        entity = line.entity or _draw(kind.candidates(layout), taken, rng)
        device = index[kind.strikes].get(entity)
        if device is None:
            raise _unknown(scenario, number, entity, kind.name, places[kind.strikes])
        taken.add(entity)
        yield Fault(number, kind, entity, device, line.onset, line.end, (seed, FAULTS, number - 1, 2))


class _OnJobs:
    """What strikes jobs: it strikes one that runs at the onset, and ends with its stay; where none runs, none does."""

    def __init__(self, scenario: Scenario, layout: Layout, seed: int) -> None:
        self._scenario, self._layout, self._seed = scenario, layout, seed
        self._found: list[Fault] = []
        self._missed: list[tuple[int, Line]] = []
        self._busy: dict[int, float] = {}  # job -> until when nothing else strikes it by itself

    def __call__(self, number: int, line: Line, running: Sequence[Job]) -> Stop | None:
        """Picks the job that a line names, else one that nothing else strikes about then."""
        rng = generator(self._seed, FAULTS, number - 1)
        kind = line.kind.drawn(rng)
        free = [job for job in running if self._busy.get(job.number, -1.0) <= line.onset]
        pick = int(rng.integers(max(1, len(free))))
        if line.entity is not None:
            free, pick = [job for job in running if job.entity == line.entity], 0
        if not free:
            self._missed += [(number, line)] if line.entity is not None else []
            return None
        fault = self._fault(number, kind, free[pick], line)
        self._found.append(fault)
        if self._scenario.rates.apart:
            self._busy[fault.device] = max(fault.end, self._busy.get(fault.device, 0.0)) + arrivals.APART
        return kind.stops(fault, self._layout)

    def faults(self, schedule: Schedule) -> Iterator[Fault]:
        """All of them, once the schedule is known; what names a job that does not run then does nothing."""
        for fault in self._found:
            stays = [s for s in schedule.within(fault.onset, fault.onset) if s.job.number == fault.device]
            yield replace(fault, end=min([fault.end, *(stay.end for stay in stays)]))
        jobs = {job.entity: job for job in schedule.jobs}
        for number, line in self._missed:
            if line.entity not in jobs:
                raise _unknown(self._scenario, number, str(line.entity), line.kind.name, tuple(jobs))
            kind = line.kind.drawn(generator(self._seed, FAULTS, number - 1))
            yield self._fault(number, kind, jobs[line.entity], line)

    def _fault(self, number: int, kind: Kind, job: Job, line: Line) -> Fault:
        return Fault(number, kind, job.entity, job.number, line.onset, line.end, (self._seed, FAULTS, number - 1, 2))


def _unknown(scenario: Scenario, number: int, entity: str, kind: str, places: Sequence[str]) -> UsageError:
    return UsageError(
        f"{scenario.source}: [[fault]] {number}: entity = {entity!r}: the fleet has none of that name; "
        f"a {kind} strikes one of {places[0]} to {places[-1]}"
    )


def _draw(candidates: Sequence[str], taken: set[str], rng: Any) -> str:
    """A candidate that no earlier fault has, while there is one."""
    free = [e for e in candidates if e not in taken] or list(candidates)
    return free[int(rng.integers(len(free)))]
