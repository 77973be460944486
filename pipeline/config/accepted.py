"""The text of the files of a configuration as a reload checked it, for the start that follows: they may change then.

It lies in memory without a name (memfd), which the new program gets with this process; a variable has its number.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, MutableMapping

VARIABLE = "FLEETPULSE_ACCEPTED"
Texts = dict[str, str]
"""By path, in the order in which they are read. Empty: there is no file."""
_NAME = "fleetpulse-accepted"


def keep_texts(environ: MutableMapping[str, str]) -> None:
    """Lets the files that are read next be kept, and every later reading get the kept text."""
    take_texts(environ)
    environ[VARIABLE] = str(os.memfd_create(_NAME, 0))  # without CLOEXEC


def take_texts(environ: MutableMapping[str, str]) -> Texts | None:
    """Returns the kept texts and ends it: files are read again. None if there are none."""
    number, texts = _find(environ), read_texts(environ)
    environ.pop(VARIABLE, None)
    if number is not None:
        os.close(number)
    return texts


def read_texts(environ: Mapping[str, str]) -> Texts | None:
    """Returns the kept texts; None if there are none."""
    number = _find(environ)
    content = os.pread(number, os.fstat(number).st_size, 0) if number is not None else b""
    texts: Texts | None = json.loads(content) if content else None
    return texts


def write_texts(environ: Mapping[str, str], texts: Texts) -> None:
    """Keeps a text that was read, if that was asked for."""
    if (number := _find(environ)) is not None:
        with os.fdopen(os.dup(number), "wb") as file:
            file.write(json.dumps(texts).encode())


def _find(environ: Mapping[str, str]) -> int | None:
    """Returns the number of the open file; None in a child, which has the variable alone."""
    try:
        number = int(environ.get(VARIABLE, ""))
        ours = os.readlink(f"/proc/self/fd/{number}").startswith(f"/memfd:{_NAME}")
    except (ValueError, OSError):
        return None
    return number if ours else None
