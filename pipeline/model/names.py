"""Validates text from outside: names and messages without invisible or misleading characters."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

MAX_NAME = 256
"""Maximum characters of a name (chosen; the longest mount paths that agents report have about 200)."""
MAX_TEXT = 4096
"""Maximum characters of any other text (chosen; a line of the kernel log has at most 1024)."""
_QUOTED = 120  # characters of outside text quoted in a message
_ENTITY = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}:\S(?:.*\S)?")
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Printable by Unicode category but drawn as nothing: fillers and variation selectors (Unicode 15, section 5.21)."""


def find_text_fault(texts: Iterable[str], most: int = MAX_TEXT) -> str | None:
    """Describes the error in the first invalid text; None if all are valid.

    Invalid: longer than `most` characters; control characters and line breaks, bidirectional controls, zero-width and
    other invisible characters, surrogates, private and unassigned characters.
    """
    known = list(texts)
    if max(map(len, known), default=0) <= most and _is_clean("".join(known)):
        return None
    for text in known:
        if len(text) > most:
            return f"{quote_text(text)}: {len(text)} characters, at most {most} are accepted"
        if not _is_clean(text):
            bad = next(c for c in text if not _is_clean(c))
            return (
                f"{quote_text(text)}: character U+{ord(bad):04X} ({unicodedata.name(bad, 'control')}) is not accepted"
            )
    return None


def find_name_fault(names: Iterable[str]) -> str | None:
    """Like `find_text_fault`, for names of nodes, sites, signals and attributes: not empty, no space at either end."""
    known = list(names)
    spaced = next((name for name in known if not name or name != name.strip()), None)
    if spaced is not None:
        return f"{quote_text(spaced)}: a name must not be empty, or begin or end with a space"
    return find_text_fault(known, MAX_NAME)


def find_entity_fault(entities: Iterable[str]) -> str | None:
    """Like `find_text_fault`, for entities: `kind:name`, the kind of ASCII letters, digits, `_` and `-`."""
    known = list(entities)
    bad = next((e for e in known if not _ENTITY.fullmatch(e)), None)
    fault = find_text_fault(known, MAX_NAME)
    if fault is None and bad is not None:
        return f"{quote_text(bad)}: an entity is kind:name, the kind at most 32 of A-Z a-z 0-9 _ -"
    return fault


def clean_text(text: str, most: int = MAX_TEXT) -> str:
    """The text with invalid characters replaced by spaces, cut to `most` characters."""
    short = text[:most]
    return short if _is_clean(short) else "".join(c if _is_clean(c) else " " for c in short)


def quote_text(text: str) -> str:
    """Outside text, escaped and shortened for a message or a log line."""
    short = ascii(text[:_QUOTED])
    return short if len(text) <= _QUOTED else f"{short}..."


def escape_text(text: str) -> str:
    """Text with each invalid character as its escape: a message of an error shows it, a terminal does not obey it."""
    return text if _is_clean(text) else "".join(c if _is_clean(c) else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _is_clean(text: str) -> bool:
    return text.isprintable() and (text.isascii() or _INVISIBLE.search(text) is None)
