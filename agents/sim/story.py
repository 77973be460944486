"""Story: everything that will happen to a fleet, and when its jobs run, known before the first block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from agents.sim import arrivals
from agents.sim.faults.kind import DAY, Fault, Kind
from agents.sim.layout import Layout
from agents.sim.physics.noise import generator
from agents.sim.scenario import FAULTS, Line, Scenario, live_lines
from agents.sim.schedule import Job, Schedule, Stop, plan
from pipeline.errors import UsageError

_BEYOND = 30 * DAY  # s beyond the last moment of the scenario: nothing that is drawn lasts longer either


@dataclass(frozen=True, slots=True)
class Story:
    """Faults and benign events in order of their numbers, and the schedule of jobs that follows from them.

    planned: how many events were to come.   dropped: how many of them found no free place, or no job.
    """

    faults: tuple[Fault, ...]
    schedule: Schedule
    planned: int = 0
    dropped: int = 0

    @classmethod
    def of(cls, scenario: Scenario, layout: Layout, seed: int, live: bool) -> Story:
        """The story of a scenario and seed. First what strikes hardware, then jobs, then what strikes jobs."""
        own = arrivals.draw(scenario, layout, seed)
        entries = list(_entries(scenario, own.lines, seed, live))
        horizon = scenario.duration + (scenario.live.hours * 3600 if live else 0.0)
        hardware = list(_struck((e for e in entries if e.line.kind.strikes != "job"), scenario, layout))
        stops = [stop for fault in hardware if (stop := fault.kind.stops(fault, layout))]
        on_jobs = _OnJobs(scenario, layout)
        strikes = [(e.line.onset, partial(on_jobs, e)) for e in entries if e.line.kind.strikes == "job"]
        schedule = plan(layout, scenario.jobs.mean_hours, stops, seed, horizon, strikes)
        faults = sorted([*hardware, *on_jobs.faults(schedule)], key=lambda f: f.number)
        return cls(tuple(faults), schedule, len(entries) + own.dropped, own.dropped + on_jobs.idle)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A line with its number in the story and the key of its generators, which does not depend on that number."""

    number: int
    line: Line
    key: tuple[int, ...]

    def drawn(self) -> tuple[Kind, Any]:
        """Its kind with all parameters, and the generator that goes on from there."""
        rng = generator(*self.key)
        return self.line.kind.drawn(rng), rng

    def fault(self, kind: Kind, entity: str, device: int) -> Fault:
        return Fault(self.number, kind, entity, device, self.line.onset, self.line.end, (*self.key, 2))


def _entries(scenario: Scenario, own: Sequence[Line], seed: int, live: bool) -> Iterator[_Entry]:
    """What comes by itself, then what is given: one more [[fault]] leaves the rest as it was, numbers and all."""
    for i, line in enumerate(own):
        yield _Entry(1 + i, line, (seed, *arrivals.DRAWN, i))
    last = scenario.duration + (scenario.live.hours * 3600 if scenario.live.every > 0 else 0.0) + _BEYOND
    for i, line in enumerate([*scenario.faults, *(live_lines(scenario, seed) if live else ())]):
        yield _Entry(1 + len(own) + i, replace(line, end=min(line.end, last)), (seed, FAULTS, i))


def _struck(entries: Iterable[_Entry], scenario: Scenario, layout: Layout) -> Iterator[Fault]:
    """Every line with entity and parameters drawn from the seed."""
    taken: set[str] = set()
    index = {what: {name: i for i, name in enumerate(names)} for what, names in layout.places.items()}
    for entry in entries:
        kind, rng = entry.drawn()
        entity = entry.line.entity or _draw(kind.candidates(layout), taken, rng)
        device = index[kind.strikes].get(entity)
        if device is None:
            raise _unknown(scenario, entry, layout.places[kind.strikes])
        if entry.key[1] == FAULTS:  # what comes by itself has its place, and takes none from what is given
            taken.add(entity)
        yield entry.fault(kind, entity, device)


class _OnJobs:
    """What strikes jobs: it strikes one that runs at the onset, and ends with its stay; where none runs, none does."""

    def __init__(self, scenario: Scenario, layout: Layout) -> None:
        self._scenario, self._layout = scenario, layout
        self._found: list[Fault] = []
        self._missed: list[_Entry] = []
        self._busy: dict[int, float] = {}  # job -> until when nothing else strikes it by itself
        self.idle = 0  # how many found no job

    def __call__(self, entry: _Entry, running: Sequence[Job]) -> Stop | None:
        """Picks the job that a line names, else one that nothing else strikes about then."""
        kind, rng = entry.drawn()
        line = entry.line
        free = [job for job in running if self._busy.get(job.number, -1.0) <= line.onset]
        pick = int(rng.integers(max(1, len(free))))
        if line.entity is not None:
            free, pick = [job for job in running if job.entity == line.entity], 0
        if not free:
            self._missed += [entry] if line.entity is not None else []
            self.idle += line.entity is None
            return None
        fault = entry.fault(kind, free[pick].entity, free[pick].number)
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
        for entry in self._missed:
            job = jobs.get(str(entry.line.entity))
            if job is None:
                raise _unknown(self._scenario, entry, tuple(jobs))
            yield entry.fault(entry.drawn()[0], job.entity, job.number)


def _unknown(scenario: Scenario, entry: _Entry, places: Sequence[str]) -> UsageError:
    return UsageError(
        f"{scenario.source}: [[fault]] {entry.key[-1] + 1}: entity = {entry.line.entity!r}: the fleet has none of that "
        f"name; a {entry.line.kind.name} strikes one of {places[0]} to {places[-1]}"
    )


def _draw(candidates: Sequence[str], taken: set[str], rng: Any) -> str:
    """A candidate that no earlier fault has, while there is one."""
    free = [e for e in candidates if e not in taken] or list(candidates)
    return free[int(rng.integers(len(free)))]
