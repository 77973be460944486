"""Links in texts of the pages: to entities, incidents, detectors and lists. Everything is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from dashboards import routes
from pipeline.model.entity_names import entity_name


@dataclass(frozen=True, slots=True)
class Link:
    """A text that leads to an address; `href` is relative to the dashboard, or an https address of a runbook.

    simulated: what it leads to is, and the label follows it.
    """

    text: str
    href: str
    title: str = ""
    simulated: bool = False


SIMULATED = '<span class="fp-badge fp-tone-simulated">SIMULATED</span>'
"""The label of simulated data, as markup."""
Text = str | Link
"""What a cell of a table, a chip or a line shows."""


def as_markup(text: Text) -> str:
    """Returns a text or a link as markup. A link with a scheme other than http(s) is shown as text."""
    if isinstance(text, str):
        return escape(text)
    shown = f"{open_tag(text)}{escape(text.text)}</a>" if is_safe(text.href) else escape(text.text)
    return f"{shown} {SIMULATED}" if text.simulated else shown


def open_tag(link: Link) -> str:
    """Returns the start of the element. Pages open in the session, other sites in a new tab."""
    outside = link.href.startswith(("http://", "https://"))
    target = 'target="_blank" rel="noreferrer noopener"' if outside else 'target="_self"'
    about = f' title="{escape(link.title)}"' if link.title else ""
    return f'<a class="fp-link" href="{escape(link.href)}" {target}{about}>'


def is_safe(href: str) -> bool:
    """Returns whether an address is one of a page or of http(s): advice files and names come from outside."""
    scheme, colon, _ = href.partition(":")
    return not colon or "?" in scheme or "/" in scheme or scheme.lower() in ("http", "https")


def entity_link(entity: str, text: str = "") -> Link:
    """Returns the link to the page about an entity, with its name."""
    return Link(text or entity_name(entity), routes.entity_href(entity), entity)


def incident_link(identity: str, text: str = "", simulated: bool = False) -> Link:
    """Returns the link to an incident, with its id or `text`."""
    return Link(text or identity, routes.href("incident", id=identity), simulated=simulated)


def detector_link(name: str) -> Link:
    """Returns the link to a detector."""
    return Link(name, routes.href("detectors", detector=name))


def breadcrumbs(steps: Sequence[Text]) -> str:
    """Returns the way to a page, from the left; the last step is the page itself."""
    last = len(steps) - 1
    shown = (f"<span{' aria-current=page' * (i == last)}>{as_markup(step)}</span>" for i, step in enumerate(steps))
    return f'<nav class="fp-crumbs" aria-label="Breadcrumb">{"<i>/</i>".join(shown)}</nav>'


def entity_crumbs(above: Sequence[str]) -> list[Text]:
    """Returns the steps to an entity: the fleet, then what it is part of. above: ancestors, nearest first."""
    kinds = ("site", "hall", "pod", "row", "rack", "node")
    found = {entity.partition(":")[0]: entity for entity in reversed(above)}
    return [Link("Fleet", routes.href("fleet")), *(entity_link(found[kind]) for kind in kinds if kind in found)]
