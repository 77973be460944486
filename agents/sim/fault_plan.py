"""Fault plan: all events of a simulated fleet, planned before the first block, and the lines of truth.jsonl.

Random faults occur at published rates, unevenly over the nodes as in real fleets, with a minimum time between events of
a node. The hazard of a node is the rate x Gamma frailty (mean 1, shape 0.2: the worst 5 % of the nodes have 44 % of the
events) x infant mortality (Weibull, shape 0.7: three times the rate at first, the published rate after 30 days) x 2^((T
- T0) / 10 K). Events of racks, loops, units, leaves and jobs are Poisson without these factors.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.sim.faults.kind import DAY, Detectability, Fault, Kind, Rate
from agents.sim.faults.leaf import LeafSlows
from agents.sim.kinds import KINDS
from agents.sim.layout import Layout
from agents.sim.physics.noise import generator
from agents.sim.scenario import FAULTS, Line, Scenario, live_lines
from agents.sim.scenario_file import MOST_EVENTS
from agents.sim.schedule import Allocation, Job, Schedule, Stop, plan
from pipeline.model.errors import UsageError
from pipeline.model.records import SECOND, iso

_FRAILTY, _INFANT, _INFANT_DAYS, _INFANT_MOST = 0.2, 0.7, 30.0, 3.0
_OLDEST_DAYS, _TEMPERATURE_SD = 730.0, 2.0  # of a node; K between nodes. Chosen
APART = 1800.0  # s between two events on the same nodes: longer than any detector's hold; chosen
_TRIES = 30
_SHARED = ("coolant", "power", "rack")  # devices of the site that many nodes depend on
_KEY = 80
DRAWN = (_KEY, 2)  # key of the generators of random events: separate, so that no [[fault]] changes them


@dataclass(frozen=True, slots=True)
class RandomEvents:
    """Random events in order of onset, and the number that found no free site."""

    lines: tuple[Line, ...]
    dropped: int


def draw_events(scenario: Scenario, layout: Layout, seed: int) -> RandomEvents:
    """Draws the random events of a scenario. Raises UsageError if there are too many to plan."""
    expected = {
        name: _scenario_rate(scenario, kind).of(layout) * scenario.duration
        for name, kind in sorted(KINDS.items())
        if kind.exists(layout)
    }
    if sum(expected.values()) > MOST_EVENTS:
        raise _too_many(scenario, expected)
    found: list[Line] = []
    places = _FaultSites(layout, generator(seed, _KEY), scenario.rates.apart)
    for name, number in expected.items():
        found += _draw_kind(KINDS[name], number, scenario.duration, places, generator(seed, _KEY, 1, _kind_key(name)))
    order = sorted(found, key=lambda line: (line.onset, line.kind.name, line.entity or ""))
    return RandomEvents(tuple(order), places.dropped)


def _rate_factor_key(kind: type[Kind]) -> str:
    return "confounders" if kind.detectability == "benign" else "faults"


def _scenario_rate(scenario: Scenario, kind: type[Kind]) -> Rate:
    """Returns the rate of a kind in this scenario."""
    rates, habits = scenario.rates, dict(scenario.world.habits) if scenario.world else {}
    elsewhere = kind.world_only and (scenario.world is None or kind.detectability == "benign")
    usual = habits.get(kind.name, 0.0 if elsewhere else kind.rate.value)
    return replace(kind.rate, value=rates.kinds.get(kind.name, usual) * getattr(rates, _rate_factor_key(kind)))


def _too_many(scenario: Scenario, expected: dict[str, float]) -> UsageError:
    """Returns the error that names the key which causes most of the events."""
    worst, rates = max(expected, key=lambda name: expected[name]), scenario.rates
    factor = _rate_factor_key(KINDS[worst])
    where = f"{factor} = {getattr(rates, factor):g}"
    if worst in rates.kinds and getattr(rates, factor) <= 1:
        where = f"kinds.{worst} = {rates.kinds[worst]:g}"
    return UsageError(
        f"{scenario.source}: [rates] {where}: {sum(expected.values()):.3g} events in {scenario.duration:g} s, "
        f"{expected[worst]:.3g} of them {worst}; expected at most {MOST_EVENTS:,} in total: lower the rate or the time"
    )


def _kind_key(name: str) -> int:
    """Returns a generator key that depends only on the kind: a new kind does not change other kinds (except under
    `apart`)."""
    return zlib.crc32(name.encode())


def _draw_kind(
    kind: type[Kind], expected: float, duration: float, places: _FaultSites, rng: np.random.Generator
) -> Iterator[Line]:
    """Draws the events of one kind, and their consequences."""
    for _ in range(int(rng.poisson(expected))):
        drawn_kind, span = kind.draw_random(places.layout, rng)
        site = places.draw_site(kind, span, duration, rng)
        if site is None:
            continue
        entity, onset = site
        yield Line(drawn_kind, onset, onset + span, entity)
        chain = kind.chain
        if chain and rng.random() < chain.probability:
            later = onset + chain.lead.draw(rng)
            if later < duration:
                after, length = KINDS[chain.kind].draw_random(places.layout, rng)
                yield Line(after, later, later + length, entity)


@dataclass(slots=True)
class _Reservations:
    """Reserved times of one node, in order and apart from each other."""

    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def is_free(self, begin: float, end: float) -> bool:
        """Returns whether nothing is reserved within half an hour of [begin, end)."""
        at = bisect_right(self.begins, begin)
        before, after = self.ends[at - 1 : at], self.begins[at : at + 1]
        return all(e <= begin - APART for e in before) and all(b >= end + APART for b in after)

    def reserve(self, begin: float, end: float) -> None:
        """Reserves [begin, end)."""
        at = bisect_right(self.begins, begin)
        self.begins.insert(at, begin)
        self.ends.insert(at, end)


class _FaultSites:
    """Chooses the devices of random events: hazards of the nodes, and times that are already reserved.

    Each node has two lists: faults and events of the node alone; and events of a loop, PDU or row that it shares.
    A benign event of a shared device needs a free time only in the second list: with many faults, no loop has all
    its nodes free at the same time.
    """

    def __init__(self, layout: Layout, rng: np.random.Generator, apart: bool) -> None:
        self.layout, self.apart = layout, apart
        frailty = rng.gamma(_FRAILTY, 1 / _FRAILTY, layout.nodes)
        age = rng.uniform(0.1, _OLDEST_DAYS, layout.nodes) / _INFANT_DAYS
        infant = np.clip(age ** (_INFANT - 1), 1.0, _INFANT_MOST)
        warmth = 2.0 ** (rng.normal(0, _TEMPERATURE_SD, layout.nodes) / 10)
        hazard = frailty * infant * warmth
        self.hazard: NDArray[np.float64] = hazard / hazard.mean()
        self._cumulative = np.cumsum(self.hazard)
        self.dropped = 0
        self._nodes = cache(self._nodes_below)
        self._own = [_Reservations() for _ in range(layout.nodes)]
        self._shared = [_Reservations() for _ in range(layout.nodes)]

    def draw_site(
        self, kind: type[Kind], span: float, duration: float, rng: np.random.Generator
    ) -> tuple[str | None, float] | None:
        """Returns (entity, onset), entity None for a job; None if every try met a reserved time."""
        held, names = min(span, kind.exclusive), () if kind.target == "job" else kind().candidates(self.layout)
        for _ in range(_TRIES):
            onset = float(rng.uniform(0, duration))
            if kind.target == "job":
                return None, onset
            device = self._pick_device(kind.target, len(names), rng)
            taken = self._reservations(kind, device) if self.apart else []
            if all(one.is_free(onset, onset + held) for one in taken):
                for one in taken:
                    one.reserve(onset, onset + held)
                return names[device], onset
        self.dropped += 1
        return None

    def _reservations(self, kind: type[Kind], device: int) -> Sequence[_Reservations]:
        """Returns the lists in which an event needs a free time."""
        nodes = self._nodes(kind.target, device)
        shared = [self._shared[node] for node in nodes] if kind.target in _SHARED else []
        alone = kind.target in _SHARED and kind.detectability == "benign"
        return shared if alone else [*shared, *(self._own[node] for node in nodes)]

    def _pick_device(self, job_events: str, count: int, rng: np.random.Generator) -> int:
        """Draws a device, weighted by its node's hazard if it belongs to one node."""
        if job_events not in ("gpu", "nvlink", "nic", "node"):
            return int(rng.integers(count))
        used = self.layout.ports_of_node if job_events == "nic" else self.layout.gpus_per_node
        width = 1 if job_events == "node" else self.layout.gpus_per_node
        weights = self._cumulative[: -(-count // width)]
        node = int(np.searchsorted(weights, rng.random() * weights[-1]))
        return min(node * width + int(rng.integers(1 if width == 1 else used)), count - 1)

    def _nodes_below(self, job_events: str, device: int) -> list[int]:
        """Returns the nodes that a device affects; for a rack its whole row, since warm air and leaks spread."""
        places = self.layout.row_of(device).tolist() if job_events == "rack" else [device]
        return [node for place in places for node in self.layout.nodes_below(job_events, place).tolist()]


_BEYOND = 30 * DAY  # s after the end of the scenario: no drawn event lasts longer


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Faults and benign events in order of their numbers, and the resulting schedule of jobs.

    planned: number of events.   dropped: number of events that found no free site, or no job.
    """

    faults: tuple[Fault, ...]
    schedule: Schedule
    planned: int = 0
    dropped: int = 0

    @classmethod
    def plan(cls, scenario: Scenario, layout: Layout, seed: int, live: bool) -> FaultPlan:
        """Plans a scenario with a seed: first events on hardware, then jobs, then events on jobs."""
        own = draw_events(scenario, layout, seed)
        entries = list(_entries(scenario, own.lines, seed, live))
        horizon = scenario.duration + (scenario.live.hours * 3600 if live else 0.0)
        hardware = list(_place_faults((e for e in entries if e.line.kind.target != "job"), scenario, layout))
        stops = [stop for fault in hardware if (stop := fault.kind.job_stop(fault, layout))]
        on_jobs = _JobFaults(scenario, layout)
        job_events = [(e.line.onset, partial(on_jobs, e)) for e in entries if e.line.kind.target == "job"]
        schedule = plan(layout, scenario.jobs.mean_hours, stops, seed, horizon, job_events)
        faults = sorted([*hardware, *on_jobs.faults(schedule)], key=lambda f: f.number)
        return cls(tuple(faults), schedule, len(entries) + own.dropped, own.dropped + on_jobs.idle)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A line with its number in the story and its generator key, which does not depend on that number."""

    number: int
    line: Line
    key: tuple[int, ...]

    def draw_kind(self) -> tuple[Kind, Any]:
        """Returns its kind with all parameters drawn, and the generator for further draws."""
        rng = generator(*self.key)
        return self.line.kind.drawn(rng), rng

    def fault(self, kind: Kind, entity: str, device: int) -> Fault:
        """Returns the fault of this line on one device."""
        return Fault(self.number, kind, entity, device, self.line.onset, self.line.end, (*self.key, 2))


def _entries(scenario: Scenario, own: Sequence[Line], seed: int, live: bool) -> Iterator[_Entry]:
    """Yields random events, then given ones: one more [[fault]] changes neither other events nor their numbers."""
    for i, line in enumerate(own):
        yield _Entry(1 + i, line, (seed, *DRAWN, i))
    last = scenario.duration + (scenario.live.hours * 3600 if scenario.live.every > 0 else 0.0) + _BEYOND
    for i, line in enumerate([*scenario.faults, *(live_lines(scenario, seed) if live else ())]):
        yield _Entry(1 + len(own) + i, replace(line, end=min(line.end, last)), (seed, FAULTS, i))


def _place_faults(entries: Iterable[_Entry], scenario: Scenario, layout: Layout) -> Iterator[Fault]:
    """Yields every line as a fault, with entity and parameters drawn from the seed."""
    taken: set[str] = set()
    index = {what: {name: i for i, name in enumerate(names)} for what, names in layout.targets.items()}
    for entry in entries:
        kind, rng = entry.draw_kind()
        if entry.line.entity is None and not kind.exists(layout):
            continue
        entity = entry.line.entity or _draw_entity(kind.candidates(layout), taken, rng)
        device = index[kind.target].get(entity)
        if device is None:
            raise _unknown(scenario, entry, layout.targets[kind.target])
        if entry.key[1] == FAULTS:  # random events have a site already, and do not block the sites of given ones
            taken.add(entity)
        yield entry.fault(kind, entity, device)


class _JobFaults:
    """Events on jobs: each affects one job that runs at its onset, and ends with that allocation; without a job it is
    dropped."""

    def __init__(self, scenario: Scenario, layout: Layout) -> None:
        self._scenario, self._layout = scenario, layout
        self._found: list[Fault] = []
        self._missed: list[_Entry] = []
        self._busy: dict[int, float] = {}  # job -> time until which no other random event may affect it
        self.idle = 0  # number of events that found no job

    def __call__(self, entry: _Entry, running: Sequence[Job]) -> Stop | None:
        """Chooses the job that a line names, else one without another event at that time."""
        kind, rng = entry.draw_kind()
        line = entry.line
        free = [job for job in running if kind.suits(job) and self._busy.get(job.number, -1.0) <= line.onset]
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
            self._busy[fault.device] = max(fault.end, self._busy.get(fault.device, 0.0)) + APART
        return kind.job_stop(fault, self._layout)

    def faults(self, schedule: Schedule) -> Iterator[Fault]:
        """Yields all of them once the schedule is known; an event on a job that does not run has no effect."""
        for fault in self._found:
            allocations = [
                s for s in schedule.allocations_within(fault.onset, fault.onset) if s.job.number == fault.device
            ]
            yield replace(fault, end=min([fault.end, *(allocation.end for allocation in allocations)]))
        jobs = {job.entity: job for job in schedule.jobs}
        for entry in self._missed:
            job = jobs.get(str(entry.line.entity))
            if job is None:
                raise _unknown(self._scenario, entry, tuple(jobs))
            yield entry.fault(entry.draw_kind()[0], job.entity, job.number)


def _unknown(scenario: Scenario, entry: _Entry, places: Sequence[str]) -> UsageError:
    expected = f"one of {places[0]} to {places[-1]}" if places else "none: this site has no such device"
    return UsageError(
        f"{scenario.source}: [[fault]] {entry.key[-1] + 1}: entity = {entry.line.entity!r}: not in this "
        f"fleet; expected {expected} for {entry.line.kind.name}"
    )


def _draw_entity(candidates: Sequence[str], taken: set[str], rng: Any) -> str:
    """Draws a candidate that no earlier fault has, if there is one."""
    free = [e for e in candidates if e not in taken] or list(candidates)
    return free[int(rng.integers(len(free)))]


_FEW_PORTS = 6  # ports of a leaf that must be in use to show it: flows that collide on an uplink are two to four
_LONG_S = 1200.0  # s for which a job must be slowed to need a page: twice the hold of one. Chosen
_SAMPLES = 16  # times within a fault at which a running job is searched; chosen


CollectiveShare = Callable[[Job], float]


def truth_lines(
    faults: Iterable[Fault], schedule: Schedule, layout: Layout, start: int, horizon: float, waits: CollectiveShare
) -> list[dict[str, Any]]:
    """Returns a line per fault or benign event that began before `horizon` s, in order of their numbers.

    waits: share of its step for which a job is in collectives.
    """
    return [_truth_line(fault, schedule, layout, start, horizon, waits) for fault in faults if fault.onset < horizon]


def _truth_line(
    fault: Fault, schedule: Schedule, layout: Layout, start: int, horizon: float, waits: CollectiveShare
) -> dict[str, Any]:
    kind, unused = fault.kind, _unused(fault, schedule, layout)
    idle = unused and kind.loaded and kind.detectability == "soft"  # hard faults are logged in any case
    harmless = unused and kind.idle_soft
    guilty = kind.faulty_entities(fault, layout)
    grade, effect = _visible_class(fault, schedule, layout), kind.effect()
    if isinstance(kind, LeafSlows):
        slowed = _slowed_jobs(fault, kind.ports_below(fault, layout).tolist(), schedule, horizon)
        guilty = (*guilty, *(job.entity for job in slowed))
        longer = {job: kind.lengthening(waits(job)) for job in slowed}
        effect = max(longer.values(), default=0.0)
        grade = kind.slowing_class(max((longer[job] for job, s in slowed.items() if s >= _LONG_S), default=0.0))
    detectable = kind.detectable_from(fault)
    unread = kind.detectability != "benign" and not _shown(fault, schedule, layout)
    unseen = idle or unread or detectable >= min(fault.end, horizon)
    line: dict[str, Any] = {
        "id": f"fault-{fault.number}",
        "kind": kind.name,
        "entity": fault.entity,
        "onset": _timestamp(start, fault.onset),
        "end": _timestamp(start, min(fault.end, horizon)),
        "class": "invisible" if unseen else "soft" if harmless else grade,
        "signals": list(kind.signals),
        "parameters": {**kind.parameters(), "row": kind.row, "attribution": kind.attributed_part()},
    }
    if guilty != (fault.entity,):
        line["entities"] = list(guilty)
    more = {"severity": kind.severity(), "effect": effect, "effect_unit": kind.effect_unit}
    line["parameters"] |= {name: value for name, value in more.items() if value is not None}
    if fault.onset < detectable < fault.end:
        line["parameters"]["detectable"] = _timestamp(start, min(detectable, horizon))
    if idle or harmless:
        line["parameters"]["idle"] = True
    return line


def _visible_class(fault: Fault, schedule: Schedule, layout: Layout) -> Detectability:
    """Returns the class of a fault that some collector shows, on a device in use or a job."""
    if fault.kind.target == "job":
        return fault.kind.job_class(schedule.jobs[fault.device])
    return fault.kind.truth_class(fault, layout)


def _shown(fault: Fault, schedule: Schedule, layout: Layout) -> bool:
    """Returns whether some collector reads what shows a fault: ranks report if their job has the hook, ports show a job
    on several nodes."""
    read = [name for name in fault.kind.evidence(fault, layout) if layout.world.reads(name)]
    if fault.kind.target == "job":
        mine = schedule.jobs[fault.device]
        unread = (*(() if mine.hooked else ("rank.",)), *(() if mine.networked else ("nic.",)))
        return any(not name.startswith(unread) for name in read)
    if any(not name.startswith("rank.") for name in read) or fault.kind.target not in ("gpu", "node"):
        return bool(read)
    job = _job_below(fault, fault.onset, schedule, layout)
    return bool(read) and (job is None or job.job.hooked)


def _job_below(fault: Fault, time: float, schedule: Schedule, layout: Layout) -> Allocation | None:
    """Returns the job on the GPU of a fault, or on the first GPU of its node, which every job of a node uses."""
    gpu = fault.device if fault.kind.target == "gpu" else fault.device * layout.gpus_per_node
    return schedule.job_at(gpu, time)


def _unused(fault: Fault, schedule: Schedule, layout: Layout) -> bool:
    """Returns whether a fault is on a device without a job for most of its time; where it stops a job, until then."""
    if fault.kind.target == "job" or not (fault.kind.loaded or fault.kind.idle_soft):
        return False
    gpus, least = [fault.device], 1
    if fault.kind.target == "node":
        gpus = layout.gpus_of(layout.nodes_below("node", fault.device))[:1].tolist()
    if isinstance(fault.kind, LeafSlows):
        gpus = fault.kind.ports_below(fault, layout).tolist()
        least = min(_FEW_PORTS, len(gpus))
    stop = fault.kind.job_stop(fault, layout)  # a job that it stopped was running there
    begin = fault.onset
    if stop and stop.at <= begin:  # it shows after the work for which the job stopped
        begin, stop = stop.at + stop.out, None
    end = min(fault.end, begin + 86_400, stop.at if stop else np.inf)
    network, logged = fault.kind.attribution == "network", fault.kind.idle_soft
    used = 0
    for time in np.linspace(begin, end, _SAMPLES, endpoint=False).tolist():
        running = schedule.allocations_within(time, time)
        if network:  # the little traffic of a service hides what is not logged
            running = [one for one in running if one.job.networked or (logged and not one.job.trains)]
        used += sum(np.isin(gpus, one.gpus).sum() for one in running) >= least
    return used < _SAMPLES / 2


def _slowed_jobs(fault: Fault, ports: Sequence[int], schedule: Schedule, horizon: float) -> dict[Job, float]:
    """Returns the jobs that send through some ports during a fault, each a right name for what slows it, and for how
    many seconds until the horizon."""
    found, seconds = schedule.allocations_within(fault.onset, fault.end), dict[Job, float]()
    for s in found:
        if s.job.networked and np.isin(ports, s.gpus).any():
            within = min(s.end, fault.end, horizon) - max(s.begin, fault.onset)
            seconds[s.job] = seconds.get(s.job, 0.0) + within
    return seconds


def _timestamp(start: int, seconds: float) -> str:
    return iso(start + round(seconds * SECOND))
