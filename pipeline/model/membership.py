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
from pipeline.model.topology import ParentGraph, Parents, Topology, kind_of, overlay_parents

ATTRIBUTE = "node"
WORK = frozenset({"stage", "job"})
"""Kinds that ranks belong to, and that end with their last rank."""


class EndedRanks:
    """Removes ended ranks from a topology. Memory: a few names per rank."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._ranks: dict[str, set[str]] = {}
        self._works_of: dict[str, tuple[str, ...]] = {}
        self._members: dict[str, set[str]] = {}
        self._add_ranks(entity for entity in topology.attributes if kind_of(entity) == "rank")

    def remove_ended(self, inventories: Sequence[Event]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Applies inventories that are already merged into the topology.

        Returns the entities that ended, and the ranks that one inventory dropped and a newer one lists again.
        """
        dropped: dict[tuple[str, str], None] = {}  # (rank, node)
        emptied: list[str] = []
        works: dict[str, None] = {}
        for event in inventories:
            reported = event.data.get("entities")
            if not isinstance(reported, dict):
                continue
            node = event.entity.partition(":")[2]
            absent = self._ranks.get(node, set()) - reported.keys()
            dropped |= dict.fromkeys((rank, node) for rank in sorted(absent))
            for rank in absent:  # not as a set minus all keys, which reads the whole topology for each inventory
                if rank not in self._topology.parents:  # already removed elsewhere
                    self._move_rank(rank, ())
            self._ranks[node] = self._ranks.get(node, set()) - absent
            emptied += self._add_ranks(entity for entity in reported if kind_of(entity) == "rank")
            works |= {entity: None for entity in reported if kind_of(entity) in WORK}
        ended = [rank for rank, node in dropped if self._has_ended(rank, node)]
        again = tuple(rank for rank, node in dropped if rank in self._ranks[node])
        emptied += self._find_empty(works)
        emptied += (over for rank in ended for over in self._move_rank(rank, ()))
        ended += dict.fromkeys(over for over in emptied if over not in self._members)
        if ended:
            self._topology.remove_entities(ended)
        return tuple(ended), again

    def _has_ended(self, rank: str, node: str) -> bool:
        """Returns whether a rank that a node dropped has not moved to another node, by its inventory or by a job_start,
        and is not listed again in a newer inventory of those applied together."""
        on = self._topology.attributes.get(rank, {}).get(ATTRIBUTE)
        return on == node and rank not in self._ranks.get(node, ())

    def _add_ranks(self, ranks: Iterable[str]) -> list[str]:
        """Adds ranks; returns the stages and jobs that are empty because a rank moved to another one."""
        emptied: list[str] = []
        for rank in ranks:
            node = self._topology.attributes.get(rank, {}).get(ATTRIBUTE)
            if isinstance(node, str):
                self._ranks.setdefault(node, set()).add(rank)
                emptied += self._move_rank(rank, tuple(e for e in self._topology.ancestors(rank) if kind_of(e) in WORK))
        return emptied

    def _find_empty(self, works: Iterable[str]) -> list[str]:
        """Stages and jobs without a rank: a step report may name any stage, which would otherwise never be removed."""
        found = [entity for entity in works if entity not in self._members]
        if not found:
            return []
        ranks = (entity for entity in self._topology.parents if kind_of(entity) == "rank")
        over = {above for rank in ranks for above in self._topology.ancestors(rank)}
        return [entity for entity in found if entity not in over]

    def _move_rank(self, rank: str, over: tuple[str, ...]) -> list[str]:
        """Moves a rank below its stage and job, or below none; returns those that are empty now."""
        before = self._works_of.pop(rank, ())
        for entity in before:
            self._members.get(entity, set()).discard(rank)
        if over:
            self._works_of[rank] = over
        for entity in over:
            self._members.setdefault(entity, set()).add(rank)
        empty = [entity for entity in before if not self._members.get(entity)]
        for entity in empty:
            self._members.pop(entity, None)
        return empty


log = logging.getLogger("fleetpulse.membership")
REMEMBERED = 3600 * SECOND
"""us: how long ends of ranks and jobs are kept, by event time; bounds the memory (chosen)."""


