"""The life of incidents: what people and the clock do to them, beside the findings that open and end them.

The Desk decides which findings are one incident, by event time. This book adds, by the clock: acknowledgements that
expire, silences, storms, escalation, and ends that are held back while an incident flaps or nothing could show it. It
turns the changes of the Desk into those that people see. Each is a row of the history, whose incident has the life
after it: the newest row is the state, so that a restart continues from the store.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from pipeline.config.sections import Incidents
from pipeline.incidents import lives, storms
from pipeline.incidents.cases import derive_id
from pipeline.incidents.changes import QUIET_END, Change, ChangeKind
from pipeline.incidents.desk import ACTOR, QUIET_PERIOD
from pipeline.incidents.lives import WORSE, has_new_labels, is_open_again, restart_wait, show, unacknowledge
from pipeline.incidents.silences import Silence, collect_labels, find_matching
from pipeline.incidents.storms import STORM, PageTimes, StormKey
from pipeline.model.errors import Refused
from pipeline.model.records import SECOND, Incident, Life
from pipeline.model.topology import Topology, kind_of

KEPT = 7200 * SECOND
"""Time for which the life of a resolved incident is kept in memory. Chosen: longer than any but a slow GPU, which may
return after a day, needs to return; its returns count anew then."""
_PAGING: frozenset[ChangeKind] = frozenset({"opened", "reopened", "severity_raised"})
_MINUTE, _HOUR = 60 * SECOND, 3600 * SECOND


@dataclass
class PageCount:
    """The pages of one step. inhibited: incidents of which receivers get no page now.   joined: those that a storm
    represents from now on.   left: by storm, those that it no longer represents."""

    inhibited: Collection[str] = ()
    joined: dict[StormKey, list[str]] = field(default_factory=dict)
    left: dict[str, set[str]] = field(default_factory=dict)


@dataclass
class LifeBook:
    """The life of every open and recently resolved incident.

    shown: incidents as people see them, by id.   silences: those that have not ended.   pages: times of the newest
    pages.   due: when `advance` has something to do next.   find_inhibited: incidents -> those that a rule of the
    receivers inhibits, by (incident, rule); None without rules.   list_receivers: incident -> the receivers to which
    routes lead it.
    """

    rules: Incidents
    topology: Topology
    site: str = "local"
    shown: dict[str, Incident] = field(default_factory=dict)
    silences: list[Silence] = field(default_factory=list)
    pages: PageTimes = field(default_factory=dict)
    due: int = 0
    _busy_since: dict[str, int] = field(default_factory=dict)
    _storms: dict[StormKey, str] = field(default_factory=dict)
    find_inhibited: Callable[[Iterable[Incident]], Mapping[str, tuple[str, str]]] | None = None
    list_receivers: Callable[[Incident], Collection[str]] = lambda incident: ()

    def load(self, incidents: Iterable[Incident]) -> None:
        """Takes over the stored incidents at a start, in the order in which they opened."""
        self.shown = {incident.id: incident for incident in sorted(incidents, key=lambda i: (i.opened, i.id))}
        self._storms = {i.life.storm: i.id for i in self._open() if i.detector == STORM}

    def copy_state(self) -> tuple[dict[str, Incident], list[Silence], PageTimes, int]:
        """Returns what `restore_state` needs. Incidents are replaced, never changed."""
        return dict(self.shown), list(self.silences), self.pages, self.due

    def restore_state(self, state: tuple[dict[str, Incident], list[Silence], PageTimes, int]) -> None:
        """Returns to an earlier state."""
        self.shown, self.silences, self.pages, self.due = state

    # --- changes of the Desk and of people ----------------------------------------------------------

    def publish(self, changes: Iterable[Change], now: int) -> list[Change]:
        """Returns the changes as people see them, with those that follow from them, in order."""
        made, changes = list[Change](), list(changes)
        pages = PageCount(self._list_inhibited(changes, now) if changes else ())  # most instants change nothing
        for change in changes:
            made += self._publish_one(change, now, pages)
        merged = {c.incident.id for c in made if c.kind == "resolved" and c.folded_into is not None}
        made += self._follow_up(pages, now, merged)
        times = (self._list_due(self.shown[change.incident.id], now) for change in made)
        self.due = min(itertools.chain((self.due,), *times))
        return made

    def _publish_one(self, change: Change, now: int, pages: PageCount) -> list[Change]:
        before = None if change.before is None else self.shown.get(change.incident.id, change.before)
        life = was = Life() if before is None else before.life
        change = self._hold_open(change, life, now)
        kind, life = self._next_life(change, before, life, now)
        if has_new_labels(change.incident, before):
            life = replace(life, escalation=0)  # those of its steps were sent the end of the old alert alone
        if kind == "reopened":
            life = self._leave_old_storm(life)
        if change.split_from is not None and (left := self.shown.get(change.split_from)) is not None:
            life = replace(life, acknowledged_by=left.life.acknowledged_by, assignee=left.life.assignee)
            waits = None if left.life.acknowledged_by else life.waits_since
            life = replace(life, acknowledged_until=left.life.acknowledged_until, waits_since=waits)
        shown = self._suppress(show(change.incident, life), now)
        is_replaced = shown.id in pages.inhibited and has_new_labels(shown, before)
        if kind in _PAGING or is_open_again(shown, before) or is_replaced or self._is_in_other_storm(shown):
            shown = self._count_page(shown, now, pages)
        self.shown[shown.id] = shown
        made = replace(change, kind=kind, incident=shown, before=before)
        return [made, *self._tell_left(shown, pages, now), *self._explain_suppression(shown, was, now)]

    def _next_life(self, change: Change, before: Incident | None, life: Life, now: int) -> tuple[ChangeKind, Life]:
        """Returns the kind of the change as people see it, and the life after it."""
        incident, kind = change.incident, change.kind
        members, page = storms.count_members(incident), incident.severity == "page"
        waits = now if page else None
        if change.life:
            life = replace(life, **change.life)
        if kind in ("opened", "severity_raised"):
            return kind, replace(unacknowledge(life), waits_since=waits, escalation=0, told=members)
        if kind == "reopened":
            life = replace(life, returned=(*self._recent_returns(life, now), now), held_until=None)
            if before is not None and before.resolved is None:
                if (news := lives.find_worse(change, before, members)) is None:
                    return "returned", life
                kind = news
            return kind, replace(unacknowledge(life), waits_since=waits, escalation=0, told=members)
        if kind == "acknowledged":
            return kind, replace(life, waits_since=None, escalation=0, told=members)
        if kind == "split":  # fewer members, and perhaps no page any more
            return kind, replace(life, told=min(life.told, members), waits_since=life.waits_since if page else None)
        if kind in ("updated", "cause_changed") and life.acknowledged_by and members >= max(WORSE * life.told, 2):
            worse = replace(unacknowledge(life), waits_since=waits, escalation=0, told=members)
            return ("worsened" if kind == "updated" else kind), worse
        if kind == "resolved":
            life = replace(life, waits_since=None, held_until=None, merged_into=change.folded_into or "")
        return kind, life

    # --- ends that are held back --------------------------------------------------------------------

    def _hold_open(self, change: Change, life: Life, now: int) -> Change:
        """Returns an end without findings as `held_open`, if the incident flaps, or no job could show it."""
        if change.kind != "resolved" or change.actor != ACTOR or change.folded_into is not None:
            return change
        if change.comment != QUIET_END:
            return change
        if (times := len(self._recent_returns(life, now))) >= self.rules.flaps:
            until = now + int(self.rules.flap_minutes * _MINUTE)
            why = f"flaps: returned {times} times within {self.rules.flap_hours:g} h, stays open until quiet for longer"
        elif self.rules.idle_hours and self._lost_its_job(change.incident):
            until = now + int(self.rules.idle_hours * _HOUR)
            why = "its job ended: open until another job shows the GPU as normal"
        else:
            return change
        open_ = replace(change.incident, resolved=None)
        return replace(change, kind="held_open", incident=open_, comment=why, life={"held_until": until})

    def _lost_its_job(self, incident: Incident) -> bool:
        """Returns whether it is a slow GPU of which only ranks of ended jobs were slow."""
        return lives.is_shown_by_ranks(incident, self.topology.parents)

    def _recent_returns(self, life: Life, now: int) -> tuple[int, ...]:
        return lives.list_returns(life, now, int(self.rules.flap_hours * _HOUR))

    def _has_job(self, gpu: str) -> bool:
        return any(kind_of(e) == "rank" for e in self.topology.descendants(gpu))

    # --- silences -----------------------------------------------------------------------------------

    def _suppress(self, incident: Incident, now: int) -> Incident:
        """Returns the incident with the silences that match it now. One that begins ends its alert everywhere, so that
        the steps of escalation begin again when it ends."""
        if incident.resolved is not None:
            return incident
        ids: tuple[str, ...] = ()
        if self.silences:
            ids = find_matching(self.silences, collect_labels(incident, self.topology, self.site), now)
        if self.silences and incident.detector == STORM:
            active = {s.id: s for s in self.silences if s.state(now) == "active"}
            ids = storms.silence_storm(ids, incident, active, self.list_pages(incident.id))
        if ids == incident.life.silenced_by:
            return incident
        return restart_wait(show(incident, replace(incident.life, silenced_by=ids, escalation=0)), now)

    def _explain_suppression(self, shown: Incident, was: Life, now: int) -> Iterator[Change]:
        """Yields rows of the history that say by what an incident is held back, or that it no longer is."""
        if shown.resolved is not None:
            return
        yield from self._tell_silences(shown, was, now)
        if shown.life.inhibited_by and not was.inhibited_by:
            yield Change("inhibited", shown, now, ACTOR, f"part of {', '.join(shown.life.inhibited_by)}", (), shown)

    def _tell_silences(self, shown: Incident, was: Life, now: int) -> Iterator[Change]:
        if shown.life.silenced_by and shown.life.silenced_by != was.silenced_by:
            known = {s.id: s for s in self.silences}
            why = "; ".join(
                f"{known[i].kind} {i} of {known[i].author}: {known[i].reason}" for i in shown.life.silenced_by
            )
            heard = show(shown, replace(shown.life, silenced_by=was.silenced_by))
            yield Change("silenced", shown, now, ACTOR, why, (), heard)
        elif was.silenced_by and not shown.life.silenced_by:
            held = show(shown, replace(shown.life, silenced_by=was.silenced_by))
            yield Change("unsilenced", shown, now, ACTOR, self._describe_ended(was.silenced_by), (), held)

    def _describe_ended(self, silences: Iterable[str]) -> str:
        """Returns which silences no longer cover an incident: `silence 5c9b of ada ended: new cable`."""
        known = {s.id: s for s in self.silences}
        found = ((i, known.get(i)) for i in silences)
        return "; ".join(
            f"silence {i} ended" if s is None else f"{s.kind} {i} of {s.author} ended: {s.reason}" for i, s in found
        )

    # --- inhibition ---------------------------------------------------------------------------------

    def _list_inhibited(self, changes: Sequence[Change] = (), now: int = 0) -> Collection[str]:
        """Returns the incidents that rules inhibit once the changes are made, in whatever order they come."""
        if self.find_inhibited is None:
            return ()
        after = {incident.id: incident for incident in self._open()}
        for change in changes:
            known = self.shown.get(change.incident.id, change.before)
            after[change.incident.id] = self._hold_open(change, Life() if known is None else known.life, now).incident
        return self.find_inhibited(i for i in after.values() if i.resolved is None).keys()

    def _follow_up(self, pages: PageCount, now: int, merged: AbstractSet[str] = frozenset()) -> Iterator[Change]:
        """Yields what follows from changes: inhibitions that begin and end, and the storm of the pages."""
        yield from self._update_inhibitions(pages, now)
        made = list(self._update_storms(pages, now, merged))
        yield from made
        if any(change.kind in ("opened", "resolved") for change in made):  # a rule may have the storm as its source
            again = PageCount()
            yield from self._update_inhibitions(again, now)
            yield from self._update_storms(again, now)

    def _update_inhibitions(self, pages: PageCount, now: int) -> Iterator[Change]:
        """Yields rows of the history that say which rule inhibits an incident from now on, or no longer does. A page
        that waited for that counts now."""
        found = {} if self.find_inhibited is None else self.find_inhibited(self._open())
        for before in list(self._open()):
            source, rule = found.get(before.id, ("", ""))
            was = before.life
            if (source, rule) == (was.inhibitor, was.inhibit_rule):
                continue
            shown = show(before, replace(was, inhibitor=source, inhibit_rule=rule))
            if not source:
                shown = restart_wait(shown, now)
            if was.page_waits and not source and shown.state != "acknowledged":
                shown = self._count_page(shown, now, replace(pages, inhibited=()))
            self.shown[before.id] = shown
            kind: ChangeKind = "inhibited" if source else "uninhibited"
            why = f"by {source} ({rule})" if source else f"{was.inhibitor} no longer does ({was.inhibit_rule})"
            yield Change(kind, shown, now, ACTOR, why, (), before)
            yield from self._explain_suppression(shown, was, now)

    # --- storms -------------------------------------------------------------------------------------

    def _count_page(self, incident: Incident, now: int, pages: PageCount) -> Incident:
        """Counts a page that receivers would get; returns it as a part of the storm if one represents it. While a rule
        inhibits it they do not get it: it waits, and counts when that ends, and the acknowledgement that it has by
        then."""
        waits = incident.id in pages.inhibited
        if self._is_in_other_storm(incident):
            pages.left.setdefault(incident.life.inhibited_by[0], set()).add(incident.id)
            incident = restart_wait(replace(incident, life=replace(incident.life, inhibited_by=())), now)
        incident = show(incident, replace(incident.life, page_waits=waits))
        key = None if waits else self._find_storm(incident, now)
        if key is None:
            return incident
        pages.joined.setdefault(key, []).append(incident.id)
        return show(incident, replace(incident.life, inhibited_by=(self._storm_id(key, now),)))

    def _tell_left(self, shown: Incident, pages: PageCount, now: int) -> Iterator[Change]:
        for storm, left in pages.left.items():
            if shown.id in left:
                yield Change("uninhibited", shown, now, ACTOR, f"no part of {storm} any more", (), shown)

    def _find_key(self, incident: Incident) -> StormKey | None:
        return storms.find_key(incident, self.topology, self.list_receivers(incident))

    def _is_in_other_storm(self, incident: Incident) -> bool:
        """Returns whether a storm represents an incident that is of another kind by now, or goes to others."""
        if incident.state != "open" or not incident.life.inhibited_by:
            return False
        storm = self.shown.get(incident.life.inhibited_by[0])
        has_key = storm is not None and storm.resolved is None and bool(storm.life.storm)
        return has_key and storm is not None and storm.life.storm != self._find_key(incident)

    def _leave_old_storm(self, life: Life) -> Life:
        """Returns the life of an incident that returned, without a storm that has ended or no longer lists it."""
        is_listed = any(map(self._is_open, life.inhibited_by)) and not life.merged_into
        return replace(life, inhibited_by=life.inhibited_by if is_listed else (), merged_into="")

    def _find_storm(self, incident: Incident, now: int) -> StormKey | None:
        """Counts a page that receivers get; returns which storm represents it, None if none does."""
        if incident.state != "open" or incident.life.inhibited_by:
            return None
        if (key := self._find_key(incident)) is None:
            return None
        most = self.rules.storm_pages if incident.severity == "page" else self.rules.storm_tickets
        self.pages = storms.count_page(self.pages, key, now, most, int(self.rules.storm_minutes * _MINUTE))
        return key if len(self.pages[key]) > most else None

    def _open_storm(self, key: StormKey) -> Incident | None:
        found = self.shown.get(self._storms.get(key, ""))
        return found if found is not None and found.resolved is None else None

    def _storm_id(self, key: StormKey, now: int) -> str:
        storm = self._open_storm(key)
        self._storms[key] = derive_id(STORM, self.site, *key, str(now)) if storm is None else storm.id
        return self._storms[key]

    def list_pages(self, storm: str) -> Iterator[Incident]:
        """Yields the open incidents that a storm represents, also what its list has no room for."""
        return (incident for incident in self._open() if storm in incident.life.inhibited_by)

    def _update_storms(self, pages: PageCount, now: int, merged: AbstractSet[str] = frozenset()) -> Iterator[Change]:
        for key in list(self._storms):
            yield from self._update_storm(key, pages, now, merged)

    def _update_storm(self, key: StormKey, pages: PageCount, now: int, merged: AbstractSet[str]) -> Iterator[Change]:
        """Yields the changes of the storm that some pages joined, that others left as they were merged into another
        incident, or that ended with the last of them."""
        before, joined = self._open_storm(key), pages.joined.get(key, [])
        left = set[str]()
        if before is not None:
            left = {i for i in merged - {*joined} if before.id in self.shown[i].life.inhibited_by}
            left |= pages.left.get(before.id, set())
        joined = [i for i in joined if i not in merged]
        stays = before is not None and any(i in self.shown for i in before.life.represents if i not in left)
        if joined or (left and stays):
            yield from self._change_storm(key, joined, left, now)
        if (storm := self._open_storm(key)) is None:
            return
        if not joined and self._has_ended(storm):
            ended = show(replace(storm, resolved=now, updated=now), replace(storm.life, waits_since=None))
            self.shown[ended.id] = ended
            yield Change("resolved", ended, now, ACTOR, "all its incidents are resolved", (), storm)
        elif (shown := self._suppress(storm, now)) is not storm:
            self.shown[shown.id] = shown
            yield from self._explain_suppression(shown, storm.life, now)

    def _has_ended(self, storm: Incident) -> bool:
        """Returns whether nothing that a storm represents is open."""
        if any(self._is_open(i) and storm.id in self.shown[i].life.inhibited_by for i in storm.life.represents):
            return False
        return next(self.list_pages(storm.id), None) is None

    def _is_open(self, id_: str) -> bool:
        return id_ in self.shown and self.shown[id_].resolved is None

    def _change_storm(self, key: StormKey, joined: Sequence[str], left: Collection[str], now: int) -> Iterator[Change]:
        before, where = self._open_storm(key), f"site:{self.site}"
        known, told = ((), 0) if before is None else (before.life.represents, before.life.told)
        listed = tuple(i for i in dict.fromkeys((*known, *joined)) if i not in left)
        new = Incident(
            *(self._storm_id(key, now), where, now, now, storms.severity_of(key), "", STORM, where, ()),
            updated=now,
            life=Life(storm=key),
        )
        shown = [self.shown[i] for i in listed if i in self.shown]
        incident = storms.change_storm(before, new, shown, listed, len(joined) - len(left))
        life = incident.life
        kind: ChangeKind = "opened" if before is None else "updated"
        if has_new_labels(incident, before):
            life = replace(life, escalation=0)
        number = storms.count_members(incident)
        if before is None or (joined and number >= WORSE * told):
            page = incident.severity == "page"
            waits, steps = (now if page else None, 0) if life.acknowledged_by else (life.waits_since, life.escalation)
            life = replace(unacknowledge(life), told=number, waits_since=waits, escalation=steps)
            kind = "opened" if before is None else "worsened"
        made = self._suppress(show(incident, life), now)
        self.shown[made.id] = made
        yield Change(kind, made, now, ACTOR, "", (), before)
        yield from self._explain_suppression(made, Life() if before is None else before.life, now)

    # --- the clock ----------------------------------------------------------------------------------

    def advance(self, now: int) -> list[Change]:
        """Returns the changes that are due: acknowledgements and silences that ended, escalation, held-back ends."""
        if now < self.due:
            return []
        self.silences = [s for s in self.silences if s.state(now) != "expired"] + [
            s
            for s in self.silences
            if s.state(now) == "expired" and any(s.id in i.life.silenced_by for i in self._open())
        ]
        pages = PageCount(self._list_inhibited())
        made = [change for incident in list(self._open()) for change in self._advance_one(incident, now, pages)]
        self.silences = [s for s in self.silences if s.state(now) != "expired"]
        made += self._follow_up(pages, now)
        self._forget(now)
        self.due = self._next_due(now)
        return made

    def _open(self) -> Iterator[Incident]:
        return (i for i in self.shown.values() if i.resolved is None)

    def _advance_one(self, before: Incident, now: int, pages: PageCount) -> Iterator[Change]:
        life = before.life
        shown = self._suppress(before, now)
        if shown is not before:
            if is_open_again(shown, before):
                shown = self._count_page(shown, now, pages)
            self.shown[shown.id] = shown
            yield from self._explain_suppression(shown, life, now)
        if shown.life.acknowledged_until is not None and shown.life.acknowledged_until <= now:
            yield from self._expire_acknowledgement(shown, now, pages)
        held_until = self._end_of_hold(self.shown[shown.id], now)
        if held_until is not None and held_until <= now:
            yield self._end_held(self.shown[shown.id], now)
        yield from self._escalate(self.shown[shown.id], now)

    def _expire_acknowledgement(self, before: Incident, now: int, pages: PageCount) -> Iterator[Change]:
        waits = now if before.severity == "page" else None
        life = replace(unacknowledge(before.life), waits_since=waits, escalation=0, told=storms.count_members(before))
        shown = self._count_page(show(replace(before, updated=now), life), now, pages)
        self.shown[shown.id] = shown
        why = f"acknowledgement of {before.life.acknowledged_by} ended"
        yield Change("acknowledgement_expired", shown, now, ACTOR, why, (), before)
        yield from self._explain_suppression(shown, before.life, now)

    def _end_of_hold(self, incident: Incident, now: int) -> int | None:
        """Returns when a held-back end is due: as planned, or after a quiet time of another job on the slow GPU."""
        until = incident.life.held_until
        if until is None or not self._lost_its_job(incident) or not self._has_job(incident.cause):
            return until
        return min(until, self._busy_since.setdefault(incident.id, now) + QUIET_PERIOD)

    def _end_held(self, before: Incident, now: int) -> Change:
        life = replace(before.life, held_until=None, waits_since=None)
        shown = self.shown[before.id] = show(replace(before, resolved=max(now, before.opened), updated=now), life)
        return Change("resolved", shown, now, ACTOR, "quiet for long enough", (), before)

    def _escalate(self, before: Incident, now: int) -> Iterator[Change]:
        """Yields the steps of escalation that are due for a page that still waits for a person."""
        life, steps = before.life, self.rules.escalation
        while (
            before.state == "open" and not before.is_held_back and not life.inhibitor and life.waits_since is not None
        ):
            if life.escalation >= len(steps) or now < life.waits_since + self._wait_of(life.escalation):
                return
            step, life = steps[life.escalation], replace(life, escalation=life.escalation + 1)
            shown = self.shown[before.id] = show(before, life)
            why = f"step {life.escalation} after {step.after_minutes:g} min: {', '.join(step.receivers)}"
            yield Change("escalated", shown, now, ACTOR, why, (), before, receivers=step.receivers)
            before = shown

    def _wait_of(self, step: int) -> int:
        return int(self.rules.escalation[step].after_minutes * _MINUTE)

    def _next_due(self, now: int) -> int:
        """Returns the time of the next thing to do."""
        times = [now + _HOUR]
        times += [t for s in self.silences for t in (s.starts, s.end) if t > now]
        return min(itertools.chain(times, *(self._list_due(incident, now) for incident in self._open())))

    def _list_due(self, incident: Incident, now: int) -> list[int]:
        """Returns when something is to be done to an incident."""
        life = incident.life
        times = [t for t in (life.acknowledged_until, life.held_until) if t is not None]
        if life.held_until is not None:
            times.append(now + _MINUTE)  # a job may begin
        waits = incident.state == "open" and not incident.is_held_back and not life.inhibitor
        if waits and life.waits_since is not None and life.escalation < len(self.rules.escalation):
            times.append(life.waits_since + self._wait_of(life.escalation))
        return times

    def _forget(self, now: int) -> None:
        """Drops incidents resolved long ago; the store keeps it."""
        old = [i.id for i in self.shown.values() if i.resolved is not None and now - max(i.resolved, i.updated) > KEPT]
        for id_ in old:
            del self.shown[id_]
        self._busy_since = {id_: t for id_, t in self._busy_since.items() if self._is_open(id_)}

    # --- what people do, beside the Desk ------------------------------------------------------------

    def note(self, id_: str, kind: ChangeKind, user: str, comment: str, now: int, **life: object) -> Change:
        """Returns the change of an open or recently resolved incident that a person made, for `publish`."""
        before = self.shown[id_]
        return Change(kind, replace(before, updated=now), now, user, comment, (), before, life=life)

    def end(self, id_: str, user: str, comment: str, now: int) -> Change:
        """Returns the end by a person of an incident of which the findings have ended. Raises Refused for a storm."""
        before = self.shown[id_]
        if before.detector == STORM:
            raise Refused(f"incident {id_}: a storm ends with the incidents that it lists; acknowledge it")
        ended = replace(before, resolved=max(now, before.opened), updated=now)
        return Change("resolved", ended, now, user, comment, (), before)

    def acknowledged_until(self, incident: Incident, now: int) -> int | None:
        """Returns when an acknowledgement of now expires by default; None: never."""
        page = incident.severity == "page"
        hours = self.rules.acknowledge_hours if page else self.rules.acknowledge_ticket_hours
        return now + int(hours * _HOUR) if hours else None
