"""The printable report in a real Chromium."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dashboards.conftest import incident_table
from tests.dashboards.test_dashboard_browser import browser as browser  # a fixture
from tests.dashboards.test_dashboard_browser import shared_browser as shared_browser  # a fixture
from tests.dashboards.test_dashboard_report import report

pytestmark = pytest.mark.chromium


def test_no_heading_of_a_table_is_broken_within_a_word(browser: Any, api: Any) -> None:
    summary = "Port mlx5_2 of sim-n034-with-a-long-name: 11k symbol errors/h, 1 flap, job 81 waits for it"
    api.incidents["A1"] |= incident_table(
        "A1", summary=summary, cause="port:sim-n034-with-a-long-name-of-a-port.mlx5_2"
    )
    page = browser.new_context(viewport={"width": 800, "height": 900}).new_page()
    page.set_content(report(api))
    lines = """heads => heads.map(head => {
        const range = document.createRange();
        range.selectNodeContents(head);
        return [head.textContent, new Set([...range.getClientRects()].map(box => box.top)).size]; })"""
    found = page.locator("thead th").evaluate_all(lines)
    assert ["Confidence", 1] in found
    assert [name for name, count in found if " " not in name and count > 1] == []
