"""The label of simulated data: on every page of the navigation table, and on none of a real fleet."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from dashboards.pages import PAGES
from tests.dashboards.test_dashboard_all_pages import QUERIES, serve_everything
from tests.dashboards.test_dashboard_objectives import answer as objectives_table

LABEL = re.compile(r'<div class="fp-badges">.*?(?=<h1)[^\n]*')
"""The row of labels above the headline."""
OWN = ("incident", "node", "link", "jobs", "explore", "acts")
"""Pages with one thing in their address in QUERIES."""
CASES = [
    *((entry.name, QUERIES.get(entry.name, "")) for entry in PAGES),
    ("acts", ""),
    ("jobs", ""),
    ("explore", ""),
    ("explore", "view=sql"),
    ("facility", "entity=cdu:c1"),
]
"""Every page, and the other states that have a headline of their own."""


def page_script(name: str) -> None:
    from dashboards.pages import PAGES, find_draw

    find_draw(next(entry for entry in PAGES if entry.name == name))()


def labels(name: str, query: str) -> str:
    """Returns what a page shows above its headline."""
    test = AppTest.from_function(page_script, default_timeout=60, args=(name,))
    pairs = [pair.split("=", 1) for pair in query.split("&") if pair]
    for key in dict.fromkeys(key for key, _ in pairs):
        test.query_params[key] = [value for k, value in pairs if k == key]
    test.run()
    assert not test.exception, test.exception
    text = "\n".join(element.proto.body for element in test.get("html"))
    assert "fp-title" in text, "the page has no headline"
    return "".join(LABEL.findall(text))


def answer_as(api: Any, monkeypatch: pytest.MonkeyPatch, kept: Mapping[str, int]) -> None:
    """Lets the API say of everything that it is real; `simulated` of the fleet and its map is that of `kept`."""
    get = api.get

    def real(path: str, query: dict[str, list[str]]) -> tuple[int, bytes]:
        status, body = get(path, query)
        table = json.loads(body, object_hook=lambda t: {**t, "simulated": False} if "simulated" in t else t)
        if path in ("fleet", "fleet/map"):
            table |= {"simulated": kept.get(path, 0)}
        return status, json.dumps(table).encode()

    monkeypatch.setattr(api, "get", real)


@pytest.fixture
def full(api: Any) -> Any:
    """An API that answers everything, of a fleet of which two of three nodes are simulated."""
    serve_everything(api)
    api.answers["objectives"] = objectives_table()
    return api


@pytest.mark.parametrize(("name", "query"), CASES)
def test_a_page_of_simulated_data_says_so(full: Any, name: str, query: str) -> None:
    found = labels(name, query)
    own = (name in OWN and query and "view=" not in query) or "entity=" in query
    assert (">SIMULATED<" if own else ">2 OF 3 NODES SIMULATED<") in found
    assert found.count("SIMULATED") == 1


@pytest.mark.parametrize(("name", "query"), CASES)
def test_a_page_of_a_real_fleet_has_no_label(full: Any, monkeypatch: pytest.MonkeyPatch, name: str, query: str) -> None:
    answer_as(full, monkeypatch, {})
    assert "SIMULATED" not in labels(name, query)


@pytest.mark.parametrize("name", [n for n in OWN if n != "acts"])
def test_a_real_thing_beside_a_simulated_fleet_has_no_label(
    full: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    answer_as(full, monkeypatch, {"fleet": 2, "fleet/map": 2})
    assert "SIMULATED" not in labels(name, QUERIES[name])
    assert "2 OF 3 NODES SIMULATED" in labels("handover", "")


def test_a_fleet_of_simulated_nodes_only_has_the_bare_word(full: Any) -> None:
    for node in full.fleet["nodes"]:
        node["simulated"] = True
    assert ">SIMULATED<" in labels("audit", "")


def test_a_handover_marks_each_simulated_incident(full: Any) -> None:
    full.incidents["B2"] |= {"simulated": False, "state": "open", "resolved": None, "summary": "port is down"}
    test = AppTest.from_function(page_script, default_timeout=60, args=("handover",)).run()
    text = "\n".join(element.proto.body for element in test.get("html"))
    assert re.search(r'id=A1"[^\n]*?</a> <span class="fp-badge fp-tone-simulated">SIMULATED<', text)
    assert re.search(">port is down</a></span>", text, re.I)
