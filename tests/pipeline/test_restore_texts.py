"""What `fleetpulse restore` says at its end."""

from __future__ import annotations

import pytest

from pipeline.commands import operation
from pipeline.config.sections import Config
from pipeline.store.schema import SCHEMA_VERSION


@pytest.mark.parametrize("schema", [1, SCHEMA_VERSION])
def test_a_store_of_an_older_version_comes_with_its_way_back(schema: int) -> None:
    """It ended with "Start the pipeline", which migrates the store again."""
    manifest = {"time": "2026-11-30T08:00:00.000000Z", "schema_version": schema, "offsets": {}}
    said = operation._what_next(Config(), manifest)
    start = said.index("Start the pipeline")
    assert ("install that version before" in said[:start]) is (schema < SCHEMA_VERSION)
