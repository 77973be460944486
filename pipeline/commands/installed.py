"""What of Fleetpulse is installed here: nodes have the agent alone."""

from __future__ import annotations

import importlib.util

_OF_SERVER = {
    **dict.fromkeys(("duckdb", "numba", "pyarrow", "fastapi", "uvicorn", "jinja2", "yaml"), "pipeline"),
    **dict.fromkeys(("streamlit", "altair"), "dashboard"),
}
"""Modules that a server needs -> the extra of pyproject.toml that has their package."""
_OF_AGENT = frozenset({"pynvml", "kafka", "opentelemetry", "prometheus_client", "h2"})


def is_node() -> bool:
    """Returns whether this installation lacks what a pipeline needs, as on a node."""
    return importlib.util.find_spec("duckdb") is None


def explain_missing(error: ModuleNotFoundError) -> str:
    """Returns which part of Fleetpulse a command needs that is not installed. Raises the error if it is of no part."""
    module = (error.name or "").partition(".")[0]
    if module in _OF_SERVER:
        return (
            f"needs {module}, which only a server has: run it there, or install the package fleetpulse-server "
            f"(without packages: pip install 'fleetpulse[{_OF_SERVER[module]}]')"
        )
    if module in _OF_AGENT:
        return f"needs {module}, which is not installed: pip install 'fleetpulse[agent]'"
    raise error
