"""Addresses of the pages: which page is about which kind of entity."""

from __future__ import annotations

import pytest
from streamlit.testing.v1 import AppTest

from dashboards import pages, routes


@pytest.fixture(autouse=True)
def live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "live_value", lambda: "")
    monkeypatch.setattr(routes, "is_local_time", lambda: False)


@pytest.mark.parametrize(
    ("entity", "address"),
    [
        ("node:n042", "node?entity=node%3An042"),
        ("agent:n042", "node?entity=node%3An042"),
        ("gpu:n042.3", "node?entity=gpu%3An042.3"),
        ("rank:81.17", "jobs?entity=rank%3A81.17"),
        ("port:n042.mlx5_0", "link?entity=port%3An042.mlx5_0"),
        ("cdu:c2", "facility?entity=cdu%3Ac2"),
        ("detector:link_flap", "detectors?detector=link_flap"),
        ("rack:a05", "./?within=rack%3Aa05"),
        ("node:häß<b>&x=1", "node?entity=node%3Ah%C3%A4%C3%9F%3Cb%3E%26x%3D1"),
    ],
)
def test_each_kind_of_entity_leads_to_the_page_about_it(entity: str, address: str) -> None:
    assert routes.entity_href(entity) == address


def test_a_page_that_does_not_refresh_links_to_pages_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "live_value", lambda: "0")
    assert routes.href("incidents") == "incidents?live=0"
    assert routes.entity_href("job:81") == "jobs?entity=job%3A81&live=0"


def test_a_page_in_local_time_links_to_pages_in_local_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "is_local_time", lambda: True)
    assert routes.href("incidents", state="open") == "incidents?state=open&tz=local"
    assert routes.href("fleet") == "./?tz=local"


def kept_script() -> None:
    import streamlit as st

    from dashboards import routes

    routes.keep_query(st.session_state["page"])
    st.text(st.query_params.get("id", "none"))


def test_a_page_of_one_thing_keeps_what_it_is_about_if_a_late_browser_sends_no_parameters() -> None:
    test = AppTest.from_function(kept_script)
    test.session_state["page"], test.query_params["id"] = "incident", "A1"
    assert test.run().text[0].value == "A1"
    del test.query_params["id"]
    assert test.run().text[0].value == "A1"
    del test.query_params["id"]
    test.session_state["page"] = "node"  # another page is not about it
    assert test.run().text[0].value == "none"


@pytest.mark.parametrize(
    ("title", "entities", "thing", "expected"),
    [
        ("Fleet", [], "", "Fleet - Fleetpulse"),
        ("Incident", [], "A1", "Incident A1 - Fleetpulse"),
        ("Node", ["gpu:n042.3"], "", "GPU 3 of n042 - Fleetpulse"),
        ("Node", ["node:n042"], "", "Node n042 - Fleetpulse"),
        ("Explore", ["gpu:n042.3", "gpu:n042.4", "node:n1"], "", "GPU 3 of n042 and 2 more - Fleetpulse"),
        ("Incident", [], "A" * 500, f"Incident {'A' * 71} - Fleetpulse"),
        ("Node", [""], "", "Node - Fleetpulse"),
    ],
)
def test_a_tab_is_named_after_its_page(title: str, entities: list[str], thing: str, expected: str) -> None:
    assert pages.tab_title(title, entities, thing) == expected
