"""Every page of the navigation table: accessible in light, dark and on a phone; honest with fleets of any size.

A new page is tried as soon as it is in `dashboards.pages.PAGES`; one that needs something in its address has it in
`QUERIES`. All cases share one Chromium, one window with a warm cache, and one dashboard for each state of the API.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from dashboards.pages import PAGES
from dashboards.theme import PALETTES, Mode
from tests.dashboards import test_dashboard_browser
from tests.dashboards.conftest import (
    Api,
    detector_table,
    finding_table,
    incident_table,
    mute_table,
    running_api,
    silence_table,
)
from tests.dashboards.device_tables import serve_node
from tests.dashboards.facility_tables import facility_table
from tests.dashboards.jobs_tables import answers as job_answers
from tests.dashboards.quality_tables import quality_table, receivers_table
from tests.dashboards.test_dashboard_acts import act_table
from tests.dashboards.test_dashboard_browser import READY, SCRIPT, running_dashboard
from tests.oidc_build import folder
from tests.parts import do_without

pytestmark = [pytest.mark.chromium, pytest.mark.slow]
shared_browser = test_dashboard_browser.shared_browser
QUERIES = {
    "incident": "id=A1",
    "node": "entity=node:n003",
    "link": "entity=port:n003.mlx5_0",
    "jobs": "entity=job:81",
    "explore": "entity=node:n003&signal=gpu.temperature&signal=gpu.power",
    "acts": "id=ACT-1",
}
NAMES = [entry.name for entry in PAGES]
MORE = {
    "incident-vote": "incident?id=S1",
    "fleet-table": "?table=1&selection=node:n003&selection=node:n004",
    "jobs-list": "jobs?",
    "acts-list": "acts?",
    "explore-start": "explore?",
    "explore-sql": "explore?view=sql",
}
"""Other states of a page that have parts of their own."""
FORMS = {
    "incident": ("Assign", "Comment", "Silence", "Resolve", "Feedback", "More", "Plan an act"),
    "incidents": ("Filter and sort", "Views"),
    "silences": ("New silence", "New maintenance window", "Edit", "Extend", "End"),
    "acts-list": ("Propose an act",),
}
"""Forms in popovers, which Streamlit draws beside its app: a style set on the app alone does not reach them."""
OPERATED = f"""
from dashboards import identity
identity.current = lambda: identity.Person("ann@example.org", "operator")
{SCRIPT}"""
"""A dashboard whose visitors are an operator: others have no forms to silence and to act."""
LOOKS = {"light": ("light", 1440, 900), "dark": ("dark", 1440, 900), "phone": ("light", 390, 844)}
SERIOUS = {"serious", "critical"}
OF_NODES = ("fleet", "incidents", "incident", "data", "node", "handover")
"""Pages that show nodes, their counts or their incidents: fleets of one node and of four racks are tried only there."""
HOSTILE = ("<b>bold</b>", "'\"><img src=x onerror=alert(1)>", "名前-ночь-🚀", "x" * 253, "../../etc", "a b&c=d#e")
WELL = re.compile(
    r"no (open |unresolved |silenced )?incidents|no problems|no findings|all nodes|healthy|\bnone open\b"
    r"|no (active|expired) mutes|nothing (is silenced|pending|has ended|changed)|no silences|holds back no"
    r"|no (open |closed )?acts?\b|no holds|not held|no receiver is configured|no events|nothing happened",
    re.I,
)
"""What a page may say only if it knows."""
CHECK = """async () => {
    const found = await axe.run(document, {resultTypes: ["violations"]});
    return found.violations.map(v => [v.impact, v.id, v.nodes.map(n => n.html.slice(0, 200) + " " + n.failureSummary)]);
}"""
GROUND = "getComputedStyle(document.querySelector('[data-testid=stApp]')).backgroundColor"


def serve_everything(api: Api) -> None:
    """Lets the API answer what every page asks."""
    serve_node(api)
    api.answers |= {"quality": quality_table(), "receivers": receivers_table(), "facility": facility_table()}
    api.answers |= job_answers()
    api.answers["acts"] = {"acts": [act_table()], "breaker": None, "modes": {"hold": "on", "evict": "off"}}
    api.answers["acts/ACT-1"] = act_table()
    api.mutes, api.silences = [mute_table("m1")], [silence_table("s1"), silence_table("s2", "maintenance")]
    api.panel = {"detectors": [detector_table(), detector_table(name="sdc", enabled=False)], "modes": []}
    api.incidents["S1"] = {**api.incidents["A1"], **incident_table("S1", detector="sdc"), "findings": [vote_table()]}


def vote_table() -> dict[str, Any]:
    """Returns a finding of a wrong result, which its page shows beside the result of the others."""
    digests = {"digest": "5f3a9c01d2e44b70", "expected": "5f3a77aad2e44b70", "peers": 7, "agreeing": 7}
    return finding_table(entity="gpu:n003.1", detector="sdc", evidence=digests)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of a dashboard in front of an API that answers everything."""
    with running_api() as api:
        serve_everything(api)
        with running_dashboard(api.url) as address:
            yield address


