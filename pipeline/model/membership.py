"""Keeps the topology up to date from inventory, job_start and job_end events, live and in replay.

An inventory lists what a node has, ranks included. A job_start places ranks on GPUs and in stages; a job_end removes
them, with stages and jobs that have no rank left. The newest event wins in any order of arrival, if an end and an older
start arrive within REMEMBERED of each other.

A rank also ends when the inventory of its node no longer lists it. Its attribute `node` names that node
(agents/collectors/jobs/jobs.py); ranks without it, such as simulated ones, stay.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from pipeline.model.errors import UsageError
from pipeline.model.links import Links
from pipeline.model.records import SECOND, Event, Instant
from pipeline.model.topology import Topology, kind_of

ATTRIBUTE = "node"
WORK = frozenset({"stage", "job"})
"""What ranks are a part of, and what ends with the last of them."""


class EndedRanks:
    """Takes ended ranks out of a topology. Memory: a few names for each rank that is there."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._ranks: dict[str, set[str]] = {}
        self._over: dict[str, tuple[str, ...]] = {}
        self._members: dict[str, set[str]] = {}
        self._note(entity for entity in topology.attributes if kind_of(entity) == "rank")

    def follow(self, inventories: Sequence[Event]) -> tuple[str, ...]:
        """Reads inventories that the topology has taken; returns what left it."""
        ended: list[str] = []
        emptied: list[str] = []
        works: dict[str, None] = {}
        for event in inventories:
            told = event.data.get("entities")
            if not isinstance(told, dict):
                continue
            node = event.entity.partition(":")[2]
            absent = self._ranks.get(node, set()) - told.keys()
            # one that another node tells of by now has moved
            ended += (e for e in absent if self._topology.attributes.get(e, {}).get(ATTRIBUTE) == node)
            for rank in absent - self._topology.parents.keys():  # somebody else took it out
                self._place(rank, ())
            self._ranks[node] = self._ranks.get(node, set()) - absent
            emptied += self._note(entity for entity in told if kind_of(entity) == "rank")
            works |= {entity: None for entity in told if kind_of(entity) in WORK}
        emptied += self._deserted(works)
        emptied += (over for rank in ended for over in self._place(rank, ()))
        ended += dict.fromkeys(over for over in emptied if over not in self._members)
        if not ended:
            return ()
        self._topology.forget(ended)
        return tuple(ended)

    def _note(self, ranks: Iterable[str]) -> list[str]:
        """Takes ranks in; returns the stages and jobs that nobody is left in because a rank is in another one now."""
        emptied: list[str] = []
        for rank in ranks:
            node = self._topology.attributes.get(rank, {}).get(ATTRIBUTE)
            if isinstance(node, str):
                self._ranks.setdefault(node, set()).add(rank)
                emptied += self._place(rank, tuple(e for e in self._topology.above(rank) if kind_of(e) in WORK))
        return emptied

    def _deserted(self, works: Iterable[str]) -> list[str]:
        """Stages and jobs in which nobody is: who reports steps may name any stage, and it would stay for ever."""
        found = [entity for entity in works if entity not in self._members]
        if not found:
            return []
        ranks = (entity for entity in self._topology.parents if kind_of(entity) == "rank")
        over = {above for rank in ranks for above in self._topology.above(rank)}
        return [entity for entity in found if entity not in over]

    def _place(self, rank: str, over: tuple[str, ...]) -> list[str]:
        """Puts a rank below its stage and job, or below none; returns those that nobody is left in."""
        before = self._over.pop(rank, ())
        for entity in before:
            self._members.get(entity, set()).discard(rank)
        if over:
            self._over[rank] = over
        for entity in over:
            self._members.setdefault(entity, set()).add(rank)
        empty = [entity for entity in before if not self._members.get(entity)]
        for entity in empty:
            self._members.pop(entity, None)
        return empty


log = logging.getLogger("fleetpulse.membership")
REMEMBERED = 3600 * SECOND
"""How long an end is known, by the newest event; it bounds the memory where jobs come and go. Chosen."""


