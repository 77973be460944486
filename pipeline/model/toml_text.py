"""Reading TOML that people write: whatever is wrong with it is one kind of error."""

from __future__ import annotations

import tomllib
from typing import Any


def parse_toml(text: str) -> dict[str, Any]:
    """Returns the tables of a TOML text. Raises ValueError if it is none, also for what tomllib raises other errors
    for: a number of over 4,300 digits, and lists or tables in each other by the hundred."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError as error:
        raise ValueError("lists or tables are nested too deep") from error
    except ValueError as error:  # its text advises a change of Python's settings
        raise ValueError("a number has too many digits") from error
