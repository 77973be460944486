"""Thousands of the hostile requests of which `make soak` tries a million for each format."""

from __future__ import annotations

import pytest

from benchmarks.hostile_requests import REQUESTS, run


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("form", REQUESTS)
def test_every_hostile_request_is_stored_or_refused(form: str) -> None:
    assert run(form, 3000, 7) == 0
