"""`/detectors?detector=`: active mutes, modes, and for each detector its blind spots, false alarm budget and incidents;
of a chosen detector also its calibration."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import streamlit as st

from dashboards import markup, routes, snapshot
from dashboards.answers import Detector, DetectorList, Mute
from dashboards.json_values import require_list
from dashboards.links import Link, Text, detector_link, entity_link
from dashboards.list_query import ListQuery
from dashboards.views import muting, parts
from dashboards.words import age, amount, detector_name, fact, quantity, scope_name
from pipeline.model.matcher_text import quote_value
from pipeline.model.records import SECOND, Incident

MAX_EXPIRED = 10
"""Expired mutes shown, the newest. Chosen."""
MIN_FOR_TENTH = 10
"""Incidents from which the slowest tenth is known. Chosen: one of them is in it."""
_MODES = {
    "record": "stores findings; no incidents, no alerts",
    "notify": "opens incidents and sends alerts",
    "act": "as notify; actions may be proposed",
}


def page() -> None:
    """Draws the page."""
    parts.draw_refreshing(_body)


def _body() -> None:
    detectors, mutes, now = snapshot.fetch_detectors(), snapshot.fetch_mutes(), snapshot.now()
    found = mutes.value or ()
    active = tuple(m for m in found if m.is_active(now))
    both = parts.merge_age(detectors, mutes)
    text = "Detectors" if detectors.value is None or mutes.value is None else headline(detectors.value, active)
    parts.draw_head(text, [], "", both, of_now=text != "Detectors")
    parts.draw_error(detectors if detectors.error else mutes)
    if mutes.value is not None:
        st.html(markup.section("Active mutes", parts.last_known(f"{len(active):,}", mutes)))
        muting.draw_result(muting.LIST)
        muting.draw_active(active, mutes, now)
    if detectors.value is not None:
        _modes(detectors.value)
        _list(detectors.value, None if mutes.error else active)
    if mutes.value is not None:
        st.html(markup.section("Expired mutes", f"the newest {MAX_EXPIRED}"))
        expired = tuple(m for m in found if not m.is_active(now))[:MAX_EXPIRED]
        head = ("Ended", "Detector", "Scope", "User", "Reason")
        empty = parts.last_known("No expired mutes.", mutes)
        st.html(markup.table(head, muting.expired_rows(expired, now), empty))


def _list(found: DetectorList, mutes: Sequence[Mute] | None) -> None:
    """Draws the detectors, the chosen one first, each with links to its incidents and mutes. mutes: None if unknown."""
    chosen = st.query_params.get("detector", "")
    budgets = snapshot.fetch(parse_budgets, "budget").value or {}
    listed = snapshot.fetch_incidents()
    incidents = None if listed.error else listed.value
    ordered = sorted(found.detectors, key=lambda d: d.name != chosen)
    names = {d.name for d in ordered}
    if chosen and chosen not in names:
        st.html(markup.notice(f"Expected one of {', '.join(sorted(names))}.", "degraded", f"No detector {chosen}."))
    st.html(markup.section("Detectors", "required signals, blind spots, false alarm budget"))
    parts.draw_problem(listed, "Incidents unknown.")
    for one in ordered:
        st.html(markup.detector(one, detector_links(one, incidents, mutes, budgets)))
        if one.name == chosen:
            _calibration(chosen)
            st.html(markup.section("Other detectors"))


def detector_links(
    one: Detector, incidents: Sequence[Incident] | None, mutes: Sequence[Mute] | None, budgets: Mapping[str, str]
) -> list[Text]:
    """Returns links to a detector's incidents by tab, and texts about its mutes and page budget.

    incidents, mutes: None if they are not known; then they are not counted.
    """
    query = ListQuery(matchers=(f"detector={quote_value(one.name)}",))
    links: list[Text] = []
    if incidents is not None:
        counts = Counter(i.resolved is not None for i in incidents if i.detector == one.name)
        links.append(Link(f"{amount(counts[False], 'unresolved incident', 'unresolved incidents')}", query.href()))
        links.append(Link(f"{counts[True]:,} resolved", query.href(show="resolved", sort="newest")))
        own = [i for i in incidents if i.detector == one.name]
        links.append(precision_text([i.life.feedback for i in own]))
        links.append(detection_text(own))
    if mutes is None:
        links.append("active mutes unknown")
    else:
        count = sum(m.detector in (one.name, "*") for m in mutes)
        links.append(amount(count, "active mute", "active mutes"))
    if one.name in budgets:
        links.append(budgets[one.name])
    links.append(Link("Calibration", routes.href("detectors", detector=one.name)))
    return links


def precision_text(verdicts: Iterable[str]) -> str:
    """Returns the precision by people's feedback, with its count and 95 % interval (Wilson 1927); `known` is right."""
    counts = Counter(verdicts)
    right, wrong = counts["useful"] + counts["known"], counts["wrong"]
    number = right + wrong
    if not number:
        return "precision not known: no feedback"
    share, square = right / number, 1.96**2
    middle = (share + square / (2 * number)) / (1 + square / number)
    half = 1.96 * math.sqrt(share * (1 - share) / number + square / (4 * number * number)) / (1 + square / number)
    low, high = (100 * min(1.0, max(0.0, bound)) for bound in (middle - half, middle + half))
    return f"precision {100 * share:.0f} % ({low:.0f} to {high:.0f} %): {right:,} of {number:,} with feedback right"


