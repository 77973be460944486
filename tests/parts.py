"""What a test does where a real part (Chromium, Kafka) is missing: it is skipped, unless this run must have it."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

REQUIRED = "FLEETPULSE_REQUIRE_PARTS"
"""Names of parts with commas between; continuous integration sets it, so that nothing is skipped unseen."""


def do_without(part: str, reason: str) -> NoReturn:
    """Skips the running test, or fails it if the part is required. `reason` names the missing part and the fix."""
    required = {name.strip() for name in os.environ.get(REQUIRED, "").split(",")}
    if part in required:
        pytest.fail(f"{reason} ({REQUIRED} wants {part})", pytrace=False)
    pytest.skip(reason)
