"""Storms: pages or tickets of one kind that become one with the list of them, instead of one each.

A storm is of pages, or of tickets, with the same `alertname` that the same receivers get, each about one device, node,
link or job. So none of them hides one of another kind, one that others get, or one about a unit that many depend on.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from pipeline.incidents.matchers import Matcher
from pipeline.incidents.reach import SPREADS
from pipeline.incidents.silences import STORM_OF, Silence, alert_name
from pipeline.model.records import Incident, Life, Severity
from pipeline.model.topology import Topology, kind_of

STORM = "alert_storm"
MAX_REPRESENTED = 2000
"""Most incidents that a storm lists. Chosen: it bounds the row; `represented` counts on."""
UNITS_OF_MANY = SPREADS | {
    *("building", "facility", "hall", "zone", "region", "block", "core"),
    *("shelf", "circuit", "pump", "reservoir", "filter", "filesystem", "version", "change"),
}
"""Kinds of what many nodes are in, are supplied by, or share."""
StormKey = tuple[str, ...]
"""What the pages of a storm have in common: their `alertname`, with routes the receivers that get them, and TICKETS if
they are tickets."""
TICKETS = ":tickets"
"""Last word of the key of a storm of tickets. No receiver has a name with a colon."""
PageTimes = Mapping[StormKey, tuple[int, ...]]
"""Times of the newest pages (UTC us), by what they have in common."""
_OLD_TITLE = re.compile(r"Alert storm: (\d+) more page")
_NAMES_A_STORM = frozenset({"alertname", "detector", "incident", STORM_OF})


def is_unit_of_many(entity: str, topology: Topology) -> bool:
    """Returns whether more than one node depends on an entity."""
    if kind_of(entity) in UNITS_OF_MANY:
        return True
    return sum(kind_of(below) == "node" for below in topology.descendants(entity)) > 1


def find_key(incident: Incident, topology: Topology, receivers: Collection[str]) -> StormKey | None:
    """Returns of which storm the page or ticket of an incident may be a part; None: it is always sent by itself."""
    if incident.detector == STORM or incident.severity == "watch" or is_unit_of_many(incident.cause, topology):
        return None
    tickets = (TICKETS,) if incident.severity == "ticket" else ()
    return (alert_name(incident.detector), *sorted(receivers), *tickets)


def severity_of(key: StormKey) -> Severity:
    """Returns the severity of a storm, which is that of what it represents."""
    return "ticket" if key[-1:] == (TICKETS,) else "page"  # of an older version it may be empty


def list_receivers(key: StormKey) -> tuple[str, ...]:
    """Returns the receivers that get a storm; none without routes."""
    return tuple(name for name in key[1:] if name != TICKETS)


def count_page(pages: PageTimes, key: StormKey, now: int, most: int, window: int) -> PageTimes:
    """Returns the times with one more page; those that no longer count are left out."""
    kept = {k: times for k, times in pages.items() if 0 <= now - times[-1] < window}
    recent = (t for t in pages.get(key, ())[-most:] if 0 <= now - t < window)
    return {**kept, key: (*recent, now)}


def encode_pages(pages: PageTimes) -> str:
    """Returns the times as they are stored."""
    return json.dumps({"pages_of": [[key, times] for key, times in pages.items()]})


def decode_pages(text: str) -> PageTimes:
    """Returns stored times; an older version counted pages of all kinds together, which count for none."""
    return {tuple(key): tuple(times) for key, times in json.loads(text).get("pages_of", ())}


def change_storm(
    before: Incident | None, new: Incident, pages: Sequence[Incident], listed: Sequence[str], added: int
) -> Incident:
    """Returns a storm with what it lists. new: the id, site and times of a new one.   added: pages more than before."""
    count = added if before is None else count_members(before) + added
    page = new.severity == "page"
    life = replace(
        Life(waits_since=new.updated if page else None) if before is None else before.life, storm=new.life.storm
    )
    return replace(
        new,
        opened=new.opened if before is None else before.opened,
        onset=min(page.onset for page in pages),
        summary=f"Alert storm: {count} more {new.severity}{'s' * (count > 1)}{name_most(pages)}",
        members=tuple(dict.fromkeys(page.cause for page in pages)),
        simulated=all(page.simulated for page in pages),
        life=replace(life, represents=tuple(listed[:MAX_REPRESENTED]), represented=count),
    )


def count_members(incident: Incident) -> int:
    """Returns how many members an incident has; of a storm, how many pages it represents, also those that its list has
    no room for. A storm of an older version has that number only in its title."""
    if incident.detector != STORM:
        return len(incident.members)
    if incident.life.represented:
        return incident.life.represented
    title = _OLD_TITLE.match(incident.summary)
    return int(title[1]) if title else len(incident.life.represents)


def name_most(pages: Sequence[Incident]) -> str:
    """Returns the alert that half or more of the pages of a storm have, for its title; empty if none does."""
    name, number = Counter(alert_name(page.detector) for page in pages).most_common(1)[0]
    return f", {'all' if number == len(pages) else 'mostly'} {name}" if 2 * number >= len(pages) else ""


def may_silence(matchers: Iterable[Matcher], incident: Incident) -> bool:
    """Returns whether matchers that match the labels of an incident silence it. A storm must be named: else one about
    its site, such as of a job there, would silence pages that it does not match."""
    return incident.detector != STORM or any(m.is_equal and m.name in _NAMES_A_STORM for m in matchers)


def silence_storm(
    matching: Iterable[str], storm: Incident, active: Mapping[str, Silence], pages: Iterable[Incident]
) -> tuple[str, ...]:
    """Returns the silences of a storm: those that name it, and those that silence each page that it represents."""
    named = {i for i in matching if may_silence(active[i].matchers, storm)}
    shared = [set(page.life.silenced_by) for page in pages]
    return tuple(sorted(named | (set.intersection(*shared) & active.keys() if shared else set())))