class Membership:
    """Keeps a topology true. Memory: a time for each rank that is there, and for each that ended within REMEMBERED."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._links, self._ended = Links(topology), EndedRanks(topology)
        self._told: dict[str, int] = {}
        self._over_since: dict[str, int] = {}  # rank or job -> when it ended; the oldest told first
        self._newest = 0

    def applied(self, instant: Instant) -> Instant:
        """Takes the events of an instant that is about to be judged; the instant, with what ended in it."""
        ended = self.follow(instant.events)
        return replace(instant, ended=ended) if ended else instant

    def follow(self, events: Iterable[Event]) -> tuple[str, ...]:
        """Applies the events of one instant in order of time; returns the ranks, stages and jobs that ended."""
        take = {"inventory": self.learn, "job_end": self._end, "job_start": self._start}
        mine = [event for event in events if event.kind in take]
        mine.sort(key=lambda e: (e.time, list(take).index(e.kind), e.entity))
        self._drop_old(mine)
        together = groupby(mine, key=lambda e: e.kind)
        return tuple(entity for kind, found in together for entity in take[kind](list(found)))

    def learn(self, inventories: Sequence[Event]) -> tuple[str, ...]:
        """Takes inventories, all at once where that goes; returns the ranks, stages and jobs that ended."""
        self._merge(inventories)
        for event in inventories:
            known = event.data.get("entities")
            for entity in known if isinstance(known, dict) else ():
                if kind_of(entity) == "rank":
                    self._told[entity] = max(event.time, self._told.get(entity, event.time))
        ended = self._ended.follow(inventories)
        self._forget_times(ended)
        return ended

    def _merge(self, inventories: Sequence[Event]) -> None:
        """Takes parents and attributes; an inventory that makes a circle is refused with a line in the log.

        All at once, where that goes: each change costs a copy of the whole graph, and after an outage all nodes have
        some.
        """
        lines = [line for event in inventories for line in inventory(event.data)]
        try:
            parents, attributes = self.topology.fixed
            told = (
                {e: p for e, p, _ in lines if p and e not in parents},
                {e: a for e, _, a in lines if a and e not in attributes},
            )
            self.topology.merge(*self._links.joined(*told))
        except UsageError as error:
            if len(inventories) == 1:
                log.warning("inventory of %s refused: %s", inventories[0].entity, error)
                return
            for event in inventories:
                self._merge([event])

    def _start(self, events: Sequence[Event]) -> tuple[str, ...]:
        """Places the ranks of jobs, but for those of which something later is known."""
        try:
            self.topology.merge({entity: over for event in events for entity, over in self._placed(event)})
        except UsageError as error:
            if len(events) == 1:
                log.warning("job_start of %s refused: %s", events[0].entity, error)
            else:
                for event in events:
                    self._start([event])
        return ()

    def _placed(self, event: Event) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Lines of ranks and stages that a job_start tells."""
        for rank, place in _places(event):
            ended = max(self._over_since.get(name, event.time) for name in (rank, event.entity))
            if max(ended, self._told.get(rank, event.time)) > event.time:
                continue
            self._told[rank] = event.time
            stage, gpu = (_named(place, kind) for kind in ("stage", "gpu"))
            yield rank, self._over(rank, event.entity, stage, gpu)
            if stage is not None:
                yield stage, (event.entity,)

    def _over(self, rank: str, job: str, stage: str | None, gpu: str | None) -> tuple[str, ...]:
        """Parents of a rank, nearest first; what the event does not tell stays, and so do further GPUs of the rank."""
        known = self.topology.parents.get(rank, ())
        stages = tuple(e for e in known if kind_of(e) == "stage") if stage is None else (stage,)
        places = tuple(e for e in known if kind_of(e) not in WORK)
        return (*stages, job, *(places if gpu is None or gpu in places else (gpu,)))

    def _end(self, events: Sequence[Event]) -> tuple[str, ...]:
        """Takes out the ranks that ended: those that an event names, else all of its job."""
        over = {rank: self.topology.above(rank) for rank in self.topology.parents if kind_of(rank) == "rank"}
        ended: dict[str, None] = {}
        for event in events:
            named = event.data.get("ranks")
            self._note_end(event)
            for rank in named if isinstance(named, (list, dict)) else over:
                if (
                    isinstance(rank, str)
                    and event.entity in over.get(rank, ())
                    and self._told.get(rank, event.time) <= event.time
                ):
                    ended[rank] = None
        if not ended:
            return ()
        left = {e for rank in ended for e in over[rank] if kind_of(e) in WORK}
        left -= {e for rank, above in over.items() if rank not in ended for e in above}
        gone = (*ended, *sorted(left))
        self._forget_times(gone)
        self.topology.forget(gone)
        return gone

    def _note_end(self, event: Event) -> None:
        """Remembers an end by the ranks that it names, else by its job."""
        named = event.data.get("ranks")
        for entity in named if isinstance(named, (list, dict)) else (event.entity,):
            if isinstance(entity, str):
                since = max(event.time, self._over_since.pop(entity, event.time))
                self._over_since[entity] = since

    def _drop_old(self, events: Sequence[Event]) -> None:
        """Drops ends that are long over by the newest event."""
        self._newest = max(self._newest, max((e.time for e in events), default=0))
        while self._over_since:
            oldest = next(iter(self._over_since))
            if self._over_since[oldest] >= self._newest - REMEMBERED:
                return
            del self._over_since[oldest]

    def _forget_times(self, ended: Iterable[str]) -> None:
        for entity in ended:
            self._told.pop(entity, None)


def inventory(data: Mapping[str, object]) -> list[tuple[str, list[str], dict[str, object]]]:
    """(entity, parents, attributes) of an inventory event; lines of another form are left out."""
    found = data.get("entities")
    out: list[tuple[str, list[str], dict[str, object]]] = []
    for entity, line in found.items() if isinstance(found, dict) else ():
        if isinstance(line, dict) and ":" in entity:
            parents, attributes = line.get("parents", []), line.get("attributes", {})
            if isinstance(parents, list) and isinstance(attributes, dict) and all(isinstance(p, str) for p in parents):
                out.append((entity, parents, attributes))
    return out


def _places(event: Event) -> list[tuple[str, Mapping[str, object]]]:
    """(rank, where it is) of a job_start; lines of another form are left out."""
    ranks = event.data.get("ranks")
    if kind_of(event.entity) != "job" or not isinstance(ranks, dict):
        return []
    return [(rank, place) for rank, place in ranks.items() if kind_of(rank) == "rank" and isinstance(place, dict)]


def _named(place: Mapping[str, object], kind: str) -> str | None:
    """The entity of that kind, if there is one."""
    found = place.get(kind)
    return found if isinstance(found, str) and found.startswith(f"{kind}:") else None
