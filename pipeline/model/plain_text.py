"""Text of people without what changes how it is shown: control characters, and those that turn the direction."""

from __future__ import annotations

import re

CODES = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069"
"""Control characters but tab and line feed, and marks that change the direction of text; for a class of a pattern."""
_CODES = re.compile(f"[{CODES}]")


def strip_codes(text: str) -> str:
    """Returns text without control characters, apart from tab and line feed, and without marks of direction."""
    return _CODES.sub("", text.replace("\r\n", "\n"))


def make_printable(text: str) -> str:
    """Returns text without line ends and codes that a terminal would obey: comments and names come from others."""
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)
