"""Reading files that keys of the configuration name: one that never ends, as a pipe or /dev/zero, must not hold a
service or fill its memory."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

MAX_BYTES = 64 << 20
"""Largest file that a key may name (bytes). Chosen: far above lists of advice, tokens and certificates."""


def read_regular(path: Path) -> bytes:
    """Returns what a file contains; of /dev/null nothing. Raises OSError, also for another kind of file."""
    number = _open(path)
    with open(number, "rb") as file:
        check_regular(number, path)
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"has more than {MAX_BYTES:,} bytes", str(path))
    return content


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[str]:
    """Gives the path of an open regular file, or of /dev/null, to what reads a file by its path, as OpenSSL does.

    The same file is read that was checked, whatever `path` names by then. Raises OSError as `read_regular`.
    """
    number = _open(path)
    try:
        check_regular(number, path)
        if os.fstat(number).st_size > MAX_BYTES:
            raise OSError(errno.EFBIG, f"has more than {MAX_BYTES:,} bytes", str(path))
        yield f"/proc/self/fd/{number}"
    finally:
        os.close(number)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a writer opens immediately


def check_regular(number: int, path: Path) -> None:
    """Raises OSError if an open file is neither a regular one nor /dev/null."""
    kind = os.fstat(number).st_mode
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(kind) and path.resolve() != Path(os.devnull):
        raise OSError(errno.EINVAL, "is no regular file, and reading it may never end", str(path))


def read_regular_text(path: Path) -> str:
    """Returns the text of a file, with line ends as \\n. Raises OSError as `read_regular`, UnicodeDecodeError."""
    return read_regular(path).decode().replace("\r\n", "\n").replace("\r", "\n")
