"""What of Fleetpulse is installed here: nodes have the agent alone."""

from __future__ import annotations

import importlib.util


def is_node() -> bool:
    """Returns whether this installation lacks what a pipeline needs, as on a node."""
    return importlib.util.find_spec("duckdb") is None
