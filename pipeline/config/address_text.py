"""Addresses in long texts, such as logs: each only to its host, in time proportional to the text."""

from __future__ import annotations

import re

from pipeline.config import addresses

_ADDRESS = re.compile(r"(?<![\w+.-])[+.-]*+\w[\w+.-]*+://(?:\\\\|[^\s'\"<>\\])*+")
"""What `addresses.hide_in_text` finds. Looked for where a word begins, not at each of its letters: a word of
100,000 letters, as a line of base64, took minutes."""


def hide_in_text(text: str) -> str:
    """Returns what `addresses.hide_in_text` returns."""
    return _ADDRESS.sub(lambda found: addresses.hide_in_text(found[0]), text)
