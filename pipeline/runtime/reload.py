"""SIGHUP: a service reads its configuration again, and if it is valid restarts in the same process.

Nothing is lost: it is the stop and start of `systemctl restart`, which keep all state, without a new process, and only
after the configuration was found valid and the change is recorded: in the audit, by an agent as an event. The new
start gets the text that was checked; files that have changed since are its first reload. A secret file that the
configuration names and that has a new content is a change, as a start reads it again; of a unit's copy, which systemd
makes at a restart alone, the log says so.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Literal, NoReturn

from pipeline.config import accepted, files
from pipeline.config.addresses import hide_in_text
from pipeline.config.changes import list_changes
from pipeline.config.sections import Config
from pipeline.model.errors import FleetpulseError
from pipeline.runtime.secret_contents import list_new_contents, list_old_copies, read_digests

AGAIN = -1
"""Result of a service that was asked to start again: no exit code of a process."""
ACTION = "reload configuration"
"""What the audit calls it."""
Outcome = Literal["done", "refused"]
Load = Callable[[], Config]
"""Reads the configuration and checks what a start would. Raises FleetpulseError."""
_SHOWN = 10  # keys that are named in a record
_REASON = 400
"""Longest reason in the line of `systemctl status` (characters). Chosen: a path and what was expected there."""
_FORCE = re.compile(r"\bconfiguration ([0-9a-f]{12})(?:, a later one refused: (.*))?$")


class Reload:
    """Answers SIGHUP. `poll` is called by the loop; a wrong configuration changes nothing. For the main thread.

    record: gets outcome and reason (changed keys with values, or why it was refused).
    log: gets one line per SIGHUP, and the traceback of an error that no check declares; also what is not in force.
    tell: gets which configuration is in force, for `doctor`: at the start and after each SIGHUP (see `read_force`).
    fixed: keys that need a restart.   accepted: whether the loop was stopped to start again.
    """

    def __init__(
        self,
        service: str,
        config: Config,
        load: Load,
        fixed: Sequence[str],
        record: Callable[[Outcome, str], object],
        log: Callable[[str], object],
        tell: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._service, self._config, self._load, self._fixed = service, config, load, fixed
        self._record, self._log, self._tell = record, log, tell
        self._secrets = read_digests(config)
        kept = accepted.take_texts(os.environ)  # by the start before this one
        self._asked = kept is not None and files.have_changed(kept, os.environ)
        self.accepted = False
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGHUP, self._ask)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])  # see start_again
        tell(describe_force(config))
        self._warn(config)

    def _ask(self, *_: object) -> None:
        self._asked = True

    def poll(self) -> bool:
        """Reads the configuration if that was asked for. Returns whether the service must close and start again."""
        if not self._asked or self.accepted:
            return self.accepted
        self._asked = False
        accepted.keep_texts(os.environ)
        try:
            self.accepted = self._check()
        finally:
            if not self.accepted:
                accepted.take_texts(os.environ)
        return self.accepted

    def _check(self) -> bool:
        """Returns whether a new start is due, which is then recorded."""
        try:
            fresh = self._load()
            changed = list_changes(self._config, fresh, self._fixed, self._service)
            changed += list_new_contents(self._secrets, read_digests(fresh))
        except Exception as error:  # noqa: BLE001 - whatever a check raises, the service goes on
            self._refuse(error)
            return False
        for old in list_old_copies(fresh):
            self._log(f"not reloaded: {old}")
        if not changed:
            self._log("configuration reloaded: nothing changed")
            self._config = fresh
            self._tell(describe_force(fresh))
            self._warn(fresh)
            return False
        more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
        keys = "; ".join(changed[:_SHOWN]) + more
        self._record("done", keys)
        self._log(f"configuration reloaded: {keys}; starting again")
        return True

    def _warn(self, config: Config) -> None:
        """Logs what in the files is not in force."""
        for line in config.replaced:
            self._log(f"warning: {line}")

    def _refuse(self, error: Exception) -> None:
        """Logs and records why the configuration is not used; of an error that no check declares also where it was."""
        declared = isinstance(error, FleetpulseError)
        why = hide_in_text(str(error) if declared else f"{type(error).__name__}: {error}")
        self._log(f"configuration not reloaded, nothing changed: {why}")
        for line in () if declared else hide_in_text("".join(traceback.format_exception(error))).splitlines():
            self._log(line)
        self._record("refused", why)
        self._tell(describe_force(self._config, why))


def describe_force(config: Config, refused: str = "") -> str:
    """Returns the text that says which configuration is in force. refused: why the last reload was."""
    return f"configuration {config.digest}" + (f", a later one refused: {refused[:_REASON]}" if refused else "")


def read_force(status: str) -> tuple[str, str]:
    """Returns (digest in force, why the last reload was refused) of a line of status; empty what it does not say."""
    found = _FORCE.search(status)
    return (found[1], found[2] or "") if found else ("", "")


def start_again() -> NoReturn:
    """Replaces this process, which has closed everything, by a new start of the same command.

    SIGHUP waits until that start answers it: a new program has no handler yet, and would end.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, sys.orig_argv)
