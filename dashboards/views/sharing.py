"""The panel "What do these share?" of the fleet page: what selected nodes have in common that others have not."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import streamlit as st

from dashboards import markup, routes, snapshot
from dashboards.fleet_map.answers import Share, SharedValue, parse_share
from dashboards.links import as_markup, entity_link
from dashboards.words import amount, percent
from pipeline.model.entity_names import KINDS, entity_name

MAX_SELECTED = 5_000
"""Entities in one question: as many as fit a request. Chosen."""
PLACES = frozenset(
    {*routes.GROUP_KINDS, *routes.FACILITY_KINDS, "job", "chassis", "nvlink_domain", "enclosure"},
)
"""Attributes of which the value is an entity with a page."""


def draw_share(entities: Sequence[str], incident: str, within: str) -> None:
    """Draws the panel for selected nodes and groups, or for the nodes of an incident."""
    if len(entities) > MAX_SELECTED:
        st.html(
            markup.notice(f"{len(entities):,} nodes are selected; select at most {MAX_SELECTED:,}, or whole groups.")
        )
        return
    body: dict[str, object] = {"entities": list(entities)}
    if incident:
        body["incident"] = incident
    if within:
        body["within"] = within
    answer = snapshot.ask(parse_share, "share", body)
    st.html(markup.section("What do these share?", subject(answer.value, incident)))
    if answer.value is None:
        st.html(markup.notice(answer.error, "critical", "Comparison unavailable."))
    else:
        st.html(share_markup(answer.value))


def subject(found: Share | None, incident: str) -> str:
    """Returns a sentence about the two groups that are compared."""
    if found is None:
        return ""
    whose = f" of incident {incident}" if incident else ""
    return f"{amount(found.selected, 'node', 'nodes')}{whose} against {found.others:,} others"


def share_markup(found: Share) -> str:
    """Returns the values that separate the selection, or that none does, and how this was decided."""
    if found.selected < 2:
        return markup.notice("Select two or more nodes: drag over them, or press a group's name.")
    proven = [row for row in found.shared if row.separates]
    nearest = [row for row in found.shared if not row.separates]
    parts = []
    if proven:
        parts.append(_table(proven, found))
    else:
        parts.append(
            markup.notice(
                "None of their places, supplies, jobs, versions and changes is more frequent here than by chance.",
                heading="Nothing separates them.",
            )
        )
    if nearest and not proven:
        parts.append(f'<p class="fp-empty">Nearest, but within chance:</p>{_table(nearest, found)}')
    method = (
        f"One-sided Fisher test (hypergeometric), corrected for {found.compared:,} compared values; "
        f"a value separates below {percent(found.threshold)}."
    )
    unknown = f" Not found: {', '.join(entity_name(e) for e in found.unknown)}." if found.unknown else ""
    return "".join(parts) + f'<p class="fp-empty">{escape(method + unknown)}</p>'


def _table(rows: Sequence[SharedValue], found: Share) -> str:
    head = "".join(f'<th scope="col">{text}</th>' for text in ("Attribute", "Value", "Selected", "Others", "By chance"))
    lines = "".join(_line(row, found) for row in rows)
    return f'<table class="fp-table fp-share"><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>'


def _line(row: SharedValue, found: Share) -> str:
    value = as_markup(entity_link(row.value) if row.attribute in PLACES else row.value)
    cells = (
        escape(KINDS.get(row.attribute, (row.attribute.replace("_", " "),))[0]),
        value,
        _part(row.inside, found.selected, "in"),
        _part(row.outside, found.others, "out"),
        chance(row.p),
    )
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _part(count: int, total: int, side: str) -> str:
    share = count / total if total else 0.0
    bar = f'<i class="fp-bar fp-bar-{side}"><b style="width:{share * 100:.0f}%"></b></i>'
    return f"{bar}{count:,} of {total:,}"


def chance(p: float) -> str:
    """Returns a probability as a person says it: `1 in 4,200`, `34 %`."""
    if p < 1e-9:
        return "below 1 in a billion"
    if p < 1e-6:
        return f"1 in {1 / p / 1e6:,.0f} million"
    return f"1 in {1 / p:,.0f}" if p < 0.01 else f"{p:.0%}".replace("%", " %")
