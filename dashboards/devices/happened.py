"""Events, findings and gaps as rows of a table: what it was, what it means, what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from html import escape
from itertools import groupby
from typing import Any

from dashboards.devices.answers import EventItem
from dashboards.devices.html import entity_link, incident_link
from dashboards.time_chart.component import Mark
from dashboards.words import amount, clock, plain, with_entity_names
from pipeline.model.event_text import describe_facts

MAX_FACTS = 6
"""Facts of an event that are named; more are left out. Chosen."""
MAX_CHANGES = 4
"""Changes of a link that are listed one by one. Chosen: two flaps."""
_TONES = {"fatal": "critical", "critical": "critical", "page": "critical", "ticket": "degraded", "watch": "watch"}
_QUIET = frozenset({"job_start", "job_end", "checkpoint", "gpu_processes", "version", "link_peer", "service"})


def describe(item: EventItem) -> tuple[str, str]:
    """Returns (what, meaning) as text: `XID 79`, `GPU has fallen off the bus. Do: reset GPU, then RMA`."""
    data = item.data
    if item.type == "finding":
        return f"{item.subject} ({data.get('level')})", plain(str(data.get("summary") or ""))
    if item.type == "gap":
        return "Data gap", f"{data.get('messages')} messages of {item.subject} lost: {data.get('cause')}"
    if item.subject in ("xid", "sxid"):
        return _xid(item.subject.upper() if item.subject == "xid" else "SXid", data, item.subject)
    if item.subject == "recovery_action":
        return "Recovery action", f"the driver recommends: {data.get('action')}"
    if item.subject == "collector":
        reason = data.get("reason")
        return f"Collector {data.get('collector')}", f"{data.get('state')}{f': {reason}' if reason else ''}"
    if item.subject == "link_state":
        return "Link", f"{data.get('from')} → {data.get('to') or data.get('state')}"
    return item.subject.replace("_", " ").capitalize(), facts(data)


def _xid(name: str, data: Mapping[str, Any], key: str) -> tuple[str, str]:
    meaning = str(data.get("name") or "meaning unknown")
    advice = ", then ".join(str(data[k]) for k in ("action", "then") if data.get(k))
    who = " (the driver says so)" if data.get("action_source") == "driver" else ""
    root = data.get("root")
    after = f" Consequence of XID {root.get('xid')}." if isinstance(root, dict) and root.get("xid") else ""
    count = data.get("count")
    many = f" {count} times." if isinstance(count, int) and count > 1 else ""
    return f"{name} {data.get(key)}", f"{meaning}.{many}{after}{f' Do: {advice}{who}.' if advice else ''}"


def facts(data: Mapping[str, Any]) -> str:
    """Returns the facts of an event in one line."""
    return with_entity_names(describe_facts(data, MAX_FACTS))


def rows(items: Iterable[EventItem], now: int, about: str = "") -> list[tuple[str, str, str, str]]:
    """Returns cells (markup): time, entity, what, meaning. about: entity whose name is left out.

    More than MAX_CHANGES changes of one link without another event between them are one row.
    """
    found = []
    for group in _group_changes(items):
        item = group[0]
        what, meaning = describe(item)
        if len(group) > 1:
            downs = sum(one.data.get("state") == "down" for one in group)
            what, meaning = (
                f"Link: {amount(downs, 'flap', 'flaps')}",
                f"since {clock(group[-1].time, now)}; last {meaning}",
            )
        incident = item.data.get("incident")
        shown = incident_link(str(incident), what) if item.type == "finding" and incident else escape(what)
        entity = "" if item.entity == about else entity_link(item.entity)
        found.append((escape(clock(item.time, now)), entity, shown, escape(meaning)))
    return found


def _group_changes(items: Iterable[EventItem]) -> Iterator[list[EventItem]]:
    """Yields single events, and runs of more than MAX_CHANGES changes of one link."""
    for (entity, is_link), run in groupby(items, key=lambda item: (item.entity, item.subject == "link_state")):
        group = list(run)
        if is_link and entity and len(group) > MAX_CHANGES:
            yield group
        else:
            yield from ([one] for one in group)


def marks(items: Iterable[EventItem], most: int = 60) -> list[Mark]:
    """Returns the events and gaps that charts mark, the newest ones; findings are marked by their incidents."""
    found = []
    for item in items:
        if item.data.get("state") == "up" and item.subject == "link_state":
            continue
        if item.type == "finding" or item.subject in ("collector", "gpu_processes", "service"):
            continue
        what, meaning = describe(item)
        tone = _TONES.get(str(item.data.get("severity")), "muted" if item.subject in _QUIET else "degraded")
        text = f"{what}: {meaning}" if len(meaning) < 90 else f"{what}: {meaning[:88]}…"
        found.append(Mark(item.time, text, "no_data" if item.type == "gap" else tone))
    return found[:most]
