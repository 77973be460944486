"""`/incidents?state=&q=&filter=&sort=&group=`: the incidents, filtered and in pages; acts on a selection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import streamlit as st

from dashboards import identity, markup, routes, snapshot
from dashboards.acting import ConflictError, Outcome, write_to_incident
from dashboards.client import ApiError
from dashboards.incident_list.component import selectable_list
from dashboards.links import Link, as_markup
from dashboards.list_query import GROUPS, PER_PAGE, SHOWN, SORTS, ListQuery, parse_query
from dashboards.people_answers import IncidentPage, parse_incident_page
from dashboards.views import fleet, parts, silencing
from dashboards.views.form_popover import close_popover, draw_failure, draw_outcome, draw_popover, keep_failure
from dashboards.views.parts import statement, unknown_since
from dashboards.words import amount, plain
from pipeline.model.entity_names import entity_name
from pipeline.model.records import Incident

_RESULT = "fleetpulse.list.result"
About = tuple[str, int | None]
"""Id of an incident, and the version that the person saw; None: the API does not list it."""
VIEWS: tuple[tuple[str, ListQuery], ...] = (
    ("Not acknowledged", ListQuery(show="pending")),
    ("Critical, by rack", ListQuery(matchers=('severity="critical"',), group="rack")),
    ("By job", ListQuery(group="job")),
    ("By cause, most members first", ListQuery(group="cause", sort="members")),
    ("Silenced, by detector", ListQuery(show="silenced", group="detector")),
    ("Resolved, newest first", ListQuery(show="resolved", sort="newest")),
)
"""Views that every site needs; others are bookmarks of the address."""
SAVE_VIEW = "All filters are in the address: bookmark this page to save a view of your own; send the link to share it."


def page() -> None:
    """Draws the page."""
    parts.draw_refreshing(_body)


def _body() -> None:
    query, answer = _fetch()
    found = answer.value
    text = "Incidents" if found is None else headline(found.counts, query)
    parts.draw_head(text, [], "", answer, of_now=found is not None)
    parts.draw_error(answer)
    _tabs(query, None if found is None else found.counts)
    _filters(query)
    if found is None:
        return
    bar = st.container()
    titles = {i.id: plain(i.summary) for i in found.incidents}
    may = identity.may_write("incidents/ID/acknowledge")
    selected = selectable_list(
        found.incidents,
        answer.fetched,
        f"incidents-{query.show}",
        _group_headings(query, found),
        found.reach,
        (lambda one: _acknowledge([(one, found.versions.get(one))], titles.get(one, one))) if may else None,
        lambda: _switch_mine(query),
    )
    with bar:
        _bulk([i for i in found.incidents if i.id in selected], found, answer)
        if not found.incidents:
            _draw_empty(query, answer)
    _pages(query, found.total)


def _fetch() -> tuple[ListQuery, snapshot.CachedAnswer[IncidentPage]]:
    """Returns what the address asks for, and its incidents. A page after the last one shows the first one."""
    query = parse_query(st.query_params.to_dict(), st.query_params.get_all("filter"))
    answer = snapshot.fetch(parse_incident_page, "incidents", **query.api_parameters())
    found = answer.value
    if found is None or found.incidents or not found.total or query.page == 1:
        return query, answer
    routes.change_query(page="")
    query = replace(query, page=1)
    return query, snapshot.fetch(parse_incident_page, "incidents", **query.api_parameters())


def _switch_mine(query: ListQuery) -> None:
    """Shows only the incidents of the person who looks, or those of all again."""
    who = identity.current()
    own = "" if isinstance(who, identity.Stranger) else who.name
    routes.change_query(assignee="" if query.assignee == own else own, page="")


def headline(counts: Mapping[str, int], query: ListQuery) -> str:
    """Returns the number of unresolved incidents, and how many of them have no owner."""
    if "unresolved" not in counts:
        return "Incidents"
    unresolved, pending = counts.get("unresolved", 0), counts.get("pending", 0)
    matching = f" that match{'es' if unresolved == 1 else ''}" if query.is_filtered else ""
    if not unresolved:
        return f"No unresolved incidents{matching}"
    text = f"{amount(unresolved, 'unresolved incident', 'unresolved incidents')}{matching}"
    return f"{text}, {pending:,} not acknowledged" if pending else f"{text}, all acknowledged or silenced"


def _tabs(query: ListQuery, counts: Mapping[str, int] | None) -> None:
    """Draws the tabs with their counts, if they are known; they are links, and the address decides.

    An older API has no count of some tabs.
    """
    number = {name: f" <b>{count:,}</b>" for name, count in (counts or {}).items()}
    tabs = "".join(
        f'<a class="fp-tab{" fp-tab-on" * (name == query.show)}" href="{markup.quoted(query.href(show=name))}" '
        f'target="_self"{" aria-current=page" * (name == query.show)}>{title}{number.get(name, "")}</a>'
        for name, title in SHOWN.items()
    )
    st.html(f'<nav class="fp-tabs" aria-label="States">{tabs}</nav>')


def _filters(query: ListQuery) -> None:
    row = st.container(horizontal=True, vertical_alignment="center")
    row.text_input(
        "Search",
        value=query.text,
        key=f"list-q-{query.text}",
        placeholder="Words in title, cause, detector, person",
        label_visibility="collapsed",
        on_change=_write,
        args=("q", f"list-q-{query.text}"),
        width=300,
    )
    if box := draw_popover(row, "Filter and sort", "list-filter"):
        with box:
            _filter_form(query)
    if views := draw_popover(row, "Views", "list-views"):
        with views:
            links = [(Link(name, view.href()),) for name, view in VIEWS]
            st.html(markup.table(("Views",), links, ""))
            st.html(markup.empty(SAVE_VIEW))
    if chips := _active(query):
        st.html(f'<div class="fp-chips">{"".join(chips)}</div>')


def _filter_form(query: ListQuery) -> None:
    """Draws matchers, assignee, order and groups; each change is written into the address."""
    with st.form("list-form", border=False):
        matchers = st.text_area(
            "Matchers, one a line",
            "\n".join(query.matchers),
            height=90,
            placeholder='rack="r12"\nseverity=~"critical|warning"',
            help="As in Alertmanager and in silences: = != =~ !~",
        )
        assignee = st.text_input("Assigned to or acknowledged by", query.assignee)
        sort = st.selectbox("Sort", list(SORTS), list(SORTS).index(query.sort), format_func=lambda k: SORTS[k])
        group = st.selectbox("Group by", list(GROUPS), list(GROUPS).index(query.group), format_func=lambda k: GROUPS[k])
        if st.form_submit_button("Show", type="primary"):
            lines = silencing.split_matchers(matchers)
            asked = {"assignee": assignee.strip(), "sort": sort or "", "group": group or "", "page": ""}
            routes.change_query(filter=lines, **asked)
            st.rerun(scope="fragment")


def _write(name: str, key: str) -> None:
    routes.change_query(**{name: str(st.session_state.get(key) or "").strip(), "page": ""})


def _active(query: ListQuery) -> list[str]:
    """Returns a chip per active filter; its link removes it."""
    found = [(f'"{query.text}"', query.href(text=""))] if query.text else []
    found += [(m, query.href(matchers=tuple(n for n in query.matchers if n != m))) for m in query.matchers]
    if query.assignee:
        found.append((f"person {query.assignee}", query.href(assignee="")))
    if query.group:
        found.append((f"by {GROUPS[query.group].lower()}", query.href(group="")))
    return [f'<span class="fp-chip">{as_markup(Link(f"{text} ✕", href, "Remove"))}</span>' for text, href in found]


def _draw_empty(query: ListQuery, answer: snapshot.CachedAnswer[IncidentPage]) -> None:
    since = unknown_since(answer, snapshot.fetch_fleet_of(), snapshot.now())
    what = "No incidents match these filters." if query.is_filtered else "No incidents in this state."
    known = snapshot.fetch_fleet_of().value
    if since is None:
        last = what + (f" {fleet.reporting(known)}." if known else "")
    else:
        last = statement(what[:1].lower() + what[1:], since, snapshot.now())
    st.html(markup.notice(last, "quiet" if since is None else "degraded", of_now=since is None))
    if query.is_filtered:
        st.html(f'<p class="fp-empty">{as_markup(Link("Remove all filters", ListQuery(show=query.show).href()))}</p>')


def _group_headings(query: ListQuery, found: IncidentPage) -> dict[str, str]:
    """Returns incident -> heading of its group, with the number of incidents in it."""
    if not query.group:
        return {}
    totals = dict(found.groups)
    headings = {}
    for incident in found.incidents:
        value = next(iter(found.labels.get(incident.id, {}).get(query.group, ())), "")
        if not value:
            name = f"no common {GROUPS[query.group].lower()}"
        else:
            name = entity_name(value) if query.group in ("cause",) else f"{GROUPS[query.group]} {value}"
        headings[incident.id] = f"{name}: {amount(totals.get(value, 0), 'incident', 'incidents')}"
    return headings


def _pages(query: ListQuery, total: int) -> None:
    """Draws links to the page before and after."""
    if total <= PER_PAGE:
        return
    last = -(-total // PER_PAGE)
    first = (query.page - 1) * PER_PAGE
    texts = [f"{first + 1:,} to {min(total, first + PER_PAGE):,} of {total:,}"]
    if query.page > 1:
        texts.insert(0, as_markup(Link("Previous", query.href(page=query.page - 1))))
    if query.page < last:
        texts.append(as_markup(Link("Next", query.href(page=query.page + 1))))
    st.html(f'<nav class="fp-pages" aria-label="Pages">{" ".join(f"<span>{t}</span>" for t in texts)}</nav>')


def seen_versions(chosen: Sequence[Incident], found: IncidentPage) -> list[About]:
    """Returns each incident with the version that the list shows."""
    return [(i.id, found.versions.get(i.id)) for i in chosen]


def _bulk(chosen: Sequence[Incident], found: IncidentPage, answer: snapshot.CachedAnswer[IncidentPage]) -> None:
    """Draws the acts on the selected incidents, and the result of the last one."""
    if chosen:
        row = st.container(horizontal=True, vertical_alignment="center", key="bulk")
        row.html(f"<b>{amount(len(chosen), 'incident', 'incidents')} selected</b>", width="content")
        if not silencing.draw_right("incidents/ID/acknowledge"):
            return
        waiting = seen_versions([i for i in chosen if i.state in ("open", "silenced")], found)
        row.button(
            f"Acknowledge {len(waiting)}",
            key="bulk-acknowledge",
            type="primary",
            disabled=not waiting,
            on_click=_acknowledge,
            args=(waiting,),
        )
        if taker := draw_popover(row, "Assign", "bulk-assign"):
            with taker:
                _assign_form(seen_versions([i for i in chosen if i.state != "resolved"], found))
        if box := draw_popover(row, "Silence", "bulk-silence", path="silences"):
            with box:
                silencing.draw_form("bulk-form", chosen, found.labels, "bulk-silence")
        else:
            with row:
                silencing.draw_result("bulk-form")
    if outcome := st.session_state.get(_RESULT):
        draw_outcome(outcome, answer)


def _assign_form(chosen: Sequence[About]) -> None:
    """Draws the form that gives incidents to one person."""
    st.text_input("Assign to", key="bulk-assign-to", placeholder="name; empty: no one")
    row = st.container(horizontal=True)
    label, none = f"Assign {len(chosen)}", not chosen
    row.button(label, key="bulk-assign-do", type="primary", disabled=none, on_click=_assign, args=(chosen,))
    who = identity.current()
    own = "" if isinstance(who, identity.Stranger) else who.name
    row.button("Assign to me", key="bulk-assign-me", disabled=none, on_click=_assign, args=(chosen, own))
    draw_failure("bulk-assign")


def _assign(chosen: Sequence[About], to: str | None = None) -> None:
    """Assigns incidents to `to`, else to the person in the form; an empty name removes the assignee."""
    name = str(st.session_state.get("bulk-assign-to") or "").strip() if to is None else to
    _write_all(chosen, "assign", {"to": name, "comment": ""}, f"assigned to {name or 'no one'}")
    if st.session_state[_RESULT].done:
        close_popover("bulk-assign")
    else:
        keep_failure("bulk-assign", st.session_state.pop(_RESULT))


def _acknowledge(chosen: Sequence[About], title: str = "") -> None:
    """Acknowledges incidents. title: of the only one, for the result."""
    _write_all(chosen, "acknowledge", {"comment": ""}, "acknowledged", title)


def _write_all(chosen: Sequence[About], verb: str, body: Mapping[str, str], done: str, title: str = "") -> None:
    """Writes to incidents one after the other; the result says which were not changed."""
    failed: list[str] = []
    unsure = False
    for number, (one, version) in enumerate(chosen, 1):
        try:
            write_to_incident(one, version, verb, body)
        except ConflictError as error:
            failed.append(f"{title or one}: {error}")
        except ApiError as error:
            failed.append(f"{title or one}: {error}")
            unsure = unsure or error.unsure
            if error.status is None:  # no answer: the others would wait as long
                failed += [name for name, _ in chosen[number:]]
                break
    st.session_state[_RESULT] = _describe(len(chosen), failed, done, unsure, title)


def _describe(wanted: int, failed: Sequence[str], done: str, unsure: bool = False, title: str = "") -> Outcome:
    """Returns the result of writes. unsure: a response was lost, so what failed may have been written."""
    if not failed:
        about = f": {title}" if title else ""
        return Outcome("quiet", f"{amount(wanted, 'incident', 'incidents')} {done}{about}.", True)
    doubt = ", or it is not known: look before you repeat it" if unsure else ""
    return Outcome(
        "critical",
        f"{len(failed):,} of {wanted:,} not {done}{doubt}. {failed[0]}",
        False,
        snapshot.now() if unsure else 0,
    )
