"""Links to pages as markup, and tables with cells of markup. All text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from urllib.parse import urlencode

from dashboards import links, routes
from dashboards.links import Link, as_markup


def link(address: str, text: str) -> str:
    """Returns a link to a page."""
    return as_markup(Link(text, address))


def entity_link(entity: str, text: str = "") -> str:
    """Returns a link to the page of an entity, with its name or another text."""
    return as_markup(links.entity_link(entity, text))


def incident_link(identity: str, text: str = "") -> str:
    """Returns a link to an incident."""
    return as_markup(links.incident_link(identity, text))


def explore_href(entities: Sequence[str], signals: Sequence[str], span: str = "6h", **more: str) -> str:
    """Returns the address of a chart of signals of entities. span: as in `?range=`."""
    pairs = [*(("entity", e) for e in entities), *(("signal", s) for s in signals), ("range", span), *more.items()]
    kept = [("live", value)] if (value := routes.live_value()) else []
    return f"explore?{urlencode([*pairs, *kept])}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], empty: str, kind: str = "") -> str:
    """Returns a table whose cells are markup, or `empty` without rows; kind: a further class."""
    names = [escape(name) for name in head]
    cells = (
        "".join(
            f'<td data-head="{name}"{"" if cell else " data-empty"}>{cell}</td>'
            for name, cell in zip(names, row, strict=False)
        )
        for row in rows
    )
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    if not body:
        return f'<p class="fp-empty">{escape(empty)}</p>'
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    return (
        f'<div class="fp-scroll" tabindex="0"><table class="fp-table {escape(kind)}"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def facts(rows: Iterable[tuple[str, str]], empty: str = "") -> str:
    """Returns label and value per line; values are markup."""
    body = "".join(f"<div><dt>{escape(label)}</dt><dd>{value}</dd></div>" for label, value in rows)
    return f'<dl class="fp-facts">{body}</dl>' if body else f'<p class="fp-empty">{escape(empty)}</p>'