@pytest.fixture(scope="module")
def operated_url() -> Iterator[str]:
    """The address of a dashboard like `url`, for an operator."""
    with running_api() as api:
        serve_everything(api)
        with running_dashboard(api.url, OPERATED) as address:
            yield address


@pytest.fixture(scope="module")
def silent_url() -> Iterator[str]:
    """The address of a dashboard in front of an API that has never answered in time."""
    with running_api() as api:
        api.released.clear()
        with running_dashboard(api.url) as address:
            yield address
        api.released.set()


@pytest.fixture(scope="module")
def sized(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a dashboard of a fleet of that size, hostile names in it."""
    with running_api() as api:
        nodes = make_nodes(api, request.param)
        counts = {state: sum(n["state"] == state for n in nodes) for state in api.fleet["counts"]}
        api.fleet = {**api.fleet, "nodes": nodes, "counts": counts}
        hostile = {"summary": HOSTILE[1], "cause": f"node:{HOSTILE[0]}", "members": [f"node:{n}" for n in HOSTILE]}
        kept = api.incidents if request.param else {"A1": api.incidents["A1"]}
        api.incidents = {key: {**one, **(hostile if request.param else {})} for key, one in kept.items()}
        with running_dashboard(api.url) as address:
            yield address


@pytest.fixture(scope="module")
def window(shared_browser: Any) -> Iterator[Any]:
    """A window whose cache has the programs of Streamlit from its second page on."""
    context = shared_browser.new_context(locale="en-GB")
    yield context
    context.close()


@pytest.fixture
def tab(window: Any) -> Iterator[Any]:
    """A new tab. It is closed before its dashboard stops: a program that a page fetches late would fail."""
    page = window.new_page()
    page.set_viewport_size({"width": 1440, "height": 900})
    yield page
    page.close()


@pytest.fixture(scope="module")
def axe() -> str:
    """The program of axe-core."""
    at = folder() / "node_modules" / "axe-core" / "axe.min.js"
    if not at.exists():
        do_without("oidc", "no axe-core: run 'make parts'")
    return at.read_text()


def address(url: str, name: str) -> str:
    """Returns the address of a page that does not refresh."""
    if name in MORE:
        return f"{url}/{MORE[name]}&live=0"
    path = "" if name == NAMES[0] else name
    return f"{url}/{path}?{QUERIES.get(name, '')}&live=0"


def is_fault(said: Any) -> bool:
    """Returns whether a line of the console is an error. Streamlit looks for its base path below the page first."""
    return said.type == "error" and "/_stcore/h" not in said.location.get("url", "")


def show(page: Any, where: str) -> list[str]:
    """Opens a page and waits until it has finished and fetched everything; returns the errors in its console."""
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: errors.append(f"{said.text} {said.location}") if is_fault(said) else None)
    page.on("dialog", lambda dialog: errors.append(f"dialog: {dialog.message}"))
    page.goto(where)
    page.locator(READY).wait_for(timeout=120_000)
    page.locator(".fp-title, .fp-notice").first.wait_for(timeout=60_000)
    page.wait_for_load_state("networkidle")  # parts of Streamlit are fetched when first drawn
    return errors


def find_violations(page: Any, look: str) -> list[Any]:
    """Returns what axe-core finds serious or critical in one look of a page, up to five times: parts that are still
    drawn are greyed for that moment, a violation of the page stays."""
    scheme, width, height = LOOKS[look]
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": height})
    page.wait_for_function(f"({GROUND} === 'rgb(255, 255, 255)') === {str(scheme == 'light').lower()}")
    found: list[Any] = []
    for _ in range(5):
        page.locator(READY).wait_for(timeout=60_000)
        page.wait_for_function("document.getAnimations().length === 0")  # colours fade in
        found = [violation for violation in page.evaluate(CHECK) if violation[0] in SERIOUS]
        if not found:
            break
        page.wait_for_timeout(1000)
    return found


@pytest.mark.parametrize("name", [*NAMES, *MORE])
def test_a_page_has_no_serious_violation_of_accessibility(url: str, tab: Any, axe: str, name: str) -> None:
    show(tab, address(url, name))
    assert tab.locator("[data-testid=stException]").count() == 0
    tab.evaluate(axe)
    assert {look: found for look in LOOKS if (found := find_violations(tab, look))} == {}, name


@pytest.mark.parametrize("look", ["dark", "light"])
@pytest.mark.parametrize("name", FORMS)
def test_a_form_has_no_serious_violation_of_accessibility(
    operated_url: str, tab: Any, axe: str, name: str, look: str
) -> None:
    tab.emulate_media(color_scheme=LOOKS[look][0])
    show(tab, address(operated_url, name))
    tab.evaluate(axe)
    found = {}
    for form in FORMS[name]:
        opener = tab.get_by_test_id("stMain").get_by_role("button", name=form, exact=True).first
        opener.click()
        body = tab.get_by_test_id("stPopoverBody")
        body.locator("input, textarea, a, summary, button").locator("visible=true").first.wait_for()
        for part in body.locator("summary").all()[:1]:
            part.click()  # the first of several forms
        if wrong := find_violations(tab, look):
            found[form] = wrong
        opener.click()
        body.wait_for(state="detached")
    assert found == {}


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_a_form_has_the_theme_that_a_person_chose(shared_browser: Any, url: str, mode: Mode) -> None:
    """Streamlit keeps the choice in the browser, which itself prefers the other scheme here."""
    palette, key = PALETTES[mode], '"stActiveTheme-" + location.pathname + "-v2"'
    context = shared_browser.new_context(color_scheme="light" if mode == "dark" else "dark", locale="en-GB")
    context.add_init_script(f"localStorage.setItem({key}, JSON.stringify({mode.title()!r}))")
    page = context.new_page()
    try:
        show(page, address(url, "incidents"))
        page.get_by_role("button", name="Views", exact=True).click()
        view = page.get_by_test_id("stPopoverBody").locator("a").first
        view.wait_for()
        seen = [page.evaluate(GROUND), view.evaluate("a => getComputedStyle(a).color")]
        assert seen == [rgb(palette.ground), rgb(palette.accent)]
    finally:
        context.close()


def rgb(colour: str) -> str:
    """Returns a colour such as #0067A6 as a browser says it."""
    return f"rgb({', '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))})"


def make_nodes(api: Api, count: int) -> list[dict[str, Any]]:
    """Returns nodes in racks of 16, hostile names among the first, states in turn."""
    names = [*HOSTILE[:count], *(f"n{i:05d}" for i in range(max(count - len(HOSTILE), 0)))][:count]
    states = ("ok", "ok", "ok", "critical", "no_data", "watch", "degraded")
    return [{**api.node(name, states[i % 7]), "rack": f"rack:r{i // 16}"} for i, name in enumerate(names)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sized", [0, 12_500], indirect=True, scope="module")
def test_a_page_holds_an_empty_and_a_large_fleet_with_hostile_names(sized: str, tab: Any, name: str) -> None:
    check_page(sized, tab, name)


@pytest.mark.parametrize("name", OF_NODES)
@pytest.mark.parametrize("sized", [1, 64], indirect=True, scope="module")
def test_a_page_of_nodes_holds_one_and_a_few_racks_of_them(sized: str, tab: Any, name: str) -> None:
    check_page(sized, tab, name)


def check_page(url: str, tab: Any, name: str) -> None:
    """Opens a page: it has no exception, no error in its console, and shows hostile names as text."""
    errors = show(tab, address(url, name))
    assert tab.locator("[data-testid=stException]").count() == 0
    assert tab.locator("img[src=x], .fp-title b").count() == 0
    assert errors == []


@pytest.mark.parametrize("name", [*NAMES, "explore-start", "jobs-list"])
def test_a_page_says_that_it_does_not_know_while_the_api_times_out(silent_url: str, tab: Any, name: str) -> None:
    errors = show(tab, address(silent_url, name))
    text = tab.locator("[data-testid=stMain]").inner_text()
    assert tab.locator("[data-testid=stException]").count() == 0
    assert WELL.search(text) is None, text
    assert re.search("does not answer|unknown|no data", text, re.I), text
    assert errors == []
