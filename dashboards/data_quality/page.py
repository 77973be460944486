"""`/data`: whether silence can be trusted. `/data?group=ID`: all sources of one row."""

from __future__ import annotations

import streamlit as st

from dashboards import linked, links, snapshot
from dashboards import markup as common
from dashboards.data_quality import explain, markup
from dashboards.data_quality.answers import Quality, parse_destinations, parse_members, parse_quality
from dashboards.data_quality.dead_messages import draw_dead_messages
from dashboards.routes import href
from dashboards.views import parts
from dashboards.words import age, amount
from pipeline.runtime.guides import guide

PAGE_SIZE = 100
"""Sources of one row on a page. Chosen."""


def page() -> None:
    """Draws the page."""
    group = st.query_params.get("group", "")
    parts.draw_refreshing(lambda: _group(group) if group else _body())


def _body() -> None:
    answer = snapshot.fetch(parse_quality, "quality")
    if answer.value is None:
        parts.draw_head("Data quality unknown", [], "", answer)
        parts.draw_error(answer)
        return
    quality = answer.value
    parts.draw_head(markup.headline(quality), [], "", answer, of_now=True)
    parts.draw_error(answer)
    if not quality.agents.known:
        text = (
            f"Install the agent on a node and start it: systemctl enable --now fleetpulse-agent. {guide('install.md')}"
        )
        st.html(common.notice(text, "quiet", "Next:"))
    st.html(markup.overview(quality))
    _sources(quality)
    st.html(linked.anchor("blind") + common.section("Blind now", "detectors without the signals that they need"))
    st.html(markup.sights(quality.sights))
    _losses(quality)
    st.html(linked.anchor("waiting") + common.section("Waiting", "input, spools and space"))
    st.html(markup.waiting(quality))
    note = f"from reading to store, messages of the last {age(quality.lag_window_s)}" if quality.lags else ""
    st.html(common.section("Lag by topic", note))
    st.html(markup.lags(quality))
    st.html(common.section("Versions", "software of the nodes against most of the fleet"))
    st.html(markup.versions(quality.versions))
    _destinations()


def _sources(quality: Quality) -> None:
    failing = [p for p in quality.problems if not p.expected]
    note = f"{amount(len(failing), 'cause', 'causes')}, the worst first" if failing else ""
    st.html(linked.anchor("sources") + common.section("Sources that do not report", note))
    if failing:
        st.html("".join(markup.problem(p, quality.as_of) for p in failing))
    else:
        st.html(common.notice("Every agent, collector, BMC and exporter that is known reports.", of_now=True))
    if quality.more:
        st.html(common.notice(f"{quality.more:,} more causes are not listed: GET /api/v1/quality has the first 100."))
    if idle := [p for p in quality.problems if p.expected]:
        st.html(markup.expected(idle))


def _losses(quality: Quality) -> None:
    now = quality.as_of
    st.html(linked.anchor("lost") + common.section("Lost", "messages that never arrived, by cause"))
    st.html(markup.gap_hours(quality.gap_hours) + markup.gaps(quality.gaps, now))
    st.html(common.section("Late", "stored, but after their frame was evaluated"))
    st.html(markup.late(quality))
    note = "dead letters by rule and sender; payloads: SELECT * FROM dead_letter"
    st.html(linked.anchor("rejected") + common.section("Rejected", note))
    st.html(markup.rejected(quality, now))


def _destinations() -> None:
    answer = snapshot.fetch(parse_destinations, "receivers")
    st.html(common.section("Alerts", "where alerts are sent, and whether they arrive"))
    if answer.value is None:
        parts.draw_error(answer)
    else:
        parts.draw_problem(answer, "Delivery of alerts unknown.")
        st.html(markup.destinations(answer.value, snapshot.now(), parts.last_known(markup.NO_RECEIVER, answer)))
        draw_dead_messages(answer.value)


def _group(group: str) -> None:
    number = _page_number()
    given = {"offset": str(number * PAGE_SIZE), "limit": str(PAGE_SIZE)}
    answer = snapshot.fetch(parse_members, f"quality/{group}", **given)
    of = snapshot.fetch(parse_quality, "quality")
    known = next((p for p in of.value.problems if p.id == group), None) if of.value else None
    steps: list[links.Text] = [
        links.Link("Data quality", href("data")),
        "Sources" if known is None else explain.title(known),
    ]
    if answer.value is None:
        text = "This problem is over" if answer.status == 404 else "Sources unknown"
        parts.draw_head(text, [], "", answer, crumbs=steps)
        if answer.status != 404:
            parts.draw_error(answer)
        return
    title = "Sources" if known is None else explain.title(known)
    parts.draw_head(title, [], "", answer, of_now=True, crumbs=steps)
    parts.draw_error(answer)
    if known is not None:
        st.html(markup.problem(known, answer.fetched))
    st.html(markup.members(answer.value.members, answer.fetched))
    _draw_pages(group, number, answer.value.total)


def _page_number() -> int:
    """Returns the page in the address from 0; an invalid one is the first."""
    text = st.query_params.get("page", "1")
    return max(0, int(text) - 1) if text.isascii() and text.isdigit() and len(text) < 7 else 0


def _draw_pages(group: str, number: int, total: int) -> None:
    last = max(0, (total - 1) // PAGE_SIZE)
    texts = [f"{min(total, number * PAGE_SIZE + 1):,} to {min(total, (number + 1) * PAGE_SIZE):,} of {total:,}"]
    if number > 0:
        texts.append(linked.link("previous", href("data", group=group, page=str(number))))
    if number < last:
        texts.append(linked.link("next", href("data", group=group, page=str(number + 2))))
    st.html(f'<p class="fp-empty">{" · ".join(texts)}</p>')
