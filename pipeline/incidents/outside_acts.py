"""Acts of people outside the pipeline's process, as rows of the audit: tokens, restores, backups without a pipeline.

Commands that cannot write into the store, which one process holds, leave a line in `STORE.acts`; tokens are in their
own file. The pipeline reads both when they change. Each act has an id, so that it is recorded once.
"""

from __future__ import annotations

import getpass
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import duckdb

from pipeline.incidents.audit import AuditEntry, write_audit
from pipeline.model.errors import ConfigError
from pipeline.model.records import iso
from pipeline.runtime.private_files import open_private

log = logging.getLogger("fleetpulse.audit")
Tokens = Callable[[], list[Any]]
"""Returns all tokens with roles, also revoked ones."""


class Store(Protocol):
    """The part of the store that is needed."""

    def transaction(self) -> AbstractContextManager[duckdb.DuckDBPyConnection]:
        """See `Database.transaction`."""
        ...


def find_act_file(store: Path) -> Path:
    """Returns the file of a store in which commands leave their acts."""
    return store.with_name(f"{store.name}.acts")


def add_act(store: Path, action: str, target: str, reason: str, time: int) -> None:
    """Adds an act of the present user, to be recorded by the pipeline."""
    line = {"id": secrets.token_hex(8), "time": time, "who": getpass.getuser(), "action": action}
    with open(find_act_file(store), "a", opener=open_private) as file:
        file.write(json.dumps({**line, "target": target, "reason": reason}) + "\n")
        file.flush()
        os.fsync(file.fileno())


class OutsideActs:
    """Records acts from the files beside a store. token_file: its tokens with roles; read_tokens: reads them."""

    def __init__(self, store: Path, token_file: Path, read_tokens: Tokens) -> None:
        self._acts, self._tokens, self._read_tokens = find_act_file(store), token_file, read_tokens
        self._seen: tuple[object, object] | None = None

    def record(self, store: Store, now: int) -> None:
        """Writes the rows of new acts. Cheap while no file changed."""
        stamps = _stamp(self._acts), _stamp(self._tokens)
        if stamps in (self._seen, (None, None)):
            return
        reading = self._acts.with_name(f"{self._acts.name}.read")
        if stamps[0] is not None and not reading.exists():
            os.rename(self._acts, reading)  # a command may add a line at any time
        entries = [*_read_acts(reading), *self._list_token_acts()]
        with store.transaction() as connection:
            write_audit(connection, entries, now)
        reading.unlink(missing_ok=True)
        self._seen = None, stamps[1]

    def _list_token_acts(self) -> Iterator[AuditEntry]:
        try:
            tokens = self._read_tokens()
        except ConfigError as error:  # the API reports it at each request, and keeps the tokens of before
            log.error("tokens are not in the audit: %s", error)
            return
        for token in tokens:
            about = {"owner": token.owner, "role": token.role}
            made = {**about, "time": iso(token.created)}
            text = f"for {token.owner}"
            yield AuditEntry(token.created_by, "create token", token.id, text, after=made, id=f"create {token.id}")
            if token.revoked is not None:
                ended = {**about, "time": iso(token.revoked)}
                who = token.revoked_by or ""
                yield AuditEntry(who, "revoke token", token.id, text, after=ended, id=f"revoke {token.id}")


def _read_acts(path: Path) -> Iterator[AuditEntry]:
    """Yields the acts of a file; a damaged line is logged."""
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            act = json.loads(line)
            after = {"time": iso(act["time"])}
            yield AuditEntry(act["who"], act["action"], act["target"], act["reason"], after=after, id=act["id"])
        except (ValueError, KeyError, TypeError):
            log.error("%s: a line is damaged and is not in the audit: %r", path, line[:200])


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
