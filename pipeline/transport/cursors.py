"""The cursor files of one reader of spools: up to where it has stored each partition durably.

A cursor only lets the spool's writer unlink segments. One that is lost keeps segments longer; none runs ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipeline.transport import Partition, segments

CURSOR_S = 1.0
"""A cursor file is written at most so often: it only lets the writer unlink, and is written in full by `write_all`."""


class Cursors:
    """`folder_of` finds a partition's folder, None if it is gone. `told`: cursors that cannot be written, and why."""

    def __init__(
        self, reader: str, folder_of: Callable[[Partition], Path | None], monotonic: Callable[[], float]
    ) -> None:
        self.told: dict[Partition, str] = {}
        self._name = f"{segments.folder_name(reader)}.cursor"
        self._folder_of, self._monotonic = folder_of, monotonic
        self._stored: dict[Partition, int] = {}
        self._written: dict[Partition, tuple[int, float]] = {}

    def known(self, partition: Partition) -> int | None:
        """What the file says; None if there is none yet."""
        folder = self._folder_of(partition)
        if folder is None or not (folder / self._name).exists():
            return None
        return segments.read_cursor(folder / self._name)

    def move(self, partition: Partition, next_offset: int) -> None:
        """Everything before `next_offset` is stored; the file says so within CURSOR_S of the next call for it."""
        self._stored[partition] = next_offset
        written, at = self._written.get(partition, (-1, -CURSOR_S))
        if next_offset != written and self._monotonic() - at >= CURSOR_S:
            self._write(partition)

    def retry(self) -> None:
        """Tries those again that could not be written."""
        for partition in self.told.keys() & self._stored.keys():
            self.move(partition, self._stored[partition])

    def write_all(self) -> None:
        """Writes every cursor that its file does not say yet."""
        for partition, stored in list(self._stored.items()):
            if self._written.get(partition, (-1, 0.0))[0] != stored:
                self._write(partition)

    def forget(self, partition: Partition) -> None:
        """Lets go of a partition that vanished."""
        self.told.pop(partition, None)
        self._stored.pop(partition, None)
        self._written.pop(partition, None)

    def _write(self, partition: Partition) -> None:
        """Without fsync; one that cannot be written is told and tried again CURSOR_S later."""
        folder, stored, now = self._folder_of(partition), self._stored[partition], self._monotonic()
        self._written[partition] = (-1, now)
        if folder is None:
            return
        path = folder / self._name
        try:
            segments.write_small(path, {"next": stored}, durable=False)
        except OSError as error:
            self.told[partition] = (
                f"{path}: cannot be written: {error.strerror}; the agent keeps what is stored already; "
                "wanted room on that disk and a folder that the pipeline's user may write"
            )
            return
        self._written[partition] = (stored, now)
        self.told.pop(partition, None)