class Membership:
    """Keeps a topology up to date. Memory: a time per rank, and per rank that ended within REMEMBERED."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._links, self._ended = Links(topology), EndedRanks(topology)
        self._reported_at: dict[str, int] = {}
        self._ended_at: dict[str, int] = {}  # rank or job -> when it ended; the first reported first
        self._newest = 0

    def apply_instant(self, instant: Instant) -> Instant:
        """Applies the events of an instant before it is evaluated; returns it with the entities that ended."""
        ended = self.apply_events(instant.events)
        return replace(instant, ended=ended) if ended else instant

    def apply_events(self, events: Iterable[Event]) -> tuple[str, ...]:
        """Applies the events of one instant in order of time; returns the ranks, stages and jobs that ended."""
        take = {"inventory": self.apply_inventories, "job_end": self._end_jobs, "job_start": self._start_jobs}
        mine = [event for event in events if event.kind in take]
        mine.sort(key=lambda e: (e.time, list(take).index(e.kind), e.entity))
        self._drop_old(mine)
        together = groupby(mine, key=lambda e: e.kind)
        return tuple(entity for kind, found in together for entity in take[kind](list(found)))

    def apply_inventories(self, inventories: Sequence[Event]) -> tuple[str, ...]:
        """Applies inventories, together if possible; returns the ranks, stages and jobs that ended."""
        self._merge(inventories)
        for event in inventories:
            known = event.data.get("entities")
            for entity in known if isinstance(known, dict) else ():
                if kind_of(entity) == "rank":
                    self._reported_at[entity] = max(event.time, self._reported_at.get(entity, event.time))
        ended, again = self._ended.remove_ended(inventories)
        # a backlog has the inventories of several runs of a job: its starts and ends are judged later, and all count
        self._drop_times((*ended, *again))
        return ended

    def _merge(self, inventories: Sequence[Event]) -> None:
        """Merges parents and attributes; an inventory that makes a circle is refused and logged.

        Together if possible: each change copies the whole graph, and after an outage all nodes have changes.
        """
        lines = [line for event in inventories for line in parse_inventory(event.data)]
        try:
            self._merge_reported({e: tuple(p) for e, p, _ in lines if p}, {e: a for e, _, a in lines if a})
        except UsageError as error:
            if len(inventories) == 1:
                log.warning("inventory of %s refused: %s", inventories[0].entity, error)
                return
            for event in inventories:
                self._merge([event])

    def _merge_reported(self, parents: Parents, attributes: Mapping[str, Mapping[str, object]]) -> None:
        """Merges what inventories report, below what files of the site say. Raises UsageError on a circle."""
        site, facts = self.topology.site
        self.topology.merge(
            *self._links.join_inventory(
                {e: overlay_parents(site.get(e, ()), p) for e, p in parents.items()},
                {e: {**a, **facts.get(e, {})} for e, a in attributes.items()},
            )
        )

    def change_site(
        self,
        site: tuple[Parents, Mapping[str, Mapping[str, object]]],
        reported: Parents,
        attributes: Mapping[str, Mapping[str, object]],
    ) -> dict[str, str]:
        """Applies new files of the site; returns entity -> reason for lines that make a circle with inventories.

        reported, attributes: what inventories say about the entities whose line in the files changed.
        """
        old, self.topology.site = self.topology.site, site
        changed = [e for e in {**old[0], **site[0]} if old[0].get(e) != site[0].get(e)]
        lines = {e: overlay_parents(site[0].get(e, ()), reported.get(e, ())) for e in changed}
        facts = {e: {**attributes.get(e, {}), **site[1].get(e, {})} for e in {**old[1], **site[1], **lines}}
        gone = [e for e in changed if not lines[e]]
        if gone:
            self.topology.remove_entities(gone)
        lines = {e: above for e, above in lines.items() if above}
        facts = {e: f for e, f in facts.items() if f}
        try:
            self.topology.merge(*self._links.join_inventory(lines, facts))
        except UsageError:
            bad = ParentGraph(self.topology.parents).set_valid(lines)
            good = {e: above for e, above in lines.items() if e not in bad}
            self.topology.merge(*self._links.join_inventory(good, facts))
            return bad
        return {}

    def _start_jobs(self, events: Sequence[Event]) -> tuple[str, ...]:
        """Places the ranks of started jobs, except those with a newer report."""
        try:
            self.topology.merge({entity: over for event in events for entity, over in self._rank_parents(event)})
        except UsageError as error:
            if len(events) == 1:
                log.warning("job_start of %s refused: %s", events[0].entity, error)
            else:
                for event in events:
                    self._start_jobs([event])
        return ()

    def _rank_parents(self, event: Event) -> Iterator[tuple[str, tuple[str, ...]]]:
        """(entity, parents) of the ranks and stages of a job_start."""
        for rank, place in _parse_ranks(event):
            ended = max(self._ended_at.get(name, event.time) for name in (rank, event.entity))
            if max(ended, self._reported_at.get(rank, event.time)) > event.time:
                continue
            self._reported_at[rank] = event.time
            stage, gpu = (_named_entity(place, kind) for kind in ("stage", "gpu"))
            yield rank, self._parents_of_rank(rank, event.entity, stage, gpu)
            if stage is not None:
                yield stage, (event.entity,)

    def _parents_of_rank(self, rank: str, job: str, stage: str | None, gpu: str | None) -> tuple[str, ...]:
        """Parents of a rank, nearest first. What the event does not contain stays, as do further GPUs of the rank."""
        known = self.topology.parents.get(rank, ())
        stages = tuple(e for e in known if kind_of(e) == "stage") if stage is None else (stage,)
        places = tuple(e for e in known if kind_of(e) not in WORK)
        return (*stages, job, *(places if gpu is None or gpu in places else (gpu,)))

    def _end_jobs(self, events: Sequence[Event]) -> tuple[str, ...]:
        """Removes the ranks that ended: those that the event names, else all of its job."""
        parents, above = self.topology.parents, self.topology.ancestors
        ended: dict[str, None] = {}
        for event in events:
            named = event.data.get("ranks")
            self._note_end(event)
            for rank in named if isinstance(named, (list, dict)) else parents:
                if (
                    isinstance(rank, str)
                    and kind_of(rank) == "rank"
                    and event.entity in above(rank)
                    and self._reported_at.get(rank, event.time) <= event.time
                ):
                    ended[rank] = None
        if not ended:
            return ()
        left = {e for rank in ended for e in above(rank) if kind_of(e) in WORK}
        gone = (*ended, *sorted(work for work in left if not self._has_other_ranks(work, ended)))
        self._drop_times(gone)
        self.topology.remove_entities(gone)
        return gone

    def _has_other_ranks(self, work: str, ended: Mapping[str, None]) -> bool:
        return any(kind_of(e) == "rank" and e not in ended for e in self.topology.descendants(work))

    def _note_end(self, event: Event) -> None:
        """Records an end under the ranks that it names, else under its job."""
        named = event.data.get("ranks")
        for entity in named if isinstance(named, (list, dict)) else (event.entity,):
            if isinstance(entity, str):
                since = max(event.time, self._ended_at.pop(entity, event.time))
                self._ended_at[entity] = since

    def _drop_old(self, events: Sequence[Event]) -> None:
        """Drops ends older than REMEMBERED, by event time."""
        self._newest = max(self._newest, max((e.time for e in events), default=0))
        while self._ended_at:
            oldest = next(iter(self._ended_at))
            if self._ended_at[oldest] >= self._newest - REMEMBERED:
                return
            del self._ended_at[oldest]

    def _drop_times(self, ended: Iterable[str]) -> None:
        for entity in ended:
            self._reported_at.pop(entity, None)


def parse_inventory(data: Mapping[str, object]) -> list[tuple[str, list[str], dict[str, object]]]:
    """(entity, parents, attributes) of an inventory event; malformed lines are skipped."""
    found = data.get("entities")
    out: list[tuple[str, list[str], dict[str, object]]] = []
    for entity, line in found.items() if isinstance(found, dict) else ():
        if isinstance(line, dict) and ":" in entity:
            parents, attributes = line.get("parents", []), line.get("attributes", {})
            if isinstance(parents, list) and isinstance(attributes, dict) and all(isinstance(p, str) for p in parents):
                out.append((entity, parents, attributes))
    return out


def _parse_ranks(event: Event) -> list[tuple[str, Mapping[str, object]]]:
    """(rank, its place) of a job_start; malformed lines are skipped."""
    ranks = event.data.get("ranks")
    if kind_of(event.entity) != "job" or not isinstance(ranks, dict):
        return []
    return [(rank, place) for rank, place in ranks.items() if kind_of(rank) == "rank" and isinstance(place, dict)]


def _named_entity(place: Mapping[str, object], kind: str) -> str | None:
    """The entity of that kind, if there is one."""
    found = place.get(kind)
    return found if isinstance(found, str) and found.startswith(f"{kind}:") else None
