"""What is known about both ends of a link together: incidents, events and flaps, each with the end that it is of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape

from dashboards.devices import happened, incident_rows
from dashboards.devices.answers import EntityDetail, EventItem, EventItems, OwnIncident
from dashboards.devices.html import entity_link
from dashboards.time_chart.component import Mark
from dashboards.words import amount
from pipeline.model.entity_names import entity_name

FAR = "Far end: "


@dataclass(frozen=True, slots=True)
class Ends:
    """Both ends. far: None if nothing monitors it. events: of each in the time range, None if they are unknown."""

    here: EntityDetail
    far: EntityDetail | None
    events: EventItems | None
    far_events: EventItems | None = None

    @property
    def entities(self) -> tuple[str, ...]:
        """Returns the monitored ends, this one first."""
        return (self.here.entity, *(() if self.far is None else (self.far.entity,)))

    def far_incidents(self) -> tuple[OwnIncident, ...]:
        """Returns the incidents of the far end that are not of this end too."""
        own = {one.incident.id for one in self.here.incidents}
        return tuple(one for one in (self.far.incidents if self.far else ()) if one.incident.id not in own)


def state_text(ends: Ends) -> str:
    """Returns what the worst unresolved incident says about the link, of the far end if this one has none."""
    far = ends.far_incidents()
    near, there = incident_rows.worst(ends.here.incidents), incident_rows.worst(far)
    chosen = near or there
    if chosen is None:
        return f"No unresolved incidents of {'this end' if ends.far is None else 'either end'}."
    where = "" if chosen is near else FAR
    said = incident_rows.WORDS[chosen.relation]
    said = said[:1].lower() + said[1:] if where else said
    cause = entity_name(chosen.incident.cause)
    return f"{where}{said} {cause}." if chosen.relation == "affected" else f"{where}{said} of an unresolved incident."


def open_lists(ends: Ends, now: int) -> str:
    """Returns the unresolved incidents of this end, then those of the far end, as markup; empty without any."""
    found = incident_rows.open_list(ends.here.incidents, now)
    if ends.far is not None and (there := incident_rows.open_list(ends.far_incidents(), now)):
        found += f'<p class="fp-empty">{escape(FAR)}{entity_link(ends.far.entity)}</p>{there}'
    return found


def past_rows(ends: Ends, now: int) -> list[tuple[str, ...]]:
    """Returns the rows of `incident_rows.past_rows` of both ends, the newest first."""
    both = [("", one) for one in ends.here.incidents] + [(FAR.lower(), one) for one in ends.far_incidents()]
    both.sort(key=lambda pair: -pair[1].incident.onset)
    return [
        (*cells, escape(where) + relation)
        for where, one in both
        for *cells, relation in incident_rows.past_rows([one], now)
    ]


def merge_events(ends: Ends) -> list[EventItem]:
    """Returns the events of both ends, the newest first, each once."""
    found: dict[tuple[int, str, str, str], EventItem] = {}
    for items in (ends.events, ends.far_events):
        for item in items.items if items else ():
            found.setdefault((item.time, item.type, item.entity, item.subject), item)
    return sorted(found.values(), key=lambda item: -item.time)


def marks(ends: Ends, now: int) -> list[Mark]:
    """Returns incidents and events of both ends for the charts; those of the far end say so."""
    found = [*incident_rows.marks(ends.here.incidents, now), *_events(ends.events)]
    own = {(mark.time, mark.text) for mark in found}
    far = [*incident_rows.marks(ends.far_incidents(), now), *_events(ends.far_events)]
    return [*found, *(replace(mark, text=f"{FAR}{mark.text}") for mark in far if (mark.time, mark.text) not in own)]


def _events(known: EventItems | None) -> Sequence[Mark]:
    return happened.marks(known.items) if known else ()


def flap_text(ends: Ends) -> str:
    """Returns how often each end went down in the time range."""
    here = count_flaps(ends.events, ends.here.entity)
    if ends.far is None:
        return here
    return f"this end {here}, far end {count_flaps(ends.far_events, ends.far.entity)}"


def count_flaps(events: EventItems | None, entity: str) -> str:
    """Returns the number of times that an end went down in the time range."""
    if events is None:
        return "flaps unknown"
    downs = sum(_is_down(item, entity) for item in events.items)
    return amount(downs, "flap", "flaps") + (" or more" if events.truncated else "")


def _is_down(item: EventItem, entity: str) -> bool:
    return item.subject == "link_state" and item.data.get("state") == "down" and item.entity == entity


def error_notes(quiet: Iterable[str], unread: Iterable[str] = ()) -> str:
    """Returns the counters without errors at any end, and those that could not be read, as markup; empty without
    any."""
    notes = [("Without errors", ", ".join(quiet)), ("Could not be read, so not known", ", ".join(unread))]
    return "".join(f'<p class="fp-empty">{lead}: {escape(names)}.</p>' for lead, names in notes if names)
