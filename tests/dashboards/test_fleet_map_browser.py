"""The fleet map in a real Chromium: keys, mouse, touch, selection, pictures; large, empty and hostile fleets."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dashboards import pages, snapshot
from dashboards.theme import LIGHT
from pipeline.model.records import SECOND, iso
from tests.dashboards.conftest import running_api
from tests.dashboards.test_dashboard_browser import browser as browser  # a fixture
from tests.dashboards.test_dashboard_browser import open_page, running_dashboard
from tests.dashboards.test_dashboard_browser import shared_browser as shared_browser  # a fixture

pytestmark = pytest.mark.chromium
CANVAS = "canvas[role=application]"


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[str, Any]]:
    """Address of one dashboard for all tests of this file, and its API."""
    with running_api() as api, running_dashboard(api.url) as url:
        yield url, api


@pytest.fixture
def fleet(shared: tuple[str, Any]) -> Iterator[tuple[str, Any]]:
    """The shared dashboard with the fleet as it was before each test."""
    url, api = shared
    before = json.dumps(api.fleet)
    api.posted.clear()
    yield url, api
    api.fleet = json.loads(before)
    api.broken.clear()


def fill(api: Any, number: int, per_rack: int = 16) -> None:
    """Gives the fleet `number` nodes; every hundredth is critical, the third rack is affected."""
    now = snapshot.now()
    nodes = []
    for i in range(number):
        node = api.node(f"n{i:05d}", "critical" if i % 100 == 7 else "ok", ["A1"] if i % 100 == 7 else [])
        affected = {"state": "critical", "affected": True, "incidents": ["A1"]} if i // per_rack == 2 else {}
        nodes.append({**node, "rack": f"rack:a{i // per_rack:03d}", "simulated": False, **affected})
    api.fleet |= {"nodes": nodes, "as_of": iso(now), "newest": iso(now - SECOND), "watermark": iso(now - 9 * SECOND)}


def open_map(browser: Any, url: str, api: Any, number: int, query: str = "", scheme: str = "light") -> Any:
    """Opens the fleet page, which refreshes until it shows this fleet."""
    fill(api, number)
    page, faults = open_page(browser, f"{url}/?{query}", scheme)
    page.get_by_text(f"of {number:,} nodes").first.wait_for(timeout=30_000)
    page.locator(".map[data-painted]").wait_for(timeout=30_000)
    page.faults = faults
    return page


def pixel(page: Any, x: float, y: float) -> list[int]:
    """Returns the colour of the map at a point of the canvas."""
    script = f"""canvas => {{ const r = canvas.width / canvas.clientWidth;
        return [...canvas.getContext('2d').getImageData({x} * r, {y} * r, 1, 1).data]; }}"""
    found: list[int] = page.locator(CANVAS).evaluate(script)
    return found


@pytest.mark.walk
def test_keys_select_nodes_and_the_page_says_what_they_share(fleet: tuple[str, Any], browser: Any) -> None:
    url, api = fleet
    page = open_map(browser, url, api, 61)
    page.locator(CANVAS).focus()
    page.keyboard.press("n")
    assert page.locator(".said").inner_text().startswith("node n00007 - CRITICAL, a000 · data less than 30 s old")
    page.keyboard.press("g")
    page.get_by_text("What do these share?").wait_for()
    assert "16 nodes selected" in page.locator(".chosen").inner_text()
    assert api.posted[-1] == ("share", {"entities": ["rack:a000"]})
    page.get_by_role("link", name="l7").wait_for()
    page.wait_for_url("**selection=rack%3Aa000*")
    page.keyboard.press("Escape")
    page.get_by_text("What do these share?").wait_for(state="detached")
    assert "selection" not in page.url
    page.keyboard.press("n")
    page.keyboard.press("Enter")
    known = {entry.name for entry in pages.PAGES}
    page.wait_for_url("**/node?*n00007*" if "node" in known else "**/incident?*id=A1*")
    assert page.faults == []


@pytest.mark.slow
def test_dragging_and_shift_click_select_with_the_mouse(fleet: tuple[str, Any], browser: Any) -> None:
    url, api = fleet
    page = open_map(browser, url, api, 62)
    box = page.locator(CANVAS).bounding_box()
    page.mouse.move(box["x"] + 8, box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + 130, box["y"] + 50, steps=4)
    page.mouse.up()
    page.get_by_text("What do these share?").wait_for()
    selected = int(page.locator(".chosen").inner_text().split()[0])
    assert 1 < selected < 16
    page.keyboard.down("Shift")
    page.mouse.click(box["x"] + 30, box["y"] + box["height"] - 30)
    page.keyboard.up("Shift")
    page.get_by_text(f"{selected + 1} nodes selected").wait_for()
    page.get_by_role("button", name="Clear selection").click()
    page.get_by_text("What do these share?").wait_for(state="detached")
    assert page.faults == []


@pytest.mark.slow
def test_a_tile_filters_and_lists_its_nodes(fleet: tuple[str, Any], browser: Any) -> None:
    url, api = fleet
    page = open_map(browser, url, api, 63)
    page.locator(".tile.affected").click()
    page.wait_for_url("**state=affected*")
    page.get_by_text("Nodes: affected").wait_for()
    assert page.locator(".fp-table tbody tr").count() == 16
    page.locator(".tile.affected").click()
    page.get_by_text("Nodes: affected").wait_for(state="detached")
    assert "state" not in page.url


@pytest.mark.slow
def test_the_address_chooses_grouping_colour_and_group(fleet: tuple[str, Any], browser: Any) -> None:
    url, api = fleet
    page = open_map(browser, url, api, 64)
    page.get_by_role("radio", name="Power").click()
    page.wait_for_url("**colour=power*")
    page.locator(".scale").get_by_text("100 W").wait_for()
    page.get_by_role("radio", name="Leaf").click()
    page.wait_for_url("**by=leaf*")
    again, _ = open_page(browser, page.url)
    again.locator(".scale").get_by_text("100 W").wait_for()
    narrowed, _ = open_page(browser, f"{url}/?within=rack:a002")
    narrowed.get_by_text("16 affected of 16 nodes in rack a002").first.wait_for()
    narrowed.get_by_role("button", name="Show the whole fleet").click()
    narrowed.get_by_text("of 64 nodes").first.wait_for()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_cell_is_shown_as_healthy_while_the_api_is_away(fleet: tuple[str, Any], browser: Any, scheme: str) -> None:
    url, api = fleet
    number = 65 if scheme == "light" else 66
    fill(api, number)
    page, _ = open_page(browser, f"{url}/", scheme)
    page.locator(".map[data-painted]").wait_for()
    page.get_by_text(f"of {number} nodes").first.wait_for(timeout=30_000)
    healthy = pixel(page, 20, 36)
    for path in ("fleet", "fleet/map", "incidents"):
        api.broken[path] = (503, b'{"detail": "the store is not open"}')
    page.locator("canvas.stale").wait_for(timeout=40_000)
    assert pixel(page, 20, 36) != healthy
    page.get_by_text("Last known:", exact=False).first.wait_for()


HAS_NAMES = (
    """number => [...(window.fleetpulseLayouts?.values() ?? [])].some(layout => layout.names.length === number)"""
)


@pytest.mark.slow
def test_a_large_fleet_zooms_and_sends_its_names_once(fleet: tuple[str, Any], browser: Any) -> None:
    url, api = fleet
    received: list[int] = []
    fill(api, 12_500)
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("websocket", lambda socket: socket.on("framereceived", lambda frame: received.append(len(frame))))
    page.goto(f"{url}/")
    page.wait_for_function(HAS_NAMES, arg=12_500, timeout=60_000)  # the fleet before it may be painted first
    first = max(received)
    received.clear()
    page.get_by_role("radio", name="Power").click()
    page.locator(".scale").get_by_text("100 W").wait_for(timeout=30_000)
    assert max(received) < first / 2  # the names of the nodes are not sent again
    before = page.locator(".space").bounding_box()["height"]
    page.get_by_role("button", name="Zoom in").click()
    page.get_by_role("button", name="Zoom in").click()
    assert page.locator(".space").bounding_box()["height"] > before
    page.locator(CANVAS).focus()
    page.keyboard.press("End")
    assert page.locator(".said").inner_text().startswith("node n12499")
    assert page.locator(".view").evaluate("view => view.scrollTop") > 0
    assert faults == []


@pytest.mark.slow
def test_the_map_is_saved_as_a_picture(fleet: tuple[str, Any], browser: Any, tmp_path: Path) -> None:
    url, api = fleet
    page = open_map(browser, url, api, 67)
    with page.expect_download() as waiting:
        page.get_by_role("button", name="PNG").click()
    saved = tmp_path / "map.png"
    waiting.value.save_as(saved)
    assert saved.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert saved.stat().st_size > 5_000
    assert waiting.value.suggested_filename.startswith("fleet-rack-20")


COUNT = """async ([data, red, green, blue]) => {
    const image = await createImageBitmap(await (await fetch(data)).blob());
    const g = new OffscreenCanvas(image.width, image.height).getContext("2d");
    g.drawImage(image, 0, 0);
    const dots = g.getImageData(0, 0, image.width, image.height).data;
    let found = 0;
    for (let i = 0; i < dots.length; i += 4) found += dots[i] === red && dots[i + 1] === green && dots[i + 2] === blue;
    return found;
}"""
"""Number of pixels of a colour in a picture."""


@pytest.mark.slow
def test_cells_and_legend_of_a_picture_show_nothing_as_healthy_while_the_api_is_away(
    fleet: tuple[str, Any], browser: Any
) -> None:
    url, api = fleet
    page = open_map(browser, url, api, 14)  # one rack, nothing affected
    blank = browser.new_context().new_page()

    def count_healthy() -> int:
        with page.expect_download() as waiting:
            page.get_by_role("button", name="PNG").click()
        data = base64.b64encode(waiting.value.path().read_bytes()).decode()
        colour = [int(LIGHT.ok[i : i + 2], 16) for i in (1, 3, 5)]
        found: int = blank.evaluate(COUNT, [f"data:image/png;base64,{data}", *colour])
        return found

    assert count_healthy() > 13 * 100
    for path in ("fleet", "fleet/map", "incidents"):
        api.broken[path] = (503, b'{"detail": "the store is not open"}')
    page.locator("canvas.stale").wait_for(timeout=40_000)
    assert count_healthy() == 0


@pytest.mark.slow
def test_empty_single_and_hostile_fleets_are_drawn(fleet: tuple[str, Any], browser: Any) -> None:
    url, api = fleet
    api.fleet["nodes"] = []
    page, faults = open_page(browser, f"{url}/?by=loop")
    page.get_by_text("Nothing to show yet.").first.wait_for()
    names = ["<img src=x onerror=alert(1)>", "ノード-7", "x" * 253, "a\"b'c", "..%2f"]
    api.fleet["nodes"] = [{**api.node(name, "critical", ["A1"]), "rack": f"rack:{name}"} for name in names]
    for path in ("/?state=critical&table=1", "/?within=rack:<img src=x onerror=alert(1)>"):
        page, faults = open_page(browser, url + path)
        page.locator(".map[data-painted]").wait_for()
        assert page.locator("[data-testid=stException]").count() == 0
        assert faults == []
    api.fleet["nodes"] = api.fleet["nodes"][:1]
    page, faults = open_page(browser, f"{url}/?by=job")
    page.locator(".map[data-painted]").wait_for()
    assert faults == []


@pytest.mark.slow
def test_the_first_touch_shows_a_node_and_the_second_opens_it(fleet: tuple[str, Any], browser: Any) -> None:
    url, api = fleet
    fill(api, 68)
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page = context.new_page()
    page.goto(f"{url}/")
    page.get_by_text("of 68 nodes").first.wait_for(timeout=30_000)
    page.locator(".map[data-painted]").wait_for(timeout=30_000)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    canvas = page.locator(CANVAS)
    canvas.scroll_into_view_if_needed()
    canvas.tap(position={"x": 20, "y": 34})
    tip = page.locator(".tip")
    tip.wait_for()
    assert tip.inner_text().startswith("node n0000")
    assert "node" not in page.url