def detection_text(incidents: Sequence[Incident]) -> str:
    """Returns how long a detector took from the onset of a fault to the incident: median, slowest tenth, and of how
    many stored incidents."""
    if not incidents:
        return "time to detect not known: no incident"
    delays = [max(0, i.opened - i.onset) / SECOND for i in incidents]
    text = f"time to detect {age(statistics.median(delays))} (median of {amount(len(delays), 'incident', 'incidents')}"
    if len(delays) < MIN_FOR_TENTH:
        return f"{text})"
    return f"{text}, slowest tenth over {age(statistics.quantiles(delays, n=10)[-1])})"


def parse_budgets(table: Mapping[str, Any]) -> dict[str, str]:
    """Parses GET /api/v1/budget: detector -> its pages and page budget in words."""
    node_days, days = table.get("node_days"), table.get("days")
    return {
        str(row["detector"]): ", ".join(filter(None, (_rate_text(row, node_days, days), _budget_text(row))))
        for row in require_list(table["budgets"])
    }


def _rate_text(row: Mapping[str, Any], node_days: float | None, days: float | None) -> str:
    """Returns the pages of a detector per 1,000 node-days; empty from an API that does not count them."""
    if row.get("pages") is None or days is None:
        return ""
    pages = amount(int(row["pages"]), "page", "pages")
    if not node_days:
        return f"{pages}, per node-day not known before a day has passed"
    rate = quantity(1000 * int(row["pages"]) / node_days)
    return f"{rate} pages per 1,000 node-days ({pages} in {days:g} d)"


def _budget_text(row: Mapping[str, Any]) -> str:
    if row["exempt"]:
        return "no page budget: reports logged facts"
    lowered = ", lowered to tickets" if row["lowered"] else ""
    return f"{int(row['wrong_pages']):,} of {quantity(float(row['allowed']))} wrong pages used{lowered}"


def parse_calibration(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Parses the rows of GET /api/v1/calibration."""
    return [dict(row) for row in require_list(table["rows"])]


def _calibration(name: str) -> None:
    answer = snapshot.fetch(parse_calibration, "calibration")
    st.html(markup.section("Calibration", f"thresholds of {name} that this site has taught"))
    parts.draw_error(answer)
    if answer.value is None:
        return
    names = ("statistic", "kind", "devices", "hours", "factor", "threshold", "least_effect", "suspects", "pages")
    rows = [tuple(fact(row.get(n)) for n in names) for row in answer.value if row.get("detector") == name]
    head = ("Statistic", "Product", "Devices", "Hours", "Factor", "Threshold", "Least effect", "Suspects", "Pages")
    st.html(markup.table(head, rows, "It has no thresholds that a site teaches."))


def headline(detectors: DetectorList, active: tuple[Mute, ...]) -> str:
    """Returns the number of active, disabled and failing detectors and of active mutes."""
    disabled, failing = sum(bool(d.off) for d in detectors.detectors), sum(bool(d.errors) for d in detectors.detectors)
    texts = [f"{amount(len(detectors.detectors) - disabled, 'detector', 'detectors')} active"]
    if disabled:
        texts.append(f"{disabled:,} disabled: missing signals")
    if failing:
        texts.append(f"{failing:,} with errors")
    texts.append(amount(len(active), "active mute", "active mutes") if active else "no active mutes")
    return ", ".join(texts)


def _modes(detectors: DetectorList) -> None:
    st.html(markup.section("Modes", "[[modes]] of the configuration; the nearest scope applies"))
    rows: list[tuple[Text, ...]] = [
        (
            detector_name(m.detector) if m.detector == "*" else detector_link(m.detector),
            scope_name(m.scope) if m.scope == "*" else entity_link(m.scope),
            m.mode,
            _MODES.get(m.mode, ""),
        )
        for m in detectors.modes
    ]
    empty = "No rules: every detector opens incidents and sends alerts everywhere (notify)."
    st.html(markup.table(("Detector", "Scope", "Mode", "Meaning"), rows, empty))
