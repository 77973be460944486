"""The files that `fleetpulse setup` writes: all are prepared before the first gets its name.

What fails on a full or foreign disk fails while they are prepared, which changes nothing. They get their names in the
order in which they were prepared, so the configuration, which names the others, is the last.
"""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.model.errors import UsageError


def find_free(path: Path) -> Path:
    """Returns the name under which a file that is replaced is kept: FILE.old, or the first of FILE.old.2, ... that no
    file has, so that one that a person wrote is never lost."""
    old = path.with_name(f"{path.name}.old")
    number = 1
    while old.is_file():
        number += 1
        old = path.with_name(f"{path.name}.old.{number}")
    return old


class PreparedFiles:
    """Files under the names PATH.new until `place`. As a context manager it removes those that have no name yet."""

    def __init__(self) -> None:
        self._drafts: dict[Path, Path] = {}
        self._placed: list[Path] = []
        self._stale: list[Path] = []

    def __enter__(self) -> PreparedFiles:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Removes the drafts."""
        for draft in self._drafts.values():
            draft.unlink(missing_ok=True)

    def prepare(self, path: Path, content: bytes, mode: int) -> None:
        """Writes the draft of a file. Raises UsageError, after which nothing was written."""
        draft = path.with_name(f"{path.name}.new")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft.unlink(missing_ok=True)
            self._drafts[path] = draft
            with open(draft, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            draft.chmod(mode)
        except OSError as error:
            raise self._explain(error, path) from error

    def prepare_copy(self, source: Path, path: Path) -> None:
        """Like `prepare`, with the content and mode of an existing file."""
        try:
            content, mode = source.read_bytes(), source.stat().st_mode & 0o777
        except OSError as error:
            raise UsageError(f"setup: {source}: {error.strerror}; expected to run as root") from error
        self.prepare(path, content, mode)

    def remove(self, path: Path) -> None:
        """Has `place` remove a file that no other names any more, after all are written."""
        self._stale.append(path)

    def place(self) -> None:
        """Gives each file its name, and removes stale ones. Raises UsageError, which says which files were written, and
        which was not."""
        for path, draft in list(self._drafts.items()):
            try:
                os.replace(draft, path)
            except OSError as error:
                raise self._explain(error, path) from error
            del self._drafts[path]
            self._placed.append(path)
        for path in self._stale:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise self._explain(error, path) from error

    def _explain(self, error: OSError, path: Path) -> UsageError:
        written = ", ".join(map(str, self._placed))
        left = ", ".join(map(str, self._drafts))
        state = f"written: {written}; not written: {left}" if written else "nothing was written"
        return UsageError(
            f"setup: {path}: cannot be written: {error.strerror}; expected a writable folder with free space, or to "
            f"run as root; {state}"
        )
