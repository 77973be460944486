"""How wide text is in a terminal: East Asian characters have two columns, marks that combine have none."""

from __future__ import annotations

import re
import textwrap
import unicodedata

_TOKENS = re.compile(r"\s+|\S+")
_NO_WIDTH = frozenset({"Mn", "Me", "Cf"})
"""Categories without a column of their own: marks above and below, joiners. Source: Unicode TR 11 and wcwidth."""


def measure_text(text: str) -> int:
    """Returns the columns of a text. Source: Unicode TR 11, wide and full-width characters have two."""
    return len(text) if text.isascii() else sum(map(_measure, text))


def _measure(character: str) -> int:
    if unicodedata.category(character) in _NO_WIDTH:
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def take_columns(text: str, most: int) -> str:
    """Returns the beginning of a text that has at most `most` columns."""
    if text.isascii():
        return text[: max(most, 0)]
    used = 0
    for i, character in enumerate(text):
        used += _measure(character)
        if used > most:
            return text[:i]
    return text


def cut_text(text: str, most: int) -> str:
    """Returns a text of at most `most` columns: a longer one is cut, with `…` at its end."""
    return text if measure_text(text) <= most else f"{take_columns(text, most - 1)}…"


def pad_text(text: str, columns: int, is_right: bool = False) -> str:
    """Returns a text with spaces up to a width, on its right or, if it is at the right, on its left."""
    space = " " * (columns - measure_text(text))
    return space + text if is_right else text + space


def wrap_text(text: str, columns: int, indent: str = "") -> list[str]:
    """Returns the lines of a text, cut at spaces; a word that is wider than a line is cut anywhere.

    indent: begins all lines but the first.
    """
    if text.isascii():
        return textwrap.wrap(text, columns, subsequent_indent=indent, break_on_hyphens=False)
    lines, line = list[str](), ""
    for token in _TOKENS.findall(text):
        if measure_text(line) + measure_text(token) <= columns and not (token.isspace() and lines and line == indent):
            line += token
            continue
        is_long = measure_text(token) > columns - len(indent)
        if line.strip() and (token.isspace() or not is_long):
            lines, line = [*lines, line.rstrip()], indent
        if token.isspace():
            continue
        while measure_text(line) + measure_text(token) > columns:
            part = take_columns(token, columns - measure_text(line)) or ("" if line.strip() else token[:1])
            lines, line, token = [*lines, (line + part).rstrip()], indent, token[len(part) :]
        line += token
    return [*lines, line.rstrip()] if line.strip() else lines
