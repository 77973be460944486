"""Where the guides of this installation are, for messages that name one: a path that exists on this host.

checkout            docs/agent.md
wheel               PREFIX/share/doc/fleetpulse/docs/agent.md, below the virtual environment
bundle, deb, rpm    /opt/fleetpulse/share/doc/fleetpulse/docs/agent.md, or where the bundle lies
image               /opt/fleetpulse/share/doc/fleetpulse/docs/agent.md
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_SHARED = "share/doc/fleetpulse/docs"
"""Of a wheel's data, as deploy/packages/commit_hook.py adds them."""
_UPWARDS = (3, 4, 0)
"""Folders above that of the code, which installers make: PREFIX/lib/python3.11/site-packages; the same below `python`
of a bundle; pip's --target has both in one folder."""


def guide(name: str, section: str = "") -> str:
    """Returns the place of a guide, such as agent.md, as a message says it. section: its heading."""
    return f"{find_guides()}/{name}" + (f", section {section}" if section else "")


@cache
def find_guides() -> str:
    """Returns the folder with the guides; that of the source code if this installation has none."""
    if (_ROOT / "pyproject.toml").is_file():
        return "docs"
    above = [_ROOT, *_ROOT.parents]
    places = (above[levels] / _SHARED for levels in _UPWARDS if levels < len(above))
    return next((str(place) for place in places if place.is_dir()), "(source code) docs")
