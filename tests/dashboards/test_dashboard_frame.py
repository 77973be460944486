"""The frame of all pages: the table of pages, search, breadcrumbs, links and the time zone."""

from __future__ import annotations

from datetime import timedelta, timezone
from importlib import import_module
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from streamlit.testing.v1 import AppTest

from dashboards import links, markup, pages, routes, times, words
from dashboards.frame import component
from dashboards.frame.component import Hit, hit_rows, parse_hits
from dashboards.links import Link
from pipeline.model.records import SECOND
from tests.dashboards.conftest import NOW
from tests.dashboards.test_dashboard_pages import fleet_script, page, shown

HOSTILE = '"><img src=x onerror=alert(1)>'


@pytest.fixture
def plain_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "live_value", lambda: "")
    monkeypatch.setattr(routes, "is_local_time", lambda: False)


@pytest.mark.parametrize("entry", pages.PAGES, ids=lambda entry: entry.name)
def test_every_page_of_the_table_has_a_module_that_draws_it(entry: pages.PageEntry) -> None:
    assert callable(import_module(f"dashboards.views.{entry.name}").page)


def test_results_of_a_search_lead_to_their_pages(plain_address: None) -> None:
    found = parse_hits(
        {
            "results": [
                {"kind": "gpu", "id": "gpu:n1.0", "match": "1654922", "text": "node:n1", "state": None},
                {"kind": "incident", "id": "A1", "match": "A1", "text": "gpu:n1.0 is hot", "state": "acknowledged"},
            ],
            "total": 7,
        }
    )
    assert found.total == 7
    assert hit_rows(found.hits) == [
        {"href": "node?entity=gpu%3An1.0", "kind": "GPU", "name": "GPU 0 of n1", "below": "1654922, node n1"},
        {"href": "incident?id=A1", "kind": "incident", "name": "GPU 0 of n1 is hot", "below": "A1, acknowledged"},
    ]


def test_a_hostile_name_stays_within_its_address(plain_address: None) -> None:
    row = hit_rows([Hit("node", f"node:{HOSTILE}", f"node:{HOSTILE}", "")])[0]
    assert "<" not in row["href"]
    assert "<img" not in links.as_markup(links.entity_link(f"node:{HOSTILE}"))


@pytest.mark.parametrize(("live", "href"), [("30", "incidents?live=30"), ("0", "incidents?live=0"), ("7", "incidents")])
def test_links_keep_how_often_pages_refresh_and_drop_words_that_mean_nothing(live: str, href: str) -> None:
    test = AppTest.from_function(linking_script)
    test.query_params["live"] = live
    assert test.run().text[0].value == href


def linking_script() -> None:
    import streamlit as st

    from dashboards import routes

    st.text(routes.href("incidents"))


def test_a_link_with_another_scheme_is_only_text() -> None:
    assert links.as_markup(Link("run", "javascript:alert(1)")) == "run"
    assert 'target="_blank"' in links.as_markup(Link("runbook", "https://wiki.example/x"))
    assert 'href="./?within=rack%3Ar1"' in links.as_markup(Link("r1", "./?within=rack%3Ar1"))


def test_tables_and_facts_show_links(plain_address: None) -> None:
    text = markup.table(("A",), [(links.incident_link("A1"),)], "") + markup.facts([("x", links.detector_link("xid"))])
    assert 'href="incident?id=A1"' in text
    assert 'href="detectors?detector=xid"' in text


def test_breadcrumbs_lead_from_the_fleet_to_the_node(plain_address: None) -> None:
    steps = links.entity_crumbs(("node:n1", "chassis:c", "rack:r1", "cdu:c1", "row:a"))
    assert [step.text for step in steps if isinstance(step, Link)] == ["Fleet", "row a", "rack r1", "node n1"]
    text = links.breadcrumbs([*steps, "GPU <0>"])
    assert text.index("rack%3Ar1") < text.index("node%3An1") < text.index("<span aria-current=page>GPU &lt;0&gt;")


def test_times_are_in_the_zone_of_the_page() -> None:
    try:
        words.set_zone(ZoneInfo("Asia/Tokyo"))
        assert words.clock(NOW, NOW) == "21:00:00 JST"
        assert words.clock(NOW - 86_400 * SECOND, NOW) == "2025-12-31 21:00:00 JST"
    finally:
        words.set_zone(times.UTC)
    assert words.clock(NOW, NOW) == "12:00:00Z"


def test_an_unknown_zone_of_the_browser_falls_back_to_its_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    class Context:
        timezone = "Mars/Olympus"
        timezone_offset = -330

    monkeypatch.setattr(times.st, "context", Context)
    assert times.browser_zone() == timezone(timedelta(minutes=330))


@pytest.mark.slow
def test_an_empty_fleet_says_what_to_do_next(api: Any) -> None:
    api.fleet |= {"nodes": [], "sources": {}}
    assert "start it with <code>fleetpulse agent</code>" in shown(page(fleet_script))


def test_a_short_text_is_not_searched_for(api: Any) -> None:
    assert component._search("x")["hits"] == []
    assert api.asked == []
