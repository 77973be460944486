"""Missing real parts (Chromium, Kafka): the test is skipped, unless this run requires the part."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

REQUIRED = "FLEETPULSE_REQUIRE_PARTS"
"""Names of parts, separated by commas; continuous integration sets it, so that nothing is skipped unnoticed."""


def do_without(part: str, reason: str) -> NoReturn:
    """Skips the running test, or fails it if the part is required. `reason` names the missing part and the fix."""
    required = {name.strip() for name in os.environ.get(REQUIRED, "").split(",")}
    if part in required:
        pytest.fail(f"{reason} ({REQUIRED} requires {part})", pytrace=False)
    pytest.skip(reason)
