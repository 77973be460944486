"""The servers of the dashboard's tests end with their block, also if it fails: else the test process never ends."""

from __future__ import annotations

import threading
import time

import pytest

from tests.dashboards.conftest import running_api
from tests.dashboards.test_dashboard_browser import running_dashboard


def test_the_api_of_a_block_that_fails_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with pytest.raises(ZeroDivisionError), running_api():
        raise ZeroDivisionError
    assert set(threading.enumerate()) <= before


def test_a_dashboard_that_does_not_start_in_time_is_ended() -> None:
    began = time.monotonic()
    hangs = "import time; time.sleep(50)"
    with (
        pytest.raises(AssertionError, match=r"no dashboard within 0\.5 s"),
        running_dashboard("http://127.0.0.1:1", hangs, within_s=0.5),
    ):
        pytest.fail("it has started")
    assert time.monotonic() - began < 40
