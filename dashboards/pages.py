"""The table of pages. A new page is a module `views/NAME.py` with a function `page`, and one line here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, cast

import streamlit as st

from dashboards import routes
from dashboards.views import place
from pipeline.model.entity_names import entity_name

if TYPE_CHECKING:
    from streamlit.navigation.page import Page
MAX_TITLE = 80
"""Longest subject of a tab's title (characters). Chosen: browsers show fewer; the address may hold any text."""


@dataclass(frozen=True, slots=True)
class PageEntry:
    """One page at /NAME. `shown`: in the navigation; the others are reached by links only."""

    name: str
    title: str
    icon: str
    shown: bool = True


PAGES: tuple[PageEntry, ...] = (
    PageEntry("fleet", "Fleet", "grid_view"),
    PageEntry("incidents", "Incidents", "notifications"),
    PageEntry("incident", "Incident", "notifications", shown=False),
    PageEntry("jobs", "Jobs", "account_tree"),
    PageEntry("facility", "Facility", "water_pump"),
    PageEntry("data", "Data quality", "sensors"),
    PageEntry("node", "Node", "dns", shown=False),
    PageEntry("link", "Link", "cable", shown=False),
    PageEntry("explore", "Explore", "monitoring"),
    PageEntry("detectors", "Detectors", "troubleshoot"),
    PageEntry("acts", "Acts", "gavel"),
    PageEntry("objectives", "Objectives", "target"),
    PageEntry("silences", "Silences", "notifications_off"),
    PageEntry("handover", "Handover", "sync_alt"),
    PageEntry("audit", "Audit", "fact_check"),
)
"""In the order of the navigation; the first is the default page, at /."""


def find_draw(entry: PageEntry) -> Callable[[], None]:
    """Returns the function that draws a page; its module is imported when the page is opened first."""

    def draw() -> None:
        if not entry.shown:
            routes.keep_query(entry.name)
        place.enter(entry.name, st.query_params.get("id", ""))
        cast(Callable[[], None], import_module(f"dashboards.views.{entry.name}").page)()

    return draw


def make_pages() -> dict[str, Page]:
    """Returns the pages of a session by name."""
    return {
        entry.name: st.Page(
            find_draw(entry),
            title=entry.title,
            url_path=entry.name,
            icon=f":material/{entry.icon}:",
            default=entry is PAGES[0],
            visibility="visible" if entry.shown else "hidden",
        )
        for entry in PAGES
    }


def tab_title(title: str, entities: Sequence[str], thing: str) -> str:
    """Returns the title of a browser tab: `GPU 3 of n042 - Fleetpulse`, `Incident A1 - Fleetpulse`.

    title: of the page.  entities, thing: `entity` and `id` in its address.
    """
    more = f" and {len(entities) - 1} more" if len(entities) > 1 else ""
    name = entity_name(entities[0]) if entities else ""
    subject = f"{name[:1].upper()}{name[1:]}{more}" if name else f"{title} {thing}".strip()
    return f"{subject[:MAX_TITLE]} - Fleetpulse"
