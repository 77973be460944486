"""`/incident?id=`: cause, impact, recommended action, evidence, timeline and history of one incident."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import streamlit as st

from dashboards import cause_and_impact, evidence, linked, markup, routes, snapshot
from dashboards.answers import Change, IncidentDetail
from dashboards.evidence import peers_chart
from dashboards.incident_timeline import timeline_rows
from dashboards.links import Link, Text, as_markup, entity_crumbs, entity_link, incident_link
from dashboards.markup import SEVERITY_OF
from dashboards.people_answers import parse_silences
from dashboards.rates import convert_series
from dashboards.theme import PALETTES
from dashboards.views import acts, muting, parts
from dashboards.views.response import draw_actions
from dashboards.words import STATE, age, amount, clock, percent, plain, signal_name
from pipeline.model.entity_names import entity_name
from pipeline.model.records import SECOND, Incident

RANGES = {"Onset": 0.0, "6 h": 6 * 3600.0, "24 h": 86_400.0, "7 d": 7 * 86_400.0}
"""Time ranges of the chart (s); 0: around the onset. Chosen."""


def page() -> None:
    """Draws the page of the incident in the address."""
    identity = st.query_params.get("id", "").strip()
    if not identity:
        _draw_missing("No incident selected.", "Expected an id in the address: /incident?id=...")
        return
    parts.draw_refreshing(lambda: _body(identity))


def _draw_missing(heading: str, text: str) -> None:
    st.html(markup.title("Incident"))
    st.html(markup.notice(text, "degraded", heading))
    if st.button("Show all incidents", type="primary"):
        routes.open_page("incidents")


def _body(identity: str) -> None:
    answer = snapshot.fetch_incident(identity)
    detail = answer.value
    if detail is None:
        if answer.status == 404:
            text = "It may belong to another site, or be older than the retention."
            _draw_missing(f"Incident {identity} not found.", text)
        else:
            _draw_listed(identity, answer)
        return
    now = snapshot.now()
    _head(detail, answer, now)
    parts.draw_error(answer)
    draw_actions(detail)
    known = snapshot.fetch(parse_silences, "silences").value if detail.incident.life.silenced_by else None
    for heading, texts in cause_and_impact.life_notices(detail.incident, now, known or ()):
        shown = ", ".join(map(as_markup, texts))
        st.html(markup.notice_of(heading, shown, "degraded"))
    if text := evidence.quiet_notice(detail, now):
        st.html(markup.notice(text, "degraded", "Main finding:"))
    muting.draw_applying(detail, now)
    left, right = st.columns([1, 1.7], gap="medium")
    with left:
        _answers(detail, now)
    with right:
        _evidence(detail, now)
    _history(detail, now)


def _draw_listed(identity: str, answer: snapshot.CachedAnswer[IncidentDetail]) -> None:
    """Draws what the list said about an incident that was never read in full, while it cannot be read."""
    row = snapshot.find_listed_incident(identity)
    if row is None or row.value is None:
        parts.draw_head(f"Incident {identity}", [], "", answer)
        parts.draw_error(answer)
        return
    now = snapshot.now()
    detail = IncidentDetail(row.value, (), (), (), {})
    kept = replace(answer, value=detail, fetched=row.fetched)
    _head(detail, kept, now)
    parts.draw_error(kept)
    text = "Evidence, impact, advice and history follow when the API answers. Until then nothing can be written."
    st.html(markup.notice(text, "degraded", f"Only the row of the list is known, as of {clock(row.fetched, now)}."))
    st.html(markup.section("Members", f"{len(row.value.members):,} with findings of this cause"))
    st.html(markup.chips([entity_link(member) for member in row.value.members]))


def _head(detail: IncidentDetail, answer: snapshot.CachedAnswer[IncidentDetail], now: int) -> None:
    incident = detail.incident
    badges = [
        markup.severity_badge(incident.severity),
        markup.state_badge(incident.state),
    ]
    crumbs: list[Text] = [Link("Incidents", routes.href("incidents")), *entity_crumbs(detail.above)[1:], incident.id]
    text, below = plain(incident.summary), subtitle(incident, now)
    parts.draw_head(text, badges, below, answer, crumbs=crumbs, simulated=incident.simulated)


def subtitle(incident: Incident, now: int) -> str:
    """Returns suspected cause, confidence, onset, duration, detection delay and owner in one line."""
    until = now if incident.resolved is None else incident.resolved
    delay = (incident.opened - incident.onset) / SECOND
    texts = [
        f"suspected cause {entity_name(incident.cause)}",
        "" if incident.confidence is None else f"confidence {percent(incident.confidence)}",
        f"onset {clock(incident.onset, now)}, duration {age((until - incident.onset) / SECOND)}",
        f"detected after {age(delay)}",
        cause_and_impact.owner_text(incident, now),
    ]
    return " · ".join(filter(None, texts))


def _answers(detail: IncidentDetail, now: int) -> None:
    """Draws why, impact, action and delivery: what the first screen of a phone answers."""
    over = detail.incident.resolved is not None
    st.html(markup.section("Recommended action") + _action(detail, "quiet" if over else "advice", now))
    st.html(markup.section("Impact") + _impact(detail, now))
    cause = markup.facts(cause_and_impact.cause_rows(detail))
    st.html(markup.section("Cause") + f'<div class="fp-narrow">{cause}</div>')
    st.html(markup.section("Delivery status") + _delivery(detail, now))
    acts.draw_of_incident(detail.incident.id, "\n".join(nodes_of(detail.incident)))


def nodes_of(incident: Incident) -> list[str]:
    """Returns the names of the nodes that the cause is, or is a part of; none for a group."""
    kind, _, name = incident.cause.partition(":")
    if kind == "node":
        return [name]
    return [name.rpartition(".")[0]] if kind in ("gpu", "port", "nic", "nvlink") else []


def _action(detail: IncidentDetail, tone: str, now: int) -> str:
    if cause_and_impact.is_merged(detail.incident):
        into = as_markup(incident_link(detail.incident.life.merged_into))
        return markup.notice_of("", f"Merged into {into}, whose advice holds.", tone)
    runbook = cause_and_impact.runbook_link(detail)
    more = f" {as_markup(runbook)}" if runbook else ""
    return markup.notice_of("", f"{as_markup(cause_and_impact.action_text(detail, now))}{more}", tone)


def _impact(detail: IncidentDetail, now: int) -> str:
    impact = detail.impact
    if impact is None:
        reached = markup.chips([*evidence.impact(detail)])
        return f'<div class="fp-narrow">{reached}</div>' + markup.empty("Loss of goodput: not computed by this API.")
    lines = "".join(f'<p class="fp-line">{as_markup(line)}</p>' for line in cause_and_impact.impact_lines(impact))
    rows = [
        (cause_and_impact.job_markup(job), as_markup(effect), f'<span class="fp-one-line">{as_markup(lost)}</span>')
        for job, (_, effect, lost) in zip(impact.jobs, cause_and_impact.job_rows(impact, now), strict=True)
    ]
    more = impact.job_count - len(impact.jobs)
    rest = markup.empty(f"and {amount(more, 'more job', 'more jobs')}") if more > 0 else ""
    unlisted = cause_and_impact.unlisted_text(impact)
    jobs = linked.table(("Job", "Effect", "Lost"), rows, unlisted or "No job is hit.", "Jobs that are hit", numbers=1)
    if rows and unlisted:
        rest += markup.empty(unlisted)
    nodes = ""
    if impact.affected:
        chips = markup.chips([entity_link(node) for node in impact.affected])
        heading = f"{amount(impact.affected_count, 'node', 'nodes')} only affected, not at fault"
        nodes = f'<details class="fp-fold"><summary>{heading}</summary>{chips}</details>'
    return f"{lines}{jobs}{rest}{nodes}"


def _delivery(detail: IncidentDetail, now: int) -> str:
    empty = "No notifications: no receiver is configured, or this severity is not sent."
    rows = evidence.delivery_rows(detail, now)
    return markup.table(("Time", "Receiver", "Type", "Status"), rows, empty)


def _evidence(detail: IncidentDetail, now: int) -> None:
    finding = evidence.main_finding(detail)
    if finding is None:
        st.html(markup.section("Evidence"))
        st.html(_no_findings(detail.incident))
        return
    vote = evidence.parse_vote(finding)
    if vote is not None:
        st.html(markup.section("Evidence", f"vote over one computation, {entity_name(finding.entity)}"))
        st.html(markup.vote_results(vote))
    else:
        _chart(detail, now)
    st.html(markup.section("Main finding", evidence.describe_main_finding(finding, detail.incident)))
    if text := evidence.suppression_notice(finding):
        st.html(markup.notice(text, "degraded"))
    st.html(markup.comparison(evidence.comparison_rows(finding, detail, now)))
    if rows := evidence.figure_rows(finding):
        st.html(markup.section("Measurements", f"from {finding.detector}"))
        st.html(markup.facts(rows))


def _no_findings(incident: Incident) -> str:
    """Returns why an incident shows none: a merge moves them, and it never gets any again by itself."""
    if not incident.life.merged_into:
        return markup.notice("No findings yet.")
    where = as_markup(incident_link(incident.life.merged_into))
    return markup.notice_of("", f"It was merged into {where}, with its findings.")


def _chart(detail: IncidentDetail, now: int) -> None:
    place = st.container()
    signals = evidence.chart_signals(detail)
    row = st.container(horizontal=True, vertical_alignment="bottom")
    chosen = row.segmented_control(
        "Range", list(RANGES), default="Onset", required=True, key=f"range-{detail.incident.id}", width="content"
    )
    if len(signals) > 1:
        names = [f"{signal_name(signal)}, {entity_name(entity)}" for entity, signal in signals]
        first = row.selectbox(
            "Signal", range(len(signals)), format_func=lambda i: names[i], key=f"signal-{detail.incident.id}", width=320
        )
        signals = [signals[first or 0], *(s for i, s in enumerate(signals) if i != (first or 0))]
    start, end = evidence.chart_span(detail.incident, now, RANGES[str(chosen)])
    failed = ""
    for entity, signal in signals:
        answer = snapshot.fetch_series(entity, signal, start, end, str(chosen))
        failed = failed or (answer.error if answer.status != 404 else "")
        if answer.error and answer.status is None and answer.value is None:
            break  # no answer in time: the next signal would wait as long
        if answer.value is not None and any(p.value is not None for p in answer.value.points):
            palette = PALETTES["dark" if st.context.theme.type == "dark" else "light"]
            with place:
                if failed and (entity, signal) != signals[0]:
                    heading = f"No answer for {signal_name(signals[0][1])}, {entity_name(signals[0][0])}."
                    st.html(
                        markup.notice(f"Shown instead: another signal of this incident. {failed}", "degraded", heading)
                    )
                known = f", up to {clock(answer.fetched, now)}" if answer.error else ""
                st.html(
                    markup.section("Evidence", f"{signal_name(signal)}, {entity_name(entity)} and its peers{known}")
                )
                st.altair_chart(peers_chart(convert_series(answer.value), detail.incident.onset, palette), key="peers")
            return
    with place:
        st.html(markup.section("Evidence"))
        if failed:
            st.html(markup.notice(failed, "critical", "Chart unavailable."))
        else:
            st.html(markup.notice("No chart for this kind of finding; see the measurements below."))


def _history(detail: IncidentDetail, now: int) -> None:
    left, right = st.columns([1.7, 1], gap="medium")
    with left:
        st.html(markup.section("Timeline", "newest first"))
        _timeline(detail, now)
        if detail.explanation is not None and detail.explanation.explained:
            found = amount(detail.explanation.explained_count, "finding", "findings")
            note = f"{found} that this cause explains"
            rows = cause_and_impact.explained_rows(detail.explanation.explained, now)
            st.html(markup.section("Explained by the cause", note))
            st.html(markup.table(("Onset", "Entity", "How it shows", "Path"), rows, ""))
        st.html(markup.section("Members", f"{len(detail.incident.members):,} with findings of this cause"))
        st.html(markup.chips([entity_link(member) for member in detail.incident.members]))
        on_map = routes.href("fleet", selection=f"incident:{detail.incident.id}")
        st.html(as_markup(Link("What do its nodes share? On the fleet map", on_map)))
        _others(detail, now)
    with right:
        st.html(markup.section("Comments and history", STATE[detail.incident.state]))
        changes = history_rows(detail.history, now)
        st.html(markup.table(("Time", "User", "Change", "Comment"), changes, "No changes since it opened."))
        audit = Link("Audit of this incident", routes.href("audit", target=detail.incident.id))
        st.html(f'<p class="fp-empty">{as_markup(audit)}</p>')


def history_rows(history: Sequence[Change], now: int) -> list[tuple[str, str, str, str]]:
    """Returns (time, user, change, comment), newest first; equal changes without a comment in a row are one."""
    rows = []
    for (actor, kind, comment), run in groupby(reversed(history), key=lambda c: (c.actor, c.kind, c.comment)):
        same = list(run)
        groups = [same] if not comment else [[one] for one in same]
        for group in groups:
            times = f" ({len(group):,} times)" if len(group) > 1 else ""
            rows.append((clock(group[0].time, now), actor, kind.replace("_", " ") + times, comment))
    return rows


def _others(detail: IncidentDetail, now: int) -> None:
    """Draws incidents that have to do with this one: of a storm, at the same time, and similar ones of the past."""
    if storm := cause_and_impact.storm_rows(detail):
        st.html(markup.section("Storm", cause_and_impact.storm_size(detail)))
        st.html(markup.chips(storm, most=60))
    if detail.co_occurring:
        st.html(markup.section("Co-occurring incidents", "began within 2 min; not known to have one cause"))
        rows = [
            (incident_link(c.id), SEVERITY_OF.get(c.severity, c.severity), entity_link(c.shared), plain(c.summary))
            for c in detail.co_occurring
        ]
        st.html(markup.table(("Incident", "Severity", "In common", "Title"), rows, ""))
    st.html(markup.section("Similar past incidents", "same device, cause or detector"))
    head = ("Onset", "Incident", "Duration", "Similar", "What people wrote")
    st.html(markup.table(head, cause_and_impact.similar_rows(detail, now), "None known."))


def _timeline(detail: IncidentDetail, now: int) -> None:
    """Draws events and findings; without an answer about events it says so, as the findings alone are not all."""
    start, end = evidence.chart_span(detail.incident, now)
    answer = snapshot.fetch_timeline(detail.incident.entity, start, end)
    if answer.error and answer.status != 404:
        heading = "Events unavailable." if answer.value is None else "Events are the last known ones."
        st.html(markup.notice(answer.error, "critical", heading))
    rows = timeline_rows(detail, answer.value or (), now)
    if rows or not answer.error:
        st.html(markup.table(("Time", "Type", "Entity", "Description"), rows, "No events."))
