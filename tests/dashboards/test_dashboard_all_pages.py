"""Every page of the navigation table: accessible in light, dark and on a phone; honest with fleets of any size.

A new page is tried as soon as it stands in `dashboards.pages.PAGES`; one that needs something in its address has it in
`QUERIES`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from dashboards.pages import PAGES
from tests.dashboards import test_dashboard_browser
from tests.dashboards.conftest import Api, running_api
from tests.dashboards.test_dashboard_browser import READY, running_dashboard
from tests.oidc_build import folder
from tests.parts import do_without

pytestmark = [pytest.mark.chromium, pytest.mark.slow]
browser, shared_browser = test_dashboard_browser.browser, test_dashboard_browser.shared_browser
QUERIES = {
    "incident": "id=A1",
    "node": "entity=node:n003",
    "link": "entity=port:n003.mlx5_0",
    "jobs": "entity=job:81",
}
NAMES = [entry.name for entry in PAGES]
LOOKS = {"light": ("light", 1440, 900), "dark": ("dark", 1440, 900), "phone": ("light", 390, 844)}
SERIOUS = {"serious", "critical"}
SIZES = (0, 1, 64, 12_500)
HOSTILE = ("<b>bold</b>", "'\"><img src=x onerror=alert(1)>", "名前-ночь-🚀", "x" * 253, "../../etc", "a b&c=d#e")
WELL = re.compile(r"no (open |unresolved )?incidents|no problems|no findings|all nodes|healthy|\bnone open\b", re.I)
"""What a page may say only if it knows."""
CHECK = """async () => {
    const found = await axe.run(document, {resultTypes: ["violations"]});
    return found.violations.map(v => [v.impact, v.id, v.nodes.map(n => n.html.slice(0, 200) + " " + n.failureSummary)]);
}"""


@pytest.fixture(scope="module")
def site() -> Iterator[tuple[Api, str]]:
    """The double of the API, and the address of a dashboard in front of it."""
    with running_api() as api, running_dashboard(api.url) as url:
        yield api, url


@pytest.fixture
def api(site: tuple[Api, str]) -> Iterator[Api]:
    """The double as it was made, before and after each test."""
    before = dict(site[0].fleet), dict(site[0].incidents)
    yield site[0]
    site[0].released.set()
    site[0].fleet, site[0].incidents = before


@pytest.fixture(scope="module")
def axe() -> str:
    """The program of axe-core."""
    at = folder() / "node_modules" / "axe-core" / "axe.min.js"
    if not at.exists():
        do_without("oidc", "no axe-core: run 'make parts'")
    return at.read_text()


def address(url: str, name: str) -> str:
    """Returns the address of a page that does not refresh."""
    path = "" if name == NAMES[0] else name
    return f"{url}/{path}?{QUERIES[name]}&live=0" if name in QUERIES else f"{url}/{path}?live=0"


def is_fault(said: Any) -> bool:
    """Returns whether a line of the console is an error. Streamlit looks for its base path below the page first."""
    return said.type == "error" and "/_stcore/h" not in said.location.get("url", "")


def show(
    browser: Any, where: str, scheme: str = "light", width: int = 1440, height: int = 900
) -> tuple[Any, list[str]]:
    """Returns a page that has finished, and the errors in its console."""
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": height}, locale="en-GB")
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: errors.append(f"{said.text} {said.location}") if is_fault(said) else None)
    page.on("dialog", lambda dialog: errors.append(f"dialog: {dialog.message}"))
    page.goto(where)
    page.locator(READY).wait_for(timeout=120_000)
    page.locator(".fp-title, .fp-notice").first.wait_for(timeout=60_000)
    return page, errors


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_no_serious_violation_of_accessibility(
    site: tuple[Api, str], browser: Any, axe: str, name: str, look: str
) -> None:
    page, _ = show(browser, address(site[1], name), *LOOKS[look])
    page.wait_for_function("document.getAnimations().length === 0")  # colours fade in
    page.locator(READY).wait_for(timeout=60_000)  # a page that connects again is greyed
    page.evaluate(axe)
    found = [violation for violation in page.evaluate(CHECK) if violation[0] in SERIOUS]
    assert found == []


def make_nodes(api: Api, count: int) -> list[dict[str, Any]]:
    """Returns nodes in racks of 16, hostile names among the first, states in turn."""
    names = [*HOSTILE[:count], *(f"n{i:05d}" for i in range(max(count - len(HOSTILE), 0)))][:count]
    states = ("ok", "ok", "ok", "critical", "no_data", "watch", "degraded")
    return [{**api.node(name, states[i % 7]), "rack": f"rack:r{i // 16}"} for i, name in enumerate(names)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_a_page_holds_a_fleet_of_any_size_with_hostile_names(
    site: tuple[Api, str], api: Api, browser: Any, name: str, size: int
) -> None:
    nodes = make_nodes(api, size)
    counts = {state: sum(n["state"] == state for n in nodes) for state in api.fleet["counts"]}
    api.fleet = {**api.fleet, "nodes": nodes, "counts": counts}
    if size:
        hostile = {"summary": HOSTILE[1], "cause": f"node:{HOSTILE[0]}", "members": [f"node:{n}" for n in HOSTILE]}
        api.incidents = {key: {**one, **hostile} for key, one in api.incidents.items()}
    else:
        api.incidents = {key: one for key, one in api.incidents.items() if key == "A1" and name == "incident"}
    page, errors = show(browser, address(site[1], name))
    page.wait_for_timeout(300)  # errors of drawing come after the last message
    assert page.locator("[data-testid=stException]").count() == 0
    assert page.locator("img[src=x], .fp-title b").count() == 0
    assert errors == []


@pytest.mark.parametrize("name", NAMES)
def test_a_page_says_that_it_does_not_know_while_the_api_times_out(
    site: tuple[Api, str], api: Api, browser: Any, name: str
) -> None:
    with running_api() as silent:
        silent.released.clear()
        with running_dashboard(silent.url) as url:
            page, errors = show(browser, address(url, name))
            text = page.locator("[data-testid=stMain]").inner_text()
        silent.released.set()
    assert page.locator("[data-testid=stException]").count() == 0
    assert WELL.search(text) is None, text
    assert re.search("does not answer|unknown|no data", text, re.I), text
    assert errors == [] or all("ERR_CONNECTION_REFUSED" in error or "WebSocket" in error for error in errors)
