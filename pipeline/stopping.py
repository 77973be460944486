"""Stop: an Event that signal handlers may set.

`threading.Event` takes a lock to be set. A handler runs in the main thread between any two instructions, so it may find
that lock held by the very code it interrupted, a second SIGTERM by the first one's handler, and wait for ever.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading


class Stop(threading.Event):
    """Somebody asked for the end. Setting it is one write to a pipe; it can never be cleared."""

    def __init__(self) -> None:
        super().__init__()
        self._asked = False
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)

    def set(self) -> None:
        self._asked = True
        with contextlib.suppress(BlockingIOError):  # full of earlier ones: whoever waits is awake
            os.write(self._writer, b"!")

    def is_set(self) -> bool:
        return self._asked

    def wait(self, timeout: float | None = None) -> bool:
        if not self._asked:
            poll = select.poll()  # select() cannot wait for files above 1024, and agents hold many
            poll.register(self._reader, select.POLLIN)
            poll.poll(None if timeout is None else max(0.0, timeout * 1000))
        return self._asked

    def clear(self) -> None:
        raise TypeError("what was asked cannot be unasked")

    def __del__(self) -> None:
        os.close(self._reader)
        os.close(self._writer)
