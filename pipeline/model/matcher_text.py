"""Quoted values of matchers as Alertmanager writes and reads them: backslash, quote and newline are escaped.

All other backslashes stay, so that `fra\\..*` in quotes is a regular expression.
"""

from __future__ import annotations

import re

_ESCAPE = re.compile(r"\\([n\"\\])")


def quote_value(value: str) -> str:
    """Returns the value in quotes, such as `"r1\\\\.2"`; `unquote_value` returns it as it was."""
    escaped = value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
    return f'"{escaped}"'


def unquote_value(text: str) -> str:
    """Returns the value of a text in quotes; of any other text itself."""
    if not text.startswith('"'):
        return text
    return _ESCAPE.sub(lambda found: "\n" if found[1] == "n" else found[1], text[1:-1])
