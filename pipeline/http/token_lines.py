"""The lines of a file of tokens, as those who show a token to the API read it."""

from __future__ import annotations

from pathlib import Path

from pipeline.model.regular_files import read_regular_text


def read_token_lines(path: Path) -> list[str]:
    """Returns the lines without blank ones and those that begin with #. Raises OSError, UnicodeDecodeError."""
    return [line.strip() for line in read_regular_text(path).splitlines() if line.strip() and line[0] != "#"]
